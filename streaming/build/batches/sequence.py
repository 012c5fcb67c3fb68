"""Slice sequences for context parallelism: choose the positions of each sequence that a rank gets.

A sequence of 8 positions, cut for a ring of 2 ranks::

    contiguous   0 0 0 0 1 1 1 1
    zigzag       0 0 1 1 1 1 0 0      2 * 2 parts; rank i gets parts i and 3 - i

With zigzag, all ranks of ring attention do the same work under a causal mask. In packs, attention is causal within each
document, so each document is cut separately (``borders``), as Transformer Engine and Megatron expect. Ulysses ranks
divide the slice of their ring rank into contiguous pieces, as in the unified sequence parallelism of Fang and Zhao
(arXiv:2405.07719).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from streaming.build.batches.jagged import int64s
from streaming.common.arguments import check_choice, checks_names, is_list, is_whole
from streaming.common.platforms import later
from streaming.errors import ConfigError
from streaming.types import Batch, Int64Array

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

Layout: TypeAlias = Literal["contiguous", "zigzag"]

RING_NAMES = frozenset({"cp", "context", "context_parallel", "ring"})
ULYSSES_NAMES = frozenset({"ulysses", "sp", "seq", "sequence", "sequence_parallel"})


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Give each context-parallel rank its slice of the sequence instead of all of it.

    Ranks that share a sequence are found by the names of the mesh axes: a ring (``cp``, ``context``, ``ring``, …),
    Ulysses (``ulysses``, ``sp``, ``sequence``, …), or both. Sequence lengths must be divisible by the number of parts;
    pad in ``collate_fn``. Shift labels before slicing (``Packed(…, shift_labels=True)``), because the token after a
    slice is on another rank. ::

        fields = ("input_ids", "labels")
        loader = DataLoader(dataset, 8, sequence=SequenceSlice(fields=fields, layout="zigzag"))

    Attributes:
        fields: Batch entries to slice: tensors of equal length along ``dim``. An entry missing from a batch is an
            error.
        dim: Axis of the sequence; 1 for ``[batch, sequence, …]``.
        layout: How the ring cuts: ``"contiguous"`` or ``"zigzag"``.
        axes: Names of the ring axis and the Ulysses axis, in this order, if they cannot be recognized; ``""``: none.
        position_ids: Name of an entry to add: int64 ``[length of the slice]``, the position of each element in the full
            sequence; with ``borders``, int64 ``[batch, length of the slice]``, its position in its row. With
            ``stage_fields``, only on stages that use one of ``fields``.
        borders: Name of an entry with the offsets of documents in the concatenated rows, and the end of the last one,
            int32 or int64 ``[n + 1]``: ``"cu_seqlens"`` for packs. Each document is then cut separately, so each length
            must be divisible: ``Packed(…, multiple=2 * cp)``. The entry itself does not change, because kernels that
            compute on slices (Transformer Engine, Megatron) expect the lengths of whole documents. None: rows are cut.
    """

    fields: tuple[str, ...]
    dim: int = 1
    layout: Layout = "contiguous"
    axes: tuple[str, str] | None = None
    position_ids: str | None = None
    borders: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", checked_names("SequenceSlice: fields", self.fields))
        if not self.fields:
            raise ConfigError("SequenceSlice: fields: give at least one")
        if not is_whole(self.dim) or self.dim < 0:
            raise ConfigError(f"SequenceSlice: dim: expected an axis number of at least 0, got {self.dim!r}")
        check_choice("SequenceSlice: layout", self.layout, get_args(Layout))
        if self.borders is not None and (not isinstance(self.borders, str) or self.dim > 1):
            raise ConfigError(
                "SequenceSlice: borders: expected the name of an entry, for sequences along axis 0 or 1; got "
                f"{self.borders!r} along axis {self.dim}"
            )


