"""Losses of restoration beside torch's (L1Loss, MSELoss): modules `(restored, clean) -> scalar` that a config passes in.

They are computed in float32 at least, also where the network runs in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from core.options import remember_options
from vision.errors import UserError

ADVICE = "use one that is least where both pictures are the same, such as torch.nn.L1Loss or those of vision.losses"


class Charbonnier(nn.Module):
    """mean(sqrt(d^2 + eps^2)) of the differences d: L1, smooth at zero (Charbonnier et al. 1994).

    Args:
        eps: where it turns from a square into a line, in units of the picture (0..1).
    """

    @remember_options
    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        if not eps > 0:
            raise UserError(f"eps={eps:g} is not positive; use e.g. 1e-3, or torch.nn.L1Loss for none")
        self.eps = eps

    def forward(self, restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        return torch.sqrt((wide(restored) - wide(clean)).square() + self.eps**2).mean()


class Edge(nn.Module):
    """Charbonnier loss of the finest level of the Laplacian pyramid, so of edges (Zamir et al. 2021, eq. 4, MPRNet).

    The level is what a picture loses when it is halved and doubled again (Burt & Adelson 1983): smoothed by 1 4 6 4 1, every
    second pixel kept, the gaps filled by the same filter. Edges of the picture are repeated.

    Args:
        eps: of `Charbonnier`.
    """

    kernel: Tensor

    @remember_options
    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        self.charbonnier = Charbonnier(eps)
        line = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], dtype=torch.float64) / 16
        self.register_buffer("kernel", torch.outer(line, line), persistent=False)

    def forward(self, restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        return self.charbonnier(self.edges(wide(restored)), self.edges(wide(clean)))

    def edges(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        kept = torch.zeros_like(x)
        kept[..., ::2, ::2] = 4 * self.smooth(x)[..., ::2, ::2]  # a quarter of the pixels carries the whole brightness
        return x - self.smooth(kept)

    def smooth(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        kernel = self.kernel.to(x.dtype).expand(x.shape[1], 1, 5, 5)
        with torch.autocast(x.device.type, enabled=False):
            return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="replicate"), kernel, groups=x.shape[1])


class Frequency(nn.Module):
    """mean |F(restored) - F(clean)| over real and imaginary parts of the orthonormal 2-d Fourier transform (Cho et al. 2021).

    MIMO-UNet's own transform is not normalised: its loss is sqrt(h w) times this one.
    """

    @remember_options
    def __init__(self) -> None:
        super().__init__()

    def forward(self, restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        with torch.autocast(restored.device.type, enabled=False):
            spectrum = torch.fft.fft2(wide(restored) - wide(clean), norm="ortho")  # linear: of the difference
            return torch.view_as_real(spectrum).abs().mean()


class Perceptual(nn.Module):
    """Distances of the features that a VGG-19 trained on ImageNet makes of both pictures (Johnson et al. 2016).

    Real-ESRGAN's by default (Wang et al. 2021): the convolutions named, before their activations, mean absolute differences. Use
    it beside a pixel loss, as there: ``Weighted([torch.nn.L1Loss(), Perceptual()], [1.0, 1.0])``. It is for looks, not for PSNR.
    Gray pictures go in as equal colours. The network is no part of checkpoints, and is read when it is first needed.

    Args:
        layers: weights by convolution, "conv1_1" to "conv5_4" (block, place within).
        weights: file of a VGG-19, such as torchvision's vgg19-dcbb9e9d.pth; "" is torchvision's download (548 MB, once).

    Raises:
        UserError: a layer that is not there; weights that cannot be had, or are none of a VGG-19; pictures below 16 pixels.
    """

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, with which VGG was trained

    @remember_options
    def __init__(self, layers: dict[str, float] | None = None, weights: str = "") -> None:
        super().__init__()
        self.layers, self.weights = dict(layers or REAL_ESRGAN), weights
        for name in self.layers:
            if name not in VGG19:
                raise UserError(f"VGG-19 has no layer {name!r}; use {', '.join(VGG19)}")
        self.hidden: list[nn.Sequential] = []  # from state dicts, optimizers and half precision

    def forward(self, restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        if min(clean.shape[-2:]) < 16:
            raise UserError(f"VGG-19 halves pictures four times, {list(clean.shape[-2:])} pixels are too few; use 16 or more")
        with torch.autocast(restored.device.type, enabled=False):
            found = self.features(restored)
            with torch.no_grad():
                wanted = self.features(clean)
            return torch.stack([self.layers[name] * (found[name] - wanted[name]).abs().mean() for name in self.layers]).sum()

    def features(self, x: Float[Tensor, "b c h w"]) -> dict[str, Tensor]:
        """What the layers give, by name."""
        x = wide(x).expand(-1, 3, -1, -1)
        mean, std = (x.new_tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        x, names, found = (x - mean) / std, {VGG19[name]: name for name in self.layers}, {}
        for place, layer in enumerate(self.network(x)):
            x = layer(x)
            if place in names:
                found[names[place]] = x
        return found

    def network(self, like: Tensor) -> nn.Sequential:
        """As far as it is needed, fixed, where the pictures are and in their precision."""
        if not self.hidden:
            self.hidden.append(vgg19(max(VGG19[name] for name in self.layers) + 1, self.weights))
        return self.hidden[0].to(like)


VGG19 = {  # place of each convolution among torchvision's features; between them lie activations, and at the ends of blocks pools
    f"conv{block}_{place + 1}": start + 2 * place
    for block, start, count in ((1, 0, 2), (2, 5, 2), (3, 10, 4), (4, 19, 4), (5, 28, 4))
    for place in range(count)
}
REAL_ESRGAN = {"conv1_2": 0.1, "conv2_2": 0.1, "conv3_4": 1.0, "conv4_4": 1.0, "conv5_4": 1.0}


def vgg19(depth: int, weights: str) -> nn.Sequential:
    """The first layers of torchvision's VGG-19 with weights, its activations not in place: what lies before them is looked at."""
    import torchvision

    from vision.weights.read import read

    if weights:
        state: Mapping[str, Tensor] = read(weights).state
    else:
        try:
            state = torchvision.models.VGG19_Weights.IMAGENET1K_V1.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, no place on the disk; cut short
            raise UserError(
                f"torchvision's VGG-19 cannot be downloaded ({error}); give Perceptual a file of it, weights=vgg19-dcbb9e9d.pth"
            ) from error
    with torch.device("meta"):
        layers = torchvision.models.vgg19().features[:depth]
    names = {f"features.{name}": name for name in layers.state_dict()}
    if any(name not in state for name in names):
        raise UserError(f"{weights} holds no VGG-19 ({next(n for n in names if n not in state)} is missing); give torchvision's")
    try:
        layers.load_state_dict({short: state[name] for name, short in names.items()}, assign=True)
    except RuntimeError as error:
        raise UserError(f"{weights} holds no VGG-19: {' '.join(str(error).split())[:160]}; give torchvision's") from error
    network = nn.Sequential(*(nn.ReLU() if isinstance(layer, nn.ReLU) else layer for layer in layers))
    return network.requires_grad_(False).eval()


