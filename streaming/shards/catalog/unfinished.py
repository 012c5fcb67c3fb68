"""Refuse incomplete sets: writers mark a directory before its first shard, and remove the mark after its index.

A directory has one file with a fixed name, which can be requested where listing is impossible, and one file per
unfinished writer, so that the first to finish does not remove the mark of the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Self

from streaming.common.arguments import Urls
from streaming.errors import AccessDeniedError, NotFoundError, UnfinishedError, shell_word
from streaming.shards.catalog.listing import StorageAhead
from streaming.shards.catalog.urls import expand_urls, folders_of, is_hidden
from streaming.shards.index.files import is_sealed, read_document, write_document
from streaming.shards.index.layout import UNFINISHED_FILE, VERSIONS_DIRECTORY, WRITERS_DIRECTORY, without_work
from streaming.shards.versions.current import read_current
from streaming.storage import ReadBuffer, Storage, join_url, redact, split_url

WRITER = "ShardWriter"
"""Value of ``command`` for an unfinished writer that belongs to a program."""
_FORMAT, _VERSION = "shardstream-unfinished", 1
FINISHED = b'{"format": "shardstream-unfinished", "finished": true}\n'
"""Content of a file that no longer marks anything, where it could be replaced but not deleted."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Work in progress of one writer in a directory of shards.

    Attributes:
        command: The command that writes, such as ``"convert"``; ``"ShardWriter"`` for a program.
        work: Digest of its work; the same for each run of the same work.
        what: Its source or its pattern, for people; without secrets.
        begun: Time of its start: ISO 8601, UTC.
        num_shards: Number of shards of the complete set, if known.
        start: Number of the first shard that it writes, if a program numbers them; otherwise -1.
        first: Number of the first shard of the interrupted writer whose work it continues; otherwise ``start``.
        awaits_table: It has written its shards, and left the chunk table to another writer.
    """

    command: str
    work: str
    what: str
    begun: str
    num_shards: int | None = None
    start: int = -1
    first: int = -1
    awaits_table: bool = False

    def to_bytes(self) -> bytes:
        """Return the value as the content of a file."""
        return write_document({"format": _FORMAT, "version": _VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: ReadBuffer) -> Self | None:
        """Return the inverse. None for a mark that is damaged or of a later release, which is still a mark."""
        try:
            content = read_document(data)
            if content.pop("format") != _FORMAT or content.pop("version") != _VERSION:
                return None
            return cls(**content)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The mark of one directory, with the number of its shards; without a listing, the number of named shards."""

    directory: str
    writer: Unfinished | None
    num_found: int
    is_listed: bool

    @property
    def what(self) -> str:
        """The directory, and its state."""
        return f"{redact(self.directory) or '.'} {self.state}"

    @property
    def state(self) -> str:
        """State of the directory: unfinished, by which command, and how far."""
        if self.writer is None:
            return f"is not whole, according to {UNFINISHED_FILE} there, which cannot be read"
        one = self.writer
        of = "" if one.num_shards is None else f" of {one.num_shards:,}"
        counted = "are there" if self.is_listed else "of it are named"
        subject = (
            "a ShardWriter"
            if one.command == WRITER
            else f"`shard_tools {' '.join(map(shell_word, one.command.split()))}`"
        )
        return (
            f"is not whole: {subject} ({one.what}), begun {one.begun}, is still writing it or was interrupted; "
            f"{self.num_found:,}{of} shards {counted}"
        )

    @property
    def cure(self) -> str:
        """The cure."""
        program = self.writer is not None and self.writer.command == WRITER
        again = "run that program again until it closes its writer" if program else "run the same command again"
        return (
            f"{again}, which completes the set; or read what is there with allow_unfinished=True (in the tools "
            "--allow-unfinished)"
        )


class Marks:
    """The marks of some shards' directories. The constructor sends the requests; their results are awaited later.

    Listed directories cost no request. Marks of directories below them count too: a set with a folder that has not
    begun is incomplete.

    Args:
        storage: The storage that has listed the folders.
        folders: The user's folders, each of which stands for all shards below it.
        shards: The shards.
        exclude: A directory whose marks do not count, nor those below it: the target of a command.
    """

    def __init__(
        self, storage: StorageAhead, folders: Sequence[str], shards: Sequence[str], *, exclude: str | None = None
    ) -> None:
        self._storage = storage
        self._found = Counter(split_url(url)[0] for url in shards)
        end = f"/{UNFINISHED_FILE}"
        below = None if exclude is None else exclude.rstrip("/") + "/"
        listed = [url.removesuffix(end) for url in storage.listed(end)]
        self._named = [
            home for home in self._found if not any(f"{home}/".startswith(f"{folder}/") for folder in folders)
        ]
        hidden = {home for home in listed if any(is_hidden(home, folder) for folder in folders)}
        homes = [home for home in dict.fromkeys([*listed, *self._named]) if home not in hidden]
        self._homes = [home for home in homes if below is None or not f"{home}/".startswith(below)]
        for home in self._homes:
            storage.will_read(join_url(home, UNFINISHED_FILE))

    def found(self) -> tuple[Mark, ...]:
        """Wait for the answers, and return the marks.

        A store that denies access to missing objects, as S3 does without permission to list, has none.
        """
        marks = []
        for home in self._homes:
            with suppress(NotFoundError, AccessDeniedError):
                data = _content(self._storage, join_url(home, UNFINISHED_FILE))
                if _is_foreign(data):
                    _log.warning(
                        "%s: holds no mark of an unfinished set; ignored", redact(join_url(home, UNFINISHED_FILE))
                    )
                elif data != FINISHED:
                    marks.append(
                        Mark(
                            directory=home, writer=Unfinished.from_bytes(data), num_found=self._found[home],
                            is_listed=home not in self._named,
                        )
                    )  # fmt: skip
        return tuple(marks)

    def check(self, *, allow_unfinished: bool) -> tuple[Mark, ...]:
        """Refuse an unfinished set, or log that only its existing shards are read.

        Raises:
            UnfinishedError: There are marks, and ``allow_unfinished`` is False.
        """
        marks = self.found()
        if marks and not allow_unfinished:
            others = f" (and {len(marks) - 1} more directories)" if len(marks) > 1 else ""
            raise UnfinishedError(f"{marks[0].what}{others}; {marks[0].cure}")
        for mark in marks:
            _log.warning("%s; only these are read", mark.what)
        return marks


