"""Swin: attention within shifted windows, in stages that halve the map (Liu et al. 2021, arXiv:2103.14030)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import Attention, Block, LayerNorm, Mlp, Position, RelativeTable, Site, drop_path_rates
from core.block import NormOrder
from core.linear import Linear
from core.options import check_makers, check_shares, hidden_width, remember_options
from core.position import make_position, require_hooks
from core.window import Padding, WindowAttention, pad_to_multiple
from vision.models.pyramid import Pyramid, Stage, check_stages
from vision.models.stem import PatchEmbedding, check_pictures, check_sizes, is_pair
from vision.models.vit import init_weights


class PatchMerging(nn.Module):
    """2x2 tokens side by side, normed, then projected to twice the channels; an odd map is padded with zeros.

    Args:
        dim: channels before.
        norm: makes the norm, over the 4 `dim` channels.
    """

    def __init__(self, dim: int, norm: Callable[[int], nn.Module] = LayerNorm) -> None:
        super().__init__()
        self.norm, self.reduction = norm(4 * dim), Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
        return self.reduction(self.norm(side_by_side(x)))


def side_by_side(x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
    # Down before right, as in all published weights.
    return rearrange(pad_to_multiple(x, (2, 2)), "b (i p) (j q) d -> b i j (q p d)", p=2, q=2)


class Swin(Pyramid):
    """Swin Transformer. Takes pictures of any size; maps are padded where no whole number of windows fits.

    Args:
        img_size: side of the pictures that the windows are made for, in pixels: a window larger than the map of such a
            picture is as large as the map (timm's rule, which published weights follow).
        patch_size: side of a patch, in pixels.
        in_chans, num_classes: channels in, classes out; 0 classes gives the pooled features.
        dim: width of the first stage; each stage doubles it.
        depths, heads: blocks and attention heads of each stage.
        window_size: side of the windows, or rows and columns, in tokens. Every second block shifts them by half.
        mlp_ratio: hidden width of the FFN over that of the stage.
        position: makes each block's position, of the places within its window; None is RelativeTable, and ContinuousBias
            in `SwinV2`.
        stem: makes `(in_chans, dim, patch_size) -> module` from picture to feature map, with a `reduction`.
        norm: makes each norm from its width.
        padding: "pad_then_roll" (torchvision, Microsoft's detection code) or "roll_then_pad" (timm), see `core.window`;
            the second one never shifts windows that cover the map of a picture of `img_size`.
        drop_path_rate: of the last block, growing linearly from 0.
        drop_rate: dropout in attention output and FFN, while training.
    """

    default_position: type[Position] = RelativeTable  # this and the next two: what Swin v2 does otherwise
    merging: Callable[..., nn.Module] = PatchMerging
    order: NormOrder = "pre"

    @remember_options
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int | tuple[int, int] = 7,
        mlp_ratio: float = 4.0,
        *,
        position: Callable[[Site], Position] | None = None,
        stem: Callable[[int, int, int], nn.Module] = PatchEmbedding,
        norm: Callable[[int], nn.Module] = LayerNorm,
        padding: Padding = "pad_then_roll",
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(img_size=img_size, patch_size=patch_size, in_chans=in_chans, dim=dim)
        check_stages(depths, heads=heads)
        check_makers(stem=stem, norm=norm)
        check_shares(drop_rate=drop_rate)
        self.in_chans, self.dim, self.num_features = in_chans, dim, dim * 2 ** (len(depths) - 1)
        self.stem, self.stem_norm = stem(in_chans, dim, patch_size), norm(dim)
        windows = stage_windows(window_size, img_size, self.stem.reduction, len(depths))
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        self.stages = nn.ModuleList()
        for i, (depth, stage_heads) in enumerate(zip(depths, heads, strict=True)):
            width, window, side = dim * 2**i, windows[i], math.ceil(img_size / (self.stem.reduction * 2**i))
            half_h, half_w = (0 if padding == "roll_then_pad" and size == side else size // 2 for size in window)
            blocks = []
            for j in range(depth):
                place = make_position(position or self.default_position, Site(width, stage_heads, extent=window))
                require_hooks(place, type(self).__name__, ("rotate", "bias", "value"))
                blocks.append(
                    Block(
                        width,
                        WindowAttention(
                            self.attention(place), window, shift=(half_h, half_w) if j % 2 else (0, 0), padding=padding
                        ),
                        Mlp(width, hidden_width(width, mlp_ratio=mlp_ratio), dropout=drop_rate),
                        norm=norm,
                        order=self.order,
                        drop_path=next(rates),
                        dropout=drop_rate,
                    )
                )
            self.stages.append(Stage(self.merging(width // 2, norm) if i else nn.Identity(), blocks))
        self.norm = norm(self.num_features)
        self.reset_classifier(num_classes)
        self.reset_parameters()

    def attention(self, position: Position) -> Attention:
        """The attention within the windows of one block."""
        return Attention(position.site.dim, position.site.heads, position=position)

    def reset_parameters(self) -> None:
        self.apply(init_weights)

    def init_head(self, head: nn.Module) -> None:
        head.apply(init_weights)

    def no_weight_decay(self) -> set[str]:
        """Parameters of positions and temperatures (timm's convention; vectors are left out anyway)."""
        return {name for name, _ in self.named_parameters() if ".position." in name or name.endswith("logit_scale")}

    def embed(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b i j d"]:
        check_pictures(x, self.in_chans)
        return self.stem_norm(rearrange(self.stem(x), "b d i j -> b i j d"))


def stage_windows(window_size: int | tuple[int, int], img_size: int, reduction: int, stages: int) -> list[tuple[int, int]]:
    """The windows of each stage: of `window_size`, or as large as the map of a picture of `img_size` if that is less."""
    pair = (window_size, window_size) if isinstance(window_size, int) else window_size
    if not is_pair(pair):
        raise ValueError(f"window_size={window_size!r} is neither one whole number nor rows and columns; use e.g. 7 or (7, 7)")
    h, w = pair
    check_sizes(window_size=min(h, w))
    sides = [math.ceil(img_size / (reduction * 2**i)) for i in range(stages)]
    return [(min(h, side), min(w, side)) for side in sides]


BASE = {"dim": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32)}
LARGE = {"dim": 192, "depths": (2, 2, 18, 2), "heads": (6, 12, 24, 48)}
WINDOW_12 = {"img_size": 384, "window_size": 12}


def swin_tiny_patch4_window7_224(**options: Any) -> Swin:
    return Swin(**options)


def swin_small_patch4_window7_224(**options: Any) -> Swin:
    return Swin(**{"depths": (2, 2, 18, 2), **options})


def swin_base_patch4_window7_224(**options: Any) -> Swin:
    return Swin(**BASE | options)


def swin_large_patch4_window7_224(**options: Any) -> Swin:
    return Swin(**LARGE | options)


def swin_base_patch4_window12_384(**options: Any) -> Swin:
    return Swin(**BASE | WINDOW_12 | options)


def swin_large_patch4_window12_384(**options: Any) -> Swin:
    return Swin(**LARGE | WINDOW_12 | options)
