"""`vision restore`: copies of every kind, no picture lost or replaced, broken ones named, exit codes that tell."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vision
from vision.cli import main
from vision.data import read_image
from vision.data.metadata import Metadata, read_metadata
from vision.data.saving import write_image
from vision.models import Restormer, SwinRestorer, ViT

TINY = {"dim": 4, "depths": (1, 1, 1, 1), "refinement": 1, "heads": (1, 1, 2, 2)}


class Inverted(nn.Module):
    """Turns dark into bright, `scale` times as large, and keeps the sizes that it has seen."""

    in_chans = 3

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.scale, self.seen = scale, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(x.shape[-2:]))
        return 1 - x.repeat_interleave(self.scale, -1).repeat_interleave(self.scale, -2)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], nn.Module]:
    """`use(model)`: the model that every weights file holds."""

    def hold(model: nn.Module) -> nn.Module:
        monkeypatch.setattr(vision, "load_model", lambda source: model, raising=False)
        return model

    return hold


@pytest.fixture
def model(use: Callable[[Inverted], Inverted]) -> Inverted:
    return use(Inverted())


def random(*shape: int, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def picture(name: str, *shape: int, dtype: type = np.uint8, form: str | None = None, seed: int = 0) -> np.ndarray:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    image = random(*(shape or (10, 12, 3)), dtype=dtype, seed=seed)
    form = form or {"jpg": "JPEG", "tif": "TIFF", "webp": "WEBP"}.get(name.rpartition(".")[2], "PNG")
    write_image(name, image, metadata=Metadata(form), quality=100)
    return image


def run(*args: str) -> int:
    try:
        return main(["restore", *args, "--weights", "w.ckpt", "--device", "cpu"])
    except SystemExit as stop:
        return int(stop.code or 0)


def files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if not path.is_dir())


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("suffix", "channels", "dtype"),
    [  # but gray with alpha in a TIFF of 16 bits, which Pillow does not read
        (suffix, channels, dtype)
        for suffix in ("png", "tif")
        for channels in (1, 2, 3, 4)
        for dtype in (np.uint8, np.uint16)
        if (suffix, channels, dtype) != ("tif", 2, np.uint16)
    ],
)
def test_issue_swinir_69_same_kind_and_depth(channels, dtype, suffix):
    """16 bits, gray and alpha come out as they went in; alpha itself is not restored."""
    image = picture(f"in/a.{suffix}", 21, 34, channels, dtype=dtype)
    assert run("in", "--output", "out") == 0
    restored = read_image(f"out/a.{suffix}", channels=None)
    expected = np.iinfo(dtype).max - image
    if channels in (2, 4):
        expected[..., -1] = image[..., -1]
    assert restored.dtype == dtype
    tolerance = 1 if channels < 3 else 0  # gray goes through three colours and back: a luma of floats
    assert np.abs(restored.astype(int) - expected).max() <= tolerance


@pytest.mark.usefixtures("model")
def test_folders_are_kept_and_formats_told_by_content(capsys):
    picture("in/a.jpg")
    picture("in/sub/deep/b.webp")
    picture("in/sub/c.TIF", form="TIFF")
    picture("in/wrong.jpg", 8, 8, 4, form="PNG")
    Image.fromarray(random(6, 7, 3)).save("in/d.bmp")
    Image.fromarray(random(6, 7, 3)).save("scan.v2", "PNG")
    assert run("in", "scan.v2", "--output", "new/out") == 0
    assert files("new/out") == ["a.jpg", "d.png", "scan.v2.png", "sub/c.TIF", "sub/deep/b.webp", "wrong.png"]
    for name, form in (("a.jpg", "JPEG"), ("d.png", "PNG"), ("sub/c.TIF", "TIFF"), ("sub/deep/b.webp", "WEBP")):
        assert read_metadata(f"new/out/{name}").format == form
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == ["in/a.jpg -> new/out/a.jpg", "in/d.bmp -> new/out/d.png"]
    assert err == ""
    assert run("in", "--output", "png", "--format", "png") == 0
    assert files("png") == ["a.png", "d.png", "sub/c.png", "sub/deep/b.png", "wrong.png"]


@pytest.mark.usefixtures("model")
def test_exif_profile_and_upright_pixels():
    image = random(8, 12, 3)
    exif = Image.Exif()
    exif[274], exif[271] = 6, "Maker"
    Image.fromarray(image).save("a.png", exif=exif, icc_profile=b"\0" * 16 + b"RGB " + b"\0" * 108)
    assert run("a.png", "--output", "out") == 0
    upright = np.rot90(image, -1)
    assert np.array_equal(read_image("out/a.png"), 255 - upright)
    with Image.open("out/a.png") as copy:
        assert (copy.getexif()[274], copy.getexif()[271]) == (1, "Maker")
        assert copy.info["icc_profile"][16:20] == b"RGB "


def test_larger_pictures(use):
    use(Inverted(scale=3))
    image = picture("a.png", 5, 7, 4, dtype=np.uint16)
    assert run("a.png", "--output", "out") == 0
    restored = read_image("out/a.png", channels=None)
    assert restored.shape == (15, 21, 4)
    assert np.array_equal(restored[1::3, 1::3, :3], 65535 - image[..., :3])


def test_options_reach_the_model(model):
    image = picture("a.png", 40, 50, 3)
    assert run("a.png", "--output", "out", "--blend", "0.25", "--self-ensemble") == 0
    assert len(model.seen) == 8
    expected = 0.75 * image + 0.25 * (255.0 - image)
    assert np.abs(read_image("out/a.png") - expected).max() <= 0.5
    model.seen.clear()
    assert run("a.png", "--output", "tiles", "--mode", "tile", "--tile", "32", "--overlap=8") == 0
    assert set(model.seen) == {(32, 32), (96, 96)}  # the latter to measure its memory
    assert np.array_equal(read_image("tiles/a.png"), 255 - image)


@pytest.mark.parametrize("mode", ["whole", "stream", "tile", "auto"])
def test_from_weights_to_pictures(mode, tmp_path, perturbed, capsys):
    """Nothing stands in: a file of ours, and the same model in the published layout."""
    model = perturbed(Restormer(**TINY)).eval()
    vision.save_weights(model, tmp_path / "ours.safetensors")
    vision.save_weights(model, tmp_path / "published.safetensors", layout="official")
    image = picture("a.png", 33, 50, 3)
    expected = vision.restore(model, image, mode="whole")
    for name in ("ours", "published"):
        main(["restore", "a.png", "--weights", f"{name}.safetensors", "--output", name, "--mode", mode, "--device=cpu"])
        assert np.abs(read_image(f"{name}/a.png").astype(int) - expected).max() <= 1
    out, err = capsys.readouterr()
    # Issue Restormer 14: may the weights be used commercially? Told once a run, for the published ones alone.
    assert err.count("note: the weights that Restormer's authors publish are for non-commercial use") == 1
    assert len(out.splitlines()) == 2


@pytest.mark.usefixtures("model")
def test_broken_pictures_are_named_and_the_others_done(capsys):
    picture("in/good.png")
    picture("in/cut.png", 40, 40, 3)
    Path("in/cut.png").write_bytes(Path("in/cut.png").read_bytes()[:2000])
    Path("in/text.jpg").write_text("no picture")
    Image.fromarray(random(4, 4).astype(np.float32)).save("in/float.tif")
    Image.fromarray(random(4, 4, 3)).convert("CMYK").save("in/print.jpg")
    assert run("in", "lost.png", "--output", "out") == 1
    out, err = capsys.readouterr()
    assert out == "in/good.png -> out/good.png\n"
    named = dict(line.split(": ", 1) for line in err.splitlines()[:-1])
    assert list(named) == ["in/cut.png", "in/float.tif", "in/print.jpg", "in/text.jpg", "lost.png"]
    assert named["in/float.tif"] == "float pixels have no known range; scale them to 0..65535 and save a 16-bit PNG or TIFF"
    assert named["lost.png"] == "no such file"
    assert err.splitlines()[-1] == "5 of 6 pictures were not restored"
    assert files("out") == ["good.png"]


def test_what_a_format_cannot_hold_is_told_before_the_work(model, capsys):
    picture("deep.png", 4, 4, 3, dtype=np.uint16)
    picture("clear.png", 4, 4, 4)
    assert run("deep.png", "clear.png", "--output", "out", "--format=jpg") == 1
    err = capsys.readouterr().err
    assert "deep.png: it has 16 bits a colour, which JPEG cannot hold; write PNG or TIFF" in err
    assert "clear.png: it has transparency, which JPEG cannot hold" in err
    assert model.seen == []


# No picture is lost


@pytest.mark.usefixtures("model")
def test_an_input_is_never_overwritten(capsys):
    """In the same folder, by links of both kinds, by another way to the folder, and with --overwrite."""
    picture("in/a.png")
    picture("in/b.png", seed=1)
    before = {name: Path("in", name).read_bytes() for name in ("a.png", "b.png")}
    Path("link").symlink_to("in")
    Path("soft").mkdir()
    Path("soft/a.png").symlink_to("../in/a.png")
    Path("hard").mkdir()
    os.link("in/a.png", "hard/a.png")
    Path("swapped").mkdir()
    os.link("in/b.png", "swapped/a.png")
    for given, output in (
        ("in/a.png", "in"),
        ("in", "in"),
        ("in", "./in/../in"),
        ("in", "link"),
        ("link", "in"),
        ("in/a.png", "link"),
        ("in/a.png", "soft"),
        ("in/a.png", "hard"),
        ("in", "swapped"),
    ):
        assert run(given, "--output", output, "--overwrite") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "would replace the picture in/" in err or "is the folder that the pictures come from; give another one" in err
        assert err.count("\n") == 1
    assert {name: Path("in", name).read_bytes() for name in before} == before
    assert files("in") == ["a.png", "b.png"]


def test_names_that_differ_by_case_where_that_is_no_difference(model, capsys, monkeypatch):
    """Two pictures, one place: on such a disk the copy of the second finds the first one's there."""
    from vision.commands import restore

    picture("one/A.png")
    picture("two/a.png")
    real = restore.identity
    monkeypatch.setattr(restore, "identity", lambda path: real(Path(str(path).replace("out/a.png", "out/A.png"))))
    assert run("one", "two", "--output", "out", "--overwrite") == 1
    assert "two/a.png: out/a.png is a picture given, or another's copy; give another --output" in capsys.readouterr().err
    assert len(model.seen) == 2