def _content(storage: Storage, url: str) -> ReadBuffer:
    """Return the content of a mark. Wrong bytes are requested again; a damaged mark is still a mark."""

    def checked(data: ReadBuffer, _: str) -> ReadBuffer:
        if data != FINISHED and not _is_foreign(data):
            read_document(data)
        return data

    with suppress(ValueError, TypeError, RecursionError):
        return storage.read_parsed(url, checked, is_sealed)
    return storage.read(url)


def _is_foreign(data: ReadBuffer) -> bool:
    """Return whether these bytes are something else, as of web servers that answer every request with a page.

    A damaged mark, or one of a later release, contains the name of one of its entries, or is empty.
    """
    content = bytes(data)
    return bool(content) and not any(name in content for name in (b'"format"', b'"command"', b'"begun"', b'"work"'))


def expand_whole(
    urls: Urls, storage: Storage, *, allow_unfinished: bool, exclude: str | None = None
) -> tuple[tuple[str, ...], tuple[Mark, ...]]:
    """Return the shards that ``urls`` name, like :func:`expand_urls`, and the marks that ``allow_unfinished`` permits.

    Raises:
        UnfinishedError: Their directories are marked, and ``allow_unfinished`` is False.
        NotFoundError, ConfigError: As for :func:`expand_urls`.
    """
    with closing(StorageAhead(storage)) as ahead:
        shards, marks = expand_ahead(urls, ahead, exclude=exclude)
        return shards, marks.check(allow_unfinished=allow_unfinished)


def expand_ahead(urls: Urls, storage: StorageAhead, *, exclude: str | None = None) -> tuple[tuple[str, ...], Marks]:
    """Return the shards that ``urls`` name, and their directories' marks, which are only requested.

    Raises:
        UnfinishedError: There is no shard yet, but a mark.
        NotFoundError, ConfigError: As for :func:`expand_urls`.
    """
    folders = folders_of(urls)
    try:
        shards = tuple(expand_urls(urls, storage))
    except NotFoundError:
        Marks(storage, folders, (), exclude=exclude).check(allow_unfinished=False)
        raise
    shards = _of_current_versions(shards, folders, storage)
    return shards, Marks(storage, folders, shards, exclude=exclude)


def _of_current_versions(
    shards: tuple[str, ...], folders: Sequence[str], storage: StorageAhead
) -> tuple[str, ...]:  # fmt: skip
    """Take what was listed of sets that live as their chunk tables have it, also where a listing is older or younger.

    Other shards there are replaced or deleted, and stay for earlier versions, or are not published yet.

    Args:
        shards: The shards; those that were listed may be of any version.
        folders: What stands for all shards below it; of a pattern, the shards of the version that match it are taken.
        storage: What has listed them.
    """
    found, living = shards, set[str]()
    for home in storage.listed_below(f"/{VERSIONS_DIRECTORY}/"):
        table = read_current(storage, home)
        if table.version is None:
            continue
        living.add(home)
        current = [join_url(home, shard.name) for shard in table.shards]
        mine = [url for url in found if split_url(url)[0] == home and storage.was_listed(url)]
        is_whole = any(f"{home}/".startswith(f"{folder}/") for folder in folders)
        taken = current if is_whole else sorted({*current} & {*mine})
        if mine and mine != taken:
            at, listed = found.index(mine[0]), {*mine}
            rest = [url for url in found[at:] if url not in listed]
            found = (*found[:at], *taken, *rest)
            _log.info(
                "%s: version %d; %d shards there are of other versions, or not published, and are not read",
                redact(home), table.version.number, len(listed.difference(current)),
            )  # fmt: skip
    _warn_of_versions(found, living)
    return found


def _warn_of_versions(shards: Sequence[str], living: Collection[str]) -> None:
    """Log a warning about shards that look like versions of one shard, in directories without an index that says so."""
    before: dict[tuple[str, str], str] = {}
    again = []
    for url in shards if any("-v" in url for url in shards) else ():
        directory, name = split_url(url)
        other = before.setdefault((directory, without_work(name)), url)
        if other != url and directory not in living:
            again.append((other, url))
    if again:
        _log.warning(
            "%s and %s (and %d more such pairs) look like two versions of one shard, written by a command such as "
            "`delete`, but the index that says which one counts is missing: samples may be read twice, and deleted "
            "ones are back. Copy sets with `shard_tools copy`, which takes the current version only",
            *map(redact, again[0]), len(again) - 1,
        )  # fmt: skip


def writers_of(storage: Storage, directory: str) -> dict[str, Unfinished | None]:
    """Return the unfinished writers of a directory, by the URL of their file."""
    found: dict[str, Unfinished | None] = {}
    with suppress(NotFoundError, AccessDeniedError):
        for info in storage.list(join_url(directory, WRITERS_DIRECTORY)):
            with suppress(NotFoundError):  # the writer has finished meanwhile
                data = _content(storage, info.url)
                if data != FINISHED:
                    found[info.url] = Unfinished.from_bytes(data)
    return found
