"""Swin against timm, torchvision and transformers, with their weights. Maps are whole windows: all pad alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

import vision
from vision.bench.cases.vit import logits
from vision.bench.contest import Contest, Plan, Setting, Side, grow

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 8, "depths": (2, 2), "heads": (1, 2)},
    "swin_t": {"dim": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24)},
}


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield from grow("swin", "tiny", plan, sizes=[56])
        return
    yield from grow("swin", "swin_t", plan, sizes=[224, 448, 896])


def contest(setting: Setting) -> Contest:
    make_ours = partial(vision.models.Swin, setting.size, **SIZES[setting.name])
    seen = partial(logits, setting.picture())
    sides = {"vision": Side(make_ours, seen)}
    for name, make in {"timm": timm, "torchvision": torchvision, "transformers": transformers}.items():
        sides[name] = Side(partial(make, setting), seen, lend=vision.load_weights)
    target = {"inference, fp32": 1.5, "training, fp32": 1.15}.get(setting.how)
    targets = {} if target is None else {"timm": target, "torchvision": target}
    return Contest(setting, sides, units=setting.batch, targets=targets)


def timm(setting: Setting) -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    size = SIZES[setting.name]
    options = {"embed_dim": size["dim"], "depths": size["depths"], "num_heads": size["heads"]}
    return SwinTransformer(setting.size, **options, window_size=7, drop_path_rate=0.0)


def torchvision(setting: Setting) -> nn.Module:
    from torchvision.models import SwinTransformer

    size = SIZES[setting.name]
    depths, heads = list(size["depths"]), list(size["heads"])
    return SwinTransformer([4, 4], size["dim"], depths, heads, [7, 7], stochastic_depth_prob=0.0)


def transformers(setting: Setting) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    size = SIZES[setting.name]
    options = {"embed_dim": size["dim"], "depths": list(size["depths"]), "num_heads": list(size["heads"])}
    options |= {"image_size": setting.size, "window_size": 7, "drop_path_rate": 0.0, "num_labels": 1000}
    config = SwinConfig(**options)
    return SwinForImageClassification(config)
