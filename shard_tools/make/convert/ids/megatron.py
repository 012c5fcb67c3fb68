"""Read Megatron's pairs of files: ``.bin`` holds tokens, ``.idx`` the beginnings of sequences and documents."""

from __future__ import annotations

import struct
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from shard_tools.make.convert.base.files import SourceFile, find_files
from shard_tools.make.convert.base.identity import EVERYWHERE, Origins, origins_of
from shard_tools.make.convert.base.records import Record, Skipped, SourceOptions, permutation
from shard_tools.make.convert.base.rows import unreadable_rest
from shard_tools.make.convert.ids.documents import Ids, TokenFiles
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.storage import Storage
from streaming.types import Int64Array

INDEX, DATA = ".idx", ".bin"
_MAGIC, _OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # mark, version, type, sequences, documents and one
_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
_FLOATS = {6: "float64", 7: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pair:
    """Two files of one name, and where the tokens of each document are.

    Attributes:
        index: The index.
        data: The tokens.
        dtype: Their type.
        begins: int64 ``[n]``, the byte where each sequence begins.
        sizes: int64 ``[n]``, its tokens.
        documents: int64 ``[d, 2]``, first sequence of each document that is not empty, and the one after its last.
        num_empty: Documents without a token.
    """

    index: SourceFile
    data: SourceFile
    dtype: np.dtype[Any]
    begins: Int64Array
    sizes: Int64Array
    documents: Int64Array
    num_empty: int

    def read(self, number: int, storage: Storage) -> Ids:
        """Return a document."""
        first, stop = self.documents[number].tolist()
        width = self.dtype.itemsize
        parts = []
        for begin, size in zip(self.begins[first:stop].tolist(), self.sizes[first:stop].tolist(), strict=True):
            data = storage.read(self.data.url, begin, begin + size * width) if size else b""
            parts.append(np.frombuffer(data, self.dtype))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class MegatronFiles(TokenFiles):
    """Documents of Megatron's ``IndexedDataset``; the sequences of a document follow each other.

    Raises:
        DataError: An index is damaged, or points out of its file.
        NotFoundError: There is no index, or no file of tokens beside one.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        others: list[SourceFile] = []
        found = find_files(spec, storage, (INDEX,), exclude=options.exclude, more=options.more, others=others)
        indexes = {_stem(file.url): file for file in found if file.url.lower().endswith(INDEX)}
        beside = {_stem(file.url): file for file in (*others, *found) if file.url.lower().endswith(DATA)}
        for stem in beside.keys() - indexes.keys() if not indexes else ():
            indexes[stem] = find_files(stem + INDEX, storage)[0]  # the file of tokens is named alone
        self._pairs = [_open(file, beside.get(stem), storage) for stem, file in indexes.items()]
        counts = [len(pair.documents) for pair in self._pairs]
        skipped = [
            Skipped(path=pair.index.name, reason=f"documents without a token: {pair.num_empty:,}")
            for pair in self._pairs
            if pair.num_empty
        ]
        super().__init__(
            "megatron", [pair.data for pair in self._pairs], storage, options,
            dtypes=[pair.dtype for pair in self._pairs], skipped=skipped,
        )  # fmt: skip
        self._ends, self._num_threads = [*accumulate(counts)], options.num_threads
        self.in_order = options.shuffle_seed is None
        self._order: Sequence[int] = range(self.num_records)
        if options.shuffle_seed is not None:
            self._order = permutation(self.num_records, options.shuffle_seed).tolist()

    @property
    def num_records(self) -> int:
        """Documents of all files."""
        return self._ends[-1] if self._ends else 0

    def origins(self) -> Origins:
        """Return the indexes and the files of tokens."""
        pairs = enumerate((pair.index, pair.data) for pair in self._pairs)
        inputs = [
            one
            for number, files in pairs
            for one in origins_of(files, self._storage, number=number if self.in_order else EVERYWHERE)
        ]
        return Origins(inputs=inputs, store=self._storage)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the documents from number ``start`` on; only their bytes are read."""
        return map_threads(self._read, range(start, self.num_records), self._num_threads)

    def _read(self, number: int) -> Record:
        place = self._order[number]
        which = int(np.searchsorted(self._ends, place, side="right"))
        pair = self._pairs[which]
        within = place - (self._ends[which] - len(pair.documents))
        where = f"{pair.index.shown_url}, document {within}"
        try:
            return self.record(pair.read(within, self._storage), number, where, which)
        except DataError as error:
            return unreadable_rest(number, where, error, which, tolerant=self._tolerant)


def _stem(url: str) -> str:
    return url[: -len(INDEX)]


def _open(index: SourceFile, data: SourceFile | None, storage: Storage) -> _Pair:
    """Read an index, and compare it with the size of its file of tokens.

    Raises:
        DataError: They do not fit.
        NotFoundError: There is no such file.
    """
    where = index.shown_url
    if data is None:
        try:
            data = find_files(_stem(index.url) + DATA, storage)[0]
        except NotFoundError as error:
            raise NotFoundError(f"{where}: no {DATA} of its name beside it, which would hold the tokens") from error
    content = memoryview(storage.read(index.url))
    if len(content) < _HEADER.size or bytes(content[: len(_MAGIC)]) != _MAGIC:
        old = bytes(content[: len(_OLD_MAGIC)]) == _OLD_MAGIC
        what = (
            "an index of fairseq's old kind; write it anew with a current Megatron" if old else "no index of Megatron"
        )
        raise DataError(f"{where}: {what}")
    _, version, code, num_sequences, num_ends = _HEADER.unpack(content[: _HEADER.size])
    if version != 1 or code not in _TYPES:
        found = f"version {version}" if version != 1 else f"values of {_FLOATS.get(code, f'the unknown type {code}')}"
        raise ConfigError(f"{where}: an index of {found}; expected version 1 and whole numbers")
    dtype = np.dtype(f"<{_TYPES[code]}")
    needed = _HEADER.size + 12 * num_sequences + 8 * num_ends
    if len(content) not in {needed, needed + num_sequences}:  # with a mode for each sequence
        raise DataError(
            f"{where}: {len(content)} bytes, expected {needed} for {num_sequences} sequences and {num_ends} ends of "
            "documents; it ends early, or is damaged. Fetch it again"
        )
    at = _HEADER.size
    sizes = np.frombuffer(content, "<i4", num_sequences, at).astype(np.int64)
    begins = np.frombuffer(content, "<i8", num_sequences, at + 4 * num_sequences).astype(np.int64)
    ends = np.frombuffer(content, "<i8", num_ends, at + 12 * num_sequences).astype(np.int64)
    _check(sizes, begins, data, dtype.itemsize, where)
    if not num_ends or ends[0] != 0 or ends[-1] != num_sequences or (np.diff(ends) < 0).any():
        raise DataError(f"{where}: its documents are no ascending parts of {num_sequences} sequences; damaged?")
    totals = np.concatenate([[0], np.cumsum(sizes)])
    is_filled = totals[ends[1:]] > totals[ends[:-1]]
    documents = np.stack([ends[:-1], ends[1:]], axis=1)[is_filled]
    return _Pair(
        index=index, data=data, dtype=dtype, begins=begins, sizes=sizes, documents=documents,
        num_empty=int((~is_filled).sum()),
    )  # fmt: skip


def _check(sizes: Int64Array, begins: Int64Array, data: SourceFile, width: int, where: str) -> None:
    """Refuse sequences that do not lie within the file of tokens.

    Raises:
        DataError: One does not.
    """
    # Sizes have 32 bits, so only the sum with a place beyond the file could overflow.
    wrong = np.flatnonzero(
        (sizes < 0) | (begins < 0) | (begins > data.size_bytes) | (sizes * width > data.size_bytes - begins)
    )
    if wrong.size:
        one = int(wrong[0])
        raise DataError(
            f"{where}: sequence {one} has {sizes[one]} tokens from byte {begins[one]} on, and {data.shown_url} has "
            f"{data.size_bytes} bytes: the two do not belong together, or one is cut off. Fetch both again"
        )


def has_pairs(names: Mapping[str, object]) -> bool:
    """Tell whether an index lies beside a file of tokens of its name, among names in lower case."""
    return any(name.endswith(INDEX) and _stem(name) + DATA in names for name in names)