def test_existing_copies_stay_and_the_rest_is_done(model, capsys):
    """So that a run that was stopped goes on where it was."""
    picture("in/a.png")
    picture("in/b.png")
    Path("out").mkdir()
    Path("out/a.png").write_text("mine")
    assert run("in", "--output", "out") == 1
    assert "in/a.png: out/a.png exists; --overwrite replaces it" in capsys.readouterr().err
    assert Path("out/a.png").read_text() == "mine"
    assert len(model.seen) == 1
    assert run("in", "--output", "out", "--overwrite") == 0
    assert read_image("out/a.png").shape == (10, 12, 3)
    assert files("out") == ["a.png", "b.png"]


def test_own_copies_are_not_restored_again(model):
    picture("in/a.png")
    picture("in/sub/b.png")
    for _ in range(2):
        assert run("in", "--output", "in/out", "--overwrite") == 0
    assert run(".", "--output", "in/out", "--overwrite") == 0
    assert len(model.seen) == 6
    assert files("in/out") == ["a.png", "in/a.png", "in/sub/b.png", "sub/b.png"]


@pytest.mark.usefixtures("model")
def test_two_pictures_for_one_place(capsys):
    picture("one/a.png")
    picture("two/a.png")
    assert run("one", "two", "--output", "out") == 2
    assert "one/a.png and two/a.png would both become out/a.png; give each another --output" in capsys.readouterr().err
    Image.fromarray(random(4, 4, 3)).save("one/a.bmp")
    assert run("one", "--output", "both") == 0
    assert files("both") == ["a.bmp.png", "a.png"]
    assert run("one/a.png", "./one/a.png", "one/../one/a.png", "--output", "out") == 0  # the same one, given three times
    assert files("out") == ["a.png"]


