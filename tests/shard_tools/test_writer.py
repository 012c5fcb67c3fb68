"""ShardWriter: deterministic bytes, names all readers understand, atomic shards, the index as it goes."""

from __future__ import annotations

import array
import hashlib
import io
import json
import mmap
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import tracemalloc
from pathlib import Path

import crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.make.write.encode import encode_field
from shard_tools.make.write.keys import SeenKeys, check_field, check_key
from streaming.errors import ConfigError, DuplicateKeyError, StorageError, TarError
from streaming.shards.catalog.build import index_shards, load_index
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.tar import parse_chunk
from streaming.shards.tar.headers import END_OF_ARCHIVE, member_header, padding
from streaming.storage import Storage
from tests.support.sets.data_sets import cut_records


def encoded(value, field):
    return b"".join(bytes(piece) for piece in encode_field(value, field=field, key="k"))


def files_of(directory):
    """Name to SHA-256 of every file below ``directory``."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file()
    }


def write_all(directory, samples, **options):
    with ShardWriter(f"{directory}/train-{{:04d}}.tar", **options) as writer:
        for sample in samples:
            writer.write(sample)
    return list(writer.shards)


def some_samples(num, size=100):
    return [
        {"__key__": f"{i:06d}", "txt": "x" * (size + i), "cls": i, "json": {"w": i * 2, "name": f"n{i}"}}
        for i in range(num)
    ]


def members(path):
    with tarfile.open(path) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}


# Headers


def test_a_plain_header_is_one_deterministic_block():
    header = member_header("a/b.txt", 5)
    assert len(header) == 512
    info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    assert (info.name, info.size, info.mtime, info.uid, info.gid) == ("a/b.txt", 5, 0, 0, 0)
    assert (info.uname, info.gname, info.mode, info.type) == ("", "", 0o644, tarfile.REGTYPE)
    assert header[257:265] == b"ustar\x0000"


NAMES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=120),
    min_size=1,
    max_size=4,
).map("/".join)


@given(NAMES, st.sampled_from([0, 1, 511, 512, 513]))
@settings(deadline=None)
def test_tarfile_reads_every_name_and_size_back(name, size):
    content = bytes(range(256)) * 3
    raw = member_header(name, size) + content[:size] + padding(size) + END_OF_ARCHIVE
    assert len(raw) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(raw), encoding="utf-8") as tar:
        (info,) = tar.getmembers()
        assert info.name == name
        assert tar.extractfile(info).read() == content[:size]


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        ("x" * 96 + ".txt", 1),
        ("d" * 155 + "/" + "x" * 96 + ".txt", 1),
        ("x" * 97 + ".txt", 3),
        ("d" * 156 + "/" + "x" * 96 + ".txt", 3),
        ("ü" * 48 + ".txt", 1),
        ("ü" * 49 + ".txt", 3),
    ],
)
def test_pax_only_where_ustar_cannot_hold_the_name(name, num_blocks):
    assert len(member_header(name, 1)) == 512 * num_blocks


def test_a_pax_record_counts_the_digits_of_its_own_length():
    for length in range(985, 1000):  # from 3 digits to 4
        with tarfile.open(fileobj=io.BytesIO(member_header("n" * length, 0))) as tar:
            assert tar.next().name == "n" * length


@pytest.mark.parametrize(("size", "num_blocks"), [(8**11 - 1, 1), (8**11, 3), (10**12, 3)])
def test_sizes_from_8_gib_on_need_pax(size, num_blocks):
    header = member_header("k.bin", size)
    assert len(header) == 512 * num_blocks
    with tarfile.open(fileobj=io.BytesIO(header)) as tar:
        assert tar.next().size == size


# Names


@pytest.mark.parametrize("key", ["0", "000001", "a/b", "v1.0/img", "über/日本", "with space", ".git/x", "a-b_c+d"])
def test_good_keys_pass(key):
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "empty"),
        ("a.b", "replace the dots"),
        ("d/a.b", "replace the dots"),
        (".hidden", "contains '.'"),
        ("d/.hidden", "contains '.'"),
        ("/abs", "starts with '/'"),
        ("dir/", "ends with '/'"),
        ("a//b", "'//'"),
        ("./a", "'.' or '..'"),
        ("a/../b", "'.' or '..'"),
        ("..", "contains '.'"),
        ("__meta__", "skip as metadata"),
        ("__meta__/a", "skip as metadata"),
        ("a/__x", "skip as metadata"),
        ("a\nb", "control character"),
        ("a\0b", "control character"),
        ("a\\b", "backslash"),
        ("a\ud800", "not valid Unicode"),
        (7, "must be a str"),
        (None, "must be a str"),
        (b"k", "must be a str"),
    ],
)
def test_keys_that_some_reader_misreads_are_refused(key, why):
    with pytest.raises(ConfigError, match="key") as caught:
        check_key(key)
    assert why in str(caught.value)
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("field", ["jpg", "seg.png", "a-b", "0", "tar.gz", "ü"])
def test_good_fields_pass(field):
    assert check_field(field, "k") == field


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("", "empty"),
        (".jpg", "'jpg'"),
        ("a/b", "'/'"),
        ("JPG", "'jpg'"),
        ("__note", "starts with '__'"),
        ("a b", "white space"),
        ("a..b", "empty part"),
        ("a.", "empty part"),
        ("a\n", "control character"),
        ("a\\b", "backslash"),
        (3, "must be a str"),
    ],
)
def test_fields_that_some_reader_misreads_are_refused(field, why):
    with pytest.raises(ConfigError) as caught:
        check_field(field, "the-key")
    assert why in str(caught.value)
    assert "the-key" in str(caught.value)


def test_a_refused_sample_leaves_no_trace(tmp_path):
    good = some_samples(4)
    expected = write_all(tmp_path / "a", good, max_samples=2)
    with ShardWriter(f"{tmp_path}/b/train-{{:04d}}.tar", max_samples=2) as writer:
        for sample in good:
            for bad in (
                {"__key__": "x.y", "txt": "1"},
                {"__key__": "x", "JPG": b""},
                {"__key__": "x", "npy": object()},
                {"__key__": "x"},
                {"__key__": "x", "__url__": "u"},
                {"txt": "1"},
            ):
                with pytest.raises(ConfigError):
                    writer.write(bad)
            writer.write(sample)
    assert writer.num_samples == 4
    assert len(expected) == len(writer.shards) == 2
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_duplicate_keys_are_refused_across_shards(tmp_path):
    with ShardWriter(f"{tmp_path}/{{:02d}}.tar", max_samples=1) as writer:
        for key in ("a", "b", "c"):
            writer.write({"__key__": key, "txt": ""})
        with pytest.raises(DuplicateKeyError, match="'a' was written before"):
            writer.write({"__key__": "a", "txt": ""})
        writer.write({"__key__": "d", "txt": ""})
    assert writer.num_samples == 4


def test_keys_that_differ_by_case_are_refused_within_a_shard_only(tmp_path):
    with ShardWriter(f"{tmp_path}/%02d.tar", max_samples=2) as writer:
        writer.write({"__key__": "Ab", "txt": ""})
        with pytest.raises(DuplicateKeyError, match="'ab' differs from 'Ab'"):
            writer.write({"__key__": "ab", "txt": ""})
        writer.write({"__key__": "b", "txt": ""})
        writer.write({"__key__": "ab", "txt": ""})
    assert writer.num_samples == 3


@given(st.lists(st.tuples(st.sampled_from("abcABCé") | st.integers(0, 3000).map("{:05d}".format), st.booleans())))
def test_seen_keys_agree_with_a_set(steps):
    seen, known, shard = SeenKeys(), set(), set()
    for key, new_shard in steps:
        same_by_case = not new_shard and any(k != key and k.casefold() == key.casefold() for k in shard)
        if key in known or same_by_case:
            with pytest.raises(DuplicateKeyError):
                seen.check(key, new_shard=new_shard)
            continue
        seen.check(key, new_shard=new_shard)
        seen.add(key, new_shard=new_shard)
        known.add(key)
        shard = {key} if new_shard else shard | {key}


def test_seen_keys_find_a_repetition_after_many_rising_keys():
    seen = SeenKeys()
    for i in range(5000):
        seen.check(f"{i:08d}", new_shard=i == 0)
        seen.add(f"{i:08d}", new_shard=i == 0)
    for i in (0, 1023, 1024, 4999):
        with pytest.raises(DuplicateKeyError):
            seen.check(f"{i:08d}", new_shard=True)
    seen.check("00000000x", new_shard=True)


# Values


@pytest.mark.parametrize(
    ("value", "field", "expected"),
    [
        (b"\0\xff", "jpg", b"\0\xff"),
        (bytearray(b"ab"), "bin", b"ab"),
        (memoryview(b"abcd")[::2], "bin", b"ac"),
        (memoryview(array.array("H", [1, 2])), "bin", array.array("H", [1, 2]).tobytes()),
        (b"", "txt", b""),
        (memoryview(b""), "txt", b""),
        ("é", "txt", b"\xc3\xa9"),
        (7, "cls", b"7"),
        (-7, "txt", b"-7"),
        (True, "cls", b"1"),
        (np.int64(12), "id", b"12"),
        (0.1, "score", b"0.1"),
        (np.float64(2.5), "txt", b"2.5"),
        ({"b": 1, "a": [True, None, "é"]}, "json", '{"a":[true,null,"é"],"b":1}'.encode()),
        ({"a": np.float32(0.5), "b": np.arange(3)}, "meta.json", b'{"a":0.5,"b":[0,1,2]}'),
        ([1, 2], "json", b"[1,2]"),
        (3, "json", b"3"),
        (None, "json", b"null"),
        ('{"ready": 1}', "json", b'{"ready": 1}'),
        ({"b": b"x", "a": 1}, "msgpack", b"\x82\xa1a\x01\xa1b\xc4\x01x"),
    ],
)
def test_values_become_bytes(value, field, expected):
    assert encoded(value, field) == expected


@pytest.mark.parametrize(
    ("value", "field", "cure"),
    [
        (None, "txt", "leave the field out"),
        (3, "jpg", "pass the encoded bytes"),
        ("x", "png", "pass the encoded bytes"),
        (1.5, "cls", "int(value)"),
        (float("nan"), "txt", "leave the field out"),
        (float("nan"), "json", "finite"),
        ({"a": [float("inf")]}, "json", "finite"),
        ("not json", "json", "json.dumps"),
        ("NaN", "json", "json.dumps"),
        ({"a": object()}, "json", "pass numbers"),
        ({"a": 1}, "txt", ".json"),
        ([1], "txt", ".json"),
        (np.zeros(3), "jpg", ".npy"),
        (np.array([None]), "npy", ".json"),
        (np.array([{}]), "json", "pass numbers"),
        ({1: 2, "a": 3}, "json", "pass numbers"),
        ({1, 2}, "msgpack", "plain numbers"),
        (object(), "bin", "pass bytes"),
        ("\ud800", "txt", "not valid Unicode"),
        ({"a": "\ud800"}, "json", "not valid Unicode"),
    ],
)
def test_values_that_have_no_bytes_are_refused(value, field, cure):
    with pytest.raises(ConfigError) as caught:
        encode_field(value, field=field, key="the-key")
    message = str(caught.value)
    assert "'the-key'" in message
    assert repr(field) in message
    assert type(value).__name__ in message
    assert cure in message


@pytest.mark.parametrize(
    "array_",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10, dtype=np.int16)[::2],
        np.zeros((0, 3), np.float32),
        np.float32(3),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array([True, False]),
    ],
)
def test_arrays_are_what_numpy_saves(array_):
    out = io.BytesIO()
    np.save(out, array_, allow_pickle=False)
    assert encoded(array_, "x.npy") == out.getvalue()


def test_large_values_are_not_copied():
    array_ = np.zeros(1 << 20, np.uint8)
    *_, view = encode_field(array_, field="npy", key="k")
    assert np.shares_memory(np.frombuffer(view, np.uint8), array_)
    raw = bytearray(1 << 20)
    (view,) = encode_field(raw, field="bin", key="k")
    raw[7] = 1
    assert view[7] == 1


def test_mmap_is_written_as_it_is(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"hello")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert encoded(mapped, "bin") == b"hello"


def test_tensors_and_images():
    torch = pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image")
    tensor = torch.arange(4.0, requires_grad=True)
    assert np.array_equal(np.load(io.BytesIO(encoded(tensor, "npy"))), [0, 1, 2, 3])
    with pytest.raises(ConfigError, match=r"\.float\(\)"):
        encode_field(torch.zeros(2, dtype=torch.bfloat16), field="npy", key="k")
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    picture = image.fromarray(pixels)
    for field, kind in (("png", "PNG"), ("seg.bmp", "BMP"), ("webp", "WEBP"), ("jpeg", "JPEG")):
        with image.open(io.BytesIO(encoded(picture, field))) as back:
            assert back.format == kind
            if kind != "JPEG":
                assert np.array_equal(np.asarray(back), pixels)
    with pytest.raises(ConfigError, match="RGBA"):
        encode_field(picture.convert("RGBA"), field="jpg", key="k")
    with pytest.raises(ConfigError, match="extensions jpg"):
        encode_field(picture, field="bin", key="k")


# Shards


def test_samples_are_written_with_sorted_fields_and_come_back(tmp_path):
    (shard,) = write_all(
        tmp_path, [{"txt": "t", "__key__": "d/k", "__url__": "u", "__local_path__": 3, "cls": 1, "a": b""}]
    )
    assert list(members(shard).items()) == [("d/k.a", b""), ("d/k.cls", b"1"), ("d/k.txt", b"t")]


def test_the_same_samples_give_the_same_files_in_any_dict_order(tmp_path):
    samples = some_samples(50)
    write_all(tmp_path / "a", samples, max_samples=7, columns=["json.w"])
    turned = [dict(reversed(list(sample.items()))) for sample in samples]
    for sample in turned:
        sample["json"] = dict(reversed(list(sample["json"].items())))
    write_all(tmp_path / "b", turned, max_samples=7, columns=["json.w"])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert sum(name.endswith(".tar") for name in files_of(tmp_path / "a")) == 8


GOLDEN_SHA256 = "11fbebdb39b508c5e28e3cbdddeea5f49dc9345e2f21038f1a267cc3b23b7dc4"


def test_golden_shard_bytes(tmp_path):
    """The bytes of a shard are a promise: a change here needs a CHANGELOG entry."""
    long_key = "d" * 120 + "/" + "e" * 120
    samples = [
        {"__key__": "000000", "cls": 3, "json": {"b": 1.5, "a": "é"}, "npy": np.arange(3, dtype="<i4")},
        {"__key__": "ü/日本", "txt": "x", "bin": b""},
        {"__key__": long_key, "txt": "long"},
    ]
    (shard,) = write_all(tmp_path, samples, index=False)
    raw = Path(shard).read_bytes()
    assert len(raw) == 3 * 1024 + 512 + 1024 + 2048 + 1024
    assert hashlib.sha256(raw).hexdigest() == GOLDEN_SHA256


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    max_bytes=st.integers(1024, 12000),
    max_samples=st.none() | st.integers(1, 9),
)
@settings(max_examples=25, deadline=None)
def test_shards_roll_by_bytes_and_samples(tmp_path_factory, sizes, max_bytes, max_samples):
    directory = tmp_path_factory.mktemp("roll")
    samples = [{"__key__": f"{i:03d}", "bin": bytes(size)} for i, size in enumerate(sizes)]
    shards = write_all(directory, samples, max_bytes=max_bytes, max_samples=max_samples, index=False)
    names, counts = [], []
    for shard in shards:
        inside = list(members(shard))
        names += inside
        counts.append(len(inside))
        assert max_samples is None or len(inside) <= max_samples
        assert os.path.getsize(shard) <= max_bytes or len(inside) == 1
    assert names == [f"{i:03d}.bin" for i in range(len(sizes))]
    for i in range(len(shards) - 1):  # no shard closes before it has to
        first_of_next = 512 + len(members(shards[i + 1])[names[sum(counts[: i + 1])]]) + 511
        grown = os.path.getsize(shards[i]) + first_of_next // 512 * 512
        assert counts[i] == max_samples or grown > max_bytes


def test_numbering(tmp_path):
    writer = ShardWriter(f"{tmp_path}/a%20d-%03d.tar".replace("%20", "x"), max_samples=1, start_shard=7, index=False)
    with writer:
        writer.write({"__key__": "a", "txt": ""})
        writer.write({"__key__": "b", "txt": ""})
    assert [os.path.basename(shard) for shard in writer.shards] == ["axd-007.tar", "axd-008.tar"]


@pytest.mark.parametrize(
    "pattern",
    ["x.tar", "{:06d}/x.tar", "{:06d}-{:02d}.tar", "{:06d}.tar.gz", "{:06d}", "{:6d}.tar", "{name}.tar", ""],
)
def test_bad_patterns_are_refused(tmp_path, pattern):
    with pytest.raises(ConfigError):
        ShardWriter(f"{tmp_path}/{pattern}" if pattern else "")


@pytest.mark.parametrize(
    "options",
    [{"max_bytes": 0}, {"max_bytes": "x"}, {"max_samples": 0}, {"max_samples": True}, {"start_shard": -1},
     {"index": ""}, {"index": 3},
     {"columns": ["key"]}, {"columns": {"size.jpg": "cls"}},
     {"columns": "json.w"}, {"columns": {"a": 3}}, {"columns": {"__a": "json.w"}}],
)  # fmt: skip
def test_bad_options_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=next(iter(options)).removesuffix("s")):
        ShardWriter(f"{tmp_path}/{{:06d}}.tar", **options)


def test_an_existing_shard_is_refused_or_replaced(tmp_path):
    write_all(tmp_path, some_samples(2), max_samples=1)
    before = files_of(tmp_path)
    with pytest.raises(StorageError, match=r"train-0000\.tar exists already; pass overwrite=True"):
        write_all(tmp_path, some_samples(3))
    assert files_of(tmp_path) == before
    write_all(tmp_path, some_samples(1, size=9), overwrite=True)
    assert members(f"{tmp_path}/train-0000.tar")["000000.txt"] == b"x" * 9
    assert files_of(tmp_path)["train-0001.tar"] == before["train-0001.tar"]


def test_no_sample_table_outlives_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that replaces shards and is stopped leaves no table of an older shard, which may be of the same size."""
    write_all(tmp_path, some_samples(1, size=9))
    table = tmp_path / "_shardstream" / "samples" / "train-0000.tar.parquet"
    assert table.exists()
    put = Storage.put

    def stopped(self: Storage, url: str, data: bytes) -> None:
        if url.endswith(".parquet"):
            raise StorageError("stopped")
        put(self, url, data)

    monkeypatch.setattr(Storage, "put", stopped)
    with pytest.raises(StorageError, match="stopped"):
        write_all(tmp_path, some_samples(1, size=9), overwrite=True)
    assert not table.exists()


