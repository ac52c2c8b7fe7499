from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vision
from vision.errors import UserError
from vision.inference.pictures import take
from vision.models import Restormer

TINY = {"dim": 2, "depths": (1, 1, 1, 1), "refinement": 1, "heads": (1, 1, 1, 1)}


class Same(nn.Module):
    """Gives the picture as it is; `in_chans` None is any number of channels."""

    def __init__(self, in_chans: int | None = None, scale: int = 1) -> None:
        super().__init__()
        self.in_chans, self.scale = in_chans, scale

    def forward(self, x):
        return x.repeat_interleave(self.scale, -1).repeat_interleave(self.scale, -2)


def random(dtype, *shape):
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("in_chans", [None, 1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_arrays_of_every_depth_and_number_of_channels(in_chans, dtype):
    """Gray, RGB, each with or without alpha; issue SwinIR 69: 16 bits go in and come out."""
    model = Same(in_chans)
    for shape in ((5, 7), (5, 7, 1), (5, 7, 2), (5, 7, 3), (5, 7, 4)):
        image = random(dtype, *shape)
        for mode in ("auto", "whole", "tile"):
            restored = vision.restore(model, image, mode=mode)
            assert restored.dtype == dtype
            assert restored.flags.c_contiguous
            assert np.array_equal(restored, image)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_arrays(dtype):
    image = random(np.uint8, 5, 7, 3).astype(dtype) / 255
    restored = vision.restore(Same(), image)
    assert restored.dtype == dtype
    assert np.array_equal(restored.astype(np.float32), image.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors(dtype):
    image = torch.from_numpy(random(np.uint8, 2, 3, 5, 7))
    image = image.to(dtype) / 255 if dtype.is_floating_point else image.to(dtype)
    for one in (image, image[0]):
        restored = vision.restore(Same(), one)
        assert restored.dtype == dtype
        assert torch.equal(restored.float(), one.float())
        assert not restored.is_inference()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "F"])
def test_pil_images(mode):
    picture = Image.fromarray(random(np.uint8, 9, 7, 3))
    if mode in ("I;16", "F"):
        picture = Image.fromarray(random(np.uint16, 9, 7) if mode == "I;16" else random(np.uint8, 9, 7).astype(np.float32) / 255)
    else:
        picture = picture.convert(mode)
    picture.info = {"icc_profile": b"colours", "dpi": (72, 72)}
    restored = vision.restore(Same(), picture)
    assert restored.mode == {"1": "L", "P": "RGB"}.get(mode, mode)
    assert restored.info == {"icc_profile": b"colours", "dpi": (72, 72)}
    assert np.array_equal(np.asarray(restored), np.asarray(picture.convert(restored.mode) if mode in "1P" else picture))


def test_transparent_colour_becomes_alpha():
    picture = Image.fromarray(random(np.uint8, 9, 7, 3)).quantize(4)
    picture.info["transparency"] = 2
    restored = vision.restore(Same(3), picture)
    assert restored.mode == "RGBA"
    assert np.array_equal(np.asarray(restored), np.asarray(picture.convert("RGBA")))


def test_alpha_is_kept_and_not_restored():
    """And grows with the picture."""

    class Darker(Same):
        def forward(self, x):
            return super().forward(x) * 0.5

    image = random(np.uint8, 6, 5, 4)
    restored = vision.restore(Darker(3), image)
    assert np.array_equal(restored[..., 3], image[..., 3])
    assert np.array_equal(restored[..., :3], np.rint(image[..., :3] / 2))
    flat = np.full((6, 5, 4), 99, dtype=np.uint8)
    twice = vision.restore(Darker(3, scale=2), flat)
    assert twice.shape == (12, 10, 4)
    assert (twice[..., 3] == 99).all()


def test_issue_swinir_169_gray_checkpoint_colour_picture(perturbed):
    """A gray model restores each colour as a gray picture; a colour model sees gray as equal colours."""
    gray, colour = (perturbed(Restormer(in_chans=channels, **TINY)).eval() for channels in (1, 3))
    image = torch.rand(2, 3, 12, 9)
    restored = vision.restore(gray, image)
    for i in range(3):
        torch.testing.assert_close(restored[:, i : i + 1], vision.restore(gray, image[:, i : i + 1]))
    one = torch.rand(1, 12, 9)
    luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    with torch.no_grad():
        expected = (colour(one.expand(1, 3, -1, -1))[0] * luma).sum(0, keepdim=True).clamp(0, 1)
    torch.testing.assert_close(vision.restore(colour, one), expected)


def test_two_views_make_one_picture(perturbed):
    model = perturbed(Restormer(in_chans=6, dual_pixel=True, **TINY))
    views = random(np.uint16, 10, 12, 6)
    restored = vision.restore(model, views)
    assert restored.shape == (10, 12, 3)
    assert restored.dtype == np.uint16
    with pytest.raises(
        UserError, match=r"the picture has 3 channels, the model takes 6 \(the left, then the right view, RGB each\)"
    ):
        vision.restore(model, views[..., :3])
    with pytest.raises(
        UserError, match=r"self_ensemble turns the picture, and views of a dual-pixel camera differ by their direction"
    ):
        vision.restore(model, views, self_ensemble=True)
    with pytest.raises(UserError, match=r"blend=0.5 mixes in the picture as it was, which the result differs from"):
        vision.restore(model, views, blend=0.5)


def test_values_are_cut_to_their_range():
    class Louder(Same):
        def forward(self, x):
            return 3 * x - 1

    for image in (np.float32([[[0.0], [0.5], [1.0]]]), torch.tensor([[[0.0, 0.5, 1.0]]])):
        assert vision.restore(Louder(), image).reshape(-1).tolist() == [0, 0.5, 1]
    assert vision.restore(Louder(), np.uint8([[0, 128, 255]])).tolist() == [[0, 129, 255]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("photo.png", r"a str is no picture; read it with vision.data.read_image\(path\): a PIL image, a numpy array h w c or"),
        ([1, 2], r"a list is no picture; give one: a PIL image, a numpy array h w c or a tensor c h w"),
        (np.zeros((2, 3, 4, 5), np.uint8), r"an array of shape \(2, 3, 4, 5\) is no picture h w or h w c; transpose it, or give"),
        (np.zeros((3, 40, 50), np.uint8), r"an array of shape \(3, 40, 50\) is no picture h w or h w c"),
        (np.zeros((0, 4, 3), np.uint8), r"an array of shape \(0, 4, 3\) is no picture"),
        (np.zeros((4, 4), np.int64), r"a picture of int64 has no known range; give uint8, uint16, or float in 0..1"),
        (np.zeros((4, 4), bool), r"a picture of bool has no known range"),
        (torch.zeros(4, 4), r"a tensor of shape \(4, 4\) is no picture c h w or b c h w; use permute or x\[None\]"),
        (torch.zeros(40, 50, 3), r"a tensor of shape \(40, 50, 3\) is no picture c h w or b c h w"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"a picture of torch.int64 has no known range"),
        (
            Image.new("CMYK", (4, 4)),
            r"a PIL image of mode CMYK is not restored as it is; convert it first, with image.convert\('RGB'\)",
        ),
        (Image.new("I", (4, 4)), r"a PIL image of mode I is not restored as it is"),
        (
            np.zeros((4, 4, 5), np.uint8),
            r"the picture has 5 channels, the model takes 3 \(RGB\); give such a picture, alpha may follow",
        ),
        (
            np.float32([[0, 255]]),
            r"the float32 picture has values from 0 to 255; float pictures are 0..1: divide by 255 or 65535, clip",
        ),
        (torch.tensor([[[-0.2, 1.1]]]), r"the torch.float32 picture has values from -0.2 to 1.1; float pictures are 0..1"),
        (np.float64([[0, np.nan]]), r"the picture holds NaN or infinity; mend it first"),
    ],
)
def test_what_is_no_picture(image, message):
    with pytest.raises(UserError, match=message):
        vision.restore(Same(3), image)


def test_rounding_is_no_reason_to_refuse():
    vision.restore(Same(), np.float32([[1.0000001, -1e-6]]))


def test_every_value_comes_back():
    """All numbers of 8 and 16 bits survive the way to float and back, of either byte order."""
    for dtype, order in itertools.product((np.uint8, np.uint16), "<>"):
        image = np.arange(np.iinfo(dtype).max + 1, dtype=dtype)[None].astype(np.dtype(dtype).newbyteorder(order))
        values, back = take(image)
        assert np.array_equal(back(values), image)
