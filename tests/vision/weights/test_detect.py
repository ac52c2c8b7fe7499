from __future__ import annotations

import pytest
import timm
import torch
import torchvision

from vision.weights.detect import LAYOUTS, detect


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        ("vit_tiny_patch16_224", "ViT", "timm"),
        ("deit_tiny_distilled_patch16_224", "ViT", "timm"),
        ("swin_tiny_patch4_window7_224", "Swin", "timm"),
        ("swinv2_tiny_window8_256", "SwinV2", "timm"),
        ("resnet18", "ResNet", "torchvision or timm"),
        ("convnext_tiny", "ConvNeXt", "timm"),
    ],
)
def test_timms_models(name, family, layout):
    with torch.device("meta"):
        found = detect(timm.create_model(name).state_dict())
    assert (found.family, found.name) == (family, layout)


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        ("vit_b_16", "ViT", "torchvision"),
        ("swin_t", "Swin", "torchvision"),
        ("swin_v2_t", "SwinV2", "torchvision"),
        ("resnet18", "ResNet", "torchvision or timm"),
    ],
)
def test_torchvisions_models(name, family, layout):
    with torch.device("meta"):
        found = detect(torchvision.models.get_model(name).state_dict())
    assert (found.family, found.name) == (family, layout)


def test_what_is_in_no_row_is_not_guessed():
    assert detect(["conv.weight", "fc.weight"]) is None
    assert detect([]) is None


def test_no_row_is_out_of_reach():
    """An earlier row whose signs are a subset would take all of a later one's files."""
    examples = [tuple(sign.replace("*", "x") for sign in layout.signs) for layout in LAYOUTS]
    assert [detect(names) for names in examples] == list(LAYOUTS)
