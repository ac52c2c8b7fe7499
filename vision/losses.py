"""Losses of restoration beside torch's (L1Loss, MSELoss): modules `(restored, clean) -> scalar` that a config passes in.

They are computed in float32 at least, also where the network runs in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
