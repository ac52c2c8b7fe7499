"""What backbones in stages share (Swin, DAT): a map that shrinks stage by stage, its mean through one head, and the map
after each stage as features."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, cast

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core.block import run_through
from core.options import check_sizes
from vision.models.backbone import Backbone
from vision.models.stem import check_classes


def check_stages(depths: Sequence[int], **per_stage: Sequence[int]) -> None:
    """Raises ValueError: options that do not give each stage a whole number of its own, or no blocks at all."""
    for name, values in {"depths": depths, **per_stage}.items():
        check_series(name, values)
        if len(values) != len(depths):
            raise ValueError(f"depths={tuple(depths)} and {name}={tuple(values)} differ in stages; give each one a stage")
        for value in values:
            check_sizes(0 if name == "depths" else 1, **{name: value})
    if not any(depths):
        raise ValueError(f"depths={tuple(depths)} leave no blocks; use e.g. (2, 2, 6, 2)")


def check_series(name: str, values: Any) -> None:
    """Raises ValueError: one value, or a text, where each stage has its own."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name}={values!r} is not one value a stage; give a tuple of them")


class Stage(nn.Module):
    """Blocks over maps of one size, after the downsampling that makes them smaller (none before the first stage)."""

    def __init__(self, downsampling: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsampling, self.blocks = downsampling, nn.ModuleList(blocks)
        self.checkpointing = False

    def forward(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b i j e"]:
        x = self.downsampling(x)
        for block in self.blocks:
            x = run_through(block, x, checkpointing=self.checkpointing)
        return x


class Pyramid(Backbone):
    """A subclass gives the parts below and `embed`, from pictures to the first map."""

    stem: Any
    stages: nn.ModuleList  # each doubles the width

    @abstractmethod
    def embed(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b i j d"]:
        """The first map."""

    def init_head(self, head: nn.Module) -> None:
        """The weights of a new head; torch's own unless a backbone says otherwise."""

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """A new, untrained head for `num_classes` classes (0: none). There is one pooling, the mean ("avg")."""
        check_classes(num_classes)
        if global_pool != "avg":
            fix = "use 'avg' (forward_features gives what is pooled)"
            raise ValueError(f"global_pool={global_pool!r} is unknown to {type(self).__name__}; {fix}")
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.init_head(self.head)
        self.head.to(next(self.parameters()))  # where the model is, in its precision
        if hasattr(self, "options"):
            self.options |= {"num_classes": num_classes}

    def get_classifier(self) -> nn.Module:
        return self.head

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for stage in cast("list[Stage]", self.stages):
            stage.checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameter belongs to which depth, for layer decay (timm's convention)."""
        fine = [(r"^stages\.(\d+)\.downsampling", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^(?:stem|embed_norm)", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def run(
        self, x: Float[Tensor, "b c h w"], keep: Collection[int] = (), count: int | None = None
    ) -> tuple[Float[Tensor, "b i j d"], dict[int, Float[Tensor, "b _ _ _"]], tuple[int, int]]:
        """The map after the first `count` stages (None: all), those after the stages in `keep`, and its size."""
        x, kept = self.embed(x), {}
        for i, stage in enumerate(self.stages):
            if i == count:
                break
            x = stage(x)
            if i in keep:
                kept[i] = x
        return x, kept, (x.shape[1], x.shape[2])

    def forward_head(self, x: Float[Tensor, "b i j d"], pre_logits: bool = False) -> Float[Tensor, "b k"]:
        """The mean over the map, through the head unless `pre_logits`."""
        pooled = x.mean(dim=(1, 2))
        return pooled if pre_logits else self.head(pooled)

    # As a backbone: `vision.models.features`

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What the map after each stage is (timm's convention)."""
        return [
            {"num_chs": self.dim * 2**i, "reduction": self.stem.reduction * 2**i, "module": f"stages.{i}"}
            for i in range(len(self.stages))
        ]

    def as_map(self, x: Float[Tensor, "b i j d"], size: tuple[int, int]) -> Float[Tensor, "b d i j"]:
        return rearrange(x, "b i j d -> b d i j")

    def keep_features(self, last: int) -> None:
        """Drops what the maps up to `last` do not need; only `feature_maps` works afterwards."""
        self.stages, self.norm, self.head = self.stages[: last + 1], nn.Identity(), nn.Identity()
