"""How functions get ``rng``, how draws from the process's generators are found out, and chains of functions."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from streaming import DataLoader
from streaming.build.batches.draw_watch import DrawWatch, generator_states, kept_generators, own_generators
from streaming.build.batches.draws import BatchDraws, Chain, epoch_key, how_it_gets_rng
from streaming.errors import ConfigError, DecodeError
from streaming.others.torch_datasets.generators import SetGenerators
from tests.support.sets.data_sets import mesh_of, write_set


class Method:
    def with_rng(self, sample: Any, rng: Any) -> Any: ...

    def __call__(self, sample: Any) -> Any: ...


class Forward(torch.nn.Module):
    def forward(self, sample: Any, rng: Any) -> Any: ...


def wrapped(sample: Any, rng: Any, size: int) -> Any: ...


HOW: dict[str, tuple[Any, str]] = {
    "one argument": (lambda sample: sample, "no"),
    "two": (lambda sample, second: sample, "second"),
    "named": (lambda sample, rng: sample, "named"),
    "named with a default": (lambda sample, rng=None: sample, "named"),
    "keyword": (eval("lambda sample, *, rng: sample"), "named"),
    "a default is no rng": (lambda sample, size=224: sample, "no"),
    "a default, and rng": (lambda sample, size=224, rng=None: sample, "named"),
    "star": (lambda *samples: samples, "no"),
    "double star": (lambda sample, **rng: sample, "no"),
    "callable": (Method(), "no"),
    "bound": (Method().with_rng, "named"),
    "module": (Forward(), "named"),
    "partial": (functools.partial(wrapped, size=3), "named"),
    "partial with a generator": (functools.partial(wrapped, size=3, rng=np.random.default_rng(0)), "no"),
    "builtin": (dict, "no"),
    "builtin with a signature": (len, "no"),
}


@pytest.mark.parametrize("name", HOW)
def test_who_gets_rng(name: str) -> None:
    function, how = HOW[name]
    assert how_it_gets_rng(function) == how


@pytest.mark.parametrize(
    ("function", "message"),
    [(5, "got 5"), (wrapped, "size"), (lambda sample, a, b: sample, "a, b"), (eval("lambda sample, *, k: 0"), "k")],
    ids=["no function", "size", "three", "keyword"],
)
def test_functions_that_need_more_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"transform: expected a function.*{message}"):
        Chain((function,))


def test_the_numbers_are_pinned() -> None:
    """A change here is a change of everybody's augmentations: CHANGELOG, Iteration order."""
    draws = BatchDraws(epoch_key(7, 3), np.array([0, 5, 2**40]))
    assert [first_words(draws, row, attempt) for row in range(3) for attempt in range(2)] == PINNED
    assert len({word for words in PINNED for word in words}) == 12
    assert first_words(BatchDraws(epoch_key(7, 3), np.array([5])), 0, 1) == PINNED[3]


def first_words(draws: BatchDraws, row: int, attempt: int) -> list[int]:
    """Of two functions."""
    draws.begin_sample(row, attempt)
    return [int(draws.generator(number).bit_generator.random_raw()) for number in range(2)]


PINNED = [
    [11801810394673439257, 10599485487046432764],
    [6480998215055976482, 9429526799733262433],
    [12530551267428240044, 10333963490766986341],
    [18210646312473339612, 15596774176333108012],
    [4218033992699692671, 16893172291942753363],
    [5342083156343025405, 8690975955809881253],
]


def test_generators_are_whole_ones() -> None:
    rng = BatchDraws(1).generator(0)
    children = rng.spawn(2)
    assert len({rng.random(), *(child.random() for child in children)}) == 3
    again = pickle.loads(pickle.dumps(BatchDraws(1).generator(0)))
    assert again.random() == BatchDraws(1).generator(0).random()


def number_of(draws: BatchDraws, row: int) -> float:
    draws.begin_sample(row)
    return draws.generator(0).random()


