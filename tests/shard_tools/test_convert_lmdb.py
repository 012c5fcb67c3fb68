"""LMDB: databases that its own library wrote, entry for entry; damaged and hostile ones, refused by name."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools.make.convert import ConvertOptions, SourceOptions, convert, open_source
from streaming.errors import ConfigError, DataError, NotFoundError, ShardstreamError
from streaming.storage import Storage
from tests.support.sources.conversions import members, tree

pytestmark = pytest.mark.thorough

JPG = b"\xff\xd8\xff\xe0"


def make(folder: Path, entries: dict[bytes, bytes], *, subdir: bool = True, **options: Any) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(folder), map_size=1 << 26, subdir=subdir, **options) as base, base.begin(write=True) as out:
        for key, value in entries.items():
            out.put(key, value)
    return folder


def many(count: int = 700, seed: int = 0) -> dict[bytes, bytes]:
    """Values in pages, in pages of their own, and empty keys' worth of depth."""
    dice = random.Random(seed)
    return {f"k{number:05d}".encode(): JPG + dice.randbytes(number * 41 % 9000) for number in range(count)}


def entries_of(path: Path, **options: Any) -> list[tuple[str, bytes]]:
    source = open_source(str(path), Storage(), options=SourceOptions(**options))
    return [(record.key, next(iter(record.fields.values()))) for record in source.records(0)]


@pytest.mark.parametrize("count", [1, 2, 100, 700, 3000])
def test_entry_for_entry(tmp_path: Path, count: int) -> None:
    entries = many(count)
    folder = make(tmp_path / "in", entries)
    before = tree(folder)
    expected = [(key.decode(), value) for key, value in sorted(entries.items())]
    source = open_source(str(folder), Storage())
    assert source.kind == "lmdb"
    assert source.num_records == count
    assert source.fields["jpg"] is True
    assert entries_of(folder) == expected
    (tmp_path / "one").mkdir()
    shutil.copy(folder / "data.mdb", tmp_path / "one" / "named")
    assert [one.key for one in open_source(str(tmp_path / "one/named"), Storage(), kind="lmdb").records(0)]
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    convert(str(folder), str(tmp_path / "out"))
    assert members(tmp_path / "out") == {f"{k}.jpg": v for k, v in expected}
    assert tree(folder) == before, "nothing is written, no lock either"


def test_changed_and_deleted_entries(tmp_path: Path) -> None:
    """The newer state holds, and pages are in any order."""
    dice = random.Random(1)
    entries = many(500)
    folder = make(tmp_path / "in", entries)
    with lmdb.open(str(folder), map_size=1 << 26) as database:
        for _ in range(5):
            with database.begin(write=True) as writing:
                for key in dice.sample(sorted(entries), 60):
                    if dice.random() < 0.5:
                        writing.delete(key)
                        del entries[key]
                    else:
                        entries[key] = JPG + dice.randbytes(dice.randrange(12_000))
                        writing.put(key, entries[key])
    assert entries_of(folder) == [(key.decode(), value) for key, value in sorted(entries.items())]


@pytest.mark.parametrize("seed", [None, 4])
def test_from_any_position(tmp_path: Path, seed: int | None) -> None:
    make(tmp_path / "in" / "a", {b"__len__": b"7", **many(300)})
    make(tmp_path / "in" / "b.lmdb", {b"b" + key: value for key, value in many(40).items()}, subdir=False)
    source = open_source(str(tmp_path / "in"), Storage(), options=SourceOptions(shuffle_seed=seed))
    whole = [(one.key, dict(one.fields)) for one in source.records(0)]
    assert len(whole) == source.num_records == 340
    assert ([key for key, _ in whole] == sorted(key for key, _ in whole)) == (
        seed is not None and False
    ) or seed is None
    for start in (1, 299, 300, 301, 339, 340, 341):
        assert [(one.key, dict(one.fields)) for one in source.records(start)] == whole[start:], start


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ([b'{"a": 1}', b"[2]"], "json"), ([b'{"a": 1}', "ü".encode()], "txt"), ([b"\0\1", b"\xff"], "bin"),
        ([JPG, JPG + b"x", b""], "jpg"), ([b"\x93NUMPY\1\0"], "npy"),
    ],
)  # fmt: skip
def test_values_by_their_content(tmp_path: Path, values: list[bytes], field: str) -> None:
    folder = make(tmp_path / "in", {f"x/{number}.y".encode(): value for number, value in enumerate(values)})
    convert(str(folder), str(tmp_path / "out"))
    assert members(tmp_path / "out") == {f"x/{number}_y.{field}": value for number, value in enumerate(values)}


