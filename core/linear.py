"""The product of tokens and weights: torch's, and on a CPU without gradient a faster one where that was measured."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from core.plain import any_kernel_serves

FEW = range(2, 5)  # rows for which the transposed product pays; of 8 torch's is as fast with weights in the processor's cache
MANY = range(32, 257)  # rows for which oneDNN's product pays; of 577, as an image of 384 pixels has, it takes a sixth longer
WIDE = 384  # fewer columns are read so fast that the weight's way into oneDNN's order costs more
ONEDNN = torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.backends.mkldnn.is_available()  # with AVX-512 no gain


def linear(
    x: Float[Tensor, "*b d"], weight: Float[Tensor, "e d"], bias: Float[Tensor, " e"] | None = None
) -> Float[Tensor, "*b e"]:
    """x weightᵀ + bias: `F.linear` by the kernel that takes the least time, at several threads.

    Figures: docs/performance.md, "Products".
    """
    # The number of rows comes first: asking for all of it at each product took 5 % of a decoding step
    rows = (
        0 if torch.compiler.is_compiling() or torch.jit.is_tracing() or not (x.ndim and x.numel()) else x.numel() // x.shape[-1]
    )
    if rows in FEW and allows(x, weight, bias):
        return of_few_rows(x, weight, bias)
    if rows in MANY and ONEDNN and weight.shape[-1] >= WIDE and torch._C._get_mkldnn_enabled() and allows(x, weight, bias):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def allows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether another kernel may be taken: in float32 at several threads, for weights as they lie in memory.

    What does not fit goes to torch's Linear, which says so.
    """
    parts = (weight,) if bias is None else (weight, bias)
    return (
        any_kernel_serves(x, *parts)
        and weight.ndim == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
        and x.dtype == torch.float32
        and torch.get_num_threads() > 1
    )


def of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The transposed product, weight xᵀ: all threads read the weights, which one alone does for x weightᵀ of so few rows."""
    y = (weight @ x.reshape(-1, x.shape[-1]).mT).mT
    return (y if bias is None else y + bias).contiguous().view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """torch's Linear, by `linear`."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        return linear(x, self.weight, self.bias)


if ONEDNN:  # so that torch's counter sees the work

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def count_flops(x: torch.Size, weight: torch.Size, *_: object, out_shape: torch.Size, **__: object) -> int:
        return 2 * out_shape.numel() * weight[1]
