"""Weights made to fit a model of other sizes, each rule named in the report; every family uses the same ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

import core
from core import LayerNorm, RelativeTable
from vision.models.stem import ConvStem, PatchEmbedding
from vision.rebuild import partial_target
from vision.weights.family import Adapted


def fit_classes(fit: Adapted, model: nn.Module, head: nn.Module, prefix: str, *, reset: Callable[[nn.Module], None]) -> None:
    """Another number of classes: the source's head is left out, and the model's starts anew.

    Args:
        head: all that depends on the number of classes.
        prefix: of its names in the model's state dict.
        reset: initialises a module of the head.
    """
    classes = next((len(t) for n, t in fit.state.items() if n.startswith(prefix) and n.endswith("weight")), 0)
    is_backbone = model.num_classes and not any(name.startswith(prefix) for name in model.state_dict())
    if classes == model.num_classes or is_backbone:
        return
    fit.state = {name: tensor for name, tensor in fit.state.items() if not name.startswith(prefix)}
    fit.fresh |= {name for name in model.state_dict() if name.startswith(prefix)}
    fate = "the head starts anew" if model.num_classes else "the head is left out"
    fit.adapted.append(f"classes {classes} -> {model.num_classes}: {fate}")
    fit.actions.append(partial(head.apply, reset))


def fit_stem(fit: Adapted, model: Any) -> None:
    """Another number of input channels or, of PatchEmbedding, another size of patches."""
    found = [(name, part) for name, part in model.stem.named_modules() if isinstance(part, nn.Conv2d)]
    for name, first in found[:1]:
        fit_channels(fit, f"stem.{name}.weight", first.in_channels)
    if isinstance(model.stem, PatchEmbedding):
        fit_patches(fit, "stem.proj.weight", model.stem.reduction)
    elif isinstance(model.stem, ConvStem):
        convolutions = [n for n, t in fit.state.items() if n.startswith("stem.convolutions.") and t.ndim == 4]
        before, after = 2 ** len(convolutions), model.stem.reduction
        if convolutions and before != after:
            fit.problems.append(
                f"ConvStem has a convolution for each halving, patches {before} -> {after}; use patch_size={before}"
            )


def fit_channels(fit: Adapted, name: str, channels: int) -> None:
    """Another number of input channels, as timm: summed to one, otherwise repeated and scaled by before / after.

    A gray picture then gives what the same picture in equal colours gave.
    """
    weight = fit.state.get(name)
    if weight is None or weight.ndim != 4 or weight.shape[1] == channels:
        return
    before = weight.shape[1]
    if channels == 1:
        fit.adapted.append(f"channels {before} -> 1: summed")
        fit.state[name] = weight.sum(dim=1, keepdim=True)
    else:
        fit.adapted.append(f"channels {before} -> {channels}: repeated, times {before}/{channels}")
        fit.state[name] = weight.repeat(1, math.ceil(channels / before), 1, 1)[:, :channels] * (before / channels)


def fit_patches(fit: Adapted, name: str, size: int) -> None:
    """Another size of patches: the kernel that answers a resized patch as the old one did (FlexiViT, Beyer et al. 2023)."""
    weight = fit.state.get(name)
    if weight is None or weight.ndim != 4 or tuple(weight.shape[-2:]) == (size, size):
        return
    from timm.layers import resample_patch_embed  # timm takes seconds to import

    fit.adapted.append(f"patches {weight.shape[-2]}x{weight.shape[-1]} -> {size}x{size}: resampled as in FlexiViT")
    fit.state[name] = resample_patch_embed(weight, [size, size])


def fit_table(
    fit: Adapted, places: Float[Tensor, "n d"], before: tuple[int, ...], after: tuple[int, ...]
) -> Float[Tensor, "m d"]:
    """A table of positions for another grid."""
    if before == after:
        return places
    fit.adapted.append(f"positions {before[0]}x{before[1]} -> {after[0]}x{after[1]}: bicubic, antialiased (timm's rule)")
    table = rearrange(places.float(), "(h w) d -> 1 d h w", h=before[0]).clone(memory_format=torch.channels_last)
    table = F.interpolate(table, size=after, mode="bicubic", antialias=True, align_corners=False)
    return rearrange(table, "1 d h w -> (h w) d").to(places.dtype)


def fit_distances(fit: Adapted, name: str, position: RelativeTable) -> None:
    """A table of distances within a square grid, for another grid."""
    table = fit.state.get(name)
    if table is None or table.ndim != 2 or table.shape == position.table.shape or table.shape[1] != position.table.shape[1]:
        return
    cells, after = math.isqrt(len(table)), position.site.extent
    if cells**2 != len(table) or cells % 2 == 0 or len(after) != 2:
        return
    before = (cells + 1) // 2
    fit.adapted.append(f"distances within {before}x{before} -> {after[0]}x{after[1]}: bicubic (Swin's rule)")
    grid = rearrange(table.float(), "(h w) heads -> 1 heads h w", h=cells)
    grid = F.interpolate(grid, size=[2 * size - 1 for size in after], mode="bicubic", align_corners=False)
    fit.state[name] = rearrange(grid, "1 heads h w -> (h w) heads").to(table.dtype)


def fit_options(fit: Adapted, model: Any, own: Mapping[str, Any], names: Sequence[str], **defaults: Any) -> None:
    """Options of a source of ours that change what is computed but no shape: the model's must be the same.

    Args:
        own: of the source, live or as plain values.
        names: those that count.
        defaults: what None stands for.
    """
    for name in names:
        if name not in own or name not in model.options:
            continue
        theirs, ours = (meaning(defaults.get(name) if o[name] is None else o[name]) for o in (own, model.options))
        if theirs != ours:
            fit.problems.append(
                f"the source has {name} {told(theirs)}, the model {told(ours)}; build it with the source's {name}"
            )


def meaning(value: Any) -> Any:
    """An option, live or plain, such that two that compute the same are equal: a class is its name with its options."""
    if isinstance(value, (list, tuple)):
        return tuple(map(meaning, value))
    if isinstance(value, Mapping) and "class_path" in value:
        name, options = str(value["class_path"]), value.get("init_args") or {}
    elif isinstance(value, partial):
        name, options = getattr(partial_target(value), "__qualname__", str(value)), value.keywords
    elif inspect.isclass(value) or inspect.isfunction(value):
        name, options = value.__qualname__, {}
    else:
        return value
    name = name.rpartition(".")[2]
    if name == "FinetunedBias":  # its measure is adapted, see `vision.weights.windows`
        name, options = "ContinuousBias", {}
    known = getattr(core, name, None)
    defaults = {k: p.default for k, p in inspect.signature(known).parameters.items()} if inspect.isclass(known) else {}
    changing = {k: v for k, v in (defaults | options).items() if v is not inspect.Parameter.empty}
    return name, {k: meaning(v) for k, v in changing.items() if k not in ("std", "prefix")}  # prefix: the tables tell


def told(value: Any) -> str:
    """A meaning in few words."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return f"{value[0]}({', '.join(f'{k}={told(v)}' for k, v in value[1].items())})"
    return f"({', '.join(map(told, value))})" if isinstance(value, tuple) else repr(value)


def eps_of(model: nn.Module) -> float | None:
    """Of the norms."""
    return next((module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)), None)


def fit_eps(fit: Adapted, model: nn.Module, eps: float | None) -> None:
    """The eps of the source's norms, where it tells one (transformers' default is 1e-12)."""
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    if eps is None or not norms or norms[0].eps == eps:
        return
    fit.adapted.append(f"eps of the norms {norms[0].eps:g} -> {eps:g}, as the source's")
    fit.actions.append(partial(set_eps, model, norms, eps))


def set_eps(model: nn.Module, norms: list[nn.LayerNorm], eps: float) -> None:
    for norm in norms:
        norm.eps = eps
    options = getattr(model, "options", None)
    if isinstance(options, dict):
        options["norm"] = partial(LayerNorm, eps=eps)
