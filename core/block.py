"""Blocks: attention and feed-forward network around a residual stream, and the parts that only residuals need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.cache import LayerCache
from core.dropout import Dropout
from core.norm import LayerNorm
from core.options import check_shares, is_number

NormOrder = Literal["pre", "post", "residual_post"]


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Rates of `depth` blocks, growing linearly from 0 to `rate` (Huang et al. 2016, section 3).

    Raises:
        ValueError: `rate` is not in 0 <= rate < 1.
    """
    check_shares(drop_path_rate=rate)
    return [rate * i / max(1, depth - 1) for i in range(depth)]


class DropPath(nn.Module):
    """Drops the whole residual branch of a sample (stochastic depth, Huang et al. 2016), while training.

    Args:
        rate: share of samples dropped, 0 <= rate < 1; the others are scaled by 1 / (1 - rate).
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        check_shares(drop_path=rate)
        self.rate = rate

    def forward(self, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        kept = torch.empty(x.shape[0], *[1] * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
        return x * (kept / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (CaiT, Touvron et al. 2021).

    Args:
        dim: channels.
        initial: value of the factors at the start, such as 1e-5.

    Raises:
        ValueError: no finite number.
    """

    def __init__(self, dim: int, initial: float = 1e-5) -> None:
        super().__init__()
        if not is_number(initial):
            raise ValueError(f"a layer scale of {initial!r} is no finite number; use e.g. 1e-5, or None for no layer scale")
        self.gamma = nn.Parameter(torch.full((dim,), float(initial)))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return x * self.gamma


class Block(nn.Module):
    """Attention, then feed-forward network, each with a norm and a residual.

    Args:
        dim: width of the tokens.
        attention: `(x, **context) -> x`, such as `Attention`.
        ffn: `x -> x`, such as `Mlp`.
        norm: makes each norm from `dim`.
        order: "pre": x + f(norm(x)), the default; "post": norm(x + f(x)) (Vaswani et al. 2017);
            "residual_post": x + norm(f(x)) (Swin v2).
        drop_path: rate of `DropPath` on both branches.
        layer_scale: initial value of a `LayerScale` on both branches; None is none.
        dropout: of both branches' output, while training.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        ffn: nn.Module,
        *,
        norm: Callable[[int], nn.Module] = LayerNorm,
        order: NormOrder = "pre",
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_order(order, ("pre", "post", "residual_post"))
        self.order = order
        self.norm1, self.attention = norm(dim), attention
        self.norm2, self.ffn = norm(dim), ffn
        self.scale1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.scale2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop = nn.Sequential(Dropout(dropout), DropPath(drop_path)) if dropout else DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b ... d"], **context: object) -> Float[Tensor, "b ... d"]:
        """Args: context: passed to the attention (`at`, `mask`, `causal`, ...)."""
        if self.order == "pre":
            x = x + self.drop(self.scale1(self.attention(self.norm1(x), **context)))
            return x + self.drop(self.scale2(self.ffn(self.norm2(x))))
        if self.order == "post":
            x = self.norm1(x + self.drop(self.scale1(self.attention(x, **context))))
            return self.norm2(x + self.drop(self.scale2(self.ffn(x))))
        x = x + self.drop(self.scale1(self.norm1(self.attention(x, **context))))
        return x + self.drop(self.scale2(self.norm2(self.ffn(x))))


def run_through(
    block: nn.Module, x: Float[Tensor, "b ... d"], *, checkpointing: bool, **context: Any
) -> Float[Tensor, "b ... d"]:
    """`block(x, **context)`. With checkpointing, its activations are not kept for the gradient but computed again when the
    backward pass comes to them (Chen et al. 2016)."""
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(block, x, use_reentrant=False, **context)
    return block(x, **context)


class CrossBlock(nn.Module):
    """Attention among the tokens, then to the memory, then a feed-forward network, each with a norm and a residual.

    Args:
        dim: width of the tokens.
        attention: `(x, **context) -> x`, such as `Attention`.
        cross_attention: `(x, memory, at=, memory_at=, mask=) -> x` (and `cache=`), such as `Attention` with `memory_dim`.
        ffn: `x -> x`, such as `Mlp`.
        norm: makes each norm from `dim`.
        order: "pre": x + f(norm(x)), the default; "post": norm(x + f(x)) (Vaswani et al. 2017).
        drop_path: rate of `DropPath` on the three branches.
        dropout: of the branches' output, while training.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        cross_attention: nn.Module,
        ffn: nn.Module,
        *,
        norm: Callable[[int], nn.Module] = LayerNorm,
        order: NormOrder = "pre",
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_order(order, ("pre", "post"))
        self.order = order
        self.norm1, self.attention = norm(dim), attention
        self.norm2, self.cross_attention = norm(dim), cross_attention
        self.norm3, self.ffn = norm(dim), ffn
        self.drop = nn.Sequential(Dropout(dropout), DropPath(drop_path)) if dropout else DropPath(drop_path)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m c"] | None = None,
        *,
        at: Float[Tensor, "..."] | None = None,
        memory_at: Float[Tensor, "..."] | None = None,
        memory_mask: Bool[Tensor, "*mask #n #m"] | None = None,
        cache: LayerCache | None = None,
        **context: object,
    ) -> Float[Tensor, "b n d"]:
        """Tokens attend each other, then the memory.

        Args:
            memory: None where the cache has its keys and values from an earlier call.
            at, memory_at: coordinates of the tokens and of the memory.
            memory_mask: which token may attend what of the memory: its padding above all, which `mask` knows nothing of.
            cache: this block's part of a `KeyValueCache`, for both attentions.
            context: passed to the attention among the tokens (`mask`, `causal`, ...).
        """
        memory_context: dict[str, object] = {"at": at, "memory_at": memory_at, "mask": memory_mask}
        if cache is not None:
            context, memory_context = context | {"cache": cache}, memory_context | {"cache": cache}
        if self.order == "pre":
            x = x + self.drop(self.attention(self.norm1(x), at=at, **context))
            x = x + self.drop(self.cross_attention(self.norm2(x), memory, **memory_context))
            return x + self.drop(self.ffn(self.norm3(x)))
        x = self.norm1(x + self.drop(self.attention(x, at=at, **context)))
        x = self.norm2(x + self.drop(self.cross_attention(x, memory, **memory_context)))
        return self.norm3(x + self.drop(self.ffn(x)))


def check_order(order: str, known: tuple[str, ...]) -> None:
    if order not in known:
        raise ValueError(f"order={order!r} is not a norm order here; use {' or '.join(map(repr, known))}")
