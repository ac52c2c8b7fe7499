"""The classification task: what it learns from the data, what it writes, and that its rate and groups are what it says."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vision
from core import Decoder, Encoder, EncoderDecoder, Rotary
from vision.errors import UserError
from vision.models import ViT
from vision.optim import warmup_cosine
from vision.tasks import Classification

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]


class Squares(LightningDataModule):
    """The class is the quadrant that is bright: 8x8 pictures, 4 classes."""

    def __init__(self, count: int = 64, classes: list[str] | None = None, soft: bool = False) -> None:
        super().__init__()
        self.classes = classes or ["a", "b", "c", "d"]
        self.preprocessing = {
            "channels": 1,
            "size": [8, 8],
            "mean": [0.0],
            "std": [1.0],
            "interpolation": "nearest",
            "resize": "squash",
        }
        self.channels = 1
        labels = torch.arange(count) % 4
        images = 0.1 * torch.randn(count, 1, 8, 8)
        for image, label in zip(images, labels, strict=True):
            i, j = divmod(int(label), 2)
            image[:, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4] += 1
        self.hard = TensorDataset(images, labels)
        self.training = TensorDataset(images, F.one_hot(labels, 4).float()) if soft else self.hard

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=16)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.hard, batch_size=16)

    test_dataloader = val_dataloader


def tiny(**options) -> ViT:
    return ViT(**{"img_size": 8, "patch_size": 4, "in_chans": 1, "dim": 16, "depth": 2, "heads": 2, **options})


def train(task: Classification, data: LightningDataModule, path, ckpt_path: str | None = None, **options) -> Trainer:
    trainer = Trainer(
        default_root_dir=path, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*GPU available.*")
        trainer.fit(task, data, ckpt_path=ckpt_path)
    return trainer


def test_learns_and_takes_the_classes_from_the_data(tmp_path) -> None:
    """PL #9473, #20311, #20147: the number of classes by a link from the data to the model, which broke; here no link."""
    task, data = Classification(tiny(), lr=5e-3, label_smoothing=0.0), Squares()
    trainer = train(task, data, tmp_path, max_epochs=20)
    assert task.classes == ["a", "b", "c", "d"]
    assert task.model.num_classes == 4
    assert trainer.callback_metrics["val/accuracy"] == 1.0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        trainer.test(task, data, verbose=False)
    assert task.test_count == 64
    assert torch.equal(task.test_confusion, 16 * torch.eye(4, dtype=torch.long))


def test_soft_labels_of_mixup_are_taken_as_they_are(tmp_path) -> None:
    task = Classification(tiny(), lr=5e-3, label_smoothing=0.1)
    trainer = train(task, Squares(soft=True), tmp_path, max_epochs=20)
    assert trainer.callback_metrics["val/accuracy"] == 1.0


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny(position=functools.partial(Rotary, base=100.0), class_tokens=0, global_pool="avg"),
        lambda: timm.create_model("resnet18", num_classes=7, in_chans=1),
    ],
    ids=["ours", "timm"],
)
def test_checkpoint_alone_rebuilds_the_model(tmp_path, model) -> None:
    """PL #18105, #20068, #15427: arguments that are instances could not be loaded again; PL #21757, cellarium-ml #353,
    matgl #802, pytorch_tabular #621, chemprop #1227: instances in a checkpoint, which weights_only refuses; PL #20726,
    py4cast #163: what was a factory or came from the data was not in it."""
    task = Classification(model())
    trainer = train(task, Squares(), tmp_path, max_steps=1)
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)
    assert stored["vision"]["classes"] == ["a", "b", "c", "d"]
    x = torch.randn(2, 1, 32, 32)
    expected = task.model.eval()(x)
    loaded = vision.load_model(path)
    assert loaded.classes == ["a", "b", "c", "d"]
    assert loaded.preprocessing == Squares().preprocessing
    assert torch.equal(loaded(x), expected)
    again = Classification.load_from_checkpoint(path, map_location="cpu")
    assert torch.equal(again.eval()(x), expected)
    assert again.classes == ["a", "b", "c", "d"]


