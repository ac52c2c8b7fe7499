"""Freed memory is used again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PAGES = """
import resource, torch
from vision.commands.allocator import keep_freed_memory
kept = {keep} and keep_freed_memory()
torch.set_num_threads(1)
[torch.ones(2**20) for _ in range(40)]  # the heap grows to 160 MiB, all free again
for _ in range(3):
    [torch.ones(2**24) for _ in range(2)]  # 64 MiB each, which glibc would take from the system and give back
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    [torch.ones(2**24) for _ in range(2)]
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(keep: bool, **variables: str) -> tuple[str, int]:
    """Whether it could be set, and how many pages the system gave while tensors were made and freed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PAGES.format(keep=keep)]
    kept, count = subprocess.run(command, env=own | variables, capture_output=True, text=True, check=True).stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are of glibc; another C library has none to test")
def test_freed_memory_is_used_again() -> None:
    given_back = pages(keep=False)[1]
    kept, used_again = pages(keep=True)
    assert kept == "True"
    assert used_again < 2000  # of 655,360 pages
    assert used_again <= given_back


def test_the_users_own_settings_stay() -> None:
    assert pages(keep=True, MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
