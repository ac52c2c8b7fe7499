"""Datasets for restoration: random patches for training, whole pictures for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt
from torch import Tensor
from torch.utils.data import Dataset

from vision.data.augment import NO_MIXING, Draws, Mixing
from vision.data.degradations.base import Degradation
from vision.data.images import read_image
from vision.data.loading import Fetched
from vision.errors import ImageError, UserError

EVALUATION_SEED = 0  # not the training's: figures of runs with different seeds compare


class Files:
    """Picture files by number, decoded when asked for, or held in memory.

    Args:
        paths: the files.
        root: what :meth:`name` leaves out of their paths.
        channels: 1 (gray) or 3 (RGB).
    """

    def __init__(self, paths: Sequence[Path], root: Path, channels: int) -> None:
        self.paths, self.root, self.channels = list(paths), root, channels
        self.held: list[UInt[np.ndarray, "h w c"]] = []

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> UInt[np.ndarray, "h w c"]:
        return self.held[number] if self.held else read_image(self.paths[number], channels=self.channels)

    def hold(self, progress: Callable[[Sequence[Path]], Any] = iter) -> None:
        """Decode all of them now; worker processes then share the memory where they are forked."""
        self.held = [read_image(path, channels=self.channels) for path in progress(self.paths)]

    def name(self, number: int) -> str:
        path = self.paths[number]
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)


class Pairs(Dataset):
    """Degraded pictures with their clean ones, from two lists of files or by a degradation of the clean ones.

    Args:
        clean: the clean pictures; None when predicting from degraded ones that have no partner.
        degraded: their partners in the same order, or what makes them.
        scale: by how much the degraded ones are smaller.
    """

    def __init__(self, clean: Files | None, degraded: Files | Degradation, scale: int) -> None:
        if clean is None and isinstance(degraded, Degradation):
            raise UserError("no clean pictures to degrade; give clean pictures, or files of degraded ones")
        self.clean, self.degraded, self.scale = clean, degraded, scale

    @property
    def files(self) -> Files:
        """Those that give the pairs their names."""
        files = self.clean if self.clean is not None else self.degraded
        assert isinstance(files, Files)
        return files

    def __len__(self) -> int:
        return len(self.files)


class Patches(Pairs):
    """Training: random patches, turned and mirrored, ``each`` of every picture in one pass.

    Keys are ``(pass, index, patch)``, a list of them a batch; everything random depends on (seed, pass, index) alone.
    Pictures smaller than a patch are continued by mirroring, to the right and below.

    Args:
        each: patches of a picture in one pass.
        seed: of the places, turns and degradations.
        patch: side where the key has none.
        augment: mirror and turn by multiples of 90 degrees, all eight ways alike.
        mixing: Mixup across a batch, degraded and clean patches alike.
    """

    def __init__(
        self,
        clean: Files,
        degraded: Files | Degradation,
        scale: int,
        *,
        each: int,
        seed: int,
        patch: int,
        augment: bool = True,
        mixing: Mixing = NO_MIXING,
    ) -> None:
        super().__init__(clean, degraded, scale)
        self.each, self.seed, self.patch, self.augment, self.mixing = each, seed, patch, augment, mixing

    def __len__(self) -> int:
        return len(self.files) * self.each

    def __getitem__(self, keys: Any) -> Fetched | UserError:
        """A batch: float32 b c h w, degraded and clean. A UserError is returned, so that it leaves a worker as itself."""
        keys = keys if isinstance(keys, list) else [(0, keys, self.patch)]  # a number: Lightning's overfit_batches
        passes, indexes, patches = zip(*keys, strict=True)
        draws = Draws(self.seed, passes, indexes)
        top, left, turn = draws.uniform("top").tolist(), draws.uniform("left").tolist(), draws.below("turn", 8).tolist()
        try:
            pairs = [
                self._pair(index % len(self.files), patches[i], (top[i], left[i]), turn[i], draws.seed("degradation", i))
                for i, index in enumerate(indexes)
            ]
        except UserError as error:
            return error
        degraded, clean = (batched(images) for images in zip(*pairs, strict=True))
        if self.mixing.on:
            degraded, clean = self.mixing.pairs(degraded, clean, draws.seed("mixing"))
        return Fetched(degraded, clean, [])

    def _pair(
        self, number: int, patch: int, place: tuple[float, float], turn: int, seed: int
    ) -> tuple[Float[np.ndarray, "h w c"], Float[np.ndarray, "h2 w2 c"]]:
        assert self.clean is not None
        clean, scale = self.clean[number], self.scale
        if isinstance(self.degraded, Degradation):
            top, left = (int(u * max(1, side - patch + 1)) for u, side in zip(place, clean.shape[:2], strict=True))
            clean = as_float(self._turned(cut(clean, top, left, patch), turn))
            return self.degraded(clean, np.random.default_rng(seed)), clean
        degraded, small = self.degraded[number], patch // scale
        check_pair(self.degraded.paths[number], degraded, self.clean.paths[number], clean, scale)
        top, left = (int(u * max(1, side - small + 1)) for u, side in zip(place, degraded.shape[:2], strict=True))
        pair = cut(degraded, top, left, small), cut(clean, top * scale, left * scale, patch)
        return as_float(self._turned(pair[0], turn)), as_float(self._turned(pair[1], turn))

    def _turned(self, image: UInt[np.ndarray, "h w c"], turn: int) -> UInt[np.ndarray, "h2 w2 c"]:
        """One of the eight ways to lay a square."""
        if not self.augment:
            return image
        image = image[:, ::-1] if turn >= 4 else image
        return np.rot90(image, turn % 4)


class Wholes(Pairs):
    """Evaluation: whole pictures, one a batch: ``(degraded, (clean, [name]))``, or ``(degraded, [name])`` when predicting.

    Degradations are the same in every run. Fixed Gaussian noise is that of the benchmarks: each picture gets the first
    numbers of numpy's ``default_rng(0)``. All others draw from ``default_rng([0, index])``.

    Args:
        predict: leave the clean pictures out.
    """

    def __init__(self, clean: Files | None, degraded: Files | Degradation, scale: int, *, predict: bool = False) -> None:
        super().__init__(clean, degraded, scale)
        self.predict = predict or clean is None

    def __getitems__(self, keys: Sequence[int]) -> Fetched | UserError:
        (number,) = keys
        try:
            degraded, clean = self.pair(number)
        except UserError as error:
            return error
        names = [self.files.name(number)]
        return Fetched(batched([degraded]), names if clean is None else (batched([clean]), names), [])

    def __getitem__(self, number: int) -> Any:
        fetched = self.__getitems__([number])
        if isinstance(fetched, UserError):
            raise fetched
        return fetched.images, fetched.targets

    def pair(self, number: int) -> tuple[Float[np.ndarray, "h w c"], Float[np.ndarray, "h2 w2 c"] | None]:
        """Degraded and clean picture, float32 in 0..1 but for noise; the clean one cut to a multiple of the scale."""
        clean = None if self.clean is None else self.clean[number]
        if isinstance(self.degraded, Files):
            degraded = self.degraded[number]
            if clean is None or self.predict:
                return as_float(degraded), None
            assert self.clean is not None
            check_pair(self.degraded.paths[number], degraded, self.clean.paths[number], clean, self.scale)
            return as_float(degraded), as_float(clean)
        assert clean is not None
        h, w = (side // self.scale * self.scale for side in clean.shape[:2])
        if not h or not w:
            raise ImageError(
                self.files.paths[number], f"{clean.shape[1]} x {clean.shape[0]} pixels are less than the scale {self.scale}"
            )
        target = as_float(clean[:h, :w])
        entropy = EVALUATION_SEED if self.degraded.sigma is not None else [EVALUATION_SEED, number]
        return self.degraded(target, np.random.default_rng(entropy)), None if self.predict else target


def check_pair(degraded_path: Path, degraded: np.ndarray, clean_path: Path, clean: np.ndarray, scale: int) -> None:
    """Raise ImageError unless the clean picture is ``scale`` times as large."""
    (h, w), (H, W) = degraded.shape[:2], clean.shape[:2]
    if (h * scale, w * scale) != (H, W):
        times = f"{scale} times " if scale > 1 else ""
        raise ImageError(
            degraded_path, f"{w} x {h} pixels do not go with {clean_path}, {W} x {H}; {times}the same size is needed"
        )


def cut(image: UInt[np.ndarray, "h w c"], top: int, left: int, side: int) -> UInt[np.ndarray, "side side c"]:
    """A square part; beyond the right and lower edge the picture goes on mirrored, its edge pixels twice.

    That mirror, unlike the one about the edge pixels' centres, keeps pictures of two scales aligned, and takes any size.
    """
    part = image[top : top + side, left : left + side]
    short = [(0, side - have) for have in part.shape[:2]]
    return np.pad(part, [*short, (0, 0)], mode="symmetric") if any(b for _, b in short) else part


def as_float(image: UInt[np.ndarray, "h w c"]) -> Float[np.ndarray, "h w c"]:
    """float32 in 0..1 of 8 or 16 bits."""
    return np.divide(image, np.float32(np.iinfo(image.dtype).max), dtype=np.float32)


def batched(images: Sequence[Float[np.ndarray, "h w c"]]) -> Float[Tensor, "b c h w"]:
    h, w, c = images[0].shape
    batch = np.empty((len(images), c, h, w), np.float32)
    for place, image in zip(batch, images, strict=True):
        place[:] = image.transpose(2, 0, 1)
    return torch.from_numpy(batch)
