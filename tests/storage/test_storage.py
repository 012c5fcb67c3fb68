"""The contract of Storage, the same for every adapter."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streaming.errors import ConfigError, NotFoundError, StorageError, TransferError
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import ChangedError, Storage, StoreWriter, join_url
from streaming.storage.adapters import in_place
from streaming.storage.adapters import object as object_adapter
from streaming.storage.adapters.object import ObjectAdapter
from streaming.storage.base.options import parse_options
from streaming.storage.requests.transfer import Transfer
from tests.support.servers.on_loopback import HttpServer, fresh_name
from tests.support.tiers import first_here

DATA = np.random.default_rng(7).integers(0, 256, 3_000_001, np.uint8).tobytes()
PART = 5 << 20


@dataclass
class Store:
    storage: Storage
    base: str


STORES = ("local", "s3-mini", "s3-in-place", "s3fs", "azure", "gcs", "file-url", "memory", "s3-moto")


@pytest.fixture(params=first_here(STORES, 6))
def store(request: pytest.FixtureRequest, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    kind = request.param
    if kind == "s3-in-place":  # the smallest ranges, too
        monkeypatch.setattr(in_place, "LEAST_BYTES", 1)
    if kind == "local":
        yield Store(Storage(), f"{tmp_path}/base dir")
    elif kind == "file-url":
        yield Store(Storage(), f"file://{tmp_path}/base")
    elif kind == "memory":
        yield Store(Storage(), f"memory://{fresh_name()}/base")
    elif kind == "s3-moto":
        yield Store(
            Storage(request.getfixturevalue("moto").storage_options), request.getfixturevalue("moto_bucket") + "/a/base"
        )
    elif kind in {"s3-mini", "s3-in-place"}:
        yield Store(
            Storage(request.getfixturevalue("mini_s3").storage_options),
            request.getfixturevalue("s3_bucket") + "/a/base",
        )
    elif kind == "gcs":
        yield Store(
            Storage(request.getfixturevalue("mini_gcs").storage_options),
            request.getfixturevalue("gcs_bucket") + "/a/base",
        )
    elif kind == "azure":
        yield Store(
            Storage(request.getfixturevalue("azurite").storage_options),
            request.getfixturevalue("azure_container") + "/a/base",
        )
    else:
        options = {**request.getfixturevalue("mini_s3").storage_options, "client": "fsspec"}
        storage = request.getfixturevalue("s3fs_closed")(Storage(options))
        yield Store(storage, request.getfixturevalue("s3_bucket") + "/a/base")


class TestContract:
    def test_what_is_put_is_read_back_in_any_range(self, store: Store) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, DATA)
        for start, stop in ((0, None), (0, 1), (1, 2), (17, 2_999_000), (2_999_999, None), (len(DATA) - 1, len(DATA))):
            got = store.storage.read(url, start, stop)
            assert isinstance(got, memoryview)
            assert got.format == "B"
            assert bytes(got) == DATA[start:stop]

    def test_an_empty_range_costs_no_request_and_an_empty_object_is_whole(self, store: Store) -> None:
        url = join_url(store.base, "empty")
        store.storage.put(url, b"")
        assert store.storage.info(url).size_bytes == 0
        assert bytes(store.storage.read(url)) == b""
        assert bytes(store.storage.read(join_url(store.base, "missing"), 5, 5)) == b""

    def test_read_into_fills_exactly_the_given_memory(self, store: Store) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, DATA)
        arena = bytearray(b"\xee" * 1000)
        store.storage.read_into(url, 5, memoryview(arena)[100:900])
        assert bytes(arena) == b"\xee" * 100 + DATA[5:805] + b"\xee" * 100
        words = np.zeros(10, np.int64)
        store.storage.read_into(url, 8, words.data)
        assert words.tobytes() == DATA[8:88]

    def test_a_range_past_the_end_is_a_transfer_error_with_the_numbers(self, store: Store) -> None:
        url = join_url(store.base, "short")
        store.storage.put(url, b"0123456789")
        with pytest.raises(TransferError, match=r"\[5, 20\).*got 5 bytes, expected 15"):
            store.storage.read(url, 5, 20)
        with pytest.raises(TransferError):
            store.storage.read(url, 50, 60)

    def test_no_other_version_is_read_than_the_one_that_is_asked_for(self, store: Store) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, b"one")
        version = store.storage.info(url).version
        assert bytes(store.storage.read(url, 0, 2, version=version)) == b"on"
        store.storage.put(url, b"two")
        if store.storage._store.adapter(url).keeps_versions and version is not None:
            with pytest.raises(ChangedError):
                store.storage.read(url, 0, 2, version=version)
        assert bytes(store.storage.read(url, 0, 2)) == b"tw"

    def test_info_tells_size_and_a_version_that_changes_with_the_content(self, store: Store) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, b"one")
        first = store.storage.info(url)
        assert (first.url, first.size_bytes) == (url, 3)
        assert first.version == store.storage.info(url).version
        store.storage.put(url, b"three")
        assert store.storage.info(url).size_bytes == 5
        assert first.version not in {None, store.storage.info(url).version}

    def test_missing_objects(self, store: Store) -> None:
        url = join_url(store.base, "dir/missing.tar")
        assert store.storage.exists(url) is False
        for call in (store.storage.info, store.storage.read, lambda u: store.storage.read(u, 3, 9)):
            with pytest.raises(NotFoundError, match=r"missing\.tar") as caught:
                call(url)
            assert isinstance(caught.value, FileNotFoundError)
        store.storage.delete(url)

    def test_list_is_recursive_sorted_and_complete(self, store: Store) -> None:
        names = ["b.tar", "a.tar", "a/z.tar", "a/b/c.tar", "a-1.tar", "ä ö+%20.tar", "_shardstream/chunks.parquet"]
        for name in names:
            store.storage.put(join_url(store.base, name), name.encode())
        store.storage.put(store.base + "-beside/x.tar", b"not below")
        found = list(store.storage.list(store.base))
        urls = [info.url for info in found]
        assert urls == sorted(urls)
        assert [info.size_bytes for info in found] == [len(bytes(store.storage.read(info.url))) for info in found]
        assert sorted(bytes(store.storage.read(url)).decode() for url in urls) == sorted(names)
        assert {info.url: info.version for info in found} == {url: store.storage.info(url).version for url in urls}
        assert [info.url for info in store.storage.list(store.base + "/")] == urls
        assert [bytes(store.storage.read(info.url)) for info in store.storage.list(join_url(store.base, "a"))] == [
            b"a/b/c.tar", b"a/z.tar"]  # fmt: skip
        assert list(store.storage.list(join_url(store.base, "nothing"))) == []

    def test_expand_finds_the_shards_below_a_prefix(self, store: Store) -> None:
        for name in ("0.tar", "sub/1.tar.gz", "2.tgz", "readme.txt", "_shardstream/x.tar", "3.tar.idx"):
            store.storage.put(join_url(store.base, name), b"x")
        wanted = [join_url(store.base, name) for name in ("0.tar", "2.tgz", "sub/1.tar.gz")]
        assert expand_urls(store.base, store.storage) == wanted
        assert expand_urls(store.base + "/", store.storage) == wanted
        with pytest.raises(NotFoundError, match="no shards below"):
            expand_urls(join_url(store.base, "none/"), store.storage)

    def test_deleted_object_is_gone(self, store: Store) -> None:
        url = join_url(store.base, "x")
        store.storage.put(url, b"x")
        store.storage.delete(url)
        assert not store.storage.exists(url)

    @pytest.mark.parametrize("num_bytes", [0, 10, PART, 2 * PART + 1])
    def test_a_writer_publishes_on_close_and_not_before(self, store: Store, num_bytes: int) -> None:
        url, left = join_url(store.base, "w.tar"), num_bytes
        store.storage.put(url, b"before")
        with store.storage.open_write(url, PART) as writer:
            while left:
                left -= writer.write(memoryview(bytearray(DATA))[:left])
            assert bytes(store.storage.read(url)) == b"before"
            assert writer.num_bytes == num_bytes
        got = bytes(store.storage.read(url))
        assert got == (DATA * (num_bytes // len(DATA) + 1))[:num_bytes]
        writer.close()
        writer.abort()
        assert store.storage.info(url).size_bytes == num_bytes
        with pytest.raises(StorageError, match="closed"):
            writer.write(b"more")

    @pytest.mark.parametrize("num_bytes", [10, 2 * PART + 1])
    def test_an_aborted_writer_leaves_nothing(self, store: Store, num_bytes: int) -> None:
        url = join_url(store.base, "aborted/w.tar")

        def fail(writer: StoreWriter) -> None:
            with writer:
                writer.write(bytes(num_bytes))
                raise KeyError(1)

        with pytest.raises(KeyError):
            fail(store.storage.open_write(url, PART))
        assert list(store.storage.list(store.base)) == []
        assert not store.storage.exists(url)

    def test_many_threads_and_a_pickled_copy_read_the_same(self, store: Store, s3fs_closed) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, DATA)
        copy = s3fs_closed(pickle.loads(pickle.dumps(store.storage)))
        starts = range(0, 80_000, 1000)
        with ThreadPoolExecutor(8) as pool:
            got = pool.map(lambda start: bytes(copy.read(url, start, start + 777)), starts)
            assert list(got) == [DATA[start : start + 777] for start in starts]

    def test_bad_arguments(self, store: Store) -> None:
        url = join_url(store.base, "x")
        for start, stop in ((-1, 5), (5, 4)):
            with pytest.raises(ConfigError, match="not a range"):
                store.storage.read(url, start, stop)
        with pytest.raises(ConfigError, match="read-only"):
            store.storage.read_into(url, 0, memoryview(b"abc"))


class TestLocal:
    def test_beyond_two_gib(self, tmp_path) -> None:
        path = tmp_path / "sparse.tar"
        with path.open("wb") as file:
            file.seek(5 << 30)
            file.write(b"the end")
        storage = Storage()
        assert storage.info(str(path)).size_bytes == (5 << 30) + 7
        assert bytes(storage.read(str(path), (5 << 30) - 2)) == b"\0\0the end"

    def test_a_killed_writer_leaves_only_what_listings_leave_out(self, tmp_path) -> None:
        storage = Storage()
        writer = storage.open_write(f"{tmp_path}/a.tar")
        writer.write(b"half")
        assert len(os.listdir(tmp_path)) == 1
        assert list(storage.list(str(tmp_path))) == []
        with pytest.raises(NotFoundError):
            expand_urls(str(tmp_path), storage)
        writer.abort()
        assert os.listdir(tmp_path) == []

    def test_a_file_is_synced_before_its_name_is_there_and_its_directory_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What survives a power cut is whole, and stays: seen by the calls, in their order."""
        calls: list[tuple[str, str]] = []
        replace = os.replace

        def synced(descriptor: int) -> None:
            calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

        def replaced(source: str, target: str) -> None:
            calls.append(("replace", source))
            replace(source, target)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", replaced)
        with Storage().open_write(str(tmp_path / "a")) as writer:
            writer.write(b"abc")
            assert calls == []
        (_, temporary), *_ = calls
        assert Path(temporary).parent == tmp_path
        assert calls == [("sync", temporary), ("replace", temporary), ("sync", str(tmp_path))]

    def test_small_pieces_are_written_together_in_their_order_and_a_full_disk_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, calls = os.write, []

        def counted(descriptor: int, data: memoryview) -> int:
            calls.append(len(data))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", counted)
        pieces = [bytes([number % 251]) * (1000 if number != 300 else 1 << 20) for number in range(600)]
        with Storage().open_write(str(tmp_path / "a")) as writer:
            assert [writer.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
            assert writer.num_bytes == sum(map(len, pieces))
        assert (tmp_path / "a").read_bytes() == b"".join(pieces)
        assert len(calls) <= 6, "the large one, and the small ones before and behind it by the quarter of a MiB"

        def full(descriptor: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "write", full)
        writer = Storage().open_write(str(tmp_path / "b"))
        writer.write(b"held")
        with pytest.raises(StorageError, match="no space left"):
            writer.close()
        assert os.listdir(tmp_path) == ["a"]

    def test_dangling_links_are_not_listed(self, tmp_path) -> None:
        (tmp_path / "a.tar").write_bytes(b"a")
        (tmp_path / "b.tar").symlink_to(tmp_path / "gone.tar")
        (tmp_path / "c.tar").symlink_to(tmp_path / "a.tar")
        assert [info.url for info in Storage().list(str(tmp_path))] == [f"{tmp_path}/a.tar", f"{tmp_path}/c.tar"]

    def test_directories_are_not_objects(self, tmp_path) -> None:
        storage = Storage()
        for call in (storage.info, storage.read):
            with pytest.raises(NotFoundError, match="directory"):
                call(str(tmp_path))
        with pytest.raises(StorageError, match="directory"):
            storage.put(str(tmp_path), b"x")

    def test_no_descriptor_is_left_open(self, tmp_path) -> None:
        storage, url = Storage(), f"{tmp_path}/a.tar"
        storage.put(url, b"x" * 100)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            storage.read(url)
            with contextlib.suppress(TransferError):
                storage.read(url, 50, 200)
        assert len(os.listdir("/proc/self/fd")) <= before  # what others left may be collected meanwhile

    def test_a_path_of_another_directory_is_relative_to_the_current_one(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        storage = Storage()
        storage.put("a.tar", b"x")
        storage.put("d/b.tar", b"y")
        assert expand_urls(".", storage) == ["./a.tar", "./d/b.tar"]
        assert expand_urls("d", storage) == ["d/b.tar"]


class TestHttp:
    @pytest.fixture
    def web(self, tmp_path) -> Iterator[HttpServer]:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "x y.tar").write_bytes(DATA)
        (tmp_path / "empty.tar").write_bytes(b"")
        with HttpServer(tmp_path) as server:
            yield server

    def test_http_objects_and_ranges_are_read(self, web: HttpServer) -> None:
        storage, url = Storage(), f"{web.url}/d/x%20y.tar"
        assert storage.info(url).size_bytes == len(DATA)
        assert storage.info(url).version
        assert bytes(storage.read(url)) == DATA
        assert bytes(storage.read(url, 1000, 5000)) == DATA[1000:5000]
        assert bytes(storage.read(f"{web.url}/empty.tar")) == b""
        assert bytes(storage.read(url + "?token=a%2Fb", 3, 9)) == DATA[3:9]
        with pytest.raises(TransferError, match="got 1 bytes, expected 2"):
            storage.read(url, len(DATA) - 1, len(DATA) + 1)

    def test_what_plain_servers_cannot_do(self, web: HttpServer) -> None:
        storage = Storage()
        with pytest.raises(StorageError, match="cannot be listed; name the shards"):
            expand_urls(f"{web.url}/d/", storage)
        with pytest.raises(StorageError, match="can only be read"):
            storage.open_write(f"{web.url}/new.tar")
        with pytest.raises(StorageError):
            storage.put(f"{web.url}/new.tar", b"x")
        with pytest.raises(NotFoundError, match=r"nope\.tar"):
            storage.read(f"{web.url}/nope.tar")
        assert expand_urls(f"{web.url}/d/{{000..002}}.tar", storage)[1] == f"{web.url}/d/001.tar"

    def test_a_presigned_url(self, mini_s3, s3_bucket: str) -> None:
        Storage(mini_s3.storage_options).put(s3_bucket + "/di r/ä+1.tar", DATA)
        url = mini_s3.presign(s3_bucket[5:], "di r/ä+1.tar")
        storage = Storage()
        assert storage.info(url).size_bytes == len(DATA)  # HEAD is refused there: the signature is for GET
        assert bytes(storage.read(url, 10, 20)) == DATA[10:20]


def test_each_read_is_one_request_and_uploads_of_small_objects_too(mini_s3, s3_bucket: str) -> None:
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def observe(name: str, amount: int) -> None:
        with lock:
            counts[name] = counts.get(name, 0) + amount

    storage = Storage(mini_s3.storage_options, observer=observe)
    mini_s3.clear_log()
    with storage.open_write(s3_bucket + "/x") as writer:
        writer.write(DATA)
    storage.read(s3_bucket + "/x")
    storage.read(s3_bucket + "/x", 100, 1100)
    storage.read_into(s3_bucket + "/x", 5, memoryview(bytearray(95)))
    seen = [(entry["method"], entry["range"]) for entry in mini_s3.log()]
    assert seen == [("PUT", None), ("GET", None), ("GET", "bytes=100-1099"), ("GET", "bytes=5-99")]
    assert counts == {"requests": 3, "bytes": len(DATA) + 1000 + 95}


def test_no_upload_in_parts_is_left_after_an_abort(mini_s3, s3_bucket: str) -> None:
    storage = Storage(mini_s3.storage_options)
    writer = storage.open_write(s3_bucket + "/x", PART)
    writer.write(bytes(3 * PART))
    writer.abort()
    with contextlib.closing(mini_s3._client()) as client:
        assert client.list_multipart_uploads(Bucket=s3_bucket[5:]).get("Uploads", []) == []
    assert "shardstream-upload" not in {thread.name for thread in threading.enumerate()}


def test_listing_beyond_one_page(mini_s3, s3_bucket: str) -> None:
    storage = Storage(mini_s3.storage_options)
    names = [f"{number:04d}.tar" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.put(f"{s3_bucket}/p/{name}", b""), names))
    assert expand_urls(s3_bucket + "/p/", storage) == [f"{s3_bucket}/p/{name}" for name in names]


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_reads_leave_nothing_to_the_garbage_collector(mini_s3, s3_bucket: str, tmp_path, kind: str) -> None:
    """Jobs that switch it off would grow with every request."""
    base, options = (str(tmp_path), None) if kind == "local" else (s3_bucket, mini_s3.storage_options)
    gc.collect()
    gc.disable()
    try:
        before = {id(one) for one in gc.get_objects()}
        storage = Storage(options)
        storage.put(f"{base}/x.bin", b"0123456789")
        for _ in range(3):
            assert bytes(storage.read(f"{base}/x.bin", 2, 5)) == b"234"
        del storage
        assert not [one for one in gc.get_objects() if isinstance(one, Storage | Transfer) and id(one) not in before]
    finally:
        gc.enable()


def test_storage_shows_no_secret() -> None:
    storage = Storage({"key": "AKIAEXAMPLE", "secret": "s3cr3t", "token": "t0k3n"})
    for text in (repr(storage), repr(storage._options)):
        assert "s3cr3t" not in text
        assert "t0k3n" not in text
        assert "AKIAEXAMPLE" not in text


def test_storages_that_are_made_alike_share_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of sets in a bucket each open a storage; connections and certificates are of one."""
    given = {"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "b", "region": "us-east-1"}
    alive = []

    def client_of(options: dict[str, object], url: str = "s3://bucket/x") -> Any:
        alive.append(ObjectAdapter(parse_options(options)))
        return alive[-1]._at(url)[0]

    first = client_of(given)
    assert client_of(dict(given)) is first
    others = [{**given, "secret": "c"}, {**given, "region": "eu-west-1"}, {**given, "read_timeout_s": 3.0}]
    assert all(client_of(one) is not first for one in others)
    assert client_of(given, "s3://other/x") is not first
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert client_of(given) is not first
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    known = len(object_adapter._clients)
    del first, alive[:]
    gc.collect()
    assert len(object_adapter._clients) < known, "nobody uses them any more"
