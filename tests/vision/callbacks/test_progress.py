from __future__ import annotations

import io
import math
import re
from unittest.mock import Mock

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from vision.callbacks import progress
from vision.callbacks.progress import Pace, Progress, batches_left, count, validations_left
from vision.callbacks.run import clock


@pytest.fixture
def bar(monkeypatch):
    """Makes a Progress that draws at every batch into a string."""

    def make(*, terminal: bool, width: int = 120) -> Progress:
        monkeypatch.setattr(progress, "INTERVAL", 0.0)
        made = Progress()
        made.console = Console(file=io.StringIO(), force_terminal=terminal, width=width, legacy_windows=False)
        return made

    return make


def text(bar: Progress) -> str:
    return bar.console.file.getvalue()


def screen(output: str) -> list[str]:
    """What is left on the screen: carriage returns, erased lines and cursor movements carried out."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1] or 1)
        elif token.endswith("2K"):
            lines[row] = ""
        elif not token.startswith("\x1b") and token != "\r":
            lines[row] += token
    return [line for line in lines if line.strip()]


EPOCH = r"epoch {}/2  loss \d\.\d{{4}}  val loss \d\.\d{{4}}  val accuracy \d\.\d{{4}}  [\d,]+ pictures/s"


def test_one_plain_line_an_epoch_where_there_is_no_terminal(task, data, trainer, bar):
    shown, module = bar(terminal=False), task()
    run = trainer(shown, enable_progress_bar=True, max_epochs=2)
    run.fit(module, datamodule=data())
    run.test(module, datamodule=data(), verbose=False)
    lines = text(shown).splitlines()
    assert "\x1b" not in text(shown)
    assert len(lines) == 3
    assert re.fullmatch(EPOCH.format(1) + r"  \d+:\d\d left", lines[0])
    assert re.fullmatch(EPOCH.format(2), lines[1])
    assert re.fullmatch(r"test: 24 pictures in 0:0\d \([\d,]+ pictures/s\)", lines[2])


def test_values_are_those_of_the_epoch(task, data, trainer, bar):
    shown, losses = bar(terminal=False), []
    spy = Callback()
    spy.on_train_batch_end = lambda trainer, pl_module, outputs, *_: losses.append(outputs["loss"].item() * 2)
    run = trainer(shown, spy, enable_progress_bar=True, accumulate_grad_batches=2)
    run.fit(task(), datamodule=data())
    line = text(shown)
    assert f"loss {sum(losses) / len(losses):.4f}" in line  # the loss itself, not Lightning's half of it
    assert f"val accuracy {run.callback_metrics['val/accuracy'].item():.4f}" in line


def test_a_bar_on_a_terminal_leaves_the_same_lines(task, data, trainer, bar):
    shown = bar(terminal=True)
    trainer(shown, enable_progress_bar=True, max_epochs=2, num_sanity_val_steps=1).fit(task(), datamodule=data())
    output = text(shown)
    drawn = [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", line) for line in output.split("\r")]
    assert any(
        re.search(r"epoch 2/2 train .* +3/6 \d+:\d\d left  loss \d\.\d{4}  val accuracy \d\.\d{4}  [\d,]+ pictures/s", d)
        for d in drawn
    )
    assert any(re.search(r"epoch 1/2 val   .* +3/6 ", d) for d in drawn)
    left = screen(output)
    assert [line.split("  ")[0] for line in left] == ["epoch 1/2", "epoch 2/2"]
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")  # the cursor is given back
    assert all("\n" not in d.rstrip("\n") for d in drawn if "epoch" in d and "val accuracy" not in d)


def test_a_narrow_terminal_gets_one_line_too(task, data, trainer, bar):
    shown = bar(terminal=True, width=80)
    trainer(shown, enable_progress_bar=True, max_epochs=2).fit(task(), datamodule=data())
    widths = [len(re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", line)) for line in re.split(r"[\r\n]", text(shown)) if "train" in line]
    assert max(widths) <= 80


def test_an_error_gives_the_terminal_back(task, data, trainer, bar):
    shown, module = bar(terminal=True), task()
    module.on_validation_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer(shown, enable_progress_bar=True).fit(module, datamodule=data())
    assert shown.bar is None
    assert screen(text(shown)) == []
    assert text(shown).endswith("\x1b[2K")
    assert text(shown).count("\x1b[?25l") == text(shown).count("\x1b[?25h")


def test_epochs_without_validation_show_no_old_metric(task, data, trainer, bar):
    shown = bar(terminal=False)
    trainer(shown, enable_progress_bar=True, max_epochs=3, check_val_every_n_epoch=2).fit(task(), datamodule=data())
    assert ["val accuracy" in line for line in text(shown).splitlines()] == [False, True, False]


def test_the_metric_of_the_best_checkpoint_is_shown(task, data, trainer, bar, tmp_path):
    shown = bar(terminal=True)
    best = ModelCheckpoint(tmp_path / "checkpoints", monitor="val/loss")
    trainer(shown, best, enable_progress_bar=True, enable_checkpointing=True, max_epochs=2).fit(task(), datamodule=data())
    assert "left  loss" in text(shown)
    assert "val accuracy" not in text(shown)
    assert re.search(r"val loss \d\.\d{4}", text(shown))


def test_only_the_first_process_prints(task, data, trainer, bar):
    shown = bar(terminal=True)
    shown.setup(Mock(spec=Trainer, is_global_zero=False), task(), "fit")
    assert not shown.enabled
    shown.print("x")
    run = trainer(shown, enable_progress_bar=True)
    shown.setup = lambda *_, **__: None
    run.fit(task(), datamodule=data())
    assert text(shown) == ""


def test_the_pictures_of_all_processes_are_counted_not_the_first_ones_times_their_number(task, data, trainer, bar, monkeypatch):
    """Their shares differ: one of 2 processes had 1,100 of 2,000 sequences, and 2,200 were told."""
    shown, module = bar(terminal=False), task()
    run = trainer(shown, enable_progress_bar=True)
    monkeypatch.setattr(run.strategy, "reduce", lambda own, reduce_op: own + 20)  # what another process has seen
    run.validate(module, datamodule=data(), verbose=False)
    assert re.fullmatch(r"validate: 44 pictures in .*", text(shown).splitlines()[-1])


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_other_stages(task, data, trainer, bar, stage):
    shown, module = bar(terminal=True), task()
    module.predict_step = lambda batch, batch_idx: batch[1]
    getattr(trainer(shown, enable_progress_bar=True), stage)(module, datamodule=data())
    assert re.search(rf"{stage} .*6/6", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text(shown)))
    assert re.fullmatch(rf"{stage}: 24 pictures in .*", screen(text(shown))[-1])


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_pace_leaves_out_the_first_batch_and_the_validations():
    clock = Clock()
    pace = Pace(clock)
    clock.time = 60.0  # workers start, kernels compile
    pace.step(8)
    assert pace.left(10, 0) is None
    for _ in range(4):
        clock.time += 0.5
        pace.step(8)
    assert pace.speed == pytest.approx(16)
    assert pace.left(10, 0) == pytest.approx(5)
    assert pace.left(10, 2, validation_batches=6) == pytest.approx(5 + 2 * 1.0)  # not timed yet: a third of a training batch each
    clock.time += 30
    pace.validated(30)
    clock.time += 0.5
    pace.step(8)
    assert pace.speed == pytest.approx(16)
    assert pace.left(10, 2.5) == pytest.approx(5 + 75)
    assert pace.left(math.inf, 1) is None


def state(**values) -> Trainer:
    defaults = {"max_epochs": 3, "max_steps": -1, "current_epoch": 0, "global_step": 0, "num_training_batches": 10}
    defaults |= {"accumulate_grad_batches": 1, "val_check_batch": 10, "check_val_every_n_epoch": 1, "enable_validation": True}
    return Mock(spec=Trainer, **(defaults | values))


@pytest.mark.parametrize(
    ("values", "batch", "batches", "validations"),
    [
        ({}, 4, 26, 3),
        ({"current_epoch": 2}, 10, 0, 0),  # the last validation is running
        ({"max_epochs": -1, "max_steps": 6, "global_step": 2, "accumulate_grad_batches": 2}, 4, 8, 1),
        ({"max_epochs": 100, "max_steps": 25, "current_epoch": 1, "global_step": 15}, 5, 10, 1),
        ({"max_epochs": -1}, 4, math.inf, 0),
        ({"num_training_batches": math.inf, "val_check_batch": math.inf}, 4, math.inf, 0),
        ({"val_check_batch": 5}, 4, 26, 6),
        ({"val_check_batch": 5}, 5, 25, 5),
        ({"check_val_every_n_epoch": 2}, 4, 26, 1),
        ({"check_val_every_n_epoch": None, "val_check_batch": 15}, 4, 26, 2),
        ({"enable_validation": False}, 4, 26, 0),
    ],
)
def test_what_is_still_to_come(values, batch, batches, validations):
    assert batches_left(state(**values), batch) == batches
    assert validations_left(state(**values), batch) == validations


def test_the_time_left_is_that_of_the_whole_run(task, data, trainer, bar, monkeypatch):
    """With batches of exactly 2 s and validations of no time, the end of epoch 1 of 5 leaves 4 x 6 x 2 s."""
    clock, shown = Clock(), bar(terminal=False)
    monkeypatch.setattr(progress, "Pace", lambda: Pace(clock))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    tick = Callback()
    tick.on_train_batch_start = lambda *_: setattr(clock, "time", clock.time + 2)
    trainer(shown, tick, enable_progress_bar=True, max_epochs=5).fit(task(), datamodule=data())
    lines = text(shown).splitlines()
    assert lines[0].endswith("2 pictures/s  0:48 left")
    assert lines[3].endswith("2 pictures/s  0:12 left")
    assert lines[4].endswith("2 pictures/s")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (760, "12:40"), (11109, "3:05:09"), (187200, "2 d 04:00")]
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown


def test_count_finds_the_pictures():
    assert count((torch.zeros(5, 3, 2, 2), ["a"] * 5)) == 5
    assert count({"images": [torch.zeros(2, 1)]}) == 2
    assert count(("x", 3)) == 0
