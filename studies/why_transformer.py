"""Why Transformer: recurrent networks without and with attention, and a Transformer, on spelling to phones.

Errors after the same number of epochs, time of an epoch, time of a training step against length, and what of it is
unavoidable: operations, steps that must wait for each other, and the longest path between two places.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from runner import Study, main
from torch import nn
from training import error_rates, forward, smooth, spelling, train, transformer

from core import AdditiveScores, EncoderDecoder, MultiplicativeScores
from vision.data import SequenceData
from vision.models import RNNDecoder, RNNEncoder

DIM, DEPTH, EPOCHS, LENGTHS = 128, 2, 8, (16, 32, 64, 128, 256, 512)
KINDS = {
    "LSTM": None,
    "LSTM, additive attention": partial(AdditiveScores, hidden=DIM),
    "LSTM, multiplicative attention": MultiplicativeScores,
}


def recurrent(data: SequenceData, score: Callable[[int, int], nn.Module] | None) -> EncoderDecoder:
    encoder = RNNEncoder(len(data.vocabularies["source"]), DIM, DEPTH, cell=nn.LSTM)
    return EncoderDecoder(
        encoder, RNNDecoder(len(data.vocabularies["target"]), DIM, DEPTH, memory_dim=DIM, score=score, cell=nn.LSTM)
    )


def step_time(model: EncoderDecoder, n: int, rounds: int) -> float:
    """Milliseconds of a training step (forward and backward) of one sequence of n symbols to n symbols: the best round."""
    source, target = torch.randint(4, 29, (1, n)), torch.randint(4, 29, (1, n))
    model.train()
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        forward(model, (source, torch.tensor([n])), target).sum().backward()
        times.append(time.perf_counter() - start)
    return 1000 * min(times[1:])


def counted(n: int) -> list[list[object]]:
    """For one encoder layer of width d, multiplications and additions counted as one; Vaswani et al. 2017, table 1."""
    half = DIM // 2  # of each direction: 4 gates of an LSTM, from the input and from the state
    lstm = 2 * n * 4 * half * (DIM + half)
    attention = 4 * n * DIM**2 + 2 * n**2 * DIM  # four projections; scores and weighted sums
    return [["LSTM, both directions", n, lstm / 1e6, n, n], ["self-attention", n, attention / 1e6, 1, 1]]


def run(study: Study) -> None:
    data = spelling()
    models = {name: recurrent(data, score) for name, score in KINDS.items()} | {"Transformer": transformer(data, DIM, DEPTH)}
    left, right = study.figure.subplots(1, 2)
    epoch, rows, times = len(data.train_dataloader()), [], []
    for name, model in models.items():
        trained = train(model, data, study.steps(EPOCHS * epoch))
        per, wer = error_rates(model, data, batches=1 if study.quick else 0)
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        rows.append([name, size, per, wer, trained.seconds * epoch])
        study.say(f"{name}: PER {per:.1f} %")
        lengths = study.some(LENGTHS)
        taken = [step_time(model, n, 1 if study.quick else 3) for n in lengths]
        times.append([name, *taken])
        left.plot(smooth(trained.losses), label=name)
        right.loglog(lengths, taken, marker="o", label=name)
    left.set(xlabel="step", ylabel="training loss of a symbol", title="spelling to phones")
    right.set(xlabel="symbols of source and of target", ylabel="ms of a training step", title="batch of 1")
    left.legend(fontsize=8)
    title = f"Spelling to phones, {EPOCHS} epochs, greedy decoding, test words"
    study.table(title, ["model", "M parameters", "PER %", "WER %", "seconds an epoch"], rows)
    study.table("Milliseconds of a training step, batch of 1, against length", ["model", *map(str, study.some(LENGTHS))], times)
    columns = ["layer", "length", "M operations", "steps in sequence", "longest path"]
    study.table("One encoder layer, counted", columns, [row for n in LENGTHS for row in counted(n)])


if __name__ == "__main__":
    main("why_transformer", __doc__, run)
