"""Image classification: any model that maps `b c h w` to `b k` logits, ours or timm's, trained and measured."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from core import EncoderDecoder
from vision.errors import UserError
from vision.models.features import Features
from vision.optim import parameter_groups
from vision.rebuild import describe
from vision.tasks.base import OptimizerName, Task

Batch = tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"] | Float[Tensor, "b k"]]


class Classification(Task):
    """Trains a classifier with AdamW, warm-up and a cosine, label smoothing and gradient clipping.

    The number of classes, their names and the preprocessing come from the data and travel in the checkpoint.

    Args:
        model: logits from pictures. Its classifier is replaced when the data has another number of classes.
        lr: largest learning rate, at the end of the warm-up.
        weight_decay: decoupled, on matrices only.
        betas: of AdamW.
        warmup: share of all optimizer steps, 0..1.
        final_lr: share of `lr` that the cosine ends at.
        layer_decay: learning rate of a layer over that of the next one; 1 is off, 0.65-0.9 is usual for fine-tuning.
        label_smoothing: share of the target spread over all classes; soft labels (Mixup) are left as they are.
        clip: largest norm of the gradient; 0 is off. `trainer.gradient_clip_val` goes before it.
        optimizer: "adamw", or "muon" for the matrices of the Linears, see `vision.optim.Muon`: more learned of each step, at
            the same `lr`; a step takes longer, much in small batches.
    """

    kind = "classification"
    monitor = ("val/accuracy", "max")

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup: float = 0.05,
        final_lr: float = 0.0,
        layer_decay: float = 1.0,
        label_smoothing: float = 0.1,
        clip: float = 1.0,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        super().__init__()
        check_own_options(label_smoothing=label_smoothing, layer_decay=layer_decay)
        self.save_hyperparameters(ignore=["model"])
        self.take_model(model)
        if isinstance(self.model, Features):
            raise UserError("features_only=True gives feature maps, a classifier logits; leave features_only out")
        if isinstance(self.model, EncoderDecoder):
            raise UserError(
                "an EncoderDecoder writes sequences, a classifier logits of pictures; use vision.tasks.Sequence, or a ViT"
            )
        self.classes: list[str] = []
        self.preprocessing: dict[str, Any] = {}

    # The data tell how many classes there are

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        classes = list(getattr(data, "classes", self.classes))
        if not classes:
            raise UserError("the data do not name their classes; give the data module a list `classes`")
        self.classes = classes
        self.preprocessing = dict(getattr(data, "preprocessing", self.preprocessing))
        self.check_channels(getattr(data, "channels", None))
        self.fit_classifier(len(classes))
        top = min(5, len(classes))
        accuracies = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(len(classes), average="micro"),
                "accuracy_top5": MulticlassAccuracy(len(classes), average="micro", top_k=top),
            }
        )
        self.val_metrics, self.test_metrics = accuracies.clone(prefix="val/"), accuracies.clone(prefix="test/")
        self.confusion = MulticlassConfusionMatrix(len(classes))
        self.test_confusion: Int[Tensor, "k k"] = torch.zeros(len(classes), len(classes), dtype=torch.long)

    def fit_classifier(self, classes: int) -> None:
        """Replaces the classifier when the data have another number of classes, and keeps the spec true to the model."""
        before = getattr(self.model, "num_classes", classes)
        if before != classes:
            reset = getattr(self.model, "reset_classifier", None)
            if reset is None:
                name = type(self.model).__name__
                raise UserError(
                    f"{name} has {self.model.num_classes} classes, the data {classes}; build it with num_classes={classes}"
                )
            reset(classes)
            if report := getattr(self.model, "weights_report", None):
                report.adapted.append(f"classes {before} -> {classes}: the head starts anew")
        if hasattr(self.model, "options") or self.model_spec is None:
            self.model_spec = describe(self.model)
        else:
            init_args = {**self.model_spec.get("init_args", {}), **self.model_spec.get("dict_kwargs", {})}
            if hasattr(self.model, "num_classes"):
                init_args["num_classes"] = classes
            if init_args.get("pretrained"):
                init_args["pretrained"] = False  # the checkpoint brings the weights
            self.model_spec = {"class_path": self.model_spec["class_path"], "init_args": init_args}
        self.hparams["model"] = self.model_spec

    # Steps

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        logits = self.model(images)
        if not isinstance(logits, Tensor):
            name = type(self.model).__name__
            raise UserError(f"{name} gives a {type(logits).__name__}, a classifier logits `b k`; use a model that gives those")
        logits = logits.float()
        if self.classes and logits.shape[-1] != len(self.classes):
            name = type(self.model).__name__
            raise UserError(
                f"{name} gives {logits.shape[-1]} logits, the data have {len(self.classes)} classes; "
                f"build it with num_classes={len(self.classes)}"
            )
        return logits

    def training_step(self, batch: Batch, index: int) -> Tensor:
        images, labels = batch
        smoothing = 0.0 if labels.is_floating_point() else self.hparams["label_smoothing"]
        loss = F.cross_entropy(self(images), labels, label_smoothing=smoothing)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(images))
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.measure("val", self.val_metrics, *batch)

    def test_step(self, batch: Batch, index: int) -> dict[str, Tensor]:
        logits = self.measure("test", self.test_metrics, *batch)
        self.confusion.update(logits, batch[1])
        return {"probabilities": logits.softmax(dim=-1), "labels": batch[1]}

    def predict_step(self, batch: tuple[Tensor, Any], index: int) -> Float[Tensor, "b k"]:
        return self(batch[0]).softmax(dim=-1)

    def measure(self, stage: str, metrics: MetricCollection, images: Tensor, labels: Tensor) -> Float[Tensor, "b k"]:
        logits = self(images)
        metrics.update(logits, labels)
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels), on_epoch=True, batch_size=len(images), sync_dist=True)
        self.log_dict(metrics, prog_bar=stage == "val", on_epoch=True, batch_size=len(images))
        return logits

    def on_test_epoch_end(self) -> None:
        self.test_confusion = self.confusion.compute().cpu()
        self.confusion.reset()

    @property
    def test_count(self) -> int:
        """Pictures in the last test."""
        return int(self.test_confusion.sum())

    def parameter_groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.model, weight_decay=self.hparams["weight_decay"], layer_decay=self.hparams["layer_decay"])

    # What a checkpoint needs to work alone

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        card = checkpoint.get("vision", {})
        classes = list(card.get("classes", []))
        if classes and self.classes and classes != self.classes:
            raise UserError(
                f"the data have classes {shorten(self.classes)}, the checkpoint {shorten(classes)}; use data with its classes"
            )
        self.classes = classes or self.classes
        self.preprocessing = self.preprocessing or dict(card.get("preprocessing", {}))
        if self.classes:
            self.fit_classifier(len(self.classes))

    def card(self) -> dict[str, Any]:
        """Plain values that rebuild the model and use it: see `vision.load_model`."""
        return {**super().card(), "classes": self.classes, "preprocessing": self.preprocessing}


def check_own_options(*, label_smoothing: float, layer_decay: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise UserError(f"label_smoothing={label_smoothing:g} is not in 0 <= s < 1; use e.g. 0.1")
    if not 0 < layer_decay <= 1:
        raise UserError(f"layer_decay={layer_decay:g} is not in 0 < d <= 1; use 1 for none, or 0.65-0.9")


def shorten(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
