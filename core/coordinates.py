"""Where tokens are: float32 coordinates in token units, the one thing that every kind of position is a function of.

A set of coordinates `at` ends in the axis dimension (1 for sequences, 2 for pictures: row, column). Before it stand
either the *places* shared by the whole batch (`n 1`, `h w 2`: a grid keeps its shape, so that tables know it) or
`batch places` (`b n 1`: rows with paddings of their own; `b n 2`: sampled points).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def line(n: int, *, start: int = 0, device: torch.device | None = None) -> Float[Tensor, "n 1"]:
    """Coordinates of `n` tokens in a row, the first one at `start` (decoding with a cache starts at its length)."""
    return torch.arange(start, start + n, dtype=torch.float32, device=device)[:, None]


def grid(h: int, w: int, *, device: torch.device | None = None) -> Float[Tensor, "h w 2"]:
    """(row, column) of each cell of an `h` x `w` grid, from (0, 0) to (h - 1, w - 1)."""
    rows = torch.arange(h, dtype=torch.float32, device=device)
    columns = torch.arange(w, dtype=torch.float32, device=device)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)


def flat(at: Float[Tensor, "*places axes"], tokens: int) -> Float[Tensor, "*b n axes"]:
    """The places in one row, `n axes` when shared by the batch and `b n axes` when each row has its own.

    Args:
        at: coordinates, see the module.
        tokens: how many tokens they are for, those without a place (class token, registers) not counted.

    Raises:
        ValueError: `at` has another number of places than there are tokens.
    """
    if math.prod(at.shape[:-1]) == tokens:
        return at.reshape(tokens, at.shape[-1])
    if at.ndim == 3 and at.shape[1] == tokens:
        return at
    raise ValueError(f"coordinates of shape {tuple(at.shape)} do not place {tokens} tokens; give one coordinate a token")


def shared_grid(at: Float[Tensor, "*places axes"], tokens: int) -> tuple[int, ...] | None:
    """The grid's shape (`(n,)` or `(h, w)`) when `at` is a whole grid shared by the batch, else None."""
    places = tuple(at.shape[:-1])
    return places if len(places) == at.shape[-1] and math.prod(places) == tokens else None
