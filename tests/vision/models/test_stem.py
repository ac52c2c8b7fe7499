"""A timm CNN's feature map as the patches of a Transformer."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch

from vision.errors import UserError
from vision.models import DAT, CNNStem, Swin, ViT
from vision.models.stem import check_sizes
from vision.rebuild import build, describe

SMALL = {"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 5, "dim": 16, "depth": 1, "heads": 2}


def test_the_map_is_timms_projected():
    stem = CNNStem(3, 24, 8, name="resnet18").eval()
    reference = timm.create_model("resnet18", features_only=True, out_indices=(2,)).eval()
    reference.load_state_dict(stem.cnn.state_dict())
    x = torch.randn(2, 3, 64, 48)
    assert stem.reduction == reference.feature_info.reduction()[0] == 8
    assert torch.equal(stem(x), stem.proj(reference(x)[0]))


@pytest.mark.parametrize("size", [(28, 28), (33, 50), (5, 4), (1, 70)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_any_size_and_channels(size, channels):
    stem = CNNStem(channels, 8, 4, name="resnet10t").eval()
    assert stem(torch.randn(1, channels, *size)).shape == (1, 8, -(-size[0] // 4), -(-size[1] // 4))


@pytest.mark.parametrize("host", [ViT, partial(Swin, window_size=7)])
def test_a_hybrid_trains_and_is_built_again(host):
    options = SMALL | ({"depth": 1} if host is ViT else {"depths": (1,), "heads": (2,)})
    options = {key: value for key, value in options.items() if host is ViT or key != "depth"}
    model = host(**options, stem=partial(CNNStem, name="resnet10t"))
    model(torch.randn(4, 1, 28, 28)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = build(describe(model))
    again.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 30, 40)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_a_rebuilt_hybrid_downloads_nothing():
    spec = describe(ViT(**SMALL, stem=partial(CNNStem, name="resnet10t")))
    spec["init_args"]["stem"]["init_args"]["pretrained"] = True
    with_network_none = build(spec)  # this would end in an error: tests have no network
    assert with_network_none.options["stem"].keywords == {"name": "resnet10t", "pretrained": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet19"}, r"timm has no model 'resnet19'; did you mean resnet1\d\w?\?"),
        ({"name": "hf-hub:someone/model"}, r"timm has no model 'hf-hub:someone/model'"),
        (
            {"name": "resnet18", "patch_size": 3},
            r"resnet18 has no map of 3 pixels a cell; use patch_size=2 or 4 or 8 or 16 or 32$",
        ),
        ({"name": "vit_tiny_patch16_224"}, r"vit_tiny_patch16_224 has no map of 4 pixels a cell; use patch_size=16$"),
    ],
)
def test_what_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        CNNStem(1, 8, **{"patch_size": 4, **options})


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"img_size": (224, 192)}, r"img_size=\(224, 192\) is not one whole number; use 224: pictures of any size are taken"),
        ({"in_chans": 0}, "in_chans=0 is too small; use 1 or more"),
        ({"dim": 1.5}, "dim=1.5 is not one whole number; use 1 or more"),
    ],
)
def test_sizes_that_are_none_are_named(sizes, text):
    with pytest.raises(ValueError, match=text):
        check_sizes(**sizes)


@pytest.mark.parametrize("model", [Swin, DAT])
def test_a_model_without_channels_is_refused(model):
    with pytest.raises(ValueError, match="in_chans=0 is too small; use 1 or more"):
        model(in_chans=0)
