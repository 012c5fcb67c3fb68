"""States of sets that live: they name their version, go on with it while the set grows, and say which one to open."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import tag
from streaming import Balanced, DataLoader, DeviceMeshFetcher, Mixture, Packed, ShuffleConfig, StreamingDataset
from streaming.errors import StateError
from streaming.order.plan.state import LoaderState
from streaming.storage import Storage

TOKENS = 6
FEW_LANES = ShuffleConfig(lanes=2)


def write(folder: Path, first: int, num: int, **options: Any) -> None:
    """Documents of six tokens each, of three kinds."""
    columns = {"tokens": "json.tokens", "kind": "json.kind"}
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=8, columns=columns, **options) as writer:
        for number in range(first, first + num):
            row = {"tokens": TOKENS, "kind": number % 3}
            body = np.full(TOKENS, number, np.uint16).tobytes()
            writer.write({"__key__": f"{number:04d}", "tok": body, "json": row})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "set", 0, 40)
    write(tmp_path / "other", 500, 24)
    return tmp_path


def of_file(folder: Path, **options: Any) -> Mixture:
    told = {"sources": {"a": {"url": f"{folder}/set", **options}, "b": f"{folder}/other"}, "shuffle": {"lanes": 2}}
    (folder / "mixture.json").write_text(json.dumps(told))
    return Mixture.from_file(folder / "mixture.json")


def data(folder: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(f"{folder}/set", shuffle=FEW_LANES, **options)


def both(folder: Path, make: Callable[[StreamingDataset], Any], **options: Any) -> Mixture:
    sources = {"a": make(data(folder, **options)), "b": make(StreamingDataset(f"{folder}/other"))}
    return Mixture(sources, shuffle=FEW_LANES)


def packs(dataset: StreamingDataset) -> Packed:
    return Packed(dataset, 2 * TOKENS)


KINDS: dict[str, Callable[..., Any]] = {
    "set": data,
    "filtered": lambda folder, **options: data(folder, where="kind != 1", **options),
    "packs": lambda folder, **options: packs(data(folder, **options)),
    "groups": lambda folder, **options: Balanced(data(folder, **options), "kind"),
    "mixture": lambda folder, **options: both(folder, lambda one: one, **options),
    "mixture of packs": lambda folder, **options: both(folder, packs, **options),
    "file": of_file,
}
CHANGES: dict[str, Callable[[str], object]] = {
    "append": lambda url: write(Path(url), 100, 9, append=True),
    "delete": lambda url: delete(url, storage=Storage(), keys=["0003", "0019"]),
}


def keys(batches: Any, num: int) -> list[Any]:
    found = list(islice(batches, num))
    return [[one["__key__"] for one in batch] if isinstance(batch, list) else batch["__key__"] for batch in found]


def loop(dataset: Any, kind: str = "loader") -> Any:
    if kind == "fetcher":
        return DeviceMeshFetcher(dataset, batch_size=4)
    return DataLoader(dataset, batch_size=4, num_threads=0)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_with_its_version_or_says_which_one(kind: str, lives: bool, change: str, folder: Path) -> None:
    url, make = f"{folder}/set", KINDS[kind]
    if lives:
        delete(url, storage=Storage(), keys=["0000"])
    number = 2 if lives else 1
    with loop(make(folder)) as loader:
        batches = iter(loader)
        keys(batches, 2)
        state = json.loads(json.dumps(loader.state_dict()))
        CHANGES[change](url)
        wanted = keys(batches, 4)  # the run itself goes on with what it opened
    assert ("versions" in state) == lives
    words = rf"version {number + 1} is open.*open it with version={number}\b"
    with loop(make(folder)) as loader, pytest.raises(StateError, match=words):
        loader.load_state_dict(state)
    with loop(make(folder, version=number)) as loader:
        loader.load_state_dict(state)
        assert keys(iter(loader), 4) == wanted


@pytest.mark.parametrize("kind", ["set", "packs", "mixture"])
def test_a_fetcher_does_the_same(kind: str, folder: Path) -> None:
    url, make = f"{folder}/set", KINDS[kind]
    tag(url, "v1", storage=Storage())
    with loop(make(folder), "fetcher") as fetcher:
        batches = iter(fetcher)
        keys(batches, 2)
        state = fetcher.state_dict()
        CHANGES["append"](url)
        wanted = keys(batches, 3)
    with loop(make(folder), "fetcher") as fetcher, pytest.raises(StateError, match="open it with version="):
        fetcher.load_state_dict(state)
    with loop(make(folder, version="v1"), "fetcher") as fetcher:
        fetcher.load_state_dict(state)
        assert keys(iter(fetcher), 3) == wanted


@pytest.mark.parametrize("kind", ["set", "packs", "groups", "mixture"])
def test_a_version_that_is_pruned_is_named_as_such(kind: str, folder: Path) -> None:
    url = f"{folder}/set"
    delete(url, storage=Storage(), keys=["0000"])
    with loop(KINDS[kind](folder)) as loader:
        keys(iter(loader), 1)
        state = loader.state_dict()
    CHANGES["append"](url)
    prune(url, storage=Storage())
    words = (
        "version 2 of this set, which is pruned and does not come back, and version 3 is open.*new run, without this "
        f"state.*shard_tools version list {url}"
    )
    with loop(KINDS[kind](folder)) as loader, pytest.raises(StateError, match=words):
        loader.load_state_dict(state)


def test_the_version_before_there_were_any_is_pruned_too(folder: Path) -> None:
    url = f"{folder}/set"
    with loop(data(folder)) as loader:
        keys(iter(loader), 1)
        state = loader.state_dict()
    assert "versions" not in state
    CHANGES["delete"](url)
    prune(url, storage=Storage())
    words = "before this set had versions, they are those of version 1, which is pruned and does not come back"
    with loop(data(folder)) as loader, pytest.raises(StateError, match=words):
        loader.load_state_dict(state)


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("make", [lambda one: one, packs], ids=["samples", "packs"])
def test_a_mixture_without_an_end_goes_on_while_its_source_grows(
    make: Callable[[StreamingDataset], Any], lives: bool, folder: Path
) -> None:
    """A pass in progress stays as it is; later ones have what was appended."""
    if lives:
        tag(f"{folder}/set", "v1", storage=Storage())

    def opened() -> Any:
        mix = Mixture(both(folder, make).sources, weights={"a": 3, "b": 1}, shuffle=False)
        return loop(mix)

    def of_a(found: list[Any]) -> list[str]:
        rows = [row for batch in found for row in batch]
        return [key for row in rows for key in ([row] if isinstance(row, str) else row) if key < "0500"]

    with opened() as loader:
        before = keys(iter(loader), 2)
        state = json.loads(json.dumps(loader.state_dict()))
    CHANGES["append"](f"{folder}/set")
    with opened() as loader:
        loader.load_state_dict(state)
        after = keys(iter(loader), 120)
        last = loader.state_dict()
    assert last["ledger"][-1]["joins"].keys() == {"a"}
    assert json.loads(last["versions"]) == {"a": [2]}
    seen, first = of_a(before) + of_a(after), last["ledger"][-1]["joins"]["a"]
    for number in range(first):
        assert sorted(seen[40 * number : 40 * (number + 1)]) == [f"{number:04d}" for number in range(40)]
    later = seen[40 * first : 40 * first + 49]
    assert sorted(later) == [f"{number:04d}" for number in (*range(40), *range(100, 109))]
    with opened() as loader:  # its own state is that of the grown set
        loader.load_state_dict(last)


@pytest.mark.parametrize("text", ["[]", "3", '{"": 3}', '{"": ["3"]}', '{"": [true]}', "{", None, 3])
def test_versions_that_are_none_are_refused(text: object, folder: Path) -> None:
    with loop(data(folder)) as loader:
        state = loader.state_dict()
    assert LoaderState.from_dict({**state, "versions": '{"": [3, 4]}'}).versions == {"": [3, 4]}
    with pytest.raises(StateError, match="state: versions: expected numbers by name"):
        LoaderState.from_dict({**state, "versions": text})
