"""Context parallel: which positions of a sequence each peer gets, and cutting them out of a batch.

Of a sequence cut for 2 peers in a ring, position by position::

    contiguous   0 0 0 0 1 1 1 1
    zigzag       0 0 1 1 1 1 0 0      2 * 2 parts; peer i gets parts i and 3 - i

Zigzag gives every peer of ring attention the same work under a causal mask. Ulysses peers share what their ring peer
holds, in contiguous pieces, as in the unified sequence parallelism of Fang and Zhao (arXiv:2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from streaming.arguments import checks_names, is_whole
from streaming.errors import ConfigError
from streaming.types import Batch

Layout: TypeAlias = Literal["contiguous", "zigzag"]

RING_NAMES = frozenset({"cp", "context", "context_parallel", "ring"})
ULYSSES_NAMES = frozenset({"ulysses", "sp", "seq", "sequence", "sequence_parallel"})


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Each context-parallel peer gets its slice of the sequence instead of all of it.

    Peers are found by the names of the mesh's axes: a ring (``cp``, ``context``, ``ring``, …), ulysses (``ulysses``,
    ``sp``, ``sequence``, …), or both. Lengths must divide; pad in ``collate_fn``. Shift labels before they are cut.

    Attributes:
        fields: Batch entries to cut: tensors of one length along ``dim``. Entries that a batch lacks are an error.
        dim: The axis of the sequence; 1 in ``[batch, sequence, …]``.
        layout: How a ring cuts: ``"contiguous"`` or ``"zigzag"``.
        axes: Names of the axes of the ring and of ulysses, in this order, where their names do not tell; ``""``: none.
        position_ids: Name of an entry to add: int64 ``[length of the slice]``, where each element stood in the whole;
            with ``stage_fields``, on stages that use one of ``fields``.
    """

    fields: tuple[str, ...]
    dim: int = 1
    layout: Layout = "contiguous"
    axes: tuple[str, str] | None = None
    position_ids: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", checked_names("SequenceSlice: fields", self.fields))
        if not self.fields:
            raise ConfigError("SequenceSlice: fields: give at least one")
        if not is_whole(self.dim) or self.dim < 0:
            raise ConfigError(f"SequenceSlice: dim: expected an axis number of at least 0, got {self.dim!r}")
        if self.layout not in get_args(Layout):
            raise ConfigError(f"SequenceSlice: layout: expected 'contiguous' or 'zigzag', got {self.layout!r}")


def checked_names(what: str, names: object) -> tuple[str, ...]:
    """The names of batch entries as a tuple.

    Raises:
        ConfigError: It is no list or tuple of names.
    """
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{what}: expected names such as ("input_ids",), got {names!r}')
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePeer:
    """A place among the peers that share a sequence.

    Attributes:
        ring: Number in the ring, below ``ring_size``.
        ring_size: Peers in the ring.
        ulysses: Number among those that share what one ring peer holds.
        ulysses_size: How many these are.
    """

    ring: int = 0
    ring_size: int = 1
    ulysses: int = 0
    ulysses_size: int = 1

    @property
    def num_peers(self) -> int:
        """Peers that share one sequence."""
        return self.ring_size * self.ulysses_size


