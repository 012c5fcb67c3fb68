"""Cutting sequences for context-parallel peers: pure, so tried for many peers in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra import DeviceMesh
from streaming import SequenceSlice
from streaming.build.batches.sequence import (
    Layout,
    SequencePeer,
    cut_sequence,
    find_peer,
    places_of_documents,
    sequence_ranges,
)  # fmt: skip
from streaming.errors import ConfigError


def places(length: int, peer: SequencePeer, layout: Layout) -> list[int]:
    return [place for one in sequence_ranges(length, peer, layout) for place in one]


def test_the_drawn_example() -> None:
    peers = [SequencePeer(ring=ring, ring_size=2) for ring in range(2)]
    assert [places(8, peer, "contiguous") for peer in peers] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [places(8, peer, "zigzag") for peer in peers] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert places(7, SequencePeer(), "zigzag") == list(range(7)), "one peer divides any length"
    assert places_of_documents(np.array([0, 7]), SequencePeer(), "zigzag").tolist() == list(range(7))


def test_zigzag_with_ulysses_is_that_of_unified_sequence_parallelism() -> None:
    """``torch.chunk``-wise: parts r and 2R-1-r joined, then the u-th of U pieces."""
    sequence = torch.arange(48)
    parts = sequence.chunk(2 * 3)
    for ring in range(3):
        joined = torch.cat([parts[ring], parts[5 - ring]])
        for ulysses in range(4):
            peer = SequencePeer(ring=ring, ring_size=3, ulysses=ulysses, ulysses_size=4)
            assert places(48, peer, "zigzag") == joined.chunk(4)[ulysses].tolist()


@given(
    ring=st.integers(1, 6),
    ulysses=st.integers(1, 4),
    unit=st.integers(0, 5),
    layout=st.sampled_from(["contiguous", "zigzag"]),
)
def test_peers_share_out_the_sequence(ring: int, ulysses: int, unit: int, layout: Layout) -> None:
    """Each position goes to exactly one peer, all get equally many, and under zigzag all get the same causal work."""
    length = 2 * ring * ulysses * unit
    rings = [
        [
            places(length, SequencePeer(ring=r, ring_size=ring, ulysses=u, ulysses_size=ulysses), layout)
            for u in range(ulysses)
        ]
        for r in range(ring)
    ]
    assert {len(got) for peers in rings for got in peers} == {length // (ring * ulysses)}
    assert sorted(place for peers in rings for got in peers for place in got) == list(range(length))
    joined = [[place for got in peers for place in got] for peers in rings]
    assert all(got == sorted(got) for got in joined)
    if layout == "contiguous":
        assert [place for got in joined for place in got] == list(range(length))
    else:
        assert len({sum(got) for got in joined}) == 1


@given(
    ring=st.integers(1, 4),
    ulysses=st.integers(1, 3),
    units=st.lists(st.integers(0, 4), max_size=5),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    begin=st.integers(0, 3),
)
def test_each_document_is_cut_as_a_sequence_by_itself(
    ring: int, ulysses: int, units: list[int], layout: Layout, begin: int
) -> None:
    lengths = [2 * ring * ulysses * unit for unit in units]
    borders = begin + np.cumsum([0, *lengths])
    for number in range(ring * ulysses):
        r, u = divmod(number, ulysses)
        peer = SequencePeer(ring=r, ring_size=ring, ulysses=u, ulysses_size=ulysses)
        alone = [
            start + place
            for start, length in zip(borders.tolist(), lengths, strict=False)
            for place in places(length, peer, layout)
        ]
        assert places_of_documents(borders, peer, layout).tolist() == alone


def test_borders_must_be_those_of_the_rows() -> None:
    wanted = SequenceSlice(fields=("x",), borders="ends")
    peer = SequencePeer(ring_size=2)
    batch = {"x": torch.arange(16).reshape(2, 8), "ends": torch.tensor([0, 4, 8, 16], dtype=torch.int32)}
    assert cut_sequence(batch, wanted, peer)["x"].tolist() == [[0, 1, 4, 5], [8, 9, 10, 11]]
    flat = {"x": batch["x"].flatten(), "ends": batch["ends"]}
    along = SequenceSlice(fields=("x",), borders="ends", dim=0, position_ids="at")
    assert cut_sequence(flat, along, peer)["at"].tolist() == [0, 1, 4, 5, 8, 9, 10, 11]
    for ends, said in (
        ([0, 4, 14], "they end at 14"),
        ([0, 8, 16, 24], "they end at 24"),
        ([0, 12, 16], "lie within its rows"),
        ([0, 3, 16], "multiple=2"),
    ):
        with pytest.raises(ConfigError, match=said):
            cut_sequence(batch | {"ends": torch.tensor(ends)}, wanted, peer)


@pytest.mark.parametrize(
    ("length", "layout", "ring", "ulysses"), [(6, "contiguous", 4, 1), (6, "zigzag", 2, 1), (8, "contiguous", 2, 3)]
)
def test_lengths_that_do_not_divide_are_refused(length: int, layout: Layout, ring: int, ulysses: int) -> None:
    with pytest.raises(ConfigError, match=rf"sequence of {length} does not divide .*pad it"):
        sequence_ranges(length, SequencePeer(ring_size=ring, ulysses_size=ulysses), layout)


def test_batches_are_cut_and_put_together_again() -> None:
    wanted = SequenceSlice(fields=("input_ids", "mask"), layout="zigzag", position_ids="position_ids")
    whole: dict[str, Any] = {
        "input_ids": torch.randint(0, 1000, (3, 24)),
        "mask": torch.rand(3, 24, 2),
        "cls": torch.arange(3),
        "__key__": ["a", "b", "c"],
    }
    again = {name: torch.full_like(whole[name], -1) for name in wanted.fields}
    for ring in range(3):
        cut = cut_sequence(whole, wanted, SequencePeer(ring=ring, ring_size=3))
        assert cut["cls"] is whole["cls"]
        assert cut["__key__"] is whole["__key__"]
        where = cut["position_ids"]
        assert where.dtype == torch.int64
        for name in wanted.fields:
            got = cut[name]
            assert got.untyped_storage().nbytes() * 3 == whole[name].untyped_storage().nbytes()
            again[name][:, where] = got
    assert all(torch.equal(again[name], whole[name]) for name in wanted.fields)
    assert tuple(whole["input_ids"].shape) == (3, 24)


def test_other_axes_and_one_peer() -> None:
    wanted = SequenceSlice(fields=("x",), dim=0)
    batch = {"x": torch.arange(8).reshape(4, 2)}
    assert cut_sequence(batch, wanted, SequencePeer(ring=1, ring_size=2))["x"].tolist() == [[4, 5], [6, 7]]
    alone = cut_sequence(batch, SequenceSlice(fields=("x",), dim=0, layout="zigzag"), SequencePeer())
    assert torch.equal(alone["x"], batch["x"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "'x' is missing; the batch has y"),
        (torch.zeros(4), r"'x' has the shape \(4,\), which has no axis 1"),
        ([torch.zeros(3), torch.zeros(4)], "'x' is a list, expected a tensor"),
        (torch.zeros(2, 5), "'x': a sequence of 5 does not divide"),
    ],
)
def test_what_cannot_be_cut_is_named(value: Any, message: str) -> None:
    batch = {"y": torch.zeros(2, 4)} | ({} if value is None else {"x": value})
    with pytest.raises(ConfigError, match=message):
        cut_sequence(batch, SequenceSlice(fields=("x",)), SequencePeer(ring_size=2))


def test_positions_need_one_length() -> None:
    batch = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 8)}
    with pytest.raises(ConfigError, match="'y' has another"):
        cut_sequence(batch, SequenceSlice(fields=("x", "y"), position_ids="at"), SequencePeer(ring_size=2))


@pytest.mark.parametrize(
    ("names", "axes", "expected"),
    [
        (("dp", "cp", "tp"), None, [(0, 2, 0, 1), (1, 2, 0, 1)]),
        (("ulysses", "dp", "tp"), None, [(0, 1, 0, 2), (0, 1, 1, 2)]),
        (("dp", "odd", "tp"), ("odd", ""), [(0, 2, 0, 1), (1, 2, 0, 1)]),
    ],
)
def test_peers_are_found_in_the_mesh(names: tuple[str, ...], axes: Any, expected: list[tuple[int, ...]]) -> None:
    place = next(name for name in names if name not in {"dp", "tp"})
    ranks = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    found = set()
    for rank in range(8):
        mesh = DeviceMesh.from_ranks(ranks, names, rank=rank, data_axes=("dp",))
        peer = find_peer(SequenceSlice(fields=("x",), axes=axes), mesh.coordinates, mesh.axis_sizes)
        found.add((mesh.coordinates[place], peer.ring, peer.ring_size, peer.ulysses, peer.ulysses_size))
    assert found == {(number, *one) for number, one in enumerate(expected)}


def test_ring_and_ulysses_together() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1, cp_size=2, ulysses_size=3, rank=5, environ={})
    peer = find_peer(SequenceSlice(fields=("x",)), mesh.coordinates, mesh.axis_sizes)
    assert peer == SequencePeer(ring=1, ring_size=2, ulysses=2, ulysses_size=3)


@pytest.mark.parametrize(
    ("sizes", "axes", "message"),
    [
        ({"dp": 2, "tp": 2}, None, "no context-parallel axis by a known name"),
        ({"cp": 2, "ring": 2}, None, "several axes could be meant"),
        ({"cp": 2}, ("pc", ""), "no axis 'pc'"),
    ],
)
def test_axes_that_are_not_there(sizes: dict[str, int], axes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_peer(SequenceSlice(fields=("x",), axes=axes), dict.fromkeys(sizes, 0), sizes)


@pytest.mark.parametrize("options", [{"fields": "x"}, {"fields": ()}, {"dim": -1}, {"dim": True}, {"layout": "snake"}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="SequenceSlice"):
        SequenceSlice(**{"fields": ("x",), **options})
