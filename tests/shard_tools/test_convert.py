"""Packing other layouts: what becomes of every record, the same bytes always, stopping and going on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools.change.sets.reindex import index
from shard_tools.make.convert import ConvertOptions, SourceOptions, TargetNotEmptyError, convert, open_source
from shard_tools.make.convert.base.records import TEXT_UNITS, permutation
from shard_tools.make.convert.base.rows import dump_json, dump_npy
from shard_tools.make.write.filetypes import file_type
from streaming.errors import (
    ConfigError,
    DataError,
    DuplicateKeyError,
    IndexFormatError,
    NotFoundError,
    TarError,
)
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.processes.forked import Forked
from tests.support.processes.killed_programs import stopping
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.index_files import change_document
from tests.support.sets.tars import write_tar
from tests.support.sources.conversions import members, tree

PNG = b"\x89PNG\r\n\x1a\n"
JPG = b"\xff\xd8\xff\xe0"


def make_images(root: Path) -> Path:
    for name, body in (("cat/b.JPG", JPG + b"1"), ("cat/a.v1.png", PNG + b"2"), ("dog/x/y.jpeg", JPG + b"3")):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return root


def make_jsonl(path: Path, num_records: int) -> Path:
    lines = [json.dumps({"id": f"r{i:05d}", "n": i, "text": "x" * (i % 97)}) for i in range(num_records)]
    path.write_text("\n".join(lines) + "\n")
    return path


# ---------------------------------------------------------------------------------------------- images


def test_image_folder(tmp_path: Path) -> None:
    report = convert(str(make_images(tmp_path / "in")), str(tmp_path / "out"))
    assert (report.kind, report.num_samples, report.num_shards) == ("images", 3, 1)
    assert report.classes == {"cat": 0, "dog": 1}
    found = members(tmp_path / "out")
    assert {name: body for name, body in found.items() if not name.endswith("json")} == {
        "cat/a_v1.jpg": PNG + b"2",
        "cat/a_v1.cls": b"0",
        "cat/b.jpg": JPG + b"1",
        "cat/b.cls": b"0",
        "dog/x/y.jpg": JPG + b"3",
        "dog/x/y.cls": b"1",
    }
    assert json.loads(found["cat/a_v1.json"]) == {"class": "cat", "path": "cat/a.v1.png"}


def test_images_without_folders_have_no_class(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(PNG)
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert report.classes == {}
    assert sorted(members(tmp_path / "out")) == ["a.json", "a.png"]


def test_image_folder_reports_what_it_leaves_out(tmp_path: Path) -> None:
    root = make_images(tmp_path / "in")
    outside = tmp_path / "secret.png"
    outside.write_bytes(PNG)
    (tmp_path / "elsewhere").mkdir()
    (root / "notes.txt").write_text("x")
    (root / "cat" / "empty.png").write_bytes(b"")
    (root / "cat" / "._b.jpg").write_bytes(b"resource fork")
    (root / "cat" / "escape.png").symlink_to(outside)
    (root / "dangling.png").symlink_to(root / "nothing")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "inside.png").symlink_to(root / "cat" / "a.v1.png")
    os.mkfifo(root / "pipe.png")
    with pytest.raises(DataError, match=r"6 inputs would be left out: .*--on-error skip"):
        convert(str(root), str(tmp_path / "out"))
    report = convert(str(root), str(tmp_path / "out"), options=ConvertOptions(on_error="skip", max_bad=6))
    assert {entry.path: entry.reason for entry in report.skipped} == {
        "notes.txt": "not an image, and beside none of its name",
        "cat/empty.png": "empty file",
        "cat/._b.jpg": "hidden: a name that starts with a dot",
        "cat/escape.png": "symbolic link out of the source folder",
        "dangling.png": "not a regular file",
        "folder": "symbolic link to a folder",
        "pipe.png": "not a regular file",
    }
    assert members(tmp_path / "out")["inside.jpg"] == PNG + b"2"


@pytest.mark.parametrize("names", [("a.jpg", "a.png"), ("a.b.jpg", "a_b.jpg"), ("A.jpg", "a.jpg")])
def test_image_keys_that_collide(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_bytes(JPG)
    with pytest.raises(DuplicateKeyError, match="--key number") as caught:
        convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert all(name in str(caught.value) for name in names)
    assert not (tmp_path / "out").exists()
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(key_field="number"))
    assert report.num_samples == 2
    assert {name.partition(".")[0] for name in members(tmp_path / "out")} == {"000000000", "000000001"}


def test_target_inside_the_source_is_not_read(tmp_path: Path) -> None:
    root = make_images(tmp_path / "in")
    first = convert(str(root), str(root / "out"))
    again = convert(str(root), str(root / "out"))
    assert first.skipped == again.skipped == ()
    assert again.num_resumed_samples == 3


# ---------------------------------------------------------------------------------------------- tables


def test_jsonl_keeps_the_record_byte_for_byte(tmp_path: Path) -> None:
    lines = [b'{"b": 1.0,  "a": [1, {"x": null}]}', b'{"z":"\xc3\xa4"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([lines[0], b"", lines[1] + b"\r"]))
    convert(str(tmp_path / "in.jsonl"), str(tmp_path / "out"))
    assert members(tmp_path / "out") == {"000000000.json": lines[0], "000000001.json": lines[1]}


def test_jsonl_key_fields_and_columns(tmp_path: Path) -> None:
    source = make_jsonl(tmp_path / "in.jsonl", 5)
    options = ConvertOptions(key_field="id", fields=(("text", "txt"),), columns=("n", "text"))
    convert(str(source), str(tmp_path / "out"), options=options)
    found = members(tmp_path / "out")
    assert found["r00003.txt"] == b"xxx"
    assert json.loads(found["r00003.json"]) == {"id": "r00003", "n": 3}
    path = tmp_path / "out" / "_shardstream" / "samples" / "000000.tar.parquet"
    table = SampleTable.from_parquet(path.read_bytes(), str(path))
    assert table.columns["n"].to_pylist() == [0, 1, 2, 3, 4]
    assert table.columns["text"].to_pylist() == ["x" * i for i in range(5)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "expected one JSON object per line"),
        ('{"id": null}', "--key id"),
        ('"x"', "object"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"in\.jsonl:3: ") as caught:
        convert(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), options=ConvertOptions(key_field="id"))
    assert said in str(caught.value)


def test_jsonl_gz_and_many_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with gzip.open(tmp_path / "in" / "b.jsonl.gz", "wb") as out:
        out.write(b'{"n":2}\n{"n":3}')
    (tmp_path / "in" / "a.jsonl").write_text('{"n":0}\n{"n":1}\n')
    convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert [json.loads(body)["n"] for body in members(tmp_path / "out").values()] == [0, 1, 2, 3]
    convert(str(tmp_path / "in" / "*.jsonl"), str(tmp_path / "two"))
    assert [json.loads(body)["n"] for body in members(tmp_path / "two").values()] == [0, 1]
    convert(str(tmp_path / "in" / "{b.jsonl.gz,a.jsonl}"), str(tmp_path / "three"))
    assert [json.loads(body)["n"] for body in members(tmp_path / "three").values()] == [2, 3, 0, 1]


def test_truncated_gz(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"n":2}\n' * 1000)[:-20])
    with pytest.raises(DataError, match=r"in\.jsonl\.gz: .*ends early"):
        convert(str(tmp_path / "in.jsonl.gz"), str(tmp_path / "out"))


def test_text_lines(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes("eins\n\nzwei ü\n".encode())
    convert(str(tmp_path / "in.txt"), str(tmp_path / "out"))
    assert members(tmp_path / "out") == {"000000000.txt": b"eins", "000000001.txt": "zwei ü".encode()}
    (tmp_path / "bad.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(DataError, match=r"bad\.txt:2: .*UTF-8"):
        convert(str(tmp_path / "bad.txt"), str(tmp_path / "other"))


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_csv_keeps_quotes_and_newlines(tmp_path: Path, suffix: str, delimiter: str) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([["id", "text"], ["a", 'say "x",\nthen'], ["b", ""]])
    source = tmp_path / f"in.{suffix}"
    source.write_text(out.getvalue(), newline="")
    convert(str(source), str(tmp_path / "out"), options=ConvertOptions(key_field="id"))
    found = {name: json.loads(body) for name, body in members(tmp_path / "out").items()}
    assert found == {"a.json": {"id": "a", "text": 'say "x",\nthen'}, "b.json": {"id": "b", "text": ""}}
    source.write_text(delimiter.join("ab") + "\n1\n")
    with pytest.raises(DataError, match=r"in\.[ct]sv:2: expected 2 values, got 1"):
        convert(str(source), str(tmp_path / "other"))
    odd = tmp_path / "in" / "all.tsv" / f"a.{suffix}"  # a folder's name says nothing
    odd.parent.mkdir(parents=True)
    odd.write_text(f"a{delimiter}b\n1{delimiter}{'x' * 200_000}\n")
    convert(str(tmp_path / "in"), str(tmp_path / "long"))
    assert json.loads(members(tmp_path / "long")["000000000.json"]) == {"a": "1", "b": "x" * 200_000}


def test_parquet_images_arrays_and_scalars(tmp_path: Path) -> None:
    rows = {
        "image": [{"bytes": PNG, "path": "a.png"}, {"bytes": JPG, "path": None}, {"bytes": None, "path": "gone"}],
        "tokens": [[1, 2, 3], [], [4]],
        "label": [1, None, 3],
        "score": [0.5, float("nan"), float("inf")],
        "tags": [["a"], [], None],
        "hashes": pa.array([[2**64 - 1, 1], [], [1]], pa.list_(pa.uint64())),
    }
    pq.write_table(pa.table(rows), tmp_path / "in.parquet", row_group_size=2)
    convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"))
    found = members(tmp_path / "out")
    assert found["000000000.png"] == PNG
    assert found["000000001.png"] == JPG, "one column, one field: decoders of images look at the content"
    for column, dtype in (("tokens", np.int64), ("hashes", np.uint64)):
        arrays = [np.load(io.BytesIO(found[f"{i:09d}.{column}.npy"]), allow_pickle=False) for i in range(3)]
        assert [array.dtype for array in arrays] == [dtype] * 3, "an empty list is of its column's type, too"
        assert [array.tolist() for array in arrays] == pa.array(rows[column]).to_pylist()
    told = [json.loads(found[f"{i:09d}.json"]) for i in range(3)]
    assert told[0] == {"label": 1, "score": 0.5, "tags": ["a"]}
    assert told[1] == {"label": None, "score": None, "tags": []}
    assert told[2] == {
        "image": {"bytes": None, "path": "gone"}, "label": 3, "score": None, "tags": None
    }  # fmt: skip


def test_parquet_several_binary_columns_are_named_by_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"Left": [PNG], "right eye": [PNG], "id": ["k"]}), tmp_path / "in.parquet")
    convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"), options=ConvertOptions(key_field="id"))
    assert sorted(members(tmp_path / "out")) == ["k.json", "k.left.png", "k.right_eye.png"]
    options = ConvertOptions(fields=(("Left", "left.jpg"), ("right eye", "-"), ("id", "txt")))
    convert(str(tmp_path / "in.parquet"), str(tmp_path / "two"), options=options)
    assert members(tmp_path / "two") == {"000000000.left.jpg": PNG, "000000000.txt": b"k"}
    options = ConvertOptions(fields=(("Left", "-"), ("right eye", "-"), ("id", "tok.npy")))
    pq.write_table(
        pa.table({"Left": [PNG], "right eye": [PNG], "id": pa.array([[]], pa.list_(pa.int8()))}),
        tmp_path / "in.parquet",
    )
    convert(str(tmp_path / "in.parquet"), str(tmp_path / "three"), options=options)
    assert np.load(io.BytesIO(members(tmp_path / "three")["000000000.tok.npy"])).dtype == np.int8


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ({"Image": PNG, "image": PNG}, (), "'Image' and 'image' would both become the field 'image.png'"),
        ({"a b": [1], "a_b": [2]}, (), "'a b' and 'a_b' would both become the field 'a_b.npy'"),
        ({"image": PNG, "caption": "x"}, (("caption", "png"),), "'image' and 'caption' would both .*=NAME.png"),
        ({"chat": "{}", "label": 1}, (("chat", "json"),), "'chat' and 'label' .* --field chat=NAME.json"),
    ],
)  # fmt: skip
def test_no_column_takes_the_place_of_another(
    tmp_path: Path, row: dict[str, object], fields: tuple[tuple[str, str], ...], said: str
) -> None:
    pq.write_table(pa.table({name: [value] for name, value in row.items()}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=rf"in\.parquet, row group 0, row 0: the columns {said}"):
        convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"), options=ConvertOptions(fields=fields))


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "in.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match=r"in\.parquet: not a Parquet file"):
        convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"))


@pytest.mark.thorough
@given(start=st.integers(0, 60), seed=st.none() | st.integers(0, 9), group=st.integers(1, 20))
@settings(deadline=None)
def test_parquet_from_any_position(
    tmp_path_factory: pytest.TempPathFactory, start: int, seed: int | None, group: int
) -> None:
    path = tmp_path_factory.mktemp("parquet") / "in.parquet"
    pq.write_table(pa.table({"n": list(range(50))}), path, row_group_size=group)
    source = open_source(str(path), Storage(), options=SourceOptions(shuffle_seed=seed))
    whole = [(record.key, record.metadata["n"]) for record in source.records(0)]
    assert sorted(n for _, n in whole) == list(range(50))
    assert [key for key, _ in whole] == [f"{i:09d}" for i in range(50)]
    assert [(record.key, record.metadata["n"]) for record in source.records(start)] == whole[start:]


def test_jsonl_from_any_position(tmp_path: Path) -> None:
    source_path = make_jsonl(tmp_path / "in.jsonl", 40)
    for seed in (None, 5):
        source = open_source(str(source_path), Storage(), options=SourceOptions(shuffle_seed=seed, num_threads=3))
        whole = [record.metadata["n"] for record in source.records(0)]
        assert (whole == list(range(40))) == (seed is None)
        assert sorted(map(str, whole)) == sorted(map(str, range(40)))
        for start in (0, 1, 39, 40, 41):
            assert [record.metadata["n"] for record in source.records(start)] == whole[start:]


def test_every_source_from_any_position(tmp_path: Path) -> None:
    """What a stopped conversion goes on with."""
    texts = [f"text {number}" for number in range(7)]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode()))
    (tmp_path / "b.csv").write_text("\n".join(["text", "", *texts]))
    write_tar(tmp_path / "c" / "0.tar", [(f"{text}.txt", b"") for text in texts[:3]])
    write_tar(tmp_path / "c" / "1.tar", [(f"{text}.txt", b"") for text in texts[3:]])
    for number in range(7):
        image = tmp_path / "d" / f"{number}.png"
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(PNG)
    for name, units in (("a.txt.gz", TEXT_UNITS), ("b.csv", ("line",)), ("c", ("line",)), ("d", ("line",))):
        for unit in units:
            source = open_source(str(tmp_path / name), Storage(), options=SourceOptions(unit=unit))
            whole = list(source.records(0))
            assert len(whole) == (1 if unit == "file" else 7)
            for start in (1, 3, 4, 6, 7, 8):
                assert list(source.records(start)) == whole[start:], (name, unit, start)


# ------------------------------------------------------------------------------------------------ tars


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_foreign_tars(tmp_path: Path, form: int, suffix: str) -> None:
    long = "d/" * 30 + "n" * 90 if form != tarfile.USTAR_FORMAT else "d/long"
    entries = [("./a.JPG", JPG), ("./a.seg.png", PNG), ("b.txt", b""), (f"{long}.json", b"{}")]
    with tarfile.open(tmp_path / f"in.{suffix}", "w:gz" if suffix.endswith("gz") else "w", format=form) as archive:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, body in entries:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(body), 1234.5 if form == tarfile.PAX_FORMAT else 1234
            archive.addfile(member, io.BytesIO(body))
        link = tarfile.TarInfo("c.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        plain = tarfile.TarInfo("README")
        archive.addfile(plain)
        hidden = tarfile.TarInfo("e/.f")
        archive.addfile(hidden)
    report = convert(str(tmp_path / f"in.{suffix}"), str(tmp_path / "out"))
    assert members(tmp_path / "out") == {"a.jpg": JPG, "a.seg.png": PNG, "b.txt": b"", f"{long}.json": b"{}"}
    assert [entry.path for entry in report.skipped] == [f"in.{suffix}:README", f"in.{suffix}:e/.f"]


def test_tars_again_are_the_same_bytes(tmp_path: Path) -> None:
    source = make_jsonl(tmp_path / "in.jsonl", 50)
    options = ConvertOptions(max_samples=20)
    convert(str(source), str(tmp_path / "one"), options=options)
    convert(str(tmp_path / "one"), str(tmp_path / "two"), options=options)
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    for name in ("convert.json", "sources.parquet"):
        del one[f"_shardstream/{name}"], two[f"_shardstream/{name}"]
    assert one == two


@pytest.mark.parametrize("cut", [100, 700, 1500])
def test_truncated_tar(tmp_path: Path, cut: int) -> None:
    convert(str(make_jsonl(tmp_path / "in.jsonl", 3)), str(tmp_path / "one"))
    whole = (tmp_path / "one" / "000000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:cut])
    with pytest.raises(TarError, match=r"cut\.tar"):
        convert(str(tmp_path / "cut.tar"), str(tmp_path / "two"))


def test_keys_that_repeat_over_tars(tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(str(make_jsonl(tmp_path / "in.jsonl", 3)), str(tmp_path / "in" / name))
    with pytest.raises(DuplicateKeyError):
        convert(str(tmp_path / "in"), str(tmp_path / "out"))
    options = ConvertOptions(key_field="number", overwrite=True)
    assert convert(str(tmp_path / "in"), str(tmp_path / "out"), options=options).num_samples == 6


# ------------------------------------------------------------------------- the same bytes, and going on


def test_workers_do_not_change_the_bytes(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for i in range(60):
        path = root / f"c{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG + bytes([i]) * (i * 37))
    for workers in (1, 7):
        options = ConvertOptions(workers=workers, max_bytes=20_000, shuffle_seed=3)
        convert(str(root), str(tmp_path / f"out{workers}"), options=options)
    assert tree(tmp_path / "out1") == tree(tmp_path / "out7")
    assert len(list((tmp_path / "out1").glob("*.tar"))) > 5


def test_shuffle_is_a_permutation_by_the_seed(tmp_path: Path) -> None:
    source = make_jsonl(tmp_path / "in.jsonl", 100)
    orders = []
    for seed in (None, 1, 2):
        target = tmp_path / f"out{seed}"
        convert(str(source), str(target), options=ConvertOptions(shuffle_seed=seed))
        orders.append([json.loads(body)["n"] for body in members(target).values()])
    assert orders[0] == list(range(100))
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    pq.write_table(pa.table({"n": range(60)}), tmp_path / "in.parquet", row_group_size=20)
    shuffled = open_source(str(tmp_path / "in.parquet"), Storage(), options=SourceOptions(shuffle_seed=1)).records(0)
    numbers = np.array([record.metadata["n"] for record in shuffled])
    assert len({tuple(group % 20) for group in numbers.reshape(3, 20)}) == 3, "each row group in an order of its own"


def test_permutation_is_pinned() -> None:
    assert permutation(8, 0).tolist() == [0, 3, 1, 6, 2, 4, 5, 7]
    assert permutation(8, 1).tolist() == [2, 7, 0, 5, 1, 3, 4, 6]
    assert permutation(0, 1).tolist() == []


STOPPER = stopping("""
from shard_tools.make.convert import ConvertOptions, convert
convert(sys.argv[1], sys.argv[2], options=ConvertOptions(max_samples=20))
""")


@pytest.mark.parametrize("stop_at", [0, 1, 20, 21, 59, 60, 99])
def test_killed_and_gone_on_with(tmp_path: Path, forked: Forked, stop_at: int) -> None:
    source = make_jsonl(tmp_path / "in.jsonl", 100)
    options = ConvertOptions(max_samples=20)
    convert(str(source), str(tmp_path / "calm"), options=options)
    arguments = (str(source), str(tmp_path / "out"), str(stop_at))
    assert forked.start(STOPPER, *arguments, output=tmp_path / "said").wait() == -signal.SIGKILL
    for shard in (tmp_path / "out").glob("*.tar"):
        assert shard.read_bytes() == (tmp_path / "calm" / shard.name).read_bytes()
    report = convert(str(source), str(tmp_path / "out"), options=options)
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")
    assert report.num_samples == 100
    # The last finished shard is written again; sample 20k+1 proves that shard k is out.
    assert report.num_resumed_samples == max(0, (stop_at - 1) // 20 * 20 - 20) if stop_at else True


def test_stopped_after_the_last_shard(tmp_path: Path) -> None:
    """The chunk table is written last: a run that was killed just before it is completed by the next one."""
    source = make_jsonl(tmp_path / "in.jsonl", 60)
    options = ConvertOptions(max_samples=20)
    convert(str(source), str(tmp_path / "out"), options=options)
    calm = tree(tmp_path / "out")
    (tmp_path / "out" / "_shardstream" / "chunks.parquet").unlink()
    journal = tmp_path / "out" / "_shardstream" / "convert.json"
    change_document(journal, complete=False)
    assert convert(str(source), str(tmp_path / "out"), options=options).num_resumed_samples == 40
    assert tree(tmp_path / "out") == calm
    change_document(journal, complete=False)
    cut = tmp_path / "out" / "000001.tar"
    cut.write_bytes(cut.read_bytes()[:-512])
    assert convert(str(source), str(tmp_path / "out"), options=options).num_resumed_samples == 0, "of another size"
    assert tree(tmp_path / "out") == calm
    (tmp_path / "out" / "000000.tar").unlink()  # as a run with overwrite=True leaves it that is killed meanwhile
    assert convert(str(source), str(tmp_path / "out"), options=options).num_resumed_samples == 0, "not done any more"
    assert tree(tmp_path / "out") == calm


def test_duplicate_key_across_a_stop(tmp_path: Path) -> None:
    keys = ["same" if i in {0, 90} else f"r{i}" for i in range(100)]
    pq.write_table(pa.table({"id": keys}), tmp_path / "in.parquet")
    options = ConvertOptions(max_samples=20, key_field="id")
    with ThreadPoolExecutor(1) as pool:
        for executor in (None, None, pool):
            with pytest.raises(DuplicateKeyError, match="same"):
                convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"), options=options, executor=executor)
            assert len([*(tmp_path / "out").glob("*.tar")]) == 4


def test_target_with_other_data_is_refused(tmp_path: Path) -> None:
    source = make_jsonl(tmp_path / "in.jsonl", 10)
    target = tmp_path / "out"
    target.mkdir()
    (target / "README.md").write_text("kept")
    convert(str(source), str(target), options=ConvertOptions(max_samples=5))
    before = tree(target)
    other = make_jsonl(tmp_path / "other.jsonl", 11)
    with pytest.raises(TargetNotEmptyError, match="source"):
        convert(str(other), str(target), options=ConvertOptions(max_samples=5))
    with pytest.raises(TargetNotEmptyError, match="max_samples: there 5, here 4"):
        convert(str(source), str(target), options=ConvertOptions(max_samples=4))
    with pytest.raises(
        TargetNotEmptyError, match=r"1 input gone, such as in\.jsonl; 1 input new, such as other\.jsonl"
    ):
        convert(str(other), str(target), options=ConvertOptions(max_samples=5))
    assert tree(target) == before
    convert(str(other), str(target), options=ConvertOptions(max_samples=100, overwrite=True))
    assert sorted(path.name for path in target.glob("*.tar")) == ["000000.tar"]
    assert (target / "README.md").read_text() == "kept"
    (target / "_shardstream" / "convert.json").unlink()
    with pytest.raises(TargetNotEmptyError, match="another data set"):
        convert(str(source), str(target))
    (target / "_shardstream" / "convert.json").write_text("{}")
    with pytest.raises(IndexFormatError, match="--overwrite"):
        convert(str(source), str(target))
    convert(str(other), str(target), options=ConvertOptions(overwrite=True))
    (target / "000000.tar").unlink()  # as a run leaves it that has only begun, or was killed
    (target / "_shardstream" / "samples" / "000000.tar.parquet").unlink()
    (target / "_shardstream" / "chunks.parquet").unlink()
    (target / "_shardstream" / "schema.json").unlink()
    with pytest.raises(TargetNotEmptyError, match="another conversion, of which no shard is written yet"):
        convert(str(source), str(target))


def test_pattern_as_target(tmp_path: Path) -> None:
    source = make_jsonl(tmp_path / "in.jsonl", 10)
    options = ConvertOptions(max_samples=4)
    report = convert(str(source), str(tmp_path / "out" / "train-{:03d}.tar"), options=options)
    assert report.num_shards == 3
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == [f"train-00{i}.tar" for i in range(3)]
    again = convert(str(source), str(tmp_path / "out" / "train-{:03d}.tar"), options=options)
    assert again.num_resumed_samples == 10


# ------------------------------------------------------------------------------------------- bad input


def test_source_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        convert(str(tmp_path / "nothing"), str(tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        convert(str(tmp_path / "empty"), str(tmp_path / "out"))
    with pytest.raises(NotFoundError):
        convert(str(tmp_path / "empty"), str(tmp_path / "out"), options=ConvertOptions(kind="images"))
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no records"):
        convert(str(tmp_path / "blank.jsonl"), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ("{}", (), "this row is empty, and a sample needs a field; delete the row from the source"),
        ('{"a": 1}', (("a", "-"),), "nothing is left of this row; name fewer columns with --field COLUMN=-"),
        ('{"a": null}', (("a", "txt"),), r"each value of this row is NULL \(a\); delete the row from the source"),
    ],
)
def test_a_row_without_a_field_says_why(
    tmp_path: Path, row: str, fields: tuple[tuple[str, str], ...], said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"a": "x", "b": 2}}\n{row}\n')
    with pytest.raises(DataError, match=rf"in\.jsonl:2: {said}$"):
        convert(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), options=ConvertOptions(fields=fields))


def test_layouts_that_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(ConfigError, match=r"csv, jsonl.*--from"):
        convert(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "c.xyz").write_text("")
    with pytest.raises(ConfigError, match="--from"):
        convert(str(tmp_path / "c.xyz"), str(tmp_path / "out"))


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    images = str(make_images(tmp_path / "in"))
    source = make_jsonl(tmp_path / "in.jsonl", 3)
    convert(str(source), str(tmp_path / "tars"))
    cases = [
        (images, ConvertOptions(fields=(("a", "jpg"),)), "--field"),
        (images, ConvertOptions(key_field="id"), "--key"),
        (str(tmp_path / "tars"), ConvertOptions(shuffle_seed=1), "--shuffle"),
        (str(tmp_path / "tars"), ConvertOptions(key_field="id"), "--key"),
        (str(source), ConvertOptions(fields=(("a", "txt"), ("b", "txt"))), "--field"),
    ]
    for where, options, said in cases:
        with pytest.raises(ConfigError, match=said):
            convert(where, str(tmp_path / "out"), options=options)
    with pytest.raises(ConfigError, match="same place"):
        convert(str(tmp_path / "tars"), str(tmp_path / "tars") + "/", options=ConvertOptions(overwrite=True))
    assert (tmp_path / "tars" / "000000.tar").exists()
    with pytest.raises(ConfigError, match="folder or prefix"):
        convert(str(source), str(tmp_path / "out.tar"))


@pytest.mark.parametrize(("kind", "text"), [("text", "line\n"), ("csv", "a,b\n1,2\n"), ("jsonl", '{"a": 1}\n')])
def test_small_files_of_a_store_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch, kind: str, text: str) -> None:
    """One after the other, each file took a round trip to the store."""
    storage, read, both = Storage(), Storage.read, threading.Barrier(2)
    folder = f"memory://ahead-{kind}/"
    for name in "abcdef":
        storage.put(f"{folder}{name}.{'txt' if kind == 'text' else kind}", text.encode())

    def read_in_pairs(self: Storage, *what: object) -> object:
        both.wait(PATIENCE_S)  # broken, and an error, where no other read is under way
        return read(self, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(Storage, "read", read_in_pairs)
    source = open_source(folder, storage, kind=kind, options=SourceOptions(num_threads=2))
    assert [record.key for record in source.records(0)] == [f"{number:09d}" for number in range(6)]


def test_a_run_that_wrote_no_shard_leaves_nothing_to_overwrite(tmp_path: Path) -> None:
    """A wrong option fails at the first record; the right one was then refused as another conversion."""
    source, out = str(make_jsonl(tmp_path / "in.jsonl", 3)), str(tmp_path / "out")
    with pytest.raises(DataError):
        convert(source, out, options=ConvertOptions(key_field="nothing"))
    assert convert(source, out).num_samples == 3
    with pytest.raises(TargetNotEmptyError, match="another conversion"):
        convert(source, out, options=ConvertOptions(key_field="nothing"))


# --------------------------------------------------------------------------------------- small functions


@pytest.mark.parametrize(
    ("payload", "extension"),
    [
        (JPG, "jpg"), (PNG, "png"), (b"GIF89a", "gif"), (b"RIFF\0\0\0\0WEBP", "webp"), (b"RIFF\0\0\0\0WAVE", "wav"),
        (b"fLaC", "flac"), (b"\0\0\0\x20ftypavif", "avif"), (b"\0\0\0\x20ftypisom", "mp4"), (b"", ""), (b"?", ""),
    ],
)  # fmt: skip
def test_file_type_is_found_by_its_first_bytes(payload: bytes, extension: str) -> None:
    assert file_type(payload) == extension


def test_dump_json_is_strict() -> None:
    assert dump_json({"a": [float("nan"), 1.5], "b": {"c": float("-inf")}}) == b'{"a":[null,1.5],"b":{"c":null}}'
    assert dump_json({"map": [("k", float("nan"))]}) == b'{"map":[["k",null]]}'
    with pytest.raises(DataError, match="binary value of 3 bytes"):
        dump_json({"a": [b"abc"]})


def test_dump_npy_takes_numbers_only() -> None:
    with pytest.raises(DataError, match="ragged"):
        dump_npy([[1], [1, 2]])
    with pytest.raises(DataError, match="which takes numbers"):
        dump_npy(["a"])
    with pytest.raises(DataError, match="NULL among its items"):
        dump_npy([None, 1], "int64")
    with pytest.raises(DataError, match="whole numbers below 0"):
        dump_npy([2**63, -1])
    assert dump_npy([[2**63 + 1, 1]]) == dump_npy([[2**63 + 1, 1]], "uint64"), "not rounded"


def test_a_damaged_sample_table_is_written_anew_as_its_error_says(tmp_path: Path) -> None:
    """With a column that only the source holds: `index` cannot rebuild it, the same conversion can."""
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text("".join(f'{{"text": "row {number}", "score": {number}}}\n' for number in range(60)))
    options = ConvertOptions(columns=("score",), max_samples=20)
    convert(str(source), str(out), options=options)
    calm = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    table = out / "_shardstream" / "samples" / "000001.tar.parquet"
    table.write_bytes(calm["_shardstream/samples/000001.tar.parquet"][:200])
    with pytest.raises(IndexFormatError, match=r"its columns score, .* `shard_tools convert` writes this shard"):
        index([str(out)], storage=Storage())
    again = convert(str(source), str(out), options=options)
    assert (again.num_samples, again.num_resumed_samples) == (60, 0), "the shard before it gets the chunk table"
    assert {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()} == calm
