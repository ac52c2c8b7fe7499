"""Recurrent baselines against torch's cells step by step, and the equalities that every decoder here keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import vision
from core import AdditiveScores, EncoderDecoder, GnmtPenalty, MultiplicativeScores, StraightThrough, beam_search, greedy
from vision.inference.translation import cross_attention
from vision.models import RNNDecoder, RNNEncoder
from vision.rebuild import build, describe

KINDS = {"none": None, "additive": partial(AdditiveScores, hidden=10), "multiplicative": MultiplicativeScores}


def model(score=None, cell=nn.GRU, layers=1, select=None, **options):
    options |= {"select": select} if select else {}
    encoder = RNNEncoder(9, 12, layers, cell=cell)
    made = EncoderDecoder(encoder, RNNDecoder(7, 16, layers, 12, score=score, cell=cell, tied=False, **options)).eval()
    with torch.no_grad():
        made.decoder.output.weight.mul_(8)  # opinions: beams and greedy differ
    return made


def by_cells(rnn, x, state, reverse=False):
    """One layer and direction of torch's GRU, by GRUCell with its weights."""
    cell, suffix = nn.GRUCell(rnn.input_size, rnn.hidden_size), "_l0_reverse" if reverse else "_l0"
    cell.load_state_dict({name: getattr(rnn, name + suffix) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})
    states = []
    for i in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        state = cell(x[:, i], state)
        states.append(state)
    return torch.stack(states[::-1] if reverse else states, dim=1)


@torch.no_grad()
def test_encoder_is_torchs_gru_in_both_directions(within):
    encoder = RNNEncoder(9, 12).eval()
    tokens = torch.randint(0, 9, (3, 6))
    x, zero = encoder.embedding(tokens), torch.zeros(3, 6)
    both = torch.cat([by_cells(encoder.rnn, x, zero), by_cells(encoder.rnn, x, zero, reverse=True)], dim=-1)
    within(encoder(tokens), both)
    torch_gru = nn.GRU(12, 6, batch_first=True, bidirectional=True)
    torch_gru.load_state_dict(encoder.rnn.state_dict())
    within(encoder(tokens), torch_gru(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_decoder_is_its_equations_a_step_at_a_time(kind, within):
    made = model(KINDS[kind])
    decoder, memory, tokens = made.decoder, torch.randn(2, 5, 12), torch.randint(0, 7, (2, 4))
    state, scores = torch.tanh(decoder.first(torch.cat([memory[:, -1, :6], memory[:, 0, 6:]], dim=1))), []
    for now in by_cells(decoder.rnn, decoder.embedding(tokens), state).unbind(1):
        x = now
        if kind != "none":
            parts = decoder.attention.score
            if kind == "additive":
                energy = parts.score(torch.tanh(parts.query(now)[:, None] + parts.key(memory)))[..., 0]
            else:
                energy = torch.einsum("bc,bmc->bm", parts.query(now), memory)
            found = torch.einsum("bm,bmc->bc", energy.softmax(dim=1), memory)
            x = torch.tanh(decoder.join.weight @ torch.cat([found, now], dim=1).T).T
        scores.append(decoder.output(x))
    within(decoder(tokens, memory), torch.stack(scores, dim=1))


@torch.no_grad()
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, cell, within):
    made = model(KINDS[kind], cell, layers=2)
    source, target, lengths = torch.randint(0, 9, (3, 6)), torch.randint(0, 7, (3, 5)), torch.tensor([6, 2, 4])
    padded = made(source, target, source_real=lengths)
    same = made(source, target, source_real=torch.arange(6) < lengths[:, None], target_real=torch.tensor([5, 3, 1]))
    for row, length in enumerate(lengths.tolist()):
        within(padded[row : row + 1], made(source[row : row + 1, :length], target[row : row + 1]))
    within(same[1, :3], padded[1, :3])
    memory = made.encoder(source, real=lengths).masked_fill(~(torch.arange(6) < lengths[:, None])[..., None], float("nan"))
    within(made.decoder(target, memory, memory_real=lengths), padded)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["additive", "multiplicative"])
def test_weights_of_the_attention_sum_to_one_over_real_places(kind):
    made, lengths = model(KINDS[kind]), torch.tensor([5, 2])
    source, target = torch.randint(0, 9, (2, 5)), torch.randint(0, 7, (2, 4))
    weights = made.decoder.look(target, made.encoder(source, real=lengths), memory_real=lengths)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4))
    assert (weights[1, :, 2:] == 0).all()
    assert (weights[1, :, :2] > 0).all()
    assert cross_attention(made, source, target).shape == (1, 2, 1, 4, 5)


