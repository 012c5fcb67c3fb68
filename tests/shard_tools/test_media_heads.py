"""What headers of sounds and videos state: as the libraries that decode them say, in few reads, whatever the bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest

from shard_tools.look.stats import media_heads
from shard_tools.look.stats.media_heads import RangedValue, stated_by
from streaming.build.decode import sound, video
from tests.support.sources import streams
from tests.support.sources.drawn_videos import KINDS, drawn_video
from tests.support.tiers import first_here

HEAD = 4096


class Reads:
    """A value of which the beginning is at hand; notes the rest that is read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.noted = data, list[tuple[int, int]]()

    def more(self, start: int, stop: int) -> bytes:
        self.noted.append((start, stop))
        return self.data[start:stop]

    def stated(self, *, is_video: bool) -> Any:
        return stated_by(RangedValue(self.data[:HEAD], len(self.data), self.more), is_video=is_video)


SOUNDS: dict[str, Callable[[], bytes]] = {
    "wav": lambda: streams.sound("wav", 3.0, rate=44_100, channels=2),
    "flac": lambda: streams.sound("flac", 3.0, rate=22_050),
    "mp3": lambda: streams.sound("mp3", 3.0, rate=16_000),
    "ogg": lambda: streams.sound("ogg", 3.0, rate=16_000, channels=2),
    "opus": lambda: streams.sound("opus", 3.0, rate=48_000),
}
CODECS = {"wav": "PCM 16 bits", "flac": "FLAC", "mp3": "MP3", "ogg": "Vorbis", "opus": "Opus"}


@pytest.mark.parametrize("kind", SOUNDS)
def test_a_sound_states_what_its_library_says(kind: str) -> None:
    data = SOUNDS[kind]()
    value = Reads(data)
    found = value.stated(is_video=False)
    frames, rate, channels = sound.measured(data)
    assert (found.codec, found.rate, found.channels) == (CODECS[kind], rate, channels)
    assert found.seconds == pytest.approx(frames / rate, abs=0.1)
    assert sum(stop - start for start, stop in value.noted) <= 40_000


@pytest.mark.parametrize("number", first_here(range(3 * len(KINDS)), 0))
def test_a_video_states_what_its_library_says(number: int) -> None:
    words, data = drawn_video(number)
    is_fragmented, is_live = "empty_moov" in words, "live" in words
    value = Reads(data)
    found = value.stated(is_video=True)
    seconds, rate, width, height = video.measured(data)
    assert (found.width, found.height) == (width, height), words
    assert found.codec, words
    if not is_fragmented and not is_live:
        assert found.seconds == pytest.approx(seconds, abs=0.2), words
        assert found.frame_rate == pytest.approx(rate, rel=0.1), words
    assert len(value.noted) <= media_heads._MOST_READS


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "H.264"), ("mkv", "H.264"), ("webm", "VP9")])
def test_a_video_with_sound_is_a_video(kind: str, codec: str) -> None:
    data = streams.video(kind, sound_s=0.5)
    found = Reads(data).stated(is_video=True)
    seconds, rate, width, height = video.measured(data)
    assert (found.codec, found.width, found.height) == (codec, width, height)
    assert found.seconds == pytest.approx(seconds, abs=0.2)
    assert found.frame_rate == pytest.approx(rate, rel=0.1)
    heard = Reads(data).stated(is_video=False)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        assert (heard.rate, heard.channels) == (stream.rate, stream.channels)


def test_any_bytes_end_in_an_answer_or_a_value_error_in_few_reads() -> None:
    rng = np.random.default_rng(7)
    seeds = [made() for made in SOUNDS.values()] + [streams.video(kind) for kind in ("mp4", "mkv")]
    for number in range(600):
        data = bytearray(seeds[number % len(seeds)])
        for at in rng.integers(0, min(len(data), 2048), 1 + number % 12):
            data[at] = rng.integers(256)
        data = data[: int(rng.integers(1, len(data)))] if number % 3 == 0 else data
        value = Reads(bytes(data))
        try:
            found = value.stated(is_video=number % 2 == 1)
        except ValueError:
            continue
        finally:
            assert len(value.noted) <= media_heads._MOST_READS + 1
            assert all(stop - start <= media_heads._MOST_BYTES for start, stop in value.noted)
        assert 0 <= found.seconds < 1e15


@pytest.mark.parametrize(
    "data", [b"", b"\x1a\x45\xdf\xa3", b"\x1a\x45\xdf\xa3" * 500, b"\0\0\0\1ftyp" + bytes(8), b"OggS", b"RIFF....WAVE",
             b"\xff\xfb", b"ID3\x04\0\0\x7f\x7f\x7f\x7f", b"\0\0\0\x08moov" * 9, io.BytesIO(bytes(99)).getvalue()],
)  # fmt: skip
def test_what_is_no_sound_and_no_video_is_refused(data: bytes) -> None:
    for is_video in (False, True):
        with pytest.raises(ValueError, match=r"\w"):
            Reads(data).stated(is_video=is_video)
