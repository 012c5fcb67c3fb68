"""Write and read index files of their common form: Parquet with a JSON document in its footer, or JSON alone.

Each file carries checksums of all its bytes, its *seal*. No reader uses a byte before its seal was compared: Parquet
decodes many changed bytes to other rows, and its own checksums leave out page headers and the footer
(``docs/design/0027-sealed-index.md``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from streaming.errors import IndexFormatError
from streaming.shards.index.pages import begun_at_page

FORMAT_VERSION = (1, 0)
"""Major and minor version. Readers accept any minor version of their major version and ignore unknown entries."""
METADATA_KEY = b"shardstream"
_FOOTER_TAIL_BYTES = 8
_SEAL = struct.Struct("<II")
"""Before the footer: CRC32C of the bytes before the seal, and of those after it."""
_SUM = "crc32c"
"""The member of a JSON document that is its seal."""
_FOOTER_GUESS_BYTES = 64 << 10
"""Bytes read of a file's end when the footer's length is unknown; most footers are shorter."""
MAX_UNPACKED_BYTES = 1 << 30
"""Memory limit for the rows of any index file; larger files may take a thousand times their own size."""
_MAX_RATIO = 1000
_PAGE_BYTES = 64 << 10
"""Size of a page as written. A reader of a single key unpacks one page (Arrow's own size is 1 MiB or 20,000 rows)."""
_ROWS_AT_ONCE = 1 << 20  # of numbers, the size of a row group: 8 MiB per column
_MAGIC = b"PAR1"
COLUMN_KIND = "column"
SOURCES_KIND = "sources"
FIELD_KIND = "late field"
VIDEO_KIND = "videos"
REBUILD = "rebuild it with `shard_tools index URL`"
CONVERT_AGAIN = (
    "restore it, or run the command that wrote the set again, such as `shard_tools convert … --overwrite` or "
    "`shard_tools copy`. The set can be read without this file, but without it samples that the set has could be "
    "appended again"
)
ADD_AGAIN = "add the column again with `shard_tools column add URL NAME … --overwrite`"
ADD_FIELD_AGAIN = "add the field again with `shard_tools field add URL NAME … --overwrite`"
INDEX_VIDEO_AGAIN = "make it again with `shard_tools index URL --video`"
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}


def write_table(table: pa.Table, facts: Mapping[str, Any], *, plain: list[str]) -> bytes:
    """Return ``table`` as Parquet bytes, sealed, with ``facts`` in the footer. The same input gives the same bytes.

    Args:
        table: The rows.
        facts: JSON-able; ``version`` is added.
        plain: Columns without a dictionary: offsets and keys, which rarely repeat.
    """
    document = {"version": f"{FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}", **facts}
    metadata = {METADATA_KEY: json.dumps(document, sort_keys=True, separators=(",", ":")).encode()}
    sink = pa.BufferOutputStream()
    repeating = [name for name in table.column_names if name not in plain]
    encodings = {name: "DELTA_BINARY_PACKED" for name in plain if pa.types.is_integer(table.schema.field(name).type)}
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        compression_level=3,
        use_dictionary=repeating or False,
        column_encoding=encodings or None,
        write_statistics=repeating or False,
        row_group_size=_ROWS_AT_ONCE,
        data_page_size=_PAGE_BYTES,
        version="2.6",
    )
    return sealed(sink.getvalue())


def sealed(file: Any) -> bytes:
    """Return a Parquet file with its seal: 8 bytes before the footer, where readers of Parquet read nothing."""
    data = memoryview(file).cast("B")
    at = len(data) - _FOOTER_TAIL_BYTES - int.from_bytes(data[-8:-4], "little")
    return b"".join((data[:at], _SEAL.pack(crc32c(data[:at]), crc32c(data[at:])), data[at:]))


def _check_seal(buffer: Any, source: str, cure: str, *, whole: bool) -> None:
    """Compare the seal of a file with all its bytes; unless ``whole``, with its footer, which ``buffer`` ends with.

    Raises:
        IndexFormatError: They differ, or there is no seal.
    """
    data = memoryview(buffer).cast("B")
    _check_end(data, source, cure)
    footer = len(data) - _FOOTER_TAIL_BYTES - int.from_bytes(data[-8:-4], "little")
    seal = footer - _SEAL.size
    if seal < 0:
        raise damaged(source, "it is cut off", cure)
    body_sum, footer_sum = _SEAL.unpack(data[seal:footer])
    if crc32c(data[footer:]) != footer_sum or (whole and crc32c(data[:seal]) != body_sum):
        raise damaged(source, "its bytes are not those of its checksum", cure)


