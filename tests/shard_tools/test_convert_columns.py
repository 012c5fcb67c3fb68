"""One column becomes one field, whatever its values look like, and keeps its types; `verify` knows the fields."""

from __future__ import annotations

import datetime as dt
import decimal
import hashlib
import io
import json
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, DataError
from tests.support.sets.tars import write_tar
from tests.support.sources.conversions import members

pytestmark = pytest.mark.thorough

NUM_DIGESTS = 2000
ACCIDENTS = (b"BM", b"\xff\xfb", b"ID3", b"\xff\xd8\xff\xd0", b"\0\0\0\0ftyq", b"GIF8")  # how files begin, or nearly


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def digests() -> list[bytes]:
    found = [hashlib.md5(str(i).encode()).digest() for i in range(NUM_DIGESTS)]
    for number, start in enumerate(ACCIDENTS):
        found[100 * number + 7] = start + found[100 * number + 7][len(start) :]
    return found


def image(kind: str, color: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), (color, 9, 9)).save(out, kind)
    return out.getvalue()


def table(path: Path, group: int | None = None, **columns: object) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return str(path)


def fields_of(target: Path) -> dict[str, int]:
    """How many samples have each field."""
    dataset = StreamingDataset(str(target), decode=None)
    samples = [dataset[number] for number in range(len(dataset))]
    names = {name for sample in samples for name in sample if not name.startswith("__")}
    return {name: sum(sample.get(name) is not None for sample in samples) for name in sorted(names)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.binary(16), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_digests_are_one_field_though_some_begin_as_files_do(tmp_path: Path, kind: pa.DataType) -> None:
    """Of 400,000 digests ten became mp3 and bmp; readers lost four rows to their neighbours, or got None for ten."""
    expected = digests()
    source = table(tmp_path / "in.parquet", 300, md5=pa.array(expected, pa.binary()).cast(kind), n=range(NUM_DIGESTS))
    report = convert(source, str(tmp_path / "out"))
    assert (report.remarks, fields_of(tmp_path / "out")) == ({}, {"bin": NUM_DIGESTS, "json": NUM_DIGESTS})
    for decode in ("auto", None):
        with DataLoader(StreamingDataset(str(tmp_path / "out"), decode=decode), batch_size=50, num_workers=0) as loader:
            rows = {key: value for batch in loader for key, value in zip(batch["__key__"], batch["bin"], strict=True)}
        assert [bytes(rows[f"{number:09d}"]) for number in range(NUM_DIGESTS)] == expected


@pytest.mark.parametrize("executor", [None, "threads"])
def test_a_later_value_of_another_type_stays_in_the_field_and_is_counted(
    tmp_path: Path, executor: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    values = [image("JPEG", i) for i in range(8)] + [b"<html>404</html>", image("PNG"), b"", b"%PDF-1.7 no image"]
    source = table(tmp_path / "in.parquet", 4, image=values)
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING):
        report = convert(
            source, str(tmp_path / "out"), options=ConvertOptions(max_samples=5), executor=pool if executor else None
        )
    assert fields_of(tmp_path / "out") == {"jpg": 12}
    [(said, count)] = report.remarks.items()
    assert count == 3, "decoders of images read the PNG by its content"
    assert "column 'image': the content is not of the type jpg" in said
    assert f"{said}: 3 samples, the first from {source}, row group 2, row 0" in caplog.text


def test_the_type_comes_from_the_option_then_the_name_then_the_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jpegs, half = [image("JPEG", i) for i in range(4)], [image("JPEG"), b"gone", image("JPEG"), b"\0"]
    columns: dict[str, object] = {
        "scan.jpeg": half, "photo": jpegs, "bmp": digests()[:4], "note": [b"x", None, b"y", b"z"], "other": half,
        "mixed": [*jpegs[:3], image("PNG")], "clip": [b"ID3\3\0..."] * 4,
    }  # fmt: skip
    options = ConvertOptions(fields=(("other", "right.png"),))
    with caplog.at_level(logging.WARNING):
        report = convert(table(tmp_path / "in.parquet", **columns), str(tmp_path / "out"), options=options)
    assert fields_of(tmp_path / "out") == {
        "scan_jpeg.jpeg": 4, "photo.jpg": 4, "bmp.bin": 4, "note.bin": 3, "right.png": 4, "mixed.jpg": 4, "clip.mp3": 4,
        "json": 1,  # NULL of a column with a field of its own
    }  # fmt: skip
    assert list(report.remarks.values()) == [2, 2]
    assert "column 'mixed': of the first 4 values 3 are jpg, 1 are png: all become the field .jpg" in caplog.text


def test_what_most_values_but_not_all_are_has_to_be_said(tmp_path: Path) -> None:
    values = [image("JPEG"), image("JPEG"), b"%PDF-1.7", b"gone"]
    source = table(tmp_path / "in.parquet", page=values, md5=digests()[:4])
    with pytest.raises(ConfigError, match=r"column 'page': .* 2 are jpg, 1 are .*--field page=jpg") as caught:
        convert(source, str(tmp_path / "out"))
    assert "--field page=bin" in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = convert(source, str(tmp_path / "out"), options=ConvertOptions(fields=(("page", "jpg"),)))
    assert list(report.remarks.values()) == [2]
    assert fields_of(tmp_path / "out") == {"bin": 4, "jpg": 4}


def test_a_column_holds_the_same_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table(tmp_path / "in" / "a.parquet", image=pa.nulls(2), x=pa.array([[1], [2]], pa.list_(pa.int16())))
    table(tmp_path / "in" / "b.parquet", image=[image("PNG")], x=pa.array([[1 << 20]], pa.list_(pa.int32())))
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"b\.parquet: column 'x' is list.*--field x=EXT"):
        convert(source, out)
    assert convert(source, out, options=ConvertOptions(fields=(("x", "x.npy"),))).num_samples == 3
    assert fields_of(tmp_path / "out") == {"json": 2, "png": 1, "x.npy": 3}
    arrays = [StreamingDataset(out)[number]["x.npy"] for number in range(3)]
    assert [(array.dtype, array.tolist()) for array in arrays] == [
        (np.int32, [1]),
        (np.int32, [2]),
        (np.int32, [1 << 20]),
    ]


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "float16", "float32"]
)
@pytest.mark.parametrize("large", [False, True])
def test_lists_keep_the_type_of_their_items(tmp_path: Path, dtype: str, large: bool) -> None:
    rows = [np.array([1, 2, 3], dtype), np.array([], dtype), None]
    kind = (pa.large_list if large else pa.list_)(pa.from_numpy_dtype(np.dtype(dtype)))
    source = table(tmp_path / "in.parquet", x=pa.array(rows, kind), n=[1, None, 3])
    convert(source, str(tmp_path / "out"), options=ConvertOptions(columns=("n",)))
    dataset = StreamingDataset(str(tmp_path / "out"))
    for number in range(2):
        assert dataset[number]["x.npy"].dtype == dtype
        np.testing.assert_array_equal(dataset[number]["x.npy"], rows[number])
    assert "x.npy" not in dataset[2]
    assert [dataset[number]["json"] for number in range(3)] == [{"n": 1}, {"n": None}, {"x": None, "n": 3}]
    assert len(StreamingDataset(str(tmp_path / "out"), where="n >= 0")) == 2, "NULL is no number"


