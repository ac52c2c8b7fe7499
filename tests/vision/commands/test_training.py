"""Whole runs on a net of a few weights: folders, records, what comes after training, which checkpoints are kept."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cli_dummies import CONFIG, failing, fit, load, saved_config, steps
from lightning.pytorch.callbacks import ProgressBar

from vision import cli
from vision.callbacks import Pictures, TrainingHealth
from vision.cli import main
from vision.commands import trainer_cli

pytestmark = pytest.mark.usefixtures("workplace")

# Folders


def test_a_run_writes_into_its_own_folder_only(tmp_path: Path) -> None:
    fit()
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "runs"}
    names = {str(path.relative_to("runs/tiny/1")) for path in Path("runs/tiny/1").rglob("*") if path.is_file()}
    assert {"config.yaml", "metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"} <= names
    columns = next(csv.reader(Path("runs/tiny/1/metrics.csv").read_text().splitlines()))
    assert {"train/loss", "val/loss", "val/accuracy", "epoch", "step"} <= set(columns)


def test_every_run_draws_tells_and_watches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """PL #15256: `callbacks+=` in a config drops Lightning's defaults; these are in the code, and stay."""
    monkeypatch.setattr(trainer_cli, "DEFAULT_CALLBACKS", (*trainer_cli.DEFAULT_CALLBACKS, Pictures))
    fit("--trainer.callbacks+=vision.callbacks.EMA")
    assert Path("runs/tiny/1/report.html").exists()
    assert "test accuracy" in capsys.readouterr().out
    assert "averaging_state" in load("runs/tiny/1/checkpoints/last.ckpt")


def test_a_callback_in_the_config_replaces_the_default_one() -> None:
    built = cli.build(
        ["--config", "tiny.yaml", "--trainer.callbacks+=vision.callbacks.TrainingHealth", "--trainer.callbacks.on_nonfinite=skip"]
    )
    health = [callback for callback in built.trainer.callbacks if isinstance(callback, TrainingHealth)]
    assert [callback.on_nonfinite for callback in health] == ["skip"]


@pytest.mark.parametrize(
    ("options", "bars"), [([], 1), (["--trainer.callbacks+=TQDMProgressBar"], 1), (["--trainer.enable_progress_bar=false"], 0)]
)
def test_there_is_one_progress_bar_at_most(options: list[str], bars: int) -> None:
    built = cli.build(["--config", "tiny.yaml", "--trainer.enable_progress_bar=true", *options])
    assert sum(isinstance(callback, ProgressBar) for callback in built.trainer.callbacks) == bars


def test_a_second_run_leaves_the_first_alone() -> None:
    """PL #17115, torchgeo #1621: the second run refused to overwrite the first one's config, or overwrote its files."""
    fit()
    before = {path: path.read_bytes() for path in Path("runs/tiny/1").rglob("*") if path.is_file()}
    fit("--model.lr=0.5")
    assert {path: path.read_bytes() for path in before} == before
    assert saved_config(2)["model"]["init_args"]["lr"] == 0.5


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit("--trainer.fast_dev_run=true")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_chosen_folder_is_used_and_not_overwritten() -> None:
    fit("--trainer.default_root_dir=mine")
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    assert Path("mine/checkpoints/last.ckpt") in before
    fit("--trainer.default_root_dir=mine")
    assert Path("mine/1/checkpoints/last.ckpt").exists()
    assert {path: path.read_bytes() for path in before} == before
    assert not Path("runs").exists()


@pytest.mark.parametrize("logger", ["false", "lightning.pytorch.loggers.CSVLogger"])
def test_a_chosen_logger_is_respected(logger: str) -> None:
    """PL #17115 happens with logger=False; #7679, #7675: a logger's own config.yaml is not touched."""
    extra = ["--trainer.logger.save_dir=logs"] if "." in logger else []
    fit(f"--trainer.logger={logger}", *extra)
    assert Path("runs/tiny/1/config.yaml").exists()
    assert not Path("runs/tiny/1/metrics.csv").exists()
    assert Path("logs").exists() == ("." in logger)


def test_a_run_that_cannot_begin_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    message = failing(
        ["fit", "--config", "tiny.yaml", "--data.fail", "pictures/ holds no pictures; give a folder of them"], 2, capsys
    )
    assert message == "error: pictures/ holds no pictures; give a folder of them"
    assert not Path("runs").exists()


