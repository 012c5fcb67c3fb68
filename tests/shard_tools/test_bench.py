"""``bench``: it names what limits stores made slow on purpose, its advice is faster, and it writes nothing."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.change.sets.open_set import open_set
from shard_tools.cli import cli
from shard_tools.look.bench import decoding, delivery
from shard_tools.look.bench import judge as judging
from shard_tools.look.bench.decoding import Decoding
from shard_tools.look.bench.delivery import LoopRun
from shard_tools.look.bench.judge import Measured, candidates, convert_advice, judge
from shard_tools.look.bench.requests import Probe, UnreadRanges, probe
from shard_tools.look.bench.run import BenchOptions, BenchReport, bench
from streaming import DataLoader, StreamingDataset
from streaming.errors import IndexMissingError
from streaming.shards.catalog.build import index_shards
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import mesh_of

pytestmark = pytest.mark.thorough

CHUNK_BYTES = 64 << 10
SAMPLES, SAMPLE_BYTES = 64, 60_000
Choose = Callable[[str, str, str | None], Fault | None]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)], prog_name="shard_tools")


def write_small_chunks(bucket: str, options: Mapping[str, str], chunk_bytes: int = CHUNK_BYTES) -> str:
    """A set of 4 MB in chunks of this size; its URL."""
    random_ = random.Random(1)
    with ShardWriter(f"{bucket}/set/{{:06d}}.tar", max_samples=16, storage_options=options) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:05d}", "bin": random_.randbytes(SAMPLE_BYTES)})
    urls = [f"{bucket}/set/{number:06d}.tar" for number in range(SAMPLES // 16)]
    index_shards(Storage(options), urls, rule=ChunkRule(min_bytes=chunk_bytes, min_samples=1), force=True)
    return f"{bucket}/set/"


def is_shard(method: str, path: str) -> bool:
    return method == "GET" and path.endswith(".tar")


@contextmanager
def behind_proxy(server: MiniS3Server, choose: Choose) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """The server behind a proxy that breaks some answers, and the options for it."""
    with FaultProxy(server.port, choose=choose) as proxy:
        yield proxy, {**server.storage_options, "endpoint_url": proxy.url}


def fetched_bytes(url: str, options: Mapping[str, str], **more: Any) -> float:
    """Bytes that the store sends for an epoch to a loader and a dataset of its own."""
    dataset = StreamingDataset(url, storage_options=dict(options), **more)
    with DataLoader(dataset, batch_size=8, device_mesh=mesh_of(1, 0)) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == SAMPLES
        return loader.metrics().get("storage_bytes", 0)


def check_cache(report: BenchReport, url: str, options: Mapping[str, str]) -> None:
    """With the cache that it suggests the store sends next to nothing for a second epoch."""
    advised = {name: report.suggest[name] for name in ("cache_dir", "cache_limit")}
    whole = fetched_bytes(url, options)
    assert fetched_bytes(url, options, **advised) > 0.9 * whole  # fills it
    assert fetched_bytes(url, options, **advised) < 0.1 * whole


@pytest.fixture
def _cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that are advised lie in the folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("_cache_here")
def test_a_store_with_long_round_trips_is_limited_by_latency(mini_s3: MiniS3Server) -> None:
    """Each answer comes 0.3 s late, however small; more at a time bring more."""
    url = write_small_chunks(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)

    def late(method: str, path: str, _: str | None) -> Fault | None:
        return Fault(kind="slow", seconds=0.3) if is_shard(method, path) else None

    with behind_proxy(mini_s3, late) as (_, options):
        report = bench([url], storage_options=options, options=BenchOptions(seconds=2))
        assert report.limit == "latency", report.why
        assert "ms however small it is" in report.why
        assert report.convert == {"max_bytes": "256MB"}
        check_cache(report, url, options)


@pytest.mark.usefixtures("_cache_here")
def test_a_thin_line_is_limited_by_bandwidth() -> None:
    """All answers together have 4 MB/s; neither more nor larger requests help."""
    with MiniS3Server(mb_per_s=4) as server:
        url = write_small_chunks(server.create_bucket(fresh_name()), server.storage_options, 512 << 10)
        report = bench([url], storage_options=server.storage_options, options=BenchOptions(seconds=3))
        assert report.limit == "bandwidth", report.why
        assert report.convert == {}
        check_cache(report, url, server.storage_options)


@pytest.mark.usefixtures("_cache_here")
def test_a_store_that_refuses_requests_is_limited_by_errors(mini_s3: MiniS3Server) -> None:
    """Two in five answers are 503."""
    url, random_ = write_small_chunks(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options), random.Random(3)

    def refuses(method: str, path: str, _: str | None) -> Fault | None:
        return Fault(kind="status", status=503) if is_shard(method, path) and random_.random() < 0.4 else None

    with behind_proxy(mini_s3, refuses) as (_, options):
        report = bench([url], storage_options=options, options=BenchOptions(seconds=2))
        assert report.limit == "errors", report.why
        assert report.error_share > judging.ERROR_SHARE
        check_cache(report, url, options)


class Clock:
    """Time that passes where somebody says so."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Batch:
    """A batch that takes 2 ms, and 3 ms to let go of."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        clock.sleep(0.002)

    def __del__(self) -> None:
        self.clock.sleep(0.003)


@pytest.mark.parametrize(
    ("batches_left", "batch_s", "seconds", "expected"),
    [(100, 0.02, 3.0, 5.0), (5, 0.02, 3.0, 5.0), (4, 0.02, 3.0, None), (100, 0.2, 3.0, None), (100, 0.0, 1.0, 5.0)],
)
def test_unhidden_time_is_taking_a_batch_and_letting_go_of_the_last(
    monkeypatch: pytest.MonkeyPatch, batches_left: int, batch_s: float, seconds: float, expected: float | None
) -> None:
    clock = Clock()
    monkeypatch.setattr(delivery, "time", clock)
    found = delivery._unhidden_ms((Batch(clock) for _ in range(batches_left)), batch_s, seconds)
    assert found == (None if expected is None else pytest.approx(expected))
    assert clock.now_s < 0.6 * seconds + 0.2


def test_little_memory_is_the_limit_and_more_is_tried(mini_s3: MiniS3Server) -> None:
    """A loader that does not start with the memory given is started with more; the suggestion is what worked."""
    url = write_small_chunks(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)
    result = run(url, "--seconds", 1, "--memory-limit", "1MB", "--json", *_store_options(mini_s3))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["limit"] == "memory"
    assert found["deliveries"][0]["refused"].startswith("memory_limit: ")
    assert found["expect"].startswith("with it the loader starts")
    dataset = StreamingDataset(url, storage_options=mini_s3.storage_options)
    settings = {name: value for name, value in found["suggest"].items() if not name.startswith("cache")}
    with DataLoader(dataset, batch_size=8, device_mesh=mesh_of(1, 0), **settings) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == SAMPLES


def _store_options(server: MiniS3Server) -> list[str]:
    return [word for name, value in server.storage_options.items() for word in ("--storage-option", f"{name}={value}")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PNGs, which take long to decode and no time to read."""
    folder, out = tmp_path_factory.mktemp("pictures"), io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 4, (400, 400, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=40) as writer:
        for number in range(120):
            writer.write({"__key__": f"{number:05d}", "png": out.getvalue(), "cls": number})
    return folder


