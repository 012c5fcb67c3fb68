"""The DataLoader's surface and life cycle: what API.md says, errors on their way to the loop, nothing left behind."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming import DataLoader, DeviceMeshFetcher, StreamingDataset
from streaming.errors import ConfigError, DecodeError, IteratorEndedError
from streaming.run.engine.threads.jobs import JobThreads
from streaming.shards.fetch.read import FetchRange
from streaming.shards.tar import ChunkLayout
from tests.support.processes.leftovers import leftovers, our_threads
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.sets.data_sets import SampleSet, check_batch, mesh_of, play, write_set

SIZE = 24
NUM_BATCHES = 202 // SIZE


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("loader") / "train")


@pytest.fixture
def dataset(samples: SampleSet) -> StreamingDataset:
    return samples.open(seed=5)


@pytest.fixture(autouse=True)
def nothing_left(samples: SampleSet, one_fork_server: None) -> Iterator[None]:
    """Whatever a test does with loaders, it leaves nothing behind."""
    before = leftovers()
    yield
    sys.last_exc = None  # type: ignore[assignment]
    assert leftovers() - before == {}


def loader_of(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"global_batch_size": SIZE, "device_mesh": mesh_of(1, 0)} | options)


# The surface


def test_length_epoch_and_batches(dataset: StreamingDataset) -> None:
    with loader_of(dataset) as loader:
        assert (len(loader), loader.epoch, loader.global_batch_size) == (NUM_BATCHES, 0, SIZE)
        for epoch in range(3):
            assert loader.epoch == epoch
            batches = list(loader)
            assert len(batches) == NUM_BATCHES
            assert loader.epoch == epoch + 1
    batch = batches[0]
    assert list(batch) == ["__key__", "__url__", "bin", "cls", "json", "txt", "vec.npy"]
    assert all(url.endswith(".tar") and Path(url).is_file() for url in batch["__url__"])
    assert batch["vec.npy"].shape == (SIZE, 4)
    assert batch["vec.npy"].dtype == torch.float32


@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("epoch_size", [None, 100, 500])
def test_the_length_is_the_number_of_batches(
    dataset: StreamingDataset, last_batch: str, epoch_size: int | None
) -> None:
    with loader_of(dataset, last_batch=last_batch, epoch_size=epoch_size) as loader:
        assert sum(1 for _ in loader) == len(loader)
        assert sum(1 for _ in loader) == len(loader)


def test_a_callable_makes_the_data_set(samples: SampleSet, dataset: StreamingDataset) -> None:
    with loader_of(lambda: samples.open(seed=5)) as loader, loader_of(dataset) as other:
        assert list(map(check_batch, loader)) == list(map(check_batch, other))


def test_metrics_count_what_happened(dataset: StreamingDataset) -> None:
    data_bytes = int((dataset.source.table.byte_end - dataset.source.table.byte_start).sum())
    with loader_of(dataset, last_batch="partial") as loader:
        assert loader.metrics()["bad"] == []
        for _ in loader:
            pass
        metrics = loader.metrics()
        assert metrics["batches"] == len(loader)
        assert metrics["fetched_bytes"] == data_bytes
        assert metrics["fetched_chunks"] == dataset.source.table.num_chunks
        assert 0 <= metrics["first_batch_wait_s"] <= metrics["first_batch_s"]
        for _ in loader:  # all of it fits into memory_limit: the second epoch reads nothing
            pass
        assert loader.metrics()["fetched_bytes"] == data_bytes


def test_describe_says_what_it_waits_for(dataset: StreamingDataset) -> None:
    gate = threading.Event()
    held = hold_fetches(dataset, gate)
    with loader_of(dataset) as loader:
        assert loader.describe() == "not running"
        thread = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
        thread.start()
        assert held.wait(PATIENCE_S)
        assert "batch 0 of 8" in loader.describe()
        assert ".tar bytes " in loader.describe()
        gate.set()
        thread.join()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": None}, "exactly one of batch_size"),
        ({"batch_size": 4}, "exactly one of batch_size"),
        ({"global_batch_size": 0}, "global_batch_size.*positive"),
        ({"global_batch_size": None, "batch_size": 0}, "batch_size.*positive"),
        ({"global_batch_size": None, "batch_size": True}, "batch_size.*positive"),
        ({"global_batch_size": 2.0}, "global_batch_size.*positive"),
        ({"global_batch_size": 203}, "do not fill one global batch of 203.*last_batch"),
        ({"global_batch_size": 2, "device_mesh": mesh_of(3, 0)}, "2 samples cannot be dealt to 3"),
        (
            {"global_batch_size": 300, "last_batch": "partial", "device_mesh": mesh_of(300, 0)},
            "202 samples .* 300 data",
        ),
        ({"last_batch": "keep"}, "drop, pad, partial"),
        ({"epoch_size": 0}, "epoch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 0}, "prefetch_factor"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"memory_limit": 0}, "memory_limit"),
    ],
)
def test_arguments_that_cannot_work(dataset: StreamingDataset, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loader_of(dataset, **options)


@pytest.mark.parametrize("wrong", [None, 3, lambda: 3])
def test_what_is_no_data_set(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="dataset: expected a StreamingDataset"):
        loader_of(wrong)


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", True])
def test_epochs_that_are_none(dataset: StreamingDataset, epoch: Any) -> None:
    with loader_of(dataset) as loader, pytest.raises(ConfigError, match="epoch"):
        loader.set_epoch(epoch)


# Life cycle


@pytest.mark.parametrize("num_batches", [1, 5, NUM_BATCHES])
def test_close_from_every_state_of_workers(dataset: StreamingDataset, num_batches: int) -> None:
    """Without workers: ``test_loop_contract``."""
    loader = loader_of(dataset, num_workers=3)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    loader.close()
    loader.close()
    if num_batches == NUM_BATCHES:
        assert list(batches) == []
    else:
        with pytest.raises(IteratorEndedError, match=r"the loader was closed by .*test_loader\.py:\d+\. Call iter"):
            next(batches)
    assert loader.epoch == (num_batches == NUM_BATCHES)
    expected = play(dataset, 1, global_batch_size=SIZE, epochs=2)[0]
    first = NUM_BATCHES if num_batches else 0
    assert list(map(check_batch, loader)) == expected[first : first + NUM_BATCHES]  # it can be used again
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 3])
def test_deleted_in_mid_epoch(dataset: StreamingDataset, num_workers: int) -> None:
    others = our_threads()
    loader = loader_of(dataset, num_workers=num_workers)
    batches = iter(loader)
    batch = next(batches)
    del loader, batches
    gc.collect()
    check_batch(batch)  # what was handed out stays
    assert our_threads() <= others


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_never_change_after_they_were_handed_out(dataset: StreamingDataset, num_workers: int) -> None:
    with loader_of(dataset, num_workers=num_workers, memory_limit="2MiB") as loader:
        kept = list(loader) + list(loader)
    for batch in kept:
        check_batch(batch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, GeneratorExit])
def test_an_exception_in_the_loop_body(dataset: StreamingDataset, error: type[BaseException]) -> None:
    expected = play(dataset, 1, global_batch_size=SIZE, epochs=2)[0]
    with loader_of(dataset, num_workers=2) as loader:
        with pytest.raises(error):  # noqa: PT012
            for number, _ in enumerate(loader):
                if number == 2:
                    raise error
        assert loader.state_dict()["samples_seen"] == 3 * SIZE
        assert list(map(check_batch, loader)) == expected[NUM_BATCHES:]


def hold_fetches(dataset: StreamingDataset, gate: threading.Event) -> threading.Event:
    """Hold back every fetch until ``gate`` is set; the event returned is set when the first one is being held."""
    fetch, held = dataset.source.fetch_unit, threading.Event()

    def holding(wanted: FetchRange, out: memoryview) -> ChunkLayout:
        held.set()
        assert gate.wait(PATIENCE_S)
        layout: ChunkLayout = fetch(wanted, out)
        return layout

    dataset.source.fetch_unit = holding  # type: ignore[method-assign]
    return held


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 3])
def test_interrupted_while_it_waits(dataset: StreamingDataset, num_workers: int) -> None:
    gate = threading.Event()
    held = hold_fetches(dataset, gate)
    main, taken = threading.get_ident(), threading.Event()

    with loader_of(dataset, num_workers=num_workers) as loader:

        def interrupt() -> None:
            assert held.wait(PATIENCE_S)
            loader.describe()  # comes back when the loop has let go of the lock: it waits, or is just about to
            while loader._loop.running is not None:  # Python sleeps on a signal that comes just before it blocks
                signal.pthread_kill(main, signal.SIGINT)
                taken.wait(0.5)

        batches = iter(loader)
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        taken.set()
        thread.join()
        gate.set()
        assert len(list(loader)) == NUM_BATCHES


@pytest.mark.parametrize("num_calls", [0, 3, 6])
def test_interrupted_while_it_asks_for_chunks(
    dataset: StreamingDataset, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C comes at any place; the next loop starts from a clean slate."""
    submit = JobThreads.submit
    calls = iter(range(10**6))

    def interrupted(threads: JobThreads, job: Any) -> None:
        asks = threading.current_thread() is threading.main_thread()  # no other thread ever gets a Control-C
        if asks and next(calls) == num_calls:
            raise KeyboardInterrupt
        submit(threads, job)

    monkeypatch.setattr(JobThreads, "submit", interrupted)
    with loader_of(dataset) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(loader), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        if thread.is_alive():
            pytest.fail(f"the loop after the interrupt hangs: {loader.describe()}")
        assert list(map(check_batch, found)) == play(dataset, 1, global_batch_size=SIZE)[0]


