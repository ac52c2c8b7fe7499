"""Greedy generation: ours with and without its cache, and transformers' `generate` on a Bart of the same weights.

No row stops early: every side writes the same number of symbols for the same sources, the encoder included. Sides round
differently, and of two symbols that are almost equally probable either may come first: a tenth of the rows may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core import Decoder, Encoder, EncoderDecoder, Learned, greedy
from vision.bench.contest import Contest, Plan, Setting, Side, seeded

SYMBOLS, SOURCE, MOST, START, PAD = 1000, 32, 512, 3, 1
SIZES = {"tiny": (16, 1, 2), "encoder-decoder": (256, 4, 8)}  # width, blocks, heads


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield Setting("generation", "tiny", batch=2, size=4, device=plan.device)
        return
    base = Setting("generation", "encoder-decoder", batch=1, size=64, device=plan.device)
    for size in (64, 256) if plan.full else (64,):
        for batch in (1, 4, 16) if plan.full else (1,):
            yield replace(base, batch=batch, size=size)


def contest(setting: Setting) -> Contest:
    source = torch.randint(4, SYMBOLS, (setting.batch, SOURCE), generator=seeded()).to(setting.device)
    build = partial(ours, *SIZES[setting.name])
    sides = {
        "vision": Side(build, partial(write, source, setting.size, True)),
        "vision, without its cache": Side(build, partial(write, source, setting.size, False), lend=lend_ours),
        "transformers": Side(partial(bart, *SIZES[setting.name]), partial(generate, source, setting.size), lend=lend_bart),
    }
    options: dict[str, Any] = {"differ": rows_that_differ, "tolerance": 0.1, "counted": False, "unit": "symbols"}
    return Contest(setting, sides, units=setting.batch * setting.size, targets={"transformers": 1.5}, **options)


def write(source: Tensor, n: int, cache: bool, model: EncoderDecoder) -> Tensor:
    start = torch.full((len(source), 1), START, device=source.device)
    found = greedy(model.decoder, start, model.encoder(source), stop=(), max_length=n, cache=cache)
    return torch.tensor([row.tokens for row in found])


def generate(source: Tensor, n: int, model: Any) -> Tensor:
    mask = torch.ones_like(source)
    return model.generate(source, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=n)[:, 1:].cpu()


def rows_that_differ(found: Tensor, reference: Tensor) -> float:
    """Their share; other numbers of symbols are infinitely far."""
    return float((found != reference).any(dim=1).float().mean()) if found.shape == reference.shape else float("inf")


def ours(dim: int, depth: int, heads: int) -> EncoderDecoder:
    options: dict[str, Any] = {"position": Learned, "order": "post", "dropout": 0.0}
    encoder = Encoder(SYMBOLS, dim, depth, heads, 4 * dim, MOST, **options)
    return EncoderDecoder(encoder, Decoder(SYMBOLS, dim, depth, heads, 4 * dim, MOST, dim, tied=False, **options))


def bart(dim: int, depth: int, heads: int) -> Any:
    """Bart norms the embedded symbols once more, which is taken out, and here it never stops."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": SYMBOLS, "d_model": dim, "max_position_embeddings": MOST, "scale_embedding": True}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": depth, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 4 * dim}
    symbols: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None, "forced_eos_token_id": None}
    config = BartConfig(**sizes, **symbols, decoder_start_token_id=START, tie_word_embeddings=False)
    model = BartForConditionalGeneration(config)
    model.model.encoder.layernorm_embedding = model.model.decoder.layernorm_embedding = nn.Identity()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)  # opinions: less often two symbols that are almost equally probable
    return model


def lend_ours(ours: nn.Module, other: nn.Module) -> None:
    ours.load_state_dict(other.state_dict())


def lend_bart(ours: nn.Module, theirs: nn.Module) -> None:
    ours.load_state_dict(from_bart(theirs))


def from_bart(theirs: Any) -> dict[str, Tensor]:
    """Our names for the weights of a Bart without norms of its embeddings."""
    state = theirs.model.state_dict()
    found = {"decoder.output.weight": theirs.lm_head.weight.detach()}
    for side in ("encoder", "decoder"):
        found[f"{side}.embedding.weight"] = state[f"{side}.embed_tokens.weight"]
        found[f"{side}.position.table"] = state[f"{side}.embed_positions.weight"][2:]  # Bart counts places from 2
        for i in range(getattr(theirs.config, f"{side}_layers")):
            names = [("self_attn", "attention", "norm1"), ("encoder_attn", "cross_attention", "norm2")]
            for (old, new, norm), end in ((name, end) for name in names for end in ("weight", "bias")):
                if old == "encoder_attn" and side == "encoder":
                    continue
                q, k, v, out = (state[f"{side}.layers.{i}.{old}.{part}_proj.{end}"] for part in ("q", "k", "v", "out"))
                place = f"{side}.blocks.{i}.{new}"
                parts = {"qkv": [q, k, v]} if new == "attention" else {"q": [q], "kv": [k, v]}
                found |= {f"{place}.{part}.{end}": torch.cat(several) for part, several in parts.items()}
                found[f"{place}.out.{end}"] = out
                found[f"{side}.blocks.{i}.{norm}.{end}"] = state[f"{side}.layers.{i}.{old}_layer_norm.{end}"]
            last = "norm2" if side == "encoder" else "norm3"
            for old, new in (("fc1", "ffn.up"), ("fc2", "ffn.down"), ("final_layer_norm", last)):
                for end in ("weight", "bias"):
                    found[f"{side}.blocks.{i}.{new}.{end}"] = state[f"{side}.layers.{i}.{old}.{end}"]
    return found
