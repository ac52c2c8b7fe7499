"""What a family's file (`vit.py`, ...) offers to `load.py` and `save.py`, as functions of the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from vision.errors import UserError
from vision.weights.read import Weights


@dataclass
class Converted:
    """A foreign state dict under our names.

    Attributes:
        state: tensors by our names.
        options: of the model, as far as the source tells them beyond the tensors' shapes.
        dropped: names of the source that our model does without, and that change nothing.
        notes: what the reader should know.
        own: all options of a source of ours that the model is to share.
        assumed: options that the source does not tell, with what they were taken as; `options_of` adds them.
    """

    state: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)


@dataclass
class Adapted:
    """What was changed so that weights fit a model.

    Attributes:
        state: tensors by our names, in the model's sizes.
        adapted: what was done, one line each.
        fresh: the model's names that the source has nothing for, and which get new values.
        problems: why the weights would not do in this model what they do at home, each with its fix.
        actions: what is left to do to the model, once it is sure that the weights go in.
        notes: what the reader should know.
    """

    state: dict[str, Tensor]
    adapted: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    actions: list[Callable[[], object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class IncompleteError(UserError):
    """Parts are missing that every model of the family has."""


class Family(Protocol):
    @property
    def MODEL(self) -> type[nn.Module]: ...  # noqa: N802

    @property
    def LAYOUTS(self) -> tuple[str, ...]: ...  # noqa: N802  # that `to_layout` writes

    def from_layout(self, weights: Weights, layout: str) -> Converted: ...

    def options_of(self, converted: Converted) -> dict[str, Any]: ...

    def adapt(self, converted: Converted, model: Any) -> Adapted: ...

    def to_layout(self, model: Any, layout: str) -> dict[str, Tensor]: ...

    def untold(self, model: Any, /) -> dict[str, Any]: ...  # options that the tensors of another layout do not tell
