"""Restormer over a picture too large to hold its intermediate maps: the same result, band of rows by band of rows.

Channel attention needs to know of the whole picture only sums over its pixels, and a 3x3 convolution one row above and
below. So each block goes over its map three times: it adds up the sums of queries and keys, then adds the attention,
then the FFN, in place. What stays in memory is one map a level (at the full size the two halves of the decoder's input,
of which the encoder works in one), the picture and the result; what comes and goes is a few maps of one band.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from core import GatedConvFfn
from core.channel import channel_sums
from core.tiles import LARGEST, bands

if TYPE_CHECKING:
    from vision.models.restormer import Restormer


@torch.no_grad()
def stream(model: Restormer, x: Float[Tensor, "b c h w"], rows: int) -> Float[Tensor, "b c2 h w"]:
    """`model(x)` for a picture whose sides are multiples of `model.multiple`.

    Args:
        rows: of a band, at every level; the fewer, the less memory and the more work is done twice (2 rows a band).
    """
    if rows < 1:
        raise ValueError(f"rows={rows} is no band; use 1 or more, such as 32")
    b, _, h, w = x.shape
    picture = rearrange(x, "b c h w -> b h w c")
    top = x.new_empty(b, h, w, 2 * model.dim)
    kept = [top[..., model.dim :]]
    for own, seen, inner in bands(h, rows):
        kept[0][:, own] = model.embed(picture[:, seen])[:, inner]
    for stage, down in zip(model.encoder, model.down, strict=True):
        run(stage, kept[-1], rows)
        kept.append(go_down(down, kept[-1], rows))
    y = kept.pop()
    run(model.latent, y, rows)
    for up, reduce, stage in zip(model.up, model.reduce, model.decoder, strict=True):
        skip = kept.pop()
        y = merge(up, reduce, y, skip, into=skip if kept else top, rows=rows)
        run(stage, y, rows)
    run(model.refinement, top, rows)
    if model.skip is not None:
        for own, seen, inner in bands(h, rows):
            top[:, own] += model.skip(model.embed(picture[:, seen])[:, inner])
    result = x.new_empty(b, model.out_chans, h, w)
    for own, seen, inner in bands(h, rows):
        restored = model.output(top[:, seen])[:, inner]
        restored = restored + picture[:, own] if model.skip is None else restored
        result[:, :, own] = rearrange(restored, "b h w c -> b c h w")
    return result


def stream_memory(model: Restormer, shape: Sequence[int], rows: int) -> int:
    """The most bytes that `stream` allocates for a picture `b c h w`, its padding and its result included."""
    b, channels, h, w = shape
    h, w = h + -h % model.multiple, w + -w % model.multiple
    # 2 dim channels at the full size; below, 2, 4 and 8 dim on 1/4, 1/16 and 1/64 of the pixels; picture, padding and result.
    kept = 2 * model.dim + model.dim * (2 / 4 + 4 / 16 + 8 / 64) + 3 * channels + model.out_chans
    pixels = b * min(h, rows + 2) * w
    weight = next(model.parameters())
    ffns = [module for module in model.modules() if isinstance(module, GatedConvFfn)]
    hidden = max((ffn.hidden for ffn in ffns if ffn.dim <= 2 * model.dim), default=0)
    at_once = min(pixels, b * LARGEST) if weight.device.type == "cpu" else pixels
    band = max(12 * model.dim * pixels, 8 * model.dim * pixels + 5 * hidden * at_once)  # q and k twice, or gate and value twice
    copies = max((sum(p.numel() for p in ffn.parameters()) for ffn in ffns), default=0)  # weights, padded
    return int(weight.element_size() * (b * h * w * kept + band + 2 * copies))


def run(stage: Any, x: Float[Tensor, "b h w d"], rows: int) -> None:
    for block in stage:
        run_block(block, x, rows)


def run_block(block: Any, x: Float[Tensor, "b h w d"], rows: int) -> None:
    """x = block(x), in place."""
    attention, dim = block.attention, block.attention.dim
    sums = None
    for _, seen, inner in bands(x.shape[1], rows):
        q, k = attention.project_part(block.norm1(x[:, seen]), 0, 2 * dim)[:, inner].chunk(2, dim=-1)
        part = channel_sums(q, k, attention.heads)
        sums = part if sums is None else sums.plus(part)
    matrix = attention.fold(attention.weights(sums))
    add(x, lambda band: attention.mix(attention.project_part(block.norm1(band), 2 * dim, 3 * dim), matrix), rows)
    add(x, lambda band: block.ffn(block.norm2(band)), rows)


def add(x: Float[Tensor, "b h w d"], change: Callable[[Tensor], Tensor], rows: int) -> None:
    """x = x + change(x), in place, for a change that looks one row up and down."""
    above = x[:, :0]
    for own, _, _ in bands(x.shape[1], rows):
        band = torch.cat([above, x[:, own.start : own.stop + 1]], dim=1)
        first = above.shape[1]
        above = x[:, own.stop - 1 : own.stop].clone()  # as it was: the next band wants to see it
        x[:, own] += change(band)[:, first : first + own.stop - own.start]


def go_down(down: Any, x: Float[Tensor, "b h w d"], rows: int) -> Float[Tensor, "b h2 w2 d2"]:
    b, h, w, dim = x.shape
    y = x.new_empty(b, h // 2, w // 2, 2 * dim)
    for own, seen, inner in bands(h, rows + rows % 2):
        y[:, own.start // 2 : own.stop // 2] = down.rearrange(down.conv(x[:, seen])[:, inner])
    return y


def merge(
    up: Any,
    reduce: nn.Module,
    x: Float[Tensor, "b h w d"],
    skip: Float[Tensor, "b h2 w2 d2"],
    *,
    into: Float[Tensor, "b h2 w2 d3"],
    rows: int,
) -> Float[Tensor, "b h2 w2 d3"]:
    """reduce([up(x), skip]), written over `into`, which may hold `skip`."""
    for own, seen, inner in bands(x.shape[1], rows):
        target = slice(2 * own.start, 2 * own.stop)
        upper = up.rearrange(up.conv(x[:, seen])[:, inner])
        into[:, target] = reduce(torch.cat([upper, skip[:, target]], dim=-1))
    return into