def _write_three_and_stop(writer):
    for sample in some_samples(3):
        writer.write(sample)
    raise KeyboardInterrupt


def test_an_exception_drops_the_open_shard_and_keeps_the_finished_ones(tmp_path):
    writer = ShardWriter(f"{tmp_path}/{{:02d}}.tar", max_samples=2)
    with pytest.raises(KeyboardInterrupt), writer:
        _write_three_and_stop(writer)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["00.tar"]
    with pytest.raises(ConfigError, match="aborted"):
        writer.write(some_samples(1)[0])
    writer.close()
    assert len(writer.shards) == 1


def test_writing_after_close_is_refused(tmp_path):
    writer = ShardWriter(f"{tmp_path}/{{:02d}}.tar")
    writer.write(some_samples(1)[0])
    writer.close()
    writer.close()
    with pytest.raises(ConfigError, match="closed"):
        writer.write(some_samples(1)[0])


def test_no_sample_no_shard(tmp_path):
    with ShardWriter(f"{tmp_path}/{{:02d}}.tar"):
        pass
    assert list(tmp_path.rglob("*.tar")) == []


# Index


def chunk_table(directory):
    path = Path(directory) / "_shardstream/chunks.parquet"
    return ChunkTable.from_parquet(path.read_bytes(), str(path))


