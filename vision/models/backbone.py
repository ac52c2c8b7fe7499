"""What our classifiers share, by the names that timm's users know: maps on the way, and how pictures are made for a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from vision.errors import UserError
from vision.models.features import check_indices, last_indices


class Backbone(nn.Module, ABC):
    """From pictures to logits: `run`, `last_norm`, `forward_head`. A subclass gives the parts below and what is not written here.

    `preprocessing` (see `vision.data`) is that of the loaded weights, where they tell it. `published_as` is timm's name of a
    model whose weights these are or will be; `create_model` sets it.
    """

    options: dict[str, Any]
    preprocessing: dict[str, Any]
    published_as = ""
    dim: int  # of the first map
    num_features: int  # of the pooled features
    num_classes: int
    in_chans: int
    prefix = 0  # tokens before those of the map
    norm: nn.Module

    @abstractmethod
    def run(
        self, x: Tensor, keep: Collection[int] = (), count: int | None = None
    ) -> tuple[Tensor, dict[int, Tensor], tuple[int, int]]:
        """What the first `count` layers (None: all) make of pictures, what those in `keep` do, and its rows and columns."""

    @abstractmethod
    def as_map(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """A map `b d i j` of what a layer gives."""

    @property
    @abstractmethod
    def feature_info(self) -> list[dict[str, Any]]:
        """`num_chs`, `reduction` and `module` of each map."""

    def last_norm(self, x: Tensor) -> Tensor:
        """The norm before the pooling."""
        return self.norm(x)

    def forward_features(self, x: Float[Tensor, "b c h w"]) -> Tensor:
        """All that the last layer gives, normed: tokens `b n d` (class tokens, registers, then patches by rows), or a map
        `b i j d`. A ViT that takes the mean (`global_pool="avg"`) norms that, and not its tokens."""
        return self.last_norm(self.run(x)[0])

    @abstractmethod
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooled features, through the head unless `pre_logits`."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        return self.forward_head(self.forward_features(x))

    def feature_maps(self, x: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """Maps `b d i j` of `feature_info` (0 is the first), before any norm, in that order."""
        _, states, size = self.run(x, indices, max(indices) + 1)
        return [self.as_map(states[i], size) for i in indices]

    # timm's conventions

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        *,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> Any:
        """What `forward_features` gives and maps on the way, as a pair.

        Args:
            x: pictures `b c h w`.
            indices: of `feature_info`; a number n is the last n, None all. The maps come in the order of the layers.
            norm: the last norm over the maps too, where it is as wide as they are.
            stop_early: no layers after the last of the maps; the features are then that layer's.
            output_fmt: "NCHW", maps `b d i j`, or "NLC", tokens `b n d`.
            intermediates_only: the list of maps alone.
            return_prefix_tokens: each map in a pair with its class tokens and registers `b n d`.

        Raises:
            UserError: an index out of range, another format, prefix tokens of a model without.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt={output_fmt!r} is unknown; use 'NCHW' (maps) or 'NLC' (tokens)")
        if return_prefix_tokens and not self.prefix:
            raise UserError(f"{type(self).__name__} has no prefix tokens here; leave return_prefix_tokens out")
        widths = [info["num_chs"] for info in self.feature_info]
        count = len(widths)
        chosen = check_indices(last_indices(count if indices is None else indices, count, "indices"), count, "indices")
        kept = sorted({index % count for index in chosen})
        x, states, size = self.run(x, kept, kept[-1] + 1 if stop_early else None)
        if norm:
            states = {i: self.last_norm(y) if widths[i] == self.num_features else y for i, y in states.items()}
        maps: list[Any] = [self.as_map(states[i], size) for i in kept]
        if output_fmt == "NLC":
            maps = [rearrange(y, "b d i j -> b (i j) d") for y in maps]
        if return_prefix_tokens:
            maps = [(y, states[i][:, : self.prefix]) for i, y in zip(kept, maps, strict=True)]
        if intermediates_only:
            return maps
        return self.last_norm(x) if x.shape[-1] == self.num_features else x, maps

    @property
    def embed_dim(self) -> int:
        return self.dim

    @property
    def head_hidden_size(self) -> int:
        return self.num_features

    @property
    def num_prefix_tokens(self) -> int:
        return self.prefix

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Classes, and how pictures are made, for `timm.data.resolve_data_config({}, model=model)`.

        As the loaded weights tell, or else as timm does for this size; what neither tells is left out, and timm then takes
        its defaults. Means and deviations for another number of channels are those of gray.
        """
        told = getattr(self, "preprocessing", {})
        found = {name: told[name] for name in ("mean", "std", "interpolation", "crop_pct") if name in told}
        if told:
            found["crop_mode"] = "squash" if told.get("resize") == "squash" else "center"
        else:
            found = published_cfg(self.published_as)
        size = told.get("size", [self.options["img_size"]] * 2)
        found |= {"num_classes": self.num_classes, "input_size": (self.in_chans, *size)}
        for name in {"mean", "std"} & found.keys():
            values = tuple(found[name])
            found[name] = values if len(values) == self.in_chans else (sum(values) / len(values),) * self.in_chans
        return found

    @property
    def default_cfg(self) -> dict[str, Any]:
        return self.pretrained_cfg


def published_cfg(name: str) -> dict[str, Any]:
    """What timm tells of the pictures of a model; nothing where it has none of this name."""
    if not name:
        return {}
    import timm  # takes seconds

    config = timm.models.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
    known = config.to_dict() if config else {}
    return {name: known[name] for name in ("mean", "std", "interpolation", "crop_pct", "crop_mode") if known.get(name)}
