"""Decode images, or parts of them: JPEG by simplejpeg (libjpeg-turbo, without the interpreter lock), others by Pillow.

The content decides, not the name: a PNG called ``.jpg`` is decoded as PNG. Width and height are read from
the header and compared with the limit before a pixel is decoded.

Images are returned upright: the EXIF orientation is applied, unless ``upright=False``.

Not supported: color profiles are ignored, transparency is dropped and not blended, and only the first of several frames
is decoded. Sixteen bits per channel become eight by dropping the low byte, except in the mode ``gray16``.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import re
import reprlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from streaming.build.decode.crops import CenterPart, Chooser, PixelBox, RandomPart, jpeg_part
from streaming.build.decode.upright import AVIF, AVIF_READER, orientation_of, stored_box, turned
from streaming.errors import ConfigError
from streaming.types import ReadBuffer

MAX_PIXELS = 2**27
"""Default limit on width x height: 402 MB as RGB. Aerial and medical images may need a larger ``max_pixels``."""

LINEAR_UP_TO = 4 / 3
"""Largest reduction of an axis for which two taps suffice: every source pixel still counts. 400 x 400 JPEGs of 64 KB to
224 x 224: 1,110 to 1,150 images per CPU second, against 800 to 820 with area averages (benchmarks/bench_decode.py,
2026-11, x86-64 with 2 CPUs, under other load)."""

_MODES: dict[str, tuple[str, str | None, int, str]] = {  # (Pillow's mode, simplejpeg's, channels, type of the result)
    "rgb8": ("RGB", "RGB", 3, "uint8"),
    "gray8": ("L", "GRAY", 1, "uint8"),
    "rgba8": ("RGBA", "RGBA", 4, "uint8"),
    "rgb": ("RGB", "RGB", 3, "float32"),
    "gray": ("L", "GRAY", 1, "float32"),
    "rgba": ("RGBA", "RGBA", 4, "float32"),
    "pil": ("RGB", "RGB", 3, "pil"),
    "index8": ("P", None, 1, "uint8"),
    "gray16": ("I;16", None, 1, "uint16"),
}
MODES = tuple(_MODES)

SAMPLED_UP_TO = 4
"""Largest reduction of an axis for which a part of an image is sampled at 2 x 2 points per new pixel. Random parts of
400 x 400 to 224 x 224 take 0.26 ms, area averages 0.55, and come closer to Pillow's filter (median 53.5 dB, 52.6)."""

_LIBRARY_PATH = "LD_LIBRARY_PATH"
_SPEC = re.compile(r"([a-z0-9]+)(?::(crop|center)?([0-9]+)x([0-9]+))?")


def _open_avif(data: io.BytesIO) -> ImageFile.ImageFile:
    if AVIF_READER is None:
        raise ValueError("an AVIF image, which this release of Pillow does not read; pip install 'pillow>=11.3'")
    return AVIF_READER(data)


