"""Picture files are read right or refused by name: decoding, orientation, depth, alpha, damage, bombs, walks."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vision.data.images import check_image, convert_channels, find_images, is_image_file, read_header, read_image
from vision.errors import ImageError, UserError

Maker = Callable[..., np.ndarray]
Writer = Callable[..., bytes]


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


# ------------------------------------------------------------------------------------------------------------ kinds


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "ppm", "webp"])
def test_lossless_rgb_is_read_as_stored(tmp_path: Path, picture: Maker, suffix: str) -> None:
    image = picture(5, 7)
    path = saved(tmp_path / f"a.{suffix}", Image.fromarray(image), **({"lossless": True} if suffix == "webp" else {}))
    np.testing.assert_array_equal(read_image(path), image)
    assert read_image(path).dtype == np.uint8


def test_content_and_not_the_name_tells_the_format(tmp_path: Path, picture: Maker) -> None:
    image = picture(5, 7)
    path = saved(tmp_path / "a.jpg", Image.fromarray(image), format="PNG")
    np.testing.assert_array_equal(read_image(path), image)


def test_gray_gives_one_channel_or_three(tmp_path: Path, picture: Maker) -> None:
    """microsoft/Swin-Transformer #328, pytorch/vision #561: gray input is neither refused nor turned to RGB unasked."""
    image = picture(5, 7, 1)
    path = saved(tmp_path / "a.png", Image.fromarray(image[..., 0]))
    np.testing.assert_array_equal(read_image(path, channels=1), image)
    np.testing.assert_array_equal(read_image(path, channels=None), image)
    np.testing.assert_array_equal(read_image(path, channels=3), np.repeat(image, 3, axis=-1))


def test_luma_is_pillows(tmp_path: Path, picture: Maker) -> None:
    image = picture(40, 50)
    path = saved(tmp_path / "a.png", Image.fromarray(image))
    np.testing.assert_array_equal(read_image(path, channels=1)[..., 0], np.array(Image.fromarray(image).convert("L")))


def test_one_bit_becomes_0_and_255(tmp_path: Path) -> None:
    bits = np.array([[0, 255, 0], [255, 255, 0]], np.uint8)
    for suffix in ("png", "tif", "pbm", "bmp"):
        path = saved(tmp_path / f"a.{suffix}", Image.fromarray(bits).convert("1"))
        np.testing.assert_array_equal(read_image(path, channels=1)[..., 0], bits)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_keeps_16_bits(tmp_path: Path, picture: Maker, channels: int, png_bytes: Writer) -> None:
    image = picture(5, 7, channels, np.uint16)
    (tmp_path / "a.png").write_bytes(png_bytes(image))
    read = read_image(tmp_path / "a.png", channels=None)
    assert read.dtype == np.uint16
    np.testing.assert_array_equal(read, image)
    assert read_image(tmp_path / "a.png").dtype == np.uint16


def test_deep_gray_from_tiff_and_pgm(tmp_path: Path, picture: Maker) -> None:
    image = picture(5, 7, 1, np.uint16)
    saved(tmp_path / "a.tif", Image.fromarray(image[..., 0]))
    (tmp_path / "a.pgm").write_bytes(b"P5\n7 5\n65535\n" + image.astype(">u2").tobytes())
    for name in ("a.tif", "a.pgm"):
        np.testing.assert_array_equal(read_image(tmp_path / name, channels=1), image)


def tiff_bytes(
    pixels: bytes,
    width: int,
    height: int,
    bits: int,
    *,
    samples: int = 1,
    kind: int = 1,
    photometric: int = 1,
    deflate: bool = False,
) -> bytes:
    """A TIFF; kind 1 = unsigned, 2 = signed, 3 = float; photometric 0 = 0 is white, 1 = 0 is black, 2 = RGB."""
    pixels = zlib.compress(pixels) if deflate else pixels
    after = 8 + len(pixels)
    depth = (258, 3, samples, bits) if samples < 3 else (258, 3, samples, after)
    shorts = struct.pack("<3H", bits, bits, bits) if samples == 3 else b""
    entries = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        depth,
        (259, 3, 1, 8 if deflate else 1),
        (262, 3, 1, photometric),
        (273, 4, 1, 8),
    ]
    entries += [(277, 3, 1, samples), (278, 3, 1, height), (279, 4, 1, len(pixels)), (339, 3, 1, kind)]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + b"\0" * 4
    return struct.pack("<2sHI", b"II", 42, after + len(shorts)) + pixels + shorts + directory


