"""A thread of ours that ends by an exception hands it to the consumer, whatever line it came from: nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming import DataLoader
from streaming.build.batches.collate import default_collate
from streaming.errors import IteratorEndedError
from streaming.run.engine import delivery
from streaming.run.engine.delivery import Delivery
from streaming.run.engine.memory import mapped
from streaming.run.engine.memory.chunk_store import ChunkStore
from streaming.run.engine.memory.mapped import FileMaps
from streaming.run.engine.pipeline import Pipeline
from streaming.run.engine.unindexed.batches import ShardStream
from streaming.shards.fetch.read import FetchRange
from tests.support.processes.leftovers import leftovers, our_threads
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.sets.data_sets import SMALL_WINDOW, SampleSet, write_set

EPOCH = 96


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("indexed"), (32, 32, 32))


@pytest.fixture
def streamed(tmp_path: Path, not_scanned: None) -> SampleSet:
    return replace(write_set(tmp_path / "streamed", (32, 32, 32), indexed=False), options=SMALL_WINDOW)


@pytest.fixture(params=["indexed", "streamed"])
def samples(request: pytest.FixtureRequest) -> SampleSet:
    found: SampleSet = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_left(indexed: SampleSet) -> Iterator[None]:
    before = leftovers()
    yield
    assert leftovers() - before == {}  # what earlier tests left may end meanwhile


def loader_of(samples: SampleSet, **options: Any) -> DataLoader:
    """Two builder threads, and a function of the user's, so that they build."""
    options = {"collate_fn": default_collate, "num_threads": 2, **options}
    return DataLoader(samples.open(seed=1), batch_size=8, epoch_size=EPOCH, **options)


def consume(loader: DataLoader) -> None:
    """Epochs of a consumer that takes its time, so that the builder threads build: until one of them fails."""
    for _ in range(10_000):
        for _ in loader:
            threading.Event().wait(0.001)


class Lazy(Mapping[str, Any]):
    """A mapping that cannot say what it holds."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("not computed yet")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("not computed yet")

    def __len__(self) -> int:
        raise RuntimeError("not computed yet")


def contains_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


ODD: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)], layout=torch.jagged),
    "meta": lambda: torch.zeros(4, device="meta"),
    "lazy mapping": Lazy,
    "contains itself": contains_itself,
    "deep": lambda: [[[[[{"a": [1, 2.5, None, {"b": {1, 2}}]}]]]]],
    "object that refers to modules": threading.local,
}


@pytest.mark.parametrize("kind", list(ODD))
def test_a_batch_of_any_content_is_handed_out(samples: SampleSet, kind: str) -> None:
    def collate(batch: list[Any]) -> Any:
        return {"odd": ODD[kind](), "count": len(batch)}

    with loader_of(samples, collate_fn=collate) as loader:
        assert sum(batch["count"] for batch in loader) == EPOCH


class BrokenError(Exception):
    """What a line of ours raises here."""


def breaks(number: int) -> Callable[..., Any]:
    """A function that raises from its call number ``number`` on."""
    calls = [0]

    def function(*_: Any, **__: Any) -> Any:
        calls[0] += 1
        if calls[0] > number:
            raise BrokenError(f"call {calls[0]}")
        return 0

    return function


@pytest.mark.parametrize("number", [0, 3])
def test_weighing_a_batch_fails(samples: SampleSet, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "weigh", breaks(number))
    with loader_of(samples) as loader, pytest.raises(BrokenError):
        consume(loader)


@pytest.mark.parametrize("line", ["_num_ready", "_can_start", "_finish", "_advance"])
def test_a_line_between_two_batches_fails(samples: SampleSet, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In builder threads alone: the consumer does not run into it by itself."""
    for kind in (Pipeline, ShardStream):
        original = getattr(kind, line)

        def only_in_builders(self: Any, *args: Any, original: Any = original) -> Any:
            if threading.current_thread().name.startswith("shardstream-build"):
                raise BrokenError(line)
            return original(self, *args)

        monkeypatch.setattr(kind, line, only_in_builders)
    with loader_of(samples) as loader, pytest.raises(BrokenError):
        consume(loader)


def test_entering_what_was_fetched_fails(indexed: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkStore, "_enter", breaks(0))
    with loader_of(indexed) as loader, pytest.raises(BrokenError):
        next(iter(loader))


