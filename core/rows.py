"""What is known of the tokens in a batch: places, padding, packing.

Padding is given as `real`: lengths, padding then on the right, or booleans b n, True = real token. Packing is given as
`segments`: numbers b n, several sequences in one row, one after the other, 0 = padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from core.coordinates import line, packed_line, padded_line
from core.mask import causal, padding, same_region

Real = Bool[Tensor, "b n"] | Int[Tensor, " b"]
Segments = Int[Tensor, "b n"]
MemoryReal = Bool[Tensor, "b m"] | Int[Tensor, " b"]
MemorySegments = Int[Tensor, "b m"]


class Rows(NamedTuple):
    """What is known of the tokens of a batch: their places, which are real, and which sequence each belongs to."""

    at: Float[Tensor, "*b n 1"]
    real: Bool[Tensor, "b n"] | None
    segments: Segments | None

    def keys(self) -> Bool[Tensor, "b 1 #n n"] | None:
        """Which key each query may attend, whatever the order."""
        if self.segments is not None:
            return same_region(self.segments) & (self.segments > 0)[:, None, None, :]
        return None if self.real is None else self.real[:, None, None, :]


def read_rows(tokens: Int[Tensor, "b n"], real: Real | None, segments: Segments | None) -> Rows:
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        given = f"of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"as {type(tokens).__name__}"
        raise ValueError(f"tokens {given} are no batch of rows; give a tensor with 2 axes, such as tokens[None]")
    if segments is not None:
        if real is not None:
            raise ValueError("real and segments both tell what is padding; pass one of them (segments: 0 = padding)")
        if segments.shape != tokens.shape:
            raise ValueError(
                f"segments of shape {tuple(segments.shape)} are not {tuple(tokens.shape)}, the tokens'; give each token a number"
            )
        return Rows(packed_line(segments), None, segments)
    if real is None:
        return Rows(line(tokens.shape[1], device=tokens.device), None, None)
    mask = as_real(real, *tokens.shape)
    at = line(tokens.shape[1], device=tokens.device) if real.dtype != torch.bool else padded_line(mask)
    return Rows(at, mask, None)


def as_real(real: Real, rows: int, n: int) -> Bool[Tensor, "b n"]:
    """Which tokens are real, from lengths or from what it is."""
    if not isinstance(real, Tensor):
        raise ValueError(f"real={real!r} is no tensor; use torch.tensor(...) of lengths, or of booleans, True = real token")
    if real.shape != ((rows, n) if real.dtype == torch.bool else (rows,)):
        raise ValueError(
            f"real of shape {tuple(real.shape)} and dtype {real.dtype} fits no {rows} rows of {n} tokens; "
            f"use {rows} whole lengths, or booleans {rows} {n}, True = real token"
        )
    return real if real.dtype == torch.bool else padding(real, n)[:, 0, 0]


def memory_mask(
    rows: int, m: int, real: MemoryReal | None, segments: MemorySegments | None, own: Segments | None
) -> Bool[Tensor, "b 1 #n m"] | None:
    """What the tokens may attend of the memory; packed sequences each their own part."""
    if (segments is None) != (own is None):
        raise ValueError("segments of the tokens and of the memory go together; pass segments and memory_segments, or neither")
    if segments is not None and own is not None:
        if real is not None:
            raise ValueError("memory_real and memory_segments both tell what is padding; pass one of them")
        return same_region(own, segments) & (segments > 0)[:, None, None, :]
    return None if real is None else as_real(real, rows, m)[:, None, None, :]


def only_earlier(n: int, total: int, keys: Bool[Tensor, "..."] | None, device: torch.device) -> dict[str, Any]:
    """`mask` and `causal` for attention of the last `n` of `total` tokens to those before and to themselves."""
    if keys is None and n in (1, total):
        # Not n > 1 itself: under torch.compile that is a symbol, which SDPA refuses
        return {"mask": None, "causal": False} if n == 1 else {"mask": None, "causal": True}
    allowed = causal(n, total, device=device)
    return {"mask": allowed if keys is None else allowed & keys, "causal": False}
