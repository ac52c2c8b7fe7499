"""Image restoration: any model that maps degraded pictures to clean ones, trained and measured."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.errors import UserError
from vision.inference.restoration import check_turnable, ensemble, run
from vision.inference.ways import Way
from vision.losses import check_loss
from vision.metrics import Protocol, fits_ssim, psnr, ssim
from vision.optim import warmup_cosine
from vision.rebuild import build, describe, path_of, plain
from vision.tasks.base import OptimizerName, Task

TrainingBatch = tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c2 h2 w2"]]
TestBatch = tuple[Float[Tensor, "1 c h w"], Float[Tensor, "1 c2 h2 w2"], Any]  # and the picture's name in a list

ENSEMBLE = "self-ensemble"  # what the mean over turns and reflections is called beside "restored"
PROBE = 64  # side of the pictures that a loss is tried on, where the data tell no patch
PANELS, SIDE = 4, 256  # pictures shown of each validation, and the side of what is shown of them


class Panel(NamedTuple):
    """The middle of a picture, before and after, 0..1; the scores are those of the whole picture."""

    name: str
    before: Float[Tensor, "c h w"]
    after: Float[Tensor, "c h w"]
    clean: Float[Tensor, "c h w"]
    before_psnr: float
    after_psnr: float


class Score(NamedTuple):
    """How near a picture came to the clean one, by one method."""

    name: str
    method: str
    psnr: float
    ssim: float


class Restoration(Task):
    """Trains a restorer with AdamW, warm-up and a cosine, and measures PSNR and SSIM on whole pictures.

    Training batches are `(degraded, clean)`, `b c h w` in 0..1; those of validation and test `(degraded, clean, [name])`, one
    picture each. Scale, channels and the kind of degradation come from the data and travel in the checkpoint.

    Args:
        model: restored pictures from degraded ones, `scale` times their size.
        loss: from restored and clean pictures, such as those of `vision.losses`; None is torch.nn.L1Loss.
        lr: largest learning rate, at the end of the warm-up.
        weight_decay: decoupled, on matrices only.
        betas: of AdamW.
        warmup: share of all optimizer steps, 0..1.
        flat: share of all steps at the largest rate, before the cosine.
        final_lr: share of `lr` that the cosine ends at.
        clip: largest norm of the gradient; 0 is off. `trainer.gradient_clip_val` goes before it.
        protocol: of PSNR and SSIM; None is RGB, not rounded.
        tile: side of the tiles that pictures are restored in, in measuring and later by `vision.restore`; None is whole pictures.
            A model that attends to whole maps does better in tiles about as large as its training patches, see `vision.restore`.
        self_ensemble: whether a test measures also the mean over each picture's 8 turns and reflections, in a column of its own
            (and as test/psnr_self_ensemble); 8 times the time. `vision restore --self-ensemble` restores so.
        optimizer: "adamw", or "muon" for the matrices of the Linears, see `vision.optim.Muon`: more learned of each step, at
            the same `lr`; a step takes longer, much in small batches.

    Raises:
        UserError: an option out of range. At the start of a training: a loss that fails on pictures, is no single number, or
            is no smaller where restored and clean picture are the same.
    """

    kind = "restoration"
    monitor = ("val/psnr", "max")

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None = None,
        lr: float = 3e-4,
        weight_decay: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup: float = 0.05,
        flat: float = 0.0,
        final_lr: float = 0.0,
        clip: float = 1.0,
        protocol: Protocol | None = None,
        tile: int | None = None,
        self_ensemble: bool = False,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model", "loss"])
        self.loss = self.take_loss(loss)
        self.protocol = Protocol(**protocol) if isinstance(protocol, Mapping) else protocol or Protocol()
        self.hparams["protocol"] = asdict(self.protocol)
        self.take_model(model)
        self.model.tile = tile
        if self_ensemble:
            check_turnable(self.model)
        Way(self.model, "auto")  # refuses a tile that the model cannot work in
        if not 0 <= flat <= 1 - warmup:
            raise UserError(f"flat={flat:g} is a share of the steps after the warm-up, 0..{1 - warmup:g}; use 0 for none")
        self.channels: int | None = None
        self.scale = int(getattr(self.model, "scale", 1))
        self.degradation = ""
        self.sigma: float | None = None
        self.panels: list[Panel] = []
        self.scores: list[Score] = []
        self.compared = 3  # channels of the pictures that were scored

    def take_loss(self, loss: Any) -> nn.Module:
        """The loss, described among the hyper-parameters as plain values."""
        given = self.given("loss")
        if isinstance(loss, Mapping):  # plain values, as a checkpoint holds them
            loss, given = build(loss), dict(loss)
        loss = nn.L1Loss() if loss is None else loss
        self.hparams["loss"] = given or spec_of(loss)
        return loss

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        self.check_channels(getattr(data, "channels", None))
        scale = int(getattr(data, "scale", self.scale))
        if scale != self.scale:
            raise UserError(
                f"the data are to be enlarged {scale} times, {type(self.model).__name__} enlarges {self.scale} times; "
                f"use one that does, such as SwinRestorer(scale={scale}), or set the scale of the data to {self.scale}"
            )
        self.channels = getattr(data, "channels", self.channels)
        self.degradation = str(getattr(data, "degradation", self.degradation))
        self.sigma = getattr(data, "sigma", self.sigma)
        self.way = Way(self.model, "auto")

    def on_fit_start(self) -> None:
        super().on_fit_start()
        data = getattr(self.trainer, "datamodule", None)
        stages, channels = getattr(data, "stages", None), self.channels or 3
        side = stages[0].patch if stages else getattr(data, "patch", None) or PROBE
        clean = (2, channels // 2 if getattr(self.model, "dual_pixel", False) else channels, side, side)
        with self.trainer.precision_plugin.forward_context():
            check_loss(self.loss, clean, self.device)

    # Steps

    def forward(self, degraded: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        return self.model(degraded)

    def training_step(self, batch: TrainingBatch, index: int) -> Tensor:
        degraded, clean = batch
        restored = self(degraded)
        if restored.shape != clean.shape:
            raise UserError(
                f"{type(self.model).__name__} made {tuple(restored.shape)} of {tuple(degraded.shape)}, the clean pictures are "
                f"{tuple(clean.shape)}; use data of its scale and channels"
            )
        loss = self.loss(restored, clean)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(degraded))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.panels, self.scores = [], []

    on_test_epoch_start = on_validation_epoch_start

    def on_test_epoch_end(self) -> None:
        """The table holds the pictures of all processes."""
        if self.trainer.world_size > 1:
            shares: list[list[Score]] = [[] for _ in range(self.trainer.world_size)]
            torch.distributed.all_gather_object(shares, self.scores)
            self.scores = sorted({score for share in shares for score in share})

    def validation_step(self, batch: TestBatch, index: int) -> None:
        self.measure("val", *batch)

    def test_step(self, batch: TestBatch, index: int) -> dict[str, Tensor]:
        restored = self.measure("test", *batch)
        if self.hparams["self_ensemble"]:
            self.measure_ensemble(*batch)
        return {"restored": restored}

    def predict_step(self, batch: tuple[Tensor, Any], index: int) -> Float[Tensor, "b c h w"]:
        return self.restore(batch[0]).clamp(0, 1)

    def restore(self, degraded: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Whole pictures, or band by band, or by tiles, as memory allows; not cut to 0..1."""
        return run(self.way, degraded)

    def measure(self, stage: str, degraded: Tensor, clean: Tensor, names: Any) -> Float[Tensor, "1 c h w"]:
        restored = self.restore(degraded)
        name, before = str(names[0]), self.baseline(degraded, clean)
        if restored.shape != clean.shape:
            raise UserError(
                f"{name}: restored to {tuple(restored.shape)}, the clean picture is {tuple(clean.shape)}; give pairs of one size"
            )
        if not restored.isfinite().all():
            raise UserError(
                f"{name}: the restored picture is not finite; train with a smaller lr, or in trainer.precision=bf16-mixed or 32"
            )
        score = self.score(name, "restored", restored, clean)
        self.log_dict(
            {f"{stage}/loss": self.loss(restored, clean), f"{stage}/psnr": score.psnr},
            prog_bar=stage == "val", on_epoch=True, batch_size=1, sync_dist=True,
        )  # fmt: skip
        self.log_ssim(f"{stage}/ssim", score.ssim)
        first = self.score(name, self.before, before, clean) if stage == "test" or len(self.panels) < PANELS else None
        if first is not None and len(self.panels) < PANELS:
            shown = [middle(x[0].detach().float().clamp(0, 1).cpu()) for x in (before, restored, clean)]
            self.panels.append(Panel(name, shown[0], shown[1], shown[2], first.psnr, score.psnr))
        return restored

    def measure_ensemble(self, degraded: Tensor, clean: Tensor, names: Any) -> None:
        score = self.score(str(names[0]), ENSEMBLE, ensemble(self.way, degraded), clean)
        self.log("test/psnr_self_ensemble", score.psnr, on_epoch=True, batch_size=1, sync_dist=True)
        self.log_ssim("test/ssim_self_ensemble", score.ssim)

    def log_ssim(self, name: str, value: float) -> None:
        """A picture without one counts nothing, on every process: one that logs less would wait for the others."""
        counts, bar = int(not math.isnan(value)), name.startswith("val")
        self.log(name, value if counts else 0.0, prog_bar=bar, on_epoch=True, batch_size=counts, sync_dist=True)

    def score(self, name: str, method: str, restored: Tensor, clean: Tensor) -> Score:
        """Measures a picture, and keeps the score for the table of a test."""
        similar = float(ssim(restored, clean, self.protocol)) if fits_ssim(clean, self.protocol) else math.nan
        score = Score(name, method, float(psnr(restored, clean, self.protocol)), similar)
        self.scores.append(score)
        self.compared = clean.shape[1]
        return score

    def baseline(self, degraded: Float[Tensor, "1 c h w"], clean: Float[Tensor, "1 c2 h2 w2"]) -> Float[Tensor, "1 c2 h2 w2"]:
        """What there is without a model: the input, enlarged by Keys' cubic where the result is larger (MATLAB's imresize)."""
        if degraded.shape[1] == 2 * clean.shape[1]:  # two views of a dual-pixel camera: the picture is their mean
            degraded = degraded.unflatten(1, (2, -1)).mean(dim=1)
        if degraded.shape[-2:] == clean.shape[-2:]:
            return degraded
        # antialias: a = -0.5 as MATLAB and Pillow, without it torch takes -0.75
        return F.interpolate(degraded, clean.shape[-2:], mode="bicubic", align_corners=False, antialias=True)

    @property
    def before(self) -> str:
        """What `baseline` is called."""
        return "input" if self.scale == 1 else "bicubic"

    # Optimisation

    def factor(self, step: int, total: int) -> float:
        options = self.hparams
        return warmup_cosine(
            step, total=total, warmup=options["warmup"], final=options["final_lr"], flat=options.get("flat", 0.0)
        )

    # What a checkpoint needs to work alone, and what a run tells

    def card(self) -> dict[str, Any]:
        """Plain values that rebuild the model and use it: see `vision.load_model`."""
        return {
            **super().card(),
            "channels": self.channels,
            "scale": self.scale,
            "degradation": self.degradation,
            "tile": self.hparams["tile"],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        card = checkpoint.get("vision", {})
        self.channels = self.channels or card.get("channels")
        self.degradation = self.degradation or card.get("degradation", "")

    def tables(self) -> dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """The scores of the last test by picture and method: title -> columns and rows, the mean last."""
        methods = sorted(dict.fromkeys(score.method for score in self.scores), key=["restored", ENSEMBLE].count)  # ours last
        names = list(dict.fromkeys(score.name for score in self.scores))
        cells = {(score.name, score.method): score for score in self.scores}
        rows = [(name, *(written(cells.get((name, method))) for method in methods)) for name in names]
        means = [mean([cells[name, method] for name in names if (name, method) in cells]) for method in methods]
        title = f"PSNR in dB / SSIM ({self.protocol.named(self.compared)})"
        return {title: (("picture", *methods), [*rows, ("mean", *map(written, means))])} if names else {}


def spec_of(loss: nn.Module) -> dict[str, Any]:
    """A loss as plain values, for `build`; torch's keep their arguments as attributes of the same name."""
    if isinstance(options := getattr(loss, "options", None), dict):
        return {"class_path": path_of(type(loss)), "init_args": {name: value_of(name, value) for name, value in options.items()}}
    if not type(loss).__module__.startswith("torch.nn"):
        return describe(loss)
    names = [name for name in inspect.signature(type(loss)).parameters if name not in ("size_average", "reduce")]
    return {"class_path": path_of(type(loss)), "init_args": {n: getattr(loss, n) for n in names if hasattr(loss, n)}}


def value_of(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [value_of(name, each) for each in value]
    return spec_of(value) if isinstance(value, nn.Module) else plain(name, value)


def middle(image: Float[Tensor, "c h w"], side: int = SIDE) -> Float[Tensor, "c h2 w2"]:
    h, w = image.shape[-2:]
    top, left = max(0, h - side) // 2, max(0, w - side) // 2
    return image[:, top : top + side, left : left + side].clone()


def written(score: Score | None) -> str:
    if score is None:
        return "–"
    return f"{score.psnr:.2f} / " + ("–" if math.isnan(score.ssim) else f"{score.ssim:.4f}")  # too small for its window


def mean(scores: list[Score]) -> Score:
    similar = [s.ssim for s in scores if not math.isnan(s.ssim)]
    return Score("mean", scores[0].method, fmean(s.psnr for s in scores), fmean(similar) if similar else math.nan)
