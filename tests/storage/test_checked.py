"""``Checked``: nothing but a comparison makes one, and every way from a store to a sample goes through one."""

from __future__ import annotations

import ast
import pickle
import random
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crc32c
import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.errors import ChecksumError
from streaming.run.engine.memory import mapped
from streaming.run.engine.memory.chunk_store import ChunkStore
from streaming.run.engine.memory.lent import ViewLeases
from streaming.run.engine.memory.mapped import FileMaps, NoMaps
from streaming.run.engine.source import Source
from streaming.sets.sources.own import CustomSource
from streaming.shards.cache import NodeCache, entry
from streaming.shards.catalog.joined import JoinedSource
from streaming.shards.catalog.packed import PackedSource
from streaming.shards.catalog.random_access import Readable
from streaming.shards.catalog.source import ChunkSource
from streaming.shards.fetch import read
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.storage import Checked, DifferentSumError
from streaming.storage.base import checked as checked_module
from tests.support.code.source_tree import modules, nodes, report
from tests.support.contracts.own_kinds import DictSource

DATA = random.Random(3).randbytes(1000)
VIEW = memoryview(DATA)


def crc(*parts: memoryview) -> int:
    return crc32c.crc32c(b"".join(parts))


# --- the type


def test_there_is_none_without_a_comparison() -> None:
    made = Checked.comparing(10, ())
    for make in (
        lambda: Checked(),  # type: ignore[call-arg]  # noqa: PLW0108  what mypy says of it
        lambda: Checked(None),  # type: ignore[arg-type]
        lambda: Checked(SimpleNamespace(num_bytes=1, crc32c=None, is_summed=True)),  # type: ignore[arg-type]
        lambda: pickle.loads(pickle.dumps(made)),
    ):
        with pytest.raises((TypeError, pickle.PicklingError)):
            make()


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([], (None, False)),
        ([((VIEW,), crc(VIEW))], (crc(VIEW), True)),
        ([((VIEW[:300], VIEW[300:]), crc(VIEW))], (crc(VIEW), True)),
        ([((VIEW[:300],), crc(VIEW[:300])), ((VIEW[300:],), crc(VIEW[300:]))], (None, True)),
        ([((VIEW[:300], VIEW[500:]), crc(VIEW[:300], VIEW[500:]))], (None, False)),
    ],
    ids=["none", "one", "apart", "two", "gap"],
)
def test_what_it_says(sums: list[Any], expected: tuple[int | None, bool]) -> None:
    found = Checked.comparing(len(VIEW), sums)
    assert (found.num_bytes, found.crc32c, found.is_summed) == (len(VIEW), *expected)
    for number in range(len(sums)):
        wrong = [(parts, total ^ (place == number)) for place, (parts, total) in enumerate(sums)]
        with pytest.raises(DifferentSumError) as caught:
            Checked.comparing(len(VIEW), wrong)
        assert (caught.value.number, caught.value.got) == (number, sums[number][1])


def test_bytes_that_differ_are_named_or_not_fetched() -> None:
    layout = UnitLayout(
        keys=["a"], fields=(), starts=typing.cast("Any", None), sizes=typing.cast("Any", None), num_bytes=0
    )
    with pytest.raises(AssertionError, match="no sample is named"):
        Fetched(checked=None, found=layout)
    with pytest.raises(AssertionError, match="no sample is named"):
        Fetched(checked=None, found=lambda _: layout)


# --- the ways: who takes and gives bytes of a store

FETCH: tuple[Any, ...] = (
    Source.fetch_unit, ChunkSource.fetch_unit, JoinedSource.fetch_unit, PackedSource.fetch_unit,
    CustomSource.fetch_unit, Readable.fetch_unit, read.fetch_unit, ChunkStore._fetched,
)  # fmt: skip
"""Return what they fetched, each with its statement."""
GIVE: tuple[Any, ...] = (FileMaps.map, NoMaps.map, NodeCache.read_into, NodeCache._load, entry.read_entry,
                         read._Read.into, read.fill_checked, read.checked_range)  # fmt: skip
"""Return the statement alone."""
TAKE: tuple[Any, ...] = (ViewLeases.add, ViewLeases._mend, NodeCache._store)
"""Keep or give away bytes, and take the statement with them."""


def test_signatures_hold_it() -> None:
    """Whatever puts bytes of a store where samples come from; mypy --strict does the rest."""
    for function in FETCH:
        assert hint(function)["return"] == "Fetched", function
    for function in GIVE:
        assert "Checked" in hint(function)["return"], function
    for function in TAKE:
        assert any("Checked" in text for name, text in hint(function).items() if name != "return"), function
    for function in (ChunkStore.__init__, ViewLeases.__init__):
        assert "Fetch" in hint(function)["fetch"]
    assert "Checked]" in hint(NodeCache.read_into)["fetch"]


