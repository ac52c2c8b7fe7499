"""`vision bench`: ours against the peers, in one run."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from vision.bench.cases import CASES
from vision.cli import DONE, SOME_FAILED, nearest
from vision.commands.options import OptionParser, positive
from vision.errors import UserError

NEEDED = ("timm", "torchvision", "transformers")


def bench(args: list[str]) -> int:
    """Runs the cases, or reads what an earlier run has found, and tells it.

    Raises:
        UserError: an unknown case or option, a peer that is not installed, a file that cannot be read or written.
    """
    options = parse(args)
    for path in (options.json, options.plot):
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
    from rich.console import Console

    from vision.bench.report import notes, plot, read_all, table, write_document, write_json

    console = Console(width=None if Console().is_terminal else 200)
    if options.read is not None:
        rows, machine = read_all(options.read)
    else:
        rows, machine = measure(options, console)
    console.print(table(rows))
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)
    if options.json is not None:
        write_json(options.json, rows, machine)
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, machine).savefig(options.plot, dpi=130)
    if options.write is not None:
        write_document(options.write, rows, machine)
    wrong = [row for row in rows if row.failed]
    for row in wrong:
        console.print(f"{row.setting['case']}, {row.setting['name']}: {row.failed}", markup=False, style="red")
    return SOME_FAILED if wrong else DONE


def parse(args: list[str]) -> Any:
    parser = OptionParser("bench", "Times ours against the peers in turn, after comparing their outputs.")
    known = ", ".join(CASES)
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=list(CASES), help=f"what to run: {known} (all)")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help="fp32, eager, batch 1, the first size: a quarter of an hour (the default)"
    )
    extent.add_argument("--full", action="store_true", help="also bf16, compiled, larger batches, models and sizes: hours")
    extent.add_argument("--tiny", action="store_true", help="the smallest models: only to see that all runs")
    some = "only settings with such values, such as batch=8 step=training precision=fp32 compiled=False"
    parser.add_argument("--only", nargs="+", metavar="KEY=VALUE", default=[], help=some)
    parser.add_argument("--threads", type=positive, help="of the processor (torch's own choice)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--repeats", type=positive, default=15, help="most rounds of a comparison (15)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a comparison, but at least 5 rounds (5)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the process a side that measures peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw them, such as bench.png")
    parser.add_argument("--write", type=Path, metavar="FILE", help="document whose marked table is written anew")
    earlier = "measure nothing: take the figures of earlier --json, the later of two for a setting that both have"
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help=earlier)
    options = parser.parse_args(args)
    for case in options.cases:
        if case not in CASES:
            guess = nearest(case, list(CASES))
            raise UserError(f"unknown case {case}; " + (f"did you mean {guess}?" if guess else f"there are {known}"))
    from vision.bench.contest import Setting

    keys = [field.name for field in fields(Setting)]
    for text in options.only:
        if "=" not in text or text.partition("=")[0] not in keys:
            raise UserError(f"--only {text} is no key and value of a setting; keys are {', '.join(keys)}, as in batch=8")
    if options.seconds < 0:
        raise UserError(f"--seconds {options.seconds:g} is negative; use 0 for the fewest rounds")
    return options


def measure(options: Any, console: Any) -> tuple[list[Any], dict[str, Any]]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed, one of the peers; use pip install 'vision-core[bench]'")
    import torch

    from vision.bench.contest import Plan
    from vision.bench.machine import describe
    from vision.bench.report import lines, write_json
    from vision.bench.run import run_case
    from vision.commands.allocator import keep_freed_memory

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {options.device} is not there; use --device cpu")
    keeps = keep_freed_memory()  # as each contest's process does
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    told = {name: getattr(options, name) for name in ("full", "tiny", "repeats", "seconds", "device")}
    only = tuple((key, value) for key, _, value in (text.partition("=") for text in options.only))
    plan = Plan(threads=threads, memory=not options.no_memory, only=only, **told)
    rows = []
    for case in options.cases:
        console.print(f"{case}: {CASES[case]}", markup=False, highlight=False)
        for row in run_case(case, plan):
            rows.append(row)
            if options.json is not None:  # at once: hours of measuring may be cut off
                write_json(options.json, rows, describe(threads, options.device, keeps))
            for cells in lines([row]):
                console.print("  " + "  ".join(cell for cell in cells if cell), markup=False, highlight=False)
    if not rows:
        raise UserError(f"no setting has {' '.join(options.only)}; use --full, or other values")
    return rows, describe(threads, options.device, keeps)
