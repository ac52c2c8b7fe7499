"""Whether Python may compute with a tensor, and look at its numbers, beside what the model computes."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(x: Tensor) -> bool:
    """Other kinds of tensors only pretend to compute, and torch.compile would keep the result as a constant of its graph."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def asking_is_free(x: Tensor) -> bool:
    """Whether Python may look at numbers: a GPU would have to wait for it, torch.compile would break the graph, and other kinds
    of tensors only pretend to have some."""
    return x.device.type == "cpu" and is_plain(x)
