"""Which degraded picture belongs to which clean one, and whether the two fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from vision.data.images import Header, find_images, is_image_file, missing, no_pictures, read_header
from vision.errors import ImageError, UserError


class Finding(NamedTuple):
    """One thing that was found in a folder of pictures."""

    kind: str  # such as "unreadable"
    path: Path
    text: str
    error: bool = True  # training would fail or be wrong; otherwise it is worth knowing


class Pair(NamedTuple):
    degraded: Path
    clean: Path


COUPLES = (  # folders of degraded and of clean pictures, as data sets name them; in capitals too
    ("input", "target"), ("lq", "gt"), ("lr", "hr"), ("noisy", "clean"), ("blur", "sharp"), ("rainy", "clean"),
    ("rain", "norain"),
)  # fmt: skip


SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def couple(folder: Path) -> Pair | None:
    """The folders of degraded and of clean pictures within, by their names (COUPLES); None if there are not both."""
    names = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()} if folder.is_dir() else {}
    return next((Pair(names[one], names[other]) for one, other in COUPLES if one in names and other in names), None)


def bounds(folder: Path, root: Path) -> Path:
    """What links in the folder may not leave: the root; of a folder that is itself a link to elsewhere, what it leads to."""
    return root if folder.resolve().is_relative_to(root.resolve()) else folder


def find_pairs(inputs: Path, targets: Path, root: Path | None = None) -> tuple[list[Pair], list[Finding]]:
    """Pairs of two folders: the same path below them, the ending aside. And what has no partner, or several.

    Args:
        inputs, targets: the folders of degraded and of clean pictures; each may be a link to anywhere.
        root: the folder they were found in, which links within them may lead to.

    Raises:
        UserError: a folder that is none, or has no pictures; both are the same one.
    """
    if inputs.resolve() == targets.resolve():
        raise UserError(f"{inputs} and {targets} are one folder; give the degraded pictures and the clean ones in two")
    found: list[dict[str, list[Path]]] = []
    for folder in (inputs, targets):
        by_name: dict[str, list[Path]] = defaultdict(list)
        for path in find_images(folder, root=bounds(folder, root or folder)):
            by_name[path.relative_to(folder).with_suffix("").as_posix()].append(path)
        if not by_name:
            raise UserError(no_pictures(folder))
        found.append(by_name)
    findings = []
    for mine, others, folder in ((found[0], found[1], targets), (found[1], found[0], inputs)):
        for name, paths in mine.items():
            if len(paths) > 1:
                findings.append(Finding("same name", paths[1], f"{paths[0].name} has the same name; keep one of them"))
            if name not in others:
                findings.append(Finding("no partner", paths[0], f"no picture of that name in {folder}"))
    return [Pair(found[0][name][0], found[1][name][0]) for name in sorted(found[0].keys() & found[1].keys())], findings


def find_splits(folders: dict[str, Pair], root: Path | None) -> tuple[dict[str, list[Pair]], list[Finding]]:
    """The pairs of each split, and what has no partner, or several; see :func:`find_pairs`."""
    splits, findings = {}, []
    for split, (degraded, clean) in folders.items():
        splits[split], news = find_pairs(degraded, clean, root)
        findings += news
    return splits, findings


def split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split that has one; the root itself, as ``train``, where there is none.

    Raises:
        UserError: the root is no folder, or has two for validation.
    """
    if not root.is_dir():
        raise UserError(f"data folder {root} {missing(root)}; give an existing folder with pictures")
    return one_each(root, {split: [root / name for name in names if (root / name).is_dir()] for split, names in SPLITS.items()})


def one_each(root: Path, found: dict[str, list[Path]]) -> dict[str, Path]:
    """The folder of each split that has one; the root itself, as ``train``, where there is none.

    Raises:
        UserError: a split has two.
    """
    for paths in found.values():
        if len(paths) > 1:
            raise UserError(f"{root} has {' and '.join(path.name for path in paths)}; keep one folder for validation")
    return {split: paths[0] for split, paths in found.items() if paths} or {"train": root}


def pair_folders(root: Path) -> dict[str, Pair]:
    """The folders of degraded and clean pictures of each split, see :func:`couple`.

    Raises:
        UserError: one of them is missing.
    """
    folders = {}
    for split, folder in split_folders(root).items():
        if (pair := couple(folder)) is None:
            lacking = next(name for name in ("input", "target") if not (folder / name).is_dir())
            raise UserError(
                f"{folder / lacking} does not exist; put degraded pictures into input and clean ones of the same name into target"
            )
        folders[split] = pair
    return folders


def read_list(file: Path) -> list[Pair]:
    """Pairs from a text file: a line each, the degraded picture, a tab, the clean one; paths from the file's folder on.

    Empty lines and lines that start with # are passed over.

    Raises:
        UserError: the file cannot be read, holds no pairs, or a line is no pair.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        if is_image_file(file):
            raise UserError(f"{file} is a picture; give a folder of pictures, or a text file that lists pairs") from error
        raise UserError(
            f"list {file} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'}); give a text file"
        ) from error
    pairs: dict[Pair, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split("\t")
        if len(parts) != 2 or not all(part.strip() for part in parts):
            raise UserError(f"list {file} line {number} is no pair; write the degraded picture, a tab, the clean picture")
        pair = Pair(*(file.parent / part.strip() for part in parts))
        if (first := pairs.setdefault(pair, number)) != number:
            raise UserError(f"list {file} line {number} repeats line {first}; write each pair once")
    if not pairs:
        raise UserError(f"list {file} holds no pairs; write a line for each: the degraded picture, a tab, the clean picture")
    return list(pairs)


def read_headers(
    paths: Sequence[Path], *, title: str = "Looking at pictures", quiet: bool = False
) -> dict[Path, Header | ImageError]:
    """The header of each file, or why it cannot be read; a progress bar shows where there are many."""
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(_header, paths)
        return dict(zip(paths, track(results, title, len(paths), disable=quiet or len(paths) < 2000), strict=True))


def _header(path: Path) -> Header | ImageError:
    try:
        return read_header(path)
    except ImageError as error:
        return error


def unreadable(headers: dict[Path, Header | ImageError]) -> list[Finding]:
    return [Finding("unreadable", path, error.reason) for path, error in headers.items() if isinstance(error, ImageError)]


def mismatched(pairs: Iterable[Pair], headers: dict[Path, Header | ImageError], scale: int) -> list[Finding]:
    """Pairs whose clean picture is not ``scale`` times as large."""
    findings = []
    for pair in pairs:
        small, large = headers[pair.degraded], headers[pair.clean]
        if isinstance(small, ImageError) or isinstance(large, ImageError):
            continue
        if (small.height * scale, small.width * scale) != (large.height, large.width):
            text = f"{small.size}, its clean picture {large.size}" + (f"; x{scale} is needed" if scale > 1 else "")
            findings.append(Finding("different size", pair.degraded, text))
    return findings


def summary(findings: Sequence[Finding], most: int = 3) -> str:
    """One line: each kind with its count and the first by name."""
    kinds: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.kind].append(finding)
    parts = []
    for kind, group in kinds.items():
        more = f", and {len(group) - most} more" if len(group) > most else ""
        parts.append(f"{len(group)} {kind}: " + ", ".join(f"{one.path} ({one.text})" for one in group[:most]) + more)
    return "; ".join(parts)
