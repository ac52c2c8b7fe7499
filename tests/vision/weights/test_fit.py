"""The rules by which weights are made to fit."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch

import core
import vision
from vision.errors import UserError
from vision.models import DAT, CNNStem, ConvStem, Swin, ViT
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


# Sources of ours: what no shape tells

W = {"in_chans": 1, "num_classes": 5, "dim": 16, "depths": (2, 2), "heads": (2, 4), "img_size": 28, "patch_size": 2}
V = {"in_chans": 1, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "img_size": 32, "patch_size": 8}
D = {**W, "dim": 8, "kinds": ("LS", "LD"), "groups": (1, 2), "strides": (1, 1), "kernels": (5, 3)}


@pytest.mark.parametrize(
    ("make", "theirs", "ours", "text"),
    [
        (partial(ViT, **V), {"position": core.Alibi}, {"position": core.Rotary}, r"position Alibi\(.*\), the model Rotary\("),
        (partial(Swin, **W), {"position": core.Rotary}, {}, r"position Rotary\(.*the model RelativeTable\("),
        (partial(Swin, position=core.Rotary, **W), {"heads": (1, 2)}, {}, r"the source has heads \(1, 2\), the model \(2, 4\)"),
        (partial(DAT, **D), {"offset_range": None}, {}, r"the source has offset_range None, the model 2.0; build it with"),
        (partial(DAT, **D), {"kinds": ("LL", "LD")}, {}, r"its blocks are LL, LD, the model's LS, LD"),
    ],
)
def test_another_function_of_the_same_shapes_is_refused(make, theirs, ours, text, tmp_path):
    source, model = make(**theirs), make(**ours)
    with pytest.raises(UserError, match=text):
        vision.load_weights(model, source)
    vision.save_weights(source, tmp_path / "source.safetensors")
    with pytest.raises(UserError, match=text):
        vision.load_weights(model, tmp_path / "source.safetensors")
    vision.load_weights(make(**theirs), tmp_path / "source.safetensors")
    if "offset_range" in theirs:  # asked for by name
        assert vision.load_model(tmp_path / "source.safetensors", offset_range=1.0).options["offset_range"] == 1.0


def test_what_only_looks_different_is_not():
    """Initial values, defaults written out, strides where nothing is deformable; a padding rule is noted."""
    vision.load_weights(Swin(**W), Swin(position=partial(core.RelativeTable, std=0.5), **W))
    vision.load_weights(ViT(position=core.Rotary, **V), ViT(position=partial(core.Rotary, base=10000.0), **V))
    vision.load_weights(DAT(**D), DAT(**D | {"strides": (4, 1), "mlp_ratio": 4.0}))
    report = vision.load_weights(Swin(**W), Swin(padding="roll_then_pad", **W))
    assert any("padding='roll_then_pad', the model 'pad_then_roll'" in note for note in report.notes)


def combined(site: core.Site) -> core.Combined:
    return core.Combined(site, kinds=[core.Learned, core.RelativeTable])


def test_tables_of_every_kind_follow_the_picture_size():
    """As the position itself resizes them at run time, on pictures of the other size."""
    for position in (core.RelativeTable, combined):
        source, model = ViT(position=position, **V).eval(), ViT(position=position, **V | {"img_size": 48}).eval()
        report = vision.load_weights(model, source)
        x = torch.randn(2, 1, 48, 48)
        torch.testing.assert_close(model(x), source(x))
        assert any("4x4 -> 6x6" in line for line in report.adapted)


def test_distances_measured_by_another_grid_are_noted():
    source = ViT(position=core.ContinuousBias, **V)
    for model, notes in (
        (ViT(position=core.ContinuousBias, **V), []),
        (ViT(position=core.ContinuousBias, **V | {"img_size": 48}), ["by the model's grid, 6x6, in the source by 4x4"]),
    ):
        assert [note.removeprefix("distances are measured ") for note in vision.load_weights(model, source).notes] == notes
    assert "does not tell the grid" in str(vision.load_weights(source, source.state_dict()))


@pytest.mark.parametrize(
    "make",
    [
        partial(ViT, stem=ConvStem, **V | {"in_chans": 3}),
        partial(ViT, stem=partial(CNNStem, name="resnet10t"), **V | {"in_chans": 3}),
        partial(DAT, stem=ConvStem, **D | {"in_chans": 3}),
    ],
)
def test_channels_of_every_stem_are_adapted(make):
    source, model = make().eval(), make(in_chans=1).eval()
    assert "channels 3 -> 1: summed" in vision.load_weights(model, source).adapted
    x = torch.randn(1, 1, 32, 32)
    torch.testing.assert_close(model(x), source(x.expand(1, 3, 32, 32)), rtol=1e-4, atol=1e-5)


def test_halvings_of_a_conv_stem_cannot_be_adapted():
    with pytest.raises(UserError, match=r"ConvStem has a convolution for each halving, patches 4 -> 8; use patch_size=4"):
        vision.load_weights(ViT(stem=ConvStem, **V), ViT(stem=ConvStem, **V | {"patch_size": 4, "img_size": 16}))
