"""Weights into a model, and models from weights alone."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from vision.errors import UserError
from vision.models.backbone import Backbone
from vision.models.features import Features
from vision.rebuild import build, describe
from vision.vocabulary import from_card
from vision.weights import dat, restormer, swin, swin_v2, vit
from vision.weights.detect import LAYOUTS, Layout, detect
from vision.weights.family import Adapted, Converted, Family
from vision.weights.fit import eps_of
from vision.weights.read import Source, Weights, peeled, read, trunk, unwrap

log = logging.getLogger("vision")

FAMILIES: dict[str, Family] = {  # subclasses first
    "ViT": vit,
    "SwinV2": swin_v2,
    "Swin": swin,
    "DAT": dat,
    "Restormer": restormer,
}


@dataclass
class Report:
    """What was loaded, and how.

    Attributes:
        source: name of the file, or class of the live module.
        layout: family and naming of the source, such as "ViT, timm".
        loaded: the model's names that got the source's values.
        missing: the model's names that the source has nothing for.
        unexpected: names of the source that the model has no place for.
        adapted: what was changed to make the weights fit, one line each.
        dropped: names of the source that the model does without, and that change nothing.
        notes: what else the reader should know.
    """

    source: str
    layout: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.source} ({self.layout}): {len(self.loaded)} tensors loaded"]
        lines += [f"  adapted: {line}" for line in self.adapted]
        lines += [f"  note: {line}" for line in self.notes]
        lines += [f"  {kind}: {some(names)}" for kind in ("missing", "unexpected", "dropped") if (names := getattr(self, kind))]
        return "\n".join(lines)


def load_weights(model: nn.Module, source: Source, *, strict: bool = True, ema: bool = True) -> Report:
    """Loads weights of any known layout into a model and says what was done.

    Classes, channels, picture size and patch size may differ: the weights are adapted, and the report says how.

    Args:
        model: changed in place, and only when all is well.
        source: path (.pth .pt .safetensors .npz .ckpt, or a folder of transformers), state dict, or live module of timm,
            torchvision, transformers or ours.
        strict: whatever is missing, unexpected or of another shape is an error; otherwise it is left out and reported.
        ema: take the averaged weights where the source has both (Lightning checkpoints with EMA, `model_ema`, ...).

    Raises:
        UserError: the source cannot be read, is of another family, or does not fit; the model is then as it was.
    """
    return fill(model, read(source, ema=ema), strict=strict)


def fill(
    model: nn.Module, weights: Weights, *, strict: bool = True, chosen: Collection[str] = (), advice: str | None = None
) -> Report:
    """`load_weights` of what was read.

    Args:
        chosen: options that may differ from those of a source of ours.
        advice: what to do where they do not fit, for callers that have no `strict`.
    """
    target, outer = trunk(model), unwrap(model)
    layout, converted = convert(weights, target)
    converted.own = {name: value for name, value in converted.own.items() if name not in chosen}
    fit = fitted(weights, target, converted)
    report, misfits = compare(target, fit, weights.name, outer.left_out if isinstance(outer, Features) else ())
    if strict:
        check(report, fit, target, misfits, advice, rebuilds=layout != "own names" or weights.card is not None)
    place(target, fit, report)
    report.layout = layout + (", average" if weights.is_average else "")
    report.dropped += converted.dropped
    report.notes += [*(fit.problems if not strict else ()), *converted.notes]
    log.info("%s", report)
    return report


def fitted(weights: Weights, target: nn.Module, converted: Converted) -> Adapted:
    """The weights in the sizes of `target`.

    Raises:
        UserError: whole numbers for parameters that are none.
    """
    tensors = target.state_dict()
    whole = [n for n, t in converted.state.items() if n in tensors and tensors[n].is_floating_point() and is_whole(t)]
    if whole:
        kind = str(converted.state[whole[0]].dtype).removeprefix("torch.")
        raise UserError(
            f"{weights.name} holds {kind} numbers in {some(whole, 3)}: quantised weights need their scales; "
            "use an unquantised file"
        )
    family = next((family for family in FAMILIES.values() if isinstance(target, family.MODEL)), None)
    return family.adapt(converted, target) if family else Adapted(dict(converted.state))


def is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def convert(weights: Weights, target: nn.Module) -> tuple[str, Converted]:
    """The weights under the names of `target`, and what layout they came in.

    Raises:
        UserError: another family, or names that mean nothing for this model.
    """
    own, name = set(target.state_dict()), type(target).__name__
    family = next((key for key, family in FAMILIES.items() if isinstance(target, family.MODEL)), None)
    found = None
    for state in peeled(weights.state):
        layout = detect(state)
        if family is not None and layout is not None and layout.family == family:
            return f"{layout.family}, {layout.name}", from_layout(weights, state, layout)
        if own & state.keys() and (family is None or layout is None):
            return "own names", Converted(state)
        found = found or layout
    if found is not None:
        fix = "it cannot be converted" if found.family == name else f"the model is a {name}; use a matching pair"
        raise UserError(f"{weights.name} holds a {found.family} ({found.name}), {fix}")
    held = str(((weights.card or {}).get("model") or {}).get("class_path") or "").rpartition(".")[2]
    if held and held != name:
        raise UserError(f"{weights.name} is a file of {held}, the model is a {name}; use a matching pair")
    known = ", ".join(sorted({x.name for x in LAYOUTS if x.family == family})) or "the names of the model itself"
    raise UserError(
        f"{weights.name} fits no layout known for {name} (its names: {some(list(weights.state), 3)}); "
        + (under_a_prefix(weights) or f"known are {known}")
    )


def from_layout(weights: Weights, state: dict[str, Tensor], layout: Layout) -> Converted:
    if layout.name == "vision":
        options = own_options(weights)
        told = ("heads", "global_pool", "eps", "window_size", "img_size", "patch_size", "position")
        return Converted(state, options={name: options[name] for name in told if name in options}, own=options)
    peeled_weights = Weights(weights.name, state, module=weights.module, config=weights.config, told=weights.told)
    converted = FAMILIES[layout.family].from_layout(peeled_weights, layout.name)
    converted.options |= weights.told
    return converted


def own_options(weights: Weights) -> dict[str, Any]:
    """The options of a file or module of ours, and the eps of its norms."""
    if weights.module is not None:
        options = dict(getattr(weights.module, "options", {}))
        eps = eps_of(weights.module)
        options |= {} if eps is None else {"eps": eps}
    else:
        options = dict(((weights.card or {}).get("model") or {}).get("init_args") or {})
        norm = options.get("norm")
        options |= (norm.get("init_args") or {}) if isinstance(norm, Mapping) else {}
    return options


def compare(model: nn.Module, fit: Adapted, source: str, left_out: Collection[str] = ()) -> tuple[Report, list[str]]:
    """What goes in and what does not, and the shapes that differ.

    Args:
        left_out: names that the model had before it became a backbone.
    """
    tensors = model.state_dict(keep_vars=True)
    first = first_names(tensors)  # tied tensors have several names, and a file one of them or all
    state = fit.state = {first.get(name, name): tensor for name, tensor in fit.state.items()}
    wrong = {n: t for n, t in state.items() if n in tensors and t.shape != tensors[n].shape}
    report = Report(source, "", adapted=list(fit.adapted), notes=list(fit.notes))
    report.loaded = [n for n in tensors if n in state and n not in wrong]
    report.missing = [n for n in tensors if first[n] == n and n not in fit.fresh and n not in report.loaded]
    report.unexpected = [n for n in state if (n not in tensors or n in wrong) and n not in left_out]
    report.dropped = [n for n in state if n not in tensors and n in left_out]
    misfits = [f"{n} is {shape(t)}, the model's {shape(tensors[n])}" for n, t in wrong.items()]
    report.notes += [some(misfits, separator="; ")] if misfits else []
    return report, misfits


@torch.no_grad()
def place(model: nn.Module, fit: Adapted, report: Report) -> None:
    """Copies the tensors.

    Raises:
        UserError: numbers that are none, before anything is copied.
    """
    if broken := not_finite({name: fit.state[name] for name in report.loaded}):
        raise UserError(f"{report.source} holds {broken}: its training diverged; use an earlier checkpoint")
    tensors = model.state_dict(keep_vars=True)
    for name in report.loaded:
        tensors[name].copy_(fit.state[name])
    for action in fit.actions:
        action()


def not_finite(state: Mapping[str, Tensor]) -> str:
    """NaN or infinity, and where; empty if there is none."""
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.float().isfinite().all()]
    return f"NaN or infinity in {some(broken, 3)}" if broken else ""


def check(report: Report, fit: Adapted, model: nn.Module, misfits: list[str], advice: str | None, *, rebuilds: bool) -> None:
    """Raises: UserError: the first thing that is wrong, with some names and the fix."""
    where = f"{report.source} does not fit {type(model).__name__}"
    if fit.problems:  # first: they say why shapes differ, where they do
        raise UserError(f"{where}: {'; '.join(fit.problems)}" + (", or strict=False" if advice is None else ""))
    whole = "vision.load_model(source) for the model it was made for, or " if rebuilds else ""
    fix = f"use {whole}strict=False to load what fits" if advice is None else advice
    if misfits:
        raise UserError(f"{where}: {some(misfits, 2, '; ')}; {fix}")
    if said := differences(report):
        raise UserError(f"{where}: it {' and '.join(said)}; {fix}")


def differences(report: Report) -> list[str]:
    parts = [("lacks", report.missing), ("has, unexpected,", report.unexpected)]
    return [f"{verb} {some(names, 3)}" for verb, names in parts if names]


def problems_of(weights: Weights, model: nn.Module) -> list[str]:
    """Why its own model would not take the weights, a line each.

    Args:
        model: with the options that the weights tell; it may be on the device `meta`, as nothing is copied.
    """
    try:
        fit = fitted(weights, model, convert(weights, model)[1])
    except UserError as error:
        return [str(error)]
    report, misfits = compare(model, fit, weights.name)
    said = [some(misfits, separator="; ")] if misfits else [f"it {part}" for part in differences(report)]
    broken = not_finite({name: fit.state[name] for name in report.loaded})
    return [*fit.problems, *said, *([broken] if broken else [])]


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of the tensor that each name stands for."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def load_model(source: Source, *, ema: bool = True, allow: Collection[str] = (), **options: Any) -> nn.Module:
    """A model from the source alone, in evaluation mode.

    Its `.classes` (names), `.preprocessing` (see `vision.data`) and, for sequences, `.vocabularies` and `.limits` are those
    of the source, or empty if it has none.

    Args:
        source: a checkpoint or model.safetensors of ours, published ViT weights (timm, torchvision, transformers,
            Google), a state dict, or a live module.
        ema: take the averaged weights where the source has both.
        allow: class paths or packages, beside ours, torch.nn, timm and torchvision, that the file may name.
        options: of the model, where the source's are not wanted or not told (`heads`, `num_classes`, `drop_path_rate`).

    Raises:
        UserError: the source cannot be read, or does not tell enough to build its model.
    """
    weights = read(source, ema=ema)
    card = card_of(weights)
    assumed: list[str] = []
    if card is not None:
        check_heads(card["model"].get("init_args") or {}, options)
        model: Any = build(with_options(card["model"], options), allow=allow)
    else:
        layout, state = known_layout(weights)
        converted = from_layout(weights, state, layout)
        family = FAMILIES[layout.family]
        converted.options |= {name: options[name] for name in ("heads", "window_size") if name in options}  # if not told
        try:
            told = family.options_of(converted)
        except UserError as error:
            raise UserError(f"{weights.name}: {error}") from error
        check_options(family.MODEL, options)
        check_heads(told, options)
        model = cast("Any", family.MODEL(**{**told, **options}))
        assumed = [note for name, note in converted.assumed.items() if name not in options]
    advice = f"leave out {', '.join(options)}" if options else "get the whole file"
    advice += ", or build the model and use vision.load_weights(model, source, strict=False) to load what fits"
    model.weights_report = fill(model, weights, chosen=options, advice=advice)
    model.weights_report.notes += assumed
    classes, preprocessing = used_with(weights, card)
    same = len(classes) == getattr(model, "num_classes", len(classes))
    model.classes, model.preprocessing = classes if same else [], preprocessing
    for name in {"tile", "degradation"} & set(card or ()):  # of a restorer
        setattr(model, name, (card or {})[name])
    model.vocabularies, model.limits = from_card(card), dict((card or {}).get("limits") or {})
    return model.eval()


def card_of(weights: Weights) -> dict[str, Any] | None:
    """Plain values that rebuild the model, checked; made on the spot for a live model of ours."""
    card = weights.card
    if card is None and weights.module is not None and isinstance(getattr(weights.module, "options", None), dict):
        return {"model": describe(weights.module)}
    if card is None:
        return None
    if not isinstance(card, Mapping) or not isinstance(card.get("model"), Mapping):
        raise UserError(f"{weights.name} does not describe its model; build the model and use vision.load_weights(model, source)")
    if card.get("format") != 1:
        raise UserError(
            f"{weights.name} has format {card.get('format')!r}, this version reads 1; install the version that wrote it"
        )
    return dict(card)


def with_options(spec: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec, "init_args": {**(spec.get("init_args") or {}), **options}}


def known_layout(weights: Weights) -> tuple[Layout, dict[str, Tensor]]:
    found = None
    for state in peeled(weights.state):
        layout = detect(state)
        if layout is not None and layout.family in FAMILIES:
            return layout, state
        found = found or layout
    known = ", ".join(dict.fromkeys(f"{x.family} ({x.name})" for x in LAYOUTS if x.family in FAMILIES))
    what = f"holds a {found.family} ({found.name})" if found else f"has no known names ({some(list(weights.state), 3)})"
    raise UserError(
        f"{weights.name} {what}; "
        + ((not found and under_a_prefix(weights)) or f"models are built from files of ours and from {known}")
    )


def under_a_prefix(weights: Weights) -> str:
    """Advice, where a known model stands under a prefix and other things beside it; otherwise empty."""
    for prefix in dict.fromkeys(f"{name.partition('.')[0]}." for name in weights.state if "." in name):
        inner = {name: tensor for name, tensor in weights.state.items() if name.startswith(prefix)}
        if layout := next(filter(None, map(detect, peeled(inner))), None):
            return (
                f"those under {prefix} are a {layout.family} ({layout.name}): keep them alone, in Python: "
                "import torch; from vision.weights.read import read; torch.save({k: v for k, v in read(FILE).state.items() "
                f"if k.startswith({prefix!r})}}, 'weights.pth')"
            )
    return ""


def check_heads(told: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises: UserError: one number of heads for a model that has one a stage."""
    heads = told.get("heads")
    if isinstance(heads, (list, tuple)) and isinstance(options.get("heads"), int):
        raise UserError(f"heads={options['heads']}: the source tells the heads of each stage, {tuple(heads)}; leave heads out")


