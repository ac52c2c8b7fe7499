"""Lightning data modules for sequences: pairs from a file, the embedded pronunciation dictionary, and toy tasks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Int
from torch.utils.data import DataLoader

from vision.data.loading import EpochSampler, EvaluationSampler, LoadedData, Loader, TrainingLoader
from vision.data.pairs import Pair, PairBatches, Ragged
from vision.errors import UserError
from vision.vocabulary import START, STOP, By, Vocabulary

log = logging.getLogger(__name__)


class SequenceData(LoadedData, ABC):
    """What the data modules for sequences share: vocabularies, batches by length, loaders.

    After `setup`: `vocabularies` (source and target, from the training pairs) and `longest` (symbols of the longest source
    and target in training). Batches are `(source, target)`, each `(symbols b n, lengths b)` with padding on the right; targets
    begin with `START` and end with `STOP`. Symbols of validation and test that training lacks become `UNKNOWN`.

    The order of an epoch depends only on (seed, epoch), every pair comes once, and checkpoints keep the place in the epoch: a
    run that was interrupted anywhere goes on exactly as it would have.
    """

    vocabularies: dict[str, Vocabulary]
    longest: dict[str, int]

    def __init__(self, tokens: int, seed: int, bucket: int = 1) -> None:
        if tokens < 1:
            raise UserError(f"tokens={tokens} of a batch are too few; use e.g. 4096")
        if bucket < 1:
            raise UserError(f"bucket={bucket} is no width of lengths; use 1 for batches of equal lengths, or e.g. 4")
        super().__init__(tokens, 0, seed)  # no workers: a batch is an index into memory
        self.tokens, self.bucket = tokens, bucket
        self.parts: dict[str, list[Pair]] = {}
        self._rows: dict[str, tuple[Ragged, Ragged]] = {}

    @abstractmethod
    def read(self) -> dict[str, list[Pair]]:
        """The pairs of train, val and test; without test the validation pairs are tested on."""

    @abstractmethod
    def build_vocabularies(self, train: Sequence[Pair]) -> dict[str, Vocabulary]:
        """Source and target."""

    def setup(self, stage: str) -> None:
        """Reads the pairs, once."""
        if not self.parts:
            parts = self.read()
            for name in ("train", "val"):
                if not parts.get(name):
                    raise UserError(f"there are no pairs for {name}; give more pairs, or another val_share")
            self.vocabularies = self.build_vocabularies(parts["train"])
            self._rows = {name: self.encoded(pairs) for name, pairs in parts.items() if pairs}
            self.longest = {
                side: int(rows.lengths.max()) for side, rows in zip(("source", "target"), self._rows["train"], strict=True)
            }
            self.longest["target"] -= 2  # start and stop
            self.parts = parts
            self.check_lengths()
        if stage == "test" and not self.parts.get("test"):
            log.warning("no test pairs: testing on the validation pairs, which flatters a model chosen by them")

    def encoded(self, pairs: Sequence[Pair]) -> tuple[Ragged, Ragged]:
        source, target = self.vocabularies["source"], self.vocabularies["target"]
        return (
            Ragged([source.encode(pair.source) for pair in pairs]),
            Ragged([[START, *target.encode(pair.target), STOP] for pair in pairs]),
        )

    def check_lengths(self) -> None:
        for name, rows in self._rows.items():
            for side, part in zip(("source", "target"), rows, strict=True):
                worst = int(part.lengths.argmax())
                if part.lengths[worst] > self.tokens:
                    raise UserError(
                        f"{self.place(name, worst)}: a {side} of {part.lengths[worst]} symbols is longer than a batch of "
                        f"tokens={self.tokens}; raise tokens, or take the line out"
                    )

    def place(self, part: str, row: int) -> str:
        """Where a pair stands."""
        return f"{part} pair {row + 1}"

    # Loaders

    def train_dataloader(self) -> TrainingLoader:
        rank, world = self._process()
        batches = PairBatches(*self._rows["train"], self.tokens, seed=self.seed, world=world, bucket=self.bucket)
        sampler = EpochSampler(batches, 1, seed=self.seed, rank=rank, world=world)
        if self._resume is not None and self._resume.pop("batches", len(batches)) != len(batches):
            log.warning("the batches are other ones than in the checkpoint: its epoch starts again from the beginning")
            self._resume = None
        return self._resumed(TrainingLoader(batches, batch_size=1, sampler=sampler, **self._loading()))

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader("test" if self.parts.get("test") else "val")

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()

    def _evaluation_loader(self, part: str) -> DataLoader:
        rank, world = self._process()
        batches = PairBatches(*self._rows[part], max(self.tokens, 4096), world=world)  # larger ones fit: no gradients
        sampler = EvaluationSampler(batches, 1, rank=rank, world=world) if world > 1 else None
        return Loader(batches, batch_size=1, sampler=sampler, **self._loading())

    def state_dict(self) -> dict[str, int]:
        """The place in the training epoch, in batches of all processes, and how many batches it has."""
        place = super().state_dict()
        if self._loader is None:
            return place
        return {**place, "batches": len(cast("PairBatches", self._loader.dataset))}


class PairsFile(SequenceData):
    """Pairs of texts from tab-separated UTF-8 files, one pair a line: source, tab, target.

    Without a file for validation or test, a share of the training pairs is taken. All pairs of one source go the same way, so
    that no tested source was trained on.

    Args:
        train: the file; further columns are passed over.
        val: file for validation; empty takes `val_share` of the training pairs.
        test: file for the test; empty takes `test_share` of the training pairs.
        columns: which columns are source and target, from 0.
        source_by, target_by: symbols of each side, characters or words between blanks.
        lower: capital letters of sources are read as small ones.
        val_share, test_share: 0..1; test_share 0 tests on the validation pairs.
        tokens: budget of a batch: rows times longest row, padding included.
        seed: of the split and the order.
        bucket: lengths up to the next multiple of it go into one batch: more mixed batches, more padding.

    Raises:
        UserError: a file that cannot be read, holds no pairs or is given twice, a line that is no pair (file, line number, rule,
            fix), a value out of range.
    """

    def __init__(
        self,
        train: str,
        val: str = "",
        test: str = "",
        columns: tuple[int, int] = (0, 1),
        source_by: By = "characters",
        target_by: By = "characters",
        lower: bool = False,
        val_share: float = 0.05,
        test_share: float = 0.0,
        tokens: int = 4096,
        seed: int = 0,
        bucket: int = 1,
    ) -> None:
        super().__init__(tokens, seed, bucket)
        if not 0 < val_share < 1 or not 0 <= test_share < 1 - val_share:
            raise UserError(
                f"val_share={val_share:g} and test_share={test_share:g} leave nothing to train on or to validate on; "
                "use e.g. 0.05 and 0.05"
            )
        if len(columns) != 2 or min(columns) < 0:
            raise UserError(f"columns={tuple(columns)} are not the two of source and target, from 0; use e.g. (0, 1)")
        self.files = {"train": train, "val": val, "test": test}
        self.columns, self.by, self.lower = (columns[0], columns[1]), (source_by, target_by), lower
        self.val_share, self.test_share = val_share, test_share

    def read(self) -> dict[str, list[Pair]]:
        check_apart({name: Path(file) for name, file in self.files.items() if file})
        parts = {name: read_pairs(Path(file), self.columns) for name, file in self.files.items() if file}
        shares = {"val": self.val_share, "test": self.test_share}
        parts |= split_pairs(parts["train"], {n: share for n, share in shares.items() if n not in parts}, self.seed)
        trained = set(parts["train"])
        for name in ("val", "test"):
            if shared := sum(pair in trained for pair in parts[name]):
                log.warning("%d of %d pairs for %s are trained on too, which flatters the model", shared, len(parts[name]), name)
        return parts

    def build_vocabularies(self, train: Sequence[Pair]) -> dict[str, Vocabulary]:
        return {
            "source": Vocabulary.of((pair.source for pair in train), self.by[0], self.lower),
            "target": Vocabulary.of((pair.target for pair in train), self.by[1]),
        }

    def place(self, part: str, row: int) -> str:
        pair = self.parts[part][row]
        return f"{self.files[part] or self.files['train']}, {pair.source[:40]!r}"


class EmbeddedCMUdict(PairsFile):
    """English words and their pronunciation, from the CMU Pronouncing Dictionary: 20,000 pairs to train on, 2,000 to test.

    Sources are letters, targets phones (39, without stress), as `thought` and `TH AO T`. Each word has one pronunciation.

    Args:
        val_share: of the 20,000, for validation, 0..1.
        tokens: budget of a batch: rows times longest row, padding included.
        seed: of the split and the order.
        bucket: lengths up to the next multiple of it go into one batch: more mixed batches, more padding.
    """

    def __init__(self, val_share: float = 0.05, tokens: int = 4096, seed: int = 0, bucket: int = 1) -> None:
        folder = Path(__file__).parent / "embedded" / "cmudict"
        train, test = str(folder / "train.tsv"), str(folder / "test.tsv")
        options: dict[str, Any] = {"val_share": val_share, "tokens": tokens, "seed": seed, "bucket": bucket}
        super().__init__(train, test=test, target_by="words", lower=True, **options)


class ToySequences(SequenceData):
    """Made-up sequences to copy, reverse or sort: does a model learn at all? No sequence is in two of train, val and test.

    Args:
        rule: what the target is of the source.
        symbols: how many there are; their names are numbers.
        shortest, longest_source: lengths, drawn uniformly.
        pairs: drawn for training; a tenth as many for validation, and for the test.
        tokens: budget of a batch: rows times longest row, padding included.
        seed: of the sequences and the order.
    """

    def __init__(
        self,
        rule: Literal["copy", "reverse", "sort"] = "copy",
        symbols: int = 10,
        shortest: int = 4,
        longest_source: int = 12,
        pairs: int = 10_000,
        tokens: int = 4096,
        seed: int = 0,
    ) -> None:
        super().__init__(tokens, seed)
        if rule not in RULES:
            raise UserError(f"rule={rule!r} is unknown; use {', '.join(RULES)}")
        if symbols < 2 or not 1 <= shortest <= longest_source or pairs < 10:
            raise UserError(
                f"symbols={symbols}, lengths {shortest} to {longest_source}, pairs={pairs} make no task; "
                "use 2 symbols or more, 1 <= shortest <= longest_source, 10 pairs or more"
            )
        self.rule, self.symbols, self.lengths, self.pairs = rule, symbols, (shortest, longest_source), pairs

    def read(self) -> dict[str, list[Pair]]:
        random = np.random.default_rng(self.seed)
        total = self.pairs + 2 * (self.pairs // 10)
        lengths = random.integers(self.lengths[0], self.lengths[1] + 1, 2 * total)
        drawn = {tuple(random.integers(0, self.symbols, n).tolist()) for n in lengths}
        rows = sorted(drawn)
        random.shuffle(rows)
        if len(rows) < total:
            raise UserError(
                f"{self.symbols} symbols in lengths {self.lengths[0]} to {self.lengths[1]} make {len(rows)} different sequences, "
                f"fewer than the {total} wanted; use fewer pairs, or longer sequences"
            )
        every = [Pair(written(row), written(RULES[self.rule](row))) for row in rows[:total]]
        tenth = self.pairs // 10
        return {"train": every[: self.pairs], "val": every[self.pairs : -tenth], "test": every[-tenth:]}

    def build_vocabularies(self, train: Sequence[Pair]) -> dict[str, Vocabulary]:
        names = Vocabulary([str(symbol) for symbol in range(self.symbols)], "words")
        return {"source": names, "target": names}


RULES: dict[str, Callable[[tuple[int, ...]], Iterable[int]]] = {
    "copy": lambda row: row,
    "reverse": lambda row: row[::-1],
    "sort": sorted,
}


def written(row: Iterable[int]) -> str:
    return " ".join(map(str, row))


def check_apart(files: dict[str, Path]) -> None:
    """Raises UserError: one file is given for two parts, such as training and validation."""
    names: dict[Path, str] = {}
    for name, file in files.items():
        if (other := names.setdefault(file.resolve(), name)) != name:
            raise UserError(f"{file} is given for {other} and for {name}, which flatters the model; leave {name} out")


def read_pairs(file: Path, columns: tuple[int, int] = (0, 1)) -> list[Pair]:
    """The pairs of a file.

    Raises:
        UserError: it cannot be read or holds no pairs, or a line is not UTF-8, blank, has too few columns or an empty one.
    """
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")  # a byte order mark is no symbol
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error}); give a file of pairs") from error
    while lines and not lines[-1].strip(b" \r"):
        lines.pop()  # what follows the last line's end, and blank lines there
    if not lines:
        raise UserError(f"{file} is empty; write source, tab, target on each line")
    return [read_pair(line, f"{file}:{number}", columns) for number, line in enumerate(lines, 1)]


def read_pair(line: bytes, place: str, columns: tuple[int, int]) -> Pair:
    try:
        cells = line.decode("utf-8").rstrip("\r").split("\t")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise UserError(f"{place}: byte {byte:#04x} is not UTF-8; save the file as UTF-8") from None
    if not line.strip(b" \r"):
        raise UserError(f"{place}: the line is blank; take it out")
    if len(cells) <= max(columns):
        rule = "no tab in it" if len(cells) == 1 else f"{len(cells)} columns, wanted are {columns[0]} and {columns[1]} (from 0)"
        raise UserError(f"{place}: {rule}; write source, tab, target on each line")
    source, target = (cells[column].strip() for column in columns)
    if not source or not target:
        raise UserError(f"{place}: the {'target' if source else 'source'} is empty; fill it in, or take the line out")
    return Pair(source, target)


def split_pairs(pairs: Sequence[Pair], shares: dict[str, float], seed: int) -> dict[str, list[Pair]]:
    """Takes shares of the sources, and of each all its pairs; "train" is the rest."""
    sources = list(dict.fromkeys(pair.source for pair in pairs))
    order: Int[np.ndarray, " n"] = np.random.default_rng(seed).permutation(len(sources))
    part_of = dict.fromkeys(sources, "train")
    start = 0
    for name, share in shares.items():
        end = start + (max(1, round(share * len(sources))) if share else 0)
        part_of |= {sources[i]: name for i in order[start:end]}
        start = end
    parts: dict[str, list[Pair]] = {name: [] for name in ("train", *shares)}
    for pair in pairs:
        parts[part_of[pair.source]].append(pair)
    return parts
