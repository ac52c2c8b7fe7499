"""Which picture's copy goes where: folders kept, no picture replaced."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vision.errors import ImageError, UserError

Identity = tuple[int, int]  # of a file on its disk: links and other spellings of a name lead to the same one

FORMATS = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG", "tif": "TIFF", "tiff": "TIFF", "webp": "WEBP"}
SUFFIXES = {f".{name}": form for name, form in FORMATS.items()} | {".jpe": "JPEG", ".jfif": "JPEG"}


STEM = "{stem}"  # in the names of copies: the picture's own, without its ending


@dataclass(frozen=True)
class Job:
    """A picture, and its restored copy.

    Attributes:
        source: the picture.
        target: place of the copy.
        form: format of the copy, such as "PNG".
        pixels: of the picture.
        error: why there will be no copy.
    """

    source: Path
    target: Path
    form: str = ""
    pixels: int = 0
    error: ImageError | None = None


def plan(given: Sequence[Path], output: Path, form: str | None, name: str = STEM) -> list[Job]:
    """A job for each picture, in the order given; a folder's own folders are kept, what lies in `output` is left out.

    Args:
        given: pictures, and folders of them.
        output: the folder of the copies.
        form: format of the copies; None = each picture's.
        name: of a copy without its ending; `{stem}` stands for the picture's.

    Raises:
        UserError: a folder holds no picture, the output is no place for copies, a copy would replace a picture given, or two
            would be one file; a name that no copy can have, or all would have.
    """
    from vision.data import is_image_file

    check_name(name)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; give a folder")
    if not output.exists() and is_image_file(output):
        raise UserError(f"--output {output} is named like a picture; give a folder, the copies keep their names")
    found = [
        job_of(source, output / below, FORMATS.get(form or ""), name)
        for path in given
        for source, below in pictures_of(path, output)
    ]
    asked = Counter(job.target for job in found)
    jobs: dict[Path, Job] = {}
    for job in found:
        if asked[job.target] > 1 and job.target.suffix.lower() != job.source.suffix.lower():
            copy = name.replace(STEM, job.source.name) + job.target.suffix  # a.bmp.png beside a.png
            job = replace(job, target=job.target.with_name(copy))
        other = jobs.setdefault(job.target, job)
        if not same(other.source, job.source):
            raise UserError(f"{other.source} and {job.source} would both become {job.target}; give each another --output")
    sources = {identity(job.source): job.source for job in jobs.values()}
    for job in jobs.values():
        if (there := identity(job.target)) is not None and there in sources:
            raise UserError(f"the copy of {job.source} would replace the picture {sources[there]}; give another --output")
    return list(jobs.values())


def pictures_of(path: Path, output: Path) -> Iterator[tuple[Path, Path]]:
    """Each picture, and what its copy is called below the output."""
    from vision.data.images import find_images, no_pictures

    if not path.is_dir():
        yield path, Path(path.name)
        return
    folder, copies = path.resolve(), output.resolve()
    if folder == copies:
        raise UserError(f"--output {output} is the folder that the pictures come from; give another one")
    is_inside = copies.is_relative_to(folder)
    found = [picture for picture in find_images(path) if not (is_inside and picture.resolve().is_relative_to(copies))]
    if not found:
        raise UserError(no_pictures(path))
    for picture in found:
        yield picture, picture.relative_to(path)


def job_of(source: Path, place: Path, form: str | None, name: str) -> Job:
    """Its format told by its content, not by its name; BMP, GIF and PNM become PNG."""
    from vision.data.images import is_image_file, open_image
    from vision.data.saving import WRITTEN

    try:
        with open_image(source, max_pixels=2**62) as picture:
            found, pixels = {"MPO": "JPEG"}.get(str(picture.format), str(picture.format)), picture.width * picture.height
    except ImageError as error:
        return Job(source, place, error=error)
    form = form or (found if found in WRITTEN else "PNG")
    suffix = place.suffix if SUFFIXES.get(place.suffix.lower()) == form else WRITTEN[form]
    stem = place.stem if place.suffix == suffix or is_image_file(place) else place.name
    return Job(source, place.with_name(name.replace(STEM, stem) + suffix), form, pixels)


def check_name(name: str) -> None:
    """Raises: UserError: a template of names that no copy can have, or all would have."""
    rest = name.replace(STEM, "")
    if rest == name or any(character in rest for character in "{}/\\\0"):
        raise UserError(
            f"--name {name!r} is no name for copies; write {STEM} for the picture's, letters around it and no folder, "
            f"for example {STEM}_restored; the ending is the format's"
        )


def identity(path: Path) -> Identity | None:
    """None if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def same(one: Path, other: Path) -> bool:
    return one == other or (identity(one) is not None and identity(one) == identity(other))


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}; give another --output") from error
