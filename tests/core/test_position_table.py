from __future__ import annotations

import math

import pytest
import timm.layers.pos_embed_rel
import torch
import torch.nn.functional as F
from timm.models import swin_transformer, swin_transformer_v2

from core.coordinates import grid, line, padded_line
from core.position import ContinuousBias, RelativeTable, Site
from core.position.table import whole_index


def q_for(position, n, b=1):
    return torch.zeros(b, position.site.heads, n, 4)


def relative(extent, prefix=0, heads=3, **options):
    return RelativeTable(Site(heads * 4, heads, extent, prefix=prefix), **options)


def whole(position, *size):
    n = math.prod(size) + position.site.prefix
    return position.bias(q_for(position, n), grid(*size), grid(*size))


@pytest.mark.parametrize("window", [(7, 7), (3, 5), (1, 1), (1, 4)])
def test_relative_table_is_swins(window):
    theirs = swin_transformer.WindowAttention(12, 3, window_size=window)
    ours = relative(window)
    ours.load_state_dict({"table": theirs.relative_position_bias_table})
    assert torch.equal(whole(ours, *window), theirs._get_rel_pos_bias()[0])


@pytest.mark.parametrize("window", [(4, 4), (3, 5)])
def test_prefix_rows_are_beits(window):
    theirs = timm.layers.RelPosBias(window, 3, prefix_tokens=1)
    ours = RelativeTable(Site(12, 3, window, prefix=1), prefix=True)
    table = theirs.relative_position_bias_table
    ours.load_state_dict({"table": table[:-3], "prefix_table": table[-3:]})
    assert torch.equal(whole(ours, *window), theirs.get_bias()[0])


def test_prefix_of_registers_and_at_decode():
    position = RelativeTable(Site(12, 3, (2, 3), prefix=2), prefix=True)
    bias = whole(position, 2, 3)
    outgoing, incoming, among = position.prefix_table.split([2, 2, 4])
    assert bias.shape == (3, 8, 8)
    assert torch.equal(bias[:, 1, 5], outgoing[1])
    assert torch.equal(bias[:, 5, 1], incoming[1])
    assert torch.equal(bias[:, 0, 1], among[1])
    assert torch.equal(bias[:, 1, 0], among[2])
    last = grid(2, 3).flatten(0, 1)[-1:]
    assert torch.equal(position.bias(q_for(position, 1), last, grid(2, 3)), bias[:, -1:])
    without = RelativeTable(position.site)
    assert without.prefix_table is None
    assert not whole(without, 2, 3)[:, :2].any()
    assert not whole(without, 2, 3)[:, :, :2].any()


@pytest.mark.parametrize("size", [(5, 5), (9, 9), (3, 3), (1, 1)])
def test_another_size_resizes_as_swin(size):
    """microsoft/Swin-Transformer #117: the table of one window does not fit another."""
    ours = relative((7, 7))
    shape = ((2 * size[0] - 1) * (2 * size[1] - 1), 3)
    table = timm.layers.pos_embed_rel.resize_rel_pos_bias_table_simple(ours.table, size, shape)
    smaller = relative(size)
    smaller.load_state_dict({"table": table})
    assert torch.allclose(whole(ours, *size), whole(smaller, *size), atol=1e-6)


def test_another_size_that_is_not_square():
    ours, larger = relative((3, 5)), relative((6, 4))
    table = F.interpolate(ours.table.T.reshape(1, 3, 5, 9), size=(11, 7), mode="bicubic")
    larger.load_state_dict({"table": table.flatten(2)[0].T})
    assert torch.allclose(whole(ours, 6, 4), whole(larger, 6, 4), atol=1e-6)


def test_index_and_interpolation_are_one():
    position = relative((4, 5))
    flat = grid(4, 5).flatten(0, 1)
    expected = whole(position, 4, 5)
    assert torch.equal(position.bias(q_for(position, 20), flat, flat), expected)
    assert torch.equal(position.bias(q_for(position, 20), grid(4, 5), flat), expected)
    order = torch.randperm(20)
    assert torch.equal(position.bias(q_for(position, 20), flat, flat[order]), expected[..., order])
    rows = torch.stack([flat, flat[order]])
    bias = position.bias(q_for(position, 20, b=2), grid(4, 5), rows)
    assert torch.equal(bias, torch.stack([expected, expected[..., order]]))


