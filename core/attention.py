"""Attention: the only file with a softmax over scores.

`attend` is the fast path (torch's scaled dot product attention, or the plain product where that is faster), `weigh`
the plain path that it must equal, `Attention` the layer made from them. Masks are boolean, True = may attend; a row
that may attend nowhere gives zeros and finite gradients on every path.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from core.mask import causal as causal_mask

if TYPE_CHECKING:
    from core.position import Position


def masked_softmax(scores: Float[Tensor, "*b q k"], mask: Bool[Tensor, "*m #q #k"] | None = None) -> Float[Tensor, "*b q k"]:
    """Softmax over the keys; masked keys weigh 0, and so does every key of a row that may attend nowhere."""
    if mask is None:
        return scores.softmax(dim=-1)
    # An empty row is -inf everywhere and its softmax NaN. Filling scores and weights both keeps the gradient finite.
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


def weigh(
    q: Float[Tensor, "b heads q e"],
    k: Float[Tensor, "b kv_heads k e"],
    *,
    bias: Float[Tensor, "*c #heads #q #k"] | None = None,
    mask: Bool[Tensor, "*m #q #k"] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "b heads q k"]:
    """The attention weights themselves: for looking at, and as the plain path of `attend` (same arguments)."""
    check_heads(q, k)
    check_mask(q, k, mask)
    if causal:
        mask = and_causal(mask, q, k)
    k = silence(k, mask)
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ repeat_heads(k, q.shape[1]).mT
    return masked_softmax(scores if bias is None else scores + bias.to(scores.dtype), mask)


def attend(
    q: Float[Tensor, "b heads q e"],
    k: Float[Tensor, "b kv_heads k e"],
    v: Float[Tensor, "b kv_heads k f"],
    *,
    bias: Float[Tensor, "*c #heads #q #k"] | None = None,
    mask: Bool[Tensor, "*m #q #k"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b heads q f"]:
    """softmax(q kᵀ · scale + bias) v over the keys that `mask` allows (Vaswani et al. 2017, eq. 1).

    Args:
        q, k, v: queries, keys, values. `heads` is a multiple of `kv_heads`: key head i serves the queries' heads
            `i * g .. i * g + g - 1`, g = heads / kv_heads (Ainslie et al. 2023).
        bias: finite numbers added to the scores.
        mask: `q k` or `b heads q k` (1s broadcast), True = may attend. Keys that no query may attend may hold NaN.
        causal: a query sees no later key; with q != k the last query stands at the last key.
        scale: of the scores; None is e ** -0.5.
        dropout: share of the weights dropped. It acts whenever it is not 0: pass 0 in evaluation.

    Raises:
        ValueError: heads that do not divide, a mask that is not boolean or not `q k` / `b heads q k`.
    """
    check_heads(q, k)
    check_mask(q, k, mask)
    if bias is not None and bias.requires_grad and torch.is_grad_enabled() and q.device.type == "cpu":
        # SDPA's step with a trainable bias takes 1.5-1.7x the plain product's time on a CPU.
        weights = weigh(q, k, bias=bias, mask=mask, causal=causal, scale=scale)
        v = silence(v, mask)
        return F.dropout(weights, dropout, training=dropout > 0) @ repeat_heads(v, q.shape[1])
    k, v = silence(k, mask), silence(v, mask)
    if causal and (mask is not None or bias is not None or q.shape[-2] != k.shape[-2]):
        mask, causal = and_causal(mask, q, k), False
    if bias is not None:
        bias = bias.to(q.dtype)  # a raw Parameter as the mask of SDPA is 4-9x slower than a plain tensor
        bias = bias.detach() if not torch.is_grad_enabled() else bias
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def silence(x: Float[Tensor, "b kv_heads k e"], mask: Bool[Tensor, "*m #q #k"] | None) -> Float[Tensor, "b kv_heads k e"]:
    """Zero at the keys that no query may attend: a weight of 0 times NaN would be NaN."""
    if mask is None:
        return x
    live = mask.any(dim=-2)
    live = live.any(dim=1, keepdim=True) if live.ndim == 3 else live
    return x.masked_fill(~live[..., None], 0.0)


def and_causal(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    allowed = causal_mask(q.shape[-2], k.shape[-2], device=q.device)
    return allowed if mask is None else mask & allowed


def repeat_heads(x: Float[Tensor, "b kv_heads k e"], heads: int) -> Float[Tensor, "b heads k e"]:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def check_heads(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"heads={q.shape[1]} is not a multiple of kv_heads={k.shape[1]}; use kv_heads that divide heads")


def check_mask(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; masks are boolean, True = may attend: use mask == 0 or mask.bool()")
    if mask.ndim not in (2, 4):
        raise ValueError(f"mask of shape {tuple(mask.shape)} is neither q k nor b heads q k; use mask[:, None] for b q k")
    full = (*q.shape[:2], q.shape[2], k.shape[2])
    if any(m not in (1, n) for m, n in zip(mask.shape, full[-mask.ndim :], strict=True)):
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to b heads q k = {full}")


class Attention(nn.Module):
    """Multi-head attention over tokens: self-attention, or cross-attention when `memory_dim` is given.

    Args:
        dim: width of the tokens.
        heads: query heads; `dim` splits over them.
        kv_heads: key and value heads (1 = multi-query, fewer than `heads` = grouped); None is `heads`.
        memory_dim: width of the memory of cross-attention; None is self-attention.
        position: adds what it knows of places by rotation, bias or value (`core.position`).
        qk_norm: a part `(q, k) -> (q, k)` before the scores, such as `QKNorm` or `CosineScores`.
        bias: of the four projections.
        dropout: of the attention weights, while training.
        scale: of the scores; None is head_dim ** -0.5, T5 and `CosineScores` use 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        memory_dim: int | None = None,
        position: Position | None = None,
        qk_norm: nn.Module | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split over heads={heads}; {split_advice(dim, heads)}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; use kv_heads that divide heads")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        kv_dim = kv_heads * self.head_dim
        if memory_dim is None:
            self.qkv = nn.Linear(dim, dim + 2 * kv_dim, bias=bias)
        else:
            self.q = nn.Linear(dim, dim, bias=bias)
            self.kv = nn.Linear(memory_dim, 2 * kv_dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.is_cross = memory_dim is not None
        self.position, self.qk_norm = position, qk_norm
        self.dropout, self.scale = dropout, scale

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m c"] | None = None,
        *,
        at: Float[Tensor, "*places axes"] | None = None,
        memory_at: Float[Tensor, "*memory_places axes"] | None = None,
        mask: Bool[Tensor, "*mask #n #m"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "b n d"]:
        """Tokens attend each other, or the memory.

        Args:
            at, memory_at: coordinates of the tokens and of the memory (`core.coordinates`); positions need them.
            mask: `n m` or `b heads n m` (1s broadcast), True = may attend.
            causal: a token sees no later one.
        """
        q, k, v = self.project(x, memory)
        k_at = memory_at if self.is_cross else at
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        bias = None
        if self.position is not None:
            q, k = self.position.rotate(q, at), self.position.rotate(k, k_at)
            bias = self.position.bias(q, at, k_at)
        dropout = self.dropout if self.training else 0.0
        if self.position is not None and "value" in self.position.hooks:
            # What the position adds to the output depends on the weights: they must be at hand.
            weights = weigh(q, k, bias=bias, mask=mask, causal=causal, scale=self.scale)
            weights = F.dropout(weights, dropout, training=self.training)
            y = weights @ repeat_heads(silence(v, mask), self.heads) + self.position.value(weights, at, k_at)
        else:
            y = attend(q, k, v, bias=bias, mask=mask, causal=causal, scale=self.scale, dropout=dropout)
        return self.out(rearrange(y, "b h n e -> b n (h e)"))

    def project(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `b heads n e`, keys and values `b kv_heads m e`."""
        kv_dim = self.kv_heads * self.head_dim
        if self.is_cross:
            if memory is None:
                raise ValueError("cross-attention (memory_dim is set) needs a memory; pass memory=...")
            q, (k, v) = self.q(x), self.kv(memory).chunk(2, dim=-1)
        else:
            if memory is not None:
                raise ValueError("self-attention takes no memory; build Attention(..., memory_dim=...) for cross-attention")
            q, k, v = self.qkv(x).split([self.heads * self.head_dim, kv_dim, kv_dim], dim=-1)
        return tuple(rearrange(t, "b n (h e) -> b h n e", e=self.head_dim) for t in (q, k, v))


def split_advice(dim: int, heads: int) -> str:
    if heads < 1 or dim < 1:
        return "use positive sizes"
    below = dim - dim % heads
    divisors = [h for h in range(1, dim + 1) if dim % h == 0]
    nearest = min(divisors, key=lambda h: (abs(h - heads), -h))
    return f"use dim={below if below else heads} or heads={nearest}"


class QKNorm(nn.Module):
    """Normalises each head's queries and keys (Dehghani et al. 2023) with a norm of the head's width, e.g. LayerNorm."""

    def __init__(self, q_norm: nn.Module, k_norm: nn.Module) -> None:
        super().__init__()
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, q: Float[Tensor, "b h n e"], k: Float[Tensor, "b g m e"]) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)


class CosineScores(nn.Module):
    """Scores are cosines times a learned temperature per head (Swin v2, Liu et al. 2022, eq. 2): use with scale=1.

    Args:
        heads: query heads.
        initial, largest: temperature at the start and its bound (the exponential of `logit_scale`).
    """

    def __init__(self, heads: int, *, initial: float = 10.0, largest: float = 100.0) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), initial).log())
        self.largest = largest

    def forward(self, q: Float[Tensor, "b h n e"], k: Float[Tensor, "b g m e"]) -> tuple[Tensor, Tensor]:
        temperature = self.logit_scale.clamp(max=math.log(self.largest)).exp()
        return F.normalize(q, dim=-1) * temperature, F.normalize(k, dim=-1)
