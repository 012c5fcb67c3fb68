"""Read token ids one after the other: nanoGPT's ``.bin``, those of llm.c with a header, and ``.npy``."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from shard_tools.make.convert.base.counts import CountedFiles, FileCount, Marker
from shard_tools.make.convert.base.files import SourceFile, open_stored, table_files
from shard_tools.make.convert.base.records import Record, SourceOptions
from shard_tools.make.convert.base.rows import unreadable_rest
from shard_tools.make.convert.ids.documents import Ids, TokenFiles
from shard_tools.make.convert.ids.megatron import DATA, INDEX
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage, redact

SUFFIXES = {"nanogpt": (".bin",), "npy": (".npy",)}
NONE = "none"  # the value of --document-token that parts nothing
MOST_TOKENS = 1 << 20
"""A longer document is cut: it would be a sample of its own size in memory."""
_BLOCK_TOKENS = 1 << 20
_HEADER_BYTES, _VERSION_AT = 1024, 4
_WITH_HEADER = {20240520: (1, "<u2", 50256), 20240801: (7, "<u4", 128000)}  # version, type, what begins a document
_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """A file of ids.

    Attributes:
        file: The file.
        dtype: Type of the ids.
        begin: The byte where they begin.
        num: How many there are.
        length: Of each row, where the file is a table; 0: it is none.
        token: What its kind of file puts between documents; None: not known.
    """

    file: SourceFile
    dtype: np.dtype[Any]
    begin: int
    num: int
    length: int = 0
    token: int | None = None


class TokenStreams(TokenFiles, CountedFiles):
    """Documents of streams of ids: each begins or ends with a token of its own (``--document-token``).

    It begins documents where the first file begins with it, otherwise it ends them. A file ends a document, too. Rows
    of a two-dimensional array are documents as they are.

    Raises:
        ConfigError: No token is known that separates the documents of a long file, or the ids are no whole numbers.
        DataError: A file is damaged.
    """

    def __init__(self, kind: str, spec: str, storage: Storage, options: SourceOptions) -> None:
        files, skipped = table_files(kind, spec, storage, SUFFIXES[kind], options)
        look = _look_at_npy if kind == "npy" else _look_at_bin
        self._streams = [look(file, storage) for file in files]
        super().__init__(kind, files, storage, options, dtypes=[one.dtype for one in self._streams], skipped=skipped)
        self._token = _separator(self._streams, options.document_token)
        first = next((one for one in self._streams if one.num), None)
        self._begins = False
        if first is not None and self._token is not None:
            self._begins = int(next(self._blocks(first, 0))[0]) == self._token

    def identity(self) -> dict[str, object]:
        """Return the names of the files, and what parts documents."""
        return {**super().identity(), "document_token": self._token, "begins": self._begins}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the documents from number ``start`` on."""
        begin = self._beginning(start)
        number, at, first = begin.number, begin.at, begin.number_in_file
        for which, stream in enumerate(self._streams[begin.which :], begin.which):
            place = stream.file.shown_url
            try:
                for within, ids in enumerate(self._documents(stream, at), first):
                    if number >= start:
                        yield self.record(ids, number, f"{place}, document {within}", which)
                    number += 1
            except DataError as error:
                rest = unreadable_rest(number, place, error, which, tolerant=self._tolerant)
                if number >= start:
                    yield rest
                number += 1
            at = first = 0

    def count_file(self, file: SourceFile) -> FileCount:
        """Count the documents of a file, and mark where some begin."""
        stream = self._streams[self.files.index(file)]
        marks, num_documents, at = Marker(), 0, 0
        for ids in self._documents(stream, 0):
            num_documents, at = num_documents + 1, at + len(ids) * stream.dtype.itemsize
            marks.add(num_documents, at)
        return marks.count(num_documents)

    def _documents(self, stream: _Stream, at: int) -> Iterator[Ids]:
        """Yield the documents from the one that begins ``at`` bytes after the first."""
        held: list[Ids] = []  # of the document that is open
        num_held = 0
        for block in self._blocks(stream, at):
            for part, is_end in self._parts(block, stream):
                held.append(part)
                num_held += len(part)
                if is_end and num_held:
                    yield np.concatenate(held)
                    held, num_held = [], 0
            while num_held >= MOST_TOKENS and not stream.length:
                whole = np.concatenate(held)
                yield whole[:MOST_TOKENS]
                held = [whole[MOST_TOKENS:]]
                num_held = len(held[0])
        if num_held:
            yield np.concatenate(held)

    def _parts(self, block: Ids, stream: _Stream) -> Iterator[tuple[Ids, bool]]:
        """Yield the parts of a block, and whether a document ends with each."""
        if stream.length:
            for begin in range(0, len(block), stream.length):
                yield block[begin : begin + stream.length], True
            return
        cuts = np.flatnonzero(block == self._token) + (not self._begins) if self._token is not None else block[:0]
        begin = 0
        for cut in cuts.tolist():
            yield block[begin:cut], True
            begin = cut
        yield block[begin:], False

    def _blocks(self, stream: _Stream, at: int) -> Iterator[Ids]:
        """Yield the ids from a byte on in blocks, of whole rows where there are rows.

        Raises:
            DataError: The file ends early.
        """
        size = max(1, _BLOCK_TOKENS // stream.length) * stream.length if stream.length else _BLOCK_TOKENS
        with open_stored(stream.file, self._storage, unzip=False) as opened:
            opened.seek(stream.begin + at)
            for begin in range(at // stream.dtype.itemsize, stream.num, size):
                wanted = min(size, stream.num - begin) * stream.dtype.itemsize
                data = opened.read(wanted)
                if len(data) != wanted:
                    raise DataError(f"{stream.file.shown_url}: it ends early; fetch it again")
                yield np.frombuffer(data, stream.dtype)


def _separator(streams: Sequence[_Stream], given: str | None) -> int | None:
    """Return the token that parts documents; None: none does.

    Raises:
        ConfigError: It is not known, and a file is too long for a document.
    """
    if given is not None:
        if given != NONE and not given.isdecimal():
            raise ConfigError(f"--document-token {given!r}: expected an id (0, 1, 2, …) or {NONE!r}")
        return None if given == NONE else int(given)
    tokens = {one.token for one in streams if not one.length}
    if len(tokens) == 1 and (token := tokens.pop()) is not None:
        return token
    long = next((one for one in streams if one.num > MOST_TOKENS and not one.length), None)
    if long is not None:
        raise ConfigError(
            f"{long.file.shown_url}: a stream of {long.num:,} tokens: say which one begins or ends a document with "
            f"--document-token ID (50256 of GPT-2, as nanoGPT has it), or --document-token none for pieces of "
            f"{MOST_TOKENS:,}"
        )
    return None


def _look_at_bin(file: SourceFile, storage: Storage) -> _Stream:
    """Look at the header of a file, if it has one; nanoGPT's has none, and ids of 16 bits."""
    head, index = b"", file.url[: -len(DATA)] + INDEX
    if file.url.lower().endswith(DATA) and storage.exists(index):
        raise ConfigError(f"{file.shown_url}: beside it lies {redact(index)}, as of Megatron; use --from megatron")
    if file.size_bytes >= _HEADER_BYTES:
        head = bytes(storage.read(file.url, 0, 12))
    magic, version, num = struct.unpack("<iii", head) if head else (0, 0, 0)
    if magic in _WITH_HEADER:
        known, kind, token = _WITH_HEADER[magic]
        dtype = np.dtype(kind)
        if version != known or num < 0 or _HEADER_BYTES + num * dtype.itemsize != file.size_bytes:
            raise DataError(
                f"{file.shown_url}: its header says version {version} and {num} tokens, and it has {file.size_bytes} "
                f"bytes, expected version {known} and {_HEADER_BYTES + num * dtype.itemsize}; fetch it again"
            )
        return _Stream(file=file, dtype=dtype, begin=_HEADER_BYTES, num=num, token=token)
    if file.size_bytes % 2:
        raise DataError(f"{file.shown_url}: {file.size_bytes} bytes, which are no ids of 16 bits; is it of nanoGPT?")
    return _Stream(file=file, dtype=np.dtype("<u2"), begin=0, num=file.size_bytes // 2)


def _look_at_npy(file: SourceFile, storage: Storage) -> _Stream:
    with open_stored(file, storage, unzip=False) as opened:
        shape, is_fortran, dtype = _npy_header(opened, file)
        begin = opened.tell()
    where = file.shown_url
    if dtype.hasobject:
        raise ConfigError(f"{where}: an array of Python objects, which is pickled, and pickles are never read")
    if dtype.kind not in "iu" or len(shape) not in {1, 2} or (len(shape) == 2 and is_fortran):
        found = f"an array {list(shape)} of {dtype}{' by columns' if is_fortran else ''}"
        raise ConfigError(
            f"{where}: {found}, expected whole numbers [tokens] or [documents, tokens]; --from files stores arrays as "
            "they are"
        )
    num = int(np.prod(shape, dtype=object))
    if begin + num * dtype.itemsize != file.size_bytes:
        raise DataError(
            f"{where}: {file.size_bytes} bytes, and its header says {begin + num * dtype.itemsize}; fetch it again"
        )
    return _Stream(file=file, dtype=dtype, begin=begin, num=num, length=shape[1] if len(shape) == 2 else 0)


def _npy_header(opened: BinaryIO, file: SourceFile) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(opened)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        return read(opened, _MOST_HEADER)
    except (ValueError, KeyError, SyntaxError, TypeError, OSError) as error:
        raise DataError(f"{file.shown_url}: not a .npy file that can be read here ({error}); fetch it again") from error
