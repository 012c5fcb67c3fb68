"""Choose the clip to decode from a stream of sound or pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from streaming.build.decode.streams.files import Encoded
from streaming.common.arguments import format_bytes
from streaming.errors import ConfigError

FIRST_SHARE: Final = 0.5
"""The draw in tools, which have no position in an epoch."""
MAX_BYTES: Final = 2**30
"""Default limit on the decoded size of one value, equal to that of ``.npz``."""


_READ_WHOLE: Final = frozenset(("mp2", "mp3", "mpga"))
"""Fields whose streams have no table of frames, so everything before a clip must be read (docs/design/0055)."""


Start: TypeAlias = Literal["random", "first", "center"] | float
"""Where a clip begins; a number is a second of the stream."""
Short: TypeAlias = Literal["pad", "keep", "refuse"]
"""What to do with a clip that extends beyond the end of its stream."""


def begin_of(start: Start, share: float, room: float, second: float) -> float:
    """Return the start of a clip, in a unit such as samples.

    Args:
        start: The user's option.
        share: Random number in [0, 1).
        room: Last possible start.
        second: Number of units per second.
    """
    if isinstance(start, str):
        return max(0.0, room) * {"random": share, "center": 0.5, "first": 0.0}[start]
    return round(start * second, 6)


@dataclass(frozen=True, slots=True)
class DrawnClip:
    """Decode the clip of one sample.

    Attributes:
        take: Decodes the clip at a share, 0 to 1, of all possible starts.
        share: The share drawn for the sample.
    """

    take: Callable[[Encoded, float], object]
    share: float

    accepts_buffer: ClassVar[bool] = True

    def __call__(self, data: Encoded) -> object:
        """Return the clip."""
        return self.take(data, self.share)


def checked_start(name: str, start: object, short: object, *, is_clip: bool) -> None:
    """Refuse invalid values of ``start`` and ``short``, and those without effect.

    Raises:
        ConfigError: A value is invalid or has no effect.
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
    """Refuse invalid values of ``reads_ranges``, and ranges of a whole stream.

    Raises:
        ConfigError: The value is invalid.
    """
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"{name}: reads_ranges={given!r}: expected True, False, or None for where it pays")
    if given and not is_part:
        raise ConfigError(
            f"{name}: reads_ranges=True reads the bytes around a clip, but a whole stream takes all; write seconds= "
            "for a clip, or leave it out"
        )


def pays(given: bool | None, field: str, *, is_clip: bool) -> bool:  # noqa: FBT001  the user's option
    """Return whether large streams of a field are read in ranges: ``given``, or by default for clips except of MP3."""
    if given is not None:
        return given
    return is_clip and field.lower().rpartition(".")[2] not in _READ_WHOLE


def checked_number(name: str, option: str, value: object, *, whole: bool) -> None:
    """Check that a value is a positive number or None.

    Raises:
        ConfigError: It is not.
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
        ValueError: The value would be too large.
    """
    if num_bytes > max_bytes:
        raise ValueError(
            f"{what} would take {format_bytes(num_bytes)}, more than the {format_bytes(max_bytes)} allowed; take a "
            "clip of it, or raise the bound with max_bytes="
        )


def check_begin(start: Start, lasts_s: float) -> None:
    """Refuse a start at or after the end of the stream.

    Raises:
        ValueError: The stream has ended by then.
    """
    if not isinstance(start, str) and start > 0 and start >= lasts_s:
        raise ValueError(f"the clip begins at second {start:g}, and the stream lasts {lasts_s:.3f} s")


def too_short(length: float, wanted: float, unit: str) -> ValueError:
    """Return the error for a stream shorter than the clip, under ``short="refuse"``."""
    return ValueError(
        f"the stream has {length:g} {unit} from the start of the clip on, fewer than the {wanted:g} wanted, and "
        'short="refuse"; write short="pad" for zeros at the end, or "keep" for shorter clips'
    )
