"""Attention among channels: every channel is a token, its pixels are the token's width."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core.attention import attend, masked_softmax, split_advice
from core.convolution import Conv1x1, Conv3x3, convolve, pointwise
from core.tiles import WHOLE, Area, by_tiles, pays

EPS = 1e-12  # least length of a query or key


class ChannelSums(NamedTuple):
    """All that the attention weights need to know of the pixels: sums over them, which add up over parts of a picture."""

    products: Float[Tensor, "b heads e e"]  # queries times keys
    q_squares: Float[Tensor, "b heads e"]
    k_squares: Float[Tensor, "b heads e"]

    def plus(self, other: ChannelSums) -> ChannelSums:
        return ChannelSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class ChannelAttention(nn.Module):
    """Transposed attention: softmax(temperature · cos(q, k)) v over channels (Restormer, Zamir et al. 2022, eq. 1).

    Queries, keys and values come from a 1x1 and a depthwise 3x3 convolution. `forward` never holds normalised queries
    and keys, nor the weighted values before the output projection: the c x c sums are divided by the lengths afterwards,
    and projection and weights are multiplied first. `plain` is the formula as it is written.

    Args:
        dim: channels.
        heads: groups of channels that attend among themselves; `dim` splits over them.
        bias: of the convolutions and the output projection.

    Raises:
        ValueError: heads that do not split the channels.
    """

    def __init__(self, dim: int, heads: int, *, bias: bool = False) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split over heads={heads}; {split_advice(dim, heads)}")
        self.dim, self.heads = dim, heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = Conv1x1(dim, 3 * dim, bias=bias)
        self.depthwise = Conv3x3(3 * dim, 3 * dim, depthwise=True, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        """Raises ValueError: a map of other than `dim` channels."""
        self.check(x)
        v, *sums = by_tiles(self.values_and_sums, x) if pays(x) else self.values_and_sums(x)
        return self.mix(v, self.fold(self.weights(ChannelSums(*sums))))

    def plain(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        """What `forward` must equal, step by step."""
        q, k, v = rearrange(self.project(x), "b h w (three heads e) -> three b heads e (h w)", three=3, heads=self.heads)
        q, k = F.normalize(q, dim=-1, eps=EPS), F.normalize(k, dim=-1, eps=EPS)
        y = attend(q * self.temperature, k, v, scale=1.0)
        return self.out(rearrange(y, "b heads e (h w) -> b h w (heads e)", h=x.shape[1]))

    def look(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b heads e e"]:
        """The attention weights that `forward` uses: row = channel that asks, column = channel that is asked."""
        q, k, _ = self.project(x).chunk(3, dim=-1)
        return self.weights(channel_sums(q, k, self.heads))

    # The steps, apart: over a picture in parts (`project_part`, `channel_sums`) and then again (`project_part`, `mix`)

    def project(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w three_d"]:
        """Queries, keys and values, side by side."""
        self.check(x)
        return self.depthwise(self.qkv(x))

    def values_and_sums(self, x: Float[Tensor, "b h w d"], inner: Area = WHOLE) -> tuple[Tensor, ...]:
        """Values, and the three `ChannelSums`, of the pixels `inner`."""
        q, k, v = self.project(x)[:, *inner].chunk(3, dim=-1)
        return v, *channel_sums(q, k, self.heads)

    def project_part(self, x: Float[Tensor, "b h w d"], first: int, last: int) -> Float[Tensor, "b h w part"]:
        """The channels `first <= i < last` of `project`: queries from 0, keys from dim, values from 2 dim."""
        self.check(x)
        part = slice(first, last)
        y = pointwise(x, self.qkv.weight[part], None if self.qkv.bias is None else self.qkv.bias[part])
        bias = None if self.depthwise.bias is None else self.depthwise.bias[part]
        return convolve(y, self.depthwise.weight[part], bias, groups=last - first)

    def weights(self, sums: ChannelSums) -> Float[Tensor, "b heads e e"]:
        q_length, k_length = (squares.clamp_min(EPS**2).sqrt() for squares in sums[1:])
        cosines = sums.products / (q_length[..., :, None] * k_length[..., None, :])
        return masked_softmax(cosines * self.temperature)

    def fold(self, weights: Float[Tensor, "b heads e e"]) -> Float[Tensor, "b d d"]:
        """Output projection times attention weights: one matrix for the values of all heads."""
        projection = rearrange(self.out.weight, "d (heads e) -> heads d e", heads=self.heads)
        return rearrange(projection @ weights.to(projection.dtype), "b heads d e -> b d (heads e)")

    def mix(self, v: Float[Tensor, "b h w d"], matrix: Float[Tensor, "b d d"]) -> Float[Tensor, "b h w d"]:
        y = (v.flatten(1, 2) @ matrix.mT.to(v.dtype)).view(v.shape)
        return y if self.out.bias is None else y + self.out.bias

    def check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[-1] != self.dim:
            raise ValueError(
                f"map of shape {tuple(x.shape)} is not b h w {self.dim}; use channels-last maps as wide as dim={self.dim}"
            )


def channel_sums(q: Float[Tensor, "b h w d"], k: Float[Tensor, "b h w d"], heads: int) -> ChannelSums:
    """Sums over all pixels: too much for float16 and too fine for bfloat16, so that these are widened."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = (y.float() if y.dtype in (torch.float16, torch.bfloat16) else y for y in (q, k))
        q, k = (rearrange(y, "b h w (heads e) -> b (h w) heads e", heads=heads) for y in (q, k))
        products = q.permute(0, 2, 3, 1) @ k.permute(0, 2, 1, 3)
        return ChannelSums(products, q.square().sum(dim=1), k.square().sum(dim=1))
