"""Dropout: the right share, the right scale, nothing in evaluation, the same numbers for the same seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_scale_and_gradient(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(333, 1001, dtype=dtype, requires_grad=True)  # no multiple of four places
    y = Dropout(p)(x)
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 4 * (p * (1 - p) / x.numel()) ** 0.5 + 1 / 65536
    assert y.detach().unique().tolist() == pytest.approx([0.0, 1 / (1 - p)], rel=4e-3 if dtype == torch.bfloat16 else 1e-3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_places_are_independent() -> None:
    """Neighbours share a draw of 64 bits: none tells of another."""
    kept = (Dropout(0.5)(torch.ones(40_000, 8)) > 0).double()
    assert (torch.corrcoef(kept.T) - torch.eye(8)).abs().max() < 0.025  # 5 deviations of 40,000 trials


def test_evaluation_and_none_change_nothing() -> None:
    """pytorch#124464, #99293: dropout is off in evaluation."""
    x = torch.randn(5, 7)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert torch.equal(Dropout(1.0)(x), nn.Dropout(1.0)(x))


def test_the_seed_decides() -> None:
    x, layer = torch.ones(100), Dropout(0.3)
    torch.manual_seed(1)
    first = layer(x)
    assert not torch.equal(layer(x), first)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
