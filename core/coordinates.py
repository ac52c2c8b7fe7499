"""Where tokens are: float32 coordinates in token units, the one thing that every kind of position is a function of.

Coordinates end in the axis dimension (1 for sequences, 2 for pictures: row, column). Before it stand

- `n axes`: places shared by the batch (`line(n)`, `grid(h, w).flatten(0, 1)`, any other places);
- `h w 2`: the whole grid from (0, 0), shared by the batch. It keeps its shape, so that tables know its size;
- `b n axes` or `b h w 2`: places of each row of the batch (paddings of their own, sampled points).

`1 n 2` is read as a grid where it is one. Compiled code cannot look: there it is a grid for tokens that place themselves,
and points where only keys have it (`b h w 2` is never in doubt).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def line(n: int, *, start: int = 0, device: torch.device | None = None) -> Float[Tensor, "n 1"]:
    """Coordinates of `n` tokens in a row, the first one at `start` (decoding with a cache starts at its length)."""
    return torch.arange(start, start + n, dtype=torch.float32, device=device)[:, None]


def padded_line(real: Bool[Tensor, "b n"]) -> Float[Tensor, "b n 1"]:
    """Coordinates of rows with padding: the real tokens of each row count from 0, padding on the left stands at 0."""
    return (real.long().cumsum(dim=1) - 1).clamp(min=0).float()[..., None]


def packed_line(segments: Int[Tensor, "b n"]) -> Float[Tensor, "b n 1"]:
    """Coordinates of rows with several sequences in each: every run of equal numbers counts from 0."""
    places = torch.arange(segments.shape[1], device=segments.device)
    starts = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=False)
    first = (places * starts).cummax(dim=1).values
    return (places - first).float()[..., None]


def grid(h: int, w: int, *, device: torch.device | None = None) -> Float[Tensor, "h w 2"]:
    """(row, column) of each cell of an `h` x `w` grid, from (0, 0) to (h - 1, w - 1)."""
    rows = torch.arange(h, dtype=torch.float32, device=device)
    columns = torch.arange(w, dtype=torch.float32, device=device)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)


class Places(NamedTuple):
    """Coordinates, understood.

    Attributes:
        at: `n axes` when shared by the batch, `b n axes` when each row has its own.
        size: `(h, w)` when they are a whole grid shared by the batch, else None.
        prefix: how many tokens without a place stand before the placed ones.
    """

    at: Float[Tensor, "*b n axes"]
    size: tuple[int, ...] | None
    prefix: int


def place(at: Tensor | None, *, axes: int, batch: int, tokens: int | None = None, prefix: int = 0) -> Places:
    """Finds out which form of coordinates `at` has, and how many of the tokens have a place.

    Args:
        at: coordinates, see the module.
        axes: axes that they must have.
        batch: rows of the tokens.
        tokens: how many tokens there are; None is not known: then they include the prefix.
        prefix: tokens without a place that stand before the placed ones, or are left out (decoding with a cache).

    Raises:
        ValueError: no coordinates, of a type that loses places, of other axes, or for other tokens.
    """
    at = check(at, axes)
    shape = tuple(at.shape[:-1])
    shared = is_shared(at, batch, tokens, prefix)
    places = math.prod(shape if shared else shape[1:])
    if not shared and not (len(shape) in (2, axes + 1) and shape[0] in (1, batch) and fits(places, tokens, prefix)):
        before = f", {prefix} of them a prefix," if prefix else ""
        raise ValueError(
            f"coordinates of shape {tuple(at.shape)} do not place {'the' if tokens is None else tokens} tokens{before} "
            f"in {batch} rows; give one coordinate a token: n {axes}, {'h w 2 ' if axes == 2 else ''}or b n {axes}"
        )
    flat = at.reshape(places, axes) if shared else at.reshape(shape[0], places, axes)
    size = shape if shared and len(shape) == axes > 1 else None
    missing = prefix if tokens is None else tokens - places
    return Places(flat, size, missing)


def is_shared(at: Float[Tensor, "*places axes"], batch: int, tokens: int | None, prefix: int) -> bool:
    """The places are those of every row of the batch."""
    shape, axes = tuple(at.shape[:-1]), at.shape[-1]
    if len(shape) not in (1, axes) or not fits(math.prod(shape), tokens, prefix):
        return False
    if len(shape) == 1 or axes != 2:
        return True
    if torch.compiler.is_compiling():  # h w 2 or b n 2: no look at the numbers, and no guard on h where it can be spared
        return tokens is not None or shape[0] != batch
    return shape[0] != batch or not fits(shape[1], tokens, prefix) or is_grid(at)


def check(at: Tensor | None, axes: int) -> Tensor:
    if at is None:
        raise ValueError("a position needs coordinates; pass at=line(n) or at=grid(h, w)")
    if at.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(f"coordinates in {at.dtype} lose places (257 becomes 256 in bfloat16); keep them in float32")
    if at.ndim < 2 or at.shape[-1] != axes:
        raise ValueError(
            f"coordinates of shape {tuple(at.shape)} do not end in {axes}, the axes of the site; "
            f"give Site(extent=(n,)) with line(n), or extent=(h, w) with grid(h, w)"
        )
    return at if at.is_floating_point() else at.float()


def fits(places: int, tokens: int | None, prefix: int) -> bool:
    return tokens is None or places in (tokens, tokens - prefix)


def is_grid(at: Float[Tensor, "h w 2"]) -> bool:
    return at.shape[-1] == 2 and torch.equal(at.detach().float(), grid(*at.shape[:2], device=at.device))


def by_axis(places: Places) -> list[Float[Tensor, "..."]]:
    """The coordinates of each axis; those of a grid have size 1 along the others, so that work on them is small."""
    if places.size is None:
        return list(places.at.unbind(-1))
    at = places.at.reshape(*places.size, len(places.size))
    return [
        at[..., axis][tuple(slice(None) if i == axis else slice(1) for i in range(at.ndim - 1))] for axis in range(at.ndim - 1)
    ]


def over_places(parts: list[Float[Tensor, "..."]], places: Places) -> Float[Tensor, "*b n c"]:
    """Channels computed of each axis (`by_axis`), side by side at every place."""
    full = torch.cat(torch.broadcast_tensors(*parts), dim=-1)
    return full.reshape(*places.at.shape[:-1], full.shape[-1])
