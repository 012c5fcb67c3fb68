"""The node cache in one process: right bytes, bounded space, real access order, and no trouble from a bad disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import pickle
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import crc32c
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streaming.common.counters import Metrics
from streaming.errors import ConfigError, TransferError
from streaming.shards.cache import NodeCache, node, space
from streaming.shards.cache.entry import HEADER_BYTES, charged_bytes, file_bytes
from streaming.shards.cache.key import EntryKey, normalized
from streaming.shards.cache.paths import CachePaths
from streaming.storage import Checked, DifferentSumError
from streaming.storage.base.locks import try_lock, unlock
from tests.support.processes.leftovers import descriptors
from tests.support.processes.waiting import PATIENCE_S, ended, started, until

URL = "s3://bucket/train/000000.tar"
BLOCK = 4096
ONE = BLOCK - HEADER_BYTES  # an entry that takes one block


def content(url: str, version: str, start: int, num_bytes: int) -> bytes:
    """What the store holds there."""
    seed = hashlib.sha256(f"{url} {version} {start}".encode()).digest()
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def checked(view: memoryview, crc: int | None = None) -> Checked:
    """What a fetch says of bytes that came: they have this checksum, or none is known."""
    return Checked.comparing(len(view), [] if crc is None else [((view,), crc)])


class Reader:
    """A cache, and a store that counts what is asked of it."""

    def __init__(self, directory: Path | str, limit_bytes: int = 1 << 20, wait_s: float = 300) -> None:
        self.metrics = Metrics()
        self.cache = NodeCache(directory, limit_bytes, metrics=self.metrics, wait_s=wait_s)
        self.layout = CachePaths(str(directory))
        self.fetches = 0

    def read(
        self, start: int, num_bytes: int = ONE, *, url: str = URL, version: str = "v1", crc: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> bool:  # fmt: skip
        expected = content(url, version, start, num_bytes)

        def fetch(view: memoryview) -> Checked:
            self.fetches += 1
            before()
            view[:] = expected
            return checked(view, crc)

        before_fetches = self.fetches
        out = bytearray(os.urandom(num_bytes))
        found, hit = self.cache.read_into(url, version, start, memoryview(out), fetch, crc32c=crc)
        assert found.num_bytes == num_bytes
        assert bytes(out) == expected
        assert hit == (self.fetches == before_fetches)
        return hit

    def entry(self, start: int, num_bytes: int = ONE) -> Path:
        return Path(self.layout.entry(EntryKey.of(URL, "v1", start, num_bytes)))

    def part(self, start: int, num_bytes: int = ONE) -> Path:
        return Path(self.layout.part(EntryKey.of(URL, "v1", start, num_bytes)))

    def counted(self) -> int | None:
        fd = os.open(self.layout.usage, os.O_RDONLY)
        try:
            return space._read(fd)
        finally:
            os.close(fd)


def used_bytes(directory: Path | str) -> int:
    """What entries and parts take, in whole blocks, by the files themselves."""
    root = Path(CachePaths(str(directory)).root)
    files = [*root.glob("entries/*/*"), *root.glob("parts/*")]
    return sum(charged_bytes(file.stat().st_size) for file in files)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


# ---------------------------------------------------------------------------------------------- hits and misses


def test_the_second_read_comes_from_the_cache_and_only_of_the_same_range_version_and_url(reader: Reader) -> None:
    assert not reader.read(0)
    assert reader.read(0)
    assert not reader.read(1)
    assert not reader.read(0, ONE - 1)
    assert not reader.read(0, version="v2")
    assert not reader.read(0, url=URL.replace("000000", "000001"))
    assert not reader.read(0, url="s3://other/train/000000.tar")  # same basename
    assert all((reader.read(0), reader.read(1), reader.read(0, ONE - 1), reader.read(0, version="v2")))


def test_another_process_or_the_next_run_reads_it_too(tmp_path: Path) -> None:
    Reader(tmp_path).read(0, 100_000)
    assert Reader(tmp_path).read(0, 100_000)


def test_making_and_pickling_a_cache_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = NodeCache(folder, 1 << 20, wait_s=7)
    copy = pickle.loads(pickle.dumps(cache))
    assert not folder.exists()
    assert repr(copy) == repr(cache)
    assert copy._wait_s == 7
    reader = Reader(folder)
    reader.cache = copy
    reader.read(0)
    assert reader.read(0)
    assert not descriptors(folder)


def test_an_empty_range_and_memory_of_other_items(reader: Reader) -> None:
    assert not reader.read(5, 0)
    out = memoryview(bytearray(16)).cast("I")

    def fetch(view: memoryview) -> Checked:
        view[:] = bytes(range(16))
        return checked(view)

    assert not reader.cache.read_into(URL, "v9", 0, out, fetch, crc32c=None)[1]
    out[0] = 0
    assert reader.cache.read_into(URL, "v9", 0, out, fetch, crc32c=None)[1]
    assert bytes(out) == bytes(range(16))


def test_by_default_four_fifths_of_what_is_free_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(folder: str) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(total=1000, free=100)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert repr(node.open_cache(tmp_path / "not" / "yet", None)).endswith("limit=80 B)")
    assert asked == [str(tmp_path)], "the nearest folder that is there"


def test_arguments_that_cannot_work() -> None:
    cache = NodeCache("x", 1)
    with pytest.raises(ConfigError, match="read-only"):
        cache.read_into(URL, "v", 0, memoryview(b"abc"), checked, crc32c=None)
    with pytest.raises(ConfigError, match="start -1"):
        cache.read_into(URL, "v", -1, memoryview(bytearray(3)), checked, crc32c=None)
    with pytest.raises(ConfigError, match="must be positive"):
        NodeCache("x", 0)
    assert not Path("x").exists()


def test_what_fetch_raises_comes_through_and_leaves_nothing(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise TransferError("the store is down")  # an OSError, but not the disk's

    with pytest.raises(TransferError, match="the store is down"):
        reader.read(0, before=fail)
    assert os.listdir(reader.layout.parts) == []
    assert not reader.read(0)
    assert reader.read(0)
    assert caplog.records == []
    assert reader.metrics.get("cache_errors") == 0


def test_metrics_add_up(reader: Reader) -> None:
    for start in (0, 1, 0, 0):
        reader.read(start, 1000)
    assert (reader.metrics.get("cache_hits"), reader.metrics.get("cache_misses")) == (2, 2)
    assert (reader.metrics.get("cache_hit_bytes"), reader.metrics.get("cache_miss_bytes")) == (2000, 2000)
    assert reader.metrics.get("cache_not_stored") == 0


# ------------------------------------------------------------------------------------------- damage, invalidation


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped byte": lambda path: flip(path, HEADER_BYTES + 17),
    "the last byte flipped": lambda path: flip(path, -1),
    "a flipped header byte": lambda path: flip(path, 9),
    "another magic": lambda path: flip(path, 0),
    "half written": lambda path: os.truncate(path, HEADER_BYTES + ONE // 2),
    "a header alone": lambda path: os.truncate(path, HEADER_BYTES),
    "half a header": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "too long": lambda path: os.truncate(path, HEADER_BYTES + ONE + 1),
    "zeros, after a power failure": lambda path: path.write_bytes(bytes(HEADER_BYTES + ONE)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_never_used_and_is_fetched_again(reader: Reader, damage: Callable[[Path], object]) -> None:
    reader.read(0)
    damage(reader.entry(0))
    assert not reader.read(0)
    assert reader.metrics.get("cache_damaged") == 1
    assert reader.read(0)


@pytest.mark.parametrize("position", range(HEADER_BYTES + 8))
def test_no_bit_of_the_header_goes_unnoticed(reader: Reader, position: int) -> None:
    reader.read(0)
    flip(reader.entry(0), position)
    assert not reader.read(0)


def test_an_entry_under_the_name_of_another_is_not_used(reader: Reader) -> None:
    reader.read(0)
    reader.read(1)
    shutil.copy(reader.entry(0), reader.entry(1))
    assert not reader.read(1)
    assert reader.metrics.get("cache_damaged") == 1


def test_bytes_that_are_not_the_expected_ones_are_never_used(reader: Reader) -> None:
    right = crc32c.crc32c(content(URL, "v1", 0, ONE))
    for _ in range(2):
        with pytest.raises(DifferentSumError):  # the store's bytes are not what the index says: nothing is stored
            reader.read(0, crc=right ^ 1)
        assert not reader.entry(0).exists()
    assert not reader.read(0, crc=right)
    assert reader.read(0, crc=right)
    assert reader.read(0)
    with pytest.raises(DifferentSumError):
        reader.read(0, crc=right ^ 1)  # stored, but not what this reader's index says: it asks the store


def test_invalidate_forgets_one_range(reader: Reader) -> None:
    reader.cache.invalidate(URL, "v1", 0, ONE)  # nothing there: nothing happens
    reader.read(0)
    reader.read(1)
    reader.cache.invalidate(URL, "v1", 0, ONE)
    assert not reader.read(0)
    assert reader.read(0)
    assert reader.read(1)


# ----------------------------------------------------------------------------------------------------- space


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 4 * BLOCK)
    for start in (0, 1, 2, 3):
        reader.read(start)
    assert reader.read(0)  # written first, used last
    reader.read(4)
    assert [start for start in range(5) if reader.entry(start).exists()] == [0, 2, 3, 4]
    assert reader.read(2)
    reader.read(5)
    assert [start for start in range(6) if reader.entry(start).exists()] == [0, 2, 4, 5]
    assert reader.metrics.get("cache_evictions") == 2
    assert reader.metrics.get("cache_evicted_bytes") == 2 * BLOCK


def test_eviction_goes_down_to_the_low_water_mark(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 40 * BLOCK)
    for start in range(40):
        reader.read(start)
    assert used_bytes(tmp_path) == 40 * BLOCK
    reader.read(40)
    assert used_bytes(tmp_path) == 37 * BLOCK
    assert reader.metrics.get("cache_evictions") == 4


def test_room_is_made_for_entries_larger_than_a_tenth(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 10 * BLOCK)
    for start in range(10):
        reader.read(start)
    assert not reader.read(10, 5 * BLOCK - HEADER_BYTES)
    assert reader.read(10, 5 * BLOCK - HEADER_BYTES)
    assert reader.metrics.get("cache_evictions") == 5
    assert not reader.metrics.get("cache_errors")


def test_what_is_larger_than_the_cache_is_streamed(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 2 * BLOCK)
    reader.read(0)
    assert not reader.read(0, 2 * BLOCK)
    assert not reader.read(0, 2 * BLOCK)
    assert reader.read(0)
    assert reader.metrics.get("cache_not_stored") == 2


def test_a_smaller_limit_takes_hold_with_the_next_entry(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 20 * BLOCK)
    for start in range(20):
        reader.read(start)
    Reader(tmp_path, 5 * BLOCK).read(99)
    assert used_bytes(tmp_path) <= 5 * BLOCK


def test_an_entry_that_was_used_while_room_is_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tmp_path, 2 * BLOCK)
    reader.read(0)
    reader.read(1)
    count = space.Space._count

    def count_then_use(self: space.Space, usage: int) -> tuple[int, list[space._Resident]]:
        found = count(self, usage)
        monkeypatch.setattr(space.Space, "_count", count)
        os.utime(reader.entry(0), ns=(2**60, 2**62))
        return found

    monkeypatch.setattr(space.Space, "_count", count_then_use)
    reader.read(2)
    assert reader.entry(0).exists()
    assert not reader.entry(1).exists()


def test_an_entry_that_is_evicted_while_it_is_read_stays_readable(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.read(0)
    preadv = os.preadv

    def evict_and_read(fd: int, views: list[memoryview], offset: int) -> int:
        reader.entry(0).unlink(missing_ok=True)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", evict_and_read)
    assert reader.read(0)


@pytest.mark.parametrize("how", ["lost", "damaged", "of another boot"])
def test_a_counter_that_cannot_be_believed_is_made_anew(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(tmp_path, 10 * BLOCK)
    for start in range(8):
        reader.read(start)
    usage = Path(reader.layout.usage)
    if how == "lost":
        usage.unlink()
    elif how == "damaged":
        flip(usage, 50)
    else:
        fd = os.open(usage, os.O_RDWR)
        with monkeypatch.context() as patch:
            patch.setattr(space, "boot_id", lambda: b"an earlier start of the machine")
            space._write(fd, 0)
        os.close(fd)
    reader.read(8)
    assert reader.counted() == used_bytes(tmp_path) == 9 * BLOCK


def test_a_counter_that_is_too_high_evicts_nothing(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 10 * BLOCK)
    for start in range(5):
        reader.read(start)
    for start in range(3):  # deleted by hand: nobody counts them out
        reader.entry(start).unlink()
    for start in range(10, 18):
        reader.read(start)
    assert reader.metrics.get("cache_evictions") == 0
    assert reader.counted() == used_bytes(tmp_path) == 10 * BLOCK


# --------------------------------------------------------------------- what others leave, hold, or own in there


def reserved(path: Path) -> None:
    """The file of a process that was killed while it wrote an entry."""
    path.write_bytes(b"half")
    os.truncate(path, file_bytes(ONE))


def test_parts_of_dead_processes_are_cleared_at_the_start_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    first = Reader(tmp_path)
    first.read(0)
    reserved(first.part(1))
    first.part(2).touch()
    reserved(first.part(3))
    held = try_lock(str(first.part(3)))
    assert held is not None
    with open(first.layout.usage, "r+b") as usage:
        space._write(usage.fileno(), 3 * BLOCK)
    second = Reader(tmp_path)
    second.read(4)
    assert os.listdir(first.layout.parts) == [first.part(3).name]
    assert second.counted() == 3 * BLOCK  # entries 0 and 4, and the living part
    unlock(held)


def test_the_part_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.read(0)
    reserved(reader.part(1))  # dies while we run
    with open(reader.layout.usage, "r+b") as usage:
        space._write(usage.fileno(), 2 * BLOCK)
    assert not reader.read(1)
    assert reader.read(1)
    assert os.listdir(reader.layout.parts) == []
    assert reader.counted() == used_bytes(tmp_path) == 2 * BLOCK


def test_room_that_the_dead_hold_is_found_when_it_is_needed(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 4 * BLOCK)
    reader.read(0)
    reader.read(1)
    for start in (2, 3):
        reserved(reader.part(start))
    with open(reader.layout.usage, "r+b") as usage:
        space._write(usage.fileno(), 4 * BLOCK)
    reader.read(4)
    assert reader.metrics.get("cache_evictions") == 0
    assert all((reader.read(0), reader.read(1), reader.read(4)))


def test_room_that_living_writers_hold_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(space, "_ROOM_LIMIT_S", 0.05)
    reader = Reader(tmp_path, 2 * BLOCK)
    reader.read(0)
    held = try_lock(str(reader.part(1, ONE)))
    assert held is not None
    os.ftruncate(held, 2 * BLOCK)
    with open(reader.layout.usage, "r+b") as usage:
        space._write(usage.fileno(), 3 * BLOCK)
    assert not reader.read(2)
    assert reader.metrics.get("cache_not_stored") == 1
    assert reader.metrics.get("cache_errors") == 1
    assert "no room for 4096 bytes" in caplog.records[0].getMessage()
    unlock(held)


@pytest.mark.parametrize("lock", ["usage", "evict"])
def test_a_stopped_process_that_holds_a_lock_stops_nobody_else(
    tmp_path: Path, lock: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(space, "_ROOM_LIMIT_S", 0.05)
    monkeypatch.setattr(space, "_LOCK_LIMIT_S", 0.05)
    reader = Reader(tmp_path, 2 * BLOCK)
    reader.read(0)
    reader.read(1)
    held = try_lock(getattr(reader.layout, lock))
    assert held is not None
    for start in range(2, 10):
        assert not reader.read(start)
    assert reader.read(1)
    assert len(caplog.records) == 1
    unlock(held)
    assert used_bytes(tmp_path) == 2 * BLOCK
    assert os.listdir(reader.layout.parts) == []


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 4 * BLOCK)
    reader.read(0)
    root = Path(reader.layout.root)
    foreign = [tmp_path / "000000.tar", root / "notes.txt", root / "entries/readme", root / "parts/mine.part"]
    foreign += [reader.entry(0).parent / "data", root / "entries/zz" / "x"]
    (root / "entries/zz").mkdir()
    other = tmp_path / "shardstream-cache-v0"  # bears our name, but has no marker
    (other / "entries/aa").mkdir(parents=True)
    foreign.append(other / "entries/aa" / reader.entry(0).name)
    for path in foreign:
        path.write_text("mine")
    second = Reader(tmp_path, 4 * BLOCK)
    for start in range(1, 20):
        second.read(start)
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)


def test_a_cache_of_an_older_layout_is_cleared_and_a_newer_one_is_not_touched(tmp_path: Path) -> None:
    layouts = {version: CachePaths(str(tmp_path), version) for version in (0, 2)}
    names = {}
    for version, layout in layouts.items():
        layout.make()
        names[version] = Path(layout.entry(EntryKey.of(URL, "v1", 0, ONE)))
        names[version].parent.mkdir()
        names[version].write_bytes(b"of another release")
        Path(layout.part(EntryKey.of(URL, "v1", 1, ONE))).touch()
    reader = Reader(tmp_path)
    assert not reader.read(0)
    assert not Path(layouts[0].root).exists()
    assert names[2].read_bytes() == b"of another release"
    assert reader.read(0)


def test_clearing_an_older_layout_spares_what_is_not_ours(tmp_path: Path) -> None:
    old = CachePaths(str(tmp_path), 0)
    old.make()
    mine = Path(old.entries) / "mine.txt"
    mine.write_text("mine")
    Reader(tmp_path).read(0)
    assert mine.read_text() == "mine"
    assert not Path(old.marker).exists()


def test_the_maker_of_the_marker_was_killed(tmp_path: Path) -> None:
    layout = CachePaths(str(tmp_path))
    Path(layout.root).mkdir()
    Path(layout.marker).touch()
    reader = Reader(tmp_path)
    reader.read(0)
    assert reader.read(0)
    assert Path(layout.marker).read_text().endswith("layout 1\n")


def test_nothing_secret_is_written(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    url = "https://user:hunter2@host/bucket-of-secrets/x.tar?X-Amz-Signature=abcdef0123&token=swordfish"
    reader.read(0, url=url)
    files = list(tmp_path.rglob("*"))
    for word in (b"hunter2", b"swordfish", b"abcdef0123", b"bucket-of-secrets"):
        assert not any(word in os.fsencode(path) for path in files)
        assert not any(word in path.read_bytes() for path in files if path.is_file())
    assert Path(reader.layout.root).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://b/k", "S3://b/k", True),
        ("s3://b/k", "s3://B/k", False),
        ("s3://b/k", "gs://b/k", False),
        ("https://h/k?X-Amz-Date=1&X-Amz-Signature=a", "https://h/k?X-Amz-Date=2&X-Amz-Signature=b", True),
        ("https://h/k?id=1&X-Goog-Signature=a", "https://h/k?id=2&X-Goog-Signature=a", False),
        ("https://h/k?sv=1&sig=a&se=2", "https://h/k?sv=2&sig=b&se=3", True),
        ("https://h/k?sp=1", "https://h/k?sp=2", False),
        ("https://h/k?Expires=1&Signature=a&Key-Pair-Id=K", "https://h/k", True),
        ("https://h/k?versionId=1", "https://h/k?versionId=2", False),
        ("https://user:pass@h/k", "https://h/k", True),
        ("https://H:443/k#x", "https://h/k", True),
        ("https://h:8443/k", "https://h/k", False),
        ("https://h:port/k", "https://[h/k", False),
        ("https://h/a@b:80/k", "https://h/b:80/k", False),
        ("http://h/k", "https://h/k", False),
        ("file:///data/a%20b.tar", "/data/a b.tar", True),
        ("/data/../data/x.tar", "/data/x.tar", True),
        ("hf://me:token@datasets/x", "hf://datasets/x", True),
    ],
)
def test_ways_to_write_a_url(one: str, other: str, same: bool) -> None:
    assert (normalized(one) == normalized(other)) is same


def test_a_lock_is_that_of_the_file_which_bears_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock, others = str(tmp_path / "lock"), fcntl.flock, [b"evicted, and made anew by another process"]

    def replaced_meanwhile(fd: int, how: int) -> None:
        flock(fd, how)
        if others:
            os.unlink(path)
            Path(path).write_bytes(others.pop())

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    fd = try_lock(path)
    assert fd is not None
    assert os.path.samestat(os.fstat(fd), os.stat(path))
    os.close(fd)


# ---------------------------------------------------------------------------------------------- disks that fail


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    ran = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], check=False, capture_output=True, text=True
    )
    if ran.returncode:
        pytest.skip("mounting needs root; the test below does the same with a system call that fails")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_full_disk_means_streaming_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk"):
        reader = Reader(tmp_path / "disk", 1 << 30)
        reader.read(0, 500_000)
        for start in range(1, 6):
            assert not reader.read(start, 900_000)
        assert reader.read(0, 500_000)  # what is there stays in use
        assert os.listdir(reader.layout.parts) == []
        assert reader.counted() == used_bytes(tmp_path / "disk")
    assert len(warnings_of(caplog)) == 1
    assert "No space left" in warnings_of(caplog)[0]
    assert reader.metrics.get("cache_errors") == 1  # and no second attempt for a while
    assert reader.metrics.get("cache_not_stored") == 5


def test_a_read_only_disk_still_gives_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        Reader(disk).read(0)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        reader = Reader(disk)
        assert reader.read(0)
        for start in (1, 2, 1):
            assert not reader.read(start)
        reader.cache.invalidate(URL, "v1", 0, ONE)
    assert len(warnings_of(caplog)) == 1
    assert "Read-only" in warnings_of(caplog)[0]


CALLS = ["open", "pwritev", "rename", "ftruncate", "pwrite", "preadv", "stat", "mkdir", "unlink"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.ENOLCK, errno.EDQUOT])
@pytest.mark.parametrize("call", CALLS)
def test_no_failing_call_reaches_the_reader(
    tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(tmp_path, 3 * BLOCK)
    for start in range(3):
        reader.read(start)
    before = descriptors(tmp_path)
    fresh = Reader(tmp_path, 3 * BLOCK)
    real = getattr(os, call)

    def fail(*args: object, **kwargs: object) -> object:
        if str(tmp_path) in str(args[0]) or isinstance(args[0], int):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for start in (0, 3, 4, 3):
            fresh.read(start)  # the right bytes, whatever happens
        fresh.cache.invalidate(URL, "v1", 0, ONE)
    assert len(warnings_of(caplog)) <= 1
    assert descriptors(tmp_path) == before
    assert used_bytes(tmp_path) <= 4 * BLOCK
    after = Reader(tmp_path, 3 * BLOCK)
    after.read(7)
    assert after.read(7)
    assert used_bytes(tmp_path) <= 3 * BLOCK


def test_writing_is_tried_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        assert not reader.read(0)
    assert not reader.read(0)
    now_s = time.monotonic()
    monkeypatch.setattr(node.time, "monotonic", lambda: now_s + 2 * node.RETRY_AFTER_S)
    assert not reader.read(0)
    assert reader.read(0)


def test_a_cache_that_is_deleted_under_us(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.read(0)
    shutil.rmtree(reader.layout.root)
    assert not reader.read(0)
    assert reader.read(0)
    assert not reader.read(1, before=lambda: shutil.rmtree(reader.layout.root))
    assert not reader.read(0)


def test_a_file_where_the_folder_should_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    reader = Reader(path)
    assert not reader.read(0)
    assert not reader.read(0)
    assert path.read_text() == "mine"
    assert len(warnings_of(caplog)) == 1


def test_links_are_not_followed(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.read(0)
    target = tmp_path / "elsewhere"
    shutil.move(reader.entry(0), target)
    reader.entry(0).symlink_to(target)
    before = target.read_bytes()
    assert not reader.read(0)
    assert target.read_bytes() == before


# ---------------------------------------------------------------------------------------- one fetch for everybody


def test_many_who_want_the_same_make_one_fetch(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    go = threading.Event()
    hits: list[bool] = []
    fetches: list[int] = []
    out = [bytearray(ONE) for _ in range(8)]

    def fetch(view: memoryview) -> Checked:
        fetches.append(1)
        assert go.wait(PATIENCE_S)
        view[:] = content(URL, "v1", 0, ONE)
        return checked(view)

    def read(number: int) -> None:
        hits.append(reader.cache.read_into(URL, "v1", 0, memoryview(out[number]), fetch, crc32c=None)[1])

    threads = started(*[lambda number=number: read(number) for number in range(8)])
    until(lambda: fetches and reader.metrics.get("cache_wait_s") > 0, "one fetches and another one waits")
    go.set()
    ended(*threads)
    assert len(fetches) == 1
    assert sorted(hits) == [False] + [True] * 7
    assert {bytes(one) for one in out} == {content(URL, "v1", 0, ONE)}


def test_a_slow_fetch_is_not_waited_for_forever_and_the_second_one_is_stored(tmp_path: Path) -> None:
    slow, quick = Reader(tmp_path), Reader(tmp_path, wait_s=0.05)
    begun, go = threading.Event(), threading.Event()
    threads = started(lambda: slow.read(0, before=lambda: begun.set() or go.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    assert not quick.read(0)
    assert quick.metrics.get("cache_wait_timeouts") == 1
    assert quick.read(0)
    go.set()
    ended(*threads)
    assert quick.read(0)
    assert used_bytes(tmp_path) == BLOCK
    assert os.listdir(quick.layout.parts) == []


def test_when_a_fetch_fails_the_next_who_waits_takes_over(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    begun, go = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def fail() -> None:
        begun.set()
        go.wait(PATIENCE_S)
        raise TransferError("reset")

    def first() -> None:
        try:
            Reader(tmp_path).read(0, before=fail)
        except TransferError as error:
            failures.append(error)

    threads = started(first)
    assert begun.wait(PATIENCE_S)
    threads += started(lambda: reader.read(0))
    until(lambda: reader.metrics.get("cache_wait_s") > 0, "the other one waits")
    go.set()
    ended(*threads)
    assert len(failures) == 1
    assert reader.fetches == 1
    assert reader.read(0)


# --------------------------------------------------------------------------------------------- against a model

LIMIT = 12 * BLOCK
KEYS = st.tuples(st.sampled_from([URL, URL + "x"]), st.sampled_from(["v1", "v2"]), st.integers(0, 5))
SIZES = st.sampled_from([1, ONE, ONE + 1, 2 * BLOCK, 5 * BLOCK])


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of reads, damages, kills and lost counters: right bytes, bounded space, and hits where they are due.

    The model: what was read last and neither damaged nor forgotten since must hit, and so must all that was
    read, as long as it all fits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="cache-machine-"))
        self.reader = Reader(self.directory, LIMIT)
        self.read_bytes: dict[tuple[str, str, int, int], int] = {}  # what was read since something could be evicted
        self.fits = True
        self.last: tuple[str, str, int, int] | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(key=KEYS, size=SIZES, with_crc=st.booleans())
    def read(self, key: tuple[str, str, int], size: int, with_crc: bool) -> None:
        url, version, start = key
        crc = crc32c.crc32c(content(url, version, start, size)) if with_crc else None
        hit = self.reader.read(start, size, url=url, version=version, crc=crc)
        name = (*key, size)
        if name == self.last or (self.fits and name in self.read_bytes):
            assert hit
        if self.fits and name not in self.read_bytes:
            assert not hit
        self.last = name
        self.read_bytes[name] = charged_bytes(file_bytes(size))
        self.fits = self.fits and sum(self.read_bytes.values()) <= LIMIT

    @rule(key=KEYS, size=SIZES)
    def invalidate(self, key: tuple[str, str, int], size: int) -> None:
        self.reader.cache.invalidate(*key, size)
        self.forget((*key, size))

    def forget(self, name: tuple[str, str, int, int]) -> None:
        self.read_bytes.pop(name, None)
        self.last = None if self.last == name else self.last

    @rule(key=KEYS, size=SIZES, flipped=st.booleans())
    def damage(self, key: tuple[str, str, int], size: int, flipped: bool) -> None:
        path = Path(self.reader.layout.entry(EntryKey.of(*key, size)))
        if path.exists():
            status = path.stat()
            flip(path, -1) if flipped else os.truncate(path, status.st_size - 1)
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
            self.forget((*key, size))

    @rule()
    def start_anew(self) -> None:
        self.reader = Reader(self.directory, LIMIT)

    @rule(start=st.integers(100, 105))
    def killed_while_writing(self, start: int) -> None:
        """What a SIGKILL between reserving and renaming leaves: counted, stretched, locked by nobody."""
        self.reader.read(start)
        self.forget((URL, "v1", start, ONE))
        self.fits = self.fits and sum(self.read_bytes.values()) + BLOCK <= LIMIT
        self.last = None
        path = self.reader.entry(start)
        path.rename(self.reader.part(start))

    @rule()
    def lose_the_counter(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.reader.layout.usage)

    @invariant()
    def bounded(self) -> None:
        assert used_bytes(self.directory) <= LIMIT

    @invariant()
    def never_counted_too_low(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            counted = self.reader.counted()
            assert counted is None or counted >= used_bytes(self.directory)


CacheMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
