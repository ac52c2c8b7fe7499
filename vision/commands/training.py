"""`vision fit`, `validate`, `test` and `predict`: what can be told before Lightning is imported, then `TrainerCLI`."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.cli import COMMANDS, DONE
from vision.commands.config_files import check_configs, option_values, scalars_in
from vision.commands.messages import SHORT_NAME_PACKAGES
from vision.errors import UserError
from vision.runs import ROOT, checkpoints_in, newest_checkpoints, run_of, runs_in

if TYPE_CHECKING:
    from vision.commands.trainer_cli import TrainerCLI

HELP = """\
usage: vision {command} --config FILE [options]

{summary}.

  -c, --config FILE            a config; given twice, the second one goes over the first
  --model CLASS                the task, as in Classification or package.module.Class; its options: --model.lr 0.001
  --data CLASS                 the data, as in EmbeddedFashionMNIST; its options: --data.batch_size 64
  --trainer.max_epochs N       how long; also --trainer.max_steps N
  --trainer.accelerator NAME   auto, cpu, gpu, mps; with --trainer.devices N as many of them
  --trainer.precision NAME     32-true, bf16-mixed, 16-mixed, …
  --trainer.fast_dev_run true  one batch of everything, nothing written: does the config work?
  --trainer.default_root_dir D write into D instead of runs/<config>/<n>
  --seed_everything N          seed of all random numbers (0)
  --ckpt_path FILE             {checkpoint}
                               "last" and "best" mean the newest run of the config; alone, the run's own config is used
{own}  --print_config               print the whole config, and stop
  --help-all                   all options, {command}'s and the trainer's
  --model.help CLASS           the options of a class; also --data.help CLASS

Options go over the config. A run writes into a new folder runs/<config>/<n>/: config.yaml, checkpoints/, metrics.csv.
"""
CHECKPOINT = {"fit": "go on from this checkpoint, in a new run folder", "": "the checkpoint to use"}
NO_TEST = "  --no-test                    do not test the best checkpoint after training\n"


def fit(args: list[str]) -> int:
    """Trains, then tests."""
    return start("fit", args)


def validate(args: list[str]) -> int:
    """Measures on the validation data."""
    return start("validate", args)


def test(args: list[str]) -> int:
    """Measures on the test data."""
    return start("test", args)


def predict(args: list[str]) -> int:
    """Runs over the prediction data."""
    return start("predict", args)


def start(command: str, args: list[str]) -> int:
    """Shows the help, or runs the command."""
    if any(arg in {"-h", "--help"} for arg in args):
        summary = COMMANDS[command][0].capitalize()
        checkpoint = CHECKPOINT.get(command, CHECKPOINT[""])
        print(
            HELP.format(command=command, summary=summary, checkpoint=checkpoint, own=NO_TEST if command == "fit" else ""), end=""
        )
        return DONE
    run(command, ["--help" if arg == "--help-all" else arg for arg in args])
    return DONE


def run(command: str, args: Sequence[str] | dict[str, Any], *, run: bool = True) -> TrainerCLI:
    """Checks the options, then builds and runs.

    Args:
        command: fit, validate, test or predict.
        args: options as on the command line, or a config as a dict.
        run: False builds model, data and trainer only.

    Raises:
        UserError: a mistake in the options or the config.
    """
    if isinstance(args, dict):
        words, configs, tests = _strings_in(args), [], True
    else:
        tests = "--no-test" not in args
        args = [arg for arg in args if arg != "--no-test" or command != "fit"]
        refuse_without_value(args)
        args = with_run_config(args)
        configs = check_configs(args)
        words = {*scalars_in(configs), *(part for arg in args for part in arg.split("="))}
    if os.getcwd() not in sys.path:  # a task of one's own in the working directory; last, so that it hides no package
        sys.path.append(os.getcwd())
    if sys.stderr.isatty():
        print("loading torch and lightning …", file=sys.stderr)
    from vision.commands.allocator import keep_freed_memory
    from vision.commands.quiet import quiet
    from vision.commands.trainer_cli import TrainerCLI

    if run:
        keep_freed_memory()

    import_short_names(words)
    with quiet(training=command == "fit"):
        return TrainerCLI(command, args, configs=configs, run=run, test=tests)


def refuse_without_value(args: Sequence[str]) -> None:
    """The parser would name only the first part of the option.

    Raises:
        UserError: an option of a model, of data or of the trainer stands without its value.
    """
    for arg, after in itertools.pairwise([*args, "--"]):
        if arg.startswith("--") and "." in arg and "=" not in arg and not arg.endswith(".help") and after.startswith("--"):
            raise UserError(f"{arg} needs a value")


def with_run_config(args: Sequence[str]) -> list[str]:
    """Adds the config that a checkpoint was trained with, when the options name a checkpoint and no config or model.

    Raises:
        UserError: there is no such checkpoint, or no config beside it.
    """
    given = option_values(args, "--ckpt_path")
    if not given or option_values(args, "--config", "-c", "--model"):
        return list(args)
    checkpoint = _newest(given[-1]) if given[-1] in {"last", "best"} else Path(given[-1])
    if checkpoint.is_dir():
        checkpoint = next(iter(checkpoints_in(checkpoint)), checkpoint / "last.ckpt")
    if not checkpoint.exists():
        raise UserError(f"checkpoint {checkpoint} does not exist; give a file, or a config with --config")
    folder = run_of(checkpoint)
    if folder is None:
        raise UserError(f"beside {checkpoint} lies no config.yaml; give the config it was trained with: --config FILE")
    print(f"config: {folder / 'config.yaml'}", file=sys.stderr)
    return ["--config", str(folder / "config.yaml"), *args]


def _newest(name: str) -> Path:
    """The newest `last` or `best` checkpoint of any config."""
    parents = [folder for folder in ROOT.iterdir() if runs_in(folder)] if ROOT.is_dir() else []
    first = [path for parent in parents for path in list(newest_checkpoints(parent, name))[:1]]
    if not first:
        raise UserError(f"--ckpt_path {name}: there is no run in {ROOT}/; train first: vision fit --config FILE")
    return max(first, key=lambda path: path.stat().st_mtime_ns)


def import_short_names(words: set[str]) -> None:
    """Imports what the options and configs name without its package (`model: Classification`), so that the parser finds it."""
    names = {word for word in words if word.isidentifier() and word[0].isupper()}
    for package in SHORT_NAME_PACKAGES if names else ():
        module = importlib.import_module(package)
        for name in names & set(getattr(module, "__all__", ())):
            getattr(module, name)


def _strings_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(_strings_in, value.values())) if value else set()
    if isinstance(value, (list, tuple)):
        return set().union(*map(_strings_in, value)) if value else set()
    return {value} if isinstance(value, str) else set()
