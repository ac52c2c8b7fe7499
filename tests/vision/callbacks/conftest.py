"""A tiny task and tiny pictures that keep the contract of a classification run: attributes, batches and metric names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class TinyTask(LightningModule):
    monitor = ("val/accuracy", "max")

    def __init__(self, model: nn.Module | None = None, lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.lr = lr
        self.classes: list[str] = []
        self.preprocessing: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        self.classes = self.trainer.datamodule.classes
        self.preprocessing = self.trainer.datamodule.preprocessing

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=False)
        self.log("train/lr", self.lr)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.model(batch[0])
        self.log("val/loss", F.cross_entropy(logits, batch[1]))
        self.log("val/accuracy", (logits.argmax(-1) == batch[1]).float().mean())

    def on_test_start(self):
        self.test_confusion = torch.zeros(len(self.classes), len(self.classes), dtype=torch.long)

    def test_step(self, batch, batch_idx):
        probabilities = self.model(batch[0]).softmax(-1)
        predicted = probabilities.argmax(-1)
        self.log("test/accuracy", (predicted == batch[1]).float().mean(), batch_size=len(predicted))
        self.test_confusion.index_put_(
            (batch[1].cpu(), predicted.cpu()), torch.ones(len(predicted), dtype=torch.long), accumulate=True
        )
        return {"probabilities": probabilities, "labels": batch[1]}

    @property
    def test_count(self) -> int:
        return int(self.test_confusion.sum())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def card(self):
        model = {"class_path": "torch.nn.Sequential", "init_args": {"width": 8}}
        return {
            "format": 1,
            "task": "classification",
            "model": model,
            "classes": self.classes,
            "preprocessing": self.preprocessing,
        }

    def on_save_checkpoint(self, checkpoint):
        checkpoint["vision"] = self.card()


class TinyData(LightningDataModule):
    """Random pictures `b 3 4 4` whose class is told by their mean; n counts batches of 4."""

    def __init__(self, n: int = 6, classes: tuple[str, ...] = ("cat", "dog", "hen")) -> None:
        super().__init__()
        self.classes = list(classes)
        self.channels = 3
        self.preprocessing = {"channels": 3, "size": [4, 4], "mean": [0.5] * 3, "std": [0.25] * 3}
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(3, (4 * n,), generator=generator)
        images = torch.randn(4 * n, 3, 4, 4, generator=generator) + labels.view(-1, 1, 1, 1) - 1.0
        self.dataset = TensorDataset(images, labels)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def task() -> type[TinyTask]:
    return TinyTask


@pytest.fixture
def data() -> type[TinyData]:
    return TinyData


@pytest.fixture
def trainer(tmp_path: Path):
    """Makes a silent CPU trainer whose run folder is `tmp_path`, or `root`."""

    def make(*callbacks: Any, root: Path = tmp_path, **options: Any) -> Trainer:
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": root,
            "logger": CSVLogger(root, name=None, version=""),
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "max_epochs": 1,
        }
        return Trainer(callbacks=list(callbacks), **(defaults | options))

    return make


@pytest.fixture(autouse=True)
def _quiet():
    """Lightning's advice about workers and its own deprecations are no matter of these tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        yield
