"""Angles of sines and cosines: exact where float32 would not be."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from core.options import is_number


def precise(device: torch.device) -> torch.dtype:
    """float64; at place 5000 an angle in float32 is off by 4e-4. Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def geometric(steps: int, over: int, base: float, device: torch.device) -> Float[Tensor, " steps"]:
    """base ** (-i / over) for i = 0 .. steps - 1: the frequencies of a sinusoid, in radians a token."""
    return base ** (-torch.arange(steps, dtype=precise(device), device=device) / over)


def check_base(base: float) -> None:
    """Raises ValueError: a base that makes no wavelengths."""
    if not is_number(base) or base <= 1:
        raise ValueError(f"base={base!r} is not a finite number above 1; use e.g. 10000")
