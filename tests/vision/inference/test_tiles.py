from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import vision
from vision.errors import UserError
from vision.inference.tiles import by_tiles, ramp, starts
from vision.models import Restormer


class Blur(nn.Module):
    """Looks 2 pixels far."""

    multiple = 1

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 5, padding=2)

    def forward(self, x):
        return self.conv(x).sigmoid()


class Upscale(nn.Module):
    """Looks 1 pixel far, and is twice the size."""

    scale = 2

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, x):
        return nn.functional.pixel_shuffle(self.conv(x), 2).sigmoid()


def test_tiles_cover_and_overlap():
    for side, tile, overlap, multiple in itertools.product(range(8, 200, 8), (16, 24, 64), (0, 4, 8), (1, 4, 8)):
        places = starts(side, tile, overlap, multiple)
        assert places[0] == 0
        assert places[-1] + tile >= side
        assert len(places) == 1 or places[-1] == side - tile
        assert all(place % multiple == 0 for place in places)
        assert all(b - a <= tile - overlap and b > a for a, b in itertools.pairwise(places))


def test_ramp_fades_over_the_inner_half():
    assert ramp(8).tolist() == [0, 0, 0.125, 0.375, 0.625, 0.875, 1, 1]
    torch.testing.assert_close(ramp(33) + ramp(33).flip(0), torch.ones(33))
    assert ramp(0).tolist() == []
    assert ramp(1).tolist() == [0.5]


@pytest.mark.parametrize(("h", "w"), [(64, 64), (65, 130), (200, 31), (1, 150), (97, 64)])
def test_issue_swinir_91_identity_is_exact(h, w):
    """Visible borders of tiles: none, to the last bit."""
    x = torch.rand(2, 3, h, w)
    for overlap in (0, 1, 16, 40):
        assert torch.equal(by_tiles(lambda tile: tile, x, tile=64, overlap=overlap), x)


@pytest.mark.parametrize("mode", ["whole", "tile"])
def test_issue_nafnet_4_and_swinir_69_no_blocks_and_no_mesh(within, mode):
    """A model that looks no further than a quarter of the overlap gives what it gives on the whole picture, borders and all."""
    x = torch.rand(3, 150, 201)
    for model in (Blur().eval(), Upscale().eval()):
        with torch.no_grad():
            expected = model(x[None])[0]
        within(vision.restore(model, x, mode=mode, tile=64 if mode == "tile" else None), expected)


def test_a_model_that_looks_far_changes_smoothly():
    """Each tile has a brightness of its own; the picture shows ramps, and no step greater than theirs (megvii-research/TLC #16:
    local statistics show as blocks)."""
    levels = iter(torch.linspace(0, 1, 9))
    y = by_tiles(lambda tile: torch.full_like(tile, next(levels).item()), torch.zeros(1, 1, 160, 160), tile=64, overlap=16)
    for axis in (-1, -2):
        assert y.diff(dim=axis).abs().max() < 1 / 8 * 1.01  # a ramp over the 8 pixels of the inner half of the overlap
    assert y.unique().numel() > 9


def test_tiles_are_what_the_model_works_in():
    shapes = set()

    class Windows(nn.Module):
        in_chans, multiple = 3, 24

        def forward(self, x):
            shapes.add(tuple(x.shape[-2:]))
            return x.clone()

    image = np.random.default_rng(0).integers(0, 256, (100, 130, 3), dtype=np.uint8)
    assert np.array_equal(vision.restore(Windows(), image, mode="tile", tile=72), image)
    assert np.array_equal(vision.restore(Windows(), image, mode="tile", memory="1MB"), image)
    assert np.array_equal(vision.restore(Windows(), image[:5, :5], mode="tile"), image[:5, :5])
    assert all(h % 24 == 0 and w % 24 == 0 for h, w in shapes)
    assert (72, 72) in shapes


def test_an_overlap_means_tiles():
    """Not passed over where the picture would go through whole."""
    shapes = []

    class Noting(nn.Module):
        multiple = 8

        def forward(self, x):
            shapes.append(tuple(x.shape[-2:]))
            return x

    vision.restore(Noting(), np.zeros((700, 96, 3), np.uint8), overlap=16)
    assert max(h for h, _ in shapes) < 700


def test_errors():
    image, model = np.zeros((200, 200, 3), np.uint8), Restormer(dim=2, depths=(1, 1, 1, 1), heads=(1, 1, 1, 1))
    for options, message in (
        ({"tile": 100}, r"tile=100 is not a multiple of 8, which Restormer works in; use 96"),
        ({"tile": 0}, r"tile=0 is not a multiple of 8, which Restormer works in; use 8"),
        ({"tile": 64, "overlap": 60}, r"overlap=60 leaves nothing of tile=64 to go on by, in steps of 8; use overlap=56 or less"),
        (
            {"tile": 8, "overlap": 6},
            r"overlap=6 leaves nothing of tile=8 to go on by, in steps of 8; use overlap=0, or a larger tile",
        ),
        ({"overlap": -1}, r"overlap=-1 is negative; use 0 or more pixels, such as 32"),
    ):
        with pytest.raises(UserError, match=message):
            vision.restore(model, image, mode="tile", **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 64.0}, r"tile=64.0 is no whole number; use pixels, such as 64"),
        ({"overlap": True}, r"overlap=True is no whole number; use pixels, such as 64"),
        ({"blend": "0.5"}, r"blend='0.5' is no number; use 0 \(the picture as it was\) to 1"),
    ],
)
def test_options_of_other_types_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        vision.restore(nn.Identity(), np.zeros((20, 20, 3), np.uint8), **options)
