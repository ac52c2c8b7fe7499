"""What all degradations share, and several of them one after the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from core.options import is_number
from vision.errors import UserError

Number = int | float
Range = Number | tuple[Number, Number]


class Degradation(ABC):
    """Spoils one picture; all its random numbers come from the generator that it is given.

    Attributes:
        scale: by how much the result is smaller.
        sigma: deviation of the noise on the scale 0..255 where it is fixed Gaussian noise and nothing else, else None.
    """

    scale: int = 1
    sigma: float | None = None

    @abstractmethod
    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h2 w2 c"]:
        """The spoiled picture.

        Args:
            clean: float32 in 0..1, 1 or 3 channels, sides multiples of ``scale``; not changed.
            rng: where the random numbers come from.

        Returns:
            float32; noise may leave 0..1.
        """

    @abstractmethod
    def __str__(self) -> str:
        """For people: what happens, with its strength."""


class Chain(Degradation):
    """One degradation after the other.

    Args:
        steps: in this order; at least one.

    Raises:
        UserError: no steps.
    """

    def __init__(self, steps: list[Degradation]) -> None:
        if not steps:
            raise UserError("steps of a Chain is empty; give at least one degradation")
        self.steps = steps
        self.scale = math.prod(step.scale for step in steps)
        self.sigma = steps[0].sigma if len(steps) == 1 else None

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h2 w2 c"]:
        for step in self.steps:
            clean = step(clean, rng)
        return clean

    def __str__(self) -> str:
        return ", then ".join(map(str, self.steps))


def checked_range(name: str, value: Range | Sequence[float], low: Number, high: Number) -> tuple[float, float]:
    """A fixed value v as (v, v), or a range (from, to); both ends within low..high.

    Raises:
        UserError: not one or two numbers, out of bounds, or the wrong way round.
    """
    ends = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(ends) != 2 or not all(map(is_number, ends)) or not low <= ends[0] <= ends[1] <= high:
        raise UserError(f"{name}={value!r} is out of range; use a number from {low:g} to {high:g}, or two in order: [from, to]")
    return float(ends[0]), float(ends[1])


def drawn(ends: tuple[float, float], rng: np.random.Generator) -> float:
    """Uniform in the range; a fixed value draws nothing."""
    return ends[0] if ends[0] == ends[1] else float(rng.uniform(*ends))


def described(ends: tuple[float, float]) -> str:
    return f"{ends[0]:g}" if ends[0] == ends[1] else f"{ends[0]:g} to {ends[1]:g}"
