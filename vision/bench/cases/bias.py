"""Attention with a trainable bias, as in Swin's windows: ours against torch's scaled dot product attention called as it is.

With a gradient ours is the plain product; without one it hands the bias over as a tensor, not as the parameter that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from core import attend
from vision.bench.contest import STEPS, Contest, Plan, Setting, Side, seeded
from vision.bench.peers.sdpa import sdpa

TOKENS, HEADS, WIDTH = 49, 3, 32  # a window of Swin-T's first stage


def settings(plan: Plan) -> Iterator[Setting]:
    for step in STEPS:
        yield Setting("bias", "windows", step, batch=2 if plan.tiny else 64, size=TOKENS, device=plan.device)


def contest(setting: Setting) -> Contest:
    shape = (3, setting.batch, HEADS, TOKENS, WIDTH)
    q, k, v = torch.randn(*shape, generator=seeded()).to(setting.device)
    sides = {
        "vision": Side(Biased, partial(run, attend, q, k, v)),
        "SDPA": Side(Biased, partial(run, sdpa, q, k, v), lend=lambda ours, theirs: ours.load_state_dict(theirs.state_dict())),
    }
    # A mean over 49 keys deviates a seventh as much as a value: rounding weighs so much more
    return Contest(setting, sides, tolerance=1e-4, units=setting.batch, unit="windows")


class Biased(nn.Module):
    """A bias for each head, and a weight for the values, so that there is a gradient on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(0.02 * torch.randn(HEADS, TOKENS, TOKENS))
        self.scale = nn.Parameter(torch.randn(WIDTH))


def run(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, module: Biased) -> Tensor:
    q, k, v = (x * module.scale for x in (q, k, v))
    return attention(q, k, v, bias=module.bias)
