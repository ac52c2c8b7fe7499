"""Lightning data modules for classification: what all share, the embedded set, and a folder of pictures."""

from __future__ import annotations

import copy
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, UInt8
from rich.progress import track
from torch.utils.data import DataLoader

from vision.data.augment import NO_MIXING, Augmentation, Mixing, hashed
from vision.data.images import check_image, find_images, is_image_file, missing, no_pictures, require_inside, tell_unread
from vision.data.loading import EpochSampler, EvaluationSampler, LoadedData, Loader, TrainingLoader
from vision.data.pairing import SPLITS, one_each
from vision.data.pictures import FilePictures, MemoryPictures, Pictures, Training, convert_all, hold, statistics
from vision.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, EvaluationTransform, Preprocessing
from vision.errors import ImageError, UserError

log = logging.getLogger(__name__)

OnBroken = Literal["stop", "skip"]
AS_DATA = Preprocessing()
_SMALL, _PHOTOS = Augmentation(padding=2), Augmentation(crop="resized")
_CHECKED_AT_START = 50_000  # larger folders start at once; what is broken in them shows when it is read


class ClassificationData(LoadedData, ABC):
    """What the data modules for classification share: loaders, seeds, splits, and the description of the data.

    After ``setup``: ``classes`` (names, in the order of the labels), ``channels`` (1 or 3) and ``preprocessing`` (plain values
    from which :func:`vision.data.evaluation_transform` builds the evaluation transform). Batches are ``(images, labels)``:
    float32 b c h w, normalised, with int64 labels, or with soft labels b k in training under Mixup or CutMix; when predicting
    ``(images, names)``. ``broken`` holds the pictures that could not be read, by path.

    The order of an epoch depends only on (seed, epoch) and the augmentation of a picture only on (seed, epoch, index), and
    checkpoints keep the place in the epoch: a run that was interrupted anywhere goes on exactly as it would have.
    """

    classes: list[str]
    channels: int
    preprocessing: dict[str, Any]
    train: Pictures
    val: Pictures
    test: Pictures
    predict: Pictures

    def __init__(self, batch_size: int, augmentation: Augmentation, mixing: Mixing, num_workers: int, seed: int) -> None:
        super().__init__(batch_size, num_workers, seed)
        self.augmentation, self.mixing = augmentation, mixing
        self.classes = []
        self.broken: dict[Path, ImageError] = {}
        self._reported: set[Path] = set()
        self._ready: set[str] = set()

    def setup(self, stage: str) -> None:
        """Build the datasets, once."""
        part = "predict" if stage == "predict" else "labelled"
        if part not in self._ready:
            self._setup_prediction() if part == "predict" else self._setup_labelled()
            self.channels = self.preprocessing["channels"]
            self._ready.add(part)
            self._report_broken()
        if stage == "test" and self.test is self.val:
            log.warning("no test pictures: testing on the validation pictures, which flatters a model chosen by them")

    def teardown(self, stage: str) -> None:
        """Name the pictures that had to be left out while the stage ran."""
        self._report_broken()

    @abstractmethod
    def _setup_labelled(self) -> None:
        """Set classes, preprocessing, train, val and test."""

    @abstractmethod
    def _setup_prediction(self) -> None:
        """Set preprocessing and predict."""

    # --------------------------------------------------------------------------------------------------------- loaders

    def train_dataloader(self) -> TrainingLoader:
        rank, world = self._process()
        sampler = EpochSampler(self.train, self.batch_size, seed=self.seed, rank=rank, world=world)
        loader = TrainingLoader(self.train, batch_size=self.batch_size, sampler=sampler, **self._loading())
        loader.broken = self.broken
        return self._resumed(loader)

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.val)

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.test)

    def predict_dataloader(self) -> DataLoader:
        loader = Loader(self.predict, batch_size=self.batch_size, **self._loading())  # Lightning deals it out to the processes
        loader.broken = self.broken
        return loader

    def _evaluation_loader(self, pictures: Pictures) -> DataLoader:
        rank, world = self._process()
        sampler = EvaluationSampler(pictures, self.batch_size, rank=rank, world=world) if world > 1 else None
        batch_size = sampler.batch_size if sampler else self.batch_size
        loader = Loader(pictures, batch_size=batch_size, sampler=sampler, **self._loading())
        loader.broken = self.broken
        return loader

    # ----------------------------------------------------------------------------------------------- parts of subclasses

    def _training(self) -> Training:
        return Training(self.augmentation, self.mixing, len(self.classes), self.seed)

    def _use_memory(
        self,
        train: tuple[UInt8[np.ndarray, "n h w c"], Int[np.ndarray, " n"]],
        test: tuple[UInt8[np.ndarray, "m h w c"], Int[np.ndarray, " m"]],
        size: int,
        preprocessing: Preprocessing,
        val_share: float,
    ) -> None:
        """Set preprocessing, train, val and test from small pictures with their labels; ``classes`` is set already."""
        (images, labels), (test_images, test_labels) = train, test
        channels = preprocessing.channels or images.shape[-1]
        mean, std = statistics(convert_all(images, channels))
        self.preprocessing = preprocessing.plain(size or images.shape[1], channels=channels, mean=mean, std=std, crop_pct=1.0)
        transform = EvaluationTransform(self.preprocessing)
        names = [str(i) for i in range(len(labels))]
        rest, kept = stratified_split(labels, names, self.classes, [val_share], self.seed)
        held = hold(images, transform)
        self.train = MemoryPictures(held, rest, labels[rest], transform, training=self._training())
        self.val = MemoryPictures(held, kept, labels[kept], transform)
        self.test = MemoryPictures(hold(test_images, transform), np.arange(len(test_labels)), test_labels, transform)

    def _file_transform(self, size: int, preprocessing: Preprocessing) -> EvaluationTransform:
        """Set preprocessing for picture files, and build its transform."""
        gray = preprocessing.channels == 1  # ImageNet's values, as luma
        mean, std = ([0.449], [0.226]) if gray else (IMAGENET_MEAN, IMAGENET_STD)
        self.preprocessing = preprocessing.plain(size, channels=3, mean=mean, std=std, crop_pct=0.875)
        return EvaluationTransform(self.preprocessing)

    def _report_broken(self) -> None:
        if news := [error for path, error in self.broken.items() if path not in self._reported]:
            log.warning("left out %s", describe_broken(news))
            self._reported |= self.broken.keys()


