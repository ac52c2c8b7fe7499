"""A pre-norm encoder over rows of equal lengths against nn.TransformerEncoder, with its weights, and x-transformers, in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from core import Encoder, Position
from core.embedding import TokenEmbedding
from vision.bench.contest import Contest, Plan, Setting, Side, grow, seeded
from vision.bench.peers import imports

SYMBOLS = 1000
SIZES = {"tiny": (16, 1, 2), "encoder": (512, 6, 8)}  # width, blocks, heads
MISSING = "x-transformers is not installed (pip install 'vision-core[bench]'): left out"
TIME_ONLY = "x-transformers names its weights otherwise, and has no biases in its attention: they are not copied, its time only"


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield from grow("sequence", "tiny", plan, sizes=[8])
        return
    for size in (128, 512, 2048) if plan.full else (128,):
        yield from grow("sequence", "encoder", replace(plan, full=plan.full and size == 128), sizes=[size])


def contest(setting: Setting) -> Contest:
    dim, depth, heads = SIZES[setting.name]
    tokens = torch.randint(SYMBOLS, (setting.batch, setting.size), generator=seeded()).to(setting.device)
    encode = partial(run, tokens)
    ours = partial(Encoder, SYMBOLS, dim, depth, heads, 4 * dim, setting.size, position=Position, dropout=0.0)
    sides = {
        "vision": Side(ours, encode),
        "nn.TransformerEncoder": Side(partial(TorchEncoder, dim, depth, heads), encode, lend=lend),
    }
    notes = [MISSING]
    if find_spec("x_transformers"):
        sides["x-transformers"] = Side(partial(XEncoder, dim, depth, heads), encode)
        notes = [TIME_ONLY]
    compared = frozenset({"nn.TransformerEncoder"})
    return Contest(setting, sides, compared=compared, units=tokens.numel(), unit="tokens", notes=notes)


def run(tokens: Tensor, module: nn.Module) -> Tensor:
    return module(tokens)


class TorchEncoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(SYMBOLS, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(dim), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


class XEncoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        with imports():
            from x_transformers import Encoder as Layers

        self.embedding = TokenEmbedding(SYMBOLS, dim)
        self.layers = Layers(dim=dim, depth=depth, heads=heads, attn_dim_head=dim // heads, attn_flash=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


def lend(ours: nn.Module, theirs: Any) -> None:
    ours.load_state_dict(from_torch(theirs.layers.state_dict()) | {"embedding.weight": theirs.embedding.weight})


def from_torch(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ours under the names of nn.TransformerEncoder or nn.Transformer."""
    found = {}
    for name, tensor in state.items():
        *place, part, leaf = name.replace("layers.", "blocks.").split(".")
        kind = leaf.removeprefix("in_proj_")
        if part == "self_attn":
            found[".".join([*place, "attention.qkv", kind])] = tensor
        elif part == "multihead_attn":
            third = len(tensor) // 3
            found[".".join([*place, "cross_attention.q", kind])] = tensor[:third]
            found[".".join([*place, "cross_attention.kv", kind])] = tensor[third:]
        else:
            path = ".".join([*place, PARTS.get(part, part), leaf])
            found[path.replace("self_attn", "attention").replace("multihead_attn", "cross_attention")] = tensor
    return found


PARTS = {"linear1": "ffn.up", "linear2": "ffn.down", "out_proj": "out"}