def test_sampled_keys_are_grid_samples():
    """Deformable sampling (DAT): displacements read the table bilinearly, zero beyond it."""
    position = relative((4, 5))
    points = torch.rand(2, 7, 2) * torch.tensor([6.0, 7.0]) - 1.5  # some outside
    apart = grid(4, 5).flatten(0, 1)[:, None] - points[:, None]
    target = apart.flip(-1) / torch.tensor([4.0, 3.0])
    plane = position.table.T.reshape(1, 3, 7, 9).expand(2, -1, -1, -1)
    theirs = F.grid_sample(plane, target, align_corners=True)
    assert torch.allclose(position.bias(q_for(position, 20, b=2), grid(4, 5), points), theirs, atol=1e-6)
    by_grid = position.bias(q_for(position, 20, b=2), grid(4, 5), points[:, :6].unflatten(1, (2, 3)))
    assert torch.allclose(by_grid, theirs[..., :6], atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2])
def test_sampled_keys_get_gradients(batch):
    position = relative((3, 3)).double()
    points = (torch.rand(batch, 5, 2, dtype=torch.float64) * 2).requires_grad_()
    at = grid(3, 3).double()
    assert torch.autograd.gradcheck(lambda p: position.bias(q_for(position, 9, b=batch).double(), at, p), points)


def test_sequences_count_distances():
    position = relative((6,))
    i, j = torch.arange(6)[:, None], torch.arange(6)
    expected = position.table[i - j + 5].permute(2, 0, 1)
    assert torch.equal(position.bias(q_for(position, 6), line(6), line(6)), expected)
    assert torch.equal(position.bias(q_for(position, 2), line(2, start=4), line(6)), expected[:, 4:])
    real = torch.tensor([[False, False, True, True], [True] * 4])
    bias = position.bias(q_for(position, 4, b=2), padded_line(real), padded_line(real))
    assert torch.equal(bias[0, :, 2:, 2:], expected[:, :2, :2])
    assert torch.equal(bias[1], expected[:, :4, :4])


@pytest.mark.parametrize(
    ("extent", "q_at", "k_at", "message"),
    [
        ((4,), line(5), line(5), "places -4 to 4 leave -3 to 3: the distances that a relative table of 4 knows; use a larger"),
        ((4,), line(1, start=9), line(3), "places 7 to 9 leave -3 to 3"),
        ((3, 3), grid(2, 5), grid(3, 3), "places -2 to 4 leave -2 to 2: .* use a larger extent, or Alibi or T5Bias"),
    ],
)
def test_relative_table_raises_past_its_end(extent, q_at, k_at, message):
    position = relative(extent)
    with pytest.raises(ValueError, match=message):
        position.bias(q_for(position, q_at[..., 0].numel()), q_at, k_at)


@pytest.mark.parametrize("extent", [(), (2, 2, 2)])
def test_relative_table_needs_an_extent(extent):
    with pytest.raises(ValueError, match=r"gives RelativeTable no table; give Site\(extent=\(n,\)\) or \(h, w\)"):
        relative(extent)


def test_index_is_derived_and_not_saved():
    position = relative((3, 4))
    assert list(position.state_dict()) == ["table"]
    assert torch.equal(relative((3, 4)).to_empty(device="cpu").index, position.index)
    assert torch.equal(position.half().index, whole_index((3, 4), torch.device("cpu")))


# --- continuous


def continuous(extent, heads=3, prefix=0, **options):
    return ContinuousBias(Site(heads * 4, heads, extent, prefix=prefix), **options)


def swin_v2(window, pretrained=(0, 0), heads=3):
    torch.manual_seed(1)
    return swin_transformer_v2.WindowAttention(12, window, heads, pretrained_window_size=pretrained)


