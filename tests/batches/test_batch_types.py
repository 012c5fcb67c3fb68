"""The type of a field in a batch: a function of the types of its values, never of their order or of who collates."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate as torchs

from streaming import DataLoader, OrdinaryDataset, StreamingDataset
from streaming.build.batches import collate
from streaming.build.batches.collate import default_collate
from streaming.errors import ConfigError
from tests.support.sets.tars import write_tar

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
DTYPES += ("complex64", "complex128", "uint16", "uint32", "uint64")
SCALARS = {
    "bool": True, "int": 3, "float": 1.5,
    **{f"np.{name}": np.dtype(name).type(1) for name in DTYPES if name != "bfloat16"},
    **{f"array.{name}": np.ones((), name) for name in DTYPES if name != "bfloat16"},
    **{f"tensor.{name}": torch.ones((), dtype=getattr(torch, name)) for name in DTYPES},
}  # fmt: skip
VECTORS = {
    **{f"array.{name}": np.ones(2, name) for name in DTYPES if name != "bfloat16"},
    **{f"tensor.{name}": torch.ones(2, dtype=getattr(torch, name)) for name in DTYPES},
}
OTHERS = {"text": "a", "bytes": b"a", "nothing": None, "dict": {"a": 1}, "list": [1, 2], "tuple": (1, 2)}
OTHERS |= {"ragged": np.ones(3, np.int8)}


@pytest.fixture(autouse=True)
def told_anew():
    """Forget what this process has warned of."""
    for function in (collate._tell_of_promotion, collate._tell_of_lists, collate._promoted):
        function.cache_clear()


def made(values, function=default_collate):
    """Return the type of a batch of these values: of a tensor its dtype, otherwise the name of the type or error."""
    try:
        batch = function([{"x": value} for value in values])["x"]
    except Exception as error:
        return type(error)
    return batch.dtype if isinstance(batch, torch.Tensor) else type(batch)


def alone(value):
    return made([value, value])


@pytest.mark.parametrize("values", [SCALARS, VECTORS], ids=["scalars", "vectors"])
def test_unlike_types_become_what_torch_promotes_them_to_in_any_order(values):
    refused = 0
    for (a, x), (b, y) in itertools.combinations_with_replacement(values.items(), 2):
        try:
            expected = torch.promote_types(alone(x), alone(y))
        except RuntimeError:
            expected, refused = ConfigError, refused + 1
        assert {made([x, y]), made([y, x]), made([x, x, y]), made([y, x, y])} == {expected}, (a, b)
        there = {made([x, y], torchs), made([y, x], torchs)}
        if len(there) == 1 and isinstance(next(iter(there)), torch.dtype):
            assert there == {expected}, (a, b)
    assert refused


def test_three_types_do_not_depend_on_their_order_either():
    for names in itertools.combinations(DTYPES, 3):
        values = [VECTORS[f"tensor.{name}"] for name in names]
        (found,) = {made(order) for order in itertools.permutations(values)}
        assert found is not ConfigError or not any(value.is_floating_point() for value in values), names


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "value", [1, 1.5, True, np.int32(3), np.ones(2), torch.ones(2)], ids=lambda value: type(value).__name__
)
def test_beside_what_does_not_stack_all_stay_as_they_are_and_a_warning_says_so(value, other, caplog):
    for values in ([value, OTHERS[other]], [OTHERS[other], value]):
        assert made(values) is list
    (record,) = caplog.records
    assert "field 'x': values of types" in record.getMessage()
    assert "stay a list" in record.getMessage()


def test_equal_types_are_told_of_never(caplog):
    for value in (*SCALARS.values(), *VECTORS.values(), *OTHERS.values()):
        made([value, value, value])
    made([np.ones(2), np.ones(3)])
    made(["a", None, {"a": 1}])
    assert not caplog.records


def test_values_survive_promotion():
    batch = default_collate([{"x": value} for value in (True, 3, np.float32(0.5), torch.tensor(7, dtype=torch.uint8))])
    assert batch["x"].dtype == torch.float32
    assert batch["x"].tolist() == [1.0, 3.0, 0.5, 7.0]
    batch = default_collate([{"x": np.arange(4, dtype=">i2").reshape(2, 2)}, {"x": torch.ones(2, 2)}])
    assert batch["x"].tolist() == [[[0, 1], [2, 3]], [[1, 1], [1, 1]]]


def test_each_promotion_is_told_once_by_name(caplog):
    for _ in range(3):
        default_collate([{"x": 1}, {"x": 1.5}])
        default_collate([{"y": np.int32(1)}, {"y": np.float32(1)}])
    assert [record.getMessage().partition(" as torch")[0] for record in caplog.records] == [
        "field 'x': values of types float, int in one batch, which become float64",
        "field 'y': values of types float32, int32 in one batch, which become float32",
    ]


@pytest.mark.parametrize("values", [[1, 2**63], [-(2**64), 0], [1.0, 10**400], [np.int32(1), 2**63], [2**63, 2**63]])
def test_numbers_that_do_not_fit_are_refused(values):
    with pytest.raises(ConfigError, match=r"field 'x': .*does not fit.*decode=\{'x': str\}"):
        default_collate([{"x": value} for value in values])


def test_subclasses_of_arrays_are_arrays_but_masks_are_kept(tmp_path):
    mapped = np.memmap(tmp_path / "a", np.float32, "w+", shape=(4, 3))
    batch = default_collate([{"x": row} for row in mapped])
    assert batch["x"].shape == (4, 3)
    masked = np.ma.array([1, 2], mask=[True, False])
    assert made([masked, masked]) is made([masked, np.ones(2)]) is list


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(self.rows[info.id :: info.num_workers] if info else self.rows)


PAIRS = [
    ((1, 1.5), torch.float64),
    ((True, 2), torch.int64),
    ((np.int32(1), np.float32(2)), torch.float32),
    ((np.ones(2, np.int32), np.ones(2, np.float32)), torch.float32),
    ((np.ones(2, np.float32), torch.ones(2, dtype=torch.float64)), torch.float64),
    ((torch.ones(2, dtype=torch.int32), torch.ones(2)), torch.float32),
    ((torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)), torch.float32),
]


@pytest.mark.parametrize("form", [lambda x: {"x": x}, lambda x: (x, 0), lambda x: x], ids=["dict", "tuple", "bare"])
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_every_set_of_torch_follows_the_rule(kind, form):
    for values, expected in PAIRS:
        for order in (values, values[::-1]):
            options = {"shuffle": False} if kind is Rows else {}
            loader = DataLoader(OrdinaryDataset(kind([form(value) for value in order]), **options), 2)
            (batch,) = loader
            found = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
            assert (found.dtype, len(found)) == (expected, 2), order


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tuples_are_collated_alike_in_worker_processes(num_workers):
    orders = [[(value, {"a": value})] for values, _ in PAIRS[3:6] for value in (*values, *values[::-1])]
    rows = [row for (row,) in orders]
    loader = DataLoader(Rows(rows), 2, shuffle=False, num_workers=num_workers)
    expected = [dtype for _, dtype in PAIRS[3:6] for _ in range(2)]
    assert [(first.dtype, second["a"].dtype) for first, second in loader] == [(one, one) for one in expected]
    loader.close()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_a_streaming_dataset_follows_the_rule(tmp_path, caplog):
    kinds = [np.int32, np.float32]
    members = [
        (f"{number}.{name}", data)
        for number in range(8)
        for name, data in (("npy", npy(np.ones(2, kinds[number % 2]))), ("json", b'{"n": 1}'))
    ]
    write_tar(tmp_path / "000000.tar", members)

    def lifted(sample):
        return {**sample, "n": sample["json"]["n"] + 0.5 * (sample["npy"].dtype == np.float32)}

    for options in ({}, {"transform": lifted}):
        for batch in DataLoader(StreamingDataset(f"{tmp_path}", shuffle=False, **options), 2, num_threads=0):
            assert batch["npy"].dtype == torch.float32
            assert isinstance(batch["json"], list)
            assert not options or batch["n"].dtype == torch.float64
    assert any("field 'npy': values of types float32, int32" in record.getMessage() for record in caplog.records)


def test_what_torch_does_not_promote_is_refused_by_name_in_every_set():
    rows = [np.ones(2, np.uint16), np.ones(2, np.int32)]
    for form, name in ((lambda x: {"x": x}, "field 'x'"), (lambda x: (x, 0), "samples")):
        with pytest.raises(ConfigError, match=rf"{name}: values of one shape but of types int32, uint16.*transform"):
            next(iter(DataLoader(Rows([form(row) for row in rows]), 2, shuffle=False)))
