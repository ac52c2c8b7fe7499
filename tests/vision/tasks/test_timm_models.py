"""Any timm model in our classification task: trained from a YAML config, and a checkpoint that `vision classify` takes alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

import vision
from vision.cli import main

FEW = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1, "max_epochs": 1}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet10t", {"in_chans": 1}),
        ("vit_tiny_patch16_224", {"in_chans": 1, "img_size": 32, "patch_size": 8, "depth": 1}),
        pytest.param("convnext_atto", {"in_chans": 1, "depths": [1, 1, 1, 1], "drop_path_rate": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_a_timm_model_from_yaml_to_a_named_picture(name, options, tmp_path: Path, monkeypatch, capsys):
    config = {
        "model": {
            "class_path": "vision.tasks.Classification",
            "init_args": {
                "model": {"class_path": "timm.create_model", "init_args": {"model_name": name}, "dict_kwargs": options}
            },
        },
        "data": {"class_path": "vision.data.EmbeddedFashionMNIST", "init_args": {"batch_size": 8, "size": 32}},
        "trainer": FEW,
    }
    monkeypatch.chdir(tmp_path)
    Path("timm.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "timm.yaml"]) == 0
    run = Path("runs/timm/1")
    stored = np.load(Path(sys.modules["vision"].__file__).parent / "data/embedded/fashion_mnist/slice.npz")["test_images"]
    Image.fromarray(stored[0]).save("boot.png")
    said = []
    for weights in (run / "checkpoints/best.ckpt", run / "model.safetensors"):
        capsys.readouterr()
        assert main(["classify", "boot.png", "--weights", str(weights), "--device", "cpu", "--top", "10"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert all(word in said[0] for word in ("Ankle boot", "Bag", "Trouser"))
    model = vision.load_model(run / "checkpoints/best.ckpt")
    assert type(model) is type(timm.create_model(name, num_classes=10, **options))
    assert len(model.classes) == model.num_classes == 10
    held = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    assert all(torch.equal(tensor, held["state_dict"][f"model.{key}"]) for key, tensor in model.state_dict().items())
