from __future__ import annotations

from functools import partial

import pytest
import timm.layers
import torch
from torch import nn

from core.ffn import GatedMlp, Mlp


def renamed(module, **names):
    """The state dict with the first part of each name replaced."""
    return {f"{names[n.split('.')[0]]}.{n.split('.')[1]}": t for n, t in module.state_dict().items()}


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, nn.SiLU])
def test_mlp_is_torchs_composition(within, perturbed, activation):
    ours = perturbed(Mlp(8, 24, activation=activation))
    theirs = nn.Sequential(nn.Linear(8, 24), activation(), nn.Linear(24, 8))
    theirs.load_state_dict(renamed(ours, up="0", down="2"))
    x = torch.randn(2, 3, 5, 8)
    within(ours(x), theirs(x))


def test_mlp_is_timms(within, perturbed):
    ours, theirs = Mlp(8, 24), perturbed(timm.layers.Mlp(8, 24))
    ours.load_state_dict(renamed(theirs, fc1="up", fc2="down"))
    x = torch.randn(2, 5, 8)
    within(ours(x), theirs(x))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_in_place_is_the_plain_one_and_hooks_see_its_input(within, perturbed, approximate):
    """Without a gradient GELU is written over its input; what a hook has kept of that must stay as it was."""
    ours = perturbed(Mlp(8, 24, activation=partial(nn.GELU, approximate=approximate)))
    x = torch.randn(2, 3, 8)
    expected = ours.down(torch.nn.functional.gelu(ours.up(x), approximate=approximate))
    within(ours(x), expected)
    with torch.no_grad():
        within(ours(x), expected, 0.0)
        seen = []
        ours.up.register_forward_hook(lambda module, args, output: seen.append(output))
        within(ours(x), expected, 0.0)
    within(seen[0], ours.up(x), 0.0)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.GELU, nn.Sigmoid])
def test_gated_mlp_is_timms_glu(within, perturbed, activation):
    """timm counts both halves in `hidden_features`."""
    ours, theirs = (
        GatedMlp(8, 24, activation=activation),
        perturbed(timm.layers.GluMlp(8, 48, act_layer=activation, gate_last=False)),
    )
    ours.load_state_dict(renamed(theirs, fc1="gate_up", fc2="down"))
    x = torch.randn(2, 5, 8)
    within(ours(x), theirs(x))


def test_gated_mlp_is_timms_swiglu(within, perturbed):
    ours, theirs = GatedMlp(8, 24), perturbed(timm.layers.SwiGLU(8, 24))
    gate, up = theirs.fc1_g, theirs.fc1_x
    ours.load_state_dict(
        {
            "gate_up.weight": torch.cat([gate.weight, up.weight]),
            "gate_up.bias": torch.cat([gate.bias, up.bias]),
            "down.weight": theirs.fc2.weight,
            "down.bias": theirs.fc2.bias,
        }
    )
    x = torch.randn(2, 5, 8)
    within(ours(x), theirs(x))


def test_gated_mlp_at_two_thirds_has_the_parameters_of_an_mlp():
    def count(module):
        return sum(p.numel() for p in module.parameters())

    assert count(GatedMlp(96, 256, bias=False)) == count(Mlp(96, 384, bias=False))


@pytest.mark.parametrize("make", [Mlp, GatedMlp])
def test_dropout_and_bias(make):
    ffn, x = make(8, 64, dropout=0.5, bias=False), torch.randn(2, 5, 8)
    assert all(p.ndim == 2 for p in ffn.parameters())
    assert not torch.equal(ffn(x), ffn(x))
    plain = make(8, 64, bias=False)
    plain.load_state_dict(ffn.state_dict())
    assert torch.equal(ffn.eval()(x), plain(x))
