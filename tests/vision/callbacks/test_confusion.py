from __future__ import annotations

import math

import pytest
import torch
from torchmetrics.functional.classification import multiclass_precision, multiclass_recall

from vision.callbacks.confusion import class_rows, wilson


def test_wilson_matches_published_values():
    """Newcombe 1998, table I (method 3): 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_wilson_stays_within_0_and_1_and_is_never_a_point(n):
    for share in (0.0, 1.0):
        low, high = wilson(share, n)
        assert 0 <= low <= share <= high <= 1
        assert high > low


def test_rows_agree_with_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    true, said = torch.randint(4, (200,), generator=generator), torch.randint(4, (200,), generator=generator)
    counts = torch.zeros(4, 4, dtype=torch.long).index_put_((true, said), torch.ones(200, dtype=torch.long), accumulate=True)
    rows = class_rows(counts, ["a", "b", "c", "d"])
    recall = multiclass_recall(said, true, 4, average=None)
    precision = multiclass_precision(said, true, 4, average=None)
    assert [row.right / row.pictures for row in rows] == pytest.approx(recall.tolist())
    assert [row.precision for row in rows] == pytest.approx(precision.tolist())


def test_rows_name_the_class_most_often_confused_and_survive_empty_ones():
    counts = torch.tensor([[5, 1, 3], [0, 0, 0], [0, 0, 4]])
    first, empty, last = class_rows(counts, ["cat", "dog", "hen"])
    assert (first.taken_for, first.taken) == ("hen", 3)
    assert (empty.pictures, empty.right, empty.taken_for) == (0, 0, "")
    assert empty.precision == 0
    assert (last.taken_for, last.taken, last.right) == ("", 0, 4)
    assert math.isnan(class_rows(torch.tensor([[1, 0], [1, 0]]), ["a", "b"])[1].precision)
