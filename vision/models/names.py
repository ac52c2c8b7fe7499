"""Named sizes: a plain dict, name -> function that builds the model (timm's names)."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

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


def list_models(
    pattern: str | Iterable[str] | None = None, *, exclude_filters: str | Iterable[str] = (), pretrained: bool = False
) -> list[str]:
    """Names that `vision.create_model` knows, sorted.

    Args:
        pattern: those that fit it, or one of several; with shell wildcards, such as "vit_*".
        exclude_filters: without those that fit one of these.
        pretrained: only those whose published weights `weights="timm"` downloads.
    """
    wanted, unwanted = patterns(pattern or "*"), patterns(exclude_filters)
    names = [name for name in sorted(MODELS) if fits(name, wanted) and not fits(name, unwanted)]
    if not pretrained:
        return names
    import timm  # takes seconds

    return [name for name in names if timm.is_model_pretrained(name)]


def patterns(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def fits(name: str, wanted: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, one) for one in wanted)


def near_names(name: str) -> list[str]:
    """Names that may be meant by one that is none: those that begin so, whatever its case, or else those spelled most like it."""
    begun = [known for known in sorted(MODELS) if name and squeezed(known).startswith(squeezed(name))]
    family = [known for known in MODELS if known.partition("_")[0] == name.lower().partition("_")[0]]
    return begun or most_like(name, family, cutoff=0.5) or most_like(name, MODELS, cutoff=0.6)


def pattern_of(names: Sequence[str]) -> str:
    """What begins as all of the names do."""
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return f"{first[:same]}*"


def squeezed(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def most_like(name: str, known: Iterable[str], *, cutoff: float) -> list[str]:
    """The nearest of the known names, and those that are about as near."""
    shares = {other: difflib.SequenceMatcher(None, name.lower(), other).ratio() for other in known}
    best = max(shares.values(), default=0.0)
    return sorted(other for other, share in shares.items() if share >= max(cutoff, best - 0.02))
