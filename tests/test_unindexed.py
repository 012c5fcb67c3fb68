"""Shards without an index: small sets are indexed at start, large and compressed ones streamed shard by shard."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_sets import WORLD_SIZES, SampleSet, check_batch, loaders, merged, mesh_of, play, total, write_set
from leftovers import leftovers

from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.engine.stream import RawSample, StreamSettings, shuffled
from streaming.errors import ConfigError, IndexMissingError, StateError, TarError
from streaming.order import OrderSettings


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
    return SampleSet(url=f"{directory}/", keys=samples.keys)


@pytest.fixture
def large(samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> SampleSet:
    """The same, as if it were too large to be indexed at start."""
    monkeypatch.setattr("streaming.shards.SCAN_LIMIT_BYTES", 1000)
    return samples


@pytest.fixture(params=["large", "compressed"])
def streamed(request: pytest.FixtureRequest) -> SampleSet:
    found: SampleSet = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_left(samples: SampleSet) -> Iterator[None]:
    before = leftovers()
    yield
    assert leftovers() - before == {}


# Small: indexed in memory


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
    assert repr(dataset) == "StreamingDataset(7 shards)"
    for ask in (len, lambda dataset: dataset[0]):
        with pytest.raises(IndexMissingError, match="index"):
            ask(dataset)
    with pytest.raises(ConfigError, match=r"epoch_size=… .*shard_tools index"):
        DataLoader(dataset, batch_size=8, device_mesh=mesh_of(1, 0))
    with caplog.at_level(logging.WARNING), DataLoader(dataset, batch_size=8, epoch_size=80, device_mesh=mesh_of(1, 0)):
        pass
    assert "shard_tools index" in caplog.text
    with pytest.raises(ConfigError, match="less than one global batch"):
        DataLoader(dataset, batch_size=8, epoch_size=7, device_mesh=mesh_of(1, 0))


def test_in_order_it_is_the_storage_order_without_end(streamed: SampleSet) -> None:
    dataset = streamed.open(shuffle=False)
    with DataLoader(dataset, batch_size=10, epoch_size=400, device_mesh=mesh_of(1, 0)) as loader:
        assert len(loader) == 40
        keys = [key for batch in loader for key in check_batch(batch)]
        assert loader.epoch == 1
    assert keys == [*streamed.keys, *streamed.keys][:400]


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
        with DataLoader(streamed.open(seed=5), device_mesh=mesh_of(2, rank), **options) as other:
            other.load_state_dict(state)
            assert [check_batch(batch) for batch in other] == expected[rank][3:]
    for ranks, size, words in (
        (3, 200, "cannot go on with 3 data-parallel ranks that began with 2"),
        (2, 220, "epoch_size"),
    ):
        other = DataLoader(dataset, device_mesh=mesh_of(ranks, 0), batch_size=20, epoch_size=size)
        with pytest.raises(StateError, match=words):
            other.load_state_dict(state)


def test_the_window_is_bounded_in_bytes() -> None:
    """However many samples the window may hold, it holds ``window_bytes`` and the sample that came in last."""
    settings = StreamSettings(
        urls=("a.tar",),
        order=OrderSettings(seed=1, lanes=1, window=10**6),
        epoch=0,
        dp_rank=0,
        window_bytes=5000,
        fields=None,
        batch_size=1,
        first_batch=0,
        num_batches=1,
        depth=1,
    )
    held_bytes, places = 0, []

    def samples() -> Iterator[RawSample]:
        nonlocal held_bytes
        for number in range(3000):
            sample = RawSample(key=str(number), url="a.tar", fields={"bin": bytes(number % 400)})
            held_bytes += sample.num_bytes
            yield sample

    for sample in shuffled(samples(), settings):
        held_bytes -= sample.num_bytes
        assert held_bytes <= 5000 + 400
        places.append(int(sample.key))
    assert places != sorted(places)
    assert len(set(places)) == len(places) > 2500


@pytest.mark.parametrize("num_batches", [0, 1, 5])
def test_close_from_every_state(streamed: SampleSet, num_batches: int) -> None:
    loader = DataLoader(streamed.open(), batch_size=10, epoch_size=100, device_mesh=mesh_of(1, 0))
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    loader.close()
    loader.close()
    if num_batches:
        assert list(batches) == []
    assert len(list(loader)) == 10
    loader.close()


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
