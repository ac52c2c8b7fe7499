"""Safe reading of picture files: right pixels or one clear error, never a silently ruined picture.

Pillow decodes, but with care: left alone it reduces 16-bit colour to 8 bits, ignores the EXIF orientation, shows the hidden
colour of transparent pixels and turns float pixels into black, all without a word. What would come out wrong (float pixels,
signed whole numbers, ...) is refused by an :class:`~vision.errors.ImageError`. Colour profiles (ICC) are ignored:
classification does not need them.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from jaxtyping import UInt
from PIL import (  # noqa: F401  (each import makes its format known to Image.OPEN)
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vision.errors import ImageError, UserError

log = logging.getLogger(__name__)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
UNREAD = (  # what cameras, phones and programs write and is not read here
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".jxr", ".apng", ".tga", ".ico", ".pcx", ".dds", ".exr", ".hdr", ".pfm",
    ".psd", ".xcf", ".svg", ".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".raf", ".orf", ".rw2", ".pef",
    ".srw", ".3fr", ".iiq", ".x3f", ".erf", ".dcr",
)  # fmt: skip
MAX_PIXELS = 2**27  # 134 million: a photo of 108 million pixels passes, a decompression bomb does not
_OTHER_BYTE = {  # Pillow's name for 16-bit pixels, and the name by which it takes the low bytes where the first takes the high
    f"{mode};16{order}": f"{mode};16{other}"
    for mode in ("RGB", "RGBA")
    for order, other in {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}.items()
}
_ORIENTATION, _WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _PLANAR = 0x0112, 256, 257, 258, 262, 284  # tags of EXIF and TIFF


def read_image(path: str | Path, *, channels: int | None = 3, max_pixels: int = MAX_PIXELS) -> UInt[np.ndarray, "h w c"]:
    """Read the first picture of a file, turned upright as its EXIF orientation says.

    Args:
        path: a JPEG, PNG, WebP, BMP, GIF, TIFF or PNM file, told by its content and not by its name.
        channels: 3 = RGB, 1 = gray (ITU-R 601 luma); transparent pixels are then laid on white.
            None = as stored: 1 (gray), 2 (gray, alpha), 3 (RGB) or 4 (RGB, alpha); a palette is looked up, CMYK becomes RGB.
        max_pixels: refuse more pixels than this, before anything is decoded.

    Returns:
        uint8 (0..255), or uint16 (0..65535) where the file stores more than 8 bits; 1-bit becomes 0 and 255.
        Animations and multi-page files give their first frame.

    Raises:
        ImageError: the file is missing, empty, broken, cut off, too large, no picture, or of a kind that would be ruined.
        UserError: channels is not 1, 3 or None.
    """
    if channels not in (1, 3, None):
        raise UserError(f"channels={channels} cannot be read from a picture; use 3 (RGB), 1 (gray) or None (as stored)")
    with open_image(path, max_pixels) as picture:
        image = _decode(picture, path)
        image = _turn(image, _orientation(picture))  # read after decoding: Pillow turns TIFF by itself and drops the tag
    return image if channels is None else convert_channels(image, channels)


class Header(NamedTuple):
    """What the header of a picture file tells: the size as :func:`read_image` returns it, channels and bits as stored."""

    height: int
    width: int
    channels: int  # 1 (gray) to 4 (RGB, alpha)
    bits: int  # 8 or 16

    @property
    def size(self) -> str:
        """For people: width x height."""
        return f"{self.width} x {self.height}"


def read_header(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Header:
    """Size and kind of a picture by its header alone (about 0.1 ms). An EXIF orientation behind a PNG's pixels is not seen.

    Raises:
        ImageError: as :func:`read_image`, but for damage further on.
    """
    with open_image(path, max_pixels) as picture:
        size = (_tag(picture, _WIDTH, 0), _tag(picture, _HEIGHT, 0)) if picture.format == "TIFF" else picture.size
        deep = picture.mode.startswith("I") or _is_deep(picture)
        known = picture.format != "PNG" or "exif" in picture.info  # else Pillow would decode all of it to look behind the pixels
        width, height = size[::-1] if known and _orientation(picture) in (5, 6, 7, 8) else size
        channels = {"1": 1, "L": 1, "F": 1, "LA": 2, "La": 2, "RGBA": 4, "RGBa": 4, "PA": 4}.get(picture.mode, 3)
        if picture.mode.startswith("I"):
            channels = 1
        if channels in (1, 3) and "transparency" in picture.info:
            channels += 1
        return Header(int(height), int(width), channels, 16 if deep else 8)


def check_image(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check a picture file by its header alone (about 0.1 ms); damage further on shows only in :func:`read_image`.

    Raises:
        ImageError: as :func:`read_image`.
    """
    with open_image(path, max_pixels):
        pass


