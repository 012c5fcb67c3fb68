"""Work that one rank does for all: the others get its result, or its error, instead of asking the store as well."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from streaming.job.error_codec import error_from_json, error_to_json

PEER_WAIT_S = 20.0
"""How long a process waits for a peer to begin what it counts on, before it does that itself."""

LOOK_UP_S = 0.25
"""After how long, at most, it looks again whether that peer has begun, or goes on from an older world instead."""

RESULT_WAIT_S = 600.0
"""How long it waits for one that has begun: listing and reading a large index from far away."""

PIECE_BYTES = 4 << 20
"""Of one entry in the key-value store, which takes 8 MiB."""

MOST_BYTES = 4 << 30
"""What the key-value store, which is one thread of one process, hands out to all ranks for one result: some seconds."""

_log = logging.getLogger(__name__)


class Peers(Protocol):
    """Processes that can leave bytes for each other. Nobody waits for anybody beyond a time-out."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def world_size(self) -> int:
        """All of them."""

    def turn(self, name: str) -> int:
        """Tell how often this process has asked for this name, this time included."""

    def leave(self, name: str, data: bytes) -> None:
        """Leave ``data`` for the others."""

    def find(self, name: str, timeout_s: float) -> bytes | None:
        """Return what somebody left, or None if nobody did in time; 0: if nobody has."""


def shared(peers: Peers | None, name: str, make: Callable[[], bytes]) -> bytes:
    """Return what ``make`` returns: called on rank 0, whose result all others get; without peers, here.

    The n-th call for a name meets the n-th of the others. Where rank 0 does not begin in time (this process works
    alone), or the result is too large to be handed to all (more than ``MOST_BYTES`` together), ``make`` is called here.

    Raises:
        Exception: What ``make`` raised, here or on rank 0.
    """
    if peers is None:
        return make()
    place = f"{name}/{peers.turn(name)}"
    if peers.rank == 0:
        return _made(peers, place, make)
    if not _begins(peers, 0, place, PEER_WAIT_S):
        return make()
    data = _told(peers, place, "raised on rank 0, which opens the data set for all ranks")
    return make() if data is None else data


def shared_parts(peers: Peers | None, name: str, make: Callable[[int, int], bytes]) -> list[bytes]:
    """Return what ``make`` returns for each rank of so many: called here for this one, the others tell theirs.

    Without peers, this is the only rank.
    What a rank has not begun in time is made here, and so is what comes after it, unless it is there already.

    Raises:
        Exception: What ``make`` raised, here or on the rank whose part it was.
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
        data = _told(peers, f"{place}/{rank}", f"raised on rank {rank}") if begun else None
        parts[rank] = make(rank, world_size) if data is None else data
    return [parts[rank] for rank in range(world_size)]


def part_of(count: int, rank: int, world_size: int) -> range:
    """Return which of so many things are a rank's part."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def framed(head: Mapping[str, Any], *body: bytes) -> bytes:
    """Put a JSON-able head before bytes, for ``unframed``."""
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *body])


def unframed(data: bytes) -> tuple[Any, int]:
    """Return the head, and where the bytes behind it begin."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def go_on(peers: Peers) -> None:
    """Tell processes that join that this one has opened its data sets in an older world: they wait in vain."""
    peers.leave(f"goes on/{peers.rank}", b"1")


def _begins(peers: Peers, rank: int, place: str, wait_s: float) -> bool:
    """Wait until ``rank`` begins, or is known to go on from an older world; whether it begins.

    It looks, sleeps and looks again: of each timed wait that runs out torch's store writes two warnings.
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
                told = "rank %d has not started to open this data set within %g s; rank %d does so in its place"
                _log.warning(told, rank, wait_s, peers.rank)
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LOOK_UP_S)
    return True


def _told(peers: Peers, place: str, raised: str) -> bytes | None:
    """Wait for what a rank that has begun leaves; None if that did not come, or was too large."""
    told = peers.find(f"{place}/told", RESULT_WAIT_S)
    if told is None:
        return None
    head = json.loads(told)
    if head["error"] is not None:
        raise error_from_json(head["error"].encode(), raised)
    pieces = [peers.find(f"{place}/{number}", PEER_WAIT_S) for number in range(head["pieces"])]
    found = [piece for piece in pieces if piece is not None]
    return zlib.decompress(b"".join(found)) if len(found) == head["pieces"] and found else None


def _made(peers: Peers, place: str, make: Callable[[], bytes]) -> bytes:
    """Make it, and leave it for the others: the pieces first, then word of them."""
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
