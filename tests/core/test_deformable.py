"""Deformable attention: points, sampled keys, biases by interpolation; several maps as in Deformable DETR."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from core import (
    Alibi,
    Attention,
    Combined,
    ContinuousBias,
    DeformableAttention,
    Learned,
    MultiScaleDeformableAttention,
    RelativeTable,
    Rotary,
    Shaw,
    Site,
    T5Bias,
    grid,
)
from core.deformable import query_points, reference_points


def test_reference_points_are_the_published_ones():
    axis = reference_points((7, 7), "dat")[:, 0, 0]
    assert axis[[0, 3, 6]].tolist() == pytest.approx([-6 / 7, 0, 6 / 7])
    assert torch.equal(query_points((7, 5), "dat"), reference_points((7, 5), "dat"))
    axis = reference_points((7, 7), "dat++")[:, 0, 0]
    assert axis[[0, 6]].tolist() == pytest.approx([-5 / 6, 7 / 6])
    assert query_points((7, 7), "dat++")[0, :, 1][[0, 3, 6]].tolist() == pytest.approx([-1, 0, 1])


@pytest.mark.parametrize("reference", ["dat", "dat++"])
def test_a_single_point_stands_in_the_middle(reference):
    assert reference_points((1, 1), reference).tolist() == query_points((1, 1), reference).tolist() == [[[0.0, 0.0]]]
    assert reference_points((1, 3), reference)[0, :, 0].tolist() == [0, 0, 0]


def published(layer: DeformableAttention, x: torch.Tensor) -> torch.Tensor:
    """The paper's formulas over `b c h w`, all in coordinates from -1 to 1, the bias read by `grid_sample`."""
    b, h, w, d = x.shape
    g, n, e = layer.groups, layer.heads, d // layer.heads
    q = layer.q(x)
    maps = q.permute(0, 3, 1, 2).reshape(b * g, d // g, h, w)
    hidden = F.gelu(layer.offset_norm(layer.offset_conv(maps).permute(0, 2, 3, 1)))
    offset = layer.offset_out(hidden)
    i, j = offset.shape[1:3]
    less = 1 if layer.reference == "dat++" else 0
    spaces = torch.tensor([i - less, j - less])
    start = torch.stack(torch.meshgrid(torch.arange(i) + 0.5, torch.arange(j) + 0.5, indexing="ij"), -1) / spaces * 2 - 1
    points = (start + offset).clamp(-1, 1) if layer.offset_range is None else start + offset.tanh() / spaces * layer.offset_range
    sampled = F.grid_sample(x.permute(0, 3, 1, 2).reshape(b * g, d // g, h, w), points[..., [1, 0]], align_corners=True)
    sampled = sampled.reshape(b, d, i * j).mT
    q, k, v = (t.reshape(b, -1, n, e).transpose(1, 2) for t in (q, layer.k(sampled), layer.v(sampled)))
    half = 0 if less else 0.5
    queries = torch.stack(torch.meshgrid(torch.arange(h) + half, torch.arange(w) + half, indexing="ij"), -1)
    queries = queries / torch.tensor([h - less, w - less]) * 2 - 1
    apart = (queries.reshape(1, h * w, 1, 2) - points.reshape(b * g, 1, i * j, 2)) / 2
    table = torch.cat([part.table.T for part in layer.positions]).unflatten(1, [2 * side - 1 for side in layer.extent])
    table = table.reshape(1, g, n // g, *table.shape[1:]).expand(b, -1, -1, -1, -1).flatten(0, 1)
    bias = F.grid_sample(table, apart[..., [1, 0]], align_corners=True).reshape(b, n, h * w, i * j)
    y = (q @ k.mT * e**-0.5 + bias).softmax(-1) @ v
    return layer.out(y.transpose(1, 2).reshape(b, h, w, d))


CASES = {
    "dat": {"offset_range": 2.0},
    "dat, far": {"offset_range": 9.0, "kernel": 5},
    "dat++": {"reference": "dat++", "offset_range": None, "stride": 2, "kernel": 5},
    "dat++, bounded": {"reference": "dat++", "offset_range": 1.0},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [(7, 7), (9, 5)], ids=str)  # the second one stretches the table, as published
def test_equals_the_published_formulas(options, size, perturbed, within):
    layer = perturbed(DeformableAttention(24, 6, (7, 7), groups=3, **options))
    with torch.no_grad():
        layer.offset_out.weight.mul_(5)
    x, target = torch.randn(2, *size, 24), torch.randn(2, *size, 24)
    ours, reference = layer(x), published(layer, x)
    within(ours.detach(), reference.detach())
    parameters = list(layer.parameters())
    for a, b in zip(
        torch.autograd.grad((ours * target).sum(), parameters),
        torch.autograd.grad((reference * target).sum(), parameters),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-5


def test_points_on_the_cells_are_plain_attention(perturbed, within):
    """Without offsets DAT++'s points would be off centre; put on the cells, keys and bias are those of `Attention`."""
    layer = perturbed(DeformableAttention(12, 2, (4, 5)))
    plain = Attention(12, 2, position=RelativeTable(Site(12, 2, extent=(4, 5))))
    with torch.no_grad():
        plain.qkv.weight.copy_(torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]))
        plain.qkv.bias.copy_(torch.cat([layer.q.bias, layer.k.bias, layer.v.bias]))
        plain.position.table.copy_(layer.positions[0].table)
    plain.out = layer.out
    layer.reference = "dat++"  # whose queries stand on the cells
    layer.points = lambda q: query_points((4, 5), "dat++").expand(2, 1, 4, 5, 2)
    x = torch.randn(2, 4, 5, 12)
    with torch.no_grad():
        within(layer(x).flatten(1, 2), plain(x.flatten(1, 2), at=grid(4, 5)))


@pytest.mark.parametrize("reference", ["dat", "dat++"])
@pytest.mark.parametrize("offset_range", [2.0, None])
@pytest.mark.parametrize("size", [(1, 1), (1, 6), (3, 2)], ids=str)
def test_small_maps_are_finite_and_so_are_their_gradients(reference, offset_range, size):
    layer = DeformableAttention(8, 2, (7, 7), groups=2, kernel=9, stride=8, reference=reference, offset_range=offset_range)
    x = torch.randn(2, *size, 8, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in [x, *layer.parameters()])


def test_groups_have_points_of_their_own_and_heads_follow_their_group():
    layer, x = DeformableAttention(8, 4, (6, 6), groups=2), torch.randn(1, 6, 6, 8)
    points = layer.points(layer.q(x))
    assert points.shape == (1, 2, 6, 6, 2)
    assert not torch.equal(points[:, 0], points[:, 1])
    assert points.shape[2:] == reference_points((6, 6), "dat").shape
    assert (points - reference_points((6, 6), "dat")).abs().max() <= 2 / 6  # the range, in halves of a space


POSITIONS = {
    "none": None,
    "Alibi": Alibi,
    "ContinuousBias": ContinuousBias,
    "RelativeTable": RelativeTable,
    "Rotary": Rotary,
    "T5Bias": T5Bias,
    "two": partial(Combined, kinds=[Rotary, RelativeTable]),
}


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_positions_with_a_rotation_or_a_bias_train_a_step(position):
    layer, x = DeformableAttention(16, 4, (5, 5), groups=2, position=position), torch.randn(2, 5, 4, 16)
    layer(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize(("position", "hook"), [(Learned, "embed"), (Shaw, "value")])
def test_positions_that_would_do_nothing_are_refused(position, hook):
    with pytest.raises(ValueError, match=rf"{position.__name__} works through {hook}, which DeformableAttention never calls"):
        DeformableAttention(16, 4, (5, 5), position=position)


def test_bfloat16_keeps_the_places(perturbed):
    layer, x = perturbed(DeformableAttention(16, 4, (14, 14), groups=2)), torch.randn(2, 14, 14, 16)
    with torch.no_grad():
        wide, narrow = layer(x), layer.bfloat16()(x.bfloat16()).float()
    assert (wide - narrow).abs().max() < 0.1 * wide.std()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, r"dim=16 does not split over heads=5; use heads that divide dim"),
        ({"groups": 3}, r"heads=4 do not split over groups=3; use groups that divide heads"),
        ({"kernel": 4}, r"kernel=4 and stride=1 give no offsets; use an odd kernel and a stride of 1 or more"),
        ({"stride": 0}, r"kernel=3 and stride=0 give no offsets"),
        ({"reference": "v1"}, r"reference='v1' is unknown; use 'dat' or 'dat\+\+'"),
        ({"offset_range": -1.0}, r"offset_range=-1.0 is not positive; use e.g. 2, or None for no bound"),
    ],
)
def test_wrong_options_name_the_rule_and_the_fix(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        DeformableAttention(**{"dim": 16, "heads": 4, "extent": (5, 5), **options})


# Several maps

SIZES = [(6, 5), (3, 4), (1, 1)]


def theirs_and_ours(points: int = 4):
    from transformers.models.deformable_detr import modeling_deformable_detr as detr

    config = detr.DeformableDetrConfig(d_model=32, num_feature_levels=3, disable_custom_kernels=True)
    theirs = detr.DeformableDetrMultiscaleDeformableAttention(config, num_heads=4, n_points=points)
    ours = MultiScaleDeformableAttention(32, 4, levels=3, points=points)
    return theirs.eval(), ours.eval()


NAMES = {"sampling_offsets": "offsets", "attention_weights": "weights", "value_proj": "value", "output_proj": "out"}


@pytest.mark.parametrize("kind", [2, 4], ids=["points", "boxes"])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_transformers_deformable_detr(kind, padded, perturbed, within):
    theirs, ours = theirs_and_ours(points=3)
    perturbed(theirs)
    ours.load_state_dict({f"{NAMES[n.split('.')[0]]}.{n.split('.')[1]}": t for n, t in theirs.state_dict().items()})
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 43, 32)
    reference = torch.rand(2, 7, 3, kind)
    real = torch.rand(2, 43) > 0.3 if padded else None
    with torch.no_grad():
        expected = theirs(
            hidden_states=x,
            attention_mask=torch.ones(2, 43, dtype=torch.bool) if real is None else real,
            encoder_hidden_states=memory,
            reference_points=reference,
            spatial_shapes=torch.tensor(SIZES),
            spatial_shapes_list=SIZES,
            level_start_index=torch.tensor([0, 30, 42]),
        )[0]
        within(ours(x, memory, SIZES, reference, real), expected)


def test_several_maps_start_as_published(within):
    theirs, ours = theirs_and_ours()
    theirs._reset_parameters() if hasattr(theirs, "_reset_parameters") else None
    bias = ours.offsets.bias.detach().view(4, 3, 4, 2)
    assert bias[0, 0].tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]  # the first head looks to the right, a cell a point
    assert torch.allclose(bias[1, 2], torch.tensor([[0.0, 1], [0, 2], [0, 3], [0, 4]]), atol=1e-6)  # the second one down
    assert not ours.weights.weight.any()


