from __future__ import annotations

import json
import os
from functools import partial

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import vision
import vision.weights.save
from core import Combined, LayerNorm, Learned, RelativeTable, Rotary
from vision.errors import UserError
from vision.models import Features, SwinV2, ViT
from vision.weights.read import read


def small(**options) -> ViT:
    return ViT(**{"img_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, **options})


def metadata(path) -> dict:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("options", [{}, {"position": RelativeTable}, {"class_tokens": 2, "reg_tokens": 1, "init_values": 0.1}])
def test_there_and_back(options, perturbed, tmp_path):
    source = perturbed(small(**options))
    source.classes, source.preprocessing = list("abcde"), {"channels": 3, "size": [32, 32]}
    vision.save_weights(source, tmp_path / "model.safetensors")
    model = vision.load_model(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert (model.classes, model.preprocessing) == (source.classes, source.preprocessing)
    x = torch.randn(1, 3, 40, 32)
    assert torch.equal(model(x), source(x))


def test_the_file_is_plain_safetensors_with_a_description(tmp_path):
    vision.save_weights(small(), tmp_path / "x.safetensors")
    assert set(load_file(tmp_path / "x.safetensors")) == set(small().state_dict())
    card = json.loads(metadata(tmp_path / "x.safetensors")["vision"])
    assert (card["format"], card["task"]) == (1, "classification")
    assert card["model"]["class_path"] == "vision.models.vit.ViT"


def test_tied_tensors_are_written_once(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    vision.save_weights(model, tmp_path / "x.safetensors", card={"format": 1})
    assert sorted(load_file(tmp_path / "x.safetensors")) == ["0.bias", "0.weight", "1.bias"]


def test_a_position_of_all_blocks_is_written_once(tmp_path):
    vision.save_weights(small(position=RelativeTable), tmp_path / "x.safetensors")
    assert [name for name in load_file(tmp_path / "x.safetensors") if "position" in name] == ["position.table"]


def test_views_of_one_storage_are_written_apart(tmp_path):
    model = nn.Linear(4, 4)
    both = torch.randn(8, 4)
    model.weight = nn.Parameter(both[:4])
    model.other = nn.Parameter(both[4:])
    vision.save_weights(model, tmp_path / "x.safetensors", card={"format": 1})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["other"], both[4:])


def test_a_timm_model(tmp_path):
    source = timm.create_model("resnet18", num_classes=3).eval()
    vision.save_weights(source, tmp_path / "x.safetensors")
    model = vision.load_model(tmp_path / "x.safetensors")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x), source(x))


def test_a_backbone(perturbed, tmp_path):
    source = Features(perturbed(small()), [1]).eval()
    vision.save_weights(source, tmp_path / "x.safetensors")
    model = vision.load_model(tmp_path / "x.safetensors")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x)[0], source(x)[0])


def test_a_task_and_a_compiled_model_are_unwrapped(tmp_path):
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small()

        def card(self) -> dict:
            return {"format": 1, "model": {"class_path": "x"}, "classes": ["from the task"]}

    vision.save_weights(Task(), tmp_path / "x.safetensors")
    assert json.loads(metadata(tmp_path / "x.safetensors")["vision"])["classes"] == ["from the task"]
    vision.save_weights(torch.compile(small()), tmp_path / "x.safetensors")
    assert "norm.weight" in load_file(tmp_path / "x.safetensors")


# Never half-written


def test_a_failure_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    vision.save_weights(small(), path)
    before = path.read_bytes()

    def full(tensors, part, metadata):
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vision.weights.save, "save_file", full)
    with pytest.raises(UserError, match=r"x.safetensors could not be written \(.*No space left on device\); free some space"):
        vision.save_weights(small(), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x.pth", r"x.pth: weights are saved as safetensors; name it \S*x.safetensors"),
        ("none/x.safetensors", r"none: no such folder; create it first"),
        ("folder.safetensors", r"folder.safetensors is a folder; name a file in it"),
    ],
)
def test_wrong_paths(path, message, tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(UserError, match=message):
        vision.save_weights(small(), tmp_path / path)


# Other layouts


def test_an_unknown_layout_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"layout='onnx' is not defined for ViT; use 'vision' or 'timm' or 'torchvision' or 'hugging"
    ):
        vision.save_weights(small(), tmp_path / "x.safetensors", layout="onnx")
    with pytest.raises(UserError, match=r"layout='timm' is not defined for Linear; use 'vision'"):
        vision.save_weights(nn.Linear(2, 2), tmp_path / "x.safetensors", layout="timm")


@pytest.mark.parametrize(
    "position",
    [Rotary, RelativeTable, lambda site: Combined(site, kinds=[Learned, Rotary])],
    ids=["Rotary", "RelativeTable", "both"],
)
def test_positions_that_a_layout_has_no_place_for_are_named(position, tmp_path):
    with pytest.raises(
        UserError, match=r"timm's ViT has a table of positions, this one has (Rotary|Rel|Combined).*layout='vision'"
    ):
        vision.save_weights(small(position=position), tmp_path / "x.safetensors", layout="timm")


def test_a_model_that_does_not_tell_how_it_was_built(tmp_path):
    with pytest.raises(UserError, match="Linear does not tell how it was built"):
        vision.save_weights(nn.Linear(2, 2), tmp_path / "x.safetensors")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("layout", ["timm", "torchvision", "huggingface"])
def test_a_file_in_another_layout_tells_what_its_tensors_do_not(layout, perturbed, tmp_path):
    """Heads of a width that no published ViT has, and the eps of norms; other programs pass over the metadata."""
    source = perturbed(small(heads=8, norm=partial(LayerNorm, eps=1e-5)))
    vision.save_weights(source, tmp_path / "x.safetensors", layout=layout)
    model = vision.load_model(tmp_path / "x.safetensors")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), source.eval()(x))
    assert set(metadata(tmp_path / "x.safetensors")) == {"format", "vision_options"}


def test_windows_of_swin_v2_come_back_from_timms_layout(perturbed, tmp_path):
    source = perturbed(SwinV2(img_size=64, dim=16, depths=(2, 2), heads=(1, 2), window_size=4, num_classes=3)).eval()
    vision.save_weights(source, tmp_path / "x.safetensors", layout="timm")
    model = vision.load_model(tmp_path / "x.safetensors", padding=source.options.get("padding", "pad_then_roll"))
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(x), source(x))


def test_options_that_no_program_of_ours_wrote_are_left_out(tmp_path):
    told = {"heads": "3", "img_size": -1, "eps": 7.0, "windows": [[4, 4], [0, 4]], "extents": 4, "position": "os.system"}
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", {"vision_options": json.dumps(told)})
    assert read(tmp_path / "x.safetensors").told == {}
