"""Neighbourhood attention (NAT: Hassani et al. 2023): each token of a map attends the `kernel` x `kernel` tokens around it.

At a border the neighbourhood is moved inside the map, not cut, so that every token attends as many keys as any other. Along
an axis that is shorter than the kernel it is the whole axis: nothing is padded.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from core.attention import attend
from core.plain import is_plain
from core.position.lookup import look_up


class Tiles(NamedTuple):
    """A map cut into tiles of queries, each with the keys that any of them may attend.

    Attributes:
        queries: the token of each place of a tile; tiles that stick out repeat the last row or column.
        keys: the token of each key.
        inverse: for each token, its place among the queries of all tiles.
        apart: key minus query as a place in the table of distances, rows first.
        mask: True where the key is in the query's neighbourhood.
    """

    queries: Int[Tensor, "tiles q"]
    keys: Int[Tensor, "tiles k"]
    inverse: Int[Tensor, " n"]
    apart: Int[Tensor, "tiles q k"]
    mask: Bool[Tensor, "tiles q k"]


def cut(size: tuple[int, int], kernel: int, tile: int, device: torch.device, *, fit: bool) -> Tiles:
    """The tiles of a map of `size`, `tile` tokens a side; with 1 that fits each query has its own keys, the mask hides none.

    Args:
        fit: make tiles no larger than a small map. Without it the map's size decides no shape but the number of tiles,
            so that a compiler needs one program for all sizes.
    """
    rows, columns = (cut_axis(side, kernel, min(tile, side) if fit else tile, device, fit=fit) for side in size)
    width = size[1]

    def crossed(row: Tensor, column: Tensor) -> Tensor:
        """Each row of each row of tiles with each column of each column of tiles: `tiles places`."""
        return rearrange(row[:, None, :, None] * width + column[None, :, None, :], "i j p q -> (i j) (p q)")

    def pairs(row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        return row[:, None, :, None, :, None], column[None, :, None, :, None, :]  # i j p q of queries, then of keys

    across, along = pairs(rows.apart, columns.apart)
    seen_across, seen_along = pairs(rows.mask, columns.mask)
    side = rows.queries.shape[1], columns.queries.shape[1]
    row, column = (torch.arange(n, device=device) for n in size)
    tile_index = (row // side[0])[:, None] * len(columns.queries) + column // side[1]
    return Tiles(
        crossed(rows.queries, columns.queries),
        crossed(rows.keys, columns.keys),
        (tile_index * (side[0] * side[1]) + (row % side[0])[:, None] * side[1] + column % side[1]).flatten(),
        rearrange(across * (2 * kernel - 1) + along, "i j p q k l -> (i j) (p q) (k l)"),
        rearrange(seen_across & seen_along, "i j p q k l -> (i j) (p q) (k l)"),
    )


def cut_axis(side: int, kernel: int, tile: int, device: torch.device, *, fit: bool) -> Tiles:
    """The same along one axis; keys that stick out repeat the last token, unseen."""
    reach = min(tile + kernel - 1, side) if fit else tile + kernel - 1
    # Compilers make a program of its own for one tile; a second one that nobody reads saves that.
    tiles = torch.sym_max((side + tile - 1) // tile, 1 if fit else 2)
    first = tile * torch.arange(tiles, device=device)[:, None]
    queries = (first + torch.arange(tile, device=device)).clamp(max=side - 1)
    places = (first - kernel // 2).clamp(0, torch.sym_max(side - reach, 0)) + torch.arange(reach, device=device)
    start = (queries - kernel // 2).clamp(0, torch.sym_max(side - kernel, 0))[:, :, None]
    seen = (places[:, None] >= start) & (places[:, None] < start + kernel) & (places[:, None] < side)
    keys = places.clamp(max=side - 1)
    apart = (keys[:, None] - queries[:, :, None]).clamp(1 - kernel, kernel - 1) + kernel - 1
    return Tiles(queries, keys, torch.arange(side, device=device), apart, seen)


@lru_cache(maxsize=64)
def kept(size: tuple[int, int], kernel: int, tile: int, device: torch.device) -> Tiles:
    with torch.inference_mode(False):  # training may use it next
        return cut(size, kernel, tile, device, fit=True)


class NeighbourhoodAttention(nn.Module):
    """Multi-head attention of each token of a map to its neighbourhood, with a learned number a head and distance.

    In plain torch: the map is cut into tiles whose queries share their keys, and a mask hides those that are in no
    neighbourhood. A tile of one token is the plain formula; larger ones copy fewer keys and give the same numbers.

    Args:
        dim: channels.
        heads: `dim` splits over them.
        kernel: side of the neighbourhood, in tokens, odd.
        tile: side of the tiles.

    Raises:
        ValueError: heads that do not split the channels, an even kernel, a tile without tokens.
    """

    def __init__(self, dim: int, heads: int, *, kernel: int = 7, tile: int = 7) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split over heads={heads}; use heads that divide dim")
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel={kernel} has no middle; use an odd one such as 7")
        if tile < 1:
            raise ValueError(f"tile={tile} holds no tokens; use e.g. {kernel}")
        self.heads, self.kernel, self.tile = heads, kernel, tile
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        # Of key minus query, from the least distance (NATTEN's order; RelativeTable's is query minus key).
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(heads, 2 * kernel - 1, 2 * kernel - 1), std=0.02))

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        size = (x.shape[1], x.shape[2])
        plain = is_plain(x)
        make = kept if plain else partial(cut, fit=False)
        tiles = make(size, self.kernel, self.tile, x.device)
        q, k, v = self.qkv(x.flatten(1, 2)).chunk(3, dim=-1)
        q, k, v = self.choose(q, tiles.queries), self.choose(k, tiles.keys), self.choose(v, tiles.keys)
        # Tiles stand beside the heads, so that bias and mask are shared by the batch.
        bias = look_up(self.table.flatten(1), tiles.apart).transpose(0, 1).flatten(0, 1)
        mask = tiles.mask[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)[None]
        y = attend(q, k, v, bias=bias, mask=None if self.tile == 1 and plain else mask)
        y = rearrange(y, "b (t heads) n e -> b (t n) (heads e)", heads=self.heads)
        return self.out(y.index_select(1, tiles.inverse)).unflatten(1, size)

    def choose(self, x: Float[Tensor, "b n d"], index: Int[Tensor, "t m"]) -> Float[Tensor, "b t_heads m e"]:
        chosen = x.index_select(1, index.flatten())
        return rearrange(chosen, "b (t m) (heads e) -> b (t heads) m e", t=len(index), heads=self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kernel={self.kernel}"
