"""Watches a training: stops or skips a step that is not finite, logs the gradient norm, explains a full memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from vision.callbacks.run import newest_checkpoint, shown
from vision.errors import UserError, is_out_of_memory


class TrainingHealth(Callback):
    """Keeps NaN and infinity out of the weights, and logs `train/grad_norm` (before clipping).

    Loss and gradient are looked at before each optimizer step; all processes take the same decision. A step is skipped by
    dropping its gradients: weights and optimizer state stay, the learning-rate schedule goes on, and running statistics of
    normalisation layers return to their values before the step. The price is one scalar read from the device each step. With
    16-bit floats (`16-mixed`) an infinite gradient under a finite loss is the loss scaler's to handle: it skips such a
    step itself, and counts here towards `stop_after` only.

    A training loss that has risen to more than `DIVERGED` times its lowest epoch is warned of: it seldom comes back by itself.

    When memory runs out, the error that Lightning raises tells batch, picture size, peak and what to try, in one line.

    Args:
        on_nonfinite: "stop" raises an error before the weights change; "skip" leaves the step out.
        stop_after: with "skip", so many bad steps in a row stop the training as well.

    Raises:
        UserError: (from the training) a step was not finite.
    """

    DIVERGED = 10.0

    def __init__(self, on_nonfinite: Literal["stop", "skip"] = "stop", stop_after: int = 10) -> None:
        if on_nonfinite not in ("stop", "skip"):
            raise UserError(f'on_nonfinite={on_nonfinite!r} of TrainingHealth is unknown; use "stop" or "skip"')
        if stop_after < 1:
            raise UserError(f"stop_after={stop_after} of TrainingHealth is below 1; use 10")
        self.on_nonfinite = on_nonfinite
        self.stop_after = stop_after
        self.skipped = 0
        self.in_a_row = 0
        self.lowest = float("inf")  # mean training loss of an epoch
        self.loss: Tensor | None = None  # sum over the batches of this optimizer step
        self.statistics: list[Tensor] = []  # running statistics before this optimizer step
        self.shape: tuple[int, ...] = ()  # of the last batch of pictures, for the words about memory

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.in_a_row, self.loss = 0, None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        loss = loss.detach() / loss_scale(trainer)
        self.loss = loss if self.loss is None else self.loss + loss

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        pl_module.log("train/grad_norm", norm, on_step=True, on_epoch=False)
        loss, self.loss = self.loss, None
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite().to(norm.device)
        if not trainer.strategy.reduce_boolean_decision(not finite, all=False):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        scaler_skips = scaler(trainer) is not None and (loss is None or bool(loss.isfinite()))
        if (self.on_nonfinite == "stop" and not scaler_skips) or self.in_a_row >= self.stop_after:
            raise UserError(self.explain(trainer, optimizer, loss, norm))
        if scaler_skips:
            return
        if self.skipped == 0:
            rank_zero_warn(f"step {trainer.global_step} is skipped: {what(loss, norm)}; further ones are counted, not told")
        self.skipped += 1
        optimizer.zero_grad(set_to_none=True)
        for buffer, kept in zip(running_statistics(pl_module), self.statistics, strict=True):
            buffer.copy_(kept)

    def explain(self, trainer: Trainer, optimizer: Optimizer, loss: Tensor | None, norm: Tensor) -> str:
        lr = max(float(group["lr"]) for group in optimizer.param_groups)
        advice = [f"a lower learning rate (now {lr:g})"]
        if trainer.precision != "32-true":
            advice.append(f"trainer.precision 32-true (now {trainer.precision})")
        if not trainer.gradient_clip_val and not trainer.lightning_module.hparams.get("clip"):  # tasks may clip themselves
            advice.append("trainer.gradient_clip_val 1.0 (now off)")
        if self.on_nonfinite == "stop":
            advice.append('on_nonfinite "skip" of TrainingHealth for single bad batches')
        times = f", the {self.in_a_row}. bad step in a row" if self.in_a_row > 1 else ""
        kept = newest_checkpoint(trainer)
        return (
            f"{what(loss, norm)} at step {trainer.global_step} (epoch {trainer.current_epoch + 1}){times}: training is stopped "
            f"before the weights changed; try {', or '.join(advice)}; "
            + (f"last good checkpoint: {shown(kept)}" if kept else "no checkpoint yet")
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self.shape = shape_of(batch)
        if self.on_nonfinite == "skip" and self.loss is None:
            self.statistics = [buffer.clone() for buffer in running_statistics(pl_module)]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = float(trainer.callback_metrics.get("train/loss_epoch", float("nan")))  # of a task that logs its mean
        if 0 < self.lowest * self.DIVERGED < loss:
            rank_zero_warn(
                f"epoch {trainer.current_epoch + 1}: the training loss is {loss:.4g}, its lowest was {self.lowest:.4g}: the "
                "training has diverged; stop it and start again with a lower learning rate, or with trainer.gradient_clip_val 1.0"
            )
        self.lowest = min(self.lowest, loss) if loss == loss else self.lowest

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.skipped:
            rank_zero_warn(f"{self.skipped} of {trainer.global_step} steps were skipped: their loss or gradient was not finite")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.shape = shape_of(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_out_of_memory(exception):  # changed in place: raising here would keep other callbacks from cleaning up
            exception.args = (f"{out_of_memory(trainer, self.shape)} ({first_line(exception)})",)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]


def what(loss: Tensor | None, norm: Tensor) -> str:
    """Says what is not finite."""
    if loss is None:
        return f"gradient norm is {norm.item():g}"
    if loss.isfinite():
        return f"gradient norm is {norm.item():g} (loss {loss.item():.4g})"
    return f"training loss is {loss.item():g}"


def scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    return getattr(trainer.precision_plugin, "scaler", None)


def loss_scale(trainer: Trainer) -> float:
    found = scaler(trainer)
    return 1.0 if found is None else found.get_scale()


def running_statistics(module: nn.Module) -> Iterator[Tensor]:
    """Buffers that a forward pass changes by averaging: those of batch and instance norms."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            yield from part.buffers(recurse=False)


