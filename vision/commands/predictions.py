"""What `vision predict` leaves: a table of classes, or the task's output as it is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from vision.commands.classify import most_likely, table

TOP = 5


class WritePredictions(Callback):
    """Writes `predictions.csv` into the run folder: a picture and its most likely classes in each row.

    That is for tasks with `classes` whose `predict_step` returns probabilities `b k` for a batch `(images, names)`. What any
    other task returns is kept as it is, in `predictions/<batch>.pt`. With several processes each writes its own files.
    """

    def __init__(self) -> None:
        self.opened = contextlib.ExitStack()
        self.write: Any = None
        self.place: Path | None = None  # of what was written

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        folder, own = Path(trainer.default_root_dir), f".{trainer.global_rank}" if trainer.world_size > 1 else ""
        classes = getattr(pl_module, "classes", None)
        if classes and isinstance(outputs, Tensor) and outputs.shape[1:] == (len(classes),) and has_names(batch):
            if self.write is None:
                self.place = folder / f"predictions{own}.csv"
                self.write = self.opened.enter_context(table(self.place, min(TOP, len(classes))))
            for name, probabilities in zip(batch[1], outputs.float().cpu(), strict=True):
                self.write(name, most_likely(probabilities, classes, TOP))
            return
        self.place = folder / f"predictions{own}"
        self.place.mkdir(exist_ok=True)
        torch.save(outputs, self.place / f"{dataloader_idx}_{batch_idx:05}.pt")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.opened.close()
        if self.place is not None and trainer.is_global_zero:
            print(f"predictions: {self.place}", flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.opened.close()


def has_names(batch: Any) -> bool:
    """Whether it is a batch of pictures with their names."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(name, (str, Path)) for name in batch[1])
