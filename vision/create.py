"""Models by name."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from vision.errors import UserError
from vision.hub import published
from vision.models.features import Features, check_whole, default_indices, feature_info
from vision.models.names import MODELS
from vision.rebuild import hints
from vision.weights.load import check_options, load_weights
from vision.weights.read import Source

log = logging.getLogger("vision")


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    weights: Source | None = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    **options: Any,
) -> nn.Module:
    """A model of a named size.

    Args:
        name: one of `vision.list_models()`.
        num_classes, in_chans: classes out (0: features; restorers have none), channels in.
        weights: what `vision.load_weights` takes, or "timm": timm's published weights, downloaded. They are adapted to
            classes, channels and sizes; the model keeps the report as `.weights_report`.
        features_only: a list of feature maps `b c h w` instead of logits, with `.feature_info`.
        out_indices: which maps; negative ones count from the end, a number n is the last n. None: every stage of a
            pyramid, the last three blocks of a plain model.
        options: of the model's class, such as `drop_path_rate`, `img_size`, `global_pool`.

    Raises:
        UserError: an unknown name or option, weights that do not fit or cannot be had, an index out of range.
    """
    if name not in MODELS:
        family = str(name).partition("_")[0]
        near = difflib.get_close_matches(str(name), [known for known in MODELS if known.partition("_")[0] == family], n=1)
        near = near or difflib.get_close_matches(str(name), MODELS, n=1)
        hint = f"did you mean {near[0]}?" if near else "vision.list_models() lists the names"
        raise UserError(f"there is no model {name!r}; {hint}")
    if out_indices is not None and not features_only:
        raise UserError(f"out_indices={out_indices!r} chooses feature maps; add features_only=True")
    build = MODELS[name]
    made = hints(build)["return"]
    if "num_classes" in inspect.signature(made).parameters or num_classes != 1000:  # a restorer has none
        options["num_classes"] = num_classes
    check_options(made, options)
    model: Any = build(in_chans=in_chans, **options)
    if weights is not None:
        model.weights_report = load_weights(model, from_timm(name) if isinstance(weights, str) and weights == "timm" else weights)
        log.info("%s", model.weights_report)
    return Features(model, indices_of(model, out_indices)) if features_only else model


def indices_of(model: nn.Module, out_indices: int | Sequence[int] | None) -> Sequence[int]:
    if out_indices is None:
        return default_indices(model)
    if isinstance(out_indices, int) and not isinstance(out_indices, bool):
        count = len(feature_info(model))
        if not 0 < out_indices <= count:
            raise UserError(f"out_indices={out_indices} is a number of last maps, 1..{count}; for one map use [{out_indices}]")
        return tuple(range(count - out_indices, count))
    return check_whole(out_indices)


def from_timm(name: str) -> nn.Module:
    """timm's model of this name with its default weights.

    Raises:
        UserError: timm has none, or they cannot be downloaded.
    """
    import timm

    if not timm.is_model_pretrained(name):
        raise UserError(f"timm publishes no weights for {name}; pass a file as weights=")
    return published(name, "download the file elsewhere and pass it as weights=")
