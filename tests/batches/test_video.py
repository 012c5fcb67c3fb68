"""Videos: clips equal to the library's own decode of all, damage, nothing opened beside, and arguments that act."""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys

import numpy as np
import pytest

from streaming import Video, decode
from streaming.errors import ConfigError, DecodeError
from tests.support.sources import streams

ALL = sorted(streams.CODECS)
FRAME_BYTES = 48 * 64 * 3


def drawn(decoder, data, seed):
    return decoder.with_rng(np.random.default_rng(seed))(data)


def nearest(times, time):
    """Number of the frame at a time."""
    return int(np.argmin(np.abs(np.array(times) - time)))


# --- equal to all ---


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("varying", [False, True])
def test_whole_video_and_clips_are_those_of_the_library(kind, varying):
    data = streams.video(kind, varying=varying)
    times, frames = streams.seen(data)
    assert len(frames) == 90
    for given in (data, bytearray(data), memoryview(data), io.BytesIO(data)):
        np.testing.assert_array_equal(Video()(given), frames)
    begins = set()
    for seed in range(12):
        clip = drawn(Video(frames=8, every=3, details=True), data, seed)
        first = nearest(times, clip["times"][0])
        begins.add(first)
        np.testing.assert_array_equal(clip["frames"], frames[first : first + 24 : 3][:8])
        np.testing.assert_allclose(clip["times"], times[first : first + 24 : 3][:8], atol=1e-9)
        assert (clip["length"], round(clip["rate"])) == (8, 30)
    assert len(begins) > 8
    assert max(begins) > 45


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("varying", [False, True])
def test_frames_by_time_are_those_that_are_shown_then(kind, varying):
    data = streams.video(kind, varying=varying)
    times, frames = streams.seen(data)
    for start in (0, 0.5, 1.01, 1.9):
        clip = Video(seconds=1.0, fps=7, start=start, details=True)(data)
        shown = [np.flatnonzero(np.array(times) <= start + n / 7 + 1e-6)[-1] for n in range(7)]
        np.testing.assert_array_equal(clip["frames"], frames[shown])
        np.testing.assert_allclose(clip["times"], np.array(times)[shown], atol=1e-9)
    fast = Video(frames=40, fps=120, start=1.0, details=True)(data)  # each is shown several times
    assert len(set(fast["times"].tolist())) in {10, 11}
    for seed in range(12):
        assert drawn(Video(frames=10, fps=5, details=True), data, seed)["length"] == 10


@pytest.mark.parametrize("gop", [1, 7, 90])
@pytest.mark.parametrize("bframes", [0, 3])
def test_every_start_is_exact_wherever_key_frames_are(gop, bframes):
    data = streams.video("mp4", gop=gop, bframes=bframes)
    times, frames = streams.seen(data)
    for number in range(0, 90, 4):
        clip = Video(frames=3, start=times[number], short="keep")(data)
        np.testing.assert_array_equal(clip, frames[number : number + 3])


def test_whole_videos_in_steps_and_from_a_second_on():
    data = streams.video("mp4")
    _, frames = streams.seen(data)
    np.testing.assert_array_equal(Video(every=7)(data), frames[::7])
    np.testing.assert_array_equal(Video(start=2.0)(data), frames[60:])
    np.testing.assert_array_equal(Video(fps=10)(data), frames[::3])
    np.testing.assert_array_equal(Video(frames=5, start="first")(data), frames[:5])
    np.testing.assert_array_equal(Video(frames=4, start="center")(data), frames[43:47])


def test_clips_of_varying_rates_are_whole_also_at_the_end():
    """A second of slow frames at the end: length and mean rate let expect more."""
    slow = streams.video("mkv", 20)
    times, frames = streams.seen(slow)
    for seed in range(20):
        clip = drawn(Video(frames=18, details=True), slow, seed)
        assert clip["length"] == 18
        first = nearest(times, clip["times"][0])
        np.testing.assert_array_equal(clip["frames"], frames[first : first + 18])