@pytest.mark.parametrize("option", ["max_epochs", "max_steps"])
def test_a_training_of_no_steps_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would test the model as it was built, and look like a result."""
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config=tiny.yaml", f"--trainer.{option}=0"])
    assert f"trainer.{option}=0 trains nothing; use 1 or more" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_folder_without_config_is_named_after_the_task() -> None:
    options = ["--model=cli_dummies.TinyTask", "--model.net=cli_dummies.TinyNet", "--data=cli_dummies.TinyData"]
    main(["fit", *options, "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])
    assert Path("runs/tinytask/1/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_two_commands_at_once_get_two_folders() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "vision", "fit", "--config", "tiny.yaml"]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == steps("runs/tiny/2/checkpoints/last.ckpt") == 8


@pytest.mark.slow
def test_two_processes_of_one_run_share_a_folder() -> None:
    """PL #8003: a race between the processes of a run for its config file; #21277: with spawned ones."""
    options = ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.max_epochs=1"]
    command = [sys.executable, "-W", "ignore", "-m", "vision", "fit", "--config", "tiny.yaml", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["1"]
    files = {str(path.relative_to("runs/tiny/1")) for path in Path("runs/tiny/1").rglob("*") if path.is_file()}
    assert {"config.yaml", "metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"} <= files
    assert "config.2.yaml" not in files
    assert done.stderr.count("run folder:") == 1


# Records


def test_the_saved_config_runs_again_as_it_is() -> None:
    fit("--model.lr=0.02", "--seed_everything=3")
    main(["fit", "--config", "runs/tiny/1/config.yaml"])
    first, second = load("runs/tiny/1/checkpoints/last.ckpt"), load("runs/tiny/2/checkpoints/last.ckpt")
    assert saved_config(1) == saved_config(2)
    assert saved_config(1)["seed_everything"] == 3
    assert all(torch.equal(first["state_dict"][name], second["state_dict"][name]) for name in first["state_dict"])


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_the_config_of_a_training_serves_the_other_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """PL #11463, #12302: the config of fit was refused by test."""
    fit()
    main([command, "--config", "runs/tiny/1/config.yaml", "--ckpt_path", "runs/tiny/1/checkpoints/best.ckpt"])
    assert saved_config(2) == saved_config(1)
    main(["fit", "--config", "runs/tiny/2/config.yaml"])
    assert steps("runs/tiny/3/checkpoints/last.ckpt") == 8


def test_the_seed_is_recorded_and_makes_runs_equal() -> None:
    fit()
    fit()
    assert saved_config()["seed_everything"] == 0
    first, second = (load(f"runs/tiny/{n}/checkpoints/last.ckpt")["state_dict"] for n in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_null_in_the_config_is_kept() -> None:
    """Without its null keys, a saved config would fall back to the defaults."""
    fit("--trainer.log_every_n_steps=null")
    assert saved_config()["trainer"]["log_every_n_steps"] is None


# After training


def test_fit_tests_the_best_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    assert "test/accuracy" in Path("runs/tiny/1/metrics.csv").read_text()


@pytest.mark.parametrize("options", [["--no-test"], ["--data=cli_dummies.NoTestData"]])
def test_fit_without_a_test(options: list[str]) -> None:
    fit(*options)
    assert "test/accuracy" not in Path("runs/tiny/1/metrics.csv").read_text()


def test_other_commands_without_a_checkpoint_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    fit(command="test")
    assert "no --ckpt_path: the model is used as its config builds it" in capsys.readouterr().err


def test_predictions_with_classes_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--model=cli_dummies.NamedTask", "--data=cli_dummies.NamedData")
    main(["predict", "--ckpt_path=best"])
    rows = list(csv.DictReader(Path("runs/tiny/2/predictions.csv").read_text().splitlines()))
    assert [row["picture"] for row in rows] == [f"thing {i}" for i in range(16)]
    assert {row["class_1"] for row in rows} == {"dull", "bright"}
    assert all(0.5 <= float(row["probability_1"]) <= 1 for row in rows)
    assert "predictions: runs/tiny/2/predictions.csv" in capsys.readouterr().out


def test_other_predictions_are_kept_as_they_are() -> None:
    fit()
    main(["predict", "--ckpt_path=best"])
    kept = sorted(Path("runs/tiny/2/predictions").iterdir())
    assert len(kept) == 4
    assert load(str(kept[0])).shape == (4, 2)


def test_a_task_of_ones_own_in_the_working_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script `vision` does not look there by itself, as `python -m vision` does."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_task.py").write_text("from cli_dummies import TinyTask\n\n\nclass MyTask(TinyTask):\n    pass\n")
    fit("--model=my_task.MyTask", "--trainer.fast_dev_run=true")


# Checkpoints


def test_checkpoints_hold_plain_values_and_two_are_kept() -> None:
    """PL #21757 and others: class instances in hyper-parameters make a checkpoint unreadable; PL #11451, #19613,
    gitter-lab/metl #12, EgoVerse #621: last-v1 piles up, and an old one is resumed."""
    fit("--trainer.max_epochs=4")
    assert sorted(path.name for path in Path("runs/tiny/1/checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert load("runs/tiny/1/checkpoints/last.ckpt")["epoch"] == 3


def test_last_is_newer_than_best_when_training_gets_worse() -> None:
    """openclimatefix/pvnet #544: save_last writes only together with a new best one."""
    fit("--model.lr=1e-9", "--trainer.max_epochs=3")
    assert steps("runs/tiny/1/checkpoints/best.ckpt") == 4
    assert steps("runs/tiny/1/checkpoints/last.ckpt") == 12


def test_the_task_says_what_best_means() -> None:
    fit("--model=cli_dummies.LossTask")
    callbacks = load("runs/tiny/1/checkpoints/best.ckpt")["callbacks"]
    assert any(state.get("monitor") == "val/loss" for state in callbacks.values())


def test_a_task_without_the_metric_keeps_last_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--model=cli_dummies.PlainTask")
    assert [path.name for path in Path("runs/tiny/1/checkpoints").iterdir()] == ["last.ckpt"]
    assert capsys.readouterr().err.count("no best.ckpt is kept: the validation logs no val/accuracy") == 1


def test_checkpoints_can_be_switched_off() -> None:
    fit("--trainer.enable_checkpointing=false")
    assert not list(Path("runs").rglob("*.ckpt"))


def test_ones_own_checkpoint_callback_does_not_collide() -> None:
    callback = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"filename": "each-{epoch}", "save_top_k": -1}}
    ]
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"callbacks": callback}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    fit()
    names = {path.name for path in Path("runs/tiny/1/checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "each-epoch=0.ckpt", "each-epoch=1.ckpt"}
