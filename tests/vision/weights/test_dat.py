"""DAT's published layout: in, out, and into models of other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import vision
from vision.errors import UserError
from vision.models import DAT

REFERENCE = Path(__file__).parents[2] / "reference"
FILES = ["dat_v1", "dat_plus_plus"]


def published(name: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """State dict, picture, logits."""
    with safe_open(REFERENCE / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("model."): tensor for key, tensor in tensors.items() if key.startswith("model.")}
    return state, tensors["input"], tensors["output"]


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_recognised_and_the_round_trip_is_exact(name, tmp_path):
    state, *_ = published(name)
    torch.save({"model": state}, tmp_path / "dat.pth")
    model = vision.load_model(tmp_path / "dat.pth")
    assert model.weights_report.layout == "DAT, official"
    assert "strides, offset range and reference points are not in the file" in str(model.weights_report)
    vision.save_weights(model, tmp_path / "back.safetensors", layout="official")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


@torch.no_grad()
@pytest.mark.parametrize("name", FILES)
def test_our_own_file_builds_the_same_model(name, tmp_path):
    state, x, _ = published(name)
    model = vision.load_model(state)
    vision.save_weights(model, tmp_path / "model.safetensors")
    again, bare = vision.load_model(tmp_path / "model.safetensors"), vision.load_model(model.state_dict())
    assert torch.equal(again(x), model(x))
    assert torch.equal(bare(x), model(x))


def test_options_are_those_of_the_file():
    model = vision.load_model(published("dat_plus_plus")[0])
    told = {"img_size": 128, "kinds": ("ND", "ND", "NDND", "DD"), "groups": (1, 2, 3, 6), "window_size": (7, 7, 5, 7)}
    assert {name: model.options[name] for name in told} == told
    assert vision.load_model(published("dat_v1")[0]).options["kinds"] == ("LS", "LS", "LDLD", "LD")


def test_without_masks_every_second_window_is_shifted():
    state, *_ = published("dat_v1")
    bare = {name: tensor for name, tensor in state.items() if not name.endswith(("attn_mask", "index"))}
    assert vision.load_model(bare).options["kinds"] == ("LS", "LS", "LDLD", "LD")


def test_classes_channels_and_tables_are_adapted():
    state, *_ = published("dat_v1")
    source = vision.load_model(state)
    model = DAT(**source.options | {"img_size": 384, "num_classes": 4, "in_chans": 1})
    report = vision.load_weights(model, state)
    assert report.adapted == [
        "classes 10 -> 4: the head starts anew",
        "channels 3 -> 1: summed",
        "tables of 14x14 -> 24x24: bicubic",
        "tables of 7x7 -> 12x12: bicubic",
    ]
    table = state["stages.2.attns.1.rpe_table"]
    expected = F.interpolate(table[None], size=(47, 47), mode="bicubic", align_corners=False)[0]
    ours = torch.cat([part.table.detach().T for part in model.stages[2].blocks[1].attention.positions])
    assert torch.allclose(ours, expected.flatten(1), atol=1e-6)


def test_neighbourhoods_of_another_size_are_resized():
    state, *_ = published("dat_plus_plus")
    model = DAT(**vision.load_model(state).options | {"window_size": 5})
    assert "tables of 7x7 -> 5x5: bicubic" in vision.load_weights(model, state).adapted


def test_blocks_of_another_kind_are_refused():
    state, *_ = published("dat_v1")
    options = vision.load_model(state).options | {"kinds": ("LL", "LS", "LD", "LD")}
    with pytest.raises(UserError, match=r"its blocks are LS, LS, LDLD, LD, the model's LL, LS, LDLD, LD"):
        vision.load_weights(DAT(**options), state)


def test_a_part_of_a_file_is_named():
    state, *_ = published("dat_v1")
    del state["cls_norm.norm.weight"]
    with pytest.raises(UserError, match=r"the weights lack norm.weight \(our name\); they are no whole DAT"):
        vision.load_model(state)


def test_another_family_is_named():
    state, *_ = published("dat_v1")
    with pytest.raises(UserError, match=r"holds a DAT \(official\), the model is a ViT; use a matching pair"):
        vision.load_weights(vision.create_model("vit_tiny_patch16_224", depth=1), state)
