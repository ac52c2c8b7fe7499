from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed

from core.coordinates import grid, line, padded_line
from core.position import Learned, Sinusoidal, Site

LAYOUTS = ("interleaved", "halves", "sincos")


def table(dim, at, **options):
    """What a sinusoidal position adds at `at`, in float64."""
    extent = (9,) * at.shape[-1] if at.shape[-1] > 1 else ()
    x = torch.zeros(1, math.prod(at.shape[:-1]), dim, dtype=torch.float64)
    return Sinusoidal(Site(dim, 1, extent), **options).embed(x, at)[0]


def closed_form(place, dim, layout, base=10000.0):
    """One row, number by number, in Python's floats."""
    half = dim // 2
    over = half - 1 if layout == "halves" else half
    angles = [place / base ** (i / over) for i in range(half)]
    if layout == "interleaved":
        return [f(a) for a in angles for f in (math.sin, math.cos)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoid_is_the_closed_form(layout):
    at = line(3, start=4998)
    expected = torch.tensor([closed_form(p, 64, layout) for p in (4998, 4999, 5000)], dtype=torch.float64)
    assert (table(64, at, layout=layout) - expected).abs().max() < 1e-11


@pytest.mark.parametrize("size", [(4, 4), (3, 5)])
def test_sincos2d_is_timms(size):
    ours = table(32, grid(*size), layout="sincos")
    theirs = build_sincos2d_pos_embed(list(size), 32, interleave_sin_cos=True)
    assert (ours - theirs).abs().max() < 1e-6
    rows_sin, columns_sin, rows_cos, columns_cos = build_sincos2d_pos_embed(list(size), 32).chunk(4, dim=-1)
    assert (ours - torch.cat([rows_sin, rows_cos, columns_sin, columns_cos], -1)).abs().max() < 1e-6


@pytest.mark.parametrize(("layout", "last"), [("sincos", 8), ("halves", 7)])
def test_columns_first_is_mae_and_big_vision(layout, last):
    # MAE: omega = base ** -(k / (d / 4)); big_vision: base ** -(k / (d / 4 - 1)); both x first, sines before cosines.
    y, x = np.mgrid[:3, :5]
    omega = 10000.0 ** -(np.arange(8) / last)
    x, y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    assert np.abs(table(32, grid(3, 5), layout=layout, columns_first=True).numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("k", [1, 17, -5])
def test_a_shift_of_the_place_is_a_rotation(k):
    here, there = table(16, line(20, start=50)), table(16, line(20, start=50 + k))
    angles = k * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    sin, cos = here[:, 0::2], here[:, 1::2]
    assert (sin * angles.cos() + cos * angles.sin() - there[:, 0::2]).abs().max() < 1e-10
    assert (cos * angles.cos() - sin * angles.sin() - there[:, 1::2]).abs().max() < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "at", "used"), [(7, line(4), 6), (5, grid(2, 2), 4), (10, grid(2, 2), 8), (2, line(4), 2)])