@pytest.mark.usefixtures("model")
def test_copies_are_named_by_a_template(capsys):
    picture("in/a.jpg")
    picture("in/a.png")
    picture("in/sub/b.c.png")
    Path("in/odd.x").write_bytes(Path("in/a.png").read_bytes())
    assert run("in", "in/odd.x", "--output", "out", "--name", "{stem}_restored") == 0
    assert files("out") == ["a_restored.jpg", "a_restored.png", "odd.x_restored.png", "sub/b.c_restored.png"]
    assert run("in", "--output", "png", "--name", "x{stem}", "--format=png") == 0
    assert files("png") == ["sub/xb.c.png", "xa.jpg.png", "xa.png"]
    assert run("in/a.png", "--output", "in", "--name", "{stem}_restored") == 0  # beside it
    assert read_image("in/a_restored.png").shape == (10, 12, 3)
    picture("in/b_new.png")
    assert run("in/sub/b.c.png", "in/b_new.png", "in/a.png", "--output", "in", "--name", "{stem}_new", "--dry-run") == 0
    capsys.readouterr()
    picture("in/b.png")
    assert run("in/b.png", "in/b_new.png", "--output", "in", "--name", "{stem}_new") == 2
    assert "the copy of in/b.png would replace the picture in/b_new.png; give another --output" in capsys.readouterr().err
    picture("one/a.png")
    assert run("one/a.png", "in/a.png", "--output", "out", "--name", "{stem}_new") == 2
    assert "would both become out/a_new.png" in capsys.readouterr().err
    for name in ("", "restored", "{name}", "{stem}{i}", "sub/{stem}", "{stem", "..\\{stem}", "{}"):
        assert run("in/a.png", "--output", "out", "--name", name) == 2
        assert f"--name {name!r} is no name for copies; write {{stem}}" in capsys.readouterr().err


