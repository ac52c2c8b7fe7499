"""`vision check-data`: what is wrong with a folder of pictures, in a table."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vision.cli import DONE, SOME_FAILED
from vision.commands.options import OptionParser, positive
from vision.errors import UserError

if TYPE_CHECKING:
    from vision.data.checks import Report
    from vision.data.pairing import Finding


def check_data(args: list[str]) -> int:
    """Reads all pictures of a folder or a list of pairs, prints what there is and what was found.

    Returns:
        0, or 1 when something would make a training fail or its figures wrong; what is merely worth knowing does not count.

    Raises:
        UserError: no folder, no pictures, an option out of range.
    """
    options = _parser().parse_args(args)
    if options.scale not in (1, 2, 3, 4):
        raise UserError(f"--scale={options.scale} is not possible; use 1 (same size), 2, 3 or 4")
    from vision.data.checks import check_folder

    names = ("targets", "kind", "scale", "tiny")
    report = check_folder(options.folder, **{name: getattr(options, name) for name in names}, progress=_progress)
    show(report, options.folder, most=options.most)
    if report.kind == "classes" and options.kind is None and (hint := perhaps_pairs(report)):
        print(hint)
    return SOME_FAILED if report.errors else DONE


def _parser() -> OptionParser:
    parser = OptionParser(
        "check-data",
        "Looks for unreadable, tiny and repeated pictures, sizes that do not fit, and pictures that training and test share.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="class folders, or pairs in input/ and target/ (or lq/ and gt/, LR/ and HR/, noisy/ and clean/, blur/ and sharp/); "
        "alone or below train/, val/, test/. Or a list of pairs, a text file",
    )
    parser.add_argument(
        "--targets", type=Path, metavar="DIR", help="the clean pictures, where the first folder has degraded ones"
    )
    parser.add_argument(
        "--kind",
        choices=list(_KINDS),
        help="what the folder holds (told by its folders); pictures = folders within are no classes",
    )
    parser.add_argument("--scale", type=positive, default=1, metavar="N", help="degraded pictures are smaller by N (1)")
    parser.add_argument("--tiny", type=positive, default=32, metavar="N", help="name pictures with a side below N pixels (32)")
    parser.add_argument("--most", type=positive, default=10, metavar="N", help="name at most so many of each kind (10)")
    return parser


def _progress(paths: Sequence[Path]) -> Iterator[Path]:
    from rich.console import Console
    from rich.progress import track

    return iter(track(paths, "Reading pictures", console=Console(stderr=True), disable=not sys.stderr.isatty()))


def show(report: Report, folder: Path, *, most: int) -> None:
    """The tables: what there is in each split, and what was found."""
    from rich.console import Console
    from rich.table import Table

    # to a file, a table is as wide as it needs: lines cut at 80 characters would cut names
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    table = Table(title=f"{folder}: {_KINDS[report.kind]}", title_justify="left")
    for name in ("split", "pictures", "unreadable", "width x height", "channels", "bits"):
        table.add_column(name)
    for split, paths in report.files.items():
        headers = [report.headers[path] for path in paths if path in report.headers]
        sides = sorted((header.width * header.height, header.size) for header in headers)
        span = f"{sides[0][1]} to {sides[-1][1]}" if sides and sides[0] != sides[-1] else sides[0][1] if sides else ""
        kinds = [", ".join(f"{key} ({n})" for key, n in sorted(Counter(values).items())) for values in (
            [header.channels for header in headers], [header.bits for header in headers])]  # fmt: skip
        table.add_row(split, str(len(paths)), str(len(paths) - len(headers)), span, *kinds)
    console.print(table)
    if not report.findings:
        console.print("nothing to mend")
        return
    base = folder.parent if folder.is_file() else folder
    found = Table(title="found", title_justify="left")
    for name in ("", "kind", "count", "picture", "why"):
        found.add_column(name, overflow="fold")
    for group in _groups(report.findings):
        for place, finding in enumerate(group[:most]):
            head = ("error" if finding.error else "note", finding.kind, str(len(group))) if place == 0 else ("", "", "")
            found.add_row(*head, _short(finding.path, base), finding.text.replace(f"{base}/", ""))
        if len(group) > most:
            found.add_row("", "", "", f"and {len(group) - most} more", "--most names more of them")
    console.print(found)
    errors = len(report.errors)
    console.print(f"{errors} error(s), {len(report.findings) - errors} note(s)")


def perhaps_pairs(report: Report) -> str:
    """What to do if two folders that were taken for classes are those of pairs: their pictures have the same names."""
    names: dict[Path, set[str]] = defaultdict(set)
    for path in next(iter(report.files.values())):
        names[path.parent].add(path.stem)
    if len(names) != 2 or len({frozenset(stems) for stems in names.values()}) > 1:
        return ""
    one, other = names
    return f"{one.name} and {other.name} have the same names; if they are pairs: vision check-data {one} --targets {other}"


_KINDS = {"pairs": "degraded and clean pictures in pairs", "classes": "pictures by class", "pictures": "pictures"}


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """By kind, errors first."""
    kinds = dict.fromkeys((not finding.error, finding.kind) for finding in findings)
    return [[one for one in findings if (not one.error, one.kind) == kind] for kind in sorted(kinds, key=lambda kind: kind[0])]


def _short(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
