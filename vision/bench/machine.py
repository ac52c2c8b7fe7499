"""What a measurement ran on: the processor, the versions, the date."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vision.callbacks.machine import cores, processor

PACKAGES = ("vision-core", "torch", "torchvision", "timm", "transformers", "x-transformers", "spandrel_extra_arches")


def describe(threads: int, device: str, keeps_memory: bool) -> dict[str, Any]:
    found = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # that torch's own kernels use, such as AVX2
        "processors": cores(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "device": device,
        "keeps_freed_memory": keeps_memory,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: tell(name) for name in PACKAGES},
    }
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(device)
    return found


def tell(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
