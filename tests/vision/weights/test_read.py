"""Files of every kind, whole and broken; nothing in them runs."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vision.errors import UserError
from vision.models import Features, ViT
from vision.weights.read import peeled, read, unwrap

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4)}


def equal(state) -> bool:
    return state.keys() == STATE.keys() and all(torch.equal(state[name], STATE[name]) for name in STATE)


def write(path: Path, state: object = STATE) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".npz", ".weights"])
def test_each_kind_of_file(suffix, tmp_path):
    weights = read(write(tmp_path / f"x{suffix}"))
    assert equal(weights.state)
    assert weights.name == f"x{suffix}"
    assert equal(read(str(tmp_path / f"x{suffix}")).state)


def test_names_lie_and_bytes_do_not(tmp_path):
    write(tmp_path / "x.safetensors").rename(tmp_path / "x.pth")
    assert equal(read(tmp_path / "x.pth").state)
    write(tmp_path / "y.npz").rename(tmp_path / "y.safetensors")
    assert equal(read(tmp_path / "y.safetensors").state)
    write(tmp_path / "z.pth").rename(tmp_path / "z.safetensors")
    assert equal(read(tmp_path / "z.safetensors").state)


def test_files_from_before_torch_1_6(tmp_path):
    torch.save(STATE, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert equal(read(tmp_path / "old.pth").state)


def test_a_folder_of_transformers(tmp_path):
    write(tmp_path / "model.safetensors")
    assert equal(read(tmp_path).state)


# Containers and prefixes


@pytest.mark.parametrize("container", ["state_dict", "model", "params", "model_state_dict"])
def test_containers_are_opened(container, tmp_path):
    assert equal(read(write(tmp_path / "x.pth", {container: STATE, "epoch": 3, "lr": 0.1, "optimizer": {"state": {}}})).state)


@pytest.mark.parametrize(
    ("raw", "average"),
    [("state_dict", "state_dict_ema"), ("model", "model_ema"), ("params", "params_ema"), ("current_model_state", "state_dict")],
)
def test_yolox_1318_average_or_raw_by_choice(raw, average):
    other = {name: tensor + 1 for name, tensor in STATE.items()}
    weights = read({raw: other, average: STATE})
    assert equal(weights.state)
    assert weights.is_average
    weights = read({raw: STATE, average: other}, ema=False)
    assert equal(weights.state)
    assert not weights.is_average


@pytest.mark.parametrize("average", ["state_dict_ema", "model_ema", "params_ema", "model_ema_state_dict"])
@pytest.mark.parametrize("ema", [True, False])
def test_an_average_alone_is_read(average, ema):
    """Real-ESRGAN's files hold `params_ema` and nothing else."""
    weights = read({average: STATE, "iter": 5}, ema=ema)
    assert equal(weights.state)
    assert weights.is_average


def test_a_checkpoint_of_ours_keeps_the_model_and_its_card_only():
    card = {"format": 1, "model": {"class_path": "x", "init_args": {}}}
    weights = read({"state_dict": {"model.a": STATE["a"], "confusion": torch.ones(1)}, "vision": card})
    assert list(weights.state) == ["a"]
    assert weights.card == card


def test_a_mapping_that_holds_itself_ends():
    endless: dict = {"a": torch.ones(1)}
    endless["model"] = endless
    assert list(read(endless).state) == ["a"]


def test_prefixes_that_all_names_share_come_off_one_by_one():
    state = {f"module._orig_mod.model.{name}": tensor for name, tensor in STATE.items()}
    assert equal(list(peeled(state))[-1])
    assert len(list(peeled(STATE | {"module.c": torch.ones(1)}))) == 1  # not all share it
    assert equal(list(peeled({f"net.backbone.{name}": tensor for name, tensor in STATE.items()}))[-1])


def test_live_modules_are_taken_out_of_their_wrappers():
    model = ViT(32, 8, 3, 5, 32, 2, 2)
    assert unwrap(torch.nn.DataParallel(model)) is model
    assert unwrap(torch.compile(model)) is model
    assert set(read(Features(model, [0])).state) == set(model.state_dict())


def test_numbers_beside_the_tensors_are_left_out():
    assert equal(read(STATE | {"version": 3, "note": "x"}).state)


# Wrong files: one line that says what to do


def refused(path: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_no_such_file_and_the_nearest_one(tmp_path):
    write(tmp_path / "weights.pth")
    refused(tmp_path / "wieghts.pth", r"wieghts.pth: no such file; did you mean \S*/weights.pth\?")
    refused(tmp_path / "none" / "x.pth", r"x.pth: no such file; check the path")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", r"folder is a folder without model.safetensors or pytorch_model.bin; pass the file")


@pytest.mark.parametrize("address", ["https://example.org/x.pth", "http://x/y.pt", "s3://bucket/x.pt", "hf-hub:timm/resnet18"])
def test_addresses_are_not_followed(address):
    refused(address, r"is an address, and weights are read from files only; download it first, then pass the file")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz", ".ckpt"])
def test_an_empty_file(suffix, tmp_path):
    (tmp_path / f"x{suffix}").touch()
    refused(tmp_path / f"x{suffix}", r"is empty; download or copy it again")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz", ".ckpt", ".bin"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95, 0.999])
def test_a_file_cut_short(suffix, share, tmp_path):
    path = write(tmp_path / f"x{suffix}", {f"layer.{i}": torch.randn(50, 20) for i in range(10)})
    content = path.read_bytes()
    path.write_bytes(content[: max(1, int(len(content) * share))])
    refused(path, r"x\.\w+ is cut short or damaged \([\d,]+ bytes\); download or copy it again")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.95])
