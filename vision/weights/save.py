"""A model's weights as safetensors: ours, which rebuild the model, or under the names of other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vision.errors import UserError
from vision.rebuild import describe
from vision.weights.load import FAMILIES, first_names
from vision.weights.read import is_task, unwrap


def save_weights(
    model: nn.Module, path: str | PathLike[str], *, layout: str = "vision", card: Mapping[str, Any] | None = None
) -> None:
    """Writes the weights as a .safetensors file, whole or not at all.

    Args:
        model: a model, or a task (its model is saved).
        path: an existing file is replaced.
        layout: "vision": ours, from which `vision.load_model` rebuilds the model with its `.classes` and
            `.preprocessing`; "timm", "torchvision", "huggingface" or "official": tensors under their names, and in the
            file's metadata, which others pass over, what those do not tell (heads, windows, picture size, eps).
        card: what the file shall say of the model instead (`Classification.card()`).

    Raises:
        UserError: no such layout, a layout that has no place for a part of the model, a path that cannot be written.
    """
    path = check_path(Path(path))
    if card is None and is_task(model):
        task: Any = model
        card = task.card()
    model = unwrap(model)
    if layout == "vision":
        tensors = model.state_dict(keep_vars=True)
        first = first_names(tensors)
        state = {name: tensor.detach() for name, tensor in tensors.items() if first[name] == name}  # tied tensors once
        metadata = {"format": "pt", "vision": json.dumps(dict(card or card_for(model)))}
    else:
        state, told = foreign(model, layout)
        metadata = {"format": "pt", "vision_options": json.dumps(told)}
    write(path, apart(state), metadata)


def card_for(model: nn.Module) -> dict[str, Any]:
    """What `vision.load_model` needs, from the model itself."""
    card = {"format": 1, "model": describe(model)}
    if is_restorer(model):
        told = {"channels": getattr(model, "in_chans", None), "scale": int(getattr(model, "scale", 1))}
        told |= {"degradation": str(getattr(model, "degradation", "")), "tile": getattr(model, "tile", None)}
        return {**card, "task": "restoration", **told}
    if getattr(model, "vocabularies", None):
        vocabularies: Any = model.vocabularies
        plain = {side: vocabulary.plain() for side, vocabulary in vocabularies.items()}
        return {**card, "task": "sequence", "vocabularies": plain, "limits": dict(getattr(model, "limits", {}))}
    used = {"classes": list(getattr(model, "classes", [])), "preprocessing": dict(getattr(model, "preprocessing", {}))}
    return {**card, "task": "classification", **used}


def is_restorer(model: nn.Module) -> bool:
    """Whether it makes pictures of pictures: such models tell by what factor, and in what multiples of pixels they work."""
    return hasattr(model, "scale") and hasattr(model, "multiple")


def foreign(model: nn.Module, layout: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in another layout, and the options that they do not tell."""
    name = next((name for name, family in FAMILIES.items() if isinstance(model, family.MODEL)), type(model).__name__)
    check_layout(name, layout)
    return FAMILIES[name].to_layout(model, layout), FAMILIES[name].untold(model)


def check_layout(family: str, layout: str) -> None:
    """Raises: UserError: models of the family are not written in this layout."""
    known = ("vision", *(FAMILIES[family].LAYOUTS if family in FAMILIES else ()))
    if layout not in known:
        raise UserError(f"layout={layout!r} is not defined for {family}; use {' or '.join(map(repr, known))}")


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, in storages of their own: safetensors refuses views of one storage."""
    seen: set[int] = set()
    result = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        seen.add(storage)
    return result


def check_path(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: weights are saved as safetensors; name it {path.with_suffix('.safetensors')}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, such as {path / 'model.safetensors'}")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; create it first")
    return path


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes beside the file, then replaces it: a reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=metadata)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} could not be written ({error}); free some space or choose another place") from error
    finally:
        part.unlink(missing_ok=True)
