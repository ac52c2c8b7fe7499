"""Degradations: seeded to the last bit, and each what its definition says."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image

from vision.data.degradations import (
    JPEG,
    Chain,
    Degradation,
    Downsample,
    GaussianBlur,
    GaussianNoise,
    MotionBlur,
    PoissonNoise,
    Rain,
    SecondOrder,
)
from vision.data.degradations.blur import blurred, gaussian_kernel, line_kernel, sinc_kernel
from vision.errors import UserError

ALL = [
    GaussianNoise((0, 50)),
    PoissonNoise((0.5, 2.0)),
    JPEG((30, 95)),
    GaussianBlur((0.5, 2.0), anisotropic=True),
    MotionBlur(),
    Rain(density=0.02),
    Chain([Rain(density=0.02), JPEG((20, 90))]),
    SecondOrder(2),
]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def smooth(h: int = 48, w: int = 36, c: int = 3, seed: int = 0) -> np.ndarray:
    """A picture without hard edges, 0.2..0.8."""
    y, x = np.mgrid[:h, :w]
    phases = rng(seed).uniform(0, 6, c)
    return (0.5 + 0.3 * np.sin(x[..., None] / 7 + y[..., None] / 9 + phases)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("degradation", ALL, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_generator_alone_decides(degradation: Degradation, channels: int) -> None:
    """Restormer #120: is the noise seeded?"""
    clean = smooth(c=channels)
    before = clean.copy()
    np.random.seed(1)
    first = degradation(clean, rng(5))
    np.random.seed(2)
    assert np.array_equal(first, degradation(clean, rng(5)))
    assert not np.array_equal(first, degradation(clean, rng(6)))
    assert np.array_equal(clean, before), "the clean picture is left as it was"
    assert first.dtype == np.float32
    assert first.shape == (48 // degradation.scale, 36 // degradation.scale, channels)
    assert np.isfinite(first).all()


@pytest.mark.parametrize("degradation", [*ALL, Downsample(2), SecondOrder(1)], ids=str)
@pytest.mark.parametrize("size", [(2, 2), (2, 40), (6, 4)])
def test_the_smallest_pictures_pass(degradation: Degradation, size: tuple[int, int]) -> None:
    assert degradation(smooth(*size), rng()).shape == (size[0] // degradation.scale, size[1] // degradation.scale, 3)


@pytest.mark.parametrize("degradation", ALL[2:], ids=str)
def test_what_files_hold_stays_within_0_and_1(degradation: Degradation) -> None:
    clean = rng().random((40, 40, 3)).astype(np.float32)
    spoilt = degradation(clean, rng())
    assert spoilt.min() >= -1e-6
    assert spoilt.max() <= 1 + 1e-6


# ---------------------------------------------------------------------------------------------------------------- noise


def test_gaussian_noise_is_numpys() -> None:
    """The noise of the benchmarks, to the bit (Restormer #73, #78: published figures not reproduced)."""
    clean = smooth()
    expected = (clean + 25 / 255 * np.random.default_rng(0).standard_normal(clean.shape)).astype(np.float32)
    assert np.array_equal(GaussianNoise(25)(clean, rng()), expected)


def test_gaussian_noise_is_neither_clipped_nor_rounded_unless_asked() -> None:
    white = np.ones((64, 64, 1), np.float32)
    noisy = GaussianNoise(25)(white, rng())
    assert noisy.max() > 1.2
    assert abs(noisy.std() * 255 - 25) < 1
    assert len(np.unique(noisy)) > 4000
    assert GaussianNoise(25, clip=True)(white, rng()).max() == 1


def test_a_range_of_sigma_is_drawn_evenly() -> None:
    sigmas = [GaussianNoise((0, 50))(np.zeros((32, 32, 3), np.float32), rng(i)).std() * 255 for i in range(200)]
    assert np.allclose(np.quantile(sigmas, [0.1, 0.5, 0.9]), [5, 25, 45], atol=5)
    assert GaussianNoise((0, 50)).sigma is None
    assert GaussianNoise(25).sigma == Chain([GaussianNoise(25)]).sigma == 25
    assert Chain([GaussianNoise(25), JPEG(50)]).sigma is None


def test_poisson_noise_grows_with_the_light() -> None:
    for value, strength in ((0.2, 1.0), (0.8, 1.0), (0.8, 3.0)):
        noise = PoissonNoise(strength)(np.full((200, 200, 1), value, np.float32), rng()) - value
        assert abs(noise.mean()) < 0.01 * strength
        assert noise.var() == pytest.approx(strength**2 * value / 255, rel=0.05)


@pytest.mark.parametrize("kind", [GaussianNoise, PoissonNoise])
def test_gray_noise_is_the_same_in_all_channels(kind: type) -> None:
    clean = smooth()
    noise = kind(10.0, gray=True)(clean, rng()) - clean
    assert np.allclose(noise[..., 0], noise[..., 1], atol=1e-6)
    assert noise.std() > 0.01


# ----------------------------------------------------------------------------------------------------------------- JPEG


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_what_pillow_writes(channels: int) -> None:
    clean = smooth(c=channels)
    file = io.BytesIO()
    Image.fromarray((clean * 255).round().astype(np.uint8).squeeze()).save(file, "JPEG", quality=20)
    expected = np.asarray(Image.open(file), np.float32).reshape(clean.shape) / 255
    assert np.allclose(JPEG(20)(clean, rng()), expected, atol=1e-7)


def test_jpeg_gets_worse_with_less_quality() -> None:
    clean = rng().random((64, 64, 3)).astype(np.float32)
    errors = [np.abs(JPEG(quality)(clean, rng()) - clean).mean() for quality in (95, 50, 10)]
    assert errors == sorted(errors)


# ----------------------------------------------------------------------------------------------------------------- blur


def test_convolution_equals_a_loop() -> None:
    image, kernel = rng().random((5, 4, 2)).astype(np.float32), rng(1).random((7, 7))

    def mirrored(i: int, n: int) -> int:  # ... 1 0 | 0 1 2 ... n-1 | n-1 n-2 ...
        i %= 2 * n
        return i if i < n else 2 * n - 1 - i

    expected = np.zeros(image.shape)
    for y, x in np.ndindex(5, 4):
        for v, u in np.ndindex(7, 7):
            expected[y, x] += kernel[v, u] * image[mirrored(y + 3 - v, 5), mirrored(x + 3 - u, 4)]
    assert np.allclose(blurred(image, kernel), expected, atol=1e-5)


def test_kernels_sum_to_1_and_have_their_moments() -> None:
    kernel = gaussian_kernel(41, 3.0, 1.5)
    y, x = np.mgrid[-20:21, -20:21]
    assert kernel.sum() == pytest.approx(1)
    assert (kernel * x**2).sum() == pytest.approx(9, rel=1e-3)
    assert (kernel * y**2).sum() == pytest.approx(2.25, rel=1e-3)
    assert np.allclose(gaussian_kernel(41, 3.0, 1.5, math.pi / 2), kernel.T, atol=1e-12)
    assert np.allclose(
        gaussian_kernel(9, 2.0, 2.0, beta=1.0, shape="plateau")[4, 4:6] * 1,
        np.array([1, 0.8]) * gaussian_kernel(9, 2.0, 2.0, shape="plateau")[4, 4],
    )
    line = line_kernel(10.0, 0.0)
    assert line.sum() == pytest.approx(1)
    assert np.count_nonzero(line.sum(1) > 1e-12) == 1, "a level way stays in its row"
    columns = line.sum(0) * (np.arange(line.shape[0]) - line.shape[0] // 2) ** 2
    assert columns.sum() == pytest.approx(10**2 / 12, rel=0.05)  # the variance of an even spread
    assert np.allclose(line_kernel(10.0, 90.0), line.T, atol=1e-12)
    assert np.allclose(line_kernel(0.0, 30.0).max(), 1)


def test_a_sinc_passes_low_and_stops_high_frequencies() -> None:
    spectrum = np.abs(np.fft.fft(sinc_kernel(63, math.pi / 2).sum(0), 256))
    assert abs(spectrum[:40] - 1).max() < 0.15  # up to 0.31 pi
    assert spectrum[90:128].max() < 0.1  # from 0.7 pi


def test_a_flat_picture_stays_flat() -> None:
    flat = np.full((20, 20, 3), 0.3, np.float32)
    for degradation in (GaussianBlur(3), MotionBlur(), Downsample(2, round=False)):
        assert np.allclose(degradation(flat, rng()), 0.3, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------- rain


def test_rain_only_brightens_and_falls_steeply() -> None:
    dark = np.full((64, 64, 3), 0.2, np.float32)
    rain = Rain(density=0.005, length=15, angle=0, brightness=0.5)(dark, rng()) - dark
    assert rain.min() >= -1e-5
    assert 0.2 < rain.max() <= 0.5 + 1e-5
    assert np.allclose(rain[..., 0], rain[..., 2])
    up, side = np.abs(np.diff(rain, axis=0)).mean(), np.abs(np.diff(rain, axis=1)).mean()
    assert side > 5 * up
    assert np.allclose(Rain(density=0.0)(dark, rng()), dark, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- down-sampling


def imresize(line: np.ndarray, scale: int) -> np.ndarray:
    """MATLAB's imresize by 1 / scale along the first axis, from its published definition, in double precision."""
    n = len(line)
    small = np.zeros((n // scale, *line.shape[1:]))
    for out in range(n // scale):
        centre = (out + 0.5) * scale - 0.5
        weights: dict[int, float] = {}
        for i in range(math.floor(centre - 2 * scale), math.ceil(centre + 2 * scale) + 1):
            t = abs((i - centre) / scale)
            cubic = 1.5 * t**3 - 2.5 * t**2 + 1 if t <= 1 else -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0
            place = i % (2 * n)
            place = place if place < n else 2 * n - 1 - place
            weights[place] = weights.get(place, 0.0) + cubic
        total = sum(weights.values())
        small[out] = sum(w / total * line[i] for i, w in weights.items())
    return small


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("size", [(24, 36), (12, 12), (72, 12)])
def test_downsampling_is_matlabs(scale: int, size: tuple[int, int]) -> None:
    """Also at the edges; KAIR #108, SwinIR #166: Set5 not reproduced with another kind of bicubic."""
    clean = rng().random((*size, 3)).astype(np.float32)
    expected = imresize(imresize(clean.astype(np.float64), scale).transpose(1, 0, 2), scale).transpose(1, 0, 2)
    assert np.allclose(Downsample(scale, round=False)(clean, rng()), expected, atol=2e-6)
    assert np.abs(Downsample(scale)(clean, rng()) - expected.clip(0, 1)).max() <= 0.5 / 255 + 1e-5


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianNoise(-1), "sigma=-1 is out of range; use a number from 0 to 255, or two in order: [from, to]"),
        (lambda: GaussianNoise((50, 5)), "sigma=(50, 5) is out of range"),
        (lambda: JPEG(0), "quality=0 is out of range; use a number from 1 to 100"),
        (lambda: JPEG(50.5), "quality=50.5 is not whole"),
        (lambda: Downsample(5), "scale=5 is not possible here; use 2, 3 or 4"),
        (lambda: SecondOrder(8), "scale=8 is not possible here"),
        (lambda: Chain([]), "steps of a Chain is empty; give at least one degradation"),
        (lambda: Downsample(2)(smooth(5, 4), rng()), "4 x 5 pixels do not divide by scale=2"),
        (lambda: Rain(density=0.9), "density=0.9 is out of range"),
    ],
)
def test_mistakes_are_told_in_one_line(make: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
