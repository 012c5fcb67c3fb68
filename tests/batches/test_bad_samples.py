"""Samples that cannot be delivered: substituted, masked or raised, the same on every world size, and accounted for."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import ChecksumError, ConfigError, DecodeError, TooManyBadSamplesError
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.sets.data_sets import (
    WORLD_SIZES,
    SampleSet,
    check_batch,
    loaders,
    make_sample,
    merged,
    mesh_of,
    play,
    write_set,
)

pytestmark = pytest.mark.usefixtures("one_fork_server")

BAD = {7, 50, 51, 99}
SHUFFLES: list[bool | ShuffleConfig] = [False, True, ShuffleConfig(lanes=3, window=20)]


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 255 - number)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100 samples in 5 shards and 25 chunks; the JPEGs of BAD do not decode."""
    directory = tmp_path_factory.mktemp("images")
    with ShardWriter(f"{directory}/{{:06d}}.tar", max_samples=20, index=False) as writer:
        for number in range(100):
            data = jpeg(number)
            damaged = data[: len(data) // 2] if number % 2 else b"\0" * len(data)
            writer.write({"__key__": f"{number:05d}", "jpg": damaged if number in BAD else data, "cls": number})
    storage = Storage()
    index_shards(storage, expand_urls(f"{directory}/", storage), rule=ChunkRule(min_bytes=1, min_samples=4))
    return f"{directory}/"


def contents(batch: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Key and red of each row, which belong together."""
    reds = batch["jpg"].float().mean(dim=(1, 2))[:, 0].round().int().tolist()
    assert all(abs(red - int(key)) <= 2 for key, red in zip(batch["__key__"], reds, strict=True))
    assert batch["cls"].tolist() == [int(key) for key in batch["__key__"]]
    return list(zip(batch["__key__"], reds, strict=True))


def global_batches(dataset: StreamingDataset, world_size: int, **options: Any) -> list[Counter[tuple[str, int]]]:
    ranks = [[contents(batch) for batch in loader] for loader in loaders(dataset, world_size, **options)]
    return [Counter(row for rows in batches for row in rows) for batches in zip(*ranks, strict=True)]


# Fields that do not decode


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_substitutes_are_the_same_on_every_world_size(images: str, shuffle: bool | ShuffleConfig) -> None:
    dataset = StreamingDataset(images, shuffle=shuffle, max_bad_samples=len(BAD))
    options: dict[str, Any] = {"global_batch_size": 12, "last_batch": "partial"}
    reference = global_batches(dataset, 1, **options)
    counts = sum(reference, Counter())
    assert counts.total() == 100
    keys = Counter(key for key, _ in counts.elements())
    assert set(keys) == {f"{number:05d}" for number in range(100) if number not in BAD}
    for world_size in WORLD_SIZES[1:]:
        assert global_batches(dataset, world_size, **options) == reference, world_size
    assert global_batches(dataset, 2, num_workers=3, **options) == reference


def test_a_substitute_is_a_neighbor(images: str) -> None:
    dataset = StreamingDataset(images, shuffle=False, max_bad_samples=len(BAD))
    with DataLoader(dataset, batch_size=100, device_mesh=mesh_of(1, 0)) as loader:
        (batch,) = loader
    expected = list(range(100))
    for bad, substitute in ((7, 4), (50, 48), (51, 48), (99, 96)):  # the next readable ones of their chunks
        expected[bad] = substitute
    assert batch["cls"].tolist() == expected


@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_skip_masks_exactly_the_bad_ones(images: str, world_size: int, last_batch: str) -> None:
    dataset = StreamingDataset(images, on_error="skip", max_bad_samples=len(BAD))
    counts: Counter[str] = Counter()
    num_rows = 0
    for loader in loaders(dataset, world_size, global_batch_size=10, last_batch=last_batch):
        for batch in loader:
            contents(batch)
            assert batch["__valid__"].dtype == torch.bool
            num_rows += len(batch["__key__"])
            valid = batch["__valid__"].tolist()
            counts.update(key for key, real in zip(batch["__key__"], valid, strict=True) if real)
    assert counts == Counter(f"{number:05d}" for number in range(100) if number not in BAD)
    assert num_rows >= 100


@pytest.mark.parametrize("num_workers", [0, 3])
def test_raise_names_shard_sample_field_and_cure(images: str, num_workers: int) -> None:
    dataset = StreamingDataset(images, on_error="raise", shuffle=False)
    with DataLoader(dataset, batch_size=10, num_workers=num_workers, device_mesh=mesh_of(1, 0)) as loader:
        with pytest.raises(DecodeError, match=r"000000\.tar: sample '00007': field 'jpg'.*on_error=") as caught:
            next(iter(loader))
        assert caught.value.__cause__ is not None
        assert loader.state_dict()["samples_seen"] == 0


def test_bad_samples_are_accounted_for_by_name(images: str) -> None:
    dataset = StreamingDataset(images, max_bad_samples=len(BAD))
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        for _ in range(2):
            for _ in loader:
                pass
            bad = loader.metrics()["bad"]
            assert sorted(one["key"] for one in bad) == sorted(f"{number:05d}" for number in BAD)
            assert {one["stage"] for one in bad} == {"decode"}
            assert all(Path(one["url"]).is_file() for one in bad)
            assert all("jpg" in one["reason"] for one in bad)
            for one in bad:  # the range is that of the sample's record, which begins with its first header
                record = Path(one["url"]).read_bytes()[one["byte_start"] : one["byte_end"]]
                assert record.startswith(f"{one['key']}.cls\0".encode())
                assert record.count(b"\0ustar\0") == 2


def test_without_sample_tables_nobody_knows_where_a_bad_sample_lies(images: str, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "set")
    shutil.rmtree(tmp_path / "set" / "_shardstream" / "samples")
    dataset = StreamingDataset(f"{tmp_path}/set/", max_bad_samples=len(BAD))
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        for _ in loader:
            pass
        places = {(one["key"], one["byte_start"], one["byte_end"]) for one in loader.metrics()["bad"]}
    assert places == {(f"{number:05d}", -1, -1) for number in BAD}


@pytest.mark.parametrize(
    ("limit", "enough"), [(4, True), (3, False), (0, False), (0.04, True), (0.03, False), (0.0, False)]
)
def test_the_limit_on_bad_samples(images: str, limit: float, enough: bool) -> None:
    dataset = StreamingDataset(images, max_bad_samples=limit)
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader:
        if enough:
            assert len(list(loader)) == 10
            return
        with pytest.raises(TooManyBadSamplesError, match=r"max_bad_samples=.*\n.*\.tar '000(07|50|51|99)' \(decode\)"):
            list(loader)


# transform drops


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["substitute", "skip"])
def test_transform_drops_samples(tmp_path: Path, on_error: Any) -> None:
    samples = write_set(tmp_path)

    def odd(sample: Any) -> Any:
        return sample if sample["cls"] % 2 else None

    dataset = samples.open(transform=odd, on_error=on_error, max_bad_samples=0)
    reference = merged(play(dataset, 1, global_batch_size=24, last_batch="partial"))
    for world_size in WORLD_SIZES[1:]:
        assert merged(play(dataset, world_size, global_batch_size=24, last_batch="partial")) == reference
    counts = sum(reference, Counter())
    assert {int(key) % 2 for key in counts} == {1}
    if on_error == "skip":
        assert counts == Counter(key for key in samples.keys if int(key) % 2)
    else:
        assert counts.total() == len(samples.keys)
        assert set(counts) == {key for key in samples.keys if int(key) % 2}
    with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0), last_batch="partial") as loader:
        for _ in loader:
            pass
        metrics = loader.metrics()
    assert metrics["dropped_samples"] >= sum(not int(key) % 2 for key in samples.keys)
    assert metrics["bad"] == []


def test_a_transform_that_drops_everything_is_an_error(tmp_path: Path) -> None:
    dataset = write_set(tmp_path, (30, 30)).open(transform=lambda _: None)
    with (
        DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader,
        pytest.raises(TooManyBadSamplesError, match="it drops most"),
    ):
        next(iter(loader))


def test_dropping_under_raise_is_an_error(tmp_path: Path) -> None:
    dataset = write_set(tmp_path, (30, 30)).open(transform=lambda _: None, on_error="raise", shuffle=False)
    with (
        DataLoader(dataset, batch_size=10, device_mesh=mesh_of(1, 0)) as loader,
        pytest.raises(DecodeError, match=r"000000\.tar: sample '00000': transform returned None"),
    ):
        next(iter(loader))


# Bytes that are not those of the index


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[SampleSet, set[str]]:
    """202 samples; one bit of a payload in shard 4 is flipped after indexing. Also: the keys of the chunk it is in."""
    samples = write_set(tmp_path / "train", chunk_samples=4)
    dataset = samples.open()
    (chunk, *_) = np.flatnonzero(dataset.source.table.shard == 4)[5:].tolist()
    wanted = dataset.source.chunk(chunk)
    data = bytearray(Path(wanted.url).read_bytes())
    data[wanted.byte_start + 512] ^= 4  # the first byte of the first member's payload, or its padding
    Path(wanted.url).write_bytes(data)
    first = int(dataset.source.table.num_samples[:chunk].sum())
    return samples, set(samples.keys[first : first + wanted.num_samples])


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", SHUFFLES[1:])
def test_a_damaged_chunk_is_substituted_alike_on_every_world_size(
    damaged: tuple[SampleSet, set[str]], shuffle: bool | ShuffleConfig
) -> None:
    samples, lost = damaged
    dataset = samples.open(shuffle=shuffle, max_bad_samples=len(lost))
    options: dict[str, Any] = {"global_batch_size": 24, "last_batch": "partial"}
    reference = merged(play(dataset, 1, **options))
    counts = sum(reference, Counter())
    assert counts.total() == len(samples.keys)
    assert set(counts) == set(samples.keys) - lost
    for world_size in WORLD_SIZES[1:]:
        assert merged(play(dataset, world_size, **options)) == reference, world_size
    assert merged(play(dataset, 3, num_workers=2, **options)) == reference


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_damage_shows_on_every_world_size_in_storage_order(
    damaged: tuple[SampleSet, set[str]], world_size: int
) -> None:
    """Several ranks read slices of chunks; what is damaged must not pass for that (check_batch sees every byte)."""
    samples, _ = damaged
    dataset = samples.open(shuffle=False, on_error="raise")
    with pytest.raises((ChecksumError, DecodeError), match=r"000004\.tar"):
        play(dataset, world_size, global_batch_size=24, last_batch="partial")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_chunk_is_raised_with_shard_and_range(damaged: tuple[SampleSet, set[str]], num_workers: int) -> None:
    samples, _ = damaged
    dataset = samples.open(on_error="raise")
    with (
        DataLoader(dataset, batch_size=24, num_workers=num_workers, device_mesh=mesh_of(1, 0)) as loader,
        pytest.raises(ChecksumError, match=r"000004\.tar, bytes \d+-\d+: CRC32C .*shard_tools verify"),
    ):
        list(loader)


def test_a_damaged_chunk_counts_with_all_its_samples(damaged: tuple[SampleSet, set[str]]) -> None:
    """The limit is on samples: a chunk of four of which none is delivered is four."""
    samples, lost = damaged
    assert len(lost) == 4
    with (
        DataLoader(
            samples.open(max_bad_samples=3), batch_size=24, last_batch="partial", device_mesh=mesh_of(1, 0)
        ) as loader,
        pytest.raises(TooManyBadSamplesError, match=r"000004\.tar"),
    ):
        list(loader)


def test_a_damaged_chunk_is_masked(damaged: tuple[SampleSet, set[str]]) -> None:
    samples, lost = damaged
    dataset = samples.open(on_error="skip", max_bad_samples=len(lost))
    counts = sum(merged(play(dataset, 2, global_batch_size=24, last_batch="pad")), Counter())
    assert counts == Counter(set(samples.keys) - lost)


def test_bytes_that_come_wrong_once_are_read_again(tmp_path: Path) -> None:
    samples = write_set(tmp_path)
    dataset = samples.open()
    read_into, seen = dataset.source.storage.read_into, Counter[tuple[str, int]]()

    def unreliable(url: str, start: int, out: memoryview, **how: bool) -> None:
        read_into(url, start, out, **how)
        seen[url, start] += 1
        if seen[url, start] == 1:
            out[600] ^= 255

    dataset.source.storage.read_into = unreliable  # type: ignore[method-assign]
    (batches,) = play(dataset, 1, global_batch_size=24, last_batch="partial")
    assert sorted(key for batch in batches for key in batch) == sorted(samples.keys)
    assert set(seen.values()) == {2}


def test_what_damage_costs(damaged: tuple[SampleSet, set[str]]) -> None:
    """A damaged chunk is not fetched anew for every one of its samples."""
    samples, lost = damaged
    dataset = samples.open(max_bad_samples=len(lost), shuffle=False)
    asked: list[FetchRange] = []

    def recording(fetch: Callable[[FetchRange, memoryview], Any]) -> Any:
        def recorded(wanted: FetchRange, out: memoryview) -> Any:
            asked.append(wanted)
            return fetch(wanted, out)

        return recorded

    dataset.source.fetch_unit = recording(dataset.source.fetch_unit)  # type: ignore[method-assign]
    with DataLoader(dataset, batch_size=24, last_batch="partial", device_mesh=mesh_of(1, 0)) as loader:
        for _ in loader:
            pass
    assert len(asked) <= dataset.source.table.num_chunks + 2 * len(lost)


# Fields that only some samples have


def test_missing_fields_are_none(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(12):
            sample = make_sample(number)
            if number % 3 == 1:
                del sample["cls"], sample["vec.npy"]
            writer.write(sample)
    for num_workers in (0, 2):
        dataset = StreamingDataset(f"{tmp_path}/", shuffle=False)
        with DataLoader(dataset, batch_size=6, num_workers=num_workers, device_mesh=mesh_of(1, 0)) as loader:
            first, _ = loader
        assert first["cls"] == [0, None, 2, 3, None, 5]
        assert [None if one is None else one.tolist() for one in first["vec.npy"]] == [
            None if number % 3 == 1 else [number, number + 1, number + 2, number + 3] for number in range(6)
        ]
        assert first["txt"] == [f"text of {number}" for number in range(6)]
    with pytest.raises(ConfigError, match=r"no sample of .* has a field 'nothing'"):
        StreamingDataset(f"{tmp_path}/", shuffle=False, fields=("cls", "nothing"))


def test_a_good_set_has_nothing_to_report(tmp_path: Path) -> None:
    dataset = write_set(tmp_path).open(max_bad_samples=0, on_error="raise")
    with DataLoader(dataset, batch_size=24, device_mesh=mesh_of(1, 0)) as loader:
        for batch in loader:
            check_batch(batch)
        assert loader.metrics()["bad"] == []


def test_a_share_of_one_is_no_limit(images: str) -> None:
    """Those that were to stand in count too, and may be more than an epoch has samples (found by the random cases)."""
    dataset = StreamingDataset(images, shuffle=False, max_bad_samples=1.0)[50:53]
    with DataLoader(dataset, batch_size=1, epoch_size=1) as loader:
        (batch,) = loader
        assert batch["cls"].tolist() == [52]
        assert loader.metrics()["bad_samples"] == 2
