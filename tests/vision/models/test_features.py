"""Feature maps as timm users expect them."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from timm.models import group_parameters
from torch import nn

import vision
from vision.errors import UserError
from vision.models import Features, ViT
from vision.models.features import check_indices, check_whole
from vision.rebuild import build, describe

OPTIONS = {"depth": 4, "img_size": 64, "patch_size": 16}
NAME = "vit_tiny_patch16_224"


def both(out_indices, **options):
    torch.manual_seed(0)
    reference = timm.create_model(NAME, **OPTIONS, dynamic_img_size=True, dynamic_img_pad=True, **options)
    chosen = {} if out_indices is None else {"out_indices": out_indices}
    theirs = timm.create_model(
        NAME, features_only=True, **chosen, **OPTIONS, dynamic_img_size=True, dynamic_img_pad=True, **options
    ).eval()
    missing = theirs.model.load_state_dict(reference.state_dict(), strict=False).missing_keys
    assert not missing
    ours = vision.create_model(NAME, features_only=True, out_indices=out_indices, weights=reference, **OPTIONS, **options)
    return ours.eval(), theirs


@pytest.mark.parametrize("out_indices", [None, 2, (0, 2), [1, -1], (-2,)])
@pytest.mark.parametrize("size", [(64, 64), (50, 100)])
def test_maps_and_their_information_equal_timms(out_indices, size):
    ours, theirs = both(out_indices)
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        mine, reference = ours(x), theirs(x)
    assert [tuple(m.shape) for m in mine] == [tuple(m.shape) for m in reference]
    for a, b in zip(mine, reference, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.std()
    assert ours.feature_info.channels() == theirs.feature_info.channels()
    assert ours.feature_info.reduction() == theirs.feature_info.reduction() == [16] * len(mine)
    assert ours.feature_info.module_name() == theirs.feature_info.module_name()
    assert ours.feature_info[0] == {"num_chs": 192, "reduction": 16, "module": ours.feature_info[0]["module"]}


@pytest.mark.usefixtures("unchecked")
def test_a_number_of_numpys_is_a_number():
    assert vision.create_model(NAME, features_only=True, out_indices=np.int64(2), **OPTIONS).out_indices == [2, 3]


def test_maps_come_in_the_order_asked_for():
    torch.manual_seed(0)
    model, x = ViT(32, 8, 3, 5, 32, 4, 2).eval(), torch.randn(1, 3, 32, 32)
    maps = model.feature_maps(x, [0, 3])
    backbone = Features(model, [3, 0])
    assert backbone.feature_info.module_name() == ["blocks.3", "blocks.0"]
    assert all(torch.equal(a, b) for a, b in zip(backbone(x), reversed(maps), strict=True))


def test_registers_and_class_tokens_are_no_part_of_the_maps():
    model = Features(ViT(32, 8, 3, 5, 32, 2, 2, class_tokens=2, reg_tokens=3), [1])
    assert model(torch.randn(1, 3, 40, 24))[0].shape == (1, 32, 5, 3)


def test_what_the_maps_do_not_need_is_gone():
    """No parameter without a gradient: data-parallel training would stop at one (PL #17212, lightly #1775)."""
    model = Features(ViT(32, 8, 3, 5, 32, 4, 2), [0, 2])
    sum(m.sum() for m in model(torch.randn(1, 3, 32, 32))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(model.model.blocks) == 3


def test_timm_2242_an_index_out_of_range_is_named():
    for wrong in (4, -5):
        with pytest.raises(UserError, match=rf"out_indices={wrong} is out of range; the model has 4 feature maps, use -4..3"):
            vision.create_model(NAME, features_only=True, out_indices=[0, wrong], **OPTIONS)
    with pytest.raises(
        UserError, match=r"out_indices=9 is a number of last maps, 1..4; for one map use its index, -4..3, in a list"
    ):
        vision.create_model(NAME, features_only=True, out_indices=9, **OPTIONS)
    with pytest.raises(UserError, match=r"out_indices=-1 is a number of last maps, 1..4; for one map use \[-1\]"):
        vision.create_model(NAME, features_only=True, out_indices=-1, **OPTIONS)
    with pytest.raises(UserError, match=r"out_indices is empty; the model has 4 feature maps"):
        vision.create_model(NAME, features_only=True, out_indices=[], **OPTIONS)


def test_a_model_without_maps_is_named():
    with pytest.raises(UserError, match=r"Linear gives no feature maps; use a ViT, Swin or DAT of vision.list_models\(\)"):
        Features(nn.Linear(2, 2), [0])


def test_a_backbone_is_described_and_built_again():
    model = Features(ViT(32, 8, 3, 5, 32, 4, 2), [1, -2])
    again = build(describe(model))
    again.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 32, 32)
    assert all(torch.equal(a, b) for a, b in zip(model.eval()(x), again.eval()(x), strict=True))


def test_published_weights_go_into_a_backbone():
    source = ViT(32, 8, 3, 5, 32, 4, 2)
    model = Features(ViT(32, 8, 3, 0, 32, 4, 2), [1])
    report = vision.load_weights(model, source.state_dict())
    assert torch.equal(model.model.blocks[1].ffn.up.weight, source.blocks[1].ffn.up.weight)
    assert "blocks.3.ffn.up.weight" in report.dropped
    assert not report.unexpected


def test_weights_pooled_otherwise_go_into_a_backbone_which_pools_nothing(tmp_path):
    averaged = timm.create_model(NAME, global_pool="avg", class_token=True, **OPTIONS).eval()
    torch.save(averaged.state_dict(), tmp_path / "avg.pth")
    x = torch.randn(1, 3, 64, 64)
    ours = vision.create_model(NAME, features_only=True, out_indices=[1], weights=tmp_path / "avg.pth", **OPTIONS).eval()
    (theirs,) = averaged.forward_intermediates(x, indices=[1], intermediates_only=True)
    assert (ours(x)[0] - theirs).abs().max() <= 1e-5 * theirs.std()
    with pytest.raises(UserError, match=r"the source pools by 'avg', the model by 'token'; use global_pool='avg'"):
        vision.create_model(NAME, weights=tmp_path / "avg.pth", **OPTIONS)


def test_a_backbone_of_the_last_n_maps_is_saved_and_loaded(tmp_path):
    model = vision.create_model("vit_tiny_patch16_224", features_only=True, out_indices=1, depth=2, dim=12, heads=2)
    vision.save_weights(model, tmp_path / "backbone.safetensors")
    assert vision.load_model(tmp_path / "backbone.safetensors").out_indices == [1]
    assert build(describe(Features(ViT(32, 8, dim=8, depth=2, heads=2), range(2)))).out_indices == [0, 1]


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ("1", "out_indices='1' is neither a number nor a list of numbers"),
        (1.5, "out_indices=1.5 is neither a number nor a list of numbers"),
        ((1.5,), "out_indices has 1.5, which is no whole number"),
        ((), "out_indices is empty"),
    ],
)
def test_indices_that_are_none_are_named(indices, text):
    with pytest.raises(UserError, match=text):
        check_indices(check_whole(indices), 2)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_backbone_trains_as_its_model_does(name):
    """Layers for layer decay, parameters without weight decay, and blocks recomputed: all with the prefix `model.`."""
    sizes = {"dim": 12, "depth": 3, "heads": 2} if name.startswith("vit") else {"dim": 6, "depths": (1, 2), "heads": (1, 2)}
    whole, backbone = vision.create_model(name, **sizes), vision.create_model(name, features_only=True, **sizes)
    names = dict(backbone.named_parameters())
    theirs = group_parameters(whole, whole.group_matcher(), reverse=True)
    layers = group_parameters(backbone, backbone.group_matcher(), reverse=True)
    assert layers == {f"model.{key}": layer for key, layer in theirs.items() if f"model.{key}" in names}
    assert len(set(layers.values())) > 3
    assert backbone.no_weight_decay() == {f"model.{key}" for key in whole.no_weight_decay()} & set(names)
    backbone.set_grad_checkpointing()
    assert any(getattr(part, "checkpointing", False) for part in backbone.modules())
    assert backbone.feature_info.get_dicts(["num_chs"])[0] == {"num_chs": backbone.feature_info.channels()[0]}