def test_keys_notes_and_options(tmp_path: Path) -> None:
    folder = make(
        tmp_path / "in", {b"__keys__": pickle.dumps([b"a"]), b"__len__": b"\x80\x04K\x02.", b"a.1": b"x", b"b": b"y"}
    )
    report = convert(str(folder), str(tmp_path / "out"))
    assert {entry.path for entry in report.skipped} == {"data.mdb:__keys__", "data.mdb:__len__"}
    assert sorted(members(tmp_path / "out")) == ["a_1.txt", "b.txt"]
    options = ConvertOptions(key_field="number", fields=(("key", "name.txt"), ("value", "dat")))
    convert(str(folder), str(tmp_path / "two"), options=options)
    assert members(tmp_path / "two") == {
        "000000000.name.txt": b"a.1", "000000000.dat": b"x", "000000001.name.txt": b"b", "000000001.dat": b"y"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="LMDB has keys of its own"):
        convert(str(folder), str(tmp_path / "x"), options=ConvertOptions(key_field="id"))
    with pytest.raises(ConfigError, match="read from this machine's disk"):
        open_source("s3://bucket/in/", Storage(), kind="lmdb")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"no file ends in \.mdb"):
        open_source(str(tmp_path / "none"), Storage(), kind="lmdb")
    raw = make(tmp_path / "raw", {b"\xff\xfe": b"x"})
    with pytest.raises(DataError, match="the key is no text; number the samples with --key number"):
        convert(str(raw), str(tmp_path / "x"))
    convert(str(raw), str(tmp_path / "raw-out"), options=ConvertOptions(key_field="number"))
    empty = make(tmp_path / "empty", {})
    with pytest.raises(DataError, match="the source holds no records"):
        convert(str(empty), str(tmp_path / "x"))


def recognition(count: int, first: int = 1, digits: int = 9) -> dict[bytes, bytes]:
    """What programs for text recognition write: an image and its text under one number each."""
    entries = {b"num-samples": str(count).encode()}
    for number in range(first, first + count):
        entries[f"image-{number:0{digits}d}".encode()] = JPG + bytes([number % 251]) * (number * 61 % 5000)
        entries[f"label-{number:0{digits}d}".encode()] = f"wörd {number}".encode()
    return entries


@pytest.mark.parametrize("digits", [1, 9])
@pytest.mark.parametrize("seed", [None, 4])
def test_entries_of_one_number_are_one_sample(
    tmp_path: Path, digits: int, seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "in/a", {b"__len__": b"7", **recognition(300, digits=digits)})
    make(tmp_path / "in/b", recognition(40, first=301, digits=digits))
    source = open_source(str(tmp_path / "in"), Storage(), options=SourceOptions(shuffle_seed=seed))
    assert "entries of one number (image-…, label-…) are one sample: 300 samples" in caplog.text
    assert source.num_records == 340
    assert [name for name, everywhere in source.fields.items() if everywhere] == ["jpg", "txt"]
    assert [entry.reason for entry in source.skipped if "num-samples" in entry.path] == ["the number of samples"] * 2
    whole = [(one.key, dict(one.fields)) for one in source.records(0)]
    expected = recognition(300, digits=digits) | recognition(40, first=301, digits=digits)
    for key, fields in whole:
        assert fields == {"jpg": expected[f"image-{key}".encode()], "txt": expected[f"label-{key}".encode()]}
    numbers = [int(key) for key, _ in whole]
    assert sorted(numbers) == [*range(1, 341)]
    assert (numbers == sorted(numbers)) == (seed is None)
    for start in (1, 299, 300, 301, 339, 340, 341):
        assert [(one.key, dict(one.fields)) for one in source.records(start)] == whole[start:], start


def test_names_of_joined_entries_are_columns(tmp_path: Path) -> None:
    folder = make(tmp_path / "in", recognition(3))
    convert(str(folder), str(tmp_path / "out"), options=ConvertOptions(fields=(("label", "-"),), key_field="number"))
    assert sorted(members(tmp_path / "out")) == [f"00000000{number}.jpg" for number in range(3)]
    convert(str(folder), str(tmp_path / "all"), options=ConvertOptions(fields=(("value", "bin"),)))
    assert len(members(tmp_path / "all")) == 7, "each entry by itself, num-samples, too"
    alike = make(tmp_path / "alike", {b"num-samples": b"1", b"image-1": JPG, b"mask-1": JPG + b"x"})
    convert(str(alike), str(tmp_path / "alike-out"))
    assert members(tmp_path / "alike-out") == {"1.image.jpg": JPG, "1.mask.jpg": JPG + b"x"}
    plain = make(tmp_path / "plain", {b"num-samples": b"1", b"a": b"text"})
    convert(str(plain), str(tmp_path / "plain-out"))
    assert sorted(members(tmp_path / "plain-out")) == ["a.txt", "num-samples.txt"], "keys without numbers"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({b"label-000000002": None}, "number 2 has no 'label'"),
        ({b"image-000000003": None}, "number 3 has no 'image'"),
        ({b"num-samples": b"5"}, "there are 3 samples, but num-samples is 5"),
        ({b"lexicon-000000001": b"a"}, "number 2 has no 'lexicon'"),
        ({b"meta": b"x"}, "the key 'meta' has no number"),
        ({b"label-3": b"x"}, "the key 'label-3' has the number of another"),
    ],
)
def test_entries_that_do_not_match_are_refused(tmp_path: Path, change: dict[bytes, bytes | None], told: str) -> None:
    entries = {key: value for key, value in (recognition(3) | change).items() if value is not None}
    folder = make(tmp_path / "in", entries)
    with pytest.raises(DataError, match=told) as caught:
        convert(str(folder), str(tmp_path / "out"))
    assert "--field value=bin" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_databases_of_different_entries_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "in/a", recognition(3))
    make(tmp_path / "in/b", many(3))
    with pytest.raises(ConfigError, match=r"databases of different entries .* convert them apart"):
        convert(str(tmp_path / "in"), str(tmp_path / "out"))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


