"""Stages of patches and batches: checked as a whole, the same samples on any number of devices, exact after a restart."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from torch.utils.data import Dataset

from vision.data.schedule import Part, Stage, StageSampler, check_stages, plan
from vision.errors import UserError

PUBLISHED = [  # Restormer's: global batches of 8 devices
    Stage(patch, batch, steps=steps)
    for patch, batch, steps in zip(
        (128, 160, 192, 256, 320, 384), (64, 40, 32, 16, 8, 8), (92_000, 64_000, 48_000, 36_000, 36_000, 24_000), strict=True
    )
]
PARTS = [Part(16, 4, 3), Part(32, 2, 2), Part(64, 1, 5)]


class Numbers(Dataset):
    """Nothing but a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def sampler(
    *, epoch: int = 0, start: int = 0, size: int = 10, batches: int = 5, **options: int
) -> list[list[tuple[int, int, int]]]:
    made = StageSampler(Numbers(size), PARTS, batches, seed=0, **options)
    made.set_epoch(epoch)
    made.start = start
    return list(made)


# ------------------------------------------------------------------------------------------------------------ the plan


def test_the_published_schedule_holds() -> None:
    check_stages(PUBLISHED, 1, 8)
    assert [part.batch for part in plan(PUBLISHED, devices=8)] == [8, 5, 4, 2, 1, 1]
    assert sum(part.batches for part in plan(PUBLISHED, devices=8)) == 300_000


@pytest.mark.parametrize(
    ("devices", "accumulation"), [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8), (4, 1), (3, 1), (1, 5), (16, 1), (1, 64)]
)
def test_each_stage_sees_the_same_samples_anywhere(devices: int, accumulation: int) -> None:
    """Restormer #28, #54, #80: fewer GPUs than published."""
    for stage, part in zip(PUBLISHED, plan(PUBLISHED, devices=devices, accumulation=accumulation), strict=True):
        seen = part.batches * part.batch * devices
        assert abs(seen - stage.batch * stage.steps) <= part.batch * devices * accumulation / 2
        assert part.batches % accumulation == 0
        if stage.batch % (devices * accumulation) == 0:
            assert part.batches == stage.steps * accumulation, "steps stay where the batch divides"


def test_the_published_config_trains_on_one_gpu() -> None:
    """Restormer #115 asked for it: the config's stages are the published ones, and one GPU takes 8 of their batches a step."""
    config = yaml.safe_load((Path(__file__).parents[3] / "configs/restormer_published.yaml").read_text(encoding="utf-8"))
    stages = [Stage(**stage) for stage in config["data"]["init_args"]["stages"]]
    trainer = config["trainer"]
    assert stages == PUBLISHED
    assert trainer["max_steps"] == sum(stage.steps for stage in stages)
    parts = plan(stages, devices=1, accumulation=trainer["accumulate_grad_batches"])
    assert [part.batch for part in parts] == [8, 5, 4, 2, 1, 1]
    assert [part.batches // trainer["accumulate_grad_batches"] for part in parts] == [stage.steps for stage in stages]


def test_shares_are_of_the_optimizer_steps() -> None:
    stages = [Stage(16, 8, share=0.5), Stage(32, 4, share=0.3), Stage(64, 2, share=0.2)]
    assert [part.batches for part in plan(stages, steps=101)] == [50, 31, 20]
    assert [part.batches for part in plan(stages, steps=101, accumulation=2)] == [100, 62, 40]
    assert sum(part.batches for part in plan(stages, steps=1)) == 1


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages is empty; give at least one"),
        ([Stage(64, 8, share=0.5), Stage(100, 4, share=0.5)], "patch of stage 2=100 is not a multiple of 8; use 96"),
        ([Stage(64, 0, share=1.0)], "batch of stage 1=0 is too small; use 1 or more"),
        ([Stage(64, 8)], "stage 1 has steps=0 and share=0; give one of them"),
        ([Stage(64, 8, steps=5, share=0.5)], "stage 1 has steps=5 and share=0.5; give one of them"),
        ([Stage(64, 8, steps=-5)], "stage 1 has steps=-5"),
        ([Stage(64, 8, share=0.5), Stage(64, 8, steps=5)], "stage 2 and stage 1 mix steps and share"),
        ([Stage(64, 8, share=math.nan)], "stage 1 has steps=0 and share=nan; give one of them, more than 0"),
        ([Stage(64, 8, share=0.5), Stage(64, 8, share=0.4)], "the shares of the stages sum to 0.9; they must sum to 1"),
    ],
)
def test_a_wrong_schedule_is_told_at_the_start(stages: list[Stage], message: str) -> None:
    """leftthomas/Restormer #2: the patch of a later milestone did not divide, hours into the training."""
    with pytest.raises(UserError) as caught:
        check_stages(stages, 1, 8)
    assert message in str(caught.value)


