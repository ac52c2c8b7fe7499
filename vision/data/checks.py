"""What may be wrong with a folder of pictures, found before a training finds it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vision.data.images import Header, find_images, read_image
from vision.data.pairing import Finding, Pair, find_pairs, mismatched
from vision.data.restoration_folders import pair_folders, split_folders
from vision.errors import ImageError, UserError

Kind = Literal["pairs", "classes", "pictures"]
Progress = Callable[[Sequence[Path]], Iterator[Path]]

TINY = 32  # pixels; a picture with a shorter side teaches little


@dataclass
class Report:
    """What was looked at, and what was found.

    Attributes:
        kind: what the folder is: pairs to restore, pictures by class, or pictures alone.
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


def check_folder(root: Path, *, kind: Kind | None = None, scale: int = 1, tiny: int = TINY, progress: Progress = iter) -> Report:
    """Reads every picture below a folder, whole, and compares what belongs together.

    Args:
        root: ``input`` and ``target`` folders, or class folders, each also below ``train``, ``val`` and ``test``; or pictures.
        kind: what the folder holds; None = told by its folders: ``input`` or ``target``, several others, or none.
        scale: by how much the degraded pictures of pairs are smaller.
        tiny: pictures with a side below so many pixels are named.
        progress: wraps the files while they are read.

    Raises:
        UserError: no folder, no pictures, half a pair of folders.
    """
    folders = split_folders(root)
    kind = kind or kind_of(folders)
    report = Report(kind, {split: find_images(folder, root=root) for split, folder in folders.items()})
    if not any(report.files.values()):
        raise UserError(f"{root} has no pictures (.png, .jpg, .tif, …); give a folder with pictures")
    paths = [path for files in report.files.values() for path in files]
    with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
        looked = dict(zip(paths, pool.map(_look, progress(paths)), strict=True))
    broken = {path: error for path, error in looked.items() if isinstance(error, ImageError)}
    report.headers = {path: look[0] for path, look in looked.items() if not isinstance(look, ImageError)}
    contents = {path: look[1] for path, look in looked.items() if not isinstance(look, ImageError)}
    report.findings += [Finding("unreadable", path, error.reason) for path, error in broken.items()]
    if kind == "pairs":
        report.findings += _pairs(root, report, broken, scale)
    if kind == "classes":
        report.findings += _classes(folders, report)
    report.findings += repeated(report.files, contents, leaks=_leak_matters(kind))
    for path, header in report.headers.items():
        if min(header.height, header.width) < tiny:
            report.findings.append(Finding("tiny", path, header.size, error=False))
    report.findings += odd_ones(report.headers)
    return report


def kind_of(folders: dict[str, Path]) -> Kind:
    """What the folders of the splits hold, told by the first."""
    first = next(iter(folders.values()))
    names = {path.name for path in first.iterdir() if path.is_dir() and not path.name.startswith(".")}
    return "pairs" if names & {"input", "target"} else "classes" if len(names) > 1 else "pictures"


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


def _leak_matters(kind: Kind) -> Callable[[Path], bool]:
    """Of pairs, the degraded pictures may repeat: black ones, say; the clean ones may not."""
    return lambda path: kind != "pairs" or "target" in path.parts


def _pairs(root: Path, report: Report, broken: dict[Path, ImageError], scale: int) -> list[Finding]:
    findings: list[Finding] = []
    headers: dict[Path, Header | ImageError] = {**report.headers, **broken}
    for inputs, targets in pair_folders(root).values():
        pairs, news = find_pairs(inputs, targets)
        findings += [*news, *mismatched(pairs, headers, scale), *_unequal_channels(pairs, report.headers)]
    return findings


def _unequal_channels(pairs: Sequence[Pair], headers: dict[Path, Header]) -> list[Finding]:
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
