"""Options of the commands that are no trainings: argparse, with errors in one line and without abbreviations."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from vision.cli import nearest
from vision.errors import UserError


class OptionParser(argparse.ArgumentParser):
    """Raises UserError where argparse prints the usage and leaves the program.

    Args:
        command: name of the command.
        description: what it does, one sentence.
    """

    def __init__(self, command: str, description: str, **options: Any) -> None:
        super().__init__(prog=f"vision {command}", description=description, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:  # before argparse says what else is missing
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(self.explain(message))

    def explain(self, message: str) -> str:
        """One line with the option that was probably meant."""
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            name = found[1].partition("=")[0]
            guess = nearest(name, list(self._option_string_actions)) if name.startswith("-") else None
            return f"unknown option {name}; " + (f"did you mean {guess}?" if guess else f"{self.prog} --help lists them")
        if found := re.match(r"the following arguments are required: (.+)", message):
            return f"{found[1]} missing; {self.prog} --help tells how to use it"
        if found := re.match(r"argument (.+?): invalid \w+ value: '(.*)'", message):
            return f"{found[1]}={found[2]} is not a number"
        return message.removeprefix("argument ")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
