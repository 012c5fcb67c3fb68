"""Mark target directories as unfinished, from before the first shard until after the index.

Readers refuse marked directories (``streaming.shards.catalog.unfinished``). Each writer has a file of its own in
``_shardstream/writers/``; ``unfinished.json``, which readers check, exists as long as any of these files does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeGuard

from streaming.errors import AccessDeniedError, NotFoundError
from streaming.shards.catalog.unfinished import FINISHED, WRITER, Unfinished, writers_of
from streaming.shards.index.layout import UNFINISHED_FILE, WRITERS_DIRECTORY, writer_path
from streaming.storage import Storage, join_url, local_path, redact_text, scheme_of

Writers = Mapping[str, Unfinished | None]
"""Unfinished writers by the URL of their file; None: the file cannot be read."""


def digest_of_work(*parts: object) -> str:
    """Return 16 hex digits that are equal for equal JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class TargetMark:
    """Mark directories of shards as unfinished. Not thread-safe.

    Args:
        storage: The store.
        directories: Directories of the shards.
        command: The command that writes them.
        work: Digest of the content to write.
        what: The source or pattern, for people.
        writer: Name of this writer's file: a run that continues the work of an interrupted one has the same name, and
            replaces its file. Default: ``work``.
        num_shards: Expected number of shards, if known.
        start: Number of the first shard to write, if a program numbers them.

    Attributes:
        work: As given.
        is_begun: Whether this mark has been set.
    """

    def __init__(
        self, storage: Storage, directories: Sequence[str], *, command: str, work: str, what: str,
        writer: str | None = None, num_shards: int | None = None, start: int = -1,
    ) -> None:  # fmt: skip
        self._storage = storage
        self._directories = tuple(dict.fromkeys(directory or "." for directory in directories))
        begun = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._content = Unfinished(
            command=command, work=work, what=redact_text(what), begun=begun, num_shards=num_shards, first=start,
            start=start,
        )  # fmt: skip
        self.work, self.is_begun = work, False
        self._writer, self._goes_on = writer or work, False

    def others(self, *, of_other_work: bool = False) -> Writers:
        """Return the other unfinished writers of the directories, or only those with different work."""
        found: dict[str, Unfinished | None] = {}
        for directory in self._directories:
            own = self._own(directory)
            found |= {url: one for url, one in writers_of(self._storage, directory).items() if url != own}
        return {url: one for url, one in found.items() if not of_other_work or one is None or one.work != self.work}

    def is_set(self) -> bool:
        """Return whether a directory is marked, as after an interrupted run of the same work."""
        marks = [join_url(directory, UNFINISHED_FILE) for directory in self._directories]
        return any(map(self._storage.exists, marks))

    def _is_own_set(self) -> bool:
        return any(self._storage.exists(self._own(directory)) for directory in self._directories)

    def begin(self, replaces: Callable[[Unfinished | None], bool] | None = None) -> None:
        """Mark the directories; delete files of other writers for which ``replaces`` is True."""
        self._goes_on, self.is_begun = self._goes_on or self._is_own_set(), True
        self._write()
        if replaces is not None:
            self._delete(replaces)
        for directory in self._directories:
            self._storage.put(join_url(directory, UNFINISHED_FILE), self._content.to_bytes())

    def begin_once(self) -> None:
        """Mark the directories unless that has been done."""
        if not self.is_begun:
            self.begin()

    def begin_shards(self, *, goes_on: Callable[[], bool]) -> None:
        """Mark the directory of a writer of numbered shards.

        Args:
            goes_on: Returns whether the shards before the first one exist; then the writer continues the work of
                interrupted writers, and replaces their files.
        """
        start = self._content.start
        before = [one for one in self.others().values() if self._is_same_pattern(one) and one.first < start]
        if before and goes_on():
            self._goes_on = True
            self._content = replace(self._content, first=min(one.first for one in before))
            self.begin(lambda one: one in before)
        else:
            self.begin()

    def finish_shards(self, next_shard: int, *, awaits_table: bool) -> None:
        """Finish a writer of the shards up to ``next_shard``, or leave its mark for the writer of the chunk table."""
        if awaits_table:
            if self.is_begun:
                self._content = replace(self._content, awaits_table=True)
                self._write()
            return
        mine = range(self._content.start, next_shard)

        def is_done(one: Unfinished | None) -> bool:
            is_overwritten = self._is_same_pattern(one) and one.start in mine and one.first >= self._content.first
            return is_overwritten or (one is not None and one.awaits_table)

        self.finish(is_done)

    def finish(self, replaces: Callable[[Unfinished | None], bool] | None = None) -> None:
        """Remove the marks, unless there are other writers; ``replaces`` applies to these as for :meth:`begin`."""
        if replaces is not None:
            self._delete(replaces)
        self._unmark()

    def withdraw(self) -> None:
        """Remove the marks after a failure before the first shard, unless an earlier run of the same work set them."""
        if self.is_begun and not self._goes_on:
            self._unmark()

    def _is_same_pattern(self, one: Unfinished | None) -> TypeGuard[Unfinished]:
        return one is not None and one.command == WRITER and one.what == self._content.what

    def _own(self, directory: str) -> str:
        return join_url(directory, writer_path(self._writer))

    def _write(self) -> None:
        for directory in self._directories:
            self._storage.put(self._own(directory), self._content.to_bytes())

    def _delete(self, which: Callable[[Unfinished | None], bool]) -> None:
        for url, one in self.others().items():
            if which(one):
                _remove(self._storage, url)

    def _unmark(self) -> None:
        for directory in self._directories:
            if self.is_begun:
                _remove(self._storage, self._own(directory))
            unmark(self._storage, directory)


def unmark(storage: Storage, directory: str, *, also_writers: bool = False) -> bool:
    """Delete ``unfinished.json`` unless writers of the directory have files; return whether it existed.

    A writer that begins meanwhile writes its own file first. So its file is seen before the deletion or after it, and
    in the second case the mark is restored. The last process to change the mark always checks for writers afterwards.

    Args:
        storage: The store.
        directory: The directory.
        also_writers: Delete the writers' files first, which declares their work finished.
    """
    url = join_url(directory, UNFINISHED_FILE)
    was_marked = storage.exists(url)
    if also_writers:
        for writer in writers_of(storage, directory):
            _remove(storage, writer)
    is_marked: bool | None = None
    while is_marked is not bool(left := writers_of(storage, directory)):
        is_marked = bool(left)
        if left:
            with suppress(NotFoundError):
                storage.put(url, bytes(storage.read(next(iter(left)))))
        else:
            _remove(storage, url)
    if not is_marked and scheme_of(directory) == "file":  # object stores have no empty directories
        for name in (WRITERS_DIRECTORY, os.path.dirname(WRITERS_DIRECTORY)):
            with suppress(OSError):
                os.rmdir(local_path(join_url(directory, name)))
    return was_marked


def _remove(storage: Storage, url: str) -> None:
    """Delete a file, or overwrite it as finished where deletion is not allowed."""
    try:
        storage.delete(url)
    except AccessDeniedError:
        storage.put(url, FINISHED)
