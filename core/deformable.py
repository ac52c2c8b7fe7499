"""Deformable attention: keys are sampled where learned offsets point to, between the cells of a map.

`DeformableAttention` (DAT: Xia et al. 2022; DAT++: Xia et al. 2023) moves a grid of points that all queries share;
`MultiScaleDeformableAttention` (Deformable DETR: Zhu et al. 2021) samples a few points for each query, on several maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from core.attention import attend, masked_softmax
from core.linear import Linear
from core.options import is_number
from core.position import Position, RelativeTable, Site, make_position, require_hooks

Reference = Literal["dat", "dat++"]


def reference_points(size: tuple[int, int], reference: Reference, device: torch.device | None = None) -> Float[Tensor, "h w 2"]:
    """Where (row, column) the points of a grid stand before they are moved: -1 and 1 are the first and last cell of the map.

    - "dat": (i + 1/2) / n · 2 - 1, even over the map.
    - "dat++": (i + 1/2) / (n - 1) · 2 - 1, as published: off centre, the last one beyond the map. A single point, where
      that divides by 0, stands in the middle.
    """
    axes = []
    for n in size:
        spaces = n - 1 if reference == "dat++" and n > 1 else n
        axes.append((torch.arange(n, dtype=torch.float32, device=device) + 0.5) * (2 / spaces) - 1)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def query_points(size: tuple[int, int], reference: Reference, device: torch.device | None = None) -> Float[Tensor, "h w 2"]:
    """Where the queries stand: "dat": as the points; "dat++": at the cells, i / (n - 1) · 2 - 1, a single one in the middle."""
    if reference == "dat":
        return reference_points(size, reference, device)
    axes = [torch.arange(n, dtype=torch.float32, device=device) * (2 / max(n - 1, 1)) - int(n > 1) for n in size]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


class DeformableAttention(nn.Module):
    """Each token of a map attends a grid of sampled keys, moved by offsets that follow from the queries.

    Channels fall into `groups`, each with offsets of its own; the sampled channels of all groups make the keys. A position
    is told the real-valued places of queries and keys, in token units of a map of `extent`: a map of another size is
    stretched over it, as published, so that a table serves maps of any size.

    Args:
        dim: channels.
        heads: attention heads; `dim` splits over them, and they over the groups.
        extent: rows and columns of the map that the position is made for.
        groups: of channels, with offsets of their own.
        kernel: side of the depthwise convolution that the offsets come from, odd.
        stride: of that convolution: queries a key, along each axis.
        offset_range: the most that a point is moved, in halves of the space between points (tanh bounds it); points
            beyond the map find zeros. None: no bound, but points stay on the map.
        reference: where points and queries stand, see `reference_points`.
        position: makes the position of each group; None is none.

    Raises:
        ValueError: heads or groups that do not split, an even kernel, a stride below 1, an unknown reference, a range
            that is not positive, a position that works through neither rotation nor bias.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        extent: tuple[int, int],
        *,
        groups: int = 1,
        kernel: int = 3,
        stride: int = 1,
        offset_range: float | None = 2.0,
        reference: Reference = "dat",
        position: Callable[[Site], Position] | None = RelativeTable,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split over heads={heads}; use heads that divide dim")
        if groups < 1 or heads % groups:
            raise ValueError(f"heads={heads} do not split over groups={groups}; use groups that divide heads")
        if kernel < 1 or kernel % 2 == 0 or stride < 1:
            raise ValueError(f"kernel={kernel} and stride={stride} give no offsets; use an odd kernel and a stride of 1 or more")
        if reference not in ("dat", "dat++"):
            raise ValueError(f"reference={reference!r} is unknown; use 'dat' or 'dat++'")
        if offset_range is not None and not (is_number(offset_range) and offset_range > 0):
            raise ValueError(f"offset_range={offset_range!r} is not positive; use e.g. 2, or None for no bound")
        self.heads, self.groups, self.extent = heads, groups, tuple(extent)
        self.offset_range, self.reference = offset_range, reference
        width = dim // groups
        self.q, self.k, self.v, self.out = (Linear(dim, dim) for _ in range(4))
        self.offset_conv = nn.Conv2d(width, width, kernel, stride=stride, padding=kernel // 2, groups=width)
        self.offset_norm, self.offset_out = nn.LayerNorm(width), Linear(width, 2, bias=False)
        site = Site(width, heads // groups, extent=self.extent)
        parts = [make_position(position, site) for _ in range(groups) if position is not None]
        for part in parts:
            require_hooks(part, "DeformableAttention", ("rotate", "bias"))
        self.positions = cast("list[Position]", nn.ModuleList(parts))

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        q = self.q(x)
        points = self.points(q)
        sampled = self.sample(x, points)
        k, v = self.split(self.k(sampled)), self.split(self.v(sampled))
        q, k, bias = self.place(self.split(q.flatten(1, 2)), k, points, (x.shape[1], x.shape[2]))
        y = attend(q, k, v, bias=bias)
        return self.out(rearrange(y, "b heads n e -> b n (heads e)")).unflatten(1, x.shape[1:3])

    def points(self, q: Float[Tensor, "b h w d"]) -> Float[Tensor, "b g i j 2"]:
        """Where each group samples (row, column): -1 and 1 are the first and the last cell of the map."""
        maps = self.offset_conv(rearrange(q, "b h w (g c) -> (b g) c h w", g=self.groups))
        offsets = self.offset_out(F.gelu(self.offset_norm(maps.permute(0, 2, 3, 1)))).float()
        size = (offsets.shape[1], offsets.shape[2])
        start = reference_points(size, self.reference, q.device)
        if self.offset_range is None:
            points = (start + offsets).clamp(-1, 1)
        else:
            spaces = [max(n - 1, 1) if self.reference == "dat++" else n for n in size]
            points = start + torch.stack(
                [offsets[..., axis].tanh() * (self.offset_range / n) for axis, n in enumerate(spaces)], dim=-1
            )
        return rearrange(points, "(b g) i j axes -> b g i j axes", g=self.groups)

    def sample(self, x: Float[Tensor, "b h w d"], points: Float[Tensor, "b g i j 2"]) -> Float[Tensor, "b i_j d"]:
        """The map between its cells, at each group's points; zeros beyond the map."""
        maps = rearrange(x, "b h w (g c) -> (b g) c h w", g=self.groups)
        # In float32: in less, points would snap to a coarse grid.
        sampled = F.grid_sample(maps.float(), points.flatten(0, 1).flip(-1), mode="bilinear", align_corners=True)
        return rearrange(sampled.to(x.dtype), "(b g) c i j -> b (i j) (g c)", g=self.groups)

    def at(self, points: Float[Tensor, "*p 2"]) -> Float[Tensor, "*p 2"]:
        """Points as coordinates in token units of a map of `extent`."""
        return torch.stack([(points[..., axis] + 1) * ((n - 1) / 2) for axis, n in enumerate(self.extent)], dim=-1)

    def place(
        self,
        q: Float[Tensor, "b heads n e"],
        k: Float[Tensor, "b heads m e"],
        points: Float[Tensor, "b g i j 2"],
        size: tuple[int, int],
    ) -> tuple[Float[Tensor, "b heads n e"], Float[Tensor, "b heads m e"], Float[Tensor, "*b heads n m"] | None]:
        """Queries and keys turned by their place, and the bias of the scores."""
        if not len(self.positions):
            return q, k, None
        q_at = self.at(query_points(size, self.reference, q.device)).flatten(0, 1)
        k_at = self.at(points)
        rows = list(zip(self.positions, q.chunk(self.groups, dim=1), k.chunk(self.groups, dim=1), k_at.unbind(1), strict=True))
        biases = [part.bias(mine, q_at, places) for part, mine, _, places in rows]
        q = torch.cat([part.rotate(mine, q_at) for part, mine, _, _ in rows], dim=1)
        k = torch.cat([part.rotate(keys, places.flatten(1, 2)) for part, _, keys, places in rows], dim=1)
        given = [bias for bias in biases if bias is not None]
        return q, k, torch.cat(given, dim=-3) if given else None

    def split(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n e"]:
        return rearrange(x, "b n (heads e) -> b heads n e", heads=self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, reference={self.reference!r}, offset_range={self.offset_range}"


class MultiScaleDeformableAttention(nn.Module):
    """Each query attends a few points around its reference, on each of several maps (Zhu et al. 2021, eq. 3).

    Args:
        dim: width of queries and maps.
        heads: `dim` splits over them; each has points of its own.
        levels: maps.
        points: of a query, on each map.

    Raises:
        ValueError: heads that do not split the width, no maps or no points.
    """

    def __init__(self, dim: int, heads: int = 8, *, levels: int = 4, points: int = 4) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split over heads={heads}; use heads that divide dim")
        if levels < 1 or points < 1:
            raise ValueError(f"levels={levels} and points={points} sample nothing; use 1 or more of each, such as 4")
        self.dim, self.heads, self.levels, self.points = dim, heads, levels, points
        self.offsets = Linear(dim, heads * levels * points * 2)
        self.weights = Linear(dim, heads * levels * points)
        self.value, self.out = Linear(dim, dim), Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """At first each head looks in a direction of its own, its points one cell apart, and weighs all alike."""
        for layer in (self.offsets, self.weights, self.value, self.out):
            nn.init.zeros_(layer.bias)
        for layer in (self.offsets, self.weights):
            nn.init.zeros_(layer.weight)
        for layer in (self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
        angle = torch.arange(self.heads) * (2 * math.pi / self.heads)
        direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
        direction = direction / direction.abs().amax(dim=-1, keepdim=True)  # to the edge of a square
        steps = torch.arange(1, self.points + 1)[:, None]
        with torch.no_grad():
            self.offsets.bias.copy_((direction[:, None, None] * steps).expand(-1, self.levels, -1, -1).flatten())

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m d"],
        sizes: Sequence[tuple[int, int]],
        reference: Float[Tensor, "b n levels xy"],
        real: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Queries `x` look at the maps.

        Args:
            memory: the tokens of all maps, by rows, one map after the other.
            sizes: rows and columns of each map.
            reference: for each query and map a point (x, y), or a box (centre x, y, width, height), as shares of the map:
                0 is its left or upper edge, 1 the other (the published order, not that of `core.coordinates`). Offsets
                from a point are in cells, from a box in halves of it, divided by the points.
            real: False at padding, which is read as zeros.

        Raises:
            ValueError: sizes that are not the memory's, another number of maps, a reference that is neither point nor box.
        """
        sizes = [(int(h), int(w)) for h, w in sizes]
        self.check(memory, sizes, reference)
        value = self.value(memory)
        if real is not None:
            value = torch.where(real[..., None], value, 0.0)
        offsets = self.offsets(x).unflatten(-1, (self.heads, self.levels, self.points, 2)).float()
        scores = self.weights(x).unflatten(-1, (self.heads, self.levels * self.points))
        weights = masked_softmax(scores).unflatten(-1, (self.levels, self.points))
        total = None
        for level, (part, (h, w)) in enumerate(zip(value.split([h * w for h, w in sizes], dim=1), sizes, strict=True)):
            maps = rearrange(part, "b (h w) (heads e) -> (b heads) e h w", h=h, heads=self.heads)
            places = self.places(offsets[:, :, :, level], reference[:, :, level].float(), (h, w))
            sampled = F.grid_sample(maps.float(), 2 * places - 1, mode="bilinear", align_corners=False).to(x.dtype)
            share = rearrange(weights[:, :, :, level], "b n heads p -> (b heads) 1 n p")
            seen = (sampled * share).sum(dim=-1)
            total = seen if total is None else total + seen
        return self.out(rearrange(total, "(b heads) e n -> b n (heads e)", heads=self.heads))

    def places(
        self, offsets: Float[Tensor, "b n heads p 2"], reference: Float[Tensor, "b n xy"], size: tuple[int, int]
    ) -> Float[Tensor, "b_heads n p 2"]:
        """Where each head samples (x, y), as shares of a map."""
        reference = reference[:, :, None, None]
        if reference.shape[-1] == 2:
            moved = torch.stack([offsets[..., 0] / size[1], offsets[..., 1] / size[0]], dim=-1)
        else:
            moved = offsets / self.points * reference[..., 2:] * 0.5
        return rearrange(reference[..., :2] + moved, "b n heads p xy -> (b heads) n p xy")

    def check(self, memory: Tensor, sizes: Sequence[tuple[int, int]], reference: Tensor) -> None:
        if len(sizes) != self.levels or reference.shape[2] != self.levels:
            raise ValueError(
                f"{len(sizes)} sizes and references on {reference.shape[2]} maps do not fit levels={self.levels}; "
                "give one of each a level"
            )
        if sum(h * w for h, w in sizes) != memory.shape[1]:
            raise ValueError(
                f"sizes={list(sizes)} hold {sum(h * w for h, w in sizes)} tokens, the memory {memory.shape[1]}; "
                "flatten each map by rows and concatenate them in the order of sizes"
            )
        if reference.shape[-1] not in (2, 4):
            raise ValueError(f"reference of shape {tuple(reference.shape)} ends in neither (x, y) nor (x, y, w, h); use 2 or 4")
