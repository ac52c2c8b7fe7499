"""Losses: each equals its formula in plain float64 NumPy."""

from __future__ import annotations

import math
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vision.errors import UserError
from vision.losses import Charbonnier, Edge, Frequency, Perceptual, Weighted, check_loss
from vision.rebuild import build, describe
from vision.tasks.restoration import spec_of


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(*shape, dtype=torch.float64), torch.rand(*shape, dtype=torch.float64)


def test_charbonnier_is_its_formula() -> None:
    a, b = pair(2, 3, 7, 5)
    expected = np.mean(
        [math.sqrt((x - y) ** 2 + 0.01**2) for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)]
    )
    assert Charbonnier(0.01)(a, b).item() == pytest.approx(expected, rel=1e-12)


def smooth(x: np.ndarray) -> np.ndarray:
    """Binomial filter 1 4 6 4 1 both ways, edges repeated, pixel by pixel."""
    weights, (h, w), y = np.array([1, 4, 6, 4, 1]) / 16, x.shape, np.zeros(x.shape)
    for i in range(h):
        for j in range(w):
            for di in range(-2, 3):
                for dj in range(-2, 3):
                    y[i, j] += weights[di + 2] * weights[dj + 2] * x[min(max(i + di, 0), h - 1), min(max(j + dj, 0), w - 1)]
    return y


@pytest.mark.parametrize("shape", [(8, 6), (7, 9)])
def test_edge_is_charbonnier_of_the_finest_laplacian(shape: tuple[int, int]) -> None:
    a, b = pair(1, 2, *shape)

    def edges(x: np.ndarray) -> np.ndarray:
        kept = np.zeros_like(x)
        kept[::2, ::2] = smooth(x)[::2, ::2]
        return x - smooth(4 * kept)

    differences = np.stack([edges(p) - edges(q) for p, q in zip(a[0].numpy(), b[0].numpy(), strict=True)])
    assert Edge(1e-3)(a, b).item() == pytest.approx(np.sqrt(differences**2 + 1e-6).mean(), rel=1e-10)


def test_edge_loss_sees_edges_not_brightness() -> None:
    flat = torch.full((1, 1, 16, 16), 0.25)
    step = flat.clone()
    step[..., 8:] = 0.75
    inner = (slice(None), slice(None), slice(4, 12), slice(4, 12))  # away from the border
    assert Edge().edges(flat + 0.5)[inner].abs().max() < 1e-6
    assert Edge().edges(step)[inner].abs().max() > 0.05


def test_frequency_is_the_mean_of_real_and_imaginary_parts() -> None:
    a, b = pair(1, 2, 5, 6)
    h, w, total = 5, 6, 0.0
    for difference in (a - b)[0].numpy():
        for u in range(h):
            for v in range(w):
                wave = np.exp(-2j * np.pi * (u * np.arange(h)[:, None] / h + v * np.arange(w) / w))
                value = (difference * wave).sum() / math.sqrt(h * w)
                total += abs(value.real) + abs(value.imag)
    assert Frequency()(a, b).item() == pytest.approx(total / (2 * 2 * h * w), rel=1e-10)


def test_weighted_is_the_sum() -> None:
    a, b = pair(2, 3, 8, 8)
    loss = Weighted([Charbonnier(), Edge(), nn.MSELoss()], [1.0, 0.05, 2.5])
    expected = Charbonnier()(a, b) + 0.05 * Edge()(a, b) + 2.5 * (a - b).square().mean()
    assert loss(a, b).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("loss", [Charbonnier(), Edge(), Frequency(), Weighted([Charbonnier(), Frequency()], [1.0, 0.1])])
def test_gradient_is_finite_where_both_are_equal_and_half_precision_is_measured_in_full(loss: nn.Module) -> None:
    a = torch.rand(1, 3, 16, 16).bfloat16().requires_grad_()
    value = loss(a, a.detach().float())
    value.backward()
    assert value.dtype == torch.float32
    assert a.grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(a, a.detach().float()).item() == value.item()


