"""How far a restoration is, told while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from core import Block

Tell = Callable[[float], None]


class Progress:
    """Tells the share of the work that is done: of equal parts, and of the model's blocks in each pass through it.

    Args:
        tell: takes the share, 0..1, which never falls; None is nobody.
        model: its `Block`s are watched while this is entered.
    """

    def __init__(self, tell: Tell | None, model: nn.Module) -> None:
        self.tell: Tell = tell or (lambda share: None)
        self.blocks = [module for module in model.modules() if isinstance(module, Block)] if tell else []
        self.start, self.length = 0.0, 1.0  # of the part that is being done
        self.begun: set[int] | None = None  # blocks of this pass; None between passes, where memory is measured
        self.handles: list[Any] = []

    def __enter__(self) -> Progress:
        # A streamed block is not called as a whole, but its first norm is, for each band.
        self.handles = [block.norm1.register_forward_pre_hook(self.hook(number)) for number, block in enumerate(self.blocks)]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def hook(self, number: int) -> Callable[..., None]:
        def begin(*args: object) -> None:
            if self.begun is not None and number not in self.begun:
                self.tell(self.start + self.length * len(self.begun) / len(self.blocks))
                self.begun.add(number)

        return begin

    @contextmanager
    def part(self, index: int, count: int) -> Iterator[None]:
        """Within it, shares are of part `index` of `count` equal ones."""
        start, length = self.start, self.length
        self.start, self.length = start + length * index / count, length / count
        yield
        self.start, self.length = start, length

    @contextmanager
    def running(self) -> Iterator[None]:
        """One pass through the model."""
        self.begun = set()
        yield
        self.begun = None
        self.tell(self.start + self.length)
