"""Models remember what they were built with, so that a checkpoint can hold it as plain values and build them again; and the
checks of options that many of them have, whose errors name the option."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
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


def is_number(value: Any) -> bool:
    """Whether it is a finite real number."""
    return isinstance(value, Real) and math.isfinite(value)


def check_sizes(least: int = 1, **sizes: Any) -> None:
    """Raises ValueError: an option that is no whole number of at least `least`."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise ValueError(f"{name}={size!r} is not one whole number; use {least} or more")
        if size < least:
            raise ValueError(f"{name}={size} is too small; use {least} or more")


def check_shares(**shares: Any) -> None:
    """Raises ValueError: an option, such as a dropout, that is no number from 0 up to, but not, 1."""
    for name, share in shares.items():
        if not is_number(share) or not 0 <= share < 1:
            raise ValueError(f"{name}={share!r} is not in 0 <= {name} < 1; use e.g. 0.1")


def check_makers(**makers: Any) -> None:
    """Raises ValueError: an option that should make a part and cannot be called, such as the name of a class as a text."""
    for name, maker in makers.items():
        if not callable(maker):
            raise ValueError(f"{name}={maker!r} makes nothing; give a class, or a function that makes the part, not its name")


def hidden_width(dim: int, **ratio: Any) -> int:
    """The width inside a feed-forward network: `dim` times the one ratio, rounded down.

    Raises:
        ValueError: a ratio that is no finite number, or leaves no width.
    """
    ((name, share),) = ratio.items()
    if not is_number(share) or not 1 <= dim * share < 2**31:
        raise ValueError(f"{name}={share!r} of dim={dim} is no width of a feed-forward network; use e.g. 4")
    return int(dim * share)
