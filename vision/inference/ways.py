"""The ways through a model: whole, streamed or tiled, whichever memory allows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vision.errors import UserError
from vision.inference.memory import bytes_per_pixel, free_memory, parse_memory, spell
from vision.inference.progress import Progress
from vision.inference.tiles import by_tiles, starts

SMALL = 96  # side of the patch that memory is measured on; what is no larger goes through at once
LEAST_TILE, LARGEST_TILE, OVERLAP = 64, 512, 32
ROWS = (64, 32, 16, 8, 4, 2, 1)  # of a band: the fewer, the less memory, and the more is done twice
SHARE = 0.8  # of the free memory


class Way:
    """Runs a model on pictures `b c h w` in its channels and precision, both sides a multiple of `multiple`.

    Args:
        model, mode, memory, tile, overlap: as `vision.restore`. A `tile` of the model's own is what it restores best in, and
            "auto" then means tiles of this side, as it means tiles with a `tile` or an `overlap` given.

    Raises:
        UserError: the mode is not the model's, or memory, tile or overlap not enough.
    """

    def __init__(
        self, model: nn.Module, mode: str, memory: int | str | None = None, tile: int | None = None, overlap: int | None = None
    ) -> None:
        self.model: Any = model  # with attributes of its own
        own: Any = getattr(model, "tile", None)
        if mode in ("whole", "stream") and (tile is not None or overlap is not None):
            name, value = ("tile", tile) if tile is not None else ("overlap", overlap)
            raise UserError(f"{name}={value} is of tiles, and mode={mode!r} makes none; use mode='tile', or leave {name} out")
        tile = own if tile is None and own and mode in ("auto", "tile") else tile
        if tile is not None or overlap is not None:
            mode = "tile"
        self.mode, self.tile, self.overlap = mode, tile, overlap
        self.memory = None if memory is None else parse_memory(memory)
        self.multiple, self.scale = getattr(model, "multiple", 1), getattr(model, "scale", 1)
        self.can_stream = hasattr(model, "stream")
        self.progress = Progress(None, model)
        if mode == "stream" and not self.can_stream:
            raise UserError(
                f"{type(model).__name__} cannot stream: it has no stream(x, rows) that gives the whole picture's result band by "
                "band, as Restormer has; use mode='tile'"
            )
        if tile is not None and (tile < 1 or tile % self.multiple):
            near = max(1, round(tile / self.multiple)) * self.multiple
            raise UserError(
                f"tile={tile} is not a multiple of {self.multiple}, which {type(model).__name__} works in; use {near}"
            )
        if tile is not None and tile - self.overlap_of(tile) < self.multiple:
            raise UserError(
                f"overlap={self.overlap_of(tile)} leaves nothing of tile={tile} to go on by, in steps of {self.multiple}; "
                f"use {at_most(max(0, tile - self.multiple))}, or a larger tile"
            )

    def __call__(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        if self.is_whole(x):
            return self.through(x)
        if len(x) > 1:
            return torch.cat([self.one_of(x, index) for index in range(len(x))])
        if self.mode == "whole":
            raise UserError(
                f"{self.limit_name(x)} is too little for {size(x)} at once; use memory='{spell(self.need(x))}' or more, "
                "or mode='auto'"
            )
        if self.mode == "stream" or (self.mode == "auto" and self.can_stream):
            return self.stream(x)
        return self.tiles(x)

    def one_of(self, x: Tensor, index: int) -> Tensor:
        with self.progress.part(index, len(x)):
            return self(x[index : index + 1])

    def is_whole(self, x: Tensor) -> bool:
        if self.mode not in ("auto", "whole"):
            return False
        if self.memory is None and (self.mode == "whole" or x[:, 0].numel() <= SMALL**2):
            return True
        return self.need(x) <= self.limit(x)

    def stream(self, x: Float[Tensor, "1 c h w"]) -> Float[Tensor, "1 c2 h w"]:
        limit = self.limit(x)
        rows = next((rows for rows in ROWS if self.model.stream_memory(x.shape, rows) <= limit), None)
        if rows is None:
            least = spell(self.model.stream_memory(x.shape, 1))
            raise UserError(
                f"{self.limit_name(x)} is too little to stream {size(x)}; use memory='{least}' or more, "
                "or mode='tile', where a tile knows nothing of the others"
            )
        with self.progress.running():
            return self.check(x, self.model.stream(x, rows))

    def tiles(self, x: Float[Tensor, "1 c h w"]) -> Float[Tensor, "1 c2 h2 w2"]:
        limit = self.limit(x)
        side = self.largest_tile(x, limit) if self.tile is None else self.tile
        need = self.need_of_tiles(x, side)
        if self.memory is not None and need > limit:
            raise UserError(
                f"{self.limit_name(x)} is too little for {size(x)} in tiles of {side}; use memory='{spell(need)}' or more"
            )
        overlap = self.overlap_of(side)
        count = math.prod(len(starts(length, side, overlap, self.multiple)) for length in x.shape[-2:])
        done = itertools.count()

        def run(part: Tensor) -> Tensor:
            with self.progress.part(next(done), count):
                return self.through(part)

        return by_tiles(run, x, tile=side, overlap=overlap, multiple=self.multiple, scale=self.scale)

    def largest_tile(self, x: Tensor, limit: int) -> int:
        """That memory allows; the least one if none is."""
        step = self.multiple
        least = math.ceil(LEAST_TILE / step) * step
        while least - self.overlap_of(least) < step:
            least += step
        sides = range(least, max(least, LARGEST_TILE) + 1, step)
        return max((side for side in sides if self.need_of_tiles(x, side) <= limit), default=least)

    def overlap_of(self, tile: int) -> int:
        return min(OVERLAP, tile // 4) if self.overlap is None else self.overlap

    def through(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        with self.progress.running():
            return self.check(x, self.model(x))

    def check(self, x: Tensor, y: Tensor) -> Tensor:
        expected = tuple(side * self.scale for side in x.shape[-2:])
        if y.ndim != 4 or tuple(y.shape[-2:]) != expected:
            raise UserError(
                f"{type(self.model).__name__} made {tuple(y.shape)} of {tuple(x.shape)}; a restorer keeps the size, "
                f"times its attribute scale ({self.scale})"
            )
        return y

    # Bytes

    def limit(self, x: Tensor) -> int:
        return int(SHARE * free_memory(x.device)) if self.memory is None else self.memory

    def limit_name(self, x: Tensor) -> str:
        return f"{spell(self.limit(x))} of free memory" if self.memory is None else f"memory={spell(self.memory)}"

    def need(self, x: Tensor) -> int:
        return int(self.per_pixel(x) * x[:, 0].numel())

    def need_of_tiles(self, x: Tensor, side: int) -> int:
        """A tile, and twice the result: it, and a strip of it."""
        h, w = x.shape[-2:]
        return int(self.per_pixel(x) * min(side, h) * min(side, w) + 2 * x.nbytes * self.scale**2)

    def per_pixel(self, x: Tensor) -> float:
        return bytes_per_pixel(self.model, x, math.ceil(SMALL / self.multiple) * self.multiple)


def at_most(overlap: int) -> str:
    return f"overlap={overlap}" + " or less" * (overlap > 0)


def size(x: Tensor) -> str:
    return f"{x.shape[-1]}x{x.shape[-2]} pixels"
