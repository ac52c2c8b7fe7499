"""How many heads at the same width, how alike they become, and what it costs to take the least used ones away."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from runner import Study, main
from torch import Tensor
from training import error_rates, forward, last, looks, spelling, train, transformer

from core import Attention, EncoderDecoder
from vision.data import SequenceData
from vision.vocabulary import PAD

HEADS, PRUNED, STEPS, SHARES = (1, 2, 4, 8, 16), 8, 600, (0.0, 0.25, 0.5, 0.75)


def alike(weights: Tensor) -> float:
    """Mean cosine between the maps of two heads of one attention."""
    maps = F.normalize(weights.flatten(2), dim=-1)
    products, heads = maps @ maps.mT, maps.shape[1]
    return float((products.sum(dim=(1, 2)) - heads).mean() / (heads * (heads - 1)))


@torch.no_grad()
def cost(model: EncoderDecoder, data: SequenceData) -> float:
    """Loss of a symbol of the validation's last batch."""
    source, (tokens, _) = last(data)
    scores = forward(model.eval(), source, tokens[:, :-1])
    return float(F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD))


@torch.no_grad()
def remove(attention: Attention, head: int) -> None:
    """What the head finds no longer comes out."""
    attention.out.weight[:, head * attention.head_dim : (head + 1) * attention.head_dim] = 0.0


def by_use(model: EncoderDecoder, data: SequenceData) -> list[tuple[float, str, int]]:
    """Every head with the loss that its absence alone adds, the least used first."""
    whole, found = cost(model, data), []
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            for head in range(module.heads):
                kept = module.out.weight.detach().clone()
                remove(module, head)
                found.append((cost(model, data) - whole, name, head))
                module.out.weight.data.copy_(kept)
    return sorted(found)


def run(study: Study) -> None:
    data, rows, pruned = spelling(), [], []
    left, right = study.figure.subplots(1, 2)
    for heads in study.some(HEADS) if not study.quick else (1, PRUNED):
        model = transformer(data, 128, heads=heads)
        trained = train(model, data, study.steps(STEPS))
        per, wer = error_rates(model, data, batches=1 if study.quick else 0)
        seen = looks(model, data)
        parts = {"encoder": "encoder", "decoder": ".attention", "cross": "cross_attention"}
        likeness = {
            part: [alike(w) for name, w in seen.items() if word in name and (part != "decoder" or name.startswith("decoder"))]
            for part, word in parts.items()
            if heads > 1
        }
        means = [sum(likeness[part]) / len(likeness[part]) if part in likeness else "-" for part in parts]
        rows.append([heads, 128 // heads, trained.end, per, wer, *means])
        study.say(f"{heads} heads: PER {per:.1f} %")
        if heads == PRUNED:
            order = by_use(model, data)
            attentions = dict(model.named_modules())
            right.bar(range(len(order)), [added for added, _, _ in order])
            done = 0
            for share in SHARES:
                while done < share * len(order):
                    _, name, head = order[done]
                    remove(attentions[name], head)
                    done += 1
                pruned.append([f"{share:.0%}", len(order) - done, *error_rates(model, data, batches=1 if study.quick else 0)])
    left.plot([row[0] for row in rows], [row[3] for row in rows], marker="o")
    left.set(xlabel="heads", ylabel="PER %", xscale="log", xticks=HEADS, xticklabels=map(str, HEADS))
    right.set(xlabel=f"heads of the model with {PRUNED}, by use", ylabel="loss that its absence adds")
    columns = ["heads", "head width", "training loss at the end", "PER %", "WER %"]
    likeness_columns = ["cosine, encoder", "cosine, decoder", "cosine, cross"]
    study.table(f"Spelling to phones, width 128, {STEPS} steps", [*columns, *likeness_columns], rows)
    study.table(f"The model with {PRUNED} heads, the least used taken away", ["pruned", "heads left", "PER %", "WER %"], pruned)


if __name__ == "__main__":
    main("heads", __doc__, run)
