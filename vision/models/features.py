"""Any of our models as a backbone: feature maps instead of logits, as timm's `features_only=True` gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from core.options import remember_options
from vision.errors import UserError


class FeatureInfo(list[dict[str, Any]]):
    """One `{"num_chs", "reduction", "module"}` a map: its channels, pixels a cell, and the part it comes from."""

    def channels(self) -> list[int]:
        return [info["num_chs"] for info in self]

    def reduction(self) -> list[int]:
        return [info["reduction"] for info in self]

    def module_name(self) -> list[str]:
        return [info["module"] for info in self]

    def get_dicts(self, keys: Sequence[str] | None = None) -> list[dict[str, Any]]:
        return [{key: info[key] for key in keys or info} for info in self]


class Features(nn.Module):
    """Takes a picture, gives the list of its feature maps `b c h w`, in the order of `out_indices`.

    Args:
        model: becomes part of this module and loses what the maps do not need (later blocks, last norm, heads).
        out_indices: which of `model.feature_info`; negative ones count from the end.

    Raises:
        UserError: a model without feature maps, an index out of range.

    Attributes:
        feature_info: what each map is.
        left_out: names of the weights that the model had before.
    """

    @remember_options
    def __init__(self, model: nn.Module, out_indices: Sequence[int]) -> None:
        super().__init__()
        infos = feature_info(model)
        self.out_indices = [index % len(infos) for index in check_indices(out_indices, len(infos))]
        self.feature_info = FeatureInfo(infos[index] for index in self.out_indices)
        self.model = cast("Any", model)
        before = set(model.state_dict())
        self.model.keep_features(max(self.out_indices))
        self.left_out = frozenset(before.difference(model.state_dict()))

    def forward(self, x: Float[Tensor, "b c h w"]) -> list[Float[Tensor, "b d i j"]]:
        return self.model.feature_maps(x, self.out_indices)

    # As the model's own, whose parameters have one more prefix here

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.model.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        return {f"model.{name}" for name in getattr(self.model, "no_weight_decay", set)()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return prefixed(self.model.group_matcher(coarse=coarse))

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """As the model's own, without classes."""
        return {name: value for name, value in self.model.pretrained_cfg.items() if name != "num_classes"}

    @property
    def default_cfg(self) -> dict[str, Any]:
        return self.pretrained_cfg


def prefixed(matcher: Any) -> Any:
    """Patterns of a group matcher for names that begin with `model.`."""
    if isinstance(matcher, dict):
        return {group: prefixed(patterns) for group, patterns in matcher.items()}
    if isinstance(matcher, list):
        return [(prefixed(pattern), depth) for pattern, depth in matcher]
    return re.sub(r"^\^", r"^model\.", matcher)


def feature_info(model: nn.Module) -> list[dict[str, Any]]:
    infos = getattr(model, "feature_info", None)
    if not infos or not hasattr(model, "feature_maps"):
        raise UserError(f"{type(model).__name__} gives no feature maps; use a ViT, Swin or DAT of vision.list_models()")
    return infos


def default_indices(model: nn.Module) -> list[int]:
    """timm's: every stage of a pyramid, the last three blocks of a plain model."""
    reductions = [info["reduction"] for info in feature_info(model)]
    return list(range(len(reductions)))[-3 if len(set(reductions)) == 1 else 0 :]


def last_indices(indices: Any, count: int, name: str = "out_indices") -> Sequence[int]:
    """A number n of the last maps as their indices; indices as they are."""
    if not isinstance(indices, Integral) or isinstance(indices, bool):
        return check_whole(indices, name)
    last = int(indices)
    if not 0 < last <= count:
        one = f"map use [{last}]" if -count <= last <= 0 else f"map use its index, {-count}..{count - 1}, in a list"
        raise UserError(f"{name}={last} is a number of last maps, 1..{count}; for one {one}")
    return range(count - last, count)


def check_whole(indices: Any, name: str = "out_indices") -> Sequence[int]:
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise UserError(f"{name}={indices!r} is neither a number nor a list of numbers; use e.g. [1, 2]")
    wrong = [index for index in indices if not isinstance(index, Integral)]
    if wrong:
        raise UserError(f"{name} has {wrong[0]!r}, which is no whole number; use e.g. [1, 2]")
    return [int(index) for index in indices]


def check_indices(indices: Sequence[int], count: int, name: str = "out_indices") -> Sequence[int]:
    indices = check_whole(indices, name)
    wrong = [index for index in indices if not -count <= index < count]
    if wrong or not indices:
        found = f"{name}={wrong[0]} is out of range" if wrong else f"{name} is empty"
        raise UserError(f"{found}; the model has {count} feature maps, use {-count}..{count - 1}")
    return indices
