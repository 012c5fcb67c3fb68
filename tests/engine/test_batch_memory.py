"""Memory of batches: a kept tensor never changes, what came back is used again, and the limit holds."""

from __future__ import annotations

import gc
import math
import mmap
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.run.engine.delivery import _SHORT_STEP_S, _SHORT_STEPS, Haste
from streaming.run.engine.memory import batch_memory
from streaming.run.engine.memory.batch_memory import LEAST_BYTES, BatchMemory, _rounded
from streaming.run.engine.workers import ring
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.tiers import first_here

LARGE = 2 * LEAST_BYTES


def filled(memory: BatchMemory, value: int, num_bytes: int = LARGE) -> torch.Tensor:
    """Return a tensor of a value."""
    return memory.allocate((num_bytes,), torch.uint8).fill_(value % 256)


@pytest.mark.thorough
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["make", "drop"]), st.integers(0, 5), st.integers(LEAST_BYTES // 2, 4 * LARGE)),
        max_size=50,
    ),
    limit=st.integers(0, 16 * LARGE),
)
@settings(deadline=None)
def test_a_kept_tensor_never_changes_and_the_limit_holds(steps: list[tuple[str, int, int]], limit: int) -> None:
    memory, kept = BatchMemory(limit), dict[int, tuple[int, torch.Tensor]]()
    for number, (what, place, num_bytes) in enumerate(steps):
        kept.pop(place, None)
        if what == "make":
            kept[place] = number % 256, filled(memory, number, num_bytes)
            assert kept[place][1].untyped_storage().nbytes() == num_bytes, "what pickle would send"
        assert all(bool(tensor.eq(value).all()) for value, tensor in kept.values())
        assert memory.held_bytes <= limit
    memory.close()
    assert all(bool(tensor.eq(value).all()) for value, tensor in kept.values())
    assert memory.num_free == 0


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[3:],
    "array": lambda tensor: tensor.numpy(),
    "array of view": lambda tensor: tensor[5:].numpy()[::2],
    "product": lambda tensor: tensor[1:] * 1,
    "typed": lambda tensor: tensor.view(torch.int32)[::3],
}


