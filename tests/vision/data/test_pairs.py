"""Batches by length: within the budget, nothing lost, the same for a seed, and as many for each process."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from vision.data.loading import EpochSampler
from vision.data.pairs import PairBatches, Ragged, cut, cut_evenly, even
from vision.vocabulary import PAD


def ragged(lengths: list[int]) -> Ragged:
    """Row i holds the number i + 4, so often."""
    return Ragged([[i + 4] * length for i, length in enumerate(lengths)])


def batches(lengths: list[int], tokens: int = 40, **options) -> PairBatches:
    return PairBatches(ragged(lengths), ragged([length + 2 for length in lengths]), tokens, **options)


@pytest.fixture
def lengths() -> list[int]:
    return np.random.default_rng(0).integers(1, 15, 300).tolist()


def rows(data: PairBatches, epoch: int) -> list[list[int]]:
    return [data.rows((epoch, number)).tolist() for number in range(len(data))]


def test_padded_rows_against_a_loop() -> None:
    lists = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    tokens, real = Ragged(lists).padded(np.array([2, 0, 1]))
    assert tokens.tolist() == [[9, 10, PAD], [5, 6, 7], [8, PAD, PAD]]
    assert real.tolist() == [2, 3, 1]
    assert tokens.dtype == real.dtype == torch.int64


@pytest.mark.parametrize("bucket", [1, 4, 30])
def test_every_row_once_and_within_the_budget(lengths: list[int], bucket: int) -> None:
    data = batches(lengths, seed=0, bucket=bucket)
    for epoch in range(3):
        assert sorted(chain(*rows(data, epoch))) == list(range(300))
        for number in range(len(data)):
            (source, source_real), (target, target_real) = data[(epoch, number)]
            assert len(source) * max(source.shape[1], target.shape[1]) <= 40  # padding included
            assert source_real.max() == source.shape[1]
            assert torch.equal(target_real, source_real + 2)
            assert torch.equal(source != PAD, torch.arange(source.shape[1]) < source_real[:, None])


def test_the_order_depends_on_seed_and_epoch_only(lengths: list[int]) -> None:
    first = rows(batches(lengths, seed=0), 3)
    other = batches(lengths, seed=0)
    rows(other, 0)  # whatever was asked before
    assert rows(other, 3) == first
    assert rows(batches(lengths, seed=0), 4) != first
    assert rows(batches(lengths, seed=1), 3) != first
    assert [len(batch) for batch in rows(other, 4)] == [len(batch) for batch in first]


def test_batches_of_like_length_hold_little_padding(lengths: list[int]) -> None:
    data = batches(lengths, tokens=400, seed=0)
    real = sum(int(data[(0, n)][1][1].sum()) for n in range(len(data)))
    padded = sum(data[(0, n)][1][0].numel() for n in range(len(data)))
    at_random = -(-300 // len(data)) * max(lengths) * len(data)
    assert real / padded > 0.9 > real / at_random


def test_cuts_are_as_few_as_possible_and_even() -> None:
    sizes = np.sort(np.random.default_rng(1).integers(3, 30, 5000))
    greedy, evenly = cut(sizes, 2048), cut_evenly(sizes, 2048)
    assert len(evenly) == len(greedy)
    cost = [(end - start) * sizes[end - 1] for start, end in evenly]
    assert max(cost) <= 2048
    assert min(cost) > 0.8 * max(cost)  # no small rest, whose few symbols would weigh as much as a whole batch
    assert cut(np.array([7]), 3) == [(0, 1)]  # the data module refuses it before


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_process_takes_as_many_batches_and_none_is_lost(lengths: list[int], world: int) -> None:
    data = batches(lengths, seed=0, world=world)
    assert len(data) % world == 0
    shares = []
    for rank in range(world):
        sampler = EpochSampler(data, 1, seed=0, rank=rank, world=world)
        sampler.set_epoch(2)
        shares.append(list(sampler))
        assert len(sampler) == len(data) // world
    dealt = [key for share in shares for key in share]
    assert sorted(chain(*(data.rows(key).tolist() for key in dealt))) == list(range(300))


def test_fewer_rows_than_processes_are_repeated() -> None:
    assert even([(0, 1)], 3) == [(0, 1)] * 3
    assert even([(0, 4)], 3) == [(0, 1), (1, 2), (2, 4)]