@pytest.mark.usefixtures("model")
def test_formats_that_are_not_read_are_told_once(capsys):
    picture("in/a.png")
    for name in ("in/b.heic", "in/sub/c.CR2", "in/d.txt", "raw/a.nef"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).touch()
    assert run("in", "--output", "out") == 0
    told = "note: 2 pictures of kinds that are not read (.cr2 1, .heic 1) are passed over; convert them, for example to PNG\n"
    assert capsys.readouterr().err == told
    assert run("raw", "--output", "out") == 2
    told = "found 1 picture of kinds that are not read (.nef 1): convert them, for example to PNG"
    assert capsys.readouterr().err == f"error: raw has no pictures (.png, .jpg, .tif, …); {told}\n"


@pytest.mark.usefixtures("model")
def test_dry_run_writes_nothing(capsys):
    picture("in/a.jpg")
    picture("in/sub/b.png")
    Path("in/c.png").write_text("no picture")
    Path("out").mkdir()
    Path("out/a.png").touch()
    assert run("in", "--output", "out", "--dry-run", "--format=png") == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == ["in/a.jpg -> out/a.png (exists)", "in/sub/b.png -> out/sub/b.png"]
    assert err.startswith("in/c.png: not a picture of a kind read here")
    assert files("out") == ["a.png"]


# Wrong use


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "PICTURE, --weights, --output missing; vision restore --help tells how to use it"),
        (["a.png", "--weights", "w"], "--output missing"),
        (["a.png", "--output", "out", "--weights", "w", "--tiles=3"], "unknown option --tiles; did you mean --tile?"),
        (["empty", "--output", "out", "--weights", "w"], "empty has no pictures (.png, .jpg, .tif, …); give a folder"),
        (["a.png", "--output", "there", "--weights", "w"], "--output there is a file; give a folder"),
        (["a.png", "--output", "b.png", "--weights", "w"], "--output b.png is named like a picture; give a folder, the copies"),
        (["a.png", "--output", "there/out", "--weights", "w"], "there/out cannot be made: Not a directory; give another"),
        (["a.png", "--output", "out", "--weights", "w", "--blend=2"], "blend=2 is no share; use 0"),
        (["a.png", "--output", "out", "--weights", "w", "--memory=lots"], "memory='lots' is no size; give bytes, or a number"),
        (["a.png", "--output", "out", "--weights", "w", "--mode=fast"], "--mode: invalid choice: 'fast'"),
        (["a.png", "--output", "out", "--weights", "w", "--mode=stream"], "Inverted cannot stream: it has no stream(x, rows)"),
        (["a.png", "--output", "out", "--weights", "w", "--tile=8", "--overlap=8"], "overlap=8 leaves nothing of tile=8"),
        (["a.png", "--output", "out", "--weights", "w", "--quality=101"], "--quality: 101 is more than 100"),
        (["a.png", "--output", "out", "--weights", "w", "--device=abacus"], "--device abacus: "),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(args, text, capsys):
    """Among them issue leftthomas/Restormer 5: an empty folder divided by zero."""
    picture("a.png")
    Path("empty").mkdir()
    Path("there").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main(["restore", *args])
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {text}")
    assert (err.count("\n"), out) == (1, "")
    assert Path("there").read_text() == "mine"


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: ViT(img_size=16, patch_size=8, dim=8, depth=1, heads=1),
            "w.ckpt: ViT tells classes and restores no picture; use a restorer such as Restormer",
        ),
        (lambda: nn.Linear(3, 3), "w.ckpt: Linear takes no pictures; give the weights of a restorer such as Restormer"),
    ],
)
def test_issues_nafnet_38_176_and_restormer_16_weights_of_another_task(build, text, use, capsys):
    """They silently gave garbage."""
    use(build())
    picture("a.png", 16, 16, 3)
    assert run("a.png", "--output", "out") == 2
    assert capsys.readouterr().err == f"error: {text}\n"
    assert not Path("out").exists()


