"""A map tile by tile: what comes and goes stays in the processor's cache, and never exists of the whole map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from core.plain import asking_is_free

Area = tuple[slice, slice]  # rows and columns
WHOLE: Area = (slice(None), slice(None))
ROWS, COLUMNS = 32, 64  # of a tile, about: among the fastest of seven sizes for 48 and 96 channels
LARGEST = (3 * ROWS // 2 + 2) * (3 * COLUMNS // 2 + 2)  # pixels of a tile and those next to it, at most

Part = Callable[[Tensor, Area], tuple[Tensor, ...]]
"""Takes a tile with the pixels next to it, and where the tile is in that; gives the tile's part of the result, and sums over its
pixels, which add up over the tiles."""


def pays(x: Float[Tensor, "b h w d"]) -> bool:
    """Whether tiles are faster than the whole map: without gradient on a CPU, where fresh memory costs more than the pixels
    between tiles, which are computed twice."""
    return not torch.is_grad_enabled() and x.shape[1] * x.shape[2] > 2 * ROWS * COLUMNS and asking_is_free(x)


def by_tiles(part: Part, x: Float[Tensor, "b h w d"]) -> tuple[Tensor, ...]:
    """What `part` gives for the whole map: its tiles put together, its sums added up."""
    whole: Tensor | None = None
    total: list[Tensor] = []
    for own, seen, inner in tiles(x.shape[1], x.shape[2]):
        tile, *sums = part(x[:, *seen], inner)
        if whole is None:
            whole, total = tile.new_empty(*x.shape[:-1], tile.shape[-1]), sums
        else:
            total = [together.add_(alone) for together, alone in zip(total, sums, strict=True)]
        whole[:, *own] = tile
    assert whole is not None  # a map has pixels
    return whole, *total


def tiles(height: int, width: int) -> Iterator[tuple[Area, Area, Area]]:
    """Tiles of a map: their own pixels, these and the ones next to them, and where the own ones are among those."""
    rows, columns = (
        bands(length, -(-length // max(1, round(length / size)))) for length, size in ((height, ROWS), (width, COLUMNS))
    )
    for pair in product(rows, columns):
        own, seen, inner = zip(*pair, strict=True)
        yield own, seen, inner


def bands(length: int, size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Bands of a map's rows or columns: their own; these and the ones next to them, where there are any; the own among those.

    A 3x3 convolution of the second, cut to the third, is that of the whole map.
    """
    for first in range(0, length, size):
        last = min(first + size, length)
        above = min(1, first)
        yield slice(first, last), slice(first - above, min(last + 1, length)), slice(above, above + last - first)
