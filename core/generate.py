"""Generation: greedy, sampling, beam search, for a `Decoder` with or without a memory.

    memory = model.encoder(source, real=lengths)
    best = greedy(model.decoder, start, memory, memory_real=lengths, stop=2, max_length=50)

Every function takes

- `prompt`: b n, what stands before the first generated symbol: a start symbol, or texts, those of unequal lengths padded on
  the left (`real`, True = real token);
- `stop`: the symbol, or symbols, that end a sequence;
- `max_length`: most symbols generated, the stop symbol included;
- `never`: symbols (or one) that are not written, such as padding; log-probabilities stay the model's own, as if they could be;
- `cache`: False computes the whole sequence again at every step, which gives the same symbols: the plain path.

A row of the batch gives what it would give alone (sampling: but for the random numbers), and leaves the batch when it ends.
Dropout is off meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from core.options import check_sizes, is_number
from core.rows import MemoryReal, as_real
from core.steps import CachedSteps, WholeSteps, Writer


@dataclass(frozen=True)
class Hypothesis:
    """A generated sequence.

    Attributes:
        tokens: its symbols, without prompt and stop symbol.
        log_prob: natural logarithm of the model's probability of them, the stop symbol included.
        score: what beams are ranked by: `log_prob` over the length penalty. Elsewhere it is `log_prob`.
        finished: it ended by a stop symbol, not by `max_length`.
    """

    tokens: list[int]
    log_prob: float
    score: float
    finished: bool


@dataclass(frozen=True)
class GnmtPenalty:
    """((5 + length) / 6) ** alpha (Wu et al. 2016, eq. 14), the stop symbol counted; 0 is none, more favours long ones."""

    alpha: float = 0.6

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def __call__(self, length: int) -> float:
        return ((5 + length) / 6) ** self.alpha


@dataclass(frozen=True)
class AveragePenalty:
    """length ** alpha, the stop symbol counted; 1 ranks by the mean log-probability of a symbol."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def __call__(self, length: int) -> float:
        return length**self.alpha


def greedy(
    decoder: Writer,
    prompt: Int[Tensor, "b n"],
    memory: Float[Tensor, "b m c"] | None = None,
    *,
    stop: int | Collection[int],
    max_length: int,
    never: int | Collection[int] = (),
    real: Bool[Tensor, "b n"] | None = None,
    memory_real: MemoryReal | None = None,
    cache: bool = True,
) -> list[Hypothesis]:
    """The most probable symbol, at every step."""
    with evaluating(decoder):
        steps = start(decoder, prompt, memory, real, memory_real, max_length, cache)
        rows = one_a_row(
            steps, lambda scores: scores.argmax(dim=-1), as_symbols("stop", stop), as_symbols("never", never), max_length
        )
    refuse_nan(torch.tensor([row.log_prob for row in rows]))  # once, not at every step: argmax takes a NaN for the largest
    return rows


