"""Carry rows from the training process to its workers, and batches and errors back.

A batch is sent as a pickle (protocol 5) whose buffers lie in a ring slot: the buffers of all its tensors and arrays,
and long lists of ``bytes`` as one buffer each. Tensors from ``SlotWriter.allocate`` are in the slot already.
"""

from __future__ import annotations

import io
import pickle
import traceback
from dataclasses import dataclass
from itertools import pairwise
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np

from streaming.build.batches.rows import Cuts, FieldRange, Rows
from streaming.build.decode import ReadDistant
from streaming.errors import WorkerError
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.workers.portable import Pickler, dumps
from streaming.run.engine.workers.ring import Memory, SlotWriter
from streaming.types import Int64Array

_IN_SLOT_BYTES = 32 << 10
"""Pickles and lists of bytes from this size on go through the slot: cheaper than twice through a socket."""
_SMALL_ITEM_BYTES = 4 << 10
"""Smaller items are joined and split as bytes objects; for larger ones a single copy into the slot is cheaper."""

WireRows: TypeAlias = tuple[
    bytes | None, list[str], list[str], dict[str, tuple[Any, Any]], bytes | None, Any, Any, Any, Any, Any, Cuts
]


# --- rows ---


def rows_to_wire(rows: Rows, arena: Arena | None) -> WireRows:
    """Return ``rows`` without their buffer if that is the arena, else with it."""
    inline = None if arena is not None and rows.memory is arena.memory else bytes(rows.memory)
    fields = {name: (where.starts, where.sizes) for name, where in rows.fields.items()}
    damage = dumps(dict(rows.damage)) if rows.damage else None
    return (
        inline, rows.keys, rows.urls, fields, damage, rows.numbers, rows.positions, rows.sources, rows.packs,
        rows.chunk_ids, rows.cuts,
    )  # fmt: skip


def rows_from_wire(
    wire: WireRows, memory: Any, view: memoryview, read_distant: ReadDistant | None = None
) -> Rows:  # fmt: skip
    """Return the rows. ``memory`` and ``view`` are the arena's; ``read_distant`` asks the process that sent them."""
    inline, keys, urls, fields, damage, numbers, positions, sources, packs, chunk_ids, cuts = wire
    return Rows(
        memory=memory if inline is None else inline,
        view=view if inline is None else memoryview(inline),
        keys=keys,
        urls=urls,
        fields={name: FieldRange(starts=starts, sizes=sizes) for name, (starts, sizes) in fields.items()},
        damage={} if damage is None else pickle.loads(damage),  # noqa: S301  from our own process
        numbers=numbers,
        positions=positions,
        sources=sources,
        packs=packs,
        chunk_ids=chunk_ids,
        read_distant=read_distant,
        cuts=cuts,
    )


