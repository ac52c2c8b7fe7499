"""timm's models by name and their published weights: what is wrong is told in one line, and a missing network at once."""

from __future__ import annotations

import difflib
import inspect
import re
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from vision.errors import UserError

INSTEAD = "download the file elsewhere and give it as checkpoint_path, without pretrained"


def published(name: str, instead: str, **options: Any) -> nn.Module:
    """timm's model of this name with its published weights.

    Args:
        instead: what else the user can do.
        options: of the model.

    Raises:
        UserError: the weights cannot be downloaded.
    """
    import timm  # takes seconds

    check_network(name, instead)
    try:
        return timm.create_model(name, pretrained=True, **options)
    except Exception as error:  # whatever the hub's client raises
        raise UserError(no_download(name, instead, error)) from error


def no_download(name: str, instead: str, error: Exception) -> str:
    return f"timm's weights of {name} could not be downloaded ({type(error).__name__}); check the network, or {instead}"


def check_network(name: str, instead: str) -> None:
    """Raises: UserError: the hub's host is unknown here; its client would find that out after a minute of retries."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or getproxies() or host is None:
        return  # from the cache, or by a proxy that knows more hosts than we do
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise UserError(
            f"timm's weights of {name} need a network, and {host} is not found; {instead}, or set HF_HUB_OFFLINE=1 if they are "
            "in the hub's cache"
        ) from error


def check_name(name: str) -> None:
    """Raises: UserError: timm has no such model, with the nearest one."""
    import timm

    if not timm.is_model(name.partition(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        raise UserError(f"timm has no model {name!r}; " + (f"did you mean {near[0]}?" if near else "see timm.list_models()"))


# timm.create_model in a config


def timm_models(config: Any) -> Iterator[dict[str, Any]]:
    """The arguments of every `timm.create_model` in a config of plain values."""
    if isinstance(config, Mapping):
        if config.get("class_path") in ("timm.create_model", "timm.models.create_model"):
            yield {**(config.get("init_args") or {}), **(config.get("dict_kwargs") or {})}
        config = list(config.values())
    for value in config if isinstance(config, list) else ():
        yield from timm_models(value)


def check_timm(options: Mapping[str, Any]) -> None:
    """Raises: UserError: `timm.create_model` with these arguments would fail, or retry for a minute."""
    name = options["model_name"]
    if ":" in name:  # a place: the hub's or a folder
        return
    check_name(name)
    if options.get("pretrained") and not (options.get("pretrained_cfg") or options.get("pretrained_cfg_overlay")):
        check_network(name, INSTEAD)


def by_timm(error: BaseException) -> bool:
    """Whether the error was raised within timm or what it called."""
    return "timm" in packages(error)


def packages(error: BaseException) -> set[str]:
    """The packages whose code was running."""
    return {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)}


def refusal(options: Mapping[str, Any], error: Exception) -> str:
    """One line for what `timm.create_model` said of its arguments."""
    name = options["model_name"]
    if "huggingface_hub" in packages(error):
        return no_download(name, INSTEAD, error)
    if unknown := re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error)):
        return f"timm's {name} has no option {unknown[2]}" + nearest_option(name, unknown[1], unknown[2])
    given = ", ".join(f"{key}={value!r}" for key, value in options.items() if key != "model_name" and value)
    return f"timm's {name} does not take {given or 'its defaults'}: {' '.join(str(error).split()) or type(error).__name__}"


def nearest_option(name: str, kind: str, option: str) -> str:
    """Advice for an option that the class `kind`, which timm's model `name` is, does not have."""
    import timm

    made = getattr(sys.modules[timm.model_entrypoint(name.partition(".")[0]).__module__], kind, None)
    near = difflib.get_close_matches(option, inspect.signature(made).parameters, n=1) if made else []
    return f"; did you mean {near[0]}?" if near else f"; see timm's {kind}"
