"""Lend the bytes of chunks to users as views: ``decode={"jpg": "view"}``.

Views are cut straight from the arena, from chunks that match their checksums. A second, private map of the same pages
would keep users' writes apart, but costs more than a copy once its bytes are read (docs/design/0047). So:

- A user may keep views for any time. All views of a chunk, and slices, arrays and tensors over them, keep one object
  alive; until it has gone, the place of the chunk is not used again. That counts in ``memory_limit``; beyond a part of
  it, users get copies.
- A user may write to a view: it is read-only, but ``torch.frombuffer`` ignores that. So lent bytes are never lent again
  unchecked. Before they are lent again (in the next epoch, as a substitute, as padding), the chunk is compared with its
  checksums. While a user still has views of it, a copy is made first, compared within the rest of the chunk, and lent.
  A chunk that a user has changed is fetched again, and compared as at its first fetch.
- Memory of chunks is private to this process, and maps of files are copy-on-write: no write reaches a file.
- Before a fork, and at the end, chunks of mapped files are copied in place, because their files may change afterwards.

The finalizer of that object runs in any thread, at any time, and so takes no lock. It appends to a deque; the threads
that fetch and lend empty it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from streaming.common.arguments import format_bytes
from streaming.common.forks import before_forks, in_children
from streaming.errors import ChecksumError, IndexMismatchError
from streaming.run.engine.memory.arena import Arena
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.storage import Checked, DifferentSumError, Parts
from streaming.types import Int64Array

_log = logging.getLogger(__name__)

_FORK_WAIT_S = 2.0
"""Time for which a fork waits for another thread that is lending, which takes microseconds."""
_EMPTY = memoryview(b"")


class _Memory:
    """The bytes of a chunk, for NumPy. Every view of them keeps this object alive, and with it the arena's memory."""

    __slots__ = ("__array_interface__", "__weakref__", "_arena")

    def __init__(self, arena: Arena, start: int, num_bytes: int) -> None:
        self._arena = arena.view[:0]
        place = arena.address + start, True
        self.__array_interface__ = {"data": place, "shape": (num_bytes,), "typestr": "|u1", "version": 3}


@dataclass(slots=True, eq=False)
class _Place:
    """A chunk in the arena.

    Attributes:
        wanted: The chunk.
        start: Its first byte.
        skew_bytes: Padding before it that belongs to its place.
        num_bytes: Its size.
        is_lendable: All of it is here and has been compared with checksums, which can be repeated.
        is_mapped: It was mapped from a file.
        given: Lent bytes, by their start; a user may have changed them.
        whole: All its bytes, from which views are cut; None: there are no views, as far as known here.
        memory: The object that all views keep alive; None: nothing was lent, or all of it has come back.
        num_loans: Number of objects like ``memory`` that have not come back.
        is_dropped: The store does not need it any more.
        num_mended: How many times users' changes of it were undone.
        instead: The bytes that the store has for it now, and their place, if users changed it and the store's bytes are
            damaged by now.
    """

    wanted: FetchRange
    start: int
    skew_bytes: int
    num_bytes: int
    is_lendable: bool
    is_mapped: bool
    given: set[int] = field(default_factory=set)
    whole: memoryview | None = None
    memory: weakref.ref[_Memory] | None = None
    num_loans: int = 0
    is_dropped: bool = False
    num_mended: int = 0
    instead: tuple[memoryview, UnitLayout] | None = None

    @property
    def room(self) -> tuple[int, int]:
        """First byte and size of the place, with padding."""
        return self.start - self.skew_bytes, self.skew_bytes + self.num_bytes

    @property
    def has_views(self) -> bool:
        """Whether there may be views; ``whole`` is released to find out."""
        self.whole = None
        return self.memory is not None and self.memory() is not None


@dataclass(frozen=True, slots=True)
class _ToCopy:
    """Bytes of a place to be copied, with their state under the lock.

    Attributes:
        row: Index among the requested ranges.
        place: The chunk.
        start: First byte in the arena.
        size: Number of bytes.
        was_lent: A user had, or has, a view of them.
        num_mended: Value of the place.
    """

    row: int
    place: _Place
    start: int
    size: int
    was_lent: bool
    num_mended: int

    @property
    def inside(self) -> int:
        """First byte within the chunk."""
        return self.start - self.place.start

    @property
    def is_doubtful(self) -> bool:
        """Whether a copy made since then may contain a user's writes."""
        return self.was_lent or self.start in self.place.given or self.num_mended != self.place.num_mended