def sample_table(directory, shard):
    path = Path(directory) / f"_shardstream/samples/{shard}.parquet"
    return SampleTable.from_parquet(path.read_bytes(), str(path))


def shard_names(directory):
    return [shard.name for shard in chunk_table(directory).shards]


@pytest.mark.parametrize("size", [0, 3000, 700_000])
def test_the_index_says_what_the_shards_hold(tmp_path, size):
    samples = [
        {
            "__key__": f"dir/{i:05d}",
            "a.bin": bytes([i % 251]) * size,
            **({"txt": f"é{i}"} if i % 3 else {"z": b""}),
        }
        for i in range(40 if size > 10_000 else 900)
    ]
    shards = write_all(tmp_path, samples, max_bytes="20MB")
    table = chunk_table(tmp_path)
    assert [shard.name for shard in table.shards] == [os.path.basename(shard) for shard in shards]
    keys = []
    for number, shard in enumerate(table.shards):
        raw = Path(shards[number]).read_bytes()
        truth = parse_chunk(raw, verify_headers=True)
        keys += truth.keys
        rows = np.flatnonzero(table.shard == number)
        assert (shard.size_bytes, shard.num_samples) == (len(raw), len(truth.keys))
        cuts = cut_records(truth.record_starts)
        assert np.array_equal(table.first_sample[rows], cuts[:-1])
        assert np.array_equal(table.byte_start[rows], truth.record_starts[cuts[:-1]])
        assert np.array_equal(table.byte_end[rows], truth.record_starts[cuts[1:]])
        spans = zip(table.byte_start[rows].tolist(), table.byte_end[rows].tolist(), strict=True)
        assert table.crc32c[rows].tolist() == [crc32c.crc32c(raw[start:end]) for start, end in spans]
        per_sample = sample_table(tmp_path, shard.name)
        assert per_sample.chunks == table.select([shard.name])
        assert list(per_sample.keys) == list(truth.keys)
        assert np.array_equal(per_sample.record_starts, truth.record_starts)
        for column, field in enumerate(truth.fields):
            starts, sizes = per_sample.fields[field]
            assert np.array_equal(starts, truth.starts[:, column])
            assert np.array_equal(sizes, truth.sizes[:, column])
        assert set(per_sample.fields) == set(truth.fields)
    assert keys == [sample["__key__"] for sample in samples]