def test_channels_that_do_not_split_are_zero(dim, at, used, layout):
    ours = table(dim, at, layout=layout)
    assert ours.isfinite().all()
    assert torch.equal(ours[:, :used], table(used, at, layout=layout))
    assert not ours[:, used:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_places_apart(dtype):
    """Coordinates in bfloat16 collide from 257 on: 3327 of the first 4096 places."""
    position = Sinusoidal(Site(64, 1)).to(dtype)
    rows = position.embed(torch.zeros(1, 4096, 64, dtype=dtype), line(4096))[0]
    assert rows.dtype == dtype
    assert len(rows.float().unique(dim=0)) == 4096
    assert (rows.double() - table(64, line(4096))).abs().max() <= torch.finfo(dtype).eps / 2


def test_prefix_gets_no_sinusoid():
    rows = Sinusoidal(Site(8, 1, (2, 3), prefix=2)).embed(torch.zeros(1, 8, 8), grid(2, 3))[0]
    assert not rows[:2].any()
    assert torch.equal(rows[2:], table(8, grid(2, 3)).float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "paper"}, "layout='paper' is unknown; use 'interleaved', 'halves' or 'sincos'"),
        ({"base": 1.0}, "base=1.0 is not a finite number above 1; use e.g. 10000"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_sinusoid_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Sinusoidal(Site(8, 1), **options)
    with pytest.raises(ValueError, match="dim=3 has no room for a sine and a cosine an axis; use dim=4 or more"):
        Sinusoidal(Site(3, 1, (2, 2)))


def embedded(position, at, tokens, batch=1):
    return position.embed(torch.zeros(batch, tokens, position.site.dim, dtype=position.table.dtype), at)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("size", [(4, 4), (6, 6), (3, 7), (2, 2), (1, 5)])
def test_learned_resizes_as_timm(size, prefix, within):
    position = Learned(Site(8, 2, (4, 4), prefix=prefix))
    theirs = resample_abs_pos_embed(position.table[None], list(size), [4, 4], num_prefix_tokens=prefix)
    within(embedded(position, grid(*size), prefix + math.prod(size)), theirs)
    with torch.no_grad():
        within(embedded(position, grid(*size), prefix + math.prod(size)), theirs)


def test_learned_without_rows_for_the_prefix_resizes_too(within):
    """huggingface/pytorch-image-models #1365: tables without a class token were resized as if they had one."""
    position = Learned(Site(8, 2, (4, 4), prefix=1), prefix=False)
    theirs = resample_abs_pos_embed(position.table[None], [6, 5], [4, 4], num_prefix_tokens=0)
    rows = embedded(position, grid(6, 5), 31)
    assert not rows[:, 0].any()
    within(rows[:, 1:], theirs)


@pytest.mark.parametrize("side", range(1, 60))
def test_transformers_32410_every_size_gets_all_its_rows(side):
    """A resize by a scale factor rounds to one row too few or too many."""
    assert Learned(Site(2, 1, (14, 14))).grid((side, 61 - side)).shape == (side * (61 - side), 2)


@pytest.mark.parametrize("size", [(7, 1), (12, 1), (2, 1)])
def test_a_picture_one_patch_wide_is_one_patch_high_turned(size, within):
    """F.interpolate (bicubic, antialiased) fills the one column of a CPU's result with its first number."""
    position, turned = Learned(Site(8, 2, (4, 4))), Learned(Site(8, 2, (4, 4)))
    turned.load_state_dict({"table": position.table.view(4, 4, 8).transpose(0, 1).flatten(0, 1)})
    within(position.grid(size), turned.grid(size[::-1]))
    assert len(position.grid(size).unique(dim=0)) == size[0]


def test_learned_of_a_table_that_is_not_square(within):
    position = Learned(Site(8, 2, (3, 5)))
    assert torch.equal(embedded(position, grid(3, 5), 15)[0], position.table)
    theirs = resample_abs_pos_embed(position.table[None], [5, 3], [3, 5], num_prefix_tokens=0)
    within(embedded(position, grid(5, 3), 15), theirs)


def test_learned_without_rows_for_the_prefix():
    position = Learned(Site(8, 2, (2, 2), prefix=2), prefix=False)
    rows = embedded(position, grid(2, 2), 6)[0]
    assert position.table.shape == (4, 8)
    assert not rows[:2].any()
    assert torch.equal(rows[2:], position.table)


def test_learned_at_points_between_cells():
    position = Learned(Site(8, 2, (3, 4), prefix=1))
    flat = grid(3, 4).flatten(0, 1)
    assert torch.equal(embedded(position, flat, 13)[0], position.table)
    kept = flat[[7, 2, 5]]  # masked pictures keep some patches
    assert torch.equal(embedded(position, kept, 3)[0], position.table[1:][[7, 2, 5]])
    points = torch.rand(2, 5, 2) * torch.tensor([2.0, 3.0])
    planes = position.table[1:].T.reshape(1, 8, 3, 4).expand(2, -1, -1, -1)
    target = points.flip(-1) / torch.tensor([3.0, 2.0]) * 2 - 1
    theirs = F.grid_sample(planes, target[:, None], align_corners=True)[:, :, 0].mT
    assert torch.allclose(embedded(position, points, 5, batch=2), theirs, atol=1e-6)


def test_learned_rows_follow_places_in_a_sequence():
    position = Learned(Site(8, 2, (6,)))
    assert torch.equal(embedded(position, line(4), 4)[0], position.table[:4])
    assert torch.equal(embedded(position, line(1, start=5), 1)[0], position.table[5:])  # decoding with a cache
    real = torch.tensor([[False, True, True], [True, True, True]])
    assert torch.equal(embedded(position, padded_line(real), 3, batch=2), position.table[torch.tensor([[0, 0, 1], [0, 1, 2]])])
    packed = torch.tensor([0.0, 1, 0, 1, 2])[:, None]
    assert torch.equal(embedded(position, packed, 5)[0], position.table[[0, 1, 0, 1, 2]])


@pytest.mark.parametrize(
    ("extent", "at", "message"),
    [
        ((4,), line(5), "places 0 to 4 leave 0 to 3: the places of a learned table of 4; use a larger extent, or Sinusoidal"),
        ((4,), line(4) - 1, "places -1 to 2 leave 0 to 3"),
        ((4,), line(4) * math.nan, "places nan to nan leave 0 to 3"),
        ((2, 3), grid(2, 3).flatten(0, 1) + 1, "places 1 to 2 leave 0 to 1"),
    ],
)
def test_learned_raises_past_its_end(extent, at, message):
    with pytest.raises(ValueError, match=message):
        embedded(Learned(Site(8, 2, extent)), at, len(at))


@pytest.mark.parametrize("extent", [(), (2, 2, 2)])
def test_learned_needs_an_extent(extent):
    with pytest.raises(ValueError, match=r"gives Learned no table; give Site\(extent=\(n,\)\) or \(h, w\)"):
        Learned(Site(8, 2, extent))


def restored(position):
    position.load_state_dict({"table": torch.randn_like(position.table)})


def assigned(position):
    position.load_state_dict({"table": torch.randn_like(position.table)}, assign=True)


def stepped(position):
    optimizer = torch.optim.AdamW(position.parameters(), lr=0.1)
    position.train()
    embedded(position, grid(3, 3), 10).square().sum().backward()
    optimizer.step()
    position.eval()


@torch.no_grad()
def copied(position):
    position.table.copy_(torch.randn_like(position.table))


def averaged(position):
    position.table.data.copy_(torch.randn_like(position.table))  # as Lightning's WeightAveraging: no version is counted


def swapped(position):
    position.table.data = torch.randn_like(position.table)


def halved(position):
    position.bfloat16()


def doubled(position):
    position.double()


def replaced(position):
    position.table = torch.nn.Parameter(torch.randn_like(position.table))


CHANGES = (restored, assigned, stepped, copied, averaged, swapped, halved, doubled, replaced)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_resized_table_outlives_its_weights(change, mode, within):
    position = Learned(Site(8, 2, (4, 4), prefix=1)).eval()
    with mode():
        embedded(position, grid(3, 3), 10)
    change(position)
    with mode():
        theirs = resample_abs_pos_embed(position.table[None], [3, 3], [4, 4], num_prefix_tokens=1)
        within(embedded(position, grid(3, 3), 10), theirs, 1e-2 if change is halved else 1e-5)


def test_resized_tables_are_kept_and_bounded():
    position = Learned(Site(8, 2, (4, 4))).eval()
    with torch.inference_mode():
        assert position.grid((3, 3)) is position.grid((3, 3))
        for side in range(5, 25):
            position.grid((side, side))
    assert len(position._resized) == Learned.KEPT
    assert list(position.state_dict()) == ["table"]
    assert torch.equal(copy.deepcopy(position).grid((3, 3)), position.grid((3, 3)))


def test_a_table_kept_in_inference_mode_does_not_reach_training():
    position = Learned(Site(8, 2, (4, 4)))
    with torch.inference_mode():
        embedded(position, grid(3, 3), 9)
    embedded(position, grid(3, 3), 9).square().sum().backward()
    assert position.table.grad.any()
