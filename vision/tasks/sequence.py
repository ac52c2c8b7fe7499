"""Sequence to sequence: an encoder and a decoder trained to write the target of a source, measured by what they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.text import CharErrorRate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from core import Hypothesis, beam_search, greedy
from core.transformer import initialise
from vision.errors import UserError
from vision.inference.translation import draw_attention, looks, table_places
from vision.optim import warmup_cosine, warmup_noam
from vision.rebuild import describe
from vision.tasks.base import OptimizerName, Task
from vision.vocabulary import NEVER, PAD, START, STOP, Vocabulary, from_card

Padded = tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]  # symbols with padding on the right, and lengths
Batch = tuple[Any, Padded]  # the source (`Padded`, or pictures b c h w), and the target from start to stop symbol

SCHEDULES = {"cosine": warmup_cosine, "noam": warmup_noam}


class Sequence(Task):
    """Trains an encoder and a decoder by teacher forcing; validates by greedy decoding.

    The loss is the mean cross-entropy over the real symbols of an optimizer step: of all its accumulated batches and all
    devices together, as if they were one batch. The vocabularies come from the data and travel in the checkpoint; embeddings
    of another size are replaced.

    `per` is the share of wrong symbols (edit distance over length of the target; of phones, letters, ...), `wer` the share of
    sequences with any mistake, `loss` the mean of a real symbol without smoothing.

    Args:
        model: has an `encoder` and a `decoder`, as `core.EncoderDecoder`.
        lr: largest learning rate, at the end of the warm-up.
        weight_decay: decoupled, on matrices only.
        betas: of AdamW.
        warmup: share of all optimizer steps, 0..1.
        schedule: after the warm-up: half a cosine, or 1 / sqrt(step) ("noam").
        final_lr: share of `lr` that the schedule ends at, or does not go below.
        label_smoothing: share of the target spread over all symbols.
        clip: largest norm of the gradient; 0 is off. `trainer.gradient_clip_val` goes before it.
        beam: sequences kept by the beam search of the test; 1 is greedy.
        optimizer: "adamw", or "muon" for the matrices of the Linears, see `vision.optim.Muon`: more learned of each step, at
            the same `lr`; a step takes longer, much in small batches.
    """

    kind, unit = "sequence", "sequences"
    monitor = ("val/per", "min")

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        warmup: float = 0.05,
        schedule: Literal["cosine", "noam"] = "cosine",
        final_lr: float = 0.0,
        label_smoothing: float = 0.1,
        clip: float = 1.0,
        beam: int = 1,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing={label_smoothing:g} is not in 0 <= s < 1; use e.g. 0.1")
        if schedule not in SCHEDULES:
            raise UserError(f"schedule={schedule!r} is unknown; use {' or '.join(SCHEDULES)}")
        if beam < 1:
            raise UserError(f"beam={beam} keeps no sequence; use 1 for greedy decoding, or e.g. 5")
        self.save_hyperparameters(ignore=["model"])
        self.take_model(model)
        if missing := [part for part in ("encoder", "decoder") if not hasattr(self.model, part)]:
            raise UserError(f"{type(self.model).__name__} has no {missing[0]} to train; use a model such as core.EncoderDecoder")
        self.vocabularies: dict[str, Vocabulary] = {}
        self.limits: dict[str, int] = {}  # symbols: of a source that can be read, of a target that is written
        self.reference: Float[Tensor, ""] | float = 1.0  # real symbols that the losses of this optimizer step are divided by
        self.counted: Float[Tensor, ""] | float = 0.0  # real symbols of this optimizer step so far, of all devices
        self.batch_index = 0
        self.examples: list[tuple[str, str, str]] = []  # source, written, target: of the last test
        self.pictures: list[Tensor] = []  # the first sources of the last test, where they are pictures

    # The data tell which symbols there are

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        self.take_vocabularies(dict(getattr(data, "vocabularies", self.vocabularies)))
        longest = dict(getattr(data, "longest", {}))
        if not self.limits and longest:  # a quarter more than was ever trained, and a stop
            target = longest["target"] + longest["target"] // 4 + 2
            self.limits = {"source": 2 * longest["source"], "target": target} if "source" in longest else {"target": target}
        for name in ("val", "test"):
            setattr(self, f"{name}_loss", MeanMetric())
            setattr(self, f"{name}_per", CharErrorRate())
            setattr(self, f"{name}_wer", MeanMetric())

    def take_vocabularies(self, vocabularies: dict[str, Vocabulary]) -> None:
        """Makes the embeddings those of the vocabularies, and keeps the spec true to the model."""
        if "target" not in vocabularies:
            raise UserError("the data do not name their symbols; give the data module a dict `vocabularies` with a target")
        self.vocabularies = vocabularies
        for side, part in (("source", self.model.encoder), ("target", self.model.decoder)):
            if side in vocabularies:
                resize(part, len(vocabularies[side]))
        if hasattr(self.model, "options") or self.model_spec is None:
            self.model_spec = describe(self.model)
        self.hparams["model"] = self.model_spec

    # Steps

    def encode(self, source: Any) -> tuple[Float[Tensor, "b m c"], Int[Tensor, " b"] | None]:
        """The memory, and its lengths where it has padding."""
        if isinstance(source, Tensor):
            return self.model.encoder(source), None
        tokens, lengths = source
        if tokens.device.type == "cpu" and int(lengths.min()) == tokens.shape[1]:
            lengths = None  # no padding, as in most batches of one length; a GPU would have to be waited for
        return self.model.encoder(tokens, real=lengths), lengths

    def forward(self, source: Any, target: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        """Scores of the symbol after each of the target's.

        Padding of the target is on its right, where no real symbol looks.
        """
        try:
            memory, lengths = self.encode(source)
            return self.model.decoder(target, memory, memory_real=lengths).float()
        except ValueError as error:  # too long for a table, another number of symbols, ...
            raise UserError(str(error)) from error

    def training_step(self, batch: Batch, index: int) -> Tensor:
        source, (tokens, _) = batch
        total, real = loss_sum(self(source, tokens[:, :-1]), tokens[:, 1:], self.hparams["label_smoothing"])
        self.log("train/loss", total.detach() / real, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(tokens))
        return total / self.share(real, index)

    def share(self, real: Float[Tensor, ""], index: int) -> Float[Tensor, ""]:
        """What to divide the sum of this batch's losses by.

        Lightning averages over batches and devices. That is the mean over all real symbols if each batch divides by the mean
        number of real symbols in a batch. With accumulation it is known after the last batch only: until then the first
        batches, one a device, stand for all, and `on_after_backward` puts it right.
        """
        world = self.trainer.world_size
        everywhere = self.trainer.strategy.reduce(real, reduce_op="sum") if world > 1 else real
        if index % self.trainer.accumulate_grad_batches == 0:  # Lightning's rule for the beginning of a step
            self.reference, self.counted = everywhere / world, 0.0
        self.counted, self.batch_index = self.counted + everywhere, index
        return torch.as_tensor(self.reference)

    def on_after_backward(self) -> None:
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated == 1 or ((self.batch_index + 1) % accumulated and not self.trainer.is_last_batch):
            return
        factor = self.reference * accumulated * self.trainer.world_size / self.counted
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def validation_step(self, batch: Batch, index: int) -> None:
        self.measure("val", batch, beam=1)

    def test_step(self, batch: Batch, index: int) -> None:
        source, (tokens, lengths) = batch
        best = self.measure("test", batch, beam=self.hparams["beam"])
        if isinstance(source, Tensor):
            self.pictures += source[: max(0, 24 - len(self.pictures))].float().cpu().unbind()
        self.examples += self.told(source, best, tokens, lengths)

    def predict_step(self, batch: Batch, index: int) -> list[str]:
        return [self.vocabularies["target"].decode(found.tokens) for found in self.write(batch[0], self.hparams["beam"])]

    def measure(self, stage: str, batch: Batch, beam: int) -> list[Hypothesis]:
        """Updates loss, symbol and sequence error rates; what was written."""
        source, (tokens, lengths) = batch
        total, real = loss_sum(self(source, tokens[:, :-1]), tokens[:, 1:], 0.0)
        best = self.write(source, beam)
        targets = unpadded(tokens, lengths)
        wrong = [found.tokens != target for found, target in zip(best, targets, strict=True)]
        loss, per, wer = (getattr(self, f"{stage}_{name}") for name in ("loss", "per", "wer"))
        loss.update(total / real, real)
        per.update([as_text(found.tokens) for found in best], [as_text(target) for target in targets])
        wer.update(torch.tensor(wrong, dtype=torch.float))
        measured = {f"{stage}/loss": loss, f"{stage}/per": per, f"{stage}/wer": wer}
        self.log_dict(measured, prog_bar=stage == "val", on_epoch=True, batch_size=len(tokens))
        return best

    def write(self, source: Any, beam: int = 1) -> list[Hypothesis]:
        """What the model writes for each source."""
        with torch.no_grad():
            memory, lengths = self.encode(source)
            start = torch.full((len(memory), 1), START, device=memory.device)
            longest = min([self.limits.get("target", 100), *table_places(self.model.decoder)])
            options: dict[str, Any] = {"stop": STOP, "never": NEVER, "max_length": longest, "memory_real": lengths}
            if beam == 1:
                return greedy(self.model.decoder, start, memory, **options)
            return [found[0] for found in beam_search(self.model.decoder, start, memory, beam=beam, **options)]

    def told(self, source: Any, best: list[Hypothesis], tokens: Tensor, lengths: Tensor) -> list[tuple[str, str, str]]:
        """Texts of sources, of what was written, and of targets."""
        named = self.vocabularies.get("source")
        sources = [named.decode(row) for row in source[0].tolist()] if named and isinstance(source, (tuple, list)) else None
        target = self.vocabularies["target"].decode
        return [
            (sources[i] if sources else "", target(best[i].tokens), target(row))
            for i, row in enumerate(unpadded(tokens, lengths))
        ]

    def on_test_epoch_start(self) -> None:
        self.examples, self.pictures = [], []

    # Pictures of a run

    def figures(self, trainer: Any) -> dict[str, Figure]:
        """After a test: lengths and mistakes; where the decoder looks in one source, or what was read in some pictures."""
        if trainer.state.fn != "test" or not self.examples:
            return {}
        drawn = {"length": by_length(self.examples, self.vocabularies["target"])}
        if self.pictures:
            drawn["read"] = draw_read(self.pictures, self.examples)
        if "source" in self.vocabularies and len(self.limits) == 2 and looks(self.model):
            source, _, target = max(self.examples[:50], key=lambda example: len(example[0]))
            numbers = self.vocabularies["source"].encode(source), self.vocabularies["target"].encode(target)
            labels = (self.vocabularies["source"].labels(numbers[0]), self.vocabularies["target"].labels(numbers[1]))
            drawn["attention"] = draw_attention(self.model, *numbers, labels)
        return drawn

    def tables(self) -> dict[str, Any]:
        """What the report of a test tells: examples, the wrong ones too."""
        wrong = [example for example in self.examples if example[1] != example[2]]
        first = 0 if "source" in self.vocabularies else 1  # of pictures there is nothing to write
        columns = ("source", "written", "target")[first:]
        shown = {"Examples": spread(self.examples, 15), "Mistakes": spread(wrong, 15)}
        return {title: (columns, [row[first:] for row in rows]) for title, rows in shown.items() if rows}

    # Optimisation

    def factor(self, step: int, total: int) -> float:
        options = self.hparams
        schedule = SCHEDULES[options["schedule"]]
        return schedule(step, total=total, warmup=options["warmup"], final=options["final_lr"])

    # What a checkpoint needs to work alone

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        card = checkpoint.get("vision", {})
        stored = from_card(card)
        for side, vocabulary in stored.items():
            if side in self.vocabularies and self.vocabularies[side] != vocabulary:
                raise UserError(
                    f"the data have other {side} symbols ({len(self.vocabularies[side])}) than the checkpoint "
                    f"({len(vocabulary)}); use the data it was trained on, or others with the same symbols"
                )
        self.limits = dict(card.get("limits") or self.limits)
        if stored:
            self.take_vocabularies(stored)

    def card(self) -> dict[str, Any]:
        """Plain values that rebuild the model and use it: see `vision.load_model`."""
        vocabularies = {side: vocabulary.plain() for side, vocabulary in self.vocabularies.items()}
        return {**super().card(), "vocabularies": vocabularies, "limits": self.limits}


def loss_sum(
    scores: Float[Tensor, "b n v"], symbols: Int[Tensor, "b n"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum of the cross-entropy over the real symbols, and their number (at least 1).

    With smoothing e a symbol costs (1 - e) nll + e / v sum(-log p) over all v symbols of the vocabulary.
    """
    total = F.cross_entropy(scores.flatten(0, 1), symbols.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum")
    return total, (symbols != PAD).sum().clamp(min=1).to(total.dtype)


def unpadded(tokens: Int[Tensor, "b n"], lengths: Int[Tensor, " b"]) -> list[list[int]]:
    """The symbols of each row between start and stop."""
    return [row[1 : length - 1] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def as_text(symbols: list[int]) -> str:
    """One character for each symbol, for metrics of texts."""
    return "".join(map(chr, symbols))


def resize(part: Any, size: int) -> None:
    """Gives an encoder or decoder new, untrained embeddings (and scores) where it has another number of symbols."""
    embedding = getattr(part, "embedding", None)
    if embedding is None or len(embedding.weight) == size:
        return
    part.embedding = type(embedding)(size, part.dim)
    if getattr(part, "output", None) is not None:
        part.output = nn.Linear(part.dim, size, bias=False)
        initialise(part.output)
    part.options["vocabulary"] = size


def spread(examples: list[tuple[str, str, str]], most: int) -> list[tuple[str, str, str]]:
    """Some of them, from short to long, as they came."""
    return examples[:: max(1, -(-len(examples) // most))]


def draw_read(pictures: list[Tensor], examples: list[tuple[str, str, str]]) -> Figure:
    """Pictures, each with what was written; where that is wrong, in red, and the target behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.35 + 0.85 * -(-len(pictures) // 4)), layout="constrained")
    places = list(figure.subplots(-(-len(pictures) // 4), 4, squeeze=False).flat)
    for axes in places:
        axes.set_axis_off()
    for axes, picture, (_, written, target) in zip(places, pictures, examples, strict=False):
        shown = picture.permute(1, 2, 0).numpy()
        axes.imshow((shown - shown.min()) / max(float(shown.max() - shown.min()), 1e-6), cmap="gray")
        wrong = written != target
        axes.set_title(f"{written} ({target})" if wrong else written, fontsize=9, color="C3" if wrong else "black")
    return figure


def by_length(examples: list[tuple[str, str, str]], vocabulary: Vocabulary) -> Figure:
    """How many targets of each length there are, and how many of them were written without a mistake."""
    from matplotlib.figure import Figure

    lengths = torch.tensor([len(vocabulary.split(target)) for _, _, target in examples])
    right = torch.tensor([written == target for _, written, target in examples])
    counts, good = lengths.bincount(), lengths[right].bincount(minlength=int(lengths.max()) + 1)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(counts)), counts.tolist(), color="0.8", label="all")
    axes.bar(range(len(good)), good.tolist(), color="C0", label="without a mistake")
    axes.set_xlabel("symbols of the target")
    axes.set_ylabel("test sequences")
    axes.legend()
    return figure
