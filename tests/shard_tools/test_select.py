"""``select``: a function's yes becomes a view that anybody reads without the function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter, select
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError


@pytest.fixture
def url(tmp_path: Path) -> str:
    with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=7, columns={"n": "json.n"}) as writer:
        for number in range(30):
            writer.write({"__key__": f"{number:03d}", "json": {"n": number}, "bin": bytes(200_000)})
    return f"{tmp_path}/set/"


def is_third(sample: Any) -> bool:
    return sample["json"]["n"] % 3 == 0


def numbers(dataset: StreamingDataset) -> list[int]:
    return [sample["json"]["n"] for sample in dataset]


def test_the_view_keeps_what_the_function_says(url: str) -> None:
    select(is_third, url, "every-third.1", fields=["json"])
    assert len(StreamingDataset(url, view="every-third.1")) == 10
    report = select(is_third, url, "third", fields=["json"])
    assert (report.num_kept, report.num_samples) == (10, 30)
    assert numbers(StreamingDataset(url, view="third", fields=["json"])) == list(range(0, 30, 3))
    assert numbers(StreamingDataset(url, where="third and n > 20", fields=["json"])) == [21, 24, 27]
    with DataLoader(StreamingDataset(url, view="third", fields=["json"]), batch_size=5) as loader:
        assert sorted(row["n"] for batch in loader for row in batch["json"]) == list(range(0, 30, 3))


def test_the_same_function_is_not_called_again_and_another_is_refused(url: str) -> None:
    calls = []

    def noted(sample: Any) -> Any:
        calls.append(sample["__key__"])
        return np.bool_(sample["json"]["n"] > 20)

    first = select(noted, url, "late", fields=["json"], workers=1)
    assert len(calls) == 30
    with pytest.raises(ConfigError, match="already exists"):
        select(is_third, url, "late", fields=["json"])
    assert select(is_third, url, "late", fields=["json"], overwrite=True).hash != first.hash
    assert len(StreamingDataset(url, view="late")) == 10


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda sample: sample["json"]["n"], ConfigError, "sample '000': expected True, False or None, got 0"),
        (lambda sample: False, ConfigError, "no sample|keeps no"),
        (lambda sample: sample["nothing"], KeyError, "nothing"),
        ("no_such_module:function", ConfigError, "no_such_module"),
        (5, ConfigError, "expected a function of one sample, got a int"),
    ],
)
def test_what_is_no_answer(url: str, function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select(function, url, "view", fields=["json"], workers=1)
    with pytest.raises(ConfigError, match="no view"):
        StreamingDataset(url, view="view")


def test_none_counts_as_no(url: str) -> None:
    select(lambda sample: True if sample["json"]["n"] == 4 else None, url, "four", fields=["json"])
    assert numbers(StreamingDataset(url, view="four", fields=["json"])) == [4]
