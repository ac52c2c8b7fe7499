"""Boolean attention masks: True = may attend, everywhere; combined with `&`. Shapes broadcast to `b heads q k`."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def causal(q: int, k: int | None = None, *, device: torch.device | None = None) -> Bool[Tensor, "q k"]:
    """Each query sees the keys up to its own place; the last query stands at the last key (lower-right alignment).

    With `q < k` the queries are the last ones of `k` places (a chunk decoded after a cache). With `q > k` the first
    queries stand before every key: their rows are empty and attention gives zeros there.
    """
    k = q if k is None else k
    return torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q)


def padding(lengths: Int[Tensor, " b"], n: int, *, left: bool = False) -> Bool[Tensor, "b 1 1 n"]:
    """Keys that are tokens, not padding.

    Args:
        lengths: tokens in each row, 0..n; 0 gives an empty row (attention is zero there).
        n: the padded length.
        left: the padding stands before the tokens, as for batched generation.

    Raises:
        ValueError: a length outside 0..n (not looked at under torch.compile).
    """
    if not torch.compiler.is_compiling() and lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > n):
        raise ValueError(f"lengths from {int(lengths.min())} to {int(lengths.max())} do not fit n={n}; use 0..n")
    places = torch.arange(n, device=lengths.device)
    real = places >= n - lengths[:, None] if left else places < lengths[:, None]
    return real[:, None, None, :]


def same_region(q_region: Int[Tensor, "*b q"], k_region: Int[Tensor, "*b k"] | None = None) -> Bool[Tensor, "..."]:
    """Query and key belong to the same region: windows that a shift has cut, documents packed in one row.

    Returns:
        `q k` for regions shared by the batch, `b 1 q k` for regions of each row.
    """
    k_region = q_region if k_region is None else k_region
    same = q_region[..., :, None] == k_region[..., None, :]
    return same if same.ndim == 2 else same[:, None]
