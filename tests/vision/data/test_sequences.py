"""Data modules for sequences: what they read and refuse, splits, vocabularies, toy rules, and a resume in mid-epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vision.data import EmbeddedCMUdict, PairsFile, ToySequences
from vision.data.pairs import Pair
from vision.data.sequences import read_pairs, split_pairs
from vision.errors import UserError
from vision.vocabulary import START, STOP, UNKNOWN


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def words(count: int) -> str:
    return "".join(f"w{i}\tx{'y' * (i % 7)}\n" for i in range(count))


# ------------------------------------------------------------------------------------------------------------ files


def test_a_file_of_pairs(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "\ufeffein Haus\ta house\r\nÜber\tover\tCC BY 2.0\n")
    assert read_pairs(file) == [("ein Haus", "a house"), ("Über", "over")]
    assert read_pairs(write(tmp_path / "b.tsv", "1\tx\ty"), (2, 1)) == [("y", "x")]  # no line end
    assert read_pairs(write(tmp_path / "c.tsv", "a\tb\n\n  \r\n\n")) == [("a", "b")]  # blank lines at the end


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("no tab", "no tab in it; write source, tab, target on each line"),
        ("", "the line is blank; take it out"),
        (" \r", "the line is blank; take it out"),
        ("\ta", "the source is empty; fill it in, or take the line out"),
        ("a\t  ", "the target is empty; fill it in, or take the line out"),
        (b"a\t\xff", "byte 0xff is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, rule: str) -> None:
    file = write(tmp_path / "a.tsv", b"a\tb\n" + (line.encode() if isinstance(line, str) else line) + b"\nc\td\n")
    with pytest.raises(UserError) as caught:
        read_pairs(file)
    assert str(caught.value) == f"{file}:2: {rule}"


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", "a\tb\n")
    with pytest.raises(UserError, match=r"a.tsv:1: 2 columns, wanted are 0 and 2 \(from 0\)"):
        read_pairs(file, (0, 2))
    with pytest.raises(UserError, match=r"b.tsv cannot be read \(No such file or directory\)"):
        read_pairs(tmp_path / "b.tsv")
    for text in ("", "\n\n", "\ufeff"):
        with pytest.raises(UserError, match=r"c.tsv is empty; write source, tab, target on each line$"):
            PairsFile(str(write(tmp_path / "c.tsv", text))).setup("fit")


def test_what_is_trained_on_is_not_measured_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, other = write(tmp_path / "t.tsv", words(20)), write(tmp_path / "v.tsv", words(3) + "new\tx\n")
    (tmp_path / "link.tsv").symlink_to(train)
    for val in (train, tmp_path / "link.tsv"):
        with pytest.raises(UserError, match=r"\.tsv is given for train and for val, which flatters the model; leave val out$"):
            PairsFile(str(train), str(val)).setup("fit")
    with pytest.raises(UserError, match=r"v.tsv is given for val and for test, which flatters the model; leave test out$"):
        PairsFile(str(train), str(other), str(other)).setup("fit")
    PairsFile(str(train)).setup("fit")
    assert not caplog.text
    PairsFile(str(train), str(other)).setup("fit")
    assert "3 of 4 pairs for val are trained on too, which flatters the model" in caplog.text


def test_splits_keep_the_pairs_of_a_source_together() -> None:
    pairs = [(f"s{i % 40}", f"t{i}") for i in range(100)]
    parts = split_pairs([Pair(*pair) for pair in pairs], {"val": 0.2, "test": 0.1}, seed=0)
    sources = {name: {pair.source for pair in part} for name, part in parts.items()}
    assert [len(sources[name]) for name in ("train", "val", "test")] == [28, 8, 4]
    assert not sources["train"] & sources["val"] | sources["train"] & sources["test"] | sources["val"] & sources["test"]
    assert sorted(p.target for part in parts.values() for p in part) == sorted(t for _, t in pairs)
    assert split_pairs([Pair(*pair) for pair in pairs], {"val": 0.2, "test": 0.1}, seed=1) != parts


def test_the_vocabulary_is_that_of_training(tmp_path: Path) -> None:
    train, val = write(tmp_path / "t.tsv", "ab\tx y\nba\ty\n"), write(tmp_path / "v.tsv", "ac\tx z\n")
    data = PairsFile(str(train), str(val), target_by="words")
    data.setup("fit")
    assert data.vocabularies["source"].symbols == ["a", "b"]
    assert data.vocabularies["target"].symbols == ["x", "y"]
    assert data.longest == {"source": 2, "target": 2}
    ((source, _), (target, lengths)) = next(iter(data.val_dataloader()))
    assert source.tolist() == [[4, UNKNOWN]]
    assert target.tolist() == [[START, 4, UNKNOWN, STOP]]
    assert lengths.tolist() == [4]


def test_a_row_longer_than_a_batch_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", words(50) + "long\t" + "z" * 99 + "\n")
    with pytest.raises(UserError, match=r"a.tsv, 'long': a target of 101 symbols is longer than a batch of tokens=100"):
        PairsFile(str(file), tokens=100, seed=1).setup("fit")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_share": 0}, "val_share=0 and test_share=0 leave nothing"),
        ({"val_share": 0.5, "test_share": 0.5}, "leave nothing to train on"),
        ({"columns": (0, -1)}, "are not the two of source and target"),
        ({"tokens": 0}, "tokens=0 of a batch are too few"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PairsFile("a.tsv", **options)


# ------------------------------------------------------------------------------------------------------------- sets


def test_the_embedded_dictionary() -> None:
    data = EmbeddedCMUdict()
    data.setup("fit")
    assert {name: len(pairs) for name, pairs in data.parts.items()} == {"train": 19_000, "val": 1_000, "test": 2_000}
    assert not {p.source for p in data.parts["train"]} & {p.source for p in [*data.parts["val"], *data.parts["test"]]}
    assert [len(data.vocabularies[side].symbols) for side in ("source", "target")] == [26, 39]
    assert data.vocabularies["source"].unknown("Thought") == []  # capital letters are read as small ones
    assert ("abner", "AE B N ER") in data.parts["test"]


@pytest.mark.parametrize(("rule", "expected"), [("copy", list), ("reverse", lambda x: x[::-1]), ("sort", sorted)])
def test_toy_rules(rule: str, expected) -> None:
    data = ToySequences(rule, symbols=6, shortest=3, longest_source=9, pairs=500)
    data.setup("fit")
    assert {name: len(pairs) for name, pairs in data.parts.items()} == {"train": 500, "val": 50, "test": 50}
    every = [pair for pairs in data.parts.values() for pair in pairs]
    assert len({pair.source for pair in every}) == 600  # no sequence twice, so none is tested that was trained on
    for source, target in every:
        assert target.split() == expected(source.split())
        assert 3 <= len(source.split()) <= 9
    again = ToySequences(rule, symbols=6, shortest=3, longest_source=9, pairs=500)
    again.setup("fit")
    assert again.parts == data.parts


@pytest.mark.usefixtures("unchecked")
def test_toys_that_cannot_be() -> None:
    with pytest.raises(UserError, match="rule='shuffle' is unknown; use copy, reverse, sort"):
        ToySequences("shuffle")
    with pytest.raises(UserError, match="make 14 different sequences, fewer than the 120 wanted"):
        ToySequences(symbols=2, shortest=1, longest_source=3, pairs=100).setup("fit")


# ----------------------------------------------------------------------------------------------------------- resume


def epoch(data: PairsFile, number: int) -> list:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return list(loader)


def same(a: list, b: list) -> bool:
    flat = [[x for pair in batches for padded in pair for x in padded] for batches in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(torch.equal(x, y) for x, y in zip(*flat, strict=True))


def test_a_resume_in_mid_epoch_goes_on_exactly(tmp_path: Path) -> None:
    """Lightning #18780, #19764: a resume repeats or loses data."""
    file = str(write(tmp_path / "a.tsv", words(300)))
    data, whole = PairsFile(file, tokens=64), PairsFile(file, tokens=64)
    data.setup("fit")
    whole.setup("fit")
    expected = epoch(whole, 1)
    loader = data.train_dataloader()
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]
    assert same(first, expected[:4])
    resumed = PairsFile(file, tokens=64)
    resumed.setup("fit")
    resumed.load_state_dict(data.state_dict())
    assert same(epoch(resumed, 1), expected[4:])


def test_a_resume_with_other_batches_starts_the_epoch_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = str(write(tmp_path / "a.tsv", words(300)))
    data = PairsFile(file, tokens=64)
    data.setup("fit")
    next(iter(data.train_dataloader()))
    other = PairsFile(file, tokens=128)
    other.setup("fit")
    other.load_state_dict(data.state_dict())
    assert len(epoch(other, 0)) == len(other._loader)
    assert "its epoch starts again from the beginning" in caplog.text
