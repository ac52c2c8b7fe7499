"""Restormer: a U-net of channel attention for image restoration (Zamir et al. 2022, arXiv:2111.09881)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import BiasFreeNorm, Block, ChannelAttention, GatedConvFfn, LayerNorm
from core.block import run_through
from core.convolution import Conv1x1, Conv3x3
from core.options import check_makers, check_sizes, hidden_width, remember_options
from vision.models.padding import reflect_to_multiple
from vision.models.pyramid import check_series, check_stages
from vision.models.restormer_stream import stream, stream_memory
from vision.models.stem import check_pictures


class Down(nn.Module):
    """Half the size, twice the channels: a 3x3 convolution, then each 2x2 cells become channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = Conv3x3(dim, dim // 2)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h2 w2 d2"]:
        return self.rearrange(self.conv(x))

    def rearrange(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 d2"]:
        return rearrange(x, "b (h i) (w j) c -> b h w (c i j)", i=2, j=2)


class Up(nn.Module):
    """Twice the size, half the channels: a 3x3 convolution, then channels become each 2x2 cells."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = Conv3x3(dim, 2 * dim)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h2 w2 d2"]:
        return self.rearrange(self.conv(x))

    def rearrange(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h2 w2 d2"]:
        return rearrange(x, "b h w (c i j) -> b (h i) (w j) c", i=2, j=2)


class Restormer(nn.Module):
    """Restores pictures of any size. Takes and gives `b c h w`, values in 0..1.

    Four levels, each of half the size and twice the channels of the one before; the last decoder level and the
    refinement keep `2 dim` channels. A picture is mirrored to a multiple of 8 and cut back.

    Args:
        in_chans: channels of the picture: 3, 1 for gray, 6 for the left and right view of a dual-pixel camera.
        out_chans: channels of the result; None is as many as come in, or half of them with `dual_pixel`.
        dim: channels of the first level; even.
        depths: blocks of the encoder levels, the last one being the bottom; the decoder mirrors them.
        refinement: blocks after the decoder.
        heads: of each level.
        ffn_ratio: hidden channels of the FFN over those of its level, rounded down.
        bias: of all convolutions but the embedding's and those between levels.
        norm: makes each norm from its channels: LayerNorm, or BiasFreeNorm for denoising.
        dual_pixel: the result is computed from the features alone, not added to the picture.

    Raises:
        ValueError: sizes that do not fit each other.

    Attributes:
        scale: size of the result over that of the picture.
        multiple: what tiles should be a multiple of.
    """

    scale, multiple = 1, 8

    @remember_options
    def __init__(
        self,
        in_chans: int = 3,
        out_chans: int | None = None,
        dim: int = 48,
        depths: Sequence[int] = (4, 6, 6, 8),
        refinement: int = 4,
        heads: Sequence[int] = (1, 2, 4, 8),
        *,
        ffn_ratio: float = 2.66,
        bias: bool = False,
        norm: Callable[[int], nn.Module] = LayerNorm,
        dual_pixel: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(in_chans=in_chans, dim=dim)
        check_sizes(0, refinement=refinement)
        check_makers(norm=norm)
        self.in_chans, self.dim, self.dual_pixel = in_chans, dim, dual_pixel
        self.out_chans = (in_chans // 2 if dual_pixel else in_chans) if out_chans is None else out_chans
        check_levels(self, depths, heads)

        def blocks(level: int, width: int, depth: int) -> nn.Sequential:
            return nn.Sequential(
                *(
                    Block(
                        width,
                        ChannelAttention(width, heads[level], bias=bias),
                        GatedConvFfn(width, hidden_width(width, ffn_ratio=ffn_ratio), bias=bias),
                        norm=norm,
                    )
                    for _ in range(depth)
                )
            )

        widths = [dim, 2 * dim, 4 * dim, 8 * dim]
        self.embed = Conv3x3(in_chans, dim)
        self.encoder = nn.ModuleList(blocks(i, widths[i], depths[i]) for i in range(3))
        self.down = nn.ModuleList(Down(widths[i]) for i in range(3))
        self.latent = blocks(3, widths[3], depths[3])
        # From the bottom up. The topmost level has no reduction: it works on both halves, 2 dim channels.
        self.up = nn.ModuleList(Up(widths[i + 1]) for i in (2, 1, 0))
        reductions = [Conv1x1(2 * widths[i], widths[i], bias=bias) for i in (2, 1)]
        self.reduce = nn.ModuleList([*reductions, nn.Identity()])
        self.decoder = nn.ModuleList(blocks(i, max(2 * dim, widths[i]), depths[i]) for i in (2, 1, 0))
        self.refinement = blocks(0, 2 * dim, refinement)
        self.skip = Conv1x1(dim, 2 * dim, bias=bias) if dual_pixel else None
        self.output = Conv3x3(2 * dim, self.out_chans, bias=bias)
        self.checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.checkpointing = enable

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h w"]:
        """Raises ValueError: other than `b in_chans h w`, or nothing in it."""
        check_picture(self, x)
        h, w = x.shape[-2:]
        picture = rearrange(reflect_to_multiple(x, self.multiple), "b c h w -> b h w c")
        y = embedded = self.embed(picture)
        kept = []
        for stage, down in zip(self.encoder, self.down, strict=True):
            y = self.run(stage, y)
            kept.append(y)
            y = down(y)
        y = self.run(self.latent, y)
        for up, reduce, stage in zip(self.up, self.reduce, self.decoder, strict=True):
            y = self.run(stage, reduce(torch.cat([up(y), kept.pop()], dim=-1)))
        y = self.run(self.refinement, y)
        y = self.output(y) + picture if self.skip is None else self.output(y + self.skip(embedded))
        return rearrange(y[:, :h, :w], "b h w c -> b c h w")

    def run(self, stage: Any, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        for block in stage:
            x = run_through(block, x, checkpointing=self.checkpointing)
        return x

    # The whole picture in bounded memory: `vision.inference` asks for these two

    def stream(self, x: Float[Tensor, "b c h w"], rows: int) -> Float[Tensor, "b c2 h w"]:
        """As `forward`, without gradient, working on `rows` rows at a time: see `vision.models.restormer_stream`."""
        check_picture(self, x)
        return stream(self, reflect_to_multiple(x, self.multiple), rows)[..., : x.shape[-2], : x.shape[-1]]

    def stream_memory(self, shape: Sequence[int], rows: int) -> int:
        """The most bytes that `stream` allocates for a picture `b c h w`."""
        return stream_memory(self, shape, rows)


def check_levels(model: Restormer, depths: Sequence[int], heads: Sequence[int]) -> None:
    if model.dim < 2 or model.dim % 2:
        raise ValueError(f"dim={model.dim} does not halve between the levels; use an even number such as 48")
    check_series("depths", depths)
    check_series("heads", heads)
    if len(depths) != 4 or len(heads) != 4:
        raise ValueError(f"depths={list(depths)} and heads={list(heads)} are for 4 levels; give 4 numbers each")
    check_stages(depths, heads=heads)
    if not model.dual_pixel and model.out_chans != model.in_chans:
        raise ValueError(
            f"out_chans={model.out_chans} differs from in_chans={model.in_chans}, and the result is added to the picture; "
            f"leave out_chans away, or use dual_pixel=True"
        )
    if model.dual_pixel and model.in_chans % 2:
        raise ValueError(f"in_chans={model.in_chans} are not two views; with dual_pixel=True use 6 (left RGB, right RGB)")


def check_picture(model: Restormer, x: Tensor) -> None:
    check_pictures(x, model.in_chans)
    if not len(x):
        raise ValueError(f"pictures of shape {tuple(x.shape)} are none; give one at least")


def restormer(**options: Any) -> Restormer:
    """The published size, 26.1 million parameters. Its denoisers have norm=BiasFreeNorm."""
    return Restormer(**options)


def restormer_small(**options: Any) -> Restormer:
    """0.8 million parameters, without biases: for denoising with little data and short trainings."""
    return Restormer(**{"dim": 16, "depths": (1, 1, 1, 1), "refinement": 2, "ffn_ratio": 2.5, "norm": BiasFreeNorm, **options})