ANY_SIZE = "leave it out: pictures of any size are taken"
TIMMS_OPTIONS = {  # and what is here instead
    "pretrained": "use weights='timm' to download, or weights=FILE",
    "checkpoint_path": "use weights=FILE",
    "dynamic_img_size": ANY_SIZE,
    "dynamic_img_pad": ANY_SIZE,
    "strict_img_size": ANY_SIZE,
    "global_pool": "leave it out: the mean is taken; forward_features gives what is pooled",
    "class_token": "use class_tokens=0 or 1",
    "norm_layer": "use norm",
    "no_embed_class": "use position=functools.partial(core.Learned, prefix=False)",
}


def check_options(model: type[nn.Module], options: Mapping[str, Any]) -> None:
    """Raises: UserError: an option that the model does not have, with the nearest one."""
    known = [name for name in inspect.signature(model).parameters if name != "self"]
    for name in options:
        if name in TIMMS_OPTIONS and name not in known:
            raise UserError(f"{model.__name__} has no option {name}; {TIMMS_OPTIONS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise UserError(f"{model.__name__} has no option {name}; {hint}")


# What the source says about its use


def used_with(weights: Weights, card: Mapping[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Class names and preprocessing."""
    if weights.card is not None and card is not None:
        return [str(name) for name in card.get("classes") or ()], dict(card.get("preprocessing") or {})
    module: Any = weights.module
    if isinstance(module, Backbone) or isinstance(getattr(module, "classes", None), list):
        return list(getattr(module, "classes", [])), dict(getattr(module, "preprocessing", {}))
    if weights.config:
        return transformers_classes(weights.config), transformers_preprocessing(weights.config, weights.processor)
    return [], timm_preprocessing(module) if module is not None and hasattr(module, "pretrained_cfg") else {}


def transformers_classes(config: Mapping[str, Any]) -> list[str]:
    names = config.get("id2label") or {}
    labels = [str(names[key]) for key in sorted(names, key=int)]
    return [] if all(label == f"LABEL_{i}" for i, label in enumerate(labels)) else labels


def transformers_preprocessing(config: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    """From preprocessor_config.json beside the file; without a crop, which is how ViT's are."""
    size = processor.get("size")
    if not processor or processor.get("do_center_crop") or not isinstance(size, (int, Mapping)):
        return {}
    height, width = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    mean, std = processor.get("image_mean"), processor.get("image_std")
    if not all((height, width, mean, std)):
        return {}
    return {
        "channels": config.get("num_channels", 3),
        "size": [height, width],
        "mean": mean,
        "std": std,
        "interpolation": {0: "nearest", 3: "bicubic"}.get(processor.get("resample", 2), "bilinear"),  # PIL's numbers
        "crop_pct": 1.0,
        "resize": "squash",
    }


def timm_preprocessing(module: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_data_config

    config = resolve_data_config({}, model=module)
    return {
        "channels": config["input_size"][0],
        "size": list(config["input_size"][1:]),
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        "interpolation": config["interpolation"],
        "crop_pct": config["crop_pct"],
        "resize": "squash" if config["crop_mode"] == "squash" else "crop",
    }


def some(names: Collection[str], most: int = 4, separator: str = ", ") -> str:
    listed = separator.join(list(names)[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