def test_checkpoint_of_other_classes_is_refused(tmp_path) -> None:
    task = Classification(tiny())
    trainer = train(task, Squares(), tmp_path, max_steps=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(
        UserError, match=r"the data have classes p, q, r, s, the checkpoint a, b, c, d; use data with its classes"
    ):
        train(Classification(tiny()), Squares(classes=list("pqrs")), tmp_path, ckpt_path=str(tmp_path / "x.ckpt"), max_steps=2)


def test_rate_counts_optimizer_steps_under_accumulation(tmp_path) -> None:
    """PL #1476, #12894: a warm-up counted in micro-batches ends too early."""
    rates: list[float] = []

    class Watched(Classification):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    train(Watched(tiny(), lr=1e-2, warmup=0.25), Squares(), tmp_path, max_epochs=8, accumulate_grad_batches=2)
    assert rates == pytest.approx([1e-2 * warmup_cosine(step, total=16, warmup=0.25) for step in range(16)])
    assert max(rates) == pytest.approx(1e-2)
    assert rates.index(max(rates)) == 4


def test_rate_of_an_odd_epoch_counts_its_last_short_step(tmp_path) -> None:
    task = Classification(tiny())
    trainer = train(task, Squares(), tmp_path, max_epochs=2, accumulate_grad_batches=3)  # 4 batches: 3 + 1
    assert trainer.global_step == task.total_steps == 4


def test_resume_uses_changed_options(tmp_path) -> None:
    train(Classification(tiny(), lr=1e-2, weight_decay=0.5), Squares(), tmp_path, max_steps=4).save_checkpoint(
        tmp_path / "x.ckpt"
    )
    seen: list[tuple[float, float]] = []

    class Watched(Classification):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            seen.append((optimizer.param_groups[-1]["lr"], optimizer.param_groups[-1]["weight_decay"]))

    task = Watched(tiny(), lr=3e-3, weight_decay=0.1, warmup=0.0)
    train(task, Squares(), tmp_path, ckpt_path=str(tmp_path / "x.ckpt"), max_steps=8)
    assert len(seen) == 4
    assert seen[0] == (pytest.approx(3e-3 * warmup_cosine(4, total=8, warmup=0.0)), 0.1)


def test_resume_is_exact(tmp_path) -> None:
    class SaveHalfway(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    data, straight = Squares(), Classification(tiny(), lr=1e-2)
    train(straight, data, tmp_path, max_steps=8, callbacks=[SaveHalfway()])
    resumed = Classification(tiny(), lr=1e-2)
    train(resumed, data, tmp_path, max_steps=8, ckpt_path=str(tmp_path / "half.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_no_decay_for_vectors_and_embeddings(tmp_path) -> None:
    task = Classification(tiny(reg_tokens=2), weight_decay=0.3)
    train(task, Squares(), tmp_path, max_steps=1)
    names = {id(p): n for n, p in task.model.named_parameters()}
    decayed = {names[id(p)] for g in task.optimizers().param_groups if g["weight_decay"] for p in g["params"]}
    assert "blocks.0.attention.qkv.weight" in decayed
    assert not {"prefix_tokens", "position.table"} & decayed
    assert not {n for n in decayed if n.endswith("bias") or "norm" in n}


def test_layer_decay_scales_the_rate_by_depth(tmp_path) -> None:
    task = Classification(tiny(), lr=1e-2, layer_decay=0.5, warmup=0.0)
    train(task, Squares(), tmp_path, max_steps=1)
    names = {id(p): n for n, p in task.model.named_parameters()}
    rate = {names[id(p)]: g["lr"] for g in task.optimizers().param_groups for p in g["params"]}
    assert rate["blocks.0.ffn.up.weight"] == pytest.approx(rate["blocks.1.ffn.up.weight"] / 2)
    assert rate["stem.proj.weight"] < rate["blocks.0.ffn.up.weight"]
    assert rate["heads.0.weight"] == pytest.approx(1e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "scaled"])
def test_gradient_is_clipped_to_one(tmp_path, precision) -> None:
    """PL #9694, #9599, #18089: with a loss scaler, the scaled gradients were clipped: to next to nothing."""
    norms: list[float] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if precision == "scaled" else {"precision": precision}

    class Watched(Classification):
        def on_train_start(self) -> None:  # as the optimizer finds them, no longer scaled
            self.trainer.optimizers[0].register_step_pre_hook(lambda *_: norms.append(self.norm()))

        def norm(self) -> float:
            return float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))

    train(Watched(tiny(), lr=1.0, warmup=0.0), Squares(), tmp_path, max_steps=8, **options)
    assert max(norms) == pytest.approx(1.0, abs=1e-4)


def test_rate_where_the_loss_scaler_skips_steps(tmp_path) -> None:
    """PL #18828, #5558: a scheduler, stepped where the scaler skips, warned and ran ahead. There is none: a skipped step
    is a step with its rate, and the schedule ends with the run."""
    rates: list[float] = []

    class Watched(Classification):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    trainer = train(
        Watched(tiny(), lr=1e-2, warmup=0.25),
        Squares(),
        tmp_path,
        max_steps=16,
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
    )
    assert scaler.get_scale() < 2.0**40  # it did skip
    assert rates == pytest.approx([1e-2 * warmup_cosine(step, total=16, warmup=0.25) for step in range(16)])
    assert not trainer.lr_scheduler_configs


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 0.0}, "lr=0 is not positive; use e.g. 1e-3"),
        ({"warmup": 5.0}, r"warmup=5 is a share of all steps, 0..1; use e.g. 0.05"),
        ({"label_smoothing": 1.0}, "label_smoothing=1 is not in 0 <= s < 1; use e.g. 0.1"),
        ({"weight_decay": -1.0}, "weight_decay=-1 is negative; use e.g. 0.05, or 0 for none"),
        ({"betas": (0.9, 2.0)}, r"betas=\(0.9, 2.0\) are not two numbers in 0 <= b < 1"),
        ({"final_lr": -5.0}, r"final_lr=-5 is a share of lr, 0..1; use e.g. 0.01"),
        ({"clip": -1.0}, "clip=-1 is negative; use e.g. 1, or 0 for none"),
        ({"layer_decay": 0.0}, "layer_decay=0 is not in 0 < d <= 1; use 1 for none, or 0.65-0.9"),
    ],
)
def test_wrong_options_are_named(options, text) -> None:
    with pytest.raises(UserError, match=text):
        Classification(tiny(), **options)