def test_generators_look_uniform() -> None:
    draws = BatchDraws(epoch_key(0, 0), np.arange(20_000))
    found = np.array([number_of(draws, row) for row in range(20_000)])
    counts = np.histogram(found, 10, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 33, "chi squared with 9 degrees of freedom: p > 0.0001"
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03


# --- who draws ---


OF_MODULE = np.random.default_rng(0)
OF_TRAINING, OTHER = np.random.default_rng(1), np.random.default_rng(4)
A_MODULE = ModuleType("a_module")
vars(A_MODULE)["inside"] = random.Random(3)


class OfMethod:
    def __call__(self, sample: Any) -> Any:
        return OF_MODULE.random()


def nested(sample: Any) -> Any:
    def step() -> Any:
        return [OF_MODULE.random() for _ in sample]

    return step()


def with_default(sample: Any, rng: Any = OTHER) -> Any:
    return rng.random()


def closed_over(own: random.Random) -> Any:
    return lambda sample: own.random()


HOLD: dict[str, tuple[Any, list[str]]] = {
    "named by a function inside": (nested, ["OF_MODULE"]),
    "named in a module": (lambda sample: A_MODULE.inside.random(), ["inside"]),
    "method": (OfMethod(), ["OF_MODULE"]),
    "default": (with_default, ["with_default"]),
    "closure": (closed_over(random.Random(5)), ["closed_over.<locals>.<lambda>.own"]),
    "partial": (functools.partial(wrapped, rng=np.random.default_rng(6)), ["partial.rng"]),
    "none": (lambda sample: np.random.default_rng(3).random(), []),
}


@pytest.mark.parametrize("name", HOLD)
def test_generators_of_a_function_are_those_it_holds_or_names(name: str) -> None:
    """Not the training's own, which stands in the same module."""
    function, found = HOLD[name]
    assert list(own_generators([function])) == found


class HoldsRng:
    """Its attribute has the name of a global that the training draws from."""

    def __init__(self) -> None:
        self.OF_TRAINING = np.random.default_rng(7)

    def __call__(self, sample: Any) -> Any:
        return self.OF_TRAINING.random()


def test_a_global_that_only_has_the_name_of_an_attribute_is_watched_where_nobody_else_draws() -> None:
    function = HoldsRng()
    watch = DrawWatch([function])

    def attempt(seeds: frozenset[str], report: Any) -> Any:
        OF_TRAINING.random()  # as the training does, at the same time
        return function(None)

    watch.build(attempt, print, is_alone=False)
    assert watch.found == {"HoldsRng.OF_TRAINING"}
    with watch.kept():
        watch.build(attempt, print)
    assert watch.found == {"HoldsRng.OF_TRAINING", "OF_TRAINING"}


def test_a_dataset_whose_attribute_has_the_name_of_the_trainings_generator_leaves_that_alone() -> None:
    """Between two batches the training draws from a global of that name."""
    held, other = HoldsRng(), copy.deepcopy(OF_TRAINING)
    generators = SetGenerators(held, 5, {})
    for pass_number in range(2):
        for step in range(3):
            with generators.drawing():
                if not step:
                    generators.begin(pass_number)
                held(None)
                assert generators.drawn() == {"HoldsRng.OF_TRAINING"}
            assert OF_TRAINING.random() == other.random()
    with generators.drawing():
        assert generators.first.keys() == {"HoldsRng.OF_TRAINING"}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (random.random, {"random"}),
        (np.random.rand, {"numpy"}),
        (lambda: torch.rand(()), {"torch"}),
        (lambda: (torch.randn(2), random.gauss(0, 1)), {"torch", "random"}),
        (lambda: np.random.default_rng(3).random(), set()),
        (lambda: None, set()),
    ],
    ids=["random", "numpy", "torch", "two", "own", "nothing"],
)
def test_whoever_draws_is_found_out_and_the_state_is_put_back(function: Any, found: set[str]) -> None:
    random.seed(3)
    watch = DrawWatch()
    before = [str(state) for state in generator_states()]
    attempts: list[frozenset[str]] = []

    def attempt(seeds: frozenset[str], report: Any) -> Any:
        attempts.append(seeds)
        report(len(attempts))
        function()
        return "built"

    told: list[int] = []
    with kept_generators():
        assert watch.build(attempt, told.append) == "built"
    assert watch.found == found
    assert len(attempts) == len(told) + bool(found) == 1 + bool(found), "reports of the attempt that counts, alone"
    assert [str(state) for state in generator_states()] == before
    with kept_generators():
        watch.build(attempt, told.append)
    assert len(attempts) == 2 + bool(found), "what is known is seeded at once"


def test_an_error_of_the_wrong_numbers_is_not_raised() -> None:
    def attempt(seeds: frozenset[str], report: Any) -> Any:
        if "random" in seeds:
            random.seed(1)
            return "built"
        raise ValueError(random.random())

    with kept_generators():
        assert DrawWatch().build(attempt, print) == "built"
        with pytest.raises(ValueError, match="always"):
            DrawWatch().build(_fails, print)


def _fails(seeds: frozenset[str], report: Any) -> Any:
    raise ValueError(f"always {random.random()}")


# --- chains ---


def plus(sample: dict[str, Any], amount: int) -> dict[str, Any]:
    return {**sample, "cls": sample["cls"] + amount}


def noted(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": [*sample.get("drawn", []), int(rng.integers(1 << 40))]}


def odd(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if sample["cls"] % 2 else None


def test_map_chains_and_leaves_the_data_set_as_it_is(tmp_path: Any) -> None:
    samples = write_set(tmp_path, (12,))
    base = samples.open(shuffle=False)
    mapped = base.map(functools.partial(plus, amount=100)).map(noted).map(noted)
    assert (base.source.transform, base[3]["cls"]) == (None, 3)
    one = pickle.loads(pickle.dumps(mapped))
    for dataset in (mapped, one):
        assert dataset[3]["cls"] == 103
        assert len(set(dataset[3]["drawn"])) == 2, "each function has numbers of its own"
    drawn = mapped[3]["drawn"]
    assert one[3]["drawn"] == mapped[3]["drawn"] == drawn
    assert samples.open(transform=noted)[3]["drawn"] == base.map(noted)[3]["drawn"]
    assert mapped.source.table is base.source.table
    assert mapped.source.storage is base.source.storage
    with DataLoader(mapped, batch_size=12, device_mesh=mesh_of(1, 0)) as loader:
        (batch,) = loader
        state = loader.state_dict()
    assert batch["cls"].tolist() == list(range(100, 112))
    assert np.stack(batch["drawn"]).tolist() == [mapped[i]["drawn"] for i in range(12)], (
        "in epoch 0 of a set that is not shuffled the position is the index"
    )
    with DataLoader(base, batch_size=12, device_mesh=mesh_of(1, 0)) as loader:
        loader.load_state_dict(state)
    dropping = base.map(odd).map(functools.partial(plus, amount=1))
    assert dropping[3]["cls"] == 4
    with pytest.raises(DecodeError, match="drops the sample"):
        dropping[2]
    with pytest.raises(ConfigError, match="transform: expected a function"):
        base.map(3)  # type: ignore[arg-type]
