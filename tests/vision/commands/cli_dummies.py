"""A task, a net and data small enough that a whole run takes a moment; the CLI tests name them in configs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vision.cli import main
from vision.errors import ImageError, UserError

CONFIG = {
    "model": {"class_path": "cli_dummies.TinyTask", "init_args": {"net": {"class_path": "cli_dummies.TinyNet"}}},
    "data": {"class_path": "cli_dummies.TinyData"},
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 1},
}


def fit(*options: str, command: str = "fit") -> None:
    """Runs `tiny.yaml`: 4 steps an epoch, 2 epochs."""
    assert main([command, "--config", "tiny.yaml", *options]) == 0


def failing(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line that a run prints which fails with this exit code."""
    with pytest.raises(SystemExit) as stop:
        main(args)
    err = capsys.readouterr().err
    assert stop.value.code == code, err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def load(path: str) -> dict:
    return torch.load(path, weights_only=True)


def steps(path: str) -> int:
    """At how many optimizer steps a checkpoint was written."""
    return load(path)["global_step"]


def saved_config(run: int = 1) -> dict:
    return yaml.safe_load(Path(f"runs/tiny/{run}/config.yaml").read_text())


class Unit(nn.Module):
    """A part that a net takes as a factory."""

    def __init__(self, size: int, slope: float = 0.0) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(x, self.slope)


class TinyNet(nn.Module):
    def __init__(self, width: int = 4, bias: bool = True, unit: Callable[[int], Unit] = Unit) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width, bias=bias), unit(width), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class PlainNet(TinyNet):
    """Whose part may be none."""

    def __init__(self, unit: Callable[[int], Unit] | None = Unit) -> None:
        super().__init__(unit=nn.Identity if unit is None else unit)


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.layers = net.layers


def wide_net(width: int = 9) -> TinyNet:
    return TinyNet(width)


class TinyTask(LightningModule):
    """Logs what a classification task logs."""

    def __init__(
        self,
        net: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        scheduled: bool = False,
        interrupt_at: int = -1,
        fail_at: int = -1,
    ) -> None:
        super().__init__()
        if lr <= 0:
            raise ValueError(f"lr={lr} is not positive; use 0.001")
        self.save_hyperparameters(ignore=["net"])
        self.net = net
        self.seen_lr: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.global_step == self.hparams["interrupt_at"]:
            signal.raise_signal(signal.SIGINT)  # in this thread, at this line
        if self.global_step == self.hparams["fail_at"]:
            raise RuntimeError("a bug of the user")
        self.seen_lr.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.measure("val", batch)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.measure("test", batch)

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.net(batch[0])

    def measure(self, stage: str, batch: list[torch.Tensor]) -> None:
        logits = self.net(batch[0])
        self.log(f"{stage}/loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log(f"{stage}/accuracy", (logits.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        options = {name: self.hparams[name] for name in ("lr", "weight_decay")}
        optimizer = torch.optim.AdamW(self.parameters(), **options)
        if not self.hparams["scheduled"]:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PlainTask(TinyTask):
    """Logs no accuracy."""

    def measure(self, stage: str, batch: list[torch.Tensor]) -> None:
        self.log(f"{stage}/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


class LossTask(PlainTask):
    """Says itself what its best checkpoint is."""

    monitor = ("val/loss", "min")


class NamedTask(TinyTask):
    """Has classes, and predicts probabilities."""

    classes = ("dull", "bright")

    def predict_step(self, batch: list, index: int) -> torch.Tensor:
        return self.net(batch[0]).softmax(-1)


@dataclass
class Noise:
    """Options in a group of their own."""

    level: float = 0.0


NO_NOISE = Noise()


class TinyData(LightningDataModule):
    def __init__(
        self, batch_size: int = 4, fail: str = "", fail_in_worker: str = "", workers: int = 0, noise: Noise = NO_NOISE
    ) -> None:
        super().__init__()
        self.batch_size, self.fail, self.fail_in_worker, self.workers = batch_size, fail, fail_in_worker, workers

    def setup(self, stage: str) -> None:
        if self.fail:
            raise UserError(self.fail)
        numbers = torch.Generator().manual_seed(0)
        x = torch.randn(16, 4, generator=numbers)
        self.set: Dataset = TensorDataset(x, (x.sum(-1) > 0).long())
        if self.fail_in_worker:
            self.set = Broken(self.fail_in_worker)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.set, batch_size=self.batch_size, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.set, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.set, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.set, batch_size=self.batch_size)


class NoTestData(TinyData):
    test_dataloader = LightningDataModule.test_dataloader


class NamedData(TinyData):
    """Predicts on things with names."""

    def predict_dataloader(self) -> DataLoader:
        return DataLoader([(x, f"thing {i}") for i, (x, _) in enumerate(self.set)], batch_size=self.batch_size)


class Broken(Dataset):
    """Fails in the process that reads it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> None:
        raise ImageError("pictures/a.png", "cut short") if self.how == "image" else UserError("this picture is wrong")
