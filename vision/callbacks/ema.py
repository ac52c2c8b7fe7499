"""Exponential moving average of the weights (Polyak & Juditsky 1992), exact across a resume."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from vision.errors import UserError


class EMA(Callback):
    """Averages the weights after each optimizer step; validation, test, checkpoints and the trained model use the average.

    The first update copies the weights, update `t` (t = 1, 2, …) does `average += (1 - d) * (weights - average)` with
    `d = min(decay, (1 + t) / (10 + t))`: a short memory at first, so that the average never drags the initial weights along.
    Before the first update nothing is replaced. Floating-point parameters are averaged (at least in float32), buffers are the
    model's own. A checkpoint holds the average in `state_dict` and the raw weights in `current_model_state`, so that a
    resume continues from both exactly; one saved with `save_weights_only=True` calls no callback and holds raw weights.

    Why not `lightning.pytorch.callbacks.WeightAveraging`: it copies the whole task in `setup`, before the task fits its head to
    the data, swaps in the untrained copy before the first update, loses an update when a checkpoint is saved between the
    step and its hook, warns in every test, and took 26 ms for a ViT-Ti on one CPU core where this takes 6. Why not
    `timm.utils.ModelEmaV3`: a second copy of the model with its own buffers, 10 ms, and no checkpoint or swap.

    Args:
        decay: largest decay `d`, 0 < decay < 1; the average looks back about 1 / (1 - decay) steps.

    Raises:
        UserError: decay outside (0, 1), or a strategy that shards the weights.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise UserError(f"decay={decay} of EMA is outside 0..1 (both excluded); use 0.999, or leave EMA out")
        self.decay = decay
        self.updates = 0
        self.step = 0  # trainer.global_step at the last update
        self.average: list[Tensor] = []
        self.raw: list[Tensor] | None = None  # the raw weights, while the module holds the average

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.raw = None
        if stage != "fit":
            return
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
            name = type(trainer.strategy).__name__
            raise UserError(f"EMA does not average sharded weights ({name}); use the strategy ddp, or leave EMA out")
        self.updates, self.average = 0, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        self.average = [a.to(p.device) for a, p in zip(self.average, averaged(pl_module).values(), strict=bool(self.average))]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.update(trainer, pl_module)

    @torch.no_grad()
    def update(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the last optimizer step into the average, once."""
        if trainer.global_step == self.step:  # gradients were accumulated, or a checkpoint has asked before the hook
            return
        self.step = trainer.global_step
        weights = [p.detach().to(wide(p)) for p in averaged(pl_module).values()]
        if self.updates == 0:
            self.average = [w.clone() for w in weights]
        else:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
            torch._foreach_lerp_(self.average, weights, 1 - decay)
        self.updates += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.show_average(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self.raw is not None:
            assign(pl_module, self.raw)
            self.raw = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show_average(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show_average(pl_module)  # a resumed run that had nothing left to do starts and ends no training
        self.average, self.raw = [a.cpu() for a in self.average], self.raw and [w.cpu() for w in self.raw]

    def show_average(self, pl_module: LightningModule) -> None:
        """Lets the module hold the average, and keeps the raw weights aside."""
        if self.updates == 0 or self.raw is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.raw = [p.detach().clone() for p in averaged(pl_module).values()]
        assign(pl_module, self.average)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay}  # lets Lightning warn when a run with EMA is resumed without

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training:
            self.update(trainer, pl_module)
        if self.updates == 0:
            return
        state, parameters = checkpoint["state_dict"], averaged(pl_module)
        place = {id(p): i for i, p in enumerate(parameters.values())}
        names = {n: place[id(p)] for n, p in pl_module.named_parameters(remove_duplicate=False) if id(p) in place and n in state}
        raw = list(parameters.values()) if self.raw is None else self.raw
        checkpoint["current_model_state"] = state | {n: raw[i].detach() for n, i in names.items()}
        checkpoint["state_dict"] = state | {n: self.average[i] for n, i in names.items()}
        checkpoint["averaging_state"] = {"updates": self.updates}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self.raw, self.average = None, []
        self.updates = checkpoint.get("averaging_state", {}).get("updates", 0)
        if self.updates:
            state = checkpoint["state_dict"]
            self.average = [state[n].to(p.device, wide(p), copy=True) for n, p in averaged(pl_module).items()]
            pl_module.load_state_dict(checkpoint["current_model_state"], strict=pl_module.strict_loading)


def averaged(module: LightningModule) -> dict[str, Tensor]:
    """The parameters that have an average; tied ones once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.is_floating_point()}


def wide(parameter: Tensor) -> torch.dtype:
    """The average's dtype: steps of 1 - decay would round to nothing in half precision."""
    return torch.promote_types(parameter.dtype, torch.float32)


@torch.no_grad()
def assign(module: LightningModule, values: list[Tensor]) -> None:
    parameters = list(averaged(module).values())
    torch._foreach_copy_(parameters, values)
