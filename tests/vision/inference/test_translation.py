"""Translation: one text as among many, search and draws, what is refused, and where the decoder looks."""

from __future__ import annotations

import pytest
import torch

from core import Decoder, Encoder, EncoderDecoder, Rotary
from vision.errors import UserError
from vision.inference.translation import Writing, cross_attention, explain, translate
from vision.vocabulary import NEVER, START, Vocabulary

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def model(perturbed) -> EncoderDecoder:
    sizes = {"dim": 16, "depth": 2, "heads": 2, "hidden": 16, "position": Rotary}
    made = perturbed(EncoderDecoder(Encoder(9, **sizes), Decoder(7, memory_dim=16, **sizes))).eval()
    made.vocabularies = {"source": Vocabulary(list("abcde")), "target": Vocabulary(["X", "Y", "Z"], "words")}
    made.limits = {"source": 12, "target": 6}
    return made


TEXTS = ["abc", "e", "deadbeadcab", "bad", "cab"]


@pytest.mark.parametrize("writing", [None, Writing(beam=3, n_best=2)])
def test_a_text_gives_the_same_alone_and_in_any_batch(model: EncoderDecoder, writing: Writing | None) -> None:
    alone = [translate(model, [text], writing)[0] for text in TEXTS]
    for size in (1, 2, 32):
        found = translate(model, TEXTS, writing, batch_size=size)
        assert [[t.text for t in targets] for targets in found] == [[t.text for t in targets] for targets in alone]
        assert [t.score for x in found for t in x] == pytest.approx([t.score for x in alone for t in x], abs=1e-5)


def test_alternatives_come_best_first(model: EncoderDecoder) -> None:
    (targets,) = translate(model, ["abc"], Writing(beam=4, n_best=3))
    assert len({target.text for target in targets}) == 3
    assert [target.score for target in targets] == sorted((target.score for target in targets), reverse=True)
    assert translate(model, ["abc"], Writing(beam=1))[0][0].text == translate(model, ["abc"])[0][0].text


def test_draws_follow_the_seed(model: EncoderDecoder) -> None:
    drawn = [[t[0].text for t in translate(model, TEXTS, Writing(temperature=1.5, seed=seed))] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = [t[0].text for t in translate(model, TEXTS)]
    assert [t[0].text for t in translate(model, TEXTS, Writing(temperature=1.0, top_k=1))] == greedy


@pytest.mark.parametrize("writing", [Writing(), Writing(beam=7, n_best=7), Writing(temperature=50.0)])
def test_only_symbols_are_written(model: EncoderDecoder, writing: Writing) -> None:
    """Padding, start and unknown are no symbols: a beam would hold texts twice that differ in them only."""
    for targets in translate(model, TEXTS * 4, writing):
        assert not any(set(target.tokens) & set(NEVER) for target in targets)
        assert len({target.text for target in targets}) == len(targets)


def test_the_greatest_length_cuts_and_says_so(model: EncoderDecoder) -> None:
    model.decoder.embedding.weight.data[2] = 0.0  # the stop symbol
    (targets,) = translate(model, ["abc"], Writing(max_length=3))
    assert not targets[0].finished
    assert len(targets[0].text.split()) <= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty; write at least one symbol"),
        ("abxy", "'abxy': the model does not know 'x', 'y'; it knows a b c d e"),
        ("a" * 13, "'aaaaaaaaaaaaa' has 13 symbols, the longest that the model can make sense of 12"),
    ],
)
def test_texts_that_are_refused(model: EncoderDecoder, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        translate(model, ["abc", text])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_best": 2}, "n_best=2 and beam=1 do not fit"),
        ({"top_k": 3}, "top_k and top_p are of draws"),
        ({"temperature": 1.0, "beam": 2}, "beam=2 searches and temperature=1 draws"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Writing(**options)


def test_a_model_without_vocabularies_is_refused() -> None:
    with pytest.raises(UserError, match="does not tell which symbols it reads"):
        translate(torch.nn.Linear(2, 2), ["a"])


def test_cross_attention_is_what_the_layers_use(model: EncoderDecoder, within) -> None:
    """Rows sum to 1, and the weights times the values give the layer's output."""
    source, target = torch.tensor([[4, 5, 6]]), torch.tensor([[START, 4, 5]])
    weights = cross_attention(model, source, target)
    assert weights.shape == (2, 1, 2, 3, 3)
    assert torch.allclose(weights.sum(-1), torch.ones(()))
    last, outputs = model.decoder.blocks[-1].cross_attention, []
    hook = last.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    memory = model.encoder(source)
    model.decoder(target, memory)
    hook.remove()
    _, values = last.of_memory(memory)
    within(last.out((weights[-1] @ values).transpose(1, 2).flatten(2)), outputs[0])
    assert not model.training


def test_the_picture_names_both_axes(model: EncoderDecoder) -> None:
    figure = explain(model, "bad")
    axes = figure.axes[-1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["b", "a", "d"]
    (target,) = translate(model, ["bad"])[0]
    rows = [*target.text.split(), *["(end)"] * target.finished]  # one that is cut has no end to look at
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert [axes.get_title() for axes in figure.axes] == ["layer 1", "layer 2", "mean"]
