"""Sounds: clips equal to the library's own decode of all, damage, and arguments that act."""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys

import numpy as np
import pytest
import soundfile
import soxr

from streaming import Sound, decode
from streaming.build.decode.sound import resampled_length, to_int16
from streaming.build.decode.streams import mpeg
from streaming.build.decode.streams.files import WatchedFile, opened
from streaming.errors import ConfigError, DecodeError
from streaming.testing import DecoderTests
from tests.support.sources import drawn_sounds, streams

ALL = sorted(streams.KINDS)
OFF = {"mp3": 1.2e-7, "opus": 0.005}
"""libmpg123 sums in another order after some jumps; Opus predicts from what it has decoded, and steady tones are its
worst case. All others are the same bit by bit."""


def drawn(decoder, data, seed):
    return decoder.with_rng(np.random.default_rng(seed))(data)


class TestContract(DecoderTests):
    """Clips of members that are read in ranges, at a place drawn for each."""

    field = "flac"

    def spec(self):
        return Sound(seconds=0.5)

    def values(self):
        return [streams.sound("flac", seconds) for seconds in (1.0, 2.0)]


# --- equal to all ---


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("channels", [1, 2])
def test_whole_sound_and_clips_are_those_of_the_library(kind, channels):
    data = streams.sound(kind, 6.0, channels=channels)
    whole = streams.heard(data).T
    assert whole.shape[1] == 96_000  # without what encoders add before and after
    for given in (data, bytearray(data), memoryview(data), io.BytesIO(data)):
        np.testing.assert_array_equal(Sound()(given), whole)
    begins = set()
    for seed in range(12):
        clip = drawn(Sound(seconds=0.7, details=True), data, seed)
        first = round(clip["start"] * 16_000)
        begins.add(first)
        assert (clip["length"], clip["rate"], clip["samples"].shape) == (11_200, 16_000, (channels, 11_200))
        np.testing.assert_allclose(clip["samples"], whole[:, first : first + 11_200], atol=OFF.get(kind, 0), rtol=0)
    assert len(begins) == 12
    assert min(begins) < 30_000 < 60_000 < max(begins) <= 96_000 - 11_200


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000])
def test_resampled_clips_are_those_of_the_resampled_whole(kind, rate):
    data = streams.sound(kind, 3.0, channels=2)
    whole = soxr.resample(streams.heard(data), 16_000, rate).T
    np.testing.assert_array_equal(Sound(rate=rate)(data), whole)
    for start in (0, 0.05, 1.3, 2.5):
        clip = Sound(seconds=0.5, rate=rate, start=start)(data)
        first = round(start * rate)
        np.testing.assert_allclose(
            clip, whole[:, first : first + rate // 2], atol=max(1e-6, OFF.get(kind, 0) if start else 0), rtol=0
        )


@pytest.mark.parametrize(("rate", "to"), [(44_100, 16_000), (44_101, 16_000), (192_000, 8_000), (11_025, 48_000)])
def test_resampled_clips_of_odd_rates(rate, to):
    data = streams.sound("wav", 1.0, rate=rate)
    whole = soxr.resample(streams.heard(data), rate, to).T
    for seed in range(6):
        clip = drawn(Sound(samples=to // 4, rate=to, details=True), data, seed)
        first = round(clip["start"] * to)
        np.testing.assert_allclose(clip["samples"], whole[:, first : first + to // 4], atol=1e-6, rtol=0)


def test_lengths_after_resampling_are_those_of_soxr():
    rng = np.random.default_rng(0)
    for rate, to in ((44_100, 16_000), (16_000, 44_100), (48_000, 8_000), (8_000, 22_050)):
        for length in (5, 100, 1001, 12_345):
            made = soxr.resample(rng.normal(0, 0.1, length).astype(np.float32), rate, to)
            assert len(made) == resampled_length(length, rate, to)


def test_the_last_sample_of_a_resampled_clip_is_that_of_the_whole():
    """5060 samples at 12 kHz are 18,595.5 at 44.1 kHz: what begins later was rounded otherwise, and ended in a zero."""
    for count in range(5050, 5070):
        waves = np.random.default_rng(0).normal(0, 0.2, (count, 2)).astype(np.float32)
        data = drawn_sounds.written(waves, 12_000, "WAV", "FLOAT")
        whole = soxr.resample(waves, 12_000, 44_100).T
        assert resampled_length(count, 12_000, 44_100) == whole.shape[1]
        clip = Sound(seconds=1.0, start=6023 / 44_100, rate=44_100, short="keep")(data)
        np.testing.assert_allclose(clip, whole[:, 6023:], atol=1e-6, rtol=0)


def test_a_tone_keeps_its_pitch_and_its_place():
    data = streams.sound("flac", 2.0, rate=44_100, tone=1000.0)
    clip = Sound(seconds=1.0, rate=16_000, start=0.5)(data)[0]
    expected = 0.4 * np.sin(2 * np.pi * 1000 * (0.5 + np.arange(16_000) / 16_000))
    np.testing.assert_allclose(clip, expected, atol=2e-4)


# --- what comes out ---


def test_channels_are_mixed_repeated_kept_or_refused():
    mono, stereo = streams.sound("flac", 1.0), streams.sound("flac", 1.0, channels=2)
    heard = streams.heard(stereo)
    np.testing.assert_allclose(Sound(channels=1)(stereo), heard.mean(1)[None], atol=1e-7)
    np.testing.assert_array_equal(Sound(channels=2)(mono), np.repeat(streams.heard(mono).T, 2, 0))
    np.testing.assert_array_equal(Sound(channels=2)(stereo), heard.T)
    six = streams.sound("wav", 0.1, channels=6)
    assert Sound()(six).shape == (6, 1600)
    assert Sound(channels=1)(six).shape == (1, 1600)
    with pytest.raises(ValueError, match="it has 6 channels, and channels=2"):
        Sound(channels=2)(six)


def test_int16_is_what_a_file_of_16_bits_stores():
    data = streams.sound("flac", 1.0, channels=2)
    stored, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    made = Sound(dtype="int16")(data)
    assert made.dtype == np.int16
    np.testing.assert_array_equal(made, stored.T)
    assert to_int16(np.array([[-1.5, -1, 0, 1, 3]], np.float32)).tolist() == [[-32768, -32768, 0, 32767, 32767]]


def test_results_are_writable_memory_of_their_own():
    data = bytearray(streams.sound("wav", 0.1))
    made = Sound()(memoryview(data))
    before = made.copy()
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(made, before)
    assert made.flags.writeable
    assert made.flags.c_contiguous


def test_what_becomes_of_a_short_sound():
    data = streams.sound("flac", 0.5)
    whole = streams.heard(data).T
    padded = drawn(Sound(seconds=2.0, details=True), data, 1)
    assert (padded["samples"].shape, padded["length"], padded["start"]) == ((1, 32_000), 8_000, 0)
    np.testing.assert_array_equal(padded["samples"][:, :8_000], whole)
    assert not padded["samples"][:, 8_000:].any()
    np.testing.assert_array_equal(Sound(seconds=2.0, short="keep")(data), whole)
    with pytest.raises(ValueError, match=r"8000 samples .* fewer than the 32000 wanted"):
        Sound(seconds=2.0, short="refuse")(data)
    at = Sound(seconds=0.3, start=0.4, details=True)(data)
    assert at["length"] == 1600
    np.testing.assert_array_equal(at["samples"][:, :1600], whole[:, 6400:])
    with pytest.raises(ValueError, match=r"begins at second 0.5, and the stream lasts 0.500 s"):
        Sound(seconds=0.3, start=0.5)(data)


def test_where_clips_begin():
    data = streams.sound("flac", 1.0)
    whole = streams.heard(data).T
    np.testing.assert_array_equal(Sound(samples=100, start="first")(data), whole[:, :100])
    np.testing.assert_array_equal(Sound(samples=100, start="center")(data), whole[:, 7950:8050])
    np.testing.assert_array_equal(Sound(samples=100, start=0.29)(data), whole[:, 4640:4740])
    np.testing.assert_array_equal(Sound(start=0.5)(data), whole[:, 8000:])
    np.testing.assert_array_equal(drawn(Sound(seconds=1.0), data, 3), whole)
    begins = {drawn(Sound(samples=15_998, details=True), data, seed)["start"] for seed in range(40)}
    assert begins == {0, 1 / 16_000, 2 / 16_000}  # every place, also the last


def test_empty_sounds():
    empty = streams.sound("wav", 0.0)
    assert Sound()(empty).shape == (1, 0)
    assert Sound(rate=8000)(empty).shape == (1, 0)
    assert not Sound(samples=10)(empty).any()
    one = streams.sound("wav", 1 / 16_000)
    assert Sound(rate=48_000)(one).shape == (1, 3)
    assert Sound(rate=12_000)(one).shape == (1, 1)  # soxr makes none of it: zeros


# --- of files, only what is needed ---


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "most"), [("wav", 70_000), ("flac", 200_000), ("ogg", 250_000), ("opus", 300_000)])
def test_of_a_file_only_the_bytes_around_the_clip_are_read(kind, most):
    data = streams.sound(kind, 60.0)
    file = streams.CountedFile(data)
    clip = Sound(seconds=1.0, start=40.0)(file)
    np.testing.assert_array_equal(clip, streams.heard(data).T[:, 640_000:656_000])
    assert file.num_read < min(most, len(data))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("fails_from", [0, 3_000, 12_000])
def test_errors_of_the_file_reach_the_caller(kind, fails_from, capfd):
    file = streams.CountedFile(streams.sound(kind, 6.0, channels=1), fails_from)
    with pytest.raises(ConnectionError, match="the store is gone"):
        Sound()(file)
    assert "Traceback" not in capfd.readouterr().err  # nothing is printed by a callback


def test_files_are_watched_as_files_are_read():
    for given in (b"0123456789", io.BytesIO(b"0123456789")):
        with opened(given) as file:
            assert (file.read(3), file.tell()) == (b"012", 3)
            assert (file.seek(-2, 2), file.read(), file.read(1)) == (8, b"89", b"")
            assert (file.seek(2), file.seek(2, 1), file.peek(0, 2), file.tell()) == (2, 4, b"01", 4)
            room = bytearray(4)
            assert (file.readinto(room), room) == (4, b"4567")
            assert (file.seek(100), file.read(1), file.num_bytes) == (100, b"", 10)
    broken = WatchedFile(streams.CountedFile(b"0123456789", 4))
    assert (broken.read(3), broken.read(3), broken.read(3)) == (b"012", b"", b"")
    assert isinstance(broken.failure, ConnectionError)


# --- damage ---


def damages(kind):
    data = streams.sound(kind, 2.0, channels=2)
    half = len(data) // 2
    yield "half", data[:half]
    yield "all but the last 500 bytes", data[:-500]
    yield "head", data[:40]
    yield "first byte", data[:1]
    yield "zeros after the head", data[:4] + bytes(len(data) - 4)
    if kind != "wav":  # which has no checksums
        yield "zeros inside", data[:half] + bytes(3000) + data[half + 3000 :]


@pytest.mark.parametrize("kind", ALL)
def test_damaged_sounds_are_errors(kind):
    for what, data in damages(kind):
        for decoder in (Sound(), Sound(rate=8000)):
            with pytest.raises(DecodeError, match=r"u.tar: sample 'k': field 'x' .* does not decode"):
                print(what, decode.decode_field(decoder, data, url="u.tar", key="k", field="x").shape)


@pytest.mark.parametrize("kind", ["wav", "ogg", "opus"])
def test_a_truncated_sound_is_an_error_wherever_the_clip_is(kind):
    data = streams.sound(kind, 2.0)
    with pytest.raises(ValueError, match="truncated"):
        Sound(seconds=0.1, start="first")(data[: len(data) * 3 // 4])


@pytest.mark.parametrize(
    "data", [b"", b"x", bytes(1000), b"#EXTM3U\nhttp://localhost/a.wav", b"\xff\xff" * 600, b"OggS" * 50, b"fLaC" * 50,
             b"ID3" * 100, b"RIFF\x00\x00\x00\x00WAVE" * 20, b"RIFF\xff\xff\xff\x7fWAVEfmt "],
)  # fmt: skip
def test_what_is_no_sound_is_an_error(data):
    with pytest.raises(DecodeError):
        decode.decode_field(Sound(), data, url="u", key="k", field="flac")


def test_noise_and_flipped_bits_never_crash_or_hang():
    rng = np.random.default_rng(7)
    for kind in ALL:
        data = bytearray(streams.sound(kind, 0.5))
        for _ in range(60):
            hurt = bytearray(data)
            for place in rng.integers(0, min(len(hurt), 400), 3):
                hurt[place] = rng.integers(256)
            try:
                made = Sound(max_bytes=10_000_000)(bytes(hurt))
            except Exception:
                continue
            assert made.dtype == np.float32


def test_a_header_that_claims_too_much_allocates_nothing():
    data = bytearray(streams.sound("flac", 1.0))
    data[21] |= 0x0F  # the highest bits of 36 for the number of samples
    data[22:26] = b"\xff" * 4
    for decoder in (Sound(), Sound(samples=100, start="first")):
        with pytest.raises(ValueError, match=r"states 68719476735 samples, and its last frame is missing"):
            decoder(bytes(data))
    with pytest.raises(ValueError, match="take a clip of it"):
        Sound(max_bytes=63_999)(streams.sound("flac", 1.0))
    assert Sound(max_bytes=64_000)(streams.sound("flac", 1.0)).nbytes == 64_000
    with pytest.raises(ValueError, match="more than"):
        Sound(seconds=1e9)(streams.sound("flac", 1.0))


def test_wav_that_was_written_to_a_pipe_states_no_length_and_is_read():
    data = bytearray(streams.sound("wav", 1.0))
    data[4:8] = b"\xff" * 4
    data[data.index(b"data") + 4 :][:4] = b""
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff" * 4
    assert Sound()(bytes(data)).shape == (1, 16_000)


def riff(data: bytes, *after: tuple[bytes, bytes], rate: int = 8_000, kind: bytes = b"RIFF") -> bytes:
    """A WAV of one channel of 8 bits, whose odd chunks are padded."""
    order = ">" if kind == b"RIFX" else "<"
    form = struct.pack(order + "HHIIHH", 1, 1, rate, rate, 1, 8)
    chunks = [(b"fmt ", form), (b"data", data), *after]
    if kind == b"RF64":
        num_bytes = 4 + 28 + sum(8 + len(content) + len(content) % 2 for _, content in chunks) + 8
        chunks.insert(0, (b"ds64", struct.pack("<QQQI", num_bytes, len(data), len(data), 0)))
    body = b"WAVE"
    for name, content in chunks:
        size = 2**32 - 1 if kind == b"RF64" and name == b"data" else len(content)
        body += name + struct.pack(order + "I", size) + content + bytes(len(content) % 2)
    return kind + struct.pack(order + "I", 2**32 - 1 if kind == b"RF64" else len(body)) + body


@pytest.mark.parametrize("kind", [b"RIFF", b"RIFX", b"RF64"])
@pytest.mark.parametrize("after", [(), ((b"LIST", b"INFO"),), ((b"LIST", b"INFOx"),)])
@pytest.mark.parametrize("num_frames", [100, 101])
def test_only_the_byte_that_pads_may_be_missing(num_frames, after, kind):
    whole = riff(bytes(range(num_frames)), *after, kind=kind)
    assert Sound()(whole).shape == (1, num_frames)
    if len(after[-1][1] if after else range(num_frames)) % 2:
        assert Sound()(whole[:-1]).shape == (1, num_frames)
    else:
        with pytest.raises(ValueError, match="truncated"):
            Sound()(whole[:-1])
    with pytest.raises(ValueError, match="truncated"):
        Sound()(whole[:-2])


def test_each_cut_of_a_sound_of_16_bits_is_an_error():
    whole = streams.sound("wav", 0.01)
    for missing in (1, 2, 3):
        with pytest.raises(ValueError, match="truncated"):
            Sound()(whole[:-missing])


def bare_mp3(waves, rate=44_100, mode="VARIABLE"):
    """An MP3 without LAME's first frame, which states its length."""
    out = io.BytesIO()
    channels = waves.ndim
    with soundfile.SoundFile(out, "w", rate, channels, format="MP3", bitrate_mode=mode, compression_level=0.6) as file:
        file.write(waves.astype(np.float32))
    data = out.getvalue()
    assert data.find(b"Xing", 0, 200) > 0 or data.find(b"Info", 0, 200) > 0
    return data[mpeg._mp3_frame(data[:4])[0] :]


@pytest.mark.parametrize("rate", [44_100, 48_000, 32_000, 22_050, 16_000, 8_000])
@pytest.mark.parametrize("around", [(b"", b""), (b"", b"TAG" + bytes(125)), (b"ID3\4\0\0\0\0\2\0" + bytes(256), b"")])
def test_mp3_of_a_constant_bit_rate_needs_no_header(rate, around):
    for shape in ((50_000,), (50_000, 2)):
        bare = bare_mp3(np.random.default_rng(0).normal(0, 0.1, shape), rate, "CONSTANT")
        data = around[0] + bare + around[1]
        whole = Sound()(data)
        assert 50_000 <= whole.shape[1] < 54_000
        np.testing.assert_array_equal(whole, streams.heard(data).T)  # which reads on to the end
        short = Sound()(data[: len(around[0]) + len(bare) - 100])  # of the last frame
        assert short.shape[1] in {whole.shape[1] - 1152, whole.shape[1] - 576}


@pytest.mark.parametrize("order", [1, -1])
def test_mp3_of_a_varying_bit_rate_without_a_header(order):
    """libsndfile believes that all frames are as long as the first: too few samples, which is refused, or too many."""
    loud = np.random.default_rng(0).normal(0, 0.2, 100_000)
    data = bare_mp3(np.concatenate([loud, np.zeros(200_000)][::order]))
    if order == 1:
        with pytest.raises(ValueError, match=r"the MP3 has \d+ samples, but libsndfile reads \d+"):
            Sound()(data)
    else:
        assert 300_000 <= Sound()(data).shape[1] < 304_000
    with pytest.raises((ValueError, RuntimeError), match=r"no frame of MPEG layer III at byte|internal error"):
        Sound()(data[:20_000] + bytes(range(1, 200)) * 20 + data[20_000:])


def test_the_content_decides_and_not_the_name():
    decoder = decode.resolve_decoders({"flac": "sound"}).decoder_for("flac")
    assert decoder(streams.sound("opus", 0.5)).shape == (1, 8000)


# --- names and arguments ---


def test_ranges_are_read_of_clips_except_of_mp3_or_as_told():
    def ranged(decoder, *fields):
        found = decode.ranged_fields(decode.resolve_decoders(dict.fromkeys(fields, decoder)))
        return [] if found is None else [field for field in fields if found(field)]

    fields = ("flac", "wav", "ogg", "mp3", "left.MP3", "mp3.wav")
    assert ranged(Sound(seconds=1), *fields) == ["flac", "wav", "ogg", "mp3.wav"]
    assert ranged(Sound(samples=9, start="first", reads_ranges=True), *fields) == list(fields)
    assert ranged(Sound(start=3.0, reads_ranges=True), *fields) == list(fields)
    for never in (Sound(seconds=1, reads_ranges=False), Sound(), Sound(start=3.0), "sound"):
        assert ranged(never, *fields) == []
    assert decode.ranged_fields(decode.resolve_decoders({"*.mp3": Sound(seconds=1)})) is None
    everything = decode.ranged_fields(decode.resolve_decoders({"*": Sound(seconds=1)}))
    assert [everything(field) for field in ("flac", "mp3", "cls")] == [True, False, True]
    with pytest.raises(ConfigError, match="a whole stream takes all; write seconds="):
        Sound(reads_ranges=True)
    with pytest.raises(ConfigError, match="reads_ranges='yes': expected True, False, or None"):
        Sound(seconds=1, reads_ranges="yes")


def test_sounds_stay_bytes_unless_asked_for():
    auto = decode.resolve_decoders("auto")
    for kind in ALL:
        assert auto.decoder_for(kind) is decode.raw
    assert decode.resolve_decoders({"wav": "sound"}).decoder_for("wav") == Sound()
    given = Sound(seconds=1)
    decoders = decode.resolve_decoders({"*.wav": given, "mp3": Sound()})
    assert decoders.decoder_for("a.wav") is given
    assert decode.is_ours(given)
    assert not decode.runs_code_of_user(decoders)
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(ConfigError, match=r"write Sound\(\)"):
        decode.resolve_decoders({"wav": Sound})


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_a_missing_package_is_named_with_its_extra(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert decode.resolve_decoders("auto").decoder_for("wav") is decode.raw
    for spec in ("sound", Sound(seconds=1)):
        with pytest.raises(ConfigError, match=r"shardstream\[audio\]"):
            decode.resolve_decoders({"wav": spec})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": 0}, "seconds=0: expected a positive number"),
        ({"seconds": math.nan}, "seconds"),
        ({"seconds": "2"}, "seconds"),
        ({"samples": 1.5}, "samples=1.5: expected a positive whole number"),
        ({"samples": True}, "samples"),
        ({"seconds": 1, "samples": 10}, "both given"),
        ({"rate": 0}, "rate"),
        ({"channels": -1}, "channels"),
        ({"dtype": "float64"}, "dtype"),
        ({"seconds": 1, "start": "last"}, "start='last': expected"),
        ({"seconds": 1, "start": -0.5}, "start"),
        ({"seconds": 1, "short": "zeros"}, "short"),
        ({"start": "random"}, "no length is given"),
        ({"start": "center"}, "no length is given"),
        ({"short": "pad"}, "no length is given"),
        ({"max_bytes": 0}, "max_bytes"),
    ],
)
def test_arguments_that_are_wrong_or_would_not_act_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Sound(**options)