def hint(function: Any) -> dict[str, str]:
    return dict(function.__annotations__)


PARSERS = {"from_parquet", "from_bytes", "read_note", "read_document", "read_column", "read_sample_columns",
           "read_facts", "chunk_rows_from_footer", "columns_from_footer", "read_footer"}  # fmt: skip
READS = {"read", "read_into"}
READS_INTO = {
    "streaming.shards.fetch.read": "compared with the index",
    "streaming.shards.catalog.scan": "what an index is made of",
    "streaming.run.engine.unindexed.read_ahead": "a set without an index has no checksums",
    "streaming.storage.facade": "the reads themselves",
    "shard_tools.look.bench.requests": "nobody gets the bytes",
    "streaming.testing.stores": "a battery compares them itself",
}


def calls(module: str) -> Iterator[tuple[ast.Call, str]]:
    for node in nodes(module):
        if isinstance(node, ast.Call):
            yield node, getattr(node.func, "attr", getattr(node.func, "id", ""))


def test_nobody_else_makes_or_reads_them() -> None:
    """The whole source: who reads into memory, makes a statement, or parses an index file that it has just read."""
    findings = []
    for module in modules():
        for node, name in calls(module):
            where = f"{module}:{node.lineno}"
            if name == "_Compared" and module != checked_module.__name__:
                findings.append(f"{where} makes a Checked without a comparison")
            reads = "storage" in ast.unparse(node.func) or "reader" in ast.unparse(node.func)
            if name == "read_into" and reads and module not in READS_INTO:
                findings.append(f"{where} reads bytes that nobody compares: use fetch_unit or fill_checked")
            given = node.args[0] if node.args else None
            while isinstance(given, ast.Call) and getattr(given.func, "id", "") == "bytes":
                given = given.args[0]
            is_number = ast.unparse(node.func) == "int.from_bytes"
            if (
                name in PARSERS
                and not is_number
                and isinstance(given, ast.Call)
                and getattr(given.func, "attr", "") in READS
            ):
                findings.append(f"{where} parses what came once: use Storage.read_parsed, which asks again")
    report(findings, "Bytes of a store are compared, and asked for again:")


# --- what it costs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "set"
    draw = random.Random(0)
    with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=20) as writer:
        for number in range(60):
            writer.write({"__key__": f"{number:05d}", "bin": draw.randbytes(20_000), "cls": number})
    return target


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each call that computes a checksum of what was read."""
    found: list[int] = []

    def counted(part: Any, start: int = 0) -> int:
        found.append(len(part))
        return int(crc32c.crc32c(part, start))

    monkeypatch.setattr(checked_module, "crc32c", SimpleNamespace(crc32c=counted))
    return found


@pytest.mark.parametrize("way", ["mapped", "read", "cache", "view", "mixture", "several views"])
def test_each_byte_is_summed_once(
    folder: Path, tmp_path: Path, summed: list[int], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way != "mapped":
        monkeypatch.setattr(mapped, "_OWN_DISKS", frozenset())
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if way == "cache" else {}
    if "view" in way:
        options["decode"] = {"bin": "view"}
    dataset: Any = StreamingDataset(str(folder), **options)
    chunks = dataset.source.chunk_bytes
    if way == "mixture":
        dataset = Mixture({"a": dataset}, repeats={"a": 1})
    for _ in range(2 if way == "cache" else 1):  # misses, then hits
        summed.clear()
        with DataLoader(dataset, 4) as loader:
            for _ in range(2 if way == "several views" else 1):  # what stays in memory, and nobody has, is summed again
                batch = None
                for batch in loader:
                    assert len(batch["bin"]) == 4
        assert sum(summed) == chunks.sum() * (2 if way == "several views" else 1)
        assert len(summed) == len(chunks) * (2 if way == "several views" else 1)


class Summed(DictSource):
    """Samples in a dict, whose chunks have checksums as well."""

    is_wrong = False

    def chunk(self, chunk_id: int) -> FetchRange:
        wanted = super().chunk(chunk_id)
        out = bytearray(wanted.num_bytes)
        super().fill(wanted, memoryview(out))
        return replace(wanted, crc32c=crc32c.crc32c(out))

    def fill(self, wanted: FetchRange, out: memoryview) -> UnitLayout:
        layout = super().fill(wanted, out)
        out[3] ^= self.is_wrong
        return layout


def test_a_source_of_ones_own_is_compared_too() -> None:
    source = Summed({str(number): {"bin": bytes([number]) * 9} for number in range(8)}, per_chunk=2)
    wanted = source.chunk(0)
    out = memoryview(bytearray(wanted.num_bytes))
    found = source.fetch_unit(wanted, out).checked
    assert found is not None
    assert found.is_summed
    source.is_wrong = True
    with pytest.raises(ChecksumError):
        source.fetch_unit(wanted, out)
