"""``as_tuple``: batches as tuples of entries, for programs written for torch's sets of pairs; or a refusal in words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from streaming import (
    DataLoader,
    DevicePrefetcher,
    Jagged,
    Mixture,
    RemoteGroup,
    StageFields,
    StreamingDataset,
    Tickets,
)
from streaming.errors import ConfigError
from tests.support.contracts.option_kinds import KINDS, Places, plain

pytestmark = pytest.mark.usefixtures("one_fork_server")
PAIR = ("cls", "__key__")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places.write(tmp_path_factory.mktemp("tuples"))


class Pairs:
    """Map-style, of pairs."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 2 * index


class Dicts(Pairs):
    """Map-style, of dicts."""

    def __getitem__(self, index: int) -> Any:
        return {"x": index, "y": 2 * index}


MADE: dict[str, tuple[Callable[[Places], Any], dict[str, Any], tuple[str, ...]]] = {
    "one thread": (lambda places: StreamingDataset(places.url("whole")), {"num_threads": 0}, PAIR),
    "workers": (lambda places: StreamingDataset(places.url("whole")), {"num_workers": 1}, PAIR),
    "one entry": (lambda places: StreamingDataset(places.url("whole")), {}, ("vec.npy",)),
    "jagged": (lambda places: StreamingDataset(places.url("whole")), {"jagged": ("bin",)}, ("bin", "cls")),
    "micro-batches": (
        lambda places: StreamingDataset(places.url("whole")), {"micro_batch_size": 2}, ("cls", "__step__", "__micro__"),
    ),
    "padded": (lambda places: StreamingDataset(places.url("whole")), {"last_batch": "pad", "batch_size": 7},
               ("cls", "__valid__")),
    "mixture": (lambda places: Mixture({name: StreamingDataset(places.url("whole")) for name in "ab"}), {},
                ("__source__", "cls")),
    "map-style": (lambda _: Dicts(), {}, ("y", "x")),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_batches_are_tuples_of_the_named_entries(places: Places, name: str) -> None:
    """Whoever builds them, under a prefetcher, and after a resume: the entries of the batches without the option."""
    make, options, names = MADE[name]
    options = {"batch_size": 5, **options}

    def loader() -> DataLoader:
        return DataLoader(make(places), as_tuple=list(names), **options)

    with DataLoader(make(places), **options) as bare:
        due = [plain({"entries": tuple(batch[entry] for entry in names)}) for batch in bare]
    with loader() as one:
        found = list(one)
        assert all(type(batch) is tuple for batch in found)
        assert [plain({"entries": batch}) for batch in found] == due
        assert len(one) == len(due)
    with loader() as one:
        assert [plain({"entries": batch}) for batch in DevicePrefetcher(one, "cpu")] == due
    with loader() as one:
        (*_, state) = (state for _, state in islice(one.with_state(), 2))
    with loader() as one:
        one.load_state_dict(state)
        assert [plain({"entries": batch}) for batch in one] == due[2:]


def test_values_are_the_tensors_of_the_batch(places: Places) -> None:
    with DataLoader(StreamingDataset(places.url("whole")), 4, as_tuple=("bin", "cls"), jagged=("bin",)) as loader:
        for sounds, labels in loader:
            assert isinstance(sounds, Jagged)
            assert isinstance(labels, torch.Tensor)
    assert loader._core.options.as_tuple == ("bin", "cls")


REFUSED: dict[str, tuple[Callable[[Places], Any], dict[str, Any], str]] = {
    "no names": (lambda places: StreamingDataset(places.url("whole")), {"as_tuple": ()}, "expected names of entries"),
    "a string": (lambda places: StreamingDataset(places.url("whole")), {"as_tuple": "cls"}, "names of entries"),
    "True": (lambda places: StreamingDataset(places.url("whole")), {"as_tuple": True}, "expected names of entries"),
    "collate_fn": (lambda places: StreamingDataset(places.url("whole")), {"collate_fn": list}, "return a tuple itself"),
    "stages": (
        lambda places: StreamingDataset(places.url("whole")),
        {"stage_fields": StageFields(first=("cls",), last=())}, "stages get different entries",
    ),
    "ready batches": (lambda _: Dicts(), {"batch_size": None}, "with collate_fn=.*batch_size=None"),
    "actors": (
        lambda places: lambda: StreamingDataset(places.url("whole")), {"remote_group": RemoteGroup(name="tuples")},
        "handles stand for batches",
    ),
    "an entry that is absent": (
        lambda places: StreamingDataset(places.url("whole")), {"as_tuple": ("jpg", "cls")},
        r"no entry 'jpg'; it has .*cls",
    ),
    "the mask left out": (
        lambda places: StreamingDataset(places.url("whole")), {"last_batch": "pad"}, 'leaves out "__valid__"',
    ),
    "marks of substitutes left out": (
        lambda places: StreamingDataset(places.url("whole"), on_error="skip"), {}, 'leaves out "__valid__"',
    ),
    "pairs": (lambda _: Pairs(), {}, "picks entries of dicts.*list|picks entries of dicts.*tuple"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_no_tuple_is_refused_before_or_at_the_first_batch(places: Places, case: str) -> None:
    make, options, words = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"^as_tuple.*{words}"):
        next(iter(DataLoader(make(places), **{"batch_size": 5, "as_tuple": PAIR, **options})))


def test_a_batch_that_is_refused_is_not_lost(places: Places) -> None:
    with DataLoader(StreamingDataset(places.url("whole")), 5, as_tuple=("jpg",)) as loader:
        with pytest.raises(ConfigError, match="no entry 'jpg'"):
            next(iter(loader))
        assert loader.state_dict()["samples_seen"] == 0


def test_tickets_stand_for_samples_or_for_tuples(places: Places) -> None:
    loader = DataLoader(StreamingDataset(places.url("whole")), 5, as_tuple=PAIR)
    with pytest.raises(ConfigError, match="as_tuple: it acts on whole batches"):
        Tickets(loader)
    assert all(type(batch) is tuple for _, batch in Tickets(loader, unit="batch"))


def test_packs_are_tuples(places: Places) -> None:
    packed = KINDS["packed"].make(places, {"Packed": {"length": 8}})
    with DataLoader(packed, 2, as_tuple=("input_ids", "labels", "num_labels")) as loader:
        for ids, labels, count in loader:
            assert ids.shape == labels.shape
            assert count == (labels != -100).sum()
