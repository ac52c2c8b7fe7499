"""Rotary embedding: queries and keys are turned, so that their product tells how far apart they are."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from core.coordinates import Places, by_axis, over_places
from core.options import is_number
from core.position.base import Position, Site
from core.position.frequencies import check_base, geometric, precise

RotaryLayout = Literal["interleaved", "half"]


class Rotary(Position):
    """Pairs of channels turned by place * base^(-2i/d) (RoFormer: Su et al. 2021, section 3.4). Lengths stay, and scores
    depend on the distance only. For pictures the pairs split over the axes, rows first (axial; Heo et al. 2024, and timm
    with in_pixels=False). Prefix tokens are not turned. Apply it before keys enter a cache, and never to
    values; keys of a cache stay turned, so that caches of two texts cannot be joined.

    Args:
        site: the head's width times `share` splits into pairs over the axes.
        layout: "interleaved" pairs channels 2i and 2i + 1 (the paper, timm), "half" i and i + d/2 (Llama in
            transformers); weights of one fit the other after permuting the rows of the projections.
        base: of the wavelengths, from 2 pi to base * 2 pi tokens.
        share: of the head's channels that are turned; the others, at the end, are left (partial rotary).
    """

    def __init__(self, site: Site, *, layout: RotaryLayout = "interleaved", base: float = 10000.0, share: float = 1.0) -> None:
        super().__init__(site)
        if layout not in ("interleaved", "half"):
            raise ValueError(f"layout={layout!r} is unknown; use 'interleaved' or 'half'")
        check_base(base)
        if not is_number(share) or not 0 < share <= 1:
            raise ValueError(f"share={share!r} is not in 0 < share <= 1; use e.g. 0.5, or 1 for all channels")
        self.layout, self.base = layout, base
        self.turned = round(site.head_dim * share)
        pairs = 2 * site.axes
        if not self.turned or self.turned % pairs:
            fit = max(pairs, self.turned - self.turned % pairs)
            fix = f"share={fit / site.head_dim:g}" if share < 1 and fit <= site.head_dim else f"dim={site.heads * fit}"
            raise ValueError(
                f"head_dim={site.head_dim} (dim={site.dim}, heads={site.heads}) turns {self.turned} channels, "
                f"not a multiple of {pairs} (pairs over {site.axes} axes); use {fix}"
            )

    def rotate(self, x: Float[Tensor, "b h n e"], at: Tensor) -> Float[Tensor, "b h n e"]:
        places = self.places(x, at)
        cos, sin = self.turn(places)
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        placed = x[..., places.prefix :, :]
        y = self.turn_pairs(placed[..., : self.turned], cos, sin)
        if self.turned < x.shape[-1]:
            y = torch.cat([y, placed[..., self.turned :]], dim=-1)
        return torch.cat([x[..., : places.prefix, :], y], dim=-2) if places.prefix else y

    def turn(self, places: Places) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n f"]]:
        """Cosine and sine of each pair's angle, in float32 from float64 angles."""
        bands = self.turned // (2 * self.site.axes)
        angles = [p.to(precise(p.device))[..., None] * geometric(bands, bands, self.base, p.device) for p in by_axis(places)]
        return (
            over_places([a.cos().float() for a in angles], places),
            over_places([a.sin().float() for a in angles], places),
        )

    def turn_pairs(self, x: Float[Tensor, "b h n r"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h n r"]:
        """Each pair (a, b) to (a cos - b sin, b cos + a sin), in float32 at least."""
        precise_x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.layout == "half":
            a, b = precise_x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
        turn = turn_neighbours if torch.compiler.is_compiling() else turn_as_complex
        return turn(precise_x, cos, sin).to(x.dtype)


def turn_neighbours(x: Float[Tensor, "b h n r"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h n r"]:
    """Channels 2i and 2i + 1 turned by angle i."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def turn_as_complex(x: Float[Tensor, "b h n r"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h n r"]:
    """The same as one complex product: 10x faster on a CPU, but not for compilers."""
    if x.stride(-1) != 1 or any(step % 2 for step in (x.storage_offset(), *x.stride()[:-1])):
        x = x.contiguous()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
