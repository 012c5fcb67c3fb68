"""Bad input: every wrong argument, store, shard and index ends in seconds, in an error of ours that says what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import streaming.shards.catalog.open
from infra import DeviceMesh, MeshError
from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, DeviceMeshFetcher, ShuffleConfig, StreamingDataset
from streaming.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    DataError,
    DecodeError,
    DuplicateKeyError,
    IndexFormatError,
    IndexMismatchError,
    IndexMissingError,
    MemoryLimitError,
    NotFoundError,
    ShardstreamError,
    StorageError,
    TooManyBadSamplesError,
)
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, free_port, fresh_name
from tests.support.sets.index_files import with_facts, write_parquet

NUM_SAMPLES = 60
QUICK = {"unreachable_s": 0.2}


def write_set(target: str | Path, num_samples: int = NUM_SAMPLES, per_shard: int = 20, **options: Any) -> str:
    """Shards of ``per_shard`` samples with a class and a text; their directory."""
    with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=per_shard, **options) as writer:
        for i in range(num_samples):
            writer.write({"__key__": f"{i:05d}", "cls": i, "txt": f"text {i} " * 40})
    return str(target)


def epoch(urls: Any, *, batch_size: int = 4, loader: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """All batches of one epoch, as a training script would ask for them."""
    with DataLoader(StreamingDataset(urls, **options), batch_size, **(loader or {})) as batches:
        return list(batches)


def says(error: BaseException, *words: str) -> str:
    """The message, after a check that every one of ``words`` is in it."""
    text = str(error)
    missing = [word for word in words if word.lower() not in text.lower()]
    assert not missing, f"missing {missing} in: {text}"
    return text


def refused(kind: type[ShardstreamError], act: Callable[[], object], *words: str) -> str:
    """The message of the error that ``act`` raises: of exactly this type, and with these words."""
    with pytest.raises(ShardstreamError) as caught:
        act()
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    return says(caught.value, *words)


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``shard_tools``, which must not end in a traceback."""
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Three indexed shards of 20 samples on disk."""
    return write_set(tmp_path / "set")


@pytest.fixture(scope="module")
def remote(mini_s3: MiniS3Server) -> tuple[str, dict[str, Any]]:
    """URL and storage options of the same shards in a bucket."""
    options: dict[str, Any] = {**mini_s3.storage_options, **QUICK}
    url = f"{mini_s3.create_bucket(fresh_name())}/train"
    write_set(url, storage_options=options)
    return url, options


# --- the store -------------------------------------------------------------------------------------------------------

SHARD = "{0000..0002}.tar"


class TestStore:
    def test_the_bucket_is_read_when_all_is_well(self, remote: tuple[str, dict[str, Any]]) -> None:
        url, options = remote
        assert sum(len(batch["cls"]) for batch in epoch(url, storage_options=options)) == NUM_SAMPLES

    @pytest.mark.parametrize("rest", ["train/", f"train/{SHARD}"])
    def test_no_such_bucket(self, remote: tuple[str, dict[str, Any]], rest: str) -> None:
        _, options = remote
        refused(NotFoundError, lambda: epoch(f"s3://no-such-bucket-here/{rest}", storage_options=options),
                "no-such-bucket-here", "no bucket", options["endpoint_url"], "endpoint_url")  # fmt: skip

    def test_no_such_key(self, remote: tuple[str, dict[str, Any]]) -> None:
        url, options = remote
        refused(NotFoundError, lambda: epoch(f"{url}/9999.tar", storage_options=options), f"{url}/9999.tar", "check")

    def test_nothing_below_the_prefix(self, remote: tuple[str, dict[str, Any]]) -> None:
        url, options = remote
        refused(NotFoundError, lambda: epoch(f"{url}/none/", storage_options=options), f"{url}/none", ".tar", "check")

    @pytest.mark.parametrize("rest", ["/", f"/{SHARD}"])
    def test_wrong_secret(self, remote: tuple[str, dict[str, Any]], rest: str) -> None:
        url, options = remote
        wrong = {**options, "secret": "hunter2-very-secret"}
        text = refused(AccessDeniedError, lambda: epoch(url + rest, storage_options=wrong), url, "access denied",
                       "credentials", "SignatureDoesNotMatch", "profile")  # fmt: skip
        assert "hunter2" not in text
        assert options["secret"] not in text

    def test_wrong_secret_leaves_no_trace_in_the_traceback(self, remote: tuple[str, dict[str, Any]]) -> None:
        url, options = remote
        wrong = {**options, "secret": f"{'hunter2'}-very-secret"}  # in pieces: a traceback shows source lines
        with pytest.raises(AccessDeniedError) as caught:
            epoch(url, storage_options=wrong)
        assert "hunter2-very" not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize("rest", ["/", f"/{SHARD}"])
    def test_private_store_read_anonymously_is_refused_by_name(
        self, remote: tuple[str, dict[str, Any]], rest: str
    ) -> None:
        url, options = remote
        nobody = {"endpoint_url": options["endpoint_url"], "region": "us-east-1", "anon": True, **QUICK}
        refused(AccessDeniedError, lambda: epoch(url + rest, storage_options=nobody), url, "access denied", "anon")

    @pytest.mark.parametrize("rest", ["/", f"/{SHARD}"])
    def test_wrong_region(self, remote: tuple[str, dict[str, Any]], rest: str) -> None:
        url, options = remote
        refused(AccessDeniedError, lambda: epoch(url + rest, storage_options={**options, "region": "eu-west-3"}), url,
                "eu-west-3", "region='us-east-1'", "storage_options")  # fmt: skip

    @pytest.mark.parametrize("rest", ["/", f"/{SHARD}"])
    def test_endpoint_that_refuses(self, remote: tuple[str, dict[str, Any]], rest: str) -> None:
        url, options = remote
        endpoint = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(StorageError) as caught:
            epoch(url + rest, storage_options={**options, "endpoint_url": endpoint})
        text = says(caught.value, url, endpoint, "refused", "endpoint_url")
        assert options["secret"] not in text

    def test_one_shard_of_the_pattern_is_not_there(self, remote: tuple[str, dict[str, Any]]) -> None:
        url, options = remote
        text = refused(NotFoundError, lambda: epoch(f"{url}/{{0000..0003}}.tar", storage_options=options), "0003.tar",
                       "no such object", "check")  # fmt: skip
        assert options["secret"] not in text

    def test_no_such_folder(self, tmp_path: Path) -> None:
        refused(NotFoundError, lambda: epoch(tmp_path / "nowhere"), str(tmp_path / "nowhere"))

    def test_no_such_file(self, tmp_path: Path) -> None:
        refused(NotFoundError, lambda: epoch(tmp_path / "nothing.tar"), "nothing.tar", "no such")

    def test_unknown_scheme(self) -> None:
        refused(ConfigError, lambda: epoch("sss://bucket/a.tar"), "sss")

    @pytest.mark.parametrize("options", [{"secert": "hunter2"}, {"key": "only"}, {"region": 3}, {"max_retries": -1}])
    def test_storage_options(self, shards: str, options: dict[str, Any]) -> None:
        text = refused(ConfigError, lambda: epoch(shards, storage_options=options), "storage option", *options)
        assert "hunter2" not in text

    def test_storage_options_of_another_type(self, shards: str) -> None:
        refused(ConfigError, lambda: epoch(shards, storage_options="key=secret"), "storage_options", "mapping", "str")


class TestUrls:
    def test_empty_folder(self, tmp_path: Path) -> None:
        refused(NotFoundError, lambda: epoch(tmp_path), str(tmp_path), ".tar", "check")

    def test_empty_list(self) -> None:
        refused(ConfigError, lambda: epoch([]), "empty", "at least one")

    @pytest.mark.parametrize("spec", ["a.tar::", "::a.tar"])
    def test_joined_url_with_an_empty_part_is_refused(self, spec: str) -> None:
        refused(ConfigError, lambda: epoch(spec), "empty", "'::'")

    def test_empty_string(self) -> None:
        refused(ConfigError, lambda: epoch(""), "expected a URL or path", "''")

    @pytest.mark.parametrize("name", ["{0000..0002.tar", "0000..0002}.tar", "{0000..{0002}.tar"])
    def test_malformed_braces(self, shards: str, name: str) -> None:
        refused(ConfigError, lambda: epoch(f"{shards}/{name}"), name, "braces", "{000..099}")

    def test_braces_that_stand_for_nothing_special(self, shards: str) -> None:
        with pytest.raises(ShardstreamError) as caught:
            epoch(f"{shards}/{{0000...0002}}.tar")
        says(caught.value, "0000")

    def test_url_with_a_star_that_matches_nothing(self, shards: str) -> None:
        refused(NotFoundError, lambda: epoch(f"{shards}/x*.tar"), "x*.tar", "pattern")

    def test_one_shard_twice(self, shards: str) -> None:
        refused(ConfigError, lambda: epoch([f"{shards}/0000.tar"] * 2), "0000.tar", "twice")

    @pytest.mark.parametrize("urls", [None, 3, b"bytes.tar", [3], {"a": 1}, [None]])
    def test_of_another_type(self, urls: Any) -> None:
        refused(ConfigError, lambda: epoch(urls), "urls", "expected")


# --- shards and index that do not belong together --------------------------------------------------------------------


def chunk_file(shards: str) -> Path:
    return Path(shards) / "_shardstream" / "chunks.parquet"


def replaced_tar(path: Path, size_bytes: int | None) -> None:
    """Another tar of as many samples in place of ``path``; of this size, if one is given (the end is zeros)."""
    path.unlink()
    with ShardWriter(f"{path.parent}/new-%d.tar", index=False) as writer:
        for i in range(20):
            writer.write({"__key__": f"other{i:05d}", "cls": i + 1000, "txt": f"fake {i} " * 40})
    path.with_name("new-0.tar").rename(path)
    if size_bytes is not None:
        os.truncate(path, size_bytes)


class TestIndexMismatch:
    @pytest.fixture(params=["at open", "while reading"])
    def when(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sizes are checked when a small set is opened, and when a read of a large one fails."""
        if request.param == "while reading":
            monkeypatch.setattr(streaming.shards.catalog.open, "CHECKED_AT_OPEN", 0)

    @pytest.mark.usefixtures("when")
    @pytest.mark.parametrize("on_error", ["raise", "substitute", "skip"])
    def test_replaced_by_one_of_another_size(self, shards: str, on_error: str) -> None:
        path = Path(shards) / "0001.tar"
        size_bytes = path.stat().st_size
        replaced_tar(path, size_bytes + 1024)
        refused(IndexMismatchError, lambda: epoch(shards, on_error=on_error), "0001.tar", str(size_bytes),
                str(size_bytes + 1024), "replaced", "shard_tools index")  # fmt: skip

    def test_replaced_by_one_of_the_same_size(self, shards: str) -> None:
        path = Path(shards) / "0001.tar"
        replaced_tar(path, path.stat().st_size)
        refused(ChecksumError, lambda: epoch(shards, on_error="raise"), "0001.tar", "bytes 0-", "CRC32C", "replaced",
                "shard_tools index --force")  # fmt: skip

    def test_replaced_by_one_of_the_same_size_is_no_silent_substitution(self, shards: str) -> None:
        path = Path(shards) / "0001.tar"
        replaced_tar(path, path.stat().st_size)
        refused(TooManyBadSamplesError, lambda: epoch(shards), "0001.tar", "max_bad_samples", "shard_tools verify")

    @pytest.mark.usefixtures("when")
    @pytest.mark.parametrize("keep", [0, 100, 512, 20_000])
    def test_shard_truncated_after_indexing_is_refused_by_size(self, shards: str, keep: int) -> None:
        path = Path(shards) / "0002.tar"
        size_bytes = path.stat().st_size
        os.truncate(path, keep)
        refused(IndexMismatchError, lambda: epoch(shards), "0002.tar", f"{keep} bytes", str(size_bytes), "indexed",
                "shard_tools index")  # fmt: skip

    def test_truncated_by_the_end_mark_alone(self, shards: str) -> None:
        """All samples are there and intact, but this is not the file that was indexed."""
        path = Path(shards) / "0002.tar"
        os.truncate(path, path.stat().st_size - 1024)
        code, text = command("verify", shards)
        assert code == 1
        assert "0002.tar" in text

    @pytest.mark.usefixtures("when")
    def test_shard_of_the_index_that_is_missing_is_named(self, shards: str) -> None:
        (Path(shards) / "0001.tar").unlink()
        urls = f"{shards}/{SHARD}"
        refused(IndexMismatchError, lambda: epoch(urls), "0001.tar", "does not have", "shard_tools index")

    def test_missing_from_the_folder(self, shards: str) -> None:
        """A folder stands for the shards in it: one that is gone must not vanish from the training set unseen."""
        (Path(shards) / "0001.tar").unlink()
        refused(IndexMismatchError, lambda: epoch(shards), "0001.tar", "does not have it", "shard_tools index --prune")

    def test_shard_that_the_index_lacks_is_named(self, shards: str) -> None:
        shutil.copy(f"{shards}/0000.tar", f"{shards}/0003.tar")
        refused(IndexMismatchError, lambda: epoch(shards), "0003.tar", "this shard is not in it", "shard_tools index")

    def test_cure_of_a_replaced_shard(self, shards: str) -> None:
        path = Path(shards) / "0001.tar"
        replaced_tar(path, path.stat().st_size + 1024)
        refused(IndexMismatchError, lambda: epoch(shards), "shard_tools index")
        code, _ = command("index", "--force", f"{shards}/0001.tar")
        assert code == 0
        keys = [key for batch in epoch(shards) for key in batch["__key__"]]
        assert len(set(keys)) == NUM_SAMPLES
        assert sum(key.startswith("other") for key in keys) == 20

    def test_cure_of_a_missing_shard(self, shards: str) -> None:
        (Path(shards) / "0001.tar").unlink()
        assert command("index", "--prune", shards)[0] == 0
        assert sum(len(batch["cls"]) for batch in epoch(shards)) == NUM_SAMPLES - 20

    def test_cure_of_an_extra_shard(self, shards: str) -> None:
        replaced_tar(Path(shutil.copy(f"{shards}/0000.tar", f"{shards}/0003.tar")), None)
        assert command("index", shards)[0] == 0
        assert sum(len(batch["cls"]) for batch in epoch(shards)) == NUM_SAMPLES + 20

    def test_in_a_bucket(self, remote: tuple[str, dict[str, Any]], mini_s3: MiniS3Server, tmp_path: Path) -> None:
        _, options = remote
        url = f"{mini_s3.create_bucket(fresh_name())}/train"
        write_set(url, storage_options=options)
        storage = Storage(options)
        whole = bytes(storage.read(f"{url}/0001.tar"))
        storage.put(f"{url}/0001.tar", whole[:9000])
        refused(IndexMismatchError, lambda: epoch(url, storage_options=options), f"{url}/0001.tar", "9000 bytes",
                str(len(whole)))  # fmt: skip
        storage.delete(f"{url}/0001.tar")
        refused(IndexMismatchError, lambda: epoch(f"{url}/{SHARD}", storage_options=options), f"{url}/0001.tar")


