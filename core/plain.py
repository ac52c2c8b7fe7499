"""Whether Python may compute with a tensor, and look at its numbers, beside what the model computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_plain(x: Tensor) -> bool:
    """Other kinds of tensors only pretend to compute, and torch.compile would keep the result as a constant of its graph."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def asking_is_free(x: Tensor) -> bool:
    """Whether Python may look at numbers: a GPU would have to wait for it, torch.compile would break the graph, and other kinds
    of tensors only pretend to have some."""
    return x.device.type == "cpu" and is_plain(x)


def any_kernel_serves(x: Tensor, *weights: Tensor) -> bool:
    """Whether a kernel that neither gradients (forward mode too) nor vmap, autocast or a trace knows may compute with these:
    plain numbers on a CPU."""
    return (
        asking_is_free(x)
        and x.layout == torch.strided
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights)))
        and all(type(weight) in (nn.Parameter, Tensor) and weight.device.type == "cpu" for weight in weights)
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and x.numel() > 0
    )
