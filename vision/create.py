"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vision.errors import UserError
from vision.hub import published
from vision.models.backbone import Backbone
from vision.models.features import Features, default_indices, feature_info, last_indices
from vision.models.names import MODELS, near_names, pattern_of
from vision.rebuild import hints
from vision.weights.load import check_options, fill, used_with
from vision.weights.read import Source, Weights, read, trunk

ADVICE = (
    "use the name and options that vision weights inspect tells of them, or load what fits into a model made without weights: "
    "vision.load_weights(model, source, strict=False)"
)


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
        name: one of `vision.list_models()`; with weights="timm" one of timm's tags may follow, `vit_base_patch16_224.dino`.
        num_classes, in_chans: classes out (0: features; restorers have none), channels in.
        weights: what `vision.load_weights` takes, or "timm": timm's published weights, downloaded. They are adapted to
            classes, channels and sizes; the model keeps the report as `.weights_report`, and how pictures were made for them
            as `.preprocessing`, where they tell it.
        features_only: a list of feature maps `b c h w` instead of logits, with `.feature_info`.
        out_indices: which maps; negative ones count from the end, a number n is the last n. None: every stage of a
            pyramid, the last three blocks of a plain model.
        options: of the model's class, such as `drop_path_rate`, `img_size`, `global_pool`.

    Raises:
        UserError: an unknown name or option, weights that do not fit or cannot be had, an index out of range.
    """
    size, _, tag = str(name).partition(".")
    if size not in MODELS:
        raise UserError(f"there is no model {name!r}; {did_you_mean(str(name))}")
    if out_indices is not None and not features_only:
        raise UserError(f"out_indices={out_indices!r} chooses feature maps; add features_only=True")
    if tag and weights != "timm":
        raise UserError(f"{name}: the tag {tag} names weights that timm publishes; add weights='timm', or leave the tag out")
    build = MODELS[size]
    made = hints(build)["return"]
    if "num_classes" in inspect.signature(made).parameters or num_classes != 1000:  # a restorer has none
        options["num_classes"] = num_classes
    check_options(made, options)
    model: Any = build(in_chans=in_chans, **options)
    if isinstance(model, Backbone):
        model.published_as = name
    if features_only:
        chosen = default_indices(model) if out_indices is None else last_indices(out_indices, len(feature_info(model)))
        model = Features(model, chosen)
    if weights is not None:
        source = read(from_timm(name) if isinstance(weights, str) and weights == "timm" else weights)
        model.weights_report = fill(model, source, advice=ADVICE)
        keep_preprocessing(trunk(model), source, options)
    return model


def did_you_mean(name: str) -> str:
    near = near_names(name)
    if not near:
        return "vision.list_models() lists the names"
    if len(near) > 4:
        return f"did you mean one of vision.list_models('{pattern_of(near)}'), such as {near[0]}?"
    return f"did you mean {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))}?"


def keep_preprocessing(model: Any, source: Weights, options: Mapping[str, Any]) -> None:
    """What the source tells of its pictures, at the size that the model is asked for."""
    told = used_with(source, source.card)[1]
    if isinstance(model, Backbone) and told.get("channels") == model.in_chans:
        model.preprocessing = {**told, "size": [options["img_size"]] * 2} if "img_size" in options else told


def from_timm(name: str) -> nn.Module:
    """timm's model of this name with its default weights.

    Raises:
        UserError: timm has none, or they cannot be downloaded.
    """
    import timm

    if not timm.is_model_pretrained(name):
        raise UserError(f"timm publishes no weights for {name}; pass a file as weights=")
    return published(name, "download the file elsewhere and pass it as weights=")
