"""URLs and paths that are refused before anything is asked: a user before a bucket, and characters that none has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import Mixture, StreamingDataset, TableDataset
from streaming.common.arguments import checked_index, checked_path
from streaming.errors import ConfigError
from streaming.shards.cache.node import open_cache
from streaming.storage import Storage, as_url

IN_BUCKETS = ("key:hunter2@bucket", "hunter2@bucket", "key:hun/ter2@bucket", "key:hunter2", "key:hunter2%40bucket",
              "a b\n")  # fmt: skip


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "az", "abfs", "S3"])
@pytest.mark.parametrize("bucket", IN_BUCKETS)
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_no_user_stands_before_a_bucket(scheme: str, bucket: str, client: str) -> None:
    """Whatever a message shows of a bucket is no secret, since a URL with one is refused before it is taken apart."""
    if bucket == "hunter2@bucket" and scheme in {"az", "abfs"}:
        bucket = "key:hunter2@account"  # one without a colon is container@account
    url = f"{scheme}://{bucket}/txt/"
    storage = Storage({"client": client, "anon": True, "max_retries": 0})
    calls: list[Callable[[], object]] = [
        lambda: storage.info(url), lambda: storage.read(url), lambda: [*storage.list(url)], lambda: storage.way_to(url),
        lambda: storage.put(url, b""), lambda: storage.delete(url), lambda: StreamingDataset(url),
        lambda: StreamingDataset(f"s3://a/a.tar::{url}x.tar"), lambda: Storage({"mirrors": {"s3://a/": [url]}}),
        lambda: StreamingDataset(f"{url}{{00..01}}.tar", index="/nowhere"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigError, match=r"storage_options \(|leave it out") as caught:
            call()
        assert not re.search("hun|ter2", str(caught.value))


def test_a_container_of_azure_names_its_account() -> None:
    assert as_url("abfs://container@account.dfs.core.windows.net/a.tar").startswith("abfs://container@")


NUL: dict[str, Callable[[str], Any]] = {
    "urls": StreamingDataset,
    "a shard": lambda path: StreamingDataset(f"{path}/a.tar"),
    "a list": lambda path: StreamingDataset([f"{path}/a.tar"]),
    "a file to read": Mixture.from_file,
    "rows": lambda path: TableDataset(f"{path}.jsonl"),
    "a mirror": lambda path: Storage({"mirrors": {"s3://a/": [path]}}).info("s3://a/b"),
    "a writer": lambda path: ShardWriter(f"{path}/{{:06d}}.tar").write({"__key__": "k", "txt": "t"}),
    "a cache": lambda path: open_cache(path, None),
    "an option": lambda path: checked_path("bad_samples_file", path),
    "an index": checked_index,
}


@pytest.mark.parametrize("path", ["/tmp/\0x", "~\0/x", "a\0"], ids=ascii)
@pytest.mark.parametrize("what", NUL)
def test_a_path_with_the_character_nul(what: str, path: str) -> None:
    with pytest.raises(ConfigError, match="character NUL"):
        NUL[what](path)


@pytest.mark.parametrize("url", ["http://h/a\nb.tar", "https://h/a.tar?x\r\nHost: y", "http://h\t/a.tar", "http://h\n:1/a.tar",
                                 "s3://b\n/a.tar", "gs://b\x7f/a.tar", "file:///tmp/%00.tar"], ids=ascii)  # fmt: skip
def test_a_url_with_a_control_character(url: str) -> None:
    """A client would leave it out, and read another object; or send what follows as a header of its own."""
    with pytest.raises(ConfigError, match="leave it out"):
        StreamingDataset(url)
