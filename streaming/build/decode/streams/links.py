"""Say of which links a file of sound consists, and what is decoded before a moment so that the moment is right.

A file may hold several streams one behind the other, a *chain* of *links*: a recording of a radio station, or what
``cat a.ogg b.ogg`` makes. libsndfile reads the first alone and says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from streaming.build.decode.streams.files import WatchedFile


def _lead_of_mp3(rate: int, channels: int) -> float:
    """Return how far back a frame of MP3 reaches, in seconds.

    It takes its bits from bytes of the frames before it, up to 511 (MPEG 1) or 255 (MPEG 2): the reservoir. The
    smallest frames, of pauses in streams of varying rate, hold few each, so these are many: six seconds of them at
    24 kHz in stereo. Two more frames are what a frame is lapped with, and what the filters keep. libmpg123 reads four.
    """
    is_first = rate >= 32_000  # MPEG 1
    smallest = 144_000 * 32 // rate if is_first else 72_000 * 8 // rate
    side = (17 if channels == 1 else 32) if is_first else (9 if channels == 1 else 17)
    held = max(1, smallest - 4 - 2 - side)  # a head, a checksum and the side information are not of it
    frames = math.ceil((511 if is_first else 255) / held) + 2
    return frames * (1152 if is_first else 576) / rate


Lead: TypeAlias = float | Callable[[int, int], float]
LEADS_S: Final[dict[str, Lead]] = {
    **dict.fromkeys(("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"), 0.0),
    **dict.fromkeys(("IMA_ADPCM", "MS_ADPCM"), 0.0),
    "VORBIS": 0.0,
    "OPUS": 0.5,
    "MPEG_LAYER_III": _lead_of_mp3,
}
"""Seconds that libsndfile decodes before a place it was sent to, until what comes is that of the whole, by its names of
codecs; a function of rate and channels gives those of MP3. What is not here is decoded from its beginning (GSM, G.721
and NMS ADPCM carry their state from sample to sample, and libsndfile does not, or wrongly, jump in them).

Measured (docs/design/0071), and held by ``tests/batches/test_moments.py``. FLAC has the codecs of PCM. Blocks of ADPCM
carry their state. Vorbis needs the block before, which libsndfile reads, except in the last page: see ``ogg.py``, also
for packets of Opus that never forget.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a library says of an open link.

    Attributes:
        codec: libsndfile's name of it.
        rate: Samples a second.
        channels: Their number.
        num_samples: How many there are.
    """

    codec: str
    rate: int
    channels: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One stream of a file.

    Attributes:
        start: Its first byte.
        stop: The byte behind it.
        num_samples: How many its frames hold; None: the library knows.
        head: What a library is given before these bytes.
    """

    start: int
    stop: int
    num_samples: int | None = None
    head: bytes = b""

    def begin(self, stream: WatchedFile, known: Known, first: int, stop: int) -> int:  # noqa: ARG002  see OggLink
        """Return from which sample on a library decodes, so that samples ``[first, stop)`` are those of the whole.

        Args:
            stream: The file.
            known: What the library says of the link.
            first: The first sample that is wanted.
            stop: The one behind the last.
        """
        lead = LEADS_S.get(known.codec)
        if lead is None:
            return 0
        seconds = lead(known.rate, known.channels) if callable(lead) else lead
        return max(0, first - math.ceil(seconds * known.rate))
