"""The examples of detection and segmentation train; docs show code that is in them."""

from __future__ import annotations

import importlib
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch

EXAMPLES = Path("docs/examples").resolve()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_the_scenes_are_what_their_annotations_say(example):
    for picture, target in example("scenes").scenes(20, seed=3):
        assert picture.shape == (1, 64, 64)
        assert 1 <= len(target["boxes"]) == len(target["labels"]) <= 3
        inside = torch.zeros(64, 64, dtype=torch.bool)
        for box, label in zip(target["boxes"].long().tolist(), target["labels"], strict=True):
            x1, y1, x2, y2 = box
            inside[y1:y2, x1:x2] = True
            found = target["map"][y1:y2, x1:x2]
            assert {0, int(label)} >= set(found.unique().tolist())
            edges = (found[0], found[-1], found[:, 0], found[:, -1])
            assert all((edge == label).any() for edge in edges), "the box is tight"
        assert (target["map"][~inside] == 0).all()
        assert (picture[0][target["map"] > 0] > 20 / 255).all()


@pytest.mark.parametrize("backbone", ["swin", "dat", "vit"])
@pytest.mark.parametrize("kind", ["retinanet", "fasterrcnn"])
def test_detectors_learn(kind, backbone, example):
    detection = example("detection")
    body = detection.make_backbone(backbone)
    detector = detection.make_detector(kind, body)
    losses = detection.train(detector, 16, batch=2, count=2)
    assert min(losses) < 0.9 * losses[0]  # RetinaNet's rises for a few steps, once its scores leave their start
    assert all(p.grad is not None and p.grad.isfinite().all() for p in body.backbone.parameters())
    with torch.no_grad():
        found = detector.eval()([torch.rand(1, 50, 70)])[0]  # of another size
    assert found["boxes"].shape == (len(found["labels"]), 4)


@pytest.mark.parametrize("backbone", ["swin", "dat", "vit"])
def test_segmenters_learn(backbone, example):
    segmentation = example("segmentation")
    model = segmentation.make_segmenter(backbone)
    losses = segmentation.train(model, 8, batch=2, count=2)
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.backbone.parameters())
    assert model(torch.rand(1, 1, 50, 75)).shape == (1, 11, 50, 75)


@pytest.mark.parametrize("name", ["detection", "segmentation"])
def test_docs_show_what_runs(name, example):
    text, code = Path(f"docs/{name}.md").read_text(), (EXAMPLES / f"{name}.py").read_text()
    code = re.sub(r'(class PyramidBackbone\(nn.Module\):\n) +""".*?"""\n\n', r"\1", code, flags=re.DOTALL)
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        assert block in code or "weights=" in block
    for line in re.findall(r"```bash\npython (.*?)\n```", text):
        script, *options = shlex.split(line)
        assert Path(script) == Path(f"docs/examples/{name}.py")
        assert all(f'"{option}"' in code for option in options if option.startswith("--"))


def test_the_numbers_of_the_docs():
    import vision

    info = vision.create_model("swin_tiny_patch4_window7_224", features_only=True).feature_info
    block = textwrap.dedent(Path("docs/detection.md").read_text())
    assert f"channels()  # {info.channels()}" in block
    assert f"reduction()  # {info.reduction()}" in block
