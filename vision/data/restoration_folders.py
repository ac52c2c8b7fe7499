"""Lightning data modules for restoration from folders: pictures in pairs, and clean pictures to degrade."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.progress import track

from vision.data.augment import NO_MIXING, Mixing, hashed
from vision.data.classification import check_fraction
from vision.data.degradations import Degradation, GaussianNoise
from vision.data.images import Header, find_images, no_pictures, tell_unread
from vision.data.pairing import (
    Finding,
    Pair,
    bounds,
    couple,
    find_splits,
    mismatched,
    pair_folders,
    read_headers,
    read_list,
    split_folders,
    summary,
    unreadable,
)
from vision.data.patches import Files, Wholes
from vision.data.restoration import RestorationData, log
from vision.data.schedule import Stage
from vision.errors import ImageError, UserError

_MOST_MEMORY = 2**30  # bytes of decoded training pictures that are held; beyond, a picture is decoded for each patch
Item = TypeVar("Item")  # a path, or a pair of them


class PairedFolder(RestorationData):
    """Degraded pictures with their clean ones, paired by name.

    Either ``root`` with ``train/input`` and ``train/target``, and ``val`` and ``test`` like it, both optional; or ``root`` with
    ``input`` and ``target`` alone; or two folders ``inputs`` and ``targets``; or ``pairs``, a text file with a pair in each
    line: degraded, tab, clean. Folders called lq and gt, LR and HR, noisy and clean, blur and sharp, rainy and clean or rain and
    norain do for input and target. Folders may be links to anywhere, links within them may not lead out. Where there is no
    ``val``, pairs are split off the training's by name and seed; where there is no ``test``, the validation is tested on; for a
    test alone, ``test`` is enough. Everything is checked before the first step: partners, sizes, readable headers. Predictions
    are of the degraded test pictures, or of any folder with pictures given as ``root``.

    Args:
        root: a folder as above.
        inputs, targets: two folders in its place.
        pairs: a list file in its place.
        scale: by how much the degraded pictures are smaller.
        degradation: a text for people.
        val_fraction: share of the pairs for validation where there is no such folder, 0..1.
        patch, batch_size, stages, patches_per_picture, channels, multiple, augment, mixing, num_workers, seed: see
            :class:`vision.data.RestorationData`.

    Raises:
        UserError: not one source; pictures without partner, of sizes that do not fit, or that cannot be read, each with its
            count.
    """

    def __init__(
        self,
        root: str = "",
        inputs: str = "",
        targets: str = "",
        pairs: str = "",
        scale: int = 1,
        degradation: str = "pictures in pairs",
        val_fraction: float = 0.1,
        patch: int | None = None,
        batch_size: int | None = None,
        stages: list[Stage] | None = None,
        patches_per_picture: int = 1,
        channels: int = 3,
        multiple: int = 8,
        augment: bool = True,
        mixing: Mixing = NO_MIXING,
        num_workers: int = -1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            patch, batch_size, stages, patches_per_picture, channels, multiple, augment, mixing, num_workers, seed, scale
        )
        if bool(inputs) != bool(targets) or sum(map(bool, (root, inputs, pairs))) != 1:
            raise UserError(
                f"root={root!r}, inputs={inputs!r}, targets={targets!r}, pairs={pairs!r}: give root, inputs and targets, or pairs"
            )
        check_fraction("val_fraction", val_fraction)
        self.root, self.inputs, self.targets, self.pairs = root, inputs, targets, pairs
        self.degradation, self.sigma, self.val_fraction = degradation, None, val_fraction

    def _setup_pairs(self) -> None:
        splits, findings = self._find()
        if not any(splits.values()):
            raise UserError(f"{self.root or self.inputs} has no pairs: {summary(findings)}")
        headers = read_headers(sorted({path for pairs in splits.values() for pair in pairs for path in pair}))
        findings += unreadable(headers)
        for pairs in splits.values():
            findings += mismatched(pairs, headers, self.scale)
        if findings:
            source = f"{self.inputs} --targets {self.targets}" if self.inputs else self.root or self.pairs
            scale = f" --scale {self.scale}" if self.scale > 1 else ""
            raise UserError(f"{summary(findings)} — mend or remove them; vision check-data {source}{scale} lists them all")
        split_off(splits, [pair.clean.name for pair in splits.get("train", [])], self.val_fraction, self.seed)
        files = {split: self._files(pairs) for split, pairs in splits.items()}
        hold(files.get("train", ()), headers)
        self._use(files)

    def _setup_prediction(self) -> None:
        if self.pairs:
            paths, root = [pair.degraded for pair in read_list(Path(self.pairs))], Path(self.pairs).parent
        else:
            root = Path(self.inputs or self.root)
            below = [root / "test" / "input", root / "input"]
            known = couple(root / "test") or couple(root)
            root = known.degraded if known else next((path for path in below if path.is_dir()), root)
            paths = found(root)
            tell_unread(root, [root])
        self.predict = Wholes(None, Files(paths, root, self.channels), self.scale)

    def _files(self, pairs: Sequence[Pair]) -> tuple[Files, Files]:
        """Clean and degraded."""
        root = Path(self.root or self.targets or Path(self.pairs).parent)
        degraded, clean = (Files([pair[i] for pair in pairs], root, self.channels) for i in (0, 1))
        return clean, degraded

    def _find(self) -> tuple[dict[str, list[Pair]], list[Finding]]:
        if self.pairs:
            return {"train": read_list(Path(self.pairs))}, []
        folders = pair_folders(Path(self.root)) if self.root else {"train": Pair(Path(self.inputs), Path(self.targets))}
        tell_unread(self.root or self.inputs, [folder for pair in folders.values() for folder in pair])
        return find_splits(folders, Path(self.root) if self.root else None)


class CleanFolder(RestorationData):
    """Clean pictures, degraded when they are asked for: no degraded ones need to be stored.

    Either ``root`` with ``train``, and ``val`` and ``test`` beside it, both optional; or a folder with pictures. Where there is
    no ``val``, pictures are split off by name and seed; where there is no ``test``, the validation is tested on; for a test
    alone, ``test`` is enough.
    Predictions are of the degraded test pictures.

    Args:
        root: a folder as above; folders below are searched too.
        degradation: what the restorer shall undo; its scale is the data's.
        val_fraction: share of the pictures for validation where there is no such folder, 0..1.
        patch, batch_size, stages, patches_per_picture, channels, multiple, augment, mixing, num_workers, seed: see
            :class:`vision.data.RestorationData`.

    Raises:
        UserError: no pictures, too few to split, or some that cannot be read, with their count.
    """

    def __init__(
        self,
        root: str,
        degradation: Degradation | None = None,
        val_fraction: float = 0.1,
        patch: int | None = None,
        batch_size: int | None = None,
        stages: list[Stage] | None = None,
        patches_per_picture: int = 1,
        channels: int = 3,
        multiple: int = 8,
        augment: bool = True,
        mixing: Mixing = NO_MIXING,
        num_workers: int = -1,
        seed: int = 0,
    ) -> None:
        self.degrade = degradation if degradation is not None else GaussianNoise(25.0)
        super().__init__(
            patch, batch_size, stages, patches_per_picture, channels, multiple, augment, mixing, num_workers, seed,
            self.degrade.scale,
        )  # fmt: skip
        check_fraction("val_fraction", val_fraction)
        self.root, self.val_fraction = Path(root), val_fraction
        self.degradation, self.sigma = str(self.degrade), self.degrade.sigma

    def _setup_pairs(self) -> None:
        folders = split_folders(self.root)
        for folder in folders.values():
            if pair := couple(folder):
                advice = f"use vision.data.PairedFolder, or root={pair.clean}"
                raise UserError(f"{folder} holds pairs, {pair.degraded.name} and {pair.clean.name}; {advice}")
        splits = {split: found(folder, self.root) for split, folder in folders.items()}
        tell_unread(self.root, folders.values())
        headers = read_headers([path for paths in splits.values() for path in paths])
        if broken := unreadable(headers):
            raise UserError(f"{summary(broken)} — mend or remove them; vision check-data lists them all")
        names = [path.relative_to(folders["train"]).as_posix() for path in splits.get("train", [])]
        split_off(splits, names, self.val_fraction, self.seed)
        files = {split: Files(paths, self.root, self.channels) for split, paths in splits.items()}
        hold([files["train"]] if "train" in files else [], headers)
        self._use({split: (clean, self.degrade) for split, clean in files.items()})

    def _setup_prediction(self) -> None:
        self.setup("test")
        self.predict = Wholes(self.test.clean, self.degrade, self.scale, predict=True)


def found(folder: Path, root: Path | None = None) -> list[Path]:
    """The pictures below a folder, which may be a link to anywhere; at least one."""
    if not (paths := find_images(folder, root=bounds(folder, root or folder))):
        fix = f"put files like {folder}/name.png there, or give another folder"
        raise UserError(f"data folder {no_pictures(folder, fix)}")
    return paths


def split_off(splits: dict[str, list[Item]], names: Sequence[str], share: float, seed: int) -> None:
    """Move a share of ``train``, at least one, to ``val`` where that is missing; by the seed and each picture's own name.

    Raises:
        UserError: nothing would be left to train on.
    """
    if "val" in splits or "train" not in splits:
        return
    count = max(1, round(share * len(names)))
    if count >= len(names):
        raise UserError(
            f"{len(names)} picture(s) are too few to train and validate on; add pictures, or a folder val beside train"
        )
    order = np.argsort(hashed(seed, [zlib.crc32(name.encode()) for name in names]), kind="stable").tolist()
    everything = splits["train"]
    splits["train"], splits["val"] = ([everything[i] for i in sorted(part)] for part in (order[count:], order[:count]))


def hold(files: Sequence[Files], headers: dict[Path, Header | ImageError]) -> None:
    """Decode the training pictures now, where they fit into memory: a patch then costs no decoding."""
    known = [(headers[path], each.channels) for each in files for path in each.paths]
    size = sum(
        header.height * header.width * channels * header.bits // 8 for header, channels in known if isinstance(header, Header)
    )
    if size > _MOST_MEMORY:
        log.info("%.1f GiB of training pictures are decoded when needed", size / 2**30)
        return
    for each in files:
        each.hold(lambda paths: track(paths, "Reading pictures", disable=len(paths) < 200))
