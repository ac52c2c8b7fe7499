"""How time and memory of an attention layer grow with the picture: global, windowed, transposed and deformable.

A size is the side of the map that the layer works on, in tokens. The layers compute different things: nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from core import Attention, ChannelAttention, DeformableAttention
from core.window import WindowAttention
from vision.bench.contest import Contest, Plan, Setting, Side, like

DIM, HEADS = 96, 3


def settings(plan: Plan) -> Iterator[Setting]:
    sizes = (8,) if plan.tiny else (14, 28, 56, 112, 224) if plan.full else (14, 28, 56, 84)
    for size in sizes:
        yield Setting("growth", "attention", size=size, device=plan.device)


def contest(setting: Setting) -> Contest:
    x = setting.picture(DIM).permute(0, 2, 3, 1).contiguous()
    size = setting.size
    parts = {
        "global": Global,
        "windowed": lambda: WindowAttention(Attention(DIM, HEADS), (7, 7)),
        "transposed": lambda: ChannelAttention(DIM, HEADS),
        "deformable": lambda: DeformableAttention(DIM, HEADS, (size, size), kernel=9, stride=8, position=None),
    }
    notes = [
        "windowed: 7 x 7, without table and shift; deformable: a key for each 8 x 8 tokens, as in DAT++'s first stage, no table"
    ]
    sides = {name: Side(build, partial(run, x)) for name, build in parts.items()}
    options: dict[str, Any] = {"compared": frozenset(), "rated": False, "counted": False, "notes": notes}
    return Contest(setting, sides, units=size * size, unit="tokens", **options)


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(DIM, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.flatten(1, 2)).view(x.shape)


def run(x: Tensor, module: nn.Module) -> Tensor:
    return module(like(x, module))
