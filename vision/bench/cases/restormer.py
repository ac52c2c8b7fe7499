"""Restormer against the published code, which is non-commercial and comes with the bench extra only, or where that is not
installed against a plain transcription of the paper; with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

import vision
from core import BiasFreeNorm, LayerNorm
from vision.bench.contest import STEPS, Contest, Plan, Setting, Side, grow, like
from vision.bench.peers import imports
from vision.bench.peers.restormer import PlainRestormer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 8, "depths": (1, 1, 1, 1), "refinement": 1, "heads": (1, 2, 2, 4)},
    "restormer": {"dim": 48, "depths": (4, 6, 6, 8), "refinement": 4, "heads": (1, 2, 4, 8)},
}
PUBLISHED = "spandrel_extra_arches"
NORMS = "both norms"


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield from grow("restormer", "tiny", plan, sizes=[16])
        return
    for setting in grow("restormer", "restormer", plan, sizes=[128, 256, 512], batches=(1,)):
        if setting.step == "inference" or setting.size < 512:  # a step of the published code takes more than 24 GB there
            yield setting
    if plan.full:
        yield from grow("restormer", "restormer, bias-free norm", plan, sizes=[128], batches=(1,))
        for step in STEPS:
            yield Setting("restormer", f"restormer, {NORMS}", step, size=128, device=plan.device)


def contest(setting: Setting) -> Contest:
    name, _, other = setting.name.partition(", ")
    sizes, bias, seen = SIZES[name], not other, partial(restored, setting.picture())
    if other == NORMS:
        norms = {"bias-free": Side(partial(ours, False, sizes), seen), "with bias": Side(partial(ours, True, sizes), seen)}
        return Contest(setting, norms, compared=frozenset(), units=setting.batch, targets={"with bias": 1.0})
    sides = {"vision": Side(partial(ours, bias, sizes), seen)}
    notes = []
    if find_spec(PUBLISHED):
        sides["published"] = Side(partial(published, bias, sizes), seen, lend=vision.load_weights)
    else:
        notes.append(f"{PUBLISHED} is not installed (pip install 'vision-core[bench]'): a plain transcription stands for it")
    sides["transcription"] = Side(partial(PlainRestormer, **sizes, bias=bias), seen, lend=vision.load_weights)
    target = {"inference, fp32": 2.0, "training, fp32": 1.5}.get(setting.how)
    peer = list(sides)[1]
    targets: dict[str, Any] = {} if target is None else {"targets": {peer: target}, "memory_targets": {peer: 0.5}}
    return Contest(setting, sides, units=setting.batch, notes=notes, **targets)


def restored(x: Tensor, module: nn.Module) -> Tensor:
    return module(like(x, module))


def ours(bias: bool, sizes: dict[str, Any]) -> nn.Module:
    return vision.models.Restormer(**sizes, norm=LayerNorm if bias else BiasFreeNorm)


def published(bias: bool, sizes: dict[str, Any]) -> nn.Module:
    """The published class, built from the names and shapes of a state dict."""
    with imports():
        from spandrel_extra_arches.architectures.Restormer import RestormerArch

    return RestormerArch().load(PlainRestormer(**sizes, bias=bias).state_dict()).model
