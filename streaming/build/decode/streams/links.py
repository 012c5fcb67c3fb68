"""Describe the links of a sound file, and the context that must be decoded before a moment.

A file may hold several streams in sequence, a *chain* of *links*: a recording of a radio station, or the result of
``cat a.ogg b.ogg``. libsndfile reads only the first link, without a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from streaming.build.decode.streams.files import WatchedFile


def _lead_of_mp3(rate: int, channels: int) -> float:
    """Return the time before a frame of MP3 on which the frame depends, in seconds.

    A frame takes bits from up to 511 (MPEG 1) or 255 (MPEG 2) bytes of earlier frames, the reservoir. The smallest
    frames, pauses in streams of varying rate, hold few bytes each, so the reservoir spans many: six seconds at 24 kHz
    in stereo. Two more frames account for overlap and the state of the filters. libmpg123 reads four.
    """
    is_first = rate >= 32_000  # MPEG 1
    smallest = 144_000 * 32 // rate if is_first else 72_000 * 8 // rate
    side = (17 if channels == 1 else 32) if is_first else (9 if channels == 1 else 17)
    held = max(1, smallest - 4 - 2 - side)  # without header, checksum and side information
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
"""Seconds that libsndfile must decode after a seek until its output equals that of the whole sound, by its codec names;
for MP3, a function of rate and channels. Other codecs are decoded from the beginning (GSM, G.721 and NMS ADPCM carry
state from sample to sample, and libsndfile cannot seek in them, or does it wrongly).

Measured (docs/design/0054), and tested by ``tests/batches/test_moments.py``. FLAC has the codecs of PCM. Blocks of
ADPCM carry their state. Vorbis needs the previous block, which libsndfile reads, except in the last page: see
``ogg.py``, also for packets of Opus whose state never fades.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The facts that a library reports about an open link.

    Attributes:
        codec: Name of the codec in libsndfile.
        rate: Samples per second.
        channels: Number of channels.
        num_samples: Number of samples.
    """

    codec: str
    rate: int
    channels: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One stream of a file.

    Attributes:
        start: First byte of the stream.
        stop: Byte after its end.
        num_samples: Number of samples in its frames; None: the library counts them.
        head: Bytes to pass to a library before these.
    """

    start: int
    stop: int
    num_samples: int | None = None
    head: bytes = b""

    def begin(self, stream: WatchedFile, known: Known, first: int, stop: int) -> int:  # noqa: ARG002  see OggLink
        """Return the sample at which a library must begin to decode, so that samples ``[first, stop)`` are exact.

        Args:
            stream: The file.
            known: The library's facts about the link.
            first: First wanted sample.
            stop: End of the wanted samples (exclusive).
        """
        lead = LEADS_S.get(known.codec)
        if lead is None:
            return 0
        seconds = lead(known.rate, known.channels) if callable(lead) else lead
        return max(0, first - math.ceil(seconds * known.rate))
