"""Swin v2: Swin with cosine scores, positions from a small network and norms at the end of the branches (Liu et al. 2022,
arXiv:2111.09883)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core import Attention, ContinuousBias, CosineScores, LayerNorm, Position, Site
from core.linear import Linear
from core.options import is_number
from vision.models.swin import BASE, LARGE, Swin, side_by_side


class PostNormMerging(nn.Module):
    """`PatchMerging` with the norm after the projection ."""

    def __init__(self, dim: int, norm: Callable[[int], nn.Module] = LayerNorm) -> None:
        super().__init__()
        self.reduction, self.norm = Linear(4 * dim, 2 * dim, bias=False), norm(2 * dim)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
        return self.norm(self.reduction(side_by_side(x)))


class KeylessBias(nn.Linear):
    """The projection to queries, keys and values, whose keys have no bias: that third of `bias` is never read."""

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n e"]:
        q, k, v = self.bias.chunk(3)
        return F.linear(x, self.weight, torch.cat([q, torch.zeros_like(k), v]))


class FinetunedBias(ContinuousBias):
    """`ContinuousBias` of windows that have grown since the pre-training: distances keep their measure.

    Args:
        share: side of a window at the pre-training over that of the site's (12/16 for the published "12to16" weights).
    """

    def __init__(self, site: Site, *, share: float) -> None:
        if not is_number(share) or share <= 0:
            raise ValueError(f"share={share!r} is not positive; use e.g. 12/16")
        super().__init__(site, pretrained_extent=tuple(max(1, round(size * share)) for size in site.extent))


class SwinV2(Swin):
    """Swin Transformer v2; options are those of `Swin`."""

    default_position = ContinuousBias
    merging = PostNormMerging
    order = "residual_post"

    def attention(self, position: Position) -> Attention:
        dim, heads = position.site.dim, position.site.heads
        attention = Attention(dim, heads, position=position, qk_norm=CosineScores(heads))
        attention.qkv = KeylessBias(dim, 3 * dim)
        return attention

    def reset_parameters(self) -> None:
        """Weights at random; the norms that end a branch at zero, so that every block starts as the identity."""
        super().reset_parameters()
        for stage in self.stages:
            for block in cast(Any, stage).blocks:
                for parameter in (*block.norm1.parameters(), *block.norm2.parameters()):
                    nn.init.zeros_(parameter)


SMALL = {"depths": (2, 2, 18, 2)}
WINDOW_8 = {"img_size": 256, "window_size": 8}
WINDOW_12 = {"img_size": 192, "window_size": 12}
WINDOW_16 = {"img_size": 256, "window_size": 16}
WINDOW_12_TO_16 = WINDOW_16 | {"position": partial(FinetunedBias, share=12 / 16)}
WINDOW_12_TO_24 = {"img_size": 384, "window_size": 24, "position": partial(FinetunedBias, share=12 / 24)}


def swinv2_tiny_window8_256(**options: Any) -> SwinV2:
    return SwinV2(**WINDOW_8 | options)


def swinv2_tiny_window16_256(**options: Any) -> SwinV2:
    return SwinV2(**WINDOW_16 | options)


def swinv2_small_window8_256(**options: Any) -> SwinV2:
    return SwinV2(**SMALL | WINDOW_8 | options)


def swinv2_small_window16_256(**options: Any) -> SwinV2:
    return SwinV2(**SMALL | WINDOW_16 | options)


def swinv2_base_window8_256(**options: Any) -> SwinV2:
    return SwinV2(**BASE | WINDOW_8 | options)


def swinv2_base_window16_256(**options: Any) -> SwinV2:
    return SwinV2(**BASE | WINDOW_16 | options)


def swinv2_base_window12_192(**options: Any) -> SwinV2:
    return SwinV2(**BASE | WINDOW_12 | options)


def swinv2_base_window12to16_192to256(**options: Any) -> SwinV2:
    return SwinV2(**BASE | WINDOW_12_TO_16 | options)


def swinv2_base_window12to24_192to384(**options: Any) -> SwinV2:
    return SwinV2(**BASE | WINDOW_12_TO_24 | options)


def swinv2_large_window12_192(**options: Any) -> SwinV2:
    return SwinV2(**LARGE | WINDOW_12 | options)


def swinv2_large_window12to16_192to256(**options: Any) -> SwinV2:
    return SwinV2(**LARGE | WINDOW_12_TO_16 | options)


def swinv2_large_window12to24_192to384(**options: Any) -> SwinV2:
    return SwinV2(**LARGE | WINDOW_12_TO_24 | options)
