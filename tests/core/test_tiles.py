from __future__ import annotations

import pytest
import torch

from core import ChannelAttention, GatedConvFfn
from core.convolution import convolve
from core.tiles import COLUMNS, LARGEST, ROWS, bands, by_tiles, tiles


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (47, 97), (48, 96), (49, 33), (128, 128), (200, 301)])
def test_tiles_are_the_map_once(size):
    count = torch.zeros(size)
    for own, seen, inner in tiles(*size):
        count[own] += 1
        assert torch.equal(count[seen][inner], count[own])
        assert count[seen].numel() <= LARGEST
    assert torch.equal(count, torch.ones(size))


def test_no_tile_is_much_smaller_than_the_others():
    """A band of 2 rows more than a tile is one tile: its pixels next to it would be as many as its own."""
    assert len(list(tiles(ROWS + 2, COLUMNS + 2))) == 1
    for length in range(ROWS, 300):
        heights = {own[0].stop - own[0].start for own, _, _ in tiles(length, COLUMNS)}
        assert min(heights) > ROWS // 2


def test_bands_see_one_row_more():
    assert list(bands(5, 2)) == [
        (slice(0, 2), slice(0, 3), slice(0, 2)),
        (slice(2, 4), slice(1, 5), slice(1, 3)),
        (slice(4, 5), slice(3, 5), slice(1, 2)),
    ]


def test_a_convolution_and_a_sum_by_tiles_are_those_of_the_whole(within):
    x, weight = torch.randn(2, 70, 131, 3), torch.randn(4, 3, 3, 3)

    def part(seen, inner):
        y = convolve(seen, weight)[:, *inner]
        return y, y.sum(dim=(1, 2))

    whole, total = by_tiles(part, x)
    within(whole, convolve(x, weight))
    within(total, convolve(x, weight).sum(dim=(1, 2)))


@pytest.mark.parametrize("make", [lambda: ChannelAttention(8, 2, bias=True), lambda: GatedConvFfn(8, 20, bias=True)])
@pytest.mark.parametrize("size", [(64, 64), (64, 65), (65, 130), (3, 2000), (2000, 3)])
def test_large_maps_by_tiles_are_plain(make, size, within, perturbed, monkeypatch):
    layer, x, taken = perturbed(make()), torch.randn(2, *size, 8), []
    for module in ("core.ffn", "core.channel"):
        monkeypatch.setattr(f"{module}.by_tiles", lambda part, x: taken.append(x.shape) or by_tiles(part, x))
    layer(x)  # a gradient needs all maps
    assert not taken
    with torch.no_grad():
        within(layer(x), layer.plain(x))
    assert len(taken) == (size[0] * size[1] > 4096)


@torch.no_grad()
def test_strips_of_a_map_are_taken_where_they_lie(within, perturbed):
    """What streaming and cropping give: maps that are not contiguous."""
    layer, x = perturbed(GatedConvFfn(8, 20)), torch.randn(1, 100, 100, 16)[:, 3:, :90, :8]
    within(layer(x), layer.plain(x.contiguous()))
