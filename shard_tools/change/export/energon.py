"""Write the files that Megatron-Energon needs beside shards: ``.nv-meta`` and the sample offsets of each tar."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from shard_tools.change.export.job import TRAIN, ExportJob
from shard_tools.running.progress import Progress
from streaming.errors import ConfigError
from streaming.shards.index.sample_table import SampleTable

_SPLITS = (TRAIN, "val", "test")
_NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")  # RFC 4122's own, of URLs
_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL, byte_offset INTEGER,
    byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, content_byte_size INTEGER
);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples (tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts (tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts (
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size
);
"""


def files(job: ExportJob, progress: Progress) -> Iterator[tuple[str, bytes]]:
    """Yield the files that ``energon prepare`` writes for samples as plain dicts (``CrudeWebdataset``), the info last.

    Raises:
        ConfigError: A shard is outside the target, a key occurs twice, or Energon does not know a split's name.
    """
    names = job.names_beside("Energon")
    counts = {name: shard.num_samples for name, shard in zip(names, job.opened.chunks.shards, strict=True)}
    whole = [name for name in names if counts[name]]  # Energon refuses shards without samples
    numbers = {name: number for number, name in enumerate(whole)}
    splits = job.splits(whole)
    for split in splits.keys() - {*_SPLITS}:
        raise ConfigError(f"--split {split}: Energon knows {', '.join(_SPLITS)}; name one of these")
    with tempfile.TemporaryDirectory(prefix="shard_tools-") as folder:
        path = os.path.join(folder, "index.sqlite")
        with closing(sqlite3.connect(path)) as database:
            database.executescript(_TABLES)
            for position, table in job.tables():
                if table.num_samples:
                    _insert(database, numbers[names[position]], table)
                    yield f"{names[position]}.idx", table.record_starts.astype("<u8").tobytes()
                progress.advance(num=1)
            database.commit()
            database.executescript(_INDEXES)
        with open(path, "rb") as file:
            yield ".nv-meta/index.sqlite", file.read()
    yield ".nv-meta/index.uuid", str(uuid.uuid5(_NAMESPACE, job.fingerprint)).encode()
    yield ".nv-meta/dataset.yaml", _yaml({"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    yield ".nv-meta/split.yaml", _yaml({"split_parts": {name: splits.get(name, []) for name in _SPLITS}, "exclude": []})
    info = json.dumps({"shard_counts": {name: counts[name] for name in whole}}, indent=2).encode() + b"\n"
    yield ".nv-meta/.info.yaml", info  # for older releases; JSON is YAML
    yield ".nv-meta/.info.json", info


def _insert(database: sqlite3.Connection, number: int, table: SampleTable) -> None:
    """Add the samples of a shard, and their fields.

    Raises:
        ConfigError: A key occurs twice.
    """
    sizes = np.diff(table.record_starts).tolist()
    rows = zip(table.keys, range(table.num_samples), table.record_starts[:-1].tolist(), sizes, strict=True)
    try:
        database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", ((number, *row) for row in rows))
    except sqlite3.IntegrityError as error:
        raise ConfigError(
            f"{table.shard.name}: it has a key that an earlier sample has, too, which Energon does not accept; rewrite "
            "the set with `shard_tools reshard … --key-prefix '{shard}/'`, or --dedupe"
        ) from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{table.shard.name}: a key is not UTF-8 ({error}), which Energon cannot read") from error
    for name, (starts, lengths) in table.fields.items():
        there = np.flatnonzero(starts >= 0)
        parts = zip(there.tolist(), starts[there].tolist(), lengths[there].tolist(), strict=True)
        database.executemany(
            "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
            ((number, sample, name, start, size) for sample, start, size in parts),
        )


def _yaml(content: Mapping[str, object]) -> bytes:
    """Write mappings of names, strings and lists of strings as YAML, with strings in JSON, which is valid YAML."""
    return ("\n".join(_lines(content, 0)) + "\n").encode()


def _lines(content: Mapping[str, object], depth: int) -> Iterator[str]:
    for name, value in content.items():
        start = "  " * depth + f"{name}:"
        if isinstance(value, Mapping):
            yield start
            yield from _lines(value, depth + 1)
        elif isinstance(value, Sequence) and not isinstance(value, str) and value:
            yield start
            yield from ("  " * depth + f"- {json.dumps(one, ensure_ascii=False)}" for one in value)
        else:
            yield f"{start} {json.dumps(value, ensure_ascii=False)}"