def test_pictures_are_limited_by_decoding(pictures: Path) -> None:
    """Processes are measured beside threads, and tried in a loop where there is more than one core."""
    before = sorted(pictures.rglob("*"))
    report = bench([f"{pictures}/"], options=BenchOptions(seconds=3, batch_size=16))
    assert report.limit == "decode", report.why
    assert report.decoding is not None
    tried = [loop.settings.get("num_workers", 0) for loop in report.deliveries]
    assert tried == ([0, report.cores] if report.cores > 1 else [0])
    assert "cache_dir" not in report.suggest  # the shards are files
    assert sorted(pictures.rglob("*")) == before


def test_json_has_what_programs_rely_on_and_text_says_it(pictures: Path) -> None:
    result = run(f"{pictures}/", "--seconds", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["limit"] in {"latency", "bandwidth", "errors", "decode", "delivery", "memory"}
    assert found["why"]
    assert {"num_workers", "prefetch_factor", "memory_limit"} <= found["suggest"].keys()
    text = run(f"{pictures}/", "--seconds", 1).stdout
    assert text.startswith("limit: ")
    assert "use    DataLoader(…, num_workers=" in text
    assert f"epoch  {found['num_chunks']:,} request" in text


def test_a_store_is_only_read_within_the_budget(mini_s3: MiniS3Server) -> None:
    """No request writes, and the bytes stay near what was allowed."""
    url = write_small_chunks(mini_s3.create_bucket(fresh_name()), mini_s3.storage_options)
    mini_s3.clear_log()
    bench([url], storage_options=mini_s3.storage_options, options=BenchOptions(seconds=1, max_bytes=4_000_000))
    log = mini_s3.log()
    assert {entry["method"] for entry in log} <= {"GET", "HEAD"}
    # Beside the budget: the samples that are decoded, and one read for each round.
    assert sum(int(str(entry["bytes"])) for entry in log) < 4_000_000 + 4_500_000 + 2_000_000


def test_a_set_without_an_index_is_refused_with_the_cure(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", index=False) as writer:
        writer.write({"__key__": "a", "txt": b"1"})
    with pytest.raises(IndexMissingError, match="shard_tools index"):
        bench([f"{tmp_path}/"])


@pytest.mark.parametrize("arguments", [(), ("{url}", "--seconds", "0"), ("{url}", "--bytes", "0")])
def test_wrong_usage_ends_with_2(pictures: Path, arguments: tuple[str, ...]) -> None:
    assert run(*(one.format(url=pictures) for one in arguments)).exit_code == 2


# ------------------------------------------------------------------------------------------------------ judgement


def reads(size_bytes: int, at_once: int, bytes_per_s: float, read_s: float = 0.01) -> Probe:
    return Probe(size_bytes=size_bytes, at_once=at_once, num_reads=100, bytes_per_s=bytes_per_s, spread=0.1,
                 read_s=read_s, retries=0)  # fmt: skip


def measured(*rates: float, small: float = 1e9, large: float = 0.0, **delivery: Any) -> Measured:
    """A store with these rates at 1, 4, 16, 64 chunks at a time, and the loop's own numbers."""
    chunk = 1 << 20
    sweep = [reads(chunk, 4**step, rate) for step, rate in enumerate(rates)]
    best = max(sweep, key=lambda one: one.bytes_per_s)
    probes = (
        reads(16 << 10, 1, 1e6),
        *sweep,
        reads(16 << 10, best.at_once, small),
        reads(4 * chunk, best.at_once, large),
    )
    loop: dict[str, Any] = {"fetch_share": 0.9, "build_share": 0.05, "samples_per_s": 1000.0, "chunks_bytes": 1 << 30}
    return Measured(
        probes=probes,
        decoding=Decoding(one_thread=900.0, threads=1500.0, processes=1800.0, num=2, spread=0.1),
        delivery=LoopRun(settings={}, **{**loop, **delivery}),
        sample_bytes=1e5,
        chunk_bytes=chunk,
        is_local=False,
    )


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (measured(1e7, 4e7, 1.6e8, 6e8), "latency"),  # still growing at 64
        (measured(1e8, 1.1e8, large=4e8), "latency"),  # larger requests bring more
        (measured(1e8, 1.1e8, small=1.7e6), "latency"),  # so many a second, whatever their size
        (measured(1e8, 1.1e8, large=1.1e8), "bandwidth"),
        (measured(1e7, 4e7, 1.6e8, 6e8, chunks_bytes=8 << 20), "memory"),
        (measured(1e8, 1.1e8, retries=100, requests=200), "errors"),
        (measured(1e8, 1.1e8, fetch_share=0.1, build_share=0.8), "decode"),
        (measured(1e8, 1.1e8, fetch_share=0.1, build_share=0.8, samples_per_s=100.0), "delivery"),
        (measured(1e8, 1.1e8, fetch_share=0.1, build_share=0.1), "delivery"),
        (measured(1e8, 1.1e8, refused="memory_limit: 1 MiB is too little"), "memory"),
    ],
)
def test_each_limit_is_told_from_the_measurements(found: Measured, limit: str) -> None:
    verdict = judge(found)
    assert verdict.limit == limit, verdict.why
    assert verdict.why