class TestIndexFiles:
    def rewritten(self, shards: str, change: Callable[[dict[str, Any]], None]) -> None:
        facts = json.loads(pq.read_schema(chunk_file(shards)).metadata[b"shardstream"])
        change(facts)
        with_facts(chunk_file(shards), facts)

    def test_of_a_newer_version(self, shards: str) -> None:
        self.rewritten(shards, lambda facts: facts.update(version="7.1"))
        refused(IndexFormatError, lambda: epoch(shards), "chunks.parquet", "7.1", "1.x", "upgrade")

    def test_of_a_newer_minor_version_is_read(self, shards: str) -> None:
        self.rewritten(shards, lambda facts: facts.update(version="1.9", more="?"))
        assert len(epoch(shards)) == NUM_SAMPLES // 4

    @pytest.mark.parametrize("facts", [{"version": None}, {"kind": "samples"}, {"shards": 3}, {"shards": []}])
    def test_with_wrong_facts(self, shards: str, facts: dict[str, Any]) -> None:
        self.rewritten(shards, lambda known: known.update(facts))
        refused(IndexFormatError, lambda: epoch(shards), "chunks.parquet")

    @pytest.mark.parametrize("damage", ["empty", "half", "text", "flipped", "foreign"])
    def test_damaged_chunk_table_is_refused_by_name(self, shards: str, damage: str) -> None:
        path = chunk_file(shards)
        data = bytearray(path.read_bytes())
        if damage == "foreign":
            write_parquet(path, pq.read_table(path).replace_schema_metadata(None))
        else:
            middle = len(data) // 2
            data[middle] ^= 0xFF
            path.write_bytes(
                {
                    "empty": b"",
                    "half": bytes(data[:middle]),
                    "text": b"not parquet",
                    "flipped": b"PAR1" + bytes(8) + bytes(data[12:]),
                }[damage]
            )
        refused(IndexFormatError, lambda: epoch(shards), "chunks.parquet", "shard_tools index URL")

    def test_cure_of_a_damaged_one(self, shards: str) -> None:
        chunk_file(shards).write_bytes(b"garbage")
        assert command("index", shards)[0] == 0
        assert len(epoch(shards)) == NUM_SAMPLES // 4

    @pytest.mark.parametrize("act", [lambda url: StreamingDataset(url)[1], lambda url: epoch(url, fields=("cls",))])
    def test_damaged_sample_table(self, shards: str, act: Callable[[str], object]) -> None:
        path = chunk_file(shards).with_name("samples") / "0000.tar.parquet"
        path.write_bytes(path.read_bytes()[:-100])
        refused(IndexFormatError, lambda: act(shards), "0000.tar.parquet", "shard_tools index URL")

    def test_sample_table_of_another_shard(self, shards: str) -> None:
        """It would silently give the bytes of other samples."""
        folder = chunk_file(shards).with_name("samples")
        shutil.copy(folder / "0000.tar.parquet", folder / "0001.tar.parquet")
        dataset = StreamingDataset(shards)
        assert dataset[0]["cls"] == 0
        refused(IndexMismatchError, lambda: dataset[21], "0001.tar.parquet", "out of date", "shard_tools index --force")

    def test_cure_of_a_sample_table_of_another_shard(self, shards: str) -> None:
        folder = chunk_file(shards).with_name("samples")
        shutil.copy(folder / "0000.tar.parquet", folder / "0001.tar.parquet")
        assert command("index", "--force", f"{shards}/0001.tar")[0] == 0
        assert StreamingDataset(shards)[21]["cls"] == 21

    def test_no_index_where_it_is_said_to_be(self, shards: str, tmp_path: Path) -> None:
        """Small sets do without, but a place that was named and is empty is a mistake."""
        refused(IndexMissingError, lambda: epoch(shards, index=tmp_path / "elsewhere"), "elsewhere", "no index",
                "shard_tools index --index")  # fmt: skip


