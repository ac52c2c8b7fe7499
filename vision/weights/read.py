"""A file, a state dict or a live module as plain tensors by name. Nothing in a file ever runs: pickles are read with
torch's restricted reader, npz without objects, and URLs are not followed."""

from __future__ import annotations

import difflib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from vision.errors import UserError
from vision.models.features import Features

Source = str | PathLike[str] | Mapping[str, Any] | nn.Module

# Where training scripts put the weights, and their average beside them.
CONTAINERS = (
    ("current_model_state", "state_dict"),  # ours: Lightning's checkpoint, which holds the average under `state_dict`
    ("state_dict", "state_dict_ema"),
    ("model", "model_ema"),
    ("params", "params_ema"),
    ("model_state_dict", "model_ema_state_dict"),
)
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")
EXTENSIONS = (".safetensors", ".pth", ".pt", ".npz", ".ckpt", ".bin")


@dataclass
class Weights:
    """What was read.

    Attributes:
        name: of the source, for messages.
        state: tensors by name, still under the names of the source.
        card: plain values that rebuild the model, in files of ours (see `vision.tasks`).
        module: the live module, if that was the source.
        told: options that the tensors do not tell, in files that we wrote in another layout (`save_weights`).
        config, processor: what transformers' config.json and preprocessor_config.json beside the file say, if they are there.
        is_average: the source held an average beside the raw weights, and this is it.
    """

    name: str
    state: dict[str, Tensor]
    card: dict[str, Any] | None = None
    module: nn.Module | None = None
    told: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    is_average: bool = False


