"""Pictures of a run: curves, confusion, mistakes, and the report that holds them together."""

from __future__ import annotations

import csv
import datetime
import heapq
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure
from torch import Tensor

from vision.callbacks import figures, machine, report
from vision.callbacks.confusion import class_rows, confusion, wilson
from vision.callbacks.restoration import before_and_after
from vision.callbacks.run import best, clock, loaded, resume_command, shown, test_command, use_command, watched, writes

DPI = 110
TESTED = ("confusion_matrix", "per_class", "mistakes")  # the figures of a test
ROWS = 100  # classes in the report's table, the worst ones when there are more


class Pictures(Callback):
    """Draws `figures/*.png` and writes `report.html` into the run folder, at the end of training and of a test.

    Learning curves come from the run's `metrics.csv`. For a task with `classes` and `test_confusion` (rows: true classes) the
    test adds the confusion matrix, the classes one by one and, if `test_step` returns `{"probabilities": b k, "labels": b}`,
    the mistakes made with the greatest confidence (with several processes: of the first one's pictures). A task adds own
    figures by a method `figures(trainer) -> dict[str, matplotlib.figure.Figure]`, asked at both ends; a name becomes that of
    the file and, with spaces for underscores, of the section. A restorer's `panels` are drawn before and after at each
    validation, and what a test measured is told by `tables() -> {title: (columns, rows)}`. A figure that fails is a warning,
    never the end of a run.

    Args:
        mistakes: how many of them are shown.
    """

    def __init__(self, mistakes: int = 24) -> None:
        self.mistakes = Mistakes(mistakes)
        self.drawn: dict[str, Path] = {}
        self.trained: list[tuple[str, object]] = []
        self.started = 0.0
        self.weights: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = time.time()
        self.drawn, self.trained = {}, []
        self.weights = [] if trainer.ckpt_path else loaded(pl_module)  # a checkpoint's have replaced them

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = {"training": trainer.train_dataloader, "validation": trainer.val_dataloaders}
        unit = getattr(pl_module, "unit", "pictures")
        self.trained = [(f"{name} {unit}", f"{n:,}") for name, loaders in parts.items() if (n := samples(loaders))]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not writes(trainer):
            return
        length = f"{trainer.global_step:,} steps, {trainer.current_epoch:,} epochs, {clock(time.time() - self.started)}"
        self.trained.append(("trained for", length))
        self.draw(trainer, "learning_curves", learning_curves, trainer, watched(trainer, pl_module))
        self.draw_own(trainer, pl_module)
        self.write(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if writes(trainer) and not trainer.sanity_checking:
            self.draw_panels(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mistakes.found.clear()
        self.weights = self.weights if trainer.ckpt_path else loaded(pl_module)
        self.drawn = {name: path for name, path in self.drawn.items() if name not in TESTED}

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        told = isinstance(outputs, dict) and {"probabilities", "labels"} <= outputs.keys() and isinstance(batch, (tuple, list))
        if told and writes(trainer):
            self.mistakes.add(batch[0], outputs["probabilities"], outputs["labels"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not writes(trainer):
            return
        counts = confusion(pl_module)
        if counts is not None:
            task: Any = pl_module
            classes = task.classes
            self.draw(trainer, "confusion_matrix", figures.confusion_matrix, counts, classes)
            self.draw(trainer, "per_class", figures.per_class, counts, classes)
            if self.mistakes.found:
                self.draw(trainer, "mistakes", lambda: figures.mistakes(self.mistakes.named(classes, task.preprocessing)))
        self.draw_own(trainer, pl_module)
        self.write(trainer, pl_module)

    def draw_own(self, trainer: Trainer, task: Any) -> None:
        """The figures that the task itself knows of."""
        self.draw_panels(trainer, task)
        if not hasattr(task, "figures"):
            return
        try:
            own = task.figures(trainer)
        except Exception as error:
            rank_zero_warn(f"the figures of {type(task).__name__} were not drawn: {reason(error)}")
            return
        for name in own:
            self.draw(trainer, name, own.__getitem__, name)

    def draw_panels(self, trainer: Trainer, task: Any) -> None:
        if getattr(task, "panels", None):
            self.draw(trainer, "before_and_after", before_and_after, task.panels, task.before)

    def draw(self, trainer: Trainer, name: str, make: Callable[..., Figure | None], *inputs: Any) -> None:
        """Draws what `make` makes of the inputs, if anything."""
        path = Path(trainer.default_root_dir) / "figures" / f"{name}.png"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing")  # the report has the name in letters
                figure = make(*inputs)
                if figure is None:
                    return
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=DPI)
        except Exception as error:
            rank_zero_warn(f"{shown(path)} was not drawn: {reason(error)}")
            return
        self.drawn[name] = path

    # The report

    def write(self, trainer: Trainer, task: Any) -> None:
        path = Path(trainer.default_root_dir) / "report.html"
        temporary = path.with_name(".report.html.tmp")
        try:
            temporary.write_text(report.page(shown(trainer.default_root_dir), self.sections(trainer, task)), encoding="utf-8")
            temporary.replace(path)
        except Exception as error:
            rank_zero_warn(f"{shown(path)} was not written: {reason(error)}")

    def sections(self, trainer: Trainer, task: Any) -> Iterable[str]:
        counts = confusion(task) if trainer.state.fn == "test" else None
        yield report.heading(f"{type(task).__name__}: {shown(trainer.default_root_dir)}", *result(trainer, counts))
        yield report.section("Model and data", report.facts([*self.trained, *best_of(trainer), *self.model(trainer, task)]))
        yield report.section("Weights at the start", *map(report.code, self.weights))
        yield report.section("Learning curves", self.picture("learning_curves", "loss, validation metric and learning rate"))
        if counts is not None:
            yield report.section("Confusion", self.picture("confusion_matrix", "how often each class was taken for each other"))
            yield report.section(
                "Classes", self.picture("per_class", "share named right of each class"), class_table(counts, task)
            )
            yield report.section("Mistakes made with the greatest confidence", self.picture("mistakes", "wrongly named pictures"))
        for title, (columns, rows) in tables(trainer, task).items():
            yield report.section(title, report.table(columns, rows))
        for name in [name for name in self.drawn if name not in ("learning_curves", *TESTED)]:
            yield report.section(name.replace("_", " ").capitalize(), self.picture(name, name))
        yield report.section("Next", next_commands(trainer, task))
        yield report.section("Where it ran", report.facts(origin(trainer)), config_text(trainer))

    def picture(self, name: str, description: str) -> str:
        return report.picture(self.drawn[name], description) if name in self.drawn else ""

    def model(self, trainer: Trainer, task: Any) -> Iterable[tuple[str, object]]:
        card = task.card() if hasattr(task, "card") else {}
        spec = card.get("model", {})
        yield "model", written(spec) if spec else type(getattr(task, "model", task)).__name__
        yield "parameters", f"{sum(p.numel() for p in task.parameters()):,}"
        options = {name: value for name, value in task.hparams.items() if name != "model" and not name.startswith("_")}
        yield "task's options", ", ".join(f"{name}={value}" for name, value in options.items())
        data = getattr(trainer, "datamodule", None)
        if data is not None:
            batch = getattr(data, "batch_size", None)
            each = " in each process" if trainer.world_size > 1 else ""
            yield "data", type(data).__name__ + (f", batches of {batch}{each}" if batch else "")
        classes = getattr(task, "classes", [])
        yield "classes", f"{len(classes):,}: {', '.join(classes[:20])}{', …' if len(classes) > 20 else ''}" if classes else ""


class Mistakes:
    """The wrong answers with the highest probability, kept while a test runs.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.found: list[tuple[float, int, int, int, Tensor]] = []  # confidence, serial number, true, predicted, picture
        self.serial = 0

    def add(self, images: Float[Tensor, "b c h w"], probabilities: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> None:
        confidence, predicted = probabilities.float().max(dim=-1)
        wrong = (predicted != labels).nonzero()[:, 0]
        for i in wrong[confidence[wrong].argsort(descending=True)][: self.most].tolist():
            if len(self.found) == self.most and confidence[i] <= self.found[0][0]:
                break
            self.serial += 1
            entry = (
                confidence[i].item(),
                self.serial,
                int(labels[i]),
                int(predicted[i]),
                images[i].detach().float().cpu().clone(),
            )
            (heapq.heappush if len(self.found) < self.most else heapq.heapreplace)(self.found, entry)

    def named(self, classes: Sequence[str], preprocessing: dict[str, Any]) -> list[figures.Mistake]:
        """As `figures.Mistake`, most confident first, with the normalisation undone."""
        mean, std = (torch.tensor(preprocessing[name]).view(-1, 1, 1) for name in ("mean", "std"))
        return [
            figures.Mistake((image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy(), classes[true], classes[said], confidence)
            for confidence, _, true, said, image in sorted(self.found, key=lambda entry: -entry[0])
        ]


def tables(trainer: Trainer, task: Any) -> dict[str, Any]:
    """What the task has to tell of a test: title -> columns and rows."""
    return task.tables() if trainer.state.fn == "test" and hasattr(task, "tables") else {}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def learning_curves(trainer: Trainer, metric: str) -> Figure | None:
    history = read_history(trainer)
    wanted = {"train/loss", "train/loss_step", "train/loss_epoch", "val/loss", "train/lr", metric}
    return figures.learning_curves(history, metric) if history.keys() & wanted else None


def read_history(trainer: Trainer) -> dict[str, list[tuple[int, float]]]:
    """What was logged, as (step, value) for each name; empty without a CSVLogger."""
    history: dict[str, list[tuple[int, float]]] = {}
    for logger in trainer.loggers:
        if not isinstance(logger, CSVLogger):
            continue
        logger.save()
        path = Path(logger.log_dir) / "metrics.csv"
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ():
            step = int(float(row.pop("step") or 0))
            for name, value in row.items():
                if value:
                    history.setdefault(name, []).append((step, float(value)))
    return history


def samples(loaders: Any) -> int:
    """Samples behind a loader, or several; 0 where that is unknown. A data set of whole batches tells them as `sample_count`."""
    if isinstance(loaders, (list, tuple)):
        return sum(map(samples, loaders))
    try:
        return getattr(loaders.dataset, "sample_count", None) or len(loaders.dataset)
    except (AttributeError, TypeError):
        return 0


def result(trainer: Trainer, counts: Int[Tensor, "k k"] | None) -> tuple[str, str]:
    """The result in one sentence, and how sure it is."""
    if counts is not None:
        n, right = int(counts.sum()), int(counts.trace())
        low, high = wilson(right / n, n)
        interval = f"95% interval {low:.1%} to {high:.1%}: so far chance may reach in {n:,} pictures"
        return f"Test accuracy {right / n:.1%} (n = {n:,})", interval
    stage = "test/" if trainer.state.fn == "test" else "val/"
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(stage)}
    return ", ".join(f"{name.replace('/', ' ')} {value:.4f}" for name, value in metrics.items()), ""


def best_of(trainer: Trainer) -> list[tuple[str, object]]:
    found = best(trainer)
    return [(f"best {found.metric.replace('/', ' ')}", f"{found.value:.4f}, in {shown(found.path)}")] if found else []


def class_table(counts: Int[Tensor, "k k"], task: Any) -> str:
    rows = class_rows(counts, task.classes)
    cut = len(rows) > ROWS
    if cut:
        rows = sorted((row for row in rows if row.pictures), key=lambda row: row.right / row.pictures)[:ROWS]
    cells = [
        (
            row.name,
            f"{row.pictures:,}",
            f"{row.right / row.pictures:.1%}" if row.pictures else "–",
            f"{row.precision:.1%}" if row.precision == row.precision else "–",
            f"{row.taken_for} ({row.taken:,})" if row.taken else "–",
        )
        for row in rows
    ]
    table = report.table(("class", "test pictures", "named right", "right when named so", "most often taken for"), cells)
    return (report.text(f"The {ROWS} worst of {len(task.classes):,} classes.") if cut else "") + table


def next_commands(trainer: Trainer, task: Any) -> str:
    """What to type next, each with its purpose."""
    longer = resume_command(trainer)
    if longer and trainer.max_epochs and trainer.max_epochs > 0:
        longer += f" --trainer.max_epochs {2 * trainer.max_epochs}"
    commands = {"use it": use_command(trainer, task), "test it again": test_command(trainer), "train it further": longer}
    lines = [f"# {purpose}\n{command}" for purpose, command in commands.items() if command]
    return report.code("\n".join(lines)) if lines else ""


def written(value: Any) -> str:
    """A described model or part as one would write it: `ViT(dim=64, position=Learned(std=0.02))`."""
    if not (isinstance(value, dict) and "class_path" in value):
        return str(value)
    name, options = value["class_path"].rpartition(".")[2], value.get("init_args") or {}
    inside = ", ".join(f"{option}={written(v)}" for option, v in options.items())
    return f"{name}({inside})" if inside else name


def origin(trainer: Trainer) -> Iterable[tuple[str, object]]:
    yield "command", shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    yield "checkpoint", shown(trainer.ckpt_path) if trainer.ckpt_path else ""
    yield "date", datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    yield "hardware", machine.hardware(trainer)
    yield "precision", trainer.precision
    yield "versions", machine.versions()
    yield "commit", machine.commit()


def config_text(trainer: Trainer) -> str:
    path = Path(trainer.default_root_dir) / "config.yaml"
    return report.folded("config.yaml", report.code(path.read_text(encoding="utf-8"))) if path.is_file() else ""
