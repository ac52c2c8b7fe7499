"""Pictures for training and evaluation: safe reading, augmentation and Lightning data modules. Lazy: importing it is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vision.data.augment import Augmentation, Mixing
    from vision.data.classification import ClassificationData, EmbeddedFashionMNIST, ImageFolder
    from vision.data.degradations import (
        JPEG,
        Chain,
        Degradation,
        Downsample,
        GaussianBlur,
        GaussianNoise,
        MotionBlur,
        PoissonNoise,
        Rain,
        SecondOrder,
    )
    from vision.data.images import check_image, find_images, is_image_file, read_image
    from vision.data.metadata import Metadata, read_metadata
    from vision.data.preprocessing import Preprocessing, evaluation_transform
    from vision.data.rendered import RenderedWords
    from vision.data.restoration import EmbeddedPhotos, RestorationData
    from vision.data.restoration_folders import CleanFolder, PairedFolder
    from vision.data.saving import write_image
    from vision.data.schedule import Stage
    from vision.data.sequences import EmbeddedCMUdict, PairsFile, SequenceData, ToySequences
    from vision.data.torchvision_sets import TorchvisionSet

_HOMES = {
    "images": ("read_image", "check_image", "is_image_file", "find_images"),
    "metadata": ("Metadata", "read_metadata"),
    "preprocessing": ("Preprocessing", "evaluation_transform"),
    "augment": ("Augmentation", "Mixing"),
    "classification": ("ClassificationData", "EmbeddedFashionMNIST", "ImageFolder"),
    "degradations": (
        "Chain",
        "Degradation",
        "Downsample",
        "GaussianBlur",
        "GaussianNoise",
        "JPEG",
        "MotionBlur",
        "PoissonNoise",
        "Rain",
        "SecondOrder",
    ),
    "rendered": ("RenderedWords",),
    "restoration": ("EmbeddedPhotos", "RestorationData"),
    "restoration_folders": ("CleanFolder", "PairedFolder"),
    "saving": ("write_image",),
    "schedule": ("Stage",),
    "sequences": ("EmbeddedCMUdict", "PairsFile", "SequenceData", "ToySequences"),
    "torchvision_sets": ("TorchvisionSet",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "JPEG",
    "Augmentation",
    "Chain",
    "ClassificationData",
    "CleanFolder",
    "Degradation",
    "Downsample",
    "EmbeddedCMUdict",
    "EmbeddedFashionMNIST",
    "EmbeddedPhotos",
    "GaussianBlur",
    "GaussianNoise",
    "ImageFolder",
    "Metadata",
    "Mixing",
    "MotionBlur",
    "PairedFolder",
    "PairsFile",
    "PoissonNoise",
    "Preprocessing",
    "Rain",
    "RenderedWords",
    "RestorationData",
    "SecondOrder",
    "SequenceData",
    "Stage",
    "TorchvisionSet",
    "ToySequences",
    "check_image",
    "evaluation_transform",
    "find_images",
    "is_image_file",
    "read_image",
    "read_metadata",
    "write_image",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