def is_image_file(path: str | Path) -> bool:
    """Whether the name ends like a picture's; hidden files (``._photo.jpg`` of a Mac) are none."""
    path = Path(path)
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")


def find_images(folder: str | Path, *, root: str | Path | None = None) -> list[Path]:
    """All picture files below a folder by name, sorted, hidden folders left out; the walk never leaves ``root``.

    Links to folders are not followed: a picture inside ``root`` is found at its real place.

    Args:
        folder: where to look.
        root: the folder that no link may leave; ``folder`` itself if not given.

    Raises:
        UserError: ``folder`` is no folder, or a link leads out of ``root``.
    """
    folder = Path(folder)
    bounds = Path(folder if root is None else root).resolve()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give an existing folder with pictures")
    require_inside(folder, bounds)
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in files if is_image_file(name))
        for name in (*folders, *names):
            if os.path.islink(os.path.join(place, name)):
                require_inside(Path(place, name), bounds)
        found += [Path(place, name) for name in names]
    return sorted(found)


def find_unread(folder: str | Path) -> list[Path]:
    """Pictures below a folder of formats that are not read here, told by their names (UNREAD), sorted; :func:`find_images`
    passes them over. Links to folders are not followed, and no folder has none."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if Path(name).suffix.lower() in UNREAD and not name.startswith(".")]
    return sorted(found)


def unread(paths: Sequence[Path]) -> str:
    """What was passed over, in a few words, such as "3 pictures of kinds that are not read (.cr2 1, .heic 2)"; "" if nothing."""
    kinds = Counter(path.suffix.lower() for path in paths)
    counts = ", ".join(f"{suffix} {kinds[suffix]}" for suffix in sorted(kinds))
    return f"{len(paths)} picture{'s' * (len(paths) > 1)} of kinds that are not read ({counts})" if paths else ""


def no_pictures(folder: Path, fix: str = "give a folder with pictures") -> str:
    """The message, with what there is in their place."""
    if others := unread(find_unread(folder)):
        fix = f"found {others}: convert them, for example to PNG"
    return f"{folder} has no pictures (.png, .jpg, .tif, …); {fix}"


def tell_unread(place: object, folders: Iterable[Path]) -> None:
    """Warn once of pictures of formats that are not read."""
    if others := unread([path for folder in folders for path in find_unread(folder)]):
        log.warning("%s: %s are passed over; convert them, for example to PNG", place, others)


def require_inside(path: Path, root: Path) -> None:
    """Raise UserError if the path, links and ``..`` resolved, lies outside root."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{path} leads outside {root}; copy what it points to into that folder, or remove it")


def convert_channels(image: UInt[np.ndarray, "h w c"], channels: int) -> UInt[np.ndarray, "h w c2"]:
    """Gray, RGB, each with or without alpha, to 1 or 3 channels without alpha; the depth stays.

    Transparent pixels are laid on white; gray is the ITU-R 601 luma in the fixed-point form of Pillow.

    Raises:
        UserError: the picture has other than 1 to 4 channels, or is neither uint8 nor uint16.
    """
    if image.dtype not in (np.uint8, np.uint16) or not 1 <= image.shape[-1] <= 4:
        raise UserError(
            f"a picture of {image.dtype} with shape {list(image.shape)} is not understood; "
            "give uint8 or uint16, height x width x 1, 2 (gray, alpha), 3 or 4 (RGB, alpha)"
        )
    if image.shape[-1] in (2, 4):
        top = np.uint32(np.iinfo(image.dtype).max)
        colour, alpha = image[..., :-1].astype(np.uint32), image[..., -1:].astype(np.uint32)
        image = ((colour * alpha + top * (top - alpha) + top // 2) // top).astype(
            image.dtype
        )  # fits 32 bits: top * top + top / 2
    if image.shape[-1] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=-1)
    red, green, blue = (image[..., i : i + 1].astype(np.uint32) for i in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).astype(image.dtype)


