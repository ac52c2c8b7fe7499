"""What the studies of sequences share: the data, a training loop, error rates, and where a model looks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.text import CharErrorRate

from core import Attention, Decoder, Encoder, EncoderDecoder, Reinforce, greedy
from vision.data import EmbeddedCMUdict, SequenceData, ToySequences
from vision.optim import parameter_groups, warmup_cosine
from vision.tasks.sequence import as_text, unpadded
from vision.vocabulary import PAD, START, STOP


def spelling(tokens: int = 1024) -> SequenceData:
    """English spelling to phones, 19,000 words to train on."""
    data = EmbeddedCMUdict(tokens=tokens)
    data.setup("fit")
    return data


def toy(rule: Any, longest: int = 12, shortest: int = 4, pairs: int = 10_000, tokens: int = 1024) -> SequenceData:
    """Digits to copy, reverse or sort."""
    data = ToySequences(rule, shortest=shortest, longest_source=longest, pairs=pairs, tokens=tokens)
    data.setup("fit")
    return data


def transformer(data: SequenceData, dim: int = 128, depth: int = 2, heads: int = 4, **options: Any) -> EncoderDecoder:
    """As many layers in the decoder as in the encoder."""
    make: Any = partial(dict, dim=dim, depth=depth, heads=heads, hidden=2 * dim, **{"dropout": 0.1, **options})
    encoder = Encoder(len(data.vocabularies["source"]), **make())
    return EncoderDecoder(encoder, Decoder(len(data.vocabularies["target"]), memory_dim=dim, **make()))


@dataclass
class Training:
    """Mean loss of a symbol at each step, and seconds a step; `steps` is less than asked for where the loss became NaN."""

    losses: list[float]
    seconds: float

    @property
    def end(self) -> float:
        """Loss of the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def train(
    model: EncoderDecoder, data: SequenceData, steps: int, lr: float = 2e-3, warmup: float = 0.1, clip: float = 1.0
) -> Training:
    """AdamW, a cosine after the warm-up (share of the steps), gradients clipped (0 is off), label smoothing 0.1."""
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=lr, betas=(0.9, 0.98))
    hard = [module for module in model.modules() if isinstance(module, Reinforce)]
    losses: list[float] = []
    loader, epoch, spent = data.train_dataloader(), 0, 0.0
    sampler: Any = loader.sampler
    model.train()
    while len(losses) < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for source, (tokens, _) in loader:
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = lr * warmup_cosine(len(losses), total=steps, warmup=warmup)
            scores, symbols = forward(model, source, tokens[:, :-1]), tokens[:, 1:]
            real = symbols != PAD
            cost = F.cross_entropy(scores.flatten(0, 1), symbols.flatten(), label_smoothing=0.1, reduction="none")
            cost = cost.view_as(symbols) * real
            loss = cost.sum() / real.sum()
            # What a choice found is used for one symbol only: that symbol's loss is its reward.
            total = loss + sum(each.surrogate(-cost) * len(cost) / real.sum() for each in hard)
            optimizer.zero_grad()
            total.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            spent += time.perf_counter() - start
            losses.append(float(loss.detach()))
            if len(losses) == steps or not math.isfinite(losses[-1]):
                break
        if not math.isfinite(losses[-1]):
            break
    return Training(losses, spent / len(losses))


def forward(model: EncoderDecoder, source: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    tokens, lengths = source
    return model.decoder(target, model.encoder(tokens, real=lengths), memory_real=lengths)


@torch.no_grad()
def error_rates(model: EncoderDecoder, data: SequenceData, batches: int = 0, part: str = "test") -> tuple[float, float]:
    """Share of wrong symbols (edit distance over length) and of sequences with a mistake, by greedy decoding, in percent.

    Args:
        batches: of the test, the first so many; 0 is all.
    """
    per, wrong = CharErrorRate(), []
    model.eval()
    loader = data.test_dataloader() if part == "test" else data.val_dataloader()
    for number, (source, (tokens, lengths)) in enumerate(loader, 1):
        memory = model.encoder(source[0], real=source[1])
        start = torch.full((len(tokens), 1), START)
        longest = int(lengths.max()) + 5
        found = greedy(model.decoder, start, memory, stop=STOP, max_length=longest, memory_real=source[1])
        targets = unpadded(tokens, lengths)
        per.update([as_text(each.tokens) for each in found], [as_text(target) for target in targets])
        wrong += [each.tokens != target for each, target in zip(found, targets, strict=True)]
        if number == batches:
            break
    return 100 * float(per.compute()), 100 * sum(wrong) / len(wrong)


@torch.no_grad()
def looks(model: EncoderDecoder, data: SequenceData) -> dict[str, Tensor]:
    """The weights of every attention, b heads n m, for the longest test batch, of which all rows are equally long or nearly."""
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(partial(keep, seen, name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    model.eval()
    source, (tokens, _) = last(data)
    forward(model, source, tokens[:, :-1])
    for hook in hooks:
        hook.remove()
    return seen


def keep(seen: dict[str, Tensor], name: str, module: Attention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    seen[name] = module.look(*args, **options)


def last(data: SequenceData) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The last batch of the validation, and of it 200 rows."""
    *_, ((source, lengths), (tokens, ends)) = data.val_dataloader()
    return (source[:200], lengths[:200]), (tokens[:200], ends[:200])


def entropy(weights: Tensor) -> float:
    """Mean entropy of the rows, as a share of the largest possible, log m: 1 is even, 0 is one place only."""
    rows = weights[weights.sum(dim=-1) > 0.5]
    return abs(float((rows * rows.clamp(min=1e-12).log()).sum(dim=-1).mean())) / math.log(weights.shape[-1])


def smooth(values: list[float], width: int = 25) -> list[float]:
    """Mean of the last `width`, for plots."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
