"""Chunks of local files are mapped: the same bytes as by reading, whatever becomes of the files meanwhile."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import DataError, ShardstreamError, TooManyBadSamplesError
from streaming.order.plan import memory as budget
from streaming.run.engine.memory import mapped
from tests.support.processes.waiting import until
from tests.support.sets.data_sets import write_set

NUM_SAMPLES, SAMPLE_BYTES, PER_SHARD, BATCH = 240, 40_000, 20, 4


def payload(i: int) -> bytes:
    return random.Random(i).randbytes(SAMPLE_BYTES + i)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ShardWriter(str(tmp_path / "{:04d}.tar"), max_samples=PER_SHARD) as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"__key__": f"{i:05d}", "bin": payload(i), "cls": i})
    return tmp_path


def open_at(folder: Path, **options: object) -> StreamingDataset:
    options = {"shuffle": ShuffleConfig(lanes=2, window=10), "decode": None, **options}
    return StreamingDataset(str(folder), **options)  # type: ignore[arg-type]


def keys(loader: DataLoader) -> list[str]:
    found = []
    for batch in loader:
        for key, data, number in zip(batch["__key__"], batch["bin"], batch["cls"], strict=True):
            assert data == payload(int(key))
            assert number == key.lstrip("0").encode() or (key == "00000" and number == b"0")
            found.append(key)
    return found


def take_the_rest(batches: Iterator[Any], found: list[str]) -> None:
    for batch in batches:
        assert batch["bin"] == [payload(int(key)) for key in batch["__key__"]]
        found += batch["__key__"]


def maps_of(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def descriptors_of(folder: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


def until_gone(folder: Path) -> None:
    """Nothing is mapped or open any more; a thread looks four times a second."""

    def left() -> list[str]:
        return maps_of(folder) + descriptors_of(folder)

    until(lambda: not left(), "maps and files are given back", details=left)


def until_fetched(loader: DataLoader) -> None:
    num_chunks = loader.dataset.source.table.num_chunks
    until(lambda: loader.metrics()["fetched_chunks"] == num_chunks, "all chunks are fetched")


def test_maps_and_reads_bring_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: who brings the bytes changes nothing; every sample comes once."""
    with DataLoader(open_at(folder), BATCH) as loader:
        by_map = keys(loader)
        metrics = loader.metrics()
    assert metrics["mapped_bytes"] == metrics["fetched_bytes"] > 0
    monkeypatch.setattr(mapped, "_OWN_DISKS", frozenset())
    with DataLoader(open_at(folder), BATCH) as loader:
        by_read = keys(loader)
        assert not loader.metrics().get("mapped_bytes")
    assert by_map == by_read
    assert sorted(by_map) == [f"{i:05d}" for i in range(NUM_SAMPLES)]


@pytest.mark.parametrize("options", [{}, {"fields": ("bin", "cls")}])
def test_nothing_stays_mapped_or_open(folder: Path, options: dict[str, object]) -> None:
    with DataLoader(open_at(folder, **options), BATCH, memory_limit="8MiB") as loader:
        assert len(set(keys(loader))) == NUM_SAMPLES
        until_gone(folder)  # chunks that nobody needs any more
        batches = iter(loader)
        next(batches)
        assert maps_of(folder)
        assert descriptors_of(folder)
    assert not maps_of(folder)
    assert not descriptors_of(folder)


def test_what_fields_leave_out_is_not_mapped(tmp_path: Path) -> None:
    """A map reads all of a chunk."""
    with ShardWriter(str(tmp_path / "{:04d}.tar"), max_samples=8) as writer:
        for i in range(16):
            writer.write({"__key__": f"{i:05d}", "mp4": payload(i) * 10, "cls": i})
    with DataLoader(open_at(tmp_path, fields=("cls",)), BATCH) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == 16
        assert not loader.metrics().get("mapped_bytes")
        assert loader.metrics()["storage_bytes"] < 4 * SAMPLE_BYTES
    with DataLoader(open_at(tmp_path, fields=("mp4",)), BATCH) as loader:
        assert sum(len(batch["mp4"]) for batch in loader) == 16
        assert loader.metrics()["mapped_bytes"] > 16 * 10 * SAMPLE_BYTES


