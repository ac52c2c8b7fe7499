"""Norms over the channels of channels-last tokens; `BatchNorm` over the tokens is the classical comparison."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import LayerNorm, RMSNorm

from core.bias_free import bias_free_norm, plain_bias_free_norm

__all__ = ["BatchNorm", "BiasFreeNorm", "LayerNorm", "RMSNorm"]


class BiasFreeNorm(nn.Module):
    """x / sqrt(var(x) + eps) · weight, the mean left in (Restormer's bias-free norm, Zamir et al. 2022).

    Neither LayerNorm without bias (which subtracts the mean) nor RMSNorm (which divides by the root mean square).
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # 256 squared is too much for float16
        norm = plain_bias_free_norm if torch.compiler.is_compiling() else bias_free_norm
        return norm(wide, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class BatchNorm(nn.Module):
    """Batch normalisation over all tokens of all rows (Ioffe & Szegedy 2015), padding left out of the statistics.

    Args:
        dim: channels.
        eps, momentum: as torch.nn.BatchNorm1d.
    """

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, eps=eps, momentum=momentum)

    def forward(self, x: Float[Tensor, "*b d"], real: Bool[Tensor, "*b"] | None = None) -> Float[Tensor, "*b d"]:
        """Args: real: True at tokens, False at padding, which comes out as it went in.

        Raises:
            ValueError: a single token in training: it is its own mean.
        """
        tokens = x.reshape(-1, x.shape[-1]) if real is None else x[real]
        if self.training and len(tokens) < 2:
            raise ValueError(f"{len(tokens)} tokens have no batch statistics; use 2 or more, LayerNorm, or eval()")
        normed = self.norm(tokens).to(x.dtype)
        return normed.reshape(x.shape) if real is None else x.masked_scatter(real[..., None], normed)
