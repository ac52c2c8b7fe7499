"""Feed-forward networks over channels-last tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.convolution import Conv3x3, convolve
from core.dropout import Dropout


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
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.activation = activation()
        self.dropout = Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=bias)

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
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias)  # gate first: one product for both
        self.activation = activation()
        self.dropout = Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up))


class GatedConvFfn(nn.Module):
    """down(GELU(gate) · value), gate and value by a 1x1 and a depthwise 3x3 convolution (Restormer, Zamir et al. 2022, eq. 2).

    Over channels-last maps. `forward` runs the hidden channels in chunks where their maps would outgrow the cache and
    no gradient needs them; `plain` is the formula as it is written.

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
        self.up = nn.Linear(dim, 2 * hidden, bias=bias)  # gate first
        self.depthwise = Conv3x3(2 * hidden, 2 * hidden, depthwise=True, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        if x.ndim != 4 or x.shape[-1] != self.dim:
            raise ValueError(f"map of shape {tuple(x.shape)} is not b h w {self.dim}; use channels-last maps as wide as dim")
        return self.in_chunks(x, self.hidden if torch.is_grad_enabled() else self.at_once(x[..., 0].numel()))

    def at_once(self, pixels: int) -> int:
        """Hidden channels that `forward` works on at once, for so many pixels, where no gradient is asked for."""
        return self.hidden if pixels <= 4096 else min(self.hidden, 64)

    def plain(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
        """What `forward` must equal, step by step."""
        gate, value = self.depthwise(self.up(x)).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * value)

    def in_chunks(self, x: Float[Tensor, "b h w d"], size: int) -> Float[Tensor, "b h w d"]:
        """`size` hidden channels at a time: their maps stay in the cache and never exist all at once."""
        parts = (gated_maps(x, *weights) for weights in self.chunks(size))
        y = next(parts)
        for part in parts:
            y.add_(part)
        return y if self.down.bias is None else y + self.down.bias

    def chunks(self, size: int) -> Iterator[tuple[Any, ...]]:
        """The weights of `size` hidden channels after the other, as `gated_maps` takes them.

        Zeros round the hidden channels up to 16, a vector of the processor, where they add less than a sixteenth: 127
        are slower than 128.
        """
        extra = -self.hidden % 16
        extra = extra if 16 * extra < self.hidden else 0
        for first in range(0, self.hidden, size):
            own, zeros = slice(first, first + size), extra if first + size >= self.hidden else 0
            up, up_bias, depthwise, depthwise_bias = (
                None if weight is None else pad_rows(weight.unflatten(0, (2, self.hidden))[:, own], zeros).flatten(0, 1)
                for weight in (self.up.weight, self.up.bias, self.depthwise.weight, self.depthwise.bias)
            )
            down = self.down.weight[:, own]
            yield up, up_bias, depthwise, depthwise_bias, F.pad(down, (0, zeros)) if zeros else down


def pad_rows(pairs: Float[Tensor, "two n *rest"], zeros: int) -> Float[Tensor, "two m *rest"]:
    return F.pad(pairs, (0, 0) * (pairs.ndim - 2) + (0, zeros)) if zeros else pairs


def gated_maps(
    x: Float[Tensor, "b h w d"],
    up: Float[Tensor, "two_n d"],
    up_bias: Float[Tensor, " two_n"] | None,
    depthwise: Float[Tensor, "two_n 1 3 3"],
    depthwise_bias: Float[Tensor, " two_n"] | None,
    down: Float[Tensor, "d n"],
) -> Float[Tensor, "b h w d"]:
    maps = convolve(F.linear(x, up, up_bias), depthwise, depthwise_bias, groups=len(depthwise))
    gate, value = maps.chunk(2, dim=-1)
    return F.linear(F.gelu(gate) * value, down)
