"""Write an index per tar, which DALI's ``readers.webdataset`` takes as ``index_paths``."""

from __future__ import annotations

from collections.abc import Iterator

from shard_tools.change.export.job import ExportJob
from shard_tools.running.progress import Progress
from streaming.errors import ConfigError
from streaming.shards.index.sample_table import SampleTable

_VERSION = "v1.2"


def files(job: ExportJob, progress: Progress) -> Iterator[tuple[str, bytes]]:
    """Yield ``NAME.idx`` for each ``NAME.tar`` that has samples.

    Raises:
        ConfigError: A key or field name has a space, at which DALI would truncate it.
    """
    names = job.names
    for position, table in job.tables():
        if table.num_samples:
            yield names[position].removesuffix(".tar") + ".idx", _lines(table).encode("utf-8", "surrogateescape")
        progress.advance(num=1)


def _lines(table: SampleTable) -> str:
    """Return the number of samples, and for each its fields: extension, offset, size and name."""
    fields: list[list[tuple[int, str, int]]] = [[] for _ in range(table.num_samples)]
    for name, (starts, sizes) in table.fields.items():
        for row, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            if start >= 0:
                fields[row].append((start, name, size))
    lines = [f"{_VERSION} {table.num_samples}"]
    for key, some in zip(table.keys, fields, strict=True):
        if len(key.split()) != 1 or any(len(name.split()) != 1 for _, name, _ in some):
            raise ConfigError(
                f"{table.shard.name}: sample {key!r} has a space in a name, at which DALI would cut it; rewrite the "
                "set with other keys (`shard_tools convert … --key number`)"
            )
        lines.append(" ".join(f"{name} {start} {size} {key}.{name}" for start, name, size in sorted(some)))
    return "\n".join(lines) + "\n"
