"""DAT as the paper writes it (Xia et al. 2022), channels first, step by step: for comparison only.

Parameters have the published names, so that its weights go into `vision.models.DAT`. Maps are whole windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

WINDOW, SHIFT = 7, 4  # half a window rounded up


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of `b c h w`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class WindowedAttention(nn.Module):
    """Swin's attention, windows rolled by `shift`."""

    def __init__(self, dim: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.proj_qkv, self.proj_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, heads) * 0.01)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        h, w = x.shape[-2:]
        x = torch.roll(x, (-self.shift, -self.shift), dims=(2, 3))
        tokens = rearrange(x, "b c (i p) (j q) -> (b i j) (p q) c", p=WINDOW, q=WINDOW)
        q, k, v = rearrange(self.proj_qkv(tokens), "b n (three heads e) -> three b heads n e", three=3, heads=self.heads)
        scores = q * q.shape[-1] ** -0.5 @ k.mT + self.bias()
        if self.shift:
            windows = len(tokens) // len(x)
            scores = (scores.unflatten(0, (-1, windows)) + self.mask(h, w, x)[:, None]).flatten(0, 1)
        tokens = self.proj_out(rearrange(scores.softmax(dim=-1) @ v, "b heads n e -> b n (heads e)"))
        x = rearrange(tokens, "(b i j) (p q) c -> b c (i p) (j q)", i=h // WINDOW, j=w // WINDOW, p=WINDOW)
        return torch.roll(x, (self.shift, self.shift), dims=(2, 3))

    def bias(self) -> Float[Tensor, "heads n n"]:
        table = self.relative_position_bias_table
        place = torch.stack(torch.meshgrid(*[torch.arange(WINDOW, device=table.device)] * 2, indexing="ij")).flatten(1)
        rows, columns = (place[:, :, None] - place[:, None, :]) + WINDOW - 1
        return table[rows * (2 * WINDOW - 1) + columns].permute(2, 0, 1)

    def mask(self, h: int, w: int, x: Tensor) -> Float[Tensor, "windows n n"]:
        """-100 between tokens that the roll has made neighbours."""
        region = x.new_zeros(h, w)
        for i, rows in enumerate((slice(-WINDOW), slice(-WINDOW, -self.shift), slice(-self.shift, None))):
            for j, columns in enumerate((slice(-WINDOW), slice(-WINDOW, -self.shift), slice(-self.shift, None))):
                region[rows, columns] = 3 * i + j
        region = rearrange(region, "(i p) (j q) -> (i j) (p q)", p=WINDOW, q=WINDOW)
        return torch.where(region[:, :, None] == region[:, None, :], 0.0, -100.0).to(x)


class PointAttention(nn.Module):
    """Keys and values sampled at points that the queries move (section 3.2), with a bias read between entries of a table."""

    def __init__(self, dim: int, heads: int, groups: int, kernel: int, side: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        width = dim // groups
        self.conv_offset = nn.Sequential(
            nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width),
            ChannelNorm(width),
            nn.GELU(),
            nn.Conv2d(width, 2, 1, bias=False),
        )
        self.proj_q, self.proj_k, self.proj_v, self.proj_out = (nn.Conv2d(dim, dim, 1) for _ in range(4))
        self.rpe_table = nn.Parameter(torch.randn(heads, 2 * side - 1, 2 * side - 1) * 0.01)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        b, _, h, w = x.shape
        q = self.proj_q(x)
        offsets = self.conv_offset(q.reshape(b * self.groups, -1, h, w)).permute(0, 2, 3, 1)
        axes = [(torch.arange(n, device=x.device, dtype=x.dtype) + 0.5) * 2 / n - 1 for n in (h, w)]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        points = grid + offsets.tanh() * torch.tensor([2 / h, 2 / w], device=x.device, dtype=x.dtype)
        sampled = F.grid_sample(x.reshape(b * self.groups, -1, h, w), points.flip(-1), align_corners=True).reshape(x.shape)
        q, k, v = (t.reshape(b * self.heads, -1, h * w) for t in (q, self.proj_k(sampled), self.proj_v(sampled)))
        scores = q.mT @ k * q.shape[1] ** -0.5 + self.bias(grid, points)
        y = v @ scores.softmax(dim=-1).mT
        return self.proj_out(y.reshape(x.shape))

    def bias(self, grid: Float[Tensor, "h w 2"], points: Float[Tensor, "b_g h w 2"]) -> Float[Tensor, "b_heads n n"]:
        apart = (grid.flatten(0, 1)[None, :, None] - points.flatten(1, 2)[:, None]) * 0.5
        tables = self.rpe_table.unflatten(0, (self.groups, -1)).repeat(len(points) // self.groups, 1, 1, 1)
        return F.grid_sample(tables, apart.flip(-1), align_corners=True).flatten(0, 1)


class Network(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.chunk = nn.Sequential()
        self.chunk.add_module("linear1", nn.Linear(dim, 4 * dim))
        self.chunk.add_module("act", nn.GELU())
        self.chunk.add_module("linear2", nn.Linear(4 * dim, dim))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return self.chunk(x.flatten(2).mT).mT.unflatten(-1, x.shape[-2:])


class PlainStage(nn.Module):
    def __init__(self, dim: int, attentions: Sequence[nn.Module]) -> None:
        super().__init__()
        self.attns, self.mlps = nn.ModuleList(attentions), nn.ModuleList(Network(dim) for _ in attentions)
        self.layer_norms = nn.ModuleList(ChannelNorm(dim) for _ in range(2 * len(attentions)))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        for i, (attention, network) in enumerate(zip(self.attns, self.mlps, strict=True)):
            x = x + attention(self.layer_norms[2 * i](x))
            x = x + network(self.layer_norms[2 * i + 1](x))
        return x


class PlainDAT(nn.Module):
    """Args: img_size, dim, depths, heads, groups, kernels, kinds: as `vision.models.DAT`, without N."""

    def __init__(
        self,
        img_size: int = 224,
        dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        groups: Sequence[int] = (1, 2, 3, 6),
        kernels: Sequence[int] = (9, 7, 5, 3),
        kinds: Sequence[str] = ("LS", "LS", "LD", "LD"),
    ) -> None:
        super().__init__()
        self.patch_proj = nn.Sequential(nn.Conv2d(3, dim, 4, stride=4), ChannelNorm(dim))
        self.stages, self.down_projs = nn.ModuleList(), nn.ModuleList()
        for i, depth in enumerate(depths):
            width, side = dim * 2**i, img_size // (4 * 2**i)
            attentions: list[nn.Module] = []
            for j in range(depth):
                kind = kinds[i][j % len(kinds[i])]
                if kind == "D":
                    attentions.append(PointAttention(width, heads[i], groups[i], kernels[i], side))
                else:
                    attentions.append(WindowedAttention(width, heads[i], SHIFT if kind == "S" else 0))
            self.stages.append(PlainStage(width, attentions))
            if i:
                self.down_projs.append(nn.Sequential(nn.Conv2d(width // 2, width, 2, stride=2, bias=False), ChannelNorm(width)))
        self.cls_norm, self.cls_head = ChannelNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        x = self.patch_proj(x)
        for i, stage in enumerate(self.stages):
            x = stage(self.down_projs[i - 1](x) if i else x)
        return self.cls_head(self.cls_norm(x).mean(dim=(2, 3)))
