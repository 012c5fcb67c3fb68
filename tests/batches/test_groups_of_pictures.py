"""Groups of pictures of videos: together they are the whole video bit by bit; damage never passes as other frames."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from streaming import Video
from streaming.build.decode.groups.decode import decode_group
from streaming.build.decode.groups.demux import find_packets
from streaming.shards.video.groups import frame_packets, group_starts, groups_of_packets
from streaming.shards.video.table import VideoStream
from tests.support.sources import drawn_videos, streams
from tests.support.sources.video_members import begun_late, edited, encoded, stream_at, with_hidden
from tests.support.tiers import first_here

BEFORE = b"\1" * 777
"""What lies in a shard before the video."""
DRAWN = len(drawn_videos.KINDS)


def plain(**options: object) -> bytes:
    return streams.video("mp4", 60, **options)  # type: ignore[arg-type]


def open_hevc() -> bytes:
    group = "keyint=20:min-keyint=20:bframes=3:open-gop=1:scenecut=0:log-level=none:pools=1:frame-threads=1"
    return encoded("libx265", "mp4", options={"x265-params": group, "preset": "fast"})


MADE: dict[str, Callable[[], bytes]] = {
    "mp4": plain,
    "mp4, table first": lambda: plain(faststart=True),
    "mp4, no B-frames": lambda: plain(bframes=0),
    "mp4 in fragments": lambda: streams.remuxed(plain(), options={"movflags": "frag_keyframe+empty_moov"}),
    "mp4, varying rate": lambda: plain(varying=True),
    "mp4 with sound between": lambda: plain(sound_s=2.0),
    "mp4 of two streams": lambda: plain(streams=2),
    "mp4, frames before its edit list": lambda: streams.remuxed(plain(), earlier=1500),
    "mp4, an edit list inside a group": lambda: streams.remuxed(plain(), earlier=2000),
    "mp4 of two parts": lambda: edited(plain(), [(0.5, 1.0), (0.5, 0.2)]),
    "mp4 of one part twice": lambda: edited(plain(bframes=0), [(0.7, 0.35), (0.7, 0.35)]),
    "mp4 that begins later": lambda: edited(plain(), [(0.5, None), (1.0, 0.1)]),
    "mkv with sound between": lambda: streams.video("mkv", 60, sound_s=2.0),
    "mkv, varying rate": lambda: streams.video("mkv", 60, varying=True),
    "webm": lambda: streams.video("webm", 60),
    "mov of JPEGs": streams.motion_jpeg,
    "mov": lambda: encoded("libx264", "mov", options={"g": "10", "bf": "2"}),
    "av1 in mp4": lambda: encoded("libsvtav1", "mp4", options={"g": "8", "preset": "12", "svtav1-params": "lp=1"}),
    "av1 in mkv": lambda: encoded("libsvtav1", "matroska", options={"g": "8", "preset": "12", "svtav1-params": "lp=1"}),
    "10 bits": lambda: encoded("libx264", "mp4", options={"g": "10"}, pix_fmt="yuv420p10le"),
    "interlaced": lambda: encoded("libx264", "mp4", options={"g": "10", "x264-params": "interlaced=1"}),
    "full range": lambda: encoded("libx264", "mp4", options={"g": "10"}, color=(2, 1)),
    "colors of the container": lambda: encoded("mpeg4", "matroska", options={"g": "10"}, color=(2, 1)),
    "vp8 with hidden pictures": lambda: with_hidden(encoded("libvpx", "webm", options=QUICK)),
    "h264 that begins with leading pictures": lambda: begun_late(drawn_videos.drawn_video(28)[1], 25),
    "hevc that begins with leading pictures": lambda: begun_late(open_hevc(), 20),
    "h264 that begins between key frames": lambda: begun_late(plain(), 5),
    "mpeg2 that begins between key frames": lambda: begun_late(drawn_videos.drawn_video(31)[1], 5),
    "ffv1": lambda: encoded("ffv1", "matroska", options={"g": "5", "level": "3"}),
    "prores": lambda: encoded("prores_ks", "mov", pix_fmt="yuv422p10le"),
    "png": lambda: encoded("png", "mov", pix_fmt="rgb24"),
}
QUICK = {"g": "20", "deadline": "realtime", "cpu-used": "8"}
TURNED = {f"turned by {turn}{', flipped' * flip}": (turn, flip) for turn in (0, 90, 180, 270) for flip in (False, True)}
KINDS = [*MADE, *map(str, range(DRAWN)), *list(TURNED)[1::2], *list(TURNED)[::2], *map(str, range(DRAWN, 6 * DRAWN))]


def data_of(kind: str) -> bytes:
    if kind in TURNED:
        turn, flip = TURNED[kind]
        return streams.remuxed(plain(), turn=turn, flip=flip)
    return drawn_videos.drawn_video(int(kind))[1] if kind.isdecimal() else MADE[kind]()


def by_groups(stream: VideoStream, shard: bytes, **options: object) -> list[np.ndarray]:
    return [
        decode_group(stream, number, shard[one.byte_start : one.byte_end], **options)  # type: ignore[arg-type]
        for number, one in enumerate(stream.groups)
    ]


@pytest.mark.parametrize("kind", first_here(KINDS, len(MADE) + DRAWN + 3))
def test_all_groups_together_are_the_whole_video(kind: str) -> None:
    data = data_of(kind)
    whole = Video(details=True)(data)
    stream, shard = stream_at(data, len(BEFORE)), BEFORE + data
    groups = stream.groups
    np.testing.assert_array_equal(stream.times, whole["times"])
    found = by_groups(stream, shard)
    assert [len(frames) for frames in found] == [one.stop_frame - one.first_frame for one in groups]
    np.testing.assert_array_equal(np.concatenate(found), whole["frames"])
    assert (groups[0].first_frame, groups[-1].stop_frame) == (0, stream.num_frames)
    for number, one in enumerate(groups):
        assert crc32c(shard[one.byte_start : one.byte_end]) == one.crc32c
        assert set(stream.groups_of(range(one.first_frame, one.stop_frame)).tolist()) <= {number}
    shape = whole["frames"].shape[1:3]
    assert shape == ((stream.width, stream.height) if stream.orientation > 4 else (stream.height, stream.width))
    small = np.concatenate(by_groups(stream, shard, size=(20, 36)))
    np.testing.assert_array_equal(small, Video(size=(20, 36))(data))


@pytest.mark.parametrize(
    ("kind", "num_groups"),
    [("mp4", 6), ("mkv, varying rate", 6), ("mov of JPEGs", 3), ("2", 1), ("mov", 6), ("png", 60)],
)
def test_groups_begin_where_a_decoder_can_start(kind: str, num_groups: int) -> None:
    """Of a video refreshed in parts, only at its beginning."""
    assert len(stream_at(data_of(kind)).groups) == num_groups


@pytest.mark.parametrize("kind", ["1", "10", "12", "13", "26"])
def test_leading_pictures_of_an_open_group_belong_to_the_group_before(kind: str) -> None:
    words, data = drawn_videos.drawn_video(int(kind))
    groups = stream_at(data).groups
    reach = [one.stop_packet > after.first_packet for one, after in itertools.pairwise(groups)]
    assert any(reach), words


@pytest.mark.parametrize("kind", ["mp4", "mkv, varying rate", "1", "mp4, an edit list inside a group"])
def test_the_frame_at_a_moment_is_that_of_video(kind: str) -> None:
    data = data_of(kind)
    stream = stream_at(data)
    moments = np.random.default_rng(0).uniform(0, stream.end_s - 0.01, 12)
    for moment, frame in zip(moments, stream.frames_at(moments), strict=True):
        clip = Video(frames=1, fps=10, start=float(moment), details=True)(data)
        assert clip["times"][0] == stream.times[frame], moment
    assert stream.frames_at([stream.times[0] - 0.1, stream.end_s + 0.1]).tolist() == [-1, -1]
    np.testing.assert_array_equal(stream.frames_at(stream.times), np.arange(stream.num_frames))


def test_some_frames_of_a_group_in_any_order_and_twice() -> None:
    data = plain()
    stream = stream_at(data)
    one = stream.groups[1]
    part, frames = data[one.byte_start : one.byte_end], Video()(data)
    asked = [one.stop_frame - 1, one.first_frame, one.first_frame + 3, one.first_frame]
    np.testing.assert_array_equal(decode_group(stream, 1, part, frames=asked), frames[asked])
    assert decode_group(stream, 1, part, frames=[]).shape == (0, 48, 64, 3)
    with pytest.raises(IndexError, match=f"frame {one.stop_frame} is not in group 1, which has frames"):
        decode_group(stream, 1, part, frames=[one.stop_frame])
    with pytest.raises(ValueError, match=f"group 1 has {len(part)} bytes, got {len(part) - 1}"):
        decode_group(stream, 1, part[:-1])


# --- damage ---


@pytest.mark.parametrize("kind", ["mp4", "webm", "mov of JPEGs", "4"])
def test_a_changed_byte_of_a_group_is_noticed_and_never_ends_the_process(kind: str) -> None:
    data = data_of(kind)
    stream, rng = stream_at(data), np.random.default_rng(3)
    for number, one in enumerate(stream.groups):
        part = bytearray(data[one.byte_start : one.byte_end])
        for at in rng.integers(0, len(part), 3):
            part[at] ^= 1 << int(rng.integers(8))
        assert crc32c(part) != one.crc32c
        with contextlib.suppress(ValueError):
            assert len(decode_group(stream, number, part)) == one.stop_frame - one.first_frame


@pytest.mark.parametrize(
    "kind", ["mp4", "hevc that begins with leading pictures", "mpeg2 that begins between key frames"]
)
def test_a_format_that_is_another_streams_never_ends_the_process(kind: str) -> None:
    data = data_of(kind)
    stream, rng = stream_at(data), np.random.default_rng(7)
    one = stream.groups[-1]
    for _ in range(20):
        head = bytearray(stream.extradata)
        for at in rng.integers(0, len(head), 3) if head else ():
            head[at] = int(rng.integers(256))
        form = replace(
            stream.format, extradata=bytes(head), coded_size=(int(rng.integers(5000)), int(rng.integers(5000))),
            codec=str(rng.choice(["h264", "hevc", "vp9", "mpeg4", "ffv1"])), reorder_depth=int(rng.integers(17)),
            bits=int(rng.integers(64)), color=tuple(rng.integers(0, 30, 4).tolist()),
        )  # fmt: skip
        with contextlib.suppress(ValueError):
            decode_group(replace(stream, format=form), len(stream.groups) - 1, data[one.byte_start : one.byte_end])


@pytest.mark.parametrize("values", [{"reorder_depth": 17}, {"codec": "tiff"}])
def test_formats_that_no_video_has_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"17 frames|'tiff' is not read"):
        replace(stream_at(plain()).format, **values)


def test_the_bytes_of_another_group_are_not_its_frames() -> None:
    data = plain(grain=0)
    stream = stream_at(data)
    one = stream.groups[1]
    with pytest.raises(ValueError, match=r"damaged: 12 frames of the 12 of group 1 did not|FFmpeg"):
        decode_group(stream, 1, bytes(one.byte_end - one.byte_start))


@pytest.mark.parametrize("kind", ["mp4", "mkv, varying rate", "webm", "mp4 in fragments"])
def test_damaged_files_are_refused_or_give_their_own_frames(kind: str) -> None:
    """A changed file is refused, or its groups are what the library decodes of it, or name what is missing."""
    data, rng = data_of(kind), np.random.default_rng(5)
    for _ in range(25):
        changed = bytearray(data)
        if rng.random() < 0.3:
            del changed[int(rng.integers(len(data))) :]
        for at in rng.integers(0, max(1, len(changed)), 4) if changed else ():
            changed[at] = int(rng.integers(256))
        try:
            stream = stream_at(bytes(changed))
            found = np.concatenate(by_groups(stream, bytes(changed)))
            whole = Video()(bytes(changed))
        except ValueError:
            continue
        assert len(found) == stream.num_frames
        if len(whole) == len(found):
            assert found.shape == whole.shape


def test_edit_lists_of_many_parts_give_the_frames_of_video_or_are_refused() -> None:
    """Where a decoder jumps from part to part, frames may depend on those before, and come in another order."""
    rng, data, num_equal = np.random.default_rng(0), drawn_videos.drawn_video(28)[1], 0
    for _ in range(12):
        starts = [None if rng.random() < 0.15 else float(rng.uniform(0, 2.5)) for _ in range(rng.integers(1, 5))]
        made = edited(data, [(float(rng.uniform(0.05, 1)), start) for start in starts])
        times = Video(details=True)(made)["times"]
        if (np.diff(times) <= 0).any():
            with pytest.raises(ValueError, match="not shown in the order of their times"):
                stream_at(made)
            continue
        num_equal, stream = num_equal + 1, stream_at(made)
        np.testing.assert_array_equal(np.concatenate(by_groups(stream, made)), Video()(made))
    assert 3 < num_equal < 12


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no bytes"),
        (b"#EXTM3U\nhttp://elsewhere/x.ts\n", "not an MP4, MOV, Matroska or WebM file"),
        (streams.sound("flac", 0.1), "not an MP4"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_packets(data)


def test_a_cut_file_is_refused() -> None:
    with pytest.raises(ValueError, match="truncated"):
        find_packets(plain(faststart=True)[:-100])


# --- groups as values ---


@st.composite
def packets(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num = draw(st.integers(1, 30))
    pts = np.array(draw(st.permutations(range(num))), np.int64)
    if draw(st.booleans()):  # nearly in order, as streams are
        pts = np.argsort(np.arange(num) + 3 * np.random.default_rng(num).random(num)).astype(np.int64)
    shown = np.array(draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    keys = np.array(draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    return pts, shown, keys


@given(packets())
def test_groups_divide_frames_as_the_format_says(drawn: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pts, shown, keys = drawn
    num = len(pts)
    starts = group_starts(pts, shown, keys)
    for packet in range(num):
        before = [pts[other] for other in range(packet) if shown[other] or keys[other]]
        expected = packet == 0 or (bool(keys[packet]) and all(time < pts[packet] for time in before))
        assert starts[packet] == expected
    begin = 100 * np.arange(num, dtype=np.int64)
    groups = groups_of_packets(pts, shown, starts, begin, begin + 10, np.arange(num, dtype=np.int64))
    firsts = np.flatnonzero(starts).tolist()
    frames = frame_packets(pts, shown).tolist()
    assert frames == sorted(np.flatnonzero(shown).tolist(), key=lambda packet: pts[packet])
    assert [one.first_packet for one in groups] == firsts == [one.crc32c for one in groups]
    for number, one in enumerate(groups):
        mine = [p for p in frames if max([0, *(n for n, k in enumerate(firsts) if n and pts[k] <= pts[p])]) == number]
        assert frames[one.first_frame : one.stop_frame] == mine
        stop = max([firsts[number + 1] if number + 1 < len(firsts) else num, *(packet + 1 for packet in mine)])
        assert (one.stop_packet, one.byte_start, one.byte_end) == (stop, 100 * one.first_packet, 100 * stop - 90)


def test_times_are_rounded_as_fractions_are() -> None:
    stream = stream_at(streams.video("mkv", 60, varying=True))
    num, den = stream.time_base
    shown = stream.pts[stream.packet_of_frame]
    expected = [float((int(pts) - stream.first_pts) * Fraction(num, den)) for pts in shown]
    assert stream.times.tolist() == expected