def test_null_among_the_items_of_a_list_is_kept_or_refused_with_the_cure(tmp_path: Path) -> None:
    for kind, value in ((pa.int32(), 1), (pa.bool_(), True)):
        source = table(tmp_path / "in.parquet", x=pa.array([[value], [value, None]], pa.list_(kind)))
        with pytest.raises(DataError, match=r"row 1: column 'x': .*NULL.*--field x=x.json"):
            convert(source, str(tmp_path / "out"))
    convert(source, str(tmp_path / "out"), options=ConvertOptions(fields=(("x", "x.json"),)))
    assert StreamingDataset(str(tmp_path / "out"))[1]["x.json"] == [True, None]
    source = table(tmp_path / "in.parquet", x=pa.array([[1.5, 2], [None, 2]], pa.list_(pa.float32())))
    report = convert(source, str(tmp_path / "floats"))
    np.testing.assert_array_equal(StreamingDataset(str(tmp_path / "floats"))[1]["x.npy"], np.array([np.nan, 2], "f4"))
    assert report.remarks == {"column 'x': NULL among the items of a list is stored as NaN": 1}


def test_nested_lists_keep_their_type_under_an_option(tmp_path: Path) -> None:
    kind = pa.list_(pa.list_(pa.uint8(), 2))
    source = table(tmp_path / "in.parquet", x=pa.array([[[1, 2], [3, 4]], []], kind), y=[[[1]], []])
    convert(source, str(tmp_path / "out"), options=ConvertOptions(fields=(("x", "x.npy"),)))
    sample = StreamingDataset(str(tmp_path / "out"))[0]
    assert (sample["x.npy"].dtype, sample["x.npy"].tolist()) == (np.uint8, [[1, 2], [3, 4]])
    assert sample["json"] == {"y": [[1]]}, "lists of lists may be ragged"


