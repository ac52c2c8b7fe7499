from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vision.callbacks import figures
from vision.callbacks.figures import Mistake, confusion_matrix, labels, learning_curves, mistakes, per_class, short, windows


def draw(figure: Figure) -> None:
    FigureCanvasAgg(figure).draw()


def texts(figure: Figure) -> list[str]:
    """Every visible text of a figure, drawn."""
    draw(figure)
    found = figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_visible())
    return [artist.get_text() for artist in found]


def boxes(figure: Figure, words: list[str]) -> list:
    draw(figure)
    return [
        artist.get_window_extent()
        for artist in figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_text() in words)
        if artist.get_visible()
    ]


FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def counts_of(classes: int, each: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.eye(classes) * 10 + torch.rand(classes, classes, generator=generator)
    return torch.stack(
        [torch.bincount(torch.multinomial(row, each, True, generator=generator), minlength=classes) for row in rows]
    )


def test_confusion_shows_counts_shares_and_names():
    counts = torch.tensor([[90, 10, 0], [1, 299, 0], [0, 0, 0]])
    seen = texts(confusion_matrix(counts, ["cat", "dog", "hen"]))
    for word in ("90\n90%", "10\n10%", "1\n<1%", "299\n100%", "cat", "dog", "hen", "predicted", "true"):
        assert word in seen
    assert "0\n0%" not in seen


def test_confusion_shades_the_true_class():
    figure = confusion_matrix(torch.tensor([[3, 1], [0, 400]]), ["a", "b"])
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[0.75, 0.25], [0, 1]])


@pytest.mark.parametrize(
    ("number", "cells", "names"), [(14, "all", True), (25, "counts", True), (60, "none", True), (61, "none", False)]
)
def test_confusion_of_many_classes_stays_readable(number, cells, names):
    seen = texts(confusion_matrix(counts_of(number), [f"c{i:03}" for i in range(number)]))
    assert any("%" in text and "\n" in text for text in seen) == (cells == "all")
    assert ("c000" in seen) == names


def test_names_on_the_axes_do_not_overlap():
    figure = confusion_matrix(counts_of(10), FASHION)
    vertical = sorted(boxes(figure, FASHION), key=lambda box: box.y0)
    rows = [box for box in vertical if box.x1 < figure.axes[0].get_window_extent().x0]
    assert len(rows) == 10
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(rows))


def test_cell_texts_fit_their_cells():
    figure = confusion_matrix(counts_of(10, 100_000), FASHION)
    draw(figure)
    axis = figure.axes[0]
    cell = axis.get_window_extent().width / 10
    assert max(text.get_window_extent().width for text in axis.texts) < cell


def test_per_class_is_sorted_with_intervals_and_skips_empty_classes():
    counts = torch.tensor([[90, 10, 0], [0, 0, 0], [5, 0, 5]])
    figure = per_class(counts, ["cat", "dog", "hen"])
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["hen", "cat"]
    assert [bar.get_width() for bar in axis.patches] == [0.5, 0.9]
    assert "50.0%  (5 of 10)" in texts(figure)
    low, high = axis.collections[0].get_segments()[0][:, 0]
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_per_class_of_many_classes_shows_the_worst():
    figure = per_class(counts_of(300, 20), [f"c{i:03}" for i in range(300)])
    assert len(figure.axes[0].patches) == 40
    assert any("the 40 worst of 300" in text for text in texts(figure))


HISTORY = {
    "train/loss_step": [(i, 2.0 - i / 1000) for i in range(0, 1000, 10)],
    "train/loss_epoch": [(500, 1.5), (1000, 1.0)],
    "val/loss": [(500, 1.6), (1000, 1.1)],
    "val/accuracy": [(500, 0.7), (1000, 0.6)],
    "train/lr": [(0, 0.0), (1000, 1e-3)],
}


def test_curves_show_loss_metric_and_rate_over_steps():
    figure = learning_curves(HISTORY)
    loss, accuracy, rate = figure.axes
    assert [line.get_label() for line in loss.lines] == ["train, single batches", "train", "validation"]
    assert loss.lines[1].get_xydata().tolist() == [[500, 1.5], [1000, 1.0]]
    assert accuracy.lines[0].get_xydata().tolist() == [[500, 0.7], [1000, 0.6]]
    assert rate.get_ylim()[0] == 0
    assert "best 0.7000 at step 500" in texts(figure)
    assert "1,000" in texts(figure)


def test_curves_mark_the_least_of_a_metric_that_falls():
    history = {"val/wer": [(1, 0.5), (2, 0.2), (3, 0.4)]}
    assert "best 0.2000 at step 2" in texts(learning_curves(history, "val/wer"))


def test_curves_draw_what_there_is():
    assert len(learning_curves({"train/loss": [(0, 1.0)]}).axes) == 1
    assert len(learning_curves({"val/loss": [(0, 1.0)]}, "val/loss").axes) == 1
    assert learning_curves({"val/loss": [(0, 1.0)]}).axes[0].lines[0].get_marker() == "o"


def test_many_single_losses_get_a_mean():
    history = {"train/loss": [(i, float(i % 2)) for i in range(1000)]}
    mean = learning_curves(history).axes[0].lines[1].get_ydata()
    assert len(mean) == 40
    assert np.allclose(mean, 0.5, atol=0.03)
    assert windows([(0, 1.0), (1, 3.0)], 1) == [(1, 2.0)]


@pytest.mark.parametrize("channels", [1, 3])
def test_mistakes_tell_truth_and_answer(channels):
    found = [
        Mistake(np.full((4, 4, channels), 0.5, np.float32), "cat", "dog", 0.987),
        Mistake(np.zeros((4, 4, channels), np.float32), "hen", "cat", 0.5),
    ]
    figure = mistakes(found)
    seen = texts(figure)
    assert {"is cat", "said dog 99%", "is hen", "said cat 50%"} <= set(seen)
    assert [axis.axison for axis in figure.axes] == [False] * 6
    assert figure.axes[0].images[0].get_array().shape == ((4, 4) if channels == 1 else (4, 4, 3))


def test_names_with_markup_and_of_any_length_are_drawn():
    names = ["a $b_$ \\frac{ $", "<b>&x</b>", "x" * 200, "x" * 199 + "y"]
    for figure in (confusion_matrix(counts_of(4), names), per_class(counts_of(4), names)):
        assert "a $b_$ \\frac{ $"[:10] in "".join(texts(figure))
        draw(figure)
    draw(mistakes([Mistake(np.zeros((2, 2, 1), np.float32), names[0], names[2], 1.0)]))


def test_short_keeps_both_ends_and_labels_tell_apart():
    assert short("abc") == "abc"
    assert short("x" * 30 + "end") == "x" * 11 + "…" + "x" * 7 + "end"
    assert len(short("x" * 99)) == 22
    assert labels(["cat", "dog"]) == ["cat", "dog"]
    alike = labels(["x" * 15 + str(i) + "x" * 15 for i in range(3)])
    assert len(set(alike)) == 3


def test_nothing_global_is_touched():
    assert "matplotlib.pyplot" not in vars(figures)
    if "matplotlib.pyplot" in sys.modules:  # another test's: no figure may be open in it
        assert not sys.modules["matplotlib.pyplot"].get_fignums()
