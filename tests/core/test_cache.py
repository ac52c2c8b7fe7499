"""Decoding with a cache is decoding without, for every position, norm order and kind of heads."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from core.cache import KeyValueCache
from core.position import Alibi, Combined, ContinuousBias, Learned, Position, RelativeTable, Rotary, Shaw, Sinusoidal, T5Bias
from core.transformer import Decoder

KINDS = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "shaw": partial(Shaw, clip=3),
    "t5": partial(T5Bias, buckets=8, max_distance=12),
    "alibi": Alibi,
    "table": RelativeTable,
    "continuous": partial(ContinuousBias, hidden=8),
    "two": partial(Combined, kinds=[Learned, Rotary, Shaw]),
}
CASES = [
    *[(kind, "pre", None, 8) for kind in KINDS],
    *[(kind, "post", 2, 8) for kind in KINDS],
    ("rotary", "pre", 1, None),  # multi-query, a language model
]
WIDTH, HEADS, SYMBOLS = 16, 4, 11


def decoder(position=Sinusoidal, order="pre", kv_heads=None, memory_dim: int | None = 8, **options):
    return Decoder(
        SYMBOLS, WIDTH, 2, HEADS, 24, 16, memory_dim, position=position, order=order, kv_heads=kv_heads, dropout=0.0, **options
    )


@torch.no_grad()
def decoded(model, tokens, memory, real, memory_real, chunks, orders):
    """Scores of every step; after a chunk the rows of the cache take the order given for it."""
    cache, parts, start = model.new_cache(len(tokens), tokens.shape[1]), [], 0
    for size, order in zip(chunks, orders, strict=True):
        now = slice(start, start + size)
        first = {"memory": memory, "memory_real": memory_real} if not start and memory is not None else {}
        parts.append(model(tokens[:, now], real=None if real is None else real[:, now], cache=cache, **first))
        start += size
        if order is not None:
            cache.select(order)
            tokens, parts = tokens[order], [part[order] for part in parts]
            real = None if real is None else real[order]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("kind", "order", "kv_heads", "memory_dim"), CASES)
def test_cached_equals_uncached_at_every_step(within, perturbed, kind, order, kv_heads, memory_dim):
    """lucidrains/x-transformers #219, #311, PR #90; keras-hub #2861 (ALiBi zero at decode); candle PR #899 (T5 bias
    ignores the cache); torchtune #1250 (unequal lengths); pytorch #144858, #103082, #108108 (a single query sees key 0)."""
    model = perturbed(decoder(KINDS[kind], order, kv_heads, memory_dim)).eval()
    tokens = torch.randint(SYMBOLS, (3, 9))
    memory = None if memory_dim is None else torch.randn(3, 5, memory_dim)
    lengths = None if memory is None else torch.tensor([5, 2, 4])
    left = torch.arange(9) >= torch.tensor([[0], [3], [1]])
    swap, drop = torch.tensor([2, 0, 1]), torch.tensor([1, 1, 0, 2, 2])
    for real in (None, left):
        with torch.no_grad():
            whole = model(tokens, memory, real=real, memory_real=lengths)
        valid = torch.ones(3, 9, dtype=torch.bool) if real is None else real
        for chunks, orders in (
            ([1] * 9, [None] * 9),
            ([4, 3, 1, 1], [None] * 4),
            ([4, 2, 2, 1], [swap, drop, torch.tensor([4, 1]), None]),
        ):
            rows = torch.arange(3)
            for rearranged in orders:
                rows = rows if rearranged is None else rows[rearranged]
            got = decoded(model, tokens, memory, real, lengths, chunks, orders)
            within(got[valid[rows]], whole[rows][valid[rows]])


def test_rows_padded_on_the_left_are_as_alone(within, perturbed):
    model, memory = perturbed(decoder(Learned)).eval(), torch.randn(2, 5, 8)
    tokens, real = torch.randint(SYMBOLS, (2, 6)), torch.arange(6) >= torch.tensor([[0], [4]])
    y = model(tokens, memory, real=real)
    within(y[1:, 4:], model(tokens[1:, 4:], memory[1:]))
    assert y.isfinite().all()


