"""What is fuzzed: each target takes bytes, and may raise errors of ours alone, in bounded time and memory.

A target that finds two readers to disagree raises ``Disagreement``. Nothing here knows hypothesis: the corpus and a
crash are replayed by calling ``run``.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from shard_tools.make.convert import SourceOptions
from shard_tools.make.convert.formats.example import parse_example
from shard_tools.make.convert.formats.litdata import decode_nested
from shard_tools.make.convert.formats.lmdb import LmdbFiles
from streaming.errors import ConfigError, DataError, ShardstreamError, StateError, TarError
from streaming.order.plan.state import LoaderState
from streaming.shards.catalog import urls as expand
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import sealed
from streaming.shards.index.sample_table import SampleTable, chunk_rows_from_footer
from streaming.shards.tar import TarScanner, iter_samples, parse_chunk
from streaming.shards.tar import fast as fast_reader
from streaming.shards.tar.blocks import Members, Origin, as_array, parse_pax
from streaming.shards.tar.walk import walk_members
from streaming.shards.video.table import VideoTable
from streaming.storage import Storage, redact
from streaming.storage.base.urls import join_url, local_path, scheme_of, split_url

SECONDS = 10.0
"""No input of the sizes used here may take more of a core; most take milliseconds."""
GROWTH_BYTES = 1 << 30
"""How much the process may grow over one input."""
SECRET = "hunter2"

Target = Callable[[bytes], None]


class Disagreement(Exception):
    """Two readers of one format say different things, or one broke its word."""


def outcome(read: Callable[[], Any]) -> Any:
    """What ``read`` returns, or the type of the DataError that it raises."""
    try:
        return read()
    except DataError as error:
        return type(error)


def run(target: Target, data: bytes) -> None:
    """Run ``target`` on ``data``; anything but a clean end is an exception."""
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.thread_time()  # others share the machine
    target(data)
    took_s = time.thread_time() - started_s
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) << 10
    if took_s > SECONDS:
        raise Disagreement(f"{len(data)} bytes took {took_s:.1f} s")
    if grown > GROWTH_BYTES:
        raise Disagreement(f"{len(data)} bytes made the process grow by {grown} bytes")


# --- tar -------------------------------------------------------------------------------------------------------------


def _plain(members: Members | type | None) -> Any:
    """Members as plain values; names up to their first NUL, as all users cut them."""
    if not isinstance(members, Members):
        return members
    names = members.names if isinstance(members.names, list) else members.names.tolist()
    return ([name.split(b"\0", 1)[0] for name in names], members.headers.tolist(), members.data.tolist(),
            members.sizes.tolist(), members.end, members.ended)  # fmt: skip


def _puts_off(data: bytes, found: Any, exact: Any, *, partial: bool) -> bool:
    """Whether ``found`` leaves extension headers for the next piece, which the walk says already are bad."""
    end = len(data) if isinstance(found, type) else found[4]
    return partial and isinstance(exact, type) and end + 512 <= len(data) and data[end + 156] in b"xXLK"


def headers(data: bytes) -> None:
    """The NumPy pass over headers against the exact walk: the same members wherever both have an opinion."""
    raw = as_array(data)
    for partial in (False, True):
        exact = outcome(lambda: _plain(walk_members(memoryview(data), Origin(), partial=partial)))  # noqa: B023
        checked = outcome(
            lambda: _plain(fast_reader._read_regular(raw, Origin(), partial=partial, verify_headers=True))  # noqa: B023
        )
        if checked is not None and checked != exact and not _puts_off(data, checked, exact, partial=partial):
            raise Disagreement(f"partial={partial}: fast {checked}, walk {exact}")
        public = outcome(
            lambda: _plain(fast_reader.read_members(data, Origin(), partial=partial, verify_headers=True))  # noqa: B023
        )
        if public != exact and not _puts_off(data, public, exact, partial=partial):
            raise Disagreement(f"partial={partial}: read_members {public}, walk {exact}")
        unchecked = outcome(
            lambda: _plain(fast_reader._read_regular(raw, Origin(), partial=partial, verify_headers=False))  # noqa: B023
        )
        if not isinstance(exact, type) and unchecked is not None and unchecked != exact:
            raise Disagreement(f"partial={partial}: unchecked {unchecked}, walk {exact}")


def _scanned(data: bytes, piece_bytes: int) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    scanner = TarScanner("s")
    layouts = [scanner.feed(data[at : at + piece_bytes]) for at in range(0, len(data), piece_bytes)]
    layouts.append(scanner.finish())
    found = []
    for layout in layouts:
        for row, key in enumerate(layout.keys):
            places = zip(layout.fields, layout.starts[row].tolist(), layout.sizes[row].tolist(), strict=True)
            found.append((key, {field: (at, size) for field, at, size in places if at >= 0}))
    return found


def scanner(data: bytes) -> None:
    """A shard whole, in pieces, and as a stream of samples: the same samples, or errors in all."""
    whole = outcome(lambda: _scanned(data, max(1, len(data))))
    for piece_bytes in (511, 1024, 5000):
        if len(data) // piece_bytes > 300:
            continue
        other = outcome(lambda: _scanned(data, piece_bytes))  # noqa: B023
        if isinstance(whole, type) != isinstance(other, type) or (not isinstance(whole, type) and whole != other):
            raise Disagreement(f"pieces of {piece_bytes}: {other}, whole {whole}")
    if isinstance(whole, type):
        with contextlib.suppress(DataError):
            list(iter_samples([data]))
        with contextlib.suppress(DataError):
            parse_chunk(data)
        return
    for key, fields in whole:
        for at, size in fields.values():
            if not 0 <= at <= at + size <= len(data):
                raise Disagreement(f"{key!r}: bytes {at} to {at + size} of {len(data)}")
    expected = [(key, {name: data[at : at + size] for name, (at, size) in fields.items()}) for key, fields in whole]
    if not data.startswith(b"\x1f\x8b") and list(iter_samples([data])) != expected:
        raise Disagreement("iter_samples and the scanner disagree")


def gzipped(data: bytes) -> None:
    """A gzip stream, in pieces; never more than the bound in memory."""
    for piece_bytes in (100, 1 << 20):
        pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
        with contextlib.suppress(DataError):
            for _ in iter_samples(pieces, max_sample_bytes=16 << 20):
                pass


def pax(data: bytes) -> None:
    """Records of a PAX header."""
    try:
        records = parse_pax(data, Origin(), 0)
    except TarError:
        return
    if sum(len(key) + len(value) for key, value in records.items()) > len(data):
        raise Disagreement("more came out than went in")


# --- index ----------------------------------------------------------------------------------------------


def index(data: bytes) -> None:
    """Both kinds of index files, also with checksums that are right; a table that is accepted keeps its promises."""
    _tables(data)
    if data[-4:] == b"PAR1" and int.from_bytes(data[-8:-4], "little") <= len(data) - 8:
        _tables(sealed(data))


def _tables(data: bytes) -> None:
    with contextlib.suppress(DataError):
        table = ChunkTable.from_parquet(data, "c")
        table.validate()
        if table.total_samples != sum(shard.num_samples for shard in table.shards) or table.total_bytes < 0:
            raise Disagreement("the counts do not add up")
        _ = table.fingerprint, table.by_shard()
    with contextlib.suppress(DataError):
        samples = SampleTable.from_parquet(data, "s")
        samples.validate()
        for number in range(min(samples.num_samples, 50)):
            place = samples.lookup(number)
            for start, end in place.fields.values():
                if not place.record_start <= start <= end <= place.record_end <= samples.shard.size_bytes:
                    raise Disagreement(f"sample {number} leaves its record")
    with contextlib.suppress(DataError):
        chunk_rows_from_footer(data)
    with contextlib.suppress(DataError):
        videos = VideoTable.from_parquet(data, "v")
        for stream in videos.streams:
            for group in stream.groups:
                if not 0 <= group.byte_start < group.byte_end <= videos.shard.size_bytes:
                    raise Disagreement(f"a group of sample {stream.sample} leaves its shard")
            if sum(group.stop_frame - group.first_frame for group in stream.groups) != stream.num_frames:
                raise Disagreement(f"groups of sample {stream.sample} have other frames")
            stream.frames_at(stream.times)


# --- what users pass on ----------------------------------------------------------------------------------------------


def state(data: bytes) -> None:
    """A state_dict from JSON; one that is accepted survives a round trip."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(StateError):
        loaded = LoaderState.from_dict(document)
        if LoaderState.from_dict(json.loads(json.dumps(loaded.to_dict()))) != loaded:
            raise Disagreement("another state after a round trip")


