"""What was found, as a table, as JSON, as a plot, and as a part of a document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.bench.contest import Row, Setting
from vision.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

HEADS = (
    "case",
    "what",
    "batch",
    "size",
    "ours",
    "peer",
    "times as fast",
    "lowest to highest",
    "target",
    "step's memory",
    "share",
    "in products",
)
FORMAT = 3
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The cells of the table: a line for each peer of each row that was measured or has failed."""
    for row in rows:
        if not (row.failed or row.sides):
            continue  # its note says why it was left out
        setting = Setting(**row.setting)
        first = [f"{setting.case}: {setting.name}", setting.how, str(setting.batch), str(setting.size)]
        if row.failed:
            yield [*first, row.failed, *[""] * (len(HEADS) - len(first) - 1)]
            continue
        ours, *others = row.sides
        mine = row.sides[ours]
        own = f"{duration(mine['median'])}, {mine['per_second']:.3g} {row.unit}/s"
        for peer in row.ratios or others or [""]:
            ratio, target = row.ratios.get(peer), row.targets.get(peer)
            met = "" if target is None or ratio is None else f"{target:g}: {'met' if ratio['median'] >= target else 'not met'}"
            told = [f"{ratio['median']:.2f}", f"{ratio['min']:.2f} to {ratio['max']:.2f}"] if ratio else ["", ""]
            time = duration(row.sides[peer]["median"]) if peer in row.sides else ""
            shares = [side["share"] for side in (mine, row.sides.get(peer, {})) if side.get("share")]
            share = " to ".join(f"{share:.0%}" for share in shares)
            products = " to ".join(in_products(side) for side in (mine, row.sides.get(peer, {})) if side.get("parts"))
            yield [*first, own, f"{peer} {time}".strip(), *told, met, memory_of(row, ours, peer), share, products]


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def memory_of(row: Row, ours: str, peer: str) -> str:
    """Ours and the peer's, in MB, and whether ours is as small as it should be."""
    sides = [row.sides.get(name, {}) for name in (ours, peer)]
    if not all("step_bytes" in side for side in sides):
        return ""
    mine, theirs = (side["step_bytes"] / 1e6 for side in sides)
    most = row.memory_targets.get(peer)
    met = "" if most is None else f", {most:g}: {'met' if mine <= most * theirs else 'not met'}"
    return f"{mine:.0f} to {theirs:.0f} MB{met}"


def in_products(side: dict[str, Any]) -> str:
    """Products and convolutions, of the operators' time."""
    return f"{side['parts']['products'] + side['parts']['convolutions']:.0%}"


def table(rows: Sequence[Row]) -> Table:
    from rich.table import Table

    made = Table(*HEADS, title="times as fast: the peer's time over ours, median of the rounds", show_lines=False)
    for cells in lines(rows):
        made.add_row(*cells)
    return made


def notes(rows: Sequence[Row]) -> list[str]:
    """Each once, with the cases that it is about."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for note in row.notes:
            found.setdefault(note, {})[row.setting["case"]] = None
    return [f"{', '.join(cases)}: {note}" for note, cases in found.items()]


def machine_line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    threads = f"{machine['threads']} of {machine['processors']} processors"
    return (
        f"{machine['date'][:10]}, {machine['processor']} ({machine['instructions']}), {threads}, {machine['device']}; {versions}"
    )


# JSON


def write_json(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def read_json(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Raises: UserError: no file of this command."""
    try:
        told = json.loads(path.read_text())
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}")
        return [Row(**row) for row in told["rows"]], told["machine"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that vision bench --json has written") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of vision bench ({error}); give a file that --json has written") from error


def read_all(paths: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """What several runs on one machine have found, in order of their dates; of two rows of one setting, the later.

    Raises:
        UserError: a file that is none of this command, or files of unlike machines.
    """
    rows: list[Row] = []
    machine: dict[str, Any] = {}
    told = [(path, *read_json(path)) for path in paths]
    for path, found, here in sorted(told, key=lambda one: one[2]["date"]):
        for key in machine:
            if key != "date" and machine[key] != here[key]:
                raise UserError(f"{path} is of {key}={here[key]!r}, others of {machine[key]!r}; join what one machine has found")
        machine = here
        rows = [row for row in rows if all(row.setting != later.setting for later in found)] + found
    return rows, machine


# Plot


def plot(rows: Sequence[Row], machine: dict[str, Any]) -> Figure:
    """Ratios as bars with their lowest and highest round; where there is growth, time and memory against tokens."""
    from matplotlib.figure import Figure

    bars = [(row, peer) for row in rows for peer in row.ratios]
    growth = [row for row in rows if row.setting["case"] == "growth" and row.sides]
    panels = int(bool(bars)) + 2 * int(bool(growth))
    figure = Figure(figsize=(5.5 * max(panels, 1) + 3, max(4.0, 0.24 * len(bars) + 1.5)), layout="constrained")
    axes = list(figure.subplots(1, max(panels, 1), squeeze=False)[0])
    if bars:
        draw_ratios(axes.pop(0), bars)
    if growth:
        draw_growth(axes[0], growth, "median", "seconds")
        draw_growth(axes[1], growth, "step_bytes", "bytes of a step")
    figure.supxlabel(machine_line(machine), fontsize=6, wrap=True)
    return figure


def draw_ratios(axes: Any, bars: Sequence[tuple[Row, str]]) -> None:
    labels = []
    for i, (row, peer) in enumerate(bars):
        setting, ratio = Setting(**row.setting), row.ratios[peer]
        labels.append(f"{setting.case}: {setting.name}, {setting.how}, {setting.batch} x {setting.size} / {peer}")
        span = [[ratio["median"] - ratio["min"]], [ratio["max"] - ratio["median"]]]
        axes.barh(i, ratio["median"], xerr=span, color="C0" if ratio["median"] >= 1 else "C1", height=0.7, error_kw={"lw": 0.8})
        if peer in row.targets:
            axes.plot([row.targets[peer]] * 2, [i - 0.4, i + 0.4], color="black", lw=1.5)
    axes.set_yticks(range(len(bars)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1.0, color="gray", lw=0.8)
    axes.set_xlabel("times as fast as the peer (black: target)")


def draw_growth(axes: Any, rows: Sequence[Row], what: str, label: str) -> None:
    for name in dict.fromkeys(name for row in rows for name in row.sides):
        points = [(row.setting["size"] ** 2, row.sides[name].get(what, 0)) for row in rows if name in row.sides]
        shown = [(tokens, value) for tokens, value in points if value > 0]
        if shown:
            axes.loglog(*zip(*shown, strict=True), marker="o", label=name)
    axes.set_xlabel("tokens (pixels of the map)")
    axes.set_ylabel(label)
    axes.legend(fontsize=7)


# Document


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    table_lines = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    table_lines += ["| " + " | ".join(cells) + " |" for cells in lines(rows)]
    return "\n".join([f"Measured {machine_line(machine)}.", "", *table_lines, "", *[f"- {note}" for note in notes(rows)]])


def write_document(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Puts the table between the two marks of a document.

    Raises:
        UserError: no such document, or one without the marks.
    """
    if not path.is_file():
        raise UserError(f"{path} is not there; --write takes a document with the lines {BEGIN} and {END}")
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{path} has no place for the table; put the lines {BEGIN} and {END} into it")
    path.write_text(f"{before}{BEGIN}\n\n{markdown(rows, machine)}\n\n{END}{after}")