def is_sealed(buffer: Any, *, whole: bool = True) -> bool:
    """Return whether an index file matches the checksum that it carries; unless ``whole``, only check its footer.

    For files that a reader refused: another answer of the store may be right only if this one is not sealed.
    """
    data = memoryview(buffer).cast("B")
    if whole and data[-4:] != _MAGIC:
        try:
            read_document(data)
        except (ValueError, TypeError, RecursionError):
            return False
        return True
    try:
        _check_seal(data, "", "", whole=whole)
    except IndexFormatError:
        return False
    return True


def is_original(rebuilt: bytes, file: Any) -> bool:
    """Return whether a Parquet file equals a damaged one before the damage: their seals are the same.

    (Equal bytes would prove nothing: a file made from the damaged one may repeat its damage.)
    """
    footer = len(rebuilt) - _FOOTER_TAIL_BYTES - int.from_bytes(rebuilt[-8:-4], "little")
    seal = slice(footer - _SEAL.size, footer)
    return bytes(memoryview(file).cast("B")[seal]) == rebuilt[seal]


def _check_end(data: memoryview, source: str, cure: str) -> None:
    if len(data) < _FOOTER_TAIL_BYTES or data[-4:] != _MAGIC:
        raise damaged(source, "it does not end as a Parquet file does", cure)


def write_document(content: Mapping[str, Any]) -> bytes:
    """Return a JSON document with its seal. The same content gives the same bytes."""
    text = json.dumps({**content, _SUM: _sum_of(content)}, ensure_ascii=False, indent=1, sort_keys=True)
    return f"{text}\n".encode("utf-8", "backslashreplace")  # keys that are not UTF-8, as JSON escapes them


def read_document(data: Any) -> dict[str, Any]:
    """Return the content of a JSON document (:func:`write_document`), without its seal.

    Raises:
        ValueError, TypeError, RecursionError: It is damaged, was changed by hand, or has no seal.
    """
    content = json.loads(bytes(data))
    if not isinstance(content, dict):
        raise TypeError(f"expected a JSON object, got {type(content).__name__}")
    said, found = content.pop(_SUM, None), _sum_of(content)
    if said != found:
        raise ValueError(f"its content has the CRC32C {found}, it says {str(said)[:80]}: damaged or changed by hand")
    return content


def _sum_of(content: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_table(
    buffer: Any, kind: str, source: str, columns: Callable[[dict[str, Any]], list[str]] | None = None, *,
    coded: bool = False, only: tuple[int, int] | None = None, checked: bool = True,
) -> tuple[pa.Table, dict[str, Any]]:  # fmt: skip
    """Return the rows and the facts of an index file of this ``kind``.

    With ``columns``, return only the columns that it selects from the facts. With ``coded``, texts stored with a
    dictionary are returned as Arrow dictionaries. With ``only``, return the rows from the first number to before the
    second; for columns other than numbers. Without ``checked``, return all that a damaged file still gives; the caller
    has to prove it.

    Raises:
        IndexFormatError: The bytes are not such a file, damaged, of a newer major version, or their rows would take
            more than both :data:`MAX_UNPACKED_BYTES` and a thousand times the size of the file.
    """
    cure = _cure_of(kind)
    if checked:
        _check_seal(buffer, source, cure, whole=True)
    file = _opened(buffer, source, cure)
    facts = _facts_of(file, kind, source)
    try:
        wanted = None if columns is None else columns(facts)
        return _read_bounded(file, memoryview(buffer), source, wanted, coded=coded, only=only), facts
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, IndexFormatError):
            raise
        raise damaged(source, str(error), cure) from error