class ViewLeases:
    """Cut views from the chunks of an arena. Thread-safe.

    ``_lock`` guards ``_starts``, ``_places``, ``_lent``, ``_free`` and the counts of bytes. Finalizers append to
    ``_returned`` without it.

    Args:
        arena: The arena.
        fetch: Fetches a chunk, as for the arena, into other memory.

    Attributes:
        limit_bytes: Upper bound on the bytes of chunks with views; beyond it, users get copies.
        kept_bytes: Bytes of the arena that only views keep.
    """

    def __init__(self, arena: Arena, fetch: Callable[[FetchRange, memoryview], Fetched]) -> None:
        self.limit_bytes = self.kept_bytes = 0
        self._lent_bytes = 0
        self._arena = arena
        self._fetch = fetch
        self._lock = threading.RLock()  # the garbage collector may close a loader in any thread
        self._starts: list[int] = []
        self._places: dict[int, _Place] = {}
        self._lent: set[_Place] = set()
        self._free: list[_Place] = []
        self._returned: deque[_Place] = deque()
        self._closed = self._may_end = self._has_lacked = self._has_told = False
        self._pid = os.getpid()
        before_forks(self, ViewLeases._part_before_fork)
        in_children(self, ViewLeases._leave_behind)

    # --- for the store ---

    def add(
        self, wanted: FetchRange, start: int, checked: Checked | None, *, skew_bytes: int, num_bytes: int,
        is_mapped: bool,
    ) -> None:  # fmt: skip
        """Note that a chunk lies in the arena from ``start`` on.

        Args:
            wanted: The chunk.
            start: Its first byte in the arena.
            checked: Its bytes match their checksums; None: some of its samples are damaged.
            skew_bytes: Padding before it.
            num_bytes: Number of its bytes that are here.
            is_mapped: It was mapped from a file.
        """
        is_whole = checked is not None and checked.is_summed and checked.num_bytes == num_bytes == wanted.num_bytes
        is_lendable = is_whole and self._arena.is_private
        with self._lock:
            # Every place in _starts is in _places: its chunk stays until release().
            insort(self._starts, start)
            self._places[start] = _Place(wanted, start, skew_bytes, num_bytes, is_lendable, is_mapped)

    def release(self, start: int) -> bool:
        """Note that the store does not need a chunk any more. Return whether its place can be used again now.

        If not, ``freed`` names the chunk when its last view has gone.
        """
        if start not in self._places:
            return True
        with self._lock:
            # From here on no bytes of it are lent.
            place = self._places.pop(start)
            del self._starts[bisect_right(self._starts, start) - 1]
            place.whole = None
            self._take_back()
            if not place.num_loans:
                return True
            place.is_dropped = True
            self.kept_bytes += place.room[1]
            return False

    def freed(self) -> list[tuple[FetchRange, int, tuple[int, int]]]:
        """Return the chunks whose last view has gone: each with its first byte and the place that it took.

        Each is returned once, after ``release``.
        """
        if not self._returned and not self._free:
            return []
        with self._lock:
            # Places taken from _free no longer count as kept: the caller frees them.
            self._take_back()
            free, self._free = self._free, []
            self.kept_bytes -= sum(place.room[1] for place in free)
        return [(place.wanted, place.start, place.room) for place in free]

    def _take_back(self) -> None:
        """Process the loans that finalizers have returned."""
        while self._returned:
            try:
                place = self._returned.popleft()
            except IndexError:  # the garbage collector has closed this loader meanwhile
                return
            place.num_loans -= 1
            if not place.num_loans:
                self._lent.discard(place)
                self._lent_bytes -= place.room[1]
                if place.is_dropped:
                    self._free.append(place)

    # --- for builders ---

    def lend(self, starts: Int64Array, sizes: Int64Array) -> list[memoryview | None]:
        """Return bytes of chunks that the store holds as read-only views; None where a size is negative.

        Args:
            starts: int64 [n], first byte of each in the arena.
            sizes: int64 [n].

        Raises:
            ChecksumError: A user has changed some of them, and the store's copy is damaged by now.
            IndexMismatchError, StorageError: They cannot be fetched again.
        """
        found: list[memoryview | None] = []
        copied: list[_ToCopy] = []
        with self._lock:
            # The requested places do not change: the store holds their chunks for the caller.
            self._may_end = True
            known, places = self._starts, self._places
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                if size <= 0:
                    found.append(None if size < 0 else _EMPTY)
                    continue
                place = places[known[bisect_right(known, start) - 1]]
                bytes_of = None if start in place.given else place.whole  # or this would be taken for a view
                if bytes_of is None:
                    bytes_of = self._ready(place, start)
                if bytes_of is None:
                    was_lent = start in place.given
                    copied.append(_ToCopy(len(found), place, start, size, was_lent, place.num_mended))
                    found.append(None)
                    continue
                place.given.add(start)
                found.append(bytes_of[start - place.start : start - place.start + size])
        for one, copy in zip(copied, self._copies(copied), strict=True):
            found[one.row] = memoryview(copy)
        return found

    def _ready(self, place: _Place, start: int) -> memoryview | None:
        """Return all bytes of a place, to cut the range that begins at ``start``; None: only a copy may be lent."""
        if self._closed or not place.is_lendable:
            self._has_lacked = True
            return None
        if start in place.given and not self._is_intact(place):
            return None
        if place.whole is not None:
            return place.whole
        memory = None if place.memory is None else place.memory()
        if memory is None:
            if not self._has_room(place):
                self._has_lacked = True
                return None
            memory = _Memory(self._arena, place.start, place.num_bytes)
            place.memory = weakref.ref(memory)
            # It needs neither the lock nor this object, which may be gone by then.
            weakref.finalize(memory, self._returned.append, place).atexit = False
            self._lent_bytes += 0 if place.num_loans else place.room[1]
            place.num_loans += 1
            self._lent.add(place)
        place.whole = memoryview(np.asarray(memory))  # type: ignore[arg-type]
        return place.whole

    def _is_intact(self, place: _Place) -> bool:
        """Return whether all lent bytes of a place have come back unchanged; then they can be lent again."""
        if place.has_views or not self._matches(place):
            return False
        place.given.clear()
        return True

    def _matches(self, place: _Place, copies: Sequence[tuple[int, bytes]] = ()) -> bool:
        """Return whether a chunk matches its checksums, with ``copies`` (by first byte) instead of its own bytes."""
        try:
            Checked.comparing(place.num_bytes, self._sums(place, copies))
        except DifferentSumError:
            return False
        return True

    def _sums(self, place: _Place, copies: Sequence[tuple[int, bytes]]) -> Iterator[tuple[Parts, int]]:
        memory = self._arena.view[place.start : place.start + place.num_bytes]
        for start, stop, expected in place.wanted.summed:
            yield _laid(memory, start, stop, copies), expected

    def _has_room(self, place: _Place) -> bool:
        """Return whether there may be views of a place; release unused views first if necessary."""
        if place.num_loans:
            return True
        if self._may_end and self._lent_bytes + place.room[1] > self.limit_bytes:
            self._may_end = False  # once per call of lend
            self._give_up_unused()
        return self._lent_bytes + place.room[1] <= self.limit_bytes

    def _copies(self, wanted: list[_ToCopy]) -> list[bytes]:
        """Return copies of bytes that no user has changed, or that were fetched again."""
        if self._has_lacked and not self._has_told:
            self._tell_of_copies()
        of_place: dict[_Place, list[_ToCopy]] = {}
        for one in wanted:
            of_place.setdefault(one.place, []).append(one)
        found = {id(one): copy for place, some in of_place.items() for one, copy in self._copied(place, some)}
        return [found[id(one)] for one in wanted]

    def _copied(self, place: _Place, wanted: list[_ToCopy]) -> Iterator[tuple[_ToCopy, bytes]]:
        """Yield copies of bytes of one place."""
        runs = _joined([(one.inside, one.inside + one.size) for one in wanted])
        memory = self._arena.view[place.start : place.start + place.num_bytes]
        copies = [(begin, bytes(memory[begin:end])) for begin, end in runs]
        # The copies are compared, which nobody can change any more, with the rest of the chunk around them.
        if any(one.is_doubtful for one in wanted) and (place.instead or not self._matches(place, copies)):
            again = self._fetch_again(place, wanted)
            copies = [(begin, bytes(again[begin:end])) for begin, end in runs]
        free = set(range(len(runs)))
        for one in wanted:
            run = bisect_right(runs, (one.inside, place.num_bytes)) - 1
            begin, copy = copies[run]
            is_all = len(copy) == one.size and run in free
            free.discard(run)
            # Each has memory of its own: a user may write to one of two views of a sample.
            yield one, copy if is_all else bytes(memoryview(copy)[one.inside - begin :][: one.size])

    def _fetch_again(self, place: _Place, wanted: list[_ToCopy]) -> memoryview:
        """Fetch the bytes of a place that users have changed again, and restore the place.

        Raises:
            ChecksumError: One of the requested samples is damaged in the store.
            IndexMismatchError: Another part of the chunk is read now.
        """
        if place.instead is None:
            again = memoryview(bytearray(place.num_bytes))
            fetched = self._fetch(place.wanted, again)
            self._check_is_all(place, fetched, again)
            if fetched.checked is not None:
                self._mend(place, again, fetched.checked)
                return again
            place.instead = again, fetched.apart(again)
        again, layout = place.instead
        for one in wanted:
            if (damage := layout.damage_at(one.inside)) is not None:
                raise ChecksumError(str(damage))  # a new one: an exception keeps the frames of each time it is raised
        return again

    @staticmethod
    def _check_is_all(place: _Place, fetched: Fetched, again: memoryview) -> None:
        """Check that the second fetch read the same part of the chunk as the first.

        Raises:
            IndexMismatchError: Another part of the chunk is read now.
        """
        checked = fetched.checked
        if (fetched.apart(again).num_bytes if checked is None else checked.num_bytes) != place.num_bytes:
            url = place.wanted.shown_url
            raise IndexMismatchError(
                f"{url}: the sample table of this shard was not there when its bytes were read, and is there now. "
                "Begin a new run from the last state"
            )

    def _mend(self, place: _Place, again: memoryview, checked: Checked) -> None:
        """Undo users' changes of a place, given all its bytes, unless users still have views of it."""
        with self._lock:
            # Nothing is lent meanwhile. Readers of other fields read the same bytes before and after; readers that have
            # made a copy under another num_mended compare it.
            is_free = not self._closed and not place.is_dropped and not place.has_views
            if checked.is_summed and is_free:
                place.num_mended += 1
                self._arena.view[place.start : place.start + place.num_bytes] = again
                place.given.clear()

    def _give_up_unused(self) -> None:
        """Take back the places that have no views."""
        for place in list(self._lent):
            place.whole = None
        self._take_back()

    def _tell_of_copies(self) -> None:
        self._has_told = True
        _log.warning(
            'decode "view": some views show copies. Views are cut from memory where batches are built in this process, '
            "from chunks that are read whole and have a checksum, up to %s of chunks (half of what memory_limit gives "
            "them, or less if the order needs more of it). To get fewer copies raise memory_limit, keep fewer batches, "
            "or use num_workers=0",
            format_bytes(self.limit_bytes),
        )

    # --- the end of the arena, or of this process ---

    def close(self, *, keeps_arena: bool) -> None:
        """Make users' views independent of files, and free the rest of the arena's memory. Nothing is lent afterwards.

        Args:
            keeps_arena: Some thread still reads from the arena.
        """
        with self._lock:
            # From here on lend() gives copies.
            self._closed = True
            self._part()
            if self._lent and not keeps_arena:
                self._arena.keep_only([place.room for place in self._lent])

    def _part(self) -> None:
        """Copy in place the bytes of files that users hold: files may change as soon as their leases end."""
        self._give_up_unused()
        for place in self._lent:
            if place.is_mapped:
                with suppress(OSError):  # no memory: it stays a private map
                    self._arena.copy_file(*place.room)

    def _part_before_fork(self) -> None:
        """Make the views of a forked child independent of its parent: maps of files are not."""
        if self._lent and os.getpid() == self._pid:
            is_held = self._lock.acquire(timeout=_FORK_WAIT_S)
            try:
                self._part()
            finally:
                if is_held:
                    self._lock.release()

    def _leave_behind(self) -> None:
        """Forget, in a forked child, the arena of its parent: views keep their bytes and return nothing."""
        self._lock, self._closed = threading.RLock(), True
        self._places, self._starts, self._lent = {}, [], set()


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, overlapping ones merged: each byte is copied once, however many requests it is in."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(set(ranges)):
        if found and begin < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _laid(memory: memoryview, start: int, stop: int, copies: Sequence[tuple[int, bytes]]) -> Iterator[memoryview]:
    """Yield bytes ``[start, stop)`` of a chunk, with ``copies`` of some, in order, instead of its own bytes."""
    for begin, copy in copies:
        low, high = max(begin, start), min(begin + len(copy), stop)
        if low < high:
            yield memory[start:low]
            yield memoryview(copy)[low - begin : high - begin]
            start = high
    yield memory[start:stop]
