"""What spoils pictures, for training a restorer from clean ones: seeded, and composed by YAML."""

from __future__ import annotations

from vision.data.degradations.base import Chain, Degradation
from vision.data.degradations.noise import GaussianNoise

__all__ = ["Chain", "Degradation", "GaussianNoise"]
