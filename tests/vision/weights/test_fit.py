"""The rules by which weights are made to fit."""

from __future__ import annotations

import pytest
import timm
import torch

import vision
from vision.models import ConvStem, ViT
from vision.weights.family import Adapted
from vision.weights.fit import fit_channels, fit_patches, fit_table


def small(**options) -> ViT:
    return ViT(**{"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, **options})


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_channels_as_timm(channels):
    weight = torch.randn(8, 3, 4, 4)
    fit = Adapted({"w": weight})
    fit_channels(fit, "w", channels)
    torch.testing.assert_close(fit.state["w"], timm.models.adapt_input_conv(channels, weight.clone()))
    assert bool(fit.adapted) == (channels != 3)


@pytest.mark.parametrize("stem", [{}, {"stem": ConvStem}])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 6), (1, 5)])
def test_a_gray_picture_gives_the_same_in_any_number_of_equal_channels(before, after, stem, perturbed):
    source = perturbed(small(in_chans=before, **stem)).eval()
    model = small(in_chans=after, **stem).eval()
    assert len(vision.load_weights(model, source).adapted) == 1
    gray = torch.randn(1, 1, 32, 32)
    torch.testing.assert_close(
        model(gray.expand(-1, after, -1, -1)), source(gray.expand(-1, before, -1, -1)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("size", [4, 6, 12, 16])
def test_patches_as_timm(size):
    weight = torch.randn(8, 3, 8, 8)
    fit = Adapted({"w": weight})
    fit_patches(fit, "w", size)
    torch.testing.assert_close(fit.state["w"], timm.layers.resample_patch_embed(weight, [size, size]))
    assert fit.adapted == [f"patches 8x8 -> {size}x{size}: resampled as in FlexiViT"]


def test_larger_patches_answer_a_larger_picture_as_before():
    """What the rule is for (FlexiViT): a picture twice the size, in patches twice the size."""
    weight = torch.randn(8, 3, 8, 8)
    fit = Adapted({"w": weight})
    fit_patches(fit, "w", 16)
    patch = torch.randn(1, 3, 8, 8)
    wide = torch.nn.functional.interpolate(patch, size=(16, 16), mode="bicubic", antialias=True)
    before = (weight * patch).sum(dim=(1, 2, 3))
    torch.testing.assert_close((fit.state["w"] * wide).sum(dim=(1, 2, 3)), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("after", [(4, 4), (7, 7), (3, 9), (9, 1), (1, 9)])
def test_tables_as_timm(after):
    table = torch.randn(25, 6)
    fit = Adapted({})
    resized = fit_table(fit, table, (5, 5), after)
    if after[1] > 1:  # torch 2.14 resizes timm's strides wrongly to a width of 1
        torch.testing.assert_close(resized, timm.layers.resample_abs_pos_embed(table[None], list(after), [5, 5], 0)[0])
    turned = fit_table(fit, table.unflatten(0, (5, 5)).transpose(0, 1).flatten(0, 1), (5, 5), after[::-1])
    torch.testing.assert_close(resized, turned.unflatten(0, after[::-1]).transpose(0, 1).flatten(0, 1))


def test_a_table_that_fits_is_not_touched():
    table, fit = torch.randn(25, 6), Adapted({})
    assert fit_table(fit, table, (5, 5), (5, 5)) is table
    assert not fit.adapted
