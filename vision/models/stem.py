"""From pictures to the first feature map: patches, or convolutions. Each is made as `(in_chans, dim, patch_size)` and
tells its `reduction`, pixels a side of a token."""

from __future__ import annotations

import itertools
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import core.options
from vision.errors import UserError
from vision.hub import check_name, published


class PatchEmbedding(nn.Module):
    """Patches, each projected to a token: a convolution whose stride is its kernel.

    A picture that is not a multiple of `reduction` is padded with zeros at the right and the bottom (timm's rule).
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__()
        check_sizes(patch_size=patch_size)
        self.reduction = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        return self.proj(pad_to_multiple(x, self.reduction))


class ConvStem(nn.Module):
    """3x3 convolutions of stride 2 instead of one large patch (Xiao et al. 2021): learns faster from little data.

    `patch_size` is a power of two: log2(patch_size) convolutions, the channels doubling up to `dim`.
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__()
        steps = patch_size.bit_length() - 1
        if patch_size != 2**steps or steps < 1:
            raise ValueError(
                f"patch_size={patch_size} is not a power of two of at least 2, which ConvStem halves to; use 4, 8 or 16"
            )
        if dim < 2 ** (steps - 1):
            raise ValueError(f"dim={dim} has no channel left after {steps} halvings; use dim={2 ** (steps - 1)} or more")
        self.reduction = patch_size
        widths = [in_chans, *(dim // 2 ** (steps - 1 - i) for i in range(steps))]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.GELU()]
        self.convolutions = nn.Sequential(*layers)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        x = pad_to_multiple(x, self.reduction).contiguous(memory_format=torch.channels_last)  # 10 % of a small ViT's step
        return self.proj(self.convolutions(x))


class CNNStem(nn.Module):
    """A feature map of a timm CNN, projected, as the patches of a Transformer (the hybrid of Dosovitskiy et al. 2021).

    Args:
        in_chans, dim: channels in and out.
        patch_size: pixels a side of a cell of the map that is taken, such as 4, 8 or 16; the CNN ends there.
        name: of timm's model. Nothing is downloaded for it.
        pretrained: timm's weights, downloaded once; a model rebuilt from a checkpoint takes those of the checkpoint.

    Raises:
        UserError: timm has no such CNN, or that has no map of this size.
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int, *, name: str = "resnet18", pretrained: bool = False) -> None:
        super().__init__()
        import timm  # takes seconds

        check_name(name)  # no address either: a file must not make us fetch anything
        try:
            with torch.device("meta"):
                whole: Any = timm.create_model(name, features_only=True)
            sizes = whole.feature_info.reduction()
        except (RuntimeError, AttributeError, AssertionError) as error:
            raise UserError(f"{name} gives no feature maps; use a CNN such as resnet18") from error
        if patch_size not in sizes:
            raise UserError(
                f"{name} has no map of {patch_size} pixels a cell; use patch_size={' or '.join(map(str, dict.fromkeys(sizes)))}"
            )
        self.reduction = patch_size
        options: dict[str, Any] = {"features_only": True, "out_indices": (sizes.index(patch_size),), "in_chans": in_chans}
        make: Any = (
            partial(published, instead="train it from nothing, with pretrained=False") if pretrained else timm.create_model
        )
        cnn: Any = make(name, **options)
        if pretrained and any(isinstance(part, nn.Linear) for part in cnn.modules()):
            raise UserError(f"{name} has linear layers, which the Transformer would start anew; use a CNN such as resnet18")
        self.cnn, self.proj = cnn, nn.Conv2d(cnn.feature_info.channels()[0], dim, 1)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        return self.proj(self.cnn(pad_to_multiple(x, self.reduction))[0])


SQUARE = {"img_size": "pictures of any size are taken", "patch_size": "patches are square"}


def check_sizes(**sizes: Any) -> None:
    """Raises ValueError: a size of a model that is no whole number of at least 1; rows and columns where one side is meant."""
    for name, why in SQUARE.items():
        size: Any = sizes.get(name)
        if is_pair(size):
            raise ValueError(f"{name}={size!r} is not one whole number; use {max(size)}: {why}")
    core.options.check_sizes(**sizes)


def is_pair(size: Any) -> bool:
    return isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(side, Integral) for side in size)


def check_classes(num_classes: int) -> None:
    """Raises ValueError: no number of classes."""
    if not isinstance(num_classes, Integral) or isinstance(num_classes, bool) or num_classes < 0:
        raise ValueError(f"num_classes={num_classes!r} is no number of classes; use 0 for features, or 1 or more")


def check_pictures(x: Tensor, in_chans: int) -> None:
    """Refuses what no stem of `in_chans` channels takes."""
    if not isinstance(x, Tensor):
        raise ValueError(f"pictures as {type(x).__name__} are no tensor; give torch's, of floats b {in_chans} h w")
    if x.ndim != 4 or x.shape[1] != in_chans or 0 in x.shape[2:]:
        fix = f"build the model with in_chans={x.shape[1]}" if x.ndim == 4 else "add the batch with x[None]"
        raise ValueError(f"pictures of shape {tuple(x.shape)} are not b {in_chans} h w; convert them, or {fix}")
    if not x.is_floating_point():
        raise ValueError(f"pictures of dtype {x.dtype} are not floats; scale and normalise them first, as x / 255")


def pad_to_multiple(x: Float[Tensor, "b c h w"], multiple: int) -> Float[Tensor, "b c h2 w2"]:
    bottom, right = ((n + multiple - 1) // multiple * multiple - n for n in x.shape[-2:])  # see core.window.pad_to_multiple
    return F.pad(x, (0, right, 0, bottom)) if bottom or right else x
