"""Our classifiers by the names that timm's users know, beside timm's own with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2

import vision
from vision.data import evaluation_transform
from vision.errors import UserError
from vision.models import DAT, Features, ViT

VIT = ("vit_tiny_patch16_224", {"img_size": 64, "depth": 4})
SWIN = ("swin_tiny_patch4_window7_224", {"img_size": 64, "depths": (1, 1, 2), "window_size": 4})
PAIRS = {
    "vit": (VIT, {}),
    "vit, mean": (VIT, {"global_pool": "avg"}),
    "distilled": (("deit_tiny_distilled_patch16_224", VIT[1]), {}),
    "swin": (SWIN, {}),
    "swin v2": (("swinv2_tiny_window8_256", SWIN[1]), {}),
}


@pytest.fixture(params=PAIRS)
def pair(request, perturbed):
    """Ours and timm's with the same weights, no parameter at its start."""
    (name, sizes), options = PAIRS[request.param]
    theirs = {"embed_dim": 24, "num_heads": (1, 2, 4)} if "swin" in name else {}
    mine = {"dim": 24, "heads": (1, 2, 4), "padding": "roll_then_pad"} if "swin" in name else {}
    reference = perturbed(timm.create_model(name, **sizes, **theirs, **options)).eval()
    return vision.create_model(name, weights=reference, **sizes, **mine, **options).eval(), reference


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": True},
        {"indices": 2, "stop_early": True},
        {"indices": [0, -2], "stop_early": True, "norm": True},
        {"indices": [-2, 0], "intermediates_only": True},
    ],
)
def test_intermediates_are_timms(pair, options, within):
    ours, theirs = pair
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        mine, reference = ours.forward_intermediates(x, **options), theirs.forward_intermediates(x, **options)
    if not options.get("intermediates_only"):
        within(mine[0], reference[0])
        mine, reference = mine[1], reference[1]
    assert len(mine) == len(reference)
    for a, b in zip(mine, reference, strict=True):
        within(a, b)


def test_tokens_and_prefix_tokens_of_a_vit_are_timms(within):
    theirs = timm.create_model("vit_tiny_patch16_224", reg_tokens=2, **VIT[1]).eval()
    ours = vision.create_model("vit_tiny_patch16_224", reg_tokens=2, weights=theirs, **VIT[1]).eval()
    options = {"indices": 2, "output_fmt": "NLC", "return_prefix_tokens": True, "intermediates_only": True}
    x = torch.randn(1, 3, 64, 64)
    for mine, reference in zip(ours.forward_intermediates(x, **options), theirs.forward_intermediates(x, **options), strict=True):
        within(mine[0], reference[0])
        within(mine[1], reference[1])


@pytest.mark.usefixtures("unchecked")
def test_what_intermediates_refuse_is_named():
    model, x = ViT(32, 8, 3, 5, 32, 2, 2, class_tokens=0, global_pool="avg"), torch.randn(1, 3, 32, 32)
    for options, text in (
        ({"indices": 3}, r"indices=3 is a number of last maps, 1..2; for one map use its index, -2..1, in a list"),
        ({"indices": [2]}, r"^indices=2 is out of range; the model has 2 feature maps, use -2..1"),
        ({"indices": []}, "^indices is empty"),
        ({"indices": "1"}, "^indices='1' is neither a number nor a list of numbers"),
        ({"output_fmt": "NHWC"}, r"output_fmt='NHWC' is unknown; use 'NCHW' \(maps\) or 'NLC' \(tokens\)"),
        ({"return_prefix_tokens": True}, "ViT has no prefix tokens here; leave return_prefix_tokens out"),
    ):
        with pytest.raises(UserError, match=text):
            model.forward_intermediates(x, **options)