@pytest.mark.thorough
@pytest.mark.parametrize("index", [None, "", "idx"])
@pytest.mark.parametrize("num_bytes", [10, 70_000])
def test_indexing_the_shards_again_gives_the_same_files(tmp_path, index, num_bytes):
    data, again = tmp_path / "data", None if index is None else str(tmp_path / index)
    samples = [
        {"__key__": f"d/{i:05d}", "json": {"i": i}, "seg.bin" if i % 7 else "alt.bin": bytes([i % 256]) * num_bytes}
        for i in range(600)
    ]
    samples[5]["__key__"] = "long/" * 60 + "name"
    shards = write_all(data / "train", samples, max_bytes="11MB", index=True if again is None else again)
    assert len(shards) == (1 if num_bytes == 10 else 4)
    written = files_of(tmp_path)
    table = index_shards(Storage(), shards, again, force=True, parallel=2)
    assert files_of(tmp_path) == written
    assert table.total_samples == 600
    for path in list(tmp_path.rglob("*.parquet")):
        path.unlink()
    index_shards(Storage(), shards, again, parallel=1)
    assert files_of(tmp_path) == written


def test_one_index_for_two_directories(tmp_path):
    shards = [
        shard
        for part in ("train", "val")
        for shard in write_all(tmp_path / part, some_samples(3), max_samples=2, index=tmp_path)
    ]
    assert shard_names(tmp_path) == [
        "train/train-0000.tar", "train/train-0001.tar", "val/train-0000.tar", "val/train-0001.tar"
    ]  # fmt: skip
    assert load_index(Storage(), shards, str(tmp_path)) == chunk_table(tmp_path)


