"""`index --video`: what it writes and reports, what it makes again, damage, and what other commands do beside it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from crc32c import crc32c

from shard_tools import ShardWriter
from shard_tools.change.columns.video import index_video
from shard_tools.cli import cli
from streaming import Video
from streaming.build.decode.groups.decode import decode_group
from streaming.errors import IndexFormatError, IndexMismatchError, IndexMissingError
from streaming.shards.catalog.build import read_chunks
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.video.read import read_video_index
from streaming.shards.video.table import VideoIndex, VideoTable
from streaming.storage import Storage
from tests.support.clusters.executors import Sending
from tests.support.sources import streams

NUM, PER_SHARD = 5, 3
BROKEN, LACKING = 3, 4


def run(*arguments: str, code: int = 0) -> Result:
    found = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert found.exit_code == code, found.output
    return found


def cameras(number: int) -> dict[str, bytes]:
    """Two videos of a sample; one of them is broken, and one sample lacks one."""
    wrist = b"no video" if number == BROKEN else streams.video("mkv", 20, first=number)
    made = {"front.mp4": streams.video("mp4", 30, first=number), "wrist.mkv": wrist}
    return {name: data for name, data in made.items() if number != LACKING or name == "front.mp4"}


def write(folder: Path, first: int = 0, num: int = NUM, **options: Any) -> str:
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=PER_SHARD, **options) as writer:
        for number in range(first, first + num):
            writer.write({"__key__": f"{number:04d}", "txt": f"text {number}", **cameras(number)})
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write(tmp_path / "set")


def read(home: str, shard: int, *fields: str) -> VideoIndex:
    storage = Storage()
    table = read_chunks(storage, home)
    return read_video_index(storage, home, table.of_shard(shard), fields or ("front.mp4", "wrist.mkv"))


def report_of(found: Result) -> dict[str, Any]:
    return json.loads(found.stdout)["video"]


def files(home: str) -> dict[str, bytes]:
    below = Path(home, "_shardstream/video")
    return {str(path.relative_to(below)): path.read_bytes() for path in sorted(below.rglob("*")) if path.is_file()}


def test_the_frames_of_every_video_lie_where_the_index_says(folder: str) -> None:
    found = report_of(run("index", folder, "--video", "--json"))
    assert found["fields"] == ["front.mp4", "wrist.mkv"]
    assert (found["num_shards"], found["num_read"], found["num_streams"], found["num_damaged"]) == (2, 2, 8, 1)
    assert found["num_frames"] == 5 * 30 + 3 * 20
    assert "001.tar: sample '0003', field 'wrist.mkv': not an MP4" in found["first_damaged"][0]
    for number in range(NUM):
        shard, row = divmod(number, PER_SHARD)
        index = read(folder, shard)
        for name, data in cameras(number).items():
            if (number, name) == (BROKEN, "wrist.mkv"):
                assert row not in index.streams(name)
                assert index.damaged(name)[row][:2] == (row, f"{number:04d}")
                continue
            stream = index.streams(name)[row]
            url = f"{folder}/{shard:03d}.tar"
            parts = [Storage().read(url, one.byte_start, one.byte_end) for one in stream.groups]
            assert [crc32c(part) for part in parts] == [one.crc32c for one in stream.groups]
            frames = [decode_group(stream, group, part) for group, part in enumerate(parts)]
            np.testing.assert_array_equal(np.concatenate(frames), Video()(data))
    assert set(read(folder, 1).streams("wrist.mkv")) == set()


def test_it_makes_what_is_missing_and_the_same_bytes(folder: str) -> None:
    run("index", folder, "--video", "front.mp4")
    first = files(folder)
    assert [*first] == ["front.mp4/000.tar.parquet", "front.mp4/001.tar.parquet"]
    with pytest.raises(IndexMissingError, match=r"'wrist.mkv': the videos of shard .*000.tar are not indexed; run"):
        read(folder, 0)
    assert report_of(run("index", folder, "--video", "--json"))["num_read"] == 2
    assert report_of(run("index", folder, "--video", "--json"))["num_read"] == 0
    Path(folder, "_shardstream/video/wrist.mkv/001.tar.parquet").unlink()
    found = report_of(run("index", folder, "--video", "--json"))
    assert (found["num_read"], found["num_streams"]) == (1, 8)
    both = files(folder)
    assert {name: both[name] for name in first} == first
    assert report_of(run("index", folder, "--video", "--force", "--json"))["num_read"] == 2
    assert files(folder) == both


def test_its_words(folder: str) -> None:
    found = run("index", folder, "--video")
    assert "videos front.mp4, wrist.mkv: 8 streams, 210 frames, " in found.output
    assert "not indexed: 1 video, whose frames are bad samples: " in found.output
    assert "'0003'" in found.output
    assert "videos    wrist.mkv: indexed in 2 of 2 shards" in run("info", folder).output
    told = run("index", folder, "--video", "side.mp4", code=2)
    assert "no sample has a field 'side.mp4'; there are: front.mp4" in told.output
    other = write_texts(Path(folder).parent / "texts")
    assert "no field ends with mp4" in run("index", other, "--video", code=2).output


def write_texts(folder: Path) -> str:
    with ShardWriter(f"{folder}/{{:03d}}.tar") as writer:
        writer.write({"__key__": "0", "txt": "text"})
    return str(folder)


def test_an_index_elsewhere(folder: str, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "index")
    run("index", folder, "--index", elsewhere)
    rows = read_chunks(Storage(), elsewhere).of_shard(0)
    with pytest.raises(IndexMissingError, match=f"run `shard_tools index {folder} --index {elsewhere} --video`"):
        read_video_index(Storage(), elsewhere, rows, ["front.mp4"], folder=folder)
    run("index", folder, "--index", elsewhere, "--video")
    assert len(files(elsewhere)) == 4
    Path(elsewhere, "_shardstream/video/front.mp4/000.tar.parquet").unlink()
    told = run("verify", folder, "--index", elsewhere, code=1).output
    assert f"`shard_tools index {folder} --index {elsewhere} --video`" in told
    run("index", folder, "--index", elsewhere, "--video")
    storage = Storage()
    table = read_chunks(storage, elsewhere)
    assert len(read_video_index(storage, elsewhere, table.of_shard(0), ["front.mp4"]).streams("front.mp4")) == 3


def test_no_field_of_a_shard_is_no_missing_index(tmp_path: Path) -> None:
    """A shard without the field has an index that says so: readers need not know why there is none."""
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_samples=1) as writer:
        writer.write({"__key__": "0", "txt": "text"})
        writer.write({"__key__": "1", "mp4": streams.video("mp4", 10)})
    run("index", str(tmp_path), "--video")
    assert read(str(tmp_path), 0, "mp4").streams("mp4") == {}
    assert len(read(str(tmp_path), 1, "mp4").streams("mp4")) == 1


# --- damage ---


def test_a_damaged_shard_is_a_finding_and_the_others_are_indexed(folder: str) -> None:
    path = Path(folder, "000.tar")
    whole = path.read_bytes()
    at = whole.index(b"ftyp") + 3000
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    found = json.loads(run("index", folder, "--video", "--json", code=1).stdout)["video"]
    assert [one["shard"] for one in found["findings"]] == [f"{folder}/000.tar"]
    assert (found["ok"], found["num_streams"]) == (False, 2)
    path.write_bytes(whole)
    assert report_of(run("index", folder, "--video", "--json"))["num_read"] == 1


def flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_index_is_refused_and_made_again(folder: str, seed: int) -> None:
    run("index", folder, "--video")
    path = Path(folder, "_shardstream/video/front.mp4/000.tar.parquet")
    whole = path.read_bytes()
    for number in range(seed, len(whole), len(whole) // 40):
        with pytest.raises(IndexFormatError, match=r"videos|damaged index file"):
            VideoTable.from_parquet(flipped(whole, number), "f")
    path.write_bytes(flipped(whole, len(whole) // 2))
    with pytest.raises(IndexFormatError, match="make it again with `shard_tools index URL --video`"):
        read(folder, 0, "front.mp4")
    assert "000.tar.parquet" in run("verify", folder, code=1).output
    run("index", folder, "--video")
    assert path.read_bytes() == whole
    assert "all as the index says" in run("verify", folder).output


CONTENT = {
    "a packet outside": lambda table: _changed(table, byte_start=table.streams[0].byte_start + (1 << 40)),
    "a packet before": lambda table: _changed(table, byte_start=table.streams[0].byte_start - (1 << 40)),
    "an empty packet": lambda table: _changed(table, num_bytes=table.streams[0].num_bytes * 0),
    "no first group": lambda table: _changed(table, is_key=table.streams[0].is_key & False),
    "groups back in time": lambda table: _changed(table, pts=-table.streams[0].pts),
    "a time base of 0": lambda table: _changed(table, time_base=(0, 1)),
    "a rate of 0": lambda table: _changed(table, rate=(0, 1)),
    "a sample too many": lambda table: _changed(table, sample=1 << 40),
}


def _changed(table: VideoTable, **values: Any) -> VideoTable:
    return replace(table, streams=(replace(table.streams[0], **values), *table.streams[1:]))


@pytest.mark.parametrize("kind", CONTENT)
def test_impossible_content_under_a_right_seal_is_refused(folder: str, kind: str) -> None:
    run("index", folder, "--video")
    table = read(folder, 0).tables["front.mp4"]
    with pytest.raises(IndexFormatError, match="not the index of videos"):
        VideoTable.from_parquet(CONTENT[kind](table).to_parquet(), "f")


# --- beside other commands ---


def test_what_is_appended_lacks_it_until_the_command_runs_again(tmp_path: Path) -> None:
    home = write(tmp_path / "set")
    more = write(tmp_path / "more", NUM, 2)
    run("index", home, "--video")
    before = files(home)
    run("append", more, home)
    table = read_chunks(Storage(), home)
    last = len(table.shards) - 1
    with pytest.raises(IndexMissingError, match=f"run `shard_tools index {home} --video`"):
        read(home, last)
    assert "are not indexed" in run("verify", home, code=1).output
    found = report_of(run("index", home, "--video", "--json"))
    assert (found["num_read"], found["num_streams"]) == (1, 12)
    assert {name: data for name, data in files(home).items() if name in before} == before
    assert len(read(home, last).streams("front.mp4")) == 2


def test_it_follows_a_deletion_by_the_same_command_and_goes_with_a_prune(folder: str) -> None:
    run("index", folder, "--video")
    run("delete", folder, "--where", "__key__ = '0001'")
    assert report_of(run("index", folder, "--video", "--json"))["num_streams"] == 6
    names = {shard.name for shard in read_chunks(Storage(), folder).shards}
    assert len({Path(name).name for name in files(folder)}) == 3
    run("version", "prune", folder)
    assert {Path(name).name.removesuffix(".parquet") for name in files(folder)} == names


def test_copies_have_it(folder: str, tmp_path: Path) -> None:
    run("index", folder, "--video")
    target = str(tmp_path / "copy")
    for _ in range(2):
        run("copy", folder, target)
        assert files(target) == files(folder)
    assert report_of(run("index", target, "--video", "--json"))["num_read"] == 0
    Path(folder, "_shardstream/video/front.mp4/000.tar.parquet").write_bytes(b"damaged")
    shutil.rmtree(target)
    run("copy", folder, target)
    assert len(files(target)) == 3


def test_an_index_of_another_content_is_refused(folder: str) -> None:
    run("index", folder, "--video")
    table = read_chunks(Storage(), folder)
    source, target = (Path(folder, f"_shardstream/video/front.mp4/{n:03d}.tar.parquet") for n in range(2))
    shutil.copy(source, target)
    with pytest.raises(IndexMismatchError, match="of another content of the shard"):
        read(folder, 1, "front.mp4")
    assert isinstance(table, ChunkTable)


@pytest.mark.parametrize("verb", ["reshard", "split"])
def test_rewriting_commands_say_that_they_leave_it_out(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    run("index", folder, "--video")
    target = str(tmp_path / "other")
    targets = (f"{target}/train=50%", f"{target}/val=50%") if verb == "split" else (target,)
    with caplog.at_level(logging.WARNING):
        run(verb, folder, *targets)
    assert "the indexes of videos front.mp4, wrist.mkv are left out" in caplog.text
    assert not [*Path(target).rglob("video")]


@pytest.mark.parametrize("to", ["parquet", "card"])
def test_exports_say_nothing_of_it(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, to: str) -> None:
    run("index", folder, "--video")
    with caplog.at_level(logging.WARNING):
        run("export", folder, folder if to == "card" else str(tmp_path / "other"), "--to", to)
    assert "indexes of videos" not in caplog.text


def test_on_other_processes_and_machines_it_is_the_same(folder: str) -> None:
    index_video([folder], storage=Storage(), workers=1)
    here = files(folder)
    shutil.rmtree(Path(folder, "_shardstream/video"))
    with Sending() as executor:
        index_video([folder], storage=Storage(), workers=2, executor=executor)
    assert files(folder) == here
