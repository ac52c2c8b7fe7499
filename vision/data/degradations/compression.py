"""Lossy compression."""

from __future__ import annotations

import io

import numpy as np
from jaxtyping import Float
from PIL import Image

from vision.data.degradations.base import Degradation, Range, checked_range, described
from vision.errors import UserError


class JPEG(Degradation):
    """Saved as JPEG and read again: 8 bits, colour at half resolution (4:2:0), values cut to 0..1 first.

    Args:
        quality: 1..100 as libjpeg counts it; two numbers = a whole number in that range, anew for each picture.

    Raises:
        UserError: quality out of range or not whole.
    """

    def __init__(self, quality: Range = (30, 95)) -> None:
        self.range = checked_range("quality", quality, 1, 100)
        if any(end != int(end) for end in self.range):
            raise UserError(f"quality={quality} is not whole; use whole numbers from 1 to 100")

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h w c"]:
        low, high = (int(end) for end in self.range)
        quality = low if low == high else int(rng.integers(low, high + 1))
        image = to_bytes(clean)
        file = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "JPEG", quality=quality)
        return (np.asarray(Image.open(file)).reshape(image.shape) / np.float32(255)).astype(np.float32)

    def __str__(self) -> str:
        return f"JPEG, quality {described(self.range)}"


def to_bytes(image: Float[np.ndarray, "h w c"]) -> np.ndarray:
    """Cut to 0..1 and rounded to 8 bits."""
    return (image.clip(0, 1) * 255).round().astype(np.uint8)


def rounded(image: Float[np.ndarray, "h w c"]) -> Float[np.ndarray, "h w c"]:
    """What an 8-bit file would hold of it, float32 in 0..1."""
    return to_bytes(image) / np.float32(255)
