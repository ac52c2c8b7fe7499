"""Turns what the config parser says about a mistake, which may be fifty lines, into one line that names key, value and fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from vision.cli import nearest

NOISE = re.compile(r"Expected a path but|Does not validate against any|Expected a <class 'NoneType'>|^Subtypes:|^Errors:")
TYPE_NAMES = {"NoneType": "null", "str": "text", "dict": "a mapping", "list": "a list", "bool": "true or false"}
# a class path or a key: what a parser of the options of that class, or of the whole command, accepts
KnownKeys = Callable[[str | None], Sequence[str]]


def one_line(message: str, known_keys: KnownKeys) -> str:
    """One line for a parser's message.

    Args:
        message: what the parser said.
        known_keys: gives the keys that a class (by class path), or the command (None), accepts.
    """
    message = message.strip()
    for pattern, explain in EXPLANATIONS:
        found = re.match(pattern, message, flags=re.DOTALL)
        if found:
            return explain(found, known_keys)
    key, class_path, reason = _innermost(message)
    if key is None:
        return " ".join(message.split())
    return _explain_value(key, class_path, reason, _given(message), known_keys)


def _innermost(message: str) -> tuple[str | None, str | None, list[str]]:
    """The dotted key a nested message ends at, the class whose option it is, and the reasons given there."""
    key: list[str] = []
    class_path: str | None = None
    reasons: list[str] = []
    for line in message.splitlines():
        line = line.strip().removeprefix("- ")
        if found := re.fullmatch(r'Parser key "(.+?)":', line):
            key.append(found[1])
            reasons = []
        elif found := re.fullmatch(r"Problem with given class_path '(.+)':", line):
            class_path, reasons = found[1], []
        elif line.startswith("Given value type:"):
            break
        elif line and not NOISE.search(line):
            reasons.append(line)
    return ".".join(key) or None, class_path, reasons


def _given(message: str) -> str | None:
    """The value that was refused, as the user wrote it."""
    found = re.search(r"Got value: (.+)", message) or re.search(r"Given value: (?!NestedArg|Namespace|\{)(.+)", message)
    return found[1].strip() if found else None


def _explain_value(key: str, class_path: str | None, reasons: list[str], given: str | None, known_keys: KnownKeys) -> str:
    reason = reasons[0] if reasons else "is not accepted"
    if found := re.match(r"Option '(.+?)' is not accepted", reason):
        return _unknown_key(f"{key}.{found[1]}", key, class_path, known_keys)
    if found := re.match(r"the following arguments are required: (.+)", reason):
        missing = ", ".join(f"{key}.{name}" for name in found[1].split(", "))
        return f"{missing} is missing ({class_path} needs it); give --{key}.{found[1].split(', ')[0]} or write it in the config"
    if found := re.match(r"Importing '(.+?)' is not allowed", reason):
        return f"{key}: {found[1]} is refused: a config names models, data and their parts, nothing that runs or writes things"
    if found := re.match(r"module '(.+?)' has no attribute '(.+?)'", reason):
        return f"{key}: {found[1]} has no {found[2]}" + _similar_in_module(found[1], found[2])
    if found := re.match(r"No module named '(.+?)'", reason):
        return f"{key}: no module {found[1]}, from {class_path or given}; check the spelling, or install what holds it"
    if found := re.match(r"Expected a dot import path string: (.+)", reason):
        return f"{key}: no class {found[1]} is known by that short name" + _similar_name(found[1])
    if found := re.match(r"Import path .*does not correspond to a subclass of (\w+)", reason):
        return f"{key}: {given or class_path} is not a {found[1]}"
    expected = [
        _plain_types(found[1]) for line in reasons if (found := re.match(r"Expected an? (.+?)(?:\. Got value: .*)?$", line))
    ]
    if expected:
        value = f"{key}={given}" if given is not None else f"{key}: the value"
        return f"{value} is not {' or '.join(dict.fromkeys(expected))}"
    return f"{key}: {' '.join(reasons)[:300]}"


def _plain_types(text: str) -> str:
    """`<class 'int'>` -> `int`; `typing.Literal['a', 'b']` -> `one of 'a', 'b'`."""
    if found := re.fullmatch(r"(?:typing\.)?Literal\[(.+)\]", text):
        return f"one of {found[1]}"
    name = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text)
    return TYPE_NAMES.get(name, name)


def _unknown_key(given: str, parent: str, class_path: str | None, known_keys: KnownKeys) -> str:
    option = given.removeprefix(f"{parent}.")
    known = list(known_keys(class_path))
    whose = f" ({class_path} has {', '.join(known)})" if known and len(known) <= 12 else ""
    guess = nearest(option, known)
    return f"unknown key {given}" + (f"; did you mean {parent}.{guess}?" if guess else f"{whose}")


def _unrecognized(found: re.Match[str], known_keys: KnownKeys) -> str:
    words = found[1].split()
    name = words[0].partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected word {words[0]}; an option starts with --, as in --config FILE"
    known = [f"--{key}" for key in known_keys(None)]
    return f"unknown option {name}" + _did_you_mean(name, known)


def _unknown_config_key(found: re.Match[str], known_keys: KnownKeys) -> str:
    return f"unknown key {found[1]} in the config" + _did_you_mean(found[1], list(known_keys(None)))


def _did_you_mean(given: str, known: list[str]) -> str:
    """Mends the first part (`trainr.max_epochs`), then the whole; below `model` and `data` only the chosen class knows more."""
    root, dot, rest = given.partition(".")
    roots = sorted({key.partition(".")[0] for key in known})
    mended = root if root in roots else nearest(root, roots)
    if mended is None:
        return "; --help-all lists all of them"
    whole = f"{mended}{dot}{rest}"
    below = [key for key in known if key.startswith(f"{mended}.")]
    guess = whole if whole in known else nearest(whole, below) or (whole if mended != root else None)
    return f"; did you mean {guess}?" if guess else "; --help-all lists all of them"


def _missing(found: re.Match[str], known_keys: KnownKeys) -> str:
    names = [name.rpartition(".")[2] for name in found[1].split(", ")]
    return f"{' and '.join(names)} missing; give a config (vision fit --config FILE) or --{names[0]} CLASS"


def _similar_in_module(module: str, name: str) -> str:
    import importlib

    guess = nearest(name, [known for known in dir(importlib.import_module(module)) if not known.startswith("_")])
    return f"; did you mean {module}.{guess}?" if guess else ""


def _similar_name(name: str) -> str:
    known = dict(short_names())
    guess = nearest(name, list(known))
    if guess:
        return f"; did you mean {guess} ({known[guess]}.{guess})?"
    return "; write it in full, package.module.Class, or use one of " + ", ".join(sorted(known))


def short_names() -> Iterator[tuple[str, str]]:
    """The class names that may be written without their package, each with the package that has it."""
    import importlib

    for package in SHORT_NAME_PACKAGES:
        for name in getattr(importlib.import_module(package), "__all__", ()):
            yield name, package


SHORT_NAME_PACKAGES = ("vision.tasks", "vision.data", "vision.callbacks")

EXPLANATIONS: list[tuple[str, Callable[[re.Match[str], KnownKeys], str]]] = [
    (r"unrecognized arguments: (.+)", _unrecognized),
    (r"(?:Subcommand '\w+'|Group '[\w.]+') does not accept option '(.+?)'", _unknown_config_key),
    (r"Option '(.+?)' is not accepted", _unknown_config_key),
    (r"the following arguments are required: (.+)", _missing),
    (r"argument (\S+): expected one argument", lambda found, _: f"{found[1]} needs a value"),
]
