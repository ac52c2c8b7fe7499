"""The sequence task: its loss is the mean over real symbols however they come, its rate the schedule, its checkpoint enough."""

from __future__ import annotations

import copy
import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningDataModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import vision
from core import Decoder, Encoder, EncoderDecoder, Learned, Rotary, beam_search, greedy
from vision.data import PairsFile
from vision.errors import UserError
from vision.optim import warmup_noam
from vision.tasks import Sequence
from vision.tasks.sequence import loss_sum
from vision.vocabulary import NEVER, PAD, START, STOP, Vocabulary

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
]

SYMBOLS = 9  # with the four markers


def model(
    tied: bool = True, position: Any = Rotary, source: int = SYMBOLS, target: int = SYMBOLS, **options: Any
) -> EncoderDecoder:
    sizes = {"dim": 16, "depth": 1, "heads": 2, "hidden": 16, "dropout": 0.0, "position": position, **options}
    return EncoderDecoder(Encoder(source, **sizes), Decoder(target, memory_dim=16, tied=tied, **sizes))


def batch(lengths: list[int], seed: int = 0) -> Any:
    """Random sources and targets: the target has another length than its source."""
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randint(4, SYMBOLS, (n,), generator=generator) for n in lengths]
    targets = [torch.tensor([START, *torch.randint(4, SYMBOLS, (n % 5 + 1,), generator=generator), STOP]) for n in lengths]
    return tuple(
        (nn.utils.rnn.pad_sequence(side, True, PAD), torch.tensor([len(row) for row in side])) for side in (sources, targets)
    )


class Batches(LightningDataModule):
    """Given batches, in their order."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        letters = Vocabulary(list("abcde"))
        self.vocabularies, self.longest = {"source": letters, "target": letters}, {"source": 12, "target": 5}
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)

    val_dataloader = test_dataloader = train_dataloader


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", **{**quiet, **options})


class Gradients(Callback):
    """The gradient and the learning rate of every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, task: Any, optimizer: Any) -> None:
        self.seen.append(torch.cat([p.grad.flatten() for p in task.model.parameters()]).clone())
        self.rates.append(optimizer.param_groups[0]["lr"])


# ------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_loss_against_a_loop_in_float64(smoothing: float) -> None:
    """pytorch #73205, #69339: smoothing together with padding."""
    scores, symbols = torch.randn(3, 5, 7), torch.tensor([[4, 5, 2, 0, 0], [6, 2, 0, 0, 0], [1, 3, 4, 6, 2]])
    total, real = loss_sum(scores, symbols, smoothing)
    expected, count = 0.0, 0
    for row, wanted in zip(scores.double(), symbols, strict=True):
        for score, symbol in zip(row, wanted, strict=True):
            if symbol == PAD:
                continue
            nll = [-math.log(math.exp(s) / sum(math.exp(t) for t in score)) for s in score]
            expected += (1 - smoothing) * nll[symbol] + smoothing * sum(nll) / 7
            count += 1
    assert real == count == 10
    assert total.item() == pytest.approx(expected, rel=1e-6)


def test_scores_at_padding_change_nothing() -> None:
    scores, symbols = torch.randn(2, 3, 7, requires_grad=True), torch.tensor([[4, 2, 0], [2, 0, 0]])
    total, real = loss_sum(scores, symbols, 0.1)
    (total / real).backward()
    assert real == 3
    assert torch.equal(scores.grad.abs().sum(-1) > 0, symbols != PAD)


def test_all_padding_is_zero_and_not_nan() -> None:
    """pytorch #40932: the mean over no symbol would be NaN."""
    total, real = loss_sum(torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.long), 0.1)
    assert total == 0
    assert real == 1


def whole_gradient(task: Sequence, batches: list[Any]) -> torch.Tensor:
    """Of the mean over all real symbols of these batches, in one graph."""
    plain = copy.deepcopy(task.model)
    total, count = torch.tensor(0.0), 0
    for (source, source_real), (target, _) in batches:
        scores = plain(source, target[:, :-1], source_real=source_real)
        real = target[:, 1:] != PAD
        total = total + nn.functional.cross_entropy(scores[real], target[:, 1:][real], label_smoothing=0.1, reduction="sum")
        count += int(real.sum())
    (total / count).backward()
    return torch.cat([p.grad.flatten() for p in plain.parameters()])


def test_accumulated_batches_are_one_large_batch(within) -> None:
    """transformers #34191, torchtune #1875, OpenNMT-py #2209: the mean of means counts the symbols of small batches too much.

    The last step has two batches only, which Lightning divides by four all the same.
    """
    lengths = [[2] * 3, [9, 4, 11, 6, 8], [3], [12] * 8, [7, 3], [4] * 6]
    batches = [batch(n, i) for i, n in enumerate(lengths)]
    task, gradients = Sequence(model(), lr=1e-12, weight_decay=0, clip=0), Gradients()
    trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[gradients], limit_val_batches=0).fit(task, Batches(batches))
    assert len(gradients.seen) == 2
    within(gradients.seen[0], whole_gradient(task, batches[:4]), 1e-4)
    within(gradients.seen[1], whole_gradient(task, batches[4:]), 1e-4)