def test_columns_are_lifted_into_the_sample_table(tmp_path):
    samples = some_samples(5)
    samples[3]["json"] = json.dumps({"w": -1}).encode()
    del samples[4]["json"]
    columns = {"tokens": lambda sample: len(sample["txt"]), "w": "json.w", "cls": "cls", "lang": "json.lang"}
    write_all(tmp_path, samples, columns=columns)
    table = sample_table(tmp_path, "train-0000.tar")
    assert {name: column.to_pylist() for name, column in table.columns.items()} == {
        "tokens": [100, 101, 102, 103, 104],
        "w": [0, 2, 4, -1, None],
        "cls": [0, 1, 2, 3, 4],
        "lang": [None] * 5,
    }


def test_a_column_that_fails_names_itself_and_leaves_no_trace(tmp_path):
    columns = {"bad": lambda sample: sample["bad"]}
    with ShardWriter(f"{tmp_path}/{{}}.tar", columns=columns) as writer:
        with pytest.raises(KeyError) as caught:
            writer.write({"__key__": "a", "txt": ""})
        assert "column 'bad' of sample 'a'" in "".join(caught.value.__notes__)
        with pytest.raises(ConfigError, match=r"column 'bad': expected a number.* got bytes"):
            writer.write({"__key__": "a", "txt": "", "bad": b""})
        assert writer.num_samples == 0