@pytest.mark.parametrize("deflate", [False, True])
def test_colour_tiff_keeps_16_bits(tmp_path: Path, picture: Maker, deflate: bool) -> None:
    image = picture(5, 7, 3, np.uint16)
    data = tiff_bytes(image.astype("<u2").tobytes(), 7, 5, 16, samples=3, photometric=2, deflate=deflate)
    (tmp_path / "a.tif").write_bytes(data)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif"), image)


@pytest.mark.parametrize("side", [32, 40])
def test_colour_tiff_in_tiles_keeps_16_bits(tmp_path: Path, picture: Maker, side: int) -> None:
    """Also where the last tiles reach beyond the picture."""
    image = picture(side, side, 3, np.uint16)
    padded = np.pad(image, [(0, -side % 16), (0, -side % 16), (0, 0)]).astype("<u2")
    places = range(0, side, 16)
    tiles = [padded[y : y + 16, x : x + 16].tobytes() for y in places for x in places]
    count, size = len(tiles), len(tiles[0])
    bits, starts = 8 + count * size, 14 + count * size
    tables = struct.pack(f"<3H{2 * count}I", 16, 16, 16, *range(8, bits, size), *[size] * count)
    entries = [(256, 3, 1, side), (257, 3, 1, side), (258, 3, 3, bits), (259, 3, 1, 1), (262, 3, 1, 2), (277, 3, 1, 3)]
    entries += [(322, 3, 1, 16), (323, 3, 1, 16), (324, 4, count, starts), (325, 4, count, starts + 4 * count)]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + b"\0" * 4
    data = struct.pack("<2sHI", b"II", 42, bits + len(tables)) + b"".join(tiles) + tables + directory
    (tmp_path / "a.tif").write_bytes(data)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif"), image)


def test_one_deep_colour_as_transparent(tmp_path: Path, picture: Maker, png_bytes: Writer, chunk: Writer) -> None:
    for channels in (1, 3):
        image = picture(5, 7, channels, np.uint16)
        key = chunk(b"tRNS", image[2, 3].astype(">u2").tobytes())
        (tmp_path / "a.png").write_bytes(png_bytes(image, extra=key))
        read = read_image(tmp_path / "a.png", channels=None)
        np.testing.assert_array_equal(read[..., :-1], image)
        assert (read[..., -1] == 0).sum() == 1
        assert read[2, 3, -1] == 0


def test_deep_tiff_where_0_is_white_is_turned_round(tmp_path: Path, picture: Maker) -> None:
    image = picture(5, 7, 1, np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff_bytes(image.tobytes(), 7, 5, 16, photometric=0))
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", channels=1), 65535 - image)


