"""``cost=`` by a budget, a column, arithmetic over columns, or a function of them: packs, rows that grow, mixtures."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError
from streaming.order.packing.balance import BalanceRules, pack_costs, quantities_of

NUM, LENGTH = 300, 256


def tokens_of(number: int) -> int:
    return 700 if number % 97 == 5 else number * number % 120 + 1


def patches_of(number: int) -> int:
    return number * 7 % 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("costs"))


def write(target: Path, *, lacks: str = "") -> Path:
    names = [name for name in ("tokens", "patches", "share") if name != lacks]
    lifted = {name: lambda sample, name=name: sample["json"].get(name) for name in names}
    with ShardWriter(f"{target}/{{:03d}}.tar", max_samples=110, columns=lifted) as writer:
        for number in range(NUM):
            row = {"tokens": tokens_of(number), "patches": patches_of(number), "share": number % 3 / 2}
            if number == 7:
                del row["share"]
            tok = np.full(row["tokens"], number, "<u2").tobytes()
            writer.write({"__key__": f"{number:04d}", "tok": tok, "json": row, "txt": "a"})
    return target


def by_function(lengths: Any, *, patches: Any, tokens: Any) -> float:
    assert lengths.tolist() == tokens.tolist()
    return float((lengths**2).sum() + 9 * patches.sum())


COSTS: dict[str, tuple[Any, Callable[[int, int, int], float]]] = {
    "a column": ("patches", lambda n, length, whole: patches_of(n) * length // whole),
    "arithmetic": ("tokens * tokens", lambda n, length, whole: length**2),
    "of several": ("tokens + 30 * patches", lambda n, length, whole: length + 30 * (patches_of(n) * length // whole)),
    "a function": (by_function, lambda n, length, whole: length**2 + 9 * (patches_of(n) * length // whole)),
}


def loader_of(packed: Any, rank: int = 0, world: int = 1, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    return DataLoader(packed, global_batch_size=8, device_mesh=mesh, last_batch="partial", **options)


def pieces_of(batch: Any) -> list[list[tuple[int, int]]]:
    """The documents of each row: number and tokens here."""
    found = []
    for row, keys in enumerate(batch["__key__"]):
        counts = np.bincount(batch["document_ids"][row][batch["document_ids"][row] >= 0], minlength=len(keys))
        found.append([(int(key), int(count)) for key, count in zip(keys, counts, strict=True)])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("of", ["packs", "a mixture"])
def test_rows_come_from_the_most_to_the_least_expensive(folder: Path, kind: str, of: str) -> None:
    cost, of_piece = COSTS[kind]

    def made() -> Any:
        halves = [Packed(StreamingDataset(folder, subset=one), LENGTH) for one in ((0.0, 0.5), (0.5, 1.0))]
        return (
            Mixture({"a": halves[0], "b": halves[1]}) if of == "a mixture" else Packed(StreamingDataset(folder), LENGTH)
        )

    plain, sorted_rows = [], []
    for rows, options in ((plain, {}), (sorted_rows, {"balance": "local", "cost": cost})):
        with loader_of(made(), **options) as loader:
            rows += [pieces_of(batch) for batch in loader]
    moved = 0
    for before, after in zip(plain, sorted_rows, strict=True):
        assert sorted(map(sorted, before)) == sorted(map(sorted, after))
        costs = [sum(of_piece(n, length, tokens_of(n)) for n, length in row) for row in after]
        assert costs == sorted(costs, reverse=True)
        moved += before != after
    assert moved > len(plain) // 2
    assert any(length < tokens_of(n) for batch in plain for row in batch for n, length in row), "documents that are cut"


def test_a_budget_is_a_cost_by_its_name_in_functions_too(folder: Path) -> None:
    def cost(lengths: Any, *, pairs: Any) -> float:
        return float(pairs.sum())

    keys = []
    for one in ("tokens * tokens", "pairs", cost):
        packed = Packed(StreamingDataset(folder), LENGTH, budgets={"pairs": ("tokens * tokens", 50_000)})
        with loader_of(packed, balance="local", cost=one) as loader:
            keys.append([batch["__key__"] for batch in loader])
    assert keys[0] == keys[1] == keys[2]


def test_rows_that_grow_are_sorted_by_the_parts_of_documents(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder), Schedule.steps({0: LENGTH // 2, 16: LENGTH}))
    with loader_of(packed, balance="local", cost="patches") as loader:
        batches = list(loader)
    first = [sum(patches_of(n) * length // tokens_of(n) for n, length in row) for row in pieces_of(batches[0])]
    pairs = [sum(first[at : at + 2]) for at in range(0, len(first), 2)]
    assert pairs == sorted(pairs, reverse=True)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ("depth", r"cost: no column 'depth' in the sample table of .*; there are: .*patches"),
        ("num_labels", r"no column 'num_labels'.*`shard_tools convert` writes it.*column add URL num_labels --compute"),
        ("patches >", r"cost: .*at character"),
        ("__key__", r"cost: "),
        (lambda lengths, *, depth: 1.0, r"cost: no column 'depth'"),
        (2.5, r"cost"),
    ],
)
def test_costs_that_cannot_be_are_refused_when_the_loader_is_made(folder: Path, cost: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loader_of(Packed(StreamingDataset(folder), LENGTH), balance="local", cost=cost)


def test_a_copy_in_another_process_measures_the_same(folder: Path) -> None:
    packed = Packed(StreamingDataset(folder), LENGTH, budgets={"pairs": ("tokens * tokens", 50_000)})
    groups = np.arange(len(packed.source.chunk_samples))
    packs = packed.source.packs(groups, np.zeros_like(groups), np.zeros_like(groups), 0)
    for made in (packed.source, pickle.loads(pickle.dumps(packed.source))):
        found = made.measured(("pairs", "patches"), groups[packs.packs], packs)
        assert found[:, 0].tolist() == (packs.lengths**2).tolist()
        assert found[:, 1].sum() > 0
    assert pickle.loads(pickle.dumps(packed.source)).fingerprint == packed.source.fingerprint


def test_each_source_of_a_mixture_needs_the_columns(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", lacks="patches")
    mix = Mixture({"a": Packed(StreamingDataset(folder), LENGTH), "b": Packed(StreamingDataset(other), LENGTH)})
    with pytest.raises(ConfigError, match="no column 'patches'"):
        loader_of(mix, balance="local", cost="patches")


def test_a_missing_value_names_the_sample_and_a_cure_that_works(folder: Path) -> None:
    with (
        loader_of(Packed(StreamingDataset(folder), LENGTH), balance="local", cost="share") as loader,
        pytest.raises(ConfigError, match=r'no value for sample 7 .*where="share IS NOT NULL"'),
    ):
        list(loader)
    cured = Packed(StreamingDataset(folder, where="share IS NOT NULL"), LENGTH)
    with loader_of(cured, balance="local", cost="share") as loader:
        assert len(list(loader)) > 1


def test_only_required_parameters_given_by_name_are_columns() -> None:
    def cost(lengths: Any, factor: float = 2.0, *, patches: Any, scale: float = 1.0) -> float:
        return 0.0

    assert quantities_of(cost) == ("patches",)
    assert quantities_of(max) == quantities_of(None) == quantities_of(61_000) == ()
    assert BalanceRules(how="local", cost="tokens * 2").quantities == ("tokens * 2",)


@pytest.mark.parametrize(
    "made",
    [float, np.float32, np.int64, np.asarray, torch.tensor, Fraction, Decimal, lambda number: torch.tensor([number])],
)
def test_a_number_of_any_library_is_a_cost(made: Callable[[Any], Any]) -> None:
    lengths, splits, sizes = np.array([3, 4, 5]), np.array([0, 1, 3]), np.array([8, 9])
    assert pack_costs(lengths, splits, sizes, lambda some: made(int(some.sum()))).tolist() == [3, 9]


@pytest.mark.parametrize(
    "value", ["3", None, True, np.True_, float("nan"), torch.tensor(torch.inf), np.ones(2), 1j, [1]]
)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="cost: expected a finite number"):
        pack_costs(np.array([3]), np.array([0, 1]), np.array([8]), lambda some: value)


@pytest.mark.parametrize(
    ("cost", "wanted"),
    [
        (lambda n, patches: 1.0, "(lengths, *, patches), got (n, patches)"),
        (lambda n, patches, *, tokens: 1.0, "(lengths, *, patches, tokens), got (n, patches, *, tokens)"),
        (lambda *, patches: 1.0, "(lengths, *, patches), got (*, patches)"),
        (lambda: 1.0, "(lengths, *, patches), got ()"),
    ],
)
def test_a_forgotten_star_is_refused_when_the_loader_is_made(folder: Path, cost: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        loader_of(Packed(StreamingDataset(folder), LENGTH), balance="local", cost=cost)
    for fine in (lambda *rest: 1.0, lambda n, scale=2: 1.0, lambda n, *, patches, **more: 1.0, len, max):
        BalanceRules(how="local", cost=fine)
