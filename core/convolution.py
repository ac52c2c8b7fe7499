"""Convolutions over channels-last maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.plain import asking_is_free


def convolve(
    x: Float[Tensor, "b h w c"], weight: Float[Tensor, "d e i j"], bias: Float[Tensor, " d"] | None = None, *, groups: int = 1
) -> Float[Tensor, "b h w d"]:
    """Convolution with an odd kernel, zeros outside the map, the same size out.

    Channels-last memory is a stride order of torch's `b c h w`: the kernels for it run without a copy.
    """
    reach = weight.shape[-2] // 2, weight.shape[-1] // 2
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=reach, groups=groups)
    return y.permute(0, 2, 3, 1).contiguous()  # a copy only where one channel leaves the order open


def pointwise(
    x: Float[Tensor, "b h w c"], weight: Float[Tensor, "d c"], bias: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "b h w d"]:
    """1x1 convolution: each pixel's product with the weight.

    On a CPU with several threads by the convolution's kernel, which takes a tenth to a half less time than the product's.
    """
    if asking_is_free(x) and torch.get_num_threads() > 1:
        return convolve(x, weight[..., None, None], bias)
    return F.linear(x, weight, bias)


class Conv1x1(nn.Linear):
    """1x1 convolution of channels-last maps: a Linear, by `pointwise`."""

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w d"]:
        return pointwise(x, self.weight, self.bias)


class Conv3x3(nn.Conv2d):
    """3x3 convolution of channels-last maps.

    Args:
        dim, out_dim: channels in and out.
        depthwise: each channel for itself; `out_dim` is then `dim`.
        bias: added to each channel.
    """

    def __init__(self, dim: int, out_dim: int, *, depthwise: bool = False, bias: bool = False) -> None:
        super().__init__(dim, out_dim, 3, padding=1, groups=dim if depthwise else 1, bias=bias)

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w d"]:
        return convolve(x, self.weight, self.bias, groups=self.groups)
