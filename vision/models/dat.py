"""DAT and DAT++: attention to points that the picture itself chooses, beside local attention, in stages that halve the map
(Xia et al. 2022, arXiv:2201.00520; Xia et al. 2023, arXiv:2309.01430)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import Attention, Block, LayerNorm, Mlp, Position, RelativeTable, Site, drop_path_rates
from core.deformable import DeformableAttention, Reference
from core.neighbourhood import NeighbourhoodAttention
from core.options import check_makers, hidden_width, remember_options
from core.window import WindowAttention
from vision.models.dat_convolutions import ConvMlp, Downsampling, OverlappingStem, PerceptionBlock
from vision.models.pyramid import Pyramid, Stage, check_series, check_stages
from vision.models.stem import PatchEmbedding, check_pictures, check_sizes


class DAT(Pyramid):
    """Deformable Attention Transformer. Takes pictures of any size: maps that no whole number of windows fits are padded
    with zeros at the right and the bottom, then rolled (the padding takes part, as in Swin's detection code);
    neighbourhoods move inside a map and shrink to it where it is smaller; deformable attention pads nothing.

    Args:
        img_size: side of the pictures that the tables of deformable attention are made for, in pixels; pictures of other
            sizes stretch them.
        patch_size: side of a patch, in pixels.
        in_chans, num_classes: channels in, classes out; 0 classes gives the pooled features.
        dim: width of the first stage; each stage doubles it.
        depths, heads: blocks and attention heads of each stage.
        groups, strides, kernels: of the offsets of each stage, see `core.DeformableAttention`.
        window_size: side of windows and neighbourhoods, in tokens, of all stages or of each; windows larger than a map stay as
            large, and the map is padded to them.
        mlp_ratio: hidden width of the FFN over that of the stage.
        kinds: attention of each stage's blocks, repeated to its depth: L local windows, S the same shifted by half a window
            rounded up, N neighbourhoods, D deformable.
        offset_range, reference: of deformable attention.
        convolutions: DAT++'s: overlapping stem and downsampling, local perception units, depthwise convolutions in FFNs.
        stem: makes `(in_chans, dim, patch_size) -> module` from picture to feature map, with a `reduction`; None is
            PatchEmbedding, with convolutions OverlappingStem.
        norm: makes each norm from its width.
        drop_path_rate: of the last block, growing linearly from 0.
        position: refused: each attention has the table that was published with it.
    """

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
        groups: Sequence[int] = (1, 2, 3, 6),
        strides: Sequence[int] = (1, 1, 1, 1),
        kernels: Sequence[int] = (9, 7, 5, 3),
        window_size: int | Sequence[int] = 7,
        mlp_ratio: float = 4.0,
        *,
        kinds: Sequence[str] = ("LS", "LS", "LD", "LD"),
        offset_range: float | None = 2.0,
        reference: Reference = "dat",
        convolutions: bool = False,
        stem: Callable[[int, int, int], nn.Module] | None = None,
        norm: Callable[[int], nn.Module] = LayerNorm,
        drop_path_rate: float = 0.0,
        position: Callable[[Site], Position] | None = None,
    ) -> None:
        super().__init__()
        if position is not None:
            raise ValueError(
                "DAT takes no position: its attentions have the tables published with them; leave it out, or use Swin"
            )
        check_sizes(img_size=img_size, patch_size=patch_size, in_chans=in_chans, dim=dim)
        check_series("depths", depths)
        stages = len(depths)
        windows = (window_size,) * stages if isinstance(window_size, int) else window_size
        check_stages(depths, heads=heads, groups=groups, strides=strides, kernels=kernels, window_size=windows)
        check_kinds(kinds, windows, kernels)
        check_makers(norm=norm)
        self.in_chans, self.dim, self.num_features = in_chans, dim, dim * 2 ** (stages - 1)
        stem = (OverlappingStem if convolutions else PatchEmbedding) if stem is None else stem
        check_makers(stem=stem)
        self.stem, self.embed_norm = stem(in_chans, dim, patch_size), norm(dim)
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        make_block, make_ffn = (PerceptionBlock, ConvMlp) if convolutions else (Block, Mlp)
        self.stages = nn.ModuleList()
        for i, depth in enumerate(depths):
            width, side = dim * 2**i, math.ceil(img_size / (self.stem.reduction * 2**i))
            makers: dict[str, Callable[[], nn.Module]] = {
                "L": partial(windowed, width, heads[i], windows[i], shift=0),
                "S": partial(windowed, width, heads[i], windows[i], shift=math.ceil(windows[i] / 2)),
                "N": partial(NeighbourhoodAttention, width, heads[i], kernel=windows[i]),
                "D": partial(
                    DeformableAttention,
                    width,
                    heads[i],
                    (side, side),
                    groups=groups[i],
                    kernel=kernels[i],
                    stride=strides[i],
                    offset_range=offset_range,
                    reference=reference,
                    position=partial(RelativeTable, std=0.01),
                ),
            }
            blocks = []
            for j in range(depth):
                attention, ffn = makers[kinds[i][j % len(kinds[i])]](), make_ffn(width, hidden_width(width, mlp_ratio=mlp_ratio))
                blocks.append(make_block(width, attention, ffn, norm=norm, drop_path=next(rates)))
            downsampling = Downsampling(width // 2, 3 if convolutions else 2, norm) if i else nn.Identity()
            self.stages.append(Stage(downsampling, blocks))
        self.norm = norm(self.num_features)
        self.reset_classifier(num_classes)  # and torch's own initialisation elsewhere, which is what was published

    def no_weight_decay(self) -> set[str]:
        """Tables of positions (timm's convention; vectors are left out anyway)."""
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    def embed(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b i j d"]:
        check_pictures(x, self.in_chans)
        return self.embed_norm(rearrange(self.stem(x), "b d i j -> b i j d"))


def check_kinds(kinds: Sequence[str], windows: Sequence[int], kernels: Sequence[int]) -> None:
    """Raises ValueError: unknown kinds of attention, or even sides where a kind needs a middle."""
    check_series("kinds", kinds)
    if len(kinds) != len(windows):
        raise ValueError(f"kinds={tuple(kinds)} are not for {len(windows)} stages; give each one a stage")
    for kind, window, kernel in zip(kinds, windows, kernels, strict=True):
        if not isinstance(kind, str) or not kind or set(kind) - set("LSND"):
            raise ValueError(f"kinds has {kind!r}, which is not made of L, S, N and D; use e.g. 'LD'")
        for letter, name, side in (("N", "window_size", window), ("D", "kernels", kernel)):
            if letter in kind and side % 2 == 0:
                raise ValueError(f"{name}={side} of a stage of kind {kind!r} has no middle; use an odd one such as {side + 1}")


def windowed(dim: int, heads: int, window: int, *, shift: int) -> WindowAttention:
    """Swin's attention; a window of one token has no half to be shifted by."""
    position = RelativeTable(Site(dim, heads, extent=(window, window)), std=0.01)
    return WindowAttention(Attention(dim, heads, position=position), (window, window), shift=(shift % window,) * 2)


SMALL = {"depths": (2, 2, 18, 2)}
BASE = {"dim": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32), "groups": (1, 2, 4, 8)}
PLUS = {
    "depths": (2, 4, 18, 2),
    "strides": (8, 4, 2, 1),
    "kinds": ("ND", "ND", "ND", "D"),
    "offset_range": None,
    "reference": "dat++",
    "convolutions": True,
}


def dat_tiny(**options: Any) -> DAT:
    return DAT(**options)


def dat_small(**options: Any) -> DAT:
    return DAT(**SMALL | options)


def dat_base(**options: Any) -> DAT:
    return DAT(**BASE | options)


def dat_plus_tiny(**options: Any) -> DAT:
    return DAT(**PLUS | {"dim": 64, "heads": (2, 4, 8, 16), "groups": (1, 2, 4, 8)} | options)


def dat_plus_small(**options: Any) -> DAT:
    return DAT(**PLUS | options)


def dat_plus_base(**options: Any) -> DAT:
    return DAT(**PLUS | {"dim": 128, "heads": (4, 8, 16, 32), "groups": (2, 4, 8, 16)} | options)
