"""What a recurrent decoder keeps from one symbol to the next while it writes."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

State = tuple[Float[Tensor, "layers b d"], ...]  # of a GRU h, of an LSTM h and c


class StateCache:
    """What a decoder keeps between steps: its state, and what it has made of the memory."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.state: State = ()
        self.memory: Tensor | None = None
        self.keys: Tensor | None = None
        self.mask: Tensor | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Goes on with these rows, in this order; one may be repeated."""
        self.reorder(rows)
        self.memory, self.keys, self.mask = (
            x if x is None else x.index_select(0, rows) for x in (self.memory, self.keys, self.mask)
        )

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """As `select`, where each new row has the memory of the row before at its place (beams of one sentence)."""
        self.state = tuple(part.index_select(1, rows) for part in self.state)
        self.batch = len(rows)