def test_an_old_torch_file_cut_short(share, tmp_path):
    torch.save({f"layer.{i}": torch.randn(50, 20) for i in range(10)}, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x.pth").read_bytes()
    (tmp_path / "x.pth").write_bytes(content[: int(len(content) * share)])
    refused(tmp_path / "x.pth", "is cut short or damaged")


@pytest.mark.parametrize("kind", ["x.safetensors", "x.npz", "x.pth", "old.pth"])
def test_damaged_bytes_are_an_error_of_one_line_or_read(kind, tmp_path):
    """600 files of each kind were tried; these are some."""
    path = tmp_path / kind
    if kind == "old.pth":
        torch.save({"model": STATE, "epoch": [1, "x"]}, path, _use_new_zipfile_serialization=False)
    else:
        write(path)
    content, draw = path.read_bytes(), random.Random(0)
    messages = []
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 3, 20])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            read(path)
        except UserError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    "page", [b"<!DOCTYPE html><html>404</html>", b"\n\n<html><body>Sign in</body></html>", b"<?xml version='1.0'?>"]
)
def test_a_web_page_saved_as_weights(page, tmp_path):
    (tmp_path / "x.pth").write_bytes(page)
    refused(tmp_path / "x.pth", r"is a web page, not weights: the download went wrong; download the file itself")


def test_a_git_lfs_pointer(tmp_path):
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    refused(tmp_path / "x.safetensors", r"is a Git LFS pointer, not weights; run git lfs pull")


def test_other_files(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    refused(tmp_path / "x.txt", r"x.txt is a text, no file of weights; pass the file that holds the tensors")
    for suffix in ("pth", "safetensors", "ckpt"):
        (tmp_path / f"x.{suffix}").write_text('{"epochs": 3, "größe": {}}\n', encoding="utf-8")
        refused(tmp_path / f"x.{suffix}", rf"x.{suffix} is a text, no file of weights; pass the file")
    (tmp_path / "x.bmp").write_bytes(b"BM\0\1\2")
    refused(tmp_path / "x.bmp", r"x.bmp is no file of weights; use one of .safetensors, .pth")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    refused(tmp_path / "x.zip", "is cut short or damaged")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_torchscript_program(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    refused(
        tmp_path / "x.pt", r"is a TorchScript program, which reading would run; pass torch.jit.load\('x.pt'\) if you trust it"
    )


@pytest.mark.parametrize("content", [torch.ones(3), [torch.ones(3)], 3, None])
def test_a_pickle_that_is_no_mapping(content, tmp_path):
    refused(write(tmp_path / "x.pth", content), r"x.pth holds a \w+, not tensors by name; save model.state_dict\(\)")


def test_a_mapping_without_tensors(tmp_path):
    refused(write(tmp_path / "x.pth", {"epoch": 3, "model": {}}), r"x.pth holds nothing; pass a file of weights")
    refused({"epoch": 3}, r"the state dict holds no tensors, but epoch; pass a file of weights")


def test_npz_with_objects(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.array([{"b": 1}], dtype=object))
    refused(tmp_path / "x.npz", r"x.npz holds pickled objects or text beside its arrays; keep the arrays alone")
    np.savez(tmp_path / "y.npz", a=np.array(["text"]))
    refused(tmp_path / "y.npz", "holds pickled objects or text")


# Pickles


class CfgNode(dict):
    """As in the published Swin files."""


@pytest.mark.parametrize(("config", "name"), [(argparse.Namespace(lr=0.1), "argparse.Namespace"), (CfgNode(a=1), r"\S*CfgNode")])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_config_object_beside_the_weights(config, name, zipped, tmp_path):
    torch.save({"model": STATE, "config": config}, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    refused(
        tmp_path / "x.pth",
        rf"x.pth pickles {name} beside its weights, and reading that could run code; if you trust the file, keep the weights "
        r"alone, in Python: import torch; from vision.weights.read import read; torch.save\(read\(torch.load\('\S*x.pth', ",
    )


def test_a_whole_pickled_model_is_refused(tmp_path):
    refused(write(tmp_path / "x.pth", torch.nn.Linear(2, 2)), r"pickles torch.nn.modules.linear.Linear beside its weights")


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", None])
def test_the_advice_for_pickles_works_when_it_is_followed(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = torch.nn.Linear(2, 2).state_dict()
    content = {key: state, "args": argparse.Namespace(lr=0.1)} if key else torch.nn.Linear(2, 2)
    with pytest.raises(UserError) as caught:
        read(write(tmp_path / "x.pth", content))
    exec(str(caught.value).partition("in Python: ")[2], {})
    assert read("weights.pth").state.keys() == state.keys()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["zip", "old", "plain pickle", "npz"])
def test_a_malicious_pickle_does_not_run(kind, tmp_path):
    ran, content = tmp_path / "ran", {"model": STATE, "x": Evil(tmp_path / "ran")}
    path = tmp_path / ("x.npz" if kind == "npz" else "x.pth")
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps({"x": content["x"]}, protocol=2))
    elif kind == "npz":
        np.savez(path, a=np.array([content["x"]], dtype=object))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    refused(path, r"system beside its weights, and reading that could run code|holds pickled objects")
    assert not ran.exists()
    pickle.loads(pickle.dumps(content["x"]))  # it would have
    assert ran.exists()
