"""Pictures are written in every depth, and what their files told beside the pixels comes through."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
from PIL import Image, ImageCms

from vision.data import read_image
from vision.data.metadata import Metadata, read_metadata
from vision.data.saving import chunk, put, write_image
from vision.errors import ImageError, UserError

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6" xmp:Rating="4"/></x:xmpmeta>'
CAMERA = {33434: 0.01, 36867: "2020:01:02 03:04:05", 40962: 99, 40963: 88, 37500: b"MAKER\0NOTE"}
EXIF = {271: "Maker", 33432: "\u00a9 me".encode(), 34665: CAMERA, 34853: {1: "N", 2: (52.0, 31.0, 12.5)}}
COMBINATIONS = [
    (form, channels, depth)
    for form in ("PNG", "TIFF", "JPEG", "WEBP")
    for channels in (1, 2, 3, 4)
    for depth in (np.uint8, np.uint16)
    if form in ("PNG", "TIFF") or (depth == np.uint8 and channels != 2 and (channels < 4 or form == "WEBP"))
]


def metadata(form: str = "PNG") -> Metadata:
    return Metadata(form, dict(EXIF), icc=SRGB, xmp=XMP, dpi=(300.0, 150.0))


@pytest.mark.parametrize(("form", "channels", "depth"), COMBINATIONS)
def test_all_that_a_format_holds_comes_back(form, channels, depth, picture, tmp_path):
    """By another decoder than the one that reads pictures here."""
    image, path = picture(37, 23, channels, depth), tmp_path / "picture"
    write_image(path, image, metadata=metadata(form), quality=100)
    back = imagecodecs.imread(path)
    if form == "JPEG":
        assert np.abs(back.reshape(image.shape).astype(int) - image).max() < 20
    elif form == "WEBP" and channels == 1:
        assert (back == image).all()
    else:
        assert back.dtype == depth
        assert np.array_equal(back.reshape(image.shape), image)
    if (form, channels, depth) == ("TIFF", 2, np.uint16):
        return  # Pillow does not know such a file
    found = read_metadata(path)
    icc = None if form == "PNG" and channels < 3 else SRGB  # PNG has no place for it in a gray picture
    assert (found.format, found.icc, found.xmp) == (form, icc, XMP.replace(b'="6"', b'="1"'))
    if form != "WEBP":  # has no place for it
        assert found.dpi == pytest.approx((300, 150), abs=0.02)
    camera = found.exif[34665]
    assert (found.exif[271], found.exif[33432], found.exif[34853][2]) == ("Maker", "\u00a9 me".encode(), (52.0, 31.0, 12.5))
    assert (camera[36867], camera[37500], float(camera[33434])) == ("2020:01:02 03:04:05", b"MAKER\0NOTE", 0.01)
    assert (camera[40962], camera[40963]) == (23, 37)  # the size it has now
    assert found.exif.get(274, 1) == 1
    if form != "WEBP":
        with Image.open(path) as opened:
            opened.load()


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (700, 1), (517, 513)])
def test_any_size(shape, picture, tmp_path):
    for form in ("PNG", "TIFF"):
        image = picture(*shape, 4, np.uint16)
        write_image(tmp_path / form, image, metadata=Metadata(form))
        assert np.array_equal(read_image(tmp_path / form, channels=None), image)


def test_orientation_is_that_of_turned_pixels(picture, tmp_path):
    """A tag that stays would turn the picture a second time."""
    image = Image.fromarray(picture(8, 12))
    exif = Image.Exif()
    exif[274] = 6
    for form in ("JPEG", "PNG", "TIFF", "WEBP"):
        image.save(tmp_path / form, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
        found, pixels = read_metadata(tmp_path / form), read_image(tmp_path / form)
        assert pixels.shape[:2] == (12, 8)
        found.format = "PNG"
        write_image(tmp_path / "copy", pixels, metadata=found, overwrite=True)
        assert np.array_equal(read_image(tmp_path / "copy"), pixels)
        assert found.exif.get(274, 1) == 1


def test_thumbnails_and_the_old_layout_are_left_out(picture, tmp_path):
    """They show and describe the picture as it was."""
    image = Image.fromarray(picture(40, 50))
    image.save(tmp_path / "a.tif", tiffinfo={270: "my picture", 34665: {33434: 0.5}})
    found = read_metadata(tmp_path / "a.tif")
    assert set(found.exif) == {270, 34665}
    write_image(tmp_path / "b.jpg", picture(40, 50), metadata=Metadata("JPEG", found.exif))
    with Image.open(tmp_path / "b.jpg") as copy:
        assert copy.getexif()[270] == "my picture"
        assert copy.getexif().get_ifd(1) == {}


def test_jpeg_keeps_its_colours_at_the_full_size(picture, tmp_path):
    write_image(tmp_path / "a.jpg", picture(16, 16), metadata=Metadata("JPEG"))
    with Image.open(tmp_path / "a.jpg") as opened:
        assert [layer[1:3] for layer in opened.layer] == [(1, 1)] * 3
        assert max(opened.quantization[0]) <= 12  # libjpeg's table for a quality of 95


@pytest.mark.parametrize("extra", [{}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}], ids=["simple", "extended"])
def test_lossless_stays_lossless(extra, picture, tmp_path):
    image = picture(20, 31)
    for lossless in (True, False):
        Image.fromarray(image).save(tmp_path / "a.webp", lossless=lossless, **extra)
        found = read_metadata(tmp_path / "a.webp")
        assert found.lossless == lossless
        write_image(tmp_path / "b.webp", image, metadata=found, overwrite=True)
        assert np.array_equal(read_image(tmp_path / "b.webp"), image) == lossless


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_costs_the_exif_only(picture, tmp_path):
    image = Image.fromarray(picture(8, 8))
    image.save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff broken")
    assert read_metadata(tmp_path / "a.jpg").exif == {}
    image.save(tmp_path / "a.jpg", exif=b"Exif\0\0no")
    found = read_metadata(tmp_path / "a.jpg")
    assert (found.exif, found.notes) == ({}, ["its EXIF is damaged and left out"])


def test_more_than_one_picture_and_cmyk_are_refused(picture, tmp_path):
    frames = [Image.fromarray(picture(8, 8, seed=seed)) for seed in range(3)]
    for name in ("a.gif", "a.webp", "a.tif", "a.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        with pytest.raises(ImageError, match=r"it has 3 frames or pages; save each as a picture of its own"):
            read_metadata(tmp_path / name)
    frames[0].convert("CMYK").save(tmp_path / "a.jpg")
    with pytest.raises(ImageError, match=r"CMYK needs its colour profile to become RGB; convert it with an image editor first"):
        read_metadata(tmp_path / "a.jpg")


@pytest.mark.parametrize(
    ("form", "shape", "depth", "message"),
    [
        ("JPEG", (4, 4, 3), np.uint16, r"it has 16 bits a colour, which JPEG cannot hold; write PNG or TIFF"),
        ("WEBP", (4, 4, 1), np.uint16, r"it has 16 bits a colour, which WEBP cannot hold; write PNG or TIFF"),
        ("JPEG", (4, 4, 4), np.uint8, r"it has transparency, which JPEG cannot hold; write PNG, TIFF or WebP"),
        ("WEBP", (1, 17000, 3), np.uint8, r"17000x1 pixels are more than the 16383 a side that WEBP can hold; write PNG or TIFF"),
        ("GIF", (4, 4, 3), np.uint8, r"format GIF is not written; use PNG, JPEG, TIFF, WEBP"),
    ],
)
def test_what_a_format_cannot_hold(form, shape, depth, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write_image(tmp_path / "a", np.zeros(shape, depth), metadata=Metadata(form))
    assert not list(tmp_path.iterdir())


# Whole or not at all


def test_nothing_is_replaced_unasked(picture, tmp_path):
    path = tmp_path / "a.png"
    write_image(path, picture(4, 4))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"a.png exists; choose another place, or overwrite it"):
        write_image(path, picture(5, 5))
    assert path.read_bytes() == before
    write_image(path, picture(5, 5), overwrite=True)
    assert read_image(path).shape == (5, 5, 3)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists"):
        write_image(tmp_path / "dangling", picture(4, 4))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_write_leaves_what_was_there(overwrite, tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old") if overwrite else None

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"a cannot be written: No space left on device; free some space or choose another place"):
        put(path, b"new", overwrite)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == ([("a", b"old")] if overwrite else [])


def test_file_systems_without_links(tmp_path, monkeypatch):
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    put(tmp_path / "a", b"new", overwrite=False)
    with pytest.raises(FileExistsError):
        put(tmp_path / "a", b"newer", overwrite=False)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a", b"new")]


def test_files_have_the_usual_rights(picture, tmp_path):
    (tmp_path / "usual").touch()
    write_image(tmp_path / "a.png", picture(4, 4))
    assert (tmp_path / "a.png").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_png_chunks_are_whole(picture, tmp_path):
    """Length, name, content and checksum of each, in an order that readers take."""
    path = tmp_path / "a.png"
    write_image(path, picture(9, 9, 4, np.uint16), metadata=metadata())
    content, place, names = path.read_bytes(), 8, []
    while place < len(content):
        (length,) = struct.unpack_from(">I", content, place)
        names.append(content[place + 4 : place + 8].decode())
        place += length + 12
    assert place == len(content)
    assert names[:5] == ["IHDR", "iCCP", "pHYs", "eXIf", "iTXt"]
    assert names[-1] == "IEND"
    assert imagecodecs.png_decode(content).shape == (9, 9, 4)
    assert Path(path).stat().st_size == len(content)


def test_a_png_keeps_the_meaning_of_its_colours_and_its_texts(picture, tmp_path):
    """Gamma, or the curve of a picture for bright screens, lost: the same numbers would be shown as other colours."""
    chunks = [
        chunk(b"sRGB", b"\0"),
        chunk(b"gAMA", struct.pack(">I", 100000)),
        chunk(b"cICP", bytes([9, 16, 0, 1])),
        chunk(b"tEXt", b"Author\0me"),
    ]
    content, damaged = bytes(imagecodecs.png_encode(picture(4, 5))), chunk(b"tEXt", b"Title\0a")[:-1] + b"?"
    (tmp_path / "a.png").write_bytes(content[:33] + b"".join(chunks) + content[33:-12] + damaged + content[-12:])
    found = read_metadata(tmp_path / "a.png")
    write_image(tmp_path / "b.png", picture(8, 10), metadata=found)
    written = (tmp_path / "b.png").read_bytes()
    assert all(each in written for each in chunks)
    assert b"Title" not in written
    with Image.open(tmp_path / "b.png") as copy:
        assert copy.info["gamma"] == 1.0
    assert read_metadata(tmp_path / "b.png").chunks == found.chunks


def test_a_tiff_without_a_resolution_gets_none(picture, tmp_path):
    """Pillow reads 1 pixel an inch where none is told."""
    plain, copy = tmp_path / "a.tif", tmp_path / "b.tif"
    write_image(plain, picture(4, 5), metadata=Metadata("TIFF"))
    found = read_metadata(plain)
    assert found.dpi is None
    write_image(copy, picture(4, 5), metadata=found)
    with Image.open(copy) as there:
        assert 282 not in there.tag_v2
