"""Batches as JSON and bytes: what goes in comes out, and nothing is run on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.run.replicas.batch_codec import ALIGN_BYTES, decode, encode


def allocate(size: int) -> torch.Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def there_and_back(batch: Any) -> Any:
    return decode(encode(batch, allocate))


def same(a: Any, b: Any) -> bool:
    """Same types, shapes, dtypes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


def test_a_batch_of_everything() -> None:
    batch = {
        "__key__": ["a", "ключ", "\ud800", ""],
        **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
        "transposed": torch.arange(6).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 4),
        "ragged": [torch.arange(n) for n in range(4)],
        "arrays": (np.arange(3, dtype=">i4"), np.array(["ab", "c"]), np.float32(2.5), np.empty((0, 2))),
        "bytes": [b"", b"abc", None],
        "numbers": [True, 2**70, -1.5, float("inf"), float("nan"), None],
        "nested": {"list": ["tensor", ["list"]], "empty": [{}, [], ()]},
    }
    assert same(there_and_back(batch), batch)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@given(
    st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner))
)
def test_any_structure(batch: Any) -> None:
    assert same(there_and_back(batch), batch)


def test_tensors_are_aligned_views_that_may_be_written() -> None:
    data = encode({"a": torch.arange(3, dtype=torch.uint8), "b": torch.ones(5)}, allocate)
    batch = decode(data)
    assert batch["b"].data_ptr() % ALIGN_BYTES == data.data_ptr() % ALIGN_BYTES
    assert data.data_ptr() <= batch["b"].data_ptr() < data.data_ptr() + len(data)
    batch["b"] += 1
    assert batch["b"].tolist() == [2.0] * 5


class Odd:
    pass


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": [1, Odd()]}, r"batch\['x'\]\[1\] is a test_batch_codec.Odd"),
        ({1: 2}, "batch is a builtins.dict"),
        ({"x": {1}}, r"batch\['x'\] is a builtins.set"),
        (np.array([None]), "batch is a numpy.ndarray"),
        (torch.eye(2).to_sparse(), "batch is a torch.Tensor"),
    ],
)
def test_other_things_are_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message + r".*Broadcast\(encode=…, decode=…\)"):
        encode(batch, allocate)
