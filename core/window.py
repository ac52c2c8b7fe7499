"""Windows of channels-last maps (Swin: Liu et al. 2021, section 3.2): split, attend within each, merge.

`split` and `merge` are free functions; `lay_out` makes the `Windows` that both need. A map that is not a multiple of the
window is padded with zeros at its right and bottom. Windows that are shifted are cut from the map rolled up and left,
and `regions` tells which of their tokens were neighbours before. Two orders of padding and rolling are published; off
multiples of the window they give different numbers:

- "pad_then_roll": the padded map is rolled (torchvision, Microsoft's detection code). There is no shift along an axis
  that one window covers.
- "roll_then_pad": the rolled map is padded (timm). The shift stays what the caller says.

Neither hides the padding from the attention: as in the published models, it takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from core.coordinates import grid
from core.mask import same_region
from core.plain import is_plain

Padding = Literal["pad_then_roll", "roll_then_pad"]


class Windows(NamedTuple):
    """How a map is cut into windows. Sizes are (rows, columns), in tokens.

    Attributes:
        size: of the map.
        window: of each window.
        shift: by which the map is rolled up and left.
        padding: order of padding and rolling.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    padding: Padding

    @property
    def counts(self) -> tuple[int, int]:
        """Windows along each axis."""
        return -(-self.size[0] // self.window[0]), -(-self.size[1] // self.window[1])

    @property
    def padded(self) -> tuple[int, int]:
        return self.counts[0] * self.window[0], self.counts[1] * self.window[1]


def lay_out(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int] = (0, 0), padding: Padding = "pad_then_roll"
) -> Windows:
    """The windows of a map of `size`.

    Raises:
        ValueError: a window without tokens, a shift of a window or more, an unknown order.
    """
    if padding not in ("pad_then_roll", "roll_then_pad"):
        raise ValueError(f"padding={padding!r} is unknown; use 'pad_then_roll' or 'roll_then_pad'")
    if min(window) < 1:
        raise ValueError(f"window={tuple(window)} holds no tokens; use positive sizes such as (7, 7)")
    if not (0 <= shift[0] < window[0] and 0 <= shift[1] < window[1]):
        raise ValueError(f"shift={tuple(shift)} is not less than window={tuple(window)}; use (0, 0) or half a window")
    windows = Windows(size, window, shift, padding)
    if padding == "roll_then_pad":
        return windows
    # Times 0 where there is one window: a condition would make torch.compile start anew for such maps.
    rows, columns = (by * torch.sym_min(count - 1, 1) for by, count in zip(shift, windows.counts, strict=True))
    return windows._replace(shift=(rows, columns))  # type: ignore[arg-type]  # symbolic sizes while compiling


def split(x: Float[Tensor, "b h w c"], windows: Windows) -> Float[Tensor, "b_windows n c"]:
    """The tokens of each window, by rows; the windows of a picture follow each other, by rows too."""
    back = (-windows.shift[0], -windows.shift[1])
    if windows.padding == "pad_then_roll":
        x = torch.roll(pad_to_multiple(x, windows.window), back, dims=(1, 2))
    else:
        x = pad_to_multiple(torch.roll(x, back, dims=(1, 2)), windows.window)
    return rearrange(x, "b (i p) (j q) c -> (b i j) (p q) c", p=windows.window[0], q=windows.window[1])


def merge(tokens: Float[Tensor, "b_windows n c"], windows: Windows) -> Float[Tensor, "b h w c"]:
    """The map that `split` has cut, without the padding."""
    (i, j), (p, q), (h, w) = windows.counts, windows.window, windows.size
    x = rearrange(tokens, "(b i j) (p q) c -> b (i p) (j q) c", i=i, j=j, p=p, q=q)
    if windows.padding == "pad_then_roll":
        return torch.roll(x, windows.shift, dims=(1, 2))[:, :h, :w]
    return torch.roll(x[:, :h, :w], windows.shift, dims=(1, 2))


