"""PSNR and SSIM equal scikit-image and the published formulas, for every protocol."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vision.errors import UserError
from vision.metrics import Protocol, luma, psnr, ssim

skimage_metrics = pytest.importorskip("skimage.metrics")


def pictures(channels: int = 3, size: tuple[int, int] = (33, 40)) -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth picture and a noisy one, noise beyond 0..1 included."""
    i, j = np.meshgrid(np.linspace(0, 7, size[0]), np.linspace(0, 5, size[1]), indexing="ij")
    clean = torch.tensor(np.stack([0.5 + 0.5 * np.sin(i + c) * np.cos(j) for c in range(channels)]), dtype=torch.float64)[None]
    return clean + 0.1 * torch.randn_like(clean), clean


def reference(noisy: torch.Tensor, clean: torch.Tensor) -> tuple[float, float]:
    a, b = (x[0].permute(1, 2, 0).numpy() for x in (noisy, clean))
    similarity = skimage_metrics.structural_similarity(
        b, a, data_range=1.0, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
    )
    return skimage_metrics.peak_signal_noise_ratio(b, a, data_range=1.0), similarity


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("border", [0, 4])
@pytest.mark.parametrize("rounded", [False, True])
def test_rgb_equals_scikit_image(channels: int, border: int, rounded: bool) -> None:
    noisy, clean = pictures(channels)
    protocol = Protocol("rgb", border, rounded)
    a, b = noisy.clamp(0, 1), clean.clamp(0, 1)
    if rounded:
        a, b = (torch.from_numpy(np.rint(x.numpy() * 255) / 255) for x in (a, b))
    inner = (..., slice(border, 33 - border), slice(border, 40 - border))
    expected = reference(a[inner], b[inner])
    assert psnr(noisy, clean, protocol).item() == pytest.approx(expected[0], abs=1e-5)
    assert ssim(noisy, clean, protocol).item() == pytest.approx(expected[1], abs=1e-5)


def test_y_equals_scikit_image_of_matlabs_luma() -> None:
    """IQA-PyTorch #167, piq #288: BT.601 in 16..235 as rgb2ycbcr, not YIQ, and both metrics on the same channel."""
    from skimage.color import rgb2ycbcr

    noisy, clean = pictures()
    a, b = (
        torch.from_numpy(rgb2ycbcr(x[0].clamp(0, 1).permute(1, 2, 0).numpy())[None, None, ..., 0] / 255) for x in (noisy, clean)
    )
    expected = reference(a, b)
    assert psnr(noisy, clean, Protocol("y")).item() == pytest.approx(expected[0], abs=1e-5)
    assert ssim(noisy, clean, Protocol("y")).item() == pytest.approx(expected[1], abs=1e-5)


def test_luma_of_known_colours() -> None:
    """ITU-R BT.601: black is 16, white 235, primary red 81, green 145, blue 41 (8 bits)."""
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64).view(5, 3, 1, 1)
    assert (luma(colours) * 255).round().flatten().tolist() == [16, 235, 81, 145, 41]
    gray = torch.rand(1, 1, 4, 4)
    assert torch.equal(luma(gray), gray)
    with pytest.raises(UserError, match="2 channels have no luma; space='y' is for RGB, use space='rgb'"):
        luma(torch.rand(1, 2, 4, 4))


def test_the_published_formulas_pixel_by_pixel() -> None:
    """Wang et al. 2004, eq. 13, with an 11x11 Gaussian window, where it lies inside."""
    noisy, clean = pictures(1, (14, 13))
    a, b = noisy.clamp(0, 1)[0, 0].numpy(), clean.clamp(0, 1)[0, 0].numpy()
    mse = sum((a[i, j] - b[i, j]) ** 2 for i in range(14) for j in range(13)) / (14 * 13)
    assert psnr(noisy, clean).item() == pytest.approx(10 * math.log10(1 / mse), abs=1e-5)
    line = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    window = np.outer(line, line) / np.outer(line, line).sum()
    values = []
    for i in range(14 - 10):
        for j in range(13 - 10):
            p, q = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
            mp, mq = (window * p).sum(), (window * q).sum()
            vp, vq, cov = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum(), (window * (p - mp) * (q - mq)).sum()
            values.append((2 * mp * mq + 1e-4) * (2 * cov + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    assert ssim(noisy, clean).item() == pytest.approx(np.mean(values), abs=1e-7)


def test_a_dark_picture_keeps_the_range() -> None:
    """The reference guesses the range from the values: a picture of at most 1/255 is then 48 dB off."""
    clean = torch.zeros(1, 3, 16, 16)
    assert psnr(clean + 1 / 255, clean).item() == pytest.approx(20 * math.log10(255), abs=1e-4)


def test_each_picture_counts_for_itself() -> None:
    noisy, clean = torch.rand(3, 3, 16, 16), torch.rand(3, 3, 16, 16)
    for metric in (psnr, ssim):
        single = torch.cat([metric(a[None], b[None]) for a, b in zip(noisy, clean, strict=True)])
        assert torch.allclose(metric(noisy, clean), single, atol=1e-6)


def test_equal_pictures() -> None:
    clean = torch.rand(1, 3, 16, 16)
    assert psnr(clean, clean).item() == math.inf
    assert ssim(clean, clean).item() == pytest.approx(1.0)
    assert psnr(clean + 2, torch.ones_like(clean)).item() == math.inf  # cut to 0..1


def test_half_precision_is_measured_in_full() -> None:
    noisy, clean = (x.float() for x in pictures())
    half = noisy.bfloat16()
    assert psnr(half, clean).item() == psnr(half.float(), clean).item()


@pytest.mark.usefixtures("unchecked")
def test_wrong_pictures_and_options_are_named() -> None:
    with pytest.raises(UserError, match=r"pictures of shape \(1, 3, 8, 8\) and \(1, 3, 8, 9\) cannot be compared"):
        psnr(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 9))
    with pytest.raises(UserError, match="SSIM has a window of 11 pixels and the picture 10x30"):
        ssim(torch.rand(1, 3, 30, 10), torch.rand(1, 3, 30, 10))
    with pytest.raises(UserError, match="crop_border=4 leaves nothing of 8x20 pixels"):
        psnr(torch.rand(1, 3, 20, 8), torch.rand(1, 3, 20, 8), Protocol(crop_border=4))
    with pytest.raises(UserError, match="crop_border=-1 is negative; use 0 or more pixels"):
        Protocol(crop_border=-1)
    with pytest.raises(UserError, match="space='lab' is not known; use 'rgb' or 'y'"):
        Protocol("lab")


def test_a_protocol_says_what_it_is() -> None:
    assert str(Protocol()) == "RGB, not rounded"
    assert Protocol().named(1) == Protocol("y").named(1) == "gray, not rounded"
    assert str(Protocol("y", 4, rounded=True)) == "Y, without 4 pixels at the border, rounded to 8 bits"
