"""``DataLoader(tuned=…)``: a file sets machinery and nothing else, what a program gives wins, and doubts are said."""

from __future__ import annotations

import inspect
import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streaming import Balanced, Curriculum, DataLoader, Mixture, OrdinaryDataset, Packed, StreamingDataset
from streaming.common.arguments import option_names, parse_bytes
from streaming.errors import ConfigError, NotFoundError
from streaming.storage import Storage
from streaming.types import VERSION
from streaming.watch.tuned import chosen
from streaming.watch.tuned.file import DEFAULT_NAME, Tuned, read_tuned, stored
from streaming.watch.tuned.machinery import MACHINERY
from tests.support.contracts.option_kinds import KINDS, Places, run
from tests.support.sets.data_sets import mesh_of, write_set
from tests.support.tiers import first_here

CORES, MEMORY = 8, 64 << 30
VALUES: dict[str, Any] = {
    "num_workers": 2, "num_threads": 3, "prefetch_factor": 5, "memory_limit": "64MiB", "pin_memory": True,
}  # fmt: skip
OWN: dict[str, Any] = {
    "num_workers": 0, "num_threads": 0, "prefetch_factor": 2, "memory_limit": "32MiB", "pin_memory": False,
}  # fmt: skip
"""What a program gives against the file; most are the defaults of the signature."""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of one rank, with these cores and this memory."""
    for name, value in (("num_cores", CORES), ("cpu_count", CORES), ("memory_bytes", MEMORY), ("ranks_here", 1)):
        monkeypatch.setattr(chosen, name, lambda value=value: value)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    return write_set(tmp_path_factory.mktemp("tuned"), (10, 7)).open()


def content(**parts: Any) -> dict[str, Any]:
    """The content of a file that was measured here."""
    machine = {"cores": CORES, "memory_bytes": MEMORY}
    return {"shardstream": VERSION, "machine": machine, "options": {}, "measured": {}} | parts


def written(folder: Path, options: Mapping[str, Any] | None = None, **parts: Any) -> Path:
    path = folder / DEFAULT_NAME
    path.write_text(json.dumps(content(options=options or {}, **parts)))
    return path


def settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of the file as they reach the loop."""
    return {name: getattr(loader._core.options, name) for name in MACHINERY}