def test_the_index_may_lie_elsewhere_or_be_left_out(tmp_path):
    write_all(tmp_path / "a", some_samples(3), index=tmp_path / "idx")
    assert sorted(files_of(tmp_path / "a")) == ["train-0000.tar"]
    assert shard_names(tmp_path / "idx") == ["train-0000.tar"]
    write_all(tmp_path / "b", some_samples(3), index=False)
    assert sorted(files_of(tmp_path / "b")) == ["train-0000.tar"]
    with pytest.raises(ConfigError, match="columns"):
        ShardWriter(f"{tmp_path}/c/{{}}.tar", index=False, columns=["json.w"])


def test_several_writers_fill_one_directory_as_one_writer_would(tmp_path):
    samples = some_samples(9)
    write_all(tmp_path / "one", samples, max_samples=2)
    for start in (2, 0, 4):
        part = samples[2 * start : 2 * start + 4]
        write_all(tmp_path / "many", part, max_samples=2, start_shard=start)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_a_chunk_table_is_rebuilt_from_the_sample_tables(tmp_path):
    write_all(tmp_path, some_samples(4), max_samples=1)
    whole = files_of(tmp_path)
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])):
        damage(tmp_path / "_shardstream/chunks.parquet")
        (tmp_path / "train-0003.tar").unlink()
        write_all(tmp_path, some_samples(4)[3:], start_shard=3)
        assert files_of(tmp_path) == whole


