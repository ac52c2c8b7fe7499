"""Named sizes: a plain dict, name -> function that builds the model (timm's names)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from torch import nn

from vision.models import dat, restormer, swin, swin_restorer, swin_v2, vit

MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit_tiny_patch16_224": vit.vit_tiny_patch16_224,
    "vit_small_patch16_224": vit.vit_small_patch16_224,
    "vit_base_patch16_224": vit.vit_base_patch16_224,
    "vit_base_patch32_224": vit.vit_base_patch32_224,
    "vit_large_patch16_224": vit.vit_large_patch16_224,
    "deit_tiny_patch16_224": vit.vit_tiny_patch16_224,
    "deit_small_patch16_224": vit.vit_small_patch16_224,
    "deit_base_patch16_224": vit.vit_base_patch16_224,
    "deit_tiny_distilled_patch16_224": vit.deit_tiny_distilled_patch16_224,
    "deit_small_distilled_patch16_224": vit.deit_small_distilled_patch16_224,
    "deit_base_distilled_patch16_224": vit.deit_base_distilled_patch16_224,
    "deit3_small_patch16_224": vit.deit3_small_patch16_224,
    "deit3_base_patch16_224": vit.deit3_base_patch16_224,
    "deit3_large_patch16_224": vit.deit3_large_patch16_224,
    "dat_tiny": dat.dat_tiny,
    "dat_small": dat.dat_small,
    "dat_base": dat.dat_base,
    "dat_plus_tiny": dat.dat_plus_tiny,
    "dat_plus_small": dat.dat_plus_small,
    "dat_plus_base": dat.dat_plus_base,
    "restormer": restormer.restormer,
    "restormer_small": restormer.restormer_small,
    "swin_restorer": swin_restorer.swin_restorer,
    "swin_restorer_light": swin_restorer.swin_restorer_light,
    "swin_restorer_small": swin_restorer.swin_restorer_small,
    "swin_tiny_patch4_window7_224": swin.swin_tiny_patch4_window7_224,
    "swin_small_patch4_window7_224": swin.swin_small_patch4_window7_224,
    "swin_base_patch4_window7_224": swin.swin_base_patch4_window7_224,
    "swin_large_patch4_window7_224": swin.swin_large_patch4_window7_224,
    "swin_base_patch4_window12_384": swin.swin_base_patch4_window12_384,
    "swin_large_patch4_window12_384": swin.swin_large_patch4_window12_384,
    "swinv2_tiny_window8_256": swin_v2.swinv2_tiny_window8_256,
    "swinv2_tiny_window16_256": swin_v2.swinv2_tiny_window16_256,
    "swinv2_small_window8_256": swin_v2.swinv2_small_window8_256,
    "swinv2_small_window16_256": swin_v2.swinv2_small_window16_256,
    "swinv2_base_window8_256": swin_v2.swinv2_base_window8_256,
    "swinv2_base_window16_256": swin_v2.swinv2_base_window16_256,
    "swinv2_base_window12_192": swin_v2.swinv2_base_window12_192,
    "swinv2_base_window12to16_192to256": swin_v2.swinv2_base_window12to16_192to256,
    "swinv2_base_window12to24_192to384": swin_v2.swinv2_base_window12to24_192to384,
    "swinv2_large_window12_192": swin_v2.swinv2_large_window12_192,
    "swinv2_large_window12to16_192to256": swin_v2.swinv2_large_window12to16_192to256,
    "swinv2_large_window12to24_192to384": swin_v2.swinv2_large_window12to24_192to384,
}


def list_models(pattern: str | None = None) -> list[str]:
    """Names that `vision.create_model` knows, sorted; `pattern` has shell wildcards, such as "vit_*"."""
    return sorted(name for name in MODELS if pattern is None or fnmatch.fnmatch(name, pattern))
