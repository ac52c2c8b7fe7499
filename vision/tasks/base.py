"""What every task shares: its model as plain values, AdamW, a learning rate from the step alone, the card of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import LightningModule
from torch import nn

from vision.errors import UserError
from vision.optim import Muon, apart, parameter_groups, warmup_cosine
from vision.rebuild import build, describe

OptimizerName = Literal["adamw", "muon"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "muon": Muon}


class Task(LightningModule):
    """Base of the tasks: trains `self.model` with AdamW, warm-up, a cosine and gradient clipping; checkpoints describe it.

    A subclass names its `kind` and `monitor` and begins so; the options are those named here and its own::

        class Naming(Task):
            kind, monitor = "naming", ("val/accuracy", "max")

            def __init__(self, model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.05,
                         betas: tuple[float, float] = (0.9, 0.999), warmup: float = 0.05, final_lr: float = 0.0,
                         clip: float = 1.0) -> None:
                super().__init__()
                self.save_hyperparameters(ignore=["model"])  # here: Lightning reads the arguments of the calling function
                self.take_model(model)                       # last: sets self.model and self.model_spec, checks the options

    It brings `training_step`, `validation_step`, ... Hooks, each with a default:

    - `factor(step, total)`: learning rate over `lr` at an optimizer step; warm-up and a cosine, from `warmup` and `final_lr`.
    - `parameter_groups()`: for AdamW; no decay for vectors and for what `model.no_weight_decay()` names. Each may have an
      `lr_scale`.
    - `card()`: plain values that rebuild the model and use it (`vision.load_model`); extend it by `{**super().card(), ...}`.
    - `on_load_checkpoint(checkpoint)`: takes back what the card holds; call `super()` first, which refuses other tasks' files.
    - `check_channels(channels)`: for `setup`, refuses data of other channels than the model takes.

    Options read from `self.hparams`: `lr` (largest rate), `weight_decay`, `betas`; `warmup` (share of all steps), `final_lr`
    (share of `lr`); `clip` (largest norm of the gradient, 0 is off; `trainer.gradient_clip_val` goes before it). Those that a
    subclass does without are taken as none.
    """

    kind = ""  # of the task, as the card names it
    monitor = ("val/loss", "min")
    unit = "pictures"  # what a batch counts, for the progress bar
    model: Any
    model_spec: dict[str, Any] | None

    def take_model(self, model: Any) -> None:
        """Holds the model, and how it is built as plain values.

        Args:
            model: built, or plain values as a checkpoint holds them.

        Raises:
            UserError: an option outside its range.
        """
        check_options(dict(self.hparams))
        self.model_spec = self.given("model")
        if isinstance(model, nn.Module):
            self.model = model
        else:
            self.model = build(model)
            self.model_spec = dict(model)
        if self.model_spec and self.model_spec["class_path"].rpartition(".")[2] == "load_model":
            self.model_spec = None  # a checkpoint must not need the file that training began from: the model tells itself
        for internal in ("_instantiator", "_class_path"):  # plain values are enough, see `build`
            self.hparams.pop(internal, None)

    def given(self, name: str) -> dict[str, Any] | None:
        """A part among the options as the command line knows it, class path and options, kept among the hyper-parameters; None
        where the part was built in Python."""
        if "_instantiator" not in self.hparams:
            return None
        self.save_hyperparameters(name)
        value = self.hparams[name]
        return dict(value) if value is not None else None

    def check_channels(self, channels: int | None) -> None:
        """Raises UserError: the data have other channels than the model takes."""
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        taken = getattr(self.model, "in_chans", None) or (first.in_channels if first is not None else None)
        if channels and taken and channels != taken:
            name = type(self.model).__name__
            raise UserError(f"the data have {channels} channel(s), {name} takes {taken}; build it with in_chans={channels}")

    def on_fit_start(self) -> None:
        """A model in evaluation mode, as `vision.load_model` gives it, is put into training mode; Lightning would leave it, with
        dropout off and running statistics fixed. Parts none of whose parameters is trained stay in evaluation mode."""
        if self.model.training:
            return
        self.model.train()
        for part in self.model.modules():
            own = list(part.parameters())
            if own and not any(parameter.requires_grad for parameter in own):
                part.eval()

    # Optimisation

    def factor(self, step: int, total: int) -> float:
        """Learning rate over `lr` at an optimizer step: 0 is the first one, `total` - 1 the last."""
        options = self.hparams
        return warmup_cosine(step, total=total, warmup=options.get("warmup", 0.0), final=options.get("final_lr", 0.0))

    def parameter_groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.model, weight_decay=self.hparams.get("weight_decay", 0.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups, kind = self.parameter_groups(), self.hparams.get("optimizer", "adamw")
        if kind == "muon":
            groups = apart(groups, self.model)
        self.decays = [group["weight_decay"] for group in groups]
        betas = tuple(self.hparams.get("betas", (0.9, 0.999)))
        return OPTIMIZERS[kind](groups, lr=self.hparams["lr"], betas=betas, fused=self.may_fuse())

    def may_fuse(self) -> bool:
        """One kernel for all parameters: the step of a small model in a fifth of the time. Not with mixed precision, where
        Lightning clips no gradients of a fused optimizer, because it could undo a loss scale by itself."""
        known = {parameter.device.type for parameter in self.parameters()} <= {"cpu", "cuda"}
        return known and (self._trainer is None or not self.trainer.precision.endswith("-mixed"))

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        """Sets the learning rate of the coming optimizer step.

        It depends on the step and the options only: a resume goes on exactly, and with changed options if they changed
        (an optimizer's stored state would bring the old ones back).
        """
        rate = self.hparams["lr"] * self.factor(self.global_step, self.total_steps)
        for group, decay in zip(self.trainer.optimizers[0].param_groups, self.decays, strict=True):
            group["lr"] = rate * group.get("lr_scale", 1.0)
            group["weight_decay"] = decay
        self.log("train/lr", rate, on_step=True)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        trainer = self.trainer
        ends = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs and trainer.max_epochs > 0 and trainer.num_training_batches != float("inf"):
            ends.append(trainer.max_epochs * -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches))
        if not ends:
            raise UserError("the learning rate needs to know the end of the run; set trainer.max_epochs or trainer.max_steps")
        return min(ends)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        clip = self.hparams.get("clip", 0.0) if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm=gradient_clip_algorithm or "norm")

    # What a checkpoint needs to work alone

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vision"] = card = self.card()
        checkpoint.setdefault(self.CHECKPOINT_HYPER_PARAMS_KEY, {})["model"] = card["model"]  # for load_from_checkpoint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint.get("vision", {}).get("task", self.kind)
        if stored != self.kind:
            raise UserError(
                f"the checkpoint is of the task {stored}, not {self.kind}; give one of this task, or use its own config"
            )

    def card(self) -> dict[str, Any]:
        """Plain values that rebuild the model and use it: see `vision.load_model`."""
        return {"format": 1, "task": self.kind, "model": self.model_spec or describe(self.model)}


def check_options(options: dict[str, Any]) -> None:
    """Raises UserError: an option of the optimizer outside its range."""
    if (kind := options.get("optimizer", "adamw")) not in OPTIMIZERS:
        raise UserError(f"optimizer={kind!r} is unknown; use {' or '.join(OPTIMIZERS)}")
    lr, warmup, decay = options["lr"], options.get("warmup", 0.0), options.get("weight_decay", 0.0)
    betas, final_lr, clip = options.get("betas", (0.9, 0.999)), options.get("final_lr", 0.0), options.get("clip", 0.0)
    if not lr > 0:
        raise UserError(f"lr={lr:g} is not positive; use e.g. 1e-3")
    if not 0 <= warmup <= 1:
        raise UserError(f"warmup={warmup:g} is a share of all steps, 0..1; use e.g. 0.05")
    if not decay >= 0:
        raise UserError(f"weight_decay={decay:g} is negative; use e.g. 0.05, or 0 for none")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas={tuple(betas)} are not two numbers in 0 <= b < 1; use e.g. (0.9, 0.999)")
    if not 0 <= final_lr <= 1:
        raise UserError(f"final_lr={final_lr:g} is a share of lr, 0..1; use e.g. 0.01")
    if not clip >= 0:
        raise UserError(f"clip={clip:g} is negative; use e.g. 1, or 0 for none")
