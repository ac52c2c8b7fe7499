"""What `check-data` finds, each kind once; and that it finds nothing in a sound folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vision.data import CleanFolder, PairedFolder
from vision.data.checks import check_folder
from vision.errors import UserError


def save(path: Path, seed: int, size: tuple[int, int] = (40, 36), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(values).convert(mode).save(path)
    return path


def found(root: Path, **options: Any) -> set[tuple[str, str, bool]]:
    return {(one.kind, one.path.relative_to(root).as_posix(), one.error) for one in check_folder(root, **options).findings}


@pytest.fixture
def paired(tmp_path: Path) -> Path:
    for place, split in enumerate(("train", "test")):
        for i in range(2):
            save(tmp_path / split / "input" / f"{i}.png", 100 + 10 * place + i)
            save(tmp_path / split / "target" / f"{i}.jpg", 200 + 10 * place + i)
    return tmp_path


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for i, split in enumerate(("train", "val")):
        for j, name in enumerate(("cat", "dog")):
            save(tmp_path / split / name / "a.png", 10 * i + j)
    return tmp_path


def test_a_sound_folder_is_sound(paired: Path) -> None:
    report = check_folder(paired)
    assert report.kind == "pairs"
    assert {split: len(files) for split, files in report.files.items()} == {"train": 4, "test": 4}
    assert not report.findings


def test_classes_are_told_from_pairs_and_from_pictures(classes: Path) -> None:
    assert check_folder(classes).kind == "classes"
    assert not check_folder(classes).findings
    assert check_folder(classes / "train").kind == "classes"
    assert check_folder(classes / "train" / "cat").kind == "pictures"


def test_pairs_that_do_not_fit(paired: Path) -> None:
    save(paired / "train/input/0.png", 1, size=(20, 18))
    save(paired / "train/input/alone.png", 2)
    save(paired / "test/target/lonely.png", 3)
    (paired / "test/input/1.png").write_bytes(b"")
    assert found(paired) >= {
        ("different size", "train/input/0.png", True),
        ("no partner", "train/input/alone.png", True),
        ("no partner", "test/target/lonely.png", True),
        ("unreadable", "test/input/1.png", True),
    }
    assert ("different size", "train/input/1.png", True) in found(paired, scale=2)
    assert ("different size", "train/input/0.png", True) not in found(paired, scale=2)


def test_two_files_of_one_name(paired: Path) -> None:
    save(paired / "train/input/0.jpg", 5)
    assert ("same name", "train/input/0.png", True) in found(paired)


def test_damage_that_headers_hide(classes: Path) -> None:
    file = classes / "train/cat/b.png"
    whole = save(file, 3).read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    assert found(classes) == {("unreadable", "train/cat/b.png", True)}


def test_leaks_are_errors_and_duplicates_are_notes(classes: Path) -> None:
    """By pixels, not by bytes: another compression of the same picture is the same picture."""
    original = save(classes / "train/cat/one.png", 50)
    with Image.open(original) as picture:
        picture.save(classes / "val/dog/other.bmp")
        picture.save(classes / "train/dog/again.png", compress_level=1)
    assert found(classes) == {("leak", "val/dog/other.bmp", True), ("duplicate", "train/dog/again.png", False)}


def test_leaks_of_pairs_count_where_targets_return(paired: Path) -> None:
    for kind, name in (("input", "8.png"), ("target", "8.png")):
        save(paired / "train" / kind / name, 60 + (kind == "target"))
        save(paired / "test" / kind / name, 60 + (kind == "target"))
    assert found(paired) == {("leak", "test/input/8.png", False), ("leak", "test/target/8.png", True)}


def test_tiny_gray_and_16_bit_pictures_are_notes(classes: Path) -> None:
    save(classes / "train/cat/tiny.png", 70, size=(8, 100))
    save(classes / "train/cat/gray.png", 71, mode="L")
    Image.fromarray(np.random.default_rng(0).integers(0, 65536, (40, 40)).astype(np.uint16)).save(classes / "train/dog/deep.png")
    assert found(classes) == {
        ("tiny", "train/cat/tiny.png", False),
        ("other channels", "train/cat/gray.png", False),
        ("other channels", "train/dog/deep.png", False),
        ("other bits", "train/dog/deep.png", False),
    }
    assert ("tiny", "train/cat/tiny.png", False) not in found(classes, tiny=8)


def test_pairs_of_different_kinds_are_notes(paired: Path) -> None:
    save(paired / "train/input/0.png", 80, mode="L")
    assert ("different kind", "train/input/0.png", False) in found(paired)


def test_classes_that_are_empty_or_unknown(classes: Path) -> None:
    save(classes / "val/bird/a.png", 90)
    (classes / "train/cow").mkdir()
    save(classes / "train/loose.png", 91)
    assert found(classes) == {
        ("unknown class", "val/bird", True),
        ("empty class", "train/cow", True),
        ("no class", "train/loose.png", False),
    }
    assert not found(classes, kind="pictures"), "folders of clean pictures are no classes"


def test_wrong_use_is_told(tmp_path: Path, paired: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="has no pictures"):
        check_folder(empty)
    with pytest.raises(UserError, match="does not exist"):
        check_folder(tmp_path / "nowhere")
    for file in (paired / "test" / "target").iterdir():
        file.unlink()
    (paired / "test" / "target").rmdir()
    with pytest.raises(UserError, match=r"target does not exist; put degraded pictures into input"):
        check_folder(paired)


def test_progress_sees_every_file(classes: Path) -> None:
    seen: list[Path] = []

    def progress(paths: list[Path]) -> object:
        for path in paths:
            seen.append(path)
            yield path

    check: Callable[..., object] = check_folder
    check(classes, progress=progress)
    assert len(seen) == 4


@pytest.mark.parametrize("names", [("lq", "gt"), ("LR", "HR"), ("noisy", "clean"), ("blur", "sharp")])
def test_folders_of_pairs_by_their_usual_names(paired: Path, names: tuple[str, str]) -> None:
    for split in ("train", "test"):
        for old, new in zip(("input", "target"), names, strict=True):
            (paired / split / old).rename(paired / split / new)
    report = check_folder(paired)
    assert report.kind == "pairs"
    assert not report.findings
    (paired / "train" / names[1] / "0.jpg").unlink()
    assert ("no partner", f"train/{names[0]}/0.png", True) in found(paired)
    data = PairedFolder(str(paired), patch=16, num_workers=0)
    with pytest.raises(UserError, match=r"1 no partner: .* vision check-data .* lists them all"):
        data.setup("fit")


def test_a_list_and_two_folders_are_checked_as_a_folder_is(paired: Path) -> None:
    save(paired / "train/input/0.png", 1, size=(20, 18))
    lines = [f"train/input/{i}.png\ttrain/target/{i}.jpg\n" for i in range(3)]
    (paired / "pairs.txt").write_text("".join(lines))
    report = check_folder(paired / "pairs.txt", tiny=8)
    assert report.kind == "pairs"
    assert {split: len(files) for split, files in report.files.items()} == {"list": 6}
    assert {(one.kind, one.path.name) for one in report.findings if one.error} == {
        ("different size", "0.png"), ("unreadable", "2.png"), ("unreadable", "2.jpg"),
    }  # fmt: skip
    report = check_folder(paired / "train/input", targets=paired / "train/target", tiny=8)
    assert [(one.kind, one.path.name) for one in report.findings] == [("different size", "0.png")]
    with pytest.raises(UserError, match="kind=classes is of one folder; a list or two folders hold pairs"):
        check_folder(paired / "pairs.txt", kind="classes")
    with pytest.raises(UserError, match="are one folder; give the degraded pictures and the clean ones in two"):
        check_folder(paired / "train/input", targets=paired / "train/input")


def test_folders_may_be_links_to_elsewhere_as_in_training(paired: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """And loops of links end."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("train/input", "test"):
        (paired / name).rename(elsewhere / name.replace("/", "_"))
        (paired / name).symlink_to(elsewhere / name.replace("/", "_"), target_is_directory=True)
    (elsewhere / "train_input" / "loop").symlink_to(elsewhere / "train_input", target_is_directory=True)
    report = check_folder(paired)
    assert {split: len(files) for split, files in report.files.items()} == {"train": 4, "test": 4}
    assert not report.findings
    PairedFolder(str(paired), patch=16, num_workers=0).setup("fit")
    photos = paired / "photos"
    photos.mkdir()
    (photos / "train").symlink_to(elsewhere / "test" / "target", target_is_directory=True)
    assert [path.name for path in check_folder(photos).files["train"]] == ["0.jpg", "1.jpg"]
    CleanFolder(str(photos), patch=16, num_workers=0).setup("fit")
    (elsewhere / "test" / "target" / "out.jpg").symlink_to(paired / "train" / "target" / "0.jpg")
    for look in (lambda: check_folder(photos), lambda: CleanFolder(str(photos), num_workers=0).setup("fit")):
        with pytest.raises(UserError, match=r"out\.jpg leads outside"):
            look()


