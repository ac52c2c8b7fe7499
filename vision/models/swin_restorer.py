"""Swin as a restorer: groups of shifted-window blocks at the picture's full size (Liang et al. 2021, arXiv:2108.10257)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import Attention, Block, LayerNorm, Mlp, Position, RelativeTable, Site, drop_path_rates
from core.block import run_through
from core.convolution import Conv3x3
from core.options import check_makers, check_sizes, hidden_width, remember_options
from core.position import make_position, require_hooks
from core.window import WindowAttention
from vision.models.padding import reflect_to_multiple
from vision.models.pyramid import check_stages
from vision.models.stem import check_pictures
from vision.models.vit import init_weights

FACTORS = {2: (2,), 3: (3,), 4: (2, 2)}  # how the size grows, step by step


class Group(nn.Module):
    """Blocks, then a convolution, around a residual."""

    def __init__(self, dim: int, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks, self.conv = nn.ModuleList(blocks), Conv3x3(dim, dim, bias=True)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        y = x
        for block in self.blocks:
            y = block(y)
        return x + self.conv(y)


class Enlarge(nn.Module):
    """`factor` times the size: a convolution, whose channels become `factor` x `factor` cells (Shi et al. 2016)."""

    def __init__(self, dim: int, out_dim: int, factor: int) -> None:
        super().__init__()
        self.factor, self.conv = factor, Conv3x3(dim, out_dim * factor**2, bias=True)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
        return rearrange(self.conv(x), "b h w (d i j) -> b (h i) (w j) d", i=self.factor, j=self.factor)


class SwinRestorer(nn.Module):
    """Restores or enlarges pictures of any size. Takes `b c h w`, gives `b c h·scale w·scale`, values in 0..1.

    A picture is mirrored to a multiple of the window and cut back. At scale 1 the result is added to the picture; a larger
    scale computes it from the features alone.

    Args:
        in_chans: channels of the picture and the result.
        dim: width of the tokens; a pixel is a token.
        depths: blocks of each group. Every second block shifts its windows by half.
        heads: attention heads of each block.
        window_size: side of the windows, in pixels; the published models have 8, and 7 (JPEG's 8 moved) against JPEG.
        mlp_ratio: hidden width of the FFN over `dim`.
        scale: 1 (denoising, deblurring, ...), or 2, 3, 4 times the size.
        enlarge_dim: channels in which the picture is enlarged, by 2 or 3 a step; None is in one step, straight to the
            result (the light models).
        position: makes each block's position, of the places within its window.
        norm: makes each norm from its width.
        drop_path_rate: of the last block, growing linearly from 0.

    Raises:
        ValueError: sizes that do not fit each other.

    Attributes:
        scale: size of the result over that of the picture.
        multiple: what tiles should be a multiple of.
    """

    @remember_options
    def __init__(
        self,
        in_chans: int = 3,
        dim: int = 180,
        depths: Sequence[int] = (6, 6, 6, 6, 6, 6),
        heads: int = 6,
        window_size: int = 8,
        mlp_ratio: float = 2.0,
        scale: int = 1,
        *,
        enlarge_dim: int | None = 64,
        position: Callable[[Site], Position] = RelativeTable,
        norm: Callable[[int], nn.Module] = LayerNorm,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(in_chans=in_chans, dim=dim, heads=heads, window_size=window_size, scale=scale)
        check_stages(depths)
        if enlarge_dim is not None:
            check_sizes(enlarge_dim=enlarge_dim)
        check_makers(norm=norm)
        if scale != 1 and scale not in FACTORS:
            raise ValueError(f"scale={scale} is not a size that pixels are made for; use 1, 2, 3 or 4")
        if window_size < 2:
            raise ValueError(f"window_size={window_size} leaves a pixel nothing to look at; use 2 or more, such as 8")
        self.in_chans, self.scale, self.multiple = in_chans, scale, window_size
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))

        def block(shift: int) -> Block:
            place = make_position(position, Site(dim, heads, extent=(window_size, window_size)))
            require_hooks(place, "SwinRestorer", ("rotate", "bias", "value"))
            attention = Attention(dim, heads, position=place)
            windows = WindowAttention(attention, (window_size, window_size), shift=(shift, shift))
            return Block(dim, windows, Mlp(dim, hidden_width(dim, mlp_ratio=mlp_ratio)), norm=norm, drop_path=next(rates))

        self.embed, self.embed_norm = Conv3x3(in_chans, dim, bias=True), norm(dim)
        self.groups = nn.ModuleList(Group(dim, [block(j % 2 * (window_size // 2)) for j in range(depth)]) for depth in depths)
        self.norm, self.conv = norm(dim), Conv3x3(dim, dim, bias=True)
        self.output = output(dim, in_chans, scale, enlarge_dim)
        self.checkpointing = False
        self.apply(init_weights)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each group in the backward pass instead of keeping its activations."""
        self.checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters of positions (timm's convention; vectors are left out anyway)."""
        return {name for name, _ in self.named_parameters() if ".position." in name}

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
        """Raises ValueError: other than `b in_chans h w`, or nothing in it."""
        check_pictures(x, self.in_chans)
        h, w = (side * self.scale for side in x.shape[-2:])
        picture = rearrange(reflect_to_multiple(x, self.multiple), "b c h w -> b h w c")
        embedded = self.embed(picture)
        y = self.embed_norm(embedded)
        for group in self.groups:
            y = run_through(group, y, checkpointing=self.checkpointing)
        y = self.output(self.conv(self.norm(y)) + embedded)
        y = y + picture if self.scale == 1 else y
        return rearrange(y[:, :h, :w], "b h w c -> b c h w")


def output(dim: int, channels: int, scale: int, enlarge_dim: int | None) -> nn.Module:
    """From features to the picture, or what is added to it."""
    if scale == 1:
        return Conv3x3(dim, channels, bias=True)
    if enlarge_dim is None:
        return Enlarge(dim, channels, scale)
    steps = [Enlarge(enlarge_dim, enlarge_dim, factor) for factor in FACTORS[scale]]
    return nn.Sequential(Conv3x3(dim, enlarge_dim, bias=True), nn.LeakyReLU(), *steps, Conv3x3(enlarge_dim, channels, bias=True))


LIGHT = {"dim": 60, "depths": (6, 6, 6, 6), "enlarge_dim": None}
SMALL = {"dim": 48, "depths": (4, 4), "heads": 4, "enlarge_dim": None}


def swin_restorer(**options: Any) -> SwinRestorer:
    """The published size for denoising and enlarging, about 11.5 million parameters."""
    return SwinRestorer(**options)


def swin_restorer_light(**options: Any) -> SwinRestorer:
    """The published light size, 0.9 million parameters."""
    return SwinRestorer(**LIGHT | options)


def swin_restorer_small(**options: Any) -> SwinRestorer:
    """0.2 million parameters: for little data and short trainings."""
    return SwinRestorer(**SMALL | options)
