"""Feed-forward networks over channels-last tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.convolution import Conv1x1, Conv3x3, convolve, pointwise
from core.dropout import Dropout
from core.linear import Linear
from core.tiles import WHOLE, Area, by_tiles, pays


class Mlp(nn.Module):
    """Linear, activation, Linear (Vaswani et al. 2017, eq. 2, with ReLU; ViT and most others with GELU).

    Args:
        dim: width of the tokens.
        hidden: width between the two.
        activation: such as nn.GELU (exact, erf) or nn.ReLU.
        dropout: after the activation, while training.
        bias: of both projections.

    Raises:
        ValueError: nothing between the two.
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
        if hidden < 1:
            raise ValueError(f"hidden={hidden} is no width; use 1 or more, such as {4 * dim}")
        self.up = Linear(dim, hidden, bias=bias)
        self.activation = activation()
        self.dropout = Dropout(dropout)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.down(self.dropout(self.activate(self.up(x))))

    def activate(self, hidden: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
        """The activation; GELU is written over `hidden` where no gradient and no hook needs it any more: on a CPU fresh memory
        for it costs a ViT up to a tenth of its time."""
        is_seen = self.up._forward_hooks or self.activation._forward_hooks or self.activation._forward_pre_hooks
        if type(self.activation) is not nn.GELU or hidden.requires_grad or is_seen or torch.compiler.is_compiling():
            return self.activation(hidden)
        return torch.ops.aten.gelu_(hidden, approximate=self.activation.approximate)


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
        self.gate_up = Linear(dim, 2 * hidden, bias=bias)  # gate first: one product for both
        self.activation = activation()
        self.dropout = Dropout(dropout)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up))


class GatedConvFfn(nn.Module):
    """down(GELU(gate) · value), gate and value by a 1x1 and a depthwise 3x3 convolution (Restormer, Zamir et al. 2022, eq. 2).

    Over channels-last maps, of which `forward` takes large ones tile by tile; `plain` is the formula as it is written.

    Args:
        dim: channels of the map.
        hidden: channels of the gate, and of the value.
        bias: of all convolutions.

    Raises:
        ValueError: no hidden channels, a map of other than `dim` channels.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden={hidden} channels are none; use 1 or more, such as {2 * dim}")
        self.dim, self.hidden = dim, hidden
        self.up = Conv1x1(dim, 2 * hidden, bias=bias)  # gate first
        self.depthwise = Conv3x3(2 * hidden, 2 * hidden, depthwise=True, bias=bias)
        self.down = Conv1x1(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        if x.ndim != 4 or x.shape[-1] != self.dim:
            raise ValueError(f"map of shape {tuple(x.shape)} is not b h w {self.dim}; use channels-last maps as wide as dim")
        weights = self.weights()
        y = by_tiles(lambda seen, inner: (gated_conv(seen, weights, inner),), x)[0] if pays(x) else gated_conv(x, weights)
        return y if self.down.bias is None else y + self.down.bias

    def plain(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        """What `forward` must equal, step by step."""
        gate, value = self.depthwise(self.up(x)).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * value)

    def weights(self) -> GatedWeights:
        """As `gated_conv` takes them.

        Zeros round the hidden channels up to 16, a vector of the processor, where they add less than a sixteenth: 127
        are slower than 128.
        """
        zeros = -self.hidden % 16
        zeros = zeros if 16 * zeros < self.hidden else 0
        up_bias, depthwise_bias = (
            None if bias is None else pad_rows(bias, zeros) for bias in (self.up.bias, self.depthwise.bias)
        )
        up, depthwise = pad_rows(self.up.weight, zeros), pad_rows(self.depthwise.weight, zeros)
        return GatedWeights(
            up, up_bias, depthwise, depthwise_bias, F.pad(self.down.weight, (0, zeros)) if zeros else self.down.weight
        )


class GatedWeights(NamedTuple):
    """Weights of `down(GELU(gate) · value)`, the gate's before the value's; without the bias of down."""

    up: Float[Tensor, "two_n d"]
    up_bias: Float[Tensor, " two_n"] | None
    depthwise: Float[Tensor, "two_n 1 3 3"]
    depthwise_bias: Float[Tensor, " two_n"] | None
    down: Float[Tensor, "d n"]


def pad_rows(pairs: Float[Tensor, "two_h *rest"], zeros: int) -> Float[Tensor, "two_n *rest"]:
    """Rows of zeros after both halves."""
    if not zeros:
        return pairs
    return F.pad(pairs.unflatten(0, (2, -1)), (0, 0) * (pairs.ndim - 1) + (0, zeros)).flatten(0, 1)


def gated_conv(x: Float[Tensor, "b h w d"], weights: GatedWeights, inner: Area = WHOLE) -> Float[Tensor, "b h2 w2 d"]:
    """Args: inner: the pixels whose result is wanted."""
    maps = convolve(pointwise(x, weights.up, weights.up_bias), *weights[2:4], groups=len(weights.depthwise))
    gate, value = maps[:, *inner].chunk(2, dim=-1)
    gated = F.gelu(gate) * value if torch.is_grad_enabled() else F.gelu(gate).mul_(value)
    return pointwise(gated, weights.down)
