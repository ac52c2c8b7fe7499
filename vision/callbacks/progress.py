"""How far a run is, how fast, how good, and when it will be done: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import rich.progress
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from torch import Tensor

from vision.callbacks.run import clock, watched

INTERVAL = 0.2  # seconds between two drawings; reading the loss waits for the device, so it is done no oftener


class Progress(ProgressBar):
    """One line on a terminal: epoch, batch, time left for the whole training, loss, validation metric, pictures a second.

    A task whose samples are no pictures names them by its `unit`.

    Each epoch leaves one line behind. Where the output is no terminal (a file, a pipe, a batch job) these lines are all there
    is. Only the first process prints. The loss is the mean of the epoch so far; the metric is the one by which checkpoints are
    chosen. The time left counts the training batches and the validations still to come, at the pace of the last 100 batches;
    it is left out where the run has no known end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.console: Console | None = None  # made in the run: a process that is started later gets its own
        self.bar: rich.progress.Progress | None = None
        self.pace = Pace()
        self.drawn = -math.inf
        self.loss: Tensor | None = None  # sum over the batches of this epoch, left on the device
        self.losses = 0
        self.batch = 0  # batches done in this epoch
        self.samples = 0  # of an evaluation
        self.unit = "pictures"
        self.metrics: dict[str, float] = {}  # of the last validation
        self.validated = False  # since the last line of an epoch
        self.started = 0.0

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False
        self.stop()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # turns itself off in all processes but the first
        self.console = self.console or Console()
        self.unit = getattr(pl_module, "unit", self.unit)

    def print(self, *words: Any, **_: Any) -> None:
        if self.enabled and self.console:
            self.console.print(*words, markup=False, highlight=False, soft_wrap=True)

    # Training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pace = Pace()
        self.metrics, self.validated = {}, False
        self.loss, self.losses = None, 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loss, self.losses = None, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.enabled:
            return
        self.pace.step(count(batch) * trainer.world_size)
        self.batch = batch_idx + 1
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):  # Lightning has divided it
            loss = loss.detach() * trainer.accumulate_grad_batches
            self.loss = loss if self.loss is None else self.loss + loss
            self.losses += 1
        if self.is_due():
            self.draw(f"{epoch_of(trainer)} train", self.batch, trainer.num_training_batches, self.training_words(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()  # other things may print between two epochs
        if self.enabled:
            metrics = self.metrics if self.validated else {}
            self.print(
                "  ".join([epoch_of(trainer), *self.loss_words(), *told(metrics), *self.speed_words(), *self.left_words(trainer)])
            )
        self.validated = False

    def training_words(self, trainer: Trainer, running: int | float = 0) -> str:
        """For the bar: the most important first, as a narrow terminal cuts the end."""
        best = dict(list(self.metrics.items())[-1:])
        return "  ".join([*self.left_words(trainer, running), *self.loss_words(), *told(best), *self.speed_words()])

    def loss_words(self) -> list[str]:
        return [] if self.loss is None else [f"loss {float(self.loss) / self.losses:.4f}"]

    def speed_words(self) -> list[str]:
        return [f"{self.pace.speed:,.0f} {self.unit}/s"] if self.pace.speed else []

    def left_words(self, trainer: Trainer, running: int | float = 0) -> list[str]:
        """Time left; `running` is the share of the running validation that is still to come."""
        each = sum(trainer.num_val_batches) if isinstance(trainer.num_val_batches, list) else 0
        left = self.pace.left(batches_left(trainer, self.batch), validations_left(trainer, self.batch) + running, each)
        return [f"{clock(left)} left"] if left else []

    # Evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def start_evaluation(self) -> None:
        self.started, self.samples = time.monotonic(), 0

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.evaluated(trainer, batch, batch_idx, trainer.num_val_batches[dataloader_idx])

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.evaluated(trainer, batch, batch_idx, trainer.num_test_batches[dataloader_idx])

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.evaluated(trainer, batch, batch_idx, trainer.num_predict_batches[dataloader_idx])

    def evaluated(self, trainer: Trainer, batch: Any, batch_idx: int, batches: int | float) -> None:
        if trainer.sanity_checking:
            return
        self.samples += count(batch)
        if not self.enabled or not self.is_due():
            return
        if trainer.state.fn == TrainerFn.FITTING:
            running = 1 - (batch_idx + 1) / batches if math.isfinite(batches) else 0.0
            self.draw(f"{epoch_of(trainer)} val  ", batch_idx + 1, batches, self.training_words(trainer, running))
        else:
            speed = self.samples * trainer.world_size / (time.monotonic() - self.started)
            self.draw(getattr(trainer.state.fn, "value", ""), batch_idx + 1, batches, f"{speed:,.0f} {self.unit}/s")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self.end_evaluation(trainer)
        elif self.enabled and not trainer.sanity_checking:
            self.pace.validated(time.monotonic() - self.started)
            wanted = dict.fromkeys(["val/loss", watched(trainer, pl_module)])
            self.metrics = {name: float(trainer.callback_metrics[name]) for name in wanted if name in trainer.callback_metrics}
            self.validated = True

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end_evaluation(trainer)

    on_predict_end = on_test_end

    def end_evaluation(self, trainer: Trainer) -> None:
        self.stop()
        seconds = time.monotonic() - self.started
        name = getattr(trainer.state.fn, "value", "")
        own = torch.tensor(self.samples, device=trainer.strategy.root_device)
        samples = int(trainer.strategy.reduce(own, reduce_op="sum"))  # shares differ by the last batches
        self.print(f"{name}: {samples:,} {self.unit} in {clock(seconds)} ({samples / seconds:,.0f} {self.unit}/s)")

    # The bar

    def is_due(self) -> bool:
        console = self.console
        is_terminal = console is not None and (console.is_terminal or console.is_jupyter) and not console.is_dumb_terminal
        return is_terminal and time.monotonic() - self.drawn >= INTERVAL

    def draw(self, description: str, done: int, total: int | float, text: str) -> None:
        """Draws without a thread of its own, so that nothing is drawn while worker processes are forked."""
        if self.console and self.console.width < 100:
            text = text.replace(f" {self.unit}/s", "/s")
        fields: dict[str, Any] = {
            "description": description,
            "completed": done,
            "total": int(total) if math.isfinite(total) else None,
            "text": text,
        }
        if self.bar is None:
            columns = (
                "{task.description}",
                rich.progress.BarColumn(12),
                rich.progress.MofNCompleteColumn(),
                "{task.fields[text]}",
            )
            self.bar = rich.progress.Progress(*columns, console=self.console, auto_refresh=False, transient=True)
            self.bar.add_task(**fields)
            self.bar.start()
        self.bar.update(rich.progress.TaskID(0), **fields)
        self.bar.refresh()
        self.drawn = time.monotonic()

    def stop(self) -> None:
        """Takes the bar away and gives the terminal back as it was."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stop()


class Pace:
    """Measures training batches and validations, and tells from them how long the rest takes.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], int | float] = time.monotonic) -> None:
        self.now = now
        self.last: float | None = None  # end of the batch or validation before
        self.seconds: deque[float] = deque(maxlen=100)
        self.pictures: deque[int] = deque(maxlen=100)
        self.validation: int | float | None = None

    def step(self, pictures: int) -> None:
        """A training batch has ended. The first one, which waits for workers and compilers, is not counted."""
        now = self.now()
        if self.last is not None:
            self.seconds.append(now - self.last)
            self.pictures.append(pictures)
        self.last = now

    def validated(self, seconds: int | float) -> None:
        self.validation = seconds
        self.last = self.now()

    @property
    def speed(self) -> float:
        """Pictures a second in training; 0 while unknown."""
        total = sum(self.seconds)
        return sum(self.pictures) / total if total > 0 else 0.0

    def left(self, batches: int | float, validations: int | float, validation_batches: int | float = 0) -> float | None:
        """Seconds until the end, None while unknown.

        Args:
            batches: training batches still to come, possibly infinite.
            validations: validations still to come.
            validation_batches: batches of one; until one was timed, each is taken for a third of a training batch.
        """
        if not self.seconds or not math.isfinite(batches):
            return None
        batch = sum(self.seconds) / len(self.seconds)
        guess = batch * validation_batches / 3 if math.isfinite(validation_batches) else 0.0
        return batches * batch + validations * (guess if self.validation is None else self.validation)


