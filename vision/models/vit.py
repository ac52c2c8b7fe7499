"""ViT: an image is a sequence of patches (Dosovitskiy et al. 2021, arXiv:2010.11929), with DeiT's distillation token
(Touvron et al. 2021), DeiT III's layer scale, registers (Darcet et al. 2024) and any position of `core.position`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

import core.options
from core import Attention, Block, LayerNorm, Learned, Mlp, Position, Shared, Site, drop_path_rates, grid
from core.block import run_through
from core.options import check_makers, check_shares, hidden_width, remember_options
from core.position import make_position
from vision.models.backbone import Backbone
from vision.models.stem import PatchEmbedding, check_classes, check_pictures, check_sizes


def layer_norm(dim: int, eps: float = 1e-6) -> nn.Module:
    """With the eps of timm, torchvision and Flax; transformers' default is 1e-12."""
    return LayerNorm(dim, eps=eps)


class ViT(Backbone):
    """Vision Transformer. Takes pictures of any size: positions follow the run-time grid, `img_size` only sizes tables.

    Args:
        img_size: side of the (square) pictures that a learned table is made for, in pixels.
        patch_size: side of a patch, in pixels.
        in_chans, num_classes: channels in, classes out; 0 classes gives the pooled features.
        dim, depth, heads: width, number of blocks, attention heads.
        mlp_ratio: hidden width of the FFN over `dim`.
        position: makes the one position that embeds the tokens and serves every block.
        stem: makes `(in_chans, dim, patch_size) -> module` from picture to feature map, with a `reduction`.
        norm: makes each norm from `dim`.
        global_pool: "token" (the class token) or "avg" (mean of the patches, then the norm).
        class_tokens: 0, 1, or 2: class and distillation token, each with a head; the logits are their mean.
        reg_tokens: registers.
        init_values: initial layer scale; None is no layer scale.
        drop_path_rate: of the last block, growing linearly from 0.
        drop_rate: dropout in attention output and FFN, while training.
    """

    @remember_options
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_ratio: float = 4.0,
        *,
        position: Callable[[Site], Position] = Learned,
        stem: Callable[[int, int, int], nn.Module] = PatchEmbedding,
        norm: Callable[[int], nn.Module] = layer_norm,
        global_pool: str = "token",
        class_tokens: int = 1,
        reg_tokens: int = 0,
        init_values: float | None = None,
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(img_size=img_size, patch_size=patch_size, in_chans=in_chans, dim=dim, depth=depth, heads=heads)
        core.options.check_sizes(0, reg_tokens=reg_tokens)
        check_pooling(global_pool, class_tokens)
        check_makers(stem=stem, norm=norm)
        check_shares(drop_rate=drop_rate)
        hidden = hidden_width(dim, mlp_ratio=mlp_ratio)
        self.global_pool, self.class_tokens, self.prefix = global_pool, class_tokens, class_tokens + reg_tokens
        self.dim = self.num_features = dim
        self.in_chans = in_chans
        self.stem = cast("Any", stem(in_chans, dim, patch_size))
        side = math.ceil(img_size / self.stem.reduction)
        self.prefix_tokens = nn.Parameter(torch.zeros(1, self.prefix, dim)) if self.prefix else None
        self.position = make_position(position, Site(dim, heads, extent=(side, side), prefix=self.prefix))
        # One position for all blocks; a kind that only embeds has nothing to do there.
        in_blocks = Shared(self.position) if self.position.hooks - {"embed"} else None
        self.blocks = nn.ModuleList(
            Block(
                dim,
                Attention(dim, heads, position=in_blocks),
                Mlp(dim, hidden, dropout=drop_rate),
                norm=norm,
                drop_path=rate,
                layer_scale=init_values,
                dropout=drop_rate,
            )
            for rate in drop_path_rates(drop_path_rate, depth)
        )
        self.norm = norm(dim)
        self.checkpointing = False
        self.reset_classifier(num_classes)
        self.apply(init_weights)
        if self.prefix_tokens is not None:
            nn.init.normal_(self.prefix_tokens, std=1e-6)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New, untrained heads for `num_classes` classes (0: none); `global_pool` changes the pooling too."""
        check_classes(num_classes)
        if global_pool is not None:
            check_pooling(global_pool, self.class_tokens)
            self.global_pool = global_pool
        self.num_classes = num_classes
        heads = 2 if self.class_tokens == 2 and self.global_pool == "token" else 1
        make = nn.Linear if num_classes else nn.Identity
        self.heads = nn.ModuleList(make(self.dim, num_classes) for _ in range(heads))
        self.heads.apply(init_weights).to(next(self.parameters()))  # where the model is, in its precision
        if hasattr(self, "options"):
            self.options |= {"num_classes": num_classes, "global_pool": self.global_pool}

    def get_classifier(self) -> Any:
        """The head, or both of a distilled model."""
        return self.heads[0] if len(self.heads) == 1 else tuple(self.heads)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that are embeddings, not weights (timm's convention; vectors are left out anyway)."""
        return {"prefix_tokens", *(f"position.{name}" for name, _ in self.position.named_parameters())}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameter belongs to which depth, for layer decay (timm's convention)."""
        return {"stem": r"^(?:stem|prefix_tokens|position)", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def embed(self, x: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "i j 2"]]:
        """Tokens (class tokens, registers, then patches by rows) and the patches' coordinates."""
        check_pictures(x, self.in_chans)
        x = self.stem(x)
        at = grid(*x.shape[-2:], device=x.device)
        x = rearrange(x, "b d i j -> b (i j) d")
        if self.prefix_tokens is not None:  # under autocast the float32 tokens make the residual stream float32
            x = torch.cat([self.prefix_tokens.expand(len(x), -1, -1), x], dim=1)
        return self.position.embed(x, at), at

    def run(
        self, x: Float[Tensor, "b c h w"], keep: Collection[int] = (), count: int | None = None
    ) -> tuple[Float[Tensor, "b n d"], dict[int, Float[Tensor, "b n d"]], tuple[int, int]]:
        """The tokens after the first `count` blocks (None: all), those after the blocks in `keep`, and the grid."""
        x, at = self.embed(x)
        kept = {}
        for i, block in enumerate(self.blocks):
            if i == count:
                break
            x = run_through(block, x, checkpointing=self.checkpointing, at=at)
            if i in keep:
                kept[i] = x
        return x, kept, (at.shape[0], at.shape[1])

    def last_norm(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:  # of all tokens, if one is pooled
        return x if self.global_pool == "avg" else self.norm(x)

    def forward_head(self, x: Float[Tensor, "b n d"], pre_logits: bool = False) -> Float[Tensor, "b k"]:
        """Pooled features, through the heads unless `pre_logits`."""
        mean = self.global_pool == "avg"
        pooled = [self.norm(x[:, self.prefix :].mean(dim=1))] if mean else x[:, : len(self.heads)].unbind(1)
        outputs = pooled if pre_logits else [head(token) for head, token in zip(self.heads, pooled, strict=True)]
        return torch.stack(outputs).mean(dim=0)

    # As a backbone: `vision.models.features`

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What the map after each block is (timm's convention)."""
        info = {"num_chs": self.dim, "reduction": self.stem.reduction}
        return [info | {"module": f"blocks.{i}"} for i in range(len(self.blocks))]

    def as_map(self, x: Float[Tensor, "b n d"], size: tuple[int, int]) -> Float[Tensor, "b d i j"]:
        return rearrange(x[:, self.prefix :], "b (i j) d -> b d i j", i=size[0])

    def keep_features(self, last: int) -> None:
        """Drops what the maps up to `last` do not need; only `feature_maps` works afterwards."""
        self.blocks, self.norm, self.heads = self.blocks[: last + 1], nn.Identity(), nn.ModuleList()


def check_pooling(global_pool: str, class_tokens: int) -> None:
    if global_pool not in ("token", "avg"):
        raise ValueError(f"global_pool={global_pool!r} is unknown; use 'token' or 'avg' (forward_features gives what is pooled)")
    if class_tokens not in (0, 1, 2):
        raise ValueError(f"class_tokens={class_tokens} is not 0, 1 or 2 (2: class and distillation token)")
    if global_pool == "token" and not class_tokens:
        raise ValueError("global_pool='token' needs a class token; use class_tokens=1 or global_pool='avg'")


def init_weights(module: nn.Module) -> None:
    """Xavier's, as ViT's authors have it: the usual 0.02 at ViT-B's width, and more in a narrow model, which learns faster."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def vit_tiny_patch16_224(**options: Any) -> ViT:
    return ViT(**{"dim": 192, "depth": 12, "heads": 3, **options})


def vit_small_patch16_224(**options: Any) -> ViT:
    return ViT(**{"dim": 384, "depth": 12, "heads": 6, **options})


def vit_base_patch16_224(**options: Any) -> ViT:
    return ViT(**{"dim": 768, "depth": 12, "heads": 12, **options})


def vit_base_patch32_224(**options: Any) -> ViT:
    return ViT(**{"patch_size": 32, "dim": 768, "depth": 12, "heads": 12, **options})


def vit_large_patch16_224(**options: Any) -> ViT:
    return ViT(**{"dim": 1024, "depth": 24, "heads": 16, **options})


def deit_tiny_distilled_patch16_224(**options: Any) -> ViT:
    return vit_tiny_patch16_224(**{"class_tokens": 2, **options})


def deit_small_distilled_patch16_224(**options: Any) -> ViT:
    return vit_small_patch16_224(**{"class_tokens": 2, **options})


def deit_base_distilled_patch16_224(**options: Any) -> ViT:
    return vit_base_patch16_224(**{"class_tokens": 2, **options})


DEIT3 = {"position": partial(Learned, prefix=False), "init_values": 1e-6}  # the table has no rows for the class token


def deit3_small_patch16_224(**options: Any) -> ViT:
    return vit_small_patch16_224(**DEIT3 | options)


def deit3_base_patch16_224(**options: Any) -> ViT:
    return vit_base_patch16_224(**DEIT3 | options)


def deit3_large_patch16_224(**options: Any) -> ViT:
    return vit_large_patch16_224(**DEIT3 | options)
