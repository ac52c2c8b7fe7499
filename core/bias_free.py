"""The bias-free norm by LayerNorm's kernel: one pass over the tokens instead of five."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def bias_free_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], eps: float) -> Float[Tensor, "*b d"]:
    """x / sqrt(var(x) + eps) · weight, as x = (x - mean) + mean: LayerNorm, plus mean / sqrt(var(x) + eps) · weight."""
    return BiasFree.apply(x, weight, eps)


def plain_bias_free_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], eps: float) -> Float[Tensor, "*b d"]:
    """What `bias_free_norm` must equal, and what a compiler fuses by itself."""
    return x * torch.rsqrt(x.var(dim=-1, keepdim=True, unbiased=False) + eps) * weight


class BiasFree(torch.autograd.Function):
    """LayerNorm's kernel gives mean and 1 / deviation too, but without their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, None, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return torch.addcmul(y, mean * rstd, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], False]
        grad = grad.contiguous()
        x_grad, weight_grad, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, rstd, weight, None, wanted
        )
        ratio = mean * rstd  # what was added, times weight
        if wanted[0]:  # its derivative by x is rstd / d · (1 - ratio · (x - mean) · rstd)
            flow = (grad @ weight)[..., None] * rstd / len(weight)
            x_grad = x_grad.add_(flow * (1 + ratio.square())).addcmul_(x, -flow * ratio * rstd)
        if wanted[1]:
            weight_grad = weight_grad + ratio.flatten() @ grad.flatten(0, -2)
        return x_grad, weight_grad, None