def same_sequences(a, b):
    assert [(h.tokens, h.finished) for h in a] == [(h.tokens, h.finished) for h in b]
    assert [h.score for h in a] == pytest.approx([h.score for h in b], abs=1e-4)


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_is_uncached_and_a_batch_is_its_rows(kind, cell):
    made, lengths = model(KINDS[kind], cell), torch.tensor([5, 1, 3, 4])
    source, start = torch.randint(0, 9, (4, 5)), torch.ones(4, 1, dtype=torch.long)
    memory = made.encoder(source, real=lengths)
    free = [h.tokens for h in greedy(made.decoder, start, memory, stop=(), max_length=8, memory_real=lengths)]
    stop = max(range(7), key=lambda s: len({row.index(s) if s in row else 9 for row in free}))  # rows end at several steps
    options = {"stop": stop, "max_length": 8, "memory_real": lengths}
    found = greedy(made.decoder, start, memory, **options)
    same_sequences(greedy(made.decoder, start, memory, **options, cache=False), found)
    beams = {"beam": 4, "n_best": 2, "penalty": GnmtPenalty(0.8)}
    best = beam_search(made.decoder, start, memory, **options, **beams)
    plain = beam_search(made.decoder, start, memory, **options, **beams, cache=False)
    for row, length in enumerate(lengths.tolist()):
        same_sequences(plain[row], best[row])
        alone = made.encoder(source[row : row + 1, :length])
        same_sequences(greedy(made.decoder, start[:1], alone, stop=stop, max_length=8), found[row : row + 1])
    with torch.no_grad():  # symbol by symbol, then two at once
        cache, target = made.decoder.new_cache(4, 8), torch.randint(0, 7, (4, 5))
        whole = made.decoder(target, memory, memory_real=lengths)
        steps = [made.decoder(target[:, :1], memory, memory_real=lengths, cache=cache)]
        steps += [made.decoder(target[:, i:j], cache=cache) for i, j in ((1, 2), (2, 4), (4, 5))]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)


@torch.no_grad()
def test_no_symbol_sees_a_later_one():
    made, source = model(KINDS["additive"]), torch.randint(0, 9, (1, 5))
    target = torch.randint(0, 7, (1, 6))
    other = torch.cat([target[:, :3], (target[:, 3:] + 1) % 7], dim=1)
    a, b = made(source, target), made(source, other)
    torch.testing.assert_close(a[:, :3], b[:, :3])
    assert not torch.allclose(a[:, 3:], b[:, 3:])


@pytest.mark.parametrize("select", [None, partial(StraightThrough, temperature=0.5)])
def test_plain_values_build_it_again(select):
    made = model(KINDS["additive"], nn.LSTM, layers=2, select=select)
    again = build(describe(made)).eval()
    again.load_state_dict(made.state_dict())
    source, target = torch.randint(0, 9, (2, 5)), torch.randint(0, 7, (2, 4))
    assert torch.equal(again(source, target), made(source, target))


def test_every_parameter_learns():
    made = model(KINDS["additive"], nn.LSTM).train()
    made(torch.randint(0, 9, (2, 5)), torch.randint(0, 7, (2, 4)), source_real=torch.tensor([5, 3])).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dim": 0}, "dim=0 is too small; use 1 or more"),
        ({"layers": 0}, "layers=0 is too small; use 1 or more"),
        ({"cell": "GRU"}, "cell='GRU' makes nothing; give a class"),
        ({"dropout": 2}, "dropout=2 is not in 0 <= dropout < 1; use e.g. 0.1"),
    ],
)
@pytest.mark.parametrize("part", [RNNEncoder, RNNDecoder])
def test_options_that_make_no_network_are_refused(part, options, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        part(9, **options)


def test_errors():
    made, source, target = model(), torch.randint(0, 9, (2, 5)), torch.randint(0, 7, (2, 4))
    left = torch.arange(5) >= torch.tensor([[0], [2]])
    with pytest.raises(ValueError, match=r"^padding is not on the right, where a recurrent network can leave it out; pad on the"):
        made.encoder(source, real=left)
    with pytest.raises(ValueError, match=r"^dim=7 is odd, and both directions have a half; use dim=8$"):
        RNNEncoder(9, 7)
    with pytest.raises(ValueError, match=r"^cell=RNN is no recurrent network with gates; use torch.nn.GRU or torch.nn.LSTM$"):
        RNNEncoder(9, 8, cell=nn.RNN)
    with pytest.raises(ValueError, match=r"^memory of shape \(2, 5, 9\) is not b m 12; use an encoder of that width$"):
        made.decoder(target, torch.zeros(2, 5, 9))
    with pytest.raises(ValueError, match=r"^a recurrent network reads one sequence a row; unpack segments, or use core.Encoder"):
        made.encoder(source, segments=torch.ones_like(source))
    with pytest.raises(ValueError, match=r"^this decoder needs a memory; pass memory=encoder\(source\)$"):
        made.decoder(target)
    with pytest.raises(ValueError, match=r"^this decoder has no attention \(score is None\); build it with a score"):
        made.decoder.look(target, made.encoder(source))
    cache = made.decoder.new_cache(2, 9)
    with torch.no_grad():
        made.decoder(target, made.encoder(source), cache=cache)
        with pytest.raises(ValueError, match=r"^the cache has its memory already; pass memory=None, or a new cache"):
            made.decoder(target, made.encoder(source), cache=cache)
        with pytest.raises(ValueError, match=r"^padding would enter the state that the cache keeps; feed rows of equal length$"):
            made.decoder(target, cache=cache, real=torch.tensor([4, 2]))
    with pytest.raises(ValueError, match=r"^decoder with memory_dim=12 does not read an encoder of dim=8; build it with"):
        EncoderDecoder(RNNEncoder(9, 8), made.decoder)


def test_of_no_attention_there_is_no_picture(unchecked):
    with pytest.raises(vision.errors.UserError, match=r"^EncoderDecoder has no cross-attention to look at; use a model with"):
        vision.inference.translation.explain(model(), "text")
