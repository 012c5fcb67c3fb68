"""Write a dataset card: a ``README.md`` for people, with metadata by which ``datasets`` finds the splits' files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence

from shard_tools.change.export.job import TRAIN, ExportJob
from shard_tools.change.export.parquet import kind_of
from shard_tools.change.sets.inspect import DataSetInfo, info
from shard_tools.running.progress import Progress
from shard_tools.running.report import plain
from streaming.common.arguments import counted, format_bytes
from streaming.storage import redact, split_url

NAME = "README.md"
_HUB_SPLITS = {"val": "validation"}
_SIZES = (
    (10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"), (10**9, "100M<n<1B"),
)  # fmt: skip
_log = logging.getLogger(__name__)
_MODALITIES = {"image": "image", "audio": "audio", "text": "text"}


def files(job: ExportJob, progress: Progress) -> Iterator[tuple[str, bytes]]:
    """Yield ``README.md``, which names the shards.

    Raises:
        ConfigError: A shard is outside the target.
    """
    names = job.names_beside("a dataset card")
    progress.advance(num=len(names))
    rare = [one for one in _facts(job).fields if one.num_samples < job.opened.chunks.total_samples]
    if rare:
        _log.warning(
            "%s of %s samples have the field %r: `datasets` reads tars only if the first samples have the same fields; "
            "--to hf writes files that it reads in any case",
            f"{rare[0].num_samples:,}", f"{job.opened.chunks.total_samples:,}", rare[0].name,
        )  # fmt: skip
    yield NAME, card(job, job.splits(names), ("webdataset",))


def card(job: ExportJob, splits: Mapping[str, Sequence[str]], tags: Sequence[str]) -> bytes:
    """Return the card of a set, given the files of each split."""
    facts = _facts(job)
    title = plain(split_url(redact(job.target).rstrip("/"))[1] or "set")
    lines = ["---", *_front(facts, splits, tags), "---", "", f"# {title}", ""]
    lines.append(
        f"{counted(facts.num_samples, 'sample')} in {counted(facts.num_shards, 'shard')}, "
        f"{format_bytes(facts.num_bytes)}. Written by `shard_tools export`; add what the numbers do not show: where "
        "the data comes from, its license, and what it must not be used for.\n"
    )
    fields = [
        (one.name, kind_of(one.name), f"{one.num_samples:,}", f"{one.min_bytes:,}", f"{one.max_bytes:,}")
        for one in facts.fields
    ]
    lines += _table(("field", "kind", "samples", "min bytes", "max bytes"), fields)
    columns = [
        (one.name, one.type, f"{one.num_values:,}", "" if one.min is None else f"{one.min:,} to {one.max:,}")
        for one in facts.columns
    ]
    lines += _table(("column", "type", "samples", "range"), columns) if columns else []
    if splits.keys() != {TRAIN}:
        lines += _table(("split", "files"), [(name, f"{len(some):,}") for name, some in splits.items()])
    return ("\n".join(lines).rstrip() + "\n").encode("utf-8", "backslashreplace")


def _facts(job: ExportJob) -> DataSetInfo:
    return info(list(job.opened.urls), storage=job.storage, index_url=job.options.index_url, allow_unfinished=True)


def _front(facts: DataSetInfo, splits: Mapping[str, Sequence[str]], tags: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the card's YAML front matter; strings are written in JSON, which is valid YAML."""
    yield "configs:"
    yield "- config_name: default"
    yield "  data_files:"
    for split, names in splits.items():
        yield f"  - split: {json.dumps(_HUB_SPLITS.get(split, split), ensure_ascii=False)}"
        yield "    path:"
        yield from (f"    - {json.dumps(name, ensure_ascii=False)}" for name in names)
    yield "size_categories:"
    yield f"- {next((word for most, word in _SIZES if facts.num_samples < most), 'n>1T')}"
    kinds = [_MODALITIES[kind] for one in facts.fields if (kind := kind_of(one.name)) in _MODALITIES]
    yield "tags:"
    yield from (f"- {tag}" for tag in dict.fromkeys((*tags, *kinds)))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[plain(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(row) + " |" for row in cells),
        "",
    ]