@contextmanager
def open_image(path: str | Path, max_pixels: int) -> Iterator[ImageFile.ImageFile]:
    """The picture with its header read and its size checked; every failure within becomes an ImageError.

    Image.open is not used: it warns or raises by a limit that is global to the process, and knows formats that run programs.
    """
    try:
        with open(_regular(path), "rb") as stream:
            prefix = stream.read(16)
            if not prefix:
                raise ImageError(path, "the file is empty")
            picture = _plugin(stream, prefix, path)
            width, height = picture.size
            if width < 1 or height < 1:
                raise ImageError(path, f"the picture is {width} x {height} pixels; it needs at least 1 x 1")
            if width * height > max_pixels:
                raise ImageError(
                    path, f"{width} x {height} pixels are more than max_pixels={max_pixels}; raise it if you trust the file"
                )
            yield picture
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(path, "no such file") from None
    except OSError as error:  # with a number: the system's, not the decoder's
        raise ImageError(path, error.strerror or f"broken or cut off ({_line(error)})") from error
    except Exception as error:  # damaged bytes bring nearly every exception out of the decoders
        raise ImageError(path, f"broken or cut off ({_line(error)})") from error


def _regular(path: str | Path) -> Path:
    """The path, if it is a regular file: a pipe or device would block or never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ImageError(path, "is a folder, not a picture file" if stat.S_ISDIR(mode) else "is not a regular file")
    return Path(path)


def _plugin(stream: IO[bytes], prefix: bytes, path: str | Path) -> ImageFile.ImageFile:
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(prefix) is True:
            stream.seek(0)
            try:
                # without the file's name: Pillow would map raw pixels into memory, and a TIFF's that are to be turned wrongly
                return cast("ImageFile.ImageFile", factory(stream, ""))  # those of FORMATS all are
            except (SyntaxError, IndexError, TypeError, struct.error) as error:
                raise ImageError(path, f"not a {name} file that can be read ({_line(error)})") from error
    raise ImageError(path, f"not a picture of a kind read here ({', '.join(FORMATS)})")


def _decode(picture: ImageFile.ImageFile, path: str | Path) -> UInt[np.ndarray, "h w c"]:
    mode = picture.mode
    if mode == "F":
        raise ImageError(path, "float pixels have no known range; scale them to 0..65535 and save a 16-bit PNG or TIFF")
    if mode.startswith("I"):
        return _with_alpha(_deep_gray(picture, path), picture)
    if _is_deep(picture):
        return _with_alpha(_deep_colour(picture, path), picture)
    if mode in ("P", "PA"):
        mode = "RGBA" if mode == "PA" or "transparency" in picture.info else "RGB"
    elif "transparency" in picture.info and mode in ("1", "L", "RGB"):  # one colour stands for "nothing here"
        mode = "RGBA" if mode == "RGB" else "LA"
    else:
        mode = {"1": "L", "CMYK": "RGB", "YCbCr": "RGB", "RGBX": "RGB", "RGBa": "RGBA", "La": "LA"}.get(mode, mode)
    if mode not in ("L", "LA", "RGB", "RGBA"):
        raise ImageError(path, f"pixels of mode {mode} are not read here; save the picture as RGB")
    picture.load()
    if mode == "LA" and picture.mode != "LA":
        return np.array(picture.convert("RGBA"))[..., [0, 3]]
    image = np.array(picture if picture.mode == mode else picture.convert(mode))
    return image.reshape(picture.height, picture.width, -1)


def _is_deep(picture: ImageFile.ImageFile) -> bool:
    """Whether Pillow would reduce the pixels to 8 bits, which it does without a word."""
    if picture.format == "TIFF":
        return max(_tag(picture, _BITS, (1,))) > 8
    arguments = picture.tile[0].args if picture.tile else ()
    if picture.format == "PPM":
        return isinstance(arguments, tuple) and arguments[-1] > 255
    return picture.format == "PNG" and str(arguments).endswith(";16B")


def _deep_colour(picture: ImageFile.ImageFile, path: str | Path) -> UInt[np.ndarray, "h w c"]:
    """16-bit colour or gray with alpha, in two passes: Pillow takes the one byte of each value or, told that the bytes lie the
    other way round, the other one."""
    kinds = [tile.args if isinstance(tile.args, tuple) else (tile.args,) for tile in picture.tile]  # each its rows
    rawmode = kinds[0][0]
    if rawmode == "LA;16B":  # has no other way round, but its four bytes a pixel can be had as they lie
        picture._mode, picture.tile = "RGBA", [tile._replace(args="RGBA") for tile in picture.tile]
        quads = _pixels(picture).astype(np.uint16)
        return quads[..., 0::2] << np.uint16(8) | quads[..., 1::2]
    planar = picture.format == "TIFF" and _tag(picture, _PLANAR, 1) != 1  # would take the high bytes for the low ones
    if planar or rawmode not in _OTHER_BYTE or any(kind[0] != rawmode for kind in kinds):
        raise ImageError(path, f"more than 8 bits a colour are not read from this kind of {picture.format}; save a 16-bit PNG")
    high = _pixels(picture).astype(np.uint16)
    with open(path, "rb") as again:
        second = _plugin(again, again.read(16), path)
        others = [(_OTHER_BYTE[rawmode], *kind[1:]) for kind in kinds]
        second.tile = [tile._replace(args=other) for tile, other in zip(second.tile, others, strict=True)]
        return high << np.uint16(8) | _pixels(second)


def _pixels(picture: ImageFile.ImageFile) -> np.ndarray:
    picture.load()  # by itself: numpy would swallow some of its errors
    return np.array(picture)


def _deep_gray(picture: ImageFile.ImageFile, path: str | Path) -> UInt[np.ndarray, "h w 1"]:
    if picture.mode == "I" and picture.format not in ("PPM", "PNG"):
        raise ImageError(path, "signed or 32-bit whole-number pixels have no known range; save a 16-bit PNG or TIFF of 0..65535")
    image = _pixels(picture).astype(np.uint16)
    if picture.format == "TIFF":
        if max(_tag(picture, _BITS, (16,))) == 12:  # stretched to the full range
            image = image << np.uint16(4) | image >> np.uint16(8)
        if _tag(picture, _PHOTOMETRIC, 1) == 0:  # 0 is white: Pillow turns it round for 8 bits only
            image = np.uint16(65535) - image
    return image[..., None]


def _with_alpha(image: UInt[np.ndarray, "h w c"], picture: ImageFile.ImageFile) -> UInt[np.ndarray, "h w c2"]:
    """With an alpha channel where a PNG declares one 16-bit colour transparent."""
    key = picture.info.get("transparency")
    if key is None or image.shape[-1] not in (1, 3):
        return image
    opaque = (image != np.array(key, np.uint16)).any(-1, keepdims=True)
    return np.concatenate([image, opaque * np.uint16(65535)], axis=-1)


def _orientation(picture: ImageFile.ImageFile) -> int:
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF does not damage the pixels
        return 1


def _turn(image: UInt[np.ndarray, "h w c"], orientation: int) -> UInt[np.ndarray, "h2 w2 c"]:
    """Turn upright by the EXIF orientation 1..8; 5 to 8 exchange height and width."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


def _tag(picture: ImageFile.ImageFile, tag: int, default: Any) -> Any:
    return picture.tag_v2.get(tag, default)  # type: ignore[attr-defined]


def _line(error: BaseException) -> str:
    """The first 160 characters of an error's text on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def missing(folder: Path) -> str:
    """Why a path is no folder."""
    return "is a file" if folder.exists() else "does not exist"
