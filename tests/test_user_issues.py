"""docs/user-issues.md: every test that it names exists, and the test's file tells the issue's number."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docs/user-issues.md").read_text(encoding="utf-8").splitlines()
HEAD = ["", "| issue | what went wrong for its user | the test that holds it here, or why there is none |", "|---|---|---|"]
TABLE = [line for line in LINES if line.startswith("|") and line not in HEAD]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_line_is_whole():
    subjects = [place for place, line in enumerate(LINES) if line.startswith("## ")]
    assert subjects
    assert all(LINES[place + 1 : place + 4] == HEAD for place in subjects)
    assert all(line.startswith("|") or line == "" or line.startswith("## ") for line in LINES[subjects[0] :])
    assert ROWS
    for row in ROWS:
        assert len(row) == 3, row
        assert re.fullmatch(r"[\w.-]+/[\w.-]+ #\d+", row[0]), row
        assert all(row), row
        assert row[2].startswith(("`tests/", "none: ")), row


def test_no_issue_stands_twice():
    assert [issue for issue, count in Counter(row[0] for row in ROWS).items() if count > 1] == []


@pytest.mark.parametrize("named", sorted({row[2].strip("`") for row in ROWS if not row[2].startswith("none: ")}))
def test_the_test_exists_and_tells_its_issues(named):
    path, _, name = named.partition("::")
    assert name in names_in(path), f"{path} has no {name}"
    text = (ROOT / path).read_text(encoding="utf-8")
    numbers = [row[0].rpartition("#")[2] for row in ROWS if row[2].strip("`") == named]
    assert [number for number in numbers if not re.search(rf"(?<!\d){number}(?!\d)", text)] == []
