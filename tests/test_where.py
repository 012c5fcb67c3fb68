"""Conditions: what SQLite selects, we select; what is no condition says so; nothing is run."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.index.columns import where_columns
from streaming.index.sample_table import SampleTable
from streaming.index.where import parse_where

Rows = Sequence[dict[str, Any]]
KINDS = {"n": pa.int64(), "x": pa.float64(), "t": pa.string(), "b": pa.bool_(), "json.w": pa.int64()}


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
    return np.flatnonzero(where.mask(where_columns(table(rows), where.names), len(rows))).tolist()


ROWS: Rows = [
    {"n": 1, "x": 0.5, "t": "a", "b": True, "json.w": 7},
    {"n": 2, "x": -1.5, "t": "it's", "b": False},
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
        ("n", "alone is no condition"),
        ("1", "expected a comparison"),
        ("n = 'a'", r"column 'n' \(number\) = 'a' \(text\)"),
        ("t < 3", r"\(text\) < 3 \(number\)"),
        ("b > true", "know = and != only"),
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
        ("__import__('os') = 1", "alone is no condition|expected AND, OR or the end"),
        ("gone = 1", "no column 'gone'.*there are:"),
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


def test_no_rows() -> None:
    where = parse_where("1 = 1 or n > 3 and t like 'a' and b is null")
    columns = where_columns(table(ROWS), where.names)
    empty = {
        name: type(one)(kind=one.kind, values=one.values[:0], valid=one.valid[:0]) for name, one in columns.items()
    }
    assert where.mask(empty, 0).shape == (0,)


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
@settings(max_examples=300, deadline=None)
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