def kept(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a loader keeps them: sizes in bytes."""
    return {**options, "memory_limit": parse_bytes(options["memory_limit"])}


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == level and one.getMessage().startswith("tuned")]


# ------------------------------------------------------------------------------------------------- what a file may set


def test_options_of_the_file_reach_the_loop(
    dataset: StreamingDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert VALUES.keys() == OWN.keys() == MACHINERY.keys()
    with (
        caplog.at_level(logging.INFO, "streaming"),
        DataLoader(dataset, 4, tuned=written(tmp_path, VALUES)) as loader,
    ):
        assert settings(loader) == kept(VALUES)
        config: Any = loader._loop.config  # type: ignore[attr-defined]
        assert (config.num_workers, config.num_threads, config.depth) == (2, 3, 3 * 5)
        assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (2, 5, True)
    (line,) = lines(caplog, logging.INFO)
    assert all(f"{name}={value!r}" in line for name, value in VALUES.items())
    assert lines(caplog, logging.WARNING) == []


@pytest.mark.parametrize("name", MACHINERY)
def test_what_the_program_gives_wins_and_is_named(
    dataset: StreamingDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Also where it gives the default; None counts as not given."""
    path = written(tmp_path, VALUES)
    with (
        caplog.at_level(logging.INFO, "streaming"),
        DataLoader(dataset, 4, tuned=path, **{name: OWN[name]}) as loader,
    ):
        assert settings(loader) == kept({**VALUES, name: OWN[name]})
    (line,) = lines(caplog, logging.INFO)
    sets, _, others = line.partition("; the program's own are kept: ")
    assert others == f"{name}={OWN[name]!r} (in the file {VALUES[name]!r})"
    assert f"{name}=" not in sets
    if name in {"num_threads", "prefetch_factor", "memory_limit"}:
        not_given: dict[str, Any] = {name: None}
        with DataLoader(dataset, 4, tuned=path, **not_given) as loader:
            assert settings(loader) == kept(VALUES)


NEVER = sorted(
    {name for one in (DataLoader, OrdinaryDataset, StreamingDataset, Mixture, Packed, Balanced, Curriculum)
     for name in option_names(one)} - MACHINERY.keys()
)  # fmt: skip


@pytest.mark.parametrize("value", [1, "x", None, [1]])
def test_whatever_is_no_machinery_is_refused_by_name(dataset: StreamingDataset, tmp_path: Path, value: Any) -> None:
    """Every option of every class that describes data, its order or a batch; and a name that nobody knows."""
    for name in (*NEVER, "num_wrkers"):
        path = written(tmp_path, {"prefetch_factor": 3, name: value})
        with pytest.raises(ConfigError, match=rf"^{path}: options: '{name}'.*only how batches are made ready"):
            DataLoader(dataset, 4, tuned=path)


def test_the_constructor_has_a_word_on_each(tmp_path: Path) -> None:
    """The options of a file are options of the loader, and its documentation names them where ``tuned`` is."""
    assert MACHINERY.keys() <= set(option_names(DataLoader))
    told = (inspect.getdoc(DataLoader) or "").partition("\n    tuned: ")[2].partition("\n    stall_report_s: ")[0]
    assert all(f"``{name}``" in told for name in MACHINERY)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places.write(tmp_path_factory.mktemp("kinds"))


STREAMED = [name for name, kind in KINDS.items() if kind.is_streamed and name != "remote"]


@pytest.mark.parametrize("kind", first_here(["plain", *sorted({*STREAMED} - {"plain"})], 3))
def test_batches_of_every_kind_are_the_same_with_it(places: Places, tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, {"num_threads": 3, "prefetch_factor": 7, "memory_limit": "256MiB"})
    plain = run(kind, places, {"DataLoader": {"num_threads": None}})
    tuned = run(kind, places, {"DataLoader": {"num_threads": None, "tuned": str(path)}})
    assert plain.batches
    assert (tuned.batches, tuned.error) == (plain.batches, plain.error)


@pytest.mark.parametrize("kind", ["map-style", "iterable", "remote"])
def test_what_was_not_measured_is_refused(places: Places, tmp_path: Path, kind: str) -> None:
    """Whatever the file sets, also options that would be refused there by themselves."""
    for name, value in VALUES.items():
        tuned = {"tuned": str(written(tmp_path, {name: value}))}
        found = run(kind, places, {"DataLoader": {"num_threads": None, **tuned}})
        assert isinstance(found.error, ConfigError)
        assert str(found.error).startswith("tuned: ")


def test_a_loader_in_another_process_keeps_the_options(dataset: StreamingDataset, tmp_path: Path) -> None:
    """The file may be on this machine only."""
    path = written(tmp_path, {"num_threads": 1, "prefetch_factor": 3})
    with DataLoader(dataset, 4, tuned=path, device_mesh=mesh_of(1, 0)) as loader:
        sent = pickle.dumps(loader)
        expected = settings(loader)
    path.unlink()
    with pickle.loads(sent) as arrived:
        assert settings(arrived) == expected


# -------------------------------------------------------------------------------------------------- another machine


@pytest.mark.parametrize(
    ("parts", "here", "numbers"),
    [
        ({}, {}, ()),
        ({"machine": {"cores": 64}}, {}, ("measured with 64 cores", "has 8")),
        ({"machine": {"cores": 4}}, {}, ("measured with 4 cores", "has 8")),
        ({}, {"ranks_here": 4}, ("measured with 8 cores", "has 2, its part as one of 4 ranks")),
        ({"machine": {"cores": 2}}, {"ranks_here": 4}, ()),
        ({"machine": {"cores": 2}}, {"ranks_here": 4, "num_cores": 2}, ()),  # each bound to its part
        ({"machine": {"cores": 1}}, {"ranks_here": 100}, ()),
        ({"shardstream": "0.0.9"}, {}, ("'0.0.9'", repr(VERSION))),
        ({"options": {"memory_limit": "30GiB"}}, {}, ()),
        ({"options": {"memory_limit": "30GiB"}}, {"memory_bytes": 16 << 30}, ("'30GiB'", "8.0 GiB")),
        ({"options": {"memory_limit": "30GiB"}, "machine": {"cores": 8}}, {"memory_bytes": 16 << 30}, ("8.0 GiB",)),
        ({"options": {"memory_limit": "60GiB"}}, {}, ()),  # more than half of the machine that was measured, too
    ],
)
def test_a_machine_that_is_not_the_one_measured_is_told(
    dataset: StreamingDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    parts: dict[str, Any], here: dict[str, int], numbers: tuple[str, ...],
) -> None:  # fmt: skip
    """A WARNING has both numbers; the options are used all the same."""
    for name, value in here.items():
        monkeypatch.setattr(chosen, name, lambda value=value: value)
    options = {"prefetch_factor": 3, "num_threads": 0, **parts.pop("options", {})}
    with DataLoader(dataset, 4, tuned=written(tmp_path, options, **parts)) as loader:
        assert loader._core.options.prefetch_factor == 3
    found = lines(caplog, logging.WARNING)
    assert len(found) == bool(numbers), found
    assert all(number in found[0] and "shard_tools bench URL --tune" in found[0] for number in numbers)


def test_memory_that_the_program_chooses_itself_is_no_doubt(
    dataset: StreamingDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chosen, "memory_bytes", lambda: 1 << 30)
    with DataLoader(dataset, 4, tuned=written(tmp_path, {"memory_limit": "30GiB"}), memory_limit="64MiB"):
        assert lines(caplog, logging.WARNING) == []


# ------------------------------------------------------------------------------------------------------ damaged files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Without the secrets of URLs."""
    urls = ["https://user:secret1@host/a.tar?sig=secret2", "s3://bucket/set/"]
    tuned = Tuned(options=VALUES, cores=3, memory_bytes=5, measured={"urls": urls, "batch_size": 4})
    path = tmp_path / "a file.json"
    path.write_bytes(tuned.to_bytes())
    found = read_tuned(path)
    assert (found.options, found.cores, found.memory_bytes, found.version) == (VALUES, 3, 5, VERSION)
    assert "secret" not in path.read_text()
    assert "s3://bucket/set/" in path.read_text()


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole, path = Tuned(options=VALUES, cores=3).to_bytes().rstrip(), tmp_path / DEFAULT_NAME
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"Move it away, and measure again: `shard_tools bench URL --tune --out "):
            stored(Storage(), str(path))


