"""What the studies share: options, tables, plots, and a record of what was run, when and on what."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from vision.callbacks.machine import cores, processor, versions
from vision.runs import create_run


class Study:
    """One run of a study.

    Attributes:
        quick: a trial of a few steps, whose figures mean nothing.
        figure: to draw on.
    """

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.tables: list[dict[str, Any]] = []
        self.figure = Figure(figsize=(10, 4), layout="constrained")  # without pyplot: no window, no backend
        self.console = Console()

    def steps(self, number: int) -> int:
        return 3 if self.quick else number

    def some(self, values: Sequence[Any]) -> Sequence[Any]:
        """All of them, in a trial the first two."""
        return values[:2] if self.quick else values

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints a table and keeps it for the record."""
        shown = Table(title=title)
        for column in columns:
            shown.add_column(column)
        for row in rows:
            shown.add_row(*map(written, row))
        self.console.print(shown)
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})

    def markdown(self) -> str:
        parts = []
        for table in self.tables:
            rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
            parts.append("\n".join([f"{table['title']}:", "", *(f"| {' | '.join(map(written, row))} |" for row in rows), ""]))
        return "\n".join(parts)


def main(name: str, description: str, run: Callable[[Study], None], args: Sequence[str] | None = None) -> Path:
    """Runs a study; its tables, plot and record are in runs/studies/<name>/<n>/, which is returned."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial of a few steps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the processor (all)")
    options = parser.parse_args(args)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    folder = create_run(Path("runs") / "studies" / name)
    study, start = Study(options.quick), time.perf_counter()
    run(study)
    seconds = time.perf_counter() - start
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0
    record = {
        "command": " ".join(["python", *(sys.argv if args is None else [f"studies/{name}.py", *args])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "hardware": f"{processor()} ({platform.machine()}), {cores()} cores, {options.threads} threads, {memory:.0f} GiB",
        "versions": versions(),
        "quick": options.quick,
        "tables": study.tables,
    }
    (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    where = f"`{record['command']}`, {record['date']}, {seconds / 60:.1f} minutes, {record['hardware']}; {record['versions']}"
    (folder / "result.md").write_text(f"{study.markdown()}\n{where}\n")
    study.figure.savefig(folder / "plot.png", dpi=110)
    study.say(f"{where}\nwritten to {folder}")
    return folder


def written(value: Any) -> str:
    """Three digits are enough."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
