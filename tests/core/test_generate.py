"""Greedy, sampling and beam search against their definitions: teacher forcing, exhaustive search, the plain path."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from core.generate import AveragePenalty, GnmtPenalty, beam_search, greedy, narrowed, sample
from core.position import Learned, Rotary
from core.transformer import Decoder

STOP, START = 0, 1


def decoder(symbols=5, memory_dim: int | None = 6, position=Rotary, sharp=3.0):
    """A model with opinions: peaked, and different for every prefix."""
    model = Decoder(symbols, 16, 2, 4, 24, 24, memory_dim, position=position, tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.output.weight.mul_(sharp)
    return model


def starts(rows):
    return torch.full((rows, 1), START)


@torch.no_grad()
def log_prob_of(model, prompt, symbols, memory):
    """Of one sequence, by teacher forcing."""
    tokens = torch.tensor([[*prompt, *symbols[:-1]]])
    log_probs = model.eval()(tokens, memory).log_softmax(dim=-1)[0, len(prompt) - 1 :]
    return float(sum(log_probs[i, s] for i, s in enumerate(symbols)))


def same(a, b):
    assert [(h.tokens, h.finished) for h in a] == [(h.tokens, h.finished) for h in b]
    assert [h.log_prob for h in a] == pytest.approx([h.log_prob for h in b], abs=1e-4)
    assert [h.score for h in a] == pytest.approx([h.score for h in b], abs=1e-4)


def test_greedy_is_the_most_probable_symbol_of_every_step():
    model, memory = decoder(), torch.randn(1, 3, 6)
    (found,) = greedy(model, starts(1), memory, stop=STOP, max_length=12)
    tokens = [START]
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model.eval()(torch.tensor([tokens]), memory)[0, -1].argmax()))
            if tokens[-1] == STOP:
                break
    ended = tokens[-1] == STOP
    assert (found.tokens, found.finished) == (tokens[1:-1] if ended else tokens[1:], ended)
    assert found.log_prob == pytest.approx(log_prob_of(model, [START], tokens[1:], memory), abs=1e-4)


@pytest.mark.parametrize("position", [Rotary, Learned])
def test_a_batch_is_its_rows_alone_and_the_cache_changes_nothing_issue_1250(position):
    """torchtune #1250: a batch of unequal lengths. Rows end at different steps, prompts and memories have padding."""
    model, memory = decoder(7, position=position), torch.randn(6, 4, 6)
    lengths, memory_lengths = [3, 1, 2, 3, 2, 1], torch.tensor([4, 1, 3, 2, 4, 2])
    prompts = torch.randint(1, 7, (6, 3))
    real = torch.arange(3) >= 3 - torch.tensor(lengths)[:, None]
    batch = {"real": real, "memory_real": memory_lengths, "max_length": 9}
    free = [h.tokens for h in greedy(model, prompts, memory, stop=(), **batch)]
    stop = max(range(7), key=lambda s: len({row.index(s) if s in row else 9 for row in free}))  # rows end at several steps
    batch["stop"] = stop
    greedily = greedy(model, prompts, memory, **batch)
    assert len({len(h.tokens) for h in greedily}) > 1
    same(greedy(model, prompts, memory, **batch, cache=False), greedily)
    beams = beam_search(model, prompts, memory, **batch, beam=3, n_best=2, penalty=GnmtPenalty(1.0))
    plain = beam_search(model, prompts, memory, **batch, beam=3, n_best=2, penalty=GnmtPenalty(1.0), cache=False)
    for i in range(6):
        alone = (prompts[i : i + 1, 3 - lengths[i] :], memory[i : i + 1, : memory_lengths[i]])
        same(greedy(model, *alone, stop=stop, max_length=9), greedily[i : i + 1])
        (beam,) = beam_search(model, *alone, stop=stop, max_length=9, beam=3, n_best=2, penalty=GnmtPenalty(1.0))
        same(beam, beams[i])
        same(plain[i], beams[i])


@pytest.mark.parametrize("penalty", [None, GnmtPenalty(0.8), AveragePenalty()])
def test_a_beam_of_1_is_greedy(penalty):
    model, memory = decoder(), torch.randn(8, 3, 6)
    beams = beam_search(model, starts(8), memory, stop=STOP, max_length=7, beam=1, penalty=penalty)
    found = greedy(model, starts(8), memory, stop=STOP, max_length=7)
    assert [(b[0].tokens, b[0].finished) for b in beams] == [(g.tokens, g.finished) for g in found]
    assert [b[0].log_prob for b in beams] == pytest.approx([g.log_prob for g in found], abs=1e-4)