def test_a_fetch_ends_by_what_is_no_exception(indexed: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(*_: Any) -> Any:
        raise SystemExit(3)

    monkeypatch.setattr(ChunkStore, "_fetched", leaves)
    with loader_of(indexed) as loader, pytest.raises(SystemExit):
        next(iter(loader))


def test_the_thread_that_gives_leases_back_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are then not safe to read; the next loop has threads that are."""
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1)
    monkeypatch.setattr(mapped, "_LOOK_EVERY_S", 0.01)
    samples = write_set(tmp_path, (8, 8, 8, 8))
    with loader_of(samples) as loader:
        assert len(list(loader)) == EPOCH // 8
        if not loader.metrics().get("mapped_bytes"):
            pytest.skip("no leases on this file system")
        monkeypatch.setattr(FileMaps, "give_back", breaks(0))
        with pytest.raises(BrokenError):
            consume(loader)
        monkeypatch.undo()
        loader.set_epoch(7)
        assert len(list(loader)) == EPOCH // 8


@pytest.mark.parametrize("line", ["_gather", "_admit", "_before_sample"])
def test_the_reading_thread_fails(streamed: SampleSet, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardStream, line, breaks(0))
    with loader_of(streamed) as loader, pytest.raises(BrokenError):
        next(iter(loader))


def test_close_from_another_thread_while_the_consumer_builds(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer's loop ends by name, and what it reads from stays until it has."""
    building, closed = threading.Event(), threading.Event()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        building.set()
        closed.wait(PATIENCE_S)
        return sample

    dataset = samples.open(seed=1, transform=transform)
    loader = DataLoader(dataset, batch_size=8, epoch_size=EPOCH, num_threads=0)
    found: list[Any] = []

    def consume() -> None:
        try:
            found.extend(loader)
        except BaseException as error:
            found.append(error)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    assert building.wait(PATIENCE_S)
    closing = threading.Event()
    begin_to_close = Delivery._begin_to_close

    def begin(self: Delivery) -> bool:
        begun = begin_to_close(self)
        closing.set()
        return begun

    monkeypatch.setattr(Delivery, "_begin_to_close", begin)
    closer = threading.Thread(target=loader.close, daemon=True)
    closer.start()
    assert closing.wait(PATIENCE_S)
    closed.set()
    consumer.join()
    closer.join()
    assert [type(one) for one in found] == [IteratorEndedError], "by name, not by what its bytes are gone"


def test_close_waits_for_builders_that_start_meanwhile(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first builder starts the second after its first batch: here while ``close`` waits for the first one."""
    others, builders = our_threads(), ("shardstream-build-0", "shardstream-build-1")
    taken, builds, waited_for = threading.Event(), threading.Event(), {name: threading.Event() for name in builders}
    join, build_all = threading.Thread.join, Delivery._build_all

    def noted(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name in waited_for:
            waited_for[self.name].set()
        join(self, timeout)

    def late(self: Delivery, place: int) -> None:
        (waited_for[builders[1]] if place else taken).wait(PATIENCE_S)
        build_all(self, place)

    def collate(rows: list[dict[str, Any]]) -> Any:
        if threading.current_thread().name == builders[0]:
            builds.set()
            waited_for[builders[0]].wait(PATIENCE_S)
        return default_collate(rows)

    monkeypatch.setattr(threading.Thread, "join", noted)
    monkeypatch.setattr(Delivery, "_build_all", late)
    loader = loader_of(samples, collate_fn=collate)
    batches = iter(loader)
    next(batches)
    taken.set()
    assert builds.wait(PATIENCE_S)
    loader.close()
    left = our_threads() - others
    waited_for[builders[1]].set()
    assert not left


def test_a_builder_that_starts_late_finds_what_was_fetched_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the consumer is in its step nobody else looks, and nobody tells it again."""
    starts, in_step, second = threading.Event(), threading.Event(), threading.Event()
    build_all = Delivery._build_all

    def late(self: Delivery, place: int) -> None:
        starts.wait(PATIENCE_S)
        build_all(self, place)

    monkeypatch.setattr(Delivery, "_build_all", late)
    dataset = write_set(tmp_path / "train", (8, 8, 8)).open(shuffle=False)
    fetch, fetched = dataset.source.fetch_unit, threading.Semaphore(0)

    def fetch_later(wanted: FetchRange, out: memoryview) -> Any:
        if "000000" not in wanted.url:
            in_step.wait(PATIENCE_S)
        found = fetch(wanted, out)
        fetched.release()
        return found

    def collate(samples: list[dict[str, Any]]) -> Any:
        if samples[0]["cls"] == 8:
            second.set()
        return default_collate(samples)

    dataset.source.fetch_unit = fetch_later  # type: ignore[method-assign]
    with DataLoader(dataset, batch_size=8, num_threads=2, collate_fn=collate) as loader:
        batches = iter(loader)
        next(batches)
        in_step.set()
        for _ in range(3):
            assert fetched.acquire(timeout=PATIENCE_S)
        until(lambda: loader.metrics()["fetched_chunks"] == 3, "the threads that fetched have said so")
        starts.set()
        assert second.wait(PATIENCE_S)
        batches.close()
