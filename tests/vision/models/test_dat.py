"""DAT and DAT++: the published numbers, any size, the contract of a backbone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import vision
from vision.models import DAT
from vision.models.dat import PLUS
from vision.rebuild import build, describe

REFERENCE = Path(__file__).parents[2] / "reference"
TINY = {"img_size": 56, "num_classes": 5, "dim": 8, "depths": (2, 2, 2, 2), "heads": (1, 2, 4, 4), "groups": (1, 1, 2, 4)}
KINDS = {"dat": {}, "dat++": {**PLUS, "depths": (2, 2, 2, 2), "window_size": 3}}


def small(kind: str, **options) -> DAT:
    return DAT(**{**TINY, **KINDS[kind], "mlp_ratio": 2.0, **options})


@torch.no_grad()
@pytest.mark.parametrize("name", ["dat_v1", "dat_plus_plus"])
def test_equals_the_published_code(name, within):
    with safe_open(REFERENCE / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("model."): tensor for key, tensor in tensors.items() if key.startswith("model.")}
    model = vision.load_model(state)
    assert type(model) is DAT
    within(model(tensors["input"]), tensors["output"])


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("dat_tiny", 28.32),
        ("dat_small", 49.70),
        ("dat_base", 87.88),
        ("dat_plus_tiny", 23.96),
        ("dat_plus_small", 53.13),
        ("dat_plus_base", 93.69),
    ],
)
def test_named_sizes_are_the_published_ones(name, millions):
    """The papers say 29, 50, 88 and 24, 53, 94 million."""
    with torch.device("meta"):
        model = vision.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(56, 56), (1, 1), (32, 32), (37, 90)], ids=str)
def test_dat_36_any_size_runs_and_a_batch_is_its_pictures_one_by_one(kind, size, perturbed, within):
    model = perturbed(small(kind)).eval()
    x = torch.randn(2, 3, *size)
    y = model(x)
    assert torch.isfinite(y).all()
    within(torch.cat([model(one[None]) for one in x]), y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_trains_every_parameter(kind):
    model = small(kind, drop_path_rate=0.1)
    model(torch.randn(2, 3, 56, 56)).square().sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_gives_equal_gradients(kind):
    model, x = small(kind), torch.randn(1, 3, 40, 40)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    for a, b in zip(torch.autograd.grad(model(x).sum(), list(model.parameters())), plain, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_windows_shift_by_half_rounded_up():
    blocks = small("dat").stages[0].blocks
    assert [block.attention.shift for block in blocks] == [(0, 0), (4, 4)]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_channels_first_maps_of_each_stage(kind):
    model = small(kind).eval()
    x = torch.randn(1, 3, 64, 48)
    maps = model.feature_maps(x, [0, 3])
    assert [tuple(m.shape) for m in maps] == [(1, 8, 16, 12), (1, 64, 2, 2)]
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16, 32]
    backbone = vision.models.Features(model, [0, 1])
    assert torch.equal(backbone(x)[0], maps[0])
    assert len(model.stages) == 2


def test_tables_do_not_decay_and_layers_learn_slower_towards_the_stem():
    model = small("dat++")
    kept = model.no_weight_decay()
    assert {name for name, _ in model.named_parameters() if name.endswith("table")} == kept
    matcher = model.group_matcher()
    patterns = [matcher["stem"], *(pattern for pattern, _ in matcher["blocks"])]
    assert all(re.compile(pattern).groups <= 2 for pattern in patterns)
    named = [name for name, _ in model.named_parameters() if not name.startswith("head")]
    assert all(any(re.match(pattern, name) for pattern in patterns) for name in named)
    from timm.models import group_parameters

    layers = group_parameters(model, matcher, reverse=True)
    assert layers["stem.halve.weight"] < layers["stages.0.blocks.1.norm1.weight"] < layers["stages.3.blocks.0.norm1.weight"]


def test_reset_classifier_is_remembered_and_the_model_is_built_again():
    model = small("dat++").to(torch.bfloat16)
    model.reset_classifier(3)
    assert (model.head.weight.dtype, model.options["num_classes"]) == (torch.bfloat16, 3)
    again = build(describe(model))
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
    model.reset_classifier(0)
    assert isinstance(model.head, nn.Identity)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": (1, 2)}, r"depths=\(2, 2, 2, 2\) and heads=\(1, 2\) differ in stages; give each one a stage"),
        ({"depths": (2, 2, -1, 2)}, r"depths=-1 is too small; use 0 or more"),
        ({"window_size": 0}, r"window_size=0 is too small; use 1 or more"),
        ({"window_size": "7"}, r"window_size='7' is not one value a stage; give a tuple of them"),
        ({"window_size": (7, 7)}, r"depths=\(2, 2, 2, 2\) and window_size=\(7, 7\) differ in stages"),
        ({"kernels": (9, 7, 4, 3)}, r"kernels=4 of a stage of kind 'LD' has no middle; use an odd one such as 5"),
        (
            {"kinds": ("LS", "LS", "ND", "LD"), "window_size": 4},
            r"window_size=4 of a stage of kind 'ND' has no middle; use an odd",
        ),
        ({"kinds": "LD"}, r"kinds='LD' is not one value a stage; give a tuple of them"),
        ({"kinds": ("LD", "LD")}, r"kinds=\('LD', 'LD'\) are not for 4 stages; give each one a stage"),
        ({"offset_range": "2"}, r"offset_range='2' is not positive; use e.g. 2, or None for no bound"),
        ({"kinds": ("LX", "LS", "LD", "LD")}, r"kinds has 'LX', which is not made of L, S, N and D; use e.g. 'LD'"),
        ({"num_classes": -1}, r"num_classes=-1 is no number of classes; use 0 for features"),
        ({"convolutions": True, "patch_size": 8}, r"patch_size=8 is not 4, which OverlappingStem's two strides of 2 make"),
    ],
)
def test_wrong_options_name_the_rule_and_the_fix(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        small("dat", **options)


def test_wrong_pictures_and_poolings_name_the_rule_and_the_fix(unchecked):
    with pytest.raises(
        ValueError, match=r"pictures of shape \(1, 1, 8, 8\) are not b 3 h w; convert them, or build the model with"
    ):
        small("dat")(torch.randn(1, 1, 8, 8))
    with pytest.raises(ValueError, match=r"global_pool='max' is unknown to DAT; use 'avg'"):
        small("dat").reset_classifier(2, "max")
    with pytest.raises(ValueError, match=r"pictures as list are no tensor; give torch's, of floats b 3 h w"):
        small("dat")([1])


@pytest.mark.parametrize("kind", ["dat", "dat++"])
def test_a_batch_may_be_empty(kind):
    assert small(kind)(torch.randn(0, 3, 32, 32)).shape == (0, 5)
