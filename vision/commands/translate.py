"""`vision translate`: texts to texts, one line in, one line out, by a model that a checkpoint alone rebuilds."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vision.cli import DONE, SOME_FAILED
from vision.commands.options import OptionParser, positive
from vision.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def translate(args: list[str]) -> int:
    """Prints a line for each line of the input, in their order; with --n-best, the alternatives with tabs between.

    A line that cannot be translated gives an empty one, and is named on standard error. An empty line gives an empty one.

    Returns:
        0, or 1 when lines could not be translated.

    Raises:
        UserError: no weights of a sequence task, no such file, options that do not fit.
    """
    options = _parser().parse_args(args)
    if options.file and options.texts:
        raise UserError(f"give texts or --file {options.file}, not both")
    if options.explain and len(options.texts) != 1:
        raise UserError("--explain draws the attention of one text; give one")
    writing = read_writing(options)
    model = load(options.weights, options.device)
    if options.explain:
        check_drawing(model, options.texts[0], options.explain)
    size = options.batch_size or (1 if not options.texts and not options.file and sys.stdin.isatty() else 32)
    failed = total = 0
    for batch in batches(lines(options), size):
        total += len(batch)
        for line in translated(model, batch, writing, options.explain):
            failed += isinstance(line, UserError)
            print("" if isinstance(line, UserError) else line)
        sys.stdout.flush()  # whoever feeds lines through a pipe waits for it
    if failed:
        print(f"{failed} of {total} lines could not be translated", file=sys.stderr)
    return SOME_FAILED if failed else DONE


def _parser() -> OptionParser:
    parser = OptionParser("translate", "Writes the target of each text: one line in, one line out. Without texts it reads lines.")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text; without any, lines of --file or of standard input")
    parser.add_argument("--weights", required=True, type=Path, metavar="FILE", help="a checkpoint, or model.safetensors of a run")
    parser.add_argument("--file", type=Path, metavar="FILE", help="a UTF-8 file, a text on each line")
    parser.add_argument(
        "--beam", type=positive, metavar="N", help="beam search with N sequences (greedy; with --n-best, as many)"
    )
    parser.add_argument("--n-best", type=positive, default=1, metavar="N", help="the N best, with tabs between (1)")
    parser.add_argument("--sample", action="store_true", help="draw symbols by their probability")
    parser.add_argument("--temperature", type=float, metavar="T", help="with --sample: below 1 prefers probable symbols (1)")
    parser.add_argument("--top-k", type=positive, metavar="N", help="with --sample: among the N most probable symbols")
    parser.add_argument("--top-p", type=float, metavar="P", help="with --sample: among the fewest symbols of probability P")
    parser.add_argument("--seed", type=int, metavar="N", help="with --sample: the same seed draws the same (0)")
    parser.add_argument("--max-length", type=positive, default=0, metavar="N", help="most symbols written (the model's limit)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="lines at once (32; on a terminal 1)")
    parser.add_argument("--explain", type=Path, metavar="FILE.png", help="draw where the model looked, for one text")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, mps, … (an accelerator if there is one)")
    return parser


def read_writing(options: Any) -> Any:
    """How targets are found.

    Raises:
        UserError: options that do not fit each other.
    """
    drawing = [name for name in ("temperature", "top_k", "top_p", "seed") if getattr(options, name) is not None]
    if drawing and not options.sample:
        raise UserError(f"--{drawing[0].replace('_', '-')} is of draws; give --sample too")
    if options.sample and (options.beam or options.n_best > 1):
        raise UserError("--sample draws, --beam and --n-best search; use one of them")
    from vision.inference.translation import Writing

    return Writing(
        beam=options.beam or options.n_best,
        n_best=options.n_best,
        temperature=(1.0 if options.temperature is None else options.temperature) if options.sample else None,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed or 0,
        max_length=options.max_length,
    )


def load(weights: Path, device: str | None) -> nn.Module:
    """The model on the device, with its vocabularies.

    Raises:
        UserError: the file is of no sequence task, or there is no such device.
    """
    import vision
    from vision.commands.devices import to_device

    model = vision.load_model(str(weights))
    if "source" not in getattr(model, "vocabularies", {}):
        raise UserError(f"{weights} does not translate texts; use a checkpoint that vision fit has written for pairs of texts")
    return to_device(model, device)


Line = tuple[str, "str | UserError"]  # its name in messages, and the text, or why there is none


def lines(options: Any) -> Iterator[Line]:
    """The texts, from the command line, the file or standard input."""
    if options.texts:
        yield from ((f"text {number}", text) for number, text in enumerate(options.texts, 1))
    elif options.file:
        try:
            with options.file.open("rb") as file:
                yield from decoded(file, str(options.file))
        except OSError as error:
            raise UserError(f"{options.file} cannot be read ({error.strerror or error}); give a file of texts") from error
    else:
        yield from decoded(sys.stdin.buffer, "line ")


def decoded(file: BinaryIO, name: str) -> Iterator[Line]:
    for number, line in enumerate(file, 1):
        place = f"{name}{number}" if name == "line " else f"{name}:{number}"
        try:
            yield place, line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield place, UserError(f"byte {line[error.start]:#04x} is not UTF-8; save the text as UTF-8")


def batches(lines: Iterable[Line], size: int) -> Iterator[list[Line]]:
    iterator = iter(lines)
    while batch := list(itertools.islice(iterator, min(size, sys.maxsize))):
        yield batch


def translated(model: nn.Module, batch: list[Line], writing: Any, picture: Path | None = None) -> list[str | UserError]:
    """What to print for each line; errors are told on standard error. The picture is of the only line's best target."""
    from vision.inference.translation import encode
    from vision.inference.translation import translate as translate_texts

    result: list[str | UserError] = [""] * len(batch)
    good: list[int] = []
    for i, (place, text) in enumerate(batch):
        try:
            if isinstance(text, UserError):
                raise text
            if text.strip():
                encode(model, text.strip())
                good.append(i)
        except UserError as error:
            print(f"{place}: {error}", file=sys.stderr)
            result[i] = error
    found = translate_texts(model, [str(batch[i][1]).strip() for i in good], writing, batch_size=len(batch))
    if picture:
        draw(model, str(batch[0][1]).strip(), found[0][0], picture)
    for i, targets in zip(good, found, strict=True):
        result[i] = "\t".join(target.text for target in targets)
        if not targets[0].finished:
            print(f"{batch[i][0]}: cut at the greatest length; raise --max-length if it should go on", file=sys.stderr)
    return result


def check_drawing(model: nn.Module, text: str, file: Path) -> None:
    """Before the text is translated.

    Raises:
        UserError: the file is none of a picture or exists, the text cannot be translated, the model has no attention to draw.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    from vision.inference.translation import encode, require_looks

    if file.suffix[1:].lower() not in FigureCanvasBase.filetypes:  # without one matplotlib would write another file, FILE.png
        raise UserError(f"--explain {file} tells no kind of picture; use a name that ends in .png, .svg or .pdf")
    if file.exists():
        raise UserError(f"{file} exists; give another --explain, or remove it")
    require_looks(model)
    encode(model, text.strip())


def draw(model: nn.Module, text: str, target: Any, file: Path) -> None:
    """Writes the picture of the attention.

    Raises:
        UserError: the file cannot be written.
    """
    from vision.inference.translation import explain

    try:
        explain(model, text, target).savefig(file, dpi=110)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; give another --explain") from error
