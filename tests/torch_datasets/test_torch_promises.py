"""What torch's loader promises to a program: held, refused with words, or otherwise, as docs/coming-from/torch.md says.

Each promise is a program, which is run with torch's loader and with ours. Promises about random numbers of a set and
about states are in test_set_states.py, those of ``get_worker_info()`` in test_worker_info.py, lengths that change in
test_growth.py, types of values in tests/batches/test_batch_types.py, dead and late workers in test_worker_causes.py,
calls of trainers in tests/trainers/test_helpers.py. Not applicable are promises about torch's samplers, its
``default_collate`` and its sets by themselves, which stay torch's own; about page-locked memory without CUDA; about
names that torch keeps private (``_workers``, ``_snapshot``); and about warnings of too many workers.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from streaming import DataLoader
from streaming.others.torch_datasets.kinds import is_iterable
from tests.support.code.folders import ROOT

pytestmark = pytest.mark.usefixtures("one_fork_server")

PAGE = ROOT / "docs" / "coming-from" / "torch.md"
ROWS = list(range(10))
Loader = Callable[..., Any]
Program = Callable[[Loader], Any]
Point = namedtuple("Point", "x y")  # noqa: PYI024  as users write them


@dataclass(frozen=True)
class Promise:
    """A program, and what becomes of it here.

    Attributes:
        program: Function of a class of loaders; what it returns is compared.
        refused: What the error says; empty: no error.
        otherwise: What the page says, where the program gets something else; empty: it gets the same.
    """

    program: Program
    refused: str = ""
    otherwise: str = ""


def ours(dataset: Any, *given: Any, **options: Any) -> DataLoader[Any]:
    """Our loader with torch's defaults: in order, in batches of one, with the last batch."""
    if not given:
        options.setdefault("batch_size", 1)
    if not is_iterable(dataset) and not {"sampler", "batch_sampler"} & set(options):
        options.setdefault("shuffle", False)
    size = given[0] if given else options["batch_size"]
    return DataLoader(dataset, *given, **({"drop_last": False} if size is not None else {}) | options)


def plain(value: Any) -> Any:
    """Values with their types, as ``==`` compares them."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(one) for one in value]
    return value


def batches_of(dataset: Any, *given: Any, **options: Any) -> Program:
    """The batches of two epochs, and how many there are."""

    def run(loader: Loader) -> Any:
        made = loader(dataset() if isinstance(dataset, type) else dataset, *given, **options)
        try:
            count: Any = len(made)
        except TypeError:
            count = "unknown"
        return count, [[plain(batch) for batch in made] for _ in range(2)]

    return run


def error_of(dataset: Any, *given: Any, **options: Any) -> Program:
    """Whether what torch refuses as a wrong value is one."""

    def run(loader: Loader) -> bool:
        with pytest.raises((ValueError, TypeError)):
            list(loader(dataset, *given, **options))
        return True

    return run


# --- sets ---


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


class Sized(Stream):
    def __len__(self) -> int:
        return len(ROWS)


class Asked(Dataset[int]):
    """Is asked for whole batches."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(len(indices), index) for index in indices]


class Bad(Dataset[int]):
    """One sample of a thousand cannot be read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise LookupError("sample 5")
        return index


class BadStream(Stream):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise LookupError("a row")


class Where(Dataset[Any]):
    """Tells of the process that reads."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return None if info is None else (info.id, index, torch.get_num_threads(), info.seed == torch.initial_seed())


def pairs(of: Any) -> list[dict[str, Any]]:
    return [of for _ in range(3)]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def pinned_to_a_core(number: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class Cores(Where):
    def __getitem__(self, index: int) -> int:
        return len(os.sched_getaffinity(0))


# --- programs ---


def loops_at_once(loader: Loader) -> Any:
    first, second = loader(ROWS, 3), loader(ROWS, 3)
    return [(plain(a), plain(b)) for a, b in zip(first, second, strict=True)]


def left_early(loader: Loader) -> Any:
    made = loader(ROWS, 3)
    return [[plain(batch) for batch in itertools.islice(made, stop)] for stop in (1, 2, 9)]


def behind_the_end(loader: Loader) -> Any:
    batches = iter(loader(ROWS, 5))
    return [plain(next(batches, "end")) for _ in range(4)]


def behind_an_error(loader: Loader) -> Any:
    batches = iter(loader(BadStream(), 1))
    with pytest.raises(LookupError):
        [next(batches) for _ in range(2)]
    return next(batches, "end")


def caught(dataset: Any, **options: Any) -> Program:
    def run(loader: Loader) -> Any:
        with pytest.raises(LookupError) as raised:
            list(loader(dataset, 2, **options))
        return type(raised.value)

    return run


def copies(loader: Loader) -> Any:
    made = loader(ROWS, 3)
    return [[plain(batch) for batch in one] for one in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)))]


