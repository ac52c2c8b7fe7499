"""`vision.optimize` against the model that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import vision
from vision.bench.contest import Contest, Plan, Setting, Side

WAYS: dict[str, dict[str, Any]] = {
    "folded": {},
    "bf16": {"precision": torch.bfloat16},
    "compiled": {"compile": True},
    "bf16 and compiled": {"precision": torch.bfloat16, "compile": True},
}
MODELS = {"vit_small_patch16_224": 224, "swin_tiny_patch4_window7_224": 224, "dat_tiny": 224, "restormer": 128}
TINY = {"dim": 16, "depth": 1, "heads": 2, "img_size": 32}


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield Setting("optimize", "vit_tiny_patch16_224, bf16", size=32, device=plan.device)
        return
    for model, size in list(MODELS.items())[: None if plan.full else 2]:
        for way in WAYS if plan.full else list(WAYS)[:2]:
            yield Setting("optimize", f"{model}, {way}", size=size, device=plan.device)


def contest(setting: Setting) -> Contest:
    name, way = setting.name.split(", ")
    build = partial(vision.create_model, name, **(TINY if setting.size == 32 else {}))
    seen = partial(run, setting.picture())
    sides = {"optimised": Side(partial(optimised, build, way), seen), "eager": Side(build, seen)}
    low = "bf16" in way
    tolerance, targets = (0.3, {"eager": 2.0}) if low else (1e-4 if "compiled" in way else 1e-5, {})
    return Contest(setting, sides, tolerance=tolerance, targets=targets, units=setting.batch)


def optimised(build: Any, way: str) -> nn.Module:
    return vision.optimize(build().eval(), **WAYS[way])


def run(x: Tensor, module: nn.Module) -> Tensor:
    return module(x)
