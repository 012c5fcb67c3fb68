"""Bytes that come wrong are asked for as often as requests that fail, then at a mirror; then they are damage."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.errors import ChecksumError, IndexFormatError
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.fetch import distant
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from streaming.storage.requests.retry import MOST_WRONG
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets import distant_sets
from tests.support.sets.data_sets import mesh_of
from tests.support.tiers import first_here

NUM, PER_SHARD, BIG_BYTES = 24, 12, 140_000
QUICK = {"first_backoff_s": 0.001, "hedge": False}
TIMES = (1, 2, 5, MOST_WRONG)


def sample_of(number: int) -> dict[str, Any]:
    big = random.Random(number).randbytes(BIG_BYTES) if number % 3 == 0 else b"small"
    return {"__key__": f"{number:05d}", "cls": number, "txt": f"words {number}" * 500, "bin": big}


@dataclass(slots=True)
class Flips:
    """Flips one byte, each time another, of the first answers to each request for what ``of`` says."""

    of: Callable[[str], bool]
    times: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    seen: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    num: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, path: str, span: str | None) -> Fault | None:
        with self.lock:
            if method != "GET" or "list-type" in path or not self.of(path):
                return None
            self.seen[path, span] += 1
            if self.seen[path, span] > self.times:
                return None
            first, last = (0, 150) if span is None else map(int, span.removeprefix("bytes=").split("-"))
            self.num += 1
            return Fault(kind="flip", at_bytes=self.dice.randrange(last + 1 - first))


def is_shard(path: str) -> bool:
    return ".tar" in path and "_shardstream" not in path


@dataclass(slots=True)
class Place:
    """A set behind a proxy."""

    url: str
    flips: Flips
    direct: dict[str, Any]
    options: dict[str, Any]

    def open(self, *, times: int = 0, **given: Any) -> StreamingDataset:
        """The set, of which from here on so many answers to each request are wrong."""
        given = {"shuffle": False, "on_error": "raise", "storage_options": self.options, **given}
        opened = StreamingDataset(self.url, **given)
        self.flips.seen.clear()
        self.flips.times, self.flips.num = times, 0
        return opened


def write(url: str, options: dict[str, Any]) -> str:
    with ShardWriter(f"{url}/{{:03d}}.tar", max_samples=PER_SHARD, index=False, storage_options=options) as writer:
        for number in range(NUM):
            writer.write(sample_of(number))
    storage = Storage(options)
    index_shards(storage, expand_urls(f"{url}/", storage), rule=ChunkRule(min_bytes=300_000, min_samples=3))
    return f"{url}/"


@pytest.fixture
def place(mini_s3: MiniS3Server) -> Iterator[Place]:
    url = write(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)
    flips = Flips(is_shard)
    with FaultProxy(mini_s3.port, choose=flips.choose) as proxy:
        options = {**mini_s3.storage_options, **QUICK, "endpoint_url": proxy.url}
        yield Place(url, flips, mini_s3.storage_options, options)


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview | bytes) else value


def rows(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    names = [name for name in ("__key__", "txt", "bin") if name in batch]
    return [tuple(plain(batch[name][row]) for name in names) for row in range(len(batch["__key__"]))]


def epoch(dataset: Any, **options: Any) -> list[tuple[Any, ...]]:
    with DataLoader(dataset, 4, **options) as loader:
        found = [row for batch in loader for row in rows(batch)]
        assert loader.metrics()["bad"] == []
    return found


def by_number(dataset: Any, numbers: Any) -> list[tuple[Any, ...]]:
    found = dataset[numbers]
    return [(one["__key__"], one["txt"], plain(one["bin"])) for one in (found if isinstance(found, list) else [found])]


def some(place: Place, cache: Any, **options: Any) -> Any:
    del cache
    return epoch(place.open(**options))


WAYS: dict[str, Callable[..., Any]] = {
    "chunks": some,
    "pieces": lambda place, cache, **of: some(place, cache, fields=("txt",), **of),
    "filter": lambda place, cache, **of: some(place, cache, where=None, subset=(3, 9), **of),
    "views": lambda place, cache, **of: some(place, cache, decode={"bin": "view"}, **of),
    "slices": lambda place, cache, **of: [
        row for rank in range(2) for row in epoch(place.open(**of), device_mesh=mesh_of(2, rank))
    ],
    "cache": lambda place, cache, **of: [epoch(one) for one in 2 * [place.open(cache_dir=cache, **of)]],
    "workers": lambda place, cache, **of: epoch(place.open(**of), num_workers=1),
    "a sample": lambda place, cache, **of: by_number(place.open(**of), 7),
    "samples": lambda place, cache, **of: by_number(place.open(**of), [1, 17, 3]),
    "scan": lambda place, cache, **of: [one["__key__"] for one in place.open(**of)],
    "mixture": lambda place, cache, **of: sorted(epoch(Mixture({"a": place.open(**of)}, repeats={"a": 1}))),
    "without obstore's reader": lambda place, cache, **of: some(
        place, cache, storage_options={**place.options, "client": "obstore"}, **of
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", first_here(WAYS, 2))
def test_whatever_reads_a_shard_asks_again(place: Place, tmp_path_factory: pytest.TempPathFactory, way: str) -> None:
    expected = WAYS[way](place, tmp_path_factory.mktemp("cache"))
    assert expected
    for times in TIMES:
        assert WAYS[way](place, tmp_path_factory.mktemp("cache"), times=times) == expected
        assert place.flips.num >= times


@pytest.mark.thorough
def test_a_whole_member_asks_again(mini_s3: MiniS3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distant, "LEAST_BYTES", distant_sets.LEAST)
    url = distant_sets.write_clips(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)
    flips = Flips(is_shard)
    with FaultProxy(mini_s3.port, choose=flips.choose) as proxy:
        options = {**mini_s3.storage_options, **QUICK, "endpoint_url": proxy.url}
        source = StreamingDataset(url, storage_options=options, decode={"clip": distant_sets.ThreePlaces()}).source
        table = source.samples_at(source.urls[0])
        assert table is not None
        start, size = (int(column[4]) for column in table.fields["clip"])
        for times in (*TIMES, MOST_WRONG + 1):
            flips.times = times
            flips.seen.clear()
            if times > MOST_WRONG:
                with pytest.raises(ChecksumError, match="also when read again"):
                    source.read_distant(0, start, start + size, whole=True)
                break
            assert source.read_distant(0, start, start + size, whole=True) == distant_sets.clip(4)


@pytest.mark.parametrize("retries", [0, 3, None])
def test_what_stays_wrong_is_damage(place: Place, retries: int | None) -> None:
    """After as many answers as a request that fails gets."""
    most = MOST_WRONG if retries is None else retries
    place.options |= {} if retries is None else {"max_retries": retries}
    dataset = place.open(times=most + 1, on_error="skip", max_bad_samples=NUM)
    with DataLoader(dataset, 4) as loader:
        found = [rows(batch) for batch in loader]
        bad = {one["key"] for one in loader.metrics()["bad"]}
        assert loader.metrics()["retries"] == place.flips.num - len(place.flips.seen)
    assert bad
    right = {(one["__key__"], one["txt"], one["bin"]) for one in map(sample_of, range(NUM))}
    assert all(row in right for some in found for row in some)


@pytest.mark.thorough
def test_what_is_wrong_in_the_primary_comes_from_a_mirror(
    place: Place, mini_s3: MiniS3Server, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = write(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)
    twin = {"url": mirror, "endpoint_url": mini_s3.storage_options["endpoint_url"]}
    dataset = place.open(times=10**6, mirrors=[twin])
    expected = [(one["__key__"], one["txt"], one["bin"]) for one in map(sample_of, range(NUM))]
    with caplog.at_level(logging.WARNING):
        assert epoch(dataset) == expected
    chunks = dataset.source.table.num_chunks
    assert dataset.source.counters()["mirror_reads"] == chunks
    assert set(place.flips.seen.values()) == {MOST_WRONG + 1}, "the primary is asked for each: it is not down"
    (warning,) = [one for one in caplog.messages if "holds wrong bytes" in one]
    assert place.url.rstrip("/") in warning


@pytest.mark.thorough
def test_a_mirror_that_is_wrong_too_leaves_the_bytes_of_the_primary(place: Place, mini_s3: MiniS3Server) -> None:
    """What is damaged does not depend on a mirror that cannot help."""
    mirror = write(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)
    direct = Storage(mini_s3.storage_options)
    for url in (place.url, mirror):
        shard = f"{url}000.tar"
        data = bytearray(direct.read(shard))
        chunk = place.open().source.chunk(0)
        for at in (chunk.byte_start, *([] if url == place.url else range(chunk.byte_start, chunk.byte_end, 512))):
            data[at + 100] ^= 1
        direct.put(shard, data)
    found = []
    for mirrors in ([], [mirror]):
        dataset = place.open(on_error="skip", max_bad_samples=NUM, **({"mirrors": mirrors} if mirrors else {}))
        with DataLoader(dataset, 4) as loader:
            list(loader)
            found.append(sorted(one["key"] for one in loader.metrics()["bad"]))
    assert found[0]
    assert found[1] == found[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["chunks.parquet", "000.tar.parquet"])
def test_index_files_through_a_proxy(place: Place, name: str) -> None:
    """The other kinds of files: ``tests/catalog/test_index_flips.py``."""
    place.flips.of = lambda path: path.partition("?")[0].endswith(name)

    def seen() -> Any:
        opened = StreamingDataset(place.url, storage_options=place.options, exclude=["00003"])
        return opened.fingerprint, len(opened), opened[4]["txt"]

    expected = seen()
    for times in TIMES:
        place.flips.times, place.flips.num = times, 0
        place.flips.seen.clear()
        assert seen() == expected
        assert place.flips.num >= times
    place.flips.times = 10**6
    place.flips.seen.clear()
    with pytest.raises(IndexFormatError, match=name):
        seen()