def test_closed_by_another_thread_while_it_waits(dataset: StreamingDataset) -> None:
    gate = threading.Event()
    held = hold_fetches(dataset, gate)
    loader = loader_of(dataset)
    ended: list[str] = []

    def consume() -> None:
        try:
            next(iter(loader))
        except IteratorEndedError as error:
            ended.append(str(error))

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert held.wait(PATIENCE_S)
    loader._loop.position.close()
    loader._loop.running.close()  # type: ignore[union-attr]  the part of close() that does not wait for fetches
    thread.join(PATIENCE_S)
    waits = thread.is_alive()
    gate.set()
    if waits:
        pytest.fail("close() does not wake the loop that waits")
    loader.close()
    (message,) = ended
    assert "the loader was closed by" in message


def test_two_loaders_side_by_side(samples: SampleSet, dataset: StreamingDataset) -> None:
    other = samples.open(seed=6)
    expected = [play(one, 1, global_batch_size=SIZE)[0] for one in (dataset, other)]
    with loader_of(dataset) as one, loader_of(other) as two, loader_of(dataset, num_workers=2) as three:
        found = [[check_batch(batch) for batch in batches] for batches in zip(one, two, three, strict=True)]
    assert found == [[a, b, a] for a, b in zip(*expected, strict=True)]


