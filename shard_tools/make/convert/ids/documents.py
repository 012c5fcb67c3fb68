"""What sources of token ids share: a document is a sample with the field ``tok``, as ``--tokenizer`` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_tools.make.convert.base.files import FileSource, SourceFile
from shard_tools.make.convert.base.records import NUMBER_KEYS, Record, Skipped, SourceOptions, number_key
from streaming.errors import ConfigError, DataError
from streaming.shards.schema.value import Schema, SchemaField, TokenMeaning
from streaming.storage import Storage

TOKENS, COUNT = "tok", "tokens"
_BOUNDS = {"uint16": 2**16, "uint32": 2**32}
Ids = npt.NDArray[Any]
"""Ids of any type of whole numbers [n]."""


class TokenFiles(FileSource):
    """Documents of token ids: their number is the column ``tokens``, their type that of the widest file.

    Args:
        kind: The value of ``--from``.
        files: The files.
        storage: The store.
        options: How to read them.
        dtypes: Types of the ids, of all files.
        skipped: What is left out.
    """

    columns = (COUNT,)

    def __init__(
        self, kind: str, files: Sequence[SourceFile], storage: Storage, options: SourceOptions, *,
        dtypes: Sequence[np.dtype[Any]], skipped: Sequence[Skipped] = (),
    ) -> None:  # fmt: skip
        if options.key_field not in {None, NUMBER_KEYS}:
            raise ConfigError(f"--key: documents of {kind} have numbers for keys; leave --key out")
        super().__init__(kind, files, storage)
        self._beside, self._tolerant = tuple(skipped), options.tolerant
        is_narrow = all(one.itemsize <= (2 if one.kind == "u" else 1) for one in dtypes)
        self.dtype = "uint16" if is_narrow else "uint32"
        self.item_types = {TOKENS: self.dtype}

    @property
    def meaning(self) -> Schema:
        """Ids of a tokenizer that the files do not name."""
        tokens = TokenMeaning(vocab_size=_BOUNDS[self.dtype], column=COUNT)
        return Schema(fields={TOKENS: SchemaField(kind="tokens", dtype=self.dtype, tokens=tokens)})

    @property
    def fields(self) -> Mapping[str, bool]:
        """The tokens."""
        return {TOKENS: True}

    def record(self, ids: Ids, number: int, where: str, origin: int) -> Record:
        """Return the sample of a document.

        Raises:
            DataError: A number in it is no id.
        """
        wrong = np.flatnonzero((ids < 0) | (ids >= _BOUNDS[self.dtype])) if ids.dtype != self.dtype else ids[:0]
        if wrong.size:
            at = int(wrong[0])
            raise DataError(f"{where}: token {at} is {ids[at]}, expected 0 to {_BOUNDS[self.dtype] - 1}")
        content = ids.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        metadata = {TOKENS: ids, COUNT: len(ids)}
        return Record(key=number_key(number), fields={TOKENS: content}, metadata=metadata, where=where, origin=origin)
