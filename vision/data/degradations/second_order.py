"""Blind degradation for pictures of unknown history: two rounds of blur, resizing, noise and JPEG."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from vision.data.degradations.base import Degradation
from vision.data.degradations.blur import blurred, gaussian_kernel, sinc_kernel
from vision.data.degradations.compression import JPEG, rounded
from vision.data.degradations.noise import GaussianNoise, PoissonNoise
from vision.data.degradations.resize import Mode, resized
from vision.errors import UserError

KERNELS = {  # (anisotropic, generalised or plateau) -> probability
    ("no", "gaussian"): 0.45,
    ("yes", "gaussian"): 0.25,
    ("no", "generalised"): 0.12,
    ("yes", "generalised"): 0.03,
    ("no", "plateau"): 0.12,
    ("yes", "plateau"): 0.03,
}
BETA = {"gaussian": (1.0, 1.0), "generalised": (0.5, 4.0), "plateau": (1.0, 2.0)}
SINC = 0.1  # probability that a blur is a sinc
FINAL_SINC = 0.8
SIDES = range(7, 22, 2)  # of kernels, pixels
GRAY = 0.4  # probability that noise is the same in all channels
GAUSSIAN = 0.5  # probability that noise is Gaussian
QUALITY = (30, 95)
MODES: tuple[Mode, ...] = ("area", "bilinear", "bicubic")


@dataclass(frozen=True)
class Round:
    """Published figures of one of the two rounds."""

    blur: float  # probability
    sigma: tuple[float, float]  # of the blur, pixels
    up: float  # probability of resizing up, and down; otherwise the size is kept
    down: float
    factor: tuple[float, float]  # of the resizing
    noise: tuple[float, float]  # sigma, scale 0..255
    poisson: tuple[float, float]  # strength


FIRST = Round(1.0, (0.2, 3.0), 0.2, 0.7, (0.15, 1.5), (1.0, 30.0), (0.05, 3.0))
SECOND = Round(0.8, (0.2, 1.5), 0.3, 0.4, (0.3, 1.2), (1.0, 25.0), (0.05, 2.5))


class SecondOrder(Degradation):
    """The second-order degradation of Real-ESRGAN with its published figures (Wang et al. 2021, arXiv 2107.10833).

    Two rounds of blur, resizing, noise and JPEG; the second resizes relative to the final size and ends in a sinc filter and
    the JPEG in either order. The result is what an 8-bit file would hold. The published training also sharpens its target;
    here the target stays as it is.

    Args:
        scale: by how much the result is smaller, 1 to 4.

    Raises:
        UserError: another scale.
    """

    def __init__(self, scale: int = 4) -> None:
        if scale not in (1, 2, 3, 4):
            raise UserError(f"scale={scale} is not possible here; use 1 (same size), 2, 3 or 4")
        self.scale = scale
        self.jpeg = JPEG(QUALITY)

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h2 w2 c"]:
        height, width = (side // self.scale for side in clean.shape[:2])
        image = self._round(clean, clean.shape[0], clean.shape[1], FIRST, rng)
        image = self._round(self.jpeg(image, rng), height, width, SECOND, rng)
        cutoff, size, rings = rng.uniform(math.pi / 3, math.pi), int(rng.choice(SIDES)), rng.random() < FINAL_SINC
        kernel, first = sinc_kernel(size, cutoff), rng.random() < 0.5
        image = image if first else self.jpeg(image, rng)
        image = resized(image, height, width, mode=random_mode(rng))
        image = blurred(image, kernel) if rings else image
        return rounded(self.jpeg(image, rng) if first else image)

    def _round(
        self, image: Float[np.ndarray, "h w c"], height: int, width: int, figures: Round, rng: np.random.Generator
    ) -> Float[np.ndarray, "h2 w2 c"]:
        """Blur, resizing to a random share of height x width, noise; cut to 0..1."""
        if rng.random() < figures.blur:
            image = blurred(image, random_kernel(figures.sigma, rng))
        choice, (low, high) = rng.random(), figures.factor
        factor = 1.0
        if choice < figures.up:
            factor = rng.uniform(1.0, high)
        elif choice < figures.up + figures.down:
            factor = rng.uniform(low, 1.0)
        image = resized(image, max(1, round(height * factor)), max(1, round(width * factor)), mode=random_mode(rng))
        gray = rng.random() < GRAY
        if rng.random() < GAUSSIAN:
            return GaussianNoise(figures.noise, clip=True, gray=gray)(image, rng)
        return PoissonNoise(figures.poisson, clip=True, gray=gray)(image, rng)

    def __str__(self) -> str:
        return f"two rounds of blur, resizing, noise and JPEG{f', x{self.scale} smaller' if self.scale > 1 else ''}"


def random_kernel(sigma: tuple[float, float], rng: np.random.Generator) -> Float[np.ndarray, "k k"]:
    """One of the six kinds of blur, or a sinc."""
    size = int(rng.choice(SIDES))
    if rng.random() < SINC:
        return sinc_kernel(size, rng.uniform(math.pi / 3 if size < 13 else math.pi / 5, math.pi))
    anisotropic, kind = list(KERNELS)[rng.choice(len(KERNELS), p=list(KERNELS.values()))]
    along, beta = rng.uniform(*sigma), rng.uniform(*BETA[kind])
    across, angle = (rng.uniform(*sigma), rng.uniform(-math.pi, math.pi)) if anisotropic == "yes" else (along, 0.0)
    return gaussian_kernel(size, along, across, angle, beta=beta, shape="plateau" if kind == "plateau" else "gaussian")


def random_mode(rng: np.random.Generator) -> Mode:
    """An interpolation."""
    return MODES[rng.integers(len(MODES))]
