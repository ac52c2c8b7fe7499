"""`vision translate`: a line for each line, in order, bad ones named, exit codes that tell."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

import vision
from core import Decoder, Encoder, EncoderDecoder, Learned, RelativeTable, Rotary
from vision.cli import main
from vision.inference.translation import Writing
from vision.inference.translation import translate as translate_texts
from vision.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, perturbed) -> EncoderDecoder:
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 1, "heads": 2, "hidden": 16, "position": Rotary}
    made = perturbed(EncoderDecoder(Encoder(9, **sizes), Decoder(7, memory_dim=16, **sizes))).eval()
    made.vocabularies = {"source": Vocabulary(list("abcde")), "target": Vocabulary(["X", "Y", "Z"], "words")}
    made.limits = {"source": 12, "target": 30}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vision, "load_model", lambda source: made, raising=False)
    return made


def run(*args: str) -> int:
    try:
        return main(["translate", "--weights", "w.ckpt", "--device", "cpu", *args])
    except SystemExit as stop:
        return int(str(stop.code))


def expected(model: EncoderDecoder, *texts: str, **options) -> list[str]:
    found = translate_texts(model, texts, Writing(**options))
    return ["\t".join(target.text for target in targets) for targets in found]


def test_texts(model: EncoderDecoder, capsys: pytest.CaptureFixture) -> None:
    assert run("abc", "dead", "--max-length", "5") == 0
    assert capsys.readouterr().out.splitlines() == expected(model, "abc", "dead", max_length=5)


@pytest.mark.parametrize("source", ["file", "stdin"])
@pytest.mark.parametrize("batch", ["1", "2", "32"])
def test_one_line_in_one_line_out(
    model: EncoderDecoder, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, source: str, batch: str
) -> None:
    """Order is kept; an empty line gives an empty one, a bad one too and is named."""
    text = b"\xef\xbb\xbfdeadbeef\r\n".replace(b"f", b"a") + b"\nabx\na\n\xff\nbcaaaaaaaaaaaaaaaaaa\ncab"
    if source == "file":
        Path("in.txt").write_bytes(text)
    else:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code = run("--batch-size", batch, *(["--file", "in.txt"] if source == "file" else []))
    out, err = capsys.readouterr()
    first, fourth, last = expected(model, "deadbeea", "a", "cab")
    assert out.split("\n") == [first, "", "", fourth, "", "", last, ""]
    place = "in.txt:" if source == "file" else "line "
    assert f"{place}3: 'abx': the model does not know 'x'" in err
    assert f"{place}5: byte 0xff is not UTF-8" in err
    assert f"{place}6: 'bcaaaaaaaaaaaaaaaaaa' has 20 symbols" in err
    assert err.rstrip().endswith("3 of 7 lines could not be translated")
    assert code == 1


@pytest.mark.parametrize("position", [Learned, RelativeTable])
def test_a_line_past_the_encoders_table_is_a_bad_line(
    model: EncoderDecoder, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, position: type
) -> None:
    """The limit is twice the longest source that was trained, the table may end before; the other lines are written."""
    sizes = {"dim": 16, "depth": 1, "heads": 2, "hidden": 16, "position": position}
    short = EncoderDecoder(Encoder(9, max_length=8, **sizes), Decoder(7, memory_dim=16, max_length=5, **sizes)).eval()
    short.vocabularies, short.limits = model.vocabularies, model.limits
    short.decoder.embedding.weight.data[2] = 0.0  # it writes on until its own table ends
    monkeypatch.setattr(vision, "load_model", lambda source: short)
    Path("in.txt").write_text("abcdeabc\nabcdeabca\nabc\n")
    assert run("--file", "in.txt") == 1
    out, err = capsys.readouterr()
    first, third = expected(short, "abcdeabc", "abc")
    assert out.split("\n") == [first, "", third, ""]
    assert "in.txt:2: 'abcdeabca' has 9 symbols, the longest that the model can make sense of 8 (its encoder's learned" in err
    assert err.rstrip().endswith("1 of 3 lines could not be translated")
    assert run("abc", "--max-length", "6") == 2
    assert "max_length=6 passes the 5 places of the decoder's learned table; use 5 or less" in capsys.readouterr().err
    assert run("abc", "--max-length", "5") == 0


def test_alternatives_and_draws(model: EncoderDecoder, capsys: pytest.CaptureFixture) -> None:
    assert run("abc", "--beam", "4", "--n-best", "3") == 0
    assert run("abc", "--n-best", "2") == 0
    assert run("abc", "--sample", "--temperature", "1.3", "--top-k", "3", "--top-p", "0.9", "--seed", "7") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == expected(model, "abc", beam=4, n_best=3)[0]
    assert out[0].count("\t") == 2
    assert out[1] == expected(model, "abc", beam=2, n_best=2)[0]
    assert out[2] == expected(model, "abc", temperature=1.3, top_k=3, top_p=0.9, seed=7)[0]


def test_a_batch_may_be_larger_than_any_file(capsys: pytest.CaptureFixture) -> None:
    assert run("", "--batch-size", "9" * 20) == 0
    assert capsys.readouterr() == ("\n", "")


def test_a_cut_target_is_told(model: EncoderDecoder, capsys: pytest.CaptureFixture) -> None:
    model.decoder.embedding.weight.data[2] = 0.0
    assert run("abc", "--max-length", "1") == 0
    assert "text 1: cut at the greatest length" in capsys.readouterr().err


def test_explain_draws_one_text(capsys: pytest.CaptureFixture) -> None:
    assert run("abc", "--explain", "a.png") == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert run("abc", "--explain", "a.png") == 2
    assert "a.png exists; give another --explain" in capsys.readouterr().err
    before = Path("a.png").read_bytes()
    for name in ("a", "a."):  # matplotlib writes a.png for both
        assert run("dead", "--explain", name) == 2
        assert f"--explain {name} tells no kind of picture; use a name that ends in .png" in capsys.readouterr().err
    assert Path("a.png").read_bytes() == before
    assert run("abc", "--explain", "b.PNG") == 0
    assert sorted(path.name for path in Path().iterdir()) == ["a.png", "b.PNG"]


def test_explain_draws_the_text_that_is_printed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of its own, or the most probable symbols, would be another text."""
    from matplotlib.figure import Figure

    drawn: list[list[str]] = []
    save = Figure.savefig

    def look(figure: Figure, *args, **options) -> None:
        drawn.append([label.get_text() for label in figure.axes[-1].get_yticklabels()])
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", look)
    for seed in ("1", "2", "3"):
        assert run("abc", "--sample", "--temperature", "3", "--seed", seed, "--explain", f"{seed}.png") == 0
    assert run("abc", "--max-length", "1", "--explain", "cut.png") == 0
    written = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:-1] if row[-1] == "(end)" else row for row in drawn] == written
    assert len({tuple(row) for row in drawn[:3]}) > 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a", "--file", "x"], "give texts or --file x, not both"),
        (["--file", "none.txt"], "none.txt cannot be read (No such file or directory)"),
        (["a", "b", "--explain", "x.png"], "--explain draws the attention of one text"),
        (["a", "--explain", "x.abc"], "--explain x.abc tells no kind of picture; use a name that ends in .png, .svg or .pdf"),
        (["a", "--explain", "no/x.png"], "cannot write no/x.png: No such file or directory"),
        (["a", "--top-k", "3"], "--top-k is of draws; give --sample too"),
        (["a", "--seed", "3"], "--seed is of draws; give --sample too"),
        (["a", "--sample", "--beam", "3"], "--sample draws, --beam and --n-best search; use one of them"),
        (["a", "--sample", "--seed", "9" * 20], "99 is not in -9223372036854775808 <= seed <= 18446744073709551615; use e.g. 0"),
        (["a", "--sample", "--temperature", "0"], "temperature=0.0 is not in 1e-6 <= temperature <= 1e6; use e.g. 0.7"),
        (["a", "--sample", "--temperature", "1e-40"], "temperature=1e-40 is not in 1e-6 <= temperature <= 1e6"),
        (["a", "--sample", "--temperature", "inf"], "temperature=inf is not in 1e-6 <= temperature <= 1e6"),
        (["a", "--sample", "--top-p", "2"], "top_p=2.0 is not in 0 < top_p <= 1; use e.g. 0.9"),
        (["a", "--beam", "2", "--n-best", "3"], "n_best=3 and beam=2 do not fit"),
        (["a", "--n-best", "99999999999"], "beam=99999999999 would fill the memory; use 10000 or less, such as 5"),
        (["a", "--beem", "2"], "unknown option --beem; did you mean --beam?"),
    ],
)
def test_wrong_use_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_wrong_draws_are_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(vision, "load_model", None)
    assert run("a", "--sample", "--temperature", "1e-40") == 2
    assert capsys.readouterr().err.startswith("error: temperature=1e-40 is not in")


def test_a_model_of_pictures_is_refused(model: EncoderDecoder, capsys: pytest.CaptureFixture) -> None:
    model.vocabularies = {}
    assert run("a") == 2
    assert "w.ckpt does not translate texts; use a checkpoint that vision fit has written" in capsys.readouterr().err


def test_a_full_memory_is_told_in_words_of_texts(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args, **options) -> None:
        raise MemoryError

    monkeypatch.setattr("vision.inference.translation.write", full)
    assert run("abc") == 2
    expected_line = "error: out of memory; try a smaller --beam, --batch-size or --max-length\n"
    assert capsys.readouterr().err == expected_line
