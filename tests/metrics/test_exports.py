"""prometheus(), opentelemetry() and flat(): every kind of loader, by the libraries' own exposition and readers."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import streaming.metrics
from streaming import DataLoader, DevicePrefetcher, RemoteGroup, RetrySampler
from streaming.errors import ConfigError
from streaming.watch.metrics.table import EXPORTED, NUMBERS, OF_EXPORTS
from tests.support.contracts.loop_kinds import CLOSABLE, compress, makers
from tests.support.contracts.option_kinds import readers_here
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set
from tests.support.sets.mixtures import mixture

pytestmark = pytest.mark.usefixtures("one_fork_server")
Series = dict[tuple[str, str, str], float]
"""Values by name, loader and data rank."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("exports"), (9, 20, 9))


@pytest.fixture(scope="module")
def kinds(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return makers(samples, compress(samples, tmp_path_factory.mktemp("streamed")))


def parsed(text: str) -> Series:
    """What Prometheus reads of a text; each name has one group, and no series comes twice."""
    found: Series = {}
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels["loader"], sample.labels["data_rank"]
            assert key not in found
            assert EXPORTED[sample.name].kind == family.type
            assert EXPORTED[sample.name].meaning == family.documentation
            found[key] = sample.value
    return found


def scraped(registry: CollectorRegistry) -> Series:
    return parsed(generate_latest(registry).decode())


def collected(reader: InMemoryMetricReader) -> dict[tuple[str, str, str], float]:
    found = {}
    data = reader.get_metrics_data()
    for metric in (m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics) if data else ():
        for point in metric.data.data_points:
            key = metric.name, str(point.attributes["loader"]), str(point.attributes["data_rank"])
            assert key not in found
            found[key] = point.value
            number = next(one for one in NUMBERS.values() if one.opentelemetry_name == metric.name)
            assert (metric.unit, metric.description) == (number.unit, number.meaning)
            assert getattr(metric.data, "is_monotonic", False) == (number.kind == "counter")
    return found


@pytest.mark.parametrize("kind", CLOSABLE)
def test_every_kind_of_loader_is_exported_as_it_counts(kinds: dict[str, Any], kind: str) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    with kinds[kind]() as loader:
        streaming.metrics.prometheus(loader, registry)
        streaming.metrics.opentelemetry(loader, provider)
        assert scraped(registry)["shardstream_epoch", "loader", "0"] == 0
        assert sum(1 for _ in loader) == 4
    numbers = {name: value for name, value in loader.metrics().items() if name != "bad"}
    assert numbers["batches"] == 4
    assert numbers["in_loader_s"] >= numbers["first_batch_s"] > 0
    assert numbers["consumer_s"] > 0
    numbers |= {"epoch": 1, "samples_seen": 0, "world_size": 1}
    by_name = {(NUMBERS[name].prometheus_name, "loader", "0"): value for name, value in numbers.items()}
    assert scraped(registry) == pytest.approx(by_name)
    by_name = {(NUMBERS[name].opentelemetry_name, "loader", "0"): value for name, value in numbers.items()}
    assert collected(reader) == pytest.approx(by_name)
    flat = streaming.metrics.flat(loader, "data/")
    assert flat.pop("data/headspace") == pytest.approx(
        (numbers["in_loader_s"] - numbers["first_batch_s"])
        / (numbers["in_loader_s"] - numbers["first_batch_s"] + numbers["consumer_s"])
    )
    del numbers["world_size"]
    assert flat == pytest.approx({f"data/{name}": value for name, value in numbers.items()})
    assert all(type(value) is float for value in flat.values())
    provider.shutdown()


def test_a_mixture_with_workers_on_another_rank(samples: SampleSet) -> None:
    registry = CollectorRegistry()
    dataset = mixture({"web": samples, "code": samples}, "web code")
    with DataLoader(dataset, batch_size=4, device_mesh=mesh_of(2, 1), num_workers=1, agreement_timeout=None) as loader:
        streaming.metrics.prometheus(loader, registry)
        for _, _ in zip(range(3), loader, strict=False):
            pass
        text = generate_latest(registry).decode()
    assert 'shardstream_batches_total{data_rank="1",loader="loader",rank="1"} 3.0' in text
    assert parsed(text)["shardstream_world_size", "loader", "1"] == 2


def test_remote_readers_have_series_of_their_own(samples: SampleSet) -> None:
    registry = CollectorRegistry()
    with readers_here(), DataLoader(
        samples.open, batch_size=4, device_mesh=mesh_of(2, 0), remote_group=RemoteGroup(name="readers")
    ) as loader:  # fmt: skip
        streaming.metrics.prometheus(loader, registry, name="train")
        next(iter(loader))
        series = scraped(registry)
        flat = streaming.metrics.flat(loader)
    assert series["shardstream_batches_total", "train", "0"] == 1
    for data_rank in ("0", "1"):
        assert series["shardstream_batches_total", "train/readers", data_rank] >= 1
        assert flat[f"loader/readers/{data_rank}/fetched_bytes"] > 0


@pytest.mark.parametrize("export", ["prometheus", "opentelemetry", "flat", "serve"])
@pytest.mark.parametrize("what", ["torch", "prefetcher over torch", "sampler", "number"])
def test_what_is_no_loader_of_ours_is_refused(kinds: dict[str, Any], export: str, what: str, tmp_path: Path) -> None:
    foreign: Any = torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type,var-annotated]
    refused = {
        "torch": foreign, "prefetcher over torch": DevicePrefetcher(foreign, "cpu"),
        "sampler": RetrySampler(kinds["sampler"](), range(38)), "number": 3,
    }[what]  # fmt: skip
    with pytest.raises(ConfigError, match=rf"^{export}: expected a DataLoader.*does not count its waits"):
        getattr(streaming.metrics, export)(refused)


