"""Clips of large recordings by ranges: with real decoders, workers and an S3 server, as whole members give them."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import streaming.build.batches.build as build_module
import streaming.run.engine.workers.pool as pool_module
import streaming.shards.catalog.source as source_module
import streaming.shards.fetch.distant as distant_module
from shard_tools import ShardWriter
from streaming import Broadcast, DataLoader, Mixture, Sound, StreamingDataset, Video
from streaming.build.decode import together
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.processes.played_ranks import played
from tests.support.processes.waiting import until
from tests.support.sets.data_sets import loaders, mesh_of
from tests.support.sets.distant_sets import LEAST, Watched
from tests.support.sources import streams
from tests.support.sources.image_files import saved, smooth
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server", "no_maps")

NUM, SHARD = 12, 4
OPTIONS: dict[str, Any] = {"global_batch_size": 4, "num_threads": 0}
SOUND = Sound(seconds=0.5, rate=16_000, channels=1)
VIDEO = Video(frames=3, every=2, size=(24, 32))
CLIPS: dict[str, Any] = {"flac": SOUND, "mp4": VIDEO, "txt": "text"}
WHOLE = {"flac": replace(SOUND, reads_ranges=False), "mp4": replace(VIDEO, reads_ranges=False), "txt": "text"}
FIRST_CUT, FIRST_GARBLED = 5, 8
"""Samples of the damaged set: a video cut in half, a sound that begins with garbage."""


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distant_module, "LEAST_BYTES", LEAST)
    monkeypatch.setattr(source_module, "REMOTE_GAP_BYTES", 100_000)


@cache
def moving(first: int) -> bytes:
    """Noise that moves, ten seconds: MPEG-4 of 1.5 MB and more, a key frame a second."""
    out, noise = io.BytesIO(), np.random.default_rng(first).integers(0, 255, (300, 400, 3), np.uint8)
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10, options={"g": "10"})
        stream.height, stream.width, stream.bit_rate = 120, 160, 4_000_000
        stream.codec_context.time_base = Fraction(1, 10)
        for number in range(100):
            part = np.ascontiguousarray(noise[number : number + 120, number : number + 160])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(part)))
        container.mux(stream.encode(None))
    return out.getvalue()


def recording(number: int) -> dict[str, Any]:
    return {
        "__key__": f"{number:03d}",
        "flac": streams.sound("flac", 20.0, rate=44_100, seed=number % 3),
        "mp4": moving(number % 3),
        "txt": f"recording {number}",
    }


def write(url: str, samples: Iterator[dict[str, Any]], options: Mapping[str, Any] | None = None) -> str:
    """Shards of four samples, and chunks of one or two."""
    with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=SHARD, index=False, storage_options=options) as writer:
        for sample in samples:
            writer.write(sample)
    storage = Storage(options)
    rule = ChunkRule(target_bytes=4_000_000, min_bytes=3_000_000, min_samples=1)
    index_shards(storage, expand_urls(f"{url}/", storage), rule=rule)
    return f"{url}/"


def damaged() -> Iterator[dict[str, Any]]:
    for number in range(NUM):
        sample = recording(number)
        if number == FIRST_CUT:
            sample["mp4"] = sample["mp4"][: len(sample["mp4"]) // 2]
        if number == FIRST_GARBLED:
            sample["flac"] = bytes(5_000) + sample["flac"]
        yield sample


@pytest.fixture(scope="module")
def urls(mini_s3: Any) -> dict[str, str]:
    """Recordings in a bucket, whole and damaged, and images."""
    bucket, options = mini_s3.create_bucket("recordings"), mini_s3.storage_options
    images = ({"__key__": f"{n:03d}", "png": saved(smooth(24, 32), "PNG"), "txt": f"{n}"} for n in range(NUM))
    return {
        "whole": write(f"{bucket}/whole", map(recording, range(NUM)), options),
        "damaged": write(f"{bucket}/damaged", damaged(), options),
        "images": write(f"{bucket}/images", images, options),
    }


@pytest.fixture
def opened(urls: dict[str, str], mini_s3: Any, least: None) -> Any:
    def open_set(name: str = "whole", decode: Any = None, **options: Any) -> StreamingDataset:
        given = {"storage_options": mini_s3.storage_options, "seed": 3, **options}
        return StreamingDataset(urls[name], decode=CLIPS if decode is None else decode, **given)

    return open_set


def plain(batch: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of a batch."""
    fields = [batch.get(name, [None] * len(batch["__key__"])) for name in ("flac", "mp4", "png", "txt")]
    rows = zip(batch["__key__"], *fields, strict=True)
    return [tuple(one if one is None or isinstance(one, str) else one.numpy().tobytes() for one in row) for row in rows]