@pytest.mark.parametrize("loss", [Charbonnier(0.01), Edge(0.01), Frequency(), Weighted([Charbonnier(), Edge()], [1.0, 0.5])])
def test_a_loss_is_rebuilt_from_plain_values(loss: nn.Module) -> None:
    a, b = torch.rand(2, 1, 3, 8, 8)
    again = build(describe(loss))
    assert not again.state_dict()  # nothing of it goes into a checkpoint
    assert again(a, b).item() == loss(a, b).item()


@pytest.fixture
def vgg(tmp_path: Path) -> str:
    """The first four convolutions of a VGG-19 with random weights, as torchvision names them."""
    made = torch.Generator().manual_seed(0)
    state = {}
    for place, chans, out in ((0, 3, 64), (2, 64, 64), (5, 64, 128), (7, 128, 128)):
        state[f"features.{place}.weight"] = torch.randn(out, chans, 3, 3, generator=made) / math.sqrt(9 * chans / 2)
        state[f"features.{place}.bias"] = torch.randn(out, generator=made) / 10
    torch.save(state, tmp_path / "vgg.pth")
    return str(tmp_path / "vgg.pth")


def test_perceptual_is_its_formula(vgg: str) -> None:
    """Before the activations, which torchvision's network would overwrite with what comes after them."""
    a, b = torch.rand(2, 2, 3, 16, 20, dtype=torch.float64)
    state = {name: value.double() for name, value in torch.load(vgg).items()}
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    def features(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        x = (x - mean) / std
        for place in (0, 2, 5, 7):
            x = F.max_pool2d(x, 2) if place == 5 else x
            x = F.conv2d(x, state[f"features.{place}.weight"], state[f"features.{place}.bias"], padding=1)
            found.append(x)
            x = x.relu()
        return found

    (_, a2, _, a4), (_, b2, _, b4) = features(a), features(b)
    expected = 0.1 * (a2 - b2).abs().mean() + 2 * (a4 - b4).abs().mean()
    loss = Perceptual({"conv1_2": 0.1, "conv2_2": 2.0}, vgg)
    assert loss(a, b).item() == pytest.approx(expected.item(), rel=1e-9)
    gray = torch.rand(2, 2, 1, 16, 16)
    assert loss(*gray).item() == pytest.approx(loss(*gray.expand(-1, -1, 3, -1, -1)).item(), rel=1e-5)


def test_perceptual_trains_beside_a_pixel_loss_and_leaves_no_trace(vgg: str) -> None:
    part = Perceptual({"conv1_2": 0.1, "conv2_2": 1.0}, vgg)
    loss = Weighted([nn.L1Loss(), part], [1.0, 0.5])
    for channels in (1, 3):
        check_loss(loss, (2, channels, 32, 32), torch.device("cpu"))
    a = torch.rand(1, 3, 16, 16).requires_grad_()
    b = torch.rand(1, 3, 16, 16)
    value = loss(a, b)
    value.backward()
    assert a.grad.abs().sum() > 0
    assert not loss.state_dict()
    assert not list(loss.parameters())
    again = build(spec_of(loss))
    assert again(a, b).item() == value.item()
    loss.bfloat16()
    half = loss(a.detach().bfloat16(), b.bfloat16())
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(value.item(), rel=0.02)


def test_perceptual_without_a_network_or_with_other_weights_is_one_line(
    vgg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", unreachable)
    a, b = torch.rand(2, 1, 3, 16, 16)
    with pytest.raises(UserError, match=r"VGG-19 cannot be downloaded \(.*no network.*\); give Perceptual a file") as caught:
        Perceptual()(a, b)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"holds no VGG-19 \(features.10.weight is missing\); give torchvision's"):
        Perceptual(weights=vgg)(a, b)
    torch.save({name: value[..., :1] for name, value in torch.load(vgg).items()}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"other.pth holds no VGG-19: .*size mismatch"):
        Perceptual({"conv1_1": 1.0}, str(tmp_path / "other.pth"))(a, b)
    with pytest.raises(UserError, match="no such file"):
        Perceptual(weights=str(tmp_path / "none.pth"))(a, b)
    with pytest.raises(UserError, match="VGG-19 has no layer 'conv6_1'; use conv1_1, conv1_2"):
        Perceptual({"conv6_1": 1.0})
    with pytest.raises(UserError, match=r"\[15, 16\] pixels are too few; use 16 or more"):
        Perceptual(weights=vgg)(a[..., :15, :], b[..., :15, :])


def test_wrong_options_are_named() -> None:
    with pytest.raises(UserError, match=r"eps=0 is not positive; use e.g. 1e-3, or torch.nn.L1Loss for none"):
        Charbonnier(0.0)
    with pytest.raises(UserError, match="losses are 1, weights 2; give one weight for each loss, at least one"):
        Weighted([Charbonnier()], [1.0, 2.0])


class Psnr(nn.Module):
    """As NAFNet trains, but for its eps: minus infinity where both are the same."""

    def forward(self, restored: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        return 10 * torch.log10((restored - clean).square().mean(dim=(1, 2, 3))).mean()


class Ssim(nn.Module):
    """A similarity: the larger, the better."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, restored: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        a, b = restored - restored.mean((2, 3), True), clean - clean.mean((2, 3), True)
        similar = (2 * (a * b).mean() + 0.001) / (a.square().mean() + b.square().mean() + 0.001)
        return self.sign * similar * (1 - (restored.mean() - clean.mean()).square())


class TotalVariation(nn.Module):
    def forward(self, restored: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        return restored.diff(dim=-1).abs().mean()


@pytest.mark.parametrize(
    "loss",
    [
        nn.L1Loss(), nn.L1Loss(reduction="sum"), nn.MSELoss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCELoss(), Charbonnier(),
        Edge(), Frequency(), Psnr(), Ssim(-1.0), Weighted([nn.L1Loss(), TotalVariation()], [1.0, 0.1]),
        Weighted([Charbonnier(), Edge()], [1.0, 0.05]),
    ],
    ids=lambda loss: type(loss).__name__,
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3])
def test_sensible_losses_pass_the_trial_and_no_draw_is_shifted(loss: nn.Module, channels: int) -> None:
    before = torch.get_rng_state()
    for side in (8, 64):
        check_loss(loss, (2, channels, side, side), torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (nn.CrossEntropyLoss(), r"loss CrossEntropyLoss is \d"),
        (nn.BCEWithLogitsLoss(), r"loss BCEWithLogitsLoss is .* for a \w+ picture"),
        (nn.KLDivLoss(reduction="batchmean"), "loss KLDivLoss is "),
        (nn.PoissonNLLLoss(), r"loss PoissonNLLLoss is .* for a darker picture"),
        (nn.SoftMarginLoss(), r"loss SoftMarginLoss is .* for a brighter picture"),
        (nn.NLLLoss(), r"loss NLLLoss fails on pictures of shape \[2, \d, 32, 32\] \(RuntimeError: "),
        (nn.CosineEmbeddingLoss(), "loss CosineEmbeddingLoss fails on pictures .*TypeError: "),
        (nn.MSELoss(reduction="none"), r"loss MSELoss gives shape \[2, \d, 32, 32\], and one number is needed"),
        (Ssim(1.0), "loss Ssim is .* picture"),
        (TotalVariation(), "loss TotalVariation is "),
        (nn.Identity(), "loss Identity fails on pictures"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("channels", [1, 3])
def test_losses_for_other_tasks_are_refused_in_one_line(loss: nn.Module, text: str, channels: int) -> None:
    """CrossEntropyLoss takes pictures for classes, gives a number, and a training on it comes to nothing."""
    with pytest.raises(UserError, match=text) as caught:
        check_loss(loss, (2, channels, 32, 32), torch.device("cpu"))
    assert "use one that is least where both pictures are the same" in str(caught.value)
    assert "\n" not in str(caught.value)
