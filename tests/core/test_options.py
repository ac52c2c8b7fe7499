from __future__ import annotations

import inspect
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from core.options import check_makers, check_shares, check_sizes, hidden_width, remember_options


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


@pytest.mark.usefixtures("unchecked")
def test_checks_name_the_option_its_value_the_rule_and_the_fix():
    for check, told in {
        (lambda: check_sizes(dim="8")): "dim='8' is not one whole number; use 1 or more",
        (lambda: check_sizes(dim=True)): "dim=True is not one whole number; use 1 or more",
        (lambda: check_sizes(0, depth=-1)): "depth=-1 is too small; use 0 or more",
        (lambda: check_shares(dropout=math.nan)): "dropout=nan is not in 0 <= dropout < 1; use e.g. 0.1",
        (lambda: check_makers(norm=None)): "norm=None makes nothing; give a class, or a function that",
        (lambda: hidden_width(8, mlp_ratio=1e12)): "mlp_ratio=1000000000000.0 of dim=8 is no width",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            check()
    check_sizes(dim=8, heads=np.int64(2))
    assert hidden_width(7, mlp_ratio=2.66) == 18
