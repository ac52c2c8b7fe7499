"""Writing picture files: every depth, and what the file told beside its pixels (EXIF, colour profile, XMP, resolution).

JPEG and WebP go through Pillow. Pillow writes no 16-bit colour, so imagecodecs encodes PNG, and TIFF is put together from
deflated strips and Pillow's directory of tags. A file appears whole or not at all.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vision.data.metadata import ICC, RESOLUTION, XMP, Metadata, exif_bytes
from vision.errors import UserError

WRITTEN = {"PNG": ".png", "JPEG": ".jpg", "TIFF": ".tif", "WEBP": ".webp"}  # formats, and how their files are called
LARGEST = {"JPEG": 65500, "WEBP": 16383}  # side in pixels
STRIP = 2**20  # bytes of a strip of a TIFF


def check_writable(shape: tuple[int, ...], dtype: Any, kind: str) -> None:
    """Raises: UserError: the format cannot hold such a picture `h w c`, with one that can."""
    deep, has_alpha = np.dtype(dtype) == np.uint16, shape[2] in (2, 4)
    most = LARGEST.get(kind)
    if deep and kind in ("JPEG", "WEBP"):
        raise UserError(f"it has 16 bits a colour, which {kind} cannot hold; write PNG or TIFF")
    if has_alpha and kind == "JPEG":
        raise UserError("it has transparency, which JPEG cannot hold; write PNG, TIFF or WebP")
    if most is not None and max(shape[:2]) > most:
        raise UserError(f"{shape[1]}x{shape[0]} pixels are more than the {most} a side that {kind} can hold; write PNG or TIFF")


def write_image(
    path: str | Path,
    image: UInt[np.ndarray, "h w c"],
    *,
    metadata: Metadata | None = None,
    quality: int = 95,
    overwrite: bool = False,
) -> None:
    """Writes a picture as its `metadata.format`: PNG and TIFF exactly, in 8 or 16 bits; JPEG and WebP in 8 bits.

    JPEG keeps colours at the full size (no subsampling). WebP halves their size, as its lossy form always does; it is lossless
    if the picture's file was, or with quality 100. It knows no gray, which becomes equal colours. A gray PNG has no place for a
    profile of colours.

    Args:
        image: uint8 or uint16; 1 (gray), 2 (gray, alpha), 3 (RGB) or 4 (RGB, alpha) channels.
        quality: of JPEG and WebP, 1..100.
        overwrite: replace an existing file.

    Raises:
        UserError: the format cannot hold the picture, the file exists or cannot be written.
    """
    metadata = metadata or Metadata()
    check_writable(image.shape, image.dtype, metadata.format)
    content = encode(np.ascontiguousarray(image), metadata, quality)
    try:
        put(Path(path), content, overwrite)
    except FileExistsError as error:
        raise UserError(f"{path} exists; choose another place, or overwrite it") from error


def encode(image: UInt[np.ndarray, "h w c"], metadata: Metadata, quality: int) -> bytes:
    if metadata.format == "PNG":
        return png(image, metadata)
    if metadata.format == "TIFF":
        return tiff(image, metadata)
    if metadata.format not in WRITTEN:
        raise UserError(f"format {metadata.format} is not written; use {', '.join(WRITTEN)}")
    picture, stream = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image), BytesIO()
    exif = metadata.exif_for(picture.size)
    options: dict[str, Any] = {"exif": exif_bytes(exif)} if exif else {}
    options |= {"icc_profile": metadata.icc} if metadata.icc else {}
    options |= {"xmp": metadata.xmp} if metadata.xmp else {}
    if metadata.format == "JPEG":
        options |= {"subsampling": 0} | ({"dpi": metadata.dpi} if metadata.dpi else {})
    else:
        options |= {
            "lossless": metadata.lossless or quality == 100,
            "exact": True,
        }  # exact: the colours below transparent places too
    picture.save(stream, metadata.format, quality=quality, **options)
    return stream.getvalue()


# PNG: what imagecodecs encodes, with the chunks for the rest put in after the header


def png(image: UInt[np.ndarray, "h w c"], metadata: Metadata) -> bytes:
    import imagecodecs

    content, chunks = imagecodecs.png_encode(image), b""
    if metadata.icc and metadata.icc[16:20] == (b"RGB " if image.shape[2] > 2 else b"GRAY"):  # others are against the rules
        chunks += chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(metadata.icc))
    if metadata.dpi:
        chunks += chunk(b"pHYs", struct.pack(">IIB", *(round(number / 0.0254) for number in metadata.dpi), 1))
    if exif := metadata.exif_for((image.shape[1], image.shape[0])):
        chunks += chunk(b"eXIf", exif_bytes(exif).removeprefix(b"Exif\0\0"))
    if metadata.xmp:
        chunks += chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + metadata.xmp)
    chunks = metadata.chunks + chunks
    header = 8 + 12 + 13  # signature; length, name and checksum of IHDR; what it holds
    return bytes(content[:header]) + chunks + bytes(content[header:])


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


# TIFF 6.0, deflated, with differences along the rows


def tiff(image: UInt[np.ndarray, "h w c"], metadata: Metadata) -> bytes:
    h, w, channels = image.shape
    rows = max(1, STRIP // image[:1].nbytes)
    strips = [deflated(image[start : start + rows]) for start in range(0, h, rows)]
    tags = ImageFileDirectory_v2()  # little-endian
    for tag, value in metadata.exif_for((w, h)).items():
        tags[tag] = value
    tags.update(
        {
            256: w,
            257: h,
            258: (8 * image.itemsize,) * channels,
            259: 8,  # deflate
            262: 2 if channels > 2 else 1,  # RGB, or gray with 0 = black
            273: tuple(starts(strips)),  # from the end of the tags, which Pillow adds
            277: channels,
            278: rows,
            279: tuple(map(len, strips)),
            284: 1,  # the colours of a pixel lie together
            317: 2,  # differences
            339: (1,) * channels,  # without a sign
        }
    )
    if channels in (2, 4):
        tags[338] = 2  # alpha that the colours are not multiplied with
    if metadata.icc:
        tags[ICC] = metadata.icc
    if metadata.xmp:
        tags[XMP] = metadata.xmp
    if metadata.dpi:
        tags.update(zip(RESOLUTION, (*metadata.dpi, 2), strict=True))  # 2: an inch
    stream = BytesIO()
    tags.save(stream)
    return stream.getvalue() + b"".join(strips)


def deflated(rows: UInt[np.ndarray, "h w c"]) -> bytes:
    differences = rows.copy()
    differences[:, 1:] -= rows[:, :-1]
    return zlib.compress(differences.astype(differences.dtype.newbyteorder("<")).tobytes())


def starts(strips: list[bytes]) -> Iterator[int]:
    start = 0
    for strip in strips:
        yield start
        start += len(strip)


def put(path: Path, content: bytes, overwrite: bool) -> None:
    """Writes beside the place, then moves it there: a reader sees the whole file or none.

    Raises:
        FileExistsError: something is there, and it shall stay.
        UserError: it cannot be written.
    """
    part = path.with_name(f".{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(part, path)
        else:
            move(part, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}; free some space or choose another place"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def move(part: Path, path: Path) -> None:
    """Unlike a rename, a link fails if something is there, at that very moment too."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except (OSError, AttributeError, NotImplementedError):  # no links on this file system
        if os.path.lexists(path):
            raise FileExistsError from None
        os.replace(part, path)
