"""Reading tables: by index, or between the entries by linear interpolation."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def look_up(table: Float[Tensor, "heads cells"], index: Int[Tensor, "*any"]) -> Float[Tensor, "heads *any"]:
    """Entries of each head: choosing columns of a small table is 5-10x faster than rows, then a transpose."""
    return table.contiguous().index_select(1, index.flatten()).view(table.shape[0], *index.shape)


def read(table: Float[Tensor, "d cells"], size: tuple[int, ...], at: Float[Tensor, "*p axes"]) -> Float[Tensor, "d *p"]:
    """Entries at real-valued places of a table of `size`, multilinear between its cells.

    Exact at whole places and differentiable in `at`. Outside the table entries fade to zero within one cell
    (`grid_sample` with zero padding and aligned corners).
    """
    if len(size) == 2 and at.ndim == 4:
        return read_map(table.unflatten(1, size), at)
    low = at.detach().floor()
    share = at - low
    table, total = table.contiguous(), table.new_zeros(())
    for corner in itertools.product((0, 1), repeat=len(size)):
        weight, index = torch.ones_like(share[..., 0]), torch.zeros_like(share[..., 0], dtype=torch.long)
        for axis, (step, cells) in enumerate(zip(corner, size, strict=True)):
            cell = low[..., axis].long() + step
            weight = weight * (share[..., axis] if step else 1 - share[..., axis]) * ((cell >= 0) & (cell < cells))
            index = index * cells + cell.clamp(0, cells - 1)
        total = total + table.index_select(1, index.flatten()).view(table.shape[0], *index.shape) * weight
    return total


def read_map(table: Float[Tensor, "d h w"], at: Float[Tensor, "b n m 2"]) -> Float[Tensor, "d b n m"]:
    """`read` by torch's `grid_sample`: a fifth of the time of the formula."""
    h, w = table.shape[1:]
    # `grid_sample` calls the first cell -1 and the last one 1. Over a power of two of steps that is exact at whole places.
    down, right = (1 << max(size - 2, 0).bit_length() for size in (h, w))
    maps = F.pad(table.to(at.dtype), (0, right + 1 - w, 0, down + 1 - h)).expand(len(at), -1, -1, -1)
    points = torch.stack([at[..., 1] * (2 / right) - 1, at[..., 0] * (2 / down) - 1], dim=-1)
    return F.grid_sample(maps, points, mode="bilinear", padding_mode="zeros", align_corners=True).movedim(1, 0)


def refuse_outside(places: Float[Tensor, "*any"], lowest: int, highest: int, rule: str) -> None:
    """Places (or distances) outside a table are an error, not an entry.

    Raises:
        ValueError: a place is not in `lowest .. highest`; RuntimeError in compiled code, which cannot look.
    """
    inside = ((places >= lowest) & (places <= highest)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(inside, f"places leave {lowest} to {highest}: {rule}")
    elif not inside:
        raise ValueError(f"places {places.min():g} to {places.max():g} leave {lowest} to {highest}: {rule}")
