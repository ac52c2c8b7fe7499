"""Weights from files and models of other libraries as ours, and back; nothing in a file is ever run."""

from vision.weights.load import Report, load_model, load_weights
from vision.weights.save import save_weights

__all__ = ["Report", "load_model", "load_weights", "save_weights"]
