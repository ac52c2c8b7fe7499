"""A vision backbone as the encoder of an encoder-decoder: pictures to a memory that a `core.Decoder` writes from."""

from __future__ import annotations

from collections.abc import Callable

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import LayerNorm, Position, Sinusoidal, Site, grid, require_hooks
from core.options import check_sizes, remember_options
from core.position import make_position
from vision.models.features import Features
from vision.models.stem import is_pair


class ImageEncoder(nn.Module):
    """The last feature map of a backbone, each cell a place of the memory, row by row.

    The decoder's attention knows no places of a memory; what is added here tells where each cell is. A ViT with embedded
    positions has told its cells already, but a Swin's are relative.

    Args:
        backbone: any with feature maps, such as `ViT` or `Swin`; it loses its head.
        dim: width of the memory; None is the map's.
        index: which feature map; -1 is the last.
        position: an absolute kind, such as `Sinusoidal` or `Learned`; `Position` is none.
        extent: cells down and across that a learned table is made for.

    Raises:
        ValueError: a relative kind of position.
    """

    @remember_options
    def __init__(
        self,
        backbone: nn.Module,
        dim: int | None = None,
        *,
        index: int = -1,
        position: Callable[[Site], Position] = Sinusoidal,
        extent: tuple[int, int] = (14, 14),
    ) -> None:
        super().__init__()
        self.features = Features(backbone, [index])
        channels = self.features.feature_info.channels()[0]
        self.dim = channels if dim is None else dim
        check_sizes(dim=self.dim)
        if not is_pair(extent):
            raise ValueError(f"extent={extent!r} is not rows and columns; use e.g. (14, 14)")
        self.norm = LayerNorm(channels)
        self.proj = nn.Identity() if self.dim == channels else nn.Linear(channels, self.dim)
        self.position = make_position(position, Site(self.dim, 1, extent=extent))
        require_hooks(self.position, "ImageEncoder", frozenset({"embed"}))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Of the backbone: see there."""
        self.features.set_grad_checkpointing(enable)

    def forward(
        self, pictures: Float[Tensor, "b c h w"], *, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Float[Tensor, "b n d"]:
        """Raises: ValueError: padding or packing, which pictures do not have."""
        if real is not None or segments is not None:
            raise ValueError("pictures have no padding and are not packed; leave real and segments out")
        (cells,) = self.features(pictures)
        at = grid(*cells.shape[-2:], device=cells.device)
        return self.position.embed(self.proj(self.norm(rearrange(cells, "b c i j -> b (i j) c"))), at)