@pytest.mark.parametrize("keep", KEPT)
def test_a_block_comes_back_with_the_last_reference(keep: str) -> None:
    memory = BatchMemory(4 * LARGE)
    tensor = memory.allocate((LARGE // 8, 2), torch.float32)
    place = tensor.data_ptr()
    kept = KEPT[keep](tensor)
    assert memory.num_free == 0
    del tensor
    gc.collect()
    assert memory.num_free == (keep == "product"), "which has memory of its own"
    del kept
    gc.collect()
    assert memory.num_free == 1
    assert memory.allocate((LARGE,), torch.uint8).data_ptr() == place


def test_sizes_that_vary_share_blocks() -> None:
    memory = BatchMemory(1 << 30)
    places = {filled(memory, 1, LARGE + step * 4096).data_ptr() for step in range(LARGE // 4096 // 2)}
    assert len(places) <= 3
    assert all(size <= _rounded(size) <= size * 5 / 4 + mmap.PAGESIZE for size in range(1, 1 << 22, 4097))


def test_small_tensors_are_not_its_business() -> None:
    memory = BatchMemory(1 << 30)
    assert filled(memory, 1, LEAST_BYTES - 1).eq(1).all()
    assert (memory.held_bytes, memory.num_free) == (0, 0)


def test_beyond_the_limit_memory_is_fresh_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    memory = BatchMemory(3 * LARGE)
    with caplog.at_level("INFO"):
        kept = [filled(memory, value) for value in range(6)]
    assert memory.held_bytes == memory.peak_bytes == 3 * LARGE
    assert [bool(tensor.eq(value).all()) for value, tensor in enumerate(kept)] == [True] * 6
    assert len(caplog.records) == 1
    del kept
    gc.collect()
    assert memory.num_free == 3
    filled(memory, 7, 3 * LARGE)
    assert memory.held_bytes == 3 * LARGE, "those that are too small made room"


def test_the_smallest_fitting_block_is_lent_and_the_one_idle_longest_makes_room() -> None:
    memory = BatchMemory(10 * LARGE)
    kept = {size: filled(memory, size, size * LARGE) for size in (1, 2, 3)}
    places = {size: tensor.data_ptr() for size, tensor in kept.items()}
    for size in (2, 1, 3):  # in this order they return
        del kept[size]
    assert filled(memory, 1, 2 * LARGE).data_ptr() == places[2], "which returns last thereby"
    assert memory.held_bytes == 6 * LARGE
    large = filled(memory, 1, 7 * LARGE)
    assert memory.held_bytes == 9 * LARGE == large.nbytes + 2 * LARGE, "1 and 3 were idle longer"


@pytest.mark.parametrize("is_closed_first", [True, False])
def test_what_comes_back_around_the_close_stays_away(is_closed_first: bool) -> None:
    memory = BatchMemory(4 * LARGE)
    kept = filled(memory, 1)
    if is_closed_first:
        memory.close()
        assert kept.eq(1).all()
    del kept
    memory.close()
    assert memory.num_free == 0
    assert filled(memory, 2).eq(2).all()
    assert memory.held_bytes == 0


def test_threads_share_nothing() -> None:
    memory, wrong = BatchMemory(64 * LARGE), list[int]()

    def work(value: int) -> None:
        for _ in range(50):
            tensors = [filled(memory, value) for _ in range(3)]
            wrong.extend(value for tensor in tensors if not tensor.eq(value).all())

    threads = [threading.Thread(target=work, args=(value,), daemon=True) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert memory.held_bytes <= 4 * 2 * 3 * LARGE, "of each thread those of this round and of the last one"


def test_a_forked_child_has_a_copy_of_its_own() -> None:
    memory = BatchMemory(4 * LARGE)
    kept, spare = filled(memory, 1), filled(memory, 2)
    del spare
    with memory._lock:  # as if another thread had it
        child = os.fork()
        if not child:
            other = memory.allocate((LARGE,), torch.uint8).numpy()  # torch's threads did not come along
            other[:], kept.numpy()[:] = 3, 4
            os._exit(not ((other == 3).all() and (kept.numpy() == 4).all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept.eq(1).all()


def test_a_tensor_travels_by_pickle() -> None:
    tensor = filled(BatchMemory(4 * LARGE), 9)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)


SHORT, LONG = _SHORT_STEP_S / 2, 2 * _SHORT_STEP_S
HURRY = [SHORT] * _SHORT_STEPS


@pytest.mark.parametrize(
    ("steps", "is_great"),
    [
        (HURRY, True),
        (HURRY[1:], False),
        ([*HURRY, LONG], False),
        ([*HURRY, LONG, SHORT], False),
        ([*HURRY, LONG, *HURRY], True),
        ([SHORT, LONG] * _SHORT_STEPS**2, False),
        (HURRY * (_SHORT_STEPS - 1) + [LONG], False),
        (HURRY * _SHORT_STEPS + [LONG], True),
        (HURRY * _SHORT_STEPS**2 + [LONG, LONG], False),
        (HURRY * _SHORT_STEPS + [LONG, SHORT, LONG], False),
    ],
)
def test_haste_is_a_row_of_short_steps_and_a_long_row_forgives_one_long_step(
    steps: list[float], is_great: bool
) -> None:
    now = [0.0]
    haste = Haste(lambda: now[0])
    for step_s in (0.0, *steps):  # the first request comes from nowhere
        now[0] += step_s
        haste.asks()
        haste.leaves()
    assert haste.is_great == is_great


def noted(
    monkeypatch: pytest.MonkeyPatch, into: list[int], of: Any, name: str, counts: Callable[..., bool] = lambda *_: True
) -> None:
    """Note each call of a function that makes memory."""
    made = getattr(of, name)

    def make(*given: Any) -> Any:
        if counts(*given):
            into.append(1)
        return made(*given)

    monkeypatch.setattr(of, name, make)


HANDS = [{"num_threads": 1}, {"num_workers": 2, "num_threads": 0}, {"num_workers": 2}]
"""With ``prefetch_factor=1`` these build one, two and two batches ahead."""


@pytest.mark.thorough
@pytest.mark.parametrize("hands", first_here(HANDS, 2), ids=str)
@pytest.mark.parametrize(
    "options", first_here([{}, {"jagged": ("npy",)}, {"pin_memory": True}], 1), ids=["stacked", "jagged", "pinned"]
)
def test_batches_use_memory_again_and_kept_ones_stay(
    tmp_path: Path, hands: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []  # not addresses: the system gives that of a block which has just gone to the next one
    noted(monkeypatch, made, batch_memory, "_Block")
    noted(monkeypatch, made, ring.Slot, "create")
    noted(monkeypatch, made, batch_memory, "fresh", lambda shape, _: math.prod(shape) >= LEAST_BYTES // 4)
    with ShardWriter(tmp_path / "{:03d}.tar", max_bytes="4MiB") as writer:
        for number in range(256):
            values = np.full(LEAST_BYTES // 8, number, np.int32)
            writer.write({"__key__": f"{number:03}", "npy": values})
    dataset = StreamingDataset(tmp_path, shuffle=False)
    kept = dict[int, torch.Tensor]()
    with DataLoader(dataset, 4, prefetch_factor=1, **hands, **options) as loader:
        for number, batch in enumerate(loader):
            ahead = min(hands.get("num_workers", 1), 63 - number)
            until(lambda ahead=ahead: loader.metrics()["built_ahead"] >= ahead, "as many are built ahead as may be")
            values = batch["npy"].values if "jagged" in options else batch["npy"]
            if number % 16 == 3:
                kept[number] = values
            del batch, values
        assert 0 < len(made) < 12, "for 64 batches: four are kept, and some are built here before they are in slots"
        for number, values in kept.items():
            numbers = values.reshape(4, -1).unique(dim=1).flatten().tolist()
            assert numbers == list(range(4 * number, 4 * number + 4))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "hands", [{"num_threads": 2}, {"num_workers": 2, "num_threads": 0}], ids=["threads", "workers"]
)
def test_a_slow_batch_holds_up_as_few_as_memory_allows(tmp_path: Path, hands: dict[str, int]) -> None:
    """Batch 4 is slow until others have been built: more of them than may be ahead of a quick one."""
    wanted = 4 + 2 * 2 * 2
    with ShardWriter(tmp_path / "{:03d}.tar") as writer:
        for number in range(64):
            writer.write({"__key__": f"{number:02}", "txt": f"{number}"})

    def waits_for_others(sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["txt"])
        (tmp_path / f"begun {number}").touch()
        if number == 4:
            until((tmp_path / f"begun {wanted}").exists, "builders go on behind the slow batch")
        return sample

    dataset = StreamingDataset(tmp_path, shuffle=False, transform=waits_for_others)
    found = []
    with DataLoader(dataset, 1, prefetch_factor=2, **hands) as loader:
        for batch in loader:
            found.append(int(batch["txt"][0]))
            if found == [0]:  # a builder begins the slow one, before anybody waits for it
                until((tmp_path / "begun 4").exists, "four batches are built ahead")
    assert found == list(range(64))