def play(dataset: Any, world_size: int = 1, epochs: int = 1, **options: Any) -> list[list[list[tuple[Any, ...]]]]:
    """The batches of each rank."""
    return [
        [plain(batch) for _ in range(epochs) for batch in loader]
        for loader in loaders(dataset, world_size, **{**OPTIONS, **options})
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_random_clips_are_those_of_whole_members(opened: Any, num_workers: int) -> None:
    plainly = opened(decode=WHOLE)
    expected = play(plainly, epochs=2)
    dataset = opened()
    assert play(dataset, epochs=2, num_workers=num_workers) == expected
    assert len({row[1:3] for batch in expected[0] for row in batch}) == 2 * NUM  # each clip is another one
    read, whole = dataset.source.counters()["storage_bytes"], plainly.source.counters()["storage_bytes"]
    assert whole > 2 * NUM * (LEAST + LEAST)
    assert read < 0.6 * whole
    if num_workers < 2:
        assert play(opened(), 2, 1, num_workers=num_workers) == play(opened(decode=WHOLE), 2, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", first_here([2, 0], 1))
def test_a_run_goes_on_in_the_middle_of_an_epoch(opened: Any, num_workers: int) -> None:
    batching: dict[str, Any] = {**OPTIONS, "device_mesh": mesh_of(1, 0)}
    ((first, *others),) = play(opened(decode=WHOLE))
    with DataLoader(opened(), num_workers=num_workers, **batching) as loader:
        assert [plain(batch) for batch in islice(loader, 1)] == [first]
        state = loader.state_dict()
    with DataLoader(opened(), num_workers=2 - num_workers, **batching) as loader:
        loader.load_state_dict(state)
        assert [plain(batch) for batch in loader] == others


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_streams_are_bad_samples_by_name(opened: Any, num_workers: int) -> None:
    found = {}
    for name, decode in {"ranges": CLIPS, "whole": WHOLE}.items():
        dataset = opened("damaged", decode, max_bad_samples=2, on_error="skip")
        with DataLoader(dataset, num_workers=num_workers, **OPTIONS) as loader:
            rows = [
                row
                for batch in loader
                for row, valid in zip(plain(batch), batch["__valid__"].tolist(), strict=True)
                if valid
            ]
            bad = sorted((one["key"], one["stage"], one["reason"]) for one in loader.metrics()["bad"])
        found[name] = rows, bad
    assert found["ranges"] == found["whole"]
    rows, ((cut, *cut_why), (garbled, *garbled_why)) = found["ranges"]
    assert len(rows) == NUM - 2
    assert (cut, garbled) == ("005", "008")
    assert (cut_why[0], garbled_why[0]) == ("decode", "decode")
    assert "field 'mp4'" in cut_why[1]
    assert "truncated" in cut_why[1]
    assert "field 'flac'" in garbled_why[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_in_the_store_that_a_decoder_meets_is_found_by_the_checksum(
    tmp_path: Path, least: None, num_workers: int
) -> None:
    url = write(str(tmp_path / "set"), map(recording, range(SHARD)))
    path, flac = tmp_path / "set" / "000000.tar", recording(1)["flac"]
    content = bytearray(path.read_bytes())
    start = content.index(b"fLaC", content.index(b"001.flac"))
    assert content[start : start + len(flac)] == flac
    for at in range(start + 10_000, start + len(flac), 5_000):  # in all its frames
        content[at] ^= 0xFF
    path.write_bytes(content)
    dataset = StreamingDataset(url, decode=CLIPS, max_bad_samples=1, on_error="skip")
    with DataLoader(dataset, num_workers=num_workers, **OPTIONS) as loader:
        list(loader)
        ((key, stage),) = [(one["key"], one["stage"]) for one in loader.metrics()["bad"]]
    assert (key, stage) == ("001", "fetch")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_mixtures_with_images(opened: Any, num_workers: int) -> None:
    def mixed(decode: Any) -> Mixture:
        images = {"png": "rgb8", "txt": "text"}
        return Mixture({"clips": opened(decode=decode), "images": opened("images", images)}, seed=5)

    options: dict[str, Any] = {"epoch_size": 2 * NUM, "collate_fn": _listed}
    expected = _mixed_rows(mixed(WHOLE), options)
    assert _mixed_rows(mixed(CLIPS), options | {"num_workers": num_workers}) == expected
    assert {"flac" in row for row in expected} == {True, False}


def _listed(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


def _mixed_rows(mixture: Mixture, options: dict[str, Any]) -> list[dict[str, Any]]:
    with DataLoader(mixture, **{**OPTIONS, **options}) as loader:
        return [
            {name: one.tobytes() if isinstance(one, np.ndarray) else one for name, one in sample.items()}
            for batch in loader
            for sample in batch
        ]


def test_replicas_get_the_clips_that_one_rank_reads(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = play(opened(decode=WHOLE))
    dataset = opened()

    def batches(mesh: Any) -> list[list[tuple[Any, ...]]]:
        with DataLoader(dataset, device_mesh=mesh, replicate=Broadcast(timeout_s=60), **OPTIONS) as loader:
            return [plain(batch) for batch in loader]

    assert played(monkeypatch)(batches, dp_size=1, tp_size=2) == [expected, expected]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_clips_of_a_batch_are_read_at_the_same_time(
    opened: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    (expected,) = play(opened(decode=WHOLE))
    dataset = opened()
    watched = Watched(dataset)
    lock, reading, asked, most = threading.Lock(), set[int](), [0], [0]

    def noted(jobs: list[Any], *given: Any) -> list[Any]:
        def done(job: Any) -> Any:
            try:
                return job()
            finally:
                with lock:
                    asked[0] -= 1

        with lock:
            asked[0] += len(jobs)
        return together([partial(done, job) for job in jobs], *given)

    def wait(url: str, start: int, out: memoryview) -> None:
        """No member is read before four are, or all that are asked for: a small batch may be built first."""
        if "shardstream-member" not in threading.current_thread().name:
            return
        with lock:  # the largest number so far is that of all who wait here
            reading.add(threading.get_ident())
            most[0] = max(most[0], len(reading))
        until(lambda: most[0] >= 4 or len(reading) >= asked[0], "four are read at the same time, or all")
        with lock:  # who goes on does not wait
            reading.discard(threading.get_ident())

    for module in (build_module, pool_module):
        monkeypatch.setattr(module, "together", noted)
    watched.before = wait
    assert play(dataset, num_workers=num_workers) == [expected]
    assert most[0] >= 4


def test_whole_streams_are_read_whole(opened: Any) -> None:
    assert opened().source.read_distant is not None
    assert opened(decode={"flac": "sound", "mp4": "video", "txt": "text"}).source.read_distant is None
    assert opened(decode=WHOLE).source.read_distant is None


@pytest.mark.parametrize("more", [0, -1])
def test_clips_are_read_in_ranges_from_8_mib_on(tmp_path: Path, more: int) -> None:
    """The bound as it is."""
    header = streams.sound("wav", 0.0, rate=44_100)
    size = (8 << 20) - len(header) + more
    patched = header[:4] + struct.pack("<I", len(header) - 8 + size) + header[8:-4] + struct.pack("<I", size)
    data = patched + np.random.default_rng(0).bytes(size)
    url = write(str(tmp_path / "set"), iter([{"__key__": "000", "wav": data, "mp3": data}]))
    for field, is_distant in (("wav", more == 0), ("mp3", False)):
        dataset = StreamingDataset(url, decode={field: SOUND}, fields=[field])
        watched = Watched(dataset)
        (((_, found),),) = [[(row["__key__"], row[field]) for row in dataset]]
        assert found.shape == (1, 8_000)
        assert (watched.num_bytes < 1_000_000) == is_distant, field
