"""A second place for the same objects, and objects that are replaced while they are read."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.errors import AccessDeniedError, ConfigError, IndexMismatchError, NotFoundError, TransferError
from streaming.shards.fetch.read import FetchRange, _Read, _whole_of
from streaming.storage import ChangedError, Storage, mirrors_of
from streaming.storage.base.mirrors import REST_S, Mirror, Route, Routes, parse_mirrors
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import fresh_name
from tests.support.sets.data_sets import SampleSet, make_sample

MIB = 1 << 20
DATA = np.random.default_rng(13).integers(0, 256, MIB, np.uint8).tobytes()
QUICK = {"first_backoff_s": 0.001, "max_backoff_s": 0.01, "read_timeout_s": 60.0, "max_retries": 2}
DOWN = Fault(kind="status", status=500)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Place:
    """A primary behind a proxy that can be down, and its mirror."""

    def __init__(self, server, proxy: FaultProxy, primary: str, mirror: str) -> None:
        self.server, self.proxy, self.primary, self.mirror = server, proxy, primary, mirror
        self.fault: Fault | None = None

    def open(self, **options: object) -> Storage:
        return Storage({**self.options(**options), "mirrors": {self.primary: self.second()}})

    def options(self, **options: object) -> dict[str, object]:
        return {**self.server.storage_options, "endpoint_url": self.proxy.url, **QUICK, **options}

    def second(self) -> dict[str, str]:
        return {"url": self.mirror, "endpoint_url": self.server.url}

    def direct(self) -> Storage:
        return Storage(self.server.storage_options)


@pytest.fixture
def place(mini_s3) -> Iterator[Place]:
    primary, mirror = (mini_s3.create_bucket(fresh_name()) + "/train" for _ in range(2))
    with FaultProxy(mini_s3.port, choose=lambda method, *_: made.fault if method in {"GET", "HEAD"} else None) as proxy:
        made = Place(mini_s3, proxy, primary, mirror)
        for home in (primary, mirror):
            made.direct().put(home + "/a/x.tar", DATA)
        yield made


def test_a_prefix_is_a_whole_directory() -> None:
    routes = Routes({"s3://b/train": (Mirror(url="s3://m"),), "s3://b/train/deep": (Mirror(url="s3://d"),)})
    found = [routes.of(f"s3://b/{name}") for name in ("train2/x", "train", "train/x", "train/deep/x", "trai")]
    assert [None if one is None else one.mirrors[0].url for one in found] == [None, "s3://m", "s3://m", "s3://d", None]


def test_a_primary_that_works_is_the_only_one_asked(place: Place) -> None:
    storage = place.open()
    assert bytes(storage.read(place.primary + "/a/x.tar", 1, 10)) == DATA[1:10]
    assert storage.metrics.get("mirror_reads") == 0


@pytest.mark.parametrize("fault", [DOWN, Fault(kind="reset_before"), Fault(kind="ignore_range")])
def test_what_fails_for_good_comes_from_the_mirror(place: Place, fault: Fault, caplog) -> None:
    storage = place.open()
    place.fault = fault
    url = place.primary + "/a/x.tar"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = bytearray(1000)
            storage.read_into(url, 5, memoryview(out))
            assert out == DATA[5:1005]
    assert storage.metrics.get("mirror_reads") == 3
    (warning,) = caplog.messages
    assert place.primary in warning
    assert place.mirror in warning
    failed = len([entry for entry in place.proxy.log if entry[0] == "GET"])
    assert failed == (1 if fault.kind == "ignore_range" else 3)  # the first read's attempts, none for the others


def test_bytes_that_came_before_the_failure_are_read_anew(place: Place) -> None:
    place.direct().put(place.mirror + "/a/x.tar", DATA[::-1])
    place.fault = Fault(kind="truncate", at_bytes=0)
    place.proxy.add(Fault(kind="truncate", at_bytes=500_000))
    assert bytes(place.open().read(place.primary + "/a/x.tar")) == DATA[::-1]  # all of it, and no mixture


def test_listings_and_facts_come_under_the_primarys_names(place: Place) -> None:
    storage = place.open()
    expected = [info.url for info in storage.list(place.primary)]
    place.fault = DOWN
    assert [info.url for info in storage.list(place.primary)] == expected == [place.primary + "/a/x.tar"]
    found = storage.info(expected[0])
    assert (found.url, found.size_bytes) == (expected[0], MIB)
    assert storage.exists(expected[0])
    asked = len(place.proxy.log)
    assert not storage.exists(place.primary + "/none")
    assert len(place.proxy.log) == asked  # the mirror's word is enough


def test_what_is_missing_or_replaced_is_no_failure(place: Place) -> None:
    place.direct().put(place.mirror + "/only-here", b"x")
    storage = place.open()
    with pytest.raises(NotFoundError):
        storage.read(place.primary + "/only-here")
    url, out = place.primary + "/a/x.tar", bytearray(10)
    storage.read_into(url, 0, memoryview(out))
    place.direct().put(url, DATA[::-1])
    with pytest.raises(ChangedError):
        storage.read_into(url, 0, memoryview(out))
    with pytest.raises(TransferError, match="truncated or replaced"):
        storage.read(url, 0, 2 * MIB)
    assert storage.metrics.get("mirror_reads") == 0


def test_refused_credentials_are_a_failure(place: Place) -> None:
    given = place.options(secret="wrong")
    mirror = {**place.second(), "secret": place.server.secret}
    storage = Storage({**given, "mirrors": {place.primary: [mirror]}})
    assert bytes(storage.read(place.primary + "/a/x.tar", 0, 10)) == DATA[:10]
    with pytest.raises(AccessDeniedError, match="access denied"):
        Storage(given).read(place.primary + "/a/x.tar", 0, 10)
    assert "wrong" not in repr(storage._options)
    assert "mini-secret" not in repr(storage._options)


def test_when_all_fail_the_primarys_error_is_raised_and_the_mirrors_is_told(place: Place) -> None:
    given = place.options(unreachable_s=0.01)
    mirror = {"url": place.mirror, "endpoint_url": "http://127.0.0.1:1"}
    storage = Storage({**given, "mirrors": {place.primary: mirror}})
    place.fault = DOWN
    with pytest.raises(TransferError, match="busy or failing") as caught:
        storage.read(place.primary + "/a/x.tar", 0, 10)
    assert any("its mirror failed, too" in note and "127.0.0.1:1" in note for note in caught.value.__notes__)
    place.fault = None
    assert bytes(storage.read(place.primary + "/a/x.tar", 0, 10)) == DATA[:10]  # no mirror left: asked, rest or not
    assert not storage._routes._routes[0].rests, "it works again"


def test_what_one_mirror_lacks_is_asked_of_the_next(place: Place) -> None:
    empty = {"url": place.server.create_bucket(fresh_name()) + "/train", "endpoint_url": place.server.url}
    storage = Storage({**place.options(), "mirrors": {place.primary: [empty, place.second()]}})
    place.fault = DOWN
    assert bytes(storage.read(place.primary + "/a/x.tar", 0, 10)) == DATA[:10]


def test_the_primary_is_tried_again_by_one_call_with_one_attempt(place: Place, monkeypatch) -> None:
    storage = place.open()
    (route,) = storage._routes._routes
    now_s = [100.0]
    monkeypatch.setattr(route, "_clock", lambda: now_s[0])
    url = place.primary + "/a/x.tar"

    def asked() -> int:
        before = len(place.proxy.log)
        assert bytes(storage.read(url, 0, 10)) == DATA[:10]
        return len(place.proxy.log) - before

    place.fault = DOWN
    assert [asked(), asked()] == [3, 0]
    now_s[0] += REST_S - 1
    assert asked() == 0
    now_s[0] += 1
    assert [asked(), asked()] == [1, 0]
    place.fault = None
    assert asked() == 0
    now_s[0] += REST_S
    assert [asked(), asked()] == [1, 1]
    assert storage.metrics.get("mirror_reads") == 6
    place.fault = DOWN
    assert asked() == 3
    place.fault = None
    now_s[0] += REST_S
    with pytest.raises(NotFoundError):  # an answer: the primary works
        storage.read(place.primary + "/none", 0, 10)
    assert asked() == 1


def test_retries_at_a_primary_that_failed_meanwhile_are_given_up(place: Place) -> None:
    place.fault = DOWN
    failed = threading.Event()

    def observe(name: str, amount: int) -> None:
        if name == "retries" and not failed.is_set():
            failed.set()
            storage._routes._routes[0].failed(TransferError("somebody else's"))

    storage = Storage({**place.options(max_retries=50), "mirrors": {place.primary: place.second()}}, observer=observe)
    assert bytes(storage.read(place.primary + "/a/x.tar", 0, 10)) == DATA[:10]
    assert len(place.proxy.log) == 2


def test_only_one_call_at_a_time_is_on_trial() -> None:
    route = Route("s3://b", (Mirror(url="s3://c"),), clock=lambda: now_s)
    now_s = 0.0
    assert route.turn() == (True, False)
    route.failed(TransferError("x"))
    assert route.turn() == (False, False)
    now_s = REST_S
    assert [route.turn(), route.turn()] == [(True, True), (False, False)]
    route.undecided()
    assert route.turn() == (True, True)
    route.worked()
    assert [route.turn(), route.turn()] == [(True, False)] * 2


def test_writes_go_to_the_primary_alone(place: Place) -> None:
    storage = place.open()
    storage.put(place.primary + "/new", b"x")
    with pytest.raises(NotFoundError):
        place.direct().read(place.mirror + "/new")


@pytest.mark.parametrize(
    ("urls", "prefix"),
    [
        ("s3://b/train/{000..099}.tar", "s3://b/train"),
        ("s3://b/train/", "s3://b/train"),
        (["s3://b/train/x/a.tar", "s3://b/train/y/b.tar"], "s3://b/train"),
        (["s3://b/t1/", "s3://b/t12/"], "s3://b"),
        ("s3://b/t/a.tar::s3://b/t/b.tar", "s3://b/t"),
        ("s3://b/{x,y}/a.tar", "s3://b"),
        ("https://host/d/{0..9}.tar", "https://host/d"),
        ("/data/train", "/data/train"),
    ],
)
def test_the_directory_that_a_data_set_lies_in(urls: str | Sequence[str], prefix: str) -> None:
    assert mirrors_of(urls, ["s3://m"]) == {prefix: ["s3://m"]}


@pytest.mark.parametrize("urls", [["s3://a/x.tar", "s3://b/x.tar"], "x.tar", ["s3://a/x.tar", "gs://a/x.tar"]])
def test_a_data_set_in_no_directory_has_no_mirror(urls: str | Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="no directory in common"):
        mirrors_of(urls, ["s3://m"])


@pytest.mark.parametrize(
    "given",
    ["s3://m", {"s3://b": []}, {"s3://b": 5}, {"s3://b": [{"key": "x"}]}, {"s3://b": {"url": "s3://m", "mirrors": {}}}]
)  # fmt: skip
def test_mirrors_are_checked(given: object) -> None:
    with pytest.raises(ConfigError, match="mirrors"):
        parse_mirrors(given)


def test_unknown_options_of_a_mirror_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown storage option 'enpoint'"):
        Storage({"mirrors": {"s3://b": {"url": "s3://m", "enpoint": "x"}}})


@pytest.fixture
def copies(place: Place) -> SampleSet:
    """A data set in both places."""
    direct = place.direct()
    with ShardWriter(
        place.primary + "/{:03d}.tar", max_samples=20, storage_options=dict(place.server.storage_options)
    ) as writer:
        for number in range(100):
            writer.write(make_sample(number))
    for home in (place.primary, place.mirror):
        direct.delete(home + "/a/x.tar")
    for info in list(direct.list(place.primary)):
        direct.put(place.mirror + info.url[len(place.primary) :], direct.read(info.url))
    return SampleSet(url=place.primary, keys=tuple(f"{number:05d}" for number in range(100)))


def test_an_epoch_over_a_primary_that_dies_on_the_way(place: Place, copies: SampleSet) -> None:
    dataset = StreamingDataset(copies.url + "/", mirrors=[place.second()], storage_options=place.options())
    with DataLoader(dataset, batch_size=10) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
        assert loader.metrics()["mirror_reads"] == 0
    place.fault = DOWN
    with DataLoader(dataset, batch_size=10) as loader:
        again = [key for batch in loader for key in batch["__key__"]]
        assert loader.metrics()["mirror_reads"] >= 5
    assert again == keys
    assert sorted(keys) == list(copies.keys)
    opened = StreamingDataset(copies.url + "/", mirrors=[place.second()], storage_options=place.options())
    assert len(opened) == 100  # listing and index came from the mirror, too


def test_a_mirror_that_differs_is_noticed(place: Place, copies: SampleSet) -> None:
    direct = place.direct()
    shard = place.mirror + "/000.tar"
    direct.put(shard, bytes(direct.read(shard))[::-1])
    dataset = StreamingDataset(
        copies.url + "/", mirrors=[place.second()], storage_options=place.options(), on_error="raise"
    )
    place.fault = DOWN
    with DataLoader(dataset, batch_size=10) as loader, pytest.raises(Exception, match="CRC32C"):
        list(loader)


def test_metrics_count_what_the_store_was_asked(place: Place, copies: SampleSet) -> None:
    dataset = StreamingDataset(copies.url + "/", storage_options=place.options(hedge=False))
    before = len(place.proxy.log)  # a loader counts from its making on, not what opening the data set took
    place.proxy.add(Fault(kind="status", status=503), Fault(kind="reset_before"))
    with DataLoader(dataset, batch_size=10) as loader:
        list(loader)
        counted = loader.metrics()
    assert counted["requests"] == len(place.proxy.log) - before == 7
    assert (counted["retries"], counted["throttled"]) == (2, 1)
    assert counted["hedges"] == counted["hedges_won"] == counted["mirror_reads"] == 0
    assert counted["storage_bytes"] == counted["fetched_bytes"]


class TestReplaced:
    """A shard that is written again while a process reads it."""

    def wanted(self, url: str, data: bytes, *, start: int = 0) -> FetchRange:
        import crc32c  # noqa: PLC0415

        crc = crc32c.crc32c(data[start : start + 1000])
        return FetchRange(url=url, byte_start=start, byte_end=start + 1000, first_sample=0,
                          num_samples=1, crc32c=crc, shard_bytes=MIB)  # fmt: skip

    def fetch(self, storage: Storage, wanted: FetchRange) -> bytes:
        out = bytearray(wanted.num_bytes)
        _Read(storage, wanted, _whole_of(wanted)).into(memoryview(out))  # without taking it for a tar
        return bytes(out)

    @pytest.mark.parametrize("where", ["s3", "file", "fsspec"])
    def test_other_bytes_are_an_error_by_name(self, place: Place, tmp_path, where: str) -> None:
        urls = {"s3": place.primary + "/a/x.tar", "file": str(tmp_path / "x.tar"), "fsspec": "memory://replaced/x.tar"}
        url = urls[where]
        storage = place.direct()
        storage.put(url, DATA)
        assert self.fetch(storage, self.wanted(url, DATA)) == DATA[:1000]
        place.direct().put(url, DATA[::-1])
        with pytest.raises(IndexMismatchError, match=r"x\.tar.*replaced"):
            self.fetch(storage, self.wanted(url, DATA, start=5000))

    def test_the_same_bytes_written_again_are_none(self, place: Place, tmp_path) -> None:
        url, storage = str(tmp_path / "x.tar"), place.direct()
        storage.put(url, DATA)
        self.fetch(storage, self.wanted(url, DATA))
        place.direct().put(url, DATA)
        before = storage.metrics.get("requests")
        for start in (1000, 2000):
            assert self.fetch(storage, self.wanted(url, DATA, start=start)) == DATA[start : start + 1000]
        assert storage.metrics.get("requests") - before == 3  # found out once, then the new version counts

    def test_a_store_that_ignores_conditions_is_seen_through(self, place: Place, monkeypatch) -> None:
        import obstore  # noqa: PLC0415

        get = obstore.get
        monkeypatch.setattr(
            obstore, "get", lambda store, key, *, options: get(store, key, options={"range": options["range"]})
        )
        url, storage = place.primary + "/a/x.tar", place.direct()
        self.fetch(storage, self.wanted(url, DATA))
        place.direct().put(url, DATA[::-1])
        with pytest.raises(IndexMismatchError, match="replaced") as caught:
            self.fetch(storage, self.wanted(url, DATA))
        assert isinstance(caught.value.__cause__, ChangedError)
        assert "changed since it was first read" in str(caught.value.__cause__)

    def test_reads_of_a_whole_object_take_what_there_is(self, place: Place) -> None:
        url, storage = place.primary + "/a/x.tar", place.direct()
        storage.read(url)
        place.direct().put(url, b"new")
        assert bytes(storage.read(url)) == b"new"

    def test_who_looks_again_or_writes_sees_the_new_one(self, place: Place) -> None:
        url, storage, out = place.primary + "/a/x.tar", place.direct(), bytearray(5)
        storage.read_into(url, 0, memoryview(out))
        place.direct().put(url, DATA[::-1])
        storage.info(url)
        storage.read_into(url, 0, memoryview(out))
        storage.put(url, DATA)
        storage.read_into(url, 0, memoryview(out))
        assert out == DATA[:5]
