"""What spoils pictures, for training a restorer from clean ones: seeded, and composed by YAML."""

from __future__ import annotations

from vision.data.degradations.base import Chain, Degradation
from vision.data.degradations.blur import GaussianBlur, MotionBlur
from vision.data.degradations.compression import JPEG
from vision.data.degradations.noise import GaussianNoise, PoissonNoise
from vision.data.degradations.rain import Rain
from vision.data.degradations.resize import Downsample
from vision.data.degradations.second_order import SecondOrder

__all__ = [
    "JPEG",
    "Chain",
    "Degradation",
    "Downsample",
    "GaussianBlur",
    "GaussianNoise",
    "MotionBlur",
    "PoissonNoise",
    "Rain",
    "SecondOrder",
]
