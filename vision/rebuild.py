"""A model as plain values, `{"class_path": ..., "init_args": {...}}`, and back: what a checkpoint holds instead of a pickle.

`describe` writes what `build` reads; both speak the words of a LightningCLI config, so that a model from YAML, from
Python and from a file is the same thing. Classes outside core, vision, torch, timm and torchvision are built only when
the caller allows them by name: a file must not choose what code runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from core.position import Position
from vision.errors import UserError

TRUSTED = ("core", "vision", "torch.nn", "timm.models", "timm.layers", "torchvision.models", "torchvision.ops")
FUNCTIONS = {"timm.create_model", "timm.models.create_model", "torchvision.models.get_model"}
PLAIN = (str, int, float, bool, type(None))


def describe(model: nn.Module) -> dict[str, Any]:
    """The model as plain values.

    Raises:
        UserError: it was built in a way that cannot be told from the model alone.
    """
    if hasattr(model, "options"):
        return {"class_path": path_of(type(model)), "init_args": {k: plain(k, v) for k, v in model.options.items()}}
    architecture = getattr(model, "pretrained_cfg", {}).get("architecture")
    if architecture:  # a timm model knows its name, but not the other options it was built with: see whether it has any
        init_args = {"model_name": architecture, "num_classes": model.num_classes, "in_chans": input_channels(model)}
        spec = {"class_path": "timm.create_model", "init_args": init_args}
        if shapes(build(spec)) == shapes(model):
            return spec
    raise UserError(
        f"{path_of(type(model))} does not tell how it was built; pass model={{'class_path': ..., 'init_args': {{...}}}} instead"
    )


def plain(name: str, value: Any) -> Any:
    """A constructor argument as plain values; classes, partials and described modules become class paths."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(name, v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(name, v) for k, v in value.items()}
    if isinstance(value, functools.partial):
        # jsonargparse's partials carry the class among their arguments
        target = value.func if inspect.isclass(value.func) else next((a for a in value.args if inspect.isclass(a)), value.func)
        return {"class_path": path_of(target), "init_args": {k: plain(k, v) for k, v in value.keywords.items()}}
    if isinstance(value, nn.Module):
        return describe(value)
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return {"class_path": path_of(value)}
    raise UserError(f"option {name}={value!r} is no plain value, class or function; a checkpoint could not hold it")


def build(spec: Mapping[str, Any], *, allow: Collection[str] = ()) -> Any:
    """Builds what `describe` has described.

    Args:
        spec: `{"class_path": "package.module.Class", "init_args": {...}}`.
        allow: further class paths or packages that may be built.

    Raises:
        UserError: a class that is not allowed, does not exist, is no module, or refuses its arguments.
    """
    target, arguments = resolve(spec["class_path"], allow), spec.get("init_args") or {}
    types = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    try:
        return target(**{name: argument(value, types.get(name), allow) for name, value in arguments.items()})
    except TypeError as error:
        raise UserError(f"{spec['class_path']} does not take the stored options: {error}") from error


def argument(value: Any, annotation: Any, allow: Collection[str]) -> Any:
    if isinstance(value, (list, tuple)):
        return [argument(v, (typing.get_args(annotation) or (None,))[0], allow) for v in value]
    if not (isinstance(value, Mapping) and "class_path" in value):
        return value
    if typing.get_origin(annotation) is not Callable:
        return build(value, allow=allow)
    target, keywords = resolve(value["class_path"], allow), value.get("init_args") or {}
    types = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    keywords = {k: argument(v, types.get(k), allow) for k, v in keywords.items()}
    return functools.partial(target, **keywords) if keywords else target


def resolve(path: str, allow: Collection[str] = ()) -> Callable[..., Any]:
    """The class or function at a dotted path, if a file may name it."""
    allowed = any(path == root or path.startswith(f"{root}.") for root in (*TRUSTED, *FUNCTIONS, *allow))
    if not allowed:
        raise UserError(
            f"the file asks for {path!r}, which is not part of {', '.join(TRUSTED)}; allow it by name if you trust it"
        )
    module, _, name = path.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{path!r} does not exist here ({error}); install the version that wrote the file") from error
    is_module = inspect.isclass(target) and issubclass(target, nn.Module)
    makes_module = inspect.isfunction(target) and (path in FUNCTIONS or returns_module(target) or path in allow)
    if not (is_module or makes_module):
        raise UserError(
            f"{path!r} is neither a torch.nn.Module nor a function that makes one; such things are not built from a file"
        )
    return target


def returns_module(function: Callable[..., Any]) -> bool:
    try:
        made = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(made) and issubclass(made, (nn.Module, Position))


def path_of(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def input_channels(model: nn.Module) -> int:
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
