"""Picture files for the tests, made where they are needed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.fixture
def chunk() -> Callable[[bytes, bytes], bytes]:
    """One chunk of a PNG file."""
    return _chunk


@pytest.fixture
def png_bytes() -> Callable[..., bytes]:
    """A PNG of 8 or 16 bits by hand (Pillow cannot write 16-bit colour); ``size`` (width, height) lies in the header."""

    def make(image: np.ndarray, *, size: tuple[int, int] | None = None, extra: bytes = b"") -> bytes:
        height, width, channels = image.shape
        depth, kind = image.dtype.itemsize * 8, {1: 0, 2: 4, 3: 2, 4: 6}[channels]
        header = struct.pack(">IIBBBBB", *(size or (width, height)), depth, kind, 0, 0, 0)
        step, above, rows = channels * depth // 8, np.zeros(width * channels * depth // 8, np.uint8), b""
        for y, line in enumerate(image):
            row = np.frombuffer(line.astype(image.dtype.newbyteorder(">")).tobytes(), np.uint8)
            left = np.concatenate([np.zeros(step, np.uint8), row[:-step]])
            rows += bytes([y % 3]) + (row, row - left, row - above)[y % 3].tobytes()  # filters none, sub and up
            above = row
        body = _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + body

    return make


@pytest.fixture
def picture() -> Callable[..., np.ndarray]:
    """A random picture, h w c."""

    def make(height: int, width: int, channels: int = 3, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, (height, width, channels)).astype(dtype)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Class folders of small PNGs: ``folder({"train/cat": 3, "train/dog": 2})``; each picture has a colour of its own."""

    def make(counts: dict[str, int], *, size: int = 12, name: str = "pictures") -> Path:
        root, number = tmp_path / name, 0
        for place, count in counts.items():
            (root / place).mkdir(parents=True)
            for i in range(count):
                number += 1
                Image.new("RGB", (size, size + i % 3), (number % 256, number // 256, 7)).save(root / place / f"{i:03d}.png")
        return root

    return make
