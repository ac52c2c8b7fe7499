"""The convolutions of DAT++ (Xia et al. 2023, section 3.4): around and inside the blocks of `vision.models.dat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core import Block, LayerNorm, Mlp
from core.convolution import Conv3x3
from core.window import pad_to_multiple


class OverlappingStem(nn.Module):
    """Two 3x3 convolutions of stride 2, a norm and a GELU between them (DAT++)."""

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__()
        if patch_size != 4:
            raise ValueError(f"patch_size={patch_size} is not 4, which OverlappingStem's two strides of 2 make; use 4")
        self.reduction = patch_size
        self.halve = nn.Conv2d(in_chans, dim // 2, 3, stride=2, padding=1)
        self.norm = LayerNorm(dim // 2)
        self.proj = nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        x = self.norm(self.halve(x).permute(0, 2, 3, 1))
        return self.proj(F.gelu(x).permute(0, 3, 1, 2))


class Downsampling(nn.Module):
    """A convolution of stride 2 to twice the channels, then a norm: of 2x2 over a map padded with zeros to even sides, or
    of 3x3."""

    def __init__(self, dim: int, kernel: int, norm: Callable[[int], nn.Module] = LayerNorm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, 2 * dim, kernel, stride=2, padding=kernel // 3, bias=False)
        self.norm = norm(2 * dim)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
        x = x if self.conv.padding[0] else pad_to_multiple(x, (2, 2))
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class ConvMlp(Mlp):
    """An Mlp whose hidden map gets its depthwise 3x3 convolution added before the activation (DAT++)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.depthwise = Conv3x3(hidden, hidden, depthwise=True, bias=True)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        x = self.up(x)
        return self.down(self.activation(x + self.depthwise(x)))


class PerceptionBlock(Block):
    """A block that first adds the map's depthwise 3x3 convolution (local perception unit, CMT: Guo et al. 2022)."""

    def __init__(self, dim: int, attention: nn.Module, ffn: nn.Module, **options: Any) -> None:
        super().__init__(dim, attention, ffn, **options)
        self.perception = Conv3x3(dim, dim, depthwise=True, bias=True)

    def forward(self, x: Float[Tensor, "b h w d"], **context: object) -> Float[Tensor, "b h w d"]:
        return super().forward(x + self.perception(x), **context)
