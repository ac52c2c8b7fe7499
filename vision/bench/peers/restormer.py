"""Restormer as the paper writes it (Zamir et al. 2022), channels first, step by step: for comparison only.

Parameters have the published names, so that weights of either go into `vision.models.Restormer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Norm(nn.Module):
    """Over the channels of `b c h w`; without a bias the mean stays in."""

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.body = Scale(dim, bias)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        tokens, body = x.permute(0, 2, 3, 1), self.body
        deviation = (tokens.var(dim=-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        if body.bias is None:
            tokens = tokens / deviation * body.weight
        else:
            tokens = (tokens - tokens.mean(dim=-1, keepdim=True)) / deviation * body.weight + body.bias
        return tokens.permute(0, 3, 1, 2)


class Scale(nn.Module):
    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None


class TransposedAttention(nn.Module):
    """Equation 1: channels attend channels."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, bias=False)
        self.qkv_dwconv = nn.Conv2d(3 * dim, 3 * dim, 3, padding=1, groups=3 * dim, bias=False)
        self.project_out = nn.Conv2d(dim, dim, 1, bias=False)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        q, k, v = (t.flatten(2).unflatten(1, (len(self.temperature), -1)) for t in self.qkv_dwconv(self.qkv(x)).chunk(3, dim=1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (q @ k.mT * self.temperature).softmax(dim=-1)
        return self.project_out((weights @ v).flatten(1, 2).unflatten(-1, x.shape[-2:]))


class GatedNetwork(nn.Module):
    """Equation 2: one half of the channels gates the other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = int(2.66 * dim)
        self.project_in = nn.Conv2d(dim, 2 * hidden, 1, bias=False)
        self.dwconv = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden, bias=False)
        self.project_out = nn.Conv2d(hidden, dim, 1, bias=False)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        gate, value = self.dwconv(self.project_in(x)).chunk(2, dim=1)
        return self.project_out(F.gelu(gate) * value)


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(dim, bias), TransposedAttention(dim, heads)
        self.norm2, self.ffn = Norm(dim, bias), GatedNetwork(dim)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Resize(nn.Module):
    def __init__(self, dim: int, out_dim: int, shuffle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(dim, out_dim, 3, padding=1, bias=False), shuffle)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        return self.body(x)


class PlainRestormer(nn.Module):
    """Args: dim, depths, refinement, heads: as `vision.models.Restormer`; bias: of the norms ("WithBias" or "BiasFree")."""

    def __init__(
        self,
        dim: int = 48,
        depths: Sequence[int] = (4, 6, 6, 8),
        refinement: int = 4,
        heads: Sequence[int] = (1, 2, 4, 8),
        bias: bool = True,
    ) -> None:
        super().__init__()

        def blocks(width: int, level: int, depth: int) -> nn.Sequential:
            return nn.Sequential(*(PlainBlock(width, heads[level], bias) for _ in range(depth)))

        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, 3, padding=1, bias=False)})
        for i in range(3):
            width = dim * 2**i
            self.add_module(f"encoder_level{i + 1}", blocks(width, i, depths[i]))
            self.add_module(f"decoder_level{i + 1}", blocks(max(width, 2 * dim), i, depths[i]))
            self.add_module(f"down{i + 1}_{i + 2}", Resize(width, width // 2, nn.PixelUnshuffle(2)))
            self.add_module(f"up{i + 2}_{i + 1}", Resize(2 * width, 4 * width, nn.PixelShuffle(2)))
            if i:
                self.add_module(f"reduce_chan_level{i + 1}", nn.Conv2d(2 * width, width, 1, bias=False))
        self.latent = blocks(8 * dim, 3, depths[3])
        self.refinement = blocks(2 * dim, 0, refinement)
        self.output = nn.Conv2d(2 * dim, 3, 3, padding=1, bias=False)

    def forward(self, picture: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        x, kept = self.patch_embed["proj"](picture), []
        for i in (1, 2, 3):
            x = self.get_submodule(f"encoder_level{i}")(x)
            kept.append(x)
            x = self.get_submodule(f"down{i}_{i + 1}")(x)
        x = self.latent(x)
        for i in (3, 2, 1):
            x = torch.cat([self.get_submodule(f"up{i + 1}_{i}")(x), kept.pop()], dim=1)
            x = self.get_submodule(f"reduce_chan_level{i}")(x) if i > 1 else x
            x = self.get_submodule(f"decoder_level{i}")(x)
        return self.output(self.refinement(x)) + picture