# --- the shards themselves -------------------------------------------------------------------------------------------


def plain_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> str:
    """A tar of other people, without an index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, BytesIO(data))
    return str(path)


class TestShards:
    def test_a_key_twice(self, tmp_path: Path) -> None:
        url = plain_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3")])
        text = refused(DuplicateKeyError, lambda: epoch(url), "a.tar", "'a'", "twice", "bytes 0 and")
        assert "sort" in text

    def test_a_field_twice(self, tmp_path: Path) -> None:
        url = plain_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("a.txt", b"2"), ("b.txt", b"2")])
        refused(DuplicateKeyError, lambda: epoch(url), "a.tar", "'a'", "txt")

    def test_duplicates_are_named_by_the_indexer_too(self, tmp_path: Path) -> None:
        url = plain_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3")])
        code, text = command("index", url)
        assert code == 1
        assert "a.tar" in text
        assert "twice" in text

    def test_a_key_twice_while_writing(self, tmp_path: Path) -> None:
        with ShardWriter(f"{tmp_path}/%d.tar") as writer:
            writer.write({"__key__": "a", "txt": "1"})
            refused(DuplicateKeyError, lambda: writer.write({"__key__": "a", "txt": "2"}), "'a'")

    def test_no_tar_at_all(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tar"
        path.write_bytes(b"<html>not found</html>" * 100)
        with pytest.raises(DataError) as caught:
            epoch(path)
        says(caught.value, "a.tar")

    @pytest.mark.parametrize("size", [0, 1024])
    def test_empty_shard(self, tmp_path: Path, size: int) -> None:
        """A tar without members is a tar, but a set of no samples cannot be trained on."""
        path = tmp_path / "a.tar"
        path.write_bytes(bytes(size))
        with pytest.raises(ShardstreamError) as caught:
            epoch(path)
        says(caught.value, "no samples" if size else "a.tar")

    def test_cut_in_the_middle_without_index(self, tmp_path: Path) -> None:
        url = Path(plain_tar(tmp_path / "a.tar", [(f"{i}.txt", b"x" * 3000) for i in range(9)]))
        os.truncate(url, 9000)
        with pytest.raises(DataError) as caught:
            epoch(url)
        says(caught.value, "a.tar")


class TestFields:
    def png_set(self, tmp_path: Path) -> str:
        with ShardWriter(f"{tmp_path}/%d.tar") as writer:
            for i in range(8):
                writer.write({"__key__": f"k{i}", "png": b"no image at all" if i == 5 else PNG, "cls": i})
        return str(tmp_path)

    def test_a_field_that_does_not_decode(self, tmp_path: Path) -> None:
        url = self.png_set(tmp_path)
        refused(DecodeError, lambda: epoch(url, on_error="raise"), "0.tar", "'k5'", "'png'", "15 B", "shard_tools cat",
                "on_error")  # fmt: skip

    def test_it_is_named_in_random_access_too(self, tmp_path: Path) -> None:
        dataset = StreamingDataset(self.png_set(tmp_path))
        refused(DecodeError, lambda: dataset[5], "0.tar", "'k5'", "'png'")
        with pytest.raises(IndexError, match="8 samples"):
            dataset[8]

    def test_too_many_that_do_not_decode(self, tmp_path: Path) -> None:
        url = self.png_set(tmp_path)
        refused(TooManyBadSamplesError, lambda: epoch(url, max_bad_samples=0), "'k5'", "max_bad_samples=0",
                "shard_tools verify")  # fmt: skip

    @pytest.mark.parametrize("spec", ["rgb9", "rgb8:224", {"png": "rgb9"}, {"png": 3}, 7, ["png"]])
    def test_unknown_decoder(self, shards: str, spec: Any) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, decode=spec), "decode")

    def test_unknown_array_type(self, shards: str) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, decode={"bin": "array:uint99"}), "uint99", "uint16")

    def test_pickle_is_refused(self, tmp_path: Path) -> None:
        with ShardWriter(f"{tmp_path}/%d.tar") as writer:
            for i in range(8):
                writer.write({"__key__": f"k{i}", "pkl": b"x"})
        refused(ConfigError, lambda: epoch(tmp_path), "pkl", "pickle", "decode=")

    @pytest.mark.parametrize("fields", [("jgp",), ("cls", "jgp")])
    def test_unknown_field(self, shards: str, fields: tuple[str, ...]) -> None:
        refused(ConfigError, lambda: epoch(shards, fields=fields), "'jgp'", "cls", "txt", "fields=")

    def test_unknown_field_close_to_a_known_one(self, shards: str) -> None:
        refused(ConfigError, lambda: epoch(shards, fields=("clss",)), "did you mean 'cls'")

    def test_unknown_field_without_an_index(self, tmp_path: Path) -> None:
        url = plain_tar(tmp_path / "a.tar", [(f"{i}.txt", b"x") for i in range(9)])
        refused(ConfigError, lambda: epoch(url, fields=("jpg",)), "'jpg'", "txt")

    def test_field_that_some_samples_have(self, tmp_path: Path) -> None:
        """A field is only unknown if no sample has it: here the first shard lacks it."""
        with ShardWriter(f"{tmp_path}/%d.tar", max_samples=4) as writer:
            for i in range(8):
                writer.write({"__key__": f"k{i}", "txt": "t", **({"cls": i} if i > 5 else {})})
        found = [
            value
            for batch in epoch(tmp_path, fields=("cls",), shuffle=False)
            for value in list(batch.get("cls", []))
            if value is not None
        ]
        assert found == [6, 7]

    @pytest.mark.parametrize("fields", ["jpg", (), [""], [3], 3, ("cls", "cls")])
    def test_fields_of_another_type(self, shards: str, fields: Any) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, fields=fields), "fields", "expected")

    def test_transform_that_raises(self, shards: str) -> None:
        def broken(sample: dict[str, Any]) -> dict[str, Any]:
            raise KeyError("image")

        refused(DecodeError, lambda: epoch(shards, transform=broken, on_error="raise"), "000", "transform", "KeyError",
                "image")  # fmt: skip

    def test_transform_that_returns_something_else(self, shards: str) -> None:
        refused(ConfigError, lambda: epoch(shards, transform=lambda sample: 3, on_error="raise"), "transform", "int",
                "dict")  # fmt: skip

    def test_collate_fn_that_raises(self, shards: str) -> None:
        """The user's own error is the user's own: it comes as it is."""

        def broken(samples: list[Any]) -> Any:
            raise RuntimeError("my own mistake")

        with pytest.raises(RuntimeError, match="my own mistake"):
            epoch(shards, loader={"collate_fn": broken})


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415478da6360606000000004000160c2f3cb"
    "0000000049454e44ae426082"
)


# --- arguments -------------------------------------------------------------------------------------------------------


class TestDatasetArguments:
    @pytest.mark.parametrize("shuffle", ["yes", 1, 0, None, {"seed": 1}, 10_000])
    def test_shuffle_of_another_type_is_refused(self, shards: str, shuffle: Any) -> None:
        refused(
            ConfigError, lambda: StreamingDataset(shards, shuffle=shuffle), "shuffle", "ShuffleConfig", repr(shuffle)
        )

    @pytest.mark.parametrize("seed", [-1, 1.5, "7", None, True, 2**64])
    def test_seed_out_of_range_is_refused(self, shards: str, seed: Any) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, seed=seed), "seed", "integer", str(seed))

    @pytest.mark.parametrize("name", ["seed", "window", "lanes"])
    @pytest.mark.parametrize("value", [-1, 1.5, "7", True, 2**65])
    def test_shuffle_config(self, name: str, value: Any) -> None:
        refused(ConfigError, lambda: ShuffleConfig(**{name: value}), name, "integer", str(value))

    def test_shuffle_of_no_lanes_is_refused(self) -> None:
        refused(ConfigError, lambda: ShuffleConfig(lanes=0), "lanes", "0")

    @pytest.mark.parametrize("on_error", ["ignore", None, True])
    def test_on_error(self, shards: str, on_error: Any) -> None:
        refused(
            ConfigError, lambda: StreamingDataset(shards, on_error=on_error), "on_error", "substitute", "skip", "raise"
        )

    @pytest.mark.parametrize("limit", [-1, -0.1, True, "3", None, float("nan"), 1.5])
    def test_max_bad_samples(self, shards: str, limit: Any) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, max_bad_samples=limit), "max_bad_samples", str(limit))

    @pytest.mark.parametrize("number", ["000001", 1.5, {1: 2}])
    def test_number_of_a_sample(self, shards: str, number: Any) -> None:
        with pytest.raises(TypeError, match="sample: expected a number from 0 on, got ") as caught:
            StreamingDataset(shards)[number]
        says(caught.value, repr(number))

    def test_transform_that_is_no_function_is_refused(self, shards: str) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, transform=3), "transform", "function")  # type: ignore[arg-type]

    @pytest.mark.parametrize("index", ["", 3])
    def test_index_that_is_no_place_is_refused(self, shards: str, index: Any) -> None:
        refused(ConfigError, lambda: StreamingDataset(shards, index=index), "index")


class TestLoaderArguments:
    @pytest.fixture
    def dataset(self, shards: str) -> StreamingDataset:
        return StreamingDataset(shards)

    @pytest.mark.parametrize("value", [0, -3, 2.0, "4", True, [4]])
    @pytest.mark.parametrize("name", ["batch_size", "global_batch_size"])
    def test_batch_size(self, dataset: StreamingDataset, name: str, value: Any) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, **{name: value}), name, "positive integer", repr(value))

    @pytest.mark.parametrize("sizes", [{}, {"batch_size": 4, "global_batch_size": 8}])
    def test_batch_size_given_none_or_both(self, dataset: StreamingDataset, sizes: dict[str, int]) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, **sizes), "exactly one", "batch_size", "global_batch_size")

    def test_batch_size_of_the_fetcher(self, dataset: StreamingDataset) -> None:
        refused(ConfigError, lambda: DeviceMeshFetcher(dataset, batch_size=0), "batch_size", "positive integer", "0")

    def test_global_batch_smaller_than_the_world(self, dataset: StreamingDataset) -> None:
        mesh = DeviceMesh.from_sizes(dp_size=8, rank=0)
        refused(ConfigError, lambda: DataLoader(dataset, global_batch_size=4, device_mesh=mesh), "4", "8", "at least 8")

    def test_more_ranks_than_samples(self, dataset: StreamingDataset) -> None:
        mesh = DeviceMesh.from_sizes(dp_size=NUM_SAMPLES + 1, rank=0)
        for last_batch in ("drop", "partial"):
            refused(ConfigError, lambda how=last_batch: DataLoader(dataset, 1, device_mesh=mesh, last_batch=how), "60",
                    "61", 'last_batch="pad"', "at most 60 ranks", "epoch_size")  # fmt: skip

    def test_more_ranks_than_samples_are_padded(self, dataset: StreamingDataset) -> None:
        kept: list[str] = []
        for rank in range(NUM_SAMPLES + 3):
            mesh = DeviceMesh.from_sizes(dp_size=NUM_SAMPLES + 3, rank=rank)
            with DataLoader(dataset, 2, device_mesh=mesh, last_batch="pad") as loader:
                (batch,) = loader
                assert len(loader) == 1
            assert len(batch["__key__"]) == len(batch["__valid__"]) == 2
            valid = batch["__valid__"].tolist()
            kept += [key for key, is_valid in zip(batch["__key__"], valid, strict=True) if is_valid]
        assert len(kept) == len(set(kept)) == NUM_SAMPLES

    def test_more_ranks_than_samples_with_the_cure(self, dataset: StreamingDataset) -> None:
        for rank in (0, 60):
            mesh = DeviceMesh.from_sizes(dp_size=NUM_SAMPLES + 1, rank=rank)
            with DataLoader(dataset, 1, device_mesh=mesh, epoch_size=122) as loader:
                assert len(list(loader)) == 2

    def test_batch_larger_than_the_set(self, dataset: StreamingDataset) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 61), "60", "61", 'last_batch="drop"', '"pad"', "smaller batch")

    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "60"])
    def test_epoch_size(self, dataset: StreamingDataset, value: Any) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 4, epoch_size=value), "epoch_size", "integer", repr(value))

    @pytest.mark.parametrize("limit", ["many", "4 GB of RAM", "-1GB", "", 0, -5, 1.5, True, "1e9"])
    def test_memory_limit(self, dataset: StreamingDataset, limit: Any) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 4, memory_limit=limit), "memory_limit", repr(limit))

    @pytest.mark.parametrize("value", ["dorp", None, True, 0])
    def test_last_batch(self, dataset: StreamingDataset, value: Any) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 4, last_batch=value), "last_batch", "drop", "pad", "partial")

    @pytest.mark.parametrize(("name", "value"), [("num_workers", -1), ("num_workers", 1.0), ("prefetch_factor", 0),
                                                 ("num_workers", "4"), ("prefetch_factor", "2")])  # fmt: skip
    def test_counts_that_are_no_integers_are_refused(self, dataset: StreamingDataset, name: str, value: Any) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 4, **{name: value}), name, "integer", repr(value))

    def test_collate_fn(self, dataset: StreamingDataset) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 4, collate_fn="stack"), "collate_fn", "function", "stack")  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", ["node", None, "everything"])
    def test_scope_of_a_shuffle(self, value: Any) -> None:
        refused(ConfigError, lambda: ShuffleConfig(scope=value), "scope", "global")

    @pytest.mark.parametrize("value", ["yes", None, 1])
    def test_pin_memory(self, dataset: StreamingDataset, value: Any) -> None:
        refused(ConfigError, lambda: DataLoader(dataset, 4, pin_memory=value), "pin_memory", "True or False")

    @pytest.mark.parametrize("wrong", ["s3://bucket/train/", 3, None, dict])
    def test_dataset_of_another_type(self, wrong: Any) -> None:
        text = refused(ConfigError, lambda: DataLoader(wrong, 4), "dataset", "StreamingDataset")
        if isinstance(wrong, str):
            says(ConfigError(text), "StreamingDataset('s3://bucket/train/')")

    @pytest.mark.parametrize("epoch_number", [-1, 1.5, "2", None])
    def test_set_epoch(self, dataset: StreamingDataset, epoch_number: Any) -> None:
        loader = DataLoader(dataset, 4)
        refused(ConfigError, lambda: loader.set_epoch(epoch_number), "epoch", "integer")
        refused(ConfigError, lambda: loader.seed(epoch_number), "seed", "integer")


class TestMesh:
    @pytest.mark.parametrize("mesh", [4, "dp", {"dp": 2}, (2, 2)])
    def test_of_another_type(self, shards: str, mesh: Any) -> None:
        with pytest.raises((ConfigError, MeshError)) as caught:
            epoch(shards, loader={"device_mesh": mesh})
        says(caught.value, "DeviceMesh", type(mesh).__name__)

    def test_sizes_that_do_not_make_the_world(self) -> None:
        with pytest.raises(MeshError) as caught:
            DeviceMesh.from_sizes(dp_size=3, tp_size=2, rank=0, world_size=8)
        says(caught.value, "6", "8")

    def test_rank_outside_its_mesh_is_refused(self) -> None:
        with pytest.raises(MeshError) as caught:
            DeviceMesh.from_sizes(dp_size=4, rank=4)
        says(caught.value, "rank", "4")

    @pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
    def test_axis_without_a_positive_size_is_refused(self, size: Any) -> None:
        with pytest.raises(MeshError) as caught:
            DeviceMesh.from_sizes(dp_size=size, rank=0)
        says(caught.value, "dp", str(size))

    def test_environment_that_contradicts(self, monkeypatch: pytest.MonkeyPatch, shards: str) -> None:
        monkeypatch.setenv("RANK", "5")
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises((ConfigError, MeshError)) as caught:
            epoch(shards)
        says(caught.value, "RANK", "5", "4")


# --- memory_limit ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """40 chunks of 2 to 4 MB, so that the plan of many lanes needs a hundred of them at once."""
    folder = tmp_path_factory.mktemp("large")
    with ShardWriter(f"{folder}/%02d.tar", max_samples=100) as writer:
        for i in range(400):
            writer.write({"__key__": f"{i:05d}", "bin": bytes([i % 256]) * 200_000})
    yield str(folder)
    shutil.rmtree(folder)


class TestMemoryLimit:
    def attempt(self, url: str, **options: Any) -> list[Any]:
        loader = {key: options.pop(key) for key in list(options) if key in {"memory_limit", "device_mesh"}}
        return epoch(url, batch_size=32, loader=loader, **options)

    def test_memory_limit_too_small_names_what_fits(self, large: str) -> None:
        refused(MemoryLimitError, lambda: self.attempt(large, memory_limit="48MiB"), "48.0 MiB", "lanes", "window",
                "memory_limit=", "ShuffleConfig(lanes=", "MiB")  # fmt: skip

    def test_the_first_cure_works(self, large: str) -> None:
        text = refused(MemoryLimitError, lambda: self.attempt(large, memory_limit="8MiB"))
        found = re.search(r'memory_limit="(\w+)"', text)
        assert found
        assert len(self.attempt(large, memory_limit=found[1])) == 400 // 32

    def test_the_second_cure_works(self, large: str) -> None:
        text = refused(MemoryLimitError, lambda: self.attempt(large, memory_limit="48MiB"))
        found = re.search(r"ShuffleConfig\(lanes=(\d+)\)", text)
        assert found
        batches = self.attempt(large, memory_limit="48MiB", shuffle=ShuffleConfig(lanes=int(found[1])))
        assert len(batches) == 400 // 32

    def test_below_a_single_chunk_promises_no_lanes(self, large: str) -> None:
        """Where no number of lanes helps, none may be suggested."""
        text = refused(MemoryLimitError, lambda: self.attempt(large, memory_limit="1MiB"), "memory_limit=")
        assert "ShuffleConfig(lanes=" not in text

    def test_memory_limit_of_an_unshuffled_set_names_what_is_enough(self, large: str) -> None:
        text = refused(MemoryLimitError, lambda: self.attempt(large, memory_limit="1MiB", shuffle=False))
        assert "ShuffleConfig(lanes=" not in text
        assert "That is for chunks; batches get the rest of the limit" in text
        found = re.search(r'memory_limit="(\w+)"', text)
        assert found
        assert len(self.attempt(large, memory_limit=found[1], shuffle=False)) == 400 // 32

    def test_slices_of_several_ranks(self, large: str) -> None:
        """In storage order ranks read slices of chunks, and one batch of them must fit as well."""
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=1)
        options = {"device_mesh": mesh, "shuffle": False}
        text = refused(MemoryLimitError, lambda: self.attempt(large, memory_limit="1MiB", **options), "memory_limit")
        found = re.search(r'memory_limit="(\w+)"', text)
        assert found, text
        assert len(self.attempt(large, memory_limit=found[1], **options)) == 400 // 64


# --- the command line ------------------------------------------------------------------------------------------------


class TestCommandLine:
    def options(self, options: dict[str, Any]) -> list[str]:
        return ["--endpoint-url", options["endpoint_url"]]

    def test_index_of_nothing(self, tmp_path: Path) -> None:
        code, text = command("index", str(tmp_path))
        assert code == 1
        assert ".tar" in text

    @pytest.mark.parametrize("verb", ["info", "verify", "ls"])
    def test_no_such_folder(self, tmp_path: Path, verb: str) -> None:
        code, text = command(verb, str(tmp_path / "nowhere"))
        assert code == (3 if verb == "verify" else 1)
        assert "nowhere" in text

    def test_malformed_braces_are_wrong_usage(self, shards: str) -> None:
        code, text = command("info", f"{shards}/{{0000..0002.tar")
        assert code == 2
        assert "braces" in text

    def test_no_such_bucket(self, remote: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        _, options = remote
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        monkeypatch.setenv("AWS_REGION", options["region"])
        code, text = command("info", "s3://no-such-bucket-here/train/")
        assert code == 1
        assert "no-such-bucket-here" in text
        assert "no bucket" in text

    def test_wrong_secret(self, remote: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        url, options = remote
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-very-secret")
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        monkeypatch.setenv("AWS_REGION", options["region"])
        code, text = command("ls", f"{url}/")
        assert code == 1
        assert "access denied" in text
        assert "hunter2" not in text

    def test_replaced_shard(self, shards: str) -> None:
        replaced_tar(Path(shards) / "0001.tar", None)
        code, text = command("verify", shards)
        assert code == 1
        assert "0001.tar" in text
