"""A column is the same wherever it is made: exactly the values given, or an error with sample, column and cure."""

from __future__ import annotations

import datetime as dt
import enum
import json
import math
import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shard_tools import ShardWriter, optimize
from shard_tools.change.functions.mapped import map_set
from shard_tools.change.functions.run import Running
from shard_tools.cli import cli
from shard_tools.look.diff.match import differing
from shard_tools.make.write.columns import column_array, stored_value
from streaming import StreamingDataset
from streaming.errors import ConfigError
from streaming.shards.index.columns import fitting, joined_type, kept_rows, read_column, recast
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.where import parse_where
from tests.support.tiers import first_here

NAN, INF = math.nan, math.inf
PAST = 2**53 + 1  # the first whole number that no float64 is equal to
KEYS = ("a", "b", "c")
_calls: list[Any] = []  # the values that the function of --compute gives, by key


class Color(enum.IntEnum):
    RED = 3


class Word(str, enum.Enum):  # noqa: UP042  its str() is its name, not its value
    ONE = "one"


# Values of three samples, and the column that they are: its type and values, or what is said of them.
PLAIN: dict[str, tuple[Sequence[Any], str, Sequence[Any]]] = {
    "whole": ([1, None, -5], "int64", [1, None, -5]),
    "large": ([2**63 - 1, PAST, -(2**63)], "int64", [2**63 - 1, PAST, -(2**63)]),
    "unsigned": ([2**64 - 1, 0, 2**63], "uint64", [2**64 - 1, 0, 2**63]),
    "floats": ([0.1, -0.0, 1e300], "double", [0.1, -0.0, 1e300]),
    "odd floats": ([NAN, INF, -INF], "double", [NAN, INF, -INF]),
    "numbers": ([1, 2.5, None], "double", [1.0, 2.5, None]),
    "large numbers": ([2**60, 0.5, -(2**53)], "double", [2.0**60, 0.5, -(2.0**53)]),
    "text": (["", "Äpfel \U0001f34e", None], "string", ["", "Äpfel \U0001f34e", None]),
    "bools": ([True, None, False], "bool", [True, None, False]),
}
REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "past a float": ([PAST, 0.5, 1], "no float64 is equal"),
    "far past a float": ([0.5, 2**64 - 1, 1], "no float64 is equal"),
    "both signs": ([-1, 0, 2**63], "from 0 to 2^64 - 1"),
    "too large": ([2**64, 0, 1], "beyond the whole numbers"),
    "too small": ([0, -(2**63) - 1, 1], "beyond the whole numbers"),
    "numbers and text": ([1, "x", None], "whole numbers and text"),
    "numbers and bools": ([1, True, None], "whole numbers and booleans"),
    "text and floats": (["x", 0.5, None], "text and floats"),
    "half a character": (["x", "\ud83d", None], "U+D83D is half a character"),
    "a list": ([None, [1], None], "got list"),
    "an object": ([None, None, {"a": 1}], "got dict"),
}
OBJECTS: dict[str, tuple[Sequence[Any], str, Sequence[Any]]] = {  # of Python and NumPy, that JSON does not have
    "dates": ([dt.date(2026, 11, 29), None, dt.date(1, 1, 1)], "string", ["2026-11-29", None, "0001-01-01"]),
    "times": (
        [dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), dt.datetime(2026, 1, 2), dt.time(3, 4)],  # noqa: DTZ001
        "string", ["2026-01-02T03:00:00+00:00", "2026-01-02T00:00:00", "03:04:00"],
    ),
    "durations": ([dt.timedelta(seconds=1.5), None, dt.timedelta(days=-1)], "double", [1.5, None, -86400.0]),
    "decimals": ([Decimal("0.10"), None, Decimal(PAST)], "string", ["0.10", None, str(PAST)]),
    "NumPy's whole": ([np.uint64(2**63), np.int8(7), None], "uint64", [2**63, 7, None]),
    "NumPy's floats": ([np.float32(0.25), np.float16(0.5), np.float64(NAN)], "double", [0.25, 0.5, NAN]),
    "NumPy's times": (
        [np.datetime64("2026-01-02T03:04:05.000000007"), np.datetime64("NaT"), None],
        "string", ["2026-01-02T03:04:05.000000007", None, None],
    ),
    "enums": ([Color.RED, 2, None], "int64", [3, 2, None]),
    "enums of text": ([Word.ONE, "x", None], "string", ["one", "x", None]),
}  # fmt: skip


