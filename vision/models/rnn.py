"""Recurrent encoder and decoder, with and without attention: what the Transformer is compared with.

Drop-in for `core.Encoder` and `core.Decoder` in a `core.EncoderDecoder`: the same training, generation and commands.

- The encoder is bidirectional (Schuster & Paliwal 1997). The decoder starts from its last states (Sutskever et al. 2014).
- With a score, each state of the decoder looks at the memory and is joined with what it finds (Luong et al. 2015, eq. 5):
  additive scores (Bahdanau et al. 2015) or multiplicative ones. What was found does not enter the next state, so that all
  states of a training batch come from one call of the recurrent network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from core import ScoredAttention, SoftSelection
from core.dropout import Dropout
from core.embedding import TokenEmbedding
from core.linear import Linear, linear
from core.mask import padding
from core.options import check_makers, check_shares, check_sizes, remember_options
from core.rows import MemoryReal, Real, as_real
from core.selection import Scores
from vision.models.rnn_cache import StateCache


class RNNEncoder(nn.Module):
    """Symbols to the states of a recurrent network that reads them in both directions.

    Args:
        vocabulary: number of symbols.
        dim: width of the memory, even: a half for each direction.
        layers: of the network.
        cell: torch.nn.GRU or torch.nn.LSTM.
        dropout: of embedded symbols, between layers and of the memory, while training.
    """

    @remember_options
    def __init__(
        self,
        vocabulary: int,
        dim: int = 256,
        layers: int = 1,
        *,
        cell: Callable[[int, int], nn.Module] = nn.GRU,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_network(dim, layers, cell, dropout)
        if dim % 2:
            raise ValueError(f"dim={dim} is odd, and both directions have a half; use dim={dim + 1}")
        self.dim = dim
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.dropout = Dropout(dropout)
        self.rnn = recurrent(cell, dim, dim // 2, layers, dropout, bidirectional=True)

    def forward(
        self, tokens: Int[Tensor, "b n"], *, real: Real | None = None, segments: Tensor | None = None
    ) -> Float[Tensor, "b n d"]:
        """Args: real: padding, on the right; states there are 0."""
        refuse_segments(segments)
        x = self.dropout(self.embedding(tokens))
        if real is None:
            return self.dropout(self.rnn(x)[0])
        lengths = right_lengths(real, *tokens.shape)
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.dropout(states)


class RNNDecoder(nn.Module):
    """Symbols so far, and a memory, to the scores (logits) of the symbol after each.

    Args:
        vocabulary, layers, cell, dropout: as `RNNEncoder`.
        dim: width of the states.
        memory_dim: width of the memory.
        score: makes the scores of the memory from `(dim, memory_dim)`: `AdditiveScores` with its `hidden`, or
            `MultiplicativeScores`; None is a decoder that looks at the memory once, for its first state.
        select: makes the selection by the scores, such as `SoftSelection` or `StraightThrough`.
        tied: the scores of symbols are products with the embedding; False gives them weights of their own.
    """

    @remember_options
    def __init__(
        self,
        vocabulary: int,
        dim: int = 256,
        layers: int = 1,
        memory_dim: int = 256,
        *,
        score: Callable[[int, int], Scores] | None = None,
        select: Callable[[], nn.Module] = SoftSelection,
        cell: Callable[[int, int], nn.Module] = nn.GRU,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        check_network(dim, layers, cell, dropout)
        check_sizes(memory_dim=memory_dim)
        check_makers(select=select)
        if score is not None:
            check_makers(score=score)
        self.dim, self.memory_dim, self.layers = dim, memory_dim, layers
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.dropout = Dropout(dropout)
        self.rnn = recurrent(cell, dim, dim, layers, dropout)
        self.parts = 2 if isinstance(self.rnn, nn.LSTM) else 1  # of a state
        self.first = nn.Linear(memory_dim, self.parts * layers * dim)
        self.attention = None if score is None else ScoredAttention(score(dim, memory_dim), select())
        self.join = None if score is None else nn.Linear(dim + memory_dim, dim, bias=False)
        self.output = None if tied else Linear(dim, vocabulary, bias=False)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        memory: Float[Tensor, "b m c"] | None = None,
        *,
        real: Real | None = None,
        memory_real: MemoryReal | None = None,
        segments: Tensor | None = None,
        memory_segments: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Scores of the symbol after each token.

        Args:
            real, memory_real: padding; of the tokens on the right only, where it changes nothing.
            cache: what `new_cache` made. Tokens are those after the ones it has seen; the memory comes with the first call only.

        Raises:
            ValueError: a memory missing or in excess, padding on the left, packed segments.
        """
        refuse_segments(segments, memory_segments)
        if real is not None and (right_lengths(real, *tokens.shape) < tokens.shape[1]).any() and cache is not None:
            raise ValueError("padding would enter the state that the cache keeps; feed rows of equal length")
        x, _ = self.states(tokens, self.read(memory, memory_real, cache), cache)
        return linear(x, self.embedding.weight) if self.output is None else self.output(x)

    def states(
        self, tokens: Int[Tensor, "b n"], seen: StateCache, cache: StateCache | None
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n m"] | None]:
        """What the scores are made of, and the weights of the attention."""
        given: Any = seen.state if self.parts == 2 else seen.state[0]
        x, state = self.rnn(self.dropout(self.embedding(tokens)), given)
        if cache is not None:
            cache.state = state if self.parts == 2 else (state,)
        weights = None
        if self.attention is not None and self.join is not None:
            mask = None if seen.mask is None else seen.mask[:, None, None, :]
            found, weights = self.attention(x, seen.memory, mask, keys=seen.keys)
            x = torch.tanh(self.join(torch.cat([found, x], dim=-1)))
        return self.dropout(x), weights

    def read(self, memory: Float[Tensor, "b m c"] | None, real: MemoryReal | None, cache: StateCache | None) -> StateCache:
        """The memory as every step needs it, and the state before the first: made once."""
        if memory is None:
            if cache is None or cache.memory is None:
                raise ValueError("this decoder needs a memory; pass memory=encoder(source)")
            return cache
        if cache is not None and cache.memory is not None:
            raise ValueError("the cache has its memory already; pass memory=None, or a new cache for a new memory")
        if memory.ndim != 3 or memory.shape[2] != self.memory_dim:
            raise ValueError(f"memory of shape {tuple(memory.shape)} is not b m {self.memory_dim}; use an encoder of that width")
        seen = StateCache(len(memory)) if cache is None else cache
        if real is not None:
            seen.mask = as_real(real, *memory.shape[:2])
            memory = memory.masked_fill(~seen.mask[..., None], 0.0)
        seen.memory = memory
        seen.keys = None if self.attention is None else self.attention.score.keys(memory)
        first = torch.tanh(self.first(ends(memory, seen.mask)))
        seen.state = tuple(rearrange(first, "b (part layer d) -> part layer b d", part=self.parts, layer=self.layers))
        return seen

    def look(
        self, tokens: Int[Tensor, "b n"], memory: Float[Tensor, "b m c"], *, memory_real: MemoryReal | None = None
    ) -> Float[Tensor, "b n m"]:
        """The weights with which the symbol after each token looks at the memory.

        Raises:
            ValueError: a decoder without attention.
        """
        _, weights = self.states(tokens, self.read(memory, memory_real, None), None)
        if weights is None:
            raise ValueError("this decoder has no attention (score is None); build it with a score to look at its weights")
        return weights

    def new_cache(self, batch: int, length: int) -> StateCache:
        """A cache for `batch` rows; a state has room for any `length`."""
        return StateCache(batch)


def check_network(dim: int, layers: int, cell: Callable[[int, int], nn.Module], dropout: float) -> None:
    """Raises ValueError: an option that no recurrent network can be built with."""
    check_sizes(dim=dim, layers=layers)
    check_makers(cell=cell)
    check_shares(dropout=dropout)


def recurrent(
    cell: Callable[[int, int], nn.Module], dim: int, hidden: int, layers: int, dropout: float, **options: bool
) -> nn.Module:
    """torch's, with dropout between its layers.

    Raises:
        ValueError: another class than GRU and LSTM.
    """
    make: Any = cell  # annotated with what the command line need not be told
    made = make(dim, hidden, num_layers=layers, batch_first=True, dropout=dropout if layers > 1 else 0.0, **options)
    if not isinstance(made, (nn.GRU, nn.LSTM)):
        raise ValueError(f"cell={type(made).__name__} is no recurrent network with gates; use torch.nn.GRU or torch.nn.LSTM")
    return made


def ends(memory: Float[Tensor, "b m c"], mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, "b c"]:
    """The last state of each direction: of the half that reads forwards at the last real place, of the other at the first."""
    half = memory.shape[-1] // 2
    last = memory[:, -1] if mask is None else memory[torch.arange(len(memory)), (mask.sum(dim=1) - 1).clamp(min=0)]
    return torch.cat([last[:, :half], memory[:, 0, half:]], dim=-1)


def right_lengths(real: Tensor, rows: int, n: int) -> Int[Tensor, " b"]:
    """Raises: ValueError: padding that is not on the right."""
    mask = as_real(real, rows, n)
    lengths = mask.sum(dim=1)
    if not torch.equal(mask, padding(lengths, n)[:, 0, 0]):
        raise ValueError("padding is not on the right, where a recurrent network can leave it out; pad on the right")
    return lengths


def refuse_segments(*segments: Tensor | None) -> None:
    if any(each is not None for each in segments):
        raise ValueError("a recurrent network reads one sequence a row; unpack segments, or use core.Encoder and core.Decoder")