# Errors reach the loop


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("stage", ["transform", "decode"])
def test_an_error_of_the_users_function_names_shard_and_sample(
    samples: SampleSet, stage: str, num_workers: int
) -> None:
    def broken(value: Any) -> Any:
        text = value["txt"] if stage == "transform" else value.decode()
        if text == "text of 77":
            raise LookupError("out of luck")
        return value

    options: dict[str, Any] = {"transform": broken} if stage == "transform" else {"decode": {"txt": broken}}
    dataset = samples.open(on_error="raise", shuffle=False, **options)
    with loader_of(dataset, num_workers=num_workers) as loader:
        batches = iter(loader)
        for _ in range(77 // SIZE):
            next(batches)
        with pytest.raises(DecodeError, match=r"000004\.tar: sample '00077'.*LookupError: out of luck") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, LookupError)
        assert loader.state_dict()["samples_seen"] == 72  # the batch that failed is not counted
        with pytest.raises(IteratorEndedError, match=r"has already ended with an error \(DecodeError"):
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("error", [LookupError, StopIteration, KeyboardInterrupt, MemoryError, SystemExit])
def test_an_error_of_collate_fn_reaches_the_loop(
    samples: SampleSet, num_workers: int, error: type[BaseException]
) -> None:
    """Whatever it is, StopIteration too: an epoch never just ends early."""

    def collate(samples: list[Any]) -> Any:
        if any(one["cls"] == 77 for one in samples):
            raise error("out of luck")
        return len(samples)

    with loader_of(samples.open(shuffle=False), num_workers=num_workers, collate_fn=collate) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [SIZE] * 3
        with pytest.raises((error, RuntimeError)) as caught:
            next(batches)
        told = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "out of luck" in told or "out of luck" in str(caught.value.__cause__)
        assert loader.epoch == 0
        assert loader.state_dict()["samples_seen"] == 72


