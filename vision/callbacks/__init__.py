"""What a training does besides training: averages, watches, saves, draws and tells."""

from __future__ import annotations

from vision.callbacks.checkpointing import GradientCheckpointing
from vision.callbacks.ema import EMA
from vision.callbacks.health import TrainingHealth
from vision.callbacks.pictures import Pictures
from vision.callbacks.preemption import Preemption
from vision.callbacks.progress import Progress
from vision.callbacks.restoration import Baselines
from vision.callbacks.summary import Summary

__all__ = ["EMA", "Baselines", "GradientCheckpointing", "Pictures", "Preemption", "Progress", "Summary", "TrainingHealth"]
