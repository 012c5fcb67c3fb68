"""Faults that were found, each as it was tried: nothing here was told before schemas met."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from shard_tools import ShardWriter, optimize
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
from shard_tools.cli import cli
from shard_tools.make.tokens.run import TokenizeOptions, tokenize
from streaming import Balanced, Curriculum, DataLoader, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError, StateError
from streaming.shards.schema.meeting import met
from streaming.shards.schema.value import Schema, SchemaColumn
from tests.support.clusters.executors import Sending
from tests.support.contracts.meeting_kinds import UNCHANGED
from tests.support.sets.meanings import SCHEMA, classes_of, say, say_classes, schema_of
from tests.support.sources.conversions import tree
from tests.support.sources.foreign_sets import picture
from tests.support.tiers import first_here

FIRST, OTHER = ["a", "b", "c"], ["b", "c", "d"]


def run(*arguments: object, fails: bool = False) -> str:
    ran = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert (ran.exit_code != 0) == fails, ran.output
    return str(ran.output)


def pictures(folder: Path, classes: Sequence[str]) -> Path:
    for number, name in enumerate(classes):
        for place in range(2):
            path = folder / name / f"{folder.name}{place}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(number))
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """Two sets of pictures in folders of classes, of which two have the same names."""
    for name, classes in (("one", FIRST), ("two", OTHER)):
        run("convert", pictures(tmp_path / "from" / name, classes), tmp_path / "sets" / name)
    return tmp_path / "sets/one", tmp_path / "sets/two"


def parsed(data: bytes) -> int:
    return int(data)


def named(dataset: Any) -> list[tuple[str, str]]:
    """Return the name that each number has, and the one that it should have."""
    return [(dataset.class_names["cls"][one["cls"]], one["json"]["class"]) for one in dataset]


def test_a_list_and_a_parent_folder_are_refused_with_both_meanings(sets: tuple[Path, Path]) -> None:
    for urls in ([str(one) for one in sets], str(sets[0].parent)):
        with pytest.raises(ConfigError, match=r"0 is 'a' in .*sets/one .*, but 'b' in .*sets/two .*classes=\"union\""):
            StreamingDataset(urls)  # type: ignore[arg-type]
        union = StreamingDataset(urls, classes="union")  # type: ignore[arg-type]
        assert union.class_names["cls"] == tuple("abcd")
        assert all(one == other for one, other in named(union))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_union_are_right_and_those_of_own_numbers_are_of_each_set(
    sets: tuple[Path, Path], num_workers: int
) -> None:
    first, other = (StreamingDataset(str(one)) for one in sets)
    union = Mixture({"x": first, "y": other}, classes="union")
    with DataLoader(union, 4, num_workers=num_workers) as loader:
        for batch in loader:
            for number, note in zip(batch["cls"].tolist(), batch["json"], strict=True):
                assert union.class_names["cls"][number] == note["class"]
    own = Mixture({"x": first, "y": other}, classes="own")
    assert "cls" not in own.class_names
    names = {"x": FIRST, "y": OTHER}
    with DataLoader(own, 4, num_workers=0) as loader:
        for batch in loader:
            for number, note, source in zip(batch["cls"].tolist(), batch["json"], batch["__source__"], strict=True):
                assert names[source][number] == note["class"]


def test_functions_after_a_union_get_its_numbers(sets: tuple[Path, Path]) -> None:
    union = Mixture({"x": StreamingDataset(str(sets[0])), "y": StreamingDataset(str(sets[1]))}, classes="union")
    mapped = union.map(lambda sample: sample | {"twice": 2 * sample["cls"]})
    assert [one["twice"] for one in mapped] == [2 * one["cls"] for one in union]
    assert all(one == other for one, other in named(mapped))
    outer = Mixture({"u": union, "more": StreamingDataset(str(sets[1]))}, classes="union")
    assert outer.class_names["cls"][:3] == tuple(OTHER)  # sources in the order of their names
    assert all(one == other for one, other in named(outer))


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["reshard", "map"])
def test_what_writes_one_set_refuses_or_writes_by_name(sets: tuple[Path, Path], tmp_path: Path, verb: str) -> None:
    function = [UNCHANGED] if verb == "map" else []
    assert "--classes union" in run(verb, *sets, tmp_path / "out", *function, fails=True)
    assert not (tmp_path / "out").exists()
    run(verb, *sets, tmp_path / "out", *function, "--classes", "union")
    made = StreamingDataset(str(tmp_path / "out"))
    assert classes_of(tmp_path / "out") == list("abcd")
    assert all(one == other for one, other in named(made))
    for name in "abcd":  # the columns, too
        kept = StreamingDataset(str(tmp_path / "out"), where=f"class = '{name}'")
        assert {one["cls"] for one in kept} == {"abcd".index(name)}
        number = StreamingDataset(str(tmp_path / "out"), where=f"cls = {'abcd'.index(name)}")
        assert len(number) == len(kept)


def test_columns_of_numbers_are_not_chosen_by_across_sets(sets: tuple[Path, Path], tmp_path: Path) -> None:
    union = {"urls": [str(one) for one in sets], "classes": "union"}
    with pytest.raises(ConfigError, match=r"where: the numbers of column 'cls' mean other classes"):
        StreamingDataset(**union, where="cls = 1")  # type: ignore[arg-type]
    assert len(StreamingDataset(**union, where="class = 'b'")) == 4  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Balanced: by: the numbers of column 'cls' mean other classes"):
        Balanced(StreamingDataset(**union), by="cls")  # type: ignore[arg-type]
    told = run("reshard", *sets, tmp_path / "out", "--classes", "union", "--where", "cls = 1", fails=True)
    assert "column 'cls' mean other classes" in told


def test_a_set_below_another_one_is_numbered_as_that_one(
    sets: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run("convert", tmp_path / "from/two", sets[0] / "day2")
    assert classes_of(sets[0] / "day2") == list("abcd")
    assert "new ones, such as 'd', get the numbers from 3 on" in caplog.text
    assert all(one == other for one, other in named(StreamingDataset(str(sets[0]))))
    told = run("convert", tmp_path / "from/two", sets[0] / "day3", "--classes", "d,c,b", fails=True)
    assert "0 is 'a'" in told
    assert not (sets[0] / "day3").exists()


def test_a_set_beside_another_one_that_numbers_otherwise_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("convert", pictures(tmp_path / "one", FIRST), tmp_path / "sets/day1")
    with caplog.at_level(logging.WARNING):
        run("convert", pictures(tmp_path / "two", OTHER), tmp_path / "sets/day2")
    assert "give --classes a,b,c,d" in caplog.text
    caplog.clear()
    run("convert", tmp_path / "two", tmp_path / "sets/day2", "--overwrite", "--classes", "a,b,c,d")
    with caplog.at_level(logging.WARNING):
        run("convert", pictures(tmp_path / "part", FIRST[1:]), tmp_path / "sets/day3")
    assert f"give --classes {tmp_path}/sets/day1" in caplog.text


def token_set(folder: Path, width: str, ids: list[int]) -> Path:
    rows = pa.array([ids], pa.list_(pa.uint16() if width == "uint16" else pa.uint32()))
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"ids": rows}), folder / "in.parquet")
    options = TokenizeOptions(tokens_field="ids")
    tokenize(str(folder / "in.parquet"), str(folder / "set"), options=options)
    return folder / "set"


def test_tokens_of_two_widths_are_read_by_their_own_and_written_in_the_wider(tmp_path: Path) -> None:
    narrow, wide = [3, 1, 400], [0, 1, 69000]
    one, two = token_set(tmp_path / "one", "uint16", narrow), token_set(tmp_path / "two", "uint32", wide)
    for urls in ([str(one), str(two)], [str(two), str(one)]):
        found = sorted(sample["tok"].tolist() for sample in StreamingDataset(urls))
        assert found == sorted([narrow, wide])
    with DataLoader(StreamingDataset([str(one), str(two)]), 2, num_workers=0, jagged=("tok",)) as loader:
        assert sorted(row.tolist() for row in next(iter(loader))["tok"].rows()) == sorted([narrow, wide])
    with pytest.raises(ConfigError, match=r"Packed: field 'tok' holds tokens of two widths .*reshard"):
        Packed(StreamingDataset([str(one), str(two)]), 8)
    run("reshard", one, two, tmp_path / "all", "--key-prefix", "{number}-")
    assert schema_of(tmp_path / "all").fields["tok"].dtype == "uint32"
    assert [sample["tok"].tolist() for sample in StreamingDataset(str(tmp_path / "all"))] == [narrow, wide]
    assert Packed(StreamingDataset(str(tmp_path / "all")), 8).counts.tokens == 6
    run("column", "add", tmp_path, "num", "--compute", "tokens")
    assert len(StreamingDataset([str(one), str(two)], where="num = 3")) == 2


def test_a_state_belongs_to_what_numbers_meant(sets: tuple[Path, Path]) -> None:
    urls = [str(one) for one in sets]
    with DataLoader(StreamingDataset(urls, classes="union"), 2, num_workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    meant = pytest.raises(StateError, match=r"numbers of classes or ids of tokens meant something else")
    with DataLoader(StreamingDataset(urls, classes="own"), 2, num_workers=0) as loader, meant:
        loader.load_state_dict(state)
    with DataLoader(StreamingDataset(urls, classes="union"), 2, num_workers=0) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))


def test_a_decoder_that_cannot_be_translated_is_refused_under_a_union(sets: tuple[Path, Path]) -> None:
    urls = [str(one) for one in sets]
    for decode in ({"cls": None}, {"cls": parsed}):
        dataset = StreamingDataset(urls, classes="union", decode=decode)
        with pytest.raises(ConfigError, match="field 'cls' holds numbers of classes"):
            dataset[0]
    with pytest.raises(ConfigError, match='classes="union" translates numbers that are decoded'):
        StreamingDataset(urls, classes="union", decode=None)
    assert StreamingDataset(urls, classes="union", decode={"cls": int})[0]["cls"] in range(4)


def test_numbers_within_json_are_translated(tmp_path: Path) -> None:
    for place, names in (("one", FIRST), ("two", OTHER)):
        with ShardWriter(f"{tmp_path}/{place}/{{:d}}.tar", classes={"json:objects.label": names}) as writer:
            objects = [{"label": number, "is": name} for number, name in enumerate(names)]
            writer.write({"__key__": place, "json": {"objects": [*objects, {"is": "none"}]}})
    urls = [str(tmp_path / "one"), str(tmp_path / "two")]
    with pytest.raises(ConfigError, match=r"'json:objects\.label'"):
        StreamingDataset(urls)

    def right(dataset: StreamingDataset) -> bool:
        names = dataset.class_names["json:objects.label"]
        objects = [one for sample in dataset for one in sample["json"]["objects"] if "label" in one]
        return len(objects) == 6 and all(names[one["label"]] == one["is"] for one in objects)

    assert right(StreamingDataset(urls, classes="union"))
    run("reshard", *urls, tmp_path / "all", "--classes", "union")
    assert right(StreamingDataset(str(tmp_path / "all")))


def test_a_writer_of_its_own_directory_and_a_function_over_a_set_keep_names(tmp_path: Path) -> None:
    for start in (0, 1):
        with ShardWriter(f"{tmp_path}/set/{{:d}}.tar", classes={"cls": FIRST}, start_shard=start) as writer:
            writer.write({"__key__": f"k{start}", "cls": start, "txt": "t"})
    refused = pytest.raises(ConfigError, match=r"0 is 'a' in the set in .*, but 'b' in the shards to be written")
    with ShardWriter(f"{tmp_path}/set/{{:d}}.tar", classes={"cls": OTHER}, start_shard=2) as writer, refused:
        writer.write({"__key__": "k2", "cls": 0})
    assert classes_of(tmp_path / "set") == list(FIRST)
    for wrong in ({"cls": ["a", "a"]}, {"cls": "ab"}, {3: ["x"]}, {"cls": [1]}, ["a"]):
        with pytest.raises(ConfigError, match="classes"):
            ShardWriter(f"{tmp_path}/wrong/{{:d}}.tar", classes=wrong)  # type: ignore[arg-type]
    optimize(lambda sample: {"cls": sample["cls"]}, str(tmp_path / "set"), tmp_path / "made", workers=0, progress=False)
    assert classes_of(tmp_path / "made") == list(FIRST)


ROWS = {
    "a name": ([{"text": "a"}], [{"content": "b"}], "text"),
    "a further name": ([{"text": "a"}], [{"text": "b", "lang": "en"}], "lang"),
    "another type": ([{"text": "a", "n": 1}], [{"text": "b", "n": "1"}], "n"),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("how", ROWS)
def test_files_of_unlike_columns_are_refused_by_name_or_taken_with_a_word(
    tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, name = ROWS[how]
    if kind == "csv" and how == "another type":
        pytest.skip("a CSV has no types")
    (tmp_path / "in").mkdir()
    for place, rows in (("1", one), ("2", two)):
        path = tmp_path / "in" / f"{place}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "csv":
            path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
    told = run("convert", tmp_path / "in", tmp_path / "out", fails=True)
    assert "files of unlike columns" in told
    assert name in told
    assert f"1.{kind}" in told
    assert f"2.{kind}" in told
    with caplog.at_level(logging.WARNING):
        run("convert", tmp_path / "in", tmp_path / "out", "--unlike-columns")
    assert "--unlike-columns:" in caplog.text
    assert len(StreamingDataset(str(tmp_path / "out"))) == 2


def test_optional_keys_of_lines_are_no_contradiction(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.jsonl").write_text('{"a": 1}\n{"a": 2, "b": 3}\n')
    (tmp_path / "in/2.jsonl").write_text('{"a": 1, "b": null}\n')
    run("convert", tmp_path / "in", tmp_path / "out")


def test_sets_of_other_fields_are_mixed_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ShardWriter(f"{tmp_path}/one/{{:d}}.tar") as writer:
        writer.write({"__key__": "a", "npy": np.zeros(2, np.float32)})
    with ShardWriter(f"{tmp_path}/two/{{:d}}.tar", classes={"cls": FIRST}) as writer:
        writer.write({"__key__": "b", "cls": 1})
    mixed = Mixture({"one": StreamingDataset(f"{tmp_path}/one"), "two": StreamingDataset(f"{tmp_path}/two")})
    assert mixed.class_names == {"cls": tuple(FIRST)}
    assert caplog.text == ""


@pytest.mark.thorough
def test_other_processes_write_the_same_bytes(sets: tuple[Path, Path], tmp_path: Path) -> None:
    narrow = token_set(tmp_path / "n", "uint16", [*range(300)] * 3)  # twice as large, it takes more blocks of a tar
    wide = token_set(tmp_path / "w", "uint32", [69000])
    for name, urls, options in (
        ("tokens", [str(narrow), str(wide)], ReshardOptions(key_prefix="{number}-")),
        ("classes", [str(one) for one in sets], ReshardOptions(classes="union")),
    ):
        reshard(urls, str(tmp_path / name / "here"), options=options)
        with Sending() as executor:
            reshard(urls, str(tmp_path / name / "there"), options=options, executor=executor)
        made = tree(tmp_path / name / "here")
        assert tree(tmp_path / name / "there") == made
        assert made


def with_lifted(tmp_path: Path, kind: str) -> tuple[list[str], str]:
    """Return two sets of unlike classes with a column that was lifted from them, and its name."""
    urls = []
    for place, names in (("one", FIRST), ("two", OTHER)):
        columns: Any = {"path": ["json.label"], "named": {"lab": "json.label"}}.get(kind, [])
        with ShardWriter(
            f"{tmp_path}/{place}/{{:d}}.tar", columns=columns, classes={"json:label": names, "cls": names}
        ) as writer:
            for number, name in enumerate(names):
                writer.write({"__key__": f"{place}{number}", "cls": number, "json": {"label": number, "is": name}})
        urls.append(f"{tmp_path}/{place}")
        if kind.startswith("late"):
            run("column", "add", urls[-1], "lab", "--lift", "cls" if kind == "late field" else "json.label")
    return urls, "json.label" if kind == "path" else "lab"


LIFTED = ["path", "named", "late field", "late path"]


@pytest.mark.parametrize("kind", LIFTED)
def test_columns_lifted_from_unlike_classes_are_not_chosen_by(tmp_path: Path, kind: str) -> None:
    urls, column = with_lifted(tmp_path, kind)
    union = StreamingDataset(urls, classes="union")
    refused = f"numbers of column '{column}' mean other classes"
    with pytest.raises(ConfigError, match=refused):
        StreamingDataset(urls, classes="union", where=f"{column} = 1")
    with pytest.raises(ConfigError, match=refused):
        Balanced(union, by=column)
    with pytest.raises(ConfigError, match=refused):
        Curriculum(union, column, Schedule.root(0.25, 1.0, over=4, degree=3))
    out = tmp_path / "out"
    assert "rewritten" in run("reshard", *urls, out, "--classes", "union", "--sort", column, fails=True)
    assert refused in run("reshard", *urls, out, "--classes", "union", "--where", f"{column} = 1", fails=True)
    assert len(StreamingDataset(urls[0], where=f"{column} = 1")) == 1  # by itself, each set is plain
    assert Schema.from_bytes(schema_of(urls[0]).to_bytes(), "again") == schema_of(urls[0])


@pytest.mark.parametrize("kind", LIFTED)
@pytest.mark.parametrize("fields", [[], ["--fields", "cls"]])
@pytest.mark.parametrize("turned", first_here([True, False], 1))
def test_columns_lifted_from_classes_are_written_as_the_field_is(
    tmp_path: Path, kind: str, fields: list[str], turned: bool
) -> None:
    urls, column = with_lifted(tmp_path, kind)
    urls = urls[::-1] if turned else urls
    more = ["--columns", column] if kind.startswith("late") else []
    run("reshard", *urls, tmp_path / "out", "--classes", "union", *more, *fields)
    names = classes_of(tmp_path / "out")
    assert schema_of(tmp_path / "out").columns[column].classes == tuple(names)
    assert not schema_of(tmp_path / "out").columns[column].is_late
    for number in range(len(names)):
        chosen = StreamingDataset(str(tmp_path / "out"), where=f"{column} = {number}")
        assert {one["cls"] for one in chosen} == {number}
    assert len(names) == 4


def test_a_lifted_column_that_only_one_set_has_is_translated_too(tmp_path: Path) -> None:
    urls, column = with_lifted(tmp_path, "late field")
    run("column", "drop", urls[0], column)
    for order in (urls, urls[::-1]):
        together = met({url: schema_of(url) for url in order}, classes="union")
        assert together.unlike == {column}
        assert together.schema.columns[column].classes == together.schema.classes["cls"]


def arrays(folder: Path, *dtypes: str, samples: int = 1) -> str:
    """Write a shard of arrays of each of these types."""
    for shard, dtype in enumerate(dtypes):
        with ShardWriter(f"{folder}/{{:d}}.tar", start_shard=shard) as writer:
            for number in range(samples):
                value = np.arange(3).astype(dtype)
                writer.write({"__key__": f"{folder.name}{shard}-{number}", "vec.npy": value, "cls": number})
    return str(folder)


@pytest.mark.parametrize(("one", "other"), [("int32", "int64"), ("float32", "float64"), ("uint8", "bool")])
def test_arrays_of_two_types_are_refused_where_sets_meet(tmp_path: Path, one: str, other: str) -> None:
    urls = [arrays(tmp_path / dtype, dtype, dtype) for dtype in (one, other)]
    assert [schema_of(url).fields["vec.npy"].dtype for url in urls] == [one, other]
    with pytest.raises(ConfigError, match=rf"'vec\.npy': dtype is {one} in .*, but {other} in .*decode="):
        StreamingDataset(urls)
    assert "dtype" in run("reshard", *urls, tmp_path / "out", fails=True)
    run("reshard", urls[0], tmp_path / "again")
    assert schema_of(tmp_path / "again").fields["vec.npy"].dtype == one

    def widened(sample: dict[str, Any]) -> dict[str, Any]:
        return {"vec.npy": sample["vec.npy"].astype(other)}

    optimize(widened, urls[0], tmp_path / "made", workers=0, progress=False)
    assert schema_of(tmp_path / "made").fields["vec.npy"].dtype == other


@pytest.mark.parametrize("samples", [1, 40])
def test_nothing_is_said_of_the_type_of_arrays_where_shards_of_a_set_differ(
    tmp_path: Path, samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    alike = arrays(tmp_path / "alike", "int32", "int32", samples=samples)
    assert schema_of(alike).fields["vec.npy"].dtype == "int32"
    mixed = arrays(tmp_path / "mixed", "int32", "int64", samples=samples)
    assert schema_of(mixed).fields["vec.npy"].dtype == ""
    assert not caplog.messages
    StreamingDataset([alike, mixed])
    assert "does not say the dtype of field 'vec.npy'" in caplog.text
    with ShardWriter(f"{tmp_path}/text/{{:d}}.tar") as writer:
        writer.write({"__key__": "k", "vec.npy": b"no array", "empty.npy": b""})
    assert {one.dtype for one in schema_of(tmp_path / "text").fields.values()} == {""}


def test_arrays_of_two_types_in_one_batch_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixed = arrays(tmp_path / "mixed", "int16", "int32", samples=4)
    loader = DataLoader(StreamingDataset(mixed, shuffle=False), batch_size=8, num_workers=0)
    for _ in range(2):
        assert all(batch["vec.npy"].dtype == torch.int32 for batch in loader)
    assert caplog.text.count("field 'vec.npy': values of types int16, int32 in one batch, which become int32") == 1


def test_arrays_of_two_types_that_torch_does_not_promote_are_refused_with_a_cure_that_works(tmp_path: Path) -> None:
    mixed = arrays(tmp_path / "mixed", "int16", "uint16", samples=4)
    with pytest.raises(ConfigError, match=r"'vec\.npy'.*int16, uint16.*transform"):
        next(iter(DataLoader(StreamingDataset(mixed, shuffle=False), batch_size=8)))
    cured = StreamingDataset(mixed, shuffle=False, transform=lambda one: {"x": one["vec.npy"].astype("int32")})
    assert all(batch["x"].dtype == torch.int32 for batch in DataLoader(cured, batch_size=8))


def silent(folder: Path, how: str) -> Path:
    """Let a set say nothing of its fields."""
    (folder / SCHEMA).unlink()
    if how == "columns":
        run("column", "add", folder, "kind", "--lift", "json.class")
    elif how == "index":
        say(folder, Schema(columns={"class": SchemaColumn(type="string")}))
    return folder


SILENCE = ["", "columns", "index"]


@pytest.mark.parametrize("how", SILENCE)
@pytest.mark.parametrize("classes", ["union", "own"])
@pytest.mark.parametrize("order", first_here([(0, 1, 2), (1, 0, 2), (0, 2, 1)], 1))
def test_a_silent_set_beside_sets_that_contradict_each_other_is_refused_by_name(
    sets: tuple[Path, Path], tmp_path: Path, how: str, classes: Any, order: tuple[int, ...]
) -> None:
    run("convert", pictures(tmp_path / "from/three", "ca"), tmp_path / "sets/three", "--classes", "c,a")
    silent(sets[1], how)
    places = [str([*sets, tmp_path / "sets/three"][number]) for number in order]
    named_silent = pytest.raises(ConfigError, match=r"sets/two\)? does not say the classes of field 'cls'.*--overwrite")
    with named_silent:
        StreamingDataset(places, classes=classes)
    opened = {str(number): StreamingDataset(place) for number, place in enumerate(places)}
    with named_silent:
        Mixture(opened, classes=classes)
    texts = {name: StreamingDataset(place, fields=["json"]) for name, place in zip("abc", places, strict=True)}
    Mixture({**texts, "d": opened["0"]}, classes=classes)  # what is not read is not taken for anything
    if classes == "union":
        for verb in (["reshard"], ["map"]):
            target, function = tmp_path / f"out-{verb[0]}", [UNCHANGED] if verb == ["map"] else []
            said = run(*verb, *places, target, *function, "--classes", "union", fails=True)
            assert "sets/two does not say the classes" in said
    run("convert", tmp_path / "from/two", sets[1], "--overwrite")  # the cure
    if classes == "union":
        assert all(one == other for one, other in named(StreamingDataset(places, classes="union")))


@pytest.mark.parametrize("how", SILENCE)
def test_a_silent_set_is_named_wherever_it_meets_others(
    sets: tuple[Path, Path], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    silent(sets[1], how)
    word = "does not say the classes of field 'cls'"
    with caplog.at_level(logging.WARNING):
        StreamingDataset([str(one) for one in sets])
    assert f"sets/two {word}" in caplog.text
    run("convert", pictures(tmp_path / "from/three", "ca"), tmp_path / "sets/three", "--classes", "c,a")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run("verify", *sets, tmp_path / "sets/three", fails=True)
    assert f"sets/two {word}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run("copy", sets[1], sets[0] / "day2")
    assert f"day2 {word}" in caplog.text


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_convert_writes_anew_what_a_whole_set_means(
    sets: tuple[Path, Path], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = sets[1] / SCHEMA
    before = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(before.replace(b"b", b"x", 1))
        assert "schema.json" in run("info", sets[1], fails=True)
        for finding in (run("info", sets[1], fails=True), run("verify", sets[1], fails=True)):
            assert "convert that again" in " ".join(finding.split())
    with caplog.at_level(logging.WARNING):
        run("convert", tmp_path / "from/two", sets[1])
    assert f"schema.json is {how}: rewritten from" in caplog.text
    assert path.read_bytes() == before


def test_a_mixture_says_what_meant_something_else_when_its_state_was_saved(sets: tuple[Path, Path]) -> None:
    def mixed() -> Mixture:
        return Mixture({"x": StreamingDataset(str(sets[0]))})

    with DataLoader(mixed(), 2, num_workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    say_classes(sets[0], {"cls": "xyz"})
    meant = pytest.raises(StateError, match=r"source 'x' .*numbers of classes or ids of tokens meant something else")
    with DataLoader(mixed(), 2, num_workers=0) as loader, meant:
        loader.load_state_dict(state)