# Pillow's Image.open would warn or refuse by a process-wide limit, and would try formats that start other programs
# (EPS). Only these readers are accepted, by the first bytes of a file.
_READERS: tuple[tuple[re.Pattern[bytes], Callable[[io.BytesIO], ImageFile.ImageFile]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), JpegImagePlugin.JpegImageFile),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), PngImagePlugin.PngImageFile),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), WebPImagePlugin.WebPImageFile),
    (re.compile(rb"GIF8[79]a"), GifImagePlugin.GifImageFile),
    (re.compile(rb"BM"), BmpImagePlugin.BmpImageFile),
    (re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+"), TiffImagePlugin.TiffImageFile),
    (re.compile(rb"P[1-6f]\s"), PpmImagePlugin.PpmImageFile),
    (AVIF, _open_avif),
    (re.compile(rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51"), Jpeg2KImagePlugin.Jpeg2KImageFile),
)
_CODESTREAM, _SIZES = b"\xff\x4f\xff\x51", struct.Struct(">4xHHIIII")  # of JPEG 2000: mark; marks, sizes and offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecoder:
    """Images of one mode and, if ``size`` is given, of one size.

    Attributes:
        mode: ``rgb8``, ``gray8``, ``rgba8``: uint8 ``[H, W, 3]``, ``[H, W]``, ``[H, W, 4]``. ``rgb``, ``gray``,
            ``rgba``: the same as float32 in 0..1. ``pil``: a loaded ``PIL.Image.Image`` in mode RGB. ``index8``: uint8
            ``[H, W]``, the numbers that a palette image (or a gray one of up to eight bits) stores, such as the classes
            of a mask. ``gray16``: uint16 ``[H, W]``, gray values of 16 bits, such as depths; values of fewer bits are
            scaled up to the full range.
        size: (height, width) to resize to, without keeping the aspect; None keeps the size. A JPEG is first
            decoded at the smallest of libjpeg's scales that is not below it. ``index8`` takes the nearest pixel.
        max_pixels: Largest height x width that is decoded.
        upright: Whether the EXIF orientation is applied.
        part: Chooses the part to take, which is resized to ``size``; None: all. Little more of a JPEG is decoded.
    """

    mode: str = "rgb8"
    size: tuple[int, int] | None = None
    max_pixels: int = MAX_PIXELS
    upright: bool = True
    part: Chooser | None = None

    accepts_buffer = True

    def __post_init__(self) -> None:
        """Reject invalid arguments.

        Raises:
            ConfigError: The mode is unknown, or a number is not positive.
        """
        if not isinstance(self.mode, str) or self.mode not in _MODES:
            raise ConfigError(f"image mode {reprlib.repr(self.mode)} is unknown; choose one of {', '.join(MODES)}")
        if self.max_pixels < 1 or not (self.size is None or _is_size(self.size)):
            raise ConfigError(
                f"image: size must be (height, width), whole numbers, and max_pixels positive, got {self.size!r} and "
                f"{self.max_pixels!r}"
            )
        if self.size is not None and int(self.size[0]) * int(self.size[1]) > (most := max(self.max_pixels, MAX_PIXELS)):
            raise ConfigError(f"image: size={self.size} has more than {most:,} pixels; choose a smaller one")
        if self.part is not None and self.size is None:
            raise ConfigError("image: a part needs size=(height, width), to which it is resized")

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Type of the returned arrays; None for ``pil``."""
        kind = _MODES[self.mode][3]
        return None if kind == "pil" else np.dtype(kind)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the returned arrays, if it is known in advance."""
        if self.size is None or self.dtype is None:
            return None
        channels = _MODES[self.mode][2]
        return self.size if channels == 1 else (*self.size, channels)

    def __call__(self, data: ReadBuffer) -> npt.NDArray[Any] | Image.Image:
        """Return the image, in new memory.

        Raises:
            ValueError: The data is not an image of a known kind, is damaged, or is larger than ``max_pixels``.
            Exception: Other errors of simplejpeg or Pillow.
        """
        pixels = self._decode(data)
        kind = _MODES[self.mode][3]
        if kind == "pil":
            return Image.fromarray(pixels)
        return pixels if kind.startswith("uint") else np.multiply(pixels, np.float32(1 / 255), dtype=np.float32)

    def into(self, data: ReadBuffer, out: npt.NDArray[Any]) -> None:
        """Write the image into ``out``, of ``shape`` and ``dtype``; raises as a call does."""
        pixels = self._decode(data, out)
        if pixels.dtype != out.dtype:
            np.multiply(pixels, np.float32(1 / 255), out=out)
        elif pixels is not out:
            np.copyto(out, pixels)

    def _decode(self, data: ReadBuffer, room: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the image as uint8 or uint16 ``[H, W(, C)]``, in ``room`` if resizing can write there directly."""
        orientation = orientation_of(data) if self.upright else 1
        size = self.size[::-1] if self.size is not None and orientation > 4 else self.size  # before it is turned
        is_jpeg = bytes(data[:3]) == b"\xff\xd8\xff"
        pixels = self._decode_jpeg(data, size, orientation) if is_jpeg and _MODES[self.mode][1] is not None else None
        if pixels is None:
            pixels = self._decode_pillow(data)
            box = self._box(pixels.shape[0], pixels.shape[1], orientation)
            pixels = pixels if box is None else box.of(pixels)
        if size is not None and pixels.shape[:2] != size:
            fits = room is not None and room.dtype == pixels.dtype and orientation == 1
            pixels = self._resized(pixels, size, room if fits else None)
        elif self.part is not None:
            pixels = np.ascontiguousarray(pixels)
        return turned(pixels, orientation)

    def _box(self, height: int, width: int, orientation: int) -> PixelBox | None:
        """Return the part to take of an image that is stored with ``height`` and ``width``; None: all of it."""
        if self.part is None or self.size is None:
            return None
        swap = orientation > 4
        part = self.part(width, height) if swap else self.part(height, width)
        return stored_box(part, orientation, height, width).on_grid(self.size[::-1] if swap else self.size)

    def _resized(
        self, pixels: npt.NDArray[Any], size: tuple[int, int], out: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        if self.mode == "index8":
            return nearest(pixels, size)
        return resize(pixels, size, out) if self.part is None else resample(pixels, size, out)

    def _decode_jpeg(
        self, data: ReadBuffer, size: tuple[int, int] | None, orientation: int
    ) -> npt.NDArray[np.uint8] | None:
        """Return the JPEG as stored, scaled as far down as ``size`` allows; None if Pillow has to decode it."""
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            return None
        self._check(height, width)
        if colorspace in {"CMYK", "YCCK"}:  # Pillow handles that Adobe stores them inverted
            return None
        min_height, min_width = size or (0, 0)
        wanted, box = str(_MODES[self.mode][1]), self._box(height, width, orientation)
        pixels: npt.NDArray[np.uint8] | None
        try:
            if box is None:
                pixels = simplejpeg.decode_jpeg(
                    data, colorspace=wanted, min_height=min(min_height, height), min_width=min(min_width, width)
                )
            else:
                pixels = jpeg_part(data, (height, width), box, (min_height, min_width), wanted)
        except ValueError:  # also for mere warnings of libjpeg, such as stray bytes before a marker
            return None
        return pixels[:, :, 0] if pixels is not None and pixels.shape[2] == 1 else pixels

    def _decode_pillow(self, data: ReadBuffer) -> npt.NDArray[Any]:
        check_sizes(data, self._check)
        with open_image(data) as image:
            self._check(image.height, image.width)
            if not self.upright and isinstance(image, TiffImagePlugin.TiffImageFile):
                raise ValueError("a TIFF is always returned upright, since Pillow turns it; leave upright=False out")
            if self.mode == "index8":
                return to_index8(image)
            return to_gray16(image) if self.mode == "gray16" else to_uint8(image, _MODES[self.mode][0])

    def _check(self, height: int, width: int) -> None:
        if height * width > self.max_pixels:
            raise ValueError(
                f"image of {height} x {width} pixels, more than the {self.max_pixels} allowed; "
                f"raise the limit with decode={{field: decode.image({self.mode!r}, max_pixels=...)}}"
            )


def _is_size(size: object) -> bool:
    """Return whether ``size`` is (height, width), both positive integers."""
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        return False
    return all(isinstance(one, (int, np.integer)) and not isinstance(one, bool) and one > 0 for one in size)


def image(
    mode: str = "rgb8", size: tuple[int, int] | None = None, *, max_pixels: int = MAX_PIXELS, upright: bool = True
) -> ImageDecoder:
    """Make a decoder of images into ``mode``, resized to ``size`` (height, width), and turned upright.

    Raises:
        ConfigError: The mode is unknown, or a number is not positive.
    """
    return ImageDecoder(mode=mode, size=size, max_pixels=max_pixels, upright=upright)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCropDecoder:
    """Images of one size, each resized from a random part of an image.

    Attributes:
        images: Decoder of the parts.
        part: Draws a part.
    """

    images: ImageDecoder
    part: RandomPart = RandomPart()  # noqa: RUF009  frozen

    accepts_buffer = True

    def __post_init__(self) -> None:
        """Reject images without a size.

        Raises:
            ConfigError: There is no size.
        """
        if self.images.size is None:
            raise ConfigError("random_crop: a part needs size=(height, width), to which it is resized")

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """See ``ImageDecoder``."""
        return self.images.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """See ``ImageDecoder``."""
        return self.images.shape

    def with_rng(self, rng: np.random.Generator) -> ImageDecoder:
        """Return a decoder for one image, with a part drawn from ``rng``."""
        return replace(self.images, part=self.part.drawn(rng))

    def __call__(self, data: ReadBuffer) -> npt.NDArray[Any] | Image.Image:
        """Return the same part on every call: for tools, which have no position in an epoch."""
        return self.with_rng(np.random.Generator(np.random.PCG64(0)))(data)


def random_crop(
    mode: str = "rgb8", size: tuple[int, int] = (224, 224), *, scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3), max_pixels: int = MAX_PIXELS, upright: bool = True,
) -> RandomCropDecoder:  # fmt: skip
    """Make a decoder of a random part of each image, resized to ``size`` (height, width).

    Within a sample, images of equal size get the same part, so an image and its mask stay aligned.

    Args:
        mode: As in :func:`image`.
        size: Height and width.
        scale: Least and largest share of the image's area.
        ratio: Least and largest width / height.
        max_pixels: As in :func:`image`.
        upright: As in :func:`image`.

    Raises:
        ConfigError: The mode is unknown, or a number is out of range.
    """
    images = ImageDecoder(mode=mode, size=size, max_pixels=max_pixels, upright=upright)
    return RandomCropDecoder(images=images, part=RandomPart(scale=scale, ratio=ratio))


def center_crop(
    mode: str = "rgb8", size: tuple[int, int] = (224, 224), *, share: float = 224 / 256, max_pixels: int = MAX_PIXELS,
    upright: bool = True,
) -> ImageDecoder:  # fmt: skip
    """Make a decoder of the middle of each image, resized to ``size`` (height, width) without changing its aspect.

    ``share`` is the share of the largest such part along each axis.

    Raises:
        ConfigError: The mode is unknown, or a number is out of range.
    """
    images = ImageDecoder(mode=mode, size=size, max_pixels=max_pixels, upright=upright)
    return replace(images, part=CenterPart(size=size, share=share))


CROPS: dict[str, Callable[..., ImageDecoder | RandomCropDecoder]] = {"crop": random_crop, "center": center_crop}
"""Functions that make decoders of a part, by the word before the size."""


def parse_image_spec(spec: str) -> ImageDecoder | RandomCropDecoder | None:
    """Return the decoder of an image mode, such as ``"rgb8"``; None if ``spec`` is not an image mode.

    ``"rgb8:224x224"`` resizes to height x width, ``"rgb8:crop224x224"`` takes a random part, and
    ``"rgb8:center224x224"`` takes the middle.

    Raises:
        ConfigError: The size is zero.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or match[1] not in _MODES:
        return None
    if not match[3]:
        return image(match[1])
    return CROPS.get(match[2], image)(match[1], (int(match[3]), int(match[4])))


def has_one_shape(decoder: object) -> TypeGuard[ImageDecoder | RandomCropDecoder]:
    """Return whether a decoder makes images of one shape, and can write them into an array."""
    return isinstance(decoder, (ImageDecoder, RandomCropDecoder)) and decoder.shape is not None


def open_image(data: ReadBuffer) -> ImageFile.ImageFile:
    """Open a copy of ``data`` with the Pillow reader for its kind, without decoding it yet.

    Raises:
        ValueError: The first bytes do not belong to a supported image.
    """
    prefix = bytes(data[:16])
    for magic, reader in _READERS:
        if magic.match(prefix):
            return reader(io.BytesIO(data))
    raise ValueError(
        f"not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or PNM image: it starts with {prefix[:8]!r}"
    )


def to_uint8(image: Image.Image, mode: str) -> npt.NDArray[np.uint8]:
    """Return the pixels of ``image`` in Pillow's ``mode`` (L, RGB, RGBA): a new array ``[H, W(, C)]``.

    Raises:
        ValueError: The pixels have 32 bits, for which there is no standard conversion to eight.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in {"I", "F"}:
        raise ValueError(
            f"{image.format} image with 32-bit pixels is not supported; take it as bytes and decode it yourself"
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image if image.mode == mode else image.convert(mode))


def to_index8(image: ImageFile.ImageFile) -> npt.NDArray[np.uint8]:
    """Return the numbers that ``image`` stores for its pixels: uint8 ``[H, W]``, indices of its palette or gray values.

    Raises:
        ValueError: The image stores colors, more than eight bits, or inexact values (JPEG).
    """
    bits = _gray_bits(image)
    image.load()  # also turns a TIFF
    if image.mode not in {"1", "L", "P"} or image.format == "JPEG":
        raise ValueError(
            f"{image.format} image of Pillow's mode {image.mode} stores no numbers of up to eight bits for its pixels, "
            "which index8 takes: expected a palette or gray image, not JPEG; take colors as rgb8, 16 bits as gray16"
        )
    pixels = np.array(image, np.uint8)
    return pixels if bits is None else pixels // np.uint8(255 // (2**bits - 1))


def _gray_bits(image: ImageFile.ImageFile) -> int | None:
    """Return the bits per value of an unloaded gray PNG if they are 2 or 4, which Pillow scales to 255; else None."""
    stored = image.tile[0].args if image.tile else None
    rawmode = stored[0] if isinstance(stored, tuple) else stored
    return {"L;2": 2, "L;4": 4}.get(str(rawmode)) if image.format == "PNG" else None


def to_gray16(image: ImageFile.ImageFile) -> npt.NDArray[np.uint16]:
    """Return the gray values of ``image``: uint16 ``[H, W]``; values of fewer bits are scaled up to 65,535.

    Raises:
        ValueError: The image stores colors, a palette, or 32 bits.
    """
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"}):
        return np.array(image).astype(np.uint16)
    if image.mode in {"1", "L"}:
        return np.array(image.convert("L")).astype(np.uint16) * np.uint16(257)
    raise ValueError(
        f"{image.format} image of Pillow's mode {image.mode}: expected gray values of up to 16 bits; take colors as "
        "rgb8, a palette as index8, and 32 bits as bytes"
    )


def stored_size(data: ReadBuffer) -> tuple[int, int, int]:
    """Return the height and width of an encoded image once upright, and its orientation, without decoding pixels.

    Raises:
        ValueError: The data is not an image of a known kind, or its header is damaged.
        Exception: Other errors of Pillow.
    """
    orientation = orientation_of(data)
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        with open_image(data) as image:
            height, width = image.height, image.width
            if isinstance(image, TiffImagePlugin.TiffImageFile):  # Pillow may have swapped its size already
                orientation = image.tag_v2.get(274, 1)
                height, width = image.tag_v2.get(257, height), image.tag_v2.get(256, width)
    return (width, height, orientation) if orientation > 4 else (height, width, orientation)


def nearest(pixels: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """Resize ``pixels`` ``[H, W]`` to ``size`` (height, width) by taking the pixel at the middle of each new one."""
    rows, columns = (
        ((2 * np.arange(new) + 1) * old // (2 * new)) for new, old in zip(size, pixels.shape[:2], strict=True)
    )
    picked: npt.NDArray[Any] = pixels[rows[:, None], columns]
    return picked


def resample(pixels: npt.NDArray[Any], size: tuple[int, int], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Resize as ``resize`` does, but from ``LINEAR_UP_TO`` to ``SAMPLED_UP_TO`` by the mean of 2 x 2 bilinear samples.

    Without OpenCV, Pillow's bilinear filter, which takes all pixels into account, serves for parts of all sizes.
    """
    ratio = max(old / new for old, new in zip(pixels.shape[:2], size, strict=True))
    cv2 = opencv()
    if not LINEAR_UP_TO < ratio <= SAMPLED_UP_TO:
        return resize(pixels, size, out)
    if cv2 is None:
        return _by_pillow(pixels, size, Image.Resampling.BILINEAR)
    twice = cv2.resize(pixels, (2 * size[1], 2 * size[0]), interpolation=cv2.INTER_LINEAR)
    sampled: npt.NDArray[Any] = cv2.resize(twice, (size[1], size[0]), dst=out, interpolation=cv2.INTER_AREA)
    return sampled


def resize(pixels: npt.NDArray[Any], size: tuple[int, int], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Resize ``pixels`` ``[H, W(, C)]``, uint8 or uint16, to ``size`` (height, width); into ``out``, if possible.

    Uses area averages if an axis shrinks by more than ``LINEAR_UP_TO`` and none grows, else bilinear: a JPEG
    scaled by libjpeg is mostly close enough, and bilinear takes a fifth of the time.

    Uses OpenCV (extra ``images``) if installed, else Pillow. The two differ slightly: for the same pixels
    on every machine, install the extra on all or on none.
    """
    height, width = size
    ratios = (pixels.shape[0] / height, pixels.shape[1] / width)
    area = max(ratios) > LINEAR_UP_TO and min(ratios) >= 1
    cv2 = opencv()
    if cv2 is not None:
        resized: npt.NDArray[Any] = cv2.resize(
            pixels, (width, height), dst=out, interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR
        )
        return resized
    method = Image.Resampling.BOX if area else Image.Resampling.BILINEAR
    return _by_pillow(pixels, size, method)


def _by_pillow(pixels: npt.NDArray[Any], size: tuple[int, int], method: Image.Resampling) -> npt.NDArray[Any]:
    height, width = size
    if pixels.dtype == np.uint16:  # Pillow resizes 16 bits as floats
        floats = Image.fromarray(pixels.astype(np.float32)).resize((width, height), method)
        return np.asarray(floats).round().astype(np.uint16)
    return np.array(Image.fromarray(pixels).resize((width, height), method))


@functools.cache
def opencv() -> Any | None:
    """Return the module ``cv2``, or None without the extra ``images``.

    Importing it changes the library path (``LD_LIBRARY_PATH``) for programs that this process starts; the change is
    undone here.
    """
    before = os.environ.get(_LIBRARY_PATH)
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None
    finally:
        if before is not None:
            os.environ[_LIBRARY_PATH] = before
        else:
            os.environ.pop(_LIBRARY_PATH, None)


def use_one_thread() -> None:
    """Keep OpenCV from starting threads: for processes that run side by side in large numbers."""
    cv2 = opencv()
    if cv2 is not None:
        cv2.setNumThreads(1)


def check_sizes(data: ReadBuffer, check: Callable[[int, int], None]) -> None:
    """Call ``check(height, width)`` for what Pillow's own size of an image does not tell.

    That is the canvas of an extended WebP, which it would allocate on opening, and the size of the pixels of a JPEG
    2000, which may be another than its header says.
    """
    at = _codestream_of(memoryview(data))
    if at is not None:
        sizes = bytes(data[at : at + _SIZES.size])
        if len(sizes) < _SIZES.size:
            raise ValueError("a JPEG 2000 that ends within its header")
        _, _, right, bottom, left, top = _SIZES.unpack(sizes)
        check(max(0, bottom - top), max(0, right - left))
    head = bytes(data[:30])
    if len(head) == 30 and head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X":
        width = int.from_bytes(head[24:27], "little") + 1
        check(int.from_bytes(head[27:30], "little") + 1, width)


def _codestream_of(view: memoryview) -> int | None:
    """Return where the pixels of a JPEG 2000 begin; None: it is none, or has none."""
    if bytes(view[:4]) == _CODESTREAM:
        return 0
    at = 0
    while bytes(view[4:8]) == b"jP  " and at + 8 <= len(view):
        size, begin = int.from_bytes(view[at : at + 4], "big"), at + 8
        if size == 1:
            size, begin = int.from_bytes(view[at + 8 : at + 16], "big"), at + 16
        if bytes(view[at + 4 : at + 8]) == b"jp2c":
            return begin
        if size < begin - at:  # the last box, or none
            return None
        at += size
    return None
