"""Stops a run when its time is up: one checkpoint, one clear exit code, on all processes at the same step."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from vision.callbacks.run import is_dry, last_checkpoint, resume_command, shown
from vision.errors import UserError


class Preemption(Callback):
    """On SIGTERM (and SIGUSR1, unless SLURM uses it to requeue): saves `checkpoints/last.ckpt`, stops, exits with code 143.

    The handler only sets a flag, as often as the signal comes. The flag is reduced over all processes after each optimizer
    step and each validation batch, so that a signal to one of them stops all at the same step. A checkpoint of a started
    validation runs that validation again, in full, when it is resumed. In test, validate and predict nothing is saved.
    Lightning's own handler ends with code 0, saves nothing, and hangs with several processes (PL #20806).

    Handlers are set in the main thread only, for as long as a stage lasts.

    Raises:
        SystemExit: with code 143 (0 in processes that another one has started, lest their parent is killed for it).
        UserError: the checkpoint could not be written.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal
        self.listening = False
        self.pending = False  # a signal was there before this epoch
        self.step = 0
        self.common: int | float = 0  # evaluation batches that all processes have; more would leave some waiting
        self.batch = 0
        self.validating = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.listening = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        self.listen()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.listen()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_evaluation(trainer, trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_evaluation(trainer, trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_evaluation(trainer, trainer.num_predict_batches)

    def start_evaluation(self, trainer: Trainer, batches: list[int | float]) -> None:
        self.listen()
        self.batch = 0
        own = torch.tensor(float(sum(batches)), device=trainer.strategy.root_device)
        counts = trainer.strategy.all_gather(own)
        unknown = trainer.world_size > 1 and not bool(counts.isfinite().all())
        self.common = 0 if unknown else counts.min().item()

    def listen(self) -> None:
        """Puts the flag in the place of Lightning's handlers, once in each stage; its teardown restores those before both."""
        if self.listening or threading.current_thread() is not threading.main_thread():
            return
        self.listening = True
        wanted = {"SIGTERM"} if SLURMEnvironment.detect() else {"SIGTERM", "SIGUSR1"}
        for name in wanted & set(dir(signal)):
            signal.signal(getattr(signal, name), self.note)

    def note(self, number: int, frame: Any) -> None:
        self.received = number

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped, self.step = trainer.global_step != self.step, trainer.global_step
        # Between optimizer steps a checkpoint would lose the gradients accumulated so far. When a validation or the end of
        # the epoch comes next, Lightning would resume behind it (even behind the next epoch): stop there instead.
        if not stepped or trainer.is_last_batch or validation_follows(trainer, batch_idx):
            return
        if self.any_received(trainer):
            self.stop(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pending = self.any_received(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.pending:  # no batch was fit to stop at; otherwise leave the epoch's best checkpoint the time to be written
            self.stop(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.batch += 1
        if self.batch <= self.common and not trainer.sanity_checking and self.any_received(trainer):
            self.stop(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def any_received(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(bool(self.received), all=False)

    def stop(self, trainer: Trainer) -> None:
        text = f"stopped by {signal.Signals(self.received).name if self.received else 'a signal to another process'}"
        if trainer.state.fn == TrainerFn.FITTING:
            text += f" at step {trainer.global_step} (epoch {trainer.current_epoch + 1})"
            if not is_dry(trainer):
                text += f"; saved {shown(self.save(trainer))}"
                command = resume_command(trainer)
                text += f"; go on with: {command}" if command else ""
        self.received = 0
        if trainer.is_global_zero:
            print(text, file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM if trainer.local_rank == 0 else 0)

    def save(self, trainer: Trainer) -> Path:
        path = last_checkpoint(trainer)
        before = path.stat().st_mtime_ns if path.exists() else 0
        self.validating = trainer.validating
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror or error}; free some space or change the folder's rights"
            ) from error
        # Lightning passes over a folder without write permission in silence (PL #21800)
        if trainer.is_global_zero and not (path.exists() and path.stat().st_mtime_ns > before):
            raise UserError(f"cannot write {path}: no permission; change the folder's rights")
        return path

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.validating:  # as if it were at its first batch: Lightning would skip the rest of this validation
            begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress |= {"total": begun, "current": dict(begun)}


def validation_follows(trainer: Trainer, batch_idx: int) -> bool:
    every = trainer.val_check_batch
    return trainer.enable_validation and every not in (None, float("inf")) and (batch_idx + 1) % every == 0