def test_a_patch_must_divide_by_the_scale_too() -> None:
    with pytest.raises(UserError, match=r"patch of stage 1=64 is not a multiple of 3 \(scale\) x 8 \(multiple\); use 72"):
        check_stages([Stage(64, 8, share=1.0)], 3, 8)


# ----------------------------------------------------------------------------------------------------------- the order


def test_batches_are_those_of_their_stage() -> None:
    batches = sampler() + sampler(epoch=1) + sampler(epoch=2)
    assert [(len(batch), batch[0][2]) for batch in batches] == [(4, 16)] * 3 + [(2, 32)] * 2 + [(1, 64)] * 10
    assert all(len({patch for _, _, patch in batch}) == 1 for batch in batches)


def test_every_pass_is_a_permutation_and_none_is_like_the_other() -> None:
    keys = [key for epoch in range(12) for batch in sampler(epoch=epoch) for key in batch]
    passes = [[index for number, index, _ in keys if number == p] for p in range(6)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert all(a != b for a, b in pairwise(passes))


def test_two_processes_see_what_one_sees_with_twice_the_batch() -> None:
    double = [Part(part.patch, 2 * part.batch, part.batches) for part in PARTS]
    one = StageSampler(Numbers(10), double, 6, seed=3)
    two = [StageSampler(Numbers(10), PARTS, 6, seed=3, rank=rank, world=2) for rank in (0, 1)]
    for whole, first, second in zip(one, *two, strict=True):
        assert Counter(whole) == Counter(first) + Counter(second)


@pytest.mark.parametrize("done", range(5))
def test_the_rest_of_an_epoch_is_what_it_would_have_been(done: int) -> None:
    """Also where the stage changes within the rest."""
    for epoch in (0, 1):
        made = StageSampler(Numbers(10), PARTS, 5, seed=0)
        made.set_epoch(epoch)
        patches = 0
        for _ in range(done):
            patches = made.after(patches)
        assert sampler(epoch=epoch, start=patches) == sampler(epoch=epoch)[done:]


def test_the_place_holds_for_another_number_of_processes() -> None:
    """A place is kept as patches of all processes: 2 x 4 after one batch is 1 x 8 after one."""
    double = [Part(part.patch, 2 * part.batch, part.batches) for part in PARTS]
    one = StageSampler(Numbers(100), double, 5, seed=0)
    two = StageSampler(Numbers(100), PARTS, 5, seed=0, world=2)
    assert one.after(one.after(0)) == two.after(two.after(0)) == 16
    one.start = two.start = 16
    assert [len(batch) for batch in one] == [2 * len(batch) for batch in two] == [8, 4, 4]


def test_an_epoch_cut_short_by_the_trainer_does_not_skip_steps() -> None:
    """limit_train_batches=2: the stages go by the batches that are trained on."""
    taken = [sampler(epoch=epoch, taken=2)[:2] for epoch in range(3)]
    assert [len(batch) for pair in taken for batch in pair] == [4, 4, 4, 2, 2, 1]
    assert len(StageSampler(Numbers(10), PARTS, 5, taken=2, seed=0)) == 5
