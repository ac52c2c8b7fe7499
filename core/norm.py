"""Norms over the channels of channels-last tokens; `BatchNorm` over the tokens is the classical comparison."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import LayerNorm, RMSNorm

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
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return x * torch.rsqrt(variance + self.eps) * self.weight


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
        """Args: real: True at tokens, False at padding, which comes out as it went in."""
        if real is None:
            return self.norm(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        y = x.clone()
        y[real] = self.norm(x[real]).to(x.dtype)
        return y
