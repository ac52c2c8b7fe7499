"""Norms before or after each branch, by depth, with and without warm-up: which of them trains?

The claim (Xiong et al. 2020): post-norm needs a warm-up, the more so the deeper it is; pre-norm does not.
"""

from __future__ import annotations

from typing import Any

from runner import Study, main
from torch import Tensor
from training import error_rates, forward, last, smooth, toy, train, transformer

from core import EncoderDecoder
from vision.data import SequenceData

DEPTHS, STEPS, LR = (2, 6, 12), 300, 2e-3


def gradient(model: EncoderDecoder, data: SequenceData) -> float:
    """Norm of the gradient in the last decoder block's feed-forward network over that in the first one's, before training."""
    source, (tokens, _) = last(data)
    model.eval()
    forward(model, source, tokens[:, :-1]).log_softmax(dim=-1).gather(-1, tokens[:, 1:, None]).mean().backward()

    def norm(block: int) -> Tensor:
        gradients = [p.grad.flatten() for p in model.decoder.blocks[block].ffn.parameters() if p.grad is not None]
        return sum(each.square().sum() for each in gradients) ** 0.5

    ratio = float(norm(-1) / norm(0))
    model.zero_grad()
    return ratio


def run(study: Study) -> None:
    data, rows = toy("reverse", tokens=768), []
    axes = study.figure.subplots(1, 2, sharey=True)
    for warmup, panel in zip((0.0, 0.2), axes, strict=True):
        for depth in study.some(DEPTHS):
            for order in ("pre", "post"):
                model = transformer(data, 64, depth, order=order, dropout=0.0)
                ratio = gradient(model, data)
                trained = train(model, data, study.steps(STEPS), lr=LR, warmup=warmup, clip=0.0)
                per, _ = error_rates(model, data, batches=1 if study.quick else 0)
                rows.append([order, depth, "yes" if warmup else "no", trained.end, per, ratio])
                study.say(f"{order}-norm, {depth} + {depth} layers, warm-up {warmup:g}: loss {trained.end:.3f}")
                style: dict[str, Any] = {"linestyle": "-" if order == "pre" else "--", "color": f"C{DEPTHS.index(depth)}"}
                panel.plot(smooth(trained.losses), label=f"{order}, {depth}", **style)
        panel.set(xlabel="step", title=f"warm-up over {warmup:.0%} of the steps")
    axes[0].set_ylabel("training loss of a symbol")
    axes[0].legend(fontsize=8)
    title = f"Reversing digits, {STEPS} steps, lr {LR:g}, no clipping"
    columns = ["norms", "layers (each stack)", "warm-up", "loss at the end", "PER %", "gradient last / first block at the start"]
    study.table(title, columns, rows)


if __name__ == "__main__":
    main("norm_order", __doc__, run)
