"""A model as plain values, `{"class_path": ..., "init_args": {...}}`, and back: what a checkpoint holds instead of a pickle.

`describe` writes what `build` reads; both speak the words of a LightningCLI config, so that a model from YAML, from
Python and from a file is the same thing. A file must not choose what code runs: it may name modules of core, vision,
torch.nn, timm and torchvision, and those libraries' model builders, but nothing that fetches or opens other files.
Whatever else is built only when the caller allows it by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from vision.errors import UserError

TRUSTED = ("core", "vision", "torch.nn", "timm.models", "timm.layers", "torchvision.models", "torchvision.ops")
# Builder arguments that make a library download or open something, wherever the weights of the file itself come from.
REACHING = (
    "pretrained",
    "weights",
    "weights_backbone",
    "checkpoint_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "cache_dir",
)


def describe(model: nn.Module) -> dict[str, Any]:
    """The model as plain values.

    Raises:
        UserError: it was built in a way that cannot be told from the model alone.
    """
    options = getattr(model, "options", None)
    if isinstance(options, dict):
        return {"class_path": path_of(type(model)), "init_args": {k: plain(k, v) for k, v in options.items()}}
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture:  # a timm model knows its name, and not in every version what else it was built with: compare
        init_args = {"model_name": architecture, **{k: plain(k, v) for k, v in timm_options(model).items()}}
        spec = {"class_path": "timm.create_model", "init_args": init_args}
        if shapes(build(spec)) == shapes(model):
            return spec
    raise UserError(
        f"{type(model).__qualname__} does not tell how it was built; "
        "pass model={'class_path': ..., 'init_args': {...}} instead of a built model"
    )


def plain(name: str, value: Any) -> Any:
    """A constructor argument as plain values; classes, partials and described modules become class paths."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # as the base types: a member of an enum or a NumPy number would not load again
        return str.__str__(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, (list, tuple, range)):
        return [plain(name, v) for v in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: plain(name, v) for k, v in value.items()}
    if isinstance(value, functools.partial) and (target := partial_target(value)):
        return {"class_path": path_of(target), "init_args": {k: plain(k, v) for k, v in value.keywords.items()}}
    if isinstance(value, nn.Module):
        return describe(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return {"class_path": path_of(value)}
    raise UserError(f"option {name}={value!r} is no plain value, class or function; a checkpoint could not hold it")


def partial_target(value: functools.partial) -> Callable[..., Any] | None:
    """What the partial calls, None where positional arguments would be lost."""
    if value.func.__module__.startswith("jsonargparse"):  # its partials call a helper of its own with the target last
        return value.args[-1]
    return None if value.args else value.func


def build(spec: Mapping[str, Any], *, allow: Collection[str] = ()) -> Any:
    """Builds what `describe` has described.

    Args:
        spec: `{"class_path": "package.module.Class", "init_args": {...}}`.
        allow: further class paths or packages that may be built.

    Raises:
        UserError: a class that is not allowed, does not exist, is no module, or refuses its arguments.
    """
    target, arguments = prepare(spec, allow)
    try:
        return target(**arguments)
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError, MemoryError) as error:
        raise UserError(f"{spec['class_path']} does not take the stored options: {str(error) or type(error).__name__}") from error


