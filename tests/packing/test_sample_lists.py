"""``Packed(field=None)``: lists of whole samples within all budgets, for programs that collate themselves."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, Schedule, StageFields, StreamingDataset
from streaming.errors import ConfigError, DecodeError

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM, BUDGET, PATCHES, PER_SHARD = 240, 200, 40, 90


def frames_of(number: int) -> int:
    return 250 if number == 77 else number * number * 13 % 90 + 1


def patches_of(number: int) -> int:
    return number * 7 % 19


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("lists")
    columns = {"frames": lambda sample: len(sample["pcm"]) // 2, "patches": lambda sample: sample["json"]["patches"]}
    with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=PER_SHARD, columns=columns) as writer:
        for number in range(NUM):
            pcm = np.full(frames_of(number), number, "<i2").tobytes()
            writer.write({"__key__": f"{number:04d}", "pcm": pcm, "json": {"patches": patches_of(number)}})
    return target


def lists_of(folder: Path, **options: Any) -> Packed:
    of_packs = {name: options.pop(name) for name in ("max_docs", "multiple") if name in options}
    documents = StreamingDataset(folder, decode={"pcm": "array:int16"}, seed=5, **options)
    return Packed(documents, BUDGET, column="frames", field=None, budgets={"patches": PATCHES}, **of_packs)


def loader_of(packed: Any, rank: int = 0, world: int = 1, *, size: int = 4, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    options.setdefault("last_batch", "partial")
    return DataLoader(packed, global_batch_size=size, device_mesh=mesh, **options)


def epoch_of(packed: Any, *given: int, **options: Any) -> list[Any]:
    with loader_of(packed, *given, **options) as loader:
        return list(loader)


def check(samples: list[dict[str, Any]], **more: Any) -> list[int]:
    """Every sample is whole, and the list is within its budgets; their numbers."""
    numbers = [int(sample["__key__"]) for sample in samples]
    for sample, number in zip(samples, numbers, strict=True):
        assert sample["pcm"].tolist() == [number] * frames_of(number)
        assert sample["json"] == {"patches": patches_of(number)}
    assert sum(map(frames_of, numbers)) <= BUDGET
    assert sum(map(patches_of, numbers)) <= PATCHES
    assert not more or all(sample[name] == value for sample in samples for name, value in more.items())
    return numbers


def numbers_in(batches: list[Any]) -> list[list[int]]:
    return [check(samples) for batch in batches for samples in batch]


ALL = [number for number in range(NUM) if number != 77]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_comes_once_in_lists_within_the_budgets(
    folder: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        packed = lists_of(folder)
    assert "1 larger ones dropped" in caplog.text
    assert "patches" in caplog.text
    batches = epoch_of(packed, num_workers=workers)
    assert all(isinstance(batch, list) and len(batch) <= 4 for batch in batches)
    found = numbers_in(batches)
    assert len(found) == len(packed)
    assert sorted(number for numbers in found for number in numbers) == ALL
    fewest = max(sum(map(frames_of, ALL)) / BUDGET, sum(map(patches_of, ALL)) / PATCHES)
    assert len(packed) <= 1.1 * fewest
    assert check(packed[3]) == [int(one["__key__"]) for one in packed[3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_global_batches_are_the_same_on_every_world_and_a_state_goes_on_on_another(folder: Path, workers: int) -> None:
    whole = [numbers_in([batch]) for batch in epoch_of(lists_of(folder))]
    for world in (2, 4):
        shares = [epoch_of(lists_of(folder), rank, world, num_workers=workers) for rank in range(world)]
        for batch, *parts in zip(whole, *shares, strict=True):
            assert sorted(batch) == sorted(one for part in parts for one in numbers_in([part]))
    with loader_of(lists_of(folder), 1, 2) as loader:
        running = iter(loader)
        for _ in range(3):
            next(running)
        state = loader.state_dict()
    with loader_of(lists_of(folder), num_workers=workers) as loader:
        loader.load_state_dict(state)
        assert [numbers_in([batch]) for batch in loader] == whole[3:]


def test_a_collate_fn_gets_the_lists_and_an_empty_share_has_its_form(folder: Path) -> None:
    def joined(lists: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            "pcm": [np.concatenate([one["pcm"] for one in samples]) for samples in lists],
            "sizes": np.array([len(samples) for samples in lists]),
        }

    packed = lists_of(folder)
    assert sum(int(batch["sizes"].sum()) for batch in epoch_of(packed, collate_fn=joined)) == NUM - 1
    world = next(n for n in (3, 5, 7) if len(packed) % n)
    last = [epoch_of(packed, rank, world, size=world, collate_fn=joined)[-1] for rank in range(world)]
    assert [len(batch["pcm"]) for batch in last] == [len(batch["sizes"]) for batch in last]
    empty = next(rank for rank, batch in enumerate(last) if not len(batch["sizes"]))
    assert epoch_of(packed, empty, world, size=world)[-1] == []


def picky(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if int(sample["__key__"]) % 3 == 1 else sample


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lost_sample_leaves_its_list_which_is_never_empty(folder: Path, workers: int) -> None:
    plain = numbers_in(epoch_of(lists_of(folder)))
    for on_error in ("substitute", "skip"):
        batches = epoch_of(lists_of(folder, transform=picky, on_error=on_error), num_workers=workers)
        for before, after in zip(plain, [samples for batch in batches for samples in batch], strict=True):
            kept = [number for number in before if number % 3 != 1]
            assert len(check(after)) == max(len(kept), 1)
            if kept:
                assert check(after) == kept
            marks = [sample.get("__valid__") for sample in after]
            assert marks == [bool(kept)] * len(after) if on_error == "skip" else marks == [None] * len(after)
    with pytest.raises(DecodeError, match="transform returned None"):
        epoch_of(lists_of(folder, transform=picky, on_error="raise"))


def test_damaged_bytes_are_counted_and_leave_their_list(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    content = bytearray((bad / "0001.tar").read_bytes())
    at = content.find(np.full(frames_of(100), 100, "<i2").tobytes())
    content[at : at + 2] = b"??"
    (bad / "0001.tar").write_bytes(content)
    with loader_of(lists_of(bad, max_bad_samples=100)) as loader:
        keys = [number for numbers in numbers_in(list(loader)) for number in numbers]
        lost = {int(one["key"]) for one in loader.metrics()["bad"]}
    assert 100 in lost
    assert set(ALL) - set(keys) == lost


def test_lists_that_pad_the_last_batch_do_not_count(folder: Path) -> None:
    packed, valid = lists_of(folder), []
    for rank in range(4):
        for batch in epoch_of(packed, rank, 4, last_batch="pad"):
            for samples in batch:
                check(samples)
                marks = {sample["__valid__"] for sample in samples}
                assert len(marks) == 1
                valid += marks
    assert sum(valid) == len(packed)
    assert len(valid) % 4 == 0


def test_a_transform_draws_for_each_sample_the_same_on_any_world(folder: Path) -> None:
    def louder(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return sample | {"gain": rng.random()}

    drawn = []
    for world in (1, 2):
        batches = [
            batch for rank in range(world) for batch in epoch_of(lists_of(folder, transform=louder), rank, world)
        ]
        drawn.append({one["__key__"]: one["gain"] for batch in batches for samples in batch for one in samples})
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) == NUM - 1


def test_micro_batches_mixtures_and_bounds(folder: Path) -> None:
    with loader_of(lists_of(folder), micro_batch_size=1) as loader:
        steps = [[check(samples) for batch in step for samples in batch] for step in loader.steps()]
    assert steps == [numbers_in([batch]) for batch in epoch_of(lists_of(folder))]
    halves = {"a": lists_of(folder, subset=(0.0, 0.5)), "b": lists_of(folder, subset=(0.5, 1.0))}
    for batch in epoch_of(Mixture(halves)):
        for samples in batch:
            check(samples, __source__="a" if int(samples[0]["__key__"]) < NUM // 2 else "b")
    for numbers in numbers_in(epoch_of(lists_of(folder, max_docs=2, multiple=8))):
        assert len(numbers) <= 2
        assert sum(-(-frames_of(number) // 8) * 8 for number in numbers) <= BUDGET


def test_local_balance_sorts_lists_by_a_column(folder: Path) -> None:
    for batch in epoch_of(lists_of(folder), size=8, balance="local", cost="patches"):
        costs = [sum(patches_of(number) for number in check(samples)) for samples in batch]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"balance": "exchange"}, r'decoded samples are not sent to other ranks. Use balance="local", and budgets='),
        ({"jagged": ("pcm",)}, r"nothing is concatenated. Leave jagged out"),
        ({"balance": "local", "cost": "depth"}, r"no column 'depth'"),
    ],
)
def test_options_of_one_tensor_are_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loader_of(lists_of(folder), **options)


def test_stages_need_a_collate_fn_that_returns_a_dict(folder: Path) -> None:
    with pytest.raises(ConfigError, match="have collate_fn return a dict"):
        epoch_of(lists_of(folder), stage_fields=StageFields(first=("pcm",), last=("pcm",)))


def test_what_cuts_samples_is_refused(folder: Path) -> None:
    documents = StreamingDataset(folder)
    for options, words in (
        ({"overlong": "split"}, r"overlong='split' with field=None"),
        ({"length": Schedule.steps({0: 100, 10: 200})}, r"whole samples cannot be cut"),
        ({"alike": ("patches",)}, r"add padded=True"),
    ):
        with pytest.raises(ConfigError, match=words):
            Packed(documents, **{"length": BUDGET, "column": "frames", "field": None} | options)