WRONG_PARTS: list[tuple[Any, str]] = [
    ([], "expected an object, got list"),
    (None, "expected an object, got NoneType"),
    ("tuned", "expected an object, got str"),
    ({"num_workers": 2}, "shardstream: expected the version, a string, got nothing"),
    (content(shardstream=1), "shardstream: expected the version, a string, got a value of type int"),
    (content(machine=3), "machine: expected an object, got a value of type int"),
    (content(options=[1]), "options: expected an object, got a value of type list"),
    (content(machine={}), "machine: cores: expected a number of at least 1, got None"),
    *((content(machine={"cores": one}), "machine: cores: expected") for one in (0, -1, True, "2", 1.5)),
    *((content(machine={"cores": 1, "memory_bytes": one}), "memory_bytes: expected") for one in (0, "1GB", False)),
    (content(option={}), "no part is called 'option' (did you mean 'options'?)"),
]


@pytest.mark.parametrize(("said", "why"), WRONG_PARTS)
def test_damage_is_named_with_a_cure(dataset: StreamingDataset, tmp_path: Path, said: Any, why: str) -> None:
    path = tmp_path / DEFAULT_NAME
    path.write_text(json.dumps(said))
    with pytest.raises(ConfigError) as caught:
        DataLoader(dataset, 4, tuned=path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert why in text
    assert f"shard_tools bench URL --tune --out {path}`" in text


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b"[" * 100_000, b'{"options": {}, "options": {}}', b" " * (1 << 21)])
def test_what_is_no_json_or_too_large_is_refused(dataset: StreamingDataset, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / DEFAULT_NAME
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a file of tuned options, or damaged: "):
        DataLoader(dataset, 4, tuned=path)


WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "num_workers": (-1, 5000, "2", 1.5, True, None, [2]),
    "num_threads": (-1, 5000, "2", 1.5, False, None),
    "prefetch_factor": (0, 5000, "2", 2.5, True, None),
    "memory_limit": (0, -1, "much", "0MB", 1.5, True, None),
    "pin_memory": (0, 1, "True", None),
}


@pytest.mark.parametrize("name", MACHINERY)
def test_a_wrong_value_is_refused_with_its_place(dataset: StreamingDataset, tmp_path: Path, name: str) -> None:
    """Also where the program gives the option itself: a file is right or wrong by itself."""
    for value in WRONG_VALUES[name]:
        path = written(tmp_path, {name: value})
        with pytest.raises(ConfigError, match=rf"^{path}: options: {name}: "):
            DataLoader(dataset, 4, tuned=path, **{name: OWN[name]})


def test_options_beside_the_others_are_told_where_they_belong(dataset: StreamingDataset, tmp_path: Path) -> None:
    for name, value in VALUES.items():
        path = written(tmp_path, **{name: value})
        with pytest.raises(ConfigError, match=rf"^{path}: '{name}' belongs in \"options\""):
            DataLoader(dataset, 4, tuned=path)


@pytest.mark.parametrize("wrong", [3, "", b"tuned.json", ["tuned.json"], {"num_workers": 2}, True])
def test_what_is_no_path_is_refused(dataset: StreamingDataset, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"tuned: expected the path or URL of a file that `shard_tools bench --tune`"):
        DataLoader(dataset, 4, tuned=wrong)


def test_a_file_that_is_not_there_is_named(dataset: StreamingDataset, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere\.json"):
        DataLoader(dataset, 4, tuned=tmp_path / "nowhere.json")
