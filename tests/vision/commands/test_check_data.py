"""`vision check-data`: tables, exit codes 0, 1 and 2, and one line for wrong use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vision.data
from vision.cli import main

PHOTOS = Path(vision.data.__file__).parent / "embedded" / "photos"


def code(*args: str) -> int:
    try:
        return main(["check-data", *args])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_embedded_photographs_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert code(str(PHOTOS)) == 0
    out = capsys.readouterr().out
    assert "nothing to mend" in out
    assert "451 x 300 to 512 x 512" in out


def test_errors_are_named_and_give_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(15):
        (tmp_path / f"{i:02d}.png").write_bytes(b"no picture")
    Image.new("RGB", (50, 50)).save(tmp_path / "[good].png")
    Image.new("RGB", (9, 50)).save(tmp_path / "small.png")
    assert code(str(tmp_path), "--most", "3") == 1
    out = capsys.readouterr().out
    assert all(f"{i:02d}.png" in out for i in range(3))
    assert "04.png" not in out
    assert "and 12 more" in out
    assert "15 error(s), 1 note(s)" in out


def test_notes_alone_give_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (9, 50)).save(tmp_path / "[small].png")
    assert code(str(tmp_path)) == 0
    assert "[small].png" in capsys.readouterr().out, "names are no markup"
    assert code(str(tmp_path), "--tiny", "9") == 0
    assert "nothing to mend" in capsys.readouterr().out


def test_it_starts_at_once(tmp_path: Path) -> None:
    """Without torch and Lightning, whose import takes longer than most folders do."""
    Image.new("RGB", (50, 50)).save(tmp_path / "a.png")
    program = "import sys; from vision.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "check-data", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "nothing to mend" in done.stdout
    assert done.returncode == 0, done.stderr


def test_two_folders_with_the_same_names_may_be_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, name in enumerate(("dark", "light")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (50, 50), (i, 0, 0)).save(tmp_path / name / "a.png")
    dark, light = tmp_path / "dark", tmp_path / "light"
    assert code(str(tmp_path)) == 0
    hint = f"dark and light have the same names; if they are pairs: vision check-data {dark} --targets {light}\n"
    assert capsys.readouterr().out.endswith(hint)
    assert code(str(tmp_path), "--kind", "classes") == 0
    assert "if they are pairs" not in capsys.readouterr().out
    assert code(str(dark), "--targets", str(light)) == 0
    out = capsys.readouterr().out
    assert "degraded and clean pictures in pairs" in out
    (tmp_path / "list.txt").write_text("dark/a.png\tlight/a.png\ndark/b.png\tlight/a.png\n")
    assert code(str(tmp_path / "list.txt")) == 1
    assert "b.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "DIR missing"),
        (["/nowhere/at/all"], "data folder /nowhere/at/all does not exist"),
        (["."], "has no pictures"),
        ([".", "--scale", "5"], "--scale=5 is not possible; use 1 (same size), 2, 3 or 4"),
        ([".", "--kind", "videos"], "--kind: invalid choice: 'videos'"),
        ([".", "--tiny", "0"], "--tiny: 0 is less than 1"),
    ],
)
def test_wrong_use_gives_2_and_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code(*args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
