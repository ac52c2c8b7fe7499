"""What the parser refuses: options beside those of the task, names that run code."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_dummies import failing

from vision import cli

pytestmark = pytest.mark.usefixtures("workplace")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that `vision fit` prints for these options, beside a config that is right."""
    message = failing(["fit", "--config", "tiny.yaml", *options], 2, capsys)
    assert not Path("runs").exists()
    return message.removeprefix("error: ")


@pytest.mark.parametrize(
    "option",
    [
        "--optimizer=torch.optim.SGD",
        "--optimizer.lr=0.5",
        "--lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau",
        "--lr_scheduler.interval=step",
    ],
)
def test_what_a_task_decides_is_no_option_beside_it(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """PL #17800, #12759: --optimizer was ignored, or went over the task's own; PL #15340, #10850, #3869: a scheduler by step or
    on a plateau could not be set so. The options of a task (--model.lr) are the one way, and another is not passed over."""
    assert refused(capsys, option).startswith(f"unknown option {option.partition('=')[0]}")


def test_no_config_is_read_unasked() -> None:
    """PL #11991: default config files were ignored for subcommands. There are none: what is not named is not read."""
    for name in ("config.yaml", "fit.yaml", "vision.yaml"):
        Path(name).write_text("trainer: {accumulate_grad_batches: 9}\nfit: {trainer: {accumulate_grad_batches: 9}}")
    assert cli.build(["--config", "tiny.yaml"]).trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize("name", ["torch.load", "torch.hub.load", "torch.jit.load", "subprocess.Popen"])
def test_a_config_names_nothing_that_runs_code(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtune #2971, #2973: any name in a config was called; jsonargparse #959, #960 can refuse, and only warns by itself."""
    assert refused(capsys, f"--model.net={name}").startswith(f"model.net: {name} is refused")


def test_sharding_on_a_cpu_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """PL #21812: FSDP needs a GPU; Lightning's own rule."""
    assert "`fsdp` requires a GPU" in refused(capsys, "--trainer.strategy=fsdp", "--trainer.accelerator=cpu")


@pytest.mark.parametrize("outer", ["model", "model.net"])
def test_null_is_null_however_deep_it_stands(outer: str) -> None:
    """jsonargparse hands a nested null on as the text None, and said that no class has this name; in a file null works."""
    nets = ["--model.net=cli_dummies.Wrapped"] * (outer == "model.net") + [f"--{outer}.net=cli_dummies.PlainNet"]
    for value, kind in (("null", "Identity"), ("cli_dummies.Unit", "Unit")):
        task = cli.build(["--config", "tiny.yaml", *nets, f"--{outer}.net.unit={value}"]).model
        assert type(task.net.layers[1]).__name__ == kind
