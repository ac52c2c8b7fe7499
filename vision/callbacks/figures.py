"""Figures of a run, without matplotlib's global state, in colours that colour-blind readers tell apart (Okabe & Ito 2008)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from vision.callbacks.confusion import class_rows, wilson

BLUE, ORANGE, GREEN, VERMILLION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#6B6B6B"
# Class names may hold a $, or letters that matplotlib's own font has not
WIDER = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "Microsoft YaHei", "Noto Sans Devanagari", "Noto Sans Arabic")
PLAIN: dict[str, Any] = {"parse_math": False, "fontfamily": ["DejaVu Sans", *(set(WIDER) & set(fontManager.get_font_names()))]}

Points = Sequence[tuple[int, float]]  # step and value
History = Mapping[str, Points]


class Mistake(NamedTuple):
    """A picture that was named wrong."""

    picture: Float[np.ndarray, "h w c"]  # 0..1, one or three channels
    true: str
    predicted: str
    confidence: float  # probability given to the predicted class


def learning_curves(history: History, metric: str = "val/accuracy") -> Figure:
    """Loss, validation metric and learning rate over the optimizer steps.

    Args:
        history: for each logged name its (step, value) pairs.
        metric: name of the validation metric; its best value is marked.
    """
    metric = metric if metric in history and metric != "val/loss" else ""
    losses = loss_series(history)
    panels = [bool(losses), bool(metric), "train/lr" in history]
    figure = Figure(figsize=(4.1 * sum(panels), 3.2), layout="constrained")
    axes = iter(figure.subplots(1, sum(panels), squeeze=False)[0])
    if panels[0]:
        axis = next(axes)
        for label, points, style in losses:
            axis.plot(*zip(*points, strict=True), label=label, marker=dots(points), **style)
        axis.set_title("loss")
        axis.legend(frameon=False)
    if panels[1]:
        axis = next(axes)
        points = history[metric]
        axis.plot(*zip(*points, strict=True), color=VERMILLION, marker=dots(points), label=metric.replace("/", " "))
        least = min(points, key=lambda p: p[1]) if falls(metric) else max(points, key=lambda p: p[1])
        axis.axhline(least[1], color=GREY, linewidth=0.8, linestyle=":")
        text, height, side = f"best {least[1]:.4f} at step {least[0]:,}", *((0.95, "top") if falls(metric) else (0.05, "bottom"))
        axis.text(0.98, height, text, color=GREY, ha="right", va=side, transform=axis.transAxes)
        axis.set_title(metric.replace("/", " "))
    if panels[2]:
        axis = next(axes)
        axis.plot(*zip(*history["train/lr"], strict=True), color=GREEN)
        axis.set_ylim(bottom=0)
        axis.set_title("learning rate")
        axis.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    for axis in figure.axes:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        tidy(axis)
    return figure


def loss_series(history: History) -> list[tuple[str, Points, dict[str, Any]]]:
    """The losses there are, in the order of drawing: label, points and style."""
    single = history.get("train/loss_step") or history.get("train/loss") or []
    mean = history.get("train/loss_epoch") or (windows(single) if len(single) > 100 else [])
    faint: dict[str, Any] = {"alpha": 0.3, "linewidth": 1.0} if mean else {"linewidth": 2.0}
    series: list[tuple[str, Points, dict[str, Any]]] = [
        ("train, single batches" if mean else "train", single, faint | {"color": BLUE}),
        ("train", mean, {"color": BLUE, "linewidth": 2.0}),
        ("validation", history.get("val/loss", []), {"color": VERMILLION, "linewidth": 2.0}),
    ]
    return [entry for entry in series if entry[1]]


def windows(points: Points, number: int = 40) -> Points:
    """Means of so many parts of a series."""
    parts = [points[i * len(points) // number : (i + 1) * len(points) // number] for i in range(number)]
    return [(part[len(part) // 2][0], sum(value for _, value in part) / len(part)) for part in parts if part]


def confusion_matrix(counts: Int[Tensor, "k k"], classes: Sequence[str]) -> Figure:
    """How often each class was taken for each other one.

    Up to 14 classes show counts and shares, up to 25 counts, up to 60 names only, more the colours alone.

    Args:
        counts: rows are true classes, columns predicted ones.
        classes: their names.
    """
    number = len(classes)
    totals = counts.sum(dim=1, keepdim=True)
    shares = (counts / totals.clamp(min=1)).numpy()
    side = min(12.0, max(4.2, 2.2 + (0.62 if number <= 14 else 0.42 if number <= 25 else 0.2) * number))
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    for row, column in np.argwhere(counts.numpy() > 0) if number <= 25 else ():
        share, count = shares[row, column], f"{counts[row, column]:,}"
        text = f"{count}\n{percent(share)}" if number <= 14 else count
        axis.text(
            column, row, text, ha="center", va="center", fontsize=8, color="white" if share > 0.55 else "black", linespacing=1.0
        )
    if number <= 60:
        names = labels(classes)
        size = 9 if number <= 25 else 7
        axis.set_xticks(range(number), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size, **PLAIN)
        axis.set_yticks(range(number), names, fontsize=size, **PLAIN)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axis, shrink=0.6, aspect=30, format=FuncFormatter(lambda value, _: f"{value:.0%}"))
    bar.set_label("share of the true class")
    bar.outline.set_visible(False)
    return figure


def per_class(counts: Int[Tensor, "k k"], classes: Sequence[str], most: int = 40) -> Figure:
    """Share of each class that was named right, with 95% intervals, worst first; of more than `most` classes the worst ones."""
    rows = sorted((row for row in class_rows(counts, classes) if row.pictures), key=lambda row: row.right / row.pictures)[:most]
    figure = Figure(figsize=(7.2, 1.1 + 0.27 * len(rows)), layout="constrained")
    axis = figure.subplots()
    shares = np.array([row.right / row.pictures for row in rows])
    intervals = np.array([wilson(row.right / row.pictures, row.pictures) for row in rows])
    spread = np.abs(intervals.T - shares)
    axis.barh(range(len(rows)), shares, color=BLUE, height=0.62)
    axis.errorbar(shares, range(len(rows)), xerr=spread, fmt="none", ecolor="black", elinewidth=1.1, capsize=2.5)
    axis.set_yticks(range(len(rows)), labels([row.name for row in rows]), **PLAIN)
    for place, row in enumerate(rows):
        text = f"{row.right / row.pictures:.1%}  ({row.right:,} of {row.pictures:,})"
        axis.text(1.02, place, text, va="center", fontsize=9, transform=axis.get_yaxis_transform())
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    shown = f", the {most} worst of {len(classes):,}" if len(classes) > most else ""
    axis.set_xlabel(f"named right (95% interval){shown}")
    tidy(axis)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    return figure


def mistakes(found: Sequence[Mistake], columns: int = 6) -> Figure:
    """The wrong answers that were given with the greatest confidence."""
    rows = max(1, math.ceil(len(found) / columns))
    figure = Figure(figsize=(1.75 * columns, 2.25 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, mistake in zip(axes, found, strict=False):
        gray = mistake.picture.shape[-1] == 1
        axis.imshow(mistake.picture[..., 0] if gray else mistake.picture, cmap="gray" if gray else None, vmin=0, vmax=1)
        said = f"said {short(mistake.predicted, 14)} {mistake.confidence:.0%}"
        axis.set_title(f"is {short(mistake.true, 24)}", fontsize=8.5, loc="left", pad=13, color=BLUE, **PLAIN)
        axis.text(0, 1.03, said, fontsize=8.5, transform=axis.transAxes, color=VERMILLION, in_layout=False, **PLAIN)
    for axis in figure.axes:
        axis.axis("off")
    return figure


def falls(metric: str) -> bool:
    """Whether less is better."""
    return metric.rpartition("/")[2] in {"loss", "per", "wer", "cer", "mae", "mse", "rmse", "lpips"}


def dots(points: Points) -> str:
    return "o" if len(points) == 1 else "None"  # a single point is no line


def short(name: str, most: int = 22) -> str:
    """A name with its middle left out where it is too long."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def labels(names: Sequence[str]) -> list[str]:
    """Names short enough for an axis, numbered where they would look the same."""
    shown = [short(name) for name in names]
    return shown if len(set(shown)) == len(set(names)) else [f"{i} {short(name, 18)}" for i, name in enumerate(names)]


def percent(share: float | np.floating) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, color="#DDDDDD", linewidth=0.7)
    axis.set_axisbelow(True)
