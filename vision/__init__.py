"""The Transformer toolkit for vision. Names are imported when they are first used: `import vision` loads nothing heavy."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "create_model": "vision.create",
    "list_models": "vision.models.names",
    "load_model": "vision.weights",
    "load_weights": "vision.weights",
    "optimize": "vision.folding",
    "restore": "vision.inference",
    "save_weights": "vision.weights",
}
_MODULES = ("data", "models", "tasks", "weights")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"vision.{name}")
    raise AttributeError(f"module 'vision' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
