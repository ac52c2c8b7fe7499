"""DAT and DAT++: attention to points that the picture itself chooses, beside local attention, in stages that halve the map
(Xia et al. 2022, arXiv:2201.00520; Xia et al. 2023, arXiv:2309.01430)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core import Attention, Block, LayerNorm, Mlp, RelativeTable, Site
from core.deformable import DeformableAttention, Reference
from core.neighbourhood import NeighbourhoodAttention
from core.options import remember_options
from core.window import WindowAttention
from vision.models.dat_convolutions import ConvMlp, Downsampling, OverlappingStem, PerceptionBlock
from vision.models.stem import PatchEmbedding


class Stage(nn.Module):
    """Blocks over maps of one size, after the downsampling that makes them smaller (none before the first stage)."""

    def __init__(self, downsampling: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsampling, self.blocks = downsampling, nn.ModuleList(blocks)
        self.checkpointing = False

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
        x = self.downsampling(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and torch.is_grad_enabled() else block(x)
        return x


class DAT(nn.Module):
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
        window_size: side of windows and neighbourhoods, in tokens, of all stages or of each.
        mlp_ratio: hidden width of the FFN over that of the stage.
        kinds: attention of each stage's blocks, repeated to its depth: L local windows, S the same shifted by half a window
            rounded up, N neighbourhoods, D deformable.
        offset_range, reference: of deformable attention.
        convolutions: DAT++'s: overlapping stem and downsampling, local perception units, depthwise convolutions in FFNs.
        stem: makes `(in_chans, dim, patch_size) -> module` from picture to feature map, with a `reduction`; None is
            PatchEmbedding, with convolutions OverlappingStem.
        norm: makes each norm from its width.
        drop_path_rate: of the last block, growing linearly from 0.
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
    ) -> None:
        super().__init__()
        stages = len(depths)
        windows = (window_size,) * stages if isinstance(window_size, int) else tuple(window_size)
        per_stage = {"heads": heads, "groups": groups, "strides": strides, "kernels": kernels, "kinds": kinds}
        for name, values in {**per_stage, "window_size": windows}.items():
            if len(values) != stages or not stages:
                raise ValueError(f"depths={tuple(depths)} and {name}={tuple(values)} differ in stages; give each one a stage")
        wrong = next((kind for kind in kinds if not kind or set(kind) - set("LSND")), None)
        if wrong is not None:
            raise ValueError(f"kinds has {wrong!r}, which is not made of L, S, N and D; use e.g. 'LD'")
        self.in_chans, self.dim, self.num_features = in_chans, dim, dim * 2 ** (stages - 1)
        self.options: dict[str, Any]
        stem = stem or (OverlappingStem if convolutions else PatchEmbedding)
        self.stem, self.embed_norm = stem(in_chans, dim, patch_size), norm(dim)
        rates = (drop_path_rate * i / max(1, sum(depths) - 1) for i in range(sum(depths)))
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
                attention, ffn = makers[kinds[i][j % len(kinds[i])]](), make_ffn(width, int(width * mlp_ratio))
                blocks.append(make_block(width, attention, ffn, norm=norm, drop_path=next(rates)))
            downsampling = Downsampling(width // 2, 3 if convolutions else 2, norm) if i else nn.Identity()
            self.stages.append(Stage(downsampling, blocks))
        self.norm = norm(self.num_features)
        self.reset_classifier(num_classes)  # and torch's own initialisation elsewhere, which is what was published

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """A new, untrained head for `num_classes` classes (0: none). DAT knows one pooling, the mean ("avg")."""
        if num_classes < 0:
            raise ValueError(f"num_classes={num_classes} is negative; use 0 for features, or the number of classes")
        if global_pool != "avg":
            raise ValueError(f"global_pool={global_pool!r} is unknown to DAT; use 'avg'")
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(next(self.parameters()))  # where the model is, in its precision
        if hasattr(self, "options"):
            self.options |= {"num_classes": num_classes}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for stage in cast("list[Stage]", self.stages):
            stage.checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Tables of positions (timm's convention; vectors are left out anyway)."""
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameter belongs to which depth, for layer decay (timm's convention)."""
        blocks = [(r"^stages\.(\d+)\.downsampling", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^(?:stem|embed_norm)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def embed(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b i j d"]:
        if x.ndim != 4 or x.shape[1] != self.in_chans or 0 in x.shape[2:]:
            fix = f"build the model with in_chans={x.shape[1]}" if x.ndim == 4 else "add the batch with x[None]"
            raise ValueError(f"pictures of shape {tuple(x.shape)} are not b {self.in_chans} h w; convert them, or {fix}")
        return self.embed_norm(rearrange(self.stem(x), "b d i j -> b i j d"))

    def forward_features(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b i j d"]:
        """The map of the last stage, channels last, normed."""
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.norm(x)

    def forward_head(self, x: Float[Tensor, "b i j d"], pre_logits: bool = False) -> Float[Tensor, "b k"]:
        """The mean over the map, through the head unless `pre_logits`."""
        pooled = x.mean(dim=(1, 2))
        return pooled if pre_logits else self.head(pooled)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        return self.forward_head(self.forward_features(x))

    # As a backbone: `vision.models.features`

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What the map after each stage is (timm's convention)."""
        return [
            {"num_chs": self.dim * 2**i, "reduction": self.stem.reduction * 2**i, "module": f"stages.{i}"}
            for i in range(len(self.stages))
        ]

    def feature_maps(self, x: Float[Tensor, "b c h w"], indices: Sequence[int]) -> list[Float[Tensor, "b d i j"]]:
        """The maps after the stages `indices` (0 is the first), before any norm, in that order."""
        x, maps = self.embed(x), {}
        for i, stage in enumerate(self.stages):
            x = stage(x)
            maps[i] = rearrange(x, "b i j d -> b d i j")
        return [maps[i] for i in indices]

    def keep_features(self, last: int) -> None:
        """Drops what the maps up to `last` do not need; only `feature_maps` works afterwards."""
        self.stages, self.norm, self.head = self.stages[: last + 1], nn.Identity(), nn.Identity()


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
