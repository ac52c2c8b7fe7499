"""Texts to texts, by a model that `vision.load_model` has built from a checkpoint of the task `Sequence`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from core import Hypothesis, Learned, RelativeTable, beam_search, greedy, sample
from core.generate import check_sampling
from vision.errors import UserError
from vision.vocabulary import NEVER, PAD, START, STOP, Vocabulary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_BEAMS = 10_000  # more would fill any memory long before they help


@dataclass(frozen=True)
class Writing:
    """How targets are found.

    Args:
        beam: sequences kept by a beam search, 10,000 at most; 1 takes the most probable symbol at every step.
        n_best: so many targets of each source, best first; at most `beam`.
        temperature: draws symbols instead of searching; below 1 prefers the probable ones.
        top_k, top_p: draws among the so many most probable ones, or among the fewest of this probability.
        seed: of the draws; torch takes 64 bits, with or without a sign.
        max_length: most symbols of a target, the stop included; 0 takes the model's, within its decoder's table of places.

    Raises:
        UserError: a value out of range, a search and draws together.
    """

    beam: int = 1
    n_best: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    max_length: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n_best <= self.beam:
            raise UserError(f"n_best={self.n_best} and beam={self.beam} do not fit; use 1 <= n_best <= beam")
        if self.beam > MOST_BEAMS:
            raise UserError(f"beam={self.beam} would fill the memory; use {MOST_BEAMS} or less, such as 5")
        if self.temperature is None and (self.top_k is not None or self.top_p is not None):
            raise UserError("top_k and top_p are of draws; give a temperature too, such as 1")
        if not -(2**63) <= self.seed < 2**64:
            raise UserError(f"seed={self.seed} is not in {-(2**63)} <= seed <= {2**64 - 1}; use e.g. 0")
        if self.temperature is not None and self.beam > 1:
            raise UserError(f"beam={self.beam} searches and temperature={self.temperature:g} draws; use one of them")
        if self.temperature is not None:
            try:
                check_sampling(self.temperature, self.top_k, self.top_p)
            except ValueError as error:
                raise UserError(str(error)) from error


@dataclass(frozen=True)
class Target:
    """What was written for a source.

    Attributes:
        text: the symbols as a text.
        score: what beams are ranked by, else the log-probability.
        finished: the model ended it; else it was cut at the greatest length.
        tokens: the numbers of its symbols, without the stop.
    """

    text: str
    score: float
    finished: bool
    tokens: list[int]


def translate(
    model: nn.Module, texts: Sequence[str], writing: Writing | None = None, *, batch_size: int = 32
) -> list[list[Target]]:
    """The targets of each text, best first.

    Args:
        model: of `vision.load_model`.
        texts: any number; a text gives the same alone and among others (but for draws).
        writing: how targets are found; None is greedy.
        batch_size: texts at once.

    Raises:
        UserError: a text that is empty, too long, or has a symbol that the model does not know; a `max_length` past the table.
    """
    writing = writing or Writing()
    sources = [encode(model, text) for text in texts]
    generator = torch.Generator(device_of(model)).manual_seed(writing.seed)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))  # of like length: little padding
    found: list[list[Target]] = [[] for _ in sources]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        for row, hypotheses in zip(rows, write(model, [sources[i] for i in rows], writing, generator), strict=True):
            decode = vocabulary(model, "target").decode
            found[row] = [Target(decode(each.tokens), each.score, each.finished, each.tokens) for each in hypotheses]
    return found


@torch.no_grad()
def write(
    model: Any, sources: list[list[int]], writing: Writing, generator: torch.Generator | None = None
) -> list[list[Hypothesis]]:
    device, wanted = device_of(model), writing.max_length
    room = min(table_places(model.decoder), default=max(wanted, model.limits["target"]))
    if wanted > room:
        raise UserError(f"max_length={wanted} passes the {room} places of the decoder's learned table; use {room} or less")
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(source) for source in sources], True, PAD).to(device)
    lengths = torch.tensor([len(source) for source in sources], device=device)
    try:
        memory = model.encoder(tokens, real=lengths)
        prompt = torch.full((len(sources), 1), START, device=device)
        options: dict[str, Any] = {
            "stop": STOP,
            "never": NEVER,
            "max_length": wanted or min(model.limits["target"], room),
            "memory_real": lengths,
        }
        if writing.temperature is not None:
            drawn: dict[str, Any] = {
                "temperature": writing.temperature,
                "top_k": writing.top_k,
                "top_p": writing.top_p,
                "generator": generator,
            }
            return [[found] for found in sample(model.decoder, prompt, memory, **options, **drawn)]
        if writing.beam == 1:
            found = greedy(model.decoder, prompt, memory, **options)
            if any(math.isnan(each.log_prob) for each in found):
                raise UserError("the scores of the next symbol are NaN; look for NaN in the model's weights")
            return [[each] for each in found]
        return beam_search(model.decoder, prompt, memory, beam=writing.beam, n_best=writing.n_best, **options)
    except ValueError as error:  # past a learned table, a temperature of 0, ...
        raise UserError(str(error)) from error


def encode(model: Any, text: str) -> list[int]:
    """The numbers of a source.

    Raises:
        UserError: it is empty, too long, or has a symbol that the model does not know.
    """
    known = vocabulary(model, "source")
    numbers = known.encode(text)
    limit, why = model.limits["source"], "twice the longest it was trained on"
    if (room := min(table_places(model.encoder), default=limit)) < limit:
        limit, why = room, "its encoder's learned table has no more places"
    if not numbers:
        raise UserError("the text is empty; write at least one symbol")
    if len(numbers) > limit:
        raise UserError(
            f"{shortened(text)} has {len(numbers)} symbols, the longest that the model can make sense of {limit} "
            f"({why}); split it"
        )
    if unknown := known.unknown(text):
        raise UserError(
            f"{shortened(text)}: the model does not know {', '.join(map(repr, unknown[:5]))}; "
            f"it knows {' '.join(known.symbols[:40])}{' …' if len(known.symbols) > 40 else ''}"
        )
    return numbers


def table_places(part: nn.Module) -> list[int]:
    """The sizes of its learned tables of places in a sequence, past which it refuses to read or write."""
    kinds = (module for module in part.modules() if isinstance(module, (Learned, RelativeTable)))
    return [kind.site.extent[0] for kind in kinds if kind.site.axes == 1]


def vocabulary(model: Any, side: str) -> Vocabulary:
    found = getattr(model, "vocabularies", {})
    if side not in found or "source" not in getattr(model, "limits", {}):
        raise UserError("the model does not tell which symbols it reads and writes; use a checkpoint of the task Sequence")
    return found[side]


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def shortened(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[: most - 1] + "…")


# Where the decoder looks


@torch.no_grad()
def cross_attention(model: Any, source: Int[Tensor, "b m"], target: Int[Tensor, "b n"]) -> Float[Tensor, "layers b heads n m"]:
    """The weights with which each target symbol looks at the source, of all layers."""
    if hasattr(model.decoder, "look"):  # a decoder with one attention of one head
        with evaluating(model):
            return model.decoder.look(target, model.encoder(source))[None, :, None]
    seen: list[Tensor] = []

    def look(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append(module.look(*arguments, **options))

    layers = [block.cross_attention for block in model.decoder.blocks]
    with evaluating(model):
        hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
        try:
            model.decoder(target, model.encoder(source))
        finally:
            for hook in hooks:
                hook.remove()
    return torch.stack(seen)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def draw_attention(
    model: Any, source: list[int], target: list[int], labels: tuple[list[str], list[str]], *, ended: bool = True
) -> Figure:
    """A picture of where each symbol written looks in the source: the mean over the heads, each layer, then all.

    Args:
        source, target: numbers, without start and stop.
        labels: what is written at the source's and at the target's symbols.
        ended: a stop symbol follows the target.
    """
    from matplotlib.figure import Figure

    device = device_of(model)
    symbols = torch.tensor([[START, *target][: len(target) + ended]], device=device)
    weights = cross_attention(model, torch.tensor([source], device=device), symbols)[:, 0].float().mean(dim=1).cpu()
    panels = [*weights, weights.mean(dim=0)]
    names = [*(f"layer {number}" for number in range(1, len(panels))), "mean"]
    columns, rows = labels[0], [*labels[1], *["(end)"] * ended]
    width, height = max(2.2, 0.28 * len(columns) + 0.9), max(2.0, 0.28 * len(rows) + 1.0)
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    for axes, name, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], names, panels, strict=True):
        axes.imshow(panel.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_title(name)
        axes.set_xlabel("source")
    figure.axes[0].set_ylabel("written")
    return figure


def looks(model: nn.Module) -> bool:
    """Whether there is an attention to the source whose weights can be shown."""
    decoder: Any = getattr(model, "decoder", None)
    if hasattr(decoder, "look"):
        return decoder.attention is not None
    blocks = getattr(decoder, "blocks", [])
    return bool(len(blocks)) and all(hasattr(getattr(block, "cross_attention", None), "look") for block in blocks)


def explain(model: nn.Module, text: str, target: Target | None = None) -> Figure:
    """Where the decoder looks when it writes a target of a text.

    Args:
        model, text: as `translate`.
        target: what `translate` wrote for the text; None is its most probable one.

    Raises:
        UserError: as `translate`; a decoder without cross-attention.
    """
    require_looks(model)
    source = encode(model, text)
    target = translate(model, [text])[0][0] if target is None else target
    labels = (vocabulary(model, "source").labels(source), vocabulary(model, "target").labels(target.tokens))
    return draw_attention(model, source, target.tokens, labels, ended=target.finished)


def require_looks(model: nn.Module) -> None:
    """Raises: UserError: a decoder without cross-attention."""
    if not looks(model):
        raise UserError(f"{type(model).__name__} has no cross-attention to look at; use a model with core.Decoder")
