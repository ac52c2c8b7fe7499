"""`vision bench`: what it tells and writes, and wrong use in one line."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from vision.bench.contest import Row, Setting
from vision.bench.machine import describe
from vision.bench.report import BEGIN, END, lines, markdown, plot, read_all, read_json, write_document, write_json
from vision.cli import main
from vision.errors import UserError


@pytest.fixture
def rows() -> list[Row]:
    side = {
        "seconds": [0.1, 0.2],
        "median": 0.15,
        "min": 0.1,
        "max": 0.2,
        "per_second": 27.0,
        "share": 0.5,
        "step_bytes": 2_000_000,
        "parts": {"products": 0.6, "convolutions": 0.1, "attention": 0.1, "norms": 0.0, "rest": 0.2},
    }
    setting = asdict(Setting("vit", "small", batch=4))
    ratio = {"median": 1.25, "min": 1.0, "max": 1.5}
    first = Row(setting, {"vision": side, "timm": side | {"median": 0.1875}}, {"timm": ratio}, {"timm": 1e-7}, {"timm": 1.05})
    first.notes = ["told once"]
    growth = Row(asdict(Setting("growth", "attention", size=28)), {"global": side, "windowed": side}, notes=["told once"])
    return [first, growth, Row(setting, failed="wrong: ours lies 1.0 from timm")]


def test_the_table(rows):
    first, *_, wrong = lines(rows)
    assert first == [
        "vit: small",
        "inference, fp32",
        "4",
        "224",
        "150 ms, 27 pictures/s",
        "timm 188 ms",
        "1.25",
        "1.00 to 1.50",
        "1.05: met",
        "2 to 2 MB",
        "50% to 50%",
        "70% to 70%",
    ]
    assert wrong[4] == "wrong: ours lies 1.0 from timm"


def test_json_plot_and_document(rows, tmp_path: Path, capsys):
    machine = describe(1, "cpu", True)
    assert {"processor", "threads", "date", "versions", "memory_bytes"} <= machine.keys()
    assert machine["versions"]["torch"] == torch.__version__.partition("+")[0] or machine["versions"]["torch"]
    file, picture, document = tmp_path / "sub" / "bench.json", tmp_path / "bench.png", tmp_path / "performance.md"
    write_json(file, rows, machine)
    assert read_json(file) == (rows, machine)
    document.write_text(f"before\n\n{BEGIN}\nnot measured yet\n{END}\n\nafter\n")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--read", str(file), "--plot", str(picture), "--write", str(document)])
    assert stop.value.code == 1  # one row is wrong
    assert picture.stat().st_size > 5_000
    once = document.read_text()
    assert once.startswith("before\n\n")
    assert once.endswith("\n\nafter\n")
    assert "| 1.25 | 1.00 to 1.50 | 1.05: met |" in once
    assert "not measured yet" not in once
    assert "- vit, growth: told once" in once
    write_document(document, rows, machine)
    assert document.read_text() == once
    assert "1.25" in capsys.readouterr().out
    assert len(plot(rows, machine).axes) == 3
    assert markdown(rows, machine).count("\n| ") == 4


def test_runs_of_one_machine_are_joined(rows, tmp_path: Path, capsys):
    """The later of two rows of one setting counts; figures of two machines are no table."""
    machine = describe(1, "cpu", True)
    again = replace(rows[0], unit="later")
    for name, found, here in (
        ("a", rows, machine),
        ("b", [again], machine | {"date": "2130"}),
        ("c", rows, machine | {"threads": 7}),
    ):
        write_json(tmp_path / name, found, here)
    for names in ("ab", "ba"):  # in any order
        assert read_all([tmp_path / name for name in names]) == ([rows[1], again], machine | {"date": "2130"})
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--read", str(tmp_path / "a"), str(tmp_path / "c")])
    assert stop.value.code == 2
    assert "c is of threads=7, others of" in capsys.readouterr().err


def test_the_document_has_the_table_of_the_results():
    root = Path(__file__).parents[2]
    told = markdown(*read_all(sorted(root.glob("benchmarks/*.json"))))
    assert told in (root / "docs/performance.md").read_text(), "vision bench --read benchmarks/*.json --write docs/performance.md"


WRONG = {
    "only": (
        ["--only", "rows=8"],
        "--only rows=8 is no key and value of a setting; keys are case, name, step, precision, "
        "compiled, batch, size, device, as in batch=8",
    ),
    "nothing": (["--tiny", "--cases", "vit", "--only", "batch=7"], "no setting has batch=7; use --full, or other values"),
    "case": (["--cases", "vti"], "unknown case vti; did you mean vit?"),
    "option": (["--repeat", "3"], "unknown option --repeat; did you mean --repeats?"),
    "seconds": (["--seconds", "-1"], "--seconds -1 is negative; use 0 for the fewest rounds"),
    "no file": (
        ["--read", "none.json"],
        "none.json: No such file or directory; give a file that vision bench --json has written",
    ),
    "folder": (["--json", "."], ". is a folder; give the name of a file"),
    "device": (["--device", "cuda:9"], "--device cuda:9 is not there; use --device cpu"),
}


@pytest.mark.parametrize(("args", "message"), WRONG.values(), ids=WRONG)
def test_wrong_use_in_one_line(args, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["bench", *args])
    assert (stop.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


def test_documents_and_files_of_others(rows, tmp_path):
    document = tmp_path / "a.md"
    document.write_text("no marks")
    with pytest.raises(UserError, match="has no place for the table; put the lines"):
        write_document(document, rows, describe(1, "cpu", True))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match="is no result of vision bench"):
        read_json(tmp_path / "a.json")
