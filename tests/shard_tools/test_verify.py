"""``verify``: a sound data set has no findings, and every class of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.change.check.verify import VerifyReport, verify
from shard_tools.change.sets.reindex import index
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.running.report import Finding
from streaming.errors import ConfigError, IndexFormatError, IndexMissingError, NotFoundError
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.sets.tars import write_tar

NUM_SHARDS = 4
SAMPLES_PER_SHARD = 25
COLUMNS = ("shard", "first_sample", "num_samples", "byte_start", "byte_end")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 25 samples, indexed as they were written."""
    folder = tmp_path_factory.mktemp("sound")
    lines = [json.dumps({"n": i, "text": "abc" * (i % 50)}) for i in range(NUM_SHARDS * SAMPLES_PER_SHARD)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    options = ConvertOptions(max_samples=SAMPLES_PER_SHARD, fields=(("text", "txt"),))
    convert(str(folder / "in.jsonl"), str(folder / "data"), options=options)
    return folder / "data"


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "data"))


def check(data: Path, **options: bool) -> VerifyReport:
    return verify([str(data)], storage=Storage(), **options)  # type: ignore[arg-type]


def kinds(report: VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, Path(finding.shard).name) for finding in report.findings]


def samples_of(data: Path, name: str) -> tuple[Path, SampleTable]:
    path = data / "_shardstream" / "samples" / f"{name}.parquet"
    return path, SampleTable.from_parquet(path.read_bytes(), str(path))


def test_sound_set_has_no_findings(data: Path) -> None:
    report = check(data, decode=True)
    assert report.findings == ()
    assert (report.num_shards, report.num_samples) == (NUM_SHARDS, NUM_SHARDS * SAMPLES_PER_SHARD)
    assert report.num_bytes == sum(path.stat().st_size for path in data.glob("*.tar"))


def test_verify_writes_nothing(data: Path) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    check(data)
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None)
def test_any_flipped_bit_is_found(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, position: float, bit: int
) -> None:
    """In headers, payload, padding and the end-of-archive mark: no byte is left unread."""
    copy = Path(shutil.copytree(sound, tmp_path_factory.mktemp("flip") / "data"))
    shard = copy / "000002.tar"
    body = bytearray(shard.read_bytes())
    at = int(position * len(body))
    body[at] ^= 1 << bit
    shard.write_bytes(body)
    report = check(copy)
    assert report.findings
    assert {Path(finding.shard).name for finding in report.findings} == {"000002.tar"}
    assert any(
        finding.byte_start is not None and finding.byte_end is not None and finding.byte_start <= at < finding.byte_end
        for finding in report.findings
    )
    shutil.rmtree(copy)


@pytest.mark.parametrize("keep", [0, 1, 511, 512, 5000, -1, -512, -1024])
def test_truncated_shard_is_found_by_its_size(data: Path, keep: int) -> None:
    shard = data / "000001.tar"
    body = shard.read_bytes()
    shard.write_bytes(body[:keep])
    report = check(data)
    (finding,) = report.findings
    assert (finding.kind, Path(finding.shard).name) == ("size", "000001.tar")
    assert "cut off" in finding.what
    assert (finding.expected, finding.got) == (f"{len(body)} bytes", f"{len(body[:keep])} bytes")


def test_longer_shard_is_found_by_its_size(data: Path) -> None:
    shard = data / "000001.tar"
    shard.write_bytes(shard.read_bytes() + b"more")
    assert [(finding.kind, "longer" in finding.what) for finding in check(data).findings] == [("size", True)]


def test_missing_shard(data: Path) -> None:
    (data / "000003.tar").unlink()
    report = check(data)
    assert kinds(report) == [("missing", "000003.tar")]
    assert "--prune" in report.findings[0].cure
    index([str(data)], storage=Storage(), prune=True)
    assert check(data).findings == ()
    assert not (data / "_shardstream" / "samples" / "000003.tar.parquet").exists()


