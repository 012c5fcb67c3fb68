"""Say which part of a stream of sound or pictures is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from streaming.build.decode.streams.files import Encoded
from streaming.common.arguments import format_bytes
from streaming.errors import ConfigError

FIRST_SHARE: Final = 0.5
"""What tools draw, which have no place in an epoch."""
MAX_BYTES: Final = 2**30
"""Default bound on what one value may decode to, as that of ``.npz``."""


_READ_WHOLE: Final = frozenset(("mp2", "mp3", "mpga"))
"""Fields whose streams have no table of their frames, so that all before a clip is read (docs/design/0072)."""


Start: TypeAlias = Literal["random", "first", "center"] | float
"""Where a clip begins; a number is a second of the stream."""
Short: TypeAlias = Literal["pad", "keep", "refuse"]
"""What becomes of a clip that goes beyond the end of its stream."""


def begin_of(start: Start, share: float, room: float, second: float) -> float:
    """Return where a clip begins, in a unit of which ``second`` make a second.

    Args:
        start: As the user said.
        share: What was drawn, from 0 up to, not including, 1.
        room: Up to where it can begin.
        second: Length of a second.
    """
    if isinstance(start, str):
        return max(0.0, room) * {"random": share, "center": 0.5, "first": 0.0}[start]
    return round(start * second, 6)


@dataclass(frozen=True, slots=True)
class DrawnClip:
    """Decode the clip of one sample.

    Attributes:
        take: Decodes the clip that begins at a share of all places where it can.
        share: What was drawn for the sample.
    """

    take: Callable[[Encoded, float], object]
    share: float

    accepts_buffer: ClassVar[bool] = True

    def __call__(self, data: Encoded) -> object:
        """Return the clip."""
        return self.take(data, self.share)


def checked_start(name: str, start: object, short: object, *, is_clip: bool) -> None:
    """Refuse places and words that are none, and those that would not act.

    Raises:
        ConfigError: There is one.
    """
    is_second = isinstance(start, int | float) and not isinstance(start, bool) and 0 <= start < math.inf
    if start is not None and start not in ("random", "first", "center") and not is_second:
        raise ConfigError(
            f'{name}: start={start!r}: expected "random", "first", "center", or a second from 0 on, such as 1.5'
        )
    if short is not None and short not in ("pad", "keep", "refuse"):
        raise ConfigError(f'{name}: short={short!r}: expected "pad", "keep" or "refuse"')
    if not is_clip and (start in ("random", "center") or short is not None):
        raise ConfigError(
            f"{name}: start={start!r}, short={short!r} say which clip is taken, but no length is given; write seconds= "
            "or leave them out"
        )


def checked_ranges(name: str, given: object, *, is_part: bool) -> None:
    """Refuse what is no choice, and ranges of a whole stream.

    Raises:
        ConfigError: It is one of them.
    """
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"{name}: reads_ranges={given!r}: expected True, False, or None for where it pays")
    if given and not is_part:
        raise ConfigError(
            f"{name}: reads_ranges=True reads the bytes around a clip, but a whole stream takes all; write seconds= "
            "for a clip, or leave it out"
        )


def pays(given: bool | None, field: str, *, is_clip: bool) -> bool:  # noqa: FBT001  as the user said
    """Tell whether large streams of a field are read in ranges: as ``given``, or by default clips, except of MP3."""
    if given is not None:
        return given
    return is_clip and field.lower().rpartition(".")[2] not in _READ_WHOLE


def checked_number(name: str, option: str, value: object, *, whole: bool) -> None:
    """Refuse what is no positive number.

    Raises:
        ConfigError: It is none.
    """
    kinds = int if whole else int | float
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < math.inf):
        return
    raise ConfigError(
        f"{name}: {option}={value!r}: expected a positive {'whole number' if whole else 'number'}, or None"
    )


def check_bytes(num_bytes: int, max_bytes: int, what: str) -> None:
    """Refuse a value that would be too large, before it is allocated.

    Raises:
        ValueError: It is.
    """
    if num_bytes > max_bytes:
        raise ValueError(
            f"{what} would take {format_bytes(num_bytes)}, more than the {format_bytes(max_bytes)} allowed; take a "
            "clip of it, or raise the bound with max_bytes="
        )


def check_begin(start: Start, lasts_s: float) -> None:
    """Refuse a second at which the stream has ended.

    Raises:
        ValueError: It has.
    """
    if not isinstance(start, str) and start > 0 and start >= lasts_s:
        raise ValueError(f"the clip begins at second {start:g}, and the stream lasts {lasts_s:.3f} s")


def too_short(length: float, wanted: float, unit: str) -> ValueError:
    """Make the error of a stream that is shorter than the clip, under ``short="refuse"``."""
    return ValueError(
        f"the stream has {length:g} {unit} from where the clip begins, fewer than the {wanted:g} wanted, and "
        'short="refuse"; write short="pad" for zeros at the end, or "keep" for shorter clips'
    )
