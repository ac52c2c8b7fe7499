"""Weights made to fit a model of other sizes, each rule named in the report; every family uses the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import LayerNorm
from vision.weights.family import Adapted


def fit_classes(fit: Adapted, model: nn.Module, head: nn.Module, prefix: str, *, reset: Callable[[nn.Module], None]) -> None:
    """Another number of classes: the source's head is left out, and the model's starts anew.

    Args:
        head: all that depends on the number of classes.
        prefix: of its names in the model's state dict.
        reset: initialises a module of the head.
    """
    classes = next((len(t) for n, t in fit.state.items() if n.startswith(prefix) and n.endswith("weight")), 0)
    if classes == model.num_classes:
        return
    fit.state = {name: tensor for name, tensor in fit.state.items() if not name.startswith(prefix)}
    fit.fresh |= {name for name in model.state_dict() if name.startswith(prefix)}
    fate = "the head starts anew" if model.num_classes else "the head is left out"
    fit.adapted.append(f"classes {classes} -> {model.num_classes}: {fate}")
    fit.actions.append(partial(head.apply, reset))


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
