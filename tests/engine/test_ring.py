"""The batch ring: a batch belongs to whoever holds any part of it; and what travels through a slot arrives."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.build.batches.build import Rows
from streaming.run.engine.workers.ring import ALIGN_BYTES, MAX_EXTRA_SLOTS, BatchRing, Slot, SlotWriter
from streaming.run.engine.workers.transport import pack, unpack
from tests.support.processes.leftovers import descriptors

SPAN = 1 << 16


def num_opened(before: Counter[tuple[str, int]]) -> int:
    return (descriptors() - before).total()


def leased(ring: BatchRing, value: int, shape: tuple[int, ...] = (4, 8)) -> torch.Tensor:
    with ring.lease() as lease:
        return lease.allocate(shape, torch.int32).fill_(value)


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda tensor: tensor,
    "slice": lambda tensor: tensor[1:2],
    "element": lambda tensor: tensor[0, 0],
    "view": lambda tensor: tensor.view(-1),
    "other dtype": lambda tensor: tensor.view(torch.uint8),
    "transpose": lambda tensor: tensor.t(),
    "detach": lambda tensor: tensor.detach(),
    "numpy": lambda tensor: tensor.numpy(),
    "numpy slice": lambda tensor: tensor.numpy()[2:, 3:],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "storage": lambda tensor: tensor.untyped_storage(),
    "dlpack": torch.from_dlpack,
    "autograd": lambda tensor: tensor.float().requires_grad_().sum() + tensor.sum(),
}


@pytest.mark.parametrize("keep", KEEPERS)
def test_a_slot_comes_back_with_the_last_reference(keep: str) -> None:
    ring = BatchRing(2, SPAN)
    tensor = leased(ring, 7)
    kept = KEEPERS[keep](tensor)
    owns = keep != "autograd"
    del tensor
    assert ring.num_taken == int(owns)
    del kept
    assert (ring.num_taken, ring.num_free) == (0, 1)
    ring.close()


def test_one_tensor_of_many_keeps_the_whole_batch() -> None:
    ring = BatchRing(2, SPAN)
    with ring.lease() as lease:
        batch = {name: lease.allocate((100,), torch.int64).fill_(i) for i, name in enumerate("abc")}
    kept = batch["b"]
    del batch
    assert ring.num_taken == 1
    others = [leased(ring, 99, (1000,)) for _ in range(5)]
    assert kept.eq(1).all()
    del kept, others
    assert ring.num_taken == 0
    ring.close()


def test_a_batch_in_a_cycle_comes_back_with_the_collector() -> None:
    ring = BatchRing(2, SPAN)
    cycle: list[object] = [leased(ring, 1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert ring.num_taken == 0
    ring.close()


def test_slots_are_used_again() -> None:
    ring = BatchRing(2, SPAN)
    addresses = {leased(ring, i).data_ptr() for i in range(20)}
    assert len(addresses) <= 2
    ring.close()


def test_hoarders_get_fresh_slots_and_then_copies_and_the_ring_shrinks_again() -> None:
    ring = BatchRing(3, SPAN)
    before = descriptors()
    kept = [leased(ring, i) for i in range(3 + MAX_EXTRA_SLOTS + 40)]
    assert all(tensor.eq(i).all() for i, tensor in enumerate(kept))
    assert num_opened(before) <= 2 * (3 + MAX_EXTRA_SLOTS)
    del kept
    assert (ring.num_taken, ring.num_free) == (0, 3)
    assert num_opened(before) == 2 * 3
    ring.close()
    assert num_opened(before) == 0


def test_a_slot_costs_what_is_used_of_it() -> None:
    ring = BatchRing(2)
    kept = leased(ring, 1, (1 << 18,))
    assert 1 << 20 <= ring.resident_bytes <= 2 << 20
    del kept
    ring.close()
    assert ring.resident_bytes == 0


def test_free_slots_give_back_what_goes_beyond_the_limit() -> None:
    """Those idle longest first; what is kept may go beyond it."""
    mib = 1 << 20
    ring = BatchRing(3, limit_bytes=2 * mib)
    kept = [leased(ring, number, (1 << 18,)) for number in range(3)]
    assert ring.held_bytes == 3 * mib
    del kept[0]
    assert ring.held_bytes == 2 * mib
    kept.clear()
    assert ring.held_bytes == 2 * mib
    assert ring.num_free == 3
    assert leased(ring, 7, (1 << 18,)).eq(7).all()
    assert ring.held_bytes <= 2 * mib
    ring.close()


def test_wrap_copies_when_crowded() -> None:
    ring = BatchRing(1, SPAN)
    kept = []
    for i in range(1 + MAX_EXTRA_SLOTS + 10):
        slot = ring.take()
        slot.array(8)[:] = i % 251
        kept.append(ring.wrap(slot, 8))
    assert all((array == i % 251).all() for i, array in enumerate(kept))
    assert ring.num_taken == 1 + MAX_EXTRA_SLOTS
    ring.close()


def test_kept_batches_outlive_the_ring() -> None:
    before = descriptors()
    ring = BatchRing(2, SPAN)
    kept = leased(ring, 5)
    spare = leased(ring, 6)
    del spare
    ring.close()
    ring.close()
    assert num_opened(before) == 1, "the kept mapping's"
    assert kept.eq(5).all()
    assert leased(ring, 9).eq(9).all(), "after close: ordinary memory"
    del kept
    assert (ring.num_taken, ring.num_free, num_opened(before)) == (0, 0, 0)


@given(steps=st.lists(st.tuples(st.sampled_from(["lease", "drop"]), st.integers(0, 7)), max_size=60))
@settings(deadline=None)
def test_nobody_sees_another_batch(steps: list[tuple[str, int]]) -> None:
    ring = BatchRing(2, SPAN)
    kept: dict[int, tuple[int, torch.Tensor]] = {}
    for number, (what, place) in enumerate(steps):
        if what == "lease":
            kept[place] = (number, leased(ring, number, (place + 1,)))
        else:
            kept.pop(place, None)
        assert all(tensor.eq(value).all() for value, tensor in kept.values())
        assert ring.num_taken == len(kept)
        assert ring.num_free <= 2
    ring.close()


def test_a_lease_that_is_too_small_falls_back_and_the_next_one_is_not() -> None:
    ring = BatchRing(2, SPAN)
    big = leased(ring, 1, (SPAN,))
    assert ring.num_taken == 0, "int32 [65536] does not fit 64 KiB: fresh memory"
    again = leased(ring, 2, (SPAN,))
    assert ring.num_taken == 1
    assert big.eq(1).all()
    assert again.eq(2).all()
    ring.close()


def test_what_a_lease_gives_is_aligned_contiguous_and_as_asked() -> None:
    ring = BatchRing(2, SPAN)
    with ring.lease() as lease:
        given = [lease.allocate((3, size), dtype) for size in (0, 1, 7) for dtype in
                 (torch.bool, torch.uint8, torch.bfloat16, torch.int64, torch.complex128)]  # fmt: skip
        scalar = lease.allocate((), torch.float64).fill_(1)
    assert scalar.shape == ()
    for tensor in given:
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGN_BYTES == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "saving it must not save the slot"
    ring.close()


def test_a_writer_grows_its_slot_and_another_process_can_follow() -> None:
    slot = Slot.create(0, SPAN)
    other = Slot(0, os.dup(slot.fd))
    writer = SlotWriter(slot)
    early = writer.allocate((100,), torch.uint8).fill_(1)
    late = writer.allocate((5 * SPAN,), torch.uint8).fill_(2)
    assert slot.span_bytes >= 5 * SPAN + 128
    assert [writer.place(tensor.numpy()) for tensor in (early, late)] == [0, 128]
    other.follow()
    seen = other.array(writer.used_bytes)
    assert (seen[:100] == 1).all()
    assert (seen[128:] == 2).all()
    slot.close()
    other.close()


# --- what travels through a slot ---


class Point(NamedTuple):
    x: object
    y: object


@dataclass
class Thing:
    name: str
    data: object


def travelled(batch: Any, keys: list[str] | None = None) -> tuple[Any, BatchRing]:
    ring = BatchRing(2, SPAN)
    slot = ring.take()
    rows = Rows(
        memory=b"", view=memoryview(b""), keys=keys or ["k"], urls=["u"] * len(keys or "k"), fields={}, damage={}
    )
    parcel = pack(batch, rows, SlotWriter(slot))
    return unpack(parcel, ring.wrap(slot, parcel.used_bytes), rows.keys, rows.urls), ring


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Thing):
        return a.name == b.name and same(a.data, b.data)
    return bool(a == b)


BATCHES: dict[str, Any] = {
    "dtypes": {str(d): torch.arange(6).reshape(2, 3).to(d) for d in
               (torch.bool, torch.uint8, torch.int16, torch.uint16, torch.bfloat16, torch.float16, torch.complex64)},
    "shapes": [torch.ones(()), torch.ones(0), torch.ones(3, 0, 2), torch.ones(1, 1),
               torch.from_numpy(np.arange(0, dtype=np.int16)), torch.arange(9)[::5][1:]],
    "strided": [torch.arange(24).reshape(4, 6).t(), torch.arange(10)[::3], torch.arange(4).expand(3, 4)],
    "arrays": {"c": np.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
               "s": np.arange(10)[::2], "text": np.array(["a", "bcd"]), "object": np.array([1, "x"], object),
               "empty": np.empty((0, 3)), "scalar": np.float32(2), "none": np.array(5)},
    "records": np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,))]),
    "nested": {"a": [{"b": (torch.ones(2), np.ones(2))}], "c": Point(torch.zeros(1), "y"), "d": {1: None}},
    "objects": [Thing("t", torch.arange(3)), Ellipsis, 1 << 100, {"set"}, frozenset("ab")],
    "grad": torch.ones(3, requires_grad=True),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "bytes": {"raw": [b"x" * 9000, b"", b"y" * 90_000]},
    "many bytes": {"raw": [bytes([i % 256]) * (i % 37) for i in range(5000)]},
    "some bytes": {"raw": [b"z" * 40_000, None, b"", None]},
    "few bytes": {"raw": [b"a", None]},
    "list of bytes": [b"q" * 50_000] * 3,
    "long text": {"text": ["ä" * 100_000]},
    "not a container": 17,
    "nothing": None,
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches_arrive_as_they_were(name: str) -> None:
    got, ring = travelled(BATCHES[name])
    assert same(got, BATCHES[name]), got
    del got
    assert ring.num_taken == 0
    ring.close()


def test_arrived_arrays_keep_the_slot_and_can_be_written() -> None:
    got, ring = travelled({"nested": [np.arange(1000)], "tensor": torch.arange(5)})
    kept = got["nested"][0]
    got["tensor"] += 1
    kept += 1
    del got
    assert ring.num_taken == 1
    assert (kept == np.arange(1, 1001)).all()
    ring.close()


def test_keys_and_urls_are_the_rows_own_lists_if_they_are_equal() -> None:
    keys = ["a", "b"]
    got, ring = travelled({"x": 1, "__key__": ["a", "b"], "__url__": ["u", "other"], "y": 2}, keys)
    assert got["__key__"] is keys
    assert got == {"x": 1, "__key__": ["a", "b"], "__url__": ["u", "other"], "y": 2}
    assert list(got) == ["x", "__key__", "__url__", "y"]
    ring.close()


def test_what_lies_in_the_slot_is_not_copied() -> None:
    ring = BatchRing(2, SPAN)
    slot = ring.take()
    writer = SlotWriter(slot)
    tensor = writer.allocate((64, 64), torch.uint8).fill_(3)
    rows = Rows(memory=b"", view=memoryview(b""), keys=[], urls=[], fields={}, damage={})
    parcel = pack({"t": tensor, "half": tensor[32:]}, rows, writer)
    assert parcel.used_bytes == 64 * 64
    got = unpack(parcel, ring.wrap(slot, parcel.used_bytes), [], [])
    assert got["t"].eq(3).all()
    assert got["half"].shape == (32, 64)
    ring.close()
