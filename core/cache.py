"""Keys and values of tokens already decoded, so that a step computes those of its new tokens only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from core.coordinates import line, padded_line


class KeyValueCache:
    """What a decoder keeps between steps: `decoder(tokens, memory, cache=cache)`, then `decoder(more, cache=cache)`.

    Keys and values lie in buffers, zero-filled (uninitialised memory may hold NaN, and a weight of 0 times NaN is NaN), are
    written by index, and are read up to the last token. Buffers of up to `FIRST` tokens are made once, in their full length;
    longer ones double from there, since most texts end long before the longest that is allowed. Keys and values of the
    memory are computed by the first call. Places, and which tokens are padding, are kept with them.

    It keeps no gradients, is no part of the model, and serves one batch: make a new one for the next. The caches of two
    texts cannot be joined, since keys are stored as they were turned by their place.

    Args:
        layers: blocks of the decoder.
        batch: rows.
        length: most tokens that it will hold, padding included.

    Raises:
        ValueError: sizes below 1.
    """

    FIRST = 256  # tokens that there is room for from the start

    def __init__(self, layers: int, batch: int, length: int) -> None:
        if min(layers, batch, length) < 1:
            raise ValueError(f"layers={layers}, batch={batch}, length={length} has a size below 1; use positive sizes")
        self.batch, self.capacity, self.length = batch, length, 0
        self.layers = [LayerCache(self) for _ in range(layers)]
        self.at: Tensor | None = None
        self.real: Tensor | None = None
        self.memory_mask: Tensor | None = None

    def places(self, tokens: Int[Tensor, "b n"], real: Bool[Tensor, "b n"] | None) -> Float[Tensor, "*b n 1"]:
        """Where the next tokens stand: after the real ones that are here.

        Raises:
            ValueError: no room for them, or other rows than the cache's.
        """
        rows, n = tokens.shape
        if rows != self.batch:
            raise ValueError(f"{rows} rows of tokens do not fit a cache of batch={self.batch}; use select, or a new cache")
        if self.length + n > self.capacity:
            raise ValueError(
                f"{n} tokens after {self.length} pass the end of a cache of length={self.capacity}; "
                f"make it with length={self.length + n} or more"
            )
        if real is None and self.real is None:
            return line(n, start=self.length, device=tokens.device)
        return padded_line(self.known(real, n, tokens.device))[:, self.length :]

    def reserve(self, at: Float[Tensor, "*b n 1"], real: Bool[Tensor, "b n"] | None) -> None:
        """Room for the next tokens, which every layer then fills by `LayerCache.extend`."""
        n = at.shape[-2]
        if real is not None or self.real is not None:
            self.real = self.known(real, n, at.device)
        if self.at is not None and self.at.ndim < at.ndim:  # padding comes for the first time
            self.at = self.at.expand(self.batch, -1, -1)
        self.at = at if self.at is None else torch.cat([self.at, at], dim=-2)
        self.length += n

    def known(self, real: Bool[Tensor, "b n"] | None, n: int, device: torch.device) -> Bool[Tensor, "b m"]:
        """Which tokens are real, of those here and the next `n`."""
        here = self.real if self.real is not None else torch.ones(self.batch, self.length, dtype=torch.bool, device=device)
        new = real if real is not None else torch.ones(self.batch, n, dtype=torch.bool, device=device)
        return torch.cat([here, new], dim=1)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Goes on with these rows, in this order: finished ones are dropped, one repeated becomes several beams."""
        self.reorder(rows)
        for layer in self.layers:
            if layer.cross is not None:
                layer.cross = (layer.cross[0].index_select(0, rows), layer.cross[1].index_select(0, rows))
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, rows)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """As `select`, where each new row has the memory of the row before at its place (beams of one sentence)."""
        for layer in self.layers:
            layer.reorder(rows)
        self.real = None if self.real is None else self.real.index_select(0, rows)
        if self.at is not None and self.at.ndim == 3:
            self.at = self.at.index_select(0, rows)
        self.batch = len(rows)


class LayerCache:
    """One block's part of a `KeyValueCache`: what its attentions are called with."""

    def __init__(self, whole: KeyValueCache) -> None:
        self.whole = whole
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.cross: tuple[Tensor, Tensor] | None = None

    @property
    def at(self) -> Float[Tensor, "*b m 1"]:
        """Places of all keys, the new ones included."""
        if self.whole.at is None:
            raise ValueError("the cache has no tokens yet; call reserve before its layers")
        return self.whole.at

    def extend(
        self, k: Float[Tensor, "b kv_heads n e"], v: Float[Tensor, "b kv_heads n f"]
    ) -> tuple[Float[Tensor, "b kv_heads m e"], Float[Tensor, "b kv_heads m f"]]:
        """Writes the new tokens' keys (turned by their place) and values; all that are here.

        Raises:
            ValueError: they need gradients.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("a key/value cache keeps no gradients; decode under torch.no_grad(), or train without a cache")
        rows, end = self.whole.batch, self.whole.length
        if self.keys is None or self.values is None:
            self.keys, self.values = self.roomy(k[:, :, :0]), self.roomy(v[:, :, :0])
        elif end > self.keys.shape[2]:
            self.keys, self.values = self.roomy(self.keys[:rows]), self.roomy(self.values[:rows])
        for buffer, new in ((self.keys, k), (self.values, v)):
            buffer[:rows, :, end - new.shape[2] : end] = new
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def once(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory: made by the first call, kept for all others."""
        if self.cross is None:
            keys, values = make()
            self.cross = (keys.contiguous(), values.contiguous())
        return self.cross

    def roomy(self, kept: Float[Tensor, "b kv_heads n e"]) -> Float[Tensor, "b kv_heads m e"]:
        """A buffer that begins with these, and has room for all tokens."""
        size = self.whole.FIRST
        while size < self.whole.length:
            size *= 2
        rows, heads, n, width = kept.shape
        buffer = kept.new_zeros(rows, heads, min(size, self.whole.capacity), width)
        buffer[:, :, :n] = kept
        return buffer

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = choose_rows(self.keys, rows, self.whole.length)
            self.values = choose_rows(self.values, rows, self.whole.length)


def choose_rows(buffer: Float[Tensor, "b g m e"], rows: Int[Tensor, " rows"], length: int) -> Float[Tensor, "c g m e"]:
    """Rows of a buffer up to `length`, written into it where it has room for them."""
    chosen = buffer[:, :, :length].index_select(0, rows)
    if len(rows) > len(buffer):
        buffer = buffer.new_zeros(len(rows), *buffer.shape[1:])
    buffer[: len(rows), :, :length] = chosen
    return buffer
