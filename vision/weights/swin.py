"""Swin and Swin v2 weights of timm, torchvision, transformers and Microsoft as ours, and timm's and torchvision's back.

Every layout is first spelled as timm's (since 0.9, where a stage begins with its downsampling).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from core import ContinuousBias, LayerNorm, RelativeTable
from core.position.table import all_distances, whole_index
from vision.errors import UserError
from vision.models.swin import Swin
from vision.models.swin_v2 import SwinV2
from vision.models.vit import init_weights
from vision.weights.family import Adapted, Converted, IncompleteError
from vision.weights.fit import eps_of, fit_classes, fit_eps, fit_options, fit_stem
from vision.weights.read import Weights
from vision.weights.windows import (
    fit_extents,
    fit_windows,
    of_config,
    of_module,
    of_options,
    of_tensors,
    options_for,
    positions_of,
)

MODEL = Swin
LAYOUTS = ("timm", "torchvision")

NAMES = (  # timm's, ours
    ("patch_embed.proj.", "stem.proj."),
    ("patch_embed.norm.", "stem_norm."),
    ("layers.{}.downsample.norm.", "stages.{}.downsampling.norm."),
    ("layers.{}.downsample.reduction.", "stages.{}.downsampling.reduction."),
    ("layers.{}.blocks.{}.norm1.", "stages.{}.blocks.{}.norm1."),
    ("layers.{}.blocks.{}.attn.qkv.", "stages.{}.blocks.{}.attention.attention.qkv."),
    ("layers.{}.blocks.{}.attn.proj.", "stages.{}.blocks.{}.attention.attention.out."),
    ("layers.{}.blocks.{}.attn.relative_position_bias_table", "stages.{}.blocks.{}.attention.attention.position.table"),
    ("layers.{}.blocks.{}.attn.logit_scale", "stages.{}.blocks.{}.attention.attention.qk_norm.logit_scale"),
    ("layers.{}.blocks.{}.attn.cpb_mlp.0.", "stages.{}.blocks.{}.attention.attention.position.hidden."),
    ("layers.{}.blocks.{}.attn.cpb_mlp.2.", "stages.{}.blocks.{}.attention.attention.position.out."),
    ("layers.{}.blocks.{}.norm2.", "stages.{}.blocks.{}.norm2."),
    ("layers.{}.blocks.{}.mlp.fc1.", "stages.{}.blocks.{}.ffn.up."),
    ("layers.{}.blocks.{}.mlp.fc2.", "stages.{}.blocks.{}.ffn.down."),
    ("norm.", "norm."),
    ("head.fc.", "head."),
)
HF = r"^encoder\.layers\.(\d+)\.blocks\.(\d+)\."
SPELLINGS = {  # to timm's, in this order; "<n>" is a number that still has to be made one more or half
    "timm": (),
    "microsoft": ((r"^layers\.(\d+)\.downsample\.", r"layers.<\1+1>.downsample."), (r"^head\.", "head.fc.")),
    "torchvision": (
        (r"^features\.0\.0\.", "patch_embed.proj."),
        (r"^features\.0\.2\.", "patch_embed.norm."),
        (r"^features\.(\d*[13579])\.", r"layers.<\1/2>.blocks."),
        (r"^features\.(\d+)\.", r"layers.<\1/2>.downsample."),
        (r"\.mlp\.0\.", ".mlp.fc1."),
        (r"\.mlp\.3\.", ".mlp.fc2."),
        (r"^head\.", "head.fc."),
    ),
    "huggingface": (
        (r"^(swin|swinv2)\.", ""),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        (r"^encoder\.layers\.(\d+)\.downsample\.", r"layers.<\1+1>.downsample."),
        (HF + r"layernorm_before\.", r"layers.\1.blocks.\2.norm1."),
        (HF + r"layernorm_after\.", r"layers.\1.blocks.\2.norm2."),
        (HF + r"attention\.(?:self\.)?([qkv])(?:uery|ey|alue|_proj)\.", r"layers.\1.blocks.\2.attn.\3."),
        (HF + r"attention\.(?:output\.dense|o_proj)\.", r"layers.\1.blocks.\2.attn.proj."),
        (
            HF + r"attention\.(?:self|relative_position_bias)\.(?:continuous_position_bias_mlp)\.",
            r"layers.\1.blocks.\2.attn.cpb_mlp.",
        ),
        (HF + r"attention\.(?:self|relative_position_bias)\.", r"layers.\1.blocks.\2.attn."),
        (HF + r"(?:intermediate\.dense|mlp\.fc1)\.", r"layers.\1.blocks.\2.mlp.fc1."),
        (HF + r"(?:output\.dense|mlp\.fc2)\.", r"layers.\1.blocks.\2.mlp.fc2."),
        (r"^layernorm\.", "norm."),
        (r"^classifier\.", "head.fc."),
    ),
}
NOTES = {
    "huggingface": ["transformers decides by its image_size where windows shift: its numbers at other sizes may differ"],
}
FOLLOWS = r"\.(relative_position_index|relative_coords_table|attn_mask|k_bias)$|(^|\.)mask_token$"  # from the sizes, or unused
BEYOND = {  # parts of related models that ours do not have
    r"(^|\.)absolute_pos_embed$|position_embeddings$": "absolute positions (ape)",
    r"\.attn\.meta_mlp\.": "the bias of Swin v2-CR",
}


# Theirs to ours


def from_layout(weights: Weights, layout: str) -> Converted:
    """A state dict in one of SPELLINGS under our names.

    Raises:
        UserError: it has parts that Swin does not have.
    """
    theirs = {as_timm(name, layout): tensor for name, tensor in weights.state.items()}
    for pattern, part in BEYOND.items():
        if any(re.search(pattern, name) for name in theirs):
            raise UserError(f"{weights.name} has {part}, which our Swin does not; use the library it comes from")
    options: dict[str, Any] = of_tensors(theirs)
    options |= live_options(weights.module, layout) if weights.module is not None else {}
    options |= config_options(weights.config) if layout == "huggingface" else {}
    options |= {"padding": "roll_then_pad"} if layout == "timm" else {}
    dropped = [name for name in theirs if re.search(FOLLOWS, name)]
    theirs = {name: tensor for name, tensor in theirs.items() if name not in dropped}
    notes = join_projections(theirs) + NOTES.get(layout, [])
    return Converted({renamed(name, 0): tensor for name, tensor in theirs.items()}, options, dropped, notes)


def as_timm(name: str, layout: str) -> str:
    """A layout's name as timm's."""
    for pattern, replacement in SPELLINGS[layout]:
        name = re.sub(pattern, replacement, name)
    name = re.sub(r"<(\d+)\+1>", lambda match: str(int(match[1]) + 1), name)
    return re.sub(r"<(\d+)/2>", lambda match: str(int(match[1]) // 2), name)


def renamed(name: str, source: int) -> str:
    """timm's name as ours (`source` 0), or ours as timm's (1); a name that is not in the table stays as it is."""
    for pair in NAMES:
        pattern = re.escape(pair[source]).replace(r"\{\}", r"(\d+)") + r"(weight|bias|)"
        if match := re.fullmatch(pattern, name):
            *numbers, rest = match.groups()
            return pair[1 - source].format(*numbers) + rest
    return name


def join_projections(theirs: dict[str, Tensor]) -> list[str]:
    """Queries, keys and values in one tensor; a bias that a source does without is zero. Returns notes."""
    without = 0
    for name in [name for name in theirs if re.search(r"\.attn\.(q|qkv)\.weight$", name)]:
        attn = name[: name.rindex(".attn.") + len(".attn.")]
        if name.endswith(".q.weight"):
            theirs[f"{attn}qkv.weight"] = torch.cat([theirs.pop(f"{attn}{part}.weight") for part in "qkv"])
        dim = theirs[f"{attn}qkv.weight"].shape[1]
        if f"{attn}qkv.bias" in theirs:
            continue
        zero = theirs[f"{attn}qkv.weight"].new_zeros(dim)
        parts = [theirs.pop(f"{attn}{part}.bias", theirs.pop(f"{attn}{part}_bias", None)) for part in "qkv"]
        without += parts[0] is None
        theirs[f"{attn}qkv.bias"] = torch.cat([zero if part is None else part for part in parts])
    return [f"{without} projections without a bias get one of zeros"] if without else []


def live_options(module: nn.Module, layout: str) -> dict[str, Any]:
    """Windows, picture size and eps of a live module."""
    name = type(module).__name__
    if any(getattr(part, "always_partition", False) for part in module.modules()):
        raise UserError(f"{name} was built with always_partition=True, which our Swin does not know; use timm for it")
    parts = dict(module.named_modules())
    options = of_module({as_timm(f"{name}.", layout): part for name, part in parts.items()})
    options["eps"] = next((part.eps for part in parts.values() if isinstance(part, nn.LayerNorm)), None)
    size = getattr(parts.get("patch_embed"), "img_size", None)
    return options | ({"img_size": size[0]} if size is not None and size[0] == size[1] else {})


def config_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, picture size and eps of transformers' config."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"the config has hidden_act={config['hidden_act']!r}, Swin the exact GELU; use transformers for it")
    if config.get("layer_norm_eps", 1e-5) != 1e-5:  # Swin's; transformers gives another one to some of the norms only
        raise UserError(
            f"the config has layer_norm_eps={config['layer_norm_eps']:g}, all of Swin's norms 1e-05; use transformers for it"
        )
    return of_config(config)


def options_of(converted: Converted) -> dict[str, Any]:
    """Options that build the model for these weights.

    Raises:
        UserError: the shapes do not tell; the message says what does.
    """
    state, known = converted.state, converted.options
    patches = state.get("stem.proj.weight")
    if patches is None or patches.ndim != 4 or patches.shape[-1] != patches.shape[-2]:
        raise UserError(
            "the stem's shape does not tell how it is made; build the model and use vision.load_weights(model, source)"
        )
    dim, in_chans, patch_size = patches.shape[:3]
    blocks = [(int(match[1]), int(match[2])) for name in state if (match := re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", name))]
    depths = [1 + max((j for i, j in blocks if i == stage), default=-1) for stage in range(1 + max(blocks)[0])]
    if 0 in depths or "stages.0.blocks.0.ffn.up.weight" not in state:
        lost = f"blocks of stage {depths.index(0)}" if 0 in depths else "stages.0.blocks.0.ffn.up.weight (our name)"
        raise IncompleteError(f"the weights lack {lost}; they are no whole Swin")
    inside = "stages.{}.blocks.0.attention.attention."
    heads = [heads_of(state, inside.format(i)) for i in range(len(depths))]
    hidden = len(state["stages.0.blocks.0.ffn.up.weight"])
    eps = known.get("eps")
    if not known.get("windows") and "window_size" not in known:
        raise UserError(
            "the weights do not tell their windows; pass them: vision.load_model(source, window_size=..., img_size=...)"
        )
    told = options_for(known["windows"], known["extents"], known.get("img_size"), patch_size) if known.get("windows") else {}
    if told and not known.get("img_size"):
        converted.assumed["img_size"] = (
            f"the picture size is not told: taken as {told['img_size']}, where the last window covers its map, as in published "
            "models; if it was another, pass it: vision.load_model(source, img_size=...)"
        )
    return told | {
        "patch_size": patch_size,
        "in_chans": in_chans,
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
        "dim": dim,
        "depths": tuple(depths),
        "heads": tuple(heads),
        "mlp_ratio": hidden / dim if int(dim * (hidden / dim)) == hidden else math.nextafter(hidden / dim, math.inf),
        **({"padding": known["padding"]} if "padding" in known else {}),
        **({"norm": partial(LayerNorm, eps=eps)} if eps not in (None, 1e-5) else {}),
    }


def heads_of(state: Mapping[str, Tensor], attention: str) -> int:
    if f"{attention}position.table" in state:
        return state[f"{attention}position.table"].shape[1]
    if f"{attention}qk_norm.logit_scale" in state:
        return len(state[f"{attention}qk_norm.logit_scale"])
    raise UserError("there is no table of positions; build the model and use vision.load_weights(model, source)")


# Ours into a model of other sizes


def adapt(converted: Converted, model: Swin) -> Adapted:
    """The weights in the model's sizes: classes, channels, patches, windows, eps."""
    fit, told = Adapted(dict(converted.state)), converted.options
    fit_classes(fit, model, model.head, "head.", reset=init_weights)
    fit_stem(fit, model)
    fit_options(fit, model, converted.own, ["heads", "position"], position=model.default_position)
    before, after = converted.own.get("padding", told.get("padding")), model.options["padding"]
    if before not in (None, after):
        fit.notes.append(f"the source has padding={before!r}, the model {after!r}: other numbers where windows do not fit a map")
    told = of_options(told, len(model.stages)) | told
    fit_windows(fit, model, told.get("windows", ()))
    fit_extents(fit, model, told.get("extents", ()))
    fit_eps(fit, model, told.get("eps"))
    return fit


