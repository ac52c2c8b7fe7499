"""A training in a process of its own, to be sent signals: `python train_until_signal.py FOLDER DEVICES [seconds a batch]`."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

from lightning import Callback, Trainer

from vision.callbacks.ema import EMA
from vision.callbacks.health import TrainingHealth
from vision.callbacks.preemption import Preemption

sys.path.insert(0, str(Path(__file__).parent))
from conftest import TinyData, TinyTask


class Slow(Callback):
    """Says where the training is, and takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, trainer, pl_module, *_):
        print(f"rank {trainer.global_rank} step {trainer.global_step}", flush=True)
        time.sleep(self.seconds)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    folder, devices, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=2000,
        callbacks=[Preemption(), EMA(), TrainingHealth(), Slow(seconds)],
    ).fit(TinyTask(), datamodule=TinyData(n=50))
    print("finished", flush=True)
