"""`vision models`: the names that `vision.create_model` and `vision fit` know."""

from __future__ import annotations

from vision.cli import DONE
from vision.commands.options import OptionParser
from vision.errors import UserError


def models(args: list[str]) -> int:
    """Prints the names, a line each.

    Raises:
        UserError: no name fits a pattern.
    """
    parser = OptionParser("models", "Lists the models by name.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="with shell wildcards, such as 'swin*'")
    parser.add_argument("--pretrained", action="store_true", help="those whose published weights timm downloads")
    options = parser.parse_args(args)

    from vision.models.names import list_models, near_names, pattern_of

    for pattern in options.patterns:
        if not list_models(pattern):
            near = near_names(pattern)
            if not near:
                raise UserError(f"no model fits {pattern!r}; vision models lists all names")
            guess = near[0] if len(near) == 1 else f"'{pattern_of(near)}'"
            raise UserError(f"no model fits {pattern!r}; did you mean {guess}?")
    names = list_models(options.patterns, pretrained=options.pretrained)
    if not names:
        raise UserError(f"timm publishes no weights of {' '.join(options.patterns)}; leave out --pretrained")
    print("\n".join(names))
    return DONE
