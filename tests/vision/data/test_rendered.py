"""Words as pictures: seeded, held apart, whole, and what the task Sequence takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Trainer

from core import Decoder, EncoderDecoder
from vision.data import Downsample, GaussianBlur, RenderedWords
from vision.data.rendered import rendered
from vision.errors import UserError
from vision.models import ConvStem, ImageEncoder, ViT
from vision.tasks import Sequence
from vision.vocabulary import START, STOP


@pytest.fixture(scope="module")
def data():
    made = RenderedWords(batch_size=16)
    made.setup("fit")
    return made


def test_no_tested_word_was_trained_on(data):
    train, val, test = (set(data.parts[name]) for name in ("train", "val", "test"))
    assert not train & val
    assert not (train | val) & test
    assert len(val) == 500
    assert len(test) > 1500
    assert {len(word) for word in train} <= set(range(3, 11))
    assert data.longest == {"target": 10}


def test_a_batch_is_pictures_and_their_letters(data):
    pictures, (tokens, lengths) = next(iter(data.val_dataloader()))
    assert pictures.shape == (16, 1, 32, 128)
    assert pictures.dtype == torch.float32
    assert pictures.min() >= -1
    assert pictures.max() <= 1
    decode = data.vocabularies["target"].decode
    words = [decode(row[1 : n - 1]) for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    assert words == data.parts["val"][:16]
    assert (tokens[:, 0] == START).all()
    assert (tokens.gather(1, lengths[:, None] - 1) == STOP).all()


def test_training_pictures_depend_on_seed_epoch_and_word_alone(data):
    words = data.train_dataloader().dataset
    assert torch.equal(words.picture((1, 5)), words.picture((1, 5)))
    assert not torch.equal(words.picture((1, 5)), words.picture((2, 5)))
    other = RenderedWords(seed=1)
    other.setup("fit")
    again = RenderedWords()
    again.setup("fit")
    assert torch.equal(again.train_dataloader().dataset.picture((1, 5)), words.picture((1, 5)))
    assert again.parts == data.parts
    assert other.parts["train"] != data.parts["train"]
    tests = [next(iter(each.test_dataloader()))[0] for each in (data, other)]
    assert torch.equal(tests[0][:16], tests[1][:16]), "the test is the same for every seed"


def test_a_clean_word_lies_whole_within_its_picture():
    """Its ink leaves the border free, whatever the size, the slant and the turn."""
    for seed, word in enumerate(["jig", "quickly", "mmmmmmmmmm"] * 30):
        picture = rendered(word, (32, 128), np.random.default_rng(seed))[..., 0]
        ink = np.abs(picture - np.median(picture)) > 0.1
        border = np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])
        assert ink.mean() > 0.01
        assert border.mean() < 0.02, f"{word} of seed {seed} is cut"


def test_a_model_reads_after_training(tmp_path, unchecked):
    """Two easy words of different length, the whole way: data, task, greedy and beam; figure and checkpoint."""
    torch.manual_seed(0)
    data = RenderedWords(32, 64, 3, 3, degradation=GaussianBlur(0.3), words=32, val_words=8, batch_size=8)
    data.setup("fit")
    data.parts = {"train": ["aaa", "ill"] * 16, "val": ["aaa", "ill"], "test": ["ill", "aaa"]}
    backbone = ViT(32, 8, 1, 0, 32, 1, 2, global_pool="avg", class_tokens=0, stem=ConvStem)
    model = EncoderDecoder(ImageEncoder(backbone), Decoder(30, 32, 1, 2, 32, memory_dim=32, dropout=0))
    task = Sequence(model, lr=5e-3, beam=2, label_smoothing=0)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=15, accelerator="cpu", default_root_dir=tmp_path, limit_val_batches=0, **options)
    trainer.fit(task, data)
    (measured,) = trainer.test(task, data, verbose=False)
    assert measured["test/per"] == 0
    assert [example[1:] for example in task.examples] == [("ill", "ill"), ("aaa", "aaa")]
    assert task.tables() == {"Examples": (("written", "target"), [("ill", "ill"), ("aaa", "aaa")])}
    assert len(task.pictures) == 2
    figure = task.figures(trainer)["read"]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["ill", "aaa"]
    assert len(figure.axes[0].images) == 1
    assert "source" not in task.card()["vocabularies"]
    assert not list(Path(tmp_path).iterdir())


def test_errors():
    with pytest.raises(
        UserError, match=r"^height=8, width=128 have no room for a word; use height=16 or more, width twice that$"
    ):
        RenderedWords(height=8)
    with pytest.raises(UserError, match=r"^words of 5 to 4 letters are none; use 1 <= shortest <= longest_word$"):
        RenderedWords(shortest=5, longest_word=4)
    with pytest.raises(UserError, match=r"^words=-1, val_words=500 are too few; use words=0 for all, val_words=1 or more$"):
        RenderedWords(words=-1)
    with pytest.raises(UserError, match=r"^a degradation with scale=2 makes pictures smaller; give smaller height and width$"):
        RenderedWords(degradation=Downsample(2))
    with pytest.raises(UserError, match=r"^\d+ words of 3 to 3 letters leave none to train on after val_words=5000; take fewer"):
        RenderedWords(longest_word=3, val_words=5000).setup("fit")
