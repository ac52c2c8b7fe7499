from __future__ import annotations

import pytest
import torch

from core.coordinates import by_axis, grid, line, over_places, padded_line, place


def test_line_and_grid_count_in_float32_from_zero():
    assert line(4).tolist() == [[0], [1], [2], [3]]
    assert line(2, start=7).tolist() == [[7], [8]]
    assert grid(2, 3).tolist() == [[[0, 0], [0, 1], [0, 2]], [[1, 0], [1, 1], [1, 2]]]
    assert line(2).dtype == grid(2, 2).dtype == torch.float32


def test_padded_rows_count_their_real_tokens():
    real = torch.tensor([[False, False, True, True], [True, True, True, False], [True] * 4, [False] * 4])
    assert padded_line(real)[..., 0].tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 1, 2, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("at", "axes", "batch", "tokens", "prefix", "flat", "size", "missing"),
    [
        (line(5), 1, 2, 5, 0, (5, 1), None, 0),
        (line(5), 1, 2, 7, 2, (5, 1), None, 2),  # the prefix stands before
        (line(1), 1, 2, 1, 2, (1, 1), None, 0),  # a decoded query comes without it
        (line(5), 1, 2, None, 2, (5, 1), None, 2),  # keys whose number is not known
        (line(5).expand(2, 5, 1), 1, 2, 5, 0, (2, 5, 1), None, 0),
        (line(5)[None], 1, 2, 5, 0, (1, 5, 1), None, 0),
        (grid(3, 4), 2, 2, 12, 0, (12, 2), (3, 4), 0),
        (grid(3, 4), 2, 2, 13, 1, (12, 2), (3, 4), 1),
        (grid(3, 4), 2, 3, 12, 0, (12, 2), (3, 4), 0),  # as many rows as the batch has
        (grid(3, 4), 2, 3, None, 0, (12, 2), (3, 4), 0),
        (grid(3, 4).flatten(0, 1), 2, 2, 12, 0, (12, 2), None, 0),
        (torch.rand(3, 4, 2), 2, 3, 4, 0, (3, 4, 2), None, 0),
        (torch.rand(3, 4, 2), 2, 3, None, 0, (3, 4, 2), None, 0),
        (torch.rand(3, 2, 2, 2), 2, 3, 4, 0, (3, 4, 2), None, 0),
        (grid(1, 4), 2, 1, 4, 0, (4, 2), (1, 4), 0),  # a picture of one row, or
        (torch.rand(1, 4, 2), 2, 1, 4, 0, (1, 4, 2), None, 0),  # one row of points
        (torch.rand(2, 3, 4, 3), 3, 5, 24, 0, (24, 3), (2, 3, 4), 0),
    ],
)
def test_each_form_is_understood(at, axes, batch, tokens, prefix, flat, size, missing):
    places = place(at, axes=axes, batch=batch, tokens=tokens, prefix=prefix)
    assert (tuple(places.at.shape), places.size, places.prefix) == (flat, size, missing)
    assert torch.equal(places.at, at.reshape(flat))


def test_whole_numbers_become_floats():
    assert place(torch.arange(300)[:, None], axes=1, batch=1, tokens=300).at.dtype == torch.float32


@pytest.mark.parametrize(
    ("at", "tokens", "message"),
    [
        (None, 4, r"a position needs coordinates; pass at=line\(n\) or at=grid\(h, w\)"),
        (line(4).bfloat16(), 4, "torch.bfloat16 lose places .*; keep them in float32"),
        (line(4).half(), 4, "torch.float16 lose places"),
        (grid(2, 2), 4, r"\(2, 2, 2\) do not end in 1, the axes of the site; give Site\(extent=\(n,\)\) with line\(n\)"),
        (torch.arange(4.0), 4, r"\(4,\) do not end in 1"),
        (line(3), 4, r"\(3, 1\) do not place 4 tokens, 2 of them a prefix, in 2 rows; give one coordinate a token: n 1"),
        (line(4).expand(3, 4, 1), 4, r"\(3, 4, 1\) do not place 4 tokens.* in 2 rows"),
    ],
)
def test_errors_name_the_fix(at, tokens, message):
    with pytest.raises(ValueError, match=message) as caught:
        place(at, axes=1, batch=2, tokens=tokens, prefix=2)
    assert "\n" not in str(caught.value)


def test_rows_of_another_batch_are_refused_not_broadcast():
    # Four rows of coordinates for a batch of one would silently make a batch of four.
    with pytest.raises(ValueError, match=r"do not place 4 tokens in 1 rows; give one coordinate a token: n 2, h w 2 or b n 2"):
        place(torch.rand(4, 4, 2), axes=2, batch=1, tokens=4)


@pytest.mark.parametrize("at", [grid(3, 4), grid(3, 4).flatten(0, 1), torch.rand(2, 12, 2), grid(1, 12), grid(12, 1)])
def test_work_by_axis_covers_every_place(at):
    places = place(at, axes=2, batch=2, tokens=12)
    channels = over_places([axis[..., None] * torch.tensor([1.0, 10.0]) for axis in by_axis(places)], places)
    rows, columns = places.at.unbind(-1)
    assert torch.equal(channels, torch.stack([rows, rows * 10, columns, columns * 10], dim=-1))