@pytest.mark.parametrize("kind", ["mkv", "mp4"])
def test_sound_that_lasts_longer_and_smaller_streams_do_not_matter(kind):
    data = streams.video(kind, 60, sound_s=4.0, streams=2)
    times, frames = streams.seen(data)
    assert len(frames) == 60
    np.testing.assert_array_equal(Video()(data), frames)
    for seed in range(8):
        clip = drawn(Video(frames=16, fps=10, details=True), data, seed)
        assert clip["length"] == 16
        np.testing.assert_array_equal(clip["frames"][0], frames[nearest(times, clip["times"][0])])


@pytest.mark.parametrize("options", [(("live", "1"),), (("movflags", "frag_keyframe+empty_moov"),)])
def test_streams_that_state_no_length(options):
    data = streams.video("webm" if options[0][0] == "live" else "mp4", options=options)
    times, frames = streams.seen(data)
    np.testing.assert_array_equal(Video()(data), frames)
    begins = set()
    for seed in range(12):
        clip = drawn(Video(frames=8, every=2, details=True), data, seed)
        first = nearest(times, clip["times"][0])
        begins.add(first)
        np.testing.assert_array_equal(clip["frames"], frames[first : first + 16 : 2])
    assert max(begins) > 40


def test_edit_lists_are_followed():
    data = streams.remuxed(streams.video("mp4"), earlier=12_000, options={"avoid_negative_ts": "disabled"})
    times, frames = streams.seen(data)
    assert len(frames) == 60  # the first second is not shown
    np.testing.assert_array_equal(Video()(data), frames)
    for seed in range(8):
        clip = drawn(Video(frames=8, details=True), data, seed)
        first = nearest(times, clip["times"][0])
        np.testing.assert_array_equal(clip["frames"], frames[first : first + 8])


