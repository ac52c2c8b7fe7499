"""The data sets of torchvision as Lightning data modules."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, UInt8

from vision.data.augment import NO_MIXING, Augmentation, Mixing
from vision.data.classification import (
    AS_DATA,
    ClassificationData,
    check_fraction,
    check_size,
    for_prediction,
    stratified_split,
)
from vision.data.pictures import FilePictures
from vision.data.preprocessing import Preprocessing
from vision.errors import UserError

_MEDIUM = Augmentation(padding=4)
_TRAIN_FLAG = {"train": {"train": True}, "test": {"train": False}}
_SPLIT_2 = {"train": {"split": "train"}, "test": {"split": "test"}}
_SPLIT_3 = _SPLIT_2 | {"val": {"split": "val"}}
_TORCHVISION: dict[str, dict[str, dict[str, Any]]] = {
    "CIFAR10": _TRAIN_FLAG,
    "CIFAR100": _TRAIN_FLAG,
    "MNIST": _TRAIN_FLAG,
    "FashionMNIST": _TRAIN_FLAG,
    "KMNIST": _TRAIN_FLAG,
    "EMNIST": {split: {"split": "balanced"} | flag for split, flag in _TRAIN_FLAG.items()},
    "SVHN": _SPLIT_2,
    "STL10": _SPLIT_2,
    "Food101": _SPLIT_2,
    "OxfordIIITPet": {"train": {"split": "trainval"}, "test": {"split": "test"}},
    "Flowers102": _SPLIT_3,
    "DTD": _SPLIT_3,
    "FGVCAircraft": _SPLIT_3,
}


class TorchvisionSet(ClassificationData):
    """A data set of torchvision by name, downloaded where there is a network.

    Small pictures (CIFAR, MNIST and its kin, SVHN, STL10) are held in memory and need no workers; the others are files.
    EMNIST is its balanced split, turned upright. Predictions are of the test pictures.

    Args:
        name: of the class in torchvision.datasets.
        root: the folder that holds, or will hold, the files.
        size: side of the model's input in pixels; 0 = as stored for small pictures, 224 for files.
        batch_size: pictures in a batch of one process.
        val_fraction: share of each class taken from the training pictures for validation, 0..1, where the set has no own.
        preprocessing: where it shall differ from the data's own (small pictures) or ImageNet's (files).
        augmentation: of the training pictures.
        mixing: Mixup and CutMix.
        num_workers: processes that prepare batches; 0 = none, -1 = none for small pictures, else one a processor, up to 8.
        seed: of the validation split, the order and the augmentation.

    Raises:
        UserError: a value is out of range, or the files are not there and cannot be downloaded.
    """

    def __init__(
        self,
        name: Literal[
            "CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "EMNIST", "SVHN", "STL10",
            "Food101", "OxfordIIITPet", "Flowers102", "DTD", "FGVCAircraft",
        ] = "CIFAR10",
        root: str = "data",
        size: int = 0,
        batch_size: int = 128,
        val_fraction: float = 0.1,
        preprocessing: Preprocessing = AS_DATA,
        augmentation: Augmentation = _MEDIUM,
        mixing: Mixing = NO_MIXING,
        num_workers: int = -1,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(batch_size, augmentation, mixing, num_workers, seed)
        if name not in _TORCHVISION:
            raise UserError(f"name={name!r} is not a torchvision set known here; use {', '.join(_TORCHVISION)}")
        check_size(size, least=0)
        check_fraction("val_fraction", val_fraction)
        self.chosen, self.root, self.size = name, Path(root), size
        self.val_fraction, self._preprocessing = val_fraction, preprocessing
        self._memory = False

    def prepare_data(self) -> None:
        """Download what is missing."""
        for split in _TORCHVISION[self.chosen]:
            self._set(split, download=True)

    def _setup_labelled(self) -> None:
        sets = {split: self._set(split, download=False) for split in _TORCHVISION[self.chosen]}
        labels = {split: _labels(data) for split, data in sets.items()}
        self.classes = list(getattr(sets["train"], "classes", None) or map(str, range(max(map(max, labels.values())) + 1)))
        self._memory = hasattr(sets["train"], "data")
        if self._memory:
            train, test = ((self._array(sets[split].data), labels[split]) for split in ("train", "test"))
            self._use_memory(train, test, self.size, self._preprocessing, self.val_fraction)
            return
        transform = self._file_transform(self.size or 224, self._preprocessing)
        paths = {split: [Path(path) for path in _files(data)] for split, data in sets.items()}
        if "val" not in sets:
            names = [path.name for path in paths["train"]]
            rest, kept = stratified_split(labels["train"], names, self.classes, [self.val_fraction], self.seed)
            paths["val"], labels["val"] = [paths["train"][i] for i in kept], labels["train"][kept]
            paths["train"], labels["train"] = [paths["train"][i] for i in rest], labels["train"][rest]
        self.train = FilePictures(paths["train"], self.root, "stop", labels["train"], transform, training=self._training())
        self.val, self.test = (
            FilePictures(paths[split], self.root, "stop", labels[split], transform) for split in ("val", "test")
        )

    def _setup_prediction(self) -> None:
        self.setup("fit")
        self.predict = for_prediction(self.test)

    def _loading(self) -> dict[str, Any]:
        if self._memory and self.num_workers == -1:
            self.num_workers = 0
        return super()._loading()

    def _set(self, split: str, *, download: bool) -> Any:
        import torchvision.datasets

        try:
            with _timeout(30.0):
                return getattr(torchvision.datasets, self.chosen)(
                    root=self.root, download=download, **_TORCHVISION[self.chosen][split]
                )
        except ModuleNotFoundError as error:
            raise UserError(
                f"torchvision's {self.chosen} needs the package {error.name}; install it: pip install {error.name}"
            ) from error
        except (OSError, RuntimeError) as error:
            what = "could not be downloaded to" if download else "is not complete in"
            raise UserError(
                f"{self.chosen} {what} {self.root} ({' '.join(str(error).split())}); connect to a network, or put the files "
                f"there as torchvision.datasets.{self.chosen} lays them out, or use EmbeddedFashionMNIST, which needs none"
            ) from error

    def _array(self, data: Any) -> UInt8[np.ndarray, "n h w c"]:
        """torchvision's pictures, whichever way the set keeps them, as n h w c."""
        images = np.asarray(data)
        if images.ndim == 3:
            images = images[..., None]
        elif images.shape[1] == 3:
            images = images.transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images.transpose(0, 2, 1, 3) if self.chosen == "EMNIST" else images)


def _labels(data: Any) -> Int[np.ndarray, " n"]:
    """The labels of a torchvision set, whatever it calls them."""
    found = next(getattr(data, name) for name in ("targets", "labels", "_labels") if hasattr(data, name))
    return np.asarray(found, np.int64)


def _files(data: Any) -> Sequence[Any]:
    return next(getattr(data, name) for name in ("_image_files", "_images") if hasattr(data, name))


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """A limit for each network operation: torchvision sets none, and a dead connection would hang for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
