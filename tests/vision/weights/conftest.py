from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 1, "num_classes": 7, "img_size": 64, "patch_size": 8}
ANY_SIZE = {"dynamic_img_size": True, "dynamic_img_pad": True}


@torch.no_grad()
def perturbed_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random values in every table, scale, norm and bias, so that nothing a conversion forgets is still at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_embedding = any(word in name for word in ("pos", "token", "cls", "gamma"))
        parameter.add_(noise * (0.5 if is_embedding else 0.1 if parameter.ndim == 1 else 0.02))
    return model.eval()


@torch.no_grad()
def difference(ours: Tensor, reference: Tensor) -> float:
    """max|a - b| in units of the reference's standard deviation."""
    assert ours.shape == reference.shape
    assert reference.std() > 1e-3
    return ((ours - reference).abs().max() / reference.std()).item()


@pytest.fixture
def perturbed() -> Callable[..., nn.Module]:
    return perturbed_


@pytest.fixture
def apart() -> Callable[[Tensor, Tensor], float]:
    return difference


@pytest.fixture
def timm_vit() -> Callable[..., VisionTransformer]:
    """A small timm ViT with random weights; `distilled=True` is DeiT's."""

    def make(*, distilled: bool = False, seed: int = 0, **options: object) -> VisionTransformer:
        kind = VisionTransformerDistilled if distilled else VisionTransformer
        torch.manual_seed(seed)
        return perturbed_(kind(**{**SMALL, **ANY_SIZE, **options}), seed)

    return make


@pytest.fixture
def pictures() -> Callable[..., Tensor]:
    def make(h: int, w: int, channels: int = 3, seed: int = 1) -> Tensor:
        return torch.randn(2, channels, h, w, generator=torch.Generator().manual_seed(seed))

    return make
