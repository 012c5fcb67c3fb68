"""Collate: what stacks, what stays a list, whose memory it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from streaming.build.batches.collate import default_collate, empty_like

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


def collate(*values, **options):
    return default_collate([{"x": value} for value in values], **options)["x"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3, 4)])
def test_arrays_of_one_shape_become_one_tensor_of_their_dtype(dtype, shape):
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.integers(0, 2, shape)).astype(dtype) for _ in range(5)]
    batch = collate(*arrays)
    assert batch.dtype == getattr(torch, dtype)
    assert batch.shape == (5, *shape)
    np.testing.assert_array_equal(batch.numpy(), np.stack(arrays))


@given(
    st.lists(
        hnp.arrays(
            st.sampled_from(["<i4", ">i4", "<f8", "|u1", "|b1"]),
            hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_stacked_or_listed_every_value_comes_back(arrays):
    batch = collate(*arrays)
    assert len(batch) == len(arrays)
    assert isinstance(batch, torch.Tensor) == (len({array.shape for array in arrays}) == 1)
    for got, array in zip(batch, arrays, strict=True):
        assert isinstance(got, torch.Tensor)
        assert got.shape == array.shape
        np.testing.assert_array_equal(got.numpy(), array)


def test_strided_readonly_and_big_endian_arrays_stack_without_a_warning():
    readonly = np.arange(6, dtype=">i4").reshape(2, 3).T[::-1]
    readonly.flags.writeable = False
    batch = collate(readonly, readonly)
    assert batch.dtype == torch.int32
    np.testing.assert_array_equal(batch[1].numpy(), readonly)
    ragged = collate(readonly, readonly[:1])
    assert [tuple(tensor.shape) for tensor in ragged] == [(3, 2), (1, 2)]
    np.testing.assert_array_equal(ragged[0].numpy(), readonly)


def test_stacked_tensors_own_their_memory():
    array = np.zeros(3, np.int64)
    tensor = torch.zeros(3)
    batch = default_collate([{"a": array, "t": tensor}])
    array[:] = 1
    tensor[:] = 1
    assert batch["a"].tolist() == [[0, 0, 0]]
    assert batch["t"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], torch.int64),
        ([-(2**63), 2**63 - 1], torch.int64),
        ([1.5, float("inf")], torch.float64),
        ([1, 1.5], torch.float64),
        ([2**63, 1.5], torch.float64),
        ([True, 3], torch.int64),
        ([True, 1.5], torch.float64),
        ([1, np.float32(0.5)], torch.float32),
        ([np.array(3, ">i2"), np.int16(4)], torch.int16),
        ([True, False], torch.bool),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([np.uint16(1), np.uint16(65535)], torch.uint16),
        ([np.bool_(True), np.bool_(False)], torch.bool),
        ([np.int8(1), np.array(2, np.int8)], torch.int8),
    ],
)
def test_numbers_become_a_vector(values, dtype):
    batch = collate(*values)
    assert batch.dtype == dtype
    assert batch.shape == (2,)
    assert batch.tolist() == [value.item() if hasattr(value, "item") else value for value in values]


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [b"a", b"b"],
        [{"a": 1}, {"a": 2}],
        [[1], [2]],
        [None, None],
        [1, "a"],
        [np.str_("a"), np.str_("b")],
        [np.datetime64("2020-01-01"), np.datetime64("2020-01-02")],
    ],
)
def test_all_else_is_a_list_of_the_same_objects(values):
    batch = collate(*values)
    assert type(batch) is list
    assert all(got is value for got, value in zip(batch, values, strict=True))


def test_tensors_stack_and_ragged_ones_are_listed():
    a = torch.arange(3, dtype=torch.bfloat16, requires_grad=True)
    stacked = collate(a, a)
    assert stacked.dtype == torch.bfloat16
    assert not stacked.requires_grad
    assert torch.equal(stacked[1], a.detach())
    assert [tuple(tensor.shape) for tensor in collate(a, a[:1])] == [(3,), (1,)]
    assert collate(a, a.float()).dtype == torch.float32
    assert [tensor.dtype for tensor in collate(a, a.float()[:1])] == [torch.bfloat16, torch.float32]
    mixed = collate(torch.ones(2), np.ones(2, np.float32))
    assert isinstance(mixed, torch.Tensor)
    assert mixed.tolist() == [[1, 1], [1, 1]]
    sparse = torch.eye(2).to_sparse()
    assert collate(sparse, sparse) == [sparse, sparse]


def test_fields_are_the_union_in_the_order_first_seen_with_none_where_missing():
    batch = default_collate([{"b": 1, "a": np.zeros(2)}, {"c": "x", "b": 2}, {"a": np.ones(2), "b": 3}])
    assert list(batch) == ["b", "a", "c"]
    assert batch["b"].tolist() == [1, 2, 3]
    assert batch["c"] == [None, "x", None]
    assert batch["a"][0].tolist() == [0, 0]
    assert batch["a"][1] is None
    assert batch["a"][2].tolist() == [1, 1]


def test_keys_and_urls_are_always_lists():
    batch = default_collate([{"__key__": "a", "__url__": "u"}, {"__key__": "b", "__url__": "v"}])
    assert batch == {"__key__": ["a", "b"], "__url__": ["u", "v"]}


def test_no_samples_no_fields():
    assert default_collate([]) == {}


def test_every_tensor_lies_where_allocate_says():
    asked = []
    memory = torch.zeros(4096, dtype=torch.uint8)

    def allocate(shape, dtype):
        start = sum((tensor.nbytes + 63) // 64 * 64 for tensor in asked)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        asked.append(memory[start : start + num_bytes].view(dtype).view(shape))
        return asked[-1]

    sample = {
        "a": np.ones((2, 3), np.uint16),
        "i": 1,
        "f": 1.0,
        "b": True,
        "t": torch.ones(2),
        "s": "x",
        "g": np.int8(1),
    }
    batch = default_collate([sample, sample], allocate=allocate)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == len(asked) == 6
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    for tensor in tensors:
        assert start <= tensor.data_ptr() < stop
        assert (tensor == 1).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda shape, dtype: torch.empty((*shape, 1), dtype=dtype),
        lambda shape, dtype: torch.empty(shape, dtype=torch.float16),
        lambda shape, dtype: torch.empty((*shape, 2), dtype=dtype)[..., 0],
    ],
)
def test_what_allocate_gives_is_checked(wrong):
    with pytest.raises(ValueError, match="contiguous tensor of that shape"):
        collate(np.zeros((2, 2)), np.zeros((2, 2)), allocate=wrong)


def test_empty_like_keeps_fields_shapes_and_dtypes_but_not_the_batch():
    batch = default_collate([{"__key__": "a", "jpg": np.zeros((4, 5, 3), np.uint8), "cls": 1, "txt": "x"}])
    empty = empty_like(batch)
    assert list(empty) == list(batch)
    assert empty["jpg"].shape == (0, 4, 5, 3)
    assert empty["jpg"].dtype == torch.uint8
    assert empty["cls"].shape == (0,)
    assert empty["__key__"] == empty["txt"] == []
    assert empty["jpg"].untyped_storage().nbytes() == 0