def shape_of(batch: Any) -> tuple[int, ...]:
    """Shape of the first tensor in a batch of tuples, lists and dicts; empty when there is none."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else ()
    return next((shape for shape in map(shape_of, parts) if shape), ())


def out_of_memory(trainer: Trainer, shape: tuple[int, ...]) -> str:
    """What filled the memory, and what to try, in one line."""
    batch = f" with a batch of {shape[0]}, each {' x '.join(map(str, shape[1:]))}" if shape else ""
    where = f" at step {trainer.global_step} (epoch {trainer.current_epoch + 1})" if trainer.training else ""
    advice = ["a smaller picture", "gradient checkpointing"] if trainer.training else ["a smaller picture"]
    if shape and shape[0] > 1:
        smaller, accumulate = shape[0] // 2, 2 * trainer.accumulate_grad_batches
        same = f" with trainer.accumulate_grad_batches {accumulate} (same gradient)" if trainer.training else ""
        advice.insert(0, f"data.batch_size {smaller}{same}")
    if trainer.precision == "32-true":
        advice.append("trainer.precision bf16-mixed")
    return f"out of memory{where}{batch}; peak {peak_memory(trainer)}; try {', or '.join(advice)}"


def peak_memory(trainer: Trainer) -> str:
    """Peak use and size of the memory that the model lives in."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        return f"{peak / 2**30:.2f} of {total / 2**30:.2f} GiB on {torch.cuda.get_device_name(device)}"
    try:
        import resource  # not on Windows
    except ImportError:
        return f"unknown on {device.type}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{peak / 2**30:.2f} of {total / 2**30:.2f} GiB of main memory"


def first_line(exception: BaseException) -> str:
    return (str(exception).strip().splitlines() or [type(exception).__name__])[0][:200]
