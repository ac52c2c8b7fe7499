"""LayerNorm, RMSNorm and BatchNorm on sequences, with large and with small batches.

BatchNorm's statistics are over all tokens of a batch: padding is in them, and in training a symbol's norm depends on later
ones, which it may not see when it writes.
"""

from __future__ import annotations

from runner import Study, main
from training import error_rates, smooth, spelling, train, transformer

from core import BatchNorm, LayerNorm, RMSNorm

NORMS, STEPS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm, "BatchNorm": BatchNorm}, {1024: 500, 128: 1000}


def run(study: Study) -> None:
    rows = []
    axes = study.figure.subplots(1, 2, sharey=True)
    for (tokens, steps), panel in zip(STEPS.items(), axes, strict=True):
        data = spelling(tokens)
        for name, norm in NORMS.items():
            model = transformer(data, norm=norm)
            trained = train(model, data, study.steps(steps))
            per, wer = error_rates(model, data, batches=1 if study.quick else 0)
            rows.append([name, tokens, trained.end, per, wer, 1000 * trained.seconds])
            study.say(f"{name}, batches of {tokens} symbols: PER {per:.1f} %")
            panel.plot(smooth(trained.losses), label=name)
        panel.set(xlabel="step", title=f"batches of {tokens} symbols")
    axes[0].set_ylabel("training loss of a symbol")
    axes[0].legend()
    columns = ["norm", "symbols of a batch", "training loss at the end", "PER %", "WER %", "ms a step"]
    study.table(f"Spelling to phones, {STEPS[1024]} and {STEPS[128]} steps", columns, rows)


if __name__ == "__main__":
    main("norm_kinds", __doc__, run)