@pytest.mark.usefixtures("one_fork_server")
def test_worker_processes_and_caches_get_copies(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Others map the arena, or what is fetched goes to the cache: both see only what was copied."""
    with DataLoader(open_at(folder, decode={"bin": None, "cls": None}), BATCH, num_workers=1) as loader:
        assert len(set(keys(loader))) == NUM_SAMPLES
        assert not loader.metrics().get("mapped_bytes")
    with DataLoader(open_at(folder, cache_dir=tmp_path_factory.mktemp("cache")), BATCH) as loader:
        assert len(set(keys(loader))) == NUM_SAMPLES
        assert not loader.metrics().get("mapped_bytes")


def overwrite(path: Path) -> None:
    """Other bytes in the same file, as many."""
    with path.open("r+b") as file:
        file.write(random.Random(-1).randbytes(path.stat().st_size))


def cut_short(path: Path) -> None:
    os.truncate(path, 4096)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.thorough
@pytest.mark.parametrize("change", [overwrite, cut_short, empty])
def test_who_changes_a_shard_in_place_waits_until_it_is_copied(folder: Path, change: Callable[[Path], None]) -> None:
    """P7: no mixture, no end of the process by a signal; what is not there yet is an error, as where it is read."""
    with DataLoader(open_at(folder), BATCH, memory_limit="8MiB") as loader:
        batches = iter(loader)
        found = list(next(batches)["__key__"])
        assert maps_of(folder)
        for shard in sorted(folder.glob("*.tar")):
            change(shard)  # waits
        assert not maps_of(folder), "no lease was given back, the kernel took it"
        with pytest.raises((DataError, TooManyBadSamplesError)):
            take_the_rest(batches, found)
        assert len(found) > BATCH


@pytest.mark.thorough
def test_what_is_there_is_copied_and_delivered(folder: Path) -> None:
    with DataLoader(open_at(folder), BATCH, memory_limit="1GiB") as loader:
        batches = iter(loader)
        found = list(next(batches)["__key__"])
        until_fetched(loader)
        for shard in sorted(folder.glob("*.tar")):
            empty(shard)
        assert not maps_of(folder)
        take_the_rest(batches, found)
    assert sorted(found) == [f"{i:05d}" for i in range(NUM_SAMPLES)]


def test_a_shard_that_is_open_for_writing_is_read(folder: Path) -> None:
    with ExitStack() as stack:
        for shard in folder.glob("*.tar"):
            stack.enter_context(shard.open("r+b"))
        with DataLoader(open_at(folder), BATCH) as loader:
            assert len(set(keys(loader))) == NUM_SAMPLES
            assert not loader.metrics().get("mapped_bytes")


def test_what_is_read_takes_the_place_of_what_was_mapped(folder: Path) -> None:
    """Half of the shards are mapped, half are read, through an arena of a few chunks: nobody writes into a map."""
    with ExitStack() as stack, DataLoader(open_at(folder), BATCH, memory_limit="8MiB") as loader:
        for shard in sorted(folder.glob("*.tar"))[::2]:
            stack.enter_context(shard.open("r+b"))
        for _ in range(2):
            assert len(set(keys(loader))) == NUM_SAMPLES
        metrics = loader.metrics()
    assert 0 < metrics["mapped_bytes"] < metrics["fetched_bytes"]
    with DataLoader(open_at(folder), BATCH) as loader:
        assert len(set(keys(loader))) == NUM_SAMPLES


def test_what_is_in_use_is_never_undone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that undoes left-over maps looks all the time, while others take their places."""
    monkeypatch.setattr(mapped, "_LOOK_EVERY_S", 0.0005)
    with DataLoader(open_at(folder), BATCH, memory_limit="8MiB") as loader:
        for _ in range(3):
            assert len(set(keys(loader))) == NUM_SAMPLES
        metrics = loader.metrics()
    assert metrics["mapped_bytes"] == metrics["fetched_bytes"] > 0


def test_a_shard_that_is_replaced_or_removed_stays_what_it_was(folder: Path) -> None:
    """By rename, as every tool of ours does it: what is mapped is the file that was checked."""
    with DataLoader(open_at(folder), BATCH, memory_limit="1GiB") as loader:
        batches = iter(loader)
        found = list(next(batches)["__key__"])
        until_fetched(loader)
        for shard in folder.glob("*.tar"):
            shard.unlink()
        take_the_rest(batches, found)
    assert sorted(found) == [f"{i:05d}" for i in range(NUM_SAMPLES)]


def test_a_shard_that_was_cut_short_before_is_an_error_of_reading(folder: Path) -> None:
    """The map of what the file does not have is refused, and reading says what is wrong."""
    dataset = open_at(folder)
    os.truncate(folder / "0002.tar", 1 << 19)
    with DataLoader(dataset, BATCH) as loader, pytest.raises(ShardstreamError, match="truncated"):
        keys(loader)


def test_damage_is_found_in_maps_too(folder: Path) -> None:
    dataset = open_at(folder, max_bad_samples=10)
    place = dataset.source.chunk(1)
    with (folder / "0000.tar").open("r+b") as file:
        file.seek(place.byte_start + 2048)
        file.write(b"\xff" * 8)
    with DataLoader(dataset, BATCH) as loader:
        total = sum(len(batch["__key__"]) for batch in loader)
        bad = loader.metrics()["bad"]
    assert total == NUM_SAMPLES
    assert bad
    assert {one["stage"] for one in bad} == {"fetch"}


@pytest.mark.thorough
def test_mapped_files_take_a_share_of_the_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More shards than the process may open: some are mapped, the others read, and there is room for others' files."""
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1)
    monkeypatch.setattr(budget, "LEAST_MAPPED_BYTES", 1)
    samples = write_set(tmp_path, (2,) * 80, chunk_samples=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60, hard))
    try:
        for _ in range(2):  # what a loader took, the next one can have
            with DataLoader(samples.open(seed=1), batch_size=16, memory_limit="64MiB") as loader:
                for _ in range(2):
                    keys = []
                    for batch in loader:
                        keys += batch["__key__"]
                        most = max(most, len(os.listdir("/proc/self/fd")))
                    assert len(set(keys)) == len(keys) == len(samples.keys)
                assert loader.metrics().get("mapped_bytes", 1) > 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert most < before + 60


def test_pieces_lie_between_maps(tmp_path: Path) -> None:
    """Chunks that are read in pieces have room for these alone; what is mapped before and beside them stays whole."""
    with ShardWriter(str(tmp_path / "{:04d}.tar"), max_samples=20) as writer:
        for i in range(200):
            large = i // 20 % 2  # every other shard holds captions beside large members
            writer.write(
                {"__key__": f"{i:05d}", "bin": payload(i)[: 200 if large else None], "mp4": bytes(large << 20)}
            )
    dataset = open_at(tmp_path, fields=("bin",), shuffle=ShuffleConfig(lanes=2, window=4))
    with DataLoader(dataset, batch_size=BATCH, memory_limit="6MiB", num_threads=2) as loader:
        for _ in range(3):
            found = [pair for batch in loader for pair in zip(batch["__key__"], batch["bin"], strict=True)]
            assert sorted(found) == [(f"{i:05d}", payload(i)[: 200 if i // 20 % 2 else None]) for i in range(200)]
        metrics = loader.metrics()
        assert metrics["mapped_bytes"] > 0
        assert metrics["arena_peak_bytes"] <= (6 << 20) * 3 // 4
