"""The way from a decoded picture to the model's input in evaluation, described by plain values that a checkpoint can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from vision.data.images import convert_channels
from vision.errors import UserError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATIONS = {
    "bicubic": InterpolationMode.BICUBIC,
    "bilinear": InterpolationMode.BILINEAR,
    "nearest": InterpolationMode.NEAREST_EXACT,  # of the two kinds, the one nearest to Pillow's
}
_LONGEST = 32  # sides of more than 32 : 1 are cut to it before resizing: 1 x 100,000 pixels would grow to gigabytes
_KEYS = {"channels", "size", "mean", "std", "interpolation", "crop_pct", "resize"}


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become a model's input; published weights need the values they were trained with.

    Args:
        channels: 3 (RGB) or 1 (gray); 0 = as the data set stores them (picture files: 3).
        mean, std: for each channel, in units of the full range (0..1); empty = ImageNet's for picture files,
            those of the training pictures for small sets.
        interpolation: of the resizing, with antialiasing.
        crop_pct: the share of the resized side that the centre crop keeps, above 0 and at most 1;
            0 = 0.875 for picture files, 1 for small sets.
        resize: "crop" keeps the proportions and cuts the longer side; "squash" keeps the whole picture and not its proportions.
    """

    channels: int = 0
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    interpolation: Literal["bicubic", "bilinear", "nearest"] = "bicubic"
    crop_pct: float = 0.0
    resize: Literal["crop", "squash"] = "crop"

    def __post_init__(self) -> None:
        if self.channels not in (0, 1, 3):
            raise UserError(f"channels={self.channels} is not possible here; use 3 (RGB), 1 (gray) or 0 (as the data are)")

    def plain(self, size: int, *, channels: int, mean: Sequence[float], std: Sequence[float], crop_pct: float) -> dict[str, Any]:
        """The dictionary that :func:`evaluation_transform` takes, for square input of ``size`` pixels; checked.

        The other arguments stand in where this object leaves the choice to the data.
        """
        values = {
            "channels": self.channels or channels,
            "size": [size, size],
            "mean": list(self.mean or mean),
            "std": list(self.std or std),
            "interpolation": self.interpolation,
            "crop_pct": float(self.crop_pct or crop_pct),
            "resize": self.resize,
        }
        check_preprocessing(values)
        return values


def check_preprocessing(values: Mapping[str, Any]) -> None:
    """Raise UserError, in one line, for the first value that breaks its rule."""
    if missing := sorted(_KEYS - values.keys()):
        raise UserError(f"preprocessing lacks {', '.join(missing)}; it needs {', '.join(sorted(_KEYS))}")
    if unknown := sorted(values.keys() - _KEYS):
        raise UserError(f"preprocessing has unknown {', '.join(unknown)}; it takes {', '.join(sorted(_KEYS))}")
    channels, size = values["channels"], values["size"]
    if channels not in (1, 3):
        raise UserError(f"channels={channels} is not possible here; use 3 (RGB) or 1 (gray)")
    if len(size) != 2 or min(size) < 1:
        raise UserError(f"size={list(size)} is not a picture size; give height and width of at least 1 pixel")
    for name in ("mean", "std"):
        if len(values[name]) != channels:
            raise UserError(f"{name} has {len(values[name])} values for channels={channels}; give one for each channel")
    if not all(math.isfinite(x) for x in values["mean"]):
        raise UserError(f"mean={list(values['mean'])} must hold finite numbers; ImageNet's are {list(IMAGENET_MEAN)}")
    if not all(x > 0 and math.isfinite(x) for x in values["std"]):
        raise UserError(f"std={list(values['std'])} must be above 0; ImageNet's are {list(IMAGENET_STD)}")
    if values["interpolation"] not in INTERPOLATIONS:
        raise UserError(f"interpolation={values['interpolation']!r} is unknown; use {', '.join(INTERPOLATIONS)}")
    if not 0 < values["crop_pct"] <= 1:
        raise UserError(f"crop_pct={values['crop_pct']} is not a share; use more than 0 and at most 1, for example 0.875")
    if values["resize"] not in ("crop", "squash"):
        raise UserError(f"resize={values['resize']!r} is unknown; use crop or squash")


