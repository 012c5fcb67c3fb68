"""Shards without an index: small sets are indexed at start, large and compressed ones streamed shard by shard."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import random
import re
import shutil
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import (
    ConfigError,
    DecodeError,
    IndexMissingError,
    IteratorEndedError,
    StateError,
    TarError,
    TooManyBadSamplesError,
)
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.run.engine.delivery import Haste
from streaming.run.engine.unindexed.samples import RawSample, StreamSettings, shuffled
from tests.support.processes.leftovers import leftovers
from tests.support.sets.data_sets import (
    SMALL_WINDOW,
    WORLD_SIZES,
    SampleSet,
    check_batch,
    loaders,
    merged,
    mesh_of,
    play,
    total,
    write_set,
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards without an index."""
    return write_set(tmp_path_factory.mktemp("unindexed") / "train", indexed=False)


@pytest.fixture(scope="module")
def compressed(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    directory = tmp_path_factory.mktemp("compressed")
    for path in Path(samples.url).glob("*.tar"):
        with path.open("rb") as source, gzip.open(directory / f"{path.name}.gz", "wb") as target:
            shutil.copyfileobj(source, target)
    return SampleSet(url=f"{directory}/", keys=samples.keys, options=SMALL_WINDOW)


@pytest.fixture
def large(samples: SampleSet, not_scanned: None) -> SampleSet:
    """The same, as if it were too large to be indexed at start."""
    return replace(samples, options=SMALL_WINDOW)


@pytest.fixture(params=["large", "compressed"])
def streamed(request: pytest.FixtureRequest) -> SampleSet:
    found: SampleSet = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_left(samples: SampleSet, one_fork_server: None) -> Iterator[None]:
    before = leftovers()
    yield
    assert leftovers() - before == {}


# Small: indexed in memory


@pytest.mark.thorough
def test_a_small_set_keeps_every_promise(samples: SampleSet) -> None:
    dataset = samples.open(seed=5)
    assert dataset.indexed
    assert len(dataset) == 202
    options: dict[str, Any] = {"global_batch_size": 24, "last_batch": "partial", "epochs": 2}
    reference = merged(play(dataset, 1, **options))
    assert total(reference[:9]) == Counter(samples.keys)
    for world_size in WORLD_SIZES[1:]:
        assert merged(play(samples.open(seed=5), world_size, **options)) == reference
    assert not (Path(samples.url) / "_shardstream").exists()


def test_a_small_set_resumes(samples: SampleSet) -> None:
    (loader,) = loaders(samples.open(seed=5), 1, global_batch_size=24)
    rows = [check_batch(batch) for _, batch in zip(range(3), loader, strict=False)]
    rest = play(samples.open(seed=5), 3, state=loader.state_dict(), global_batch_size=24)
    assert merged([rows]) + merged(rest) == merged(play(samples.open(seed=5), 1, global_batch_size=24))


# Large or compressed: streamed


def test_it_says_what_is_missing_and_the_cure(streamed: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    dataset = streamed.open()
    assert not dataset.indexed
    assert re.search(r"7 shards, no index", repr(dataset))
    for ask in (len, lambda dataset: dataset[0]):
        with pytest.raises(IndexMissingError, match="index"):
            ask(dataset)
    cure = "shard_tools index" if any(Path(streamed.url).glob("*.tar")) else "gunzip"
    with pytest.raises(ConfigError, match=rf"{cure}.*epoch_size=…"):
        DataLoader(dataset, batch_size=8, device_mesh=mesh_of(1, 0))
    with caplog.at_level(logging.WARNING), DataLoader(dataset, batch_size=8, epoch_size=80, device_mesh=mesh_of(1, 0)):
        pass
    assert cure in caplog.text
    with pytest.raises(ConfigError, match="do not fill one global batch"):
        DataLoader(dataset, batch_size=8, epoch_size=7, device_mesh=mesh_of(1, 0))


def test_in_order_it_is_the_storage_order_without_end(streamed: SampleSet) -> None:
    dataset = streamed.open(shuffle=False)
    with DataLoader(dataset, batch_size=10, epoch_size=400, device_mesh=mesh_of(1, 0)) as loader:
        assert len(loader) == 40
        keys = [key for batch in loader for key in check_batch(batch)]
        assert loader.epoch == 1
    assert keys == [*streamed.keys, *streamed.keys][:400]


@pytest.mark.thorough
def test_the_order_is_that_of_earlier_releases(large: SampleSet) -> None:
    """Through a window bounded by its samples, and through one bounded by its bytes."""
    for memory_limit, expected in (
        ("4GiB", "51d4a0f660749320b1a820c67656a08f3ab7830be2ba2ebf8584e28cdcbeb96f"),
        ("20KiB", "d41546ab166cb98c9739a1ff670777a35c744a0f0ea5b66812e6f318a15d2af5"),
    ):
        options: dict[str, Any] = {"batch_size": 20, "epoch_size": 200, "epochs": 2, "memory_limit": memory_limit}
        ranks = play(large.open(seed=5, shuffle=True), 2, **options)
        assert hashlib.sha256(repr(ranks).encode()).hexdigest() == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_rank_gets_the_same_number_of_batches_of_whole_samples(streamed: SampleSet, world_size: int) -> None:
    dataset = streamed.open(seed=5, shuffle=ShuffleConfig(window=10))
    ranks = play(dataset, world_size, batch_size=5, epoch_size=20 * world_size, epochs=2)
    assert all(len(batches) == 8 for batches in ranks)
    if world_size <= 7:  # in a first pass, ranks read different shards
        first = [{key for batch in batches[:1] for key in batch} for batches in ranks]
        assert sum(map(len, first)) == len(set().union(*first))


def test_shuffled_differs_by_epoch_and_seed_and_repeats(streamed: SampleSet) -> None:
    def run(seed: int) -> list[list[str]]:
        options: dict[str, Any] = {"batch_size": 20, "epoch_size": 200, "epochs": 2}
        (batches,) = play(streamed.open(seed=seed), 1, **options)
        return batches

    one = run(5)
    assert one == run(5)
    assert one != run(6)
    assert one[:10] != one[10:]
    counts = Counter(key for batch in one[:10] for key in batch)
    assert max(counts.values()) <= 2 + 20  # the window of one pass may reach into the next ones
    assert set(counts) <= set(streamed.keys)


def test_resume_reads_again_what_was_read(streamed: SampleSet) -> None:
    dataset = streamed.open(seed=5)
    options: dict[str, Any] = {"batch_size": 20, "epoch_size": 200}
    expected = play(dataset, 2, **options)
    for rank, loader in enumerate(loaders(dataset, 2, **options)):
        for _ in zip(range(3), loader, strict=False):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["samples_seen"] == 120
        assert len(json.dumps(state)) < 1000
        mine = {**options, "num_workers": rank, "num_threads": 1 - rank}  # a process that the state knows nothing of
        with DataLoader(streamed.open(seed=5, transform=dict), device_mesh=mesh_of(2, rank), **mine) as other:
            other.load_state_dict(state)
            assert [check_batch(batch) for batch in other] == expected[rank][3:]
    for ranks, size, batch_size, words in (
        (3, 200, 20, "that began with 2 data-parallel ranks cannot continue with 3"),
        (2, 220, 20, "epoch_size"),
        (2, 200, 16, "after 120 samples, which are not whole batches of 32"),
    ):
        other = DataLoader(dataset, device_mesh=mesh_of(ranks, 0), batch_size=batch_size, epoch_size=size)
        with pytest.raises(StateError, match=words):
            other.load_state_dict(state)


def window_settings(window_bytes: int) -> StreamSettings:
    """A window of any number of samples, bounded by its bytes."""
    return StreamSettings(
        urls=("a.tar",),
        order=OrderSettings(seed=1, lanes=1, window=10**6),
        epoch=0,
        dp_rank=0,
        window_bytes=window_bytes,
        fields=None,
        shape=Shape(sizes=Sizes.constant(1), num_ranks=1, last_batch="drop", epoch_size=1),
        first_batch=0,
        depth=1,
    )


def test_the_window_is_bounded_in_bytes() -> None:
    """However many samples the window may hold, it holds ``window_bytes`` and the sample that came in last."""
    held_bytes, places = 0, []

    def samples() -> Iterator[RawSample]:
        nonlocal held_bytes
        for number in range(3000):
            sample = RawSample(key=str(number), url="a.tar", fields={"bin": bytes(number % 400)})
            held_bytes += sample.held_bytes
            yield sample

    for sample in shuffled(samples(), window_settings(20_000)):
        held_bytes -= sample.held_bytes
        assert held_bytes <= 20_000 + 1000
        places.append(int(sample.key))
    assert places != sorted(places)
    assert len(set(places)) == len(places) > 2500


@pytest.mark.parametrize("num_fields", [1, 3, 8])
def test_a_window_of_tiny_samples_takes_no_more(num_fields: int) -> None:
    """What Python keeps beside a sample counts: it is many times what these hold."""
    window_bytes = 2 << 20
    names = [f"field{number}" for number in range(num_fields)]

    def samples() -> Iterator[RawSample]:
        for number in range(10_000):
            fields = {name: number.to_bytes(8, "little") for name in names}
            yield RawSample(key=f"{number:08d}", url="a.tar", fields=fields)

    tracemalloc.start()
    try:
        num_left = sum(1 for _ in shuffled(samples(), window_settings(window_bytes)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_left > 1000
    assert 0.5 * window_bytes < peak_bytes <= 1.1 * window_bytes


def test_an_error_of_collate_fn_reaches_the_loop(streamed: SampleSet) -> None:
    def collate(samples: list[Any]) -> Any:
        raise StopIteration("out of luck")

    options: dict[str, Any] = {"batch_size": 10, "epoch_size": 100, "collate_fn": collate}
    with (
        DataLoader(streamed.open(), device_mesh=mesh_of(1, 0), **options) as loader,
        pytest.raises(RuntimeError),
    ):
        list(loader)


def test_a_truncated_shard_is_an_error(compressed: SampleSet, tmp_path: Path) -> None:
    source = Path(compressed.url) / "000004.tar.gz"
    (tmp_path / "000000.tar.gz").write_bytes(source.read_bytes()[:-200])
    dataset = StreamingDataset(f"{tmp_path}/000000.tar.gz", shuffle=False)
    with (
        DataLoader(dataset, batch_size=10, epoch_size=100, device_mesh=mesh_of(1, 0)) as loader,
        pytest.raises(TarError, match=r"000000\.tar\.gz"),
    ):
        list(loader)


# Fields that some samples lack


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 samples: text in the second half, where every third lacks it, and numbers of which only some are there."""
    folder = tmp_path_factory.mktemp("uneven")
    with ShardWriter(f"{folder}/indexed/{{:06d}}.tar") as writer:
        for number in range(48):
            sample: dict[str, Any] = {"__key__": f"{number:02d}", "bin": bytes([number]) * (number % 5)}
            if number >= 24 and number % 3:
                sample["txt"] = f"text {number}"
            if number % 16 >= 8:
                sample["cls"] = number
            if number >= 40:
                sample["vec.npy"] = torch.full((3,), float(number)).numpy()
            writer.write(sample)
    (folder / "streamed").mkdir()
    (folder / "streamed" / "000000.tar.gz").write_bytes(gzip.compress((folder / "indexed/000000.tar").read_bytes()))
    return folder


@pytest.mark.parametrize("hands", [{"num_threads": 0}, {"num_workers": 1}])
@pytest.mark.parametrize("fields", [None, ("vec.npy", "txt"), ("txt", "cls", "bin")])
@pytest.mark.parametrize("decode", [True, False])
def test_a_field_that_samples_lack_is_as_in_a_set_with_an_index(
    uneven: Path, hands: dict[str, int], fields: tuple[str, ...] | None, decode: bool
) -> None:
    """None where a sample lacks it; a field that is asked for is in every batch, another only where a sample has it."""
    plainly = {} if decode else {"decode": None}
    options: dict[str, Any] = {"batch_size": 8, "device_mesh": mesh_of(1, 0), **hands}

    def run(name: str, **more: Any) -> list[list[tuple[str, Any]]]:
        dataset = StreamingDataset(f"{uneven}/{name}/", shuffle=False, fields=fields, **plainly)
        with DataLoader(dataset, **options, **more) as loader:
            return [[item for item in batch.items() if item[0] != "__url__"] for batch in plain(list(loader))]

    found = run("streamed", epoch_size=48)
    assert found == run("indexed")
    texts = [dict(batch).get("txt", "absent") for batch in found]
    assert texts[0] == ("absent" if fields is None else [None] * 8)
    assert [text is None for text in texts[3]] == [number % 3 == 0 for number in range(24, 32)]


def test_a_field_that_the_first_shard_lacks_is_an_error(uneven: Path) -> None:
    dataset = StreamingDataset(f"{uneven}/streamed/", shuffle=False, fields=("txt", "png"))
    with (
        DataLoader(dataset, batch_size=8, epoch_size=96, device_mesh=mesh_of(1, 0)) as loader,
        pytest.raises(ConfigError, match=r"000000\.tar\.gz has 'png'; its samples have bin, cls, txt, vec\.npy"),
    ):
        list(loader)


# Threads and processes


def shifted(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Uses all there is; some samples fail, some are dropped."""
    if sample["cls"] % 50 == 7:
        raise ZeroDivisionError(f"no {sample['cls']}")
    return None if sample["cls"] % 50 == 8 else {**sample, "more": torch.full((3,), sample["cls"] * 2)}


HANDS = [{"num_threads": 0}, {"num_threads": 3}, {"num_workers": 1}, {"num_workers": 3}]


def plain(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["substitute", "skip"])
def test_batches_do_not_depend_on_who_builds_them(compressed: SampleSet, on_error: str) -> None:
    def run(**hands: int) -> tuple[Any, ...]:
        dataset = compressed.open(seed=5, transform=shifted, on_error=on_error, max_bad_samples=100)
        found = []
        options: dict[str, Any] = {"batch_size": 16, "epoch_size": 400, **hands}
        for loader in loaders(dataset, 2, **options):
            with loader:
                epochs = [plain(list(loader)) for _ in range(2)]
                metrics = loader.metrics()
            bad = sorted((one["key"], one["stage"], one["reason"]) for one in metrics["bad"])
            assert metrics["batches"] == 24
            assert metrics["arena_bytes"] == 0
            found.append((epochs, bad, metrics["bad_samples"], metrics["dropped_samples"]))
        return tuple(found)

    expected = run(num_threads=0)
    assert expected[0][1], "there are bad samples"
    assert [key for batch in expected[0][0][0] for key in batch["__key__"]] == [
        key for batch in run(num_threads=1)[0][0][0] for key in batch["__key__"]
    ]
    for hands in HANDS[1:]:
        assert run(**hands) == expected, hands


def pid_and_draw(sample: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "thread": threading.current_thread().name, "drawn": random.random()}


def test_workers_build_what_is_not_trivial_and_draw_the_same(compressed: SampleSet) -> None:
    options: dict[str, Any] = {"batch_size": 16, "epoch_size": 160, "device_mesh": mesh_of(1, 0)}
    drawn = []
    for num_workers in (1, 3):
        with DataLoader(
            compressed.open(transform=pid_and_draw), num_workers=num_workers, num_threads=0, **options
        ) as loader:
            batches = list(loader)
        assert all(os.getpid() not in batch["pid"].tolist() for batch in batches)
        drawn.append([batch["drawn"].tolist() for batch in batches])
    assert drawn[0] == drawn[1]
    here = threading.current_thread().name
    with DataLoader(compressed.open(transform=pid_and_draw), num_threads=1, **options) as loader:
        batches = list(loader)
    assert {name for batch in batches for name in batch["thread"]} == {here}, "it draws from what the process shares"
    assert [batch["drawn"].tolist() for batch in batches] == drawn[0]


def test_what_draws_nothing_is_built_on_threads_from_the_second_batch_on(compressed: SampleSet) -> None:
    here, began = threading.current_thread().name, threading.Event()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        name = threading.current_thread().name
        if name != here:
            began.set()
        return {"thread": name}

    options: dict[str, Any] = {"batch_size": 16, "epoch_size": 160, "device_mesh": mesh_of(1, 0)}
    for num_threads, names in ((0, {here}), (1, {here, "shardstream-build-0"})):
        with DataLoader(compressed.open(transform=transform), num_threads=num_threads, **options) as loader:
            found = set()
            for number, batch in enumerate(loader):
                found.update(batch["thread"])
                if number == 0:
                    assert found == {here}
                    assert not num_threads or began.wait(60)
        assert found == names


@pytest.mark.parametrize("is_great", [False, True])
def test_batches_that_are_only_copied_stay_in_this_process(
    compressed: SampleSet, is_great: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Haste, "asks", lambda haste: setattr(haste, "is_great", is_great))
    options: dict[str, Any] = {"batch_size": 16, "epoch_size": 160, "device_mesh": mesh_of(1, 0)}
    with DataLoader(compressed.open(decode=None), num_workers=2, **options) as loader:
        batches = list(loader)
        described = loader.describe()
        metrics = loader.metrics()
    assert described == "not running"
    assert len(batches) == 10
    assert metrics["ring_peak_bytes"] == 0
    assert not is_great or metrics["build_in_consumer_s"] > 0


@pytest.mark.parametrize("hands", HANDS)
def test_errors_name_shard_key_and_stage(compressed: SampleSet, hands: dict[str, int]) -> None:
    dataset = compressed.open(shuffle=False, transform=shifted, on_error="raise")
    options: dict[str, Any] = {"batch_size": 4, "epoch_size": 100, "device_mesh": mesh_of(1, 0), **hands}
    with DataLoader(dataset, **options) as loader:
        batches = iter(loader)
        assert check_batch(next(batches)) == list(compressed.keys[:4])
        with pytest.raises(DecodeError, match=r"000000\.tar\.gz: sample '00007': transform raised ZeroDivisionError"):
            next(batches)
        with pytest.raises(IteratorEndedError, match="has already ended with an error"):
            next(batches)
        with pytest.raises(DecodeError, match="'00007'"):
            list(loader)
    dataset = compressed.open(shuffle=False, transform=shifted, max_bad_samples=1)
    with DataLoader(dataset, **options) as loader, pytest.raises(TooManyBadSamplesError, match="max_bad_samples=1"):
        list(loader)


@pytest.mark.parametrize("hands", HANDS)
def test_leaving_early_and_going_on(compressed: SampleSet, hands: dict[str, int]) -> None:
    dataset = compressed.open(seed=5, transform=dict)
    options: dict[str, Any] = {"batch_size": 10, "epoch_size": 200, "device_mesh": mesh_of(1, 0), **hands}
    with DataLoader(dataset, **options) as loader:
        expected = [check_batch(batch) for batch in loader]
        loader.set_epoch(0)
        for taken, batch in enumerate(loader):
            assert check_batch(batch) == expected[taken]
            if taken == 6:
                break
        state = loader.state_dict()
        assert loader.metrics()["arena_bytes"] == 0
        loader.close()
        loader.load_state_dict(state)
        assert [check_batch(batch) for batch in loader] == expected[7:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_larger_than_their_room_come_one_at_a_time(tmp_path: Path, num_workers: int) -> None:
    """A sixteenth of the limit is for batches that wait to be built; these are larger, and some fail."""
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", index=False) as writer:
        for number in range(12):
            writer.write({"__key__": str(number), "bin": bytes([number]) * 60_000})
    (tmp_path / "000000.tar.gz").write_bytes(gzip.compress((tmp_path / "000000.tar").read_bytes()))

    def transform(sample: dict[str, Any]) -> dict[str, Any] | None:
        number = sample["bin"][0]
        return None if number == 5 else {"number": number, "good": sample["bin"] == bytes([number]) * 60_000}

    dataset = StreamingDataset(f"{tmp_path}/000000.tar.gz", shuffle=False, transform=transform)
    options: dict[str, Any] = {"batch_size": 4, "epoch_size": 24, "device_mesh": mesh_of(1, 0)}
    with DataLoader(dataset, memory_limit="1MiB", num_workers=num_workers, **options) as loader:
        batches = list(loader)
        assert loader.metrics()["arena_peak_bytes"] == 0
    assert [batch["number"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 6, 6, 7], [8, 9, 10, 11]] * 2
    assert all(batch["good"].all() for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_describe_says_what_is_built_where(compressed: SampleSet, tmp_path: Path, num_workers: int) -> None:
    """A sample hangs: its batch, shard and key stand in the report, and so does the reader."""
    fifo, other = str(tmp_path / "fifo"), str(tmp_path / "other")
    os.mkfifo(fifo)
    os.mkfifo(other)

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == "00021":
            with open(fifo, "w") as out:
                out.write("here")
            with open(other) as go_on:
                go_on.read()
        return sample

    dataset = compressed.open(shuffle=False, transform=transform)
    options: dict[str, Any] = {"batch_size": 10, "epoch_size": 30, "device_mesh": mesh_of(1, 0)}
    with DataLoader(dataset, num_workers=num_workers, num_threads=1, **options) as loader:
        found = []

        def ask() -> None:
            with open(fifo) as signals:
                assert signals.read() == "here"
            found.append(loader.describe())
            with open(other, "w") as go_on:
                go_on.write("on")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert len(list(loader)) == 3
        asking.join()
    assert re.search(r"batch \d of 3: .*; 3 batches read", found[0])
    assert "arena: " in found[0]
    assert "reading " in found[0]
    assert re.search(r"builds batch 2 for .* at sample 2 of 10: '00021' of .*000000\.tar\.gz", found[0])
