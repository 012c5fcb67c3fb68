"""Large members whose decoders read ranges stay in the store: the same values, fewer bytes, and the same faults."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streaming.build.batches.build as build_module
import streaming.shards.catalog.source as source_module
import streaming.shards.fetch.distant as distant_module
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.build.decode import DistantMember, MemberFile, together
from streaming.errors import (
    ChecksumError,
    IndexMismatchError,
    MemoryLimitError,
    TooManyBadSamplesError,
    TransferError,
)
from tests.support.processes.waiting import PATIENCE_S, ended, until
from tests.support.sets.data_sets import loaders, mesh_of
from tests.support.sets.distant_sets import LEAST, NUM, SHARD, ThreePlaces, Watched, clip, flip, sample_of, write_clips
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server", "no_maps", "least")

OPTIONS: dict[str, Any] = {"global_batch_size": 6, "last_batch": "partial"}
DECODE = {"clip": ThreePlaces(-1)}


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distant_module, "LEAST_BYTES", LEAST)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_clips(str(tmp_path_factory.mktemp("clips")))


@pytest.fixture
def copied(clips: str, tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    shutil.copytree(clips, folder)
    return folder


def is_distant(number: int) -> bool:
    return "clip" in sample_of(number) and len(clip(number)) >= LEAST


def plain(batch: Any) -> list[tuple[Any, ...]]:
    """The rows of a batch."""
    clips = batch.get("clip", [None] * len(batch["__key__"]))
    clips = [None if one is None else tuple(int(word) for word in one) for one in clips]
    return list(zip(batch["__key__"], batch.get("txt", batch["__key__"]), clips, strict=True))


def opened(url: str | Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(f"{url}", **{"decode": DECODE, **options})


def play(dataset: Any, world_size: int = 1, **options: Any) -> list[list[list[tuple[Any, ...]]]]:
    return [[plain(batch) for batch in loader] for loader in loaders(dataset, world_size, **{**OPTIONS, **options})]


def in_memory(monkeypatch: pytest.MonkeyPatch, url: str, world_size: int = 1, **options: Any) -> Any:
    """The batches of whole members."""
    with monkeypatch.context() as patch:
        patch.setattr(distant_module, "LEAST_BYTES", 1 << 40)
        return play(opened(url, **options), world_size)


def places(dataset: StreamingDataset, number: int) -> range:
    """Where the clip of a sample is in its shard."""
    table = dataset.source.samples_at(dataset.source.urls[number // SHARD])
    assert table is not None
    starts, sizes = table.fields["clip"]
    row = number % SHARD
    return range(int(starts[row]), int(starts[row] + sizes[row]))


# Values


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", first_here([3, 1], 1))
def test_batches_are_those_of_whole_members(
    clips: str, monkeypatch: pytest.MonkeyPatch, num_workers: int, world_size: int
) -> None:
    expected = in_memory(monkeypatch, clips, world_size)
    dataset = opened(clips)
    watched = Watched(dataset)
    assert play(dataset, world_size, num_workers=num_workers) == expected
    whole = sum(len(clip(number)) for number in range(NUM) if is_distant(number))
    assert watched.num_bytes < 0.6 * whole
    assert sum(row[2] is not None for rank in expected for batch in rank for row in batch) == NUM - NUM // 7


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"fields": ["clip"]},
        {"fields": ["clip", "txt"], "shuffle": False},
        {"shuffle": ShuffleConfig(lanes=3, window=4)},
        {"transform": dict},
        {"exclude": ["00003", "00007", "00008", "00020"]},
    ],
    ids=["field", "order", "lanes", "transform", "filter"],
)
def test_options_do_not_change_that(clips: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    for world_size in (1, 2, 4):  # in storage order ranks read slices
        assert play(opened(clips, **options), world_size) == in_memory(monkeypatch, clips, world_size, **options)


def test_what_is_left_of_a_chunk_is_checked_though_no_field_needs_it(clips: str) -> None:
    """Its headers: they tell whether the shard is the one that the index describes."""
    dataset = opened(clips, fields=["clip"], shuffle=False)
    watched = Watched(dataset)
    play(dataset)
    for number in filter(is_distant, range(NUM)):
        header = places(dataset, number).start - 512
        assert any(start <= header < start + size for _, start, size in watched.reads), number


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_goes_on_where_it_was(clips: str, num_workers: int) -> None:
    batching: dict[str, Any] = {**OPTIONS, "device_mesh": mesh_of(1, 0)}
    with DataLoader(opened(clips), num_workers=num_workers, **batching) as loader:
        calm = [plain(batch) for batch in loader]
    with DataLoader(opened(clips), num_workers=num_workers, **batching) as loader:
        first = [plain(batch) for batch in islice(loader, 2)]
        state = loader.state_dict()
    with DataLoader(opened(clips), num_workers=2 - num_workers, **batching) as loader:
        loader.load_state_dict(state)
        assert first + [plain(batch) for batch in loader] == calm


def test_samples_by_number_are_those_of_whole_members(clips: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [29, 3, 4, 0, 12, 2]
    with monkeypatch.context() as patch:
        patch.setattr(distant_module, "LEAST_BYTES", 1 << 40)
        expected = [opened(clips)[number] for number in numbers]
        every = list(opened(clips))
    dataset = opened(clips)
    watched = Watched(dataset)
    assert [dataset[number] for number in numbers] == expected
    assert watched.num_bytes < 2_000_000
    assert list(dataset) == every


@pytest.mark.thorough
def test_a_mixture_reads_ranges_of_the_sources_that_want_to(clips: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> Mixture:
        sources = {
            "ranges": opened(clips),
            "bytes": opened(clips, decode={"clip": _summed}),
            "same": opened(clips, decode={"clip": ThreePlaces(0.25)}),
        }
        return Mixture(sources)

    with monkeypatch.context() as patch:
        patch.setattr(distant_module, "LEAST_BYTES", 1 << 40)
        expected = play(mixed(), 2)
    assert play(mixed(), 2) == expected
    assert play(mixed(), 2, num_workers=1) == expected


def _summed(data: bytes) -> tuple[int]:
    return (sum(data[:1000]),)


@pytest.mark.thorough
def test_a_set_of_an_s3_server(s3_bucket: str, mini_s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "REMOTE_GAP_BYTES", 100_000)
    url = write_clips(f"{s3_bucket}/clips", mini_s3.storage_options)
    options = {"storage_options": mini_s3.storage_options}
    expected = in_memory(monkeypatch, url, **options)
    dataset = opened(url, **options)
    assert play(dataset) == expected
    assert dataset.source.counters()["storage_bytes"] < 0.6 * NUM * 600_000
    assert play(opened(url, **options), num_workers=1) == expected


def test_without_sample_tables_members_are_read_whole(copied: Path, clips: str) -> None:
    expected = play(opened(clips, shuffle=False))
    shutil.rmtree(copied / "_shardstream" / "samples")
    dataset = opened(copied, shuffle=False)
    watched = Watched(dataset)
    assert play(dataset) == expected
    assert watched.num_bytes > sum(len(clip(number)) for number in range(NUM) if is_distant(number))


@pytest.mark.usefixtures("not_scanned")
def test_without_an_index_members_are_read_whole(copied: Path, clips: str) -> None:
    whole = {"decode": {"clip": ThreePlaces(0.5)}, "shuffle": ShuffleConfig(window=8)}
    expected = play(opened(clips, **whole))
    shutil.rmtree(copied / "_shardstream")
    (found,) = play(opened(copied, **whole), epoch_size=NUM)
    got = [row for batch in found for row in batch]
    assert len(got) == NUM
    assert set(got) <= {row for batch in expected[0] for row in batch}  # some come twice, some not in this epoch


# Memory and the end


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_set_fits_of_which_no_whole_member_would(clips: str, num_workers: int) -> None:
    expected = play(opened(clips, shuffle=ShuffleConfig(lanes=2, window=4)))
    limits: dict[str, Any] = {"memory_limit": "1.5MiB", "num_workers": num_workers}
    with pytest.raises(MemoryLimitError):
        play(opened(clips, decode={"clip": _summed}, shuffle=ShuffleConfig(lanes=2, window=4)), **limits)
    assert play(opened(clips, shuffle=ShuffleConfig(lanes=2, window=4)), **limits) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_is_closed_while_a_store_is_silent(clips: str, num_workers: int) -> None:
    dataset, gone = opened(clips), threading.Event()
    watched, asked = Watched(dataset), threading.Event()
    inside = [places(dataset, number) for number in range(NUM) if is_distant(number)]

    def silent(url: str, start: int, out: memoryview) -> None:
        if any(start in one for one in inside):
            asked.set()
            gone.wait(3600)

    watched.before = silent
    try:
        loader = DataLoader(dataset, num_workers=num_workers, num_threads=None if num_workers else 2,
                            device_mesh=mesh_of(1, 0), **OPTIONS)  # fmt: skip
        waiting = threading.Thread(target=lambda: _until_closed(loader), daemon=True)
        waiting.start()
        assert asked.wait(PATIENCE_S)
        loader.close()
    finally:
        gone.set()
    ended(waiting)


def _until_closed(loader: Any) -> None:
    with suppress(Exception):  # that the loader was closed
        next(iter(loader))


# Faults


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_where_a_decoder_reads_is_that_of_whole_members(
    copied: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    lost = [4, 16, 25]
    for number in lost:
        flip(copied, number, 0.0)
    options: dict[str, Any] = {"max_bad_samples": len(lost), "on_error": "skip"}
    expected = in_memory(monkeypatch, str(copied), **options)
    (loader,) = loaders(opened(copied, **options), 1, num_workers=num_workers, **OPTIONS)
    assert [plain(batch) for batch in loader] == expected[0]
    bad = loader.metrics()["bad"]
    assert sorted(one["key"] for one in bad) == [f"{number:05d}" for number in lost]
    assert {one["stage"] for one in bad} == {"fetch"}
    assert all("CRC32C" in one["reason"] and "also when read again" in one["reason"] for one in bad)


def test_damage_where_no_decoder_reads_is_not_found(copied: Path, clips: str) -> None:
    """This is said in docs/reliability.md: who wants each byte checked does without ranges."""
    assert is_distant(4)
    flip(copied, 4, 0.3)
    halves = {"decode": {"clip": ThreePlaces(0.9)}}
    assert play(opened(copied, **halves)) == play(opened(clips, **halves))
    with pytest.raises(TooManyBadSamplesError, match="00004"):
        play(opened(copied, decode={"clip": _summed}, max_bad_samples=0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bytes_that_come_wrong_once_are_read_again(clips: str, num_workers: int) -> None:
    expected = play(opened(clips))
    dataset = opened(clips, max_bad_samples=0)
    watched, flipped = Watched(dataset), []
    inside = places(dataset, 4)

    def damage(url: str, start: int, out: memoryview) -> None:
        if url.endswith("000000.tar") and start == inside.start and not flipped:
            flipped.append(start)
            out[0] ^= 0xFF

    watched.after = damage
    assert play(dataset, num_workers=num_workers) == expected
    assert flipped
    assert any(size == len(inside) for _, _, size in watched.reads)  # the whole member, once


def test_a_sound_member_that_does_not_decode_is_a_bad_sample(clips: str) -> None:
    dataset = opened(clips, decode={"clip": _Fussy(0.5)}, max_bad_samples=1, on_error="skip")
    (loader,) = loaders(dataset, 1, **OPTIONS)
    list(loader)
    ((key, stage, reason),) = [(one["key"], one["stage"], one["reason"]) for one in loader.metrics()["bad"]]
    assert (key, stage) == ("00009", "decode")
    assert "does not decode: ValueError: of all numbers" in reason


class _Fussy(ThreePlaces):
    def __call__(self, data: Any) -> tuple[int, int, int]:
        found = super().__call__(data)
        if found[0] == 9:
            raise ValueError("of all numbers")
        return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_store_that_fails_is_no_bad_sample(clips: str, num_workers: int) -> None:
    dataset = opened(clips, shuffle=False, max_bad_samples=NUM)
    watched, inside = Watched(dataset), places(dataset, 16)

    def fail(url: str, start: int, out: memoryview) -> None:
        if url.endswith("000001.tar") and start in inside:
            raise TransferError("the store is gone")

    watched.before = fail
    (loader,) = loaders(dataset, 1, num_workers=num_workers, **OPTIONS)
    got = []
    with pytest.raises(TransferError, match="the store is gone"):
        got += [plain(batch) for batch in loader]
    assert loader.metrics()["bad"] == []


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("same", [True, False])
def test_a_shard_that_is_replaced_is_noticed(copied: Path, clips: str, num_workers: int, same: bool) -> None:
    """By one with the same bytes: nothing happens. By another one: the run ends with its name."""
    expected = play(opened(clips, shuffle=False))
    dataset = opened(copied, shuffle=False, max_bad_samples=NUM)
    watched, inside, shard = Watched(dataset), places(dataset, 16), copied / "000001.tar"
    done: list[int] = []

    def replace(url: str, start: int, out: memoryview) -> None:
        if url.endswith("000001.tar") and start in inside and not done:
            done.append(start)
            content = bytearray(shard.read_bytes())
            if not same:
                content[inside.start : inside.stop] = bytes(len(inside))
            other = copied / "other"
            other.write_bytes(content)
            other.replace(shard)

    watched.before = replace
    (loader,) = loaders(dataset, 1, num_workers=num_workers, **OPTIONS)
    if same:
        assert [plain(batch) for batch in loader] == expected[0]
    else:
        with pytest.raises(IndexMismatchError, match=r"000001\.tar.*was replaced"):
            list(loader)
    assert done


def test_a_missing_shard_stops_the_run(copied: Path) -> None:
    dataset = opened(copied, shuffle=False, max_bad_samples=NUM)
    watched, inside = Watched(dataset), places(dataset, 16)

    def remove(url: str, start: int, out: memoryview) -> None:
        if url.endswith("000001.tar") and start in inside:
            (copied / "000001.tar").unlink(missing_ok=True)

    watched.before = remove
    with pytest.raises(IndexMismatchError, match="000001"):
        play(dataset)


# At the same time


def test_members_of_a_batch_are_read_at_the_same_time(clips: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = play(opened(clips))
    monkeypatch.setattr(build_module, "is_ours", lambda decoder: True)
    dataset = opened(clips)
    watched = Watched(dataset)
    inside = [places(dataset, number) for number in range(NUM) if is_distant(number)]
    reading, asked, met = set[int](), [0], set[int]()
    together = build_module.together

    def noted(jobs: list[Any]) -> list[Any]:
        reading.clear()
        asked.append(min(3, len(jobs)))
        return together(jobs)

    def wait(url: str, start: int, out: memoryview) -> None:
        """No member of a batch is read before three are asked for, or all where there are fewer."""
        if any(start in one for one in inside):
            reading.add(threading.get_ident())
            until(lambda: len(reading) >= asked[-1], f"{asked[-1]} are read at the same time")
            met.add(asked[-1])

    monkeypatch.setattr(build_module, "together", noted)
    watched.before = wait
    assert play(dataset, num_threads=0) == expected
    assert 3 in met


def test_jobs_run_together_and_keep_their_errors() -> None:
    barrier = threading.Barrier(4)

    def job(number: int) -> int:
        barrier.wait(PATIENCE_S)
        if number == 2:
            raise KeyError(number)
        return number

    found = together([lambda number=number: job(number) for number in range(8)], 4)
    assert [one.get() for number, one in enumerate(found) if number != 2] == [0, 1, 3, 4, 5, 6, 7]
    with pytest.raises(KeyError):
        found[2].get()
    assert together([]) == []


# The file


def _member(data: bytes, log: list[tuple[int, int]] | None = None) -> DistantMember:
    def read(start: int, stop: int, *, whole: bool) -> bytes:
        assert 0 <= start < stop <= len(data)
        assert not whole
        if log is not None:
            log.append((start, stop))
        return data[start:stop]

    return DistantMember(read=read, num_bytes=len(data))


_STEPS = st.lists(
    st.tuples(st.sampled_from(["seek", "end", "on", "read"]), st.integers(0, 3_000_000)), min_size=1, max_size=40
)
_DATA = np.random.default_rng(0).bytes(2_500_000)


@given(_STEPS)
def test_a_file_reads_like_the_bytes(steps: list[tuple[str, int]]) -> None:
    log: list[tuple[int, int]] = []
    ours, real = MemberFile(_member(_DATA, log)), io.BytesIO(_DATA)
    for kind, number in steps:
        if kind == "read":
            assert ours.read(number) == real.read(number)
        elif kind == "on":
            assert ours.seek(number % 5000, io.SEEK_CUR) == real.seek(number % 5000, io.SEEK_CUR)
        else:
            at = (-min(number, len(_DATA)), io.SEEK_END) if kind == "end" else (number,)
            assert ours.seek(*at) == real.seek(*at)
        assert ours.tell() == real.tell()
    assert len(ours) == len(_DATA)
    assert all(stop <= other or start >= end for (start, stop), (other, end) in pairwise(log))


def test_a_file_that_is_read_on_and_on_asks_for_more_each_time() -> None:
    log: list[tuple[int, int]] = []
    with MemberFile(_member(_DATA, log)) as file:
        while file.read(8192):
            pass
    sizes = [stop - start for start, stop in log]
    assert sum(sizes) == len(_DATA)
    assert sizes[:4] == [131072, 262144, 524288, 1048576]


def test_a_file_that_fails_ends_and_says_why() -> None:
    def read(start: int, stop: int, *, whole: bool) -> bytes:
        raise KeyboardInterrupt

    with MemberFile(DistantMember(read=read, num_bytes=100)) as file:
        assert file.read(10) == b""
        assert file.read() == b""
        assert isinstance(file.failure, KeyboardInterrupt)
    with pytest.raises(ValueError, match="expected a position"):
        MemberFile(_member(b"abc")).seek(-1)


def test_only_members_of_8_mib_are_distant_by_default(monkeypatch: pytest.MonkeyPatch, clips: str) -> None:
    monkeypatch.undo()
    dataset = opened(clips)
    assert dataset.source.read_distant is not None
    assert all(dataset.source.reads_whole(dataset.source.chunk(chunk)) for chunk in range(3))


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    until(lambda: not any("shardstream-member" in one.name for one in threading.enumerate()), "their threads end")


def test_checksums_are_those_of_the_whole_member(clips: str, copied: Path) -> None:
    """``dataset[i]`` of a damaged clip raises what it raises without ranges."""
    flip(copied, 4, 0.0)
    with pytest.raises(ChecksumError, match="CRC32C"):
        opened(copied)[4]
