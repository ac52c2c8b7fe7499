"""Gradient checkpointing against keeping all activations: what a training step takes in memory, and in time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

import vision
from vision.bench.cases.optimize import MODELS, TINY, run
from vision.bench.contest import Contest, Plan, Setting, Side


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield Setting("checkpointing", "vit_tiny_patch16_224", step="training", size=32, device=plan.device)
        return
    for model, size in list(MODELS.items())[: None if plan.full else 2]:
        batch = 1 if model == "restormer" else 8
        yield Setting("checkpointing", model, step="training", batch=batch, size=size, device=plan.device)


def contest(setting: Setting) -> Contest:
    build = partial(vision.create_model, setting.name, **(TINY if setting.size == 32 else {}))
    seen = partial(run, setting.picture())
    sides = {"checkpointing": Side(partial(recomputing, build), seen), "kept": Side(build, seen)}
    return Contest(setting, sides, units=setting.batch)


def recomputing(build: Any) -> nn.Module:
    model = build()
    model.set_grad_checkpointing()
    return model