def test_limited_epochs_end_in_a_whole_step(within) -> None:
    batches = [batch([n] * n, n) for n in range(2, 9)]
    task, gradients = Sequence(model(), lr=1e-12, weight_decay=0, clip=0), Gradients()
    options = {"max_epochs": 1, "accumulate_grad_batches": 3, "limit_train_batches": 5, "limit_val_batches": 0}
    trainer(callbacks=[gradients], **options).fit(task, Batches(batches))
    within(gradients.seen[1], whole_gradient(task, batches[3:5]), 1e-4)


def test_clipping_sees_the_gradient_of_the_mean() -> None:
    """Accumulated gradients are put right before they are clipped."""
    batches = [batch([2], 0), batch([12] * 9, 1)]
    task = Sequence(model(), lr=1e-12, weight_decay=0, clip=1e-3)
    norms: list[float] = []

    class Norm(Callback):
        def on_before_zero_grad(self, trainer: Trainer, task: Any, optimizer: Any) -> None:
            gradients = [p.grad.flatten() for p in task.parameters() if p.grad is not None]
            norms.extend([float(torch.cat(gradients).norm())] if gradients else [])

    trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[Norm()], limit_val_batches=0).fit(task, Batches(batches))
    assert norms[-1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
def test_two_processes_are_one_large_batch(tmp_path: Path, within) -> None:
    """Each process has other lengths and accumulates two batches: the gradient is of the mean over the symbols of all four."""
    script = Path(__file__).parent / "train_on_two.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "out.pt")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = torch.load(tmp_path / "out.pt")
    assert len(found) == 2
    for gradient, wanted in zip(found, expected, strict=True):
        within(gradient, wanted, 1e-4)


# --------------------------------------------------------------------------------------------------------- schedule


def test_noam_is_the_papers_formula() -> None:
    """512 wide, 4000 warm-up steps: the values of Vaswani et al. 2017, equation 3."""
    lr, total = (512 * 4000) ** -0.5, 100_000
    for step, rate in ((1, 1.7469e-7), (4000, 6.98771e-4), (8000, 4.94106e-4), (100_000, 1.39754e-4)):
        assert lr * warmup_noam(step - 1, total=total, warmup=0.04) == pytest.approx(rate, rel=1e-4)
    assert warmup_noam(99_999, total=total, warmup=0.04, final=0.5) == 0.5
    assert warmup_noam(0, total=100, warmup=0.0) == 1.0


def test_the_rate_counts_optimizer_steps() -> None:
    """Lightning #1476, #12894: a warm-up counted in batches is over too early under accumulation."""
    batches, gradients = [batch([3, 4], i) for i in range(20)], Gradients()
    task = Sequence(model(), lr=0.5, warmup=0.2, schedule="noam")
    trainer(max_epochs=4, accumulate_grad_batches=4, callbacks=[gradients], limit_val_batches=0).fit(task, Batches(batches))
    steps, warm = range(1, 21), 4  # 20 steps of the run, a fifth of them to warm up
    expected = [0.5 * min(s**-0.5, s * warm**-1.5) / warm**-0.5 for s in steps]
    assert gradients.rates == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------- metrics


def distance(a: list[int], b: list[int]) -> int:
    """Edit distance by its definition."""

    @functools.cache
    def least(i: int, j: int) -> int:
        if min(i, j) == 0:
            return max(i, j)
        return min(least(i - 1, j) + 1, least(i, j - 1) + 1, least(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return least(len(a), len(b))


@pytest.mark.parametrize("beam", [1, 3])
def test_rates_against_the_definition(beam: int, perturbed) -> None:
    batches = [batch([5, 7, 2, 9], 0), batch([12], 1)]
    task, data = Sequence(perturbed(model()), beam=beam), Batches(batches)
    runner = trainer()
    runner.test(task, data, verbose=False)
    measured = {name: float(value) for name, value in runner.callback_metrics.items()}
    edits = symbols = wrong = count = 0
    for (source, real), (target, lengths) in batches:
        for i in range(len(source)):  # one by one: a batch gives the same
            with torch.no_grad():
                memory = task.model.encoder(source[i : i + 1, : real[i]])
            prompt, limits = torch.tensor([[START]]), {"stop": STOP, "never": NEVER, "max_length": task.limits["target"]}
            if beam == 1:
                written = greedy(task.model.decoder, prompt, memory, **limits)[0].tokens
            else:
                written = beam_search(task.model.decoder, prompt, memory, beam=beam, **limits)[0][0].tokens
            wanted = target[i, 1 : lengths[i] - 1].tolist()
            edits, symbols, wrong, count = (
                edits + distance(written, wanted),
                symbols + len(wanted),
                wrong + (written != wanted),
                count + 1,
            )
    assert measured["test/per"] == pytest.approx(edits / symbols)
    assert measured["test/wer"] == pytest.approx(wrong / count)
    with torch.no_grad():
        sums = [loss_sum(task.model(s, t[:, :-1], source_real=n), t[:, 1:], 0.0) for (s, n), (t, _) in batches]
    total, real = (torch.stack(part).sum() for part in zip(*sums, strict=True))
    assert measured["test/loss"] == pytest.approx(float(total / real), rel=1e-5)


# ------------------------------------------------------------------------------------------------ data and checkpoint


def pairs_file(folder: Path, count: int = 120) -> PairsFile:
    file = folder / "pairs.tsv"
    file.write_text("".join(f"{i}\t{i * i} {i % 3}\n" for i in range(count)), encoding="utf-8")
    return PairsFile(str(file), tokens=48, target_by="words", test_share=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_alone_translates(tmp_path: Path, tied: bool) -> None:
    from vision.inference.translation import translate

    task, data = Sequence(model(tied, source=5, target=5)), pairs_file(tmp_path)
    runner = trainer(max_epochs=1)
    runner.fit(task, data)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["vision"]["task"] == "sequence"
    loaded = vision.load_model(str(tmp_path / "a.ckpt"))
    assert loaded.vocabularies == data.vocabularies
    assert len(loaded.encoder.embedding.weight) == len(data.vocabularies["source"]) == 14
    task.model.vocabularies, task.model.limits = data.vocabularies, task.limits
    texts = ["7", "110", "42"]
    assert translate(loaded, texts) == translate(task.model, texts)
    assert Sequence.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).vocabularies == data.vocabularies


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """accelerate #1204, TransformerLens #1725: after a load or a copy the scores must still use the embedding."""
    task = Sequence(model())
    runner = trainer(max_epochs=1, limit_val_batches=0)
    runner.fit(task, Batches([batch([3, 4])]))
    runner.save_checkpoint(tmp_path / "a.ckpt")
    for other in (copy.deepcopy(task.model), vision.load_model(str(tmp_path / "a.ckpt"))):
        (source, real), (target, _) = batch([4, 4])
        assert torch.equal(other(source, target, source_real=real), task.model(source, target, source_real=real))
        assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in task.model.parameters())
        with torch.no_grad():
            other.decoder.embedding.weight[5] = 0.0
            assert (other(source, target, source_real=real)[..., 5] == 0).all()


class StopAt(Callback):
    """Saves and stops after so many steps, wherever the epoch is."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resume_in_mid_epoch_is_exact(tmp_path: Path, accumulate: int) -> None:
    """Lightning #18780, #19764: the same weights as without the interruption."""
    options = {"max_epochs": 3, "limit_val_batches": 0, "accumulate_grad_batches": accumulate}
    start, data = model(), pairs_file(tmp_path)
    whole = Sequence(copy.deepcopy(start))
    full = trainer(**options)
    torch.manual_seed(1)  # of the embeddings, which the data make larger
    full.fit(whole, data)
    assert full.num_training_batches > 6
    torch.manual_seed(1)
    with pytest.raises(SystemExit):
        trainer(callbacks=[StopAt(5, tmp_path / "a.ckpt")], **options).fit(Sequence(copy.deepcopy(start)), pairs_file(tmp_path))
    resumed, runner = Sequence(copy.deepcopy(start)), trainer(**options)
    runner.fit(resumed, pairs_file(tmp_path), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert runner.global_step == full.global_step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_other_symbols_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    runner = trainer(max_epochs=1)
    runner.fit(Sequence(model()), pairs_file(tmp_path))
    runner.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"the data have other source symbols \(9\) than the checkpoint \(14\)"):
        trainer().test(Sequence(model()), Batches([batch([3])]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


def test_too_long_for_a_learned_table_is_one_line() -> None:
    task = Sequence(model(position=Learned, max_length=6))
    with pytest.raises(UserError, match="6"):
        trainer().validate(task, Batches([batch([9])]), verbose=False)


def test_data_without_symbols_are_refused() -> None:
    with pytest.raises(UserError, match="the data do not name their symbols"):
        trainer().validate(Sequence(model()), DataLoader([batch([3])], batch_size=None), verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing=1 is not in 0 <= s < 1"),
        ({"schedule": "linear"}, "schedule='linear' is unknown; use cosine or noam"),
        ({"beam": 0}, "beam=0 keeps no sequence"),
        ({"warmup": 2}, "warmup=2 is a share of all steps"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sequence(model(), **options)


def test_a_model_that_writes_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^Linear has no encoder to train; use a model such as core.EncoderDecoder$"):
        Sequence(torch.nn.Linear(2, 2))


def test_figures_and_tables_of_a_test() -> None:
    task, data = Sequence(model()), Batches([batch([5, 7, 2, 9], 0)])
    runner = trainer()
    runner.test(task, data, verbose=False)
    assert set(task.figures(runner)) == {"length", "attention"}
    columns, rows = task.tables()["Mistakes"]
    assert columns == ("source", "written", "target")
    assert 1 <= len(rows) <= 4
