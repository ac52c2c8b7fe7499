"""DAT against a plain transcription of the paper, with its weights. Maps are whole windows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import vision
from vision.bench.cases.vit import logits
from vision.bench.contest import Contest, Plan, Setting, Side, grow
from vision.bench.peers.dat import PlainDAT

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 8, "depths": (2, 2), "heads": (1, 2), "groups": (1, 2), "kernels": (5, 3), "kinds": ("LS", "LD")},
    "dat_t": {},
}


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield from grow("dat", "tiny", plan, sizes=[56])
        return
    yield from grow("dat", "dat_t", plan, sizes=[224, 448])


def contest(setting: Setting) -> Contest:
    sizes = SIZES[setting.name]
    ours = partial(vision.models.DAT, setting.size, **sizes, **({"strides": (1, 1)} if setting.name == "tiny" else {}))
    seen = partial(logits, setting.picture())
    sides = {
        "vision": Side(ours, seen),
        "transcription": Side(partial(PlainDAT, setting.size, **sizes), seen, lend=vision.load_weights),
    }
    targets = {"transcription": 1.5} if setting.how == "inference, fp32" else {}
    return Contest(setting, sides, units=setting.batch, targets=targets)
