"""A batch in the middle of generation: scores of the next symbols, the symbols fed back, rows dropped and reordered.

`CachedSteps` computes each token once; `WholeSteps` is the plain path that it must equal.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class Writer(Protocol):
    """What generates: a `Decoder`, or another module whose `forward` and cache are called alike."""

    training: bool

    def __call__(self, tokens: Int[Tensor, "b n"], memory: Float[Tensor, "b m c"] | None = None, **options: Any) -> Any: ...

    def new_cache(self, batch: int, length: int) -> Any:
        """With `batch`, `select` and `reorder`, as `KeyValueCache`."""

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


class CachedSteps:
    """Args: prompt, memory, real, memory_real: as `Decoder`; max_length: symbols to come, at most."""

    def __init__(
        self,
        decoder: Writer,
        prompt: Int[Tensor, "b n"],
        memory: Float[Tensor, "b m c"] | None,
        real: Bool[Tensor, "b n"] | None,
        memory_real: Bool[Tensor, "b m"] | None,
        max_length: int,
    ) -> None:
        self.decoder = decoder
        self.cache = decoder.new_cache(len(prompt), prompt.shape[1] + max_length - 1)
        self.next = decoder(prompt, memory, real=real, memory_real=memory_real, cache=self.cache)[:, -1]

    @property
    def rows(self) -> int:
        return self.cache.batch

    def scores(self) -> Float[Tensor, "b v"]:
        """Of the next symbol, in float32."""
        return self.next.float()

    def feed(self, symbols: Int[Tensor, " b"]) -> None:
        self.next = self.decoder(symbols[:, None], cache=self.cache)[:, -1]

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Goes on with these rows; one may be repeated."""
        self.cache.select(rows)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """As `select`, where each row gets one of the same memory."""
        self.cache.reorder(rows)


class WholeSteps:
    """The same, all tokens computed again at every step."""

    def __init__(
        self,
        decoder: Writer,
        prompt: Int[Tensor, "b n"],
        memory: Float[Tensor, "b m c"] | None,
        real: Bool[Tensor, "b n"] | None,
        memory_real: Bool[Tensor, "b m"] | None,
    ) -> None:
        self.decoder, self.tokens, self.memory = decoder, prompt, memory
        self.real, self.memory_real = real, memory_real

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def scores(self) -> Float[Tensor, "b v"]:
        return self.decoder(self.tokens, self.memory, real=self.real, memory_real=self.memory_real)[:, -1].float()

    def feed(self, symbols: Int[Tensor, " b"]) -> None:
        self.tokens = torch.cat([self.tokens, symbols[:, None]], dim=1)
        if self.real is not None:
            self.real = torch.cat([self.real, torch.ones_like(self.real[:, :1])], dim=1)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.tokens = self.tokens[rows]
        self.memory, self.real, self.memory_real = (
            None if x is None else x[rows] for x in (self.memory, self.real, self.memory_real)
        )

    reorder = select
