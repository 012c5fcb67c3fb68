"""The sets that random histories draw from: written once for so many cases."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from tests.support.models.history_cases import COLUMNS, SHAPES, Shape
from tests.support.models.known_sets import VIEW, Sample, content, read

CASES_OF_A_POOL = 250


@dataclass
class Lifted:
    """A column, by keys."""

    name: str
    known: dict[str, dict[str, Any]]

    def __call__(self, sample: dict[str, Any]) -> Any:
        return self.known[sample["__key__"]][self.name]


def draw_fields(dice: random.Random, shape: Shape, key: str) -> dict[str, bytes]:
    low, high = shape.num_bytes
    tokens = int(shape.tokens[0] * (shape.tokens[1] / shape.tokens[0]) ** dice.random())
    text = 11 * dice.randint(1, 20) + (10 if dice.random() < shape.broken else dice.randint(0, 9))
    sizes = {"bin": int(low * (high / low) ** dice.random()), "cls": 1, "mask": tokens, "tok": 2 * tokens, "txt": text}
    if dice.random() < 0.1 and shape.size > 1:
        del sizes["txt"]
    return {name: content(key, name, size) for name, size in sizes.items()}


def write_pool(folder: Path, dice: random.Random) -> dict[str, list[Sample]]:
    """Write all sets: columns with the shards, or where these are indexed later, as late columns; ``score`` is one."""
    pool = {}
    for name, shape in SHAPES.items():
        made = {key: draw_fields(dice, shape, key) for key in (f"{name}{one:04d}" for one in range(shape.size))}
        known = {key: Sample(key, "", 0, 0, fields, {}).columns for key, fields in made.items()}
        lifted = {column: Lifted(column, known) for column in COLUMNS}
        with ShardWriter(
            f"{folder}/{name}/{{:06d}}.tar", max_samples=shape.per_shard, index=shape.is_indexed and shape.is_default,
            columns=lifted if shape.is_indexed and shape.is_default else None,
        ) as writer:  # fmt: skip
            for key, fields in made.items():
                writer.write({"__key__": key, **fields})
        pool[name] = read(folder / name)
        if shape.is_indexed and shape.size > 1:
            add_later(f"{folder}/{name}/", shape, known)
    return pool


def add_later(url: str, shape: Shape, known: dict[str, dict[str, Any]]) -> None:
    """Index the set, if its writer did not, and add late columns and a view."""
    if not shape.is_default:
        storage = Storage()
        rule = ChunkRule(min_bytes=shape.least[0], min_samples=shape.least[1])
        index_shards(storage, expand_urls(url, storage), rule=rule, parallel=1)
    for column in ("score",) if shape.is_default else ("score", *COLUMNS):
        has = {key: columns[column] for key, columns in known.items() if columns[column] is not None}
        pq.write_table(pa.table({"key": list(has), column: list(has.values())}), f"{url}/table.parquet")
        run_command("column", "add", url, column, "--from", f"{url}/table.parquet", "--on", "key")
    os.unlink(f"{url}/table.parquet")
    run_command("view", "save", url, "view", "--where", VIEW)


def run_command(*arguments: str) -> None:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


class Pools:
    """The sets of so many cases; those of others are deleted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, ""
        self._pool: dict[str, list[Sample]] = {}

    def of(self, seed: int, number: int) -> tuple[Path, dict[str, list[Sample]]]:
        name = f"{seed}-{number // CASES_OF_A_POOL}"
        if name != self._name:
            shutil.rmtree(self._folder / self._name, ignore_errors=True)
            self._name, self._pool = name, write_pool(self._folder / name, random.Random(name))
        return self._folder / name, self._pool
