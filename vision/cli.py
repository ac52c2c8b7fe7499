"""The front of the command line: which commands there are, and what a user sees when one of them fails.

Nothing heavy is imported here, so that `vision --help` and `vision --version` answer at once. A command is one line
in `COMMANDS`; its module is imported when it is asked for.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vision.errors import UserError, is_out_of_memory

if TYPE_CHECKING:
    from vision.commands.trainer_cli import TrainerCLI

# name -> (one line of help, "module:function"); the function takes the arguments after the name and returns an exit code
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("train a model from a config, then test it", "vision.commands.training:fit"),
    "validate": ("measure a checkpoint on the validation data", "vision.commands.training:validate"),
    "test": ("measure a checkpoint on the test data", "vision.commands.training:test"),
    "predict": ("run a checkpoint over the prediction data of a config", "vision.commands.training:predict"),
    "classify": ("name what is on pictures, with a checkpoint", "vision.commands.classify:classify"),
    "restore": ("write restored copies of pictures, with a checkpoint", "vision.commands.restore:restore"),
    "translate": ("write the target of each line of text, with a checkpoint", "vision.commands.translate:translate"),
    "check-data": ("find what is wrong with a folder of pictures", "vision.commands.check_data:check_data"),
    "models": ("list the models by name", "vision.commands.models:models"),
    "bench": ("time ours against timm, torchvision, transformers and others", "vision.commands.bench:bench"),
    "weights": ("tell what a file of weights holds, or convert it", "vision.commands.weights:weights"),
}

MEMORY_ADVICE = {"translate": "a smaller --beam, --batch-size or --max-length"}  # of other commands: they read pictures

DONE, SOME_FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        args: what follows `vision` on the command line; `sys.argv[1:]` when None.

    Returns:
        0, when all is done.

    Raises:
        SystemExit: with the exit code when it is not 0. 1: some of the work failed, each part named; 2: wrong use,
            one line on standard error (with a traceback if VISION_TRACEBACK=1); 130: Ctrl-C; 143: SIGTERM.
        Exception: an error that is nobody's wrong use (a bug) keeps its traceback.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text, and a terminal may lack a character
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else DONE if stop.code is None else SOME_FAILED
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        print(interrupt.args[0] if interrupt.args else "stopped", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # `vision … | head`: nobody reads on; a later flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = SOME_FAILED
    except Exception as error:
        message = user_message(error, arguments[0] if arguments else None)
        if message is None:
            raise
        if os.environ.get("VISION_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"error: {message}", file=sys.stderr)
        code = WRONG_USE
    if code != DONE:
        raise SystemExit(code)
    return DONE


def build(args: Sequence[str] | dict[str, Any], command: str = "fit") -> TrainerCLI:
    """The model, the data and the trainer of a config, without running anything: for notebooks and launchers.

    Args:
        args: options as on the command line (`["--config", "configs/x.yaml"]`), or a config as a dict.
        command: which command's options `args` holds.

    Returns:
        an object with `.model`, `.datamodule`, `.trainer` and `.config`. Its trainer has a run folder of its own.

    Raises:
        UserError: the options or the config are wrong.
    """
    return import_module("vision.commands.training").run(command, args, run=False)


def user_message(error: BaseException, command: str | None = None) -> str | None:
    """One line for an error that the user can mend, None for any other error.

    An error raised in a loader's worker process arrives as a text with the worker's traceback in it: its last line counts.

    Args:
        error: what a command raised.
        command: which; the advice depends on it.
    """
    text = str(error)
    from_worker = re.match(r"Caught \w+ in \w+ worker process", text)
    if from_worker:
        last = re.search(r"^vision\.errors\.\w+: (.+)\Z", text, flags=re.MULTILINE | re.DOTALL)
        return " ".join(last[1].split()) if last else None
    if isinstance(error, UserError) or (isinstance(error, ValueError) and raised_by_us(error)):
        return " ".join(text.split())
    if is_out_of_memory(error):
        told = f" ({text.splitlines()[0]})" if text else ""
        advice = MEMORY_ADVICE.get(command or "", "smaller pictures or fewer at once")
        return text if text.startswith("out of memory") else f"out of memory{told}; try {advice}"
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        place = error.filename or "the run folder"
        return f"{place}: {os.strerror(error.errno)}; free some space or choose another --trainer.default_root_dir"
    return None


def raised_by_us(error: BaseException) -> bool:
    """Whether `core` or `vision` itself refused something, not a library that they called."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").partition(".")[0] in {"core", "vision"}


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that is most like this one, None when none is near."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


def load_command(name: str) -> Callable[[list[str]], int]:
    """Imports the function of a command.

    Raises:
        UserError: there is no such command.
    """
    if name not in COMMANDS:
        guess = nearest(name, list(COMMANDS))
        hint = f"did you mean {guess}?" if guess else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name}; {hint} (vision --help lists them)")
    module, function = COMMANDS[name][1].split(":")
    return getattr(import_module(module), function)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in {"-h", "--help", "help"}:
        print(_help())
        return DONE if args else WRONG_USE
    if args[0] in {"--version", "-V"}:
        print(f"vision {_version()}")
        return DONE
    if args[0].startswith("-"):
        raise UserError(f"unknown option {args[0]} before the command; write the command first: vision fit {args[0]} …")
    return load_command(args[0])(args[1:])


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vision COMMAND [options]",
            "",
            "Vision Transformers: train, measure and use them.",
            "",
            "commands:",
            *lines,
            "",
            "vision COMMAND --help tells a command's options; vision --version the version.",
            "Also as `lightning COMMAND` and `python -m vision COMMAND`. VISION_TRACEBACK=1 shows where an error comes from.",
        ]
    )


def _version() -> str:
    try:
        return version("vision-core")
    except PackageNotFoundError:  # run from the sources, not installed
        return "unknown (not installed)"