def called(sample: dict[str, Any]) -> Any:
    return _calls[KEYS.index(sample["__key__"])]


def run(*arguments: object) -> str:
    """Run a command; a refusal is raised as such, and anything else is not."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        raise ConfigError(result.stderr)
    return result.stdout


def document(value: Any) -> bytes:
    return json.dumps({"v": value}).encode()


def samples_of(values: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"__key__": key, "json": document(value)} for key, value in zip(KEYS, values, strict=True)]


def table_of(folder: Path) -> pa.Array:
    [file] = sorted((folder / "_shardstream" / "samples").glob("*.parquet"))
    columns = SampleTable.from_parquet(file.read_bytes(), file.name).columns
    [values] = columns.values()
    return values


def late_of(folder: Path) -> pa.Array:
    [file] = sorted((folder / "_shardstream" / "columns").rglob("*.parquet"))
    return read_column(file.read_bytes(), file.name)[0]


def written(folder: Path, values: Sequence[Any], **options: Any) -> str:
    with ShardWriter(f"{folder}/{{:06d}}.tar", **options) as writer:
        for sample in samples_of(values):
            writer.write(sample)
    return f"{folder}/"


def by_path(folder: Path, values: Sequence[Any]) -> pa.Array:
    written(folder, values, columns={"v": "json.v"})
    return table_of(folder)


def by_function(folder: Path, values: Sequence[Any]) -> pa.Array:
    _calls[:] = values
    written(folder, [None] * 3, columns={"v": called})
    return table_of(folder)


def lines(folder: Path, values: Sequence[Any], key: str) -> Path:
    path = folder.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({key: k, "v": v}) + "\n" for k, v in zip(KEYS, values, strict=True)))
    return path


def converted_lines(folder: Path, values: Sequence[Any]) -> pa.Array:
    run("convert", lines(folder, values, "id"), folder, "--columns", "v", "--key", "id")
    return table_of(folder)


def parquet(folder: Path, values: Sequence[Any], key: str) -> Path:
    path = folder.with_suffix(".parquet")
    kind = pa.uint64() if 2**63 in values else None
    pq.write_table(pa.table({key: list(KEYS), "v": pa.array(values, kind)}), path)
    return path


def converted_table(folder: Path, values: Sequence[Any]) -> pa.Array:
    run("convert", parquet(folder, values, "id"), folder, "--columns", "v", "--key", "id")
    return table_of(folder)


def lifted(folder: Path, values: Sequence[Any]) -> pa.Array:
    run("column", "add", written(folder, values), "v", "--lift", "json.v")
    return late_of(folder)


def indexed(folder: Path, values: Sequence[Any]) -> pa.Array:
    run("index", written(folder, values), "--columns", "json.v")
    return late_of(folder)


def computed(folder: Path, values: Sequence[Any]) -> pa.Array:
    _calls[:] = values
    run("column", "add", written(folder, [None] * 3), "v", "--compute", f"{__name__}:called")
    return late_of(folder)


def joined_lines(folder: Path, values: Sequence[Any]) -> pa.Array:
    rows = lines(folder, values, "id")
    run("column", "add", written(folder, [None] * 3), "v", "--from", rows, "--on", "id")
    return late_of(folder)


def joined_table(folder: Path, values: Sequence[Any]) -> pa.Array:
    rows = parquet(folder, values, "id")
    run("column", "add", written(folder, [None] * 3), "v", "--from", rows, "--on", "id")
    return late_of(folder)


def optimized(folder: Path, values: Sequence[Any]) -> pa.Array:
    optimize(operator.itemgetter(0), [(one,) for one in samples_of(values)], str(folder), columns=["json.v"], workers=0)
    return table_of(folder)


def resharded(folder: Path, values: Sequence[Any]) -> pa.Array:
    _calls[:] = values
    run("reshard", written(folder / "in", [None] * 3, columns={"v": called}), folder / "out")
    return table_of(folder / "out")


def mapped(folder: Path, values: Sequence[Any]) -> pa.Array:
    _calls[:] = values
    source = written(folder / "in", [None] * 3, columns={"v": called})
    map_set(source, str(folder / "out"), f"{__name__}:unchanged", running=Running(workers=0))
    return table_of(folder / "out")


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


Place = Callable[[Path, Sequence[Any]], pa.Array]
OF_JSON: tuple[Place, ...] = (by_path, converted_lines, lifted, indexed, joined_lines, optimized)
OF_FUNCTIONS: tuple[Place, ...] = (by_function, computed, resharded, mapped)
OF_TABLES: tuple[Place, ...] = (converted_table, joined_table)


def same(array: pa.Array, kind: str, values: Sequence[Any]) -> None:
    assert (str(array.type), repr(array.to_pylist())) == (kind, repr(list(values)))


@pytest.mark.parametrize("place", [*OF_JSON, *OF_FUNCTIONS, *OF_TABLES], ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", first_here(PLAIN, len(PLAIN) // 2))
def test_a_column_is_the_same_in_every_place(tmp_path: Path, place: Place, name: str) -> None:
    values, kind, expected = PLAIN[name]
    if place in OF_TABLES and name in {"numbers", "large numbers"}:
        pytest.skip("a column of Parquet has one type")
    same(place(tmp_path / "set", values), kind, expected)


@pytest.mark.parametrize("place", [*OF_JSON, by_function, computed], ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_column_holds_is_refused_in_every_place(tmp_path: Path, place: Place, name: str) -> None:
    values, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        place(tmp_path / "set", values)
    told = str(caught.value)
    assert said in told
    assert "v'" in told, "the column"
    assert any(f"'{key}'" in told for key in KEYS), "the sample"
    assert ("--compute" in told) or ("--value" in told), "the cure"
    late = place in {lifted, indexed, computed, joined_lines}
    assert not [*tmp_path.rglob("column.json" if late else "*.tar")], "nothing is left that readers would take"


@pytest.mark.parametrize("place", [by_function, computed], ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_become_plain_values(tmp_path: Path, place: Place, name: str) -> None:
    values, kind, expected = OBJECTS[name]
    same(place(tmp_path / "set", values), kind, expected)


@pytest.mark.parametrize("place", OF_TABLES, ids=lambda place: place.__name__)
@pytest.mark.parametrize(
    ("array", "kind", "expected"),
    [
        (pa.array([1, None, -3], pa.int8()), "int64", [1, None, -3]),
        (pa.array([1, 2, 3], pa.uint64()), "int64", [1, 2, 3]),
        (pa.array([0.5, None, NAN], pa.float32()), "double", [0.5, None, NAN]),
        (pa.array([np.float16(0.5), None, np.float16(-0.0)], pa.float16()), "double", [0.5, None, -0.0]),
        (pa.array(["x", None, ""], pa.large_string()), "string", ["x", None, ""]),
        (pa.array(["x", "x", None]).dictionary_encode(), "string", ["x", "x", None]),
        (pa.array([0, None, 1], pa.date32()), "string", ["1970-01-01", None, "1970-01-02"]),
        (pa.array([7, None, 10**9], pa.timestamp("ns")), "string",
         ["1970-01-01T00:00:00.000000007", None, "1970-01-01T00:00:01"]),
        (pa.array([1500, None, 0], pa.duration("ms")), "double", [1.5, None, 0.0]),
        (pa.array([Decimal("0.10"), None, Decimal("-2.00")], pa.decimal128(9, 2)), "string", ["0.10", None, "-2.00"]),
    ],
    ids=lambda one: str(one.type) if isinstance(one, pa.Array) else "",
)  # fmt: skip
def test_columns_of_tables_become_plain_values(
    tmp_path: Path, place: Place, array: pa.Array, kind: str, expected: Sequence[Any]
) -> None:
    same(place(tmp_path / "set", array), kind, expected)


def test_files_of_several_types_are_one_column_or_refused(tmp_path: Path) -> None:
    """Whole numbers beyond 2^53 became floats, and a condition found the row of another one."""
    data = written(tmp_path / "set", [None] * 3)
    for name, first in (("exact", 2**60), ("rounded", PAST)):
        folder = tmp_path / name
        folder.mkdir()
        pq.write_table(pa.table({"id": ["a"], "v": [first]}), folder / "0.parquet")
        pq.write_table(pa.table({"id": ["b"], "v": [0.5]}), folder / "1.parquet")
    run("column", "add", data, "v", "--from", tmp_path / "exact", "--on", "id")
    same(late_of(tmp_path / "set"), "double", [2.0**60, 0.5, None])
    with pytest.raises(ConfigError, match=rf"column 'v', key 'a': {PAST} is no double.*--value"):
        run("column", "add", data, "w", "--from", tmp_path / "rounded", "--on", "id")


@pytest.mark.parametrize(
    ("texts", "kind", "expected"),
    [
        ([str(2**64 - 1), "", "7"], "uint64", [2**64 - 1, None, 7]),
        ([str(PAST), "0.5", ""], "string", [str(PAST), "0.5", None]),
        ([str(2**60), "0.5", ""], "double", [2.0**60, 0.5, None]),
        ([str(2**64), "", "-1"], "double", [2.0**64, None, -1.0]),
        ([str(2**64 + 1), "", "-1"], "string", [str(2**64 + 1), None, "-1"]),
    ],
)
def test_text_tables_keep_their_whole_numbers(
    tmp_path: Path, texts: list[str], kind: str, expected: Sequence[Any]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("id,v\n" + "".join(f"{key},{text}\n" for key, text in zip(KEYS, texts, strict=True)))
    run("column", "add", written(tmp_path / "set", [None] * 3), "v", "--from", rows, "--on", "id")
    same(late_of(tmp_path / "set"), kind, expected)


def test_shards_of_one_writer_hold_one_kind(tmp_path: Path) -> None:
    """Numbers of two types stay what they are in each shard; text beside numbers of an earlier shard is refused."""
    values = [PAST, 0.5, None]
    folder = tmp_path / "numbers"
    data = written(folder, values, columns={"v": "json.v"}, max_samples=1)
    found = [
        SampleTable.from_parquet(file.read_bytes(), "").columns["v"]
        for file in sorted(folder.rglob("*.parquet"))
        if file.parent.name == "samples"
    ]
    assert [(str(one.type), one.to_pylist()) for one in found] == [
        ("int64", [PAST]),
        ("double", [0.5]),
        ("null", [None]),
    ]
    for condition, expected in ((f"v = {PAST}", ["a"]), (f"v = {PAST - 1}", []), (f"v > {PAST - 1}.0", ["a"])):
        if expected:
            assert [one["__key__"] for one in StreamingDataset(data, where=condition)] == expected
        else:
            with pytest.raises(ConfigError, match="keeps none"):
                len(StreamingDataset(data, where=condition))
    with pytest.raises(ConfigError, match=r"000000\.tar holds int64, 000002\.tar string; .*one kind"):
        written(tmp_path / "mixed", [1, None, "x"], columns={"v": "json.v"}, max_samples=1)


# ------------------------------------------------------------------------------------------------------ properties

whole = st.one_of(
    st.integers(-5, 5),
    st.integers(-(2**65), 2**65),
    st.sampled_from([2**53, PAST, 2**63, 2**63 - 1, -(2**63), 2**64 - 1]),
)
real = st.one_of(st.floats(), st.sampled_from([-0.0, 2.0**53, 2.0**63, 2.0**64, -(2.0**63)]), whole.map(float))
value = st.one_of(st.none(), st.booleans(), whole, real, st.text(st.characters(), max_size=3))
OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def made(values: Sequence[Any]) -> pa.Array | None:
    try:
        return column_array(
            [stored_value(one) for one in values], "v", "0.tar", lambda: [*map(str, range(len(values)))]
        )
    except (ConfigError, ValueError):
        return None


@given(values=st.one_of(st.lists(value, max_size=4), st.lists(whole | real, max_size=4), st.lists(whole, max_size=4)))
def test_a_column_holds_exactly_what_was_given(values: list[Any]) -> None:
    array = made(values)
    again = made(values[::-1])
    assert (array is None) == (again is None), "whatever the order"
    if array is None:
        return
    assert str(array.type) in {"null", "bool", "int64", "uint64", "double", "string"}
    for given_value, stored in zip(values, array.to_pylist(), strict=True):
        assert stored == given_value or (given_value != given_value and math.isnan(stored))
        if isinstance(given_value, float):
            assert math.copysign(1, stored) == math.copysign(1, given_value)
        assert isinstance(stored, bool) == isinstance(given_value, bool)


@given(parts=st.lists(st.lists(value, min_size=1, max_size=3), max_size=3))
def test_types_join_in_any_order_and_grouping(parts: list[list[Any]]) -> None:
    arrays = [one for one in map(made, parts) if one is not None]
    types = [one.type for one in arrays]
    whole_type = joined_type(types)
    assert joined_type(types[::-1]) == whole_type == joined_type(types * 2)
    rest = joined_type(types[1:])
    if types and rest is not None:
        assert joined_type([types[0], rest]) == whole_type
    for array in arrays if whole_type is not None else ():
        kept = recast(array, whole_type)
        if kept is not None:
            assert not differing(kept, array).any()


@given(
    numbers=st.lists(st.one_of(st.none(), whole.filter(lambda one: -(2**63) <= one < 2**64)), min_size=1, max_size=4),
    floats=st.lists(st.none() | real, min_size=4, max_size=4),
    sign=st.sampled_from([*OPERATORS]),
)
def test_numbers_compare_by_their_exact_values(
    numbers: list[int | None], floats: list[float | None], sign: str
) -> None:
    """Python compares whole numbers and floats so; Arrow rounds the whole ones first."""
    array = made(numbers)
    if array is None:
        return
    pairs = list(zip(numbers, floats, strict=False))
    columns = {"n": array, "x": pa.array([x for _, x in pairs], pa.float64())}

    def kept(condition: str) -> list[bool]:
        return kept_rows(fitting(parse_where(condition), columns, len(pairs)), len(pairs)).tolist()

    there = [n is not None and x is not None for n, x in pairs]
    answers = [ok and OPERATORS[sign](n, x) for ok, (n, x) in zip(there, pairs, strict=True)]
    assert kept(f"n {sign} x") == answers
    assert kept(f"NOT n {sign} x") == [ok and not one for ok, one in zip(there, answers, strict=True)]
    for n in (one for one in numbers if one is not None):
        for name, column in (("n", numbers), ("x", [x for _, x in pairs])):
            expected = [one is not None and OPERATORS[sign](one, n) for one in column]
            assert kept(f"{name} {sign} {n}") == expected
            if name == "n" or float(n) == n:
                assert kept(f"{name} {sign} {n}.0") == expected
        half = Decimal(f"{n}.5")  # Python compares whole numbers with decimals exactly, too
        expected = [one is not None and OPERATORS[sign](one, half) for one in numbers]
        assert kept(f"n {sign} {half}") == expected
    unlike = differing(columns["n"], columns["x"]).tolist()
    assert unlike == [(n is None) != (x is None) or (n is not None and x is not None and n != x) for n, x in pairs]
