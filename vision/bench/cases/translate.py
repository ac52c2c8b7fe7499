"""A training step of an encoder-decoder on sentences of unequal lengths: ours packed and in buckets, the peers padded.

All sides take the same sentences, and give the same loss of each and the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import Decoder, Encoder, EncoderDecoder, Sinusoidal, Site, line
from core.embedding import TokenEmbedding
from vision.bench.cases.sequence import MISSING, SYMBOLS, TIME_ONLY, from_torch
from vision.bench.contest import Contest, Plan, Setting, Side
from vision.bench.peers import imports

SIZES = {"tiny": (16, 1, 2), "encoder-decoder": (256, 4, 4)}  # width, blocks, heads
BUCKET = 8  # sentences

Sentence = tuple[list[int], list[int]]  # source; target with a start and a stop symbol


class Batch(NamedTuple):
    """Rows of sentences, one after the other in each: `owner` and `owner_in_source` number the sentence of a token, -1 is
    padding."""

    source: Tensor
    target: Tensor
    label: Tensor
    owner_in_source: Tensor
    owner: Tensor


def settings(plan: Plan) -> Iterator[Setting]:
    if plan.tiny:
        yield Setting("translate", "tiny", "training", batch=6, size=12, device=plan.device)
        return
    base = Setting("translate", "encoder-decoder", "training", batch=64, size=64, device=plan.device)
    yield base
    if plan.full:
        yield replace(base, precision="bf16")
        yield replace(base, size=256)


def contest(setting: Setting) -> Contest:
    sentences = made_up(setting.batch, setting.size)
    whole, packed = [lay_out([[i] for i in range(len(sentences))], sentences)], [lay_out(pack(sentences), sentences)]
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i][0]))
    buckets = [lay_out([[i] for i in order[j : j + BUCKET]], sentences) for j in range(0, len(order), BUCKET)]
    tokens = sum(len(source) + len(target) - 1 for source, target in sentences)

    def side(build: Any, forward: Any, batches: list[Batch], lend: Any = None) -> Side:
        batches = [Batch(*(part.to(setting.device) for part in batch)) for batch in batches]
        losses = partial(loss_of_each, forward, batches, len(sentences))
        return Side(build, losses, lambda module: losses(module).sum() / tokens, lend)

    dim, depth, heads = SIZES[setting.name]
    make_ours, make_theirs = partial(ours, dim, depth, heads), partial(TorchPair, dim, depth, heads)
    sides = {
        "vision, in buckets": side(make_ours, by_real, buckets),
        "vision, packed": side(make_ours, by_segments, packed, lend_ours),
        "nn.Transformer": side(make_theirs, by_torch, whole, lend_theirs),
        "nn.Transformer, in buckets": side(make_theirs, by_torch, buckets, lend_theirs),
    }
    compared, notes = (
        frozenset(sides),
        [f"{padding(whole):.0%} of the padded rows is padding, {padding(packed):.0%} of the packed"],
    )
    if find_spec("x_transformers"):
        x = [part.to(setting.device) for part in for_x(sentences)]
        sides["x-transformers"] = Side(partial(x_pair, dim, depth, heads, setting.size), lambda module: module(*x[:2], mask=x[2]))
        notes.append(TIME_ONLY)
    else:
        notes.append(MISSING)
    options: dict[str, Any] = {"targets": {"nn.Transformer": 1.2}, "notes": notes, "compared": compared, "counted": False}
    return Contest(setting, sides, units=tokens, unit="tokens", **options)


def made_up(count: int, longest: int) -> list[Sentence]:
    """Lengths as of real text: few long, many short; the median is a third of the longest."""
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randn(count, generator=draw) * 0.6).exp() * longest / 3
    sources = lengths.round().long().clamp(2, longest - 1)
    targets = (sources * (0.8 + 0.4 * torch.rand(count, generator=draw))).long().clamp(2, longest - 2)

    def symbols(n: int) -> list[int]:
        return torch.randint(3, SYMBOLS, (n,), generator=draw).tolist()

    return [(symbols(int(n)), [1, *symbols(int(m)), 2]) for n, m in zip(sources, targets, strict=True)]


def pack(sentences: Sequence[Sentence]) -> list[list[int]]:
    """Which sentences stand in which row: the longest first, each in the first row with room for it."""
    room = max(max(len(source), len(target) - 1) for source, target in sentences)
    found: list[tuple[list[int], list[int]]] = []
    for i in sorted(range(len(sentences)), key=lambda i: -len(sentences[i][0])):
        need = [len(sentences[i][0]), len(sentences[i][1]) - 1]
        row = next((row for row in found if all(n <= left for n, left in zip(need, row[1], strict=True))), None)
        if row is None:
            row = ([], [room, room])
            found.append(row)
        row[0].append(i)
        row[1][:] = [left - n for n, left in zip(need, row[1], strict=True)]
    return [row[0] for row in found]


def lay_out(places: Sequence[Sequence[int]], sentences: Sequence[Sentence]) -> Batch:
    parts: list[list[list[int]]] = [[], [], [], [], []]
    for row in places:
        cut = [(sentences[i][0], sentences[i][1][:-1], sentences[i][1][1:]) for i in row]
        for part, k in zip(parts, range(3), strict=False):
            part.append([symbol for sentence in cut for symbol in sentence[k]])
        parts[3].append([i for i in row for _ in sentences[i][0]])
        parts[4].append([i for i in row for _ in sentences[i][1][1:]])
    return Batch(*(padded(part, fill) for part, fill in zip(parts, (0, 0, 0, -1, -1), strict=True)))


def padded(lists: Sequence[Sequence[int]], fill: int) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in lists], batch_first=True, padding_value=fill)


def padding(batches: Sequence[Batch]) -> float:
    owners = [owner.flatten() for batch in batches for owner in (batch.owner, batch.owner_in_source)]
    return float((torch.cat(owners) < 0).float().mean())


def loss_of_each(forward: Any, batches: Sequence[Batch], count: int, module: nn.Module) -> Tensor:
    """The summed cross-entropy of each sentence."""
    total = torch.zeros(count, device=batches[0].source.device)
    for batch in batches:
        scores, real = forward(module, batch), batch.owner >= 0
        losses = F.cross_entropy(scores[real].float(), batch.label[real], reduction="none")
        total = total.index_add(0, batch.owner[real], losses)
    return total


def by_real(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch.source, batch.target, source_real=batch.owner_in_source >= 0, target_real=batch.owner >= 0)


def by_segments(module: nn.Module, batch: Batch) -> Tensor:
    source, target = batch.owner_in_source + 1, batch.owner + 1  # 0 is padding
    return module(batch.source, batch.target, source_segments=source, target_segments=target)


def by_torch(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch.source, batch.target, batch.owner_in_source < 0, batch.owner < 0)


def ours(dim: int, depth: int, heads: int) -> EncoderDecoder:
    options: dict[str, Any] = {"dim": dim, "depth": depth, "heads": heads, "hidden": 4 * dim, "dropout": 0.0}
    return EncoderDecoder(Encoder(SYMBOLS, **options), Decoder(SYMBOLS, memory_dim=dim, **options))


class TorchPair(nn.Module):
    """nn.Transformer with our embeddings and places."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.source, self.target = TokenEmbedding(SYMBOLS, dim), TokenEmbedding(SYMBOLS, dim)
        self.position = Sinusoidal(Site(dim, heads))
        options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, **options)
        encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(dim), enable_nested_tensor=False)  # as pre-norm does by itself
        self.transformer = nn.Transformer(dim, heads, depth, depth, 4 * dim, 0.0, custom_encoder=encoder, **options)

    def forward(self, source: Tensor, target: Tensor, source_padding: Tensor, target_padding: Tensor) -> Tensor:
        x, y = (self.place(part(tokens)) for part, tokens in ((self.source, source), (self.target, target)))
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=y.device).triu(1)
        masks = {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding}
        y = self.transformer(x, y, tgt_mask=later, tgt_is_causal=True, tgt_key_padding_mask=target_padding, **masks)
        return F.linear(y, self.target.weight)

    def place(self, x: Tensor) -> Tensor:
        return self.position.embed(x, line(x.shape[1], device=x.device))


def lend_ours(ours: nn.Module, other: nn.Module) -> None:
    ours.load_state_dict(other.state_dict())


def lend_theirs(ours: nn.Module, theirs: Any) -> None:
    embeddings = {f"{part}.embedding.weight": getattr(theirs, name).weight for part, name in EMBEDDINGS.items()}
    ours.load_state_dict(from_torch(theirs.transformer.state_dict()) | embeddings)


EMBEDDINGS = {"encoder": "source", "decoder": "target"}


def x_pair(dim: int, depth: int, heads: int, longest: int) -> nn.Module:
    with imports():
        from x_transformers import XTransformer

    options: dict[str, Any] = {"dim": dim, "tie_token_emb": False}
    for side in ("enc", "dec"):
        options |= {f"{side}_num_tokens": SYMBOLS, f"{side}_depth": depth, f"{side}_heads": heads, f"{side}_max_seq_len": longest}
        options |= {f"{side}_attn_dim_head": dim // heads, f"{side}_attn_flash": True}
    return XTransformer(**options)


def for_x(sentences: Sequence[Sentence]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target with its own sign for padding, and where the source is real."""
    source = padded([source for source, _ in sentences], -1)
    return source.clamp_min(0), padded([target for _, target in sentences], -100), source >= 0
