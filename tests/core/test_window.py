"""Windows against their definition, written as loops; the gather against the plain path; attention against each window alone."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from core import Attention, RelativeTable, Site, grid
from core import window as module
from core.window import (
    WindowAttention,
    Windows,
    lay_out,
    merge,
    merge_by_index,
    pad_to_multiple,
    regions,
    source_index,
    split,
    split_by_index,
)

PADDINGS = ("pad_then_roll", "roll_then_pad")
# Multiple of the window, odd, smaller than a window, one cell, long and thin
SIZES = ((8, 12), (7, 13), (3, 2), (1, 1), (4, 30), (9, 5))
LAYOUTS = [
    lay_out(size, window, shift, padding)
    for size in SIZES
    for window, shift in (((4, 4), (0, 0)), ((4, 4), (2, 2)), ((3, 5), (1, 2)))
    for padding in PADDINGS
]


def by_definition(x: Tensor, windows: Windows) -> Tensor:
    """Token (p, q) of window (i, j) is the map's cell at (i, j) · window + (p, q) + shift; zeros at the padding."""
    (h, w), (p, q), (down, right) = windows.size, windows.window, windows.shift
    found = []
    for b, i, j in itertools.product(range(len(x)), *map(range, windows.counts)):
        for row, column in itertools.product(range(i * p, i * p + p), range(j * q, j * q + q)):
            if windows.padding == "pad_then_roll":
                row, column = (row + down) % windows.padded[0], (column + right) % windows.padded[1]
            elif row < h and column < w:
                row, column = (row + down) % h, (column + right) % w
            found.append(x[b, row, column] if row < h and column < w else torch.zeros(x.shape[-1]))
    return torch.stack(found).view(-1, p * q, x.shape[-1])


def test_split_is_what_its_definition_says():
    for windows in LAYOUTS:
        x = torch.randn(2, *windows.size, 3)
        assert torch.equal(split(x, windows), by_definition(x, windows)), windows


def test_merge_undoes_split():
    for windows in LAYOUTS:
        x = torch.randn(2, *windows.size, 3)
        assert torch.equal(merge(split(x, windows), windows), x), windows


def test_gather_is_bitwise_the_plain_path_and_so_are_its_gradients():
    for windows in LAYOUTS:
        x, y = (torch.randn(2, *windows.size, 3).requires_grad_() for _ in range(2))
        y.data = x.data.clone()
        plain, fast = split(x, windows), split_by_index(y, windows)
        assert torch.equal(fast, plain), windows
        gradient = torch.randn_like(plain)
        merged = merge(plain * gradient, windows), merge_by_index(fast * gradient, windows)
        assert torch.equal(*merged), windows
        for m in merged:
            (m * m).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("window", [(4, 4), (3, 5)])
@pytest.mark.parametrize("size", [(8, 15), (7, 13), (3, 2), (12, 4)])
def test_regions_are_the_tokens_that_stayed_neighbours(size, window):
    """Two tokens of a window belong together if they are as far apart in the (padded) map as they are in the window."""
    windows = lay_out(size, window, (window[0] // 2, window[1] // 2))
    region = regions(windows).view(-1, window[0] * window[1])
    cells = grid(*windows.padded)[None]
    if windows.padding == "pad_then_roll":
        places = split(cells, windows._replace(size=windows.padded))
    inside = grid(*window).flatten(0, 1)
    apart = places[:, :, None] - places[:, None, :] == inside[:, None] - inside[None, :]
    assert torch.equal(region[:, :, None] == region[:, None, :], apart.all(-1))


@pytest.mark.parametrize("size", [(14, 14), (16, 9), (28, 5)])
def test_regions_are_timms(size):
    block = SwinTransformerBlock(8, size, num_heads=1, window_size=7, shift_size=3, always_partition=True)
    region = regions(lay_out(size, (7, 7), (3, 3), "roll_then_pad")).view(-1, 49)
    assert torch.equal(region[:, :, None] == region[:, None, :], block.attn_mask == 0)


def test_pad_then_roll_does_not_shift_along_an_axis_of_one_window():
    assert lay_out((4, 9), (4, 4), (2, 2)).shift == (0, 2)
    assert lay_out((3, 3), (4, 4), (2, 2)).shift == (0, 0)
    assert lay_out((5, 5), (4, 4), (2, 2)).shift == (2, 2)
    assert lay_out((3, 3), (4, 4), (2, 2), "roll_then_pad").shift == (2, 2)


def test_the_two_paddings_agree_on_multiples_of_the_window_and_nowhere_else():
    for size, equal in (((8, 12), True), ((8, 13), False), ((7, 12), False)):
        x = torch.randn(1, *size, 2)
        first, second = (split(x, lay_out(size, (4, 4), (2, 2), padding)) for padding in PADDINGS)
        assert torch.equal(first, second) == equal


def test_a_map_that_fits_is_not_copied_to_pad_it():
    x = torch.randn(1, 4, 6, 2)
    assert pad_to_multiple(x, (2, 3)) is x
    assert pad_to_multiple(x, (3, 4)).shape == (1, 6, 8, 2)


def test_tables_made_under_inference_mode_serve_training():
    module.kept.cache_clear()
    windows = lay_out((5, 7), (4, 4), (2, 2))
    with torch.inference_mode():
        merge_by_index(split_by_index(torch.randn(1, 5, 7, 2), windows), windows)
    x = torch.randn(1, 5, 7, 2).requires_grad_()
    merge_by_index(split_by_index(x, windows), windows).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_tensors_that_only_pretend_leave_no_table_behind():
    module.kept.cache_clear()
    windows = lay_out((5, 7), (4, 4), (2, 2))
    with FakeTensorMode():
        assert split_by_index(torch.randn(1, 5, 7, 2), windows).shape == (4, 16, 2)
    assert torch.equal(split_by_index(torch.ones(1, 5, 7, 2), windows), split(torch.ones(1, 5, 7, 2), windows))


def test_tables_are_kept():
    module.kept.cache_clear()
    windows = lay_out((5, 7), (4, 4), (2, 2))
    for _ in range(3):
        split_by_index(torch.randn(1, 5, 7, 2), windows)
    assert module.kept.cache_info().misses == 1
    assert module.kept(source_index, windows, torch.device("cpu")).shape == (64,)


# Attention


def attention(window: tuple[int, int], **options: object) -> WindowAttention:
    return WindowAttention(Attention(16, 2, position=RelativeTable(Site(16, 2, extent=window), std=1.0)), window, **options)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (3, 10)])
