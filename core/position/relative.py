"""Relative kinds of sequences (Shaw, T5, ALiBi), each for pictures too: distances along each axis, or Euclidean ones.

Where coordinates are real-valued, Shaw and T5 round distances to whole ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from core.options import check_sizes
from core.position.base import Position, Site, add_up, distances, distances_by_axis, fill, pad_prefix, per_row
from core.position.lookup import look_up


class Shaw(Position):
    """Learned vectors of the clipped distance, for keys and values (Shaw et al. 2018, eq. 3 to 5):
    scores (q·k + q·a_K) / sqrt(head_dim), output sum of weights · (v + a_V). The tables serve all heads. For pictures
    there is a table an axis, and the vectors of both axes add up.

    Args:
        site: the tables are `axes, 2 clip + 1, head_dim`.
        clip: distances beyond it count as it.
        value: there are vectors for the values too; Shaw et al. found the keys' to matter most.
        std: of the initial tables.
    """

    def __init__(self, site: Site, *, clip: int = 16, value: bool = True, std: float = 0.02) -> None:
        super().__init__(site)
        check_sizes(clip=clip)
        self.clip = clip
        self.key_table = nn.Parameter(torch.empty(site.axes, 2 * clip + 1, site.head_dim))
        self.value_table = nn.Parameter(torch.empty(site.axes, 2 * clip + 1, site.head_dim)) if value else None
        for table in self.parameters():
            fill(table, std)

    @property
    def hooks(self) -> frozenset[str]:
        return frozenset({"bias"}) if self.value_table is None else frozenset({"bias", "value"})

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "b h n m"]:
        queries, keys = self.both_places(q, q_at, k_at)
        q = q[..., queries.prefix :, :] * q.shape[-1] ** -0.5
        chosen = choose_rows if per_row(queries, keys) else choose
        # The product with all 2 clip + 1 vectors, then a choice: no `n m e` tensor of the vectors themselves.
        scores = [
            chosen(q @ table.to(q.dtype).mT, self.rows(apart))
            for table, apart in zip(self.key_table.unbind(), distances_by_axis(queries, keys), strict=True)
        ]
        return pad_prefix(add_up(scores).flatten(3), queries, keys)

    def value(self, weights: Float[Tensor, "b h n m"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "b h n e"]:
        if self.value_table is None:
            raise ValueError("this Shaw has no value table; build it with value=True")
        queries, keys = self.both_places(weights, q_at, k_at, keys=weights.shape[-1])
        weights = weights[..., queries.prefix :, keys.prefix :]
        own = per_row(queries, keys)
        none = weights.new_zeros(*weights.shape[:3], 2 * self.clip + 1)
        outputs = []
        for axis, apart in enumerate(distances_by_axis(queries, keys)):
            # The weights of equal distances add up first: all of a grid's row or column, then those of each table row.
            rows = self.rows(apart)[:, None] if own else self.rows(apart).flatten(1)
            shares = weights if own or keys.size is None else add_lines(weights, keys.size, axis)
            sums = none.scatter_add(-1, rows.expand_as(shares), shares)
            outputs.append(sums @ self.value_table[axis].to(weights.dtype))
        return F.pad(add_up(outputs), (0, 0, queries.prefix, 0))

    def rows(self, apart: Float[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Row of the tables for each distance."""
        return apart.round().clamp(-self.clip, self.clip).long() + self.clip


def choose(x: Float[Tensor, "b h n r"], rows: Int[Tensor, "n *m"]) -> Float[Tensor, "b h n *m"]:
    """For each query the entries at its rows, the same in the whole batch (4x faster than `gather`)."""
    b, h, n, r = x.shape
    start = torch.arange(n, device=x.device) * r
    index = start.view(n, *[1] * (rows.ndim - 1)) + rows
    return x.reshape(b * h, n * r).index_select(1, index.flatten()).view(b, h, *rows.shape)


def choose_rows(x: Float[Tensor, "b h n r"], rows: Int[Tensor, "#b n m"]) -> Float[Tensor, "b h n m"]:
    """For each query of each row of the batch the entries at its rows."""
    return x.gather(-1, rows[:, None].expand(*x.shape[:2], -1, -1))


def add_lines(weights: Float[Tensor, "b h n m"], size: tuple[int, ...], axis: int) -> Float[Tensor, "b h n k"]:
    """Sums over the other axes of a grid of keys."""
    others = [3 + i for i in range(len(size)) if i != axis]
    return weights.unflatten(-1, size).sum(dim=others)


