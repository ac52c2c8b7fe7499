"""ViT against timm, torchvision and transformers, with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

import vision
from vision.bench.contest import Contest, Plan, Setting, Side, grow, like

SIZES = {"tiny": (16, 1, 2), "small": (384, 12, 6), "base": (768, 12, 12)}  # width, blocks, heads


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield from grow("vit", "tiny", plan, sizes=[32])
        return
    yield from grow("vit", "small", plan, sizes=[224, 384, 512, 1024])
    if plan.full:
        yield from grow("vit", "base", plan, sizes=[224])


def contest(setting: Setting) -> Contest:
    peers = {"timm": timm, "torchvision": torchvision, "transformers": transformers}
    seen = partial(logits, setting.picture())
    sides = {"vision": Side(lambda: ours(setting), seen)}
    for name, make in peers.items():
        sides[name] = Side(partial(make, setting), seen, lend=vision.load_weights)
    targets = {"timm": 1.05} if setting.how == "inference, fp32" else {}
    return Contest(setting, sides, units=setting.batch, targets=targets)


def logits(x: Tensor, module: nn.Module) -> Tensor:
    result: Any = module(like(x, module))
    return getattr(result, "logits", result)


def ours(setting: Setting) -> nn.Module:
    dim, depth, heads = SIZES[setting.name]
    return vision.models.ViT(setting.size, 16, dim=dim, depth=depth, heads=heads)


def timm(setting: Setting) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    dim, depth, heads = SIZES[setting.name]
    return VisionTransformer(setting.size, 16, embed_dim=dim, depth=depth, num_heads=heads)


def torchvision(setting: Setting) -> nn.Module:
    from torchvision.models import VisionTransformer

    dim, depth, heads = SIZES[setting.name]
    return VisionTransformer(setting.size, 16, depth, heads, dim, 4 * dim)


def transformers(setting: Setting) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    dim, depth, heads = SIZES[setting.name]
    sizes: dict[str, Any] = {"hidden_size": dim, "num_hidden_layers": depth, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 4 * dim, "image_size": setting.size, "layer_norm_eps": 1e-6, "num_labels": 1000}
    config = ViTConfig(**sizes)
    return ViTForImageClassification(config)