def test_two_loaders_in_one_registry(samples: SampleSet) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    with DataLoader(samples.open(), batch_size=4) as one, DataLoader(samples.open(), batch_size=2) as two:
        for name, loader in (("train", one), ("valid", two)):
            assert streaming.metrics.prometheus(loader, registry, name=name).name == name
            assert streaming.metrics.opentelemetry(loader, provider).name == {"train": "loader"}.get(name, "loader2")
            for _ in loader:
                pass
        series = scraped(registry)
        assert [series["shardstream_batches_total", name, "0"] for name in ("train", "valid")] == [9, 19]
        points = collected(reader)
        assert [points["shardstream.batches", name, "0"] for name in ("loader", "loader2")] == [9, 19]
        again = streaming.metrics.prometheus(one, registry)
        assert again.name == "train"
        with pytest.raises(ConfigError, match="name='valid': this loader is exported as 'train' already"):
            streaming.metrics.prometheus(one, registry, name="valid")
        again.close()
        again.close()
        assert {loader for _, loader, _ in scraped(registry)} == {"valid"}
        with pytest.raises(ConfigError, match="name='valid': another loader is exported by this name"):
            streaming.metrics.prometheus(one, registry, name="valid")
    provider.shutdown()


def test_a_loader_that_is_gone_is_not_kept_and_its_name_is_free(samples: SampleSet) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    loader = DataLoader(samples.open(), batch_size=4)
    for _ in range(2):
        assert streaming.metrics.prometheus(loader, registry).name == "loader"
        assert streaming.metrics.opentelemetry(loader, provider).name == "loader"
        assert scraped(registry)
        assert collected(reader)
        loader.close()
        assert scraped(registry)["shardstream_epoch", "loader", "0"] == 0  # a closed one keeps its numbers
        loader = None  # type: ignore[assignment]
        gc.collect()
        assert scraped(registry) == collected(reader) == {}
        loader = DataLoader(samples.open(), batch_size=4)
    loader.close()
    provider.shutdown()