def test_pickles_are_refused_and_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    for protocol in range(2, 6):
        folder = make(tmp_path / f"in{protocol}", {b"a": pickle.dumps(Bomb(), protocol)})
        with pytest.raises(DataError, match=r"data\.mdb, key 'a': the value is pickled.*--field value=bin"):
            convert(str(folder), str(tmp_path / "out"))
        options = ConvertOptions(fields=(("value", "bin"),))
        convert(str(folder), str(tmp_path / f"out{protocol}"), options=options)
        assert members(tmp_path / f"out{protocol}") == {"a.bin": pickle.dumps(Bomb(), protocol)}
    assert not (tmp_path / "ran").exists()


def test_other_kinds_of_databases_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "named"), max_dbs=2) as database:
        inner = database.open_db(b"inner")
        with database.begin(write=True) as writing:
            writing.put(b"a", b"b", db=inner)
    with pytest.raises(DataError, match="the key 'inner' is a database within it"):
        list(open_source(str(tmp_path / "named"), Storage()).records(0))
    path = make(tmp_path / "several", {b"a": b"b"}) / "data.mdb"
    body = bytearray(path.read_bytes())
    for at in (0, 4096):
        body[at + 16 + 24 + 48 + 4] = 4  # MDB_DUPSORT
    path.write_bytes(body)
    with pytest.raises(ConfigError, match="several values for a key"):
        open_source(str(tmp_path / "several"), Storage())


def test_truncated_and_hostile_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "in", many(300))
    path = folder / "data.mdb"
    whole = path.read_bytes()
    for size in (0, 100, 4096, 8192, 8300, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"data\.mdb"):
            entries_of(folder)
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(DataError, match="not an LMDB file"):
        entries_of(folder)
    newer = max((0, 4096), key=lambda at: struct.unpack_from("<Q", whole, at + 16 + 24 + 96 + 8))
    main = newer + 16 + 24 + 48
    for at, form, value, said in (
        (main + 32, "<Q", 10**12, "data.mdb"),  # entries
        (main + 32, "<Q", 299, "more than 299 entries"),
        (main + 32, "<Q", 301, "holds 300 entries, expected 301"),
        (main + 40, "<Q", 10**9, "ends after the file"),  # root
        (main + 40, "<Q", 0, "no page of keys"),
        (main + 6, "<H", 9, "at depth"),
    ):
        body = bytearray(whole)
        struct.pack_into(form, body, at, value)
        path.write_bytes(body)
        with pytest.raises(DataError, match=said):
            entries_of(folder)


def test_a_page_that_leads_to_itself(tmp_path: Path) -> None:
    folder = make(tmp_path / "in", many(3000))
    path = folder / "data.mdb"
    whole = bytearray(path.read_bytes())
    for page in range(2, len(whole) // 4096):
        at = page * 4096
        number, _, flags, lower, _ = struct.unpack_from("<QHHHH", whole, at)
        if number == page and flags == 1:
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", whole, at + 16):
                struct.pack_into("<HHH", whole, at + node, page & 0xFFFF, page >> 16, 0)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="at depth"):
        entries_of(folder)


@pytest.mark.thorough
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=4
    ),
    heads=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_changed_bytes_are_errors_of_ours_or_values(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, int]], heads: bool
) -> None:
    folder = tmp_path_factory.mktemp("in")
    body = bytearray(_whole(tmp_path_factory))
    for page, at, value in changes:
        body[page % (len(body) // 4096) * 4096 + (at % 64 if heads else at)] = value
    (folder / "data.mdb").write_bytes(body)
    for options in ({}, {"shuffle_seed": 1, "key_field": "number", "fields": (("value", "bin"),)}):
        try:
            assert len(entries_of(folder, **options)) <= 300
        except ShardstreamError as error:
            assert "data.mdb" in str(error) or "column" in str(error)  # noqa: PT017


def _whole(factory: pytest.TempPathFactory) -> bytes:
    folder = factory.getbasetemp() / "whole-lmdb"
    if not folder.exists():
        make(folder, many(300))
    return (folder / "data.mdb").read_bytes()


def test_json_stays_as_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "in", {b"a": b'{"n":  1}'})
    convert(str(folder), str(tmp_path / "out"))
    assert members(tmp_path / "out") == {"a.json": b'{"n":  1}'}
    assert json.loads(members(tmp_path / "out")["a.json"]) == {"n": 1}
