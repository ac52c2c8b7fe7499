"""Where a command computes."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from vision.commands.allocator import keep_freed_memory
from vision.errors import UserError

Model = TypeVar("Model", bound=nn.Module)


def to_device(model: Model, device: str | None) -> Model:
    """The model on the device of this name, such as "cpu" or "cuda:1"; None is an accelerator if there is one. The process
    keeps the memory that its pictures or lines free for the next ones.

    Raises:
        UserError: there is no such device.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator.type if accelerator else "cpu"
    keep_freed_memory()
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        told = str(error).splitlines()[0].split(". ")[0].rstrip(".")  # torch goes on with advice about drivers
        if told.startswith("Expected one of"):  # twenty names
            raise UserError(f"--device {device}: no such kind; use cpu, cuda, mps or xpu") from error
        raise UserError(f"--device {device}: {told}; use --device cpu") from error
