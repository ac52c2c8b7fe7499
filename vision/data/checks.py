"""What may be wrong with a folder of pictures, found before a training finds it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vision.data.images import Header, find_images, find_unread, no_pictures, read_image
from vision.data.pairing import (
    Finding,
    Pair,
    bounds,
    couple,
    find_splits,
    mismatched,
    pair_folders,
    read_list,
    split_folders,
)
from vision.errors import ImageError, UserError

Kind = Literal["pairs", "classes", "pictures"]
Progress = Callable[[Sequence[Path]], Iterator[Path]]

TINY = 32  # pixels; a picture with a shorter side teaches little


@dataclass
class Report:
    """What was looked at, and what was found.

    Attributes:
        kind: what there is: pairs to restore, pictures by class, or pictures alone.
        files: the pictures of each split.
        headers: of all that can be read: size, channels and depth.
        findings: in order of their kinds.
    """

    kind: Kind
    files: dict[str, list[Path]]
    headers: dict[Path, Header] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.error]


def check_folder(
    root: Path,
    *,
    targets: Path | None = None,
    kind: Kind | None = None,
    scale: int = 1,
    tiny: int = TINY,
    progress: Progress = iter,
) -> Report:
    """Reads every picture below a folder, whole, and compares what belongs together.

    Args:
        root: folders of pairs such as ``input`` and ``target`` (see :class:`vision.data.PairedFolder`), or class folders, each
            also below ``train``, ``val`` and ``test``; or pictures; or a list file of pairs.
        targets: the clean pictures, where ``root`` holds the degraded ones.
        kind: what the folder holds; None = told by its folders: those of pairs, several others, or none.
        scale: by how much the degraded pictures of pairs are smaller.
        tiny: pictures with a side below so many pixels are named.
        progress: wraps the files while they are read.

    Raises:
        UserError: no folder, no pictures, half a pair of folders, a list or two folders of another kind than pairs.
    """
    kind, folders = places(root, targets, kind)
    pairs: list[Pair] = []
    findings: list[Finding] = []
    if not folders:
        pairs = read_list(root)
        files = {"list": sorted({path for pair in pairs for path in pair})}
    else:
        if kind == "pairs":
            splits, findings = find_splits({split: Pair(*both) for split, both in folders.items()}, root)
            pairs = [pair for split in splits.values() for pair in split]
        files = {split: [path for one in group for path in _pictures(one, root, kind)] for split, group in folders.items()}
    report = Report(kind, files)
    if not any(files.values()):
        raise UserError(no_pictures(root))
    looked = _look_at([path for split in files.values() for path in split], progress)
    broken = {path: error for path, error in looked.items() if isinstance(error, ImageError)}
    report.headers = {path: look[0] for path, look in looked.items() if not isinstance(look, ImageError)}
    contents = {path: look[1] for path, look in looked.items() if not isinstance(look, ImageError)}
    report.findings += [Finding("unreadable", path, error.reason) for path, error in broken.items()]
    report.findings += [*findings, *mismatched(pairs, {**report.headers, **broken}, scale), *_unequal(pairs, report.headers)]
    if kind == "classes":
        report.findings += _classes({split: folder for split, (folder,) in folders.items()}, report)
    clean = {pair.clean for pair in pairs}  # degraded pictures may repeat: black ones, say
    report.findings += repeated(files, contents, leaks=lambda path: kind != "pairs" or path in clean)
    for path, header in report.headers.items():
        if min(header.height, header.width) < tiny:
            report.findings.append(Finding("tiny", path, header.size, error=False))
    report.findings += odd_ones(report.headers)
    for path in (path for group in folders.values() for folder in group for path in find_unread(folder)):
        text = "passed over in training; convert it, for example to PNG"
        report.findings.append(Finding(f"{path.suffix.lower()} is not read", path, text, error=False))
    return report


def places(root: Path, targets: Path | None, kind: Kind | None) -> tuple[Kind, dict[str, tuple[Path, ...]]]:
    """What is to be checked: its kind, and the folders of each split, of pairs the degraded and the clean one; of a list none."""
    is_list = targets is None and root.is_file()
    if is_list or targets is not None:
        if kind not in (None, "pairs"):
            raise UserError(f"kind={kind} is of one folder; a list or two folders hold pairs, leave the kind out")
        return "pairs", {} if targets is None else {"pairs": (root, targets)}
    splits = split_folders(root)
    kind = kind or kind_of(splits)
    return kind, {**pair_folders(root)} if kind == "pairs" else {split: (folder,) for split, folder in splits.items()}


def kind_of(folders: dict[str, Path]) -> Kind:
    """What the folders of the splits hold, told by the first."""
    first = next(iter(folders.values()))
    names = {path.name for path in first.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if names & {"input", "target"} or couple(first):
        return "pairs"
    return "classes" if len(names) > 1 else "pictures"


def _pictures(folder: Path, root: Path, kind: Kind) -> list[Path]:
    """As the training finds them: a class may not be a link to elsewhere."""
    return find_images(folder, root=root if kind == "classes" else bounds(folder, root))


def repeated(files: dict[str, list[Path]], contents: dict[Path, bytes], *, leaks: Callable[[Path], bool]) -> list[Finding]:
    """Pictures with the same pixels: in one split a note, in two splits a leak, which makes test figures too good.

    Args:
        files: of each split.
        contents: a hash of each picture's pixels.
        leaks: whether a picture's return in another split matters.
    """
    first: dict[bytes, tuple[str, Path]] = {}
    findings = []
    for split, paths in files.items():
        for path in paths:
            if path not in contents:
                continue
            if (before := first.setdefault(contents[path], (split, path))) == (split, path):
                continue
            if before[0] != split:
                findings.append(Finding("leak", path, f"the same picture as {before[1]}", error=leaks(path)))
            else:
                findings.append(Finding("duplicate", path, f"the same picture as {before[1]}", error=False))
    return findings


def odd_ones(headers: dict[Path, Header]) -> list[Finding]:
    """Pictures whose channels or depth are not those of most."""
    findings = []
    for name, of in (("channels", lambda header: header.channels), ("bits", lambda header: header.bits)):
        counts = Counter(map(of, headers.values()))
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            findings += [
                Finding(f"other {name}", path, f"{of(header)} {name}, most have {usual}", error=False)
                for path, header in headers.items()
                if of(header) != usual
            ]
    return findings


def _look_at(paths: Sequence[Path], progress: Progress) -> dict[Path, tuple[Header, bytes] | ImageError]:
    with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
        return dict(zip(paths, pool.map(_look, progress(paths)), strict=True))


def _look(path: Path) -> tuple[Header, bytes] | ImageError:
    """Size and kind of a picture, and a hash of its pixels."""
    try:
        image = read_image(path, channels=None)
    except ImageError as error:
        return error
    height, width, channels = image.shape
    digest = hashlib.blake2b(repr((image.shape, image.dtype.str)).encode(), digest_size=16)
    digest.update(image.data)
    return Header(height, width, channels, 8 * image.dtype.itemsize), digest.digest()


def _unequal(pairs: Sequence[Pair], headers: dict[Path, Header]) -> list[Finding]:
    findings = []
    for pair in pairs:
        small, large = headers.get(pair.degraded), headers.get(pair.clean)
        if small and large and (small.channels, small.bits) != (large.channels, large.bits):
            text = f"{small.channels} channels of {small.bits} bits, its clean picture {large.channels} of {large.bits}"
            findings.append(Finding("different kind", pair.degraded, text, error=False))
    return findings


def _classes(folders: dict[str, Path], report: Report) -> list[Finding]:
    """Classes without pictures, classes that training lacks, and pictures that belong to none."""
    findings, trained = [], set[str]()
    for split, folder in folders.items():
        counts: dict[str, int] = defaultdict(int)
        counts |= {path.name: 0 for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
        for path in report.files[split]:
            parts = path.relative_to(folder).parts
            if len(parts) > 1:
                counts[parts[0]] += 1
            else:
                findings.append(Finding("no class", path, "lies beside the class folders", error=False))
        trained = trained or {name for name, count in counts.items() if count}
        for name, count in counts.items():
            if not count:
                findings.append(Finding("empty class", folder / name, "has no pictures"))
            elif name not in trained:
                findings.append(Finding("unknown class", folder / name, "training has no such class"))
    return findings
