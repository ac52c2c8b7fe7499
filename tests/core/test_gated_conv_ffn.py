from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core import GatedConvFfn


def by_torch(ffn, x):
    """The formula with convolutions over `b c h w`, as it is published."""
    up, down = (layer.weight[..., None, None] for layer in (ffn.up, ffn.down))
    y = F.conv2d(x.permute(0, 3, 1, 2), up, ffn.up.bias)
    gate, value = F.conv2d(y, ffn.depthwise.weight, ffn.depthwise.bias, padding=1, groups=2 * ffn.hidden).chunk(2, dim=1)
    return F.conv2d(F.gelu(gate) * value, down, ffn.down.bias).permute(0, 2, 3, 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hidden", [5, 21, 64, 127])  # 127 is rounded up with a zero, 21 is not
def test_forward_is_plain_is_the_formula(within, perturbed, hidden, bias):
    ffn = perturbed(GatedConvFfn(6, hidden, bias=bias))
    for x in (torch.randn(2, 5, 7, 6), torch.randn(1, 66, 130, 6)):  # the second in tiles
        reference = by_torch(ffn, x)
        within(ffn(x), reference)  # with a gradient
        with torch.no_grad():
            within(ffn(x), reference)
            within(ffn.plain(x), reference)


def test_gradients_of_both_paths(perturbed):
    ffn = perturbed(GatedConvFfn(3, 31, bias=True)).double()
    x = torch.randn(1, 4, 5, 3, dtype=torch.float64)
    grads = []
    for path in (ffn.forward, ffn.plain):
        leaf = x.clone().requires_grad_()
        ffn.zero_grad()
        path(leaf).square().sum().backward()
        grads.append({"x": leaf.grad, **{name: p.grad.clone() for name, p in ffn.named_parameters()}})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    with pytest.raises(ValueError, match=r"hidden=0 channels are none; use 1 or more, such as 12"):
        GatedConvFfn(6, 0)
    with pytest.raises(ValueError, match=r"map of shape \(1, 4, 4, 5\) is not b h w 6; use channels-last maps as wide as dim"):
        GatedConvFfn(6, 12)(torch.randn(1, 4, 4, 5))


@pytest.mark.compile
def test_compiles_to_one_graph(within, perturbed):
    ffn, x = perturbed(GatedConvFfn(6, 31)), torch.randn(2, 6, 7, 6)
    within(torch.compile(ffn, fullgraph=True)(x), ffn(x))