def told(metrics: dict[str, float]) -> list[str]:
    return [f"{name.replace('/', ' ')} {value:.4f}" for name, value in metrics.items()]


def batches_left(trainer: Trainer, batch: int) -> int | float:
    """Training batches to come behind the `batch`-th one of this epoch; infinite where the run has no known end."""
    ends: list[int | float] = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        ends.append((trainer.max_epochs - trainer.current_epoch) * trainer.num_training_batches - batch)
    if trainer.max_steps >= 0:
        ends.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return max(0, min(ends))


def validations_left(trainer: Trainer, batch: int) -> int:
    """Whole validations to come behind the `batch`-th batch of this epoch; one that is due now counts as begun."""
    every = trainer.val_check_batch if trainer.enable_validation else None
    each, left = trainer.num_training_batches, batches_left(trainer, batch)
    if every is None or not math.isfinite(each) or not math.isfinite(left):
        return 0
    every = min(every, each) if trainer.check_val_every_n_epoch else every
    every *= trainer.check_val_every_n_epoch or 1
    position = trainer.current_epoch * each + batch
    return int((position + left) // every - position // every)


def epoch_of(trainer: Trainer) -> str:
    known = trainer.max_epochs is not None and trainer.max_epochs > 0
    epoch = str(trainer.current_epoch + 1)
    return f"epoch {epoch.rjust(len(str(trainer.max_epochs)))}/{trainer.max_epochs}" if known else f"epoch {epoch}"


def count(batch: Any) -> int:
    """Pictures in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for n in map(count, parts) if n), 0)
