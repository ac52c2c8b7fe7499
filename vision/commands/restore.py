"""`vision restore`: restored copies of pictures of any size and kind, by a model that its weights alone rebuild."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.cli import DONE, SOME_FAILED
from vision.commands.copies import FORMATS, STEM, Job, identity, make_folder, plan
from vision.commands.options import OptionParser, positive
from vision.errors import ImageError, UserError, is_out_of_memory

if TYPE_CHECKING:
    from torch import nn

BYTES_PER_PIXEL = 64  # that a picture takes beside the model's maps: as read, as floats, the result


def restore(args: list[str]) -> int:
    """Writes a restored copy of each picture; prints `cat.png -> out/cat.png`.

    Returns:
        0, or 1 when pictures could not be read, restored or written; each of them is named on standard error.

    Raises:
        UserError: no pictures, no restorer, a mode that the model cannot do, copies that would replace a picture given or
            each other.
    """
    options = _parser().parse_args(args)
    jobs = plan(options.pictures, options.output, options.format, options.name)
    tell_unread(options.pictures)
    run: Callable[[Job, Callable[[float], None]], str] = foresee
    if not options.dry_run:
        run = Restoration(load(options.weights, options.device), jobs, options)
        make_folder(options.output)
    failed = 0
    with shown(len(jobs)) as show:
        for number, job in enumerate(jobs):
            show(number, 0.0)
            try:
                print(f"{job.source} -> {run(job, partial(show, number))}", flush=True)
            except UserError as error:
                failed += 1
                print(f"{job.source}: {error.reason if isinstance(error, ImageError) else error}", file=sys.stderr)
    if failed:
        print(f"{failed} of {len(jobs)} pictures were not restored", file=sys.stderr)
    return SOME_FAILED if failed else DONE


def _parser() -> OptionParser:
    parser = OptionParser(
        "restore",
        "Writes restored copies of pictures: same format, depth and transparency, with EXIF, colour profile and XMP, "
        "turned upright. JPEG without colour subsampling.",
    )
    add = parser.add_argument
    add("pictures", nargs="+", type=Path, metavar="PICTURE", help="a picture, or a folder of them (folders below are kept)")
    add("--weights", required=True, type=Path, metavar="FILE", help="a checkpoint, model.safetensors of a run, published weights")
    add("--output", required=True, type=Path, metavar="DIR", help="where the copies go; no picture is ever changed")
    add("--overwrite", action="store_true", help="replace copies that are there")
    add("--dry-run", action="store_true", help="only tell what would be written where")
    add("--name", default=STEM, metavar="NAME", help="of each copy, such as {stem}_restored; {stem} is the picture's ({stem})")
    add("--format", choices=sorted(FORMATS), metavar="NAME", help=f"of all copies: {', '.join(FORMATS)} (as the picture's)")
    add(
        "--quality",
        type=percent,
        default=95,
        metavar="N",
        help="of JPEG and WebP, 1 to 100 (95; a WebP that is lossless stays so)",
    )
    add("--mode", choices=("auto", "whole", "stream", "tile"), default="auto", help="see vision.restore (auto: as memory allows)")
    add("--memory", metavar="SIZE", help="the most that the model's maps may take, such as 8GB (most of what is free)")
    add("--tile", type=positive, metavar="PIXELS", help="tiles of this side (--mode tile: up to 512, as memory allows)")
    add("--overlap", type=int, metavar="PIXELS", help="of tiles (a quarter of a tile, up to 32)")
    add("--self-ensemble", action="store_true", help="the mean over 8 turns and reflections: 8 times the time")
    add("--blend", type=float, default=1.0, metavar="SHARE", help="of the restored picture, 0 to 1; the rest is the original (1)")
    add("--device", metavar="NAME", help="cpu, cuda, mps, … (an accelerator if there is one)")
    return parser


def tell_unread(given: Sequence[Path]) -> None:
    """What lies in the folders given in formats that are not read."""
    from vision.data.images import find_unread, unread

    if others := unread([path for folder in given if folder.is_dir() for path in find_unread(folder)]):
        print(f"note: {others} are passed over; convert them, for example to PNG", file=sys.stderr)


def percent(text: str) -> int:
    number = positive(text)
    if number > 100:
        raise argparse.ArgumentTypeError(f"{text} is more than 100")
    return number


def load(weights: Path, device: str | None) -> nn.Module:
    """The model on the device; prints what its weights have to say, such as a licence, and what they were trained on.

    Raises:
        UserError: the file holds no restorer, or there is no such device.
    """
    import vision
    from vision.commands.devices import to_device
    from vision.inference.restoration import channels_of, check_restorer

    model: Any = vision.load_model(str(weights))
    try:
        check_restorer(model)
    except UserError as error:
        raise UserError(f"{weights}: {error}") from error
    if channels_of(model) is None:
        raise UserError(f"{weights}: {type(model).__name__} takes no pictures; give the weights of a restorer such as Restormer")
    if getattr(model, "dual_pixel", False):
        raise UserError(
            f"{weights}: the model takes two views of a dual-pixel camera at once, which no picture file holds; "
            "use vision.restore(model, array) with both side by side, h w 6"
        )
    for note in getattr(getattr(model, "weights_report", None), "notes", []):
        print(f"note: {note}", file=sys.stderr)
    if degradation := getattr(model, "degradation", ""):  # weights for other damage give a picture too, and no error
        print(f"note: {weights} was trained on: {degradation}", file=sys.stderr)
    return to_device(model, device)


def foresee(job: Job, show: Callable[[float], None]) -> str:
    """Where the copy would be. Raises: ImageError: the picture's header cannot be read."""
    if job.error is not None:
        raise job.error
    return f"{job.target} (exists)" if os.path.lexists(job.target) else str(job.target)


