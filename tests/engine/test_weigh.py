"""What a batch weighs: near what it takes, in little time, and without running anybody's code."""

from __future__ import annotations

import ctypes
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from streaming.run.engine import batch_bytes as weigh_module
from streaming.run.engine.batch_bytes import weigh

DOCUMENTS: dict[str, Any] = {
    "numbers": [[1_000 + i, i / 7] for i in range(200)],
    "records": [{"id": 10**9 + i, "name": f"record {i}", "tags": [f"tag {i % 7}", None, True]} for i in range(60)],
    "nested": [[[[]]] for _ in range(100)],
    "text": [f"a sentence with the number {i} and a few words" for i in range(80)],
    "one string": "x" * 10_000,
}


def traced_bytes(make: Callable[[], Any]) -> tuple[Any, int]:
    """What a function makes, and the memory that it keeps."""
    tracemalloc.start()
    try:
        made = make()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_decoded_json_weighs_about_what_it_takes(name: str) -> None:
    texts = [json.dumps(DOCUMENTS[name]) for _ in range(64)]
    batch, taken_bytes = traced_bytes(lambda: {"json": [json.loads(text) for text in texts]})
    assert 0.9 * taken_bytes <= weigh(batch) <= 1.35 * taken_bytes


@pytest.mark.thorough
def test_documents_of_all_sizes_weigh_about_their_sum() -> None:
    dice = random.Random(3)
    texts = [json.dumps(list(range(1000, 1000 + int(dice.expovariate(1 / 200))))) for _ in range(4096)]
    batch, taken_bytes = traced_bytes(
        lambda: [[json.loads(text) for text in texts[i : i + 64]] for i in range(0, 4096, 64)]
    )
    assert 0.75 * taken_bytes <= sum(map(weigh, batch)) <= 1.5 * taken_bytes


def test_tensors_arrays_and_bytes_weigh_exactly() -> None:
    batch = {"x": torch.zeros(8, 1000), "y": np.zeros((3, 500)), "z": [bytes(size) for size in (10, 10**6, 5)] * 32}
    assert 0 < weigh(batch) - (32_000 + 12_000 + 32 * 1_000_015) < 8_000
    small = [bytes(size % 9) for size in range(10_000)]  # of which most is not their content
    assert 0 <= weigh(small) - sum(map(sys.getsizeof, small)) - sys.getsizeof(small) <= 8 * 10_000


def test_what_is_shared_counts_once() -> None:
    shared = list(range(1000, 2000))
    assert weigh([[shared, shared, shared]]) < 1.1 * weigh([[shared]])


def test_a_view_weighs_its_own_part() -> None:
    assert weigh(torch.zeros(10, 1 << 20)[0]) < 5 << 20
    chunk = memoryview((ctypes.c_ubyte * (1 << 24)).from_buffer(bytearray(1 << 24))).cast("B")
    views = [chunk[start : start + 1000].toreadonly() for start in range(64)]
    for batch in (views, {"jpg": views}, [*views, "text"], [{"jpg": view} for view in views]):
        assert 64_000 < weigh(batch) < 130_000


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_weigh_their_entries(layout: str) -> None:
    dense = torch.eye(64)
    made = {
        "coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
    }[layout]()  # fmt: skip
    assert 64 * 4 < weigh(made) < 64 * 64 * 4


def test_objects_are_thinned_out() -> None:
    """A large document counts whole, and is looked at in part."""
    document = json.loads(json.dumps([[i + 1000, [i + 2000]] for i in range(100_000)]))
    expected = sum(sys.getsizeof(part) for pair in document for part in (pair, pair[0], pair[1], pair[1][0]))
    assert 0.95 * expected <= weigh({"x": [document]}) <= 1.3 * expected


class Asks(Mapping[str, Any]):
    """A mapping that computes what it is asked for, and says that it was asked."""

    asked: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.held = list(range(1000, 2000))

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(name)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("iter")

    def __len__(self) -> int:
        raise AssertionError("len")

    def __sizeof__(self) -> int:
        raise AssertionError("sizeof")


def test_no_code_of_the_user_runs() -> None:
    assert weigh({"x": Asks()}) > 36_000
    assert weigh(Asks()) > 36_000
    assert weigh([Asks() for _ in range(100)]) > 3_600_000


def test_what_refers_to_the_program_does_not_weigh_the_program() -> None:
    class Odd:
        def __init__(self) -> None:
            self.module, self.kind, self.function, self.method = sys, Odd, weigh, self.__init__  # type: ignore[misc]

    assert weigh([Odd()]) < 4_000


def test_it_takes_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in objects that are looked at: of 256 documents of 1,000 numbers one in thirty."""
    looked_at = 0

    class Counting:
        getsizeof = staticmethod(sys.getsizeof)

    def count(one: Any) -> int:
        nonlocal looked_at
        looked_at += 1
        return sys.getsizeof(one)

    monkeypatch.setattr(Counting, "getsizeof", staticmethod(count))
    monkeypatch.setattr(weigh_module, "sys", Counting)
    weigh({"json": [list(range(1000, 2000)) for _ in range(256)], "__key__": [str(i) for i in range(256)]})
    assert looked_at < 256 * 1000 / 25


def test_lists_of_numbers_are_not_joined_to_find_out_that_they_are_no_arrays() -> None:
    """Counted in memory: a joined list of 2 million numbers takes 16 MB."""
    batch = {"json": [list(range(1000, 2000)) for _ in range(2000)]}
    tracemalloc.start()
    try:
        weigh(batch)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
