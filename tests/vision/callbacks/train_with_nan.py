"""Two processes, of which the second has a NaN as its third loss: `python train_with_nan.py FOLDER MODE`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from lightning import Trainer

from vision.callbacks.ema import EMA
from vision.callbacks.health import TrainingHealth
from vision.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from conftest import TinyData, TinyTask


class OneBadLoss(TinyTask):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        bad = self.global_rank == 1 and self.global_step == 2
        return loss + float("nan") if bad else loss  # the gradient stays finite: only this process can know


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    folder, mode = sys.argv[1:]
    task, health, ema = OneBadLoss(), TrainingHealth(mode), EMA()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=2,
        callbacks=[health, ema],
    )
    try:
        trainer.fit(task, datamodule=TinyData(n=8))
        outcome = f"skipped {health.skipped}"
    except UserError as error:
        outcome = f"stopped: {error}"
    total = sum(p.double().sum().item() for p in task.parameters())
    print(f"rank {trainer.global_rank} {outcome}; weights {total:.12f}, {ema.updates} updates", flush=True)
