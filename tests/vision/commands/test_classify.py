"""`vision classify`: a line for each picture, broken ones named, exit codes that tell."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vision
from vision.cli import main

CLASSES = ["dark", "grey", "bright"]
PREPROCESSING = {
    "channels": 3,
    "size": [8, 8],
    "mean": [0.0] * 3,
    "std": [1.0] * 3,
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "resize": "squash",
}


class Brightness(nn.Module):
    """Knows dark, grey and bright by the mean, and how many pictures came at once."""

    classes = CLASSES
    preprocessing = PREPROCESSING

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        return -self.scale * (x.mean((1, 2, 3))[:, None] - torch.tensor([0.0, 0.5, 1.0])).abs()


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Brightness:
    made = Brightness()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vision, "load_model", lambda source: made, raising=False)
    return made


def picture(name: str, level: int) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((10, 12, 3), level, dtype=np.uint8)).save(name)
    return name


def run(*args: str) -> int:
    return main(["classify", *args, "--weights", "w.ckpt", "--device", "cpu"])


def test_one_line_for_each_picture_in_the_order_given(capsys: pytest.CaptureFixture[str]) -> None:
    names = [picture("z.png", 255), picture("a.png", 0), picture("m.jpg", 127)]
    assert run(*names, "--top=2") == 0
    out, err = capsys.readouterr()
    assert [line.split(" ")[:2] for line in out.splitlines()] == [["z.png:", "bright"], ["a.png:", "dark"], ["m.jpg:", "grey"]]
    assert out.splitlines()[0] == "z.png: bright 100.0 %, grey 0.0 %"
    assert err == ""


def test_folders_are_searched_and_batches_formed(model: Brightness, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        picture(f"set/{'inner/' if number > 2 else ''}{number}.png", 255)
    assert run("set", "--batch-size=2", "--top", "1") == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [f"set/{n}: bright 100.0 %" for n in ("0.png", "1.png", "2.png", "inner/3.png", "inner/4.png")]
    assert model.batches == [2, 2, 1]


def test_broken_pictures_are_named_and_the_others_done(capsys: pytest.CaptureFixture[str]) -> None:
    good = picture("good.png", 0)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save("cut.png")
    Path("cut.png").write_bytes(Path("cut.png").read_bytes()[:2000])
    Path("text.jpg").write_text("no picture")
    with pytest.raises(SystemExit, match="1"):
        run("cut.png", good, "text.jpg", "lost.png")
    out, err = capsys.readouterr()
    assert out.startswith("good.png: dark")
    assert out.count("\n") == 1
    assert [line.partition(":")[0] for line in err.splitlines()[:3]] == ["cut.png", "text.jpg", "lost.png"]
    assert err.splitlines()[3] == "3 of 4 pictures could not be read"


def test_the_table_holds_pictures_classes_and_errors() -> None:
    good = picture("good, better.png", 255)
    Path("broken.png").write_bytes(b"")
    with pytest.raises(SystemExit, match="1"):
        run(good, "broken.png", "--output", "out.csv", "--top", "4")
    with Path("out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["picture"], rows[0]["class_1"], rows[0]["probability_1"]) == ("good, better.png", "bright", "0.999955")
    assert (rows[0]["class_4"], rows[0]["error"]) == ("", "")
    assert (rows[1]["picture"], rows[1]["class_1"], rows[1]["error"]) == ("broken.png", "", "the file is empty")


def test_probabilities_do_not_depend_on_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    names = [picture(f"{n}.png", 40 * n) for n in range(5)]
    run(*names)
    together = capsys.readouterr().out
    for name in names:
        run(name)
    assert capsys.readouterr().out == together


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "PICTURE, --weights missing; vision classify --help tells how to use it"),
        (["a.png"], "--weights missing; vision classify --help tells how to use it"),
        (["a.png", "--weights", "w", "--topp=3"], "unknown option --topp; did you mean --top?"),
        (["a.png", "--weight", "w"], "unknown option --weight; did you mean --weights?"),
        (["a.png", "--weights", "w", "--top", "many"], "--top=many is not a number"),
        (["a.png", "--weights", "w", "--top", "0"], "--top: 0 is less than 1"),
        (["empty", "--weights", "w"], "empty has no pictures (.png, .jpg, .tif, …); give a folder with pictures"),
        (["a.png", "--weights", "w", "--output", "there.csv"], "there.csv exists; give another --output, or remove it"),
        (["a.png", "--weights", "w", "--output", "no/out.csv"], "cannot write no/out.csv: No such file or directory; give"),
        (["a.png", "--weights", "w", "--device", "abacus"], "--device abacus: "),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    picture("a.png", 0)
    Path("empty").mkdir()
    Path("there.csv").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main(["classify", *args])
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {text}")
    assert (err.count("\n"), out) == (1, "")
    assert Path("there.csv").read_text() == "mine"


def test_weights_without_preprocessing_are_refused(model: Brightness, capsys: pytest.CaptureFixture[str]) -> None:
    model.preprocessing = {}
    with pytest.raises(SystemExit, match="2"):
        run(picture("a.png", 0))
    assert "w.ckpt does not tell how pictures are prepared for it" in capsys.readouterr().err


def test_a_model_without_class_names_has_numbers(model: Brightness, capsys: pytest.CaptureFixture[str]) -> None:
    model.classes = []
    run(picture("a.png", 255), "--top=1")
    assert capsys.readouterr().out == "a.png: class 2 100.0 %\n"


def test_no_progress_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    run(*[picture(f"{n}.png", 0) for n in range(4)], "--batch-size=1")
    assert not sys.stderr.isatty()
    assert capsys.readouterr().err.strip() == ""