class EmbeddedFashionMNIST(ClassificationData):
    """The Fashion-MNIST slice that comes with the package: 12,000 training and 2,000 test pictures, 28 x 28, gray, 10 classes.

    Xiao, Rasul, Vollgraf 2017 (arXiv 1708.07747). Needs no network and no workers. Predictions are of the test pictures.

    Args:
        size: side of the model's input in pixels; other than 28 resizes.
        batch_size: pictures in a batch of one process.
        val_size: how many training pictures are kept for validation, as many of each class, chosen by the seed.
        preprocessing: where it shall differ from the data's own channels, mean and deviation.
        augmentation: of the training pictures.
        mixing: Mixup and CutMix.
        num_workers: processes that prepare batches; 0 = none, -1 = one a processor, up to 8.
        seed: of the validation split, the order and the augmentation.

    Raises:
        UserError: a value is out of range.
    """

    def __init__(
        self,
        size: int = 28,
        batch_size: int = 128,
        val_size: int = 1000,
        preprocessing: Preprocessing = AS_DATA,
        augmentation: Augmentation = _SMALL,
        mixing: Mixing = NO_MIXING,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, augmentation, mixing, num_workers, seed)
        check_size(size)
        if not 10 <= val_size <= 11_990 or val_size % 10:
            raise UserError(f"val_size={val_size} does not split over the 10 classes; use a multiple of 10 from 10 to 11990")
        self.size, self.val_size, self._preprocessing = size, val_size, preprocessing

    def _setup_labelled(self) -> None:
        with np.load(Path(__file__).parent / "embedded" / "fashion_mnist" / "slice.npz", allow_pickle=False) as arrays:
            train, test = (
                (arrays[f"{part}_images"][..., None], arrays[f"{part}_labels"].astype(np.int64)) for part in ("train", "test")
            )
        self.classes = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
        self._use_memory(train, test, self.size, self._preprocessing, self.val_size / len(train[1]))

    def _setup_prediction(self) -> None:
        self.setup("fit")
        self.predict = for_prediction(self.test)


