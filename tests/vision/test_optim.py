"""Muon: the plain formulas, torch's own, and AdamW for everything that is no matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import core
from vision.optim import Muon, apart, orthogonal, parameter_groups


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(20, 16)
        self.wide, self.narrow, self.norm = nn.Linear(16, 24), nn.Linear(24, 4), nn.LayerNorm(16)
        self.same = nn.Linear(16, 24, bias=False)
        self.head = nn.Linear(16, 10)


def optimizer(model: nn.Module, kind: type[torch.optim.Optimizer] = Muon, **options) -> torch.optim.Optimizer:
    groups = parameter_groups(model, weight_decay=0.1)
    return kind(apart(groups, model) if kind is Muon else groups, lr=1e-2, **options)


def ids(model: nn.Module, *, orthogonal: bool) -> set[int]:
    groups = apart(parameter_groups(model, weight_decay=0.1), model)
    return {id(p) for group in groups if group["orthogonal"] is orthogonal for p in group["params"]}


def give_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 24), (2, 40, 16)])
def test_orthogonal_keeps_the_directions_and_makes_them_alike(shape) -> None:
    """The polar factor U V^T of a singular value decomposition, but for lengths of 0.65 to 1.25."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.mT @ orthogonal(x) @ v.mT
    lengths = inside.diagonal(dim1=-2, dim2=-1)
    assert (inside - torch.diag_embed(lengths)).abs().max() < 1e-3
    assert lengths.min() > 0.6
    assert lengths.max() < 1.3


def test_only_linears_within_the_model_are_orthogonal() -> None:
    model = Small()
    assert ids(model, orthogonal=True) == {id(model.wide.weight), id(model.same.weight)}
    decoder = core.Decoder(vocabulary=20, dim=16, depth=1, heads=2, hidden=32, memory_dim=16)
    assert id(decoder.embedding.weight) in ids(decoder, orthogonal=False)
    assert id(decoder.blocks[0].ffn.up.weight) in ids(decoder, orthogonal=True)
    assert len(ids(decoder, orthogonal=True) | ids(decoder, orthogonal=False)) == len(list(decoder.parameters()))


def test_matrices_step_as_torchs_muon() -> None:
    """torch iterates in bfloat16: 3 digits."""
    ours, theirs = Small(), Small()
    theirs.load_state_dict(ours.state_dict())
    start = copy.deepcopy(ours)
    matrices = [theirs.wide.weight, theirs.same.weight]
    other = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    mine = optimizer(ours, rms=0.2)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        other.step()
    for name in ("wide", "same"):
        a, b, c = (getattr(m, name).weight.detach() for m in (ours, theirs, start))
        assert (b - c).norm() > 0.1
        assert (a - b).norm() < 0.02 * (b - c).norm()


@pytest.mark.parametrize("fused", [False, True])
def test_everything_else_steps_as_adamw(fused: bool) -> None:
    ours, theirs = Small(), Small()
    theirs.load_state_dict(ours.state_dict())
    mine, other = optimizer(ours, fused=fused), optimizer(theirs, torch.optim.AdamW, fused=fused)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        other.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b) is (name not in ("wide.weight", "same.weight")), name


def test_a_saved_state_goes_on_exactly() -> None:
    ours = Small()
    mine = optimizer(ours)
    give_gradients(ours, 0)
    mine.step()
    other = copy.deepcopy(ours)
    resumed = optimizer(other)
    resumed.load_state_dict(copy.deepcopy(mine.state_dict()))
    for model, own in ((ours, mine), (other, resumed)):
        give_gradients(model, 1)
        own.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_a_gradient_of_zeros_or_none_moves_nothing() -> None:
    model = Small()
    start = copy.deepcopy(model)
    groups = apart(parameter_groups(model, weight_decay=0.0), model)
    own = Muon(groups, lr=1e-2, weight_decay=0.0)
    model.wide.weight.grad = torch.zeros_like(model.wide.weight)
    own.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
