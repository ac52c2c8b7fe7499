from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import vision
from core import BiasFreeNorm
from vision.errors import UserError
from vision.models import Restormer, ViT
from vision.weights.restormer import LICENCE, ffn_ratio, options_of, to_layout

REFERENCE = Path(__file__).parents[2] / "reference"
NAMES = ("withbias", "biasfree_gray", "dualpixel")
SMALL = {"dim": 4, "depths": (1, 2, 1, 1), "refinement": 1, "heads": (1, 2, 2, 4)}


def published(name):
    with safe_open(REFERENCE / f"restormer_{name}.safetensors", "pt") as file:
        return {key.removeprefix("model."): file.get_tensor(key) for key in file.keys() if key.startswith("model.")}  # noqa: SIM118


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_exact(tmp_path, name):
    """Published names, ours, published names: the same tensors, in a .pth as in a .safetensors."""
    state = published(name)
    torch.save({"params": state}, tmp_path / "published.pth")
    model = vision.load_model(tmp_path / "published.pth")
    assert model.weights_report.layout == "Restormer, official"
    vision.save_weights(model, tmp_path / "back.safetensors", layout="official")
    for back in (load_file(tmp_path / "back.safetensors"), to_layout(model, "official")):
        assert back.keys() == state.keys()
        assert all(torch.equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize("name", NAMES)
def test_own_file_is_enough(tmp_path, name):
    model = vision.load_model({"params": published(name)})
    vision.save_weights(model, tmp_path / "model.safetensors")
    again = vision.load_model(tmp_path / "model.safetensors")
    x = torch.rand(1, model.in_chans, 9, 10)
    assert torch.equal(again(x), model(x))
    assert not again.training


def test_containers(tmp_path):
    """Bare, `params`, its average, a wrapper's prefix; a name that means nothing is named."""
    state = published("withbias")
    moved = {key: value + 1 for key, value in state.items()}
    wrapped = {f"module.{key}": value for key, value in state.items()}
    x = torch.rand(1, 3, 8, 8)
    expected = vision.load_model(state)(x)
    for container in ({"params": state}, wrapped, {"params": moved, "params_ema": state}, {"params": wrapped}):
        torch.save(container, tmp_path / "weights.pth")
        assert torch.equal(vision.load_model(tmp_path / "weights.pth")(x), expected)
    raw = vision.load_model({"params": state, "params_ema": moved}, ema=False)
    assert torch.equal(raw(x), expected)
    with pytest.raises(UserError, match=r"does not fit Restormer: it has, unexpected, extra.weight; get the whole file"):
        vision.load_model(state | {"extra.weight": torch.zeros(1)})


def test_issue_restormer_14_the_licence_is_shown():
    report = str(vision.load_model(published("withbias")).weights_report)
    assert LICENCE in report
    assert "non-commercial" in report
    assert "non-commercial" not in str(vision.load_model(Restormer(**SMALL)).weights_report)


def test_issue_restormer_108_channels_are_told_by_the_file():
    """A dual-pixel checkpoint has 6 channels: its model has them, and a model of 3 says what is wrong."""
    assert vision.load_model(published("dualpixel")).in_chans == 6
    with pytest.raises(UserError, match=r"embed.weight is 4x6x3x3, the model's 4x3x3x3.*use vision.load_model\(source\)"):
        vision.load_weights(Restormer(**SMALL | {"depths": (1, 2, 1, 2)}), published("dualpixel"))


def test_issue_spandrel_288_a_relative_of_other_results_is_told_before_it_is_run(tmp_path):
    """Its file loaded, and the first picture ended in an error of shapes: 31 spectral bands do not add to three colours."""
    torch.save({"params": published("withbias") | {"output.weight": torch.zeros(31, 8, 3, 3)}}, tmp_path / "bands.pth")
    with pytest.raises(UserError, match=r"^bands.pth: the weights make 31 channels of 3, which cannot be added to the picture"):
        vision.load_model(tmp_path / "bands.pth")


@pytest.mark.parametrize("dim", [24, 48, 64])
@pytest.mark.parametrize("ratio", [1, 2, 2.5, 2.66, 8 / 3, 4])
def test_ratio_is_found(dim, ratio):
    """127 of 48 would give 254 at the next level, where the published model has 255."""
    pairs = [(dim * 2**level, int(dim * 2**level * ratio)) for level in range(4)]
    assert all(int(width * ffn_ratio(pairs)) == hidden for width, hidden in pairs)
    assert ffn_ratio(pairs) == ratio or ratio == 8 / 3


def test_full_size_is_told_by_shapes():
    """And the ratio is the published one: (48, 127), (96, 255), (192, 510), (384, 1021)."""
    with torch.device("meta"):
        model = Restormer(norm=BiasFreeNorm)
    told = options_of(vision.weights.family.Converted(model.state_dict()))
    assert told == model.options | {"out_chans": 3, "depths": [4, 6, 6, 8], "heads": [1, 2, 4, 8]}


def test_wrong_files():
    state = published("withbias")
    with pytest.raises(UserError, match=r"the weights lack output.weight \(published as output.weight\); they are no whole"):
        vision.load_model({key: value for key, value in state.items() if key != "output.weight"})
    with pytest.raises(UserError, match=r"holds a Restormer \(official\), the model is a ViT; use a matching pair"):
        vision.load_weights(ViT(img_size=8, patch_size=4, dim=8, depth=1, heads=1), state)
    with pytest.raises(UserError, match=r"follow no ratio; Restormer has one for all levels"):
        ffn_ratio([(48, 127), (96, 300)])
    norms = Restormer(**SMALL | {"depths": (1, 2, 1, 2)}, norm=BiasFreeNorm)
    with pytest.raises(UserError, match=r"unexpected, .*norm1.bias"):
        vision.load_weights(norms, state)