class Weighted(nn.Module):
    """The sum of losses, each times its weight.

    Args:
        losses: such as [Charbonnier(), Edge()].
        weights: one each, such as [1, 0.05].
    """

    @remember_options
    def __init__(self, losses: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        if not losses or len(losses) != len(weights):
            raise UserError(f"losses are {len(losses)}, weights {len(weights)}; give one weight for each loss, at least one")
        self.losses, self.weights = nn.ModuleList(losses), [float(weight) for weight in weights]

    def forward(self, restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        parts = [weight * loss(restored, clean) for loss, weight in zip(self.losses, self.weights, strict=True)]
        return torch.stack(parts).sum()


def check_loss(loss: nn.Module, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Tries a loss on smooth pictures, and on copies of them that are darker, brighter, harder and inverted.

    Args:
        shape: of the clean pictures, b c h w.

    Raises:
        UserError: it fails, is not one number with a gradient, or the clean pictures themselves are not the best: so with
            CrossEntropyLoss, which takes the channels for classes.
    """
    b, c, h, w = shape
    phase = 2 * torch.arange(b * c, device=device).view(b, c, 1, 1)
    rows, columns = (torch.arange(side, device=device) / 7 for side in (h, w))
    wave = torch.sin(rows[:, None] + phase) * torch.cos(columns)
    clean = 0.5 + 0.2 * wave
    wrong = {"darker": clean / 2, "brighter": (1 + clean) / 2, "harder": 0.5 + 0.48 * wave, "inverted": 1 - clean}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # a loss that draws shifts no other draw
        best = value_of(loss, clean, clean)
        values = {kind: value_of(loss, restored, clean) for kind, restored in wrong.items()}
    name, least = type(loss).__name__, min(values, key=values.__getitem__)
    if values[least] < best - 1e-4 * max(1.0, abs(best)):
        raise UserError(f"loss {name} is {values[least]:.4g} for a {least} picture, {best:.4g} for the clean one; {ADVICE}")
    if max(values.values()) <= best:
        raise UserError(f"loss {name} is {best + 0.0:.4g} whatever the restored picture; {ADVICE}")


def value_of(loss: nn.Module, restored: Float[Tensor, "b c h w"], clean: Float[Tensor, "b c h w"]) -> float:
    """Minus infinity may be: some logarithms have it where both pictures are the same."""
    name = type(loss).__name__
    try:
        value = loss(restored.clone().requires_grad_(), clean)
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(f"loss {name} fails on pictures of shape {list(clean.shape)} ({reason}); {ADVICE}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UserError(f"loss {name} gives {kind}, and one number is needed; {ADVICE}")
    if not value < math.inf or not value.requires_grad:
        raise UserError(f"loss {name} gives {value.item():g} without a gradient to follow; {ADVICE}")
    return value.item()


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
