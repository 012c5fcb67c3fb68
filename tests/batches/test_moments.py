"""A clip is that part of the whole, for every codec, rate, mode, layout and place: random clips, many by an option."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
import soxr

from streaming import Sound, Video
from streaming.build.decode.streams.links import LEADS_S
from tests.support.sources import drawn_sounds, drawn_videos, streams

CLIPS_OF_EACH = 40
CLIPS_OF_VIDEOS = 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case of each dozen of sounds, a sound of each kind."""
    for name, clips in (("dozen", len(drawn_sounds.STREAMS) * CLIPS_OF_EACH), ("video", CLIPS_OF_VIDEOS)):
        if name in metafunc.fixturenames:
            first, count = (metafunc.config.getoption(option) for option in ("--clips-first", "--clips"))
            metafunc.parametrize(name, range(first // clips, first // clips - (-count // clips)))


@pytest.mark.thorough
def test_random_clips_are_parts_of_the_whole(dozen, pytestconfig, capfd):
    seed, kinds, worst = pytestconfig.getoption("--torture-seed"), len(drawn_sounds.STREAMS), {}
    for number in range(dozen * kinds, (dozen + 1) * kinds):
        drawn = drawn_sounds.drawn_sound(number, seed)
        rng = np.random.default_rng([seed, number, 1])
        whole = Sound()(drawn.data)
        assert whole.shape == drawn.whole.T.shape, drawn.what
        for _ in range(CLIPS_OF_EACH):
            off, words = difference(drawn, rng)
            assert off <= drawn.bound, f"{drawn.what}: {words}: off by {off}"
            worst[drawn.bound] = max(worst.get(drawn.bound, 0), off)
    capfd.readouterr()  # libmpg123 prints
    print(f"clips: {kinds * CLIPS_OF_EACH}, most by bound: {worst}")


def difference(drawn, rng):
    """By how much a random clip differs from the whole, and which it was."""
    count, rate = len(drawn.whole), drawn.rate
    length = int(rng.integers(1, max(2, min(count, rate))))
    first = int(rng.integers(0, count))
    if rng.random() < 0.4:  # in the last second
        first = max(0, count - 1 - int(rng.integers(0, rate)))
    given = io.BytesIO(drawn.data) if rng.random() < 0.4 else drawn.data
    to = int(rng.choice([8_000, 16_000, 44_100])) if rng.random() < 0.15 else rate
    if to != rate:
        length, first = max(1, length * to // rate), min(first * to // rate, max(0, count * to // rate - 1))
    clip = Sound(samples=length, start=first / to, rate=to, short="keep", details=True)(given)
    assert round(clip["start"] * to) == first
    if to == rate:
        expected, more = drawn.whole[first : first + length], 0.0
    else:
        expected, more = soxr.resample(drawn.whole, rate, to)[first : first + length], 2e-6
    words = f"{length} samples from {first} of {count}, at {to} Hz"
    made = clip["samples"].T
    if made.shape != expected.shape:  # soxr makes a few fewer of very short sounds: zeros
        assert not made[len(expected) :].any(), words
        made = made[: len(expected)]
    off = float(np.abs(made - expected).max(initial=0))
    return max(0.0, off - more) / (1.5 if to != rate else 1.0), words  # a filter may add what two libraries differ in


@pytest.mark.thorough
def test_random_clips_of_videos_are_parts_of_the_whole(video, pytestconfig):
    av.logging.set_level(None)
    seed = pytestconfig.getoption("--torture-seed")
    what, data = drawn_videos.drawn_video(video, seed)
    rng = np.random.default_rng([seed, video, 1])
    times, frames = streams.seen(data)
    np.testing.assert_array_equal(Video()(data), frames)
    for _ in range(CLIPS_OF_VIDEOS):
        first = int(rng.integers(0, len(frames))) if rng.random() < 0.6 else len(frames) - 1 - int(rng.integers(0, 8))
        count, every = int(rng.integers(1, 8)), int(rng.choice([1, 1, 2, 3]))
        given = io.BytesIO(data) if rng.random() < 0.4 else data
        clip = Video(frames=count, every=every, start=times[first], short="keep")(given)
        expected = frames[first::every][:count]
        assert clip.shape == expected.shape, what
        np.testing.assert_array_equal(clip, expected, err_msg=f"{what}: {count} frames from {first}, each {every}")


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 44_100])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_mp3_behind_pauses(rate, channels, mode, capfd):
    """Frames of pauses are small, and the next loud ones take their bits from many: libmpg123 reads four before."""
    rng = np.random.default_rng(0)
    waves = rng.normal(0, 0.2, (4 * rate, channels)).astype(np.float32)
    for begin in range(0, len(waves), rate):
        waves[begin : begin + rate // 2] = 0
    level = 0.9 if mode == "CONSTANT" else 0.5
    data = drawn_sounds.written(waves, rate, "MP3", None, bitrate_mode=mode, compression_level=level)
    whole = drawn_sounds.by_av(data).T
    for start in np.arange(0.05, 3.9, 0.11):
        first = round(start * rate)
        clip = Sound(samples=rate // 10, start=first / rate, short="keep")(data)
        np.testing.assert_allclose(clip, whole[:, first : first + rate // 10], atol=3e-5, rtol=0)
    capfd.readouterr()  # libmpg123 prints


# --- chains ---


def stream_of(kind, seed, *, seconds=2.0, rate=16_000, channels=1):
    return streams.sound(kind, seconds, rate=rate, channels=channels, seed=seed)


@pytest.mark.parametrize("kind", sorted(streams.KINDS))
def test_what_is_written_behind_a_stream_is_read(kind):
    """``cat a.ogg b.ogg``: libsndfile reads the first alone, in silence."""
    links = [stream_of(kind, seed, seconds=seconds) for seed, seconds in ((1, 2.0), (2, 0.7), (3, 2.0))]
    heard = np.concatenate([streams.heard(link) for link in links]).T
    for given in (b"".join(links), io.BytesIO(b"".join(links))):
        np.testing.assert_array_equal(Sound()(given), heard)
        for start in (0.0, 1.9, 2.5, 2.69, 4.2):
            first = round(start * 16_000)
            clip = Sound(seconds=0.5, start=start)(given)
            np.testing.assert_allclose(clip, heard[:, first : first + 8000], atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", sorted(streams.KINDS))
def test_a_stream_twice_is_twice_as_long(kind):
    """With numbers and lengths that are the same in both: all bytes tell, which are at hand."""
    one = stream_of(kind, 1)
    assert Sound()(one + one).shape[1] == 2 * Sound()(one).shape[1]


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg"])
def test_chains_of_unlike_streams_are_refused(kind):
    for other in (stream_of(kind, 2, rate=8_000), stream_of(kind, 2, channels=2)):
        for given in (stream_of(kind, 1) + other, io.BytesIO(stream_of(kind, 1) + other)):
            with pytest.raises(ValueError, match="a chain of streams of different rates or channels, 16000 Hz x 1, "):
                Sound(seconds=0.1, start="first")(given)


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "opus"])
def test_a_chain_whose_last_stream_ends_early_is_refused(kind):
    last = stream_of(kind, 2)
    chain = stream_of(kind, 1) + last[: len(last) // 2]
    for given in (chain, io.BytesIO(chain)):
        with pytest.raises(ValueError, match="truncated"):
            Sound(seconds=0.1, start="first")(given)


def test_sound_behind_the_end_that_an_mp3_states_is_not_lost_in_silence():
    one = stream_of("mp3", 1)
    bare = drawn_sounds.written(np.zeros((9000, 1), np.float32), 16_000, "MP3", None, bitrate_mode="CONSTANT")
    bare = bare[bare.index(b"\xff\xf3", 4) :]
    with pytest.raises(ValueError, match=r"continues after byte \d+, where its first frame says that it ends"):
        Sound()(one + bare)
    tagged = one + b"TAG" + bytes(125) + b"ID3\4\0\0\0\0\0\0" + bare
    assert Sound()(tagged).shape[1] >= 32_000 + 9000  # tags between them make it sure


# --- what states no length, and odd bytes ---


def test_flac_that_was_written_to_a_pipe_is_read():
    """Its head states no samples: it was refused for 33554432.0 TiB, and clips at random died."""
    data = streams.sound("flac", 3.0, channels=2)
    heard = streams.heard(data).T
    for piped in (drawn_sounds.piped_flac(data), drawn_sounds.piped_flac(data) + b"TAG" + bytes(125)):
        for given in (piped, io.BytesIO(piped)):
            np.testing.assert_array_equal(Sound()(given), heard)
            clip = Sound(seconds=0.5, start=2.5)(given)
            np.testing.assert_array_equal(clip, heard[:, 40_000:])
            assert Sound(seconds=0.5, start="center")(given).shape == (2, 8000)
    for kept in (-1, -300, 5000, 50):
        with pytest.raises(ValueError, match="FLAC is truncated or damaged"):
            Sound(seconds=0.1, start="first")(drawn_sounds.piped_flac(data)[:kept])


@pytest.mark.parametrize("odd", [bytes(500), bytes(range(200)) * 3, b"ID3\4\0\0\0\0\0\0" + bytes(500)])
def test_mp3_behind_odd_bytes_is_read(odd):
    data = stream_of("mp3", 1)
    np.testing.assert_array_equal(Sound()(odd + data), streams.heard(data).T)
    with pytest.raises(ValueError, match="not a WAV, FLAC, MP3 or Ogg file"):
        Sound()(odd * 2)


@pytest.mark.parametrize("codec", ["GSM610", "G721_32", "NMS_ADPCM_24"])
def test_codecs_that_libsndfile_does_not_seek_in_are_decoded_from_the_beginning(codec):
    waves = np.random.default_rng(0).normal(0, 0.1, (70_001, 1)).astype(np.float32)
    data = drawn_sounds.written(waves, 8_000, "WAV", codec)
    whole = Sound()(data)
    assert codec not in LEADS_S
    assert 70_001 <= whole.shape[1] < 70_400
    for start in (0.0, 1.0, 8.6):
        np.testing.assert_array_equal(Sound(seconds=0.1, start=start)(data), whole[:, round(start * 8000) :][:, :800])


def test_a_tone_of_opus_at_a_low_rate_is_not_turned_over():
    """SILK never forgets: libsndfile's jumps gave the tone with the other sign, from wherever it had begun."""
    waves = 0.5 * np.sin(2 * np.pi * 440 * np.arange(48_000 * 8)[:, None] / 48_000).astype(np.float32)
    options = {"frame_duration": "40", "application": "audio", "vbr": "off"}
    data = drawn_sounds.opus(waves, 6_000, "200000", options)
    assert drawn_sounds.opus_modes(data) == {"SILK"}
    whole = streams.heard(data).T
    for start in (1.0, 4.0, 7.5):
        for given in (data, io.BytesIO(data)):
            clip = Sound(seconds=0.4, start=start)(given)
            np.testing.assert_array_equal(clip, whole[:, round(start * 48_000) :][:, :19_200])


def test_ogg_of_other_codecs_is_named():
    out = io.BytesIO()
    with av.open(out, "w", format="ogg") as container:
        stream = container.add_stream("flac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4608), np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match=r"neither Vorbis nor Opus: its packets begin with b'.x7fFLAC"):
        Sound()(out.getvalue())
