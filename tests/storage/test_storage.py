"""The contract of Storage, the same for every adapter."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streaming.errors import NotFoundError, StorageError, TransferError
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import Storage
from streaming.storage.adapters import in_place
from streaming.storage.adapters import object as object_adapter
from streaming.storage.adapters.object import ObjectAdapter
from streaming.storage.base.options import parse_options
from streaming.storage.requests.transfer import Transfer
from streaming.testing import StoreTests
from streaming.testing.stores import DATA, PART, GivenStore
from tests.support.processes.leftovers import descriptors
from tests.support.servers.on_loopback import HttpServer, fresh_name
from tests.support.tiers import first_here


@dataclass(frozen=True)
class ClosedStore(GivenStore):
    """One whose copies are closed at the end of the test."""

    close: Callable[[Storage], Storage]

    def copy(self) -> Storage:
        return self.close(super().copy())


STORES = ("local", "s3-mini", "s3-in-place", "s3fs", "azure", "gcs", "file-url", "memory", "s3-moto")


class TestContract(StoreTests):
    @pytest.fixture(params=first_here(STORES, 6))
    def store(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[GivenStore]:
        kind = request.param
        if kind == "s3-in-place":  # the smallest ranges, too
            monkeypatch.setattr(in_place, "LEAST_BYTES", 1)
        if kind == "local":
            yield GivenStore(Storage(), f"{tmp_path}/base dir")
        elif kind == "file-url":
            yield GivenStore(Storage(), f"file://{tmp_path}/base")
        elif kind == "memory":
            yield GivenStore(Storage(), f"memory://{fresh_name()}/base")
        elif kind == "s3-moto":
            yield GivenStore(
                Storage(request.getfixturevalue("moto").storage_options),
                request.getfixturevalue("moto_bucket") + "/a/base",
            )
        elif kind in {"s3-mini", "s3-in-place"}:
            yield GivenStore(
                Storage(request.getfixturevalue("mini_s3").storage_options),
                request.getfixturevalue("s3_bucket") + "/a/base",
            )
        elif kind == "gcs":
            yield GivenStore(
                Storage(request.getfixturevalue("mini_gcs").storage_options),
                request.getfixturevalue("gcs_bucket") + "/a/base",
            )
        elif kind == "azure":
            yield GivenStore(
                Storage(request.getfixturevalue("azurite").storage_options),
                request.getfixturevalue("azure_container") + "/a/base",
            )
        else:
            options = {**request.getfixturevalue("mini_s3").storage_options, "client": "fsspec"}
            closed = request.getfixturevalue("s3fs_closed")
            yield ClosedStore(closed(Storage(options)), request.getfixturevalue("s3_bucket") + "/a/base", closed)


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
        for _ in range(20):
            storage.read(url)
            with contextlib.suppress(TransferError):
                storage.read(url, 50, 200)
            with contextlib.suppress(StorageError):
                storage.read(str(tmp_path))
        assert not descriptors(tmp_path)

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


@pytest.mark.thorough
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