def find_peer(wanted: SequenceSlice, coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> SequencePeer:
    """The place that a rank at ``coordinates`` of a mesh of these axis sizes has among its sequence's peers.

    Raises:
        ConfigError: The mesh has no such axis, or several that may be meant.
    """
    if wanted.axes is not None:
        ring, ulysses = wanted.axes
        unknown = [name for name in (ring, ulysses) if name and name not in sizes]
        if unknown:
            raise ConfigError(f"SequenceSlice: axes: the mesh has no axis {unknown[0]!r}; it has {tuple(sizes)}")
    else:
        ring, ulysses = (_only(names, sizes) for names in (RING_NAMES, ULYSSES_NAMES))
        if not ring and not ulysses:
            raise ConfigError(
                f"sequence: the mesh has no context-parallel axis by name; its axes are {tuple(sizes)}. Name the axes "
                'of the ring and of ulysses: SequenceSlice(axes=("name", "")), or leave sequence= out'
            )
    return SequencePeer(
        ring=coordinates.get(ring, 0), ring_size=sizes.get(ring, 1),
        ulysses=coordinates.get(ulysses, 0), ulysses_size=sizes.get(ulysses, 1),
    )  # fmt: skip


def _only(names: frozenset[str], sizes: Mapping[str, int]) -> str:
    found = [name for name in sizes if name.lower() in names]
    used = [name for name in found if sizes[name] > 1] or found[:1]
    if len(used) > 1:
        raise ConfigError(
            f"sequence: several axes may be meant, {used}; name them: SequenceSlice(axes=(ring, ulysses))"
        )
    return used[0] if used else ""


def sequence_ranges(length: int, peer: SequencePeer, layout: Layout) -> tuple[range, ...]:
    """The positions of a sequence of ``length`` that a peer gets, as ascending ranges in the order of its slice.

    All peers get equally many, and each position goes to exactly one.

    Raises:
        ConfigError: The length does not divide.
    """
    parts = peer.ring_size * (2 if layout == "zigzag" and peer.ring_size > 1 else 1)
    if length % parts or length % peer.num_peers:
        raise ConfigError(
            f"a sequence of {length} does not divide into {parts} parts for {peer.ring_size} ring and "
            f"{peer.ulysses_size} ulysses peers ({layout}); pad it in collate_fn or transform"
        )
    size = length // parts
    chosen = [peer.ring] if parts == peer.ring_size else [peer.ring, parts - 1 - peer.ring]
    share = length // peer.num_peers
    return _within([range(part * size, (part + 1) * size) for part in chosen], share * peer.ulysses, share)


def _within(ranges: Sequence[range], start: int, count: int) -> tuple[range, ...]:
    """The elements ``[start, start + count)`` of ranges laid end to end."""
    found = []
    for one in ranges:
        piece = one[max(0, start) : max(0, start + count)]
        if piece:
            found.append(piece)
        start -= len(one)
    return tuple(found)


def cut_sequence(
    batch: Mapping[str, Any], wanted: SequenceSlice, peer: SequencePeer, fields: Sequence[str] | None = None
) -> Batch:
    """``batch`` with the wanted entries cut down to what ``peer`` gets; those share no memory with the whole.

    Args:
        batch: The whole.
        wanted: What to cut, and how.
        peer: Whose slice.
        fields: Only these of the entries; None: all that ``wanted`` names.

    Raises:
        ConfigError: An entry is missing, is no tensor with such an axis, or is of a length that does not divide.
    """
    cut: Batch = dict(batch)
    positions: tuple[range, ...] | None = None
    for name in wanted.fields if fields is None else fields:
        value = batch.get(name)
        if not isinstance(value, torch.Tensor) or value.ndim <= wanted.dim:
            raise ConfigError(f"sequence: batch entry {name!r} {_described(value, batch, wanted.dim)}")
        try:
            ranges = sequence_ranges(value.shape[wanted.dim], peer, wanted.layout)
        except ConfigError as error:
            raise ConfigError(f"sequence: batch entry {name!r}: {error}") from None
        if positions not in {None, ranges} and wanted.position_ids is not None:
            raise ConfigError(f"sequence: position_ids need entries of one length; {name!r} has another")
        positions = ranges
        pieces = [value.narrow(wanted.dim, one.start, len(one)) for one in ranges]
        cut[name] = torch.cat(pieces, wanted.dim) if pieces else value.narrow(wanted.dim, 0, 0).clone()
    if wanted.position_ids is not None and positions is not None:
        cut[wanted.position_ids] = torch.tensor([place for one in positions for place in one], dtype=torch.int64)
    return cut


def _described(value: object, batch: Mapping[str, Any], dim: int) -> str:
    if value is None:
        return f"is missing; there are {', '.join(map(str, batch))}"
    if isinstance(value, torch.Tensor):
        return f"has the shape {tuple(value.shape)}, and no axis {dim}"
    return f"is a {type(value).__name__}, expected a tensor: sequences of different lengths need padding in collate_fn"
