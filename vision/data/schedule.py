"""Progressive training: patches that grow while batches shrink, at steps that hold for any number of devices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from vision.data.augment import hashed
from vision.data.loading import EpochSampler
from vision.errors import UserError


@dataclass(frozen=True)
class Stage:
    """A part of the training with its own sizes of patch and batch (Zamir et al. 2022, section 4).

    Args:
        patch: side of the clean patch in pixels.
        batch: patches of one optimizer step, of all devices and all accumulated batches together.
        steps: optimizer steps it lasts; or
        share: its part of the training, 0..1.
    """

    patch: int
    batch: int
    steps: int = 0
    share: float = 0.0


class Part(NamedTuple):
    """A stage as one process runs it."""

    patch: int  # side of the clean patch, pixels
    batch: int  # patches of one process in one batch
    batches: int  # batches it lasts, of one process; the last stage goes on for ever


def check_patch(name: str, patch: int, scale: int, multiple: int) -> None:
    """Raise UserError unless the degraded patch is a multiple of ``multiple``."""
    step = scale * multiple
    if patch < 1 or patch % step:
        near = max(step, round(patch / step) * step)
        why = f"{scale} (scale) x {multiple} (multiple)" if scale > 1 else f"{multiple}"
        raise UserError(f"{name}={patch} is not a multiple of {why}; use {near}")


def check_stages(stages: Sequence[Stage], scale: int, multiple: int) -> None:
    """Check a whole schedule before the first step.

    Raises:
        UserError: no stages; a patch that does not divide; a batch, share or step count that is not positive; steps mixed with
            shares; shares that do not sum to 1.
    """
    if not stages:
        raise UserError("stages is empty; give at least one, such as {patch: 64, batch: 8, share: 1}, or leave it out")
    for number, stage in enumerate(stages, 1):
        check_patch(f"patch of stage {number}", stage.patch, scale, multiple)
        if stage.batch < 1:
            raise UserError(f"batch of stage {number}={stage.batch} is too small; use 1 or more")
        if stage.steps < 0 or not stage.share >= 0 or bool(stage.steps) == bool(stage.share):
            raise UserError(f"stage {number} has steps={stage.steps} and share={stage.share:g}; give one of them, more than 0")
        if bool(stage.steps) != bool(stages[0].steps):
            raise UserError(f"stage {number} and stage 1 mix steps and share; use the same for all stages")
    total = sum(stage.share for stage in stages)
    if stages[0].share and not abs(total - 1) <= 1e-6:
        raise UserError(f"the shares of the stages sum to {total:g}; they must sum to 1")


def local_batch(stage: Stage, devices: int, accumulation: int) -> int:
    """Patches of one process in one batch: the stage's batch over devices and accumulation, rounded, at least 1."""
    return max(1, round(stage.batch / (devices * accumulation)))


def plan(stages: Sequence[Stage], *, devices: int = 1, accumulation: int = 1, steps: int = 0) -> list[Part]:
    """The stages for this many processes and accumulated batches, so that each still sees the same number of patches.

    The rule: a process takes ``batch / (devices * accumulation)`` patches at a time, rounded, at least 1. Where that divides,
    each stage keeps its optimizer steps. Where it does not, the step sees another number of patches, and the stage's steps
    change by the inverse factor: samples seen stay the same, to within one step.

    Args:
        stages: checked by :func:`check_stages`.
        devices: processes.
        accumulation: batches for one optimizer step.
        steps: optimizer steps of the whole training; what shares are of.
    """
    if stages[0].share:  # by cumulated shares: rounding does not add up
        ends, total = [], 0.0
        for stage in stages:
            total += stage.share
            ends.append(round(total * steps))
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    else:
        counts = [
            max(1, round(stage.steps * stage.batch / (local_batch(stage, devices, accumulation) * devices * accumulation)))
            for stage in stages
        ]
    return [
        Part(stage.patch, local_batch(stage, devices, accumulation), count * accumulation)
        for stage, count in zip(stages, counts, strict=True)
    ]


class StageSampler(EpochSampler):
    """Training order as whole batches, whose size and patch are those of the stage that the step falls into.

    The pictures come as one endless row, pass after pass through the data, each pass in an order of its own by (seed, pass).
    Batch number m of a training takes its place in that row by m alone: neither workers nor a restart change what it holds.
    An epoch is a fixed number of batches, so that Lightning, which counts them once, is right in every stage.

    Args:
        parts: the stages.
        batches: of an epoch, as Lightning counts them.
        taken: of these, how many the trainer takes (``limit_train_batches``); 0 = all.

    Yields:
        lists of keys ``(pass, index, patch)``, one list a batch.
    """

    def __init__(
        self, dataset: Dataset, parts: Sequence[Part], batches: int, *, taken: int = 0, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        super().__init__(dataset, parts[0].batch, seed=seed, rank=rank, world=world)
        self.parts, self.num_samples, self.taken = parts, batches, taken or batches
        self._ends = list(accumulate(part.batches for part in parts))
        self._orders: dict[int, list[int]] = {}

    def part(self, number: int) -> Part:
        """The stage of a batch, counted from the start of training."""
        return self.parts[min(bisect_right(self._ends, number), len(self.parts) - 1)]

    def before(self, number: int) -> int:
        """Patches of all processes in the batches before this one."""
        patches, start = 0, 0
        for part, end in zip(self.parts[:-1], self._ends, strict=False):
            patches += part.batch * self.num_replicas * (min(end, number) - start)
            start = min(end, number)
        return patches + self.parts[-1].batch * self.num_replicas * (number - start)

    def after(self, done: int) -> int:
        """Patches handed out in this epoch after one more batch."""
        number = self.epoch * self.taken + self._batches(done)
        return done + self.part(number).batch * self.num_replicas

    def _batches(self, done: int) -> int:
        """How many batches of this epoch the patches handed out make; of another batch size, those begun count as whole."""
        first = self.epoch * self.taken
        base = self.before(first)
        return bisect_left(range(self.num_samples), done, key=lambda i: self.before(first + i) - base)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:  # type: ignore[override]  # batches, not the samples that torch's annotation has
        first = self.epoch * self.taken
        for number in range(first + self._batches(self.start), first + self.num_samples):
            part, place = self.part(number), self.before(number)
            row = range(place, place + part.batch * self.num_replicas)[self.rank :: self.num_replicas]
            yield [(at // self.size, self._order(at // self.size)[at % self.size], part.patch) for at in row]

    def _order(self, number: int) -> list[int]:
        """The order of a pass; of a batch that spans several, all are kept."""
        if number not in self._orders:
            self._orders = {n: order for n, order in self._orders.items() if n >= number - 1}
            generator = torch.Generator().manual_seed(int(hashed(self.seed, number)[0] >> 1))
            self._orders[number] = torch.randperm(self.size, generator=generator).tolist()
        return self._orders[number]
