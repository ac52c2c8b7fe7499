"""Turns what the config parser says about a mistake, which may be fifty lines, into one line that names key, value and fix."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vision.cli import nearest

# a class path, or None for the whole command -> the keys that it accepts
KnownKeys = Callable[[str | None], Sequence[str]]
SHORT_NAME_PACKAGES = ("vision.tasks", "vision.data", "vision.callbacks")

NOISE = re.compile(r"Expected a path but|Does not validate against any|Expected a <class 'NoneType'>|^Subtypes:|^Errors:")
CALLABLE = re.compile(r"Type \S.* expects a function or a callable class: ")
TYPE_NAMES = {
    "float": "a number",
    "int": "a whole number",
    "NoneType": "null",
    "str": "text",
    "dict": "a mapping",
    "list": "a list",
    "bool": "true or false",
}


@dataclass
class Mistake:
    """A value that the parser refused.

    Attributes:
        key: where it stands, as on the command line: `model.lr`.
        class_path: the class whose option it is, None when not told.
        reasons: what the parser said, a line for each alternative of the type.
        given: the value, as the user wrote it, None when not told.
        known_keys: the keys that a class accepts.
    """

    key: str
    class_path: str | None
    reasons: list[str]
    given: str | None
    known_keys: KnownKeys = field(repr=False)


def one_line(message: str, known_keys: KnownKeys) -> str:
    """One line for a parser's message; one that is not understood keeps its words.

    Args:
        message: what the parser said.
        known_keys: gives the keys that a class (by class path), or the command (None), accepts.
    """
    message = message.strip()
    for pattern, explain in COMMAND_MISTAKES:
        if found := re.match(pattern, message, flags=re.DOTALL):
            return explain(found, known_keys)
    mistake = innermost(message, known_keys)
    if mistake is None:
        return " ".join(message.split())
    for pattern, explain_value in VALUE_MISTAKES:
        if mistake.reasons and (found := re.match(pattern, mistake.reasons[0])):
            return explain_value(found, mistake)
    return wrong_type(mistake)


def innermost(message: str, known_keys: KnownKeys) -> Mistake | None:
    """What is wrong at the end of a nested message: a line for each key, class and alternative on the way there."""
    keys: list[str] = []
    class_path: str | None = None
    reasons: list[str] = []
    for line in message.splitlines():
        line = CALLABLE.sub("", line.strip().removeprefix("- "))
        if found := re.fullmatch(r'Parser key "(.+?)":\s*(.*)', line):
            keys.append(found[1])
            reasons = [found[2]] if found[2] else []
        elif found := re.fullmatch(r"Problem with given class_path '(.+)':", line):
            class_path, reasons = found[1], []
        elif line.startswith("Given value type:"):
            break
        elif line and not NOISE.search(line):
            reasons.append(line)
    if not keys:
        return None
    if found := re.search(r"Got value: Namespace\(class_path='([\w.]+)'", message):
        class_path = found[1]
    shown = re.search(r"Got value:[ ]?(.*)", message) or re.search(r"Given value: (.+)", message)
    value = shown[1].partition(". Got value: ")[0].strip() if shown else ""  # what follows is the class around it
    given = value if shown and not re.match(r"NestedArg|Namespace|\{", value) else None
    return Mistake(
        ".".join(keys), class_path, [re.sub(r"\.? ?Got value:.*", "", reason) for reason in reasons], given, known_keys
    )


# Mistakes in the options of the command


def unknown_option(found: re.Match[str], known_keys: KnownKeys) -> str:
    name = found[1].split()[0].partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected word {name}; an option starts with --, as in --config FILE"
    return f"unknown option {name}" + did_you_mean(name, [f"--{key}" for key in known_keys(None)])


def unknown_config_key(found: re.Match[str], known_keys: KnownKeys) -> str:
    return f"unknown key {found[1]} in the config" + did_you_mean(found[1], list(known_keys(None)))


def did_you_mean(given: str, known: list[str]) -> str:
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


def missing(found: re.Match[str], known_keys: KnownKeys) -> str:
    names = [name.rpartition(".")[2] for name in found[1].split(", ")]
    return f"{' and '.join(names)} missing; give a config (vision fit --config FILE) or --{names[0]} CLASS"


def without_value(found: re.Match[str], known_keys: KnownKeys) -> str:
    return f"{found[1]} needs a value"


COMMAND_MISTAKES: list[tuple[str, Callable[[re.Match[str], KnownKeys], str]]] = [
    (r"unrecognized arguments: (.+)", unknown_option),
    (r"(?:Subcommand '\w+'|Group '[\w.]+') does not accept option '(.+?)'", unknown_config_key),
    (r"Option '(.+?)' is not accepted", unknown_config_key),
    (r"the following arguments are required: (.+)", missing),
    (r"argument (\S+): expected one argument", without_value),
]


# Mistakes in a value


def unknown_key(found: re.Match[str], mistake: Mistake) -> str:
    return not_an_option(found[1], mistake)


def unknown_in_group(found: re.Match[str], mistake: Mistake) -> str:
    return not_an_option(f"{found[1]}.{found[2]}", mistake)


def not_an_option(option: str, mistake: Mistake) -> str:
    known = list(mistake.known_keys(mistake.class_path)) if mistake.class_path else []
    if guess := nearest(option, known):
        return f"unknown key {mistake.key}.{option}; did you mean {mistake.key}.{guess}?"
    if mistake.class_path and mistake.class_path.endswith("create_model"):  # it takes any option of any model
        return f"unknown key {mistake.key}.{option}; options of the model itself go under dict_kwargs, beside init_args"
    own = [key for key in known if "." not in key]
    whose = f" ({mistake.class_path} has {', '.join(own)})" if own and len(own) <= 12 else ""
    if mistake.class_path and not known:
        whose = f" ({mistake.class_path} has no options)"
    return f"unknown key {mistake.key}.{option}{whose}"


def missing_key(found: re.Match[str], mistake: Mistake) -> str:
    names = [f"{mistake.key}.{name}" for name in found[1].split(", ")]
    return f"{', '.join(names)} is missing ({mistake.class_path} needs it); give --{names[0]} or write it in the config"


def refused(found: re.Match[str], mistake: Mistake) -> str:
    return (
        f"{mistake.key}: {found[1]} is refused: a config names models, data and their parts, nothing that runs or writes things"
    )


def not_in_module(found: re.Match[str], mistake: Mistake) -> str:
    module, name = found[1], found[2]
    guess = nearest(name, [known for known in dir(importlib.import_module(module)) if not known.startswith("_")])
    return f"{mistake.key}: {module} has no {name}" + (f"; did you mean {module}.{guess}?" if guess else "")


def no_module(found: re.Match[str], mistake: Mistake) -> str:
    named = mistake.class_path or mistake.given
    return f"{mistake.key}: no module {found[1]}, from {named}; check the spelling, or install what holds it"


def no_short_name(found: re.Match[str], mistake: Mistake) -> str:
    known = dict(short_names())
    guess = nearest(found[1], list(known))
    if part := None if guess else nearest(found[1], importlib.import_module("core").__all__):
        return f"{mistake.key}: no class {found[1]} is known by that short name; did you mean core.{part}?"
    also = (
        f"did you mean {guess} ({known[guess]}.{guess})?" if guess else f"use package.module.Class, or {', '.join(sorted(known))}"
    )
    return f"{mistake.key}: no class {found[1]} is known by that short name; {also}"


def wrong_class(found: re.Match[str], mistake: Mistake) -> str:
    return f"{mistake.key}: {mistake.given or mistake.class_path} is not a {found[1]}"


def not_a_subclass(found: re.Match[str], mistake: Mistake) -> str:
    kinds = kinds_of(found[2])
    return f"{mistake.key}: {found[1]} is not a {found[2]}" + (f"; use core.{', core.'.join(kinds)}" if kinds else "")


def kinds_of(name: str) -> list[str]:
    """The parts of core that are of this class."""
    core = importlib.import_module("core")  # not at the top: it brings torch, which a help does without
    base = getattr(core, name, None)
    if not isinstance(base, type):
        return []
    parts = {part: getattr(core, part) for part in core.__all__}
    return [part for part, kind in parts.items() if isinstance(kind, type) and issubclass(kind, base) and kind is not base]


def wrong_type(mistake: Mistake) -> str:
    expected = [plain_type(found[1]) for line in mistake.reasons if (found := re.match(r"Expected an? (.+)", line))]
    if not expected:
        return f"{mistake.key}: {' '.join(mistake.reasons)[:300] or 'the value is not accepted'}"
    value = f"{mistake.key}: the value" if mistake.given is None else f"{mistake.key}={mistake.given or repr('')}"
    return f"{value} is not {' or '.join(dict.fromkeys(expected))}"


def plain_type(text: str) -> str:
    """`<class 'int'>` -> `int`; `typing.Literal['a', 'b']` -> `one of 'a', 'b'`."""
    if found := re.fullmatch(r"(?:typing\.)?Literal\[(.+)\]", text):
        return f"one of {found[1]}"
    name = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text)
    return TYPE_NAMES.get(name, name)


def short_names() -> Iterator[tuple[str, str]]:
    """The class names that may be written without their package, each with the package that has it."""
    for package in SHORT_NAME_PACKAGES:
        for name in getattr(importlib.import_module(package), "__all__", ()):
            yield name, package


VALUE_MISTAKES: list[tuple[str, Callable[[re.Match[str], Mistake], str]]] = [
    (r"Option '(.+?)' is not accepted", unknown_key),
    (r"unrecognized arguments: --([\w.-]+)", unknown_key),
    (r"Group '([\w.]+)' does not accept option '(.+?)'", unknown_in_group),
    (r"the following arguments are required: (.+)", missing_key),
    (r"Importing '(.+?)' is not allowed", refused),
    (r"module '(.+?)' has no attribute '(.+?)'", not_in_module),
    (r"No module named '(.+?)'", no_module),
    (r"Expected a dot import path string: (.+)", no_short_name),
    (r"Expected '(.+?)' to be a subclass of <class '(.+?)'>", not_a_subclass),
    (r"Import path .*does not correspond to a subclass of (\w+)", wrong_class),
]
