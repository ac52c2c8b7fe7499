"""Noise: Gaussian and Poisson."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from vision.data.degradations.base import Degradation, Range, checked_range, described, drawn


class GaussianNoise(Degradation):
    """Independent normal noise on each value, as the denoising benchmarks use it: float, not rounded and not clipped.

    Args:
        sigma: its deviation on the scale 0..255; two numbers = uniform in that range, anew for each picture ("blind").
        clip: cut the result to 0..1, as a picture file would.
        gray: the same noise in all channels.

    Raises:
        UserError: sigma out of range.
    """

    def __init__(self, sigma: Range = 25.0, clip: bool = False, gray: bool = False) -> None:
        self.range = checked_range("sigma", sigma, 0, 255)
        self.clip, self.gray = clip, gray
        self.sigma = self.range[0] if self.range[0] == self.range[1] and not clip and not gray else None

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h w c"]:
        sigma = drawn(self.range, rng) / 255
        h, w, c = clean.shape
        # drawn in double precision: the published figures' numbers, and the same on every machine
        noise = rng.standard_normal((h, w, 1 if self.gray else c))
        noisy = (clean + sigma * noise).astype(np.float32)
        return noisy.clip(0, 1) if self.clip else noisy

    def __str__(self) -> str:
        return f"Gaussian noise, sigma {described(self.range)}{', gray' * self.gray}{', clipped' * self.clip}"


class PoissonNoise(Degradation):
    """Shot noise: each value counts photons, of which white sends 255; the count's error is multiplied by ``strength``.

    Its variance is ``strength^2 * value / 255``, so that bright parts are the noisiest.

    Args:
        strength: 1 = the camera described above; two numbers = uniform in that range, anew for each picture.
        clip: cut the result to 0..1, as a picture file would.
        gray: the same noise in all channels: that of the mean of the channels.

    Raises:
        UserError: strength out of range.
    """

    WHITE = 255  # photons

    def __init__(self, strength: Range = 1.0, clip: bool = False, gray: bool = False) -> None:
        self.range = checked_range("strength", strength, 0, 20)
        self.clip, self.gray = clip, gray

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h w c"]:
        strength = drawn(self.range, rng)
        light = np.maximum(clean.mean(-1, keepdims=True) if self.gray else clean, 0)
        noisy = (clean + strength * (rng.poisson(light * self.WHITE) / self.WHITE - light)).astype(np.float32)
        return noisy.clip(0, 1) if self.clip else noisy

    def __str__(self) -> str:
        return f"Poisson noise, strength {described(self.range)}{', gray' * self.gray}{', clipped' * self.clip}"
