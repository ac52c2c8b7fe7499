"""Feed-forward networks over channels-last tokens."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear, activation, Linear (Vaswani et al. 2017, eq. 2, with ReLU; ViT and most others with GELU).

    Args:
        dim: width of the tokens.
        hidden: width between the two.
        activation: such as nn.GELU (exact, erf) or nn.ReLU.
        dropout: after the activation, while training.
        bias: of both projections.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.activation = activation()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedMlp(nn.Module):
    """down(activation(gate(x)) · up(x)): GLU variants (Shazeer 2020); SwiGLU with nn.SiLU, GEGLU with nn.GELU.

    Args:
        dim, hidden, activation, dropout, bias: as `Mlp`. At hidden = 2/3 of an Mlp's, both have as many parameters.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[], nn.Module] = nn.SiLU,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias)  # gate first: one product for both
        self.activation = activation()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up))
