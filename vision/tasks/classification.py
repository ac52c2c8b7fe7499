"""Image classification: any model that maps `b c h w` to `b k` logits, ours or timm's, trained and measured."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from vision.errors import UserError
from vision.optim import parameter_groups, warmup_cosine
from vision.rebuild import build, describe

Batch = tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"] | Float[Tensor, "b k"]]


class Classification(LightningModule):
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
    """

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
    ) -> None:
        super().__init__()
        check_options(lr=lr, warmup=warmup, label_smoothing=label_smoothing, layer_decay=layer_decay)
        check_optimizer(weight_decay=weight_decay, betas=betas, final_lr=final_lr, clip=clip)
        self.save_hyperparameters(ignore=["model"])
        self.model_spec: dict[str, Any] | None = None
        if "_instantiator" in self.hparams:  # built by the command line, which knows the model's options as plain values
            self.save_hyperparameters("model")
            self.model_spec = dict(self.hparams["model"])
            for internal in ("_instantiator", "_class_path"):  # plain values are enough, see `build`
                self.hparams.pop(internal, None)
        if isinstance(model, nn.Module):
            self.model = model
        else:  # plain values, as a checkpoint holds them
            self.model = build(model)
            self.model_spec = dict(model)
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

    def check_channels(self, channels: int | None) -> None:
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        if channels and first is not None and channels != first.in_channels:
            name = type(self.model).__name__
            raise UserError(
                f"the data have {channels} channel(s), {name} takes {first.in_channels}; build it with in_chans={channels}"
            )

    def fit_classifier(self, classes: int) -> None:
        """Replaces the classifier when the data have another number of classes, and keeps the spec true to the model."""
        if getattr(self.model, "num_classes", classes) != classes:
            reset = getattr(self.model, "reset_classifier", None)
            if reset is None:
                name = type(self.model).__name__
                raise UserError(
                    f"{name} has {self.model.num_classes} classes, the data {classes}; build it with num_classes={classes}"
                )
            reset(classes)
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
        logits = self.model(images).float()
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

    # Optimisation

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = parameter_groups(self.model, weight_decay=self.hparams["weight_decay"], layer_decay=self.hparams["layer_decay"])
        self.decays = [group["weight_decay"] for group in groups]
        return torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=tuple(self.hparams["betas"]))

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        """Sets the learning rate of the coming optimizer step.

        It depends on the step and the options only: a resume goes on exactly, and with changed options if they changed
        (an optimizer's stored state would bring the old ones back).
        """
        options = self.hparams
        factor = warmup_cosine(self.global_step, total=self.total_steps, warmup=options["warmup"], final=options["final_lr"])
        for group, decay in zip(self.trainer.optimizers[0].param_groups, self.decays, strict=True):
            group["lr"] = options["lr"] * factor * group.get("lr_scale", 1.0)
            group["weight_decay"] = decay
        self.log("train/lr", options["lr"] * factor, on_step=True)

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
        clip = self.hparams["clip"] if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm=gradient_clip_algorithm or "norm")

    # What a checkpoint needs to work alone

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vision"] = self.card()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
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
        return {
            "format": 1,
            "task": "classification",
            "model": self.model_spec or describe(self.model),
            "classes": self.classes,
            "preprocessing": self.preprocessing,
        }


def check_options(*, lr: float, warmup: float, label_smoothing: float, layer_decay: float) -> None:
    if lr <= 0:
        raise UserError(f"lr={lr:g} is not positive; use e.g. 1e-3")
    if not 0 <= warmup <= 1:
        raise UserError(f"warmup={warmup:g} is a share of all steps, 0..1; use e.g. 0.05")
    if not 0 <= label_smoothing < 1:
        raise UserError(f"label_smoothing={label_smoothing:g} is not in 0 <= s < 1; use e.g. 0.1")
    if not 0 < layer_decay <= 1:
        raise UserError(f"layer_decay={layer_decay:g} is not in 0 < d <= 1; use 1 for none, or 0.65-0.9")


def check_optimizer(*, weight_decay: float, betas: tuple[float, float], final_lr: float, clip: float) -> None:
    if not weight_decay >= 0:
        raise UserError(f"weight_decay={weight_decay:g} is negative; use e.g. 0.05, or 0 for none")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas={tuple(betas)} are not two numbers in 0 <= b < 1; use e.g. (0.9, 0.999)")
    if not 0 <= final_lr <= 1:
        raise UserError(f"final_lr={final_lr:g} is a share of lr, 0..1; use e.g. 0.01")
    if not clip >= 0:
        raise UserError(f"clip={clip:g} is negative; use e.g. 1, or 0 for none")


def shorten(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
