"""Scores over the root of the head's width, or not (Vaswani et al. 2017, section 3.2.1).

Products of d independent numbers of variance 1 have variance d: without the scale, wide heads start with a softmax that is
nearly a choice, and choices pass little gradient on.
"""

from __future__ import annotations

from typing import Any

from runner import Study, main
from training import entropy, error_rates, looks, smooth, spelling, train, transformer

from core import Attention

HEADS, STEPS = (8, 2, 1), 600


def run(study: Study) -> None:
    data, rows = spelling(), []
    axes = study.figure.subplots()
    for heads in study.some(HEADS):
        for scaled in (True, False):
            model = transformer(data, 128, heads=heads)
            for module in model.modules():
                if isinstance(module, Attention) and not scaled:
                    module.scale = 1.0
            before = looks(model, data)
            trained = train(model, data, study.steps(STEPS))
            after = looks(model, data)
            per, wer = error_rates(model, data, batches=1 if study.quick else 0)
            even = [sum(map(entropy, seen.values())) / len(seen) for seen in (before, after)]
            rows.append([128 // heads, "yes" if scaled else "no", *even, trained.end, per, wer])
            study.say(f"heads of width {128 // heads}, scaled: {scaled}: PER {per:.1f} %")
            style: dict[str, Any] = {"linestyle": "-" if scaled else "--", "color": f"C{HEADS.index(heads)}"}
            axes.plot(smooth(trained.losses), label=f"width {128 // heads}{'' if scaled else ', not scaled'}", **style)
    axes.set(xlabel="step", ylabel="training loss of a symbol")
    axes.legend()
    columns = ["head width", "scaled", "entropy at the start", "entropy at the end", "training loss at the end", "PER %", "WER %"]
    study.table(f"Spelling to phones, {STEPS} steps; entropy 1 looks evenly at all places, 0 at one", columns, rows)


if __name__ == "__main__":
    main("score_scale", __doc__, run)