def test_shards_that_are_gone_or_replaced_by_others_leave_the_chunk_table(tmp_path):
    write_all(tmp_path, some_samples(4), max_samples=1)
    (tmp_path / "train-0001.tar").unlink()
    (tmp_path / "train-0002.tar").write_bytes(bytes(10240))
    write_all(tmp_path, [{"__key__": "new", "txt": ""}], start_shard=4)
    assert shard_names(tmp_path) == ["train-0000.tar", "train-0003.tar", "train-0004.tar"]


def test_replaced_shards_get_new_rows(tmp_path):
    write_all(tmp_path / "a", some_samples(6, size=50), max_samples=2)
    write_all(tmp_path / "a", some_samples(6, size=9000), max_samples=2, overwrite=True)
    write_all(tmp_path / "b", some_samples(6, size=9000), max_samples=2)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_relative_patterns_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ShardWriter("{:02d}.tar") as writer:
        writer.write(some_samples(1)[0])
    with ShardWriter("%02d.tar", start_shard=1) as writer:
        writer.write(some_samples(2)[1])
    assert shard_names(tmp_path) == ["00.tar", "01.tar"]


def test_values_of_no_common_type_are_refused_before_the_shard_appears(tmp_path):
    samples = [{"__key__": "a", "cls": 1}, {"__key__": "b", "cls": "one"}]
    with pytest.raises(ConfigError, match=r"train-0000\.tar: column 'cls': 1 \(sample 'a'\) beside 'one'"):
        write_all(tmp_path, samples, columns=["cls"])
    assert files_of(tmp_path) == {}


def test_samples_of_which_each_has_its_own_field_are_refused_before_the_shard_appears(tmp_path):
    samples = [{"__key__": f"{i:03d}", f"f{i}.txt": ""} for i in range(300)]
    with pytest.raises(TarError, match="300 different extensions"):
        write_all(tmp_path, samples)
    assert files_of(tmp_path) == {}


# Stores


def test_a_large_value_is_not_copied(tmp_path):
    value = bytearray(64 << 20)
    tracemalloc.start()
    try:
        with ShardWriter(f"{tmp_path}/{{}}.tar") as writer:
            writer.write({"__key__": "a", "bin": value, "npy": np.frombuffer(value, np.uint8)})
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert os.path.getsize(writer.shards[0]) > 2 * len(value)


