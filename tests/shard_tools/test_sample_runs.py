"""Samples written many at once: the same bytes, the same errors at the same sample, as one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools.make.write.sample_runs import sample_run
from shard_tools.make.write.writer import UnmarkedWriter
from shard_tools.running import engine
from shard_tools.running.engine import map_sized
from streaming.errors import ShardstreamError
from streaming.shards.tar.headers import member_header, member_headers

Sample = dict[str, Any]
VALUES = st.one_of(
    st.binary(max_size=2000),
    st.sampled_from([b"", b"x" * 512, b"y" * 70_000, b"z" * 140_000, "text", 7, {"w": 1}, None]),
)
KEYS = st.one_of(
    st.sampled_from(["a/b", "A/b", "a/b ", "é" * 60, "k" * 99, "k" * 150, "f/" * 60 + "k", "a.b", "__a", ""]),
    st.integers(0, 400).map("{:04d}".format),
)
FIELDS = st.lists(st.sampled_from(["cls", "json", "txt", "seg.png", "Bad"]), min_size=1, max_size=3, unique=True)


@st.composite
def samples_alike(draw: Callable[..., Any]) -> list[Sample]:
    """Some samples with the same fields, most of them of small bytes."""
    fields = draw(FIELDS)
    count = draw(st.integers(1, 12))
    values = st.binary(max_size=900) if draw(st.booleans()) else VALUES
    first = draw(st.integers(0, 300))
    return [
        {"__key__": draw(KEYS) if draw(st.integers(0, 9)) == 0 else f"s{first + i:05d}"}
        | {field: draw(values) for field in fields}
        for i in range(count)
    ]


def written(folder: Path, write: Callable[[UnmarkedWriter], None], **options: Any) -> tuple[int, str, dict[str, bytes]]:
    """Samples that were taken, the error, and the files of a writer that is closed after it."""
    told = ""
    writer = UnmarkedWriter(f"{folder}/{{:03d}}.tar", columns={"n": len}, **options)
    try:
        write(writer)
    except ShardstreamError as error:
        told = f"{type(error).__name__}: {error}"
    writer.close()
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return writer.num_samples, told, files


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(
    st.lists(samples_alike(), max_size=6),
    st.sampled_from([1, 5_000, 100_000, 10_000_000]),
    st.sampled_from([None, 1, 7]),
)
def test_many_at_once_are_the_same_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Sample]], max_bytes: int, max_samples: int | None
) -> None:
    samples = [sample for group in groups for sample in group]
    options = {"max_bytes": max_bytes, "max_samples": max_samples}

    def one_by_one(writer: UnmarkedWriter) -> None:
        for sample in samples:
            writer.write(sample)

    found = written(tmp_path_factory.mktemp("all"), lambda writer: writer.write_all(samples), **options)
    assert found == written(tmp_path_factory.mktemp("each"), one_by_one, **options)


def test_runs_longer_than_a_chunk_have_its_sums(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i:05d}", "bin": bytes([i % 251]) * (i * 37 % 9000)} for i in range(2500)]

    def one_by_one(writer: UnmarkedWriter) -> None:
        for sample in samples:
            writer.write(sample)

    (tmp_path / "all").mkdir()
    (tmp_path / "each").mkdir()
    found = written(tmp_path / "all", lambda writer: writer.write_all(samples), max_bytes=8_000_000)
    assert found[:2] == (2500, "")
    assert found == written(tmp_path / "each", one_by_one, max_bytes=8_000_000)


def test_what_is_written_one_by_one() -> None:
    plain = [{"__key__": str(i), "bin": b"x"} for i in range(3)]
    assert sample_run(plain, []) is not None
    for odd in (
        {"__key__": "a.b", "bin": b"x"}, {"bin": b"x"}, {"__key__": 7, "bin": b"x"}, {"__key__": "a", "bin": "text"},
        {"__key__": "k" * 120, "bin": b"x"}, {"__key__": "a", "bin": bytes(128 << 10)},
    ):  # fmt: skip
        assert sample_run([*plain, odd], []) is None, odd
    assert sample_run([{"__key__": "a"}, {"__key__": "b"}], []) is None, "no field"


@given(
    st.lists(
        st.tuples(st.sampled_from(["a.jpg", "é.jpg", "n" * 100, "n" * 101, "d/" * 70 + "n"]), st.integers(0, 8**11)),
        min_size=1,
        max_size=20,
    )
)
def test_headers_made_at_once_are_those_made_alone(members: list[tuple[str, int]]) -> None:
    names, sizes = [name for name, _ in members], [size for _, size in members]
    assert member_headers(names, sizes) == [member_header(name, size) for name, size in members]


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_names_without_a_header_are_refused_among_others(name: str) -> None:
    with pytest.raises(ShardstreamError, match="tar member"):
        member_headers(["a", name], [1, 1])


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_results_come_in_order_and_before_the_error(num_threads: int) -> None:
    def half(number: int) -> float:
        return 1000 / (number - 700)

    found = []
    with pytest.raises(ZeroDivisionError):
        found.extend(map_sized(half, range(2000), lambda _: 3000, num_threads))
    assert found == [half(number) for number in range(700)]


def test_large_results_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight threads, as many are at work, or wait with results, as the bound allows."""
    monkeypatch.setattr(engine, "_AHEAD_BYTES", 30)
    monkeypatch.setattr(engine, "_RUN_BYTES", 10)
    lock, held, most = threading.Lock(), 0, 0

    def make(number: int) -> int:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)  # what is made, or being made, and not consumed
        return number

    for done in map_sized(make, range(100), lambda _: 10, 8):
        assert done >= 0
        with lock:
            held -= 1
    assert most <= 4  # three ahead, and the one that the consumer has taken
    assert list(map_sized(make, range(5), lambda _: 1000, 8)) == [*range(5)]
