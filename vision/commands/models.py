"""`vision models`: the names that `vision.create_model` and `vision fit` know."""

from __future__ import annotations

from vision.cli import DONE, nearest
from vision.commands.options import OptionParser
from vision.errors import UserError


def models(args: list[str]) -> int:
    """Prints the names, a line each.

    Raises:
        UserError: no name fits the pattern.
    """
    parser = OptionParser("models", "Lists the models by name.")
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="with shell wildcards, such as 'swin*'")
    pattern = parser.parse_args(args).pattern

    from vision.models.names import list_models

    names = list_models(pattern)
    if not names:
        guess = nearest(pattern, list_models())
        raise UserError(f"no model fits {pattern!r}; " + (f"did you mean {guess}?" if guess else "vision models lists all names"))
    print("\n".join(names))
    return DONE
