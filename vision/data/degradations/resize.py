"""Down-sampling, for super-resolution."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float

from vision.data.degradations.base import Degradation
from vision.data.degradations.compression import rounded
from vision.errors import UserError

Mode = Literal["area", "bilinear", "bicubic"]


class Downsample(Degradation):
    """Smaller by 2, 3 or 4 as MATLAB's imresize does it, which made the low-resolution pictures of the benchmarks.

    Bicubic (a = -0.5), widened by the scale against aliasing; edges mirrored.

    Args:
        scale: 2, 3 or 4.
        round: to what an 8-bit file would hold, cut to 0..1, as the benchmarks' files do.

    Raises:
        UserError: another scale.
    """

    def __init__(self, scale: int = 4, round: bool = True) -> None:
        if scale not in (2, 3, 4):
            raise UserError(f"scale={scale} is not possible here; use 2, 3 or 4")
        self.scale, self.round = scale, round

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h2 w2 c"]:
        h, w, _ = clean.shape
        if h % self.scale or w % self.scale:
            raise UserError(f"{w} x {h} pixels do not divide by scale={self.scale}; cut the picture to a multiple")
        # torch's kernel is the same inside; at the edges it drops what lies beyond, so it gets MATLAB's mirror to see
        small = resized(np.pad(clean, [(edge := 2 * self.scale, edge), (edge, edge), (0, 0)], mode="symmetric"),
                        h // self.scale + 4, w // self.scale + 4, antialias=True)[2:-2, 2:-2]  # fmt: skip
        return rounded(small) if self.round else small

    def __str__(self) -> str:
        return f"down-sampling x{self.scale}"


def resized(
    image: Float[np.ndarray, "h w c"],
    height: int,
    width: int,
    *,
    mode: Mode = "bicubic",
    antialias: bool = False,
) -> Float[np.ndarray, "h2 w2 c"]:
    """The picture in another size, float32."""
    values = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)[None], dtype=np.float32))
    options = {} if mode == "area" else {"antialias": antialias, "align_corners": False}
    return torch.nn.functional.interpolate(values, (height, width), mode=mode, **options)[0].permute(1, 2, 0).numpy()
