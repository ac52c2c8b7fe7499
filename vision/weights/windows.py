"""The windows of Swin's weights: told by tables, buffers, live modules or configs, and fitted to those of another model.

Each stage has a window, and in Swin v2 an extent: the window that distances are measured by, which is the one of the
pre-training. Files of Swin v2 often tell neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core import ContinuousBias, RelativeTable
from vision.errors import UserError
from vision.models.swin import Swin, stage_windows
from vision.models.swin_v2 import FinetunedBias
from vision.rebuild import partial_target
from vision.weights.family import Adapted

Sizes = tuple[tuple[int, int], ...]  # one a stage


# What a source tells: `windows`, `extents`, `img_size`


def of_tensors(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """From tables (square, unless a live module says otherwise) and from stored coordinates, under timm's names."""
    windows, extents = {}, {}
    for name, tensor in state.items():
        match = re.match(r"layers\.(\d+)\.blocks\.\d+\.attn\.relative_(position_bias|coords)_table$", name)
        if match and match[2] == "coords":
            windows[int(match[1])], extents[int(match[1])] = of_coordinates(tensor)
        elif match and (side := math.isqrt(len(tensor))) ** 2 == len(tensor):
            windows[int(match[1])] = pair((side + 1) // 2)
    return {"windows": by_stage(windows), "extents": by_stage(extents)}


def of_coordinates(table: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Window and extent of Swin v2's `relative_coords_table`, whose last entry is log2(1 + 8 (window - 1) / (extent - 1)) / 3."""
    window = ((table.shape[1] + 1) // 2, (table.shape[2] + 1) // 2)
    last = table[0, -1, -1].double().tolist()
    spans = [8 * (size - 1) / (2 ** (3 * entry) - 1) if entry > 0 else 0 for size, entry in zip(window, last, strict=True)]
    return window, (1 + round(spans[0]), 1 + round(spans[1]))


def of_module(parts: Mapping[str, nn.Module]) -> dict[str, Any]:
    """From a live module of another library, whose parts have timm's names."""
    windows, extents = {}, {}
    for name, part in parts.items():
        stage = re.match(r"layers\.(\d+)\.blocks\.", name)
        if stage and hasattr(part, "window_size") and hasattr(part, "relative_position_index"):
            pretrained = pair(getattr(part, "pretrained_window_size", 0))
            windows[int(stage[1])] = pair(part.window_size)
            extents[int(stage[1])] = pretrained if min(pretrained) > 0 else pair(part.window_size)
    return {"windows": by_stage(windows), "extents": by_stage(extents)}


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """From transformers' config; of Swin the size alone, since its tables tell the windows."""
    if config.get("model_type") not in ("swin", "swinv2") or not isinstance(config.get("image_size"), int):
        return {}
    if config["model_type"] == "swin":
        return {"img_size": config["image_size"]}
    windows = stage_windows(config["window_size"], config["image_size"], config["patch_size"], len(config["depths"]))
    pretrained = config.get("pretrained_window_sizes") or [0] * len(windows)
    extents = tuple(pair(before) if before else window for before, window in zip(pretrained, windows, strict=False))
    return {"img_size": config["image_size"], "windows": tuple(windows), "extents": extents}


def of_options(options: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """From the options of a model of ours, live or as plain values."""
    if not {"window_size", "img_size", "patch_size"} <= options.keys():
        return {}
    windows = tuple(stage_windows(pair(options["window_size"]), options["img_size"], options["patch_size"], stages))
    share, position = 1.0, options.get("position")
    if isinstance(position, Mapping) and position["class_path"].endswith(".FinetunedBias"):
        share = position["init_args"]["share"]
    elif isinstance(position, partial) and partial_target(position) is FinetunedBias:
        share = position.keywords["share"]
    return {"windows": windows, "extents": tuple(tuple(round(size * share) for size in window) for window in windows)}


def by_stage(found: Mapping[int, tuple[int, int]]) -> Sizes:
    return tuple(found[i] for i in sorted(found)) if found.keys() == set(range(len(found))) else ()


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


# What a model needs


def options_for(windows: Sizes, extents: Sizes, img_size: int | None, reduction: int) -> dict[str, Any]:
    """`window_size`, `img_size` and `position` of a model with these windows.

    Args:
        windows, extents: of each stage; no extents are the windows.
        img_size: if the source tells it; otherwise the last window covers its map, as in all published models.
        reduction: of the first stage.

    Raises:
        UserError: no model has these windows.
    """
    stages, largest = len(windows), max(windows)
    img_size = img_size or max(windows[-1]) * reduction * 2 ** (stages - 1)
    if list(windows) != stage_windows(largest, img_size, reduction, stages):
        raise UserError(
            f"windows {windows} do not follow from one size; build the model and use vision.load_weights(model, source)"
        )
    options = {"window_size": largest[0] if largest[0] == largest[1] else largest, "img_size": img_size}
    return options if extents in ((), windows) else options | {"position": finetuned(windows, extents)}


def finetuned(windows: Sizes, extents: Sizes) -> partial:
    """The position of windows whose distances are measured by `extents`.

    Raises:
        UserError: the two are not in one proportion.
    """
    share = extents[0][0] / windows[0][0]
    if any(tuple(round(size * share) for size in window) != extent for window, extent in zip(windows, extents, strict=True)):
        raise UserError(f"windows {windows} and the {extents} they are measured by are in no proportion; use windows that are")
    return partial(FinetunedBias, share=share)


# Into a model with other windows


def positions_of(model: Swin) -> dict[str, tuple[int, nn.Module]]:
    """The position of each block by its name, with its stage."""
    return {
        f"stages.{i}.blocks.{j}.attention.attention.position": (i, block.attention.attention.position)
        for i, stage in enumerate(model.stages)
        for j, block in enumerate(cast(Iterable[Any], stage.blocks))
    }


def fit_windows(fit: Adapted, model: Swin, windows: Sizes) -> None:
    """Tables for windows of another size (bicubic, as in Microsoft's code)."""
    done = {}
    for name, (stage, position) in positions_of(model).items():
        table = fit.state.get(f"{name}.table")
        if table is None or not isinstance(position, RelativeTable) or table.shape == position.table.shape:
            continue
        before, after = windows[stage] if stage < len(windows) else pair((math.isqrt(len(table)) + 1) // 2), position.site.extent
        cells = [2 * size - 1 for size in before]
        if table.shape[1] != position.site.heads or math.prod(cells) != len(table):
            continue
        grid = rearrange(table.float(), "(h w) heads -> 1 heads h w", h=cells[0])
        grid = F.interpolate(grid, size=[2 * size - 1 for size in after], mode="bicubic", align_corners=False)
        fit.state[f"{name}.table"] = rearrange(grid, "1 heads h w -> (h w) heads").to(table.dtype)
        done[f"windows {before[0]}x{before[1]} -> {after[0]}x{after[1]}: tables resized, bicubic"] = True
    fit.adapted += done
    note_windows(fit, model, windows)


def note_windows(fit: Adapted, model: Swin, windows: Sizes) -> None:
    """Windows of another size where no table tells of it."""
    for stage, position in positions_of(model).values():
        after = cast(Any, position).site.extent
        before = windows[stage] if stage < len(windows) else after
        if before != after and not isinstance(position, RelativeTable):
            line = f"windows {before[0]}x{before[1]} -> {after[0]}x{after[1]}, without tables to resize"
            fit.notes += [line] if line not in fit.notes else []


def fit_extents(fit: Adapted, model: Swin, extents: Sizes) -> None:
    """Swin v2: distances keep the measure that they have in the source, whatever the windows of the model."""
    continuous = {name: (i, p) for name, (i, p) in positions_of(model).items() if isinstance(p, ContinuousBias)}
    if not continuous:
        return
    windows = tuple(cast(Any, stage).blocks[0].attention.window for stage in model.stages)
    if len(extents) < len(windows):
        side = 1 + next(iter(continuous.values()))[1].spans[0]
        fit.adapted.append(f"the source does not tell its windows: taken as {side}, the model's; if not, choose windows as there")
        return
    spans = [(max(h - 1, 1), max(w - 1, 1)) for h, w in extents]
    if all(position.spans == spans[stage] for stage, position in continuous.values()):
        return
    try:
        position = finetuned(windows, extents[: len(windows)])
    except UserError as error:
        fit.problems.append(str(error))
        return
    fit.adapted.append(f"distances are measured by windows of {extents[0][0]}x{extents[0][1]}, as in the source")
    fit.actions.append(partial(measure, model, list(continuous.values()), spans, position))


def measure(model: Swin, positions: Sequence[tuple[int, nn.Module]], spans: Sequence[tuple[int, int]], position: partial) -> None:
    for stage, part in positions:
        cast(Any, part).spans = spans[stage]
    model.options["position"] = position
