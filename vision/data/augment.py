"""Augmentation of whole batches, in which each sample's random numbers depend on (seed, epoch, index) alone.

No generator is carried from batch to batch: the number of workers, the batch size and a restart in the middle of an
epoch therefore change nothing in how a picture is augmented.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from vision.data.preprocessing import to_float
from vision.errors import UserError

# ---------------------------------------------------------------------------------------------------- random numbers


def scramble(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele et al. 2014, fig. 15), on uint64 arrays of any shape."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed(*numbers: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """One well-mixed uint64 for each tuple of whole numbers; scalars are repeated along the sequences."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = scramble(key ^ np.atleast_1d(np.asarray(number, np.int64)).astype(np.uint64))
    return key


class Draws:
    """The random numbers of the samples of a batch: a function of (seed, epoch, index) and the name of the draw.

    A new kind of draw does not shift the others, so that adding one augmentation leaves the rest as it was.
    """

    def __init__(self, seed: int, epochs: Sequence[int], indexes: Sequence[int]) -> None:
        self.keys = hashed(seed, epochs, indexes)

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> Float[Tensor, " b"]:
        """Uniform in [low, high), one for each sample."""
        bits = scramble(self.keys ^ np.uint64(zlib.crc32(name.encode()))) >> np.uint64(40)  # 24 bits: exact in float32
        return torch.from_numpy(bits.astype(np.float32) / np.float32(2**24)) * (high - low) + low

    def below(self, name: str, bound: int | Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Whole numbers 0 .. bound - 1."""
        return (self.uniform(name) * bound).long()

    def chance(self, name: str, probability: float) -> Bool[Tensor, " b"]:
        return self.uniform(name) < probability

    def seed(self, name: str, sample: int = 0) -> int:
        """A seed for torch, for what has a generator of its own."""
        return int(scramble(self.keys[sample : sample + 1] ^ np.uint64(zlib.crc32(name.encode())))[0] >> np.uint64(1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, torch's CPU generator starts from ``seed``; after, it goes on as if nothing had been drawn."""
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(state)


# ------------------------------------------------------------------------------------------------ pictures one by one


@dataclass(frozen=True)
class Augmentation:
    """What happens to training pictures, each by itself; evaluation never uses it.

    Args:
        crop: "resized" = a random part of the picture at the wanted size (photographs; Szegedy et al. 2015);
            "pad" = shift by up to ``padding`` pixels, black beyond the edge (small pictures); "none".
        padding: the largest shift of "pad", in pixels.
        min_area: the smallest part of the picture's area that "resized" takes, 0..1.
        flip: the probability of a mirror image, 0..1; 0 for digits and letters.
        randaugment: how many RandAugment operations a picture gets (Cubuk et al. 2020); 0 = off, 2 is usual.
        magnitude: their strength, 0..30; 9 is usual.
        jitter: brightness, contrast and saturation change by factors within 1 +- jitter, 0..1; 0.4 is usual for photographs.
        erasing: the probability that a rectangle of 2 to 33 % of the area becomes the mean colour (Zhong et al. 2020), 0..1.
    """

    crop: Literal["resized", "pad", "none"] = "pad"
    padding: int = 4
    min_area: float = 0.08
    flip: float = 0.5
    randaugment: int = 0
    magnitude: int = 9
    jitter: float = 0.0
    erasing: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("resized", "pad", "none"):
            raise UserError(f"crop={self.crop!r} is unknown; use resized, pad or none")
        for name in ("flip", "jitter", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} is out of range; use 0 (off) to 1")
        if not 0 < self.min_area <= 1:
            raise UserError(f"min_area={self.min_area} is out of range; use more than 0 and at most 1, for example 0.08")
        if not 0 <= self.magnitude <= 30:
            raise UserError(f"magnitude={self.magnitude} is out of range; use 0 to 30, 9 is usual")
        for name in ("padding", "randaugment"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} is negative; use 0 (off) or more")

    def resized_crop(self, picture: Any, size: tuple[int, int], interpolation: InterpolationMode, seed: int) -> Any:
        """A random part of one picture (Pillow or tensor c h w) at ``size``: torchvision's RandomResizedCrop under a seed."""
        crop = v2.RandomResizedCrop(size, scale=(self.min_area, 1.0), interpolation=interpolation, antialias=True)
        with seeded(seed):
            return crop(picture)

    def __call__(self, images: Tensor, draws: Draws) -> Float[Tensor, "b c h w"]:
        """Shift, mirror and recolour a batch of the right size.

        Args:
            images: b c h w, uint8, or float in 0..1.

        Returns:
            float32 in 0..1.
        """
        if self.crop == "pad" and self.padding:
            images = shift(images, self.padding, draws)
        if self.flip:
            rows = draws.chance("flip", self.flip).nonzero()[:, 0]
            images = images.index_copy(0, rows, images.index_select(0, rows).flip(-1))
        for i in range(self.randaugment):
            images = randaugment(images, self.magnitude, draws, name=f"randaugment {i}")
        images = to_float(images)
        return jitter(images, self.jitter, draws) if self.jitter else images

    def erase(self, images: Float[Tensor, "b c h w"], draws: Draws) -> Float[Tensor, "b c h w"]:
        """Random Erasing on normalised pictures: 0 is the mean colour."""
        return images.masked_fill(erasing_boxes(images, self.erasing, draws), 0.0) if self.erasing else images


def shift(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Shift each picture by up to ``padding`` pixels either way, black beyond the edge. b c h w."""
    h, w = images.shape[-2:]
    windows = torch.nn.functional.pad(images, [padding] * 4).unfold(2, h, 1).unfold(3, w, 1)  # a view: b c y x h w
    y, x = (draws.below(f"shift {axis}", 2 * padding + 1) for axis in "yx")
    return windows[torch.arange(len(images)), :, y, x]


def jitter(images: Float[Tensor, "b c h w"], strength: float, draws: Draws) -> Float[Tensor, "b c h w"]:
    """Brightness, then contrast, then (in colour) saturation, by factors within 1 +- strength for each picture."""

    def factor(name: str) -> Tensor:
        return draws.uniform(f"jitter {name}", 1 - strength, 1 + strength)[:, None, None, None]

    images = (images * factor("brightness")).clamp_(0, 1)
    gray = F.rgb_to_grayscale(images) if images.shape[1] == 3 else images
    images = torch.lerp(gray.mean((1, 2, 3), keepdim=True), images, factor("contrast")).clamp_(0, 1)
    if images.shape[1] == 3:
        images = torch.lerp(F.rgb_to_grayscale(images), images, factor("saturation")).clamp_(0, 1)
    return images


def erasing_boxes(images: Float[Tensor, "b c h w"], probability: float, draws: Draws) -> Bool[Tensor, "b 1 h w"]:
    """True inside the rectangle that Random Erasing takes out; none for a picture that is not chosen."""
    height, width = images.shape[-2:]
    area = draws.uniform("erasing area", 0.02, 1 / 3) * height * width
    aspect = draws.uniform("erasing aspect", math.log(0.3), math.log(1 / 0.3)).exp()
    boxes = []
    for name, side, extent in (("y", (area * aspect).sqrt(), height), ("x", (area / aspect).sqrt(), width)):
        length = side.round().long().clamp(1, extent)
        start = draws.below(f"erasing {name}", extent - length + 1)
        place = torch.arange(extent)
        boxes.append((place >= start[:, None]) & (place < (start + length)[:, None]))
    chosen = draws.chance("erasing", probability)
    return (boxes[0] & chosen[:, None])[:, None, :, None] & boxes[1][:, None, None, :]


# ------------------------------------------------------------------------------------------------------- RandAugment

_BILINEAR = InterpolationMode.BILINEAR


def _shear(images: Tensor, x: float, y: float) -> Tensor:
    angles = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
    return F.affine(images, 0.0, [0, 0], 1.0, angles, interpolation=_BILINEAR, center=[0.0, 0.0])


def _translate(images: Tensor, x: float, y: float) -> Tensor:
    return F.affine(images, 0.0, [int(x), int(y)], 1.0, [0.0, 0.0], interpolation=_BILINEAR)


# Strength s = magnitude / 30, negative for half of the pictures where the flag says so; the ranges are torchvision's.
OPERATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], bool]] = {
    "Identity": (lambda images, s: images, False),
    "ShearX": (lambda images, s: _shear(images, 0.3 * s, 0.0), True),
    "ShearY": (lambda images, s: _shear(images, 0.0, 0.3 * s), True),
    "TranslateX": (lambda images, s: _translate(images, 150 / 331 * s * images.shape[-1], 0.0), True),
    "TranslateY": (lambda images, s: _translate(images, 0.0, 150 / 331 * s * images.shape[-2]), True),
    "Rotate": (lambda images, s: F.rotate(images, 30 * s, interpolation=_BILINEAR), True),
    "Brightness": (lambda images, s: F.adjust_brightness(images, 1 + 0.9 * s), True),
    "Color": (lambda images, s: F.adjust_saturation(images, 1 + 0.9 * s), True),
    "Contrast": (lambda images, s: F.adjust_contrast(images, 1 + 0.9 * s), True),
    "Sharpness": (lambda images, s: F.adjust_sharpness(images, 1 + 0.9 * s), True),
    "Posterize": (lambda images, s: F.posterize(images, 8 - round(4 * s)), False),
    "Solarize": (lambda images, s: F.solarize(images, (1 if images.is_floating_point() else 255) * (1 - s)), False),
    "AutoContrast": (lambda images, s: F.autocontrast(images), False),
    "Equalize": (lambda images, s: F.equalize(images), False),
}


def randaugment(images: Tensor, magnitude: int, draws: Draws, *, name: str = "randaugment") -> Tensor:
    """One random operation for each picture (b c h w, uint8 or float in 0..1), by torchvision's kernels.

    Pictures with the same operation and sign go through it together, which is several times faster than one by one.
    """
    operation = draws.below(f"{name} operation", len(OPERATIONS))
    negative = draws.chance(f"{name} sign", 0.5)
    images = images.clone()
    for i, (apply, signed) in enumerate(OPERATIONS.values()):
        for sign in (1, -1) if signed else (1,):
            chosen = operation == i
            if signed:
                chosen &= negative == (sign < 0)
            if (rows := chosen.nonzero()[:, 0]).numel():
                images[rows] = apply(images[rows], sign * magnitude / 30)
    return images


# --------------------------------------------------------------------------------------------------- across a batch


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) across a training batch.

    Labels become soft; of restoration's pairs, degraded and clean pictures are mixed alike, by Mixup only. torchvision's
    versions: one mixing share for the batch, and each picture's partner is the one before it, so that any batch size works, odd
    ones too; a batch of one picture stays as it is. With both on, each batch takes one of them.

    Args:
        mixup: alpha of the Beta distribution of Mixup's share; 0 = off, 0.2 to 0.8 are usual (Restormer's denoisers: 1.2).
        cutmix: alpha of CutMix; 0 = off, 1.0 is usual.
        probability: how many of the batches are mixed, 0..1 (Restormer's denoisers: 0.5).
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name)} is out of range; use 0 (off) or a positive alpha, for example 0.2")
        if not 0 <= self.probability <= 1:
            raise UserError(f"probability={self.probability} is out of range; use 0 to 1")

    @property
    def on(self) -> bool:
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0

    def __call__(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], classes: int, seed: int
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b k"]]:
        """Mixed pictures and soft labels (rows sum to 1), also where this batch is left alone."""
        (mixed,), soft = self._mix([images], torch.nn.functional.one_hot(labels, classes).float(), seed)
        return mixed, soft

    def pairs(
        self, degraded: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c2 h2 w2"], seed: int
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c2 h2 w2"]]:
        """Degraded and clean pictures, mixed alike; their sizes may differ."""
        (degraded, clean), _ = self._mix([degraded, clean], torch.ones(len(clean), 1), seed)
        return degraded, clean

    def _mix(self, batches: Sequence[Tensor], targets: Float[Tensor, "b k"], seed: int) -> tuple[list[Tensor], Tensor]:
        """Each batch of pictures and the targets, by one draw; or all as they are."""
        kinds = [
            kind(alpha=alpha, labels_getter=lambda inputs: inputs[-1])
            for kind, alpha in ((v2.MixUp, self.mixup), (v2.CutMix, self.cutmix))
            if alpha
        ]
        with seeded(seed):
            if len(targets) == 1 or not kinds or torch.rand(()) >= self.probability:
                return list(batches), targets
            mix = kinds[int(torch.randint(len(kinds), ()))]
            *mixed, targets = mix(*map(tv_tensors.Image, batches), targets)  # of plain tensors it mixes the first alone
        return [batch.as_subclass(Tensor) for batch in mixed], targets


NO_MIXING = Mixing()
