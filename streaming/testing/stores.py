"""Test the promises of ``Storage`` for a store with any adapter: ``StoreTests``."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from streaming.errors import ConfigError, NotFoundError, StorageError, TransferError
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import ChangedError, Storage, StoreWriter, join_url

DATA = np.random.default_rng(7).integers(0, 256, 3_000_001, np.uint8).tobytes()
PART = 5 << 20


@dataclass(frozen=True)
class GivenStore:
    """A store, and an empty folder or prefix in it."""

    storage: Storage
    base: str

    def copy(self) -> Storage:
        """Return the storage as it arrives in another process."""
        copied: Storage = pickle.loads(pickle.dumps(self.storage))
        return copied


class StoreTests:
    """Tests of a store; a subclass returns a place for objects.

    Override :meth:`base`, and :meth:`storage` if the store takes options; or the fixture ``store``, which returns
    both::

        class TestShelf(StoreTests):
            def base(self, tmp_path):
                return f"shelf://{tmp_path.name}/data"
    """

    def storage(self) -> Storage:
        """Return the storage that accesses the store."""
        return Storage()

    def base(self, tmp_path: Path) -> str:
        """Return the URL of an empty folder or prefix, a different one for each test.

        Args:
            tmp_path: An empty folder of this test.
        """
        raise NotImplementedError(f"{type(self).__name__}.base: return the URL of an empty folder of your store")

    @pytest.fixture
    def store(self, tmp_path: Path) -> GivenStore:
        return GivenStore(self.storage(), self.base(tmp_path))

    def test_what_is_put_is_read_back_in_any_range(self, store: GivenStore) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, DATA)
        for start, stop in ((0, None), (0, 1), (1, 2), (17, 2_999_000), (2_999_999, None), (len(DATA) - 1, len(DATA))):
            got = store.storage.read(url, start, stop)
            assert isinstance(got, memoryview)
            assert got.format == "B"
            assert bytes(got) == DATA[start:stop]

    def test_an_empty_range_costs_no_request_and_an_empty_object_is_whole(self, store: GivenStore) -> None:
        url = join_url(store.base, "empty")
        store.storage.put(url, b"")
        assert store.storage.info(url).size_bytes == 0
        assert bytes(store.storage.read(url)) == b""
        assert bytes(store.storage.read(join_url(store.base, "missing"), 5, 5)) == b""

    def test_read_into_fills_exactly_the_given_memory(self, store: GivenStore) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, DATA)
        arena = bytearray(b"\xee" * 1000)
        store.storage.read_into(url, 5, memoryview(arena)[100:900])
        assert bytes(arena) == b"\xee" * 100 + DATA[5:805] + b"\xee" * 100
        words = np.zeros(10, np.int64)
        store.storage.read_into(url, 8, words.data)
        assert words.tobytes() == DATA[8:88]

    def test_a_range_past_the_end_is_a_transfer_error_with_the_numbers(self, store: GivenStore) -> None:
        url = join_url(store.base, "short")
        store.storage.put(url, b"0123456789")
        with pytest.raises(TransferError, match=r"\[5, 20\).*got 5 bytes, expected 15"):
            store.storage.read(url, 5, 20)
        with pytest.raises(TransferError):
            store.storage.read(url, 50, 60)

    def test_no_other_version_is_read_than_the_one_that_is_asked_for(self, store: GivenStore) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, b"one")
        version = store.storage.info(url).version
        assert bytes(store.storage.read(url, 0, 2, version=version)) == b"on"
        store.storage.put(url, b"two")
        if store.storage._store.adapter(url).keeps_versions and version is not None:
            with pytest.raises(ChangedError):
                store.storage.read(url, 0, 2, version=version)
        assert bytes(store.storage.read(url, 0, 2)) == b"tw"

    def test_info_tells_size_and_a_version_that_changes_with_the_content(self, store: GivenStore) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, b"one")
        first = store.storage.info(url)
        assert (first.url, first.size_bytes) == (url, 3)
        assert first.version == store.storage.info(url).version
        store.storage.put(url, b"three")
        assert store.storage.info(url).size_bytes == 5
        assert first.version not in {None, store.storage.info(url).version}

    def test_missing_objects(self, store: GivenStore) -> None:
        url = join_url(store.base, "dir/missing.tar")
        assert store.storage.exists(url) is False
        for call in (store.storage.info, store.storage.read, lambda u: store.storage.read(u, 3, 9)):
            with pytest.raises(NotFoundError, match=r"missing\.tar") as caught:
                call(url)
            assert isinstance(caught.value, FileNotFoundError)
        store.storage.delete(url)

    def test_list_is_recursive_sorted_and_complete(self, store: GivenStore) -> None:
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

    def test_expand_finds_the_shards_below_a_prefix(self, store: GivenStore) -> None:
        for name in ("0.tar", "sub/1.tar.gz", "2.tgz", "readme.txt", "_shardstream/x.tar", "3.tar.idx"):
            store.storage.put(join_url(store.base, name), b"x")
        wanted = [join_url(store.base, name) for name in ("0.tar", "2.tgz", "sub/1.tar.gz")]
        assert expand_urls(store.base, store.storage) == wanted
        assert expand_urls(store.base + "/", store.storage) == wanted
        with pytest.raises(NotFoundError, match="no shards below"):
            expand_urls(join_url(store.base, "none/"), store.storage)

    def test_deleted_object_is_gone(self, store: GivenStore) -> None:
        url = join_url(store.base, "x")
        store.storage.put(url, b"x")
        store.storage.delete(url)
        assert not store.storage.exists(url)

    @pytest.mark.parametrize("num_bytes", [0, 10, PART, 2 * PART + 1])
    def test_a_writer_publishes_on_close_and_not_before(self, store: GivenStore, num_bytes: int) -> None:
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
    def test_an_aborted_writer_leaves_nothing(self, store: GivenStore, num_bytes: int) -> None:
        url = join_url(store.base, "aborted/w.tar")

        def fail(writer: StoreWriter) -> None:
            with writer:
                writer.write(bytes(num_bytes))
                raise KeyError(1)

        with pytest.raises(KeyError):
            fail(store.storage.open_write(url, PART))
        assert list(store.storage.list(store.base)) == []
        assert not store.storage.exists(url)

    def test_many_threads_and_a_pickled_copy_read_the_same(self, store: GivenStore) -> None:
        url = join_url(store.base, "x.bin")
        store.storage.put(url, DATA)
        copy = store.copy()
        starts = range(0, 80_000, 1000)
        with ThreadPoolExecutor(8) as pool:
            got = pool.map(lambda start: bytes(copy.read(url, start, start + 777)), starts)
            assert list(got) == [DATA[start : start + 777] for start in starts]

    def test_bad_arguments(self, store: GivenStore) -> None:
        url = join_url(store.base, "x")
        for start, stop in ((-1, 5), (5, 4)):
            with pytest.raises(ConfigError, match="not a range"):
                store.storage.read(url, start, stop)
        with pytest.raises(ConfigError, match="read-only"):
            store.storage.read_into(url, 0, memoryview(b"abc"))