# --- upright, scaled ---


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
@pytest.mark.parametrize("flip", [False, True])
def test_frames_are_turned_upright(turn, flip):
    plain = streams.video("mp4", 12)
    _, frames = streams.seen(plain)
    expected = np.rot90(frames, turn // 90, axes=(1, 2))
    expected = expected[:, :, ::-1] if flip else expected
    data = streams.remuxed(plain, turn=turn, flip=flip)
    np.testing.assert_array_equal(Video()(data), expected)
    np.testing.assert_array_equal(Video(upright=False)(data), frames)
    small = Video(size=(40, 20))(data)
    assert small.shape == (12, 40, 20, 3)
    unturned = streams.seen(plain, width=40, height=20) if turn % 180 else streams.seen(plain, width=20, height=40)
    turned = np.rot90(unturned[1], turn // 90, axes=(1, 2))
    np.testing.assert_array_equal(small, turned[:, :, ::-1] if flip else turned)


@pytest.mark.parametrize("size", [(24, 32), (96, 128), (7, 50)])
def test_sizes_are_those_of_the_library(size):
    data = streams.video("mp4", 12)
    _, expected = streams.seen(data, height=size[0], width=size[1])
    np.testing.assert_array_equal(Video(size=size)(data), expected)


# --- what comes out ---


def test_what_becomes_of_a_short_video():
    data = streams.video("mp4", 10)
    _, frames = streams.seen(data)
    padded = drawn(Video(frames=16, details=True), data, 1)
    assert (padded["frames"].shape, padded["length"]) == ((16, 48, 64, 3), 10)
    np.testing.assert_array_equal(padded["frames"][:10], frames)
    assert not padded["frames"][10:].any()
    assert np.isnan(padded["times"][10:]).all()
    assert np.isfinite(padded["times"][:10]).all()
    np.testing.assert_array_equal(Video(frames=16, short="keep")(data), frames)
    np.testing.assert_array_equal(Video(frames=16, start=0.2, short="keep")(data), frames[6:])
    with pytest.raises(ValueError, match=r"10 frames .* fewer than the 16 wanted"):
        Video(frames=16, short="refuse")(data)
    with pytest.raises(ValueError, match=r"begins at second 5, and the stream lasts 0.333 s"):
        Video(frames=1, start=5)(data)
    assert drawn(Video(seconds=1.0, fps=30, details=True), data, 0)["length"] == 10


# --- of files, only what is needed ---


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ALL)
def test_of_a_file_only_the_bytes_around_the_clip_are_read(kind):
    data = streams.video(kind, 300, size=(96, 128), gop=10, grain=60)
    file = streams.CountedFile(data)
    clip = Video(frames=4, start=6.0)(file)
    np.testing.assert_array_equal(clip, streams.seen(data)[1][180:184])
    assert file.num_read < len(data) / 5


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("fails_from", [0, 2_000])
def test_errors_of_the_file_reach_the_caller(kind, fails_from):
    with pytest.raises(ConnectionError, match="the store is gone"):
        Video()(streams.CountedFile(streams.video(kind), fails_from))


# --- damage ---


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("faststart", [False, True])
def test_damaged_videos_are_errors_wherever_the_clip_is(kind, faststart):
    data = streams.video(kind, faststart=faststart and kind == "mp4")
    half = len(data) // 2
    for what, hurt in {
        "half": data[:half], "without the end": data[:-1], "head": data[:40], "two": data[:2],
        "zeros after the head": data[:12] + bytes(len(data) - 12),
    }.items():  # fmt: skip
        for decoder in (Video(), Video(frames=2, start="first")):
            with pytest.raises(DecodeError, match=r"u.tar: sample 'k': field 'mp4' .* does not decode"):
                print(what, decode.decode_field(decoder, hurt, url="u.tar", key="k", field="mp4").shape)
    if kind == "mp4":  # in Matroska, FFmpeg goes on at the next cluster and says nothing
        hurt = data[:half] + bytes(200) + data[half + 200 :]
        with pytest.raises(DecodeError):
            decode.decode_field(Video(), hurt, url="u", key="k", field="mp4")


def test_noise_and_flipped_bits_never_crash_or_hang():
    rng = np.random.default_rng(7)
    for kind in ALL:
        data = streams.video(kind, 30)
        for _ in range(40):
            hurt = bytearray(data)
            for place in rng.integers(0, len(hurt), 4):
                hurt[place] = rng.integers(256)
            try:
                made = Video(max_bytes=10_000_000)(bytes(hurt))
            except Exception:
                continue
            assert made.dtype == np.uint8


def test_headers_that_claim_too_much_allocate_nothing():
    data = streams.video("mp4")
    with pytest.raises(ValueError, match=r"frames of 48 x 64 pixels, more than the 3071 allowed"):
        Video(max_pixels=3071)(data)
    assert Video(max_pixels=3072, frames=1)(data).shape == (1, 48, 64, 3)
    with pytest.raises(ValueError, match="take a clip of it, or raise the bound with max_bytes="):
        Video(max_bytes=90 * FRAME_BYTES - 1)(data)
    assert len(Video(max_bytes=90 * FRAME_BYTES)(data)) == 90
    with pytest.raises(ValueError, match="more than the"):
        Video(frames=10**9)(data)  # before it is allocated


@pytest.mark.parametrize("count", [10**6, 2**28, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize(
    ("box", "at"), [("stsz", 12), ("stts", 8), ("stts", 12), ("ctts", 8), ("stsc", 8), ("stco", 8)]
)
def test_tables_that_claim_too_much_are_errors_of_the_sample(box, at, count):
    """FFmpeg may fail to allocate what they claim: then it is no lack of memory, which would end the run."""
    hurt = bytearray(streams.video("mp4"))
    place = hurt.index(box.encode()) + at
    hurt[place : place + 4] = struct.pack(">I", count)
    try:
        made = decode.decode_field(Video(max_bytes=10_000_000), bytes(hurt), url="u", key="k", field="mp4")
    except DecodeError:
        return
    assert made.dtype == np.uint8  # FFmpeg does not need this table


def test_frames_whose_codec_states_more_pixels_than_the_file():
    """A photograph of 30,000 x 30,000 in the place of one of 64 x 48: refused by the decoder before it allocates."""
    data = bytearray(streams.motion_jpeg())
    at = data.index(b"\xff\xc0")
    while at >= 0:
        data[at + 5 : at + 9] = struct.pack(">HH", 30_000, 30_000)
        at = data.find(b"\xff\xc0", at + 4)
    with pytest.raises((ValueError, OSError)):
        Video()(bytes(data))


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAYLIST, "ffconcat version 1.0\nfile '{url}'\n", "<MPD><BaseURL>{url}</BaseURL></MPD>", "RIFF0000AVI LIST",
        "[playlist]\nFile1={url}\n", "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    ],
)  # fmt: skip
def test_playlists_open_neither_urls_nor_files(text, tmp_path):
    (tmp_path / "secret.mp4").write_bytes(streams.video("mp4", 10))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        http = f"http://127.0.0.1:{server.getsockname()[1]}/a.mp4"
        for url in (http, str(tmp_path / "secret.mp4"), f"file://{tmp_path}/secret.mp4"):
            data = text.format(url=url).encode()
            for given in (data, b"\0\0\0\x18ftypisom" + bytes(12) + data, b"\x1a\x45\xdf\xa3" + data):
                with pytest.raises(DecodeError):
                    decode.decode_field(Video(), given, url="u", key="k", field="mp4")
        with pytest.raises(BlockingIOError):  # nobody connected
            server.accept()


@pytest.mark.parametrize("data", [b"", b"x", bytes(5000), b"GIF89a" + bytes(50), streams.sound("wav", 0.1)])
def test_what_is_no_video_is_an_error(data):
    with pytest.raises(DecodeError):
        decode.decode_field(Video(), data, url="u", key="k", field="mp4")


def test_the_content_decides_and_not_the_name():
    decoder = decode.resolve_decoders({"mp4": "video"}).decoder_for("mp4")
    assert decoder(streams.video("webm", 10)).shape == (10, 48, 64, 3)


# --- names and arguments ---


def test_ranges_are_read_of_clips_or_as_told():
    def ranged(decoder):
        return decode.ranged_fields(decode.resolve_decoders({"mp4": decoder})) is not None

    assert all(map(ranged, (Video(frames=4), Video(seconds=1, fps=8), Video(start=3.0, reads_ranges=True))))
    assert not any(map(ranged, (Video(), Video(start=3.0), Video(frames=4, reads_ranges=False), "video")))
    with pytest.raises(ConfigError, match="a whole stream takes all; write seconds="):
        Video(reads_ranges=True)


def test_videos_stay_bytes_unless_asked_for():
    auto = decode.resolve_decoders("auto")
    for kind in ALL:
        assert auto.decoder_for(kind) is decode.raw
    given = Video(frames=4)
    assert decode.resolve_decoders({"mp4": "video", "*": given}).decoder_for("webm") is given
    assert decode.is_ours(given)
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(ConfigError, match=r"write Video\(\)"):
        decode.resolve_decoders({"mp4": Video})


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert decode.resolve_decoders("auto").decoder_for("mp4") is decode.raw
    for spec in ("video", Video(frames=2)):
        with pytest.raises(ConfigError, match=r"shardstream\[video\]"):
            decode.resolve_decoders({"mp4": spec})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frames": 0}, "frames=0: expected a positive whole number"),
        ({"every": 1.5}, "every"),
        ({"fps": -1}, "fps"),
        ({"every": 2, "fps": 5}, "leave one out"),
        ({"seconds": 2}, "needs fps="),
        ({"seconds": 2, "frames": 4, "fps": 2}, "takes the place of frames="),
        ({"size": (0, 4)}, "expected .height, width."),
        ({"size": (4,)}, "expected .height, width."),
        ({"frames": 2, "start": "end"}, "start"),
        ({"start": "random"}, "no length is given"),
        ({"short": "refuse"}, "no length is given"),
        ({"max_pixels": 0}, "max_pixels"),
    ],
)
def test_arguments_that_are_wrong_or_would_not_act_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Video(**options)
