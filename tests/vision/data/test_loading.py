"""The order of epochs, shares of processes, and loaders: exact with any number of workers and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from vision.data.loading import EpochSampler, EvaluationSampler, Fetched, Loader, TrainingLoader
from vision.errors import ImageError, UserError


class Numbers(Dataset):
    """Hands its keys back: images are (epoch, index), targets the indexes."""

    def __init__(self, size: int, error: Exception | None = None) -> None:
        self.size, self.error = size, error

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, keys: Sequence[Any]) -> Fetched | Exception:
        if self.error is not None:
            return self.error
        return Fetched(torch.tensor(keys), torch.tensor(keys)[:, -1], [])


def as_fetched(batch: Any) -> Any:
    return batch


def loader(size: int, batch_size: int, *, seed: int = 0, workers: int = 0, rank: int = 0, world: int = 1) -> TrainingLoader:
    data = Numbers(size)
    sampler = EpochSampler(data, batch_size, seed=seed, rank=rank, world=world)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": as_fetched}
    return TrainingLoader(data, batch_size=batch_size, sampler=sampler, **options)


def epoch(loader: TrainingLoader, number: int) -> list[list[list[int]]]:
    loader.sampler.set_epoch(number)
    return [images.tolist() for images, _ in loader]


# ------------------------------------------------------------------------------------------------------------ order


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_only() -> None:
    first = epoch(loader(100, 10), 3)
    assert sorted(index for batch in first for _, index in batch) == list(range(100))
    assert {number for batch in first for number, _ in batch} == {3}
    assert epoch(loader(100, 25), 3) == [list(chain(*first[i : i + 5]))[j : j + 25] for i in (0, 5) for j in (0, 25)]
    indexes = [
        [index for batch in epoch(loader(100, 10, seed=seed), n) for _, index in batch] for seed, n in ((0, 3), (0, 4), (1, 3))
    ]
    assert indexes[0] != indexes[1] != indexes[2] != indexes[0]


@pytest.mark.parametrize(
    ("size", "batch_size", "world", "batches"),
    [(10, 4, 1, [4, 4]), (3, 4, 1, [3]), (4, 4, 1, [4]), (10, 2, 2, [2, 2]), (3, 4, 2, [2]), (1, 4, 3, [1])],
)
def test_the_last_batch_is_dropped_unless_it_is_the_only_one(size: int, batch_size: int, world: int, batches: list[int]) -> None:
    for rank in range(world):
        part = loader(size, batch_size, rank=rank, world=world)
        assert [len(batch) for batch in epoch(part, 0)] == batches
        assert len(part) == len(batches)


def test_two_processes_see_what_one_sees_with_twice_the_batch() -> None:
    whole = epoch(loader(50, 8), 1)
    parts = [epoch(loader(50, 4, rank=rank, world=2), 1) for rank in (0, 1)]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(batch) for batch in whole]


def test_evaluation_shares_have_no_duplicates_and_as_many_batches() -> None:
    """KAIR #84: an odd number of pictures on several devices ended the validation."""
    for size in range(1, 30):
        for world in (1, 2, 3, 4):
            for batch_size in (1, 2, 3, 5, 8):
                samplers = [EvaluationSampler(Numbers(size), batch_size, rank=rank, world=world) for rank in range(world)]
                shares = [list(sampler) for sampler in samplers]
                assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
                assert sorted({index for share in shares for index in share}) == list(range(size))
                used = samplers[0].batch_size
                assert 1 <= used <= batch_size
                assert len({-(-len(share) // used) for share in shares}) == 1
                if not samplers[0].padded:
                    assert sum(map(len, shares)) == size
                else:  # no even batch size exists
                    assert size < world or batch_size == 1 or all((size // world) % b == 0 for b in range(1, batch_size + 1))


# ---------------------------------------------------------------------------------------------------------- restart


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_interrupted_epoch_is_exact(workers: int) -> None:
    uninterrupted = [epoch(loader(40, 4), number) for number in range(3)]
    started = loader(40, 4, workers=workers)
    assert epoch(started, 0) == uninterrupted[0]
    started.sampler.set_epoch(1)
    batches = iter(started)
    assert [next(batches)[0].tolist() for _ in range(3)] == uninterrupted[1][:3]
    state = started.state_dict()  # with two workers more batches have been prepared by now than were handed out
    assert state == {"epoch": 1, "samples": 12}

    resumed = loader(40, 4, workers=workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert len(resumed) == 10
    assert epoch(resumed, 1) == uninterrupted[1][3:]
    assert resumed.state_dict() == {"epoch": 1, "samples": 40}
    assert epoch(resumed, 2) == uninterrupted[2]
    assert epoch(resumed, 2) == uninterrupted[2]  # a second pass starts at the beginning


def test_a_place_in_another_epoch_is_not_used() -> None:
    resumed = loader(40, 4)
    resumed.load_state_dict({"epoch": 1, "samples": 40})
    assert epoch(resumed, 2) == epoch(loader(40, 4), 2)


def test_the_rest_of_the_epoch_with_another_batch_size_and_world() -> None:
    whole = list(chain(*epoch(loader(48, 4), 0)))
    parts = []
    for rank in range(2):
        part = loader(48, 6, rank=rank, world=2)
        part.load_state_dict({"epoch": 0, "samples": 12})
        parts += chain(*epoch(part, 0))
    assert sorted(parts) == sorted(whole[12:])


def test_place_at_the_start_and_within() -> None:
    fresh = loader(10, 4)
    assert fresh.state_dict() == {"epoch": 0, "samples": 0}
    for number, _ in enumerate(fresh, 1):
        assert fresh.state_dict() == {"epoch": 0, "samples": 4 * number}


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [ImageError("a/b.png", "broken or cut off"), UserError("one line")])
def test_errors_come_out_of_workers_as_themselves(workers: int, error: UserError) -> None:
    with pytest.raises(type(error)) as caught:
        list(Loader(Numbers(4, error), batch_size=2, num_workers=workers, collate_fn=as_fetched))
    assert str(caught.value) == str(error)


def test_what_was_left_out_is_noted_and_an_empty_batch_is_passed_over() -> None:
    class Broken(Numbers):
        def __getitems__(self, keys: Sequence[Any]) -> Fetched:
            kept = [key for key in keys if key > 1]
            return Fetched(torch.tensor(kept), torch.tensor(kept), [ImageError(f"{key}.png", "why") for key in keys if key <= 1])

    batches = Loader(Broken(6), batch_size=2, collate_fn=as_fetched)
    batches.broken = {}
    assert [targets.tolist() for _, targets in batches] == [[2, 3], [4, 5]]
    assert list(batches.broken) == [Path("0.png"), Path("1.png")]