class ImageFolder(ClassificationData):
    """A folder of picture files with a sub-folder for each class, whose name becomes the class's name.

    Either ``root/train/CLASS/…`` with ``root/val`` (or ``valid``, ``validation``) and ``root/test`` beside it, both optional, or
    ``root/CLASS/…`` alone. What is missing is split off the training pictures, by class and seed. Without test pictures the
    validation pictures are tested on, and a warning says so. Hidden files and files that do not end like a picture are passed
    over. For predictions ``root`` may be any folder with pictures.

    Args:
        root: the folder; links within it may not lead out of it.
        size: side of the model's input in pixels.
        batch_size: pictures in a batch of one process.
        val_fraction: share of each class for validation where there is no such folder, 0..1.
        test_fraction: share of each class for the test where there is no such folder; 0 = none.
        preprocessing: where it shall differ from RGB, ImageNet's mean and deviation, and a centre crop of 0.875.
        augmentation: of the training pictures.
        mixing: Mixup and CutMix.
        on_broken: a picture that cannot be read ends the run ("stop") or is left out, counted and named ("skip"). Up to 50,000
            files are looked at before training starts, by their headers; the rest, and damage further on, shows when read.
        num_workers: processes that decode; 0 = none, -1 = one a processor, up to 8.
        seed: of the splits, the order and the augmentation.

    Raises:
        UserError: a value is out of range; the folder has no pictures, one class only, a class without pictures, too few pictures
            to split, or a class in val or test that training lacks; with "stop", a broken picture.
    """

    def __init__(
        self,
        root: str,
        size: int = 224,
        batch_size: int = 64,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        preprocessing: Preprocessing = AS_DATA,
        augmentation: Augmentation = _PHOTOS,
        mixing: Mixing = NO_MIXING,
        on_broken: OnBroken = "stop",
        num_workers: int = -1,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, augmentation, mixing, num_workers, seed)
        check_size(size)
        check_fraction("val_fraction", val_fraction)
        if not 0 <= test_fraction < 1 - val_fraction:
            raise UserError(
                f"test_fraction={test_fraction} leaves nothing to train on; use 0 (none) to less than {1 - val_fraction:g}"
            )
        if on_broken not in ("stop", "skip"):
            raise UserError(f"on_broken={on_broken!r} is unknown; use stop or skip")
        self.root, self.size, self.on_broken = Path(root), size, on_broken
        self.val_fraction, self.test_fraction, self._preprocessing = val_fraction, test_fraction, preprocessing

    def _setup_labelled(self) -> None:
        transform = self._file_transform(self.size, self._preprocessing)
        folders = self._folders()
        found = {split: self._scan(folder) for split, folder in folders.items()}
        self.classes = sorted(found["train"])
        if len(self.classes) == 1:
            only = folders["train"] / self.classes[0]
            raise UserError(
                f"one class only ({only}); classification needs a sub-folder of pictures for each of 2 or more classes"
            )
        labelled = {split: self._labelled(folders[split], classes) for split, classes in found.items()}
        paths, labels = labelled["train"]
        missing = {"val": self.val_fraction, "test": self.test_fraction}
        missing = {split: share for split, share in missing.items() if share and split not in labelled}
        names = [path.relative_to(folders["train"]).as_posix() for path in paths]
        parts = stratified_split(labels, names, self.classes, list(missing.values()), self.seed)
        for split, rows in zip(["train", *missing], parts, strict=True):
            labelled[split] = [paths[row] for row in rows], labels[rows]
        sets = {
            split: self._pictures(*labelled[split], transform, training=self._training() if split == "train" else None)
            for split in labelled
        }
        self.train, self.val, self.test = sets["train"], sets["val"], sets.get("test", sets["val"])

    def _setup_prediction(self) -> None:
        transform = self._file_transform(self.size, self._preprocessing)
        paths = self._readable(self._find(self.root))
        self.predict = self._pictures(paths, np.zeros(len(paths), np.int64), transform, predict=True)

    def _pictures(
        self, paths: list[Path], labels: Int[np.ndarray, " n"], transform: EvaluationTransform, **options: Any
    ) -> FilePictures:
        return FilePictures(paths, self.root, self.on_broken, labels, transform, **options)

    def _folders(self) -> dict[str, Path]:
        """The folder of each split that has one; the root itself where there is no folder train with classes in it."""
        if not self.root.is_dir():
            hint = "give a folder with a sub-folder of pictures for each class"
            raise UserError(f"data folder {self.root} {missing(self.root)}; {hint}")
        found = {split: [self.root / name for name in names if _subfolders(self.root / name)] for split, names in SPLITS.items()}
        folders = one_each(self.root, found) if any(found.values()) else {}
        if folders and "train" not in folders:
            names = ", ".join(path.name for path in folders.values())
            raise UserError(f"{self.root} has {names} but no train; put the training pictures into {self.root / 'train'}/CLASS/")
        split_names = {name for group in SPLITS.values() for name in group}
        flat = [path for path in _subfolders(self.root) if path.name in split_names and path not in folders.values()]
        flat = [path for path in flat if any(is_image_file(file) for file in path.iterdir())]
        if flat and (folders or all(path.name in split_names for path in _subfolders(self.root))):
            raise UserError(f"{flat[0]} has pictures but no class folders; put them into {flat[0]}/CLASS/, as in train")
        return folders or {"train": self.root}

    def _scan(self, folder: Path) -> dict[str, list[Path]]:
        """The pictures of each class folder."""
        self._find(folder)
        for path in folder.iterdir():
            if path.is_dir() and not path.name.startswith("."):
                require_inside(path, self.root)
        classes = {path.name: find_images(path, root=self.root) for path in _subfolders(folder)}
        if not classes:
            raise UserError(f"{folder} has pictures but no class folders; put the pictures of each class into {folder}/CLASS/")
        for name, paths in classes.items():
            if not paths:
                raise UserError(f"class folder {folder / name} has no pictures; add some, or remove the folder")
        if loose := sum(is_image_file(path) for path in folder.iterdir()):
            log.warning("%d picture(s) directly in %s belong to no class and are left out", loose, folder)
        return classes

    def _find(self, folder: Path) -> list[Path]:
        if not (paths := find_images(folder, root=self.root)):
            fix = f"put files like {folder}/CLASS/name.jpg there, or give another folder"
            raise UserError(f"data folder {no_pictures(folder, fix)}")
        tell_unread(folder, [folder])
        return paths

    def _labelled(self, folder: Path, classes: dict[str, list[Path]]) -> tuple[list[Path], Int[np.ndarray, " n"]]:
        """Readable pictures and their labels."""
        if unknown := sorted(classes.keys() - set(self.classes)):
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            known = ", ".join(self.classes[:5]) + (", …" if len(self.classes) > 5 else "")
            raise UserError(
                f"{folder} has the class {unknown[0]!r}{more} that training lacks ({len(self.classes)} classes: {known}); "
                "rename the folder, remove it, or add training pictures"
            )
        readable = set(self._readable([path for name in sorted(classes) for path in classes[name]]))
        kept = [(path, self.classes.index(name)) for name in sorted(classes) for path in classes[name] if path in readable]
        counts = np.bincount([label for _, label in kept], minlength=len(self.classes))
        if empty := [name for name in sorted(classes) if not counts[self.classes.index(name)]]:
            raise UserError(f"all pictures of class folder {folder / empty[0]} are broken; replace them, or remove the folder")
        return [path for path, _ in kept], np.array([label for _, label in kept], np.int64)

    def _readable(self, paths: list[Path]) -> list[Path]:
        """The files whose headers are sound; the others are noted, or end the run."""
        if len(paths) > _CHECKED_AT_START:
            return paths
        if broken := {error.path: error for error in check_images(paths)}:
            if self.on_broken == "stop":
                raise UserError(f"{describe_broken(list(broken.values()))} — mend or remove them, or set on_broken=skip")
            self.broken |= broken
        return [path for path in paths if path not in broken]


