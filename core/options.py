"""Models remember what they were built with, so that a checkpoint can hold it as plain values and build them again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def remember_options(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates an `__init__`: the arguments, defaults filled in, are kept as `self.options` (a dict by name).

    The outermost class wins: a subclass with a decorated `__init__` of its own keeps its own arguments.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)  # first: Python's own error about a wrong argument names the class and what was meant
        if type(self).__init__ is remembering:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            self.options = dict(list(bound.arguments.items())[1:])  # without self

    return remembering
