"""``column add --compute length --after``: what training will measure, measured once; another transform is noticed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.change.columns.target import AddReport, ColumnTarget
from shard_tools.change.functions.length import LengthOptions, measure_column
from shard_tools.change.functions.run import Running
from shard_tools.cli import cli
from streaming import DataLoader, Packed, StreamingDataset
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage

MODULE = """
import random

import numpy as np
import torch


def ids(sample):
    return {"ids": np.zeros(3 * len(sample["txt"]), np.int64), "txt": sample["txt"]}


def drawn(sample, rng):
    return {"ids": np.zeros(4 + rng.integers(1000), np.int64)}


def drawn_elsewhere(sample):
    return {"ids": [0] * (4 + random.randrange(1000))}


def same_by_rng(sample, rng):
    return {"ids": rng.integers(9, size=len(sample["txt"]))}


def two(sample):
    return {"a": np.zeros((2, 5)), "b": torch.zeros(3, 7), "cls": 4}


def alone(sample):
    return torch.zeros(len(sample["txt"]), 2)


def none(sample):
    return None if len(sample["txt"]) % 2 else {"ids": [0] * len(sample["txt"])}


def scalar(sample):
    return {"a": 4}


def popped(sample):
    return {"ids": [0] * len(sample.pop("txt"))}


def broken(sample):
    raise RuntimeError(f"{sample['__key__']} is bad")
"""
NAMES = ("ids", "same_by_rng", "two", "alone", "none", "popped")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    (folder / "measured_transforms.py").write_text(MODULE)
    return folder


@pytest.fixture
def place(tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A set of texts of 1 to 20 letters in several shards."""
    monkeypatch.syspath_prepend(str(module))
    with ShardWriter(str(tmp_path / "set" / "{:06d}.tar"), max_samples=30) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:03d}", "txt": "x" * (1 + number % 20), "cls": number})
    return str(tmp_path / "set")


def add(place: str, after: str | None = None, *, field: str | None = None, overwrite: bool = False) -> AddReport:
    target = ColumnTarget([place], "length", storage=Storage(), index_url=None, overwrite=overwrite)
    return measure_column(target, [place], options=LengthOptions(after=after, field=field), running=Running(workers=0))


def column(place: str) -> list[int]:
    """The values of the column, by the shards' order; -1: none."""
    found: list[int | None] = []
    for path in sorted(Path(place).glob("_shardstream/columns/length/*.parquet")):
        found += pq.read_table(path).column(0).to_pylist()
    return [-1 if one is None else one for one in found]


TEXTS = [1 + number % 20 for number in range(100)]
EXPECTED: dict[str, tuple[str | None, list[int]]] = {
    "ids": (None, [3 * size for size in TEXTS]),
    "ids of txt": ("txt", TEXTS),
    "same_by_rng": (None, TEXTS),
    "two of a": ("a", [2] * 100),
    "two of b": ("b", [3] * 100),
    "alone": (None, TEXTS),
    "none": (None, [-1 if size % 2 else size for size in TEXTS]),
    "popped": (None, TEXTS),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_the_column_is_what_the_transform_makes(place: str, case: str) -> None:
    field, expected = EXPECTED[case]
    report = add(place, f"measured_transforms:{case.split(maxsplit=1)[0]}", field=field)
    assert column(place) == expected
    assert report.num_missing == expected.count(-1)


def test_without_a_transform_decoded_values_are_measured(place: str) -> None:
    add(place, field="txt")
    assert column(place) == TEXTS


@pytest.mark.parametrize(
    ("after", "field", "words"),
    [
        ("drawn", None, "its length is random"),
        ("drawn_elsewhere", None, "its length is random"),
        ("two", None, r"several fields have a length \(a, b\); name the one to measure with --field"),
        ("scalar", None, "no field is an array or a list; name the one to measure"),
        ("scalar", "a", "field 'a' is a int without a length"),
        ("two", "c", "--field c: the sample has no such field; it has: a, b, cls"),
        ("alone", "c", "--field c: the transform returns a Tensor, which has no fields"),
        ("broken", None, "000 is bad"),
        ("nothing", None, "module 'measured_transforms' has no attribute 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_an_error(place: str, after: str, field: str | None, words: str) -> None:
    with pytest.raises((ConfigError, DataError, RuntimeError), match=words):
        add(place, f"measured_transforms:{after}", field=field)
    assert "no late columns" in CliRunner().invoke(cli, ["column", "list", place]).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compute", "tokens", "--after", "m:f"), "--after and --field are for --compute length."),
        (("--lift", "cls", "--field", "a"), "--after and --field are for --compute length."),
        (("--compute", "length", "--dtype", "uint16"), "--dtype is for --compute tokens."),
    ],
)
def test_wrong_usage(place: str, arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(cli, ["column", "add", place, "length", *arguments])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.thorough
def test_the_command_measures_in_processes(place: str) -> None:
    command = ["column", "add", place, "length", "--compute", "length", "--after", "measured_transforms:none"]
    result = CliRunner().invoke(cli, [*command, "--workers", "2", "--field", "ids"])
    assert result.exit_code == 0, result.output
    assert "without a value: 50 samples" in result.output
    assert column(place) == EXPECTED["none"][1]
    broken = [*command[:3], "other", *command[4:-1], "measured_transforms:broken"]
    failing = CliRunner().invoke(cli, [*broken, "--workers", "2"])
    assert failing.exit_code == 1
    assert "measured_transforms:broken failed on sample 0 of" in failing.output


def test_a_run_that_was_stopped_goes_on_and_another_function_is_refused(place: str) -> None:
    add(place, "measured_transforms:ids")
    assert add(place, "measured_transforms:ids").was_complete
    there = sorted(Path(place).glob("_shardstream/columns/length/*"))
    document = next(one for one in there if one.name == "column.json")
    values = {one: one.read_bytes() for one in there if one != document}
    content = json.loads(document.read_bytes())
    assert content["made_from"] == "length after measured_transforms:ids"
    assert content["after"].startswith("ids (source text ")
    document.unlink()  # as if it had been killed before the end
    min(values).unlink()
    add(place, "measured_transforms:ids")
    assert {one: one.read_bytes() for one in values} == values
    with pytest.raises(ConfigError, match="already exists"):
        add(place, "measured_transforms:popped")
    add(place, "measured_transforms:popped", overwrite=True)
    assert column(place) == TEXTS


def batches(place: str, transform: Any, caplog: pytest.LogCaptureFixture) -> tuple[list[Mapping[str, Any]], str]:
    caplog.clear()
    dataset = StreamingDataset(place, transform=transform)
    packed = Packed(dataset, length=120, column="length", padded=True, field=None)
    with caplog.at_level(logging.WARNING):
        with DataLoader(packed, batch_size=1, num_threads=0, jagged=("ids",)) as loader:
            found = list(loader)
        Packed(dataset, length=120, column="length", padded=True, field=None)
    return found, caplog.text


def test_batches_hold_what_was_measured_and_another_transform_is_noticed(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    import measured_transforms  # type: ignore[import-not-found]  # noqa: PLC0415

    add(place, "measured_transforms:ids")
    found, told = batches(place, measured_transforms.ids, caplog)
    sizes = [np.diff(one["ids"].offsets) for one in found]
    assert all(len(one) * one.max() <= 120 for one in sizes)
    assert sum(map(len, sizes)) == 100
    assert "measure them again" not in told
    _, told = batches(place, measured_transforms.same_by_rng, caplog)
    assert "column 'length' holds length after measured_transforms:ids, which was ids (source text" in told
    assert f"shard_tools column add {place} length --compute length --after MODULE:FUNCTION --overwrite" in told