def test_a_run_that_prunes_and_is_killed_is_continued(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "000002.tar").unlink()
    (data / "000003.tar").unlink()
    calls = 0

    def change(storage: Storage, url: str, *data: Any, work: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        work(storage, url, *data)

    with monkeypatch.context() as patch:
        for name in ("put", "delete"):
            patch.setattr(Storage, name, partialmethod(change, work=getattr(Storage, name)))
        with pytest.raises(KeyboardInterrupt):
            index([str(data)], storage=Storage(), prune=True)
    assert index([str(data)], storage=Storage(), prune=True).num_pruned == 2
    assert not list(data.glob("_shardstream/samples/00000[23]*"))


def test_missing_shard_named_in_a_list(data: Path) -> None:
    (data / "000003.tar").unlink()
    report = verify([str(data / "{000000..000003}.tar")], storage=Storage())
    assert kinds(report) == [("missing", "000003.tar")]
    assert verify([str(data / "{000000..000002}.tar")], storage=Storage()).findings == ()


def test_shard_without_index_entry(data: Path) -> None:
    with ShardWriter(str(data / "new-{:03d}.tar"), index=False) as writer:
        writer.write({"__key__": "new", "txt": "x"})
    assert kinds(check(data)) == [("unindexed", "new-000.tar")]
    index([str(data)], storage=Storage())
    assert check(data).findings == ()


def test_replaced_by_another_of_the_same_size(data: Path) -> None:
    body = (data / "000001.tar").read_bytes()
    text = b"abcabc"
    at = body.index(text)
    (data / "000001.tar").write_bytes(body[:at] + b"cbacba" + body[at + len(text) :])
    (finding,) = check(data).findings
    assert finding.kind == "checksum"
    assert finding.byte_start is not None
    assert finding.byte_start <= at < (finding.byte_end or 0)
    assert str(finding.expected).startswith("CRC32C ")


def test_swapped_shards_are_called_so(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ShardWriter(str(data / "{:d}.tar"), max_samples=3) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i}", "cls": i})
    (data / "0.tar").rename(data / "x")
    (data / "1.tar").rename(data / "0.tar")
    (data / "x").rename(data / "1.tar")
    report = check(data)
    assert kinds(report) == [("checksum", "0.tar"), ("checksum", "1.tar")]
    assert "1.tar: swapped?" in report.findings[0].what
    assert "0.tar: swapped?" in report.findings[1].what


def test_duplicate_keys_across_shards(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(3):
        with ShardWriter(str(data / f"part{number}-{{:d}}.tar")) as writer:
            for key in ("same", f"own{number}"):
                writer.write({"__key__": key, "cls": number})
    report = check(data)
    assert [(finding.kind, finding.key, Path(finding.shard).name) for finding in report.findings] == [
        ("duplicate", "same", "part1-0.tar"),
        ("duplicate", "same", "part2-0.tar"),
    ]
    assert all("part0-0.tar" in finding.what for finding in report.findings)


def test_duplicate_keys_that_are_not_utf_8(tmp_path: Path) -> None:
    """Where they stand beside others, and alone: a key is the same wherever it is hashed."""
    odd = [b"caf\xe9".decode("utf-8", "surrogateescape"), b"\xff".decode("utf-8", "surrogateescape")]
    for number, keys in enumerate((["plain", odd[0], "caf\u00e9"], [odd[1], "other"], [odd[0]], ["plain"])):
        write_tar(tmp_path / f"d/{number}.tar", [(f"{key}.txt", b"x") for key in keys])
    index([str(tmp_path / "d")], storage=Storage())
    report = check(tmp_path / "d")
    assert [(finding.kind, finding.key, Path(finding.shard).name) for finding in report.findings] == [
        ("duplicate", odd[0], "2.tar"),
        ("duplicate", "plain", "3.tar"),
    ]


def test_fields_that_do_not_decode(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ShardWriter(str(data / "{:d}.tar")) as writer:
        writer.write({"__key__": "good", "json": {"a": 1}, "cls": 3, "bin": b"\xff"})
        writer.write({"__key__": "bad", "json": b"{", "cls": b"three", "pkl": b"anything"})
    assert check(data).findings == ()
    report = check(data, decode=True)
    assert sorted((finding.kind, finding.key, finding.what.split("'")[1]) for finding in report.findings) == [
        ("decode", "bad", "cls"),
        ("decode", "bad", "json"),
    ]
    assert report.not_decoded == ("pkl",)
    body = (data / "0.tar").read_bytes()
    spans = {body[finding.byte_start : finding.byte_end] for finding in report.findings}
    assert spans == {b"{", b"three"}


# ---------------------------------------------------------------------------------- an index that is wrong


def drop_samples(data: Path) -> None:
    (data / "_shardstream" / "samples" / "000000.tar.parquet").unlink()


def damage_samples(data: Path) -> None:
    path = data / "_shardstream" / "samples" / "000000.tar.parquet"
    path.write_bytes(path.read_bytes()[:-10])


def other_samples(data: Path) -> None:
    samples = data / "_shardstream" / "samples"
    shutil.copy(samples / "000001.tar.parquet", samples / "000000.tar.parquet")


@pytest.mark.parametrize("damage", [drop_samples, damage_samples, other_samples])
def test_sample_table_that_is_gone_damaged_or_anothers(data: Path, damage: Callable[[Path], None]) -> None:
    damage(data)
    assert kinds(check(data)) == [("index", "000000.tar")]
    index([str(data)], storage=Storage(), force=True)
    assert check(data).findings == ()


def rewrite(data: Path, name: str, **changes: object) -> None:
    path, table = samples_of(data, name)
    path.write_bytes(replace(table, **changes).to_parquet())  # type: ignore[arg-type]


def test_sample_table_with_another_key(data: Path) -> None:
    _, table = samples_of(data, "000000.tar")
    keys = list(table.keys)
    keys[7] = "wrong"
    rewrite(data, "000000.tar", keys=keys)
    (finding,) = check(data).findings
    assert (finding.kind, finding.key, finding.expected) == ("keys", "000000007", "'wrong'")


def test_sample_table_with_other_bytes(data: Path) -> None:
    _, table = samples_of(data, "000000.tar")
    starts, sizes = table.fields["txt"]
    sizes = sizes.copy()
    sizes[3] += 1
    rewrite(data, "000000.tar", fields={**table.fields, "txt": (starts, sizes)})
    (finding,) = check(data).findings
    assert (finding.kind, finding.key) == ("fields", "000000003")
    assert "'txt'" in finding.what


def test_chunk_table_that_disagrees(data: Path) -> None:
    path = data / "_shardstream" / "chunks.parquet"
    table = ChunkTable.from_parquet(path.read_bytes(), str(path))
    crc = table.crc32c.copy()
    crc[0] ^= 1
    columns = {
        name: getattr(table, name) for name in ("shard", "first_sample", "num_samples", "byte_start", "byte_end")
    }
    path.write_bytes(ChunkTable(shards=table.shards, crc32c=crc, **columns).to_parquet())
    assert kinds(check(data)) == [("index", "000000.tar"), ("checksum", "000000.tar")]


def test_no_or_damaged_chunk_table(data: Path, tmp_path: Path) -> None:
    path = data / "_shardstream" / "chunks.parquet"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(IndexFormatError, match=r"chunks\.parquet"):
        check(data)
    path.unlink()
    with pytest.raises(IndexMissingError, match="shard_tools index"):
        check(data)
    with pytest.raises(NotFoundError):
        check(tmp_path / "nothing")


def test_index_elsewhere_and_folders(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        with ShardWriter(str(tmp_path / "data" / folder / "{:d}.tar"), index=False, max_samples=2) as writer:
            for i in range(3):
                writer.write({"__key__": f"{folder}{i}", "cls": i})
    options = {"storage": Storage(), "index_url": str(tmp_path / "data")}
    index([str(tmp_path / "data")], **options)  # type: ignore[arg-type]
    report = verify([str(tmp_path / "data")], **options)  # type: ignore[arg-type]
    assert (report.findings, report.num_shards, report.num_samples) == ((), 4, 6)
    (tmp_path / "data" / "b" / "1.tar").unlink()
    report = verify([str(tmp_path / "data")], **options)  # type: ignore[arg-type]
    assert kinds(report) == [("missing", "1.tar")]
    index([str(tmp_path / "data")], **options, prune=True)  # type: ignore[arg-type]
    assert verify([str(tmp_path / "data")], **options).findings == ()  # type: ignore[arg-type]


def test_an_index_elsewhere_is_of_one_folder(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        with ShardWriter(str(tmp_path / folder / "{:d}.tar"), index=False, max_samples=2) as writer:
            for i in range(3):
                writer.write({"__key__": f"{folder}{i}", "cls": i})  # as long as those of the other
    options = {"storage": Storage(), "index_url": str(tmp_path / "index")}
    index([str(tmp_path / "a")], **options)  # type: ignore[arg-type]
    assert index([str(tmp_path / "a")], **options).num_scanned_bytes == 0  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"b/0.tar: the index in .*index describes another shard of this name"):
        index([str(tmp_path / "b")], **options)  # type: ignore[arg-type]
    assert verify([str(tmp_path / "a")], **options).findings == ()  # type: ignore[arg-type]
    index([str(tmp_path / "b")], **options, force=True)  # type: ignore[arg-type]
    assert verify([str(tmp_path / "b")], **options).findings == ()  # type: ignore[arg-type]


def test_finding_as_text_and_json() -> None:
    finding = Finding(
        kind="keys", shard="s3://b/0.tar", what="wrong", cure="mend it", byte_start=5, byte_end=9, key="k",
        expected="a", got="b",
    )  # fmt: skip
    assert str(finding) == "s3://b/0.tar, bytes 5-9, sample 'k': wrong (expected a, got b); mend it"
    assert json.loads(json.dumps(finding.as_dict()))["byte_end"] == 9
