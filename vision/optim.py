"""Parameter groups, and a learning rate that is a function of the optimizer step alone, so that a resume is exact."""

from __future__ import annotations

import math
from typing import Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn


def parameter_groups(model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """No decay for vectors (biases, norms) and for what `model.no_weight_decay()` names; timm's rules.

    Args:
        layer_decay: the learning rate of each layer over that of the next (Bao et al. 2021); 1 is the same for all. The
            groups carry it as `lr_scale`.
    """
    named = getattr(model, "no_weight_decay", set)
    excluded: set[str] = named()
    if layer_decay == 1.0:
        return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=excluded)
    return param_groups_layer_decay(model, weight_decay, no_weight_decay_list=excluded, layer_decay=layer_decay)


def warmup_cosine(step: int, *, total: int, warmup: float, final: float = 0.0, flat: float = 0.0) -> float:
    """Factor of the learning rate at an optimizer step: linear warm-up, flat, then half a cosine down to `final`.

    Args:
        step: 0 is the first optimizer step, `total` - 1 the last.
        total: optimizer steps of the whole run.
        warmup: share of all steps, 0..1.
        final: factor that the last step comes down to.
        flat: share of all steps at the full rate, after the warm-up.
    """
    warm = round(warmup * total)
    if step < warm:
        return (step + 1) / (warm + 1)
    start = warm + round(flat * total)
    progress = min(1.0, max(0, step - start) / max(1, total - start))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_noam(step: int, *, total: int, warmup: float, final: float = 0.0) -> float:
    """Factor of the learning rate at an optimizer step: linear warm-up, then 1 / sqrt(step) (Vaswani et al. 2017, section 5.3).

    The paper's d^-0.5 min(s^-0.5, s w^-1.5), s from 1, over its value at s = w: their rate is an `lr` of (d w)^-0.5.

    Args:
        step, total, warmup: as `warmup_cosine`; no warm-up counts as one step.
        final: factor that it does not go below.
    """
    warm = max(1, round(warmup * total))
    count = step + 1
    return count / warm if count <= warm else max(final, math.sqrt(warm / count))
