"""Odd places and odd names: a home folder, one shard under two names, what is no shard, what a tar holds besides."""

from __future__ import annotations

import bz2
import logging
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from shard_tools import ShardWriter
from shard_tools.make.convert.sources import open_source
from streaming import StreamingDataset
from streaming.errors import ConfigError, NotFoundError, StorageError, TarError
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import make_sample, write_set
from tests.support.sets.tars import write_tar


def shard(path: Path, *members: tuple[str, bytes], links: tuple[tuple[str, str], ...] = ()) -> Path:
    """A tar of these files, and of hard links (name, target) behind them."""
    return write_tar(path, members or (("a.txt", b"text"),), links=links, form=tarfile.GNU_FORMAT)


def names(spec: object, storage: Storage | None = None) -> list[str]:
    return [os.path.basename(url) for url in expand_urls(spec, storage or Storage())]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- spelling


def test_the_home_folder_is_where_a_shell_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with ShardWriter("~/data/{:06d}.tar") as writer:
        writer.write(make_sample(1))
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "home" / "data" / "000000.tar").exists()
    for spec in ("~/data/", "~/data/{000000..000000}.tar", Path("~/data")):
        dataset = StreamingDataset(spec, cache_dir="~/cache", bad_samples_file="~/bad.jsonl")
        assert dataset[0]["__key__"] == "00001"
        assert dataset.source.bad_samples_file == str(tmp_path / "home" / "bad.jsonl")
    assert [file.name for file in open_source("~/data/", Storage()).files] == ["000000.tar"]  # type: ignore[attr-defined]
    assert not (tmp_path / "~").exists()
    write_set("./~", (1,))  # whoever means it says so
    assert (tmp_path / "~").is_dir()


def test_one_shard_by_two_names_is_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = shard(tmp_path / "in" / "a.tar")
    shard(tmp_path / "in" / "b.tar")
    (tmp_path / "link.tar").symlink_to(one)
    (tmp_path / "folder").symlink_to(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    others = (
        "in//a.tar",
        "./in/a.tar",
        f"{tmp_path}/in/../in/a.tar",
        f"file://{tmp_path}/in/a.tar",
        "link.tar",
        "folder/a.tar",
    )
    for other in others:
        with pytest.raises(ConfigError, match=r"named twice, also as .*which is the same shard"):
            expand_urls(["in/a.tar", other], Storage())
    assert names(["in/a.tar", "folder/b.tar"]) == ["a.tar", "b.tar"]
    with pytest.raises(ConfigError, match="named twice"):
        names(tmp_path)  # the link, and what it leads to
    with pytest.raises(ConfigError, match="same shard"):
        names(["s3://bucket/a.tar", "s3a://bucket/a.tar"])
    with pytest.raises(ConfigError, match="same shard"):
        names(["https://host/a%20b.tar", "https://host/a b.tar"])


# -------------------------------------------------------------------------------------------- what is a shard


def test_hidden_folders_and_pipes_are_no_shards(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar")
    for hidden in (".cache/x.tar", ".ipynb_checkpoints/a-checkpoint.tar", "deep/.git/y.tar", "._a.tar"):
        shard(tmp_path / hidden)
    os.mkfifo(tmp_path / "pipe.tar")
    assert names(tmp_path) == ["a.tar"]
    assert names(tmp_path / ".cache") == ["x.tar"]  # named, it is meant
    with pytest.raises(StorageError, match=r"pipe\.tar: it is a FIFO"):
        StreamingDataset(tmp_path / "pipe.tar")
    with pytest.raises(StorageError, match=r"pipe\.tar: it is a FIFO"):
        Storage().read(str(tmp_path / "pipe.tar"))


def test_marks_of_empty_folders_in_a_bucket_are_no_shards(mini_s3: MiniS3Server) -> None:
    url = mini_s3.create_bucket(fresh_name())
    write_set(url, (2,), storage_options=mini_s3.storage_options)
    storage = Storage(mini_s3.storage_options)
    storage.put(f"{url}/.hidden/x.tar", b"x")
    mini_s3.put_object(url.removeprefix("s3://"), "folder.tar/", b"")
    assert names(f"{url}/", storage) == ["000000.tar"]
    assert len(StreamingDataset(f"{url}/", storage_options=mini_s3.storage_options)) == 2


@pytest.mark.parametrize(
    ("name", "pack", "program"),
    [("a.tar.bz2", bz2.compress, "bunzip2"), ("a.tar.xz", lzma.compress, "unxz"), ("a.tar.zst", bytes, "unzstd")],
)
def test_other_compressions_are_named_with_their_cure(
    tmp_path: Path, name: str, pack: object, program: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(shard(tmp_path / "plain" / "a.tar").read_bytes()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=f"this compression is not supported.*{program}"):
        StreamingDataset(path)
    (tmp_path / "plain" / name).write_bytes(path.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert names(tmp_path / "plain") == ["a.tar"]
    assert f"`{program}`" in caplog.text
    (tmp_path / "plain" / "a.tar").unlink()
    with pytest.raises(NotFoundError, match=f"decompress .*{program}"):
        names(tmp_path / "plain")
    if pack is not bytes:  # under a name that says nothing
        with pytest.raises(TarError, match=rf"byte 0: this is .*{program}"):
            StreamingDataset(path.rename(tmp_path / "b.tar"))


# ----------------------------------------------------------------------------------------- what is in a shard


def test_what_would_get_lost_of_a_sample_is_an_error(tmp_path: Path) -> None:
    linked = shard(tmp_path / "linked.tar", ("a.txt", b"text"), links=(("b.txt", "a.txt"),))
    with pytest.raises(
        TarError, match=r"member 'b\.txt': a hard link to 'a\.txt'.*--hard-dereference.*shard_tools repair"
    ):
        StreamingDataset(linked)
    assert len(StreamingDataset(shard(tmp_path / "other.tar", ("a.txt", b""), links=(("Makefile", "a.txt"),)))) == 1
    for field in ("__key__", "__url__"):
        taken = shard(tmp_path / "key.tar", ("a.txt", b"text"), (f"a.{field}", b"other"), ("b.txt", b""))
        with pytest.raises(
            TarError, match=rf"member 'a\.{field}': a field '{field}', a name that readers use for their own notes"
        ):
            StreamingDataset(taken)