@pytest.mark.thorough
def test_the_same_bytes_on_s3_in_parts(tmp_path, s3_bucket, mini_s3):
    samples = [{"__key__": f"{i:03d}", "bin": bytes([i]) * (5 << 20)} for i in range(8)]
    local = write_all(tmp_path, samples, max_bytes="36MiB")
    assert len(local) == 2
    with ShardWriter(
        f"{s3_bucket}/a/train-{{:04d}}.tar", max_bytes="36MiB", storage_options=mini_s3.storage_options
    ) as writer:
        for sample in samples:
            writer.write(sample)
    storage = Storage(mini_s3.storage_options)
    prefix = f"{s3_bucket}/a/"
    on_s3 = {
        info.url.removeprefix(prefix): hashlib.sha256(storage.read(info.url)).hexdigest()
        for info in storage.list(prefix)
    }
    assert on_s3 == files_of(tmp_path)
    assert list(writer.shards) == [f"{prefix}train-0000.tar", f"{prefix}train-0001.tar"]
    with (
        pytest.raises(StorageError, match="exists already"),
        ShardWriter(f"{s3_bucket}/a/train-%04d.tar", storage_options=mini_s3.storage_options) as second,
    ):
        second.write({"__key__": "x", "txt": ""})


def test_an_aborted_writer_leaves_nothing_on_s3(s3_bucket, mini_s3):
    writer = ShardWriter(f"{s3_bucket}/b/{{}}.tar", storage_options=mini_s3.storage_options)
    for i in range(5):
        writer.write({"__key__": f"{i}", "bin": bytes(8 << 20)})
    writer.abort()
    assert list(Storage(mini_s3.storage_options).list(f"{s3_bucket}/b")) == []


class _FullDisk:
    """A store writer that fails after some bytes."""

    def __init__(self, out, limit):
        self.out, self.left = out, limit

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            raise StorageError("no space left")
        return self.out.write(data)

    def close(self):
        self.out.close()

    def abort(self):
        self.out.abort()


def test_a_failing_store_closes_the_writer_and_drops_the_open_shard(tmp_path, monkeypatch):
    opened = Storage.open_write
    monkeypatch.setattr(Storage, "open_write", lambda self, url: _FullDisk(opened(self, url), 5000))
    writer = ShardWriter(f"{tmp_path}/{{}}.tar", max_samples=2)
    for i in range(3):
        writer.write({"__key__": f"{i}", "bin": bytes(1000)})
    with pytest.raises(StorageError, match="no space left"):
        writer.write({"__key__": "3", "bin": bytes(9000)})
    with pytest.raises(ConfigError, match="aborted"):
        writer.write({"__key__": "4", "bin": b""})
    writer.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["0.tar"]
    assert [os.path.basename(shard) for shard in writer.shards] == ["0.tar"]


KILLED = textwrap.dedent(
    """
    import sys
    from shard_tools import ShardWriter
    writer = ShardWriter(sys.argv[1] + "/{:06d}.tar", max_samples=4, overwrite=True)
    for i in range(10**9):
        writer.write({"__key__": f"{i:09d}", "bin": bytes(100_000)})
        if i == 10:
            print("in the third shard", flush=True)
            sys.stdin.read()
    """
)


def test_a_killed_writer_leaves_whole_shards_only_and_the_next_one_starts(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "in the third shard\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    shards = sorted(path.name for path in tmp_path.rglob("*.tar"))
    assert shards == ["000000.tar", "000001.tar"]
    for shard in shards:
        assert len(members(tmp_path / shard)) == 4
        assert (tmp_path / shard).read_bytes().endswith(END_OF_ARCHIVE)
        assert sample_table(tmp_path, shard).num_samples == 4
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", start_shard=2) as writer:
        writer.write({"__key__": "next", "txt": ""})
    assert shard_names(tmp_path) == ["000000.tar", "000001.tar", "000002.tar"]


def test_a_column_whose_path_leads_nowhere_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Mosaic's writer, whose columns map names to types."""
    columns = {"text": "str", "cls": "cls", "half": "txt"}
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_samples=2, columns=columns) as writer:
        for number in range(6):
            writer.write({"__key__": str(number), "cls": number} | ({"txt": "a"} if number % 2 else {}))
    (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert told.startswith("columns['text']: no sample of 000.tar has a value at 'str', so the column is NULL there")
