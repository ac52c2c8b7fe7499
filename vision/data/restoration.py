"""Lightning data modules for restoration: what all share, and the embedded photographs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from torch.utils.data import DataLoader

from vision.data.augment import NO_MIXING, Mixing
from vision.data.degradations import Degradation, GaussianNoise
from vision.data.loading import EvaluationSampler, LoadedData, Loader, TrainingLoader
from vision.data.patches import Files, Pairs, Patches, Wholes
from vision.data.schedule import Part, Stage, StageSampler, check_patch, check_stages, local_batch, plan
from vision.errors import UserError

log = logging.getLogger(__name__)


class RestorationData(LoadedData, ABC):
    """What the data modules for restoration share: patches, their schedule, loaders and the description of the data.

    Training batches are ``(degraded, clean)``, float32 b c h w in 0..1; noise may leave that range. Validation and test
    batches are one whole picture each, ``(degraded, clean, [name])``; when predicting ``(degraded, [name])``. After
    ``setup``: ``channels``, ``scale`` (by how much the degraded picture is smaller), ``degradation`` (a text for people),
    ``sigma`` (of fixed Gaussian noise on the scale 0..255, else None), and the datasets ``train``, ``val`` and ``test``.

    What a training batch holds depends on its number and the seed alone: workers and processes change nothing, and a run
    that was interrupted anywhere goes on exactly as it would have, also across a change of stage.

    Args:
        patch: side of the clean training patch in pixels, 128 if not told (of the embedded photographs 64); smaller
            pictures are continued by mirroring.
        batch_size: patches in a batch of one process, 8 if not told (of the embedded photographs 16).
        stages: a schedule of growing patches and shrinking batches, in place of ``patch`` and ``batch_size``.
        patches_per_picture: how many patches of each picture make a pass through the data.
        channels: 3 (RGB) or 1 (gray).
        multiple: what the side of the degraded patch must be a multiple of; 8 suits Restormer, which halves three times.
        augment: mirror and turn training patches by multiples of 90 degrees.
        mixing: Mixup across a training batch, degraded and clean patches alike; Restormer's denoisers take
            ``Mixing(mixup=1.2, probability=0.5)``.
        num_workers: processes that prepare batches; 0 = none, -1 = one a processor, up to 8.
        seed: of the order, the patches and the training degradations; those of evaluation are always the same.
        scale: by how much the degraded picture is smaller.

    Raises:
        UserError: a value is out of range, or the schedule does not hold.
    """

    train: Patches
    val: Wholes
    test: Wholes
    predict: Wholes
    degradation: str
    sigma: float | None
    usual: tuple[int, int] = (128, 8)  # patch and batch size where neither they nor stages are told

    def __init__(
        self,
        patch: int | None,
        batch_size: int | None,
        stages: list[Stage] | None,
        patches_per_picture: int,
        channels: int,
        multiple: int,
        augment: bool,
        mixing: Mixing,
        num_workers: int,
        seed: int,
        scale: int,
    ) -> None:
        for name, value in {"patch": patch, "batch_size": batch_size}.items():
            if stages is not None and value is not None:
                raise UserError(f"{name}={value} says otherwise than stages; leave one out (--data.stages null)")
        patch = self.usual[0] if patch is None else patch
        super().__init__(self.usual[1] if batch_size is None else batch_size, num_workers, seed)
        if channels not in (1, 3):
            raise UserError(f"channels={channels} is not possible here; use 3 (RGB) or 1 (gray)")
        if scale not in (1, 2, 3, 4):
            raise UserError(f"scale={scale} is not possible here; use 1 (same size), 2, 3 or 4")
        for name, value in {"patches_per_picture": patches_per_picture, "multiple": multiple}.items():
            if value < 1:
                raise UserError(f"{name}={value} is too small; use 1 or more")
        if mixing.cutmix:
            raise UserError(f"mixing.cutmix={mixing.cutmix:g} is for classes; use mixing.mixup, for example 1.2, or 0 (off)")
        if stages is None:
            check_patch("patch", patch, scale, multiple)
        else:
            check_stages(stages, scale, multiple)
        self.patch, self.stages, self.patches_per_picture, self.channels = patch, stages, patches_per_picture, channels
        self.augment, self.mixing, self.scale = augment, mixing, scale
        self._ready: set[str] = set()

    def setup(self, stage: str) -> None:
        """Build the datasets, once; wrong pictures are told before the first step."""
        part = "predict" if stage == "predict" else "pairs"
        if part not in self._ready:
            self._setup_prediction() if part == "predict" else self._setup_pairs()
            self._ready.add(part)
        if stage == "fit":
            if not hasattr(self, "train"):
                raise UserError("there are validation or test pictures but none to train on; put them into a folder train beside")
            self._parts()  # a schedule that does not fit the trainer

    def _use(self, files: Mapping[str, tuple[Files, Files | Degradation]]) -> None:
        """Set train, val and test from the clean and degraded pictures of each split; val and test may stand for each other."""
        if "train" in files:
            self.train = self._patches(*files["train"])
        self.val, self.test = (
            Wholes(*files[first if first in files else second], self.scale)
            for first, second in (("val", "test"), ("test", "val"))
        )
        if "test" not in files:
            self.test = self.val
            log.warning("no test pictures: testing on the validation pictures, which flatters a model chosen by them")

    @abstractmethod
    def _setup_pairs(self) -> None:
        """Set degradation, sigma, train, val and test."""

    @abstractmethod
    def _setup_prediction(self) -> None:
        """Set predict."""

    def _patches(self, clean: Files, degraded: Files | Degradation) -> Patches:
        patch = self.stages[0].patch if self.stages else self.patch
        return Patches(
            clean, degraded, self.scale, each=self.patches_per_picture, seed=self.seed, patch=patch, augment=self.augment,
            mixing=self.mixing,
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------------------- loaders

    def train_dataloader(self) -> TrainingLoader:
        rank, world = self._process()
        sampler = StageSampler(
            self.train, self._parts(), self._batches(), taken=self._taken(), seed=self.seed, rank=rank, world=world
        )
        return self._resumed(TrainingLoader(self.train, batch_size=None, sampler=sampler, **self._loading()))

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.val)

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.test)

    def predict_dataloader(self) -> DataLoader:
        return Loader(self.predict, batch_size=1, **self._loading())  # Lightning deals it out to the processes

    def _evaluation_loader(self, pictures: Pairs) -> DataLoader:
        rank, world = self._process()
        sampler = EvaluationSampler(pictures, 1, rank=rank, world=world) if world > 1 else None
        return Loader(pictures, batch_size=1, sampler=sampler, **self._loading())

    # -------------------------------------------------------------------------------------------------------- schedule

    def _accumulation(self) -> int:
        return max(1, self.trainer.accumulate_grad_batches) if self.trainer is not None else 1

    def _batches(self) -> int:
        """Batches of one process in an epoch: one pass at the first stage's batch, in whole optimizer steps."""
        _, world = self._process()
        accumulation = self._accumulation()
        first = local_batch(self.stages[0], world, accumulation) if self.stages else self.batch_size
        return max(1, len(self.train) // (first * world * accumulation)) * accumulation

    def _taken(self) -> int:
        """Of these, how many the trainer takes: the stages go by the batches that are trained on."""
        batches, limit = self._batches(), self.trainer.limit_train_batches if self.trainer is not None else None
        if isinstance(limit, float):
            return max(1, int(batches * limit))
        return min(batches, limit) if limit else batches

    def _parts(self) -> list[Part]:
        """The stages as this process runs them.

        Raises:
            UserError: shares without an end of the training, or steps that end before the training does.
        """
        if self.stages is None:
            return [Part(self.patch, self.batch_size, 1)]
        _, world = self._process()
        accumulation, steps = self._accumulation(), self._steps()
        if not steps and self.stages[0].share and len(self.stages) > 1:
            raise UserError(
                "the shares of the stages need to know the length of the training; set trainer.max_steps or max_epochs"
            )
        parts = plan(self.stages, devices=world, accumulation=accumulation, steps=steps)
        if self.stages[0].steps and self.trainer is not None and not getattr(self.trainer, "fast_dev_run", False):
            self._compare(sum(part.batches for part in parts) // accumulation, steps)
        for number, (stage, part) in enumerate(zip(self.stages, parts, strict=True), 1):
            if (seen := part.batch * world * accumulation) != stage.batch:
                log.warning(
                    "stage %d: batch=%d does not divide by %d device(s) x %d accumulated; a step takes %d patches",
                    number, stage.batch, world, accumulation, seen,
                )  # fmt: skip
        return parts

    def _steps(self) -> int:
        """Optimizer steps of the training, one pass if there is no trainer; 0 if it has no end that can be told."""
        if self.trainer is None:
            return self._batches()
        if self.trainer.max_steps > 0:
            return self.trainer.max_steps
        epochs = self.trainer.max_epochs or 0
        return max(0, epochs) * -(-self._taken() // self._accumulation())

    @staticmethod
    def _compare(planned: int, steps: int) -> None:
        """What the stages take, against what the trainer does."""
        if steps > planned or not steps:
            raise UserError(
                f"the stages end after {planned} steps, the training after {steps or 'no'} steps; set trainer.max_steps={planned}"
            )
        if steps < planned:
            log.warning("the training ends after %d of the %d steps of its stages", steps, planned)


class EmbeddedPhotos(RestorationData):
    """The photographs that come with the package, 9 to train and 4 to test, degraded as asked for.

    Needs no network and no workers. Validation is on the test photographs: too few to split, so take the last weights of a
    training rather than the best. Under Gaussian noise of sigma 25 the noisy test photographs, cut to 0..1, have a mean
    PSNR of 20.58 dB. Predictions are of the degraded test photographs. Sources and licences: embedded/LICENSES.md.

    Args:
        degradation: what the restorer shall undo; its scale is the data's.
        patch, batch_size, stages, patches_per_picture, channels, multiple, augment, mixing, num_workers, seed: see
            :class:`RestorationData`.
    """

    usual = (64, 16)

    def __init__(
        self,
        degradation: Degradation | None = None,
        patch: int | None = None,
        batch_size: int | None = None,
        stages: list[Stage] | None = None,
        patches_per_picture: int = 100,
        channels: int = 3,
        multiple: int = 8,
        augment: bool = True,
        mixing: Mixing = NO_MIXING,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        self.degrade = degradation if degradation is not None else GaussianNoise(25.0)
        super().__init__(
            patch, batch_size, stages, patches_per_picture, channels, multiple, augment, mixing, num_workers, seed,
            self.degrade.scale,
        )  # fmt: skip

    def _setup_pairs(self) -> None:
        self.degradation, self.sigma = str(self.degrade), self.degrade.sigma
        self.train = self._patches(self._photos("train"), self.degrade)
        self.val = self.test = Wholes(self._photos("test"), self.degrade, self.scale)

    def _setup_prediction(self) -> None:
        self.degradation, self.sigma = str(self.degrade), self.degrade.sigma
        self.predict = Wholes(self._photos("test"), self.degrade, self.scale, predict=True)

    def _photos(self, part: str) -> Files:
        return embedded_photos(part, self.channels)


@cache
def embedded_photos(part: str, channels: int) -> Files:
    """The decoded photographs of "train" or "test", once a process: 10 MB in all."""
    root = Path(__file__).parent / "embedded" / "photos" / part
    files = Files(sorted(root.glob("*.png")), root, channels)
    files.hold()
    return files
