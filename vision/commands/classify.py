"""`vision classify`: what is on pictures, by a model that a checkpoint alone rebuilds."""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.cli import DONE, SOME_FAILED
from vision.commands.options import OptionParser, positive
from vision.errors import ImageError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

# a picture, and its classes with their probabilities, most likely first; or why it could not be read
Result = tuple[Path, "list[tuple[str, float]] | ImageError"]


def classify(args: list[str]) -> int:
    """Prints one line for each picture, in the order given: `cat.png: cat 97.1 %, lynx 1.3 %`.

    Returns:
        0, or 1 when pictures could not be read; each of them is named on standard error.

    Raises:
        UserError: no weights, weights without preprocessing, a folder without pictures, an output that exists.
    """
    options = _parser().parse_args(args)
    pictures = find_pictures([Path(given) for given in options.pictures])
    if options.output and options.output.exists():
        raise UserError(f"{options.output} exists; give another --output, or remove it")
    model = load(options.weights, options.device)
    failed = 0
    with table(options.output, options.top) as write:
        for path, outcome in predictions(model, pictures, top=options.top, batch_size=options.batch_size):
            write(path, outcome)
            if isinstance(outcome, ImageError):
                failed += 1
                print(f"{path}: {outcome.reason}", file=sys.stderr)
            else:
                print(f"{path}: " + ", ".join(f"{name} {100 * probability:.1f} %" for name, probability in outcome))
    if failed:
        print(f"{failed} of {len(pictures)} pictures could not be read", file=sys.stderr)
    return SOME_FAILED if failed else DONE


def _parser() -> OptionParser:
    parser = OptionParser("classify", "Names what is on pictures.")
    parser.add_argument("pictures", nargs="+", metavar="PICTURE", help="a picture, or a folder of them (folders below too)")
    parser.add_argument("--weights", required=True, type=Path, metavar="FILE", help="a checkpoint, or model.safetensors of a run")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="so many classes for each picture (5)")
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="also write a table")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="so many pictures at once (32)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, mps, … (an accelerator if there is one)")
    return parser


def find_pictures(given: Sequence[Path]) -> list[Path]:
    """The files, and the pictures in the folders.

    Raises:
        UserError: a folder has no picture.
    """
    from vision.data.images import find_images, no_pictures

    found: list[Path] = []
    for path in given:
        inside = find_images(path) if path.is_dir() else [path]
        if not inside:
            raise UserError(no_pictures(path))
        found += inside
    return found


def load(weights: Path, device: str | None) -> nn.Module:
    """The model on the device, with its classes and preprocessing.

    Raises:
        UserError: the file does not tell how pictures are prepared for it, or there is no such device.
    """
    import vision
    from vision.commands.devices import to_device

    model = vision.load_model(str(weights))
    if not getattr(model, "preprocessing", None):
        raise UserError(f"{weights} does not tell how pictures are prepared for it; use a checkpoint that vision fit has written")
    return to_device(model, device)


def predictions(model: nn.Module, pictures: Sequence[Path], *, top: int, batch_size: int) -> Iterator[Result]:
    """The most likely classes of each picture, in order, with a progress bar when there are many."""
    import torch
    from rich.console import Console
    from rich.progress import track

    preprocessing: Any = model.preprocessing
    names: Any = getattr(model, "classes", [])
    read = reader(preprocessing)
    device = next(model.parameters()).device
    batches = [pictures[start : start + batch_size] for start in range(0, len(pictures), batch_size)]
    shown = track(batches, "classifying", console=Console(stderr=True), disable=len(batches) < 2, transient=True)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for batch in shown:
            read_pictures = list(pool.map(read, batch))
            whole = [picture for picture in read_pictures if not isinstance(picture, ImageError)]
            with torch.inference_mode():
                probabilities = iter(model(torch.stack(whole).to(device)).float().softmax(-1).cpu() if whole else ())
            for path, picture in zip(batch, read_pictures, strict=True):
                yield path, picture if isinstance(picture, ImageError) else most_likely(next(probabilities), names, top)


def reader(preprocessing: dict[str, Any]) -> Callable[[Path], Tensor | ImageError]:
    """Reads a picture as the model wants it, and hands back the error when that fails."""
    from vision.data import evaluation_transform, read_image

    transform = evaluation_transform(preprocessing)

    def read(path: Path) -> Tensor | ImageError:
        try:
            return transform(read_image(path, channels=preprocessing["channels"]))
        except ImageError as error:
            return error

    return read


def most_likely(probabilities: Tensor, names: Sequence[str], top: int) -> list[tuple[str, float]]:
    """Classes and probabilities, most likely first; without as many names as classes these are numbers."""
    values, places = probabilities.topk(min(top, len(probabilities)))
    if len(names) != len(probabilities):
        names = [f"class {number}" for number in range(len(probabilities))]
    return [(names[place], value) for place, value in zip(places.tolist(), values.tolist(), strict=True)]


@contextlib.contextmanager
def table(output: Path | None, top: int) -> Iterator[Callable[[Any, Any], None]]:
    """A function that writes a picture's row to a CSV file, or does nothing without one.

    Raises:
        UserError: the file cannot be written.
    """
    if output is None:
        yield lambda path, outcome: None
        return
    columns = [f"{kind}_{rank}" for rank in range(1, top + 1) for kind in ("class", "probability")]
    try:
        with output.open("x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["picture", *columns, "error"])

            def write(path: Any, outcome: Any) -> None:
                cells, reason = [""] * len(columns), ""
                if isinstance(outcome, ImageError):
                    reason = outcome.reason
                else:
                    found = [cell for name, value in outcome for cell in (name, f"{value:.6f}")]
                    cells[: len(found)] = found
                writer.writerow([path, *cells, reason])

            yield write
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}; give another --output") from error
