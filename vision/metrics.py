"""PSNR and SSIM of restored pictures under a named protocol: the same picture has several, and papers mix them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

from vision.errors import UserError

WINDOW, SIGMA = 11, 1.5  # of SSIM, pixels
LUMA = (65.481, 128.553, 24.966)  # BT.601 as MATLAB's rgb2ycbcr: 16 + this for values in 0..1


@dataclass(frozen=True)
class Protocol:
    """How pictures are compared. Values are cut to 0..1 first, and 1 is the peak, however dark the picture.

    SSIM is that of Wang et al. 2004 (Gaussian window 11x11, sigma 1.5, K = 0.01 and 0.03, where the window lies inside), the
    mean over the channels; scikit-image's with `gaussian_weights=True, sigma=1.5, use_sample_covariance=False`. MATLAB's
    `ssim` of a colour volume, with which the deblurring papers' .96 were computed, is another number.

    Args:
        space: "rgb", the channels as they are; "y", luma of BT.601 as MATLAB's rgb2ycbcr (deraining and super-resolution).
        crop_border: pixels left out on each side; super-resolution leaves out as many as its scale.
        rounded: whether both pictures are rounded to 8 bits first, as when saved; luma itself is not rounded.

    Raises:
        UserError: a space that is not known, a negative border.
    """

    space: Literal["rgb", "y"] = "rgb"
    crop_border: int = 0
    rounded: bool = False

    def __post_init__(self) -> None:
        if self.space not in ("rgb", "y"):
            raise UserError(f"space={self.space!r} is not known; use 'rgb' or 'y'")
        if self.crop_border < 0:
            raise UserError(f"crop_border={self.crop_border} is negative; use 0 or more pixels")

    def __str__(self) -> str:
        return self.named(3)

    def named(self, channels: int) -> str:
        """For people, of pictures of so many channels: gray ones have neither colours nor a luma of them."""
        space = "gray" if channels == 1 else "RGB" if self.space == "rgb" else "Y"
        border = f", without {self.crop_border} pixels at the border" if self.crop_border else ""
        return f"{space}{border}, {'rounded to 8 bits' if self.rounded else 'not rounded'}"

    def prepare(self, image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """The picture as it is compared."""
        x = image.float() if image.dtype in (torch.float16, torch.bfloat16) else image
        x = x.clamp(0, 1)
        x = torch.round(x * 255) / 255 if self.rounded else x
        if n := self.crop_border:
            x = x[..., n:-n, n:-n]
        return luma(x) if self.space == "y" else x


def luma(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 1 h w"]:
    """Y of BT.601 in 16/255..235/255, of RGB in 0..1; gray pictures are taken as they are."""
    if image.shape[1] == 1:
        return image
    if image.shape[1] != 3:
        raise UserError(f"{image.shape[1]} channels have no luma; space='y' is for RGB, use space='rgb'")
    weights = torch.tensor(LUMA, dtype=image.dtype, device=image.device).view(1, 3, 1, 1)
    return (16 + (image * weights).sum(dim=1, keepdim=True)) / 255


def psnr(
    restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"], protocol: Protocol | None = None
) -> Float[Tensor, " b"]:
    """10 log10(1 / MSE) in dB, of each picture; infinite where both are the same."""
    a, b = prepared(restored, clean, protocol or Protocol())
    return peak_signal_noise_ratio(a, b, data_range=1.0, reduction="none", dim=(1, 2, 3))


def fits_ssim(image: Float[Tensor, "b c h w"], protocol: Protocol) -> bool:
    """Whether the picture is as large as SSIM's window, without its border."""
    return min(image.shape[-2:]) - 2 * protocol.crop_border >= WINDOW


def ssim(
    restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"], protocol: Protocol | None = None
) -> Float[Tensor, " b"]:
    """Structural similarity of each picture, -1..1.

    Raises:
        UserError: a picture smaller than the window of 11 pixels.
    """
    a, b = prepared(restored, clean, protocol or Protocol())
    if min(a.shape[-2:]) < WINDOW:
        raise UserError(
            f"SSIM has a window of {WINDOW} pixels and the picture {a.shape[-1]}x{a.shape[-2]} (without its border); "
            "leave out pictures as small as this"
        )
    a, b = a.double(), b.double()  # small differences of squares
    (x, y), (xx, yy, xy) = map(smooth, (a, b)), map(smooth, (a * a, b * b, a * b))
    luminance = (2 * x * y + 0.01**2) / (x * x + y * y + 0.01**2)
    rest = (2 * (xy - x * y) + 0.03**2) / (xx - x * x + yy - y * y + 0.03**2)
    return (luminance * rest).mean(dim=(1, 2, 3))


def smooth(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
    """Means under SSIM's window, where it lies inside: torchmetrics' SSIM has the border too, which no published one has."""
    place = torch.arange(WINDOW, dtype=image.dtype, device=image.device) - WINDOW // 2
    line = torch.exp(-(place**2) / (2 * SIGMA**2))
    line = (line / line.sum()).expand(image.shape[1], 1, 1, WINDOW)
    with torch.autocast(image.device.type, enabled=False):
        image = F.conv2d(image, line, groups=image.shape[1])
        return F.conv2d(image, line.mT, groups=image.shape[1])


def prepared(restored: Tensor, clean: Tensor, protocol: Protocol) -> tuple[Tensor, Tensor]:
    if restored.shape != clean.shape:
        raise UserError(
            f"pictures of shape {tuple(restored.shape)} and {tuple(clean.shape)} cannot be compared; give two of one shape"
        )
    if min(clean.shape[-2:]) <= 2 * protocol.crop_border:
        raise UserError(f"crop_border={protocol.crop_border} leaves nothing of {clean.shape[-1]}x{clean.shape[-2]} pixels")
    return protocol.prepare(restored), protocol.prepare(clean)