@pytest.mark.parametrize("penalty", [None, GnmtPenalty(0.8), AveragePenalty(1.0), GnmtPenalty(-1.0)])
def test_a_wide_beam_is_exhaustive_search_and_scores_are_teacher_forced_pr_20901(penalty):
    """huggingface/transformers PR #20901: what the length penalty prefers. 5 symbols, 4 steps: all sequences."""
    model, memory, n = decoder(), torch.randn(1, 3, 6), 6
    sequences = [(*p, STOP) for k in range(4) for p in itertools.product(range(1, 5), repeat=k)]
    sequences += list(itertools.product(range(1, 5), repeat=4))
    rows = torch.tensor([[START, *s, *[STOP] * (4 - len(s))][:-1] for s in sequences])
    with torch.no_grad():
        log_probs = model.eval()(rows, memory.expand(len(rows), -1, -1)).log_softmax(dim=-1)
    weigh = penalty or GnmtPenalty(0.0)
    exact = [float(sum(log_probs[i, t, s] for t, s in enumerate(seq))) for i, seq in enumerate(sequences)]
    best = sorted(zip(exact, sequences, strict=True), key=lambda pair: -pair[0] / weigh(len(pair[1])))[:n]
    (found,) = beam_search(model, starts(1), memory, stop=STOP, max_length=4, beam=5**4, n_best=n, penalty=penalty)
    assert [(*h.tokens, STOP) if h.finished else tuple(h.tokens) for h in found] == [s for _, s in best]
    assert [h.log_prob for h in found] == pytest.approx([p for p, _ in best], abs=1e-4)
    assert [h.score for h in found] == pytest.approx([p / weigh(len(s)) for p, s in best], abs=1e-4)
    assert sum(2.718281828459045**p for p in exact) == pytest.approx(1, abs=1e-4)  # they are all


def test_stopping_early_is_exact():
    """The same beam without its early stop finds nothing better: n_best = beam keeps it going longer."""
    model, memory = decoder(), torch.randn(8, 3, 6)
    options = {"stop": STOP, "max_length": 10, "beam": 5, "penalty": AveragePenalty(0.5)}
    early = beam_search(model, starts(8), memory, **options)
    late = beam_search(model, starts(8), memory, **options, n_best=5)
    for first, all_of_them in zip(early, late, strict=True):
        same(first, all_of_them[:1])
        assert [h.score for h in all_of_them] == sorted((h.score for h in all_of_them), reverse=True)


def test_finished_rows_leave_the_batch():
    model, memory, rows = decoder(), torch.randn(8, 3, 6), []
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    found = greedy(model, starts(8), memory, stop=STOP, max_length=9)
    lengths = [len(h.tokens) + h.finished for h in found]
    assert rows == [sum(n > step for n in lengths) for step in range(max(lengths))]
    assert rows[-1] < 8


def test_a_target_may_be_shorter_or_longer_than_its_source_issue_271():
    """lucidrains/x-transformers #271: generation failed where the target is shorter than the source."""
    model = decoder()
    for source, length in ((9, 2), (1, 9)):
        (found,) = greedy(model, starts(1), torch.randn(1, source, 6), stop=[], max_length=length)
        assert (len(found.tokens), found.finished) == (length, False)


def test_several_stop_symbols():
    model, memory = decoder(), torch.randn(1, 3, 6)
    (free,) = greedy(model, starts(1), memory, stop=(), max_length=9)
    last = free.tokens[4]
    never_before = set(range(5)) - set(free.tokens[: free.tokens.index(last)])
    (found,) = greedy(model, starts(1), memory, stop=never_before, max_length=9)
    assert len(never_before) > 1
    assert (found.tokens, found.finished) == (free.tokens[: free.tokens.index(last)], True)


def test_a_language_model_and_its_mode_are_left_as_they_were():
    model = decoder(memory_dim=None).train()
    found = beam_search(model, torch.tensor([[1, 2], [3, 4]]), stop=STOP, max_length=5)
    assert model.training
    assert len(found) == 2
    with pytest.raises(ValueError, match=r"^symbol 99 is not in the vocabulary, 0 to 4;"):
        greedy(model, torch.tensor([[99]]), stop=STOP, max_length=5)
    assert model.training


