"""What a run ran on, for its report: hardware, versions, commit. Nothing here fails: what cannot be found out is left out."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from lightning import Trainer

PACKAGES = ("vision-core", "torch", "lightning", "torchvision", "timm")


def hardware(trainer: Trainer) -> str:
    """`2 x NVIDIA H200 (139.7 GiB); AMD EPYC 9654, 16 cores, 128.0 GiB`."""
    device = trainer.strategy.root_device
    parts = []
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        parts.append(f"{trainer.world_size} x {properties.name} ({properties.total_memory / 2**30:.1f} GiB)")
    elif device.type != "cpu":
        parts.append(f"{trainer.world_size} x {device.type}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    machine = [processor(), f"{cores()} cores", f"{memory / 2**30:.1f} GiB" if memory else ""]
    return "; ".join([*parts, ", ".join(part for part in machine if part)])


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, platform.platform(terse=True)])


def commit() -> str:
    """Commit of the working directory, with `+` when files differ from it; empty outside a repository."""
    try:
        short = git("rev-parse", "--short=12", "HEAD")
        return short + (" + changes" if short and git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