def load(ours, theirs):
    state = {"hidden.weight": "0.weight", "hidden.bias": "0.bias", "out.weight": "2.weight"}
    ours.load_state_dict({name: theirs.cpb_mlp.state_dict()[key] for name, key in state.items()})


def swin_v2_bias(theirs):
    n = math.prod(theirs.window_size)
    table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, theirs.num_heads)
    return 16 * table[theirs.relative_position_index.flatten()].view(n, n, -1).permute(2, 0, 1).sigmoid()


@pytest.mark.parametrize("pretrained", [(), (6, 6), (1, 12)])
@pytest.mark.parametrize("window", [(8, 8), (3, 5), (1, 1), (1, 4)])
def test_continuous_bias_is_swin_v2s(window, pretrained, within):
    # A window of one cell is 0/0 in the published code.
    theirs, ours = swin_v2(window, pretrained or (0, 0)), continuous(window, pretrained_extent=pretrained)
    load(ours, theirs)
    bias = whole(ours, *window)
    assert bias.isfinite().all()
    assert (bias - swin_v2_bias(theirs)).abs().max() < 1e-5


def test_larger_windows_keep_the_measure():
    theirs, ours = swin_v2((12, 12), (8, 8)), continuous((8, 8))
    load(ours, theirs)
    assert (whole(ours, 12, 12) - swin_v2_bias(theirs)).abs().max() < 1e-5


def test_grid_and_points_are_one():
    position = continuous((3, 4))
    flat = grid(3, 4).flatten(0, 1)
    assert torch.allclose(position.bias(q_for(position, 12), flat, flat), whole(position, 3, 4), atol=1e-5)
    points = torch.rand(2, 5, 2) * 3
    bias = position.bias(q_for(position, 12, b=2), grid(3, 4), points)
    one = position.evaluate(grid(3, 4)[1, 2] - points[1, 4])
    assert torch.allclose(bias[1, :, 6, 4], one, atol=1e-5)


def test_sequences_evaluate_each_distance_once():
    position = continuous((6,))
    apart = torch.arange(9.0)[:, None] - torch.arange(9.0)
    expected = position.evaluate(apart[..., None])
    assert torch.allclose(position.bias(q_for(position, 9), line(9), line(9)), expected, atol=1e-5)  # longer than the extent
    decoded = position.bias(q_for(position, 1), line(1, start=8), line(9))
    assert torch.allclose(decoded, expected[:, -1:], atol=1e-5)
    between = position.bias(q_for(position, 1), line(1) + 0.5, line(2))
    assert torch.allclose(between[:, 0, 0], (expected[:, 0, 0] + expected[:, 1, 0]) / 2, atol=1e-5)
    with pytest.raises(ValueError, match="places 9 to 11 leave -5 to 5: the distances of that many places; use a larger"):
        position.bias(q_for(position, 1), line(1, start=11), line(3))


def test_neighbours_differ_in_a_low_precision_model():
    position = continuous((64,)).bfloat16()
    bias = position.bias(q_for(position, 1), line(1, start=63), line(64))
    assert bias.dtype == torch.float32
    assert len(bias[0, 0].unique()) == 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(position.bias(q_for(position, 1), line(1, start=63), line(64)), bias)


def test_continuous_bias_refuses():
    with pytest.raises(ValueError, match=r"extent=\(\) gives ContinuousBias no measure; give Site\(extent=\(n,\)\) or \(h, w\)"):
        continuous(())
    with pytest.raises(ValueError, match=r"pretrained_extent=\(8,\) and extent=\(4, 4\) differ in axes; give 2 numbers"):
        continuous((4, 4), pretrained_extent=(8,))
    with pytest.raises(ValueError, match=r"pretrained_extent=0 is too small; use 1 or more"):
        continuous((4, 4), pretrained_extent=(0, 8))
    with pytest.raises(ValueError, match=r"hidden=0 is too small; use 1 or more"):
        continuous((4, 4), hidden=0)
