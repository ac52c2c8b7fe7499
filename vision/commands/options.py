"""Options of the commands that are no trainings: argparse, with errors in one line and without abbreviations."""

from __future__ import annotations

import argparse
import re
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
