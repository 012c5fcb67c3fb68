"""Turn images upright: find the orientation that a camera recorded beside the pixels, and apply it.

The orientation is entry 274 of the EXIF block (EXIF 2.32, section 4.6.4): a segment APP1 in JPEG, a chunk ``eXIf`` in
PNG, a chunk ``EXIF`` in WebP. It is read here for all formats, by one rule, without a library's parser: most images
have no orientation, and a scan of the segments takes a few microseconds. Pillow turns TIFFs itself, and converts the
properties of AVIF, which has its own for orientation, to the same entry.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ImageFile

from streaming.build.decode.crops import PixelBox
from streaming.types import ReadBuffer

AVIF = re.compile(rb"....ftypavi[fs]", re.DOTALL)
"""What an AVIF begins with."""


def _avif_reader() -> Callable[[io.BytesIO], ImageFile.ImageFile] | None:
    try:
        found: Callable[[io.BytesIO], ImageFile.ImageFile] = importlib.import_module(
            "PIL.AvifImagePlugin"
        ).AvifImageFile
    except ImportError:
        return None
    return found


AVIF_READER = _avif_reader()
"""Pillow's reader, of releases that have it: 11.3 and later."""
_TAG = 274
_EXIF = b"Exif\0\0"
_TURNS: dict[int, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}


def orientation_of(data: ReadBuffer) -> int:
    """Return the orientation of an encoded JPEG, PNG, WebP or AVIF, 1 to 8; 1 (upright) if it states none.

    From 5 on, the upright image is as high as the stored one is wide.
    """
    view = memoryview(data)
    start = bytes(view[:12])
    if start.startswith(b"\xff\xd8"):
        blocks = _jpeg_blocks(view)
    elif start.startswith(b"\x89PNG\r\n\x1a\n"):
        blocks = _png_blocks(view)
    elif start.startswith(b"RIFF") and start.endswith(b"WEBP"):
        blocks = _webp_blocks(view)
    elif AVIF.match(start):
        return _avif_orientation(data)
    else:
        return 1
    for block in blocks:
        if found := _orientation_in(block):
            return found
    return 1


def _avif_orientation(data: ReadBuffer) -> int:
    if AVIF_READER is None:
        return 1  # which is said when it is decoded
    with AVIF_READER(io.BytesIO(data)) as image:
        value = image.getexif().get(_TAG, 1)
    return value if value in range(1, 9) else 1


def turned(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Return ``pixels`` [H, W, ...] upright: unchanged, or a contiguous copy."""
    turn = _TURNS.get(orientation)
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def stored_box(box: PixelBox, orientation: int, height: int, width: int) -> PixelBox:
    """Return the box in the stored image, of ``height`` and ``width``, for a part of the upright one."""
    y, x, rows, columns = (box.x, box.y, box.width, box.height) if orientation > 4 else box
    if orientation in {3, 4, 6, 7}:
        y = height - y - rows
    if orientation in {2, 3, 7, 8}:
        x = width - x - columns
    return PixelBox(y, x, rows, columns)


def _jpeg_blocks(view: memoryview) -> Iterator[memoryview]:
    """Yield the EXIF blocks; application segments come before all others except comments."""
    at = 2
    while at + 4 <= len(view) and view[at] == 0xFF and (0xE0 <= (marker := view[at + 1]) <= 0xEF or marker == 0xFE):
        stop = at + 2 + (view[at + 2] << 8 | view[at + 3])
        if marker == 0xE1 and bytes(view[at + 4 : at + 10]) == _EXIF:
            yield view[at + 10 : stop]
        at = max(stop, at + 4)


def _png_blocks(view: memoryview) -> Iterator[memoryview]:
    if b"eXIf" not in bytes(view):  # faster than walking from chunk to chunk, in vain for most images
        return
    at = 8
    while at + 12 <= len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        if bytes(view[at + 4 : at + 8]) == b"eXIf":
            yield view[at + 8 : at + 8 + size]
        at += size + 12


def _webp_blocks(view: memoryview) -> Iterator[memoryview]:
    if bytes(view[12:16]) != b"VP8X":  # a simple file has only the image chunk
        return
    at = 12
    while at + 8 <= len(view):
        size = int.from_bytes(view[at + 4 : at + 8], "little")
        if bytes(view[at : at + 4]) == b"EXIF":
            block = view[at + 8 : at + 8 + size]
            yield block[6:] if bytes(block[:6]) == _EXIF else block  # some programs write JPEG's prefix here, too
        at += 8 + size + size % 2


def _orientation_in(block: memoryview) -> int:
    """Return entry 274 of the first directory of an EXIF block, 1 to 8; 0 if there is none."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(bytes(block[:4]))
    if order is None:
        return 0

    def number(at: int, num_bytes: int) -> int:
        return int.from_bytes(block[at : at + num_bytes], "little" if order == "little" else "big")

    first = number(4, 4)
    last = min(first + 2 + 12 * number(first, 2), len(block) - 11)
    for at in range(first + 2, last, 12):
        if number(at, 2) == _TAG:
            value = number(at + 8, 4 if number(at + 2, 2) == 4 else 2)
            return value if 1 <= value <= 8 else 0
    return 0
