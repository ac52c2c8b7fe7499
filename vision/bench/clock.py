"""Times of several sides, taken in turn, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

FEWEST = 5  # rounds: of three the median has lain a tenth off


def interleave(
    runs: dict[str, Callable[[], Any]],
    repeats: int,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    finish: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each run in each round: A B C, B C A, ..., after one round that does not count.

    Each begins as often as any other: who comes after whom finds memory and caches otherwise.

    Args:
        repeats: most rounds.
        seconds: no further round once so many have passed, but at least 5 (or `repeats`, if that is less).
        clock: tells the time in seconds.
        finish: waits for the device.
    """
    for run in runs.values():
        run()
    finish()
    found: dict[str, list[float]] = {name: [] for name in runs}
    began = clock()
    for done in range(repeats):
        if done >= FEWEST and clock() - began >= seconds:
            break
        names = [*runs][done % len(runs) :] + [*runs][: done % len(runs)]
        for name in names:
            start = clock()
            runs[name]()
            finish()
            found[name].append(clock() - start)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of every side but the first: its time over the first one's in the same round."""
    ours, *peers = seconds
    return {peer: spread([theirs / mine for theirs, mine in zip(seconds[peer], seconds[ours], strict=True)]) for peer in peers}


def finisher(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def product_rate(precision: str, device: str, size: int = 1024, repeats: int = 5) -> float:
    """FLOP a second of a product of two square matrices, the best of a few."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = interleave({"product": lambda: a @ b}, repeats, seconds=60.0, finish=finisher(device))
    return 2 * size**3 / min(times["product"])