def test_padding_may_hold_nan(within):
    ours, real = MultiScaleDeformableAttention(16, 2, levels=1), torch.ones(1, 12, dtype=torch.bool)
    real[0, 8:] = False
    x, memory, at = torch.randn(1, 5, 16), torch.randn(1, 12, 16), torch.rand(1, 5, 1, 2)
    spoilt = memory.clone()
    spoilt[0, 8:] = torch.nan
    with torch.no_grad():
        within(ours(x, spoilt, [(3, 4)], at, real), ours(x, memory, [(3, 4)], at, real))


@pytest.mark.parametrize(
    ("sizes", "levels", "axes", "message"),
    [
        ([(3, 4)], 2, 2, r"1 sizes and references on 2 maps do not fit levels=2; give one of each a level"),
        ([(3, 4), (1, 1)], 2, 2, r"sizes=\[\(3, 4\), \(1, 1\)\] hold 13 tokens, the memory 12; flatten each map by rows"),
        ([(2, 4), (2, 2)], 2, 3, r"reference of shape \(1, 5, 2, 3\) ends in neither \(x, y\) nor \(x, y, w, h\); use 2 or 4"),
    ],
)
def test_wrong_maps_name_the_rule_and_the_fix(sizes, levels, axes, message):
    ours = MultiScaleDeformableAttention(16, 2, levels=2)
    with pytest.raises(ValueError, match=message):
        ours(torch.randn(1, 5, 16), torch.randn(1, 12, 16), sizes, torch.rand(1, 5, levels, axes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"dim=16 does not split over heads=3; use heads that divide dim"),
        ({"heads": 2, "points": 0}, r"levels=4 and points=0 sample nothing; use 1 or more of each, such as 4"),
    ],
)
def test_wrong_options_of_several_maps_name_the_rule_and_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        MultiScaleDeformableAttention(16, **options)