# --- batches ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A batch whose buffers lie in a slot.

    Attributes:
        body: The pickle; None: the last buffer is the pickle.
        echoes: Entries of the batch that are the rows' own lists: name to ``"keys"`` or ``"urls"``.
        buffers: Start and size of each buffer in the slot.
        used_bytes: Number of bytes of the slot in use.
    """

    body: bytes | None
    echoes: dict[str, str]
    buffers: list[tuple[int, int]]
    used_bytes: int


def pack(batch: Any, rows: Rows, writer: SlotWriter) -> Parcel:
    """Pack ``batch`` with its memory in the writer's slot.

    Raises:
        Exception: Pickling a part of the batch raised it.
    """
    echoes: dict[str, str] = {}
    if rows.cuts is not None:  # its micro-batches
        batch = [_lighter_entries(one, rows, writer) for one in batch]
    elif type(batch) is dict:
        batch = {name: _lighter(name, value, rows, writer, echoes) for name, value in batch.items()}
    elif type(batch) is list:
        batch = _lighter(None, batch, rows, writer, echoes)
    buffers: list[tuple[int, int]] = []

    def keep(buffer: PickleBuffer) -> bool:
        try:
            data = np.frombuffer(buffer.raw(), np.uint8)
        except BufferError:  # not contiguous: part of the pickle
            return True
        buffers.append((writer.place(data), len(data)))
        return False

    out = io.BytesIO()
    Pickler(out, keep).dump(batch)
    body: bytes | None = out.getvalue()
    if body is not None and len(body) >= _IN_SLOT_BYTES:
        keep(PickleBuffer(body))
        body = None
    return Parcel(body=body, echoes=echoes, buffers=buffers, used_bytes=writer.used_bytes)


def unpack(parcel: Parcel, memory: Memory, keys: list[str], urls: list[str]) -> Any:
    """Return the batch. Its tensors and arrays are views of ``memory`` (the slot's used bytes) and keep it alive."""
    buffers = [memory[start : start + size] for start, size in parcel.buffers]
    body = buffers.pop().data if parcel.body is None else parcel.body
    batch = pickle.loads(body, buffers=buffers)  # noqa: S301  from our own worker
    for name, what in parcel.echoes.items():
        batch[name] = keys if what == "keys" else urls
    return batch


def _lighter_entries(batch: Any, rows: Rows, writer: SlotWriter) -> Any:
    """Return a micro-batch with entries that are cheaper to send; its keys are not those of all rows."""
    if type(batch) is dict:
        return {name: _lighter(None, value, rows, writer, {}) for name, value in batch.items()}
    return _lighter(None, batch, rows, writer, {}) if type(batch) is list else batch


def _lighter(name: Any, value: Any, rows: Rows, writer: SlotWriter, echoes: dict[str, str]) -> Any:
    """Return ``value``, or a replacement that is cheaper to send."""
    if type(value) is not list or not value:
        return value
    if name == "__key__" and value == rows.keys:
        echoes[name] = "keys"
        return None
    if name == "__url__" and value == rows.urls:
        echoes[name] = "urls"
        return None
    kinds = set(map(type, value))
    if bytes in kinds and kinds <= {bytes, type(None)}:
        sizes = np.fromiter((-1 if item is None else len(item) for item in value), np.int64, len(value))
        total = int(sizes.clip(0).sum())
        if total >= _IN_SLOT_BYTES:
            return _BytesList(value, sizes, writer.reserve(total))
    return value


class _BytesList:
    """Represent a list of ``bytes`` or None: all of them end to end in ``room``, and their sizes (None: -1)."""

    def __init__(self, values: list[bytes | None], sizes: Int64Array, room: Memory) -> None:
        self._sizes = sizes
        self._room = room
        out = room.data
        if len(room) < _SMALL_ITEM_BYTES * len(values):
            out[:] = b"".join([value for value in values if value is not None])
            return
        start = 0
        for value in values:
            if value is not None:
                out[start : start + len(value)] = value
                start += len(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bytes_list, (PickleBuffer(self._room.data), self._sizes)


def _bytes_list(memory: Any, sizes: Int64Array) -> list[bytes | None]:
    lengths = sizes.clip(0)
    stops = np.cumsum(lengths)
    places = zip((stops - lengths).tolist(), stops.tolist(), strict=True)
    if len(memory) < _SMALL_ITEM_BYTES * len(sizes):
        whole = bytes(memory)
        values: list[bytes | None] = [whole[start:stop] for start, stop in places]
    else:
        view = memoryview(memory)
        values = [bytes(view[start:stop]) for start, stop in places]
    for missing in np.flatnonzero(sizes < 0).tolist():
        values[missing] = None
    return values


# --- errors ---


def error_to_wire(error: BaseException, where: str) -> list[bytes]:
    """Pickle the exception and its causes, one by one. ``where`` and the traceback become notes."""
    trace = "".join(traceback.format_exception(error))
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and len(chain) < 8:
        chain.append(chain[-1].__cause__)
    blobs = [_portable(link) for link in chain]
    return [*blobs, pickle.dumps(f"{where}\nTraceback in the worker:\n{trace}")]


def error_from_wire(blobs: list[bytes]) -> BaseException:
    """Return the exception, ready to be raised, with its causes and notes as in the worker."""
    *chain, note = [pickle.loads(blob) for blob in blobs]  # noqa: S301  from our own worker
    for link, cause in pairwise(chain):
        link.__cause__ = cause
    error: BaseException = chain[0]
    error.add_note(note)
    return error


def _portable(error: BaseException) -> bytes:
    """Pickle the exception or, if it does not survive that, a WorkerError that describes it."""
    try:
        blob = dumps(error)
        if type(pickle.loads(blob)) is type(error):  # noqa: S301  pickled just now
            return blob
    except Exception:  # noqa: BLE001, S110  any class may fail in any way here
        pass
    return pickle.dumps(WorkerError(f"{type(error).__module__}.{type(error).__qualname__}: {error}"))