# ------------------------------------------------------------------------------------------------ verify


def rewritten(target: Path, change: dict[str, dict[str, bytes | None]]) -> None:
    """Write the first shard again with changed fields, and an index that agrees."""
    dataset = StreamingDataset(str(target), decode=None)
    samples = {str(dataset[i]["__key__"]): dict(dataset[i]) for i in range(len(dataset))}
    members = {}
    for key, sample in samples.items():
        own = {name: value for name, value in sample.items() if not name.startswith("__")} | change.get(key, {})
        members |= {f"{key}.{name}": bytes(value) for name, value in own.items() if value is not None}
    write_tar(target / "000000.tar", members.items())
    assert run("index", "--force", target).exit_code == 0


def test_verify_knows_which_fields_each_sample_of_a_conversion_has(tmp_path: Path) -> None:
    """It said "all as the index says" of the set in which ten samples lacked their digest."""
    source = table(tmp_path / "in.parquet", md5=digests()[:50], note=[b"x", None] * 25, n=range(50))
    convert(source, str(tmp_path / "out"))
    assert run("verify", tmp_path / "out").exit_code == 0
    rewritten(tmp_path / "out", {"000000007": {"md5.bin": None, "mp3": b"\xff\xfb?"}, "000000008": {"note.bin": None}})
    result = run("verify", tmp_path / "out", "--json")
    found = [(one["kind"], one["key"], one["what"]) for one in json.loads(result.stdout)["findings"]]
    assert result.exit_code == 1
    assert found == [
        ("fields", "000000007", "the sample lacks the field 'md5.bin', which every sample of this conversion has"),
        ("fields", "000000007", "the sample has a field 'mp3', which this conversion does not make"),
    ]


