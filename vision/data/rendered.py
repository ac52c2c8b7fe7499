"""Words as pictures, to be read: rendered by Pillow's own font, turned, slanted and spoiled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vision.data.augment import hashed
from vision.data.degradations import JPEG, Chain, Degradation, GaussianBlur, GaussianNoise
from vision.data.loading import EpochSampler, EvaluationSampler, Fetched, LoadedData, Loader, TrainingLoader
from vision.data.pairs import Ragged
from vision.data.sequences import read_pairs
from vision.errors import UserError
from vision.vocabulary import START, STOP, Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyz"
EVALUATION = -1  # in place of a seed: validation and test are always the same pictures


class RenderedWords(LoadedData):
    """Reading: pictures of the words of the embedded pronunciation dictionary, b 1 h w in -1..1, and their letters.

    Each picture has its own size of letters, place, slant, turn and grays, light on dark or dark on light, and is then
    spoiled. A training picture is drawn anew in every epoch, by (seed, epoch, word) alone. No tested word was trained on.

    After `setup`: `vocabularies` (target) and `longest` (letters of the longest target in training). Batches are
    `(pictures, (symbols b n, lengths b))`, as `vision.tasks.Sequence` takes them.

    Args:
        height, width: of the pictures, in pixels.
        shortest, longest_word: letters of the words that are used.
        degradation: what spoils a picture; None is blur, noise and JPEG of various strengths.
        words: so many are used for training; 0 is all.
        val_words: taken from training for validation.
        batch_size: pictures in a batch of one process.
        num_workers: processes that draw; 0 = none, -1 = one a processor, up to 8.
        seed: of the split, the order and the training pictures.

    Raises:
        UserError: a value is out of range.
    """

    def __init__(
        self,
        height: int = 32,
        width: int = 128,
        shortest: int = 3,
        longest_word: int = 10,
        degradation: Degradation | None = None,
        words: int = 0,
        val_words: int = 500,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        if height < 16 or width < 2 * height:
            raise UserError(f"height={height}, width={width} have no room for a word; use height=16 or more, width twice that")
        if not 1 <= shortest <= longest_word:
            raise UserError(f"words of {shortest} to {longest_word} letters are none; use 1 <= shortest <= longest_word")
        if words < 0 or val_words < 1:
            raise UserError(f"words={words}, val_words={val_words} are too few; use words=0 for all, val_words=1 or more")
        if degradation is not None and degradation.scale != 1:
            raise UserError(f"a degradation with scale={degradation.scale} makes pictures smaller; give smaller height and width")
        self.degradation = degradation or Chain([GaussianBlur((0.3, 1.2)), GaussianNoise((0.0, 40.0)), JPEG((20, 90))])
        self.size, self.lengths = (height, width), (shortest, longest_word)
        self.words, self.val_words = words, val_words
        self.vocabularies = {"target": Vocabulary(list(LETTERS))}
        self.longest: dict[str, int] = {}
        self.parts: dict[str, list[str]] = {}

    def setup(self, stage: str) -> None:
        """Reads the words, once."""
        if self.parts:
            return
        folder = Path(__file__).parent / "embedded" / "cmudict"
        read = {part: self.fitting(pair.source for pair in read_pairs(folder / f"{part}.tsv")) for part in ("train", "test")}
        order = np.random.default_rng(self.seed).permutation(len(read["train"]))
        shuffled = [read["train"][i] for i in order]
        if len(shuffled) <= self.val_words or not read["test"]:
            raise UserError(
                f"{len(shuffled)} words of {self.lengths[0]} to {self.lengths[1]} letters leave none to train on after "
                f"val_words={self.val_words}; take fewer, or words of other lengths"
            )
        train = shuffled[self.val_words :][: self.words or None]
        mixed = [read["test"][i] for i in np.random.default_rng(0).permutation(len(read["test"]))]  # figures show the first ones
        self.parts = {"train": train, "val": shuffled[: self.val_words], "test": mixed}
        self.longest = {"target": max(map(len, train))}

    def fitting(self, words: Any) -> list[str]:
        shortest, longest = self.lengths
        kept = (word for word in map(str.lower, words) if shortest <= len(word) <= longest and set(word) <= set(LETTERS))
        return list(dict.fromkeys(kept))

    # Loaders

    def train_dataloader(self) -> TrainingLoader:
        rank, world = self._process()
        pictures = WordPictures(self.parts["train"], self.vocabularies["target"], self.size, self.degradation, self.seed)
        sampler = EpochSampler(pictures, self.batch_size, seed=self.seed, rank=rank, world=world)
        return self._resumed(TrainingLoader(pictures, batch_size=self.batch_size, sampler=sampler, **self._loading()))

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()

    def _evaluation_loader(self, part: str) -> DataLoader:
        rank, world = self._process()
        pictures = WordPictures(self.parts[part], self.vocabularies["target"], self.size, self.degradation, EVALUATION)
        if world == 1:
            return Loader(pictures, batch_size=self.batch_size, **self._loading())
        sampler = EvaluationSampler(pictures, self.batch_size, rank=rank, world=world)
        return Loader(pictures, batch_size=sampler.batch_size, sampler=sampler, **self._loading())


class WordPictures(Dataset):
    """Keys are `(epoch, word)` in training, numbers of words elsewhere."""

    def __init__(
        self, words: Sequence[str], vocabulary: Vocabulary, size: tuple[int, int], degradation: Degradation, seed: int
    ) -> None:
        self.words, self.size, self.degradation, self.seed = list(words), size, degradation, seed
        self.targets = Ragged([[START, *vocabulary.encode(word), STOP] for word in words])

    def __len__(self) -> int:
        return len(self.words)

    def picture(self, key: int | tuple[int, int]) -> Float[Tensor, "1 h w"]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        rng = np.random.default_rng(int(hashed(self.seed, epoch, index)[0]))
        spoiled = self.degradation(rendered(self.words[index], self.size, rng), rng)
        return torch.from_numpy(np.ascontiguousarray(spoiled.clip(0, 1).transpose(2, 0, 1))) * 2 - 1

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Float[Tensor, "1 h w"], Int[Tensor, " n"]]:
        index = key[1] if isinstance(key, tuple) else key
        return self.picture(key), self.targets.padded(np.array([index]))[0][0]

    def __getitems__(self, keys: Sequence[Any]) -> Fetched:
        """As a loader asks for one batch."""
        rows = np.array([key[1] if isinstance(key, tuple) else key for key in keys])
        return Fetched(torch.stack([self.picture(key) for key in keys]), (self.targets.padded(rows),), [])


def rendered(word: str, size: tuple[int, int], rng: np.random.Generator) -> Float[np.ndarray, "h w 1"]:
    """A clean picture of a word, in 0..1: somewhere, of some size, slanted and turned a little."""
    height, width = size
    slant, turn = rng.uniform(-0.3, 0.3), np.radians(rng.uniform(-3, 3))
    letters = round(height * rng.uniform(0.45, 0.8))
    room = width - 2 - abs(slant) * height * 0.6
    while (box := font(letters).getbbox(word))[2] - box[0] > room and letters > 6:
        letters -= 1
    free = room - (box[2] - box[0]), height - 6 - (box[3] - box[1])
    left = (width - room) / 2 + rng.uniform(0, max(free[0], 0)) - box[0]
    top = 3 + rng.uniform(0, max(free[1], 0)) - box[1]
    ink = Image.new("L", (width, height))
    ImageDraw.Draw(ink).text((left, top), word, fill=255, font=font(letters))
    # Pillow asks where each place comes from: x + slant y, turned, about the centre
    a, b, c, d = np.cos(turn), slant + np.sin(turn), -np.sin(turn), np.cos(turn)
    x, y = width / 2, height / 2
    matrix = (a, b, x - a * x - b * y, c, d, y - c * x - d * y)
    ink = ink.transform(ink.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    light, dark = rng.uniform(0.6, 1.0), rng.uniform(0.0, 0.35)
    paper, written = (light, dark) if rng.random() < 0.5 else (dark, light)
    share = np.asarray(ink, np.float32)[..., None] / 255
    return (paper + (written - paper) * share).astype(np.float32)


@functools.cache
def font(size: int) -> Any:
    """Pillow's own, of this height in pixels."""
    return ImageFont.load_default(size)