def test_12_bit_tiff_fills_the_range(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(tiff_bytes(bytes([0xFF, 0xF0, 0x00]), 2, 1, 12))  # 4095, 0
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", channels=1).ravel(), [65535, 0])


@pytest.mark.parametrize(
    ("kind", "samples", "bits", "words"),
    [
        (3, 1, 32, "float pixels have no known range; scale them to 0..65535 and save a 16-bit PNG or TIFF"),
        (2, 1, 32, "signed or 32-bit whole-number pixels have no known range"),
        (2, 1, 16, "signed or 32-bit whole-number pixels have no known range"),
        (3, 3, 32, "not a TIFF file that can be read"),
    ],
)
def test_tiff_that_would_be_ruined_is_refused(tmp_path: Path, kind: int, samples: int, bits: int, words: str) -> None:
    data = np.linspace(0, 1, 35 * samples).astype(np.float32).tobytes()[: 35 * samples * bits // 8]
    (tmp_path / "a.tif").write_bytes(
        tiff_bytes(data, 7, 5, bits, samples=samples, kind=kind, photometric=2 if samples == 3 else 1)
    )
    with pytest.raises(ImageError, match=words):
        read_image(tmp_path / "a.tif")


def test_deep_colour_pnm_and_float_pfm_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_bytes(b"P6\n7 5\n65535\n" + bytes(7 * 5 * 6))
    with pytest.raises(ImageError, match="more than 8 bits a colour are not read from this kind of PPM; save a 16-bit PNG"):
        read_image(tmp_path / "a.ppm")
    (tmp_path / "a.pfm").write_bytes(b"Pf\n7 5\n-1.0\n" + bytes(7 * 5 * 4))
    with pytest.raises(ImageError, match="float pixels"):
        read_image(tmp_path / "a.pfm")


def test_cmyk_jpeg_has_its_colours(tmp_path: Path) -> None:
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # full cyan
    path = saved(tmp_path / "a.jpg", ink, quality=100)
    read = read_image(path)
    assert read.shape == (16, 16, 3)
    assert np.abs(read.astype(int) - np.array([0, 255, 255])).max() <= 4
    assert read_image(path, channels=None).shape[-1] == 3


# ------------------------------------------------------------------------------------------------------------ alpha


def test_transparent_pixels_are_white_and_not_their_hidden_colour(tmp_path: Path) -> None:
    """pytorch/vision #64: convert("RGB") shows the invisible red."""
    path = saved(tmp_path / "a.png", Image.new("RGBA", (2, 2), (255, 0, 0, 0)))
    np.testing.assert_array_equal(read_image(path), 255)
    np.testing.assert_array_equal(read_image(path, channels=None)[0, 0], [255, 0, 0, 0])


def test_half_transparent_is_the_mean_with_white() -> None:
    image = np.array([[[0, 100, 255, 128]]], np.uint8)
    np.testing.assert_array_equal(convert_channels(image, 3)[0, 0], [127, 177, 255])
    deep = np.array([[[0, 65535, 0, 65535], [7, 7, 7, 0]]], np.uint16)
    np.testing.assert_array_equal(convert_channels(deep, 3)[0], [[0, 65535, 0], [65535] * 3])


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_palette_with_transparency(tmp_path: Path, suffix: str) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    path = saved(tmp_path / f"a.{suffix}", image, transparency=0)
    np.testing.assert_array_equal(read_image(path)[0], [[255, 255, 255], [0, 0, 255]])
    assert read_image(path, channels=None).shape[-1] == 4


def test_palette_without_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    path = saved(tmp_path / "a.png", image)
    np.testing.assert_array_equal(read_image(path, channels=None)[0], [[255, 0, 0]] * 2)


def test_gray_with_alpha(tmp_path: Path, png_bytes: Writer) -> None:
    image = np.array([[[9, 0], [9, 255]]], np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(png_bytes(image))
    np.testing.assert_array_equal(read_image(path, channels=1)[0, :, 0], [255, 9])
    np.testing.assert_array_equal(read_image(path, channels=None), image)


def test_one_gray_value_as_transparent(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", Image.fromarray(np.array([[3, 200]], np.uint8)), transparency=3)
    np.testing.assert_array_equal(read_image(path, channels=1)[0, :, 0], [255, 200])
    np.testing.assert_array_equal(read_image(path, channels=None)[0], [[3, 0], [200, 255]])


def test_other_shapes_and_dtypes_are_refused() -> None:
    for image in (np.zeros((2, 2, 3), np.float32), np.zeros((2, 2, 5), np.uint8)):
        with pytest.raises((UserError, TypeError)) as caught:  # TypeError: the shape checker, where it is on, comes first
            convert_channels(image, 3)
        if isinstance(caught.value, UserError):
            assert "give uint8 or uint16, height x width x 1, 2 (gray, alpha), 3 or 4 (RGB, alpha)" in str(caught.value)


# ------------------------------------------------------------------------------------------------------ orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_exif_orientation_is_applied(tmp_path: Path, picture: Maker, orientation: int, suffix: str) -> None:
    image = Image.fromarray(np.repeat(np.repeat(picture(1, 2, seed=3), 8, 0), 8, 1))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path / f"a.{suffix}", image, exif=exif)
    with Image.open(path) as opened:
        expected = np.array(ImageOps.exif_transpose(opened))
    np.testing.assert_array_equal(read_image(path), expected)
    assert read_image(path).shape[:2] == ((16, 8) if orientation > 4 else (8, 16))


def test_exif_orientation_of_a_16_bit_png(tmp_path: Path, picture: Maker, png_bytes: Writer, chunk: Writer) -> None:
    image = picture(4, 8, 3, np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.png").write_bytes(png_bytes(image, extra=chunk(b"eXIf", exif.tobytes()[6:])))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), np.rot90(image, -1))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_damaged_exif_does_not_lose_the_picture(tmp_path: Path, picture: Maker) -> None:
    path = saved(tmp_path / "a.jpg", Image.fromarray(picture(8, 8)), exif=b"Exif\0\0II*\0garbage")
    assert read_image(path).shape == (8, 8, 3)


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.webp", "a.tif", "a.png"):
        options = {"lossless": True} if name == "a.webp" else {}
        path = saved(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(read_image(path)[0, 0], [255, 0, 0])


# ----------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, this is text, not a picture", "not a picture of a kind read here (JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM)"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "not a picture of a kind read here"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture of a kind read here"),
        (b"\x89PNG\r\n\x1a\n", "not a PNG file that can be read"),
        (b"\xff\xd8\xff\xe0", "not a JPEG file that can be read"),
    ],
)
def test_no_picture(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for read in (read_image, check_image):
        with pytest.raises(ImageError) as caught:
            read(path)
        assert caught.value.path == path
        assert reason in caught.value.reason
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "gif", "tif", "ppm"])
def test_cut_off_files_are_named(tmp_path: Path, picture: Maker, suffix: str) -> None:
    """pytorch/vision #138: a truncated JPEG must be named, not kill the epoch without a word on which file."""
    path = saved(tmp_path / f"a.{suffix}", Image.fromarray(picture(64, 64)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match=r"a\.\w+: "):
        read_image(path)


def test_cut_off_16_bit_png(tmp_path: Path, picture: Maker, png_bytes: Writer) -> None:
    whole = png_bytes(picture(64, 64, 3, np.uint16))
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match="broken or cut off"):
        read_image(tmp_path / "a.png")


def test_bomb_is_refused_before_it_is_decoded(tmp_path: Path, picture: Maker, png_bytes: Writer) -> None:
    for dtype in (np.uint8, np.uint16):
        path = tmp_path / "a.png"
        path.write_bytes(png_bytes(picture(1, 1, 3, dtype), size=(100_000, 100_000)))
        with pytest.raises(
            ImageError, match="100000 x 100000 pixels are more than max_pixels=134217728; raise it if you trust the file"
        ):
            read_image(path)


def test_max_pixels_is_the_callers(tmp_path: Path, picture: Maker) -> None:
    path = saved(tmp_path / "a.png", Image.fromarray(picture(10, 10)))
    assert read_image(path, max_pixels=100).shape == (10, 10, 3)
    with pytest.raises(ImageError, match="10 x 10 pixels are more than max_pixels=99"):
        read_image(path, max_pixels=99)


def test_more_pixels_than_pillow_allows_are_the_callers_choice(tmp_path: Path) -> None:
    """No warning and no process-wide limit of Pillow stands in the way of a large picture that is wanted."""
    path = saved(tmp_path / "a.png", Image.new("1", (20_000, 10_000)))
    check_image(path, max_pixels=200_000_000)
    assert Image.MAX_IMAGE_PIXELS == 89_478_485


def test_compressed_text_bomb(tmp_path: Path, picture: Maker, png_bytes: Writer, chunk: Writer) -> None:
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100_000_000)))
    (tmp_path / "a.png").write_bytes(png_bytes(picture(2, 2), extra=bomb))
    with pytest.raises(ImageError, match=r"broken or cut off .*too large"):
        read_image(tmp_path / "a.png")