def test_features_heads_and_widths_are_timms(pair, within):
    ours, theirs = pair
    x = torch.randn(2, 3, 64, 64)
    for name in ("num_features", "embed_dim", "head_hidden_size", "num_classes"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.num_prefix_tokens == getattr(theirs, "num_prefix_tokens", 0)
    with torch.no_grad():
        within(ours.forward_features(x), theirs.forward_features(x))
        within(
            ours.forward_head(ours.forward_features(x), pre_logits=True), theirs.forward_head(theirs.forward_features(x), True)
        )
        heads, reference = ours.get_classifier(), theirs.get_classifier()
        for mine, other in zip(
            *[[each] if isinstance(each, torch.nn.Module) else each for each in (heads, reference)], strict=True
        ):
            assert torch.equal(mine.weight, other.weight)
        for model in (ours, theirs):
            model.reset_classifier(0)
        within(ours(x), theirs(x))
    ours.reset_classifier(7)
    assert ours(x).shape == (2, 7)
    assert ours.pretrained_cfg["num_classes"] == 7


def test_no_pooling_as_timm_has_it_is_forward_features():
    for model in (
        ViT(32, 8, 3, 5, 32, 2, 2),
        vision.create_model("swin_tiny_patch4_window7_224", dim=6, heads=(1,), depths=(1,)),
    ):
        with pytest.raises(ValueError, match=r"global_pool='' is unknown.* \(forward_features gives what is pooled\)"):
            model.reset_classifier(0, "")


@pytest.mark.parametrize("name", vision.list_models(["vit*", "swin*", "deit*"], exclude_filters="*restorer*"))
def test_pictures_are_made_as_timm_makes_them_for_the_model_of_this_name(name):
    small = {"dim": 12, "heads": 1, "depth": 1} if name[:3] in ("vit", "dei") else {"dim": 6, "heads": (1,), "depths": (1,)}
    model = vision.create_model(name, **small)
    with torch.device("meta"):
        theirs = timm.create_model(name)
    assert resolve_data_config({}, model=model) == resolve_data_config({}, model=theirs)
    assert model.default_cfg == model.pretrained_cfg


def test_pictures_are_made_for_the_sizes_that_the_model_has():
    model = vision.create_model("vit_tiny_patch16_224", img_size=32, in_chans=1, depth=1, num_classes=0)
    config = resolve_data_config({}, model=model)
    assert (config["input_size"], config["mean"], config["std"]) == ((1, 32, 32), (0.5,), (0.5,))
    picture = Image.fromarray(np.zeros((40, 50), dtype=np.uint8))
    assert create_transform(**config)(picture).shape == (1, 32, 32)
    gray = vision.create_model("swin_tiny_patch4_window7_224", in_chans=1, dim=6, heads=(1,), depths=(1,))
    assert gray.pretrained_cfg["mean"] == pytest.approx([sum((0.485, 0.456, 0.406)) / 3])
    assert resolve_data_config(
        {}, model=DAT(32, 4, dim=12, heads=(1, 1), depths=(1, 1), groups=(1, 1), strides=(1, 1), kernels=(3, 3), kinds=("L", "D"))
    )["input_size"] == (3, 32, 32)


USED = {"channels": 3, "size": [48, 40], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"}


@pytest.mark.parametrize("fate", [{"crop_pct": 0.8, "resize": "crop"}, {"crop_pct": 1.0, "resize": "squash"}])
def test_pictures_are_made_as_the_loaded_weights_tell(tmp_path, fate):
    model = ViT(48, 8, 3, 5, 32, 2, 2)
    model.preprocessing = USED | fate
    vision.save_weights(model, tmp_path / "own.safetensors")
    loaded = vision.load_model(tmp_path / "own.safetensors")
    transform = create_transform(**resolve_data_config({}, model=loaded))
    picture = np.random.default_rng(0).integers(0, 256, (70, 60, 3), dtype=np.uint8)
    torch.testing.assert_close(
        transform(Image.fromarray(picture)), evaluation_transform(loaded.preprocessing)(picture), atol=0.02, rtol=0
    )
    options = {"patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2}
    again = vision.create_model("vit_tiny_patch16_224", weights=tmp_path / "own.safetensors", **options, img_size=64)
    assert again.preprocessing == USED | fate | {"size": [64, 64]}
    assert again.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert vision.load_model(again).preprocessing == again.preprocessing
    gray = vision.create_model("vit_tiny_patch16_224", weights=tmp_path / "own.safetensors", **options, in_chans=1)
    assert gray.pretrained_cfg["mean"] == (0.5,)


def test_a_live_model_of_timm_tells_its_pictures_and_a_model_of_ours_that_knows_nothing_none():
    theirs = timm.create_model("deit_tiny_patch16_224", depth=1)
    ours = vision.create_model("vit_tiny_patch16_224", depth=1, weights=theirs)
    assert resolve_data_config({}, model=ours) == resolve_data_config({}, model=theirs)
    assert vision.load_model(vision.create_model("vit_tiny_patch16_224", depth=1)).preprocessing == {}


def test_a_backbone_tells_its_pictures_too():
    backbone = vision.create_model("vit_tiny_patch16_224", depth=1, features_only=True, out_indices=[0])
    assert isinstance(backbone, Features)
    assert resolve_data_config({}, model=backbone)["mean"] == (0.5, 0.5, 0.5)
    assert "num_classes" not in backbone.default_cfg


@pytest.mark.parametrize("features_only", [False, True])
def test_timms_optimizers_take_layer_decay(features_only):
    for name, sizes in (VIT, SWIN, ("dat_tiny", {"depths": (1, 1, 1, 1), "dim": 24})):
        heads = {"heads": (1, 2, 4), "dim": 24} if name.startswith("swin") else {}
        model = vision.create_model(name, features_only=features_only, **sizes, **heads)
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in model.parameters()}
        scales = sorted({group["lr_scale"] for group in optimizer.param_groups})
        assert len(scales) >= 4
        assert scales[-1] == 1.0
