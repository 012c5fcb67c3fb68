"""Classes in given shares: counts in the long run, resumes on other worlds, many classes, wrong arguments."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import Balanced, DataLoader, Mixture, Schedule, StreamingDataset
from streaming.errors import ConfigError, OptionError, StateError
from streaming.sets.datasets import balanced as classes
from tests.support.sets.curriculum_sets import FEW_LANES, plain_world
from tests.support.sets.data_sets import total

CLASSES = ["cat"] * 100 + ["dog"] * 60 + ["a/b"] * 10 + [""] * 4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """174 samples of four classes, mixed; six in each chunk."""
    folder = tmp_path_factory.mktemp("balanced")
    mixed = np.random.default_rng(3).permutation(len(CLASSES)).tolist()
    columns = {"cls": "json.cls", "num": "json.num", "some": "json.some", "share": "json.share"}
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=6, columns=columns) as writer:
        for place, number in enumerate(mixed):
            cls = CLASSES[number]
            row = {"cls": cls, "num": len(cls), "some": cls if place % 3 else None, "share": place / 7}
            writer.write({"__key__": f"{number:05d}", "json": row})
    return f"{folder}/"


@pytest.fixture(scope="module")
def data(url: str) -> StreamingDataset:
    return StreamingDataset(url, shuffle=FEW_LANES)


def counted(dataset: Any, count: int = 400) -> Counter[str]:
    """Samples of each class in batches of 12."""
    batches, _ = plain_world(dataset, 1, count)
    return Counter(CLASSES[int(key)] for key in total(batches).elements())


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, {"cat": 1, "dog": 1, "a/b": 1, "": 1}),
        ({"weights": "balanced"}, {"cat": 1, "dog": 1, "a/b": 1, "": 1}),
        ({"quotas": "exact", "power": 0.5}, {"cat": 10, "dog": 60**0.5, "a/b": 10**0.5, "": 2}),
        ({"power": 0.5}, {"cat": 10, "dog": 60**0.5, "a/b": 10**0.5, "": 2}),
        ({"power": 1}, {"cat": 100, "dog": 60, "a/b": 10, "": 4}),
        ({"weights": {"cat": 0, "dog": 3, "a/b": 1, "": 2}}, {"cat": 0, "dog": 3, "a/b": 1, "": 2}),
    ],
)
def test_shares_hold(data: StreamingDataset, options: dict[str, Any], shares: dict[str, float]) -> None:
    found = counted(Balanced(data, "cls", **options))
    for name, share in shares.items():
        slack = 2 * 4 * 6 if options.get("quotas") is None else 2 * 2
        assert abs(found[name] - 4800 * share / sum(shares.values())) <= slack, name


def test_whole_numbers_are_classes_and_a_schedule_changes_shares(data: StreamingDataset) -> None:
    changing = Schedule.steps({0: {"0": 0, "3": 1}, 1200: {"0": 1, "3": 1}})
    found = counted(Balanced(data, "num", weights=changing), 200)
    assert abs(found[""] - 600) <= 2 * 2 * 6
    fixed = counted(Balanced(data, "num", weights={0: 1, 3: 0}), 20)
    assert fixed == {"": 240}


def test_each_sample_of_a_class_comes_once_before_one_comes_again(data: StreamingDataset) -> None:
    batches, _ = plain_world(Balanced(data, by="cls"), 1, 300)
    by_class: dict[str, Counter[str]] = {}
    for key, times in total(batches).items():
        by_class.setdefault(CLASSES[int(key)], Counter())[key] = times
    assert {name: len(found) for name, found in by_class.items()} == dict(Counter(CLASSES))
    for found in by_class.values():
        assert max(found.values()) - min(found.values()) <= 2  # lanes read passes side by side


def test_resumed_on_another_world_with_other_weights(data: StreamingDataset, caplog: pytest.LogCaptureFixture) -> None:
    balanced = Balanced(data, by="cls")
    whole, _ = plain_world(balanced, 1, 30)
    before, state = plain_world(balanced, 2, 13)
    after, _ = plain_world(balanced, 3, 17, state)
    assert before + after == whole
    caplog.set_level(logging.INFO, "streaming")
    natural, changed = plain_world(Balanced(data, by="cls", power=1), 2, 400, state)
    assert [entry["why"] for entry in changed["ledger"]] == ["start", "changed at a resume"]
    assert any("the mixture changes at row" in message for message in caplog.messages)
    cats = sum(CLASSES[int(key)] == "cat" for key in total(natural[200:]).elements())
    assert abs(cats - 2400 * 100 / 174) <= 2 * 4 * 6
    with pytest.raises(StateError, match="but this Balanced has"):
        plain_world(Balanced(data, by="num"), 1, 1, state)


@pytest.mark.parametrize(
    ("by", "weights", "others"),
    [
        ("cls", {"cat": 1, "dog": 0, "a/b": 0, "": 0}, {"cat": 0, "dog": 1, "a/b": 1, "": 0}),
        ("num", {3: 1, 0: 0}, {3: 0, 0: 1}),
        ("num", {3: 1, 0: 0}, "balanced"),
    ],
)
def test_set_weights_takes_what_the_constructor_takes(
    data: StreamingDataset, by: str, weights: dict[Any, float], others: Any
) -> None:
    with DataLoader(Balanced(data, by, weights=weights, quotas="exact"), batch_size=12, num_threads=0) as loader:
        batches = iter(loader)
        next(batches)
        row = loader.set_weights(others)
        following = [key for _ in range(100) for key in next(batches)["__key__"]][row - 12 :]
        with pytest.raises(ConfigError, match="no such class"):
            loader.set_weights({"cow": 1})
    fresh = counted(Balanced(data, by, weights=others, quotas="exact"), 50)
    found = Counter(CLASSES[int(key)] for key in following)
    assert set(found) == set(fresh)
    for name, share in fresh.items():
        assert abs(found[name] / len(following) - share / 600) < 0.05, name


def test_a_sample_by_number_names_its_class_as_batches_do(url: str) -> None:
    """Also in a filtered set and a range of it; one without a class names none."""
    whole = StreamingDataset(url)
    names = {"cat": "cat", "dog": "dog", "a/b": "a%2Fb", "": '""'}
    for dataset in (whole, StreamingDataset(url, where="num > 0"), whole[7:90]):
        balanced = Balanced(dataset, "cls", name_sources=True)
        for number in (0, 5, -1):
            sample = balanced[number]
            assert sample["__source__"] == names[sample["json"]["cls"]]
            assert sample["__key__"] == dataset[number]["__key__"]
    assert "__source__" not in Balanced(whole, "cls")[0]
    some = Balanced(whole, "some", nulls="drop", name_sources=True)
    told = [some[number] for number in range(12)]
    assert {"__source__" in sample for sample in told} == {True, False}
    for sample in told:
        assert sample.get("__source__") == (None if sample["json"]["some"] is None else names[sample["json"]["some"]])


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_loader_and_in_a_mixture(data: StreamingDataset, num_workers: int) -> None:
    with DataLoader(Balanced(data, "cls"), batch_size=16, epoch_size=len(data), num_workers=num_workers) as loader:
        assert len(loader) == 174 // 16
        assert all("__source__" not in batch for batch in loader)
    mix = Mixture({"pets": Balanced(data, "cls", name_sources=True), "all": data}, weights={"pets": 1, "all": 1})
    with DataLoader(mix, batch_size=48, num_workers=num_workers) as loader:
        assert set(next(iter(loader))["__source__"]) <= {"all", "pets/cat", "pets/dog", "pets/a%2Fb", 'pets/""'}


def test_samples_without_a_class(data: StreamingDataset) -> None:
    with pytest.raises(ConfigError, match="no value for 58 samples"):
        Balanced(data, "some")
    assert sum(Balanced(data, "some", nulls="drop").sizes.values()) == 116


def test_no_two_classes_have_one_name() -> None:
    labels = ["", '""', "a/b", "a%2Fb", "\n", "%0A"]
    assert len(set(map(classes._name, labels))) == len(labels)


@pytest.mark.thorough
def test_hundreds_of_classes_of_few_samples(tmp_path: Path) -> None:
    num_classes, num_samples = 200, 1000
    with ShardWriter(str(tmp_path / "{:06d}.tar"), max_samples=500, columns={"cls": "json.c"}) as writer:
        for number in range(num_samples):
            writer.write({"__key__": f"{number:06d}", "json": {"c": number % num_classes if number % 7 else 0}})
    balanced = Balanced(StreamingDataset(f"{tmp_path}/", shuffle=FEW_LANES), by="cls")
    assert len(balanced.names) == num_classes
    with DataLoader(balanced, batch_size=500, num_threads=0) as loader:
        batches = iter(loader)
        found = Counter(row["c"] for _ in range(4) for row in next(batches)["json"])
    assert {found[cls] for cls in range(1, num_classes)} <= set(range(6, 15))  # of 2,000 rows: 10 in the mean
    assert found[0] <= 2 * 74  # a class of 74 samples in each of two chunks, which come whole


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: Balanced(d, "clas"), "did you mean 'cls'?"),
        (lambda d: Balanced(d, "share"), "holds double, but classes must be"),
        (lambda d: Balanced(d, 3), "the name of a column"),
        (lambda d: Balanced(d, "cls", power=-1), "of at least 0, such as 0.5"),
        (lambda d: Balanced(d, "cls", power=1, weights="balanced"), "give only one; power computes"),
        (lambda d: Balanced(d, "cls", weights="natural"), 'expected "balanced", a dict'),
        (lambda d: Balanced(d, "cls", weights=Schedule.linear(0, 1, over=9)), "a Schedule of such dicts"),
        (lambda d: Balanced(d, "cls", weights={"cat": 1, "cow": 2}), "cow: no such class"),
        (lambda d: Balanced(d, "cls", weights={"cat": 1}), "give 0 to a class"),
        (lambda d: Balanced(d, "cls", nulls="keep"), "expected one of error, drop"),
        (lambda d: Balanced(d, "cls", num_samples=9), "DataLoader(…, epoch_size=…)"),
        (lambda d: Balanced(Balanced(d, "cls"), "cls"), "make a Balanced of each source"),
        (lambda d: Balanced(d, "cls")[1:2], "dataset[a:b]"),
        (lambda d: len(Balanced(d, "cls")), "epoch_size"),
        (lambda d: DataLoader(d, batch_size=2, sampler=[1]), 'Balanced(dataset, by="cls")'),
    ],
)  # fmt: skip
def test_wrong_arguments_name_the_cure(data: StreamingDataset, make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises((ConfigError, OptionError, TypeError)) as caught:
        make(data)
    assert words in str(caught.value)
