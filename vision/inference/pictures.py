"""Pictures of every kind as float tensors and back: same kind, same depth, alpha kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vision.errors import UserError

Kind = TypeVar("Kind", Image.Image, np.ndarray, Tensor)
Back = Callable[[Tensor], Kind]

PLAIN_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "I;16L", "I;16B", "I;16N", "F")
TOLERANCE = 1e-4  # what rounding may put outside 0..1
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


def take(image: Kind) -> tuple[Float[Tensor, "b c h w"], Back[Kind]]:
    """The picture as float32 in 0..1, and the function that makes its kind of such values.

    Raises:
        UserError: a kind, depth, order of axes or range that is not understood.
    """
    if isinstance(image, Image.Image):
        return take_pil(image)
    if isinstance(image, np.ndarray):
        return take_array(image)
    if isinstance(image, Tensor):
        return take_tensor(image)
    hint = "read it with vision.data.read_image(path)" if hasattr(image, "__fspath__") or isinstance(image, str) else "give one"
    raise UserError(f"a {type(image).__name__} is no picture; {hint}: a PIL image, a numpy array h w c or a tensor c h w")


def take_pil(image: Image.Image) -> tuple[Float[Tensor, "1 c h w"], Back[Image.Image]]:
    info = {key: value for key, value in image.info.items() if key != "transparency"}
    if image.has_transparency_data and image.mode in ("1", "L", "P", "PA", "RGB"):
        image = image.convert("LA" if image.mode in ("1", "L") else "RGBA")
    elif image.mode in ("1", "P"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    if image.mode not in PLAIN_MODES:
        wide = image.mode in ("I", "F")  # which Pillow would cut to 8 bits
        fix = "pass np.asarray(image) as uint16, or as float in 0..1" if wide else "convert it first, with image.convert('RGB')"
        raise UserError(f"a PIL image of mode {image.mode} is not restored as it is; {fix}")
    values, back = take_array(np.asarray(image))

    def make(values: Tensor) -> Image.Image:
        made = Image.fromarray(back(values))
        made.info = info
        return made

    return values, make


def take_array(image: np.ndarray) -> tuple[Float[Tensor, "1 c h w"], Back[np.ndarray]]:
    if image.ndim not in (2, 3) or 0 in image.shape or (image.ndim == 3 and image.shape[2] > 16):
        raise UserError(f"an array of shape {image.shape} is no picture h w or h w c; transpose it, or give pictures one by one")
    dtype = image.dtype
    if dtype.kind == "f":
        values = torch.from_numpy(image.astype(np.float32))
        check_range(values, dtype.name)
    elif dtype.kind == "u" and dtype.itemsize <= 2:
        values = torch.from_numpy(image.astype(np.float32)) / np.iinfo(dtype).max
    else:
        raise UserError(f"a picture of {dtype} has no known range; give uint8, uint16, or float in 0..1")

    def make(values: Float[Tensor, "1 c h w"]) -> np.ndarray:
        array = values[0].permute(1, 2, 0).float().cpu().numpy()
        if dtype.kind != "f":
            array = np.rint(array * np.float32(np.iinfo(dtype).max))
        array = array[..., 0] if image.ndim == 2 and array.shape[2] == 1 else array
        return np.ascontiguousarray(array, dtype=dtype)

    return (values[..., None] if image.ndim == 2 else values).permute(2, 0, 1)[None], make


def take_tensor(image: Tensor) -> tuple[Float[Tensor, "b c h w"], Back[Tensor]]:
    if image.ndim not in (3, 4) or 0 in image.shape or image.shape[-3] > 16:
        raise UserError(f"a tensor of shape {tuple(image.shape)} is no picture c h w or b c h w; use permute or x[None]")
    dtype, device = image.dtype, image.device
    if image.is_floating_point():
        values = image.detach().float()
        check_range(values, str(dtype))
    elif dtype in (torch.uint8, torch.uint16):
        values = image.float() / torch.iinfo(dtype).max
    else:
        raise UserError(f"a picture of {dtype} has no known range; give uint8, uint16, or float in 0..1")

    def make(values: Float[Tensor, "b c h w"]) -> Tensor:
        values = values if dtype.is_floating_point else (values.float() * torch.iinfo(dtype).max).round()
        return (values if image.ndim == 4 else values[0]).to(device, dtype)

    return values if image.ndim == 4 else values[None], make


def check_range(values: Float[Tensor, "..."], kind: str) -> None:
    if not torch.isfinite(values).all():
        raise UserError("the picture holds NaN or infinity; mend it first, such as with numpy.nan_to_num")
    least, most = float(values.min()), float(values.max())
    if least < -TOLERANCE or most > 1 + TOLERANCE:
        raise UserError(
            f"the {kind} picture has values from {least:.4g} to {most:.4g}; float pictures are 0..1: "
            "divide by 255 or 65535, clip, or give uint8 or uint16"
        )


def split_alpha(values: Float[Tensor, "b c h w"], in_chans: int | None) -> tuple[Tensor, Tensor | None]:
    """Colour and alpha, which the model does not see: the last of 2 or 4 channels, or the one that the model has no place for."""
    channels = values.shape[1]
    has_alpha = channels != in_chans and (channels in (2, 4) or channels - 1 == in_chans)
    return (values[:, :-1], values[:, -1:]) if has_alpha else (values, None)


def match_channels(colour: Float[Tensor, "b c h w"], in_chans: int | None) -> tuple[Float[Tensor, "n d h w"], Back[Tensor]]:
    """The picture in the model's channels, and what its result becomes.

    A gray picture goes through a colour model as equal colours and comes out as their luma; a colour picture goes
    through a gray model as three gray pictures.

    Raises:
        UserError: channels that are neither.
    """
    batch, channels = colour.shape[:2]
    if in_chans in (channels, None):
        return colour, lambda result: result
    if (channels, in_chans) == (1, 3):
        luma = torch.tensor(LUMA).view(1, 3, 1, 1)
        return colour.expand(-1, 3, -1, -1), lambda result: (result * luma.to(result)).sum(dim=1, keepdim=True)
    if (channels, in_chans) == (3, 1):
        return colour.flatten(0, 1)[:, None], lambda result: result.unflatten(0, (batch, 3)).flatten(1, 2)
    names = {1: "1 (gray)", 3: "3 (RGB)", 6: "6 (the left, then the right view, RGB each)"}
    raise UserError(
        f"the picture has {channels} channels, the model takes {names.get(in_chans, in_chans)}; "
        f"give such a picture, alpha may follow"
    )