def urls(data: bytes) -> None:
    """URLs and braces: taken apart, joined, expanded, and shown without the password."""
    text = data.decode("utf-8", "replace").replace("\0", "")
    with contextlib.suppress(ConfigError):
        directory, name = split_url(text)
        scheme_of(text)
        if name and re.sub("/+", "/", join_url(directory, name)) != re.sub("/+", "/", text):
            raise Disagreement(f"{text!r} became {join_url(directory, name)!r}")
        local_path(text)
    for shown in (redact(f"https://user:{SECRET}@host/{text}"), redact(f"https://host/k?{text}&sig={SECRET}")):
        if SECRET in shown and SECRET not in text:
            raise Disagreement(f"{shown!r} tells a secret")
    with contextlib.suppress(ShardstreamError), mock.patch.object(expand, "MAX_BRACE_URLS", 2000):
        found = expand_urls(f"s3://b/{text}.tar", _NOWHERE)
        if len(found) > 2000 * (text.count("::") + 1):
            raise Disagreement(f"{len(found)} URLs")


# --- what convert reads --------------------------------------------------------------------------------------------


def formats(data: bytes) -> None:
    """An Example, a tagged value of LitData, and an LMDB file: each of them, or an error."""
    with contextlib.suppress(ValueError, RecursionError):
        parse_example(data)
    with contextlib.suppress(ValueError, LookupError, RecursionError):
        decode_nested(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.mdb"
        path.write_bytes(data)
        with contextlib.suppress(DataError, ConfigError):
            source = LmdbFiles(str(path), Storage(), SourceOptions(fields=(("value", "bin"),), key_field="number"))
            count = sum(1 for _ in source.records(0))
            if count != source.num_records:
                raise Disagreement(f"{count} entries, and {source.num_records} are said")


class _Nowhere(Storage):
    """A store that holds nothing."""

    def list(self, url: str) -> list[Any]:
        return []

    def exists(self, url: str) -> bool:
        return False


_NOWHERE = _Nowhere()

TARGETS: dict[str, Target] = {
    target.__name__: target for target in (headers, scanner, gzipped, pax, index, state, urls, formats)
}