class T5Bias(Position):
    """A learned number a head and bucket of distances, buckets growing with the distance (T5: Raffel et al. 2020,
    section 2.1). For pictures a table an axis, summed. T5 shares one among its layers, has none in
    cross-attention, and does not scale scores: give `Attention(scale=1)` for its weights; the kind only adds its numbers.

    Args:
        site: `causal` sites tell no later keys apart and have all buckets for earlier ones.
        buckets: rows of the table.
        max_distance: from it on all distances fall in the last bucket.
        std: of the initial table, `axes, buckets, heads`.
    """

    _bounds: Tensor

    def __init__(self, site: Site, *, buckets: int = 32, max_distance: int = 128, std: float = 0.02) -> None:
        super().__init__(site)
        check_sizes(buckets=buckets, max_distance=max_distance)
        if not site.causal and buckets % 2:
            raise ValueError(f"buckets={buckets} do not split over earlier and later keys; use {buckets - 1} or {buckets + 1}")
        self.bounds = bucket_bounds(buckets if site.causal else buckets // 2, max_distance)
        self.later = 0 if site.causal else buckets // 2
        self.table = nn.Parameter(torch.empty(site.axes, buckets, site.heads))
        fill(self.table, std)
        self.register_buffer("_bounds", torch.empty(0), persistent=False)
        self.make_constants()

    def make_constants(self) -> None:
        self._bounds = torch.tensor(self.bounds, dtype=torch.float32, device=self._bounds.device)

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"]:
        queries, keys = self.both_places(q, q_at, k_at)
        numbers = [
            look_up(table.T, self.bucket(apart))
            for table, apart in zip(self.table.unbind(), distances_by_axis(queries, keys), strict=True)
        ]
        total = add_up(numbers)
        return pad_prefix(total.movedim(0, 1) if per_row(queries, keys) else total.flatten(2), queries, keys)

    def bucket(self, apart: Float[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Bucket of each distance (place of the key minus place of the query)."""
        apart = apart.round()
        if self.later:
            return torch.bucketize(apart.abs(), self._bounds, right=True) + self.later * (apart > 0)
        return torch.bucketize(-apart, self._bounds, right=True)


def bucket_bounds(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The least distance of each of T5's buckets but the first.

    One half holds a distance each, the other grows as a power up to `max_distance`. In whole numbers: logarithms in
    floating point may round a distance on a bound to either side.
    """
    exact = buckets // 2
    grown = buckets - exact
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{buckets} buckets a direction with max_distance={max_distance} leave none that grow; "
            f"use at least 2 a direction and max_distance above {max(exact, 1)}"
        )
    bounds = list(range(1, exact + 1))
    for step in range(1, grown):  # least n with exact * (max_distance / exact) ** (step / grown) <= n
        limit = max_distance**step * exact ** (grown - step)
        n = max(math.floor(exact * (max_distance / exact) ** (step / grown)) - 1, exact)
        while n**grown < limit:
            n += 1
        bounds.append(n)
    return tuple(bounds)


class Alibi(Position):
    """Minus slope times distance, a fixed slope a head (ALiBi: Press et al. 2022). Distances are symmetric, which is ALiBi
    for encoders; in causal attention it is the paper's. For pictures they are Euclidean (CROMA: Fuller et al. 2023).
    Nothing is learned."""

    slopes: Tensor

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.register_buffer("slopes", torch.empty(0), persistent=False)
        self.make_constants()

    def make_constants(self) -> None:
        self.slopes = torch.tensor(alibi_slopes(self.site.heads), dtype=torch.float32, device=self.slopes.device)

    def bias(self, q: Float[Tensor, "b h n e"], q_at: Tensor, k_at: Tensor) -> Float[Tensor, "*b h n m"]:
        queries, keys = self.both_places(q, q_at, k_at)
        apart = distances(queries, keys)
        far = apart[..., 0].abs() if self.site.axes == 1 else torch.linalg.vector_norm(apart, dim=-1)
        return pad_prefix(-self.slopes[:, None, None] * far.unsqueeze(-3), queries, keys)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / heads), h = 1 .. heads, for powers of two; else those of the power below, then every second one of the
    power above (the authors' rule)."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power) + 1, 2)]
