"""Do work on one rank for all: the other ranks get its result or its error, instead of reading from storage, too."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from streaming.common.job.error_codec import error_from_json, error_to_json

PEER_WAIT_S = 20.0
"""Maximum wait for a peer to begin needed work; after it, a process does the work itself."""

LOOK_UP_S = 0.25
"""Maximum interval between checks whether that peer has begun, or continues from an earlier world instead."""

RESULT_WAIT_S = 600.0
"""Maximum wait for a peer that has begun: enough to list and read a large, distant index."""

PIECE_BYTES = 4 << 20
"""Size of one entry in the key-value store, which accepts 8 MiB."""

MOST_BYTES = 4 << 30
"""Maximum bytes of one result that the store, a single thread, delivers to all ranks together: takes seconds."""

_log = logging.getLogger(__name__)


class Peers(Protocol):
    """Processes that can store bytes for each other. No wait exceeds a time-out."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def turn(self, name: str) -> int:
        """Return the number of times that this process has called this with the name, including this call."""

    def leave(self, name: str, data: bytes) -> None:
        """Store ``data`` for the others."""

    def find(self, name: str, timeout_s: float) -> bytes | None:
        """Return the stored bytes, or None if none came in time; 0: do not wait."""


def shared(peers: Peers | None, name: str, make: Callable[[], bytes]) -> bytes:
    """Return the result of ``make``, which is called on rank 0 for all ranks; without peers, in this process.

    The n-th call for a name is matched with the n-th call of the other ranks. ``make`` is called in this process if
    rank 0 does not begin in time (this process works alone), or if the result is too large (``MOST_BYTES`` over all
    ranks).

    Raises:
        Exception: Any error of ``make``, in this process or on rank 0.
    """
    if peers is None:
        return make()
    place = f"{name}/{peers.turn(name)}"
    if peers.rank == 0:
        return _made(peers, place, make)
    if not _begins(peers, 0, place, PEER_WAIT_S):
        return make()
    data = _result_of(peers, place, "raised on rank 0, which opens the data set for all ranks")
    return make() if data is None else data


def shared_parts(peers: Peers | None, name: str, make: Callable[[int, int], bytes]) -> list[bytes]:
    """Return the result of ``make`` for each rank: this process makes its own part; the other ranks send theirs.

    Without peers, this is the only rank. If a rank has not begun its part in time, this process makes it, and all later
    parts that are not available yet.

    Raises:
        Exception: Any error of ``make``, in this process or on the rank of the part.
    """
    if peers is None:
        return [make(0, 1)]
    place, world_size = f"{name}/{peers.turn(name)}", peers.world_size
    parts = {peers.rank: _made(peers, f"{place}/{peers.rank}", lambda: make(peers.rank, world_size))}
    wait_s = PEER_WAIT_S
    for rank in range(world_size):
        if rank in parts:
            continue
        begun = _begins(peers, rank, f"{place}/{rank}", wait_s)
        wait_s = wait_s if begun else 0.0
        data = _result_of(peers, f"{place}/{rank}", f"raised on rank {rank}") if begun else None
        parts[rank] = make(rank, world_size) if data is None else data
    return [parts[rank] for rank in range(world_size)]


def part_of(count: int, rank: int, world_size: int) -> range:
    """Return the numbers of a rank's part of ``count`` items."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def framed(head: Mapping[str, Any], *body: bytes) -> bytes:
    """Prefix bytes with a JSON-serializable head, for ``unframed``."""
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *body])


def unframed(data: bytes) -> tuple[Any, int]:
    """Return the head, and the offset of the bytes after it."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def go_on(peers: Peers) -> None:
    """Inform joining processes that this one opened its datasets in an earlier world, so they need not wait for it."""
    peers.leave(f"goes on/{peers.rank}", b"1")


def _begins(peers: Peers, rank: int, place: str, wait_s: float) -> bool:
    """Wait until ``rank`` begins, or is known to continue from an earlier world; return whether it begins.

    This polls, because torch's store logs two warnings for each timed wait that expires.
    """
    until_s = time.monotonic() + wait_s
    pause_s = 0.01
    while peers.find(f"{place}/begun", 0) is None:
        if peers.find(f"goes on/{rank}", 0) is not None:
            _log.info("rank %d continues from an older world; rank %d opens this data set alone", rank, peers.rank)
            return False
        left_s = max(until_s - time.monotonic(), 0)
        if not left_s:
            if wait_s:
                text = "rank %d has not started to open this data set within %g s; rank %d opens it instead"
                _log.warning(text, rank, wait_s, peers.rank)
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LOOK_UP_S)
    return True


def _result_of(peers: Peers, place: str, raised: str) -> bytes | None:
    """Wait for the result of a rank that has begun; None if it did not come, or was too large."""
    text = peers.find(f"{place}/told", RESULT_WAIT_S)
    if text is None:
        return None
    head = json.loads(text)
    if head["error"] is not None:
        raise error_from_json(head["error"].encode(), raised)
    pieces = [peers.find(f"{place}/{number}", PEER_WAIT_S) for number in range(head["pieces"])]
    found = [piece for piece in pieces if piece is not None]
    return zlib.decompress(b"".join(found)) if len(found) == head["pieces"] and found else None


def _made(peers: Peers, place: str, make: Callable[[], bytes]) -> bytes:
    """Make the result and store it for the others: first the pieces, then the announcement."""
    peers.leave(f"{place}/begun", b"1")
    try:
        data = make()
    except BaseException as error:
        peers.leave(f"{place}/told", json.dumps({"error": error_to_json(error).decode(), "pieces": 0}).encode())
        raise
    packed = zlib.compress(data, 1)
    count = -(-len(packed) // PIECE_BYTES) if len(packed) * (peers.world_size - 1) <= MOST_BYTES else 0
    for number in range(count):
        peers.leave(f"{place}/{number}", packed[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
    peers.leave(f"{place}/told", json.dumps({"error": None, "pieces": count}).encode())
    return data
