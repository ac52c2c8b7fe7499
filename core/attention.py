"""Attention: the only file with a softmax over scores.

`attend` is the fast path (torch's scaled dot product attention, or the plain product where that is faster), `weigh`
the plain path that it must equal, `Attention` the layer made from them. Masks are boolean, True = may attend; a row
that may attend nowhere gives zeros and finite gradients on every path.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from core.cache import LayerCache
from core.linear import Linear
from core.mask import causal as causal_mask
from core.options import check_shares
from core.plain import asking_is_free
from core.position import Position


def masked_softmax(scores: Float[Tensor, "*b q k"], mask: Bool[Tensor, "*m #q #k"] | None = None) -> Float[Tensor, "*b q k"]:
    """Softmax over the keys; masked keys weigh 0, and so does every key of a row that may attend nowhere."""
    if mask is None:
        return scores.softmax(dim=-1)
    if scores.dtype == torch.float16:
        scores = scores.clamp(-65504.0, 65504.0)  # an overflow at a masked place would become inf - inf
    # An empty row of -inf would be NaN: it keeps its scores, and its weights are zeroed. No step ever makes a NaN, so that
    # the gradient is finite and anomaly detection has nothing to report. Adding is 5-10x faster than filling on a CPU.
    live = any_along(mask, -1)[..., None]
    weights = (scores + forbid(~mask & live, scores.dtype)).softmax(dim=-1)
    return weights if asking_is_free(live) and bool(live.all()) else weights * live


def weigh(
    q: Float[Tensor, "b heads q e"],
    k: Float[Tensor, "b kv_heads k e"],
    *,
    bias: Float[Tensor, "*c #q #k"] | None = None,
    mask: Bool[Tensor, "*m #q #k"] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "b heads q k"]:
    """The attention weights themselves: for looking at, and the plain path of `attend` (same arguments, same errors)."""
    check_heads(q, k, k)
    check_mask(q, k, mask)
    check_bias(q, k, bias)
    if causal:
        mask = and_causal(mask, q, k)
    (k,) = silence(mask, k)
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ repeat_heads(k, q.shape[1]).mT
    return masked_softmax(scores if bias is None else scores + bias.to(scores.dtype), mask)


def attend(
    q: Float[Tensor, "b heads q e"],
    k: Float[Tensor, "b kv_heads k e"],
    v: Float[Tensor, "b kv_heads k f"],
    *,
    bias: Float[Tensor, "*c #q #k"] | None = None,
    mask: Bool[Tensor, "*m #q #k"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b heads q f"]:
    """softmax(q kᵀ · scale + bias) v over the keys that `mask` allows (Vaswani et al. 2017, eq. 1).

    Args:
        q, k, v: queries, keys, values. `heads` is a multiple of `kv_heads`: key head i serves the queries' heads
            `i * g .. i * g + g - 1`, g = heads / kv_heads (Ainslie et al. 2023).
        bias: finite numbers added to the scores; `q k`, `heads q k` or `b heads q k` (1s broadcast).
        mask: `q k` or `b heads q k` (1s broadcast), True = may attend. Any finite number at a masked place changes
            nothing; keys and values that no query of their heads may attend may hold NaN.
        causal: a query sees no later key; with q != k the last query stands at the last key.
        scale: of the scores; None is e ** -0.5.
        dropout: share of the weights dropped. It acts whenever it is not 0: pass 0 in evaluation.

    Raises:
        ValueError: heads, widths or lengths that do not fit each other; a mask that is not boolean; a mask or bias of
            another shape.
    """
    check_heads(q, k, v)
    check_mask(q, k, mask)
    check_bias(q, k, bias)
    if causal and (mask is not None or bias is not None or q.shape[2] != k.shape[2]):
        mask, causal = and_causal(mask, q, k), False  # SDPA's own is for equal lengths and nothing beside it
    if bias is not None and bias.requires_grad and torch.is_grad_enabled() and q.device.type == "cpu":
        # SDPA's step with a trainable bias takes 1.2-1.7x the plain product's time on a CPU (bench's case bias).
        weights = weigh(q, k, bias=bias, mask=mask, causal=causal, scale=scale)
        (v,) = silence(mask, v)
        return F.dropout(weights, dropout, training=dropout > 0) @ repeat_heads(v, q.shape[1])
    k, v = silence(mask, k, v)
    if bias is not None:
        # On a CPU SDPA takes 1.3-9x the time with a raw Parameter (the same case), and as much with three axes.
        bias = bias.to(q.dtype) if torch.is_grad_enabled() else bias.to(q.dtype).detach()
        bias = bias[None] if bias.ndim == 3 else bias
        # Added: to fill the bias of all windows or rows in takes 10x as long.
        mask = bias if mask is None else bias + forbid(~mask, bias.dtype)
    # Not a flag that is computed: it may be a symbol under torch.compile, which SDPA refuses.
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, **grouped)


def and_causal(mask: Bool[Tensor, "..."] | None, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
    allowed = causal_mask(q.shape[2], k.shape[2], device=q.device)
    return allowed if mask is None else mask & allowed


def silence(mask: Bool[Tensor, "*m #q #k"] | None, *xs: Float[Tensor, "b kv_heads k ..."]) -> tuple[Tensor, ...]:
    """Keys, values: zero where no query of their heads may attend, since a weight of 0 times NaN would be NaN."""
    if mask is None or (asking_is_free(mask) and all(abs(x.detach().sum().item()) < 1e18 for x in xs)):
        return xs  # all finite, and no garbage whose score overflows: a sum costs a third of a copy
    live = any_along(mask, -2)
    if live.ndim == 3 and live.shape[1] > 1:
        live = any_along(live.unflatten(1, (xs[0].shape[1], -1)), 2)
    return tuple(torch.where(live[..., None], x, 0.0) for x in xs)


def forbid(blocked: Bool[Tensor, "*m"], dtype: torch.dtype) -> Float[Tensor, "*m"]:
    """What forbids when it is added to scores: -inf where blocked, else 0."""
    return torch.zeros_like(blocked, dtype=dtype).masked_fill(blocked, float("-inf"))


def any_along(mask: Bool[Tensor, "..."], dim: int) -> Bool[Tensor, "..."]:
    """`mask.any(dim)`, which takes up to 60 times as long on a CPU."""
    if torch.compiler.is_compiling() or not mask.shape[dim]:
        return mask.any(dim)  # Inductor makes C++ of the other form that does not compile
    return mask.view(torch.uint8).amax(dim).view(torch.bool)


def repeat_heads(x: Float[Tensor, "b kv_heads k e"], heads: int) -> Float[Tensor, "b heads k e"]:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} of shape {tuple(x.shape)} is not b heads n e; split the heads off the width first")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)} differ in batch or width; make both equal")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k of shape {tuple(k.shape)} and v of shape {tuple(v.shape)} differ; give one value for each key")
    check_groups(q.shape[1], k.shape[1])


def check_groups(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; use kv_heads that divide heads")


def check_mask(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; masks are boolean, True = may attend: use mask == 0 or mask.bool()")
    if mask.ndim not in (2, 4):
        raise ValueError(f"mask of shape {tuple(mask.shape)} is neither q k nor b heads q k; use mask[:, None] for b q k")
    check_broadcast("mask", mask, (*q.shape[:3], k.shape[2]))


def check_bias(q: Tensor, k: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        return
    if bias.ndim not in (2, 3, 4) or not bias.is_floating_point():
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} and dtype {bias.dtype} is not a float q k, heads q k or b heads q k; "
            f"booleans go to mask"
        )
    check_broadcast("bias", bias, (*q.shape[:3], k.shape[2]))


def check_broadcast(name: str, x: Tensor, full: tuple[int, ...]) -> None:
    if any(have not in (1, want) for have, want in zip(x.shape, full[-x.ndim :], strict=True)):
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to b heads q k = {full}; use those sizes, or 1 where shared"
        )


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
        scale: of the scores; None is head_dim ** -0.5, or what `qk_norm` asks for (`CosineScores`: 1). T5 uses 1.

    Raises:
        ValueError: heads that do not split the width, kv_heads that do not divide heads, dropout outside 0 <= p < 1.
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
        check_groups(heads, kv_heads)
        check_shares(dropout=dropout)
        self.dim, self.memory_dim = dim, memory_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        kv_dim = kv_heads * self.head_dim
        if memory_dim is None:
            self.qkv: nn.Linear = Linear(dim, dim + 2 * kv_dim, bias=bias)
        else:
            self.q = Linear(dim, dim, bias=bias)
            self.kv = Linear(memory_dim, 2 * kv_dim, bias=bias)
        self.out: nn.Linear = Linear(dim, dim, bias=bias)
        self.position, self.qk_norm = position, qk_norm
        self.dropout, self.scale = dropout, getattr(qk_norm, "scale", None) if scale is None else scale

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m c"] | None = None,
        *,
        at: Float[Tensor, "*places axes"] | None = None,
        memory_at: Float[Tensor, "*memory_places axes"] | None = None,
        mask: Bool[Tensor, "*mask #n #m"] | None = None,
        causal: bool = False,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Tokens attend each other, or the memory.

        Args:
            at, memory_at: coordinates of the tokens and of the memory (`core.coordinates`); positions need them.
            mask: `n m` or `b heads n m` (1s broadcast), True = may attend.
            causal: a token sees no later one.
            cache: what earlier calls left for these tokens: they attend its keys too (`mask` counts them, `at` does not),
                and a memory is needed by the first call only.

        Raises:
            ValueError: tokens or memory of another width, a memory missing or in excess, coordinates missing, or as `attend`.
        """
        q, k, v, bias = self.project(x, memory, at, memory_at, cache)
        k_at = self.keys_at(at, memory_at, cache)
        dropout = self.dropout if self.training else 0.0
        if self.position is not None and at is not None and k_at is not None and "value" in self.position.hooks:
            # What the position adds to the output depends on the weights: they must be at hand.
            weights = weigh(q, k, bias=bias, mask=mask, causal=causal, scale=self.scale)
            weights = F.dropout(weights, dropout, training=self.training)
            (v,) = silence(and_causal(mask, q, k) if causal else mask, v)
            y = weights @ repeat_heads(v, self.heads) + self.position.value(weights, at, k_at)
        else:
            y = attend(q, k, v, bias=bias, mask=mask, causal=causal, scale=self.scale, dropout=dropout)
        return self.out(y.transpose(1, 2).flatten(2))

    def look(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m c"] | None = None,
        *,
        at: Float[Tensor, "*places axes"] | None = None,
        memory_at: Float[Tensor, "*memory_places axes"] | None = None,
        mask: Bool[Tensor, "*mask #n #m"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "b heads n m"]:
        """The attention weights that `forward` uses for the same arguments, without dropout: where each token looks."""
        q, k, _, bias = self.project(x, memory, at, memory_at)
        return weigh(q, k, bias=bias, mask=mask, causal=causal, scale=self.scale)

    def project(
        self,
        x: Tensor,
        memory: Tensor | None,
        at: Tensor | None,
        memory_at: Tensor | None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Tensor, "b heads n e"], Float[Tensor, "b kv_heads m e"], Float[Tensor, "b kv_heads m e"], Tensor | None]:
        """Queries, keys and values, normed and turned by their place, and the bias of the scores."""
        self.check(x, memory, cache)
        if self.memory_dim is None:
            q, k, v = self.split(self.qkv(x)).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        elif cache is None:
            q, (k, v) = self.split(self.q(x)), self.of_memory(memory)
        else:
            q, (k, v) = self.split(self.q(x)), cache.once(lambda: self.of_memory(memory))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        bias = None
        if self.position is not None and not self.position.hooks <= {"embed"}:
            k_at = at if self.memory_dim is None else memory_at  # of the new keys: the cached ones are turned already
            if at is None or k_at is None:
                kind, missing = type(self.position).__name__, "at" if at is None else "memory_at"
                raise ValueError(f"{kind} needs to know where the tokens are; pass {missing}=line(n) or {missing}=grid(h, w)")
            all_at = k_at if cache is None or self.memory_dim is not None else cache.at
            bias = self.position.bias(q, at, all_at)  # of queries not yet turned: else Shaw beside Rotary sees absolute places
            q, k = self.position.rotate(q, at), self.position.rotate(k, k_at)
        if cache is not None and self.memory_dim is None:
            k, v = cache.extend(k, v)
        return q, k, v, bias

    def split(self, x: Float[Tensor, "b n _"]) -> Float[Tensor, "b h n e"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # a tenth of a decoding step less than einops

    def of_memory(self, memory: Float[Tensor, "b m c"] | None) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory, neither normed nor turned."""
        k, v = self.split(self.kv(memory)).split(self.kv_heads, dim=1)
        return k, v

    def keys_at(self, at: Tensor | None, memory_at: Tensor | None, cache: LayerCache | None) -> Tensor | None:
        """Where all the keys are."""
        if self.memory_dim is not None:
            return memory_at
        return at if cache is None else cache.at

    def check(self, x: Tensor, memory: Tensor | None, cache: LayerCache | None) -> None:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"tokens of shape {tuple(x.shape)} are not b n {self.dim}; use tokens as wide as dim={self.dim}")
        if self.memory_dim is None and memory is not None:
            raise ValueError("self-attention takes no memory; build Attention(..., memory_dim=...) for cross-attention")
        if self.memory_dim is not None and memory is None and (cache is None or cache.cross is None):
            raise ValueError("cross-attention (memory_dim is set) needs a memory; pass memory=...")
        if memory is not None and (memory.shape[::2] != (len(x), self.memory_dim) or memory.ndim != 3):
            raise ValueError(
                f"memory of shape {tuple(memory.shape)} is not {len(x)} m {self.memory_dim}; use the tokens' batch and memory_dim"
            )


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
    """Scores are cosines times a learned temperature per head (Swin v2, Liu et al. 2022, eq. 2).

    Args:
        heads: query heads.
        initial, largest: temperature at the start and its bound (the exponential of `logit_scale`).
    """

    scale = 1.0  # of the scores, instead of e ** -0.5

    def __init__(self, heads: int, *, initial: float = 10.0, largest: float = 100.0) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), initial).log())
        self.largest = largest

    def forward(self, q: Float[Tensor, "b h n e"], k: Float[Tensor, "b g m e"]) -> tuple[Tensor, Tensor]:
        temperature = self.logit_scale.clamp(max=math.log(self.largest)).exp()
        eps = max(1e-12, torch.finfo(k.dtype).tiny)  # 1e-12 is 0 in float16, which makes NaN of a key of zeros
        return F.normalize(q, dim=-1, eps=eps) * temperature, F.normalize(k, dim=-1, eps=eps)
