"""Padding pictures to the sizes that a model works in."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def reflect_to_multiple(x: Float[Tensor, "b c h w"], multiple: int) -> Float[Tensor, "b c h2 w2"]:
    """The picture, mirrored at its lower and right edge up to the next multiple of `multiple`.

    torch's reflection needs a side longer than its padding; here the mirror image is mirrored again, so that any side will do.
    """
    h, w = x.shape[-2:]
    always = torch.compiler.is_compiling()  # a question here is a compilation more for each of its four answers
    if always or h % multiple:
        x = x.index_select(-2, mirrored(h, h + -h % multiple, x.device))
    return x.index_select(-1, mirrored(w, w + -w % multiple, x.device)) if always or w % multiple else x


def mirrored(side: int, length: int, device: torch.device) -> Int[Tensor, " length"]:
    """0, 1, ..., side - 1, side - 2, ..., 1, 0, 1, ...: which pixel stands at each place."""
    there_and_back = max(1, 2 * side - 2)
    place = torch.arange(length, device=device) % there_and_back
    return torch.minimum(place, there_and_back - place) if side > 1 else place
