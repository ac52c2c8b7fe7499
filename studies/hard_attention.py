"""Soft against hard attention: a weighted sum of all places, or one place, in a recurrent decoder with additive scores.

A choice has no gradient: the straight-through estimator passes the softmax's on, Gumbel noise makes it try others, and
REINFORCE learns from which choices were followed by a small loss.
"""

from __future__ import annotations

from functools import partial

import torch
from runner import Study, main
from torch import Tensor
from training import entropy, error_rates, last, smooth, spelling, train

from core import AdditiveScores, EncoderDecoder, Reinforce, SoftSelection, StraightThrough
from vision.data import SequenceData
from vision.models import RNNDecoder, RNNEncoder

DIM, STEPS = 128, 1200
KINDS = {
    "soft": SoftSelection,
    "straight-through": StraightThrough,
    "straight-through, Gumbel": partial(StraightThrough, gumbel=True),
    "REINFORCE": Reinforce,
}


@torch.no_grad()
def weights(model: EncoderDecoder, data: SequenceData) -> Tensor:
    (source, lengths), (tokens, _) = last(data)
    model.eval()
    return model.decoder.look(tokens[:, :-1], model.encoder(source, real=lengths), memory_real=lengths)


def run(study: Study) -> None:
    data, rows = spelling(), []
    loss, picture = study.figure.subplots(1, 2)
    for name, select in study.some(list(KINDS.items())) if not study.quick else KINDS.items():
        encoder = RNNEncoder(len(data.vocabularies["source"]), DIM)
        score = partial(AdditiveScores, hidden=DIM)
        decoder = RNNDecoder(len(data.vocabularies["target"]), DIM, memory_dim=DIM, score=score, select=select)
        model = EncoderDecoder(encoder, decoder)
        trained = train(model, data, study.steps(STEPS))
        per, wer = error_rates(model, data, batches=1 if study.quick else 0)
        seen = weights(model, data)
        rows.append([name, trained.end, per, wer, entropy(seen), 1000 * trained.seconds])
        study.say(f"{name}: PER {per:.1f} %")
        loss.plot(smooth(trained.losses), label=name)
        if name == "soft":
            picture.imshow(seen[0].numpy(), vmin=0, vmax=1, aspect="auto")
    loss.set(xlabel="step", ylabel="training loss of a symbol")
    loss.legend()
    picture.set(xlabel="letter", ylabel="phone", title="where soft attention looks in one word")
    columns = ["selection", "training loss at the end", "PER %", "WER %", "entropy of the weights", "ms a step"]
    study.table(f"Spelling to phones, GRU with additive scores, {STEPS} steps", columns, rows)


if __name__ == "__main__":
    main("hard_attention", __doc__, run)
