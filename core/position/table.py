"""Numbers a head and distance within a window or grid: learned (Swin), or computed by a small network (Swin v2)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from core.coordinates import Places
from core.options import check_sizes
from core.position.base import Position, Site, distances, fill, pad_prefix
from core.position.lookup import look_up, read, refuse_outside


class RelativeTable(Position):
    """A learned number a head and distance (Swin: Liu et al. 2021, eq. 4; BEiT: Bao et al. 2022).

    Whole grids of `site.extent` read it by index. For whole grids of another size it is resized (bicubic, corners not
    aligned, not antialiased: Swin's rule for a new window). Elsewhere it is read between its entries by linear
    interpolation, exact at whole distances and differentiable in the coordinates. Distances past its end are refused, but
    for pictures whose rows have places of their own (deformable sampling): those find zero there.

    Args:
        site: `extent` is the window, the grid or the longest sequence.
        prefix: prefix tokens have numbers of their own (BEiT); False leaves their scores as they are.
        std: of the initial table, `prod(2 extent - 1), heads`: query minus key, from the least one, rows first.
    """

    index: Tensor

    def __init__(self, site: Site, *, prefix: bool = False, std: float = 0.02) -> None:
        super().__init__(site)
        if len(site.extent) not in (1, 2):
            raise ValueError(f"extent={site.extent} gives RelativeTable no table; give Site(extent=(n,)) or (h, w)")
        self.table = nn.Parameter(torch.empty(math.prod(table_size(site.extent)), site.heads))
        # Of each prefix token to the placed ones, of those to each prefix token, of prefix to prefix tokens.
        own = site.prefix * (2 + site.prefix) if prefix else 0
        self.prefix_table = nn.Parameter(torch.empty(own, site.heads)) if own else None
        for table in self.parameters():
            fill(table, std)
        self.register_buffer("index", torch.empty(0, dtype=torch.long), persistent=False)
        self.make_constants()

    def make_constants(self) -> None:
        if self.site.axes == 2:
            self.index = whole_index(self.site.extent, self.index.device)

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"]:
        queries, keys = self.both_places(q, q_at, k_at)
        if queries.size is not None and queries.size == keys.size:
            numbers = self.whole(queries.size)
        else:
            numbers = self.between(queries, keys)
        return self.pad(numbers, queries, keys)

    def whole(self, size: tuple[int, ...]) -> Float[Tensor, "heads n n"]:
        """Between all cells of a grid."""
        if size == self.site.extent:
            return look_up(self.table.T, self.index)
        return look_up(self.resize(size), whole_index(size, self.table.device))

    def resize(self, size: tuple[int, ...]) -> Float[Tensor, "heads cells"]:
        """The table for a grid of another size."""
        h, w = table_size(self.site.extent)
        table = rearrange(self.table.float(), "(h w) heads -> 1 heads h w", h=h, w=w)
        table = F.interpolate(table, size=table_size(size), mode="bicubic", align_corners=False)
        return table[0].flatten(1).to(self.table.dtype)

    def between(self, queries: Places, keys: Places) -> Float[Tensor, "*b heads n m"]:
        """Between any places."""
        apart = -distances(queries, keys)
        if self.site.axes == 1 or apart.ndim == 3:
            for axis, size in enumerate(self.site.extent):
                rule = f"the distances that a relative table of {size} knows; use a larger extent, or Alibi or T5Bias"
                refuse_outside(apart[..., axis], 1 - size, size - 1, rule)
        return as_scores(read(self.table.T, table_size(self.site.extent), from_corner(apart, self.site.extent)))

    def pad(self, bias: Float[Tensor, "*b heads n m"], queries: Places, keys: Places) -> Float[Tensor, "*b heads n2 m2"]:
        """Rows and columns of the prefix tokens."""
        if self.prefix_table is None:
            return pad_prefix(bias, queries, keys)
        p = self.site.prefix
        outgoing, incoming, among = (part.T for part in self.prefix_table.split([p, p, p * p]))
        *lead, n, m = bias.shape
        if keys.prefix:
            bias = torch.cat([incoming[:, None].expand(*lead, n, p), bias], dim=-1)
        if queries.prefix:
            rows = outgoing[:, :, None].expand(*lead, p, m)
            if keys.prefix:
                rows = torch.cat([among.unflatten(1, (p, p)).expand(*lead, p, p), rows], dim=-1)
            bias = torch.cat([rows, bias], dim=-2)
        return bias


class ContinuousBias(Position):
    """A number a head and distance from a small network (Swin v2: Liu et al. 2022, eq. 3 and 4):
    16 sigmoid(MLP(sign(d) log2(1 + |d|) / 3)), d = 8 distance / (extent - 1). It knows grids of any size without resizing.

    Sequences evaluate the network at whole distances, up to the extent or the number of places if that is more, and
    interpolate between them linearly. For places of pictures that are not whole grids it runs once a pair.

    Args:
        site: `extent` is the window, the grid or the longest sequence.
        hidden: width of the network.
        pretrained_extent: the extent that distances are measured by, for weights trained with another one than the site's
            (Swin v2's "12to16" files); empty is the site's.
    """

    def __init__(self, site: Site, *, hidden: int = 512, pretrained_extent: tuple[int, ...] = ()) -> None:
        super().__init__(site)
        if not site.extent:
            raise ValueError("extent=() gives ContinuousBias no measure; give Site(extent=(n,)) or (h, w)")
        check_sizes(hidden=hidden)
        for size in pretrained_extent:
            check_sizes(pretrained_extent=size)
        if pretrained_extent and len(pretrained_extent) != site.axes:
            raise ValueError(
                f"pretrained_extent={tuple(pretrained_extent)} and extent={site.extent} differ in axes; give {site.axes} numbers"
            )
        self.spans = tuple(max(size - 1, 1) for size in pretrained_extent or site.extent)  # one cell: distance 0, not 0/0
        self.hidden = nn.Linear(site.axes, hidden)
        self.out = nn.Linear(hidden, site.heads, bias=False)

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"]:
        queries, keys = self.both_places(q, q_at, k_at)
        if queries.size is not None and queries.size == keys.size:
            numbers = look_up(self.evaluate(all_distances(queries.size, q.device)), whole_index(queries.size, q.device))
        elif self.site.axes == 1:
            numbers = self.along_line(queries, keys)
        else:
            numbers = as_scores(self.evaluate(-distances(queries, keys)))
        return pad_prefix(numbers, queries, keys)

    def along_line(self, queries: Places, keys: Places) -> Float[Tensor, "*b heads n m"]:
        # A network for each of n * m pairs would be 512 numbers a pair: evaluate the few distances that there are.
        reach = max(self.site.extent[0], queries.at.shape[-2], keys.at.shape[-2])
        apart = -distances(queries, keys)
        rule = "the distances of that many places; use a larger extent"
        refuse_outside(apart, 1 - reach, reach - 1, rule)
        table = self.evaluate(all_distances((reach,), apart.device))
        return as_scores(read(table, table_size((reach,)), from_corner(apart, (reach,))))

    def evaluate(self, apart: Float[Tensor, "*p axes"]) -> Float[Tensor, "heads *p"]:
        """The number of each distance (query minus key), in float32: in less, neighbouring distances are the same."""
        dtype = torch.promote_types(self.out.weight.dtype, torch.float32)
        d = torch.stack([8 * apart[..., axis] / span for axis, span in enumerate(self.spans)], dim=-1)
        logs = (d.sign() * torch.log2(1 + d.abs()) / 3).to(dtype)
        with torch.autocast(apart.device.type, enabled=False):
            hidden = F.relu(F.linear(logs, self.hidden.weight.to(dtype), self.hidden.bias.to(dtype)))
            return (16 * F.linear(hidden, self.out.weight.to(dtype)).sigmoid()).movedim(-1, 0)


def as_scores(numbers: Float[Tensor, "heads *b n m"]) -> Float[Tensor, "*b heads n m"]:
    return numbers.movedim(0, 1) if numbers.ndim == 4 else numbers


def table_size(extent: tuple[int, ...]) -> tuple[int, ...]:
    """Distances along each axis: from 1 - size to size - 1."""
    return tuple(2 * size - 1 for size in extent)


def from_corner(apart: Float[Tensor, "*p axes"], extent: tuple[int, ...]) -> Float[Tensor, "*p axes"]:
    """Distances as places in the table of an extent."""
    return torch.stack([apart[..., axis] + (size - 1) for axis, size in enumerate(extent)], dim=-1)


def all_distances(extent: tuple[int, ...], device: torch.device) -> Float[Tensor, "cells axes"]:
    """The distances within an extent, from the least one, rows first."""
    axes = [torch.arange(1 - size, size, dtype=torch.float32, device=device) for size in extent]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def whole_index(extent: tuple[int, ...], device: torch.device) -> Int[Tensor, "n n"]:
    """For each pair of cells of a grid, the place of query minus key among all its distances."""
    cells = torch.meshgrid(*[torch.arange(size, device=device) for size in extent], indexing="ij")
    index = torch.zeros((), dtype=torch.long, device=device)
    for cell, size in zip(cells, extent, strict=True):
        index = index * (2 * size - 1) + cell.flatten()[:, None] - cell.flatten()[None, :] + size - 1
    return index
