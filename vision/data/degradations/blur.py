"""Blur: kernels of lenses and of moving cameras, and the convolution with them."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float

from vision.data.degradations.base import Degradation, Range, checked_range, described, drawn
from vision.errors import UserError

Shape = Literal["gaussian", "plateau"]


class GaussianBlur(Degradation):
    """Convolution with a Gaussian.

    Args:
        sigma: its deviation in pixels; two numbers = uniform in that range, anew for each picture.
        anisotropic: two deviations drawn apart, along two axes of any direction.

    Raises:
        UserError: sigma out of range.
    """

    def __init__(self, sigma: Range = (0.2, 3.0), anisotropic: bool = False) -> None:
        self.range = checked_range("sigma", sigma, 0.01, 50)
        self.anisotropic = anisotropic

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h w c"]:
        along = drawn(self.range, rng)
        across, angle = (drawn(self.range, rng), rng.uniform(0, math.pi)) if self.anisotropic else (along, 0.0)
        size = 2 * math.ceil(3.5 * max(along, across)) + 1
        return blurred(clean, gaussian_kernel(size, along, across, angle))

    def __str__(self) -> str:
        return f"{'anisotropic ' * self.anisotropic}Gaussian blur, sigma {described(self.range)} pixels"


class MotionBlur(Degradation):
    """The mean along a straight way, as of a camera that moves evenly while it exposes.

    Args:
        length: of the way in pixels; two numbers = uniform in that range, anew for each picture.
        angle: its direction in degrees, 0 = along a row, 90 = upwards; two numbers as above.

    Raises:
        UserError: length or angle out of range.
    """

    def __init__(self, length: Range = (5.0, 25.0), angle: Range = (0.0, 180.0)) -> None:
        self.length, self.angle = checked_range("length", length, 0, 200), checked_range("angle", angle, -360, 360)

    def __call__(self, clean: Float[np.ndarray, "h w c"], rng: np.random.Generator) -> Float[np.ndarray, "h w c"]:
        return blurred(clean, line_kernel(drawn(self.length, rng), drawn(self.angle, rng)))

    def __str__(self) -> str:
        return f"motion blur, {described(self.length)} pixels, {described(self.angle)} degrees"


def gaussian_kernel(
    size: int, along: float, across: float, angle: float = 0.0, *, beta: float = 1.0, shape: Shape = "gaussian"
) -> Float[np.ndarray, "size size"]:
    """A Gaussian or a relative of it, with sum 1 (Wang et al. 2021, section 3.1).

    With q the squared distance in deviations: ``exp(-q^beta / 2)`` ("gaussian"; generalised unless beta = 1) or
    ``1 / (1 + q^beta)`` ("plateau").

    Args:
        size: side, odd.
        along, across: deviations along the two axes, pixels.
        angle: of the first axis, radians from a row.
    """
    offsets = np.arange(size) - size // 2
    x, y = np.meshgrid(offsets, offsets)
    u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    q = ((u / along) ** 2 + (v / across) ** 2) ** beta
    kernel = np.exp(-q / 2) if shape == "gaussian" else 1 / (1 + q)
    return kernel / kernel.sum()


def sinc_kernel(size: int, cutoff: float) -> Float[np.ndarray, "size size"]:
    """The circular ideal low-pass, cut to a square, with sum 1: it rings (Wang et al. 2021, equation 6).

    Args:
        size: side, odd.
        cutoff: the highest frequency that passes, radians a pixel, up to pi.
    """
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    radius = torch.hypot(offsets[:, None], offsets[None])
    kernel = cutoff * torch.special.bessel_j1(cutoff * radius) / (2 * math.pi * radius)
    kernel[size // 2, size // 2] = cutoff**2 / (4 * math.pi)  # the limit at 0
    return (kernel / kernel.sum()).numpy()


def line_kernel(length: float, angle: float) -> Float[np.ndarray, "k k"]:
    """A straight way through the middle, its points shared among the four pixels around them; sum 1.

    Args:
        length: pixels.
        angle: degrees from a row, upwards.
    """
    radius = math.ceil(length / 2) + 1
    way = np.linspace(-length / 2, length / 2, 2 * math.ceil(4 * length) + 1)  # at least 8 points a pixel
    x, y = way * math.cos(math.radians(angle)) + radius, -way * math.sin(math.radians(angle)) + radius
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    kernel = np.zeros((2 * radius + 1, 2 * radius + 1))
    for dy in (0, 1):
        for dx in (0, 1):
            np.add.at(kernel, (top + dy, left + dx), (1 - abs(y - top - dy)) * (1 - abs(x - left - dx)))
    return kernel / kernel.sum()


def blurred(image: Float[np.ndarray, "h w c"], kernel: Float[np.ndarray, "k k"]) -> Float[np.ndarray, "h w c"]:
    """Each channel convolved; beyond its edges the picture goes on mirrored. float32.

    Raises:
        UserError: the kernel's side is even.
    """
    if kernel.shape[0] % 2 == 0:
        raise UserError(f"a kernel of {kernel.shape[0]} pixels has no middle; use an odd side")
    radius = kernel.shape[0] // 2
    padded = np.pad(image, [(radius, radius), (radius, radius), (0, 0)], mode="symmetric")
    size = padded.shape[:2]
    channels = torch.from_numpy(np.ascontiguousarray(padded.transpose(2, 0, 1), dtype=np.float32))
    spectrum = torch.fft.rfft2(torch.from_numpy(kernel.astype(np.float32)), size)
    # by Fourier transforms (2 to 11 times as fast as conv2d for kernels of 21 and 29 pixels); what wraps around is cut off
    whole = torch.fft.irfft2(torch.fft.rfft2(channels) * spectrum, size)
    return np.ascontiguousarray(whole[:, 2 * radius :, 2 * radius :].permute(1, 2, 0).numpy())