def test_zero_size(tmp_path: Path, picture: Maker, png_bytes: Writer) -> None:
    (tmp_path / "a.png").write_bytes(png_bytes(picture(1, 1), size=(0, 5)))
    (tmp_path / "b.bmp").write_bytes(b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 0, 0, 1, 24, 0, 0, 0, 0, 0, 0))
    for name in ("a.png", "b.bmp"):
        with pytest.raises(ImageError):
            read_image(tmp_path / name)


def test_what_is_no_regular_file_neither_hangs_nor_passes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path, reason in (
        (tmp_path / "none.png", "no such file"),
        (tmp_path, "is a folder, not a picture file"),
        (tmp_path / "pipe.png", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / "nul\0.png", "null"),
    ):
        with pytest.raises(ImageError, match=reason):
            read_image(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "a.png").chmod(0)
    with pytest.raises(ImageError, match="Permission denied"):
        read_image(tmp_path / "a.png")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::DeprecationWarning:PIL")
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "gif", "tif", "ppm", "png16"])
def test_damaged_bytes_give_a_picture_or_an_image_error(tmp_path: Path, picture: Maker, suffix: str, png_bytes: Writer) -> None:
    """Whatever is wrong, no other exception and no process-wide crash comes out."""
    path = tmp_path / "a"
    if suffix == "png16":
        whole = png_bytes(picture(16, 16, 3, np.uint16))
    else:
        stream = io.BytesIO()
        Image.fromarray(picture(16, 16)).save(stream, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()))
        whole = stream.getvalue()
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = np.frombuffer(whole, np.uint8).copy()
        front = min(len(damaged), 200)
        damaged[rng.integers(0, front, 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        with contextlib.suppress(ImageError):
            assert read_image(path, max_pixels=10_000_000).shape[2:] == (3,)


def test_image_error_survives_pickling(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(ImageError(tmp_path / "a.png", "why")))
    assert (error.path, error.reason) == (tmp_path / "a.png", "why")


@pytest.mark.parametrize("channels", [0, 2, 4])
def test_channels_of_no_kind_are_refused(tmp_path: Path, channels: int) -> None:
    with pytest.raises(UserError, match=rf"channels={channels} .* use 3 \(RGB\), 1 \(gray\) or None"):
        read_image(tmp_path / "a.png", channels=channels)


# ------------------------------------------------------------------------------------------------------------ walks


def test_names_of_pictures() -> None:
    assert is_image_file("A/B/photo.JPEG")
    assert not any(map(is_image_file, ["notes.txt", "photo.jpg.txt", "._photo.jpg", ".jpg", "photo"]))


def test_walk_is_sorted_deep_and_without_hidden_folders(tmp_path: Path) -> None:
    for name in ("b/2.png", "a/1.JPG", "c.gif", ".cache/3.png", "a/note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == ["a/1.JPG", "b/2.png", "c.gif"]
    with pytest.raises(UserError, match="is not a folder; give an existing folder with pictures"):
        find_images(tmp_path / "none")


def test_walk_never_leaves_the_root(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret.png").touch()
    (tmp_path / "root" / "real.png").touch()
    (tmp_path / "root" / "inside.png").symlink_to("real.png")
    assert len(find_images(tmp_path / "root")) == 2
    for target in ("../secret.png", tmp_path / "secret.png", ".."):
        link = tmp_path / "root" / "out.png"
        link.symlink_to(target)
        with pytest.raises(UserError, match=r"out\.png leads outside .*root; copy what it points to into that folder"):
            find_images(tmp_path / "root")
        link.unlink()
    with pytest.raises(UserError, match="leads outside"):
        find_images(tmp_path / "root" / "..", root=tmp_path / "root")


def test_loops_of_links_end(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    assert find_images(tmp_path) == [tmp_path / "a" / "1.png"]


def test_reading_pictures_needs_no_torch() -> None:
    code = "import sys, vision.data; vision.data.read_image; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "I;16"])
def test_raw_tiffs_are_turned_upright(tmp_path: Path, picture: Maker, orientation: int, mode: str) -> None:
    """Told a file's name, Pillow maps raw pixels into memory, and mixes them up where height and width are exchanged."""
    values = picture(5, 7, {"L": 1, "RGB": 3, "RGBA": 4, "I;16": 1}[mode], np.uint16 if mode == "I;16" else np.uint8)
    stored = Image.fromarray(values.squeeze())
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "raw.tif", exif=exif)
    stored.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(stored))
    image = read_image(tmp_path / "raw.tif", channels=None)
    assert np.array_equal(image.squeeze(), expected)
    assert read_header(tmp_path / "raw.tif")[:2] == image.shape[:2]


# suffix -> the modes that Pillow writes to it
WRITTEN = {
    "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "tif": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"),
    "jpg": ("1", "L", "RGB", "CMYK"),
    "webp": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"),
    "bmp": ("1", "L", "P", "RGB", "RGBA"),
    "gif": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
}


@pytest.mark.parametrize(("suffix", "mode"), [(suffix, mode) for suffix, modes in WRITTEN.items() for mode in modes])
def test_a_header_tells_what_reading_gives(tmp_path: Path, mode: str, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / f"a.{suffix}"
    Image.new(mode, (7, 5)).save(file, exif=exif)
    image, header = read_image(file, channels=None), read_header(file)
    assert (header.height, header.width, header.channels, header.bits) == (*image.shape, 8 * image.dtype.itemsize)


def test_a_header_of_a_16_bit_colour_png(tmp_path: Path, picture: Maker, png_bytes: Writer) -> None:
    (tmp_path / "deep.png").write_bytes(png_bytes(picture(5, 7, 4, np.uint16)))
    assert read_header(tmp_path / "deep.png") == (5, 7, 4, 16)
    (tmp_path / "broken.png").write_bytes(b"")
    with pytest.raises(ImageError, match="the file is empty"):
        read_header(tmp_path / "broken.png")
