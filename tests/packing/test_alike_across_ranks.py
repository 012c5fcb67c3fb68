"""``Packed(alike=…, alike_across_ranks=True)``: one kind for all ranks in a step, on any number of ranks."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError, DecodeError, StateError

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM, PER_SHARD, GLOBAL = 1_200, 300, 4
SIZES = ((8, 8), (4, 16), (16, 4), (6, 8))


def size_of(number: int) -> tuple[int, int]:
    return SIZES[number % 11 % 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kinds")
    names = ("height", "width", "pixels", "rare", "tokens", "text")
    columns = {name: lambda sample, name=name: sample["json"][name] for name in names}
    with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=PER_SHARD, columns=columns) as writer:
        for number in range(NUM):
            height, width = size_of(number)
            facts = {"height": height, "width": width, "pixels": height * width, "rare": int(number < 3), "text": "a"}
            image = np.full((height, width, 3), number % 250, np.uint8)
            tok = np.full(height, number, "<u2")
            writer.write(
                {"__key__": f"{number:04d}", "npy": image, "tok": tok.tobytes(), "json": facts | {"tokens": height}}
            )
    return target


def images(folder: Path, given: dict[str, Any] | None = None, **options: Any) -> Packed:
    fixed = {"length": 640, "column": "pixels", "alike": ("height", "width"), "field": None, "padded": True}
    options = fixed | {"alike_across_ranks": True} | options
    documents = StreamingDataset(folder, seed=2, fields=("npy",), **(given or {}))
    return Packed(documents, **options)


def loader_of(packed: Any, rank: int = 0, world: int = 1, *, size: int = GLOBAL, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
    options.setdefault("collate_fn", list)
    return DataLoader(packed, global_batch_size=size, device_mesh=mesh, last_batch="drop", **options)


def steps_of(packed: Any, world: int, epochs: int = 1, **options: Any) -> list[list[tuple[str, ...]]]:
    """For each step the packs of all ranks, sorted; each is of one kind, over all ranks."""
    ranks = []
    for rank in range(world):
        with loader_of(packed, rank, world, **options) as loader:
            ranks.append([batch for _ in range(epochs) for batch in loader])
    found = []
    for step in zip(*ranks, strict=True):
        packs = [pack for share in step for pack in share]
        assert len({pack["npy"].shape[1:] for pack in packs}) == 1
        assert all("__source__" not in pack and "source_ids" not in pack for pack in packs)
        found.append(sorted(tuple(pack["__key__"]) for pack in packs))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_has_one_kind_and_is_the_same_on_every_world(folder: Path, workers: int) -> None:
    packed = images(folder)
    whole = steps_of(packed, 1)
    for world in (2, 4):
        assert steps_of(images(folder), world, num_workers=workers) == whole
    kinds = [size_of(int(step[0][0])) for step in whole]
    assert len(set(kinds)) == len(SIZES)
    assert sum(one != other for one, other in pairwise(kinds)) > len(kinds) // 4, "kinds are mixed"


@pytest.mark.parametrize("size", [4, 6, 8])
def test_what_fills_no_batch_comes_first_in_the_next_epoch(folder: Path, size: int) -> None:
    """After each epoch less than a global batch of each kind waits, and no sample of a kind comes before others."""
    packed, epochs = images(folder), 6
    packs = Counter(size_of(int(packed[number]["__key__"][0])) for number in range(len(packed)))
    steps = steps_of(packed, 1, epochs, size=size)
    per_epoch = -(-len(packed) // size)
    assert len(steps) == epochs * per_epoch
    drawn = Counter[tuple[int, int]]()
    for number, step in enumerate(steps, 1):
        drawn[size_of(int(step[0][0]))] += size
        epoch, rest = divmod(number, per_epoch)
        more = epoch * (per_epoch * size - len(packed))
        assert rest or all(-more - size < epoch * count - drawn[kind] < size for kind, count in packs.items())
    times = Counter(key for step in steps for pack in step for key in pack)
    assert set(times) == {f"{number:04d}" for number in range(NUM)}
    for kind in packs:
        counts = [count for key, count in times.items() if size_of(int(key)) == kind]
        assert max(counts) - min(counts) <= 1


@pytest.mark.thorough
def test_later_epochs_differ_by_kind_and_go_on_on_another_world(folder: Path) -> None:
    whole = steps_of(images(folder), 1, 3, size=8)
    per_epoch = len(whole) // 3
    kinds = [Counter(size_of(int(step[0][0])) for step in whole[at * per_epoch :][:per_epoch]) for at in range(2)]
    assert kinds[0] != kinds[1], "36 packs of a kind are 4 batches, then 5"
    for at in (per_epoch - 1, per_epoch + 5):
        with loader_of(images(folder), size=8) as loader:
            running = (batch for _ in range(3) for batch in loader)
            for _ in range(at):
                next(running)
            state = loader.state_dict()
            running.close()
        ranks = []
        for rank in range(4):
            with loader_of(images(folder), rank, 4, size=8) as loader:
                loader.load_state_dict(state)
                left = 3 - loader.state_dict()["epoch"]
                ranks.append([[tuple(pack["__key__"]) for pack in one] for _ in range(left) for one in loader])
        assert [sorted(pack for share in step for pack in share) for step in zip(*ranks, strict=True)] == whole[at:]


def test_a_state_goes_on_on_another_world(folder: Path) -> None:
    whole = steps_of(images(folder), 1, 2)
    at = len(whole) // 2 - 3
    with loader_of(images(folder), 1, 2) as loader:
        running = iter(loader)
        for _ in range(at):
            next(running)
        state = loader.state_dict()
    rest = []
    for rank in range(4):
        with loader_of(images(folder), rank, 4) as loader:
            loader.load_state_dict(state)
            rest.append([[tuple(pack["__key__"]) for pack in batch] for _ in range(2) for batch in loader])
    assert [sorted(pack for share in step for pack in share) for step in zip(*rest, strict=True)] == whole[at:]
    for options, size in (({"alike": ("height",)}, GLOBAL), ({}, 8)):
        with loader_of(images(folder, **options), size=size) as loader, pytest.raises(StateError):
            loader.load_state_dict(state)


@pytest.mark.parametrize("where", ["rare = 0", "NOT (height = 6)"])
def test_a_state_over_other_samples_is_refused_in_words_of_kinds(folder: Path, where: str) -> None:
    with loader_of(images(folder)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of(images(folder, {"where": where})) as loader, pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert "filter" in str(caught.value)
    assert "group" in str(caught.value)
    assert "Mixture" not in str(caught.value)


def test_documents_of_tokens_too_and_counts_are_those_of_the_set(folder: Path) -> None:
    def made(**options: Any) -> Packed:
        return Packed(StreamingDataset(folder), 64, padded=True, alike=("height",), **options)

    packed = made(alike_across_ranks=True)
    assert packed.num_tokens == made().num_tokens == sum(size_of(number)[0] for number in range(NUM))
    assert packed.counts.documents == NUM
    assert 0.9 < packed.fill <= 1
    assert packed.documents[3]["tok"] == np.full(size_of(3)[0], 3, "<u2").tobytes()
    lengths = set()
    with DataLoader(packed, global_batch_size=GLOBAL, micro_batch_size=1) as loader:
        for batches in loader.steps():
            step = list(batches)
            assert len({batch["input_ids"].shape[1] for batch in step}) == 1
            lengths.add(step[0]["input_ids"].shape[1])
            assert not {"__source__", "source_ids"} & step[0].keys()
    assert lengths == {height for height, _ in SIZES}


def picky(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if int(sample["__key__"]) % 5 == 1 else sample


def test_lost_samples_are_replaced_by_others_of_their_kind(folder: Path) -> None:
    whole = steps_of(images(folder), 1)
    replaced = steps_of(images(folder, {"transform": picky}), 1)  # each step is still of one kind
    assert len(replaced) == len(whole)
    keys = {key for step in replaced for pack in step for key in pack}
    assert keys == {key for step in whole for pack in step for key in pack if int(key) % 5 != 1}
    with pytest.raises(DecodeError, match="transform returned None"):
        steps_of(images(folder, {"transform": picky, "on_error": "raise"}), 1)


def test_mixed_shards_are_warned_of_with_the_command_and_too_large_kinds_are_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        packed = images(folder)
    assert "packs of 4 kinds (height, width)" in caplog.text
    assert "bytes for each byte of the set" in caplog.text
    assert "--sort height" in caplog.text
    small = images(folder, length=60)  # only those of 48 pixels fit
    assert small.counts.documents == NUM
    assert len(small) == small.counts.documents - small.counts.dropped < len(packed) * 13
    with pytest.raises(ConfigError, match="nothing to pack"):
        images(folder, length=40)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda folder: images(folder, alike=()), r"which samples are alike\? Name the columns: Packed"),
        (lambda folder: images(folder, alike=("text",)), r"alike: column 'text' holds string, expected whole numbers"),
        (lambda folder: images(folder, alike=("depth",)), r"no column 'depth'"),
        (lambda folder: images(folder, alike_across_ranks="yes"), r"alike_across_ranks"),
        (lambda folder: Mixture({"a": images(folder)}), r"sources: 'a': Packed\(…, alike_across_ranks=True\) deals"),
        (
            lambda folder: loader_of(images(folder, alike=("rare",))),
            r"rare = 1 has 1 pack, too few for a global batch of 4.*where='NOT \(rare = 1\)'",
        ),
        (
            lambda folder: DataLoader(
                images(folder), global_batch_size=Schedule.steps({0: 4, 8: 8}), collate_fn=list
            ),
            r"alike_across_ranks=True: the source of a batch .* or leave alike_across_ranks out",
        ),
        (lambda folder: loader_of(images(folder), epoch_size=6), r"alike_across_ranks=True needs a multiple"),
    ],
)  # fmt: skip
def test_where_it_is_impossible_it_is_refused_with_the_cure(folder: Path, made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(folder)


def test_the_cure_for_rare_kinds_works(folder: Path) -> None:
    packed = images(folder, {"where": "NOT (rare = 1)"}, alike=("rare",))
    with loader_of(packed) as loader:
        assert len(list(loader)) == len(packed) // GLOBAL