def test_issues_nafnet_38_176_and_restormer_39_weights_for_other_damage_tell_theirs(capsys):
    """They make a picture too, and no error: what they were trained on travels in the file and is told."""
    model = Restormer(**TINY)
    model.degradation = "rain, density 0.02"
    vision.save_weights(model, "rain.safetensors")
    picture("a.png", 16, 16, 3)
    assert main(["restore", "a.png", "--weights", "rain.safetensors", "--output", "out", "--device=cpu"]) == 0
    assert capsys.readouterr().err == "note: rain.safetensors was trained on: rain, density 0.02\n"
    assert main(["weights", "inspect", "rain.safetensors"]) == 0
    assert "trained on: rain, density 0.02" in capsys.readouterr().out


def test_too_little_memory_says_the_least_that_works(use, capsys):
    """Of that picture: a smaller one is restored."""
    use(Restormer(**TINY))
    picture("in/a.png", 150, 121, 3)
    picture("in/b.png", 9, 9, 3)
    assert run("in", "--output", "out", "--memory", "1MB", "--mode", "stream") == 1
    err = capsys.readouterr().err
    assert "in/a.png: memory=1MB is too little to stream 128x152 pixels; use memory='" in err
    least = err.partition("use memory='")[2].partition("'")[0]
    assert run("in/a.png", "--output", "out", "--memory", least, "--mode", "stream") == 0
    assert files("out") == ["a.png", "b.png"]


def test_out_of_memory_is_one_line(use, capsys):
    class Greedy(Inverted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried …")

    use(Greedy())
    picture("a.png")
    assert run("a.png", "--output", "out") == 1
    assert "a.png: out of memory; give --memory a smaller bound, or --mode tile with a smaller --tile" in capsys.readouterr().err
    assert files("out") == []


def test_a_huge_header_is_refused_before_it_is_decoded(model, capsys, monkeypatch):
    from vision.inference import memory

    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    picture("a.png", 40, 50, 3)
    assert run("a.png", "--output", "out") == 1
    assert "a.png: its 2000 pixels alone take 0.2MB, and 0.1MB of memory are free" in capsys.readouterr().err
    assert model.seen == []


def test_a_full_disk_leaves_no_part(use, capsys, monkeypatch):
    use(Inverted())
    picture("a.png")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run("a.png", "--output", "out") == 1
    assert "out/a.png cannot be written: No space left on device" in capsys.readouterr().err
    assert files("out") == []


def test_interrupted(use):
    class Stopped(Inverted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    use(Stopped())
    picture("a.png")
    assert run("a.png", "--output", "out") == 130
    assert files("out") == []


# Sizes


def sizes(step: int) -> list[tuple[int, int]]:
    every = [(h, w) for h in range(1, 41) for w in range(1, 41)]
    return every[::step]


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("restormer", 199),
        ("swin", 199),
        pytest.param("restormer", 1, marks=pytest.mark.slow),
        pytest.param("swin", 1, marks=pytest.mark.slow),
    ],
)
def test_all_sizes_to_40_on_a_side(kind, step, use, perturbed):
    """As PNG files of 16 bits, through each way."""
    tiny = {"dim": 4, "depths": (1,), "heads": 1, "window_size": 4}
    model = perturbed(Restormer(**TINY) if kind == "restormer" else SwinRestorer(**tiny, scale=2, enlarge_dim=None))
    use(model.eval())
    given = sizes(step)
    for h, w in given:
        picture(f"in/{h}x{w}.png", h, w, 3, dtype=np.uint16)
    for mode in ("whole", "stream") if kind == "restormer" else ("tile",):
        assert run("in", "--output", mode, "--mode", mode) == 0
        for h, w in given:
            copy = read_image(f"{mode}/{h}x{w}.png")
            assert (copy.shape, copy.dtype) == ((h * model.scale, w * model.scale, 3), np.uint16)
        shutil.rmtree(mode)


def test_help_needs_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys, contextlib\nfrom vision.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['restore', '--help'])\n"
        "import json; print(json.dumps([name for name in ('torch', 'PIL', 'numpy', 'imagecodecs') if name in sys.modules]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--self-ensemble" in told
    assert json.loads(told.splitlines()[-1]) == []