def test_keys_of_the_memory_are_computed_once(monkeypatch):
    model, made = decoder().eval(), []
    for block in model.blocks:
        monkeypatch.setattr(block.cross_attention.kv, "forward", lambda x, made=made: made.append(1) or x.repeat(1, 1, 4))
    cache = model.new_cache(2, 5)
    with torch.no_grad():
        model(torch.zeros(2, 2, dtype=torch.long), torch.randn(2, 3, 8), cache=cache)
        model(torch.zeros(2, 1, dtype=torch.long), cache=cache)
    assert len(made) == len(model.blocks)


def test_buffers_are_made_once_and_zero_filled():
    """transformers #30055: a cache that is called static, made anew at each step, gains nothing under compilation."""
    model = decoder().eval()
    cache = model.new_cache(2, 5)
    with torch.no_grad():
        model(torch.zeros(2, 2, dtype=torch.long), torch.randn(2, 3, 8), cache=cache)
        buffer = cache.layers[0].keys
        assert buffer is not None
        assert buffer.shape == (2, HEADS, 5, WIDTH // HEADS)
        assert (buffer[:, :, 2:] == 0).all()
        model(torch.zeros(2, 1, dtype=torch.long), cache=cache)
        cache.reorder(torch.tensor([1, 0]))
    assert cache.layers[0].keys is buffer
    assert cache.length == 3
    assert not any("cache" in name for name in model.state_dict())


def test_longer_buffers_double_and_change_nothing(within, perturbed, monkeypatch):
    """The longest text that is allowed takes no memory before one is as long."""
    monkeypatch.setattr(KeyValueCache, "FIRST", 2)
    model = perturbed(decoder(Rotary)).eval()
    tokens, memory = torch.randint(SYMBOLS, (3, 11)), torch.randn(3, 5, 8)
    cache, sizes, parts = model.new_cache(3, 11), [], []
    order = torch.tensor([2, 0])
    with torch.no_grad():
        for i in range(11):
            parts.append(model(tokens[:, i : i + 1], memory if i == 0 else None, cache=cache))
            sizes.append(cache.layers[0].keys.shape[2])
            if i == 4:  # rows leave, and the buffers grow afterwards
                cache.select(order)
                tokens, parts = tokens[order], [part[order] for part in parts]
        within(torch.cat(parts, dim=1), model(tokens, memory[order]))
    assert sizes == [2, 2, 4, 4, 8, 8, 8, 8, 11, 11, 11]
    with torch.no_grad():
        model(tokens, memory[order], cache=model.new_cache(2, 10**12))  # whole, it would be terabytes


def test_errors():
    model, memory = decoder().eval(), torch.randn(2, 3, 8)
    two = torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^layers=2, batch=0, length=5 has a size below 1; use positive sizes$"):
        model.new_cache(0, 5)
    with pytest.raises(ValueError, match=r"^a key/value cache keeps no gradients; decode under torch.no_grad\(\), or train"):
        model(two, memory, cache=model.new_cache(2, 5))
    with torch.no_grad():
        cache = model.new_cache(2, 3)
        model(two, memory, cache=cache)
        with pytest.raises(ValueError, match=r"^2 tokens after 2 pass the end of a cache of length=3; make it with length=4"):
            model(two, cache=cache)
        with pytest.raises(ValueError, match=r"^1 rows of tokens do not fit a cache of batch=2; use select, or a new cache$"):
            model(two[:1, :1], cache=cache)
        with pytest.raises(ValueError, match=r"^the cache holds keys and values of its memory already; pass memory=None"):
            model(two[:, :1], memory, cache=cache)
        with pytest.raises(ValueError, match=r"^a cache holds one sequence a row; decode packed segments without it"):
            model(two[:, :1], cache=cache, segments=torch.ones(2, 1, dtype=torch.long))
        assert model(two[:, :1], cache=cache).shape == (2, 1, SYMBOLS)  # the errors left it as it was
    with pytest.raises(ValueError, match=r"^the cache has no tokens yet; call reserve before its layers$"):
        _ = KeyValueCache(1, 1, 1).layers[0].at