class Restoration:
    """Restores one picture after the other.

    Args:
        model: a restorer.
        jobs: all of them: no copy replaces a picture of any, nor another copy.
        options: of the command.

    Raises:
        UserError: options that no picture could be restored with.
    """

    def __init__(self, model: nn.Module, jobs: Sequence[Job], options: Any) -> None:
        from vision.inference.restoration import check_options
        from vision.inference.ways import Way

        self.model, self.options = model, options
        self.keep = {identity(job.source) for job in jobs} - {None}
        check_options(options.mode, options.tile, options.overlap, options.blend)
        Way(model, options.mode, options.memory, options.tile, options.overlap)

    def __call__(self, job: Job, show: Callable[[float], None]) -> str:
        """Where the copy is. Calls `show` with the share that is done.

        Raises:
            ImageError: the picture cannot be read.
            UserError: it cannot be restored or written, or its copy exists.
        """
        if job.error is not None:
            raise job.error
        if os.path.lexists(job.target) and not self.options.overwrite:
            raise UserError(f"{job.target} exists; --overwrite replaces it")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="PIL")  # it warns of damaged EXIF, which is named below
                self.run(job, show)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError("out of memory; give --memory a smaller bound, or --mode tile with a smaller --tile") from error
        return str(job.target)

    def run(self, job: Job, show: Callable[[float], None]) -> None:
        import torch

        import vision
        from vision.data.images import read_image
        from vision.data.metadata import read_metadata
        from vision.data.saving import check_writable, write_image
        from vision.inference.memory import free_memory, spell

        free = free_memory(torch.device("cpu"))
        if job.pixels * BYTES_PER_PIXEL > free:
            need = spell(job.pixels * BYTES_PER_PIXEL)
            raise UserError(f"its {job.pixels} pixels alone take {need}, and {spell(free)} of memory are free")
        metadata = read_metadata(job.source, max_pixels=job.pixels)
        metadata.format = job.form
        image = read_image(job.source, channels=None, max_pixels=job.pixels)
        scale = getattr(self.model, "scale", 1)
        check_writable((image.shape[0] * scale, image.shape[1] * scale, image.shape[2]), image.dtype, job.form)
        names = ("mode", "memory", "tile", "overlap", "self_ensemble", "blend")
        given = {name: getattr(self.options, name) for name in names}
        restored = vision.restore(self.model, image, progress=show, **given)
        if identity(job.target) in self.keep:  # where names differ by case alone, or a link was put there meanwhile
            raise UserError(f"{job.target} is a picture given, or another's copy; give another --output")
        make_folder(job.target.parent)
        write_image(job.target, restored, metadata=metadata, quality=self.options.quality, overwrite=self.options.overwrite)
        self.keep.add(identity(job.target))
        for note in metadata.notes:
            print(f"{job.source}: {note}", file=sys.stderr)


@contextmanager
def shown(count: int) -> Iterator[Callable[[int, float], None]]:
    """A function that shows how many pictures are done, and what share of the next, on a bar where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("restoring"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count)
        yield lambda number, share: bar.update(task, completed=number + share)
