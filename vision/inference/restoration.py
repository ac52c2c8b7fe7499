"""`restore`: one call for a picture of any size and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.options import is_number
from vision.errors import UserError
from vision.inference.pictures import Kind, match_channels, split_alpha, take
from vision.inference.progress import Progress
from vision.inference.ways import Way
from vision.models.padding import reflect_to_multiple

MODES = ("auto", "whole", "stream", "tile")


def restore(
    model: nn.Module,
    image: Kind,
    *,
    mode: str = "auto",
    memory: int | str | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    self_ensemble: bool = False,
    blend: float = 1.0,
    progress: Callable[[float], None] | None = None,
) -> Kind:
    """Restores a picture of any size.

    What comes out is of the same kind and depth, with the same alpha, and its size is the picture's times the model's
    `scale` (1 if it has none). Float values are cut to 0..1.

    A model may tell more of itself by attributes: `in_chans`; `scale`; `multiple`, of pixels, that its input's sides must
    be (the picture is mirrored up to it); and two methods, `stream(x, rows)`, which is `model(x)` in bounded memory, and
    `stream_memory(shape, rows)`, the bytes that it takes. With a `tile` it is run in tiles of this side unless `mode` or
    `tile` say otherwise: a model that attends to the whole map has learned what maps of its training patches look like, and
    does better on such (Chu et al. 2022, arXiv:2112.04491).

    Args:
        model: from `b c h w` to `b c h·scale w·scale`, values in 0..1. It runs where it is and in its precision.
        image: PIL image (its `info`, such as the ICC profile, is passed on), numpy array h w or h w c, or tensor c h w or
            b c h w. uint8, uint16, or float in 0..1. Channels as the model's, or gray for a colour model and the other
            way round; alpha last.
        mode: "whole": at once; "stream": exactly as whole, band by band, for models that can; "tile": overlapping
            tiles, each for itself, without seams; "auto": whole if memory allows, otherwise stream if the model can,
            otherwise tile.
        memory: the most that the model may allocate, beside its weights and the picture: bytes, or such as "8GB". None is
            most of what is free.
        tile: side of a tile in pixels, a multiple of the model's; None is as memory allows, up to 512.
        overlap: of tiles, in pixels; None is a quarter of the tile, up to 32. With it, as with a `tile`, "auto" makes tiles.
        self_ensemble: the mean over the picture's 8 turns and reflections: 8 times the time, slightly better.
        blend: share of the restored picture, 0..1; the rest is the picture as it was.
        progress: called as the work goes on, with the share that is done, 0..1.

    Raises:
        UserError: a classifier, a picture that is not understood, a mode that the model cannot do, memory for nothing (with
            the least that works), options out of range, a result that is not finite.
    """
    check_options(mode, tile, overlap, blend)
    check_restorer(model)
    values, back = take(image)
    colour, alpha = split_alpha(values, channels_of(model))
    inputs, unmatch = match_channels(colour, channels_of(model))
    if self_ensemble:
        check_turnable(model)
    if blend < 1 and (scale_of(model) != 1 or getattr(model, "dual_pixel", False)):
        raise UserError(
            f"blend={blend:g} mixes in the picture as it was, which the result differs from in size or channels; use 1"
        )
    way = Way(model, mode, memory, tile, overlap)
    with torch.inference_mode(), evaluating(model), Progress(progress, model) as way.progress:
        result = ensemble(way, inputs) if self_ensemble else run(way, inputs)
        result = unmatch(check_finite(result, model).cpu()).clamp(0, 1)
        result = result if blend == 1 else torch.lerp(colour.cpu(), result, blend)
        if alpha is not None:
            size = result.shape[-2:]
            alpha = alpha if alpha.shape[-2:] == size else F.interpolate(alpha, size, mode="bicubic", align_corners=False)
            result = torch.cat([result, alpha.clamp(0, 1).cpu()], dim=1)
    return back(result.clone())  # outside of inference mode: a tensor like any other


def run(way: Way, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
    """Float in, float out; where the model is, in its precision and in sizes that it takes."""
    scale, (h, w) = scale_of(way.model), x.shape[-2:]
    parameter = next(way.model.parameters(), x)
    y = way(reflect_to_multiple(x.to(parameter.device, parameter.dtype), way.multiple))
    return y[..., : h * scale, : w * scale].float()


def ensemble(way: Way, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
    """The mean over the 8 turns and reflections (Timofte et al. 2016)."""
    total = torch.zeros(())
    for turns in range(4):
        for is_flipped in (False, True):
            with way.progress.part(2 * turns + is_flipped, 8):
                y = run(way, torch.rot90(x.flip(-1) if is_flipped else x, turns, (-2, -1)))
            y = torch.rot90(y, -turns, (-2, -1))
            total = total.to(y.device) + (y.flip(-1) if is_flipped else y)
    return total / 8


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each part is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def channels_of(model: nn.Module) -> int | None:
    """Channels that the model takes, None if it does not tell."""
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return getattr(model, "in_chans", first)


def scale_of(model: nn.Module) -> int:
    return getattr(model, "scale", 1)


def check_options(mode: str, tile: Any, overlap: Any, blend: Any) -> None:
    if mode not in MODES:
        raise UserError(f"mode={mode!r} is unknown; use {', '.join(map(repr, MODES))}")
    for name, value in (("tile", tile), ("overlap", overlap)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise UserError(f"{name}={value!r} is no whole number; use pixels, such as 64")
    if not is_number(blend):
        raise UserError(f"blend={blend!r} is no number; use 0 (the picture as it was) to 1 (restored)")
    if overlap is not None and overlap < 0:
        raise UserError(f"overlap={overlap} is negative; use 0 or more pixels, such as 32")
    if not 0 <= blend <= 1:
        raise UserError(f"blend={blend:g} is no share; use 0 (the picture as it was) to 1 (restored)")


def check_restorer(model: nn.Module) -> None:
    """Raises: UserError: a model of another task."""
    if hasattr(model, "num_classes") or hasattr(model, "reset_classifier"):
        raise UserError(f"{type(model).__name__} tells classes and restores no picture; use a restorer such as Restormer")


def check_turnable(model: nn.Module) -> None:
    """Raises: UserError: a model whose input means something else when it is turned, which a self-ensemble does."""
    if getattr(model, "dual_pixel", False):
        raise UserError(
            "self_ensemble turns the picture, and views of a dual-pixel camera differ by their direction; leave it out"
        )


def check_finite(result: Float[Tensor, "b c h w"], model: nn.Module) -> Float[Tensor, "b c h w"]:
    if not torch.isfinite(result).all():
        dtype = next((parameter.dtype for parameter in model.parameters()), result.dtype)
        fix = "use model.float(), or bfloat16" if dtype == torch.float16 else "its weights are broken; use an earlier checkpoint"
        raise UserError(f"{type(model).__name__} gave NaN or infinity in {str(dtype).removeprefix('torch.')}; {fix}")
    return result
