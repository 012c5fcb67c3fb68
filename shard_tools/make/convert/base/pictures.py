"""Convert rows of pixels, and lists of files in one value, to image files that decoders read."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
from PIL import Image

from streaming.errors import DataError

_PNG_MODES = {"L": 8, "LA": 16, "RGB": 24, "RGBA": 32, "I;16": 16}  # bits per pixel
_TIFF_MODES = {"I": 32, "F": 32, "CMYK": 32, "YCbCr": 24, "LAB": 24}
_HEADER = struct.Struct("<3I")
_MOST_IMAGES = 10_000  # in one value; each becomes a field, and readers accept 16,384 fields


def pixel_type(data: bytes) -> str:
    """Return the type of a lossless file for these pixels, ``png`` or ``tif``.

    Raises:
        DataError: The image is damaged, or neither type supports its mode.
    """
    mode = _parse(data)[0]
    return "tif" if mode in _TIFF_MODES else "png"


def encode_pixels(data: bytes) -> bytes:
    """Encode an image (width, height and length of the mode as uint32, the mode, rows of pixels) as a lossless file.

    Modes with a palette come without the palette, so their indices become shades of gray.

    Raises:
        DataError: It is damaged, or no lossless file supports its mode.
    """
    mode, width, height, pixels = _parse(data)
    image = Image.frombytes("L" if mode == "P" else mode, (width, height), pixels)
    out = io.BytesIO()
    image.save(out, "TIFF" if mode in _TIFF_MODES else "PNG")
    return out.getvalue()


def _parse(data: bytes) -> tuple[str, int, int, bytes]:
    if len(data) < _HEADER.size:
        raise DataError(f"an image of {len(data)} bytes, which is too short for its size and mode")
    width, height, length = _HEADER.unpack_from(data)
    mode = data[_HEADER.size : _HEADER.size + min(length, 16)].decode("ascii", "replace")
    bits = {"1": 1, "P": 8, **_PNG_MODES, **_TIFF_MODES}.get(mode)
    if bits is None:
        raise DataError(f"an image of mode {mode!r}, which no file keeps without loss")
    pixels = data[_HEADER.size + length :]
    expected = height * -(-width * bits // 8)
    if not expected or len(pixels) != expected:
        raise DataError(f"an image of {width} x {height} pixels {mode} with {len(pixels)} bytes, expected {expected}")
    return mode, width, height, pixels


def split_images(data: bytes, *, at: int) -> list[bytes]:
    """Split a list of images: their number at byte ``at``, then their sizes (uint32), then the images.

    Raises:
        DataError: Numbers and sizes do not match the bytes.
    """
    num_images = int.from_bytes(data[at : at + 4], "little")
    start = at + 4 + 4 * num_images
    if len(data) < start or num_images > _MOST_IMAGES:
        raise DataError(f"a list of {num_images} images in {len(data)} bytes; damaged?")
    ends = start + np.cumsum(np.frombuffer(data, "<u4", num_images, at + 4), dtype=np.int64)
    if (int(ends[-1]) if num_images else start) != len(data):
        raise DataError(f"a list of {num_images} images whose sizes are not those of its {len(data)} bytes; damaged?")
    begins = [start, *ends.tolist()]
    return [data[begin:end] for begin, end in itertools.pairwise(begins)]
