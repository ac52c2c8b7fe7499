"""How much memory there is, and how much a model needs."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vision.errors import UserError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CGROUP = Path("/sys/fs/cgroup")


def parse_memory(memory: int | float | str) -> int:
    """Bytes of 8_000_000_000, "8GB", "512 MiB".

    Raises:
        UserError: another spelling, or nothing.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", str(memory))
    try:
        size = int(float(match[1]) * UNITS[match[2].upper()] if match else "")
    except (KeyError, ValueError) as error:
        raise UserError(f"memory={memory!r} is no size; give bytes, or a number with MB, GB, MiB or GiB such as '8GB'") from error
    if size < 1:
        raise UserError(f"memory={memory!r} is nothing; give the most that may be used, such as '8GB'")
    return size


def spell(size: int) -> str:
    """As `parse_memory` reads it, rounded up, so that what is said to be enough is enough."""
    unit = "GB" if size >= 1e9 else "MB"
    tenths = -int(-size // (UNITS[unit] / 10))
    return f"{tenths / 10:g}{unit}"


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; of the processor's, what the machine and the container leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [int(number) for number in re.findall(r"MemAvailable:\s+(\d+)", read("/proc/meminfo"))]
    free = [kilobytes * 1024 for kilobytes in free]
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, usage = read(CGROUP / most).strip(), read(CGROUP / used).strip()
        if limit.isdigit() and usage.isdigit():
            free.append(max(0, int(limit) - int(usage)))
    return min(free, default=4 * 10**9)  # where the system does not tell: what a small machine has


def read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that live at once while it is entered.

    Args:
        known: tensors that are there anyway.

    Attributes:
        most: the most so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


MEASURED: weakref.WeakKeyDictionary[nn.Module, dict[Any, float]] = weakref.WeakKeyDictionary()


def bytes_per_pixel(model: nn.Module, like: Tensor, side: int) -> float:
    """Bytes that the model allocates for each pixel of its input, measured once on a patch.

    Right for models whose memory grows with the pixels, which no model with attention over the whole picture does.

    Args:
        like: a picture `b c h w` in the model's channels and precision.
        side: of the patch.
    """
    known = MEASURED.setdefault(model, {})
    key = like.dtype, like.device.type, like.shape[1], side
    if key not in known:
        patch = like.new_full((1, like.shape[1], side, side), 0.5)
        with Peak([patch, *model.parameters(), *model.buffers()]) as peak:
            model(patch)
        known[key] = peak.most / side**2
    return known[key]
