"""The one table of a loader's options: what it says is what constructors, faces, actors and other processes do."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_args

import pytest

from infra import DeviceMesh
from streaming import DataLoader, DeviceMeshFetcher, RemoteGroup, StreamingDataset
from streaming.common.arguments import option_names
from streaming.errors import ConfigError
from streaming.loader_face import LoaderFace
from streaming.loop_core import LoopCore
from streaming.run.options.loader_options import RULES, LoaderOptions, Where
from tests.support.sets.data_sets import mesh_of, write_set

CHECKED = [name for name, rule in RULES.items() if rule.check is not None]
REFUSED = [(name, where) for name, rule in RULES.items() for where in rule.refused]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    return write_set(tmp_path_factory.mktemp("rules"), (10, 7)).open()


def test_each_constructor_has_the_names_and_defaults_of_the_table() -> None:
    defaults = {one.name: one.default for one in fields(LoaderOptions)}
    assert option_names(DataLoader) == ("dataset", *defaults)
    for face in (DataLoader, DeviceMeshFetcher):
        given = [*inspect.signature(face).parameters.values()][1:]
        assert {one.name: one.default for one in given} == {one.name: defaults[one.name] for one in given}


def test_neither_face_is_the_other_and_each_holds_one_core(dataset: StreamingDataset) -> None:
    for face, other in ((DataLoader, DeviceMeshFetcher), (DeviceMeshFetcher, DataLoader)):
        with face(dataset, 4) as loader:
            assert isinstance(loader, LoaderFace)
            assert not isinstance(loader, other)
            assert [type(one) for one in vars(loader).values()].count(LoopCore) == 1


@pytest.mark.parametrize("name", CHECKED)
def test_a_wrong_value_is_refused_where_the_options_are_made(name: str) -> None:
    wrong: dict[str, Any] = {name: object()}
    with pytest.raises(ConfigError, match=f"^{name}: "):
        LoaderOptions(4, **wrong)


def test_options_do_not_change() -> None:
    options: LoaderOptions[Any] = LoaderOptions(4)
    with pytest.raises(FrozenInstanceError):
        options.num_workers = 3  # type: ignore[misc]
    assert not hasattr(options, "__dict__")


@pytest.mark.parametrize(("name", "where"), REFUSED)
def test_harmless_values_pass_and_all_others_are_explained(name: str, where: Where) -> None:
    assert where in get_args(Where)
    refusal = RULES[name].refused[where]
    for harmless in refusal.harmless:
        given: dict[str, Any] = {name: harmless}
        LoaderOptions(4, **given).refuse(where)
    assert refusal.allows(next(one.default for one in fields(LoaderOptions) if one.name == name)), "the default"
    options: LoaderOptions[Any] = LoaderOptions(4)
    object.__setattr__(options, name, b"anything else")
    with pytest.raises(ConfigError, match=f"^{name}: ") as caught:
        options.refuse(where)
    assert "{" not in str(caught.value).replace('{"deadline_s": …}', ""), "a place for a value is left"


def test_options_travel_as_they_are(dataset: StreamingDataset) -> None:
    given: dict[str, Any] = {
        "num_threads": 0,
        "memory_limit": "64MiB",
        "last_batch": "pad",
        "device_mesh": mesh_of(2, 1),
    }
    with DataLoader(dataset, 4, **given) as loader, pickle.loads(pickle.dumps(loader)) as arrived:
        assert arrived._core.options == loader._core.options
        arrived.remesh(0, 1, at=0)
        assert (arrived._core.options.batch_size, arrived._core.options.global_batch_size) == (None, 8)
        assert pickle.loads(pickle.dumps(arrived)).global_batch_size == 8


def test_loaders_in_actors_have_all_options_but_the_training_process_own() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=0, environ={})
    changed: dict[str, Any] = {
        "stall_report_s": 3.0, "remote_group": RemoteGroup(name="readers"), "device_mesh": mesh, "num_workers": 2,
        "memory_limit": 10**8, "balance": "local", "cost": 5, "agreement_timeout": 9.0, "last_batch": "pad",
    }  # fmt: skip
    here: LoaderOptions[Any] = LoaderOptions(4, **changed)
    there = here.in_actors()
    own = {name for name, rule in RULES.items() if rule.is_local}
    assert own == {"stall_report_s", "remote_group", "device_mesh"}
    assert {one for one in RULES if getattr(here, one) != getattr(there, one)} == own
