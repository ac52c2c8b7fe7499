from __future__ import annotations

import math
from functools import reduce

import pytest
import torch

from core import ChannelAttention
from core.channel import ChannelSums, channel_sums

SHAPES = ((1, 8, 9), (2, 5, 7), (1, 1, 1), (3, 1, 6))  # b h w


def by_loop(attention, x):
    """The formula, channel by channel, in float64: outputs and weights."""
    project = attention.double().project(x.double())
    b, h, w, _ = x.shape
    dim, heads = attention.dim, attention.heads
    e = dim // heads
    mixed = torch.zeros(b, h, w, dim, dtype=torch.float64)
    weights = torch.zeros(b, heads, e, e, dtype=torch.float64)
    for row in range(b):
        for head in range(heads):
            for i in range(e):
                q = project[row, ..., head * e + i]
                scores = []
                for j in range(e):
                    k = project[row, ..., dim + head * e + j]
                    lengths = max(float(q.norm()), 1e-12) * max(float(k.norm()), 1e-12)
                    scores.append(math.exp(float((q * k).sum()) / lengths * float(attention.temperature[head])))
                for j in range(e):
                    weights[row, head, i, j] = scores[j] / sum(scores)
                    mixed[row, ..., head * e + i] += weights[row, head, i, j] * project[row, ..., 2 * dim + head * e + j]
    return attention.out(mixed), weights


@pytest.mark.parametrize(("heads", "bias"), [(1, False), (2, True), (4, False)])
def test_folded_is_plain_is_the_formula(within, perturbed, heads, bias):
    attention = perturbed(ChannelAttention(8, heads, bias=bias))
    for shape in SHAPES:
        x = torch.randn(*shape, 8)
        with torch.no_grad():
            y, plain, weights = attention(x), attention.plain(x), attention.look(x)
            reference, reference_weights = by_loop(attention, x)
        attention.float()
        within(y, reference.float())
        within(plain, reference.float())
        torch.testing.assert_close(weights, reference_weights.float())


def test_gradients_of_both_paths(within, perturbed):
    attention = perturbed(ChannelAttention(8, 2, bias=True)).double()
    x = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    grads = []
    for path in (attention.forward, attention.plain):
        leaf = x.clone().requires_grad_()
        attention.zero_grad()
        path(leaf).square().sum().backward()
        grads.append({"x": leaf.grad, **{name: p.grad.clone() for name, p in attention.named_parameters()}})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-9, atol=1e-9)


def test_black_picture_has_finite_gradients():
    """Queries and keys of length 0 weigh all channels alike."""
    attention = ChannelAttention(6, 2)
    x = torch.zeros(1, 4, 4, 6, requires_grad=True)
    attention(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in attention.parameters())
    torch.testing.assert_close(attention.look(x), torch.full((1, 2, 3, 3), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_many_pixels_are_finite_in_half_precision(perturbed, dtype):
    """A raw sum of products over 128 x 128 pixels of size 4 is 2.6e5, and float16 ends at 6.6e4."""
    attention = perturbed(ChannelAttention(8, 2))
    x = torch.randn(1, 128, 128, 8)
    with torch.no_grad():
        attention.qkv.weight.mul_(4 / attention.project(x).std())
        reference, y = attention(x), attention.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert (y.float() - reference).std() < 0.02 * reference.std()


def test_autocast_keeps_the_sums_wide(perturbed):
    attention, x = perturbed(ChannelAttention(8, 2)), torch.randn(2, 6, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, _ = attention.project(x).chunk(3, dim=-1)
        sums = channel_sums(q, k, 2)
        y = attention(x)
    assert all(part.dtype == torch.float32 for part in sums)
    assert y.dtype == torch.bfloat16
    assert (y.float() - attention(x)).std() < 0.02 * attention(x).std()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_sums_add_up_over_parts(within, perturbed, rows):
    """What streaming relies on: parts of the projection, and sums over bands, are those of the whole."""
    attention = perturbed(ChannelAttention(8, 2, bias=True))
    x = torch.randn(2, 7, 5, 8)
    whole = attention.project(x)
    for first, last in ((0, 16), (16, 24), (3, 5)):
        within(attention.project_part(x, first, last), whole[..., first:last])
    q, k, _ = whole.chunk(3, dim=-1)
    parts = [channel_sums(*part, 2) for part in zip(q.split(rows, dim=1), k.split(rows, dim=1), strict=True)]
    for together, alone in zip(reduce(ChannelSums.plus, parts), channel_sums(q, k, 2), strict=True):
        within(together, alone)


def test_every_channel_asks_channels_of_its_head_only(perturbed):
    attention = perturbed(ChannelAttention(6, 3))
    x = torch.randn(1, 4, 5, 6)
    weights = attention.look(x)
    assert weights.shape == (1, 3, 2, 2)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 3, 2))


@pytest.mark.usefixtures("unchecked")
def test_errors():
    with pytest.raises(ValueError, match=r"dim=50 does not split over heads=3; use dim=48 or heads=2"):
        ChannelAttention(50, 3)
    with pytest.raises(ValueError, match=r"map of shape \(1, 4, 4, 5\) is not b h w 6; use channels-last maps as wide as dim=6"):
        ChannelAttention(6, 2)(torch.randn(1, 4, 4, 5))
    with pytest.raises(ValueError, match=r"map of shape \(4, 4, 6\) is not b h w 6"):
        ChannelAttention(6, 2)(torch.randn(4, 4, 6))


@pytest.mark.compile
def test_compiles_to_one_graph(within, perturbed):
    attention, x = perturbed(ChannelAttention(8, 2)), torch.randn(2, 6, 7, 8)
    within(torch.compile(attention, fullgraph=True)(x), attention(x))
