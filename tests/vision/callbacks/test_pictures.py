from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.figure import Figure
from PIL import Image

from vision.callbacks.ema import EMA
from vision.callbacks.pictures import Mistakes, Pictures, read_history, samples, written
from vision.callbacks.summary import Summary
from vision.data import EmbeddedCMUdict


@pytest.fixture
def run(task, data, trainer, tmp_path):
    """Trains and tests in the run folder; gives the report."""

    def start(*callbacks, module=None, source=None, test=True, config="trainer: 1\n", **options):
        (tmp_path / "config.yaml").write_text(config)
        module, source = module or task(), source or data()
        best = ModelCheckpoint(tmp_path / "checkpoints", "best", monitor="val/accuracy", mode="max", enable_version_counter=False)
        runner = trainer(Pictures(), Summary(), best, *callbacks, **({"enable_checkpointing": True, "max_epochs": 2} | options))
        runner.fit(module, datamodule=source)
        if test:
            runner.test(module, datamodule=source, verbose=False, ckpt_path=None if options.get("fast_dev_run") else "best")
        path = tmp_path / "report.html"
        return path.read_text() if path.exists() else ""

    return start


def without_pictures(html: str) -> str:
    return re.sub(r"base64,[^\"]*", "", html)


def test_a_run_leaves_pictures_and_a_report(run, tmp_path):
    html = run(EMA())
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"learning_curves.png", "confusion_matrix.png", "per_class.png", "mistakes.png"}
    for name in names:
        picture = np.asarray(Image.open(tmp_path / "figures" / name).convert("L"))
        assert min(picture.shape) > 100
        assert picture.std() > 5  # not blank
    assert html.count("data:image/png;base64,") == 4
    text = without_pictures(html)
    for part in (
        "Test accuracy",
        "(n = 24)",
        "95% interval",
        "<th>training pictures</th><td>24</td>",
        "12 steps, 2 epochs",
        "<th>model</th><td>Sequential(width=8)</td>",
        "<th>parameters</th><td>435</td>",
        "TinyData",
        "3: cat, dog, hen",
        "torch " + torch.__version__.partition("+")[0],
        "cores",
        "trainer: 1",
        f"# use it\nvision classify PICTURE --weights {tmp_path}/model.safetensors",
        f"# test it again\nvision test --ckpt_path {tmp_path}/checkpoints/best.ckpt",
        "most often taken for",
    ):
        assert part in text, part
    assert not re.search(r"https?:|<script|<link|<iframe|@import|url\(|\son\w+=", text)  # no network, nothing to execute


def test_training_alone_leaves_curves_and_a_report(run, tmp_path):
    html = run(test=False)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["learning_curves.png"]
    assert "val accuracy" in html
    assert "Test accuracy" not in html
    assert "Confusion" not in html


def test_names_from_the_data_are_escaped(run, data):
    html = run(source=data(classes=("<img src=x onerror=alert(1)>", "a & b", "$\\frac$")), config="x: <script>\n")
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "x: &lt;script&gt;" in html


def test_mistakes_are_the_most_confident_wrong_pictures():
    generator = torch.Generator().manual_seed(0)
    images = torch.arange(40.0).view(40, 1, 1, 1).expand(40, 1, 2, 2)
    probabilities = torch.randn(40, 3, generator=generator).softmax(-1)
    labels = torch.randint(3, (40,), generator=generator)
    mistakes = Mistakes(5)
    for part in zip(images.split(7), probabilities.split(7), labels.split(7), strict=True):
        mistakes.add(*part)
    confidence, predicted = probabilities.max(-1)
    wrong = [i for i in confidence.argsort(descending=True).tolist() if predicted[i] != labels[i]][:5]
    found = mistakes.named(["a", "b", "c"], {"mean": [0.0], "std": [1 / 40]})
    assert [m.confidence for m in found] == pytest.approx(confidence[wrong].tolist())
    assert [m.true for m in found] == ["abc"[labels[i]] for i in wrong]
    assert [m.predicted for m in found] == ["abc"[predicted[i]] for i in wrong]
    assert [round(m.picture[0, 0, 0].item() * 40) for m in found] == wrong


