"""The symbols of a language and their numbers: what data, checkpoints and translations share."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from vision.errors import UserError

PAD, START, STOP, UNKNOWN = range(4)
MARKERS = 4  # numbers that stand for no symbol: those above
NEVER = (PAD, START, UNKNOWN)  # those that are read, and never written

By = Literal["characters", "words"]


class Vocabulary:
    """Texts to numbers and back. Numbers 0 to 3 are padding, start, stop and "unknown"; the symbols follow.

    Texts are brought to Unicode's composed form (NFC) first: é is one symbol, however it was typed.

    Args:
        symbols: each once.
        by: a text is its characters, or words between blanks.
        lower: capital letters are read as small ones.

    Raises:
        UserError: symbols that are no texts or occur twice, another `by`.
    """

    def __init__(self, symbols: Sequence[str], by: By = "characters", lower: bool = False) -> None:
        if by not in ("characters", "words"):
            raise UserError(f"by={by!r} does not tell what a symbol is; use characters or words")
        if not all(isinstance(symbol, str) for symbol in symbols) or len(set(symbols)) < len(symbols):
            raise UserError("the symbols of a vocabulary are texts, each of which occurs once; remove what occurs twice")
        self.symbols, self.by, self.lower = list(symbols), by, bool(lower)
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols, MARKERS)}

    @classmethod
    def of(cls, texts: Iterable[str], by: By = "characters", lower: bool = False) -> Vocabulary:
        """The symbols of these texts, in the order of their code points."""
        empty = cls([], by, lower)
        return cls(sorted({symbol for text in texts for symbol in empty.split(text)}), by, lower)

    def __len__(self) -> int:
        """The markers included: what a model is built for."""
        return MARKERS + len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.plain() == other.plain()

    def split(self, text: str) -> list[str]:
        """The symbols of a text."""
        text = unicodedata.normalize("NFC", text.lower() if self.lower else text)
        return text.split() if self.by == "words" else list(text)

    def encode(self, text: str) -> list[int]:
        """Numbers of the symbols, without start and stop; those that are not here become `UNKNOWN`."""
        return [self.numbers.get(symbol, UNKNOWN) for symbol in self.split(text)]

    def unknown(self, text: str) -> list[str]:
        """The symbols of a text that are not here, each once."""
        return [symbol for symbol in dict.fromkeys(self.split(text)) if symbol not in self.numbers]

    def labels(self, numbers: Iterable[int]) -> list[str]:
        """What is written for each number: the symbol, or `<unk>`; padding, start and stop are left out."""
        kept = (number for number in numbers if number >= UNKNOWN)
        return ["<unk>" if number == UNKNOWN else self.symbols[number - MARKERS] for number in kept]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of the numbers."""
        return (" " if self.by == "words" else "").join(self.labels(numbers))

    def plain(self) -> dict[str, Any]:
        """Plain values: `Vocabulary(**plain)` is the same again."""
        return {"symbols": self.symbols, "by": self.by, "lower": self.lower}


def from_card(card: Mapping[str, Any] | None) -> dict[str, Vocabulary]:
    """The vocabularies that a checkpoint's card holds, by side (source, target); none for a model of no sequences."""
    found = (card or {}).get("vocabularies") or {}
    try:
        return {str(side): Vocabulary(**plain) for side, plain in found.items()}
    except (TypeError, AttributeError) as error:
        raise UserError(f"the file's vocabularies cannot be read ({error}); use the file as it was written") from error
