"""Encoder, decoder, and both together: the base model for sequences (Vaswani et al. 2017).

Three rules hold for all of them.

- One position serves all blocks of a stack: absolute kinds embed the tokens, relative ones work in every self-attention, so
  that a learned table is shared by the layers (as T5's). Cross-attention has none. Two kinds at once are a `Combined`.
- Pre-norm stacks end in a norm, since nothing else norms their residual stream; post-norm stacks already do, and have
  none. torch's nn.Transformer norms these twice: put a LayerNorm in `encoder.norm` and `decoder.norm` for its weights.
- Padding (`real`: lengths, padding then on the right, or booleans b n, True = real token) and packing (`segments`:
  numbers b n, several sequences in one row, 0 = padding) change nothing at the other tokens. Each sequence counts its places
  from 0. A row without real tokens gives finite numbers without meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from core.attention import Attention
from core.block import Block, CrossBlock, check_order, run_through
from core.cache import KeyValueCache
from core.dropout import Dropout
from core.embedding import TokenEmbedding
from core.ffn import Mlp
from core.linear import Linear, linear
from core.norm import LayerNorm
from core.options import check_makers, check_shares, check_sizes, remember_options
from core.position import HOOKS, Position, Shared, Sinusoidal, Site, make_position, require_hooks
from core.rows import MemoryReal, MemorySegments, Real, Rows, Segments, as_real, memory_mask, only_earlier, read_rows

Order = Literal["pre", "post"]


class Encoder(nn.Module):
    """Symbols to vectors, each of which has seen the whole sequence.

    Args:
        vocabulary: number of symbols.
        dim, depth, heads, hidden: width, blocks, attention heads, width within the feed-forward networks.
        max_length: places of kinds of position with a table; others have no end.
        kv_heads: key and value heads, fewer than `heads`; None is `heads`.
        position: makes the position of all blocks, such as `Learned` or `Rotary`; `Position` is none.
        order: of the norms, "pre" or "post".
        norm: makes each norm from `dim`.
        ffn: `(dim, hidden, dropout=) -> module`, such as `Mlp` or `GatedMlp`.
        dropout: of the embedded tokens, attention weights, hidden activations and residual branches, while training.
    """

    @remember_options
    def __init__(
        self,
        vocabulary: int,
        dim: int = 256,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 1024,
        max_length: int = 512,
        *,
        kv_heads: int | None = None,
        position: Callable[[Site], Position] = Sinusoidal,
        order: Order = "pre",
        norm: Callable[[int], nn.Module] = LayerNorm,
        ffn: Callable[[int, int], nn.Module] = Mlp,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_stack(vocabulary, dim, depth, heads, hidden, max_length, kv_heads, order, norm, ffn, dropout)
        self.dim = dim
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.position = make_position(position, Site(dim, heads, extent=(max_length,)))
        require_hooks(self.position, "Encoder", HOOKS)
        shared = in_blocks(self.position)
        self.dropout = Dropout(dropout)
        make_ffn: Any = ffn  # annotated with what the command line need not be told; given a dropout too
        self.blocks = nn.ModuleList(
            Block(
                dim,
                Attention(dim, heads, kv_heads=kv_heads, position=shared, dropout=dropout),
                make_ffn(dim, hidden, dropout=dropout),
                norm=norm,
                order=order,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.norm = norm(dim) if order == "pre" else nn.Identity()
        self.checkpointing = False
        self.blocks.apply(initialise)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.checkpointing = enable

    def forward(
        self, tokens: Int[Tensor, "b n"], *, real: Real | None = None, segments: Segments | None = None
    ) -> Float[Tensor, "b n d"]:
        """Args: real, segments: padding and packing, see the module."""
        rows = read_rows(tokens, real, segments)
        x, mask = self.dropout(self.position.embed(self.embedding(tokens), rows.at)), rows.keys()
        for block in self.blocks:
            x = run_through(block, x, checkpointing=self.checkpointing, at=rows.at, mask=mask)
        return self.norm(x)


class Decoder(nn.Module):
    """Symbols so far, and a memory, to the scores (logits) of the symbol after each: the next one is never seen.

    Args:
        vocabulary, dim, depth, heads, hidden, max_length: as `Encoder`.
        memory_dim: width of the memory; None is a decoder without one (a language model).
        kv_heads, position, order, norm, ffn, dropout: as `Encoder`.
        tied: the scores are products with the embedding (Press & Wolf 2017); False gives them weights of their own.
    """

    @remember_options
    def __init__(
        self,
        vocabulary: int,
        dim: int = 256,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 1024,
        max_length: int = 512,
        memory_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        position: Callable[[Site], Position] = Sinusoidal,
        order: Order = "pre",
        norm: Callable[[int], nn.Module] = LayerNorm,
        ffn: Callable[[int, int], nn.Module] = Mlp,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        check_stack(vocabulary, dim, depth, heads, hidden, max_length, kv_heads, order, norm, ffn, dropout)
        if memory_dim is not None:
            check_sizes(memory_dim=memory_dim)
        self.dim, self.memory_dim = dim, memory_dim
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.position = make_position(position, Site(dim, heads, extent=(max_length,), causal=True))
        require_hooks(self.position, "Decoder", HOOKS)
        shared = in_blocks(self.position)
        self.dropout = Dropout(dropout)
        build: Any = Block if memory_dim is None else CrossBlock
        make_ffn: Any = ffn
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            parts: list[nn.Module] = [Attention(dim, heads, kv_heads=kv_heads, position=shared, dropout=dropout)]
            if memory_dim is not None:
                parts.append(Attention(dim, heads, kv_heads=kv_heads, memory_dim=memory_dim, dropout=dropout))
            parts.append(make_ffn(dim, hidden, dropout=dropout))
            self.blocks.append(build(dim, *parts, norm=norm, order=order, dropout=dropout))
        self.norm = norm(dim) if order == "pre" else nn.Identity()
        self.checkpointing = False
        # Tied scores use the embedding's own parameter: no second name for it that a copy or a file could set apart.
        self.output = None if tied else Linear(dim, vocabulary, bias=False)
        self.blocks.apply(initialise)
        if self.output is not None:
            self.output.apply(initialise)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As `Encoder.set_grad_checkpointing`; never for cached tokens."""
        self.checkpointing = enable

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        memory: Float[Tensor, "b m c"] | None = None,
        *,
        real: Real | None = None,
        memory_real: MemoryReal | None = None,
        segments: Segments | None = None,
        memory_segments: MemorySegments | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Scores of the symbol after each token.

        Args:
            real, memory_real, segments, memory_segments: padding and packing of the tokens and of the memory.
            cache: what `new_cache` made. Tokens (and `real`) are those after the cached ones; the memory comes with the
                first call only.

        Raises:
            ValueError: a memory missing or in excess, tokens past a learned table or the cache, segments with a cache.
        """
        known = cache is not None and cache.layers[0].cross is not None
        if (memory is not None) != (self.memory_dim is not None and not known):
            raise ValueError(memory_advice(self.memory_dim, known))
        if memory is None and (memory_real is not None or memory_segments is not None):
            raise ValueError("memory_real and memory_segments are of a memory, and none is given; leave them out")
        if cache is None:
            rows = read_rows(tokens, real, segments)
        elif segments is not None or memory_segments is not None:
            raise ValueError("a cache holds one sequence a row; decode packed segments without it, or unpack them")
        else:
            mask = None if real is None else as_real(real, *tokens.shape)
            rows = Rows(cache.places(tokens, mask), mask, None)
        x = self.dropout(self.position.embed(self.embedding(tokens), rows.at))
        context: dict[str, Any] = {"at": rows.at}
        if memory is not None:
            seen = memory_mask(len(tokens), memory.shape[1], memory_real, memory_segments, segments)
            context |= {"memory": memory, "memory_mask": seen}
        keys, total = rows.keys(), tokens.shape[1]
        if cache is not None:
            cache.reserve(rows.at, rows.real)
            keys, total = None if cache.real is None else cache.real[:, None, None, :], cache.length
            if memory is not None:
                cache.memory_mask = context["memory_mask"]
            elif known:
                context["memory_mask"] = cache.memory_mask
        context |= only_earlier(tokens.shape[1], total, keys, tokens.device)
        for i, block in enumerate(self.blocks):
            own = {} if cache is None else {"cache": cache.layers[i]}
            x = run_through(block, x, checkpointing=self.checkpointing and cache is None, **context, **own)
        x = self.norm(x)
        return linear(x, self.embedding.weight) if self.output is None else self.output(x)

    def new_cache(self, batch: int, length: int) -> KeyValueCache:
        """A cache for `batch` rows of up to `length` tokens."""
        return KeyValueCache(len(self.blocks), batch, length)


class EncoderDecoder(nn.Module):
    """Source to target: the decoder's memory is what the encoder makes of the source.

    Args:
        encoder: `(source, real=, segments=) -> b m c`, such as `Encoder`, or of pictures, with its width as `dim`.
        decoder: a `Decoder` whose `memory_dim` is that width, or another with its `forward` and `new_cache`.

    Raises:
        ValueError: parts that do not tell the memory's width, a decoder for no memory, or for one of another width.
    """

    encoder: Any  # torch's stubs let no attribute of an unnamed module be called
    decoder: Any

    @remember_options
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        for name, part, width in (("encoder", encoder, "dim"), ("decoder", decoder, "memory_dim")):
            if not hasattr(part, width):
                raise ValueError(f"{name}={type(part).__name__} has no {width}; use one such as core.{name.capitalize()}")
        if decoder.memory_dim != encoder.dim:
            raise ValueError(
                f"decoder with memory_dim={decoder.memory_dim} does not read an encoder of dim={encoder.dim}; "
                f"build it with memory_dim={encoder.dim}"
            )
        self.encoder, self.decoder = encoder, decoder

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Of both; AttributeError where one has no blocks to recompute, such as a recurrent network."""
        for part in (self.encoder, self.decoder):
            part.set_grad_checkpointing(enable)

    def forward(
        self,
        source: Int[Tensor, "b m"] | Float[Tensor, "b c h w"],
        target: Int[Tensor, "b n"],
        *,
        source_real: MemoryReal | None = None,
        target_real: Real | None = None,
        source_segments: MemorySegments | None = None,
        target_segments: Segments | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Scores of the symbol after each of `target`, the symbols so far (teacher forcing: start symbol first)."""
        return self.decoder(
            target,
            self.encoder(source, real=source_real, segments=source_segments),
            real=target_real,
            memory_real=source_real,
            segments=target_segments,
            memory_segments=source_segments,
        )


def check_stack(
    vocabulary: int,
    dim: int,
    depth: int,
    heads: int,
    hidden: int,
    max_length: int,
    kv_heads: int | None,
    order: str,
    norm: Any,
    ffn: Any,
    dropout: float,
) -> None:
    """Raises ValueError: an option that no stack of blocks can be built with."""
    check_sizes(vocabulary=vocabulary, dim=dim, heads=heads, hidden=hidden, max_length=max_length)
    check_sizes(0, depth=depth)
    check_sizes(kv_heads=heads if kv_heads is None else kv_heads)
    check_order(order, ("pre", "post"))
    check_makers(norm=norm, ffn=ffn)
    check_shares(dropout=dropout)


def in_blocks(position: Position) -> Shared | None:
    """For the attention of every block; a kind that only embeds has nothing to do there."""
    return Shared(position) if position.hooks - {"embed"} else None


def memory_advice(memory_dim: int | None, known: bool) -> str:
    if memory_dim is None:
        return "this decoder has no memory (memory_dim is None); build Decoder(..., memory_dim=...) to give it one"
    if known:
        return "the cache holds keys and values of its memory already; pass memory=None, or a new cache for a new memory"
    return "a decoder with memory_dim needs a memory; pass memory=encoder(source)"


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Xavier-uniform weights, fused projections each on its own, and biases of 0."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Attention):
        kv = module.kv_heads * module.head_dim
        fused = module.qkv.weight.split([module.dim, kv, kv]) if module.memory_dim is None else module.kv.weight.split([kv, kv])
        for weight in fused:
            nn.init.xavier_uniform_(weight)
