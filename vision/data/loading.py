"""The order of an epoch, its share for each process, and loaders that resume in the middle of it."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from vision.data.augment import hashed
from vision.errors import ImageError, UserError


class Fetched(NamedTuple):
    """What a dataset of this package hands to its loader for one batch."""

    images: Any  # b c h w
    targets: Any  # labels of a batch, or names when predicting; a tuple where a batch has several things beside its images
    broken: list[ImageError]  # pictures that could not be read and were left out


class EpochSampler(DistributedSampler):
    """Training order: keys ``(epoch, index)`` in an order that depends only on (seed, epoch).

    The epoch travels in the key, so that workers that outlive an epoch know it. Of the epoch's order, each global batch is
    dealt out to the processes in turn: two processes with batch b see the pictures that one sees with batch 2 b.
    The incomplete last batch is dropped, unless it is the only one. A DistributedSampler by type: Lightning then puts no
    other sampler in its place, and calls set_epoch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, seed: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(dataset, num_replicas=world, rank=rank, seed=seed)
        self.size, self.global_batch = len(dataset), batch_size * world  # type: ignore[arg-type]
        full = self.size // self.global_batch * self.global_batch
        self.total_size = full or math.ceil(self.size / world) * world  # too few for one batch: the same number for each process
        self.num_samples = self.total_size // world
        self.start = 0  # samples of this epoch, of all processes, that are done already

    def after(self, done: int) -> int:
        """Samples of this epoch, of all processes, that are done after one more batch."""
        return min(done + self.global_batch, self.total_size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(int(hashed(self.seed, self.epoch)[0] >> 1))
        order = torch.randperm(self.size, generator=generator).repeat(math.ceil(self.total_size / self.size))
        mine = order[self.start : self.total_size][self.rank :: self.num_replicas]
        return iter([(self.epoch, index) for index in mine.tolist()])


class EvaluationSampler(DistributedSampler):
    """Each process its share of an evaluation set, in order and without the duplicates of DistributedSampler.

    Shares differ by at most one picture. :meth:`even_batch_size` gives the batch size by which all processes still take the
    same number of batches; where there is none (batches of one, fewer pictures than processes) the last ones are repeated.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, rank: int, world: int) -> None:
        super().__init__(dataset, num_replicas=world, rank=rank, shuffle=False)
        self.size = len(dataset)  # type: ignore[arg-type]
        self.batch_size = self.even_batch_size(self.size, batch_size, world)
        self.padded = self.batch_size == 0
        self.batch_size = self.batch_size or batch_size
        self.num_samples = len(range(rank, self.total_size if self.padded else self.size, world))

    @staticmethod
    def even_batch_size(size: int, batch_size: int, world: int) -> int:
        """The largest batch size up to batch_size with which ceil and floor of size / world make as many batches; 0 if none."""
        fewest = size // world
        fits = (b for b in range(batch_size, 0, -1) if size % world == 0 or fewest % b)
        return next(fits, 0) if fewest else 0

    def __iter__(self) -> Iterator[int]:
        last = self.total_size if self.padded else self.size
        return (index % self.size for index in range(self.rank, last, self.num_replicas))


class Loader(DataLoader):
    """A DataLoader over a dataset that fetches whole batches (``__getitems__`` returning :class:`Fetched`).

    Yields ``(images, targets)``, or ``(images, *targets)``. A user's error in a worker arrives as itself, in one line, and
    not as the worker's traceback.
    """

    broken: dict[Path, ImageError] | None = None  # where to note what was left out; the data module's own

    def __iter__(self) -> Iterator[tuple[Any, ...]]:  # type: ignore[override]  # torch's annotation names its private iterator
        for batch in super().__iter__():
            if isinstance(batch, UserError):
                raise batch
            if self.broken is not None:
                self.broken.update({error.path: error for error in batch.broken})
            if len(batch.targets):
                yield batch.images, *(batch.targets if isinstance(batch.targets, tuple) else (batch.targets,))


class TrainingLoader(Loader):
    """A loader whose place in the epoch is part of a checkpoint: the rest of an interrupted epoch comes exactly as it would have.

    The place is kept as samples of all processes, so that it also holds for another batch size or number of processes.
    """

    place: tuple[int, int] = (0, 0)  # epoch, samples handed out
    resume: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:  # type: ignore[override]  # as above
        sampler = self.sampler
        if not isinstance(sampler, EpochSampler):  # Lightning's overfit_batches puts in its own
            yield from super().__iter__()
            return
        # As a generator this runs at the first batch: by then Lightning has set the epoch, also when it resumes.
        epoch, done = self.resume or (sampler.epoch, 0)
        self.resume = None
        sampler.start = done if epoch == sampler.epoch else 0
        self.place = (sampler.epoch, sampler.start)
        for batch in super().__iter__():
            self.place = (sampler.epoch, sampler.after(self.place[1]))
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch and samples handed out in it, of all processes."""
        return dict(zip(("epoch", "samples"), self.resume or self.place, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, if the next pass is through the same epoch; otherwise it starts at its beginning."""
        self.resume = (state["epoch"], state["samples"])


class LoadedData(LightningDataModule):
    """What the data modules of all tasks share: workers, processes, and the place in the epoch in checkpoints.

    Raises:
        UserError: batch_size or num_workers out of range.
    """

    def __init__(self, batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size} is too small; use 1 or more")
        if num_workers < -1:
            raise UserError(f"num_workers={num_workers} is out of range; use 0 or more, or -1 for one a processor, up to 8")
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self._loader: TrainingLoader | None = None
        self._resume: dict[str, int] | None = None

    def _process(self) -> tuple[int, int]:
        """Rank and number of processes."""
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def _loading(self) -> dict[str, Any]:
        workers = self.num_workers
        if workers < 0:
            processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            workers = min(8, max(1, processors // (self.trainer.num_devices if self.trainer is not None else 1)))
        if workers == 0:  # chosen, not forgotten: Lightning would advise more at each start
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        pin = torch.cuda.is_available() and (self.trainer is None or self.trainer.strategy.root_device.type == "cuda")
        return {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": pin, "collate_fn": as_fetched}

    # ---------------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, int]:
        """The place in the training epoch.

        The loader's own copy in Lightning's loop state gets lost if the task asks for trainer.estimated_stepping_batches.
        """
        return self._loader.state_dict() if self._loader is not None else {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next training loader go on from there."""
        self._resume = state_dict or None

    def _resumed(self, loader: TrainingLoader) -> TrainingLoader:
        """The loader whose place checkpoints keep, at the place of the one that was loaded."""
        self._loader = loader
        if self._resume is not None:
            loader.load_state_dict(self._resume)
            self._resume = None
        return loader


def as_fetched(batch: Any) -> Any:
    """The collate function of datasets that fetch whole batches."""
    return batch
