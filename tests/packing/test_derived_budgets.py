"""``Packed(budgets={name: (arithmetic, limit)})``: packs are within every budget; plans show them, states know them."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.plan.packs import PackTotals
from streaming import DataLoader, Packed, StreamingDataset
from streaming.errors import ConfigError, StateError
from streaming.order.plan.sizes import Sizes
from streaming.shards.index.where import column_quantity, parse_quantity

Columns = Mapping[str, Any]
NUM, LENGTH = 400, 512


def columns() -> Columns:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.lognormal(4, 0.8, NUM).astype(np.int64) + 1, LENGTH)
    images = rng.integers(0, 4, NUM)
    return {"tokens": tokens, "images": images, "seconds": images * 1.25, "odd-name": tokens % 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, known = tmp_path_factory.mktemp("documents"), columns()
    lifted = {name: lambda sample, name=name: sample["json"][name] for name in known}
    with ShardWriter(f"{target}/{{:03d}}.tar", max_samples=150, columns=lifted) as writer:
        for number in range(NUM):
            row = {name: values[number].item() for name, values in known.items()}
            tok = np.full(row["tokens"], number, "<u2").tobytes()
            writer.write({"__key__": f"{number:04d}", "tok": tok, "json": row, "txt": "a"})
    return target


QUANTITIES: dict[str, tuple[str, int, Callable[[Columns], Any]]] = {
    "of one column": ("tokens * tokens", 60_000, lambda c: c["tokens"] ** 2),
    "of several": ("tokens + 100 * images", 900, lambda c: c["tokens"] + 100 * c["images"]),
    "of a fraction": ("seconds * 1000", 9_000, lambda c: np.ceil(c["seconds"] * 1000)),
    "rounded up": ("seconds / 2", 7, lambda c: np.ceil(c["seconds"] / 2)),
    "of whole numbers": ("tokens / 3 + tokens % 3", 300, lambda c: c["tokens"] // 3 + c["tokens"] % 3),
    "of a name in quotes": ('"odd-name" * 2', 40, lambda c: c["odd-name"] * 2),
    "less than nothing": ("tokens - tokens", 5, lambda c: c["tokens"] * 0),
}


def run_cli(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments, prog_name="shard_tools")
    assert result.exit_code == 0, result.output
    return result


def keys_of(packed: Packed) -> list[list[int]]:
    with DataLoader(packed, batch_size=4, last_batch="partial") as loader:
        return [[int(key) for key in keys] for batch in loader for keys in batch["__key__"]]


@pytest.mark.parametrize("kind", QUANTITIES)
def test_every_pack_is_within_every_budget_and_no_document_is_lost(folder: Path, kind: str) -> None:
    text, limit, numpy_of = QUANTITIES[kind]
    amounts = np.asarray(numpy_of(columns()), np.int64)
    packed = Packed(StreamingDataset(folder), LENGTH, budgets={"it": (text, limit), "images": 12})
    packs = keys_of(packed)
    assert all(amounts[pack].sum() <= limit and columns()["images"][pack].sum() <= 12 for pack in packs)
    fitting = amounts <= limit
    assert sorted(number for pack in packs for number in pack) == np.flatnonzero(fitting).tolist()
    assert packed.source.counts.dropped == NUM - fitting.sum()
    assert packed.source.fills["it"] == pytest.approx(amounts[fitting].sum() / (limit * len(packed)))


def test_a_quantity_is_known_by_its_values_and_another_one_is_another_set(folder: Path) -> None:
    def made(budget: Any) -> Packed:
        return Packed(StreamingDataset(folder), LENGTH, budgets={"images": budget})

    plain, derived = made(("images", 6)), made(["images * 1", 6])
    assert plain.source.fingerprint == derived.source.fingerprint != made(6).source.fingerprint
    assert keys_of(plain) == keys_of(derived)
    assert plain.source.fingerprint != made(("images + tokens % 2", 6)).source.fingerprint
    with DataLoader(plain, batch_size=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(made(("images + tokens % 2", 6)), batch_size=4) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (lambda sample: 1, r"a function cannot be compared .*Write arithmetic .*column add URL it --compute MODULE"),
        ((lambda tokens: tokens, 5), r"a function cannot be compared"),
        (("tokens * ", 5), r"budgets: it: .*at character"),
        (("tokens > 3", 5), r"budgets: it: expected \+ - \* / %"),
        (("hash(tokens)", 5), r"expected arithmetic over the columns of a sample"),
        (("3 * 4", 5), r"expected arithmetic over the columns of a sample"),
        (("depth * 2", 5), r"budgets: 'depth \* 2': no column 'depth' in the sample table of .*; there are: .*tokens"),
        (('"tokens" * 9000000000000000000', 5), r"overflow"),
        (("tokens", 5, 6), r'expected \("tokens \* tokens", 2\*\*26\), a text and a number'),
        (("tokens", "many"), r"budgets: it"),
        (("0 - tokens", 5), r"budgets: it: '0 - tokens' is -\d+ for sample \d+ of .*, expected at least 0"),
        (("tokens - tokens - 1", 5), r"budgets: it: '.*' is -1 for sample 0 of .*, expected at least 0"),
        (
            ("tokens / 0", 5),
            r"budgets: it: '.*' is no number \(it divides by 0\) for sample 0 of .*, expected",
        ),
        (("tokens % (tokens - tokens)", 5), r"budgets: it: '.*' is no number \(it divides by 0\)"),
        (2**41, r"budgets: it"),
        ("tokens", r"budgets: it"),
    ],
)
def test_what_is_no_quantity_is_refused_with_the_cure(folder: Path, budget: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Packed(StreamingDataset(folder), LENGTH, budgets={"it": budget})


def test_fractions_are_a_budget_as_the_message_says(folder: Path) -> None:
    with pytest.raises(ConfigError, match="holds double, expected whole numbers") as refused:
        Packed(StreamingDataset(folder), LENGTH, budgets={"seconds": 600})
    (cure,) = re.findall(r"budgets=(\{.*\})", str(refused.value))
    assert len(Packed(StreamingDataset(folder), LENGTH, budgets=ast.literal_eval(cure))) > 1


def test_quantities_travel_and_name_any_column() -> None:
    for text in ("tokens * tokens", '"a ""b"" c" + 1', "-x.y % 3"):
        one = parse_quantity(text, "test")
        assert pickle.loads(pickle.dumps(one)) == one
    for name in ("tokens", "json.w", "odd-name", 'a "quoted" one', "and", "1st"):
        assert column_quantity(name).names == {name}


def test_a_plan_shows_fill_and_imbalance_of_each_budget(folder: Path) -> None:
    options = {"length": LENGTH, "budgets": {"pairs": ["tokens * tokens", 60_000], "images": 12}}
    result = run_cli("plan", str(folder), "--dp", "2", "--batch-size", "4", "--packed", json.dumps(options), "--json")
    uses = {use["name"]: use for use in json.loads(result.stdout)["packs"]["budgets"]}
    assert list(uses) == ["tokens", "pairs", "images"]
    packed = Packed(StreamingDataset(folder), LENGTH, budgets={"pairs": ("tokens * tokens", 60_000), "images": 12})
    assert uses["pairs"]["fill"] == pytest.approx(packed.source.fills["pairs"], abs=1e-3)
    assert uses["tokens"]["limit"] == LENGTH
    for use in uses.values():
        assert 0 <= use["exchanged"] <= use["imbalance"] + 1e-9 or use["imbalance"] < 0.2
    shown = run_cli("plan", str(folder), "--dp", "2", "--batch-size", "4", "--packed", json.dumps(options)).stdout
    assert "budget    pairs" in shown
    assert PackTotals.of(packed.source, Sizes.of(8)).budgets[1].imbalance is None


def test_packs_of_one_budget_show_none(folder: Path) -> None:
    result = run_cli("plan", str(folder), "--batch-size", "4", "--length", "512", "--json")
    assert "budgets" not in json.loads(result.stdout)["packs"]


@pytest.mark.parametrize("text", ["tokens - 40", "tokens / images", "100 / (images - 1)"])
def test_samples_with_less_than_nothing_are_left_out_as_the_message_says(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="Write arithmetic that gives at least 0") as refused:
        Packed(StreamingDataset(folder), LENGTH, budgets={"it": (text, 4096)})
    (where,) = re.findall(r'where="(.*)"', str(refused.value))
    assert len(Packed(StreamingDataset(folder, where=where), LENGTH, budgets={"it": (text, 4096)})) > 1


@pytest.mark.parametrize("name", ["tokens", "patches"])
def test_a_column_below_0_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    lifted = {one: lambda sample, one=one: sample["json"][one] for one in ("tokens", "patches")}
    with ShardWriter(f"{tmp_path}/{{}}.tar", columns=lifted) as writer:
        row = {"tokens": 4, "patches": 4, name: -1}
        writer.write({"__key__": "0", "tok": bytes(8), "json": row})
    with pytest.raises(ConfigError, match=f"column '{name}' has -1 for sample 0 of .*, expected at least 0"):
        Packed(StreamingDataset(tmp_path), LENGTH, budgets={"patches": 4})
