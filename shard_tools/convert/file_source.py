"""What sources that are files have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shard_tools.convert.files import SourceFile
from shard_tools.convert.records import Skipped
from streaming.storage import Storage


class FileSource:
    """A source of files whose records are counted only by reading them; the base of all but tables of known length."""

    def __init__(self, kind: str, files: Sequence[SourceFile], storage: Storage) -> None:
        self.kind = kind
        self.files = files
        self._storage = storage

    @property
    def num_records(self) -> int | None:
        """Unknown before reading."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the files as they lie."""
        return sum(file.size_bytes for file in self.files)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Nothing is left out."""
        return ()

    def identity(self) -> dict[str, object]:
        """The names and sizes of the files, as one digest."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size_bytes}\n".encode())
        return {"kind": self.kind, "num_files": len(self.files), "sha256_of_names": digest.hexdigest()}
