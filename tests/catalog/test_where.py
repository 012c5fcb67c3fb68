"""Conditions: what SQLite selects, we select; what is no condition says so; nothing is run."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.shards.index.columns import fitting, kept_rows, names_of, sample_columns, stable_hash
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.where import as_where, parse_where

Rows = Sequence[dict[str, Any]]
KINDS = {"n": pa.int64(), "x": pa.float64(), "t": pa.string(), "b": pa.bool_(), "json.w": pa.int64(),
         "u": pa.uint64()}  # fmt: skip


def table(rows: Rows) -> SampleTable:
    count = len(rows)
    return SampleTable.build(
        name="0.tar",
        size_bytes=count * 1024 + 1024,
        keys=[f"k{i}" for i in range(count)],
        record_starts=np.arange(count + 1) * 1024,
        fields={},
        chunk_bounds=np.array([0, count]),
        crc32c=[0],
        columns={name: pa.array([row.get(name) for row in rows], kind) for name, kind in KINDS.items()},
    )


def selected(text: str, rows: Rows) -> list[int]:
    where = parse_where(text)
    bits = fitting(where, sample_columns(table(rows), [*KINDS, "__key__"]), len(rows))
    return np.flatnonzero(kept_rows(bits, len(rows))).tolist()


ROWS: Rows = [
    {"n": 1, "x": 0.5, "t": "a", "b": True, "json.w": 7},
    {"n": 2, "x": -1.5, "t": "it's", "b": False, "u": 5},
    {"n": None, "x": None, "t": None, "b": None},
    {"n": 2**53 + 1, "x": float("nan"), "t": "A%_\n", "b": True},
    {"n": -5, "x": 2, "t": "", "b": None},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n >= 2", [1, 3]),
        ("n = 9007199254740993", [3]),  # not 9007199254740992.0
        ("n = 9007199254740992", []),
        ("n < 99999999999999999999999", [0, 1, 3, 4]),
        ("2 > n", [0, 4]),
        ("n > -5 and not n > 1", [0]),
        ("NOT (n > 1 OR t = 'a')", [4]),
        ("x = x", [0, 1, 4]),
        ("x != x", [3]),
        ("x > n", [4]),
        ("t = 'it''s' or t = 'a'", [0, 1]),
        ("t in ('a', '') and n in (1, 2, -5)", [0, 4]),
        ("t not in ('a', '')", [1, 3]),
        ("n between -5 and 1", [0, 4]),
        ("n not between -5 and 1", [1, 3]),
        ("t like 'a'", [0]),
        ("t like '%'", [0, 1, 3, 4]),
        ("t like '_%'", [0, 1, 3]),
        ("t like 'A%'", [3]),
        ("t like 'A\\%_%'", []),  # a backslash is one
        ("t like '___' or t not like '%s%'", [0, 3, 4]),
        ("t < 'b' and t >= 'a'", [0]),
        ("b", [0, 3]),
        ("not b", [1]),
        ("b = false or b is null", [1, 2, 4]),
        ("n is not null and x is null or t is null", [2]),
        ('"json.w" = 7', [0]),
        ("json.w is null", [1, 2, 3, 4]),
        ("__key__ in ('k1', 'k3')", [1, 3]),
        ("1 = 1", [0, 1, 2, 3, 4]),
        ("1e0 = 2", []),
        ("n <> 1 AND n == n", [1, 3, 4]),
    ],
)
def test_what_is_selected(text: str, expected: list[int]) -> None:
    assert selected(text, ROWS) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a column"),
        ("n >", "expected a column"),
        ("n", "alone is not a condition"),
        ("1", "alone is not a condition"),
        ("n = 'a'", r"column 'n' \(number\) = 'a' \(text\)"),
        ("t < 3", r"\(text\) < 3 \(number\)"),
        ("b > true", "only take = and !="),
        ("n like 'a'", "LIKE is for text"),
        ("n = null", "IS NULL"),
        ("n in ()", "expected a column"),
        ("n in (1", r"expected \)"),
        ("(n = 1", r"expected \)"),
        ("n = 1 n", "expected AND, OR or the end"),
        ("n not 1", "IN, BETWEEN or LIKE"),
        ("n = 1; drop table x", "not understood"),
        ('n = "a" or t = \'b', "not understood"),
        ("12abc = 1", "not understood"),
        ("__import__('os').system('x')", "not understood"),
        ("__import__('os') = 1", "no function '__import__'; there are hash, length"),
        ("hash('a') = 1", "takes the name of a column"),
        ("leng(t) = 1", r"did you mean 'length'\?"),
        ("length(n) = 1", r"length\(\) is for text, not for column 'n' \(number\)"),
        ("t + 1 = 2", r"\+ is for numbers, not for column 't' \(text\), at character 1"),
        ("n = 1 and (n + x)", r"column 'n' \+ column 'x' \(number\) alone is not a condition.*at character 12"),
        ("n * 9223372036854775807 * 10 = 1", "overflow"),
        ("n in (1, 'a')", r"column 'n' \(number\) = 'a' \(text\)"),
        ("n " + "+ 1 " * 60 + "= 1", "more than 50 signs"),
        ("gone = 1", "no column 'gone'.*there are:"),
        ("jsonw = 1", "no column 'jsonw' .did you mean 'json.w'.*there are: __key__, b, json.w, n, t, u, x"),
        ("1 < n < 3", "expected AND, OR or the end, at character 7"),
        ("not " * 60 + "b", "more than 50 levels"),
        ("(" * 60, "more than 50 levels"),
        ("b or " * 5000 + "b", "at most 10000 characters"),
    ],
)
def test_what_is_no_condition(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)where: .*{problem}"):
        selected(text, ROWS)


def test_the_message_shows_where() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_where("n = 1 and ?")
    assert str(caught.value).endswith("at character 11:\n  n = 1 and ?\n            ^")


def test_a_column_without_values_fits_nothing() -> None:
    rows: Rows = [{"n": 1}, {"n": 2}]
    for text in ("t = 'a'", "t = 3", "not t = 'a'", "t like '%'", "b", "t in ('a')"):
        assert selected(text, rows) == []
    assert selected("t is null and n = 2", rows) == [1]


def test_bits_are_those_of_the_rows_alone() -> None:
    values = [number % 3 == 0 for number in range(40)]
    for start, stop in pairwise((0, 3, 8, 11, 27, 40)):
        found = fitting(parse_where("b"), {"b": pa.array(values)[start:stop]}, stop - start)
        assert found.tolist() == np.packbits(values[start:stop], bitorder="little").tolist()


def test_condition_over_no_rows_selects_none() -> None:
    where = parse_where("1 = 1 or n > 3 and t like 'a' and b is null or hash(t) % 3 = length(t)")
    columns = {name: pa.array([], kind) for name, kind in KINDS.items()}
    assert fitting(where, columns, 0).shape == (0,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n + 1 >= 3", [1, 3]),
        ("-n = 5 or - -n = 1", [0, 4]),
        ("n / 2 = 0", [0]),  # integers divide to integers
        ("n / 2.0 = 0.5", [0]),
        ("n / 0 is null and n is not null", [0, 1, 3, 4]),
        ("x / 0 is null and x % 0 is null and x is not null", [0, 1, 3, 4]),
        ("n % 3 = -2", [4]),  # the sign of the first, as in SQL
        ("x % 1 = 0.5", [0]),
        ("x % 1 = -0.5", [1]),
        ("n - n + 9223372036854775807 < 9223372036854775808", [0, 1, 3, 4]),  # as floats they are one
        ("x * 0 in (0.0, 7.5)", [0, 1, 4]),  # -0.0 is 0.0
        ("(n + 1) * 2 = 4 and not (n > 1)", [0]),
        ("n*2-1=3", [1]),
        ("length(t) = 4", [1, 3]),
        ("n between length(t) and length(t) + 1", [0]),
        ("t like 'A%' and t like '%_' and t not like 'A%_'", []),
        ("(n > 1) = b", [3]),
        ("hash(t) >= 0", [0, 1, 3, 4]),
        ("hash(json.w) is null", [1, 2, 3, 4]),
        ("u / 2.0 = 2.5 and u * 0.5 > 2", [1]),  # unsigned, by a float
        ("u / 2 = 2 and 1 - u < 0", [1]),
        ("n > x", [0, 1]),  # what is NaN compares with nothing
    ],
)
def test_arithmetic_follows_sql(text: str, expected: list[int]) -> None:
    assert selected(text, ROWS) == expected


def test_an_expression_of_pyarrow() -> None:
    where = as_where((pc.field("n") > 1) & pc.field("t").isin(["it's", "zz"]))
    assert where is not None
    types = sample_columns(table(ROWS), list(KINDS))
    assert names_of(where, lambda name: types[name].type) == {"n", "t"}
    assert np.flatnonzero(kept_rows(fitting(where, types, 5), 5)).tolist() == [1]
    for odd in (pc.field("n") + 1, pc.field("n") > "a"):
        with pytest.raises(ConfigError, match="where: "):
            fitting(as_where(odd), types, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a condition such as"):
        as_where(3)


def test_the_same_condition_is_the_same_text() -> None:
    texts = ["n>=1  and(t = 'a  b' or not  b)", "n >= 1 AND ( t = 'a  b' OR NOT b )"]
    assert parse_where(texts[0]).text == parse_where(texts[1]).text == texts[1]
    assert parse_where(texts[1].replace("a  b", "a b")).text != texts[1]


def test_numbers_that_are_equal_hash_alike() -> None:
    hashes = [stable_hash(pa.array(one)).to_pylist() for one in ([0, 7], [0.0, 7.0], [-0.0, 7.0], [False])]
    assert hashes[0] == hashes[1] == hashes[2]
    assert hashes[3] == hashes[0][:1]
    texts = pa.array([f"{number}" for number in range(20_000)])  # more than are hashed at once
    parts = [stable_hash(texts[first : first + 5000]).to_pylist() for first in range(0, 20_000, 5000)]
    assert stable_hash(texts).to_pylist() == [one for part in parts for one in part]


def test_hash_is_that_of_its_description() -> None:
    """The formula of ``stable_hash`` in plain integers; and numbers that no release may change."""

    def mix(x: int) -> int:
        z = (x + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    def of_text(text: str) -> int:
        data = text.encode()
        h = mix(len(data))
        for at in range(0, len(data), 8):
            h = mix(h ^ int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little"))
        return h >> 1

    texts = ["", "a", "shardstream", "12345678", "123456789", "Äpfel\0", "x" * 100, None]
    expected = [None if text is None else of_text(text) for text in texts]
    for kind in (pa.string(), pa.large_string()):
        assert stable_hash(pa.array(["zz", *texts], kind)[1:]).to_pylist() == expected
    assert stable_hash(pa.array(texts * 50)).to_pylist() == expected * 50  # few values among many rows
    numbers = [0, 1, -1, 2**63 - 1, None]
    expected = [None if one is None else mix(one % 2**64) >> 1 for one in numbers]
    assert stable_hash(pa.array(numbers, pa.int64())).to_pylist() == expected
    assert stable_hash(pa.array([0.0, 1.0, -1.0], pa.float64())).to_pylist() == expected[:3]
    assert stable_hash(pa.array([False, True])).to_pylist() == expected[:2]
    assert stable_hash(pa.array([0.5])).to_pylist() == [mix(0x3FE0000000000000) >> 1]
    assert stable_hash(pa.array(["shardstream", "a"])).to_pylist() == GOLDEN_HASHES


GOLDEN_HASHES = [3820565744143051492, 3387040954141595551]


# ---------------------------------------------------------------------------------------------- against SQLite

numbers = st.sampled_from(["n", "x", "1", "-2", "0.5", "3"])
texts = st.sampled_from(["t", "'a'", "'B'", "''", "'ab'"])
signs = st.sampled_from(["=", "!=", "<>", "<", "<=", ">", ">="])
negation = st.sampled_from(["", "not "])
predicates = st.one_of(
    st.builds("{} {} {}".format, numbers, signs, numbers),
    st.builds("{} {} {}".format, texts, signs, texts),
    st.builds("{} {}in (1, 2.5, -2)".format, st.sampled_from(["n", "x"]), negation),
    st.builds("t {}in ('a', 'ab')".format, negation),
    st.builds("n {}between -2 and 1".format, negation),
    st.builds("t {}like {}".format, negation, st.sampled_from(["'%'", "'a%'", "'_'", "'%b'", "''"])),
    st.builds("{} is {}null".format, st.sampled_from(["n", "x", "t", "b"]), negation),
    st.builds("n {} {} {} {}".format, st.sampled_from("+-*/%"), st.integers(-2, 2), signs, st.integers(-4, 4)),
    st.builds("(x + {}) * n {} {}".format, st.integers(-2, 2), signs, st.sampled_from(["1.5", "-3", "n"])),
    st.builds("length(t) {} {}".format, signs, st.sampled_from(["1", "n", "2 - n"])),
    st.just("b"),
)
conditions = st.recursive(
    predicates,
    lambda inner: st.one_of(
        st.builds("not ({})".format, inner),
        st.builds("({}) and ({})".format, inner, inner),
        st.builds("({}) or ({})".format, inner, inner),
        st.builds("{} or {} and {}".format, predicates, predicates, predicates),
    ),
    max_leaves=8,
)
row = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-3, 3),
        "x": st.none() | st.sampled_from([-2.0, 0.5, 2.5]),
        "t": st.none() | st.sampled_from(["", "a", "ab", "B"]),
        "b": st.none() | st.booleans(),
    }
)


@given(text=conditions, rows=st.lists(row, min_size=1, max_size=12))
@settings(deadline=None)
def test_what_sqlite_selects(text: str, rows: list[dict[str, Any]]) -> None:
    with sqlite3.connect(":memory:") as connection:
        connection.execute("pragma case_sensitive_like = on")
        connection.execute("create table s (number, n, x, t, b)")
        values = [(i, one["n"], one["x"], one["t"], one["b"]) for i, one in enumerate(rows)]
        connection.executemany("insert into s values (?, ?, ?, ?, ?)", values)
        expected = [number for (number,) in connection.execute(f"select number from s where {text} order by number")]
    connection.close()
    assert selected(text, rows) == expected


@given(st.text(max_size=60) | st.text("()'\"nt<>=!,.%_ 019eandorti", max_size=40))
def test_any_text_is_a_condition_or_an_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        selected(text, ROWS)


# --- texts that are stored once each ---

TEXTS = st.lists(
    st.none() | st.sampled_from(["", "a", "ab", "de", "en", "ein langer Text über zwei Wörter"]), min_size=1
)
CONDITIONS = (
    "lang = 'en'", "lang != 'en' OR lang IS NULL", "NOT lang LIKE 'e%'", "lang IN ('de', 'ab')", "length(lang) > 1",
    "hash(lang) % 3 = 1", "n >= 2 AND lang = 'en'", "lang = 'en' AND hash(lang) % 2 = 0 AND n % 2 = 0",
    "n > 1 AND lang IS NOT NULL OR hash(lang) % 5 = 0", "lang = other", "hash(lang) % 2 = hash(n) % 2 AND other > 'a'",
    "NOT (lang = 'en' AND n > 1) AND lang < 'f'", "lang >= 'b' AND lang <= 'e' AND lang BETWEEN 'a' AND 'dz'",
)  # fmt: skip


@settings(deadline=None)
@given(texts=TEXTS, condition=st.sampled_from(CONDITIONS))
def test_dictionaries_and_parts_say_the_same(texts: list[str | None], condition: str) -> None:
    where = parse_where(condition)
    plain = {
        "lang": pa.array(texts, pa.string()),
        "other": pa.array(texts[::-1], pa.string()),
        "n": pa.array(range(len(texts))),
    }
    coded = {**plain, "lang": plain["lang"].dictionary_encode(), "other": plain["other"].dictionary_encode()}
    whole = fitting(replace(where, parts=()), plain, len(texts))
    for columns in (plain, coded):
        assert fitting(where, columns, len(texts)).tolist() == whole.tolist()


def test_conditions_that_and_joins_are_parts(tmp_path: Path) -> None:
    where = parse_where("a = 1 AND hash(b) % 2 = 0 AND (c = 1 OR b = 'x')")
    assert [sorted(part.names or ()) for part in where.parts] == [["a"], ["b"], ["b", "c"]]
    assert [sorted(part.compared or ()) for part in where.parts] == [["a"], [], ["b", "c"]]
    assert (where.names, where.hashed, where.compared) == ({"a", "b", "c"}, {"b"}, {"a", "b", "c"})
    assert parse_where("a = 1 AND b = 1 OR c = 1").parts == ()
    assert [part.names for part in where.also(parse_where("d = 1")).parts][-1] == {"d"}
    # Row groups of a file have dictionaries of their own.
    texts = pa.array(["x", "y"] * 3 + ["y", "z"] * 3)
    path = tmp_path / "groups.parquet"
    pq.write_table(pa.table({"b": texts}), path, row_group_size=6)
    column = pq.ParquetFile(path, read_dictionary=["b"]).read().column("b").combine_chunks()
    assert kept_rows(fitting(parse_where("b = 'y'"), {"b": column}, 12), 12).tolist() == [
        t == "y" for t in texts.to_pylist()
    ]


@settings(deadline=None)
@given(length=st.integers(1, 40), count=st.integers(1, 5))
def test_texts_of_one_length_hash_as_all_others(length: int, count: int) -> None:
    texts = [("xyzäöü" * 20)[at : at + length] for at in range(count)]
    alone = [stable_hash(pa.array([text, text + "!"]))[0].as_py() for text in texts]
    assert stable_hash(pa.array(texts)).to_pylist() == alone
    assert stable_hash(pa.array(["", *texts])[1:]).to_pylist() == alone