def _read_bounded(
    file: pq.ParquetFile, buffer: memoryview, source: str, columns: list[str] | None, *, coded: bool,
    only: tuple[int, int] | None,
) -> pa.Table:  # fmt: skip
    """Return the rows (of some ``columns``, or all), counted as they arrive: equal ones take no room in the file."""
    limit_bytes = max(MAX_UNPACKED_BYTES, _MAX_RATIO * buffer.nbytes)
    schema = file.schema_arrow
    names = schema.names if columns is None else columns
    if len(set(names)) < len(names):
        raise ValueError("two columns of one name")
    kinds = {name: schema.field(name).type for name in names}
    numbers = [name for name, kind in kinds.items() if _is_number(kind)]
    others = [name for name in names if name not in set(numbers)]
    found, num_bytes = _read_numbers(file, source, numbers, limit_bytes)
    found |= _read_others(file, buffer, source, others, limit_bytes, num_bytes, only)
    if not coded:
        found = {name: one if one.type == kinds[name] else one.cast(kinds[name]) for name, one in found.items()}
    return pa.table([found[name] for name in names], names)


def _is_number(kind: pa.DataType) -> bool:
    """Return whether all values of a type have the same size, at most eight bytes."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _read_numbers(
    file: pq.ParquetFile, source: str, names: list[str], limit_bytes: int
) -> tuple[dict[str, pa.ChunkedArray], int]:
    """Return columns of numbers, which are counted as they arrive, and their size in bytes."""
    if not names:
        return {}, 0
    batches: list[pa.RecordBatch] = []
    num_bytes, num_rows = 0, max(min(_ROWS_AT_ONCE, limit_bytes // (8 * len(names))), 1)
    for batch in file.iter_batches(num_rows, columns=names, use_threads=False):
        num_bytes += batch.nbytes
        _check_unpacked(num_bytes, limit_bytes, source)
        batches.append(batch)
    kinds = file.schema_arrow
    return {
        name: pa.chunked_array([batch.column(name) for batch in batches], kinds.field(name).type) for name in names
    }, num_bytes


def _read_others(
    file: pq.ParquetFile, buffer: memoryview, source: str, names: list[str], limit_bytes: int, num_bytes: int,
    only: tuple[int, int] | None,
) -> dict[str, pa.ChunkedArray]:  # fmt: skip
    """Return columns of anything except numbers, after checking their size, in addition to ``num_bytes``.

    Texts stored with a dictionary are read in this form, counted, and only then expanded.
    """
    if not names:
        return {}
    metadata, texts = file.metadata, set()
    for group in range(metadata.num_row_groups):
        # Reading damaged metadata of a column ends the process (pyarrow 26); reading a row raises. So read rows first.
        next(file.iter_batches(batch_size=1, row_groups=[group], columns=names, use_threads=False), None)
        for index in range(metadata.num_columns):
            if metadata.schema.column(index).path not in names:
                continue
            column = metadata.row_group(group).column(index)
            width = _VALUE_BYTES.get(column.physical_type) or max(1, metadata.schema.column(index).length)
            num_bytes += max(column.total_uncompressed_size, column.num_values * width)
            if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in one for one in column.encodings):
                texts.add(column.path_in_schema)
    _check_unpacked(num_bytes, limit_bytes, source)
    if texts:
        file = pq.ParquetFile(pa.BufferReader(buffer), metadata=metadata, read_dictionary=sorted(texts))
    # (`pq.read_table` would import pandas if it is installed.)
    # Arrow's threads, together with torch's, abort about one short script in fifty at the interpreter's end.
    plain = buffer if len(names) == 1 and not texts else None
    table = file.read(names, use_threads=False) if only is None else _rows_only(file, plain, names, only)
    for name in texts.intersection(names):
        for chunk in table.column(name).chunks:
            if pa.types.is_dictionary(chunk.type):
                lengths = pc.binary_length(chunk.dictionary)
                most = (pc.max(lengths).as_py() or 0) * len(chunk)
                is_little = num_bytes + most <= limit_bytes
                num_bytes += most if is_little else pc.sum(pc.take(lengths, chunk.indices)).as_py() or 0
    _check_unpacked(num_bytes, limit_bytes, source)
    return {name: table.column(name) for name in names}


def _rows_only(file: pq.ParquetFile, plain: memoryview | None, names: list[str], only: tuple[int, int]) -> pa.Table:
    """Return the rows of a file from one number to before another, as far as they exist.

    Given the file's bytes (``plain``: it is about one column without a dictionary), pages before them are skipped.
    """
    found: list[pa.RecordBatch] = []
    done = 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        first, stop = max(only[0] - done, 0), min(only[1] - done, num_rows)
        done += num_rows
        if first >= stop:
            continue
        part, at = (file, 0) if plain is None else begun_at_page(file, plain, group, names[0], first)
        for batch in part.iter_batches(stop - at, row_groups=[group], columns=names, use_threads=False):
            found.append(batch.slice(max(first - at, 0), stop - max(first, at)))
            at += len(batch)
            if at >= stop:
                break
    return pa.Table.from_batches(found, None if found else pa.schema([file.schema_arrow.field(name) for name in names]))


def _check_unpacked(num_bytes: int, limit_bytes: int, source: str) -> None:
    if num_bytes > limit_bytes:
        raise damaged(source, f"its rows would take {num_bytes} bytes, at most {limit_bytes} are read")


def read_facts(buffer: Any, kind: str, source: str, *, whole: bool = False) -> dict[str, Any]:
    """Return the facts alone.

    ``buffer`` may be any tail of the file that contains seal and footer (see :func:`read_footer`). If it is the
    ``whole`` file, all of it is checked.
    """
    cure = _cure_of(kind)
    _check_seal(buffer, source, cure, whole=whole)
    return _facts_of(_opened(buffer, source, cure), kind, source)


def types_of_columns(buffer: Any, kind: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the facts of a table, and Arrow's name of the type of each column, from a tail with the footer.

    Raises:
        IndexFormatError: The footer is damaged, of another kind of file, or of a newer major version.
    """
    cure = _cure_of(kind)
    _check_seal(buffer, source, cure, whole=False)
    file = _opened(buffer, source, cure)
    with content_errors(source, "damaged footer"):
        return _facts_of(file, kind, source), {one.name: str(one.type) for one in file.schema_arrow}