def test_scraping_while_it_iterates(samples: SampleSet) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider, stop, errors, seen = MeterProvider([reader]), threading.Event(), [], [0.0]

    def scrape() -> None:
        try:
            while not stop.is_set():
                for found in (scraped(registry), collected(reader)):
                    seen.append(
                        found.get(("shardstream_batches_total", "loader", "0"))
                        or found.get(("shardstream.batches", "loader", "0"), seen[-1])
                    )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=scrape)
    with DataLoader(samples.open(), batch_size=2, num_threads=2) as loader:
        with DevicePrefetcher(loader, "cpu") as prefetcher:
            streaming.metrics.prometheus(prefetcher, registry)
            streaming.metrics.opentelemetry(prefetcher, provider)
            thread.start()
            for _ in range(8):
                for _ in prefetcher:
                    pass
        stop.set()
        thread.join()
    provider.shutdown()
    assert errors == []
    assert seen == sorted(seen)
    assert len(seen) > 8


def test_over_http_as_prometheus_asks(samples: SampleSet) -> None:
    registry = CollectorRegistry()
    with DataLoader(samples.open(), batch_size=4) as loader:
        streaming.metrics.prometheus(loader, registry)
        server, thread = start_http_server(0, "127.0.0.1", registry)
        with closing(server.socket):
            for _ in loader:
                pass
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
                text = answer.read().decode()
            server.shutdown()
            thread.join()
        assert parsed(text) == scraped(registry)
    assert parsed(text)["shardstream_batches_total", "loader", "0"] == 9


def test_one_that_fails_is_left_out_and_told_once(samples: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()

    class Odd:
        is_broken = False

        def _observed(self) -> Any:
            if self.is_broken:
                raise ValueError("broken")
            return good._observed()

    odd = Odd()
    with DataLoader(samples.open(), batch_size=4) as good:
        streaming.metrics.prometheus(odd, registry, name="odd")
        streaming.metrics.prometheus(good, registry, name="good")
        odd.is_broken = True
        for _ in range(2):
            assert {loader for _, loader, _ in scraped(registry)} == {"good"}
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in told] == ["metrics of the loader 'odd' cannot be read; they are left out"]


def test_a_forked_child_exports_what_it_is_given_there(samples: SampleSet) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    with DataLoader(samples.open(), batch_size=4) as loader:
        streaming.metrics.prometheus(loader, registry)
        streaming.metrics.opentelemetry(loader, provider)
        child = os.fork()
        if not child:
            status = 1
            try:
                before = scraped(registry), collected(reader)
                streaming.metrics.prometheus(loader, registry, name="child")
                names = {name for _, name, _ in scraped(registry)}
                status = 0 if before == ({}, {}) and names == {"child"} else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert scraped(registry)
        assert collected(reader)
    provider.shutdown()


@pytest.mark.parametrize(
    ("export", "library"), [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")]
)
def test_without_the_extra_it_is_named(
    samples: SampleSet, monkeypatch: pytest.MonkeyPatch, export: str, library: str
) -> None:
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with DataLoader(samples.open(), batch_size=4) as loader:
        with pytest.raises(ConfigError, match=r"pip install 'shardstream\[metrics\]'"):
            getattr(streaming.metrics, export)(loader)
        assert streaming.metrics.flat(loader)


@pytest.mark.parametrize(("export", "option"), [("prometheus", "registry"), ("opentelemetry", "meter_provider")])
def test_what_is_no_registry_is_refused(samples: SampleSet, export: str, option: str) -> None:
    with DataLoader(samples.open(), batch_size=4) as loader, pytest.raises(ConfigError, match=f"^{option}: expected"):
        getattr(streaming.metrics, export)(loader, 3)


def test_the_global_registry_and_provider_are_the_default(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4) as loader:
        ends = [streaming.metrics.prometheus(loader), streaming.metrics.opentelemetry(loader)]
        assert 'shardstream_epoch{data_rank="0",loader="loader",rank="0"} 0.0' in generate_latest().decode()
        for end in ends:
            end.close()
        assert "shardstream_epoch{" not in generate_latest().decode()


def test_what_exports_add_is_in_no_loader(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4) as loader:
        assert not {one.name for one in OF_EXPORTS} & loader.metrics().keys()
