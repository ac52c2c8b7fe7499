from __future__ import annotations

import pytest
import torch
from torch import nn

import core.norm
from core.norm import BatchNorm, BiasFreeNorm


def test_layer_norm_and_rms_norm_are_torchs():
    assert core.norm.LayerNorm is nn.LayerNorm
    assert core.norm.RMSNorm is nn.RMSNorm


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_bias_free_norm_by_formula(within, perturbed, dtype, tolerance):
    """Divides by the deviation, keeps the mean: numbers far from 0 and large ones tell it from LayerNorm and RMSNorm."""
    norm = perturbed(BiasFreeNorm(8)).to(dtype)
    x = (200 * torch.randn(2, 3, 5, 8, dtype=torch.float64) + 300).to(dtype)
    wide = x.double()
    deviation = ((wide - wide.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    within(norm(x), (wide / deviation * norm.weight.double()).to(dtype), tolerance)


def test_bias_free_norm_gradient():
    norm = BiasFreeNorm(6).double()
    assert torch.autograd.gradcheck(norm, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))
    assert norm(torch.zeros(2, 6).double()).eq(0).all()


@pytest.mark.parametrize("shape", [(4, 5, 8), (2, 3, 4, 8)])
def test_batch_norm_is_torchs_over_all_tokens(within, perturbed, shape):
    ours, theirs = perturbed(BatchNorm(8, eps=1e-3, momentum=0.3)), nn.BatchNorm1d(8, eps=1e-3, momentum=0.3)
    theirs.load_state_dict(ours.norm.state_dict())
    x = 3 * torch.randn(shape) + 1
    within(ours(x), theirs(x.flatten(0, -2)).view(shape))
    within(ours.norm.running_var, theirs.running_var)
    within(ours.eval()(x), theirs.eval()(x.flatten(0, -2)).view(shape))


def test_batch_norm_leaves_padding_out(within, perturbed):
    """Packed tokens give the same statistics and outputs; the padding may hold anything and comes out as it went in."""
    ours, theirs = perturbed(BatchNorm(8)), BatchNorm(8)
    theirs.load_state_dict(ours.state_dict())
    x, real = torch.randn(3, 5, 8), torch.arange(5) < torch.tensor([2, 5, 0])[:, None]
    x[~real] = float("nan")
    x.requires_grad_()
    y = ours(x, real)
    within(y[real], theirs(x[real]))
    within(ours.norm.running_mean, theirs.norm.running_mean)
    assert y[~real].isnan().all()
    y[real].square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[~real].eq(0).all()


def test_batch_norm_of_a_single_token():
    with pytest.raises(ValueError, match=r"^1 tokens have no batch statistics; use 2 or more, LayerNorm, or eval\(\)$"):
        BatchNorm(8)(torch.randn(1, 1, 8))
    with pytest.raises(ValueError, match=r"^0 tokens have no batch statistics"):
        BatchNorm(8)(torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=torch.bool))
    assert BatchNorm(8).eval()(torch.randn(1, 1, 8)).isfinite().all()
