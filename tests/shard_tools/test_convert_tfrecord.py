"""TFRecord: records that TensorFlow wrote, value for value; what a feature becomes; damaged and hostile files."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools.make.convert import ConvertOptions, SourceOptions, convert, open_source
from shard_tools.make.convert.formats.example import parse_example
from shard_tools.make.convert.formats.tfrecord import RECORD
from streaming.errors import ConfigError, DataError, NotFoundError, ShardstreamError
from streaming.storage import Storage
from tests.support.sources.conversions import members

pytestmark = pytest.mark.thorough

DATA = Path(__file__).resolve().parent / "data" / "tfrecord"


def told() -> list[dict[str, Any]]:
    found = json.loads((DATA / "expected.json").read_text())
    assert isinstance(found, list)
    return found


def masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(*records: bytes) -> bytes:
    heads = [struct.pack("<Q", len(one)) for one in records]
    return b"".join(head + masked(head) + one + masked(one) for head, one in zip(heads, records, strict=True))


def sized_head(size: int) -> bytes:
    return struct.pack("<Q", size) + masked(struct.pack("<Q", size))


def sized(number: int, *parts: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(sum(map(len, parts))) + b"".join(parts)


def varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def example(**features: bytes) -> bytes:
    """An Example of encoded features."""
    return sized(1, *(sized(1, sized(1, name.encode()), sized(2, body)) for name, body in features.items()))


def texts(*values: bytes) -> bytes:
    return sized(1, *(sized(1, value) for value in values))


def ints(*values: int) -> bytes:
    return sized(3, sized(1, *(varint(value % 2**64) for value in values)))


def floats(*values: float) -> bytes:
    return sized(2, sized(1, struct.pack(f"<{len(values)}f", *values)))


def record_of(tmp_path: Path, *records: bytes, name: str = "a.tfrecord", **options: Any) -> list[dict[str, Any]]:
    """The fields of all samples, arrays and JSON decoded."""
    (tmp_path / name).write_bytes(framed(*records))
    source = open_source(str(tmp_path / name), Storage(), options=SourceOptions(**options))
    return [{field: decoded(field, body) for field, body in one.fields.items()} for one in source.records(0)]


def decoded(field: str, body: bytes) -> Any:
    if field.endswith("npy"):
        array = np.load(io.BytesIO(body), allow_pickle=False)
        return (str(array.dtype), array.tolist())
    return json.loads(body) if field.endswith("json") else bytes(body)


# ------------------------------------------------------------------------------------------ value for value


@pytest.mark.parametrize("name", ["examples", "gzip", "zlib"])
def test_examples_of_tensorflow(tmp_path: Path, name: str) -> None:
    report = convert(str(DATA / name), str(tmp_path / "out"))
    assert (report.kind, report.num_samples) == ("tfrecord", 15 if name == "examples" else 8)
    found = members(tmp_path / "out")
    for number, features in enumerate(told()[: report.num_samples]):
        key = f"{number:09d}"
        rest = json.loads(found.pop(f"{key}.json"))
        for feature, value in features.items():
            ((kind, values),) = value.items()
            if feature in {"box", "ids"}:
                array = np.load(io.BytesIO(found.pop(f"{key}.{feature}.npy")), allow_pickle=False)
                assert array.dtype == {"float": np.float32, "int64": np.int64}[kind]
                assert array.tolist() == values
            elif feature == "views":
                assert [found.pop(f"{key}.views.{i}.png").hex() for i in range(len(values))] == values
            elif feature in {"image", "raw"}:
                assert found.pop(f"{key}.{'image.jpg' if feature == 'image' else 'raw.bin'}").hex() == values[0]
            elif kind == "bytes":
                text = [bytes.fromhex(one).decode() for one in values]
                assert rest.pop(feature) == (text if feature == "tags" else text[0])
            else:
                assert rest.pop(feature) == (values[0] if values else None)
        assert not rest
    assert not found


def test_sequences_of_tensorflow(tmp_path: Path) -> None:
    convert(str(DATA / "sequences"), str(tmp_path / "out"))
    found = members(tmp_path / "out")
    for number in range(5):
        key, steps = f"{number:09d}", range(number + 1)
        assert json.loads(found[f"{key}.json"]) == {"id": number, "words": [["a", "b"][: 1 + i % 2] for i in steps]}
        assert [found[f"{key}.frames.{i}.jpg"] for i in steps] == [b"\xff\xd8\xff\xe0" + bytes([i]) for i in steps]
        assert decoded("npy", found[f"{key}.tokens.npy"]) == ("int64", [[i, i * i] for i in steps])
        assert decoded("npy", found[f"{key}.times.npy"]) == ("float32", [i / 2 for i in steps])


def test_records_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"record 0: not a tf\.train\.Example.*--from tfrecord-raw --field {RECORD}=EXT"
    ):
        convert(str(DATA / "raw"), str(tmp_path / "out"))
    lines = [f"line {number}\n".encode() for number in range(4)]
    convert(str(DATA / "raw"), str(tmp_path / "out"), options=ConvertOptions(kind="tfrecord-raw"))
    assert [*members(tmp_path / "out").items()] == [(f"{i:09d}.txt", line) for i, line in enumerate(lines)]
    options = ConvertOptions(kind="tfrecord-raw", fields=((RECORD, "dat"),))
    convert(str(DATA / "raw"), str(tmp_path / "two"), options=options)
    assert [*members(tmp_path / "two").values()] == lines
    assert {name.partition(".")[2] for name in members(tmp_path / "two")} == {"dat"}


# --------------------------------------------------------------------------------- what a feature becomes


def test_decided_once_by_the_first_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_tools.make.convert.formats.tfrecord._LOOKED_AT", 2)
    first = [example(x=ints(1), t=texts(b"a")), example(x=ints(2), t=texts(b"b"))]
    assert record_of(tmp_path, *first, example(x=ints(), t=texts()))[2] == {"json": {"x": None, "t": None}}
    for later, said in (
        (example(x=ints(1, 2), t=texts(b"")), r"record 2: feature 'x': 2 values here.*--field x=x\.npy"),
        (example(x=floats(1.5)), "feature 'x': it holds float32 here, and int64"),
        (example(t=texts(b"\xff")), "feature 't': bytes that are no text here; --field t=bin"),
        (example(t=texts(b"a", b"b")), r"feature 't': 2 values here.*--field t=t\.json"),
        (example(new=ints(1)), "feature 'new' is not in the first 2 records.*--field new=EXT"),
    ):
        with pytest.raises(DataError, match=said):
            record_of(tmp_path, *first, later)
    fields = (("x", "x.npy"), ("t", "t.json"), ("new", "cls"), ("old", "-"))
    found = record_of(tmp_path, *first, example(x=ints(1, 2), t=texts(b"a", b"b"), new=ints(7)), fields=fields)
    assert found[0] == {"x.npy": ("int64", [1]), "t.json": ["a"]}
    assert found[2] == {"x.npy": ("int64", [1, 2]), "t.json": ["a", "b"], "cls": b"7"}


def test_types_of_features(tmp_path: Path) -> None:
    one = example(a=ints(-1), b=floats(0.1), c=ints(2**63 - 1, -(2**63)), d=floats(), e=texts(b'{"a": 1}'), f=b"")
    (found,) = record_of(tmp_path, one)
    assert found["json"] == {"a": -1, "b": float(np.float32(0.1)), "d": None, "e": '{"a": 1}', "f": None}
    assert found["c.npy"] == ("int64", [2**63 - 1, -(2**63)])
    with pytest.raises(ConfigError, match="feature 'a' holds float32 and int64; leave it out"):
        record_of(tmp_path, example(a=ints(1)), example(a=floats(1.0)))
    mixed = [example(x=texts(value)) for value in (b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n", b"\xff\xfe")]
    with pytest.raises(ConfigError, match=r"column 'x': of the first 3 values .* --field x=png"):
        record_of(tmp_path, *mixed)
    unpacked = sized(3, b"".join(varint(1 << 3) + varint(value) for value in (1, 300)))
    (found,) = record_of(tmp_path, example(a=unpacked, b=sized(2, varint(1 << 3 | 5), struct.pack("<f", 2.5))))
    assert found == {"a.npy": ("int64", [1, 300]), "json": {"b": 2.5}}
    (found,) = record_of(tmp_path, example(key=texts(b"k.1"), x=ints(1)), key_field="key")
    assert found == {"json": {"key": "k.1", "x": 1}}


def test_which_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = [
        "a.tfrecord",
        "b.tfrecords.gz",
        "c.tfrec",
        "d-00000-of-00010",
        "d-00001-of-00010",
        "e.tfrecord-00000-of-00001",
    ]
    for number, name in enumerate(names):
        body = framed(example(x=ints(number)))
        (tmp_path / "in" / name).write_bytes(gzip.compress(body) if name.endswith("gz") else body)
    (tmp_path / "in" / "features.txt").write_text("no records")
    source = open_source(str(tmp_path / "in"), Storage(), kind="tfrecord")
    assert [record.metadata["x"] for record in source.records(0)] == list(range(6))
    (tmp_path / "odd").write_bytes(framed(example(x=ints(1))) * 2)
    assert len(list(open_source(str(tmp_path / "odd"), Storage(), kind="tfrecord").records(0))) == 2
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.txt").write_text("x")
    with pytest.raises(NotFoundError, match="no file is called"):
        open_source(str(tmp_path / "none"), Storage(), kind="tfrecord")


@pytest.mark.parametrize("seed", [None, 5])
def test_from_any_position(seed: int | None) -> None:
    source = open_source(str(DATA / "examples"), Storage(), options=SourceOptions(shuffle_seed=seed, num_threads=3))
    whole = [(record.key, dict(record.fields), record.where) for record in source.records(0)]
    assert len(whole) == 15
    assert (sorted(where for *_, where in whole) == [where for *_, where in whole]) == (seed is None)
    for start in (0, 1, 4, 5, 14, 15, 16):
        assert [(one.key, dict(one.fields), one.where) for one in source.records(start)] == whole[start:]
    packed = open_source(str(DATA / "gzip"), Storage(), options=SourceOptions(shuffle_seed=1))
    with pytest.raises(ConfigError, match="compressed and cannot be read out of order"):
        list(packed.records(0))


# ------------------------------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body[:-1], "record 2 at byte .*: (it ends early|.*truncated)"),
        (lambda body: body[:-30], "record 2 at byte"),
        (lambda body: body + b"\0" * 5, "record 3 at byte .*ends early"),
        (lambda body: body[:20] + bytes([body[20] ^ 1]) + body[21:], "record 0 at byte 0: a wrong checksum of its"),
        (lambda body: bytes([body[0] ^ 1]) + body[1:], "record 0 at byte 0: .*checksum of its size; not a TFRecord"),
        (lambda body: sized_head(10**12) + body, "1000000000000 bytes, which"),
        (lambda _: b"hello world, this is no record", "not a TFRecord file"),
        (lambda body: gzip.compress(body)[:-9], "compressed file (ends early|is damaged)"),
        (lambda body: zlib.compress(body)[:-5], "compressed file (ends early|is damaged)"),
        (lambda _: gzip.compress(sized_head(2**31) + bytes(100)), "2147483648 bytes"),
        (lambda _: gzip.compress(sized_head(2**30) + bytes(99)), "ends early"),
        (lambda _: framed(sized(1, sized(1, b"\xff"))), r"record 0: not a tf\.train\.Example"),
    ],
)  # fmt: skip
def test_damaged_and_hostile_files(tmp_path: Path, change: Any, said: str) -> None:
    body = framed(*(example(x=ints(number), y=texts(b"some text that is longer")) for number in range(3)))
    (tmp_path / "a.tfrecord").write_bytes(change(body))
    with pytest.raises(DataError, match=rf"a\.tfrecord.*{said}"):
        list(open_source(str(tmp_path / "a.tfrecord"), Storage()).records(0))


def test_bombs_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress(sized_head(300 << 20) + bytes(300 << 20)))
    with pytest.raises(DataError, match=r"decompression bomb.*--max-gzip-ratio"):
        open_source(str(tmp_path / "a.tfrecord"), Storage())


# --------------------------------------------------------------------------------------------------- fuzz


@given(
    data=st.binary(max_size=200)
    | st.builds(lambda a, b: example(x=a, y=b), st.binary(max_size=40), st.binary(max_size=40))
)
@settings(max_examples=300, deadline=None)
def test_bytes_are_an_example_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_example(data)


@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=1), mended=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_flipped_bits_are_errors_of_ours_or_values(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], mended: bool
) -> None:
    path = tmp_path_factory.mktemp("in") / "a.tfrecord"
    whole = (DATA / "examples" / "train-00000-of-00003").read_bytes()
    if mended:  # the checksums hold: what is in the records is wrong
        records, at = [], 0
        while at < len(whole):
            (size,) = struct.unpack_from("<Q", whole, at)
            records.append(bytearray(whole[at + 12 : at + 12 + size]))
            at += size + 16
        for place, bit in flips:
            record = records[place % len(records)]
            record[place % len(record)] ^= 1 << bit
        path.write_bytes(framed(*records))
    else:
        body = bytearray(whole)
        for place, bit in flips:
            body[place % len(body)] ^= 1 << bit
        path.write_bytes(body)
    for seed in (None, 1):
        try:
            found = list(open_source(str(path), Storage(), options=SourceOptions(shuffle_seed=seed)).records(0))
        except ShardstreamError as error:
            assert "a.tfrecord" in str(error) or "feature" in str(error) or "column" in str(error)  # noqa: PT017
        else:
            assert len(found) == 5
            assert mended, "checksums find every flipped bit"
