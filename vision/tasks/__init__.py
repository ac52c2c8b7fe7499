"""Tasks: LightningModules that bring a loss and metrics to a model. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vision.tasks.base import Task
    from vision.tasks.classification import Classification
    from vision.tasks.restoration import Restoration
    from vision.tasks.sequence import Sequence

_HOMES = {
    "Classification": "classification",
    "Restoration": "restoration",
    "Sequence": "sequence",
    "Task": "base",
}

__all__ = ["Classification", "Restoration", "Sequence", "Task"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
