"""Datasets of labelled pictures, fetched a batch at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from vision.data.augment import Augmentation, Draws, Mixing
from vision.data.images import convert_channels, read_image
from vision.data.loading import Fetched
from vision.data.preprocessing import EvaluationTransform, as_picture, as_tensor, to_float
from vision.errors import ImageError, UserError

_MOST_MEMORY = 2**30  # bytes up to which resized pictures are kept; beyond, each batch is resized anew
_MOST_TRIES = 100  # neighbours that may stand in for a broken training picture


@dataclass(frozen=True)
class Training:
    """What turns an evaluation dataset into a training one."""

    augmentation: Augmentation
    mixing: Mixing
    classes: int
    seed: int


class Pictures(Dataset, ABC):
    """Labelled pictures: a batch is normalised, float32 b c h w, with its labels, or with names when predicting.

    Keys are indexes, or ``(epoch, index)`` in training, where the augmentation depends on (seed, epoch, index) alone.
    """

    def __init__(
        self,
        labels: Int[np.ndarray, " n"],
        transform: EvaluationTransform,
        *,
        training: Training | None = None,
        predict: bool = False,
    ) -> None:
        self.labels, self.transform, self.training, self.predict = labels, transform, training, predict

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Float[Tensor, "c h w"], Any]:
        fetched = self.__getitems__([key])
        if isinstance(fetched, UserError):
            raise fetched
        if not len(fetched.targets):
            raise fetched.broken[0]
        return fetched.images[0], fetched.targets[0]

    def __getitems__(self, keys: Sequence[Any]) -> Fetched | UserError:
        """A whole batch; a UserError is returned, not raised, so that it leaves a worker as itself."""
        epochs, indexes = zip(*(key if isinstance(key, tuple) else (0, key) for key in keys), strict=True)
        try:
            return self._trained(epochs, indexes) if self.training else self._evaluated(indexes)
        except UserError as error:
            return error

    def _evaluated(self, indexes: Sequence[int]) -> Fetched:
        images, kept, broken = self._fitted(indexes)
        targets = [self.name(i) for i in kept] if self.predict else torch.from_numpy(self.labels[kept])
        return Fetched(self.transform.normalize(to_float(images)), targets, broken)

    def _trained(self, epochs: Sequence[int], indexes: Sequence[int]) -> Fetched:
        assert self.training is not None
        augmentation, mixing = self.training.augmentation, self.training.mixing
        draws = Draws(self.training.seed, epochs, indexes)
        images, kept, broken = self._cropped(indexes, draws) if augmentation.crop == "resized" else self._fitted(indexes)
        images = augmentation.erase(self.transform.normalize(augmentation(images, draws)), draws)
        labels = torch.from_numpy(self.labels[kept])
        if mixing.on:
            images, labels = mixing(images, labels, self.training.classes, draws.seed("mixing"))
        return Fetched(images, labels, broken)

    def name(self, index: int) -> str:
        """What predictions call the picture."""
        return str(index)

    @abstractmethod
    def _fitted(self, indexes: Sequence[int]) -> tuple[Tensor, list[int], list[ImageError]]:
        """The pictures in the size of evaluation (b c h w, uint8 or float 0..1), whose they are, and the broken ones."""

    @abstractmethod
    def _cropped(self, indexes: Sequence[int], draws: Draws) -> tuple[Tensor, list[int], list[ImageError]]:
        """The same with a random part of each picture."""

    def _part(self, image: np.ndarray, draws: Draws, sample: int) -> Tensor:
        """A random part of one picture, c h w."""
        assert self.training is not None
        picture, seed = as_picture(image, self.transform.channels), draws.seed("crop", sample)
        return as_tensor(
            self.training.augmentation.resized_crop(picture, self.transform.size, self.transform.interpolation, seed)
        )


class MemoryPictures(Pictures):
    """Small pictures of one size in a single uint8 tensor (see :func:`hold`): a few operations gather and augment a batch.

    That is fast enough (over 100,000 pictures of 28 x 28 a second on one core) to need no workers.
    """

    def __init__(self, images: UInt8[Tensor, "m c h w"], rows: Int[np.ndarray, " n"], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.images, self.rows = images, torch.from_numpy(rows)

    def _rows(self, indexes: Sequence[int]) -> UInt8[Tensor, "b c h w"]:
        return self.images.index_select(0, self.rows[list(indexes)])  # three times as fast as indexing

    def _fitted(self, indexes: Sequence[int]) -> tuple[Tensor, list[int], list[ImageError]]:
        images = self._rows(indexes)
        if images.shape[2:] != self.transform.size:
            images = _fit_all(images, self.transform)
        return images, list(indexes), []

    def _cropped(self, indexes: Sequence[int], draws: Draws) -> tuple[Tensor, list[int], list[ImageError]]:
        images = self._rows(indexes).permute(0, 2, 3, 1).numpy()
        return torch.stack([self._part(image, draws, i) for i, image in enumerate(images)]), list(indexes), []


class FilePictures(Pictures):
    """Picture files, decoded when asked for.

    Args:
        paths: the files.
        root: what :meth:`name` leaves out of their paths.
        on_broken: "stop" raises at the first file that cannot be read. "skip" leaves it out of an evaluation batch, and in
            training puts the next readable picture in its place, so that batches keep their size.
    """

    def __init__(self, paths: list[Path], root: Path, on_broken: Literal["stop", "skip"], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.paths, self.root, self.on_broken = paths, root, on_broken

    def name(self, index: int) -> str:
        path = self.paths[index]
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def _fitted(self, indexes: Sequence[int]) -> tuple[Tensor, list[int], list[ImageError]]:
        return self._decoded(indexes, lambda image, _: self.transform.fit(image))

    def _cropped(self, indexes: Sequence[int], draws: Draws) -> tuple[Tensor, list[int], list[ImageError]]:
        return self._decoded(indexes, lambda image, sample: self._part(image, draws, sample))

    def _decoded(
        self, indexes: Sequence[int], fit: Callable[[np.ndarray, int], Tensor]
    ) -> tuple[Tensor, list[int], list[ImageError]]:
        images: list[Tensor] = []
        kept: list[int] = []
        broken: list[ImageError] = []
        for sample, index in enumerate(indexes):
            for candidate in self._candidates(index):
                try:
                    images.append(fit(read_image(self.paths[candidate], channels=None), sample))
                except ImageError as error:
                    if self.on_broken == "stop":
                        raise
                    broken.append(error)
                else:
                    kept.append(candidate)
                    break
            else:
                if self.training:
                    raise UserError(f"none of the pictures tried after {self.paths[index]} can be read; is the disk still there?")
        if len({image.dtype for image in images}) > 1:  # 8 and 16 bits in one batch
            images = [to_float(image) for image in images]
        empty = torch.empty(0, self.transform.channels, *self.transform.size)
        return torch.stack(images) if images else empty, kept, broken

    def _candidates(self, index: int) -> list[int]:
        return [(index + step) % len(self) for step in range(min(len(self), _MOST_TRIES))] if self.training else [index]


def hold(images: UInt8[np.ndarray, "n h w c"], transform: EvaluationTransform) -> UInt8[Tensor, "n c2 h2 w2"]:
    """Pictures as one tensor in the channels of evaluation, and in its size where that takes no more than a gibibyte."""
    converted = torch.from_numpy(convert_all(images, transform.channels)).permute(0, 3, 1, 2).contiguous()
    small = len(images) * transform.channels * transform.size[0] * transform.size[1] <= _MOST_MEMORY
    return _fit_all(converted, transform) if small and converted.shape[2:] != transform.size else converted


def convert_all(images: UInt8[np.ndarray, "n h w c"], channels: int) -> UInt8[np.ndarray, "n h w c2"]:
    """All pictures in 1 or 3 channels."""
    n, h, w, c = images.shape
    return convert_channels(images.reshape(n * h, w, c), channels).reshape(n, h, w, channels)


def statistics(images: UInt8[np.ndarray, "n h w c"]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel in units of the full range, to 4 places."""
    value, means, stds = np.arange(256) / 255, [], []
    for channel in range(images.shape[-1]):
        share = np.bincount(images[..., channel].ravel(), minlength=256) / images[..., channel].size
        means.append(float(share @ value))
        stds.append(float(np.sqrt(share @ (value - means[-1]) ** 2)))
    return [round(x, 4) for x in means], [round(max(x, 1e-4), 4) for x in stds]


def _fit_all(images: UInt8[Tensor, "b c h w"], transform: EvaluationTransform) -> UInt8[Tensor, "b c h2 w2"]:
    return torch.stack([transform.fit(image) for image in images.permute(0, 2, 3, 1).numpy()])