@pytest.mark.parametrize("num_workers", [0, 3])
def test_an_error_of_collate_fn_says_which_samples(samples: SampleSet, num_workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        raise LookupError("out of luck")

    with loader_of(samples.open(shuffle=False), num_workers=num_workers, collate_fn=collate) as loader:
        with pytest.raises(LookupError, match="out of luck") as caught:
            next(iter(loader))
        notes = "".join(getattr(caught.value, "__notes__", ()))
        assert "collate_fn" in notes
        assert "00000" in notes
        assert "000000.tar" in notes


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_fetch_that_fails_reaches_the_loop(dataset: StreamingDataset, num_workers: int) -> None:
    fetch = dataset.source.fetch_unit
    broken = dataset.source.chunk(17)

    def failing(wanted: FetchRange, out: memoryview) -> ChunkLayout:
        if wanted == broken:
            raise PermissionError("out of luck")
        layout: ChunkLayout = fetch(wanted, out)
        return layout

    dataset.source.fetch_unit = failing  # type: ignore[method-assign]
    with loader_of(dataset, num_workers=num_workers, last_batch="partial") as loader:
        with pytest.raises(PermissionError, match="out of luck"):
            list(loader)
        dataset.source.fetch_unit = fetch  # type: ignore[method-assign]
    with loader_of(dataset) as loader:
        assert len(list(loader)) == NUM_BATCHES


# collate_fn, transform, fields, decoding


def test_collate_fn_gets_the_samples_and_makes_the_batch(samples: SampleSet) -> None:
    dataset = samples.open(shuffle=False)
    with loader_of(dataset, collate_fn=lambda samples: [one["cls"] for one in samples], last_batch="pad") as loader:
        batches = list(loader)
    assert batches[0] == list(range(SIZE))
    with loader_of(
        dataset, last_batch="pad", collate_fn=lambda samples: [one["__valid__"] for one in samples]
    ) as loader:
        assert [sum(batch) for batch in loader] == [SIZE] * NUM_BATCHES + [202 % SIZE]


@pytest.mark.thorough
def test_transform_changes_samples(samples: SampleSet) -> None:
    def transform(sample: Mapping[str, Any]) -> Any:
        return {"__key__": sample["__key__"], "twice": sample["cls"] * 2}

    with loader_of(samples.open(shuffle=False, transform=transform)) as loader:
        batch = next(iter(loader))
    assert set(batch) == {"__key__", "twice"}
    assert batch["twice"].tolist() == list(range(0, 2 * SIZE, 2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fields_and_decoding(samples: SampleSet, num_workers: int) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"fields": ("cls",)}, {"cls": torch.arange(SIZE)}),
        ({"fields": (".CLS", "txt")}, {"cls": torch.arange(SIZE), "txt": [f"text of {i}" for i in range(SIZE)]}),
        ({"fields": ("cls",), "decode": None}, {"cls": [str(i).encode() for i in range(SIZE)]}),
        ({"fields": ("cls",), "decode": {"cls": str}}, {"cls": [str(i) for i in range(SIZE)]}),
        ({"fields": ("cls",), "decode": {"cls": float}}, {"cls": torch.arange(SIZE, dtype=torch.float64)}),
        ({"fields": ("json",), "decode": {"json": len}}, {"json": torch.tensor([12 + (i > 9) for i in range(SIZE)])}),
    ]
    for options, expected in cases:
        with loader_of(samples.open(shuffle=False, **options), num_workers=num_workers) as loader:
            batch = next(iter(loader))
        assert set(batch) == {"__key__", "__url__", *expected}
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(batch[name], value), options
                assert batch[name].dtype == value.dtype
            else:
                assert batch[name] == value


def test_the_fetcher_gives_lists_of_samples_from_this_thread(dataset: StreamingDataset, samples: SampleSet) -> None:
    threads = set()

    def transform(sample: Any) -> Any:
        threads.add(threading.current_thread())
        return sample

    dataset = samples.open(transform=transform, shuffle=False)
    with DeviceMeshFetcher(dataset, batch_size=10, device_mesh=mesh_of(2, 1)) as fetcher:
        batches = list(fetcher)
    assert [len(batch) for batch in batches] == [10] * len(fetcher)
    assert batches[0][0]["__key__"] == samples.keys[10]
    assert batches[0][0]["json"] == {"number": 10}
    assert threads == {threading.current_thread()}


def test_as_many_threads_build_as_batches_may_be_under_way(samples: SampleSet) -> None:
    """A thread, and the process behind it, keeps memory of its own after its first batch: others are not woken."""
    threads = Counter[str]()

    def transform(sample: Any) -> Any:
        threads[threading.current_thread().name] += 1
        return {"x": torch.zeros(1 << 20, dtype=torch.uint8)}

    def builders() -> set[str]:
        return {name for name in list(threads) if name != threading.current_thread().name}

    dataset = samples.open(transform=transform, shuffle=False)
    with DataLoader(dataset, batch_size=2, num_threads=8, memory_limit="48MiB") as loader:  # 12 MiB: a batch has 2
        for _ in loader:  # a thread, not this one, builds the next batch, or one of those after it
            until(builders, "a thread builds")
    assert builders() == {"shardstream-build-0"}
