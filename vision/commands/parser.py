"""The parser of a config and its options: errors in one line, with the key that was probably meant."""

from __future__ import annotations

import contextlib
import inspect
import re
from importlib import import_module
from typing import Any, NoReturn

import jsonargparse
from lightning.pytorch.cli import LightningArgumentParser

from core import Position
from vision.commands.messages import one_line
from vision.errors import UserError

# What a config may not name, besides jsonargparse's own list (os, subprocess, pickle, builtins.eval, open, sockets, …)
DENIED = ("torch.load", "torch.hub", "torch.jit", "torch.ops", "torch.utils.cpp_extension")


def refuse_dangerous_names() -> None:
    """Makes the parser refuse what would run commands, open files or unpickle; by itself jsonargparse only warns.

    This is a rail, no sandbox. A config is code all the same: it names classes, and naming one imports its module.
    """
    jsonargparse.set_parsing_settings(import_path_denylist=list(DENIED))


class Parser(LightningArgumentParser):
    """Raises UserError with one line where jsonargparse prints the usage, fifty lines of it, and leaves the program."""

    def parse_args(self, *args: Any, **options: Any) -> Any:
        words, *rest = args or [options.pop("args", None)]
        if words is not None and not self.exit_on_error:  # an inner parser: the outer one hands its null on as Python's None
            words = [re.sub(r"^(--[^=]+=)None$", r"\1null", word) for word in words]
        return super().parse_args(words, *rest, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # an inner parser, that of one class: the outer one reports
            super().error(message, ex)
        raise UserError(one_line(message, self.known_keys)) from ex

    def known_keys(self, class_path: str | None) -> list[str]:
        """The keys that the constructor of a class accepts; with None, those of the command."""
        if class_path is not None:
            return keys_of(class_path)
        commands = self._subcommands_action
        parsers = commands.choices.values() if commands else [self]
        keys = {action.dest for parser in parsers for action in parser._actions}
        return sorted(key for key in keys - {"help", "print_config"} if not key.endswith(".help"))


def keys_of(class_path: str) -> list[str]:
    """The constructor options of a class, or the options of a function, those taken as **kwargs included."""
    with contextlib.suppress(Exception):  # a guess at what was meant is not worth a second error
        module, _, name = class_path.rpartition(".")
        target = getattr(import_module(module), name)
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        add = parser.add_class_arguments if inspect.isclass(target) else parser.add_function_arguments
        add(target, fail_untyped=False)
        keys = [action.dest for action in parser._actions if action.dest != "help" and not action.dest.endswith(".help")]
        given_by_model = {"site"} if inspect.isclass(target) and issubclass(target, Position) else set()
        return [key for key in keys if key.partition(".")[0] not in given_by_model]
    return []
