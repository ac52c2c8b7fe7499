"""Restormer weights under the published names as ours, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from core import BiasFreeNorm, LayerNorm
from vision.errors import UserError
from vision.models.restormer import Restormer
from vision.weights.family import Adapted, Converted
from vision.weights.read import Weights

MODEL = Restormer
LAYOUTS = ("official",)

LICENCE = "the weights that Restormer's authors publish are for non-commercial use (Academic Public License); yours are yours"

STAGES = {  # ours, theirs
    "encoder.0": "encoder_level1",
    "encoder.1": "encoder_level2",
    "encoder.2": "encoder_level3",
    "latent": "latent",
    "decoder.0": "decoder_level3",
    "decoder.1": "decoder_level2",
    "decoder.2": "decoder_level1",
    "refinement": "refinement",
}
PARTS = {  # of a block
    "norm1": "norm1.body",
    "attention": "attn",
    "attention.qkv": "attn.qkv",
    "attention.depthwise": "attn.qkv_dwconv",
    "attention.out": "attn.project_out",
    "norm2": "norm2.body",
    "ffn.up": "ffn.project_in",
    "ffn.depthwise": "ffn.dwconv",
    "ffn.down": "ffn.project_out",
}
BETWEEN = {
    "embed": "patch_embed.proj",
    "down.0.conv": "down1_2.body.0",
    "down.1.conv": "down2_3.body.0",
    "down.2.conv": "down3_4.body.0",
    "up.0.conv": "up4_3.body.0",
    "up.1.conv": "up3_2.body.0",
    "up.2.conv": "up2_1.body.0",
    "reduce.0": "reduce_chan_level3",
    "reduce.1": "reduce_chan_level2",
    "skip": "skip_conv",
    "output": "output",
}


def from_layout(weights: Weights, layout: str) -> Converted:
    """A state dict under the published names under ours. 1x1 convolutions are Linear here."""
    state = {}
    for name, tensor in weights.state.items():
        ours = translate(
            name, {v: k for k, v in STAGES.items()}, {v: k for k, v in PARTS.items()}, {v: k for k, v in BETWEEN.items()}
        )
        state[ours] = tensor.flatten(1) if tensor.ndim == 4 and tensor.shape[2:] == (1, 1) else tensor
    return Converted(state, notes=[LICENCE])


def untold(_: Any) -> dict[str, Any]:
    """Nothing: the tensors tell all."""
    return {}


def to_layout(model: Restormer, layout: str) -> dict[str, Tensor]:
    """The model's tensors under the published names; the published files hold them as {"params": these}."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {
        translate(name, STAGES, PARTS, BETWEEN): tensor[..., None, None] if name in linear else tensor
        for name, tensor in model.state_dict().items()
    }


def translate(name: str, stages: Mapping[str, str], parts: Mapping[str, str], between: Mapping[str, str]) -> str:
    """The name on the other side; one that is unknown stays as it is."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(rf"({'|'.join(map(re.escape, stages))})\.(\d+)\.(.+)", module)
    if match and match[3] in parts:
        return f"{stages[match[1]]}.{match[2]}.{parts[match[3]]}.{kind}"
    return f"{between[module]}.{kind}" if module in between else name


def options_of(converted: Converted) -> dict[str, Any]:
    """Options that build a Restormer for these weights.

    Raises:
        UserError: a part that tells sizes is missing, results that are no pictures, or hidden channels that follow no ratio.
    """
    state = converted.state
    missing = [name for name in ("embed.weight", "output.weight", "latent.0.attention.qkv.weight") if name not in state]
    if missing:
        raise UserError(
            f"the weights lack {missing[0]} (published as {translate(missing[0], STAGES, PARTS, BETWEEN)}); "
            "they are no whole Restormer"
        )
    dim, in_chans = state["embed.weight"].shape[:2]
    out_chans = state["output.weight"].shape[0]
    levels = ("encoder.0", "encoder.1", "encoder.2", "latent")
    dual_pixel = "skip.weight" in state
    if not dual_pixel and in_chans != out_chans:
        raise UserError(
            f"the weights make {out_chans} channels of {in_chans}, which cannot be added to the picture as Restormer's result "
            "is; they are of another model, use the library they come from"
        )
    hidden = [(t.shape[0], t.shape[1]) for name, t in state.items() if name.endswith("ffn.down.weight")]
    return {
        "in_chans": in_chans,
        "out_chans": out_chans,
        "dim": dim,
        "depths": [depth(state, level) for level in levels],
        "refinement": depth(state, "refinement"),
        "heads": [len(state.get(f"{level}.0.attention.temperature", (0,))) for level in levels],
        "ffn_ratio": ffn_ratio(hidden),
        "bias": "latent.0.attention.qkv.bias" in state,
        "norm": LayerNorm if "latent.0.norm1.bias" in state else BiasFreeNorm,
        "dual_pixel": dual_pixel,
    }


def depth(state: Mapping[str, Tensor], stage: str) -> int:
    return 1 + max((int(m[1]) for name in state if (m := re.match(rf"{re.escape(stage)}\.(\d+)\.", name))), default=-1)


def ffn_ratio(pairs: list[tuple[int, int]]) -> float:
    """The simplest ratio that gives these (channels, hidden channels), rounded down; 127 of 48 alone would not do."""
    simple = [
        2.66,
        *(
            round(i / 10**digits, digits)
            for digits in (0, 1, 2, 3, 4, 5)
            for i in range(least(pairs, digits), least(pairs, digits) + 2)
        ),
    ]
    found = next((ratio for ratio in simple if all(int(dim * ratio) == hidden for dim, hidden in pairs)), None)
    if found is None:
        raise UserError(f"(channels, hidden channels) of {sorted(set(pairs))} follow no ratio; Restormer has one for all levels")
    return found


def least(pairs: list[tuple[int, int]], digits: int) -> int:
    """The largest number of 10**-digits that is not above any hidden / channels."""
    return int(max(hidden / dim for dim, hidden in pairs) * 10**digits)


def adapt(converted: Converted, model: Restormer) -> Adapted:
    """Nothing is adapted: a restorer of other channels or sizes would not restore."""
    return Adapted(dict(converted.state))
