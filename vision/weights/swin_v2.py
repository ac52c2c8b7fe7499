"""Swin v2 weights: as Swin's."""

from vision.models.swin_v2 import SwinV2
from vision.weights.swin import LAYOUTS, adapt, from_layout, options_of, to_layout, untold

__all__ = ["LAYOUTS", "MODEL", "adapt", "from_layout", "options_of", "to_layout", "untold"]

MODEL = SwinV2