def pad_to_multiple(x: Float[Tensor, "b h w c"], multiple: tuple[int, int]) -> Float[Tensor, "b h2 w2 c"]:
    """Zeros at the right and the bottom, up to the next multiple."""
    # Without a remainder: of a free size, torch.compile has none where a float follows from it (as in deformable attention).
    bottom, right = ((n + m - 1) // m * m - n for n, m in zip(x.shape[1:3], multiple, strict=True))
    if not torch.compiler.is_compiling() and bottom == right == 0:
        return x  # compiled code pads by nothing instead: a condition would make it start anew for such maps
    return F.pad(x, (0, 0, 0, right, 0, bottom))


def regions(windows: Windows, device: torch.device | None = None) -> Int[Tensor, " windows_n"]:
    """For each token of all windows, its region: tokens of a window see each other if no edge of the map is between them."""
    (rows, columns), (p, q), (down, right) = cells(windows, device), windows.window, windows.shift
    last_row, last_column = windows.padded
    row_bands = (rows >= last_row - p).int() + (rows >= last_row - down)
    column_bands = (columns >= last_column - q).int() + (columns >= last_column - right)
    return 3 * row_bands + column_bands


def cells(windows: Windows, device: torch.device | None = None) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Row and column of each token of all windows, in the map that is padded and rolled."""
    (i, j), (p, q) = windows.counts, windows.window
    # By numbers alone: with shapes of their own, compiled code would tell one window from several.
    token = torch.arange(i * j * p * q, device=device)
    window, inside = token // (p * q), token % (p * q)
    return window // j * p + inside // q, window % j * q + inside % q


# The fast path: roll, padding and cut as one gather, by an index that depends on the sizes only


def split_by_index(x: Float[Tensor, "b h w c"], windows: Windows) -> Float[Tensor, "b_windows n c"]:
    """`split` in one copy. Padded places read a row of zeros after the last token."""
    (b, h, w, c), (i, j), (p, q) = x.shape, windows.counts, windows.window
    tokens = x.reshape(b, h * w, c)
    if torch.compiler.is_compiling() or windows.padded != windows.size:
        tokens = F.pad(tokens, (0, 0, 0, 1))
    tokens = tokens.index_select(1, table(source_index, windows, x))
    # By way of one row of tokens: from `b (windows n) c`, compiled code would tell one window from several.
    return tokens.view(b * i * j * p * q, c).view(b * i * j, p * q, c)


def merge_by_index(tokens: Float[Tensor, "b_windows n c"], windows: Windows) -> Float[Tensor, "b h w c"]:
    """`merge` in one copy."""
    (i, j), (m, n, c) = windows.counts, tokens.shape
    tokens = tokens.reshape(m * n, c).view(m // (i * j), i * j * n, c)
    return tokens.index_select(1, table(target_index, windows, tokens)).unflatten(1, windows.size)


def source_index(windows: Windows, device: torch.device) -> Int[Tensor, " windows_n"]:
    """For each token of all windows, the token of the map; `h * w` at the padding."""
    (rows, columns), (h, w) = cells(windows, device), windows.size
    around, (down, right) = cycle(windows)
    if windows.padding == "pad_then_roll":
        rows, columns = wrap(rows + down, around[0]), wrap(columns + right, around[1])
        is_real = (rows < h) & (columns < w)
    else:
        is_real = (rows < h) & (columns < w)
        rows, columns = wrap(rows + down, around[0]), wrap(columns + right, around[1])
    return torch.where(is_real, rows * w + columns, h * w)


def target_index(windows: Windows, device: torch.device) -> Int[Tensor, " h_w"]:
    """For each token of the map, its place among the tokens of all windows."""
    (h, w), (p, q) = windows.size, windows.window
    around, (down, right) = cycle(windows)
    token = torch.arange(h * w, device=device)
    rows, columns = wrap(token // w + around[0] - down, around[0]), wrap(token % w + around[1] - right, around[1])
    window = rows // p * windows.counts[1] + columns // q
    return window * (p * q) + rows % p * q + columns % q


def cycle(windows: Windows) -> tuple[tuple[int, int], tuple[int, int]]:
    """After how many rows and columns the roll comes round, and its shift, less than that."""
    around = windows.padded if windows.padding == "pad_then_roll" else windows.size
    return around, (windows.shift[0] % around[0], windows.shift[1] % around[1])


def wrap(place: Int[Tensor, " n"], around: int) -> Int[Tensor, " n"]:
    # The remainder without a division, for places up to twice around: Inductor cannot always take `%` of an index.
    return torch.where(place >= around, place - around, place)


def table(make: Callable[[Windows, torch.device], Tensor], windows: Windows, x: Tensor) -> Tensor:
    """What `make` makes for windows of `x`, kept from call to call. Compiled code computes it: a table a size would be a
    compilation a size."""
    if not is_plain(x):
        return make(windows, x.device)
    return kept(make, windows, x.device)


@lru_cache(maxsize=128)
def kept(make: Callable[[Windows, torch.device], Tensor], windows: Windows, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training may use it next
        return make(windows, device)


class WindowAttention(nn.Module):
    """Attention within the windows of a map, for a `Block` over maps.

    Args:
        attention: `(tokens, at=, mask=) -> tokens`, such as `Attention`; `at` are the places within a window.
        window: rows and columns of a window.
        shift: rows and columns that the windows are moved by; tokens from either side of an edge of the map do not see
            each other.
        padding: order of padding and rolling, see the module.

    Raises:
        ValueError: as `lay_out`.
    """

    def __init__(
        self,
        attention: nn.Module,
        window: tuple[int, int],
        *,
        shift: tuple[int, int] = (0, 0),
        padding: Padding = "pad_then_roll",
    ) -> None:
        super().__init__()
        lay_out(window, window, shift, padding)  # refuses what does not fit
        self.attention, self.window, self.shift, self.padding = attention, window, shift, padding

    def forward(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c"]:
        windows = lay_out((x.shape[1], x.shape[2]), self.window, self.shift, self.padding)
        tokens, mask = split_by_index(x, windows), None
        if any(self.shift):
            mask = same_region(table(regions, windows, x).repeat(x.shape[0]).view(tokens.shape[:2]))
        tokens = self.attention(tokens, at=grid(*self.window, device=x.device), mask=mask)
        return merge_by_index(tokens, windows)

    def extra_repr(self) -> str:
        return f"window={self.window}, shift={self.shift}, padding={self.padding!r}"