# Ours to theirs


def to_layout(model: Swin, layout: str) -> dict[str, Tensor]:
    """The model's tensors under the names of one of LAYOUTS.

    Raises:
        UserError: the model has parts that the layout has no place for.
    """
    state = {renamed(name, 1): tensor for name, tensor in model.state_dict().items()}
    alien = next((name for name in state if re.search(r"^stages\.|^stem", name)), None)
    kinds = [position for _, position in positions_of(model).values() if not isinstance(position, model.default_position)]
    alien = type(kinds[0]).__name__ if kinds else alien
    if alien:
        raise UserError(f"{layout}'s Swin has no place for {alien}; use layout='vision'")
    if layout == "timm":
        return split_biases(state) if isinstance(model, SwinV2) else state
    return as_torchvision(state, model)


def untold(model: Swin) -> dict[str, Any]:
    """Windows, picture size and eps, which a state dict in another layout does not always tell."""
    told = of_options(model.options, len(model.stages)) | {"img_size": model.options["img_size"], "eps": eps_of(model)}
    return {name: value for name, value in told.items() if value is not None}


def split_biases(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Swin v2's biases of queries and values apart, as timm and Microsoft have them; there is none of keys."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(".qkv.bias"):
            q, _, v = tensor.chunk(3)
            result |= {name.replace("qkv.bias", "q_bias"): q, name.replace("qkv.bias", "v_bias"): v}
        else:
            result[name] = tensor
    return result


def as_torchvision(state: Mapping[str, Tensor], model: Swin) -> dict[str, Tensor]:
    windows = {block.attention.window for stage in model.stages for block in cast(Iterable[Any], stage.blocks)}
    if len(windows) > 1:
        raise UserError(f"torchvision's Swin has one window, this one {sorted(windows)}; use layout='timm'")
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = re.sub(r"^patch_embed\.(proj|norm)\.", lambda m: f"features.0.{0 if m[1] == 'proj' else 2}.", name)
        name = re.sub(r"^layers\.(\d+)\.blocks\.", lambda m: f"features.{2 * int(m[1]) + 1}.", name)
        name = re.sub(r"^layers\.(\d+)\.downsample\.", lambda m: f"features.{2 * int(m[1])}.", name)
        for theirs, ours in ((".mlp.fc1.", ".mlp.0."), (".mlp.fc2.", ".mlp.3."), ("head.fc.", "head.")):
            name = name.replace(theirs, ours)
        result[name] = tensor
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(cast(Iterable[Any], stage.blocks)):
            result |= {
                f"features.{2 * i + 1}.{j}.attn.{name}": t for name, t in following(block.attention.attention.position).items()
            }
    return result


def following(position: RelativeTable | ContinuousBias) -> dict[str, Tensor]:
    """What torchvision stores although it follows from the window."""
    window, device = position.site.extent, next(position.parameters()).device
    index = {"relative_position_index": whole_index(window, device).flatten()}
    if isinstance(position, RelativeTable):
        return index
    distances = 8 * (all_distances(window, device) / torch.tensor(position.spans, device=device))
    logs = distances.sign() * torch.log2(distances.abs() + 1) / 3
    return index | {"relative_coords_table": logs.view(1, *(2 * n - 1 for n in window), 2)}
