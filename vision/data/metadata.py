"""What a picture file tells beside its pixels: camera and place (EXIF), colour profile (ICC), XMP, resolution."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from vision.data.images import MAX_PIXELS, open_image
from vision.errors import ImageError

EXIF, GPS, ORIENTATION, WIDTH, HEIGHT = 34665, 34853, 274, 40962, 40963
XMP, ICC, RESOLUTION = 700, 34675, (282, 283, 296)  # of a TIFF
# Tags of a TIFF that say how its pixels lie, which holds for that file only: sizes, strips, tiles, tables, thumbnails.
STRUCTURE = {*range(254, 267), *range(273, 285), *range(288, 294), *RESOLUTION, 297, 301, *range(317, 348), *range(512, 533)}
STRUCTURE |= {XMP, ICC}
# Chunks of a PNG that hold for a copy too: what its numbers mean as colours, and texts.
PNG_CHUNKS = {b"gAMA", b"cHRM", b"sRGB", b"cICP", b"mDCV", b"cLLI", b"tEXt", b"zTXt", b"iTXt"}
DAMAGED = "its EXIF is damaged and left out"


@dataclass
class Metadata:
    """What a picture file tells beside its pixels, as it holds for the picture turned upright.

    Attributes:
        format: "JPEG", "PNG", ...; not a file's name but its content tells it.
        exif: tags by number, those of the camera and of the place in dicts of their own.
        icc: the colour profile.
        xmp: the XML of editing programs.
        dpi: pixels an inch, across and down.
        lossless: a WebP that is so.
        chunks: of a PNG, as they stand in it: gamma and other meanings of its colours, texts.
        notes: what is there and could not be read.
    """

    format: str = "PNG"
    exif: dict[int, Any] = field(default_factory=dict)
    icc: bytes | None = None
    xmp: bytes | None = None
    dpi: tuple[float, float] | None = None
    lossless: bool = False
    chunks: bytes = b""
    notes: list[str] = field(default_factory=list)

    def exif_for(self, size: tuple[int, int]) -> dict[int, Any]:
        """The tags of a picture of this width and height."""
        camera = dict(self.exif.get(EXIF) or {})
        camera |= {tag: side for tag, side in zip((WIDTH, HEIGHT), size, strict=True) if tag in camera}
        return self.exif | ({EXIF: camera} if camera else {})


def read_metadata(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Metadata:
    """What the file tells beside its pixels; `read_image` reads those.

    Raises:
        ImageError: as `read_image`, and for what would not be whole with one picture of plain colours: an animation, several
            pages, CMYK.
    """
    with open_image(path, max_pixels) as picture:
        frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)  # a phone's photo with others behind it
        if frames > 1:
            raise ImageError(path, f"it has {frames} frames or pages; save each as a picture of its own")
        if picture.mode == "CMYK":
            raise ImageError(path, "CMYK needs its colour profile to become RGB; convert it with an image editor first")
        exif, notes = read_exif(picture)
        info = picture.info
        kind = {"MPO": "JPEG"}.get(str(picture.format), str(picture.format))
        return Metadata(
            kind,
            exif,
            icc=info.get("icc_profile") or None,
            xmp=upright(info.get("xmp")),
            dpi=resolution(info.get("dpi")) if is_told(picture) else None,
            lossless=kind == "WEBP" and is_lossless(path),
            chunks=png_chunks(path) if kind == "PNG" else b"",
            notes=notes,
        )


def is_lossless(path: str | Path) -> bool:
    """Whether the pixels of a WebP file stand in a chunk of the lossless kind."""
    with open(path, "rb") as file:
        file.seek(12)
        while len(header := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", header)
            if name in (b"VP8L", b"VP8 "):
                return name == b"VP8L"
            file.seek(length + length % 2, 1)
    return False


def png_chunks(path: str | Path) -> bytes:
    """The `PNG_CHUNKS` of a file that are whole, one after the other; XMP is left out, which is read as such."""
    kept = []
    with open(path, "rb") as file:
        file.seek(8)
        while len(header := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", header)
            if name not in PNG_CHUNKS:
                file.seek(length + 4, 1)
                continue
            content = file.read(length + 4)
            is_whole = len(content) == length + 4 and zlib.crc32(name + content[:-4]) == int.from_bytes(content[-4:], "big")
            if is_whole and not content.startswith(b"XML:com.adobe.xmp\0"):
                kept.append(header + content)
    return b"".join(kept)


def is_told(picture: Image.Image) -> bool:
    """Whether the file has a resolution: of a TIFF without one, Pillow says 1 pixel an inch."""
    return RESOLUTION[0] in getattr(picture, "tag_v2", {RESOLUTION[0]: 0})


def read_exif(picture: Image.Image) -> tuple[dict[int, Any], list[str]]:
    try:
        read = picture.getexif()
        tags = {tag: value for tag, value in read.items() if tag not in STRUCTURE and tag not in (EXIF, GPS)}
        tags = as_written(tags)
        groups = {tag: as_written(read.get_ifd(tag)) for tag in (EXIF, GPS)}
        if ExifTags.IFD.Interop in groups[EXIF]:
            groups[EXIF][ExifTags.IFD.Interop] = as_written(read.get_ifd(ExifTags.IFD.Interop))
        found = tags | {tag: group for tag, group in groups.items() if group}
        exif_bytes(found)  # some damage shows only here
        is_lost = not read and bool(picture.info.get("exif"))  # Pillow has only warned
        return found | ({ORIENTATION: 1} if ORIENTATION in read else {}), [DAMAGED] * is_lost
    except Exception:  # damaged bytes bring any of them
        return {}, [DAMAGED]


def as_written(tags: Mapping[int, Any]) -> dict[int, Any]:
    """Texts as bytes where they are not ASCII: Pillow reads each byte as a letter, and writes such letters as '?'."""
    return {tag: v.encode("latin-1") if isinstance(v, str) and not v.isascii() else v for tag, v in tags.items()}


def resolution(dpi: Any) -> tuple[float, float] | None:
    if isinstance(dpi, tuple) and len(dpi) == 2 and all(0 < float(number) < 1e6 for number in dpi):
        return float(dpi[0]), float(dpi[1])
    return None  # nonsense, or not told


def upright(xmp: Any) -> bytes | None:
    """The XML, with its orientation as that of a picture that is turned."""
    if not xmp:
        return None
    return re.sub(rb"(tiff:Orientation\s*(?:=\s*[\"']|>))\d", rb"\g<1>1", xmp if isinstance(xmp, bytes) else str(xmp).encode())


def exif_bytes(tags: dict[int, Any]) -> bytes:
    exif = Image.Exif()
    exif.update(tags)
    return exif.tobytes()
