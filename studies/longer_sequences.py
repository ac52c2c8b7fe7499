"""Kinds of position on sequences longer than any they were trained on: copying digits, up to 20 in training."""

from __future__ import annotations

from functools import partial

from runner import Study, main
from training import error_rates, smooth, toy, train, transformer

from core import Alibi, Combined, Learned, Position, Rotary, Shaw, Sinusoidal, T5Bias

KINDS = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "Shaw": partial(Shaw, clip=8),
    "T5 bias": T5Bias,
    "ALiBi": Alibi,
    "rotary": Rotary,
    "sinusoidal and rotary": partial(Combined, kinds=[Sinusoidal, Rotary]),
}
STEPS = 800


def run(study: Study) -> None:
    data = toy("copy", longest=20, tokens=2048)
    longer = {"21-30": toy("copy", 30, 21, pairs=1000), "40-60": toy("copy", 60, 40, pairs=1000)}
    axes, rows = study.figure.subplots(), []
    for name, position in study.some(list(KINDS.items())):
        model = transformer(data, 64, position=position, dropout=0.0)
        trained = train(model, data, study.steps(STEPS))
        batches = 1 if study.quick else 0
        errors = [error_rates(model, each, batches)[0] for each in (data, *longer.values())]
        rows.append([name, trained.end, *errors, 1000 * trained.seconds])
        study.say(f"{name}: PER {errors[0]:.1f} %, longer {errors[1]:.1f} %, much longer {errors[2]:.1f} %")
        axes.plot(smooth(trained.losses), label=name)
    axes.set(xlabel="step", ylabel="training loss of a symbol")
    axes.legend(fontsize=8)
    columns = ["position", "training loss at the end", "PER % at 4-20", *(f"PER % at {n}" for n in longer), "ms a step"]
    study.table(f"Copying digits, trained on 4 to 20, {STEPS} steps", columns, rows)


if __name__ == "__main__":
    main("longer_sequences", __doc__, run)
