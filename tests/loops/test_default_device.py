"""A script that trains under another default device of torch gets the same batches, in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from streaming import DataLoader, DeviceMeshFetcher, StreamingDataset
from tests.support.contracts.option_kinds import COUNT, KINDS, Places, run
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places.write(tmp_path_factory.mktemp("sets"))


class Rows:
    """Map-style, without tensors of its own."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"cls": index, "bin": bytes(1 + index % 9), "vec.npy": np.arange(4) + index}


class Stream(IterableDataset[dict[str, Any]]):
    """Iterable, likewise."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(Rows().__getitem__, range(COUNT))


OTHERS = {"map-style": lambda *_: Rows(), "iterable": lambda *_: Stream()}


@contextmanager
def set_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("how", first_here([set_device, torch.device], 1))
@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("kind", first_here(KINDS, 8))
def test_batches_of_all_kinds_are_the_same(places: Places, kind: str, num_workers: int, how: Any) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "last_batch": "pad"}
    if kind in OTHERS:
        options["dataset"] = OTHERS[kind]
    if kind in {"plain", "mixture", "map-style"}:
        options["jagged"] = {"bin": "flat", "vec.npy": "values"}
    found = []
    for context in (nullcontext(), how("meta")):
        with context:
            found.append(run(kind, places, {"DataLoader": options}))
    assert found[0].error is None
    assert found[1].shown == found[0].shown
    assert found[0].batches


@pytest.mark.thorough
def test_a_loop_whose_functions_make_tensors_gets_them_where_the_script_puts_them(places: Places) -> None:
    """As without workers, where functions are called by the script; in threads and processes, too."""

    def make(sample: dict[str, Any]) -> dict[str, Any]:
        return {"cls": sample["cls"], "made": str(torch.zeros(2).device)}

    dataset = StreamingDataset(places.url("whole"), transform=make)
    for num_workers, num_threads in ((0, 0), (0, 3), (2, 0), (2, 1)):
        with (
            set_device("meta"),
            DataLoader(dataset, 4, num_workers=num_workers, num_threads=num_threads) as loader,
        ):
            for batch in loader:
                assert batch["cls"].device.type == "cpu"
                assert set(batch["made"]) == {"meta"}


def test_samples_of_a_fetcher_are_the_same(places: Places) -> None:
    found = []
    for context in (nullcontext(), set_device("meta")):
        with context, DeviceMeshFetcher(StreamingDataset(places.url("whole")), 8, last_batch="pad") as fetcher:
            found.append([sample["cls"] for samples in fetcher for sample in samples])
    assert found[0] == found[1] != []