@pytest.mark.parametrize("penalty", [None, AveragePenalty()])
def test_symbols_that_are_never_written_leave_every_path_as_exact(penalty):
    """Cached and whole, a beam of 1 and greedy, a wide beam and exhaustive search, scores and teacher forcing."""
    model, memory = decoder(), torch.randn(8, 3, 6)
    (free,) = greedy(model, starts(1), memory[:1], stop=(), max_length=1, never=(STOP, START))
    usual = {"stop": STOP, "max_length": 4, "never": (START, *free.tokens)}
    allowed = set(range(5)) - set(usual["never"])
    greedily = greedy(model, starts(8), memory, **usual)
    same(greedy(model, starts(8), memory, **usual, cache=False), greedily)
    wide = {**usual, "beam": 3, "n_best": 3, "penalty": penalty}
    beams = beam_search(model, starts(8), memory, **wide)
    for row, plain in zip(beams, beam_search(model, starts(8), memory, **wide, cache=False), strict=True):
        same(row, plain)
    singles = beam_search(model, starts(8), memory, **usual, beam=1, penalty=penalty)
    assert [b[0].tokens for b in singles] == [g.tokens for g in greedily]
    drawn = sample(model, starts(8), memory, **usual, temperature=9.0)
    same(sample(model, starts(8), memory, **usual, top_k=1), greedily)
    for h in [*greedily, *drawn, *(h for row in beams for h in row)]:
        assert set(h.tokens) <= allowed - {STOP}
    written = [*greedily[0].tokens, *[STOP] * greedily[0].finished]
    assert greedily[0].log_prob == pytest.approx(log_prob_of(model, [START], written, memory[:1]), abs=1e-4)
    weigh = penalty or GnmtPenalty(0.0)
    symbols = sorted(allowed - {STOP})
    sequences = [(*p, STOP) for k in range(4) for p in itertools.product(symbols, repeat=k)]
    sequences += list(itertools.product(symbols, repeat=4))
    exact = max(log_prob_of(model, [START], s, memory[:1]) / weigh(len(s)) for s in sequences)
    (best,) = beam_search(model, starts(1), memory[:1], **usual, beam=5**4, penalty=penalty)
    assert best[0].score == pytest.approx(exact, abs=1e-4)


# Sampling