def _opened(buffer: Any, source: str, cure: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(pa.BufferReader(buffer))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(source, str(error), cure) from error


def _facts_of(file: pq.ParquetFile, kind: str, source: str) -> dict[str, Any]:
    try:
        facts = json.loads((file.metadata.metadata or {})[METADATA_KEY])
    except KeyError:
        raise IndexFormatError(f"{source}: a Parquet file, but not a shardstream index; {_cure_of(kind)}") from None
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise damaged(source, str(error), _cure_of(kind)) from error
    if not isinstance(facts, dict) or facts.get("kind") != kind:
        got = facts.get("kind") if isinstance(facts, dict) else facts
        raise IndexFormatError(f"{source}: expected an index file of kind {kind!r}, got {got!r}")
    _check_version(str(facts.get("version")), source)
    return facts


def read_footer(read: Callable[[int, int], Any], size_bytes: int, source: str) -> bytes:
    """Read the end of an index file of ``size_bytes``: its seal and its footer, in one request if possible.

    Args:
        read: Returns the file's bytes [start, stop).
        size_bytes: Size of the file.
        source: Its name, for messages.

    Raises:
        IndexFormatError: The file does not end as a Parquet file does.
    """
    tail = bytes(read(max(0, size_bytes - _FOOTER_GUESS_BYTES), size_bytes))
    _check_end(memoryview(tail), source, REBUILD)
    need = int.from_bytes(tail[-8:-4], "little") + _FOOTER_TAIL_BYTES + _SEAL.size
    return bytes(read(size_bytes - need, size_bytes)) if len(tail) < need <= size_bytes else tail


def _check_version(version: str, source: str) -> None:
    major, dot, _ = version.partition(".")
    if not dot or not (major.isascii() and major.isdigit() and len(major) < 10):
        raise damaged(source, f"version {version!r}")
    if int(major) > FORMAT_VERSION[0]:
        raise IndexFormatError(
            f"{source}: index format {version}, this release reads {FORMAT_VERSION[0]}.x; upgrade shardstream"
        )


@contextmanager
def content_errors(source: str, what: str, cure: str = REBUILD) -> Iterator[None]:
    """Convert errors of parsing malformed content to ours. ``what`` names the malformed part."""
    try:
        yield
    except IndexFormatError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        raise IndexFormatError(f"{source}: {what} ({error}); {cure}") from error


def damaged(source: str, why: str, cure: str = REBUILD) -> IndexFormatError:
    """Return the error for an index file whose content is impossible."""
    return IndexFormatError(f"{source}: damaged index file ({why}); {cure}")


def _cure_of(kind: str) -> str:
    cures = {COLUMN_KIND: ADD_AGAIN, SOURCES_KIND: CONVERT_AGAIN, FIELD_KIND: ADD_FIELD_AGAIN}
    cures[VIDEO_KIND] = INDEX_VIDEO_AGAIN
    return cures.get(kind, REBUILD)
