"""The front: answers at once, knows its commands, and turns a user's mistake into one line and an exit code."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vision import cli
from vision.cli import COMMANDS, main, user_message
from vision.errors import ImageError, UserError

HEAVY = {"torch", "lightning", "jsonargparse", "timm", "torchvision", "numpy", "matplotlib", "rich"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def command_that(action: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `vision fit` do something else."""

    def run(_: list[str]) -> int:
        if isinstance(action, BaseException):
            raise action
        return action

    monkeypatch.setattr(cli, "load_command", lambda name: run)


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    """anomalib #3535, pytorch #91856, torchchat #1347: --help took seconds because everything was imported first."""
    code = f"import sys; from vision.cli import main; main({args}); print(sorted({HEAVY} & set(sys.modules)))"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["fit", "--help"]])
def test_help_answers_within_half_a_second(args: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "vision", *args], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the processor: the clock on the wall tells of other programs too
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_names_each_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (summary, _) in COMMANDS.items():
        assert f"{name} " in out
        assert summary in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_exists_and_has_a_help_that_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: vision {name}" in capsys.readouterr().out


def test_without_a_command_the_help_is_shown_as_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage: vision COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["ift"], "error: unknown command ift; did you mean fit? (vision --help lists them)"),
        (["frobnicate"], "error: unknown command frobnicate; there are fit, validate,"),
        (
            ["--config", "x.yaml"],
            "error: unknown option --config before the command; write the command first: vision fit --config …",
        ),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(args)
    err = capsys.readouterr().err
    assert err.startswith(text)
    assert err.count("\n") == 1


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import vision

    main(["--version"])
    assert capsys.readouterr().out == f"vision {vision.__version__}\n"


def test_both_scripts_are_declared_for_the_same_program() -> None:
    """PL #20041: another package may install a `lightning` script over ours; `vision` and `python -m vision` always work."""
    from importlib.metadata import entry_points

    scripts = {
        entry.name: entry.value for entry in entry_points(group="console_scripts") if entry.value == "vision.__main__:main"
    }
    assert set(scripts) == {"vision", "lightning"}
    done = subprocess.run([sys.executable, "-m", "vision", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vision ")


def test_a_users_mistake_is_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(UserError("dim=50 does not split\n  over heads=3"), monkeypatch)
    monkeypatch.delenv("VISION_TRACEBACK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["fit"])
    assert capsys.readouterr().err == "error: dim=50 does not split over heads=3\n"


def test_the_traceback_is_shown_on_wish(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command_that(UserError("no pictures"), monkeypatch)
    monkeypatch.setenv("VISION_TRACEBACK", "1")
    with pytest.raises(SystemExit, match="2"):
        main(["fit"])
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: no pictures\n")


@pytest.mark.usefixtures("unchecked")
def test_what_core_refuses_is_one_line_wherever_it_is_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model built well may still refuse its first batch. (A library's ValueError is a bug and keeps its traceback.)"""
    from core import Shared, Site

    monkeypatch.setattr("vision.cli.load_command", lambda name: lambda args: Shared(Site(8, 2)))
    with pytest.raises(SystemExit, match="2"):
        main(["fit"])
    assert capsys.readouterr().err == "error: Shared holds a built position, got Site; name the kind itself\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("out of memory at step 3; try less"), "out of memory at step 3; try less"),
        (MemoryError(), "out of memory; try smaller pictures or fewer at once"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore"), "out of memory (DefaultCPUAllocator: can't"),
    ],
)
def test_a_full_memory_is_one_line(error: Exception, message: str) -> None:
    line = user_message(error)
    assert line is not None
    assert line.startswith(message)
    assert "\n" not in line


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), OSError(errno.EIO, "bad disk")])
def test_other_errors_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(error, monkeypatch)
    with pytest.raises(type(error)):
        main(["fit"])


@pytest.mark.parametrize(("action", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (1, 1), (2, 2)])
def test_exit_codes(action: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(action, monkeypatch)
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == code


@pytest.mark.parametrize("action", [0, SystemExit(0), SystemExit(None)])
def test_success_returns_0(action: object, monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(action, monkeypatch)
    assert main(["fit"]) == 0


def test_arguments_come_from_the_command_line_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vision", "--version"])
    main()
    assert capsys.readouterr().out.startswith("vision ")


def test_a_full_disk_is_one_line_wherever_it_is_met() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/1/metrics.csv")
    assert user_message(error) == (
        "runs/x/1/metrics.csv: No space left on device; free some space or choose another --trainer.default_root_dir"
    )


@pytest.mark.parametrize("error", [UserError("no such class"), ImageError("a/b.png", "cut short")])
def test_an_error_from_a_loaders_worker_is_one_line(error: UserError) -> None:
    """torch sends such an error over as a text with the worker's traceback, and an ImageError as a RuntimeError."""
    from torch._utils import ExceptionWrapper

    try:
        raise error
    except UserError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises((UserError, RuntimeError)) as caught:
        wrapper.reraise()
    assert user_message(caught.value) == str(error)


def test_a_bug_in_a_loaders_worker_keeps_its_traceback() -> None:
    from torch._utils import ExceptionWrapper

    try:
        raise ValueError("a bug")
    except ValueError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ValueError, match="a bug") as caught:
        wrapper.reraise()
    assert user_message(caught.value) is None


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(f"{sys.executable} -m vision --help | true", shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_names_that_are_no_text_can_be_told(encoding: str, tmp_path: Path) -> None:
    """A name in Latin-1, and a terminal without the characters of tables."""
    Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.png")).write_bytes(b"no picture")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    program = [sys.executable, "-m", "vision", "check-data", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, env=environment, check=False)
    assert b"caf\\udce9.png" in done.stdout
    assert (done.returncode, done.stderr) == (1, b"")