def test_attention_is_that_of_each_region_of_each_window_alone(size, padding, within):
    layer = attention((4, 4), shift=(2, 2), padding=padding).eval()
    windows = lay_out(size, (4, 4), (2, 2), padding)
    x = torch.randn(2, *size, 16)
    tokens, outputs = split(x, windows), []
    region = regions(windows).repeat(2).view(-1, 16)
    for alone, own in zip(tokens, region, strict=True):
        y = torch.zeros_like(alone)
        for each in own.unique():
            here = own == each
            places = grid(4, 4).flatten(0, 1)[here]
            y[here] = layer.attention(alone[here][None], at=places)[0]
        outputs.append(y)
    within(layer(x), merge(torch.stack(outputs), windows).contiguous())


def test_windows_do_not_see_each_other():
    layer = attention((4, 4)).eval()
    x = torch.randn(1, 8, 8, 16)
    changed = x.clone()
    changed[:, :4, :4] += 1
    same = (layer(x) == layer(changed)).all(-1)[0]
    assert same.sum() == 48
    assert not same[:4, :4].any()


def test_opposite_edges_do_not_see_each_other_in_shifted_windows():
    layer = attention((4, 4), shift=(2, 2)).eval()
    x = torch.randn(1, 8, 8, 16)
    changed = x.clone()
    changed[:, 0] += 1  # rows 0 and 1 share a window with rows 6 and 7
    same = (layer(x) == layer(changed)).all(-1)[0]
    assert same[2:].all()
    assert not same[:2].any()


@pytest.mark.parametrize("shift", [(0, 0), (2, 2)])
def test_a_batch_is_its_pictures_one_by_one(shift, within):
    layer = attention((4, 4), shift=shift).eval()
    x = torch.randn(3, 7, 9, 16)
    within(layer(x), torch.cat([layer(one[None]) for one in x]))


def test_evaluation_equals_training_without_dropout(within):
    layer = attention((4, 4), shift=(2, 2))
    x = torch.randn(2, 7, 9, 16)
    trained = layer(x).detach()
    with torch.no_grad():
        within(layer.eval()(x), trained)


def test_no_pictures_give_no_pictures():
    assert attention((4, 4), shift=(2, 2))(torch.randn(0, 7, 9, 16)).shape == (0, 7, 9, 16)


@pytest.mark.parametrize("padding", PADDINGS)
def test_export_leaves_batch_and_size_free(padding, within, unchecked):
    layer = attention((4, 4), shift=(2, 2), padding=padding).eval()
    free = {0: torch.export.Dim("b"), 1: torch.export.Dim("h"), 2: torch.export.Dim("w")}
    program = torch.export.export(layer, (torch.randn(2, 7, 9, 16),), dynamic_shapes=(free,)).module()
    for shape in ((2, 7, 9), (5, 3, 2), (3, 20, 4)):
        x = torch.randn(*shape, 16)
        within(program(x), layer(x))


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 4),), r"window=\(0, 4\) holds no tokens; use positive sizes such as \(7, 7\)"),
        (((4, 4), (4, 0)), r"shift=\(4, 0\) is not less than window=\(4, 4\); use \(0, 0\) or half a window"),
        (((4, 4), (-1, 0)), r"shift=\(-1, 0\) is not less than"),
        (((4, 4), (2, 2), "none"), "padding='none' is unknown; use 'pad_then_roll' or 'roll_then_pad'"),
    ],
)
def test_windows_that_cannot_be_are_refused(arguments, message, unchecked):
    with pytest.raises(ValueError, match=message):
        lay_out((8, 8), *arguments)


def test_window_attention_refuses_when_it_is_built(unchecked):
    with pytest.raises(ValueError, match="padding='reflect' is unknown"):
        attention((4, 4), padding="reflect")


@pytest.mark.compile
@pytest.mark.parametrize("padding", PADDINGS)
def test_seven_sizes_compile_at_most_three_times(padding, within):
    torch._dynamo.reset()
    layer = attention((4, 4), shift=(2, 2), padding=padding).eval()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for size in ((8, 8), (9, 7), (12, 12), (3, 3), (3, 20), (16, 8), (31, 5)):
        x = torch.randn(2, *size, 16)
        within(compiled(x), layer(x))
    assert counter.frame_count <= 3


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("padding", PADDINGS)
def test_inductor_makes_code_of_it_in_reasonable_time(padding, within):
    """Remainders of negative places, or by free sizes, made it fail or take minutes."""
    torch._dynamo.reset()
    layer = attention((4, 4), shift=(2, 2), padding=padding).eval()
    compiled = torch.compile(layer, fullgraph=True)
    start = time.process_time()
    with torch.no_grad():
        for size in ((8, 8), (9, 7), (12, 20)):
            x = torch.randn(2, *size, 16)
            within(compiled(x), layer(x))
    assert time.process_time() - start < 100
