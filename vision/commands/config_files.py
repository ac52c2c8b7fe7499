"""Looks at the options and config files of a command before anything heavy is imported: a mistake costs no waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from vision.cli import nearest
from vision.errors import UserError

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CONFIG_OPTIONS = ("--config", "-c")


def option_values(args: Sequence[str], *names: str) -> list[str]:
    """The values given to an option, as `--name value` or `--name=value`."""
    values = []
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name not in names:
            continue
        if equals:
            values.append(value)
        elif index + 1 < len(args):
            values.append(args[index + 1])
    return values


def check_configs(args: Sequence[str]) -> list[Path]:
    """The config files that the options name, each looked at.

    Raises:
        UserError: a file is missing, empty, not YAML, holds no keys, or holds a key twice.
    """
    files = [Path(value) for value in option_values(args, *CONFIG_OPTIONS)]
    for file in files:
        _check(file)
    return files


def scalars_in(files: Sequence[Path]) -> Iterator[str]:
    """Every plain value in the config files, as written."""
    for file in files:
        yield from (token.value for token in yaml.scan(_read(file), Loader) if isinstance(token, yaml.ScalarToken))


def _check(file: Path) -> None:
    try:
        root = yaml.compose(_read(file), Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"config {file}{place} is not YAML: {getattr(error, 'problem', None) or error}") from error
    if root is None:
        raise UserError(f"config {file} is empty; `vision fit --config … --print_config` prints a whole one")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(
            f"config {file} line {root.start_mark.line + 1} holds no keys; it starts like `model:`, `data:`, `trainer:`"
        )
    _refuse_twice(root, file, "")


def _refuse_twice(node: yaml.Node, file: Path, parent: str) -> None:
    """YAML readers let the last of two equal keys win in silence."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twice(item, file, parent)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line, name = key.start_mark.line + 1, f"{parent}{key.value}"
        if key.value in seen and key.value != "<<":
            raise UserError(f"config {file} has {name} twice (lines {seen[key.value]} and {line}); keep one")
        seen[key.value] = line
        _refuse_twice(value, file, f"{name}.")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        guess = _similar_file(file)
        raise UserError(f"config {file} does not exist" + (f"; did you mean {guess}?" if guess else "")) from None
    except IsADirectoryError:
        raise UserError(f"config {file} is a folder; give a YAML file" + _configs_in(file)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"config {file} is not a text file; give a YAML file in UTF-8") from error
    except OSError as error:
        raise UserError(f"config {file} cannot be read: {error}") from error


def _similar_file(file: Path) -> Path | None:
    if not file.parent.is_dir():
        return None
    guess = nearest(file.name, [other.name for other in file.parent.iterdir() if other.suffix in {".yaml", ".yml"}])
    return file.parent / guess if guess else None


def _configs_in(folder: Path) -> str:
    found = sorted(str(path) for path in folder.glob("*.yaml"))
    return f", such as {found[0]}" if found else ""