def attributes(loader: Loader) -> Any:
    made = loader(ROWS, 3, num_workers=0)
    return made.dataset is ROWS, made.batch_size, made.num_workers, made.collate_fn is None, made.drop_last


def change(loader: Loader) -> bool:
    for name in ("batch_size", "dataset", "drop_last", "sampler"):
        with pytest.raises(ValueError, match=name):
            setattr(loader(ROWS, 3), name, 2)
    return True


def global_state(loader: Loader) -> Any:
    """Loops draw nothing from NumPy's generator of the process."""
    np.random.seed(3)  # noqa: NPY002
    list(loader(ROWS, 3))
    return int(np.random.randint(10**6))  # noqa: NPY002


def seeded(loader: Loader) -> Any:
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append([plain(batch) for batch in loader(ROWS, 3, shuffle=True)])
    return orders[0] == orders[1], orders[0] == orders[2]


def another_order_each_epoch(loader: Loader) -> Any:
    made = loader(list(range(100)), 100, shuffle=True)
    first, second = [[int(row) for batch in made for row in batch] for _ in range(2)]
    return sorted(first) == sorted(second) == list(range(100)), first == second, first == list(range(100))


def size_of_items(loader: Loader) -> Any:
    return loader(ROWS, batch_size=None).batch_size


def generic(loader: Loader) -> bool:
    return (DataLoader if loader is ours else TorchLoader)[int] is not None  # type: ignore[index]


def or_error(program: Program) -> Program:
    def run(loader: Loader) -> Any:
        try:
            return program(loader)
        except (LookupError, ValueError):
            return "an error"

    return run


def bare(program: Program) -> Program:
    """With each loader's own defaults."""
    return lambda loader: program(DataLoader if loader is ours else loader)