def read(source: Source, *, ema: bool = True) -> Weights:
    """Reads a source.

    Args:
        source: path (.safetensors .pth .pt .npz .ckpt, or a folder with a model.safetensors), state dict or live module.
        ema: take the averaged weights where there are both.

    Raises:
        UserError: no such file, a URL, a file that is cut short or no file of weights, a pickle that holds more than
            plain values and tensors.
    """
    if isinstance(source, nn.Module):
        module = trunk(source)
        return Weights(type(module).__name__, dict(module.state_dict()), module=module, config=config_of(module))
    if isinstance(source, Mapping):
        return from_mapping("the state dict", source, ema)
    if not isinstance(source, (str, PathLike)):
        raise UserError(f"weights {source!r} are no path, state dict or module; give one of them")
    path = locate(source)
    kind = kind_of(path)
    if kind == "safetensors":
        weights = from_safetensors(path)
    elif kind == "npz":
        weights = Weights(path.name, read_npz(path))
    else:
        weights = from_mapping(path.name, read_pickle(path), ema)
    if Path(source).is_dir():
        weights.name = f"{Path(source).name}/{path.name}"
    weights.config = read_config(path.parent / "config.json", "model_type")
    weights.processor = read_config(path.parent / "preprocessor_config.json", "image_mean")
    return weights


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel or a task of ours."""
    for name, is_wrapper in (
        ("_orig_mod", hasattr(module, "_orig_mod")),
        ("module", isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))),
        ("model", is_task(module)),
    ):
        if is_wrapper:
            return unwrap(getattr(module, name))
    return module


def trunk(module: nn.Module) -> nn.Module:
    """The model whose weights have published layouts: not `Features` around it."""
    module = unwrap(module)
    return trunk(module.model) if isinstance(module, Features) else module


def is_task(module: nn.Module) -> bool:
    return callable(getattr(module, "card", None)) and isinstance(getattr(module, "model", None), nn.Module)


# Files


def locate(source: str | PathLike[str]) -> Path:
    if re.match(r"[a-zA-Z][\w+.-]+:(//|[^\\/])", str(source)):
        raise UserError(f"{source} is an address, and weights are read from files only; download it first, then pass the file")
    path = Path(source)
    if path.is_dir():
        found = next((path / name for name in FOLDER_FILES if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path} is a folder without {' or '.join(FOLDER_FILES)}; pass the file of weights")
        return found
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a device or pipe, and weights are read from files; pass a file of weights")
    if not path.is_file():
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, others, n=1)
        raise UserError(f"{path}: no such file; " + (f"did you mean {path.parent / near[0]}?" if near else "check the path"))
    return path


def kind_of(path: Path) -> str:
    """By the first bytes: names lie.

    Raises:
        UserError: the file is empty, a web page, a Git LFS pointer, or no file of weights at all.
    """
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    text = head.lstrip().lower()
    if not head:
        raise UserError(f"{path} is empty; download or copy it again")
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise UserError(f"{path} is a web page, not weights: the download went wrong; download the file itself")
    if text.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not weights; run git lfs pull in its repository")
    if head.startswith(b"PK"):
        return kind_of_zip(path)
    if is_text(head):
        raise UserError(f"{path} is a text, no file of weights; pass the file that holds the tensors")
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    if head.startswith(b"\x80") or path.suffix in EXTENSIONS:  # a pickle, as torch wrote it before 1.6
        return "pickle"
    raise UserError(f"{path} is no file of weights; use one of {', '.join(EXTENSIONS)}")


def is_text(head: bytes) -> bool:
    return not any(byte < 32 and byte not in b"\t\n\r\f" for byte in head) and head[:1] < b"\x80"


def kind_of_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # whatever a library meets in a damaged file, here and below
        raise UserError(cut_short(path)) from error
    if any(name.endswith("constants.pkl") for name in names):
        raise UserError(
            f"{path} is a TorchScript program, which reading would run; pass torch.jit.load({path.name!r}) if you trust it"
        )
    return "npz" if any(name.endswith(".npy") for name in names) else "pickle"


def cut_short(path: Path) -> str:
    return f"{path} is cut short or damaged ({path.stat().st_size:,} bytes); download or copy it again"


def from_safetensors(path: Path) -> Weights:
    try:
        with safe_open(path, framework="pt") as file:
            state, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        card, told = (json.loads(metadata[key]) if key in metadata else None for key in ("vision", "vision_options"))
    except Exception as error:
        raise UserError(cut_short(path)) from error
    if card is not None and not isinstance(card, dict):
        raise UserError(f"{path} has a description that is no mapping but {type(card).__name__}; use the file it was made from")
    return Weights(path.name, state, card=card, told=checked_options(told))


def checked_options(told: Any) -> dict[str, Any]:
    """Options of the kinds that `save_weights` writes; whatever else a file says is left out."""
    found: dict[str, Any] = {}
    for name, value in told.items() if isinstance(told, dict) else ():
        if (name in ("heads", "img_size") and is_size(value)) or (name == "eps" and isinstance(value, float) and 0 < value < 1):
            found[name] = value
        elif name in ("windows", "extents") and isinstance(value, list) and all(is_size_pair(pair) for pair in value):
            found[name] = tuple(map(tuple, value))
    return found


def is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**20


def is_size_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_size, value))


def read_npz(path: Path) -> dict[str, Tensor]:
    state = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                array = arrays[name]
                if array.dtype == np.dtype("V2"):  # how NumPy stores bfloat16
                    state[name] = torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
                else:
                    state[name] = torch.from_numpy(np.ascontiguousarray(array))
    except Exception as error:
        if "allow_pickle" in str(error) or isinstance(error, TypeError):
            raise UserError(f"{path} holds pickled objects or text beside its arrays; keep the arrays alone") from error
        raise UserError(cut_short(path)) from error
    return state


def read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # of other programs; it is read, or it is not
            if path.suffix == ".safetensors":  # torch would believe the name
                with path.open("rb") as file:
                    return torch.load(file, map_location="cpu", weights_only=True)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is None:
            raise UserError(cut_short(path)) from error
        raise UserError(
            f"{path} pickles {asked[1]} beside its weights, and reading that could run code; if you trust the file, keep the "
            "weights alone, in Python: import torch; from vision.weights.read import read; "
            f"torch.save(read(torch.load({str(path)!r}, weights_only=False)).state, 'weights.pth')"
        ) from error
    except Exception as error:
        raise UserError(cut_short(path)) from error


# Mappings


def from_mapping(name: str, mapping: Any, ema: bool) -> Weights:
    """The tensors of a checkpoint's mapping, out of whatever container they are in."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{name} holds a {type(mapping).__name__}, not tensors by name; save model.state_dict()")
    card = mapping.get("vision") if isinstance(mapping.get("vision"), Mapping) else None
    is_average = False
    for _ in range(4):  # containers within containers; a mapping may hold itself
        beside = next((pair for pair in CONTAINERS if is_container(mapping, pair[0])), None)
        alone = next((pair for pair in CONTAINERS[1:] if is_container(mapping, pair[1])), None)  # Real-ESRGAN's files
        if (pair := beside or alone) is None:
            break
        raw, average = pair
        is_average = is_container(mapping, average) and (ema or beside is None)
        mapping = mapping[average if is_average else raw]
    state = {str(k): torch.as_tensor(v) for k, v in mapping.items() if isinstance(v, (Tensor, np.ndarray))}
    if not state:
        others = f"no tensors, but {', '.join(map(str, list(mapping)[:5]))}" if mapping else "nothing"
        raise UserError(f"{name} holds {others}; pass a file of weights")
    if card is not None:
        state = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    return Weights(name, state, card=card, is_average=is_average)


def is_container(mapping: Mapping[str, Any], key: str) -> bool:
    return isinstance(mapping.get(key), Mapping)


def peeled(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The state dict, then without the prefixes that all its names share, one by one.

    They come from DataParallel (`module.`), torch.compile (`_orig_mod.`) and LightningModules, which name them freely.
    """
    yield state
    first, dot, _ = next(iter(state), "").partition(".")
    if dot and all(name.startswith(first + dot) for name in state):
        yield from peeled({name.removeprefix(first + dot): tensor for name, tensor in state.items()})


# What transformers says beside the weights


def config_of(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def read_config(path: Path, sign: str) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # not transformers' then
    return config if isinstance(config, dict) and sign in config else {}
