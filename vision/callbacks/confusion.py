"""What a confusion matrix tells: of each class, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor


def confusion(task: Any) -> Int[Tensor, "k k"] | None:
    """What a test has counted; rows are true classes."""
    counts = getattr(task, "test_confusion", None)
    return counts.cpu().long() if counts is not None and counts.sum() > 0 else None


class ClassRow(NamedTuple):
    """What became of the pictures of one class."""

    name: str
    pictures: int
    right: int
    precision: float  # share of the pictures called so that are so; nan when none was
    taken_for: str  # the class it was most often mistaken for, or an empty string
    taken: int


def class_rows(counts: Int[Tensor, "k k"], classes: Sequence[str]) -> list[ClassRow]:
    """One row for each class, in the order of the classes."""
    rows, predicted = [], counts.sum(dim=0)
    for i, name in enumerate(classes):
        wrong = counts[i].clone()
        wrong[i] = 0
        taken, other = (int(v) for v in wrong.max(dim=0))
        right = int(counts[i, i])
        precision = right / int(predicted[i]) if predicted[i] else math.nan
        rows.append(ClassRow(name, int(counts[i].sum()), right, precision, classes[other] if taken else "", taken))
    return rows


def wilson(share: int | float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95% confidence interval of a share of n independent trials (Wilson 1927); unlike share ± z·s it stays within 0..1.

    Args:
        share: 0..1.
        n: trials, at least 1.
        z: quantile of the normal distribution.
    """
    centre, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    return max(0.0, min(share, low)), min(1.0, max(share, high))  # the bounds of 0 and 1 are hit but for rounding
