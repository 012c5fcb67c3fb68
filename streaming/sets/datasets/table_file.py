"""Read CSV and JSONL files directly, as a map-style dataset: ``TableDataset``."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from infra import agent_store
from streaming.common.arguments import check_choice, checked_number, checks_names, shows
from streaming.common.arrays import sums
from streaming.common.job.shared_results import shared
from streaming.common.job.store import job_peers
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, DataError, shell_spec
from streaming.shards.catalog.lines import RecordStarts, json_line, scan_lines
from streaming.shards.catalog.open import digest_of
from streaming.storage import Storage, redact, scheme_of

_BLOCK_BYTES = 8 << 20
_REQUESTS = 16
_GAP_BYTES = 64 << 10
"""Maximum gap in bytes between two records of a batch that are read with one request, gap included."""
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
Row = dict[str, Any]


@checks_names({"path": "give it as the first argument", "data_files": "give them as the first argument"})
class TableDataset:
    """Read rows of CSV, TSV or JSONL files directly into training: a map-style dataset with random access.

    ::

        loader = DataLoader(TableDataset("s3://bucket/train.jsonl"), batch_size=32, num_workers=4)

    Opening reads the files once and keeps the offset of each record, 4 bytes per record; under torch.distributed, rank
    0 does this for all. A row is then one ranged read, and neighboring rows of a batch share one. In an object store
    that is about one request per row: for large files, pack them into shards with ``shard_tools convert``. Thread-safe
    and picklable.

    A JSONL row is the object on its line; a CSV row is a dict of strings by column name, from the header. If the file
    has no column ``"__key__"``, it is added and holds the row number. Quoted CSV records may span lines. Blank lines
    are ignored.

    Args:
        urls: A URL or path ending in ``.jsonl``, ``.ndjson``, ``.csv`` or ``.tsv``, or a list of them.
        transform: Function of one row that returns the sample to use.
        storage_options: As for ``StreamingDataset``.
        kind: ``"jsonl"``, ``"csv"`` or ``"tsv"``; default: from the file name.

    Raises:
        NotFoundError, AccessDeniedError, TransferError: A file cannot be read.
        DataError: A row cannot be parsed; the message names the file and the byte offset.
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        transform: Callable[[Row], Any] | None = None,
        storage_options: Mapping[str, object] | None = None,
        kind: str | None = None,
    ) -> None:
        listed = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
        if not listed:
            raise ConfigError("urls: expected a URL or path, or a list of them, got an empty list")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform: expected a function of one row, got {transform!r}")
        self.urls = tuple(os.fspath(url) for url in listed)
        self.transform = transform
        self.storage = Storage(storage_options)
        self._kinds = tuple(_kind_of(url, kind) for url in self.urls)
        peers = job_peers(agent_store())
        self._files: list[RecordStarts] = []
        for url, one in zip(self.urls, self._kinds, strict=True):
            data = shared(peers, f"rows/{digest_of([url, one])}", partial(self._scan, url, one))
            self._files.append(RecordStarts.from_bytes(data))
        self._headers = [None if one == "jsonl" else self._header(number) for number, one in enumerate(self._kinds)]
        rows = [len(starts) - (header is not None) for starts, header in zip(self._files, self._headers, strict=True)]
        self._firsts = sums(rows)

    def __len__(self) -> int:
        """Return the number of rows in all files."""
        return int(self._firsts[-1])

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return row number ``index``; negative numbers count from the end.

        Raises:
            IndexError: There is no such row.
            DataError: It cannot be parsed.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Return several rows by number; rows that lie close together are read with one request."""
        places = [self._place(index) for index in indices]
        runs: list[list[int]] = []  # indices into ``places`` of records that are near each other
        for number in sorted(range(len(places)), key=lambda number: places[number][:2]):
            file, begin, *_ = places[number]
            if runs and (last := places[runs[-1][-1]])[0] == file and begin - last[2] <= _GAP_BYTES:
                runs[-1].append(number)
            else:
                runs.append([number])
        rows: dict[int, Any] = {}

        def read(run: list[int]) -> None:
            file, begin = places[run[0]][:2]
            data = memoryview(self.storage.read(self.urls[file], begin, max(places[number][2] for number in run)))
            for number in run:
                _, first, stop, index = places[number]
                rows[number] = self._row(file, bytes(data[first - begin : stop - begin]), first, index)

        is_remote = any(scheme_of(url) != "file" for url in self.urls)
        on_threads(read, runs, _REQUESTS if is_remote else 1, name="shardstream-rows")
        return [rows[number] for number in range(len(places))]

    @shows
    def __repr__(self) -> str:
        more = f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else ""
        return f"TableDataset({redact(self.urls[0])}{more}, {len(self)} rows)"

    def _place(self, given: SupportsIndex) -> tuple[int, int, int, int]:
        """Return the file of a row, its first byte, its end (exclusive), and its row number."""
        index = checked_number(given, len(self), "row", "the files have")
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        record = index - int(self._firsts[file]) + (self._headers[file] is not None)
        return file, *self._files[file].range_of(record), index

    def _row(self, file: int, data: bytes, begin: int, index: int) -> Any:
        where = f"{redact(self.urls[file])}: the row at byte {begin}"
        header = self._headers[file]
        row = json_line(data, where)[0] if header is None else _parsed_csv(data, self._kinds[file], header, where)
        row.setdefault("__key__", str(index))
        return row if self.transform is None else self.transform(row)

    def _header(self, file: int) -> list[str]:
        url = redact(self.urls[file])
        if not len(self._files[file]):
            raise DataError(f"{url}: expected a header with the names of the columns, got an empty file")
        begin, end = self._files[file].range_of(0)
        data = bytes(self.storage.read(self.urls[file], begin, end)).removeprefix(b"\xef\xbb\xbf")
        (header,) = _csv_rows(data, self._kinds[file], f"{url}: the header")
        if len(set(header)) < len(header):
            raise DataError(f"{url}: expected a header of distinct column names, got {header}")
        return header

    def _scan(self, url: str, kind: str) -> bytes:
        size_bytes = self.storage.info(url).size_bytes

        def blocks() -> Iterator[memoryview]:
            for begin in range(0, size_bytes, _BLOCK_BYTES):
                yield memoryview(self.storage.read(url, begin, min(begin + _BLOCK_BYTES, size_bytes)))

        return RecordStarts.of(scan_lines(blocks(), redact(url), quoted=kind != "jsonl")).to_bytes()


def _kind_of(url: str, kind: str | None) -> str:
    if kind is not None:
        check_choice("kind", kind, dict.fromkeys(_KINDS.values()))
        return kind
    name = url.partition("?")[0].lower()
    found = _KINDS.get(os.path.splitext(name)[1])
    if found is not None:
        return found
    compressed = name.endswith((".gz", ".zst", ".bz2", ".xz"))
    raise ConfigError(
        f"{redact(url)}: "
        + ("compressed files cannot be read out of order; unpack it" if compressed else f"expected {', '.join(_KINDS)}")
        + f", or pack it into shards: shard_tools convert {shell_spec(url)} TARGET"
        + ("" if compressed else "; for a file of another name give kind=")
    )


def _parsed_csv(data: bytes, kind: str, header: list[str], where: str) -> Row:
    (values,) = _csv_rows(data, kind, where)
    if len(values) != len(header):
        raise DataError(f"{where}: expected {len(header)} values, got {len(values)}; correct this row")
    return dict(zip(header, values, strict=True))


def _csv_rows(data: bytes, kind: str, where: str) -> list[list[str]]:
    """Parse the single record in ``data``; blank lines may follow it."""
    try:
        text = io.StringIO(data.decode(), newline="")
        rows = [row for row in csv.reader(text, delimiter="\t" if kind == "tsv" else ",", strict=True) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not readable as CSV in UTF-8: {error}; correct this row") from error
    if len(rows) != 1:
        raise DataError(f"{where}: expected one record, got {len(rows)}; is a quote open? got {data[:60]!r}")
    return rows
