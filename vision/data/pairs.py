"""Pairs of sequences in memory, and batches of them by length under a budget of symbols."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from vision.data.augment import hashed
from vision.data.loading import Fetched
from vision.vocabulary import PAD

# symbols, padding on the right, and how many of each row are real
Padded = tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]
PaddedSource = tuple[Int[Tensor, "b m"], Int[Tensor, " b"]]


class Pair(NamedTuple):
    """Two texts that mean the same."""

    source: str
    target: str


class Ragged:
    """Rows of unequal length, one after the other in one tensor."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.flat = np.fromiter(chain.from_iterable(rows), np.int64, int(self.lengths.sum()))

    def padded(self, rows: Int[np.ndarray, " b"]) -> Padded:
        """These rows side by side, and their lengths."""
        lengths = self.lengths[rows]
        places = np.arange(lengths.max())
        real = places < lengths[:, None]
        tokens = np.full(real.shape, PAD, np.int64)
        tokens[real] = self.flat[(self.starts[rows][:, None] + places)[real]]
        return torch.from_numpy(tokens), torch.from_numpy(lengths)


class PairBatches(Dataset):
    """A dataset whose items are whole batches: rows of like length, as many as a budget of symbols allows.

    A batch costs its rows times its longest side, padding included. Rows are sorted by that side, those of equal length in
    an order that depends only on (seed, epoch), and cut into as few batches as the budget allows, as equal as possible. Every
    epoch has the same cuts, hence the same number of batches, and each pair once.

    Keys are `(epoch, number)` in training, numbers elsewhere. A batch is `(source, target)`, each as `Padded`.

    Args:
        source, target: the rows.
        tokens: budget of a batch, at least the longest row.
        seed: of the order in training; None keeps the given order among rows of equal length.
        world: processes: the number of batches is a multiple of it, so that each takes as many. Some batches are halved for
            it; with fewer rows than processes the last one is repeated.
        bucket: lengths up to the next multiple of it count as equal: batches of more different rows, with more padding.
    """

    def __init__(
        self, source: Ragged, target: Ragged, tokens: int, *, seed: int | None = None, world: int = 1, bucket: int = 1
    ) -> None:
        self.source, self.target, self.seed = source, target, seed
        self.sample_count = len(source.lengths)  # what a report counts: an item here is a batch
        longest = np.maximum(source.lengths, target.lengths)
        self.sizes = np.maximum(longest, np.minimum(-(-longest // bucket) * bucket, tokens))
        self.ranges = even(cut_evenly(np.sort(self.sizes), tokens), world)
        self.ordered: tuple[int, Int[np.ndarray, " n"]] = (-1, np.arange(0))

    def __len__(self) -> int:
        return len(self.ranges)

    def order(self, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows by size."""
        if self.ordered[0] != epoch:
            rows = np.arange(len(self.sizes))
            if self.seed is not None:
                np.random.default_rng(int(hashed(self.seed, epoch)[0])).shuffle(rows)
            self.ordered = epoch, rows[np.argsort(self.sizes[rows], kind="stable")]
        return self.ordered[1]

    def rows(self, key: int | tuple[int, int]) -> Int[np.ndarray, " b"]:
        """Which pairs a batch has."""
        epoch, number = key if isinstance(key, tuple) else (0, key)
        start, end = self.ranges[number]
        return self.order(epoch)[start:end]

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[PaddedSource, Padded]:
        rows = self.rows(key)
        return self.source.padded(rows), self.target.padded(rows)

    def __getitems__(self, keys: Sequence[Any]) -> Fetched:
        """As a loader asks for one batch."""
        (key,) = keys
        source, target = self[key]
        return Fetched(source, (target,), [])


def cut(sizes: Int[np.ndarray, " n"], tokens: int) -> list[tuple[int, int]]:
    """Ranges of rows, sorted by size, each as long as `rows * largest size` stays within the budget."""
    ranges, start = [], 0
    while start < len(sizes):
        most = sizes[start : start + max(1, tokens // int(sizes[start]))]
        rows = max(1, int(np.searchsorted(most * np.arange(1, len(most) + 1), tokens, side="right")))
        ranges.append((start, start + rows))
        start += rows
    return ranges


def cut_evenly(sizes: Int[np.ndarray, " n"], tokens: int) -> list[tuple[int, int]]:
    """As few ranges as `cut` makes, by the smallest budget that makes no more: else the last one is a small rest."""
    best = cut(sizes, tokens)
    low, high = int(sizes.max(initial=1)), tokens
    while low < high:
        middle = (low + high) // 2
        tried = cut(sizes, middle)
        if len(tried) > len(best):
            low = middle + 1
        else:
            best, high = tried, middle
    return best


def even(ranges: list[tuple[int, int]], world: int) -> list[tuple[int, int]]:
    """A multiple of `world` ranges: the longest ones are halved, or the last one is repeated where none can be."""
    ranges = list(ranges)
    while ranges and len(ranges) % world:
        i = max(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0])
        start, end = ranges[i]
        middle = (start + end) // 2
        ranges[i : i + 1] = [(start, middle), (middle, end)] if middle > start else [(start, end)] * 2
    return ranges