def test_formats_that_are_not_read_are_notes(paired: Path) -> None:
    for name in ("a.HEIC", "b.heic", "c.CR2", "notes.txt", ".hidden.heic"):
        (paired / "train/input" / name).touch()
    assert found(paired) == {
        (".heic is not read", "train/input/a.HEIC", False),
        (".heic is not read", "train/input/b.heic", False),
        (".cr2 is not read", "train/input/c.CR2", False),
    }


def test_formats_that_are_not_read_are_told_in_training(paired: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train/input/a.heic", "train/target/a.heic", "train/target/b.cr2"):
        (paired / name).touch()
    PairedFolder(str(paired), patch=16, num_workers=0).setup("fit")
    told = f"{paired}: 3 pictures of kinds that are not read (.cr2 1, .heic 2) are passed over; convert them, for example to PNG"
    assert [record.message for record in caplog.records if "passed over" in record.message] == [told]
    caplog.clear()
    CleanFolder(str(paired / "train" / "target"), patch=16, num_workers=0).setup("fit")
    assert "2 pictures of kinds that are not read (.cr2 1, .heic 1) are passed over" in caplog.text
    for file in (*(paired / "train/target").glob("*.jpg"),):
        file.unlink()
    with pytest.raises(UserError, match=r"has no pictures \(.*\); found 2 pictures of kinds that are not read"):
        check_folder(paired)


def test_two_folders_for_validation_are_refused(paired: Path) -> None:
    for name in ("val", "validation"):
        (paired / name).mkdir(exist_ok=True)
    with pytest.raises(UserError, match="has val and validation; keep one folder for validation"):
        check_folder(paired)
    with pytest.raises(UserError, match="has val and validation; keep one folder for validation"):
        PairedFolder(str(paired), patch=16, num_workers=0).setup("fit")


def test_a_path_called_target_makes_no_leak_of_degraded_pictures(tmp_path: Path) -> None:
    for i, split in enumerate(("train", "test")):
        save(tmp_path / "target" / split / "input" / "8.png", 60)
        save(tmp_path / "target" / split / "target" / "8.png", 61 + i)
    assert {(one.kind, one.error) for one in check_folder(tmp_path / "target").findings} == {("leak", False)}
