"""States in torch.distributed.checkpoint: it takes them apart, and fills in what a new loader's state has."""

from __future__ import annotations

import importlib
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from streaming import DataLoader, Mixture
from streaming.errors import ConfigError, StateError
from streaming.integrations.checkpoint import WholeState
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]  # one process, as meant


@pytest.fixture(scope="module")
def dcp() -> Any:
    """Imported when it is used: it takes a second, in each process that collects tests."""
    return importlib.import_module("torch.distributed.checkpoint")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return {name: write_set(folder / name, (12, 20, 16)) for name in ("web", "code", "math")}


def mixture(sources: dict[str, SampleSet], names: str = "web code") -> DataLoader:
    parts = {name: sources[name].open() for name in names.split()}
    return DataLoader(Mixture(parts, weights=dict.fromkeys(parts, 1), quotas="exact"), batch_size=6, num_threads=0)


def keys(loader: DataLoader, count: int) -> list[list[str]]:
    return [batch["__key__"] for batch, _ in zip(loader, range(count), strict=False)]


def changed(loader: DataLoader) -> dict[str, Any]:
    """The state of a run whose weights were changed twice."""
    batches = iter(loader)
    for weights in ({"web": 1, "code": 5}, {"web": 7, "code": 1}):
        loader.set_weights(weights)
        next(batches)
    return loader.state_dict()


def test_a_ledger_that_grew_comes_back(dcp: Any, sources: dict[str, SampleSet], tmp_path: Path) -> None:
    with mixture(sources) as loader, mixture(sources) as new:
        state = changed(loader)
        assert len(state["ledger"]) == 3
        dcp.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"loader": new}, checkpoint_id=tmp_path, no_dist=True)
        assert new.state_dict() == state
        assert keys(new, 30) == keys(loader, 30)


def test_a_state_that_went_through_a_configuration(sources: dict[str, SampleSet]) -> None:
    """OmegaConf has dicts and lists of its own, which are none of Python's."""
    with mixture(sources) as loader, mixture(sources) as new:
        state = changed(loader)
        new.load_state_dict(UserDict({**state, "ledger": UserList(map(UserDict, state["ledger"]))}))
        assert new.state_dict() == state


def test_a_ledger_that_was_edited_is_refused(sources: dict[str, SampleSet]) -> None:
    with mixture(sources) as loader, mixture(sources) as new:
        state = changed(loader)
        longer = {**state, "ledger": [*state["ledger"], {**state["ledger"][-1], "from": 10**6}]}
        with pytest.raises(StateError, match=r"ledger and ledger_text contradict each other"):
            new.load_state_dict(longer)
        state["ledger"][1]["weights"]["web"] = 9
        with pytest.raises(StateError, match=r"ledger and ledger_text contradict each other.*ledger_text is None"):
            new.load_state_dict(state)
        state["ledger_text"] = None
        new.load_state_dict(state)
        assert new.state_dict()["ledger"] == state["ledger"]


def test_other_sources_than_before(dcp: Any, sources: dict[str, SampleSet], tmp_path: Path) -> None:
    with mixture(sources) as loader, mixture(sources, "web code math") as new:
        state = changed(loader)
        dcp.save({"loader": WholeState(loader)}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"loader": WholeState(new)}, checkpoint_id=tmp_path, no_dist=True)
        assert new.state_dict()["ledger"][:3] == state["ledger"]
        assert set(new.state_dict()["ledger"][-1]["sources"]) == {"web", "code", "math"}


def test_what_is_no_loader_or_no_whole_state_is_refused(sources: dict[str, SampleSet]) -> None:
    with mixture(sources) as loader:
        with pytest.raises(ConfigError, match=r"WholeState: expected a loader, got a dict; write WholeState\(loader\)"):
            WholeState(loader.state_dict())  # type: ignore[arg-type]  # as users do
        with pytest.raises(StateError, match=r"expected what its state_dict\(\) returned, got the keys .*'epoch'"):
            WholeState(loader).load_state_dict(loader.state_dict())


class Counting(IterableDataset[dict[str, int]]):
    """Its state has other parts at other times."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 1000:
            self.at += 1
            yield {"x": self.at}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "parts": [{"n": 1}] * (self.at % 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_an_iterable_data_set(dcp: Any, tmp_path: Path) -> None:
    with DataLoader(Counting(), batch_size=10) as loader, DataLoader(Counting(), batch_size=10) as new:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        dcp.save({"loader 0": WholeState(loader)}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"loader 0": WholeState(new)}, checkpoint_id=tmp_path, no_dist=True)
        assert next(iter(new))["x"].tolist() == next(batches)["x"].tolist() == list(range(31, 41))