def test_pictures_are_shown_as_they_were_before_normalisation():
    mistakes = Mistakes(1)
    original = torch.rand(1, 3, 4, 4)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    normalised = (original - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    mistakes.add(normalised, torch.tensor([[0.1, 0.9]]), torch.tensor([0]))
    shown = mistakes.named(["a", "b"], {"mean": mean, "std": std})[0].picture
    np.testing.assert_allclose(shown, original[0].permute(1, 2, 0), atol=1e-6)


def test_no_mistakes_no_picture_of_them(run, task, data):
    class Knows(type(task())):
        def test_step(self, batch, batch_idx):
            right = torch.nn.functional.one_hot(batch[1], 3).float()
            self.test_confusion += torch.diag(right.sum(0).long())
            return {"probabilities": right, "labels": batch[1]}

    html = run(module=Knows())
    assert "Test accuracy 100.0% (n = 24)" in html
    assert "Mistakes" not in html


def test_a_task_adds_its_own_figures(run, task):
    class Draws(type(task())):
        def figures(self, trainer):
            figure = Figure()
            figure.subplots().plot([1, 2])
            return {f"attention_at_{trainer.state.fn.value}": figure}

    html = run(module=Draws())
    assert "<h2>Attention at fit</h2>" in html
    assert "<h2>Attention at test</h2>" in html


def test_a_figure_that_fails_is_a_warning(run, task, tmp_path):
    class Fails(type(task())):
        def figures(self, trainer):
            raise RuntimeError("no\nfigure")

    (tmp_path / "figures" / "confusion_matrix.png").mkdir(parents=True)
    with pytest.warns(UserWarning, match="not drawn") as told:
        html = run(module=Fails())
    texts = [str(w.message) for w in told]
    assert "the figures of Fails were not drawn: RuntimeError: no figure" in texts
    assert any(re.search(r"confusion_matrix\.png was not drawn: IsADirectoryError: ", text) for text in texts)
    assert "Test accuracy" in html


def test_a_report_that_cannot_be_written_is_a_warning(task, data, trainer, tmp_path):
    (tmp_path / "report.html" / "x").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"report\.html was not written: "):
        trainer(Pictures()).fit(task(), datamodule=data())


def test_a_dry_run_writes_nothing(run, tmp_path):
    assert run(fast_dev_run=True) == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"config.yaml"}


def test_another_process_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vision.callbacks.pictures.writes", lambda trainer: False)
    run()
    assert not (tmp_path / "figures").exists()


def test_history_is_that_of_metrics_csv(task, data, trainer):
    runner = trainer(max_epochs=2)
    runner.fit(task(), datamodule=data())
    history = read_history(runner)
    assert [step for step, _ in history["train/loss"]] == list(range(12))
    assert [step for step, _ in history["val/accuracy"]] == [5, 11]
    assert history["val/accuracy"][1][1] == pytest.approx(runner.callback_metrics["val/accuracy"].item())
    assert read_history(trainer(logger=False)) == {}


def test_models_are_written_as_one_would_write_them():
    position = {"class_path": "core.position.Learned", "init_args": {"std": 0.02}}
    spec = {
        "class_path": "vision.models.ViT",
        "init_args": {"dim": 64, "position": position, "stem": {"class_path": "vision.models.ConvStem"}},
    }
    assert written(spec) == "ViT(dim=64, position=Learned(std=0.02), stem=ConvStem)"


def test_samples_counts_what_can_be_counted(data):
    loader = data().train_dataloader()
    assert samples(loader) == 24
    assert samples([loader, loader]) == 48
    assert samples(None) == samples(iter([])) == 0


def test_samples_counts_pairs_and_not_their_batches():
    data = EmbeddedCMUdict(tokens=512)
    data.prepare_data()
    data.setup("fit")
    assert samples(data.train_dataloader()) + samples(data.val_dataloader()) == 20_000
