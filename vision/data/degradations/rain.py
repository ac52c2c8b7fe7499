"""Rain."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from vision.data.degradations.base import Degradation, Range, checked_range, described, drawn
from vision.data.degradations.blur import blurred, line_kernel


class Rain(Degradation):
    """Bright streaks added to the picture and cut to 0..1: ``O = B + S`` (Yang et al. 2017), the same in all channels.

    Each number may be a range, from which it is drawn uniformly, anew for each picture.

    Args:
        density: share of pixels at which a streak has its middle, 0..0.5.
        length: of a streak in pixels.
        angle: how far the streaks lean from the vertical, degrees, -90..90; positive to the right.
        brightness: of a streak, 0..1.

    Raises:
        UserError: a value out of range.
    """

    def __init__(
        self,
        density: Range = (0.001, 0.01),
        length: Range = (10.0, 40.0),
        angle: Range = (-30.0, 30.0),
        brightness: Range = (0.2, 0.7),
    ) -> None:
        self.density, self.length = checked_range("density", density, 0, 0.5), checked_range("length", length, 0, 200)
        self.angle, self.brightness = checked_range("angle", angle, -90, 90), checked_range("brightness", brightness, 0, 1)

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h w c"]:
        density, length, angle, brightness = (
            drawn(ends, rng) for ends in (self.density, self.length, self.angle, self.brightness)
        )
        h, w, _ = clean.shape
        drops = (rng.random((h, w, 1)) < density) * rng.uniform(0.5, 1.0, (h, w, 1))  # near and far ones
        kernel = line_kernel(length, 90 - angle)
        streaks = blurred(drops, kernel / kernel.max()).clip(0, 1)
        return (clean + np.float32(brightness) * streaks).clip(0, 1).astype(np.float32)

    def __str__(self) -> str:
        return f"rain, density {described(self.density)}, streaks of {described(self.length)} pixels"
