"""Stores through fsspec that stall, and objects there that are replaced."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.errors import TransferError
from streaming.storage import ChangedError, Storage
from tests.support.processes.leftovers import leftovers, our_threads
from tests.support.processes.waiting import PATIENCE_S, ended
from tests.support.servers.impatience import make_impatient

MIB = 1 << 20
DATA = np.random.default_rng(13).integers(0, 256, 2 * MIB, np.uint8).tobytes()
URL = "scripted://b/x.tar"


class Play:
    """What the file system is to do: ``script`` is asked before each read and may wait."""

    def __init__(self) -> None:
        self.data = DATA
        self.version: dict[str, object] = {"ETag": "1"}
        self.asked: list[str] = []
        self.script: Callable[[int, int | None], None] = lambda start, end: None

    def replace(self) -> None:
        """The same length, other bytes, another version."""
        self.data = bytes(255 - byte for byte in self.data[:1000]) + self.data[1000:]
        self.version = {name: f"{value}!" for name, value in self.version.items()}


class Scripted(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "scripted"

    def __init__(self, play: Play, **options: Any) -> None:
        super().__init__(**options)
        self.play = play

    def info(self, path: str, **_: Any) -> dict[str, object]:
        self.play.asked.append("info")
        return {"name": path, "size": len(self.play.data), "type": "file", **self.play.version}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.play.asked.append("read")
        self.play.script(start or 0, end)
        return self.play.data[start:end]


fsspec.register_implementation("scripted", Scripted, clobber=True)


@pytest.fixture
def play() -> Play:
    return Play()


def storage_of(play: Play, **options: object) -> Storage:
    return Storage({"fsspec": {"play": play}, "first_backoff_s": 0.001, **options})


class TestHedging:
    @pytest.fixture(autouse=True)
    def held(self) -> Iterator[threading.Event]:
        """What stalls does so until the test is over; then nothing is left."""
        before, others, self.end = leftovers(), our_threads(), threading.Event()
        yield self.end
        self.end.set()
        ended(*our_threads() - others)
        assert leftovers() - before == Counter()

    def stall(self, *reads: int) -> Callable[[int, int | None], None]:
        """The n-th reads stall, counted from now."""
        lock, self.num_reads = threading.Lock(), 0

        def script(start: int, end: int | None) -> None:
            with lock:
                self.num_reads += 1
                stalls = self.num_reads in reads
            if stalls:
                self.end.wait(PATIENCE_S)

        return script

    def hedged(self, storage: Storage, num: int) -> None:
        """A read that has begun gets ``num`` second requests, and no more, however slow the machine is."""
        make_impatient(storage, URL, lambda: self.num_reads > 0 and storage.metrics.get("hedges") < num)

    def test_a_stalled_read_is_asked_for_again(self, play: Play) -> None:
        storage = storage_of(play)
        play.script, out = self.stall(1), bytearray(MIB)
        self.hedged(storage, 1)
        storage.read_into(URL, 7, memoryview(out))
        assert out == DATA[7 : 7 + MIB]
        assert not self.end.is_set()
        counted = storage.metrics.snapshot()
        assert (counted["hedges"], counted["hedges_won"], counted["retries"]) == (1, 1, 0)
        assert counted["storage_bytes"] == MIB

    def test_a_second_one_that_stalls_as_well_gets_a_third(self, play: Play) -> None:
        storage = storage_of(play)
        play.script = self.stall(1, 2)
        self.hedged(storage, 2)
        assert bytes(storage.read(URL, 0, 1000)) == DATA[:1000]
        assert (storage.metrics.get("hedges"), storage.metrics.get("hedges_won")) == (2, 1)

    def test_a_file_system_without_time_outs_ends_at_the_deadline(self, play: Play) -> None:
        storage = storage_of(play, deadline_s=0.5)
        play.script = self.stall(*range(1, 99))
        make_impatient(storage, URL)
        with pytest.raises(TransferError, match=r"x\.tar bytes \[0, 10\).*the answer stands still"):
            storage.read(URL, 0, 10)
        assert storage.metrics.get("hedges") == 2
        assert storage.in_flight() == []

    def test_off_is_off_and_of_unknown_length_means_no_second_request(self, play: Play) -> None:
        """Those are made by the thread that asks: nobody watches it."""
        threads: list[threading.Thread] = []
        play.script = lambda start, end: threads.append(threading.current_thread())
        storage_of(play, hedge=False).read(URL, 0, 10)
        storage_of(play).read(URL)
        storage_of(play).read(URL, 0, 10)
        assert [thread is threading.current_thread() for thread in threads] == [True, True, False]

    def test_an_epoch_over_a_file_system_that_stalls(self, play: Play, tmp_path) -> None:
        with ShardWriter(f"{tmp_path}/{{:06d}}.tar", max_samples=200) as writer:
            for i in range(200):
                writer.write({"__key__": f"{i:04d}", "bin": DATA[i : i + 1000]})
        (shard,) = tmp_path.glob("*.tar")
        play.data = shard.read_bytes()
        options = {"fsspec": {"play": play}}
        dataset = StreamingDataset(
            "scripted://b/000000.tar", index=str(tmp_path), storage_options=options, decode=None, shuffle=False
        )
        play.script = self.stall(1)
        self.hedged(dataset.source.storage, 1)
        with DataLoader(dataset, batch_size=10) as loader:
            assert [bytes(one) for batch in loader for one in batch["bin"]] == [DATA[i : i + 1000] for i in range(200)]
            assert loader.metrics()["hedges_won"] == 1


class TestVersions:
    def read(self, storage: Storage, start: int = 0, *, summed: bool = False) -> bytes:
        out = bytearray(1000)
        storage.read_into(URL, start, memoryview(out), summed=summed)
        return bytes(out)

    def test_one_is_asked_for_before_the_first_read_and_after_each(self, play: Play) -> None:
        storage = storage_of(play)
        for start in (0, 5):
            assert self.read(storage, start) == DATA[start : start + 1000]
        assert play.asked == ["info", "read", "info", "read", "info"]

    def test_a_caller_with_checksums_asks_only_where_they_differ(self, play: Play) -> None:
        storage = storage_of(play)
        for _ in range(3):
            self.read(storage, summed=True)
        assert play.asked == ["info", "read", "read", "read"]
        storage.check_unchanged(URL)
        play.replace()
        assert self.read(storage, summed=True) == play.data[:1000]
        with pytest.raises(ChangedError, match="changed since it was first read"):
            storage.check_unchanged(URL)

    @pytest.mark.parametrize("name", ["ETag", "generation", "mtime", "LastModified", "created"])
    def test_a_replaced_object_is_an_error_once(self, play: Play, name: str) -> None:
        play.version = {name: "7"}
        storage = storage_of(play)
        self.read(storage)
        play.replace()
        with pytest.raises(ChangedError, match=r"scripted://b/x\.tar: the object changed since it was first read"):
            self.read(storage)
        assert self.read(storage) == play.data[:1000]

    def test_another_size_is_another_version(self, play: Play) -> None:
        """File times may have whole seconds only."""
        storage = storage_of(play)
        self.read(storage)
        play.data += b"more"
        with pytest.raises(ChangedError):
            self.read(storage)

    def test_one_replaced_during_the_read_is_noticed(self, play: Play) -> None:
        storage = storage_of(play)
        play.script = lambda start, end: play.replace()
        with pytest.raises(ChangedError):
            self.read(storage)

    def test_where_nothing_is_told_nothing_is_asked_again(self, play: Play) -> None:
        play.version = {}
        storage = storage_of(play)
        for _ in range(3):
            self.read(storage)
        assert play.asked == ["info", "read", "read", "read"]
        storage.check_unchanged(URL)

    def test_whoever_looks_at_it_takes_it_as_it_is(self, play: Play) -> None:
        storage = storage_of(play)
        self.read(storage)
        play.replace()
        storage.info(URL)
        assert self.read(storage) == play.data[:1000]

    def test_nothing_is_asked_for_nothing(self, play: Play) -> None:
        storage_of(play).read_into(URL, 5, memoryview(bytearray()))
        assert play.asked == []