NESTED = {"a": [1, 2], "b": {"c": 1}}
OF_MIXED = [(1, 2.5, "s", True, np.float32(3), np.arange(2), b"b")] * 4
PROMISES: dict[str, Promise] = {
    "in order, with a short last batch": Promise(batches_of(ROWS, 3)),
    "drop_last=True": Promise(batches_of(ROWS, 3, drop_last=True)),
    "batches of one sample": Promise(batches_of(ROWS)),
    "batch_size=None": Promise(batches_of([torch.arange(3), torch.arange(2)], batch_size=None)),
    "collate_fn gets the list of samples": Promise(batches_of(ROWS, 3, collate_fn=as_list)),
    "tuples of all types": Promise(batches_of(OF_MIXED, 3)),
    "dicts": Promise(batches_of([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}], 2)),
    "named tuples": Promise(batches_of([Point(1, "a"), Point(2, "b")], 2)),
    "a tuple, a range as a data set": Promise(lambda loader: [batches_of(of, 2)(loader) for of in ((1, 2), range(3))]),
    "TensorDataset": Promise(batches_of(TensorDataset(torch.arange(5), torch.arange(5) * 2), 2)),
    "StackDataset": Promise(batches_of(StackDataset(a=ROWS, b=ROWS), 4)),
    "Subset, ConcatDataset, random_split": Promise(lambda loader: [
        batches_of(of, 2)(loader) for of in (
            Subset(ROWS, [4, 2, 9]), ConcatDataset([ROWS, [7]]),  # type: ignore[arg-type, list-item]
            *random_split(ROWS, [3, 7], torch.Generator().manual_seed(2)),  # type: ignore[arg-type]
        )
    ]),
    "__getitems__ is asked for a batch": Promise(batches_of(Asked, 4)),
    "an iterable set": Promise(batches_of(Stream, 4)),
    "an iterable set in items": Promise(batches_of(Stream, batch_size=None)),
    "ChainDataset": Promise(batches_of(ChainDataset([Stream(), Stream()]), 4)),
    "DataPipes": Promise(lambda loader: batches_of(IterableWrapper(ROWS).map(str), 4)(loader)[1]),
    "two loaders over one set at once": Promise(loops_at_once),
    "a loop left early": Promise(left_early),
    "next() behind the end": Promise(behind_the_end),
    "an error of an iterable set": Promise(caught(BadStream())),
    "an error of an iterable set in a worker": Promise(caught(BadStream(), num_workers=1)),
    "copies of a loader": Promise(copies),
    "options as attributes": Promise(lambda loader: attributes(loader)[:3]),
    "options that are set later": Promise(change),
    "DataLoader[int]": Promise(generic),
    "numpy.random stays as it is": Promise(global_state),
    "shuffle=True: another order each epoch": Promise(another_order_each_epoch),
    "one thread, and a seed, in each worker; batches in turn": Promise(
        batches_of(Where, 3, num_workers=2, collate_fn=as_list)
    ),
    "worker_init_fn may choose cores": Promise(batches_of(Cores, 5, num_workers=1, worker_init_fn=pinned_to_a_core)),
    "persistent_workers=False of an iterable set": Promise(
        batches_of(Stream, 4, num_workers=1, persistent_workers=False)
    ),
    "a negative num_workers": Promise(error_of(ROWS, num_workers=-1)),
    "a negative timeout": Promise(error_of(ROWS, timeout=-1)),
    "a batch of no samples": Promise(error_of(ROWS, 0)),
    "no start method of that name": Promise(error_of(ROWS, num_workers=1, multiprocessing_context="bad")),
    "shuffle of an iterable set": Promise(error_of(Stream(), shuffle=True)),
    "a sampler for an iterable set": Promise(error_of(Stream(), sampler=[1])),
    "a sampler and shuffle": Promise(error_of(ROWS, sampler=[1], shuffle=True)),
    "batch_sampler and batch_size": Promise(error_of(ROWS, 2, batch_sampler=[[1]])),
    # refused
    "`sampler=`": Promise(batches_of(ROWS, 3, sampler=[1, 2]), refused="deals out the samples itself"),
    "`batch_sampler=`": Promise(batches_of(ROWS, batch_sampler=[[1, 2]]), refused="deals out the samples itself"),
    "`generator=`": Promise(batches_of(ROWS, 3, generator=torch.Generator()), refused="the order comes from a seed"),
    "`in_order=False`": Promise(batches_of(ROWS, 3, in_order=False), refused="batches always come in order"),
    "`persistent_workers=True` of an iterable dataset": Promise(
        batches_of(Stream, 4, num_workers=1, persistent_workers=True), refused="end with each pass over it"
    ),
    "`len` of a loader over an iterable dataset that has one": Promise(
        lambda loader: len(loader(Sized(), 4)), refused="give epoch_size"
    ),
    "a string as a dataset": Promise(batches_of("abc", 2), refused="got the string"),
    "`next` after an error": Promise(behind_an_error, refused="call iter\\(\\) again"),
    # otherwise
    "the default of `shuffle=`": Promise(
        bare(batches_of(ROWS, 5)), otherwise="map-style datasets are shuffled by default"
    ),
    "the default of `drop_last=`": Promise(
        bare(batches_of(ROWS, 4, collate_fn=len)), otherwise="is dropped by default"
    ),
    "`torch.manual_seed`": Promise(seeded, otherwise="does not change the order"),
    "entries that are dicts, lists or tuples": Promise(batches_of(pairs(NESTED), 3), otherwise="Nested samples"),
    "a sample that raises": Promise(
        or_error(lambda loader: len(list(loader(Bad(), 100)))), otherwise="A sample that raises is replaced"
    ),
    "`drop_last=True` with `batch_size=None`": Promise(
        or_error(batches_of(ROWS, batch_size=None, drop_last=True)), otherwise="positions and ranks count items"
    ),
    "`loader.batch_size` with `batch_size=None`": Promise(size_of_items, otherwise="positions and ranks count items"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROMISES)
def test_promises_are_held_or_something_is_said(name: str) -> None:
    promise = PROMISES[name]
    expected = promise.program(TorchLoader)
    if promise.refused:
        with pytest.raises(Exception, match=promise.refused):
            promise.program(ours)
    elif promise.otherwise:
        assert promise.program(ours) != expected, "it is held"
    else:
        assert promise.program(ours) == expected


def test_the_page_has_a_row_for_each_that_is_not_held() -> None:
    section = PAGE.read_text().partition("## What torch promises and we do not")[2].partition("\n## ")[0]
    cells = [[one.strip() for one in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert [(row[0], row[1]) for row in cells[2:]] == [
        (name, "refused" if one.refused else "otherwise")
        for name, one in PROMISES.items()
        if one.refused or one.otherwise
    ]
    whole = " ".join(PAGE.read_text().split())
    for one in PROMISES.values():
        assert one.otherwise in whole
