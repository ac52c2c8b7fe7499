"""What a run prints at its beginning and its end, and the file it leaves to be used elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.cells import cell_len, set_cell_size
from safetensors.torch import save

from vision.callbacks.confusion import class_rows, confusion, wilson
from vision.callbacks.run import WEIGHTS, best, loaded, shown, use_command, writes
from vision.runs import checkpoints_in

CLASSES = 20  # more are not listed


class Summary(Callback):
    """Writes `model.safetensors` when training ends, and prints what was reached, where it lies and what to type next.

    The file holds the model of the best checkpoint, or as it is without one, under plain names, and as metadata `vision` the
    JSON from which `vision.load_model` rebuilds it (`task.card()`; a task without one gets no file). With EMA these are the
    averaged weights. Printed are: at the start the `weights_report` of a model that was given weights; after training the best
    validation; after a test the accuracy with n and half the width of its 95% interval, and each of up to 20 classes, or the
    task's own `tables()`.
    """

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells which weights the model begins with, if no checkpoint has replaced them."""
        reports = [] if trainer.ckpt_path else loaded(pl_module)
        for report in reports if trainer.is_global_zero and reports != self.told else ():
            print(f"weights: {report}", file=sys.stderr, flush=True)
        self.told = reports or self.told

    on_validation_start = on_test_start = on_fit_start

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if writes(trainer) and hasattr(pl_module, "card"):
            export(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The last hook of a stage that went well: all files are there."""
        if not writes(trainer):
            return
        lines = {"fit": after_fit, "test": after_test}.get(stage)
        for line in lines(trainer, pl_module) if lines else ():
            print(line, flush=True)


def after_fit(trainer: Trainer, task: Any) -> Iterable[str]:
    found = best(trainer)
    if found:
        yield f"best {found.metric.replace('/', ' ')} {found.value:.4f} in {shown(found.path)}"
    weights = Path(trainer.default_root_dir) / WEIGHTS
    if weights.is_file():
        yield f"weights to use elsewhere in {shown(weights)}"


def after_test(trainer: Trainer, task: Any) -> Iterable[str]:
    counts = confusion(task)
    if counts is None:
        yield from (
            f"{name.replace('/', ' ')} {float(v):.4f}" for name, v in trainer.callback_metrics.items() if name[:5] == "test/"
        )
        for title, (columns, rows) in task.tables().items() if hasattr(task, "tables") else ():
            yield from aligned(title, [columns, *rows])
    else:
        n, right = int(counts.sum()), int(counts.trace())
        low, high = wilson(right / n, n)
        yield f"test accuracy {right / n:.4f} (n = {n:,}, ±{(high - low) / 2:.3f})"
        if len(task.classes) <= CLASSES:
            rows = class_rows(counts, task.classes)
            width = max(5, *(cell_len(row.name) for row in rows))
            yield f"  {'class':<{width}}  {'pictures':>8}  {'right':>6}  most often taken for"
            for row in rows:
                share = f"{row.right / row.pictures:.3f}" if row.pictures else "-"
                taken = f"{row.taken_for} ({row.taken:,})" if row.taken else "-"
                yield f"  {set_cell_size(row.name, width)}  {row.pictures:>8,}  {share:>6}  {taken}"
    yield from where(trainer, task)


def aligned(title: str, rows: list[tuple[str, ...]]) -> Iterable[str]:
    """A table as lines; the first column is to the left, the others to the right."""
    yield title
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [" " * (width - cell_len(cell)) + cell for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(["", set_cell_size(first, widths[0]), *cells])


def where(trainer: Trainer, task: Any) -> Iterable[str]:
    """Files and the next command, those that there are."""
    found, report = best(trainer), Path(trainer.default_root_dir) / "report.html"
    checkpoint = trainer.ckpt_path or (found.path if found else next(iter(checkpoints_in(Path(trainer.default_root_dir))), None))
    named = {
        "report": shown(report) if report.is_file() else None,
        "checkpoint": shown(checkpoint) if checkpoint else None,
        "next": use_command(trainer, task),
    }
    return (f"{name + ':':<12}{value}" for name, value in named.items() if value)


def export(trainer: Trainer, task: Any) -> None:
    """Writes the deployable file, whole or not at all."""
    path = Path(trainer.default_root_dir) / WEIGHTS
    temporary = path.with_name(f".{WEIGHTS}.tmp")
    try:
        state, card = deployable(trainer, task)
        weights = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
        # copies: tied weights share memory, which the format refuses
        weights = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
        temporary.write_bytes(save(weights, metadata={"format": "pt", "vision": json.dumps(card)}))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        rank_zero_warn(f"{shown(path)} was not written: {error.strerror or error}; the checkpoints hold the same weights")


def deployable(trainer: Trainer, task: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and card of the best checkpoint, or of the model as it is."""
    found = best(trainer)
    if found is None:
        return task.state_dict(), task.card()
    checkpoint = torch.load(found.path, map_location="cpu", weights_only=True)
    return checkpoint["state_dict"], checkpoint["vision"]
