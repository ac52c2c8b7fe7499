"""Absolute kinds: what is added to the tokens says where each one is."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core.coordinates import Places, by_axis, over_places
from core.position.base import Position, Site, fill
from core.position.frequencies import check_base, geometric, precise
from core.position.lookup import read, refuse_outside

SinusoidLayout = Literal["interleaved", "halves", "sincos"]


class Sinusoidal(Position):
    """Fixed sines and cosines of each place (Vaswani et al. 2017, section 3.5); for pictures the channels split over
    the axes, rows first. Computed in float64, whatever the type of the tokens.

    With d channels for an axis and i = 0 .. d/2 - 1 the layouts, which are not interchangeable, are

    - "interleaved": channel 2i is sin(p / base^(2i/d)), channel 2i + 1 its cosine (the paper);
    - "halves": sines, then cosines, of p / base^(i/(d/2 - 1)) (tensor2tensor, fairseq, big_vision);
    - "sincos": sines, then cosines, of p / base^(2i/d) (MoCo v3, MAE: Chen et al. 2021, He et al. 2022).

    Channels that do not split evenly are zero, at the end. Prefix tokens get nothing.

    Args:
        site: its `dim` holds a sine and a cosine an axis at least.
        layout: of the channels.
        base: of the wavelengths, from 2 pi to base * 2 pi tokens.
        columns_first: channels of the columns before those of the rows, as in MAE and big_vision.
    """

    def __init__(
        self, site: Site, *, layout: SinusoidLayout = "interleaved", base: float = 10000.0, columns_first: bool = False
    ) -> None:
        super().__init__(site)
        if layout not in ("interleaved", "halves", "sincos"):
            raise ValueError(f"layout={layout!r} is unknown; use 'interleaved', 'halves' or 'sincos'")
        check_base(base)
        if site.dim < 2 * site.axes:
            raise ValueError(f"dim={site.dim} has no room for a sine and a cosine an axis; use dim={2 * site.axes} or more")
        self.layout, self.base, self.columns_first = layout, base, columns_first

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        places = self.places(x, at)
        parts = [self.encode(coordinate) for coordinate in by_axis(places)]
        table = over_places(parts[::-1] if self.columns_first else parts, places)
        return x + F.pad(table, (0, x.shape[-1] - table.shape[-1], places.prefix, 0)).to(x.dtype)

    def encode(self, p: Float[Tensor, "*places"]) -> Float[Tensor, "*places c"]:
        half = self.site.dim // (2 * self.site.axes)
        over = max(half - 1, 1) if self.layout == "halves" else half
        angles = p.to(precise(p.device))[..., None] * geometric(half, over, self.base, p.device)
        if self.layout == "interleaved":
            return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Learned(Position):
    """A table of embeddings, one a place, added to the tokens (Vaswani et al. 2017, ViT: Dosovitskiy et al. 2021).

    Over grids of another size than `site.extent` the table is resized (bicubic, antialiased, corners not aligned: timm's
    rule); at places that are not a whole grid it is read, between its entries by bilinear interpolation. Sequences count
    in whole numbers (others are rounded). Places past the table's end are refused.

    Args:
        site: `extent` is the grid or the longest sequence.
        prefix: the table has rows of its own for the prefix tokens; False leaves them as they are (DeiT III).
        std: of the initial table.
    """

    KEPT = 8  # resized tables

    def __init__(self, site: Site, *, prefix: bool = True, std: float = 0.02) -> None:
        super().__init__(site)
        if len(site.extent) not in (1, 2):
            raise ValueError(f"extent={site.extent} gives Learned no table; give Site(extent=(n,)) or (h, w)")
        self.prefix = site.prefix if prefix else 0
        self.table = nn.Parameter(torch.empty(self.prefix + math.prod(site.extent), site.dim))
        fill(self.table, std)
        self._resized: dict[tuple[int, ...], Tensor] = {}
        self._resized_from: Tensor | None = None

    def embed(self, x: Float[Tensor, "b n d"], at: Tensor) -> Float[Tensor, "b n d"]:
        places = self.places(x, at)
        rows = self.grid(places.size) if places.size is not None else self.points(places)
        if places.prefix and self.prefix:
            own = self.table[: self.prefix]
            rows = torch.cat([own.expand(*rows.shape[:-2], -1, -1), rows], dim=-2)
        elif places.prefix:
            rows = F.pad(rows, (0, 0, places.prefix, 0))
        return x + rows  # under autocast the residual stream becomes float32 here, as the table is

    def points(self, places: Places) -> Float[Tensor, "*b n d"]:
        for axis, size in enumerate(self.site.extent):
            rule = f"the places of a learned table of {size}; use a larger extent, or Sinusoidal or Rotary, which have no end"
            refuse_outside(places.at[..., axis], 0, size - 1, rule)
        table = self.table[self.prefix :]
        if len(self.site.extent) == 1:
            return table[places.at[..., 0].round().long()]
        return read(table.T, self.site.extent, places.at).movedim(0, -1)

    def grid(self, size: tuple[int, ...]) -> Float[Tensor, "n d"]:
        if size == self.site.extent:
            return self.table[self.prefix :]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.table.device.type != "cpu":
            return self.resize(size)  # on a GPU resizing costs no more than looking whether the weights have changed
        # Weights change unseen by any version counter (`p.data.copy_`, as averaging callbacks do): compare them.
        source = self._resized_from
        if source is None or source.dtype != self.table.dtype or not torch.equal(source, self.table):
            self._resized_from, self._resized = self.table.detach().clone(), {}
        if size not in self._resized:
            self._resized = dict(list(self._resized.items())[-self.KEPT + 1 :]) | {size: self.resize(size)}
        return self._resized[size]

    def resize(self, size: tuple[int, ...]) -> Float[Tensor, "n d"]:
        """The table for a grid of another size."""
        table = rearrange(self.table[self.prefix :].float(), "(h w) d -> h w d", h=self.site.extent[0])
        rows, columns = (resizing(old, new, table.device) for old, new in zip(self.site.extent, size, strict=True))
        with torch.autocast(table.device.type, enabled=False):
            table = columns @ torch.einsum("yh,hwd->ywd", rows, table)
        return table.flatten(0, 1).to(self.table.dtype)


def resizing(old: int, new: int, device: torch.device) -> Float[Tensor, "new old"]:
    """The weights of timm's interpolation along one axis, which are what it makes of unit vectors.

    Interpolating the table itself is the same, but torch 2.14 cannot compile its gradient for sizes that change, and on a
    CPU gets a single column wrong.
    """
    units = torch.eye(old, device=device)[None, :, None]
    return F.interpolate(units, size=(1, new), mode="bicubic", antialias=True, align_corners=False)[0, :, 0].T
