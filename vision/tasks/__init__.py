"""Tasks: LightningModules that bring a loss and metrics to a model."""

from vision.tasks.classification import Classification

__all__ = ["Classification"]
