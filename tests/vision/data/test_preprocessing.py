"""The evaluation transform equals timm's, keeps depth, and names wrong values."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vision.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, evaluation_transform
from vision.errors import UserError

Maker = Callable[..., np.ndarray]


def values(**changed: Any) -> dict[str, Any]:
    plain = {"channels": 3, "size": [32, 32], "mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
    return plain | {"interpolation": "bicubic", "crop_pct": 0.875, "resize": "crop"} | changed


@pytest.mark.parametrize("shape", [(300, 451), (451, 300), (40, 31), (17, 90)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875])
@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize("size", [[64, 64], [48, 80]])
def test_equals_timm(
    picture: Maker, size: list[int], interpolation: str, resize: str, crop_pct: float, shape: tuple[int, int]
) -> None:
    image = picture(*shape)
    ours = evaluation_transform(values(size=size, interpolation=interpolation, resize=resize, crop_pct=crop_pct))(image)
    options = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop_mode": {"crop": "center", "squash": "squash"}[resize]}
    theirs = create_transform((3, *size), is_training=False, interpolation=interpolation, crop_pct=crop_pct, **options)
    torch.testing.assert_close(ours, theirs(Image.fromarray(image)), rtol=0, atol=1e-6)


def test_picture_of_the_right_size_is_only_normalised(picture: Maker) -> None:
    image = picture(28, 28, 1)
    ours = evaluation_transform(values(channels=1, size=[28, 28], mean=[0.25], std=[0.5], crop_pct=1.0))(image)
    torch.testing.assert_close(ours, (torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.25) / 0.5)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_16_bits_agree_with_8_to_a_level(interpolation: str) -> None:
    y, x = np.mgrid[0:90, 0:120]
    smooth = (127 + 60 * np.sin(x / 9) * np.cos(y / 7))[..., None].repeat(3, -1)
    transform = evaluation_transform(values(interpolation=interpolation, mean=[0.0] * 3, std=[1.0] * 3))
    coarse = transform(smooth.astype(np.uint8))
    fine = transform(smooth.astype(np.uint8).astype(np.uint16) * 257)
    assert (coarse - fine).abs().max() * 255 < 1.01  # rounding of the 8-bit path


def test_16_bits_are_not_reduced_to_8() -> None:
    image = np.full((32, 32, 1), 30_001, np.uint16)
    transform = evaluation_transform(values(channels=1, mean=[0.0], std=[1.0], crop_pct=1.0))
    assert transform(image)[0, 0, 0] == pytest.approx(30_001 / 65_535, abs=1e-7)
    assert transform((image > 0) * np.uint16(65_535)).min() >= 0


def test_channels_are_converted(picture: Maker) -> None:
    gray, colour = picture(40, 40, 1), picture(40, 40, 3)
    to_rgb = evaluation_transform(values(mean=[0.0] * 3, std=[1.0] * 3))(gray)
    assert to_rgb.shape == (3, 32, 32)
    assert torch.equal(to_rgb[0], to_rgb[2])
    to_gray = evaluation_transform(values(channels=1, mean=[0.0], std=[1.0]))
    assert to_gray(colour).shape == (1, 32, 32)
    assert to_gray(picture(40, 40, 4)).shape == to_gray(picture(40, 40, 2)).shape == (1, 32, 32)


def test_bicubic_overshoot_of_16_bits_stays_in_range() -> None:
    image = np.zeros((10, 10, 1), np.uint16)
    image[:, 5:] = 65_535
    out = evaluation_transform(values(channels=1, mean=[0.0], std=[1.0]))(image)
    assert out.min() == 0
    assert out.max() == 1


@pytest.mark.parametrize("shape", [(1, 200_000), (200_000, 1), (1, 1)])
def test_extreme_proportions_do_not_fill_the_memory(shape: tuple[int, int]) -> None:
    assert evaluation_transform(values())(np.zeros((*shape, 3), np.uint8)).shape == (3, 32, 32)


def test_can_be_pickled_and_shown(picture: Maker) -> None:
    transform = evaluation_transform(values())
    image = picture(50, 40)
    assert torch.equal(pickle.loads(pickle.dumps(transform))(image), transform(image))
    assert "'crop_pct': 0.875" in repr(transform)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"channels": 2}, "channels=2 is not possible here; use 3 (RGB) or 1 (gray)"),
        ({"size": [0, 5]}, "size=[0, 5] is not a picture size"),
        ({"size": [5]}, "size=[5] is not a picture size"),
        ({"mean": [0.5]}, "mean has 1 values for channels=3; give one for each channel"),
        ({"std": [0.5] * 4}, "std has 4 values for channels=3"),
        ({"std": [0.5, 0.5, 0.0]}, "std=[0.5, 0.5, 0.0] must be above 0"),
        ({"mean": [0.5, 0.5, float("nan")]}, "must hold finite numbers"),
        ({"interpolation": "lanczos"}, "interpolation='lanczos' is unknown; use bicubic, bilinear, nearest"),
        ({"crop_pct": 1.5}, "crop_pct=1.5 is not a share; use more than 0 and at most 1"),
        ({"resize": "stretch"}, "resize='stretch' is unknown; use crop or squash"),
        ({"crop": 1}, "preprocessing has unknown crop; it takes channels, crop_pct, interpolation, mean, resize, size, std"),
    ],
)
def test_wrong_values_are_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        evaluation_transform(values(**changed))


def test_missing_values_are_named() -> None:
    with pytest.raises(UserError, match="preprocessing lacks mean, std; it needs"):
        evaluation_transform({k: v for k, v in values().items() if k not in ("mean", "std")})


def test_preprocessing_fills_in_what_the_data_says() -> None:
    plain = Preprocessing().plain(28, channels=1, mean=[0.3], std=[0.2], crop_pct=1.0)
    assert plain == values(channels=1, size=[28, 28], mean=[0.3], std=[0.2], crop_pct=1.0)
    own = Preprocessing(channels=3, mean=[0.5] * 3, std=[0.5] * 3, crop_pct=0.9)
    assert own.plain(28, channels=1, mean=[0.3], std=[0.2], crop_pct=1.0)["mean"] == [0.5] * 3
    with pytest.raises(UserError, match="mean has 1 values for channels=3"):
        Preprocessing(channels=3, mean=[0.5]).plain(28, channels=1, mean=[0.3], std=[0.2], crop_pct=1.0)


def test_channels_of_a_config_are_checked_at_once() -> None:
    with pytest.raises(UserError, match=r"channels=2 is not possible here; use 3 \(RGB\), 1 \(gray\) or 0 \(as the data are\)"):
        Preprocessing(channels=2)
