"""Kinds of position, each a function of coordinates (`core.coordinates`).

A host (a model, an encoder, a window) says where a kind is used by a `Site` and calls it at one of four places: `embed`
(added to the tokens), `rotate` (turns queries and keys), `bias` (added to the scores), `value` (added to the output).
`prefix` tokens (class token, registers) have no place: they come before the placed ones, are never rotated, and their
rows and columns of a bias are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core.coordinates import flat, shared_grid

HOOKS = ("embed", "rotate", "bias", "value")


@dataclass(frozen=True)
class Site:
    """Where a position is used.

    Attributes:
        dim: width of the tokens.
        heads: heads of the attention; the head's width is dim / heads.
        extent: the window, the grid `(h, w)` or the longest sequence `(n,)`; empty where nothing is known.
        causal: no query sees a later key.
        prefix: tokens without a place, before the placed ones.
    """

    dim: int
    heads: int
    extent: tuple[int, ...] = ()
    causal: bool = False
    prefix: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Position(nn.Module):
    """No position at all, and the base of every kind: each hook defaults to "nothing"."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that this kind uses; a host refuses a kind whose hooks it never calls."""
        return frozenset(h for h in HOOKS if getattr(type(self), h) is not getattr(Position, h))

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        """Tokens with their position added."""
        return x

    def rotate(self, x: Float[Tensor, "b h n e"], at: Tensor) -> Float[Tensor, "b h n e"]:
        """Queries or keys turned by their place."""
        return x

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"] | None:
        """What is added to the scores, after their scaling; None is nothing."""
        return None

    def value(self, weights: Float[Tensor, "b h n m"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "b h n e"]:
        """What is added to the output, given the attention weights."""
        raise NotImplementedError("called only where `value` is among the hooks")


def require_hooks(position: Position, host: str, calls: Iterable[str]) -> None:
    """Refuses a kind of position that a host would ignore, wholly or in part.

    Raises:
        ValueError: the kind uses a hook that the host never calls.
    """
    idle = sorted(position.hooks - set(calls))
    if idle:
        raise ValueError(
            f"{type(position).__name__} works through {', '.join(idle)}, which {host} never calls; "
            f"use a kind that works through {' or '.join(calls)}"
        )


class Learned(Position):
    """A table of embeddings, one a place, added to the tokens (Vaswani et al. 2017, ViT: Dosovitskiy et al. 2021).

    Over grids of another size than `site.extent` the table is resized (bicubic, antialiased, corners not aligned: timm's
    rule). Sequences past its end are refused.

    Args:
        site: `extent` is the grid or the longest sequence.
        prefix: the table has rows of its own for the prefix tokens; False leaves them as they are (DeiT III).
        std: of the initial table.
    """

    def __init__(self, site: Site, *, prefix: bool = True, std: float = 0.02) -> None:
        super().__init__(site)
        if not site.extent:
            raise ValueError("Learned needs the extent of its table; give Site(extent=(n,)) or (h, w)")
        self.prefix = site.prefix if prefix else 0
        self.table = nn.Parameter(torch.empty(self.prefix + math.prod(site.extent), site.dim))
        nn.init.trunc_normal_(self.table, std=std)
        self._resized: dict[tuple, Tensor] = {}

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        places = x.shape[1] - self.site.prefix
        rows = self.sequence(flat(at, places)) if len(self.site.extent) == 1 else self.grid(at, places)
        if self.prefix:
            own = self.table[: self.prefix]
            rows = torch.cat([own.expand(*rows.shape[:-2], -1, -1), rows], dim=-2)
        elif self.site.prefix:
            rows = F.pad(rows, (0, 0, self.site.prefix, 0))
        return x + rows.to(x.dtype)

    def sequence(self, at: Float[Tensor, "*b n 1"]) -> Float[Tensor, "*b n d"]:
        last = self.site.extent[0]
        if not torch.compiler.is_compiling() and at.numel() and not 0 <= float(at.min()) <= float(at.max()) < last:
            raise ValueError(
                f"places {at.min():g} to {at.max():g} leave a learned table of {last}; "
                f"use extent=({int(at.max()) + 1},), or Sinusoidal or Rotary, which have no end"
            )
        return self.table[self.prefix :][at[..., 0].long()]

    def grid(self, at: Tensor, places: int) -> Float[Tensor, "n d"]:
        size = shared_grid(at, places)
        if size is None:
            raise ValueError(f"a learned table over a grid needs coordinates h w 2, not {tuple(at.shape)}; use grid(h, w)")
        if size == self.site.extent:
            return self.table[self.prefix :]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_inference(self.table):
            return self.resize(size)
        key = (size, self.table._version, self.table.data_ptr(), self.table.dtype)
        if key not in self._resized:
            self._resized = {k: t for k, t in self._resized.items() if k[1:] == key[1:]}  # drop those of older weights
            self._resized[key] = self.resize(size)
        return self._resized[key]

    def resize(self, size: tuple[int, ...]) -> Float[Tensor, "n d"]:
        """The table for a grid of another size."""
        h, w = self.site.extent
        table = rearrange(self.table[self.prefix :].float(), "(h w) d -> 1 d h w", h=h, w=w)
        table = F.interpolate(table, size=size, mode="bicubic", antialias=True, align_corners=False)
        return rearrange(table, "1 d h w -> (h w) d").to(self.table.dtype)