def test_what_is_tried_fits_what_limits() -> None:
    """Larger chunks only where they are small, more memory only if the machine has it."""
    settings = {"batch_size": 8, "memory_limit": 100}
    more = candidates("memory", settings, cores=2, memory_bytes=1000)
    assert [one["memory_limit"] for one in more] == [400, 1000]
    assert candidates("memory", settings, cores=2, memory_bytes=100) == []
    assert [one.get("num_workers") for one in candidates("decode", settings, cores=8, memory_bytes=1)] == [8, None]
    assert candidates("decode", settings, cores=1, memory_bytes=1) == []
    assert candidates("bandwidth", settings, cores=8, memory_bytes=1) == []
    assert convert_advice(measured(1e8), "latency") == {"max_bytes": "256MB"}
    assert convert_advice(measured(1e8), "bandwidth") == {}


def test_ranges_are_different_until_all_bytes_were_handed_out() -> None:
    """Then they begin again."""
    ranges = UnreadRanges(["a", "b", "empty"], [1000, 250, 0])
    taken = [ranges.take(100) for _ in range(13)]
    assert len({*taken}) == 13
    assert sum(stop - start for _, start, stop in taken) == 1250
    assert ranges.take(100) in taken


def test_a_probe_reads_at_least_once_a_round(tmp_path: Path) -> None:
    """Even when no time and no bytes are left."""
    (tmp_path / "a").write_bytes(bytes(1000))
    found = probe(Storage(), UnreadRanges([str(tmp_path / "a")], [1000]), 1000, 4, 0.0, 0)
    assert (found.num_reads, found.size_bytes, found.retries) == (3, 1000, 0)


def test_a_giant_among_the_few_that_are_decoded_does_not_stand_for_the_set(tmp_path: Path) -> None:
    """Of 400 small images one has 4 megapixels, and lies where samples are taken from."""
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(400):
            size = (2048, 2048) if number == 3 else (32, 32)
            pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
            image = io.BytesIO()
            Image.fromarray(pixels).save(image, "PNG")
            writer.write({"__key__": f"{number:04d}", "png": image.getvalue()})
    storage = Storage()
    opened = open_set([f"{tmp_path}/"], storage, None)
    samples, record_bytes = decoding.some_samples(opened, storage)
    mean = opened.chunks.total_bytes / opened.chunks.total_samples
    assert len(samples) < 40, "the giant takes the room of the others"
    rates = decoding.measure(samples, seconds=0.6, cores=1, weight=record_bytes / mean)
    alone = decoding.measure(samples, seconds=0.6, cores=1)
    assert rates.one_thread > 5 * alone.one_thread
