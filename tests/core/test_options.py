from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from core.options import remember_options


class Model(nn.Module):
    @remember_options
    def __init__(self, dim: int, depth: int = 3, *, norm: type = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(dim)


class Child(Model):
    @remember_options
    def __init__(self, width: int = 8) -> None:
        super().__init__(2 * width, depth=1)


class Plain(Model):
    def __init__(self) -> None:
        super().__init__(4)


def test_arguments_and_defaults_by_name():
    assert Model(4).options == {"dim": 4, "depth": 3, "norm": nn.LayerNorm}
    assert Model(4, 5, norm=nn.RMSNorm).options == {"dim": 4, "depth": 5, "norm": nn.RMSNorm}


def test_options_build_the_same_model():
    model = Model(dim=4, norm=nn.RMSNorm)
    assert repr(Model(**model.options)) == repr(model)


def test_the_outermost_class_wins():
    assert Child().options == {"width": 8}
    assert Child(3).options == {"width": 3}


def test_a_subclass_with_its_own_arguments_remembers_none():
    """What the base was given would not build the subclass."""
    assert not hasattr(Plain(), "options")


def test_signature_and_wrong_arguments_stay():
    assert list(inspect.signature(Model).parameters) == ["dim", "depth", "norm"]
    with pytest.raises(TypeError, match=r"Model.__init__\(\) got an unexpected keyword argument 'dimm'"):
        Model(4, dimm=4)


def test_options_are_no_state():
    assert list(Model(4).state_dict()) == ["norm.weight", "norm.bias"]
    assert torch.equal(Model(4).norm.weight, torch.ones(4))
