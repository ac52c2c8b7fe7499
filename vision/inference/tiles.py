"""A picture in overlapping tiles, blended without a seam."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def by_tiles(
    run: Callable[[Tensor], Tensor],
    x: Float[Tensor, "b c h w"],
    *,
    tile: int,
    overlap: int,
    multiple: int = 1,
    scale: int = 1,
) -> Float[Tensor, "b c2 h2 w2"]:
    """Runs each tile alone and fades each into the next over the inner half of their overlap.

    The outer quarters of an overlap, where the edge of a tile shows, are left to the other tile: a model that looks no
    further than a quarter of the overlap gives exactly what it gives on the whole picture.

    Args:
        run: from `b c h w` to `b c2 h·scale w·scale`.
        x: both sides are multiples of `multiple`.
        tile, overlap: pixels, multiples of `multiple`; the overlap is less than the tile.
    """
    h, w = x.shape[-2:]
    result, bottom = x.new_empty(0), 0
    for row in starts(h, tile, overlap, multiple):
        strip, right = x.new_empty(0), 0
        for column in starts(w, tile, overlap, multiple):
            part = run(x[..., row : row + tile, column : column + tile])
            strip = strip if right else part.new_empty(*part.shape[:-1], w * scale)
            right = fade_in(strip.mT, part.mT, column * scale, right)
            del part  # the next one needs its memory
        result = result if bottom else strip.new_empty(*strip.shape[:-2], h * scale, w * scale)
        bottom = fade_in(result, strip, row * scale, bottom)
    return result


def starts(side: int, tile: int, overlap: int, multiple: int) -> list[int]:
    """Where tiles begin: evenly, in steps of `multiple`, overlapping by `overlap` at least; the last ends with the side."""
    way = max(0, side - tile) // multiple
    steps = math.ceil(way / ((tile - overlap) // multiple))
    return [i * way // steps * multiple for i in range(steps + 1)] if steps else [0]


def fade_in(canvas: Float[Tensor, "*b h w"], part: Float[Tensor, "*b n w"], at: int, end: int) -> int:
    """Writes `part` into the canvas from row `at`; rows before `end` are there already, and fade. Returns the new end.

    Where both say the same, the same comes out to the last bit.
    """
    shared = end - at
    canvas[..., at:end, :] = torch.lerp(canvas[..., at:end, :], part[..., :shared, :], ramp(shared).to(part)[:, None])
    canvas[..., end : at + part.shape[-2], :] = part[..., shared:, :]
    return at + part.shape[-2]


def ramp(length: int) -> Float[Tensor, " length"]:
    """From 0 to 1 over the inner half, without reaching either, and flat on both sides of it."""
    inner = length - 2 * (length // 4)
    return ((torch.arange(length) - length // 4 + 0.5) / max(1, inner)).clamp(0, 1)