def checked_names(what: str, names: object) -> tuple[str, ...]:
    """Return the names of batch entries as a tuple.

    Raises:
        ConfigError: ``names`` is not a list or tuple of strings.
    """
    if not is_list(names) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{what}: expected names such as ("input_ids",), got {names!r}')
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePeer:
    """A rank's coordinates among the ranks that share a sequence.

    Attributes:
        ring: Rank in the ring, below ``ring_size``.
        ring_size: Number of ranks in the ring.
        ulysses: Rank among the ranks that share the slice of one ring rank.
        ulysses_size: Number of the ranks that share it.
    """

    ring: int = 0
    ring_size: int = 1
    ulysses: int = 0
    ulysses_size: int = 1

    @property
    def num_peers(self) -> int:
        """Number of ranks that share one sequence."""
        return self.ring_size * self.ulysses_size

    def parts(self, layout: Layout) -> int:
        """Return the number of parts into which the ring cuts a sequence."""
        return self.ring_size * (2 if layout == "zigzag" and self.ring_size > 1 else 1)

    def divisor(self, layout: Layout) -> int:
        """Return the number by which sequence lengths must be divisible."""
        return math.lcm(self.parts(layout), self.num_peers)


def find_peer(wanted: SequenceSlice, coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> SequencePeer:
    """Return a rank's position among the ranks that share its sequence.

    Args:
        wanted: The user's choice.
        coordinates: The rank's coordinates in the mesh, by axis.
        sizes: Sizes of the mesh's axes.

    Raises:
        ConfigError: The mesh has no context-parallel axis, or several candidates.
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
                f"sequence: the mesh has no context-parallel axis by a known name; its axes are {tuple(sizes)}. "
                'Name the ring and ulysses axes, SequenceSlice(axes=("name", "")), or leave sequence= out'
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
            f"sequence: several axes could be meant, {used}; name the ones to use: SequenceSlice(axes=(ring, ulysses))"
        )
    return used[0] if used else ""


def sequence_ranges(length: int, peer: SequencePeer, layout: Layout) -> tuple[range, ...]:
    """Return the positions of a sequence of ``length`` that a rank gets, as ascending ranges in the order of its slice.

    All ranks get equally many positions, and each position goes to exactly one rank.

    Raises:
        ConfigError: ``length`` is not divisible as required.
    """
    parts = peer.parts(layout)
    if length % peer.divisor(layout):
        raise ConfigError(
            f"a sequence of {length} does not divide into {parts} parts for {peer.ring_size} ring and "
            f"{peer.ulysses_size} ulysses peers ({layout}); pad it in collate_fn or transform"
        )
    size = length // parts
    chosen = [peer.ring] if parts == peer.ring_size else [peer.ring, parts - 1 - peer.ring]
    share = length // peer.num_peers
    return _within([range(part * size, (part + 1) * size) for part in chosen], share * peer.ulysses, share)


def _within(ranges: Sequence[range], start: int, count: int) -> tuple[range, ...]:
    """Return the elements ``[start, start + count)`` of the concatenated ranges."""
    found = []
    for one in ranges:
        piece = one[max(0, start) : max(0, start + count)]
        if piece:
            found.append(piece)
        start -= len(one)
    return tuple(found)


def places_of_documents(borders: Int64Array, peer: SequencePeer, layout: Layout) -> Int64Array:
    """Return the positions of concatenated documents that a rank gets, int64.

    Each document is cut by ``sequence_ranges``.

    Args:
        borders: [n + 1], the offset of each document and the end of the last. Documents may be empty, and n may be 0.
        peer: The rank.
        layout: How the ring cuts.

    Raises:
        ConfigError: The length of a document is not divisible as required.
    """
    lengths, parts = np.diff(borders), peer.parts(layout)
    odd = np.flatnonzero(lengths % peer.divisor(layout))
    if len(odd):
        raise ConfigError(
            f"a document of {lengths[odd[0]]} positions does not divide into {parts} parts for {peer.ring_size} ring "
            f"and {peer.ulysses_size} ulysses peers ({layout}); round each document up: Packed(…, "
            f"multiple={peer.divisor(layout)})"
        )
    # Each array below has one entry per position of all n documents. First the ring: a document of length l has
    # parts of l // parts positions; a rank has part `ring`, and with zigzag also its mirror image from the end.
    sizes = (lengths // parts).repeat(lengths)
    place = np.arange(borders[0], borders[-1]) - borders[:-1].repeat(lengths)  # position in the document
    part = place // sizes
    is_second = (part == parts - 1 - peer.ring) & (parts != peer.ring_size)
    is_mine = (part == peer.ring) | is_second
    within = place - (part - is_second) * sizes  # position in the ring peer's part of the document
    # Then Ulysses: the ring peer's part is divided into contiguous shares of l // num_peers positions.
    share = (lengths // peer.num_peers).repeat(lengths)
    is_mine &= within // share == peer.ulysses
    places: Int64Array = np.flatnonzero(is_mine) + borders[0]
    return places


def cut_sequence(
    batch: Mapping[str, Any], wanted: SequenceSlice, peer: SequencePeer, fields: Sequence[str] | None = None
) -> Batch:
    """Return ``batch`` with the wanted entries cut to the slice of ``peer``; slices share no memory with the batch.

    Args:
        batch: The whole batch.
        wanted: The entries to cut, and how to cut them.
        peer: The rank whose slice to take.
        fields: Names of the entries to cut; None: all that ``wanted`` names.

    Raises:
        ConfigError: An entry is missing, is not a tensor with such an axis, or its length is not divisible.
    """
    cut: Batch = dict(batch)
    if wanted.position_ids in batch:
        raise ConfigError(
            f"sequence: position_ids={wanted.position_ids!r} names an entry to add, but the batch already has one of "
            "that name: to slice that one, name it in fields; to add positions in the whole sequence, choose another "
            "name"
        )
    if wanted.borders is not None:
        return cut | _cut_documents(batch, wanted, wanted.borders, peer, fields)
    positions: tuple[range, ...] | None = None
    for name in wanted.fields if fields is None else fields:
        value = _checked_tensor(batch, name, wanted.dim)
        try:
            ranges = sequence_ranges(value.shape[wanted.dim], peer, wanted.layout)
        except ConfigError as error:
            raise ConfigError(f"sequence: batch entry {name!r}: {error}") from None
        if positions not in {None, ranges} and wanted.position_ids is not None:
            raise ConfigError(f"sequence: position_ids needs entries of one length, but {name!r} has another")
        positions = ranges
        pieces = [value.narrow(wanted.dim, one.start, len(one)) for one in ranges]
        cut[name] = torch.cat(pieces, wanted.dim) if pieces else value.narrow(wanted.dim, 0, 0).clone()
    if wanted.position_ids is not None and positions is not None:
        cut[wanted.position_ids] = int64s(place for one in positions for place in one)
    return cut


def _cut_documents(
    batch: Mapping[str, Any], wanted: SequenceSlice, by: str, peer: SequencePeer, fields: Sequence[str] | None
) -> Batch:
    """Return the wanted entries with each document cut separately; the axes [batch, sequence, …] stay."""
    borders = _checked_tensor(batch, by, 0).numpy().astype(np.int64)
    try:
        places = places_of_documents(borders, peer, wanted.layout)
    except ConfigError as error:
        raise ConfigError(f"sequence: borders={by!r}: {error}") from None
    cut: Batch = {}
    for name in wanted.fields if fields is None else fields:
        value = _checked_tensor(batch, name, wanted.dim)
        rows, length = (1, *value.shape)[wanted.dim : wanted.dim + 2]
        share = length // peer.num_peers
        if rows * length != borders[-1] or (np.bincount(places // max(1, length), minlength=rows) != share).any():
            raise ConfigError(
                f"sequence: borders={by!r}: they end at {borders[-1]}, but batch entry {name!r} has the shape "
                f"{tuple(value.shape)}; expected borders of documents that lie within its rows"
            )
        chosen = value.reshape(rows * length, *value.shape[wanted.dim + 1 :])[torch.from_numpy(places)]
        cut[name] = chosen.reshape(*value.shape[: wanted.dim], share, *value.shape[wanted.dim + 1 :])
        if wanted.position_ids is not None:
            cut[wanted.position_ids] = torch.from_numpy(places % max(1, length)).reshape(
                *value.shape[: wanted.dim], share
            )
    return cut


def _checked_tensor(batch: Mapping[str, Any], name: str, dim: int) -> torch.Tensor:
    value = batch.get(name)
    if not isinstance(value, torch.Tensor) or value.ndim <= dim:
        raise ConfigError(f"sequence: batch entry {name!r} {_described(value, batch, dim)}")
    return value


def _described(value: object, batch: Mapping[str, Any], dim: int) -> str:
    if value is None:
        return f"is missing; the batch has {', '.join(map(str, batch))}"
    if isinstance(value, torch.Tensor):
        return f"has the shape {tuple(value.shape)}, which has no axis {dim}"
    return f"is a {type(value).__name__}, expected a tensor: sequences of different lengths need padding in collate_fn"