def test_sampling_is_seeded_and_follows_the_probabilities():
    model, memory = decoder(sharp=1.0), torch.randn(1, 3, 6).expand(4000, -1, -1)
    seeded = [
        sample(model, starts(20), memory[:20], stop=STOP, max_length=6, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    drawn = sample(model, starts(4000), memory, stop=(), max_length=1, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(torch.tensor([h.tokens[0] for h in drawn]), minlength=5) / 4000
    with torch.no_grad():
        expected = model.eval()(starts(1), memory[:1])[0, -1].softmax(dim=-1)
    assert (share - expected).abs().max() < 0.03
    for h in drawn[:3]:
        assert h.log_prob == pytest.approx(float(expected[h.tokens[0]].log()), abs=1e-4)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_the_narrowest_sampling_is_greedy(options):
    model, memory = decoder(), torch.randn(5, 3, 6)
    found = sample(model, starts(5), memory, stop=STOP, max_length=8, **options)
    same(found, greedy(model, starts(5), memory, stop=STOP, max_length=8))


def test_top_k_and_top_p_keep_the_most_probable_symbols():
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    kept = {
        (1, None): [1],
        (3, None): [1, 2, 3],
        (9, None): [0, 1, 2, 3],
        (None, 0.35): [1],
        (None, 0.45): [1, 3],
        (None, 0.75): [1, 2, 3],
        (None, 1.0): [0, 1, 2, 3],
        (2, 0.6): [1, 3],  # of the two: 4/7 and 3/7
        (2, 0.5): [1],
    }
    for (top_k, top_p), symbols in kept.items():
        assert narrowed(scores, top_k, top_p).isfinite()[0].nonzero()[:, 0].tolist() == symbols


def test_errors():
    model, memory = decoder(position=Learned), torch.randn(1, 3, 6)
    usual = {"stop": STOP, "max_length": 5}
    with pytest.raises(ValueError, match=r"^temperature=0.0 is not in 1e-6 <= temperature <= 1e6; use e.g. 0.7, or greedy for"):
        sample(model, starts(1), memory, **usual, temperature=0.0)
    with pytest.raises(ValueError, match=r"^top_k=0 is no number of symbols; use 1 or more, or None for all$"):
        sample(model, starts(1), memory, **usual, top_k=0)
    with pytest.raises(ValueError, match=r"^top_p=1.5 is not in 0 < top_p <= 1; use e.g. 0.9, or None for all$"):
        sample(model, starts(1), memory, **usual, top_p=1.5)
    with pytest.raises(ValueError, match=r"^n_best=3 and beam=2 do not fit; use 1 <= n_best <= beam$"):
        beam_search(model, starts(1), memory, **usual, beam=2, n_best=3)
    with pytest.raises(ValueError, match=r"^never=5 is no symbol of the vocabulary, 0 to 4; leave it out$"):
        greedy(model, starts(1), memory, **usual, never=[5])
    for symbol in (5, -1):
        with pytest.raises(ValueError, match=rf"^stop={symbol} is no symbol of the vocabulary, 0 to 4; leave it out$"):
            greedy(model, starts(1), memory, stop=symbol, max_length=5)
    with pytest.raises(ValueError, match=r"^alpha=nan ranks nothing; use a finite number such as 0.6, or 0 for none$"):
        GnmtPenalty(float("nan"))
    with pytest.raises(ValueError, match=r"^never names all 5 symbols and leaves none to write; leave some out$"):
        greedy(model, starts(1), memory, **usual, never=range(5))
    with pytest.raises(ValueError, match=r"^max_length=0 leaves nothing to generate; use 1 or more$"):
        greedy(model, starts(1), memory, stop=STOP, max_length=0)
    with pytest.raises(ValueError, match=r"^prompt of shape \(1, 0\) is empty; begin each row with a start symbol$"):
        greedy(model, starts(1)[:, :0], memory, **usual)
    with pytest.raises(ValueError, match=r"^a row of the prompt ends in padding; pad prompts on the left$"):
        greedy(model, starts(1).repeat(1, 2), memory, **usual, real=torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match=r"^places 24 to 24 leave 0 to 23: the places of a learned table of 24"):
        greedy(model, starts(1), memory, stop=(), max_length=30)


def test_what_has_no_order_or_no_rows_is_refused_in_one_line(unchecked):
    model, memory = decoder(), torch.randn(1, 3, 6)
    usual = {"stop": STOP, "max_length": 5}
    for write in (greedy, beam_search):
        with pytest.raises(ValueError, match=r"^prompt of shape \(1,\) is no batch of rows; give it 2 axes, such as prompt"):
            write(model, torch.tensor([START]), memory, **usual)
        with pytest.raises(ValueError, match=r"^max_length=2.5 is no whole number; use e.g. 128$"):
            write(model, starts(1), memory, stop=STOP, max_length=2.5)
        with pytest.raises(ValueError, match=r"^prompt is of torch.float32, not a tensor of whole numbers; use torch.tensor"):
            write(model, torch.ones(1, 1), memory, **usual)
        with pytest.raises(ValueError, match=r"^prompt is of list, not a tensor of whole numbers; use torch.tensor\(rows\)"):
            write(model, [[START]], memory, **usual)
        with pytest.raises(ValueError, match=r"^the scores of the next symbol are NaN; look for NaN in the model's weights"):
            write(model, starts(1), memory * float("nan"), **usual)
        for stop in (torch.tensor(0), torch.tensor([0, 2]), 0.5 * torch.ones(()), ["0"], None, 2.0):
            with pytest.raises(ValueError, match=r"is no whole number, or several; use stop=0, or tensor.tolist\(\)$"):
                write(model, starts(1), memory, stop=stop, max_length=5)
        for never in (torch.tensor([0]), [0.5], ["0"], None):
            with pytest.raises(ValueError, match=r"^never=.* is no whole number, or several; use never=0, or tensor.tolist\(\)$"):
                write(model, starts(1), memory, **usual, never=never)
        assert write(model, starts(1), memory, **usual, never=3) == write(model, starts(1), memory, **usual, never=[3])
    for name, values in {"temperature": (float("inf"), 1e300, 1e-40, "1", None), "top_k": ("3", 1.5), "top_p": ("0.9",)}.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} is no"):
                sample(model, starts(1), memory, **usual, **{name: value})
    for name in ("beam", "n_best"):
        with pytest.raises(ValueError, match=rf"^{name}=2.5 is not one whole number; use 1 or more$"):
            beam_search(model, starts(1), memory, **usual, **{"beam": 4, name: 2.5})
    with pytest.raises(ValueError, match=r"^prompt is of torch.bool, not a tensor of whole numbers"):
        greedy(model, starts(1).bool(), memory, **usual)
    for other in (torch.nn.Linear(2, 2), None):
        with pytest.raises(
            ValueError, match=rf"^{type(other).__name__} writes no symbols; give a decoder, such as model.decoder$"
        ):
            greedy(other, starts(1), memory, **usual)
    with pytest.raises(ValueError, match=r"^alpha='1' ranks nothing"):
        GnmtPenalty("1")
    with pytest.raises(ValueError, match=r"^penalty=0.6 does not tell which one; use GnmtPenalty\(0.6\) or AveragePenalty"):
        beam_search(model, starts(1), memory, **usual, penalty=0.6)
    with torch.no_grad():
        model.output.weight[3] = float("nan")
    for write in (beam_search, sample):
        with pytest.raises(ValueError, match=r"^the scores of the next symbol are NaN; look for NaN in the model's weights"):
            write(model, starts(1), memory, **usual)
