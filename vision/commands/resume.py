"""What a run writes down about itself, and how a run that goes on from a checkpoint treats options that have changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from vision.errors import UserError


class RunRecord(Callback):
    """Writes the config of a run into its folder, so that `vision fit --config runs/x/1/config.yaml` runs it again.

    Nothing is written over: a second config in the same folder becomes `config.2.yaml`. All processes of a run learn
    the folder of the first one here.

    Args:
        text: the config as YAML.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.written: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.written is not None:
            return
        trainer._default_root_dir = trainer.strategy.broadcast(trainer.default_root_dir)  # type: ignore[attr-defined]
        folder = Path(trainer.default_root_dir)
        self.written = self.write(folder) if trainer.is_global_zero else folder / "config.yaml"

    def write(self, folder: Path) -> Path:
        """Creates the next free config file; "x" lets only one process have a name."""
        number = 1
        while True:
            file = folder / ("config.yaml" if number == 1 else f"config.{number}.yaml")
            try:
                with file.open("x", encoding="utf-8") as stream:
                    stream.write(self.text)
                return file
            except FileExistsError:
                number += 1
            except OSError as error:
                raise UserError(f"cannot write {file}: {error.strerror}; choose another --trainer.default_root_dir") from error


class KeepChangedOptions(Callback):
    """Lets options of the optimizer that were changed for a resume (`--model.lr 0.01`) hold.

    A checkpoint holds the optimizer's learning rate, weight decay, … and loading it puts the old values back, in silence.
    Where the task's options differ from those in the checkpoint, the values of the newly built optimizer are kept; a
    scheduled learning rate goes on at its place in the schedule, scaled by the new value over the old one.
    """

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}
        self.step = -1  # of the checkpoint; -1: training starts from the beginning
        self.fresh: list[list[dict[str, Any]]] = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint.get("hyper_parameters", {})
        self.step = checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizers are built, and not yet loaded from the checkpoint."""
        self.fresh = [[options_of(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        changed = changes(self.saved, dict(pl_module.hparams))
        if not changed:
            return
        if trainer.is_global_zero:
            print(
                "changed since the checkpoint: " + ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in changed.items()),
                file=sys.stderr,
            )
        for optimizer, groups in zip(trainer.optimizers, self.fresh, strict=True):
            take_options(optimizer, groups)
        for config in trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [group["initial_lr"] for group in config.scheduler.optimizer.param_groups]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def take_options(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Puts the options of newly built parameter groups into an optimizer that was loaded."""
    for group, fresh in zip(optimizer.param_groups, groups, strict=True):
        before, peak = group.get("initial_lr"), fresh.get("initial_lr")
        scheduled = group["lr"] * peak / before if before and peak is not None else fresh["lr"]
        group.update(fresh | {"lr": scheduled})


def changes(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The task's options that differ, as name -> (in the checkpoint, now)."""
    return {
        name: (value, now[name])
        for name, value in saved.items()
        if name in now and not name.startswith("_") and name != "model" and plain(value) != plain(now[name])
    }


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