def test_a_run_without_an_end_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"the learning rate needs to know the end of the run; set trainer.max_epochs"):
        train(Classification(tiny()), Squares(), tmp_path, max_epochs=-1)


def test_a_model_that_cannot_change_its_classes_is_refused(tmp_path) -> None:
    """open-mmlab/mmdetection #7727: found late, by an index out of range; here before the first step."""

    class Fixed(nn.Module):
        num_classes = 3

    with pytest.raises(UserError, match="Fixed has 3 classes, the data 4; build it with num_classes=4"):
        train(Classification(Fixed()), Squares(), tmp_path, max_steps=1)


def test_torchvision_model_of_other_classes_is_refused(tmp_path) -> None:
    model = torchvision.models.resnet18(num_classes=7)
    model.conv1 = nn.Conv2d(1, 64, 7)
    task = Classification({"class_path": "torchvision.models.resnet18", "init_args": {"num_classes": 7}})
    task.model = model
    with pytest.raises(UserError, match="ResNet gives 7 logits, the data have 4 classes; build it with num_classes=4"):
        train(task, Squares(), tmp_path, max_steps=1)


def test_channels_that_do_not_fit_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"the data have 1 channel\(s\), ViT takes 3; build it with in_chans=1"):
        train(Classification(tiny(in_chans=3)), Squares(), tmp_path, max_steps=1)


def test_warmup_cosine_is_what_it_says() -> None:
    factors = [warmup_cosine(step, total=100, warmup=0.1, final=0.01) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11)
    assert max(factors) == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.01 + 0.99 * 0.5)
    assert factors[-1] < 0.012
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_a_backbone_is_no_classifier():
    backbone = vision.create_model("vit_tiny_patch16_224", features_only=True, dim=12, depth=3, heads=2)
    sizes = {"dim": 8, "depth": 1, "heads": 2, "hidden": 8}
    with pytest.raises(
        UserError, match=r"^an EncoderDecoder writes sequences, a classifier logits of pictures; use vision\.tasks"
    ):
        Classification(EncoderDecoder(Encoder(9, **sizes), Decoder(9, memory_dim=8, **sizes)))
    with pytest.raises(UserError, match="features_only=True gives feature maps, a classifier logits; leave features_only out"):
        Classification(backbone)
    task = Classification(timm.create_model("resnet10t", features_only=True))
    with pytest.raises(UserError, match="FeatureListNet gives a list, a classifier logits `b k`"):
        task.eval()(torch.zeros(1, 3, 32, 32))


class Modes(Callback):
    def on_train_batch_start(self, trainer, task, batch, index) -> None:
        self.modes = {name: part.training for name, part in task.model.named_modules()}


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # Lightning asks whether that is meant: it is
def test_training_goes_on_from_a_checkpoint_of_ones_own(tmp_path) -> None:
    """Classes of the data, dropout on, frozen parts left as they are; and the new file does not need the old one."""
    vision.save_weights(tiny(num_classes=7, drop_rate=0.1), tmp_path / "old.safetensors")
    path = str(tmp_path / "old.safetensors")
    task, modes = Classification(vision.load_model(path)), Modes()
    task.model.stem.requires_grad_(False)
    train(task, Squares(), tmp_path, max_steps=2, callbacks=[modes])
    assert {name for name, is_on in modes.modes.items() if not is_on} == {"stem", "stem.proj"}
    assert task.model.num_classes == 4
    assert task.model.weights_report.adapted == ["classes 7 -> 4: the head starts anew"]
    assert task.card()["model"]["class_path"].endswith(".ViT")


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # Lightning asks whether that is meant: it is
def test_what_is_frozen_in_a_model_in_training_stays_frozen(tmp_path) -> None:
    model, modes = tiny(), Modes()
    model.blocks[0].eval()
    train(Classification(model), Squares(), tmp_path, max_steps=1, callbacks=[modes])
    assert not modes.modes["blocks.0"]
    assert modes.modes["blocks.1"]
