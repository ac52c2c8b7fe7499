"""DAT and DAT++ weights under the published names as ours, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core import RelativeTable
from core.deformable import DeformableAttention
from core.neighbourhood import NeighbourhoodAttention
from core.position.table import whole_index
from core.window import WindowAttention, lay_out, regions
from vision.errors import UserError
from vision.models.dat import DAT, PLUS
from vision.weights.family import Adapted, Converted, IncompleteError
from vision.weights.fit import fit_classes, fit_eps, fit_options, fit_stem
from vision.weights.read import Weights

MODEL = DAT
LAYOUTS = ("official",)

UNTOLD = "strides, offset range and reference points are not in the file: a model built from it has the published ones"

# Parts of a block: theirs within the stage, ours within the block. Names end where "weight" or "bias" begins, tables whole.
WINDOW = {
    "attns.{}.proj_qkv.": "attention.attention.qkv.",
    "attns.{}.proj_out.": "attention.attention.out.",
    "attns.{}.relative_position_bias_table": "attention.attention.position.table",
}
NEIGHBOURHOOD = {
    "attns.{}.qkv.": "attention.qkv.",
    "attns.{}.proj.": "attention.out.",
    "attns.{}.rpb": "attention.table",
}
DEFORMABLE = {
    "attns.{}.proj_q.": "attention.q.",
    "attns.{}.proj_k.": "attention.k.",
    "attns.{}.proj_v.": "attention.v.",
    "attns.{}.proj_out.": "attention.out.",
    "attns.{}.conv_offset.0.": "attention.offset_conv.",
    "attns.{}.conv_offset.1.norm.": "attention.offset_norm.",
    "attns.{}.conv_offset.3.": "attention.offset_out.",
}
ATTENTION = {"L": WINDOW, "S": WINDOW, "N": NEIGHBOURHOOD, "D": DEFORMABLE}
PLAIN = {"mlps.{}.chunk.linear1.": "ffn.up.", "mlps.{}.chunk.linear2.": "ffn.down."}
CONVOLUTIONAL = {
    "mlps.{}.linear1.0.": "ffn.up.",
    "mlps.{}.dwc.": "ffn.depthwise.",
    "mlps.{}.linear2.0.": "ffn.down.",
    "local_perception_units.{}.": "perception.",
}
PLAIN_STEM = {"patch_proj.0.": "stem.proj.", "patch_proj.1.norm.": "embed_norm."}
CONVOLUTIONAL_STEM = {
    "patch_proj.0.": "stem.halve.",
    "patch_proj.1.norm.": "stem.norm.",
    "patch_proj.3.": "stem.proj.",
    "patch_proj.4.norm.": "embed_norm.",
}
ENDS = {"cls_norm.norm.": "norm.", "cls_head.": "head."}
FOLLOWS = r"\.(relative_position_index|attn_mask|q_grid|reference|rpe_index)$"  # from the sizes
# Where a block's attention is, and which names in it tell deformable attention and neighbourhoods
THEIR_SIGNS = ("stages.{}.attns.{}.", "conv_offset.0.weight", "rpb")
OUR_SIGNS = ("stages.{}.blocks.{}.attention.", "offset_conv.weight", "table")
# 1x1 convolutions there, Linear here
POINTWISE = r"\.(conv_offset\.3|proj_[qkv]|linear[12]\.0)\.weight$"


def names(kinds: Sequence[str], convolutions: bool) -> dict[str, str]:
    """Theirs to ours, for stages with blocks of these kinds."""
    table = (CONVOLUTIONAL_STEM if convolutions else PLAIN_STEM) | ENDS
    for i, stage in enumerate(kinds):
        if i:
            table[f"down_projs.{i - 1}.0."] = f"stages.{i}.downsampling.conv."
            table[f"down_projs.{i - 1}.1.norm."] = f"stages.{i}.downsampling.norm."
        for j, kind in enumerate(stage):
            parts = ATTENTION[kind] | (CONVOLUTIONAL if convolutions else PLAIN)
            block = f"stages.{i}.blocks.{j}."
            table |= {f"stages.{i}.{theirs.format(j)}": block + ours for theirs, ours in parts.items()}
            for k in (0, 1):
                table[f"stages.{i}.layer_norms.{2 * j + k}.norm."] = f"{block}norm{k + 1}."
    return table


def renamed(name: str, table: Mapping[str, str]) -> str:
    """A name that is not in the table stays as it is."""
    leaf = next((leaf for leaf in ("weight", "bias") if name.endswith(leaf)), "")
    stem = name.removesuffix(leaf)
    return table[stem] + leaf if stem in table else name


# Theirs to ours


def from_layout(weights: Weights, layout: str) -> Converted:
    """A state dict under the published names under ours."""
    dropped = [name for name in weights.state if re.search(FOLLOWS, name)]
    kinds = kinds_of(weights.state, THEIR_SIGNS)
    convolutions = "patch_proj.3.weight" in weights.state
    table = names(kinds, convolutions)
    state: dict[str, Tensor] = {}
    for name, tensor in weights.state.items():
        if name in dropped:
            continue
        if name.endswith(".rpe_table") and tensor.ndim == 3:
            state |= split_table(name, tensor, weights.state)
        else:
            ours = renamed(name, table)
            is_linear = tensor.ndim == 4 and tensor.shape[2:] == (1, 1) and not ours.endswith("offset_conv.weight")
            state[ours] = tensor.flatten(1) if is_linear else tensor
    return Converted(state, {"kinds": kinds}, dropped, [UNTOLD])


def kinds_of(state: Mapping[str, Tensor], signs: tuple[str, str, str]) -> tuple[str, ...]:
    """The kind of attention of each block of each stage.

    Only the mask of a shifted window, which published files hold, tells it from another one; without masks every second
    window is taken as shifted, as published.
    """
    inside, offsets, table = signs
    counts: dict[int, int] = {}
    for name in state:
        if match := re.match(re.escape(inside).replace(r"\{\}", r"(\d+)"), name):
            counts[int(match[1])] = max(counts.get(int(match[1]), 0), int(match[2]) + 1)
    masks = any(name.endswith(".attn_mask") for name in state)
    kinds = []
    for i in range(max(counts, default=-1) + 1):
        stage = ""
        for j in range(counts.get(i, 0)):
            own = inside.format(i, j)
            if own + offsets in state:
                stage += "D"
            elif own + table in state:
                stage += "N"
            else:
                stage += "S" if f"{own}attn_mask" in state or (not masks and stage.endswith("L")) else "L"
        kinds.append(stage)
    return tuple(kinds)


def split_table(name: str, table: Tensor, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The table of each group of heads, from theirs `heads rows columns`."""
    attention = name.removesuffix("rpe_table")
    match = re.fullmatch(r"stages\.(\d+)\.attns\.(\d+)\.", attention)
    q, conv = theirs.get(f"{attention}proj_q.weight"), theirs.get(f"{attention}conv_offset.0.weight")
    if match is None or q is None or conv is None or len(table) % max(1, len(q) // max(1, len(conv))):
        return {name: table}
    prefix = f"stages.{match[1]}.blocks.{match[2]}.attention.positions"
    parts = table.flatten(1).chunk(len(q) // len(conv))
    return {f"{prefix}.{group}.table": part.T for group, part in enumerate(parts)}


def options_of(converted: Converted) -> dict[str, Any]:
    """Options that build the model for these weights.

    Raises:
        UserError: a part that tells sizes is missing.
    """
    state, convolutions = converted.state, "stem.halve.weight" in converted.state
    stem = "stem.halve.weight" if convolutions else "stem.proj.weight"
    needed = [stem, "embed_norm.weight", "norm.weight", "stages.0.blocks.0.ffn.up.weight"]
    if missing := [name for name in needed if name not in state]:
        raise IncompleteError(f"the weights lack {missing[0]} (our name); they are no whole DAT")
    dim, kinds = len(state["embed_norm.weight"]), converted.options.get("kinds") or kinds_of(state, OUR_SIGNS)
    patch_size = 4 if convolutions else state[stem].shape[-1]
    stages = [stage_options(state, i, stage) for i, stage in enumerate(kinds)]
    sides = [(i, stage["side"]) for i, stage in enumerate(stages) if stage["side"]]
    hidden = len(state["stages.0.blocks.0.ffn.up.weight"]) / dim
    options = {
        "img_size": max((side * patch_size * 2**i for i, side in sides[:1]), default=224),
        "patch_size": patch_size,
        "in_chans": state[stem].shape[1],
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
        "dim": dim,
        "depths": tuple(map(len, kinds)),
        "mlp_ratio": hidden if int(dim * hidden) == round(dim * hidden) else math.nextafter(hidden, math.inf),
        "kinds": kinds,
        "convolutions": convolutions,
        **{name: tuple(stage[name] for stage in stages) for name in ("heads", "groups", "kernels", "window_size")},
    }
    # Not told by any tensor: as published.
    published: dict[str, Any] = PLUS if convolutions else {"strides": (1, 1, 1, 1), "offset_range": 2.0, "reference": "dat"}
    strides = (published["strides"] + (1,) * len(kinds))[: len(kinds)]
    return options | {name: published[name] for name in ("offset_range", "reference")} | {"strides": strides}


def stage_options(state: Mapping[str, Tensor], i: int, kinds: str) -> dict[str, Any]:
    """What the tensors of a stage tell of its attention."""
    options: dict[str, Any] = {"heads": 1, "groups": 1, "kernels": 3, "window_size": 7, "side": None}
    for j, kind in enumerate(kinds):
        own = f"stages.{i}.blocks.{j}.attention."
        if kind in "LS" and f"{own}attention.position.table" in state:
            table = state[f"{own}attention.position.table"]
            options |= {"heads": table.shape[1], "window_size": (math.isqrt(len(table)) + 1) // 2}
        elif kind == "N":
            heads, rows, _ = state[f"{own}table"].shape
            options |= {"heads": heads, "window_size": (rows + 1) // 2}
        elif kind == "D":
            tables = [tensor for name, tensor in state.items() if name.startswith(f"{own}positions.")]
            conv = state[f"{own}offset_conv.weight"]
            if not tables:
                raise UserError(f"block {j} of stage {i} has deformable attention without a table, which our DAT does not know")
            options |= {"groups": len(tables), "heads": sum(table.shape[1] for table in tables), "kernels": conv.shape[-1]}
            options["side"] = (math.isqrt(len(tables[0])) + 1) // 2
    return options


# Ours into a model of other sizes


def adapt(converted: Converted, model: DAT) -> Adapted:
    """The weights in the model's sizes: classes, channels, patches, tables."""
    fit = Adapted(dict(converted.state))
    fit_classes(fit, model, model.head, "head.", reset=reset_head)
    fit_stem(fit, model)
    fit_tables(fit, model)
    fit_eps(fit, model, converted.options.get("eps"))
    if "kinds" in converted.options:
        fit.problems += other_kinds(converted.options["kinds"], model)
    fit_own(fit, model, converted.own)
    return fit


def fit_own(fit: Adapted, model: DAT, own: Mapping[str, Any]) -> None:
    """What no tensor tells; of deformable attention only where there is some."""
    kinds = kinds_of_model(model)
    if "kinds" in own:
        theirs = [(kind * len(ours))[: len(ours)] for kind, ours in zip(own["kinds"], kinds, strict=False)]
        fit.problems += other_kinds(theirs, model)
    if any("D" in kind for kind in kinds):
        fit_options(fit, model, own, ["offset_range", "reference"])
    strides = zip(kinds, own.get("strides", ()), model.options["strides"], strict=False)
    if any("D" in kind and a != b for kind, a, b in strides):
        fit_options(fit, model, own, ["strides"])


def other_kinds(kinds: Sequence[str], model: DAT) -> list[str]:
    """A shifted window has the tensors of one that is not: nothing else would tell that the function differs."""
    ours = kinds_of_model(model)
    pairs = zip(kinds, ours, strict=False)
    return [f"its blocks are {', '.join(kinds)}, the model's {', '.join(ours)}"] if any(a != b for a, b in pairs) else []


def reset_head(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def fit_tables(fit: Adapted, model: DAT) -> None:
    """Tables for maps, windows and neighbourhoods of other sizes (bicubic, not antialiased, as published)."""
    for name, part in model.named_modules():
        table = fit.state.get(f"{name}.table")
        if table is None or not isinstance(part, (RelativeTable, NeighbourhoodAttention)) or table.shape == part.table.shape:
            continue
        theirs = table.T if isinstance(part, RelativeTable) else table.flatten(1)
        before, size = math.isqrt(theirs.shape[1]), part.site.extent if isinstance(part, RelativeTable) else (part.kernel,) * 2
        if before**2 != theirs.shape[1] or len(theirs) != (part.site.heads if isinstance(part, RelativeTable) else part.heads):
            continue
        grid = theirs.float().unflatten(1, (before, before))[None]
        grid = F.interpolate(grid, size=[2 * n - 1 for n in size], mode="bicubic", align_corners=False)[0].to(table.dtype)
        fit.state[f"{name}.table"] = grid.flatten(1).T if isinstance(part, RelativeTable) else grid
        side = (before + 1) // 2
        line = f"tables of {side}x{side} -> {size[0]}x{size[1]}: bicubic"
        fit.adapted += [line] if line not in fit.adapted else []


# Ours to theirs


def untold(_: Any) -> dict[str, Any]:
    """Nothing: the tensors tell all."""
    return {}


def to_layout(model: Any, layout: str) -> dict[str, Tensor]:
    """The model's tensors under the published names, with the indices and masks that the published code stores.

    Raises:
        UserError: the model has parts that the layout has no place for.
    """
    kinds, convolutions = kinds_of_model(model), model.options["convolutions"]
    table = {ours: theirs for theirs, ours in names(kinds, convolutions).items()}
    state = {}
    for ours, tensor in model.state_dict().items():
        if ".attention.positions." in ours:
            continue
        name = renamed(ours, table)
        if name == ours:
            raise UserError(f"{layout}'s DAT has no place for {ours}; use layout='vision'")
        is_out = re.search(r"\.blocks\.\d+\.attention\.out\.weight$", ours) and name.endswith("proj_out.weight")
        is_pointwise = is_out or re.search(POINTWISE, name)
        state[name] = tensor[..., None, None] if is_pointwise else tensor
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage.blocks):
            attention = block.attention
            parts = stored(attention, i, model) if isinstance(attention, WindowAttention) else {}
            if isinstance(attention, DeformableAttention):
                heads = torch.cat([part.table.detach().T for part in cast("list[RelativeTable]", attention.positions)])
                parts = {"rpe_table": heads.unflatten(1, [2 * n - 1 for n in attention.extent])}
            state |= {f"stages.{i}.attns.{j}.{name}": tensor for name, tensor in parts.items()}
    return state


def kinds_of_model(model: Any) -> tuple[str, ...]:
    kinds = model.options["kinds"]
    return tuple("".join(kinds[i][j % len(kinds[i])] for j in range(len(stage.blocks))) for i, stage in enumerate(model.stages))


def stored(attention: WindowAttention, stage: int, model: Any) -> dict[str, Tensor]:
    """What the published code keeps of a window although it follows from the sizes: the index, the mask where it is shifted."""
    device = next(attention.parameters()).device
    parts = {"relative_position_index": whole_index(attention.window, device)}
    if any(attention.shift):
        side = math.ceil(model.options["img_size"] / (model.stem.reduction * 2**stage))
        windows = lay_out((side, side), attention.window)._replace(shift=attention.shift)
        region = rearrange(regions(windows, device), "(w n) -> w n", n=math.prod(attention.window))
        parts["attn_mask"] = torch.where(region[:, None, :] == region[:, :, None], 0.0, -100.0)
    return parts