def sample(
    decoder: Writer,
    prompt: Int[Tensor, "b n"],
    memory: Float[Tensor, "b m c"] | None = None,
    *,
    stop: int | Collection[int],
    max_length: int,
    never: int | Collection[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    real: Bool[Tensor, "b n"] | None = None,
    memory_real: MemoryReal | None = None,
    cache: bool = True,
) -> list[Hypothesis]:
    """Symbols drawn by their probability.

    Args:
        temperature: divides the scores; below 1 prefers the probable symbols.
        top_k: draws among the so many most probable ones only.
        top_p: draws among the fewest symbols that have this probability together (nucleus sampling, Holtzman et al. 2020).
        generator: on the device of the prompt; the same seed gives the same symbols.
    """
    check_sampling(temperature, top_k, top_p)

    def choose(scores: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        refuse_nan(scores)
        weights = narrowed(scores / temperature, top_k, top_p).log_softmax(dim=-1).exp()
        return torch.multinomial(weights, 1, generator=generator)[:, 0]

    with evaluating(decoder):
        steps = start(decoder, prompt, memory, real, memory_real, max_length, cache)
        return one_a_row(steps, choose, as_symbols("stop", stop), as_symbols("never", never), max_length)


def beam_search(
    decoder: Writer,
    prompt: Int[Tensor, "b n"],
    memory: Float[Tensor, "b m c"] | None = None,
    *,
    stop: int | Collection[int],
    max_length: int,
    never: int | Collection[int] = (),
    beam: int = 4,
    n_best: int = 1,
    penalty: GnmtPenalty | AveragePenalty | None = None,
    real: Bool[Tensor, "b n"] | None = None,
    memory_real: MemoryReal | None = None,
    cache: bool = True,
) -> list[list[Hypothesis]]:
    """The `n_best` sequences of highest score found for each row, best first.

    At every step the `beam` most probable continuations of a row's live sequences are kept: those with a stop symbol have
    ended, the others live on. A row is done when none lives, or when no live one could still reach the score of the
    `n_best`-th ended one, which is exact. At `max_length` the live ones count as ended. A beam of 1 is `greedy`.

    Args:
        beam: sequences kept.
        n_best: at most `beam`.
        penalty: divides log-probabilities into scores; None is none.

    Raises:
        ValueError: scores that are NaN, which have no order.
    """
    if penalty is not None and not callable(penalty):
        raise ValueError(
            f"penalty={penalty!r} does not tell which one; use GnmtPenalty({penalty!r}) or AveragePenalty({penalty!r})"
        )
    check_sizes(n_best=n_best, beam=beam)
    if n_best > beam:
        raise ValueError(f"n_best={n_best} and beam={beam} do not fit; use 1 <= n_best <= beam")
    penalty = GnmtPenalty(0.0) if penalty is None else penalty
    stops, unwritten = as_symbols("stop", stop), as_symbols("never", never)
    with evaluating(decoder):
        steps, rows = start(decoder, prompt, memory, real, memory_real, max_length, cache), len(prompt)
        ended: list[list[Hypothesis]] = [[] for _ in range(rows)]
        scores = steps.scores()
        allow = without(unwritten, scores, stops)
        log_probs = (scores.log_softmax(dim=-1) + allow)[:, None]  # one live sequence a row
        live = log_probs.new_zeros(rows, 1)
        symbols = prompt.new_zeros(rows, 1, 0)
        ids = list(range(rows))  # rows of the batch that are not done
        for length in range(1, max_length + 1):
            width = log_probs.shape[1]
            total = (live[..., None] + log_probs).flatten(1)
            live, index = total.topk(min(beam, total.shape[1]), dim=1)
            refuse_nan(live)
            parent, symbol = index // log_probs.shape[-1], index % log_probs.shape[-1]
            symbols = torch.cat([symbols.take_along_dim(parent[..., None], dim=1), symbol[..., None]], dim=2)
            ends = among(symbol, stops)
            last = length == max_length
            for i, row in enumerate(ids):
                for j in ((ends[i] | last) & live[i].isfinite()).nonzero()[:, 0].tolist():
                    log_prob, finished = float(live[i, j]), bool(ends[i, j])
                    tokens = symbols[i, j].tolist()[: length - finished]
                    ended[row].append(Hypothesis(tokens, log_prob, log_prob / penalty(length), finished))
                ended[row] = sorted(ended[row], key=lambda h: -h.score)[:n_best]
            if last:
                break
            live = live.masked_fill(ends, float("-inf"))
            bound = live.amax(dim=1).double() / max(penalty(length + 1), penalty(max_length))
            going = [i for i, row in enumerate(ids) if float(bound[i]) > worst(ended[row], n_best)]
            if not going:
                break
            ids = [ids[i] for i in going]
            keep = torch.tensor(going, device=live.device)
            live, parent, symbol, symbols = live[keep], parent[keep], symbol[keep], symbols[keep]
            source = (keep[:, None] * width + parent).flatten()
            if len(going) == len(ends) and width == live.shape[1]:
                steps.reorder(source)  # within their rows: the memory stays
            else:
                steps.select(source)
            steps.feed(symbol.flatten())
            log_probs = (steps.scores().log_softmax(dim=-1) + allow).unflatten(0, live.shape)
    return ended


def worst(ended: list[Hypothesis], n_best: int) -> float:
    """The score that a further sequence must exceed."""
    return ended[n_best - 1].score if len(ended) >= n_best else float("-inf")


def one_a_row(
    steps: CachedSteps | WholeSteps,
    choose: Callable[[Float[Tensor, "b v"]], Int[Tensor, " b"]],
    stops: list[int],
    never: list[int],
    max_length: int,
) -> list[Hypothesis]:
    """Chooses a symbol a row and step; rows that end leave the batch."""
    allow: Tensor | float = 0.0
    tokens: list[list[int]] = [[] for _ in range(steps.rows)]
    log_probs, finished = [0.0] * steps.rows, [False] * steps.rows
    ids = list(range(steps.rows))
    for length in range(1, max_length + 1):
        scores = steps.scores()
        allow = without(never, scores, stops) if length == 1 else allow
        symbol = choose(scores + allow)
        gained = scores.log_softmax(dim=-1).gather(1, symbol[:, None])[:, 0].tolist()
        going = []
        for i, (row, chosen) in enumerate(zip(ids, symbol.tolist(), strict=True)):
            log_probs[row] += gained[i]
            finished[row] = chosen in stops
            if not finished[row]:
                tokens[row].append(chosen)
                going.append(i)
        if not going or length == max_length:
            break
        if len(going) < len(ids):
            keep = torch.tensor(going, device=symbol.device)
            steps.select(keep)
            symbol, ids = symbol[keep], [ids[i] for i in going]
        steps.feed(symbol)
    return [Hypothesis(*row) for row in zip(tokens, log_probs, log_probs, finished, strict=True)]


def start(
    decoder: Writer,
    prompt: Int[Tensor, "b n"],
    memory: Float[Tensor, "b m c"] | None,
    real: Bool[Tensor, "b n"] | None,
    memory_real: MemoryReal | None,
    max_length: int,
    cache: bool,
) -> CachedSteps | WholeSteps:
    if not isinstance(max_length, Integral):
        raise ValueError(f"max_length={max_length!r} is no whole number; use e.g. 128")
    if max_length < 1:
        raise ValueError(f"max_length={max_length} leaves nothing to generate; use 1 or more")
    if not isinstance(prompt, Tensor) or prompt.is_floating_point() or prompt.dtype == torch.bool:
        kind = str(prompt.dtype) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"prompt is of {kind}, not a tensor of whole numbers; use torch.tensor(rows) or prompt.long()")
    if prompt.ndim != 2:
        raise ValueError(f"prompt of shape {tuple(prompt.shape)} is no batch of rows; give it 2 axes, such as prompt[None]")
    if 0 in prompt.shape:
        raise ValueError(f"prompt of shape {tuple(prompt.shape)} is empty; begin each row with a start symbol")
    if real is not None:
        if not bool(as_real(real, *prompt.shape)[:, -1].all()):
            raise ValueError("a row of the prompt ends in padding; pad prompts on the left")
        real = None if bool(real.all()) else real
    if memory is not None and memory_real is not None:
        memory_real = as_real(memory_real, *memory.shape[:2])
    if cache:
        return CachedSteps(decoder, prompt, memory, real, memory_real, max_length)
    return WholeSteps(decoder, prompt, memory, real, memory_real)


@contextmanager
def evaluating(decoder: Writer) -> Iterator[None]:
    """Without dropout and gradients; the decoder is left as it was."""
    if not isinstance(decoder, Writer):
        raise ValueError(f"{type(decoder).__name__} writes no symbols; give a decoder, such as model.decoder")
    training = decoder.training
    decoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        decoder.train(training)


def without(never: list[int], scores: Float[Tensor, "b v"], stops: list[int]) -> Float[Tensor, " v"]:
    """What is added to scores: 0, and -inf at the symbols that are not written.

    Raises:
        ValueError: one of them or a stop symbol outside the vocabulary, or all symbols.
    """
    size = scores.shape[-1]
    for name, symbols in {"never": never, "stop": stops}.items():
        if wrong := [symbol for symbol in symbols if not 0 <= symbol < size]:
            raise ValueError(f"{name}={wrong[0]} is no symbol of the vocabulary, 0 to {size - 1}; leave it out")
    if len(set(never)) == size:
        raise ValueError(f"never names all {size} symbols and leaves none to write; leave some out")
    allow = torch.zeros(size)
    allow[never] = float("-inf")
    return allow.to(scores.device)


def as_symbols(name: str, given: int | Collection[int]) -> list[int]:
    symbols: Any = [given] if isinstance(given, Integral) else given
    if isinstance(symbols, Tensor) or not isinstance(symbols, Collection) or not all(isinstance(s, Integral) for s in symbols):
        raise ValueError(f"{name}={given!r} is no whole number, or several; use {name}=0, or tensor.tolist()")
    return list(symbols)


def refuse_nan(scores: Float[Tensor, "*b"]) -> None:
    if bool(scores.isnan().any()):
        raise ValueError("the scores of the next symbol are NaN; look for NaN in the model's weights and in its input")


def among(symbols: Int[Tensor, "*b"], stops: list[int]) -> Bool[Tensor, "*b"]:
    return torch.isin(symbols, torch.tensor(stops, dtype=symbols.dtype, device=symbols.device))


def check_alpha(alpha: float) -> None:
    if not is_number(alpha):
        raise ValueError(f"alpha={alpha!r} ranks nothing; use a finite number such as 0.6, or 0 for none")


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not is_number(temperature) or not 1e-6 <= temperature <= 1e6:  # beyond, scores over it are no numbers
        raise ValueError(
            f"temperature={temperature!r} is not in 1e-6 <= temperature <= 1e6; use e.g. 0.7, or greedy for the most probable"
        )
    if top_k is not None and not (isinstance(top_k, Integral) and top_k >= 1):
        raise ValueError(f"top_k={top_k!r} is no number of symbols; use 1 or more, or None for all")
    if top_p is not None and not (is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r} is not in 0 < top_p <= 1; use e.g. 0.9, or None for all")


def narrowed(scores: Float[Tensor, "b v"], top_k: int | None, top_p: float | None) -> Float[Tensor, "b v"]:
    """Scores of -inf where a symbol is not to be drawn."""
    if top_k is None and top_p is None:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True)
    out = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        out[:, top_k:] = True
    if top_p is not None:
        weights = ordered.masked_fill(out, float("-inf")).log_softmax(dim=-1).exp()
        out |= weights.cumsum(dim=-1) - weights >= top_p  # what comes before has the probability already
        out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(out).scatter(-1, order, out), float("-inf"))