def evaluation_transform(preprocessing: Mapping[str, Any]) -> Callable[[UInt[np.ndarray, "h w c"]], Float[Tensor, "c2 h2 w2"]]:
    """The evaluation transform that plain values describe, as a callable that workers can pickle.

    Resizing and cropping follow timm's evaluation pipeline, pixel for pixel on uint8 pictures: with ``resize="crop"`` the
    shorter side becomes size / crop_pct, with "squash" both sides do; then the centre of ``size`` is cut out.
    uint16 pictures are resized as float numbers and never reduced to 8 bits.

    Args:
        preprocessing: ``{"channels": 1|3, "size": [h, w], "mean": [...], "std": [...], "interpolation":
            "bicubic"|"bilinear"|"nearest", "crop_pct": 0..1, "resize": "crop"|"squash"}``.

    Returns:
        A function from a picture, uint8 or uint16 with 1 to 4 channels, to the normalised input, float32.

    Raises:
        UserError: a key is missing or unknown, or a value breaks its rule.
    """
    check_preprocessing(preprocessing)
    return EvaluationTransform(dict(preprocessing))


class EvaluationTransform:
    """What :func:`evaluation_transform` returns; its parts serve the training pictures too."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.channels: int = values["channels"]
        self.size: tuple[int, int] = (int(values["size"][0]), int(values["size"][1]))
        self.interpolation = INTERPOLATIONS[values["interpolation"]]
        self.mean = torch.tensor(values["mean"], dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(values["std"], dtype=torch.float32).view(-1, 1, 1)

    def __call__(self, image: UInt[np.ndarray, "h w c"]) -> Float[Tensor, "c2 h2 w2"]:
        return self.normalize(to_float(self.fit(image)))

    def __repr__(self) -> str:
        return f"EvaluationTransform({self.values})"

    def fit(self, image: UInt[np.ndarray, "h w c"]) -> Tensor:
        """Right channels and size: uint8 from uint8; float32 in 0..1 from uint16. Shape c h2 w2."""
        picture = as_picture(image, self.channels)
        picture = _cut_extremes(picture)
        size = self._resized(*F.get_size(picture))
        if size != tuple(F.get_size(picture)):
            picture = F.resize(picture, list(size), self.interpolation, antialias=True)
        return as_tensor(F.center_crop(picture, list(self.size)))

    def normalize(self, images: Float[Tensor, "*b c h w"]) -> Float[Tensor, "*b c h w"]:
        """From 0..1 to mean 0 and deviation 1 of the training set."""
        return images.sub(self.mean).div_(self.std)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        target = tuple(math.floor(side / self.values["crop_pct"]) for side in self.size)
        if self.values["resize"] == "squash":
            return target[0], target[1]
        if target[0] == target[1]:  # torchvision's and timm's rounding for square input ...
            short = target[0]
            return (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
        ratio = min(height / target[0], width / target[1])  # ... and timm's for other input
        return round(height / ratio), round(width / ratio)


def as_picture(image: UInt[np.ndarray, "h w c"], channels: int) -> Image.Image | Float[Tensor, "c2 h w"]:
    """In the wanted channels: a Pillow picture of 8 bits, or of 16 bits a float tensor in 0..1, which Pillow has no mode for."""
    image = convert_channels(image, channels)
    if image.dtype == np.uint16:
        return torch.from_numpy(image.astype(np.float32) / 65535).permute(2, 0, 1).contiguous()
    return Image.fromarray(image[..., 0] if channels == 1 else image)


def as_tensor(picture: Image.Image | Float[Tensor, "c h w"]) -> Tensor:
    """A Pillow picture as uint8 c h w; a float tensor with the overshoot of bicubic resizing cut off."""
    return picture.clamp(0, 1) if isinstance(picture, Tensor) else F.pil_to_tensor(picture)


def to_float(images: Tensor) -> Float[Tensor, "*b c h w"]:
    """uint8 to float32 in 0..1; float pictures as they are."""
    return images if images.is_floating_point() else images.float().div_(255)


def _cut_extremes(picture: Any) -> Any:
    height, width = F.get_size(picture)
    return F.center_crop(picture, [min(height, _LONGEST * width), min(width, _LONGEST * height)])
