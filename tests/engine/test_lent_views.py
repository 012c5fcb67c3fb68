"""``decode={"bin": "view"}``: views of verified memory, which stay what they are, whoever writes, forks or ends."""

from __future__ import annotations

import gc
import gzip
import logging
import os
import pickle
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, ShuffleConfig, StreamingDataset
from streaming.build.decode import resolve_decoders
from streaming.errors import ChecksumError, ConfigError
from streaming.others.remote import wire
from streaming.run.engine.memory import mapped
from streaming.run.replicas import batch_codec
from streaming.storage.requests.retry import MOST_WRONG
from streaming.testing.children import in_child
from streaming.torch_view import TorchIterable
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets import packed_sets
from tests.support.tiers import first_here

NUM_SAMPLES, SAMPLE_BYTES, PER_SHARD, BATCH = 120, 40_000, 20, 4
VIEW = {"bin": "view"}
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning", "ignore:The given NumPy array is not writable:UserWarning"
)


def payload(i: int) -> bytes:
    return random.Random(i).randbytes(SAMPLE_BYTES + i)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views")
    with ShardWriter(str(folder / "{:04d}.tar"), max_samples=PER_SHARD) as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"__key__": f"{i:05d}", "bin": payload(i), "cls": i})
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "own"))


@pytest.fixture(params=["mapped", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How chunks come into the arena."""
    if request.param == "read":
        monkeypatch.setattr(mapped, "_OWN_DISKS", frozenset())
    return str(request.param)


def open_at(folder: Path | str, **options: Any) -> StreamingDataset:
    options = {"shuffle": ShuffleConfig(lanes=2, window=10), "decode": VIEW, **options}
    return StreamingDataset(str(folder), **options)


def check(batch: dict[str, Any], names: str = "bin") -> list[str]:
    for key, data in zip(batch["__key__"], batch[names], strict=True):
        assert type(data) is memoryview
        assert data.readonly
        assert data.format == "B"
        assert data == payload(int(key))
    return list(batch["__key__"])


def store_of(loader: Any) -> Any:
    return loader._loop._machinery.contents


def is_lent(loader: Any, view: memoryview) -> bool:
    """Whether it lies in the arena."""
    arena = store_of(loader).arena
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return bool(arena.address <= address < arena.address + len(arena.memory))


def scribble(view: Any) -> None:
    torch.frombuffer(view, dtype=torch.uint8)[:] = 7


# --- what users get ---


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("decode", [VIEW, "view", {"*": "view", "cls": int}, {"bin": "view", "cls": None}])
def test_every_sample_comes_as_a_view_of_its_bytes(made: Path, decode: Any) -> None:
    with DataLoader(open_at(made, decode=decode), BATCH) as loader:
        found: list[str] = []
        for _ in range(2):
            for batch in loader:
                found += check(batch)
                if len(found) <= NUM_SAMPLES:  # later some may be copies
                    assert all(is_lent(loader, view) for view in batch["bin"])
    assert sorted(found) == sorted(2 * [f"{i:05d}" for i in range(NUM_SAMPLES)])


def test_order_and_content_are_those_of_bytes(made: Path) -> None:
    def seen(decode: Any) -> list[Any]:
        with DataLoader(open_at(made, decode=decode), BATCH, last_batch="pad") as loader:
            return [
                (batch["__key__"], [bytes(one) for one in batch["bin"]], batch["__valid__"].tolist())
                for _ in range(2)
                for batch in loader
            ]

    assert seen(VIEW) == seen({"bin": None})


def test_a_sample_by_number_and_a_resumed_run(made: Path) -> None:
    dataset = open_at(made)
    sample: Any = dataset[17]
    assert type(sample["bin"]) is memoryview
    assert sample["bin"] == payload(17)
    scribble(sample["bin"])
    same: Any = dataset[[17, 17]]
    scribble(same[0]["bin"])
    assert same[1]["bin"] == payload(17)
    with DataLoader(dataset, BATCH) as loader:
        batches = iter(loader)
        first = [check(next(batches)) for _ in range(5)]
        state = loader.state_dict()
        rest = [check(batch) for batch in batches]
    with DataLoader(open_at(made), BATCH) as loader:
        loader.load_state_dict(state)
        assert [check(batch) for batch in loader] == rest
    assert len(first) + len(rest) == NUM_SAMPLES // BATCH


def test_sources_of_a_mixture_may_differ(made: Path) -> None:
    mixture = Mixture({"a": open_at(made), "b": open_at(made, decode={"bin": None})}, repeats={"a": 1, "b": 1})
    with DataLoader(mixture, 8) as loader:
        for batch in loader:
            for source, key, data in zip(batch["__source__"], batch["__key__"], batch["bin"], strict=True):
                assert type(data) is (memoryview if source == "a" else bytes)
                assert data == payload(int(key))
                if source == "a":
                    scribble(data)


def test_views_are_given_where_samples_are_transformed(made: Path) -> None:
    """The transform may keep part of a view, or write to it; a lost sample has a substitute."""

    def changed(sample: dict[str, Any]) -> dict[str, Any] | None:
        if sample["cls"] == 5:
            return None
        assert sample["bin"] == payload(sample["cls"])
        half = sample["bin"][: SAMPLE_BYTES // 2]
        scribble(sample["bin"][SAMPLE_BYTES // 2 :])
        return {**sample, "bin": half}

    with DataLoader(open_at(made, transform=changed, max_bad_samples=10), BATCH, num_threads=2) as loader:
        kept = []
        for _ in range(2):
            for batch in loader:
                kept += list(zip(batch["__key__"], batch["bin"], strict=True))
    for key, half in kept:
        assert half == payload(int(key))[: SAMPLE_BYTES // 2]
    assert len(kept) == 2 * NUM_SAMPLES
    assert "00005" not in dict(kept)


def test_jagged_fields_are_laid_end_to_end(made: Path) -> None:
    with DataLoader(open_at(made), BATCH, jagged=("bin",)) as loader:
        for batch in loader:
            for key, row in zip(batch["__key__"], batch["bin"].rows(), strict=True):
                assert row.numpy().tobytes() == payload(int(key))


def test_a_field_that_some_samples_lack_and_one_without_bytes(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:04d}.tar")) as writer:
        for i in range(8):
            writer.write({"__key__": f"{i}", "cls": i, **({"bin": payload(i)[: i // 2 * 1000]} if i % 2 else {})})
    with DataLoader(open_at(tmp_path), 8) as loader:
        (batch,) = loader
    for key, data in zip(batch["__key__"], batch["bin"], strict=True):
        i = int(key)
        assert data is None if i % 2 == 0 else data == payload(i)[: i // 2 * 1000]


def test_a_view_takes_no_arguments(made: Path) -> None:
    for decode in ({"bin": "view:uint8"}, "view:224x224", {"bin": "views"}):
        with pytest.raises(ConfigError, match='takes no arguments; write "view"'):
            open_at(made, decode=decode)
    assert resolve_decoders("view").decoder_for("pickle")(b"a") == memoryview(b"a")


def test_packs_refuse_to_decode_their_tokens(tmp_path: Path) -> None:
    packed_sets.write(tmp_path, num_docs=100)
    with pytest.raises(ConfigError, match=r"Packed would not call the decoder of 'tok'"):
        Packed(StreamingDataset(str(tmp_path), decode={"tok": "view"}), packed_sets.LENGTH, dtype="uint32")


# --- where views are copies ---


@pytest.mark.thorough
def test_without_an_index_and_compressed(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in made.glob("*.tar"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    dataset = StreamingDataset(str(tmp_path / "{0000..0005}.tar.gz"), decode=VIEW)
    with DataLoader(dataset, BATCH, epoch_size=NUM_SAMPLES) as loader:
        for batch in loader:
            check(batch)
            scribble(batch["bin"][0])
    assert [record.message for record in caplog.records].count(
        'decode "view": without an index samples are gathered in memory of their own, so views show copies, which cost '
        "what bytes do"
    ) == 1


@pytest.mark.thorough
def test_from_a_store_and_through_a_cache(made: Path, mini_s3: MiniS3Server, tmp_path: Path) -> None:
    url = mini_s3.create_bucket(fresh_name())
    with ShardWriter(f"{url}/{{:04d}}.tar", max_samples=20, storage_options=mini_s3.storage_options) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i:05d}", "bin": payload(i)})
    for cache in (None, tmp_path, tmp_path):  # none, misses, hits
        dataset = open_at(url, storage_options=mini_s3.storage_options, cache_dir=cache)
        with DataLoader(dataset, BATCH) as loader:
            for _ in range(2):
                found = []
                for batch in loader:
                    found += check(batch)
                    scribble(batch["bin"][1])
                assert len(set(found)) == 40
                assert is_lent(loader, batch["bin"][0])


def flip(sample: dict[str, Any]) -> dict[str, Any]:
    assert type(sample["bin"]) is memoryview
    scribble(sample["bin"][:1])
    return {**sample, "other": [sample["bin"][1:9], memoryview(b"")]}


@pytest.mark.usefixtures("one_fork_server")
def test_worker_processes_send_them_as_copies(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a worker a view shows a copy; it arrives as a view of the batch, which lives as long as it."""
    with DataLoader(open_at(made, transform=flip), BATCH, num_workers=1) as loader:
        kept = list(loader)
    for batch in kept:
        for key, data, (part, nothing) in zip(batch["__key__"], batch["bin"], batch["other"], strict=True):
            assert type(data) is type(part) is type(nothing) is memoryview
            assert data.readonly
            assert data == b"\7" + payload(int(key))[1:]
            assert part == payload(int(key))[1:9]
            assert not len(nothing)
    assert sum("with worker processes batches are built" in record.message for record in caplog.records) == 1


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_torch_workers_get_bytes(made: Path, context: str) -> None:
    """What they return is pickled, in a thread whose errors nobody sees."""
    datasets: list[Any] = [open_at(made), TorchIterable(open_at(made))]
    for dataset in datasets:
        loader: Any = torch.utils.data.DataLoader(
            dataset, batch_size=BATCH, num_workers=1, collate_fn=as_list, multiprocessing_context=context
        )
        found = [sample for batch in loader for sample in batch]
        assert {type(sample["bin"]) for sample in found} == {bytes}
        assert all(sample["bin"] == payload(int(sample["__key__"])) for sample in found)
        assert len(found) == NUM_SAMPLES


def test_between_ranks_and_actors_they_travel_as_views(made: Path) -> None:
    with DataLoader(open_at(made), BATCH) as loader:
        batch = next(iter(loader))
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(batch)
        sent = batch_codec.encode(batch, lambda size: torch.empty(size, dtype=torch.uint8))
        assert check(batch_codec.decode(sent)) == batch["__key__"]
        packed = pickle.loads(pickle.dumps(wire.pack(batch)))
        assert wire.num_bytes(packed) >= sum(map(len, batch["bin"]))
        assert check(wire.unpack(packed)) == batch["__key__"]


# --- how long they live ---


def kinds() -> list[Callable[[memoryview], Any]]:
    return [
        lambda view: view,
        lambda view: view[8:][:-8].cast("B"),
        lambda view: np.frombuffer(view, np.uint8)[16:],
        lambda view: torch.frombuffer(view, dtype=torch.uint8)[16:].view(-1),
        lambda view: torch.from_numpy(np.frombuffer(view, np.uint8))[::2],
    ]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", range(5))
def test_whatever_refers_to_a_view_keeps_its_bytes(made: Path, kind: int) -> None:
    """Through an arena of a few chunks, so that every place is used again and again; past the end of the loader."""
    derive = kinds()[kind]
    with DataLoader(open_at(made), BATCH, memory_limit="8MiB") as loader:
        kept = []
        for _ in range(2):
            for batch in loader:
                check(batch)
                kept.append((derive(batch["bin"][0]), derive(memoryview(payload(int(batch["__key__"][0]))))))
        arena = store_of(loader).arena
        assert arena.peak_bytes <= arena.budget_bytes
    del loader, batch, arena
    gc.collect()
    for got, expected in kept:
        assert bytes(memoryview(got if isinstance(got, memoryview) else np.asarray(got).tobytes())) == bytes(
            memoryview(expected if isinstance(expected, memoryview) else np.asarray(expected).tobytes())
        )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("end", ["close", "forget", "leave open"])
def test_files_may_change_after_the_loader(folder: Path, end: str) -> None:
    loader: Any = DataLoader(open_at(folder), BATCH)
    batches: Any = iter(loader)
    batch = next(batches)
    if end == "close":
        loader.close()
    if end != "leave open":
        del loader, batches
        gc.collect()
    for path in folder.glob("*.tar"):
        with path.open("r+b") as file:  # waits for a lease, if there is one
            file.write(bytes(path.stat().st_size))
            file.truncate(512)
    check(batch)
    if end != "leave open":
        maps = Path("/proc/self/maps").read_text()
        assert str(folder) not in maps
    else:
        loader.close()
    check(batch)


def test_nothing_is_left_of_views_that_are_gone(folder: Path) -> None:
    with DataLoader(open_at(folder), BATCH, memory_limit="8MiB") as loader:
        for _ in range(2):
            for batch in loader:
                check(batch)
        del batch
        store = store_of(loader)
        with store.changed:
            store._free_returned()
        assert store.lender.kept_bytes == 0
        held = {place.start for place in store.lender._places.values()}
        assert {place.start for place in store.lender._lent} <= held
    assert str(folder) not in Path("/proc/self/maps").read_text()


# --- who writes ---


@pytest.mark.thorough
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("limit", ["8MiB", "1GiB"])
def test_what_is_written_to_a_view_reaches_nobody_else(folder: Path, limit: str) -> None:
    """Chunks come and go, or stay for the next epochs; views are kept, or not."""
    before = {path: path.read_bytes() for path in folder.glob("*.tar")}
    kept: list[Any] = []
    with DataLoader(open_at(folder), BATCH, memory_limit=limit, last_batch="pad") as loader:
        for epoch in range(4):
            for number, batch in enumerate(loader):
                check(batch)
                if epoch % 2 == 0 or number % 2:
                    scribble(batch["bin"][number % BATCH])
                kept.append(batch["bin"][number % BATCH])
                if epoch == 1:
                    kept.clear()
    assert {path: path.read_bytes() for path in folder.glob("*.tar")} == before


@pytest.mark.usefixtures("way")
def test_a_copy_from_before_another_thread_restored_the_chunk_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataLoader(open_at(folder), BATCH, num_threads=0) as loader:  # nothing is lent ahead
        batches = iter(loader)
        batch = next(batches)
        for view in batch["bin"]:
            scribble(view)
        lender = store_of(loader).lender
        place = next(place for place in lender._places.values() if place.given)
        asked = np.array([min(place.given)]), np.array([16])
        right = bytes(made_again(lender, place)[int(asked[0][0]) - place.start :][:16])
        del batch, view
        looks = []

        def matches(of: Any, *copies: Any) -> bool:
            """The second look is the one at the copy: another thread is quicker."""
            looks.append(of)
            if len(looks) == 2:
                assert [bytes(one) for one in lender.lend(*asked)] == [right]
            return bool(type(lender)._matches(lender, of, *copies))

        monkeypatch.setattr(lender, "_matches", matches)
        assert [bytes(one) for one in lender.lend(*asked)] == [right]
        assert len(looks) > 2


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("wrong", [0, 1, MOST_WRONG, 10**6], ids=["right", "once", "often", "for good"])
@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.parametrize("transform", first_here([None, dict], 1), ids=["columns", "samples"])
def test_a_chunk_that_is_fetched_again_is_checked_as_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any, wrong: int, transform: Any, kept: bool
) -> None:
    """All of its views were written to. (Once it was given out unchecked: 20 wrong rows an epoch, none listed.)"""
    monkeypatch.setattr(mapped, "_OWN_DISKS", frozenset())
    dataset = open_at(folder, on_error=on_error, max_bad_samples=NUM_SAMPLES, transform=transform)
    read_into, asked, is_on = dataset.source.storage.read_into, Counter[tuple[str, int]](), False

    def unreliable(url: str, start: int, out: memoryview, **how: bool) -> None:
        read_into(url, start, out, **how)
        asked[url, start] += is_on
        if is_on and asked[url, start] <= wrong:
            out[random.Random(start).randrange(600, len(out))] ^= 0xFF  # for good: the same byte

    dataset.source.storage.read_into = unreliable  # type: ignore[method-assign]
    views = []
    with DataLoader(dataset, BATCH) as loader:
        for batch in loader:
            check(batch)
            views += batch["bin"]
        for view in views:
            scribble(view)
        del batch, view
        if not kept:
            views.clear()
        is_on = True
        with pytest.raises(ChecksumError) if wrong > MOST_WRONG and on_error == "raise" else nullcontext():
            found, lost = list[str](), 0
            for batch in loader:
                found += check(batch)
                lost += 0 if "__valid__" not in batch else int((~batch["__valid__"]).sum())
            bad = loader.metrics()["bad"]
            assert len(found) == NUM_SAMPLES
            assert lost == len({one["key"] for one in bad}) == len(bad)
            assert bool(bad) == (wrong > MOST_WRONG)
            assert all(one["stage"] == "fetch" and "CRC32C" in one["reason"] for one in bad)
        assert asked


@pytest.mark.usefixtures("way")
def test_what_is_compared_is_what_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who writes to a view, and writes back what was there, between the copy of it and the comparison."""
    with DataLoader(open_at(folder), BATCH) as loader:
        batch = next(iter(loader))
        lender = store_of(loader).lender
        view = batch["bin"][0]
        right, key = bytes(view), batch["__key__"][0]
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0] - lender._arena.address
        scribble(view)
        matches = type(lender)._matches

        def back(self: Any, place: Any, *copies: Any) -> bool:
            if copies:
                torch.frombuffer(view, dtype=torch.uint8)[:] = torch.frombuffer(bytearray(right), dtype=torch.uint8)
            return bool(matches(self, place, *copies))

        monkeypatch.setattr(type(lender), "_matches", back)
        (copy,) = lender.lend(np.array([address]), np.array([len(right)]))
        assert bytes(copy) == right == payload(int(key))
        assert bytes(view) == right


def made_again(lender: Any, place: Any) -> bytearray:
    """The bytes of a chunk, fetched again."""
    again = bytearray(place.num_bytes)
    lender._fetch(place.wanted, memoryview(again))
    return again


def test_the_same_sample_twice_in_a_batch(made: Path) -> None:
    with DataLoader(open_at(made, subset=(0, 3)), 8, last_batch="pad") as loader:
        for _ in range(3):
            (batch,) = loader
            check(batch)
            for place, (key, view) in enumerate(zip(batch["__key__"], batch["bin"], strict=True)):
                scribble(view)
                for other, data in list(zip(batch["__key__"], batch["bin"], strict=True))[place + 1 :]:
                    assert data == payload(int(other)), (key, other)


@pytest.mark.thorough
def test_a_chunk_without_a_checksum_is_copied(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing could tell later whether it was written to."""
    dataset = open_at(made)
    source: Any = dataset.source
    whole = source.chunk
    source.chunk = lambda number: replace(whole(number), crc32c=None)
    with DataLoader(dataset, BATCH) as loader:
        for _ in range(2):
            for batch in loader:
                check(batch)
                assert not any(is_lent(loader, view) for view in batch["bin"])
                for view in batch["bin"]:
                    scribble(view)
    assert sum("some views show copies" in record.message for record in caplog.records) == 1


# --- how much they take ---


@pytest.mark.usefixtures("way")
def test_views_that_are_kept_count_in_the_memory_limit(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever keeps everything gets copies from some point on, and one line in the log."""
    caplog.set_level(logging.INFO)
    kept = []
    with DataLoader(open_at(made), BATCH, memory_limit="6MiB") as loader:
        for _ in range(2):
            for batch in loader:
                check(batch)
                kept.append(batch)
                store = store_of(loader)
                assert store.arena.used_bytes <= store.arena.budget_bytes <= (6 << 20) * 3 // 4
                assert store.lender.limit_bytes <= store.arena.budget_bytes // 2
        lent = [is_lent(loader, batch["bin"][0]) for batch in kept]
    assert any(lent)
    assert not all(lent)
    assert sum("some views show copies" in record.message for record in caplog.records) == 1
    for batch in kept:
        check(batch)


def test_finalizers_wait_for_nothing(made: Path) -> None:
    """They may run in a thread, or in a function, that has the locks."""
    with DataLoader(open_at(made), BATCH, num_threads=0) as loader:  # no later batch has views of its chunks
        batches = iter(loader)
        batch = next(batches)
        store = store_of(loader)
        is_done = threading.Event()

        def drop() -> None:
            batch.clear()
            is_done.set()

        lender = store.lender
        with store.changed, lender._lock:
            for place in lender._lent:
                place.whole = None
            thread = threading.Thread(target=drop)
            thread.start()
            assert is_done.wait(PATIENCE_S)
            thread.join()
            assert lender._returned
        assert sum(len(check(batch)) for batch in batches) == NUM_SAMPLES - BATCH


# --- forks ---


@pytest.mark.thorough
@pytest.mark.usefixtures("way")
def test_a_forked_child_has_its_own(folder: Path) -> None:
    """It writes, keeps and drops; its parent goes on, and its files change. Neither sees anything of the other."""
    with DataLoader(open_at(folder), BATCH, memory_limit="8MiB") as loader:
        batches: Iterator[Any] = iter(loader)
        kept = [next(batches) for _ in range(3)]
        go, ready = os.pipe(), os.pipe()

        def child() -> list[bool]:
            views = [(key, view) for batch in kept for key, view in zip(batch["__key__"], batch["bin"], strict=True)]
            scribble(views[0][1][:100])  # torch's threads, which it would use for more, are not here
            kept.clear()
            gc.collect()
            os.write(ready[1], b"1")
            os.read(go[0], 1)
            return [view == payload(int(key)) for key, view in views[1:]]

        def parent() -> None:
            os.read(ready[0], 1)
            for batch in kept:
                check(batch)
            kept.clear()
            for batch in batches:
                check(batch)
            for path in folder.glob("*.tar"):
                with path.open("r+b") as file:
                    file.write(bytes(path.stat().st_size))
            os.write(go[1], b"1")

        thread = threading.Thread(target=parent)
        thread.start()
        assert in_child(child) == [True] * (3 * BATCH - 1)
        thread.join()
    for end in (*go, *ready):
        os.close(end)
