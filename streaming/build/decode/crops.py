"""Choose a part of an image, and decode little more of a JPEG than that part.

This uses the features of libjpeg-turbo that Python packages offer: a JPEG is decoded at half, a quarter or an eighth of
its size, if the part is then still as large as wanted, and without the rows below the part. Rows above and columns
beside it cannot be left out (``docs/design/0053-crops.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg

from streaming.errors import ConfigError
from streaming.types import ReadBuffer

_ATTEMPTS = 10
"""Maximum number of draws of a part that must fit into the image, as in torchvision."""
_ONLY_ROWS_LEFT = "extraneous bytes before marker 0xd9"
"""The only warning of libjpeg for a JPEG whose header states fewer rows than it has: more data before its end."""


class PixelBox(NamedTuple):
    """Part of an image: rows ``[y, y + height)``, columns ``[x, x + width)``."""

    y: int
    x: int
    height: int
    width: int

    def shrink(self, size: tuple[int, int]) -> int:
        """Return the largest factor (8, 4, 2 or 1) by which a JPEG can shrink while the part is at least of ``size``.

        The other eighths take longer than all pixels (7/8 of 400 x 400: 1.44 ms, 8/8: 0.86).
        """
        return next(
            by for by in (8, 4, 2, 1) if by == 1 or (self.height >= by * size[0] and self.width >= by * size[1])
        )

    def on_grid(self, size: tuple[int, int]) -> PixelBox:
        """Return the part with edges that still lie between pixels after scaling down: up to 7 pixels smaller."""
        by = self.shrink(size)
        y, x, height, width = (edge // by * by for edge in self)
        return PixelBox(y, x, height, width)

    def of(self, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return this part of ``pixels`` [H, W, ...], a view."""
        return pixels[self.y : self.y + self.height, self.x : self.x + self.width]


Chooser: TypeAlias = Callable[[int, int], PixelBox]
"""Returns the wanted part of an upright image, given its height and width."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPart:
    """Draw a part of random area, shape and position, like torchvision's ``RandomResizedCrop``.

    Attributes:
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width / height; its logarithm is drawn.

    Raises:
        ConfigError: A bound is not positive, the lower exceeds the upper, or ``scale`` exceeds 1.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, bounds, most in (("scale", self.scale, 1.0), ("ratio", self.ratio, math.inf)):
            pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(_is_number(one) for one in bounds)
            if not pair or not 0 < bounds[0] <= bounds[1] <= most or not math.isfinite(bounds[1]):
                raise ConfigError(
                    f"random_crop: {name}={bounds!r}: expected a lower and an upper bound, positive"
                    f"{' and at most 1' if most == 1 else ''}, such as {(0.08, 1.0) if most == 1 else (0.75, 1.33)}"
                )

    def drawn(self, rng: np.random.Generator) -> Chooser:
        """Return a function that chooses the same part of all images of equal size."""
        return partial(self._chosen, rng.random((_ATTEMPTS, 4)).tolist())

    def _chosen(self, numbers: list[list[float]], height: int, width: int) -> PixelBox:
        """Return the first drawn part that fits into the image; if none fits, the largest middle with a valid ratio."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for area, shape, down, right in numbers:
            pixels = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + shape * (high - low))
            rows, columns = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
            if 0 < rows <= height and 0 < columns <= width:
                return PixelBox(int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns)
        rows = max(1, min(height, round(width / self.ratio[0])))
        columns = max(1, min(width, round(height * self.ratio[1])))
        return _middle(height, width, rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterPart:
    """Take the middle of an image, in the shape of ``size``.

    Attributes:
        size: Height and width; only their ratio counts.
        share: Share of the largest such part along each axis; 224 / 256 equals torchvision's ``Resize(256)`` and
            ``CenterCrop(224)``.

    Raises:
        ConfigError: ``share`` is not above 0 and at most 1.
    """

    size: tuple[int, int]
    share: float = 224 / 256

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigError(f"center_crop: share={self.share!r}: expected a number above 0 and at most 1")

    def __call__(self, height: int, width: int) -> PixelBox:
        """Return the middle of an image."""
        unit = min(height / self.size[0], width / self.size[1]) * self.share
        rows, columns = (
            max(1, min(most, round(unit * part))) for most, part in zip((height, width), self.size, strict=True)
        )
        return _middle(height, width, rows, columns)


def _middle(height: int, width: int, rows: int, columns: int) -> PixelBox:
    return PixelBox((height - rows) // 2, (width - columns) // 2, rows, columns)


def jpeg_part(
    data: ReadBuffer, whole: tuple[int, int], box: PixelBox, size: tuple[int, int], colorspace: str
) -> npt.NDArray[np.uint8] | None:
    """Decode a part of a JPEG, at the smallest scale at which the part is at least of ``size``.

    Args:
        data: The JPEG.
        whole: Height and width of the JPEG.
        box: The part, ``on_grid``.
        size: Height and width to which the part will be resized.
        colorspace: The name that simplejpeg uses.

    Returns:
        The part, uint8 ``[h, w, C]``, perhaps a view of a larger array; None if the JPEG is damaged or unusual.
    """
    height, width = whole
    shrink = box.shrink(size)
    below = box.y + box.height + 2 * shrink  # colors at the border of two rows of blocks depend on both
    shorter = _with_rows(data, below) if below < height else None
    rows = height if shorter is None else shorter[1]
    shape = (-(-rows // shrink), -(-width // shrink))
    pixels = np.empty((*shape, _CHANNELS[colorspace]), np.uint8)
    try:
        simplejpeg.decode_jpeg(
            data if shorter is None else shorter[0],
            colorspace=colorspace,
            min_height=shape[0],
            min_width=shape[1],
            buffer=pixels,
        )
    except ValueError as error:
        if shorter is None or not str(error).endswith(_ONLY_ROWS_LEFT):
            return None
    part: npt.NDArray[np.uint8] = PixelBox(*(edge // shrink for edge in box)).of(pixels)
    return part


_CHANNELS = {"RGB": 3, "RGBA": 4, "GRAY": 1}
_ROWS_OF_BLOCKS = 16  # the height of a row of blocks, or a multiple of it, unless sampling factors are odd


def _with_rows(data: ReadBuffer, least: int) -> tuple[bytearray, int] | None:
    """Return a copy of a JPEG whose header states fewer rows, at least ``least``, and their number; None: impossible.

    So the decoder stops early, and reports the rest as extra bytes. The JPEG must have one scan, from top to bottom,
    without restart markers: between markers, libjpeg may also find extra bytes in damaged data.
    """
    view, at, frame, components = memoryview(data), 2, 0, 0
    while at + 10 <= len(view) and view[at] == 0xFF:
        marker = view[at + 1]
        if marker in {0xC0, 0xC1}:
            frame, components = at, view[at + 9]
            if any(factors & 15 > 2 for factors in bytes(view[at + 11 : at + 10 + 3 * components])[::3]):
                return None
        elif marker == 0xDD and (view[at + 4] or view[at + 5]):
            return None
        elif marker == 0xDA:
            break
        at += 2 + (view[at + 2] << 8 | view[at + 3])
    else:
        return None
    rows = -(-least // _ROWS_OF_BLOCKS) * _ROWS_OF_BLOCKS
    if not frame or view[at + 4] != components or rows >= (view[frame + 5] << 8 | view[frame + 6]):
        return None
    copied = bytearray(data)
    copied[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
    return copied, rows