# --------------------------------------------------------------------------------------------------- splits and checks


def stratified_split(
    labels: Int[np.ndarray, " n"], names: Sequence[str], classes: Sequence[str], shares: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Split by class: what is left, then the given shares of each class.

    A picture's place depends on the seed and its own name, so that adding pictures moves hardly any other across.

    Args:
        labels: class of each picture.
        names: of the pictures.
        classes: names of the classes.
        shares: of each class, 0..1; at least one picture of each class goes to each.

    Returns:
        Indexes, ascending: those left, then those of each share.

    Raises:
        UserError: a class has too few pictures to be on every side.
    """
    order = hashed(seed, [zlib.crc32(name.encode()) for name in names])
    parts: list[list[np.ndarray]] = [[] for _ in range(len(shares) + 1)]
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(order[members], kind="stable")]
        counts = [max(1, round(share * len(members))) for share in shares]
        if sum(counts) >= len(members):
            raise UserError(
                f"class {name!r} has {len(members)} picture(s), of which validation and test take {sum(counts)}: "
                "none is left to train on; add pictures, or keep a smaller share"
            )
        *taken, left = np.split(members, np.cumsum(counts))
        for part, piece in zip(parts, [left, *taken], strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def check_images(paths: Sequence[Path]) -> list[ImageError]:
    """The picture files whose headers are not sound; a progress bar shows where there are many."""
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(_broken, paths)
        return [error for error in track(results, "Looking at pictures", len(paths), disable=len(paths) < 2000) if error]


def describe_broken(broken: Sequence[ImageError], most: int = 5) -> str:
    """One line: how many, the first by name and reason, then a count."""
    more = f"; and {len(broken) - most} more" if len(broken) > most else ""
    return f"{len(broken)} broken picture(s): {'; '.join(map(str, broken[:most]))}{more}"


def _broken(path: Path) -> ImageError | None:
    try:
        check_image(path)
    except ImageError as error:
        return error
    return None


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")) if folder.is_dir() else []


def check_size(size: int, *, least: int = 1) -> None:
    """Raise UserError for a side below ``least`` pixels."""
    if size < least:
        raise UserError(f"size={size} is too small; give the side of the model's input in pixels, for example 224")


def check_fraction(name: str, value: float) -> None:
    """Raise UserError unless the value lies between 0 and 1."""
    if not 0 < value < 1:
        raise UserError(f"{name}={value} is not a share of the pictures; use more than 0 and less than 1, for example 0.1")


def for_prediction(pictures: Pictures) -> Pictures:
    """The same pictures, in batches with names in place of labels."""
    pictures = copy.copy(pictures)
    pictures.predict = True
    return pictures
