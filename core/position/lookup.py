"""Reading tables: by index, or between the entries by linear interpolation."""

from __future__ import annotations

import itertools

import torch
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
