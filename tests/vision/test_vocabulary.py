"""Symbols and numbers: there and back, unknown ones, Unicode, and what a file may not bring."""

from __future__ import annotations

import pytest

from vision.errors import UserError
from vision.vocabulary import MARKERS, PAD, START, STOP, UNKNOWN, Vocabulary, from_card


def test_there_and_back() -> None:
    letters = Vocabulary.of(["cab", "bad"])
    assert letters.symbols == ["a", "b", "c", "d"]
    assert len(letters) == MARKERS + 4
    assert letters.encode("dab") == [7, 4, 5]
    assert letters.decode([START, 7, 4, 5, STOP, PAD, PAD]) == "dab"
    phones = Vocabulary.of(["TH AO  T", "K AE T"], by="words")
    assert phones.symbols == ["AE", "AO", "K", "T", "TH"]
    assert phones.decode(phones.encode(" K  AO T ")) == "K AO T"


def test_unknown_symbols_have_one_number_and_are_named() -> None:
    letters = Vocabulary.of(["ab"])
    assert letters.encode("axb") == [4, UNKNOWN, 5]
    assert letters.unknown("xaxy") == ["x", "y"]
    assert letters.decode([4, UNKNOWN]) == "a<unk>"


def test_a_symbol_written_like_a_marker_is_a_symbol() -> None:
    words = Vocabulary.of(["<pad> <unk>"], by="words")
    assert words.encode("<pad> <unk>") == [4, 5]
    assert words.decode([4, 5]) == "<pad> <unk>"


def test_text_is_composed_first() -> None:
    letters = Vocabulary.of(["cafe\u0301"])  # e and an accent
    assert letters.encode("caf\u00e9") == letters.encode("cafe\u0301")
    assert len(letters.encode("cafe\u0301")) == 4
    assert Vocabulary.of(["Ab"], lower=True).encode("aB") == [4, 5]


def test_plain_values_are_the_same_again() -> None:
    before = Vocabulary.of(["x y", "z"], by="words", lower=True)
    assert Vocabulary(**before.plain()) == before
    assert from_card({"vocabularies": {"source": before.plain()}}) == {"source": before}
    assert from_card(None) == from_card({}) == {}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"symbols": ["a", "a"]}, "occurs once"),
        ({"symbols": ["a", 3]}, "are texts"),
        ({"symbols": ["a"], "by": "syllables"}, "characters or words"),
        ({"symbols": ["a"], "code": "x"}, "cannot be read"),
        ({"symbols": 5}, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_line(plain: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_card({"vocabularies": {"source": plain}})