def prepare(spec: Mapping[str, Any], allow: Collection[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The target of a spec and its arguments, nested specs built."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("class_path"), str):
        raise UserError(f"a model is described as {{'class_path': ..., 'init_args': {{...}}}}, not {str(spec)[:80]!r}")
    path, values = spec["class_path"], spec.get("init_args") or {}
    if not isinstance(values, Mapping):
        raise UserError(f"init_args of {path} are {type(values).__name__}; they are a dict of options by name")
    target = resolve(path, allow)
    if target.__module__.partition(".")[0] in ("timm", "torchvision"):
        check_arguments(path, target, values)
    elif values.get("pretrained"):  # of a part of ours, such as CNNStem: the file itself brings the weights
        values = {**values, "pretrained": False}
    expected = hints(target)
    return target, {name: argument(value, expected.get(name), allow) for name, value in values.items()}


def argument(value: Any, annotation: Any, allow: Collection[str]) -> Any:
    """A stored value as the argument it was; the annotation tells instances from factories and tuples from lists."""
    if isinstance(value, Mapping) and "class_path" in value:
        if not wants_factory(annotation):
            return build(value, allow=allow)
        target, keywords = prepare(value, allow)
        return functools.partial(target, **keywords) if keywords else target
    containers = [arm for arm in arms(annotation) if typing.get_origin(arm) not in (None, Callable)]
    inner = typing.get_args(containers[0]) if containers else ()
    if isinstance(value, Mapping):
        return {k: argument(v, inner[-1] if inner else None, allow) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        each = inner if len(inner) == len(value) and Ellipsis not in inner else inner[:1] * len(value) or (None,) * len(value)
        items = [argument(v, a, allow) for v, a in zip(value, each, strict=True)]
        return tuple(items) if any((typing.get_origin(arm) or arm) is tuple for arm in arms(annotation)) else items
    return value


def arms(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def wants_factory(annotation: Any) -> bool:
    return any(typing.get_origin(arm) in (Callable, type) or arm in (Callable, typing.Callable, type) for arm in arms(annotation))


def resolve(path: str, allow: Collection[str] = ()) -> Callable[..., Any]:
    """The class or function at a dotted path, if a file may name it.

    Not only the path must be trusted, also the module that defines what it leads to; private modules of the libraries
    (hub access, graph tracing, which compiles code from names) are left out.
    """
    allowed = within(path, allow)
    if not allowed and path != "timm.create_model" and not within(path, TRUSTED):
        raise UserError(
            f"the file asks for {path!r}, which is not part of {', '.join(TRUSTED)}; allow it by name if you trust it"
        )
    module, _, name = path.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{path!r} does not exist here ({error}); install the version that wrote the file") from error
    is_module = inspect.isclass(target) and issubclass(target, nn.Module)
    if not (is_module or (inspect.isfunction(target) and (allowed or makes_module(target)))):
        raise UserError(
            f"{path!r} is neither a torch.nn.Module nor a function that makes one; such things are not built from a file"
        )
    home = target.__module__
    is_public = not is_module or not any(part.startswith("_") for part in home.split("."))
    if not allowed and not (within(home, TRUSTED) and is_public):
        raise UserError(f"{path!r} leads to {home}, which a file may not use; allow it by name if you trust it")
    return target


def within(path: str, roots: Collection[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def makes_module(function: Callable[..., Any]) -> bool:
    """Our functions that say so, and the model builders that timm and torchvision list."""
    home = function.__module__
    if within(home, ("timm",)):
        return is_timm_builder(function)
    if within(home, ("torchvision",)):
        from torchvision.models import get_model, list_models

        return function is get_model or function.__name__ in list_models()
    made = hints(function).get("return")
    return within(home, ("core", "vision.models")) and inspect.isclass(made) and issubclass(made, nn.Module)


def is_timm_builder(target: Callable[..., Any]) -> bool:
    import timm

    if target is timm.create_model:
        return True
    return timm.is_model(target.__name__) and timm.model_entrypoint(target.__name__) is target


def check_arguments(path: str, target: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuses what would let a file fetch or open another one.

    Raises:
        UserError: such an argument, or a model name that is a place (`hf-hub:`, `local-dir:`, a path).
    """
    import timm

    reaching = [name for name in REACHING if values.get(name)]
    if reaching:
        raise UserError(f"{path} with {reaching[0]}={values[reaching[0]]!r} would load other files; a file may not ask for that")
    name = values.get("model_name")
    if target is timm.create_model and not (isinstance(name, str) and timm.is_model(name.partition(".")[0])):
        raise UserError(f"timm has no model {name!r}; a file may only name models of timm.list_models()")


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The type of each argument. What cannot be evaluated (names imported for type checking only) is left out."""
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    found: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        probe = type("probe", (), {"__annotations__": {name: annotation}})
        try:
            found |= typing.get_type_hints(probe, globalns=getattr(function, "__globals__", None))
        except (NameError, TypeError, AttributeError, SyntaxError):
            continue
    made = found.get("return")  # a named size passes its options on to the class it makes
    return hints(made) | found if inspect.isclass(made) and not inspect.isclass(target) else found


def timm_options(model: nn.Module) -> dict[str, Any]:
    import timm

    recorded = getattr(timm.models, "get_model_args", None)
    return recorded(model) if recorded else {"num_classes": model.num_classes, "in_chans": input_channels(model)}


def path_of(target: Callable[..., Any]) -> str:
    if "<" in target.__qualname__ or "." in target.__qualname__:
        raise UserError(
            f"{target.__qualname__} stands inside a function or class, where no file can find it; move it to a module's top level"
        )
    return f"{target.__module__}.{target.__qualname__}"


def input_channels(model: nn.Module) -> int:
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