@pytest.mark.parametrize("kind", ["images", "jsonl", "csv", "txt", "tokens"])
def test_every_source_says_what_fields_its_samples_have(tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"in.{kind}"
    extra: tuple[object, ...] = ()
    lost = {"images": "cls", "txt": "txt", "tokens": "tok"}.get(kind, "json")
    if kind == "images":
        for name in ("cat/a.jpg", "dog/b.jpg"):
            (source / name).parent.mkdir(parents=True)
            (source / name).write_bytes(image("JPEG"))
    else:
        content = {"csv": "a,b\n1,2\n3,4\n", "txt": "one\ntwo\n"}.get(kind, '{"text": "one"}\n{"text": "two"}\n')
        source = source.with_suffix(".jsonl") if kind == "tokens" else source
        source.write_text(content)
        extra = ("--tokenizer", "bytes") if kind == "tokens" else ()
    assert run("convert", source, tmp_path / "out", *extra).exit_code == 0
    assert run("verify", tmp_path / "out").exit_code == 0
    key = str(StreamingDataset(str(tmp_path / "out"), decode=None)[1]["__key__"])
    rewritten(tmp_path / "out", {key: {lost: None, "keeps": b"it"}})
    told = run("verify", tmp_path / "out").stdout
    assert f"lacks the field '{lost}'" in told
    assert "has a field 'keeps'" in told


def test_verify_leaves_sets_alone_that_others_have_written_since(tmp_path: Path) -> None:
    convert(table(tmp_path / "in.parquet", n=range(5)), str(tmp_path / "out"))
    with ShardWriter(str(tmp_path / "out" / "more-{:d}.tar")) as writer:
        writer.write({"__key__": "x", "txt": "mine"})
    assert run("index", tmp_path / "out").exit_code == 0
    assert run("verify", tmp_path / "out").exit_code == 0
    (tmp_path / "out" / "_shardstream" / "convert.json").write_text("{")
    assert "not a journal" in run("verify", tmp_path / "out").stdout


def test_dates_and_numbers_that_json_lacks_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Null in place of NaN came without a word, and a column of dates was an error."""
    when = [dt.datetime(2024, 1, day, 12, tzinfo=dt.UTC) for day in (1, 2, 3)]
    table = pa.table({"x": [1.5, math.nan, math.inf], "when": when, "cost": [decimal.Decimal("1.10")] * 3})
    pq.write_table(table, tmp_path / "a.parquet")
    report = convert(
        str(tmp_path / "a.parquet"), str(tmp_path / "out"), options=ConvertOptions(columns=("when", "x", "cost"))
    )
    assert report.remarks == {"NaN or infinity, which JSON does not have, is stored as null": 2}
    assert "is stored as null: 2 samples, the first from" in caplog.text
    kept = StreamingDataset(str(tmp_path / "out"), where="when >= '2024-01-02' AND x > 1 AND cost = '1.10'")
    assert [kept[0]["json"], len(kept)] == [{"x": None, "when": "2024-01-03T12:00:00+00:00", "cost": "1.10"}, 1]


STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def pages(kind: pa.DataType) -> tuple[pa.Array, dict[str, bytes]]:
    """Return a column of lists of images, as interleaved sets have them, and the fields that it becomes."""
    rows = [[image("PNG", 1), None, image("PNG", 2)], [], None, [image("PNG", 3)]]
    expected = {
        f"{row:09d}.pages.{number}.png": item
        for row, items in enumerate(rows)
        for number, item in enumerate(items or ())
        if item is not None
    }
    if pa.types.is_struct(kind):
        structs = [items and [item and {"bytes": item, "path": "a.png"} for item in items] for items in rows]
        return pa.array(structs, pa.list_(kind)), expected
    return pa.array(rows, pa.list_(pa.binary())).cast(pa.list_(kind)), expected


@pytest.mark.parametrize("kind", [STRUCT, pa.binary(), pa.large_binary()], ids=["struct", "binary", "large"])
@pytest.mark.parametrize("saved", ["parquet", "hf"])
def test_each_file_of_a_list_is_a_field(tmp_path: Path, kind: pa.DataType, saved: str) -> None:
    """A list of images could not be stored: one cure named the option that gave the other one."""
    column, expected = pages(kind)
    texts = [["a", None, "b"], ["c"], None, ["d"]]
    source = table(tmp_path / "in.parquet", pages=column, texts=texts)
    if saved == "hf":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(pa.table({"pages": column, "texts": texts})).save_to_disk(str(tmp_path / "saved"))
        source = str(tmp_path / "saved")
    out = tmp_path / "out"
    found = run("convert", source, out, "--from", saved)
    assert found.exit_code == 0, found.output
    stored = members(out)
    assert {name: body for name, body in stored.items() if name.endswith(".png")} == expected
    told = [json.loads(stored[f"{row:09d}.json"]) for row in range(4)]
    assert told == [
        {"texts": texts[0], "pages[1]": None},
        {"texts": texts[1], "pages": []},
        {"texts": None, "pages": None},
        {"texts": texts[3]},
    ]
    assert StreamingDataset(str(out))[0]["pages.2.png"].shape == (6, 8, 3)
    assert run("verify", out).exit_code == 0


def test_lists_of_images_of_a_builder_are_stored(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    feature = datasets.List if hasattr(datasets, "List") else datasets.Sequence
    features = datasets.Features({"pages": feature(datasets.Image())})
    column, expected = pages(STRUCT)
    rows = [items and [item for item in items if item] for items in column.to_pylist()]
    made = datasets.Dataset.from_dict({"pages": rows}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "rows.parquet"))
    for source, kind in ((tmp_path / "saved", "hf"), (tmp_path / "rows.parquet", "parquet")):
        found = run("convert", source, tmp_path / kind, "--from", kind)
        assert found.exit_code == 0, found.output
        stored = [body for name, body in sorted(members(tmp_path / kind).items()) if name.endswith(".png")]
        assert stored == [*expected.values()]


def test_each_cure_for_bytes_within_values_works_when_typed(tmp_path: Path) -> None:
    """Options are followed as messages name them until one works; ``--field a=json`` and ``a=jpg`` named each other."""
    struct = {"bytes": image("PNG"), "path": "a.png"}
    values = {
        "deep": [[[struct]]], "captioned": [{**struct, "caption": "x"}], "several": [{"a": b"1", "b": [b"2"]}],
        "pages": [[struct]],
    }  # fmt: skip
    for name, value in values.items():
        source = table(tmp_path / f"{name}.parquet", **{name: value}, n=[1])
        for first in ("", f"{name}=jpg", f"{name}=json", f"{name}=npy"):
            option, seen = first, set[str]()
            while option not in seen:
                seen.add(option)
                target = tmp_path / f"{name}-{first}-{len(seen)}"
                found = run("convert", source, target, *(("--field", option) if option else ()))
                if not found.exit_code:
                    break
                named = re.search(rf"--field ({name}=\S+)|try ({name}=\w+)", found.stderr)
                assert named, found.stderr
                option = (named[1] or named[2]).rstrip(";,.")
            assert not found.exit_code, (name, first, seen)
