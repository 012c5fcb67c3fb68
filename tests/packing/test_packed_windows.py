"""``Packed(stride=…)`` and ``Packed(budgets=…)``, from shards to batches: windows that overlap, several limits."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import Mixture, Packed, StreamingDataset
from streaming.errors import ConfigError
from streaming.order.packing.fit import pack
from streaming.order.packing.rules import PackRules
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import document_lengths, epoch_of, loader_of, write

LENGTH, STRIDE, NUM_DOCS = 64, 48, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target, num_docs=NUM_DOCS)
    return target


def windows_of(folder: Path, **options: Any) -> Packed:
    return Packed(StreamingDataset(folder, seed=3), LENGTH, stride=STRIDE, **options)


def expected_windows() -> list[tuple[str, int, int]]:
    """Document, first and last token of each window, by what docs/packing.md says; tokens are numbered from 1."""
    windows = []
    lengths = document_lengths(NUM_DOCS)
    for number, (length, stop) in enumerate(zip(lengths.tolist(), np.cumsum(lengths).tolist(), strict=True)):
        for start in range(0, length, STRIDE):
            if start and start - STRIDE + LENGTH >= length:  # the window before it came to the end
                break
            last = min(start + LENGTH, length)
            windows.append((f"{number:06d}", stop - length + start + 1, stop - length + last))
    return windows


def found_windows(batches: list[Any]) -> list[tuple[str, int, int]]:
    windows = []
    for batch in batches:
        for ids, documents, keys in zip(batch["input_ids"], batch["document_ids"], batch["__key__"], strict=True):
            for number, key in enumerate(keys):
                tokens = ids[documents == number]
                assert (tokens.diff() == 1).all()
                windows.append((key, int(tokens[0]), int(tokens[-1])))
    return windows


def test_windows_overlap_and_come_once_each(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        packed = windows_of(folder)
    batches = epoch_of(packed)
    expected = expected_windows()
    assert sorted(found_windows(batches)) == sorted(expected)
    delivered = sum(last - first + 1 for _, first, last in expected)
    assert packed.num_tokens == sum(batch["num_tokens"] for batch in batches) == delivered > packed.counts.tokens
    assert f"{packed.counts.split:,} longer ones split" in caplog.text
    assert packed.counts.split == int((document_lengths(NUM_DOCS) > LENGTH).sum())


def test_they_are_the_same_on_any_world_and_after_a_resume(folder: Path) -> None:
    alone = epoch_of(windows_of(folder))
    halves = [epoch_of(windows_of(folder), rank=rank, world=2) for rank in range(2)]
    for number, batch in enumerate(alone):
        assert [*halves[0][number]["__key__"], *halves[1][number]["__key__"]] == batch["__key__"]
    with loader_of(windows_of(folder)) as loader:
        begun = iter(loader)
        for _ in range(3):
            next(begun)
        state = loader.state_dict()
    with loader_of(windows_of(folder)) as loader:
        loader.load_state_dict(state)
        assert all(same_batch(one, other) for one, other in zip(loader, alone[3:], strict=True))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("mask", [None, "mask"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_token_bears_loss_once_if_asked(folder: Path, *, shift: bool, mask: str | None, padded: bool) -> None:
    options: dict[str, Any] = {"shift_labels": shift, "mask_field": mask, "padded": padded}
    both: list[Counter[int]] = []
    for overlap in (True, False):
        batches = epoch_of(windows_of(folder, overlap_labels=overlap, **options), size=1 if padded else 8)
        labels: Counter[int] = Counter()
        for batch in batches:
            borne = batch["labels"][batch["labels"] >= 0]
            assert batch["num_labels"] == len(borne)
            labels.update(borne.tolist())
        both.append(labels)
    lengths = document_lengths(NUM_DOCS)
    begins = {*(np.cumsum(lengths) - lengths + 1).tolist()}
    all_tokens = range(1, int(lengths.sum()) + 1)
    once = {token: 1 for token in all_tokens if token not in begins and (mask is None or token % 3)}
    assert both[1] == once
    # In every window that holds it but as its first: what else there is comes of the overlaps.
    again: Counter[int] = Counter()
    for _, first, last in expected_windows():
        again.update(token for token in range(first + 1, last + 1) if mask is None or token % 3)
    assert both[0] == again != once


NUM_SAMPLES = 400


def columns_of(number: int) -> tuple[int, int, int]:
    """Tokens, image tokens and images of a sample."""
    return number * 37 % 50 + 1, number * number % 90, number % 4


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("interleaved")
    names = ("tokens", "image_tokens", "images")
    columns = {name: (lambda sample, place=place: columns_of(sample["num"])[place]) for place, name in enumerate(names)}
    with ShardWriter(f"{target}/{{:03d}}.tar", max_samples=150, columns=columns) as writer:
        for number in range(NUM_SAMPLES):
            tokens = np.full(columns_of(number)[0], number, "<u2")
            writer.write({"__key__": f"{number:06d}", "tok": tokens.tobytes(), "num": number})
    return target


BUDGETS = {"image_tokens": 80, "images": 5}


@pytest.mark.usefixtures("one_fork_server")
def test_packs_keep_every_budget(interleaved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        packed = Packed(StreamingDataset(interleaved, seed=2), LENGTH, budgets=BUDGETS)
    over = {n for n in range(NUM_SAMPLES) if columns_of(n)[1] > BUDGETS["image_tokens"]}
    assert over
    assert f"{len(over)} larger ones dropped" in caplog.text
    batches, keys, full = epoch_of(packed), [], 0
    for batch in batches:
        for row, documents, ids in zip(batch["__key__"], batch["document_ids"], batch["input_ids"], strict=True):
            numbers = [int(key) for key in row]
            used = np.sum([columns_of(n) for n in numbers], axis=0)
            assert (used <= [LENGTH, *BUDGETS.values()]).all()
            full += used[1] > BUDGETS["image_tokens"] // 2
            assert [int(ids[documents == place][0]) for place in range(len(row))] == numbers
            assert int((documents >= 0).sum()) == used[0]
            keys += numbers
    assert sorted(keys) == sorted(set(range(NUM_SAMPLES)) - over)
    assert full > len(packed) / 4  # the budgets bind
    rules = PackRules(length=LENGTH, overlong="drop", budgets=tuple(BUDGETS.values()))
    shards = pairwise([*range(0, NUM_SAMPLES, 150), NUM_SAMPLES])
    assert len(packed) == sum(len(pack(np.array([columns_of(n) for n in range(*at)]), rules)) for at in shards)
    assert all(same_batch(one, other) for one, other in zip(epoch_of(packed, num_workers=1), batches, strict=True))


def test_a_mixture_and_whole_samples_with_budgets(interleaved: Path) -> None:
    half = [StreamingDataset(interleaved, subset=part, decode=None) for part in ((0.0, 0.5), (0.5, 1.0))]
    mix = Mixture({str(n): Packed(one, LENGTH, budgets=BUDGETS) for n, one in enumerate(half)})
    seen = [key for batch in epoch_of(mix) for row in batch["__key__"] for key in row]
    assert len(seen) == len(set(seen)) == sum(columns_of(n)[1] <= BUDGETS["image_tokens"] for n in range(NUM_SAMPLES))
    whole = Packed(half[0], LENGTH, budgets={"images": 6}, padded=True, field=None)
    for batch in epoch_of(whole, size=1):
        numbers = np.array([columns_of(int(key)) for key in batch["__key__"]])
        assert len(numbers) * numbers[:, 0].max() <= LENGTH
        assert len(numbers) * numbers[:, 2].max() <= 6


def test_what_cannot_work_is_refused(folder: Path, interleaved: Path) -> None:
    documents, images = StreamingDataset(folder), StreamingDataset(interleaved)
    for options, said in (
        ({"stride": 65}, "stride: expected"),
        ({"stride": 8, "overlong": "drop"}, 'stride=8 cuts overlong documents: it needs overlong="split"'),
        ({"overlap_labels": False}, "overlap_labels=False applies to windows that overlap; add stride=…"),
        ({"stride": 8, "overlap_labels": 1}, "overlap_labels: expected True or False"),
        ({"stride": 8, "field": None, "padded": True}, "stride=8 with field=None: it applies to tokens"),
        ({"budgets": 5}, "budgets: expected a number per column"),
        ({"budgets": {"tokens": 5}}, "column 'tokens' is already bounded by length="),
        ({"budgets": {"num": -1}}, "budgets: num: expected"),
        ({"budgets": {"num": 0}}, r"budgets: num: expected an integer in \[1, "),
        ({"budgets": {"it": ("num * 2", 0)}}, r"budgets: it: expected an integer in \[1, "),
        (
            {"budgets": {"images": 4}},
            r"budgets= or alike=: no column 'images' in the sample table of .*\.tar; there are: ",
        ),
        (
            {"budgets": {"tokns": 4}},
            r"budgets= or alike=: no column 'tokns' in the sample table of .*\.tar \(did you mean 'tokens'\?\)",
        ),
        (
            {"alike": ("tokns",), "padded": True},
            r"no column 'tokns' in the sample table of .*\.tar \(did you mean 'tokens'\?\)",
        ),
        ({"budgets": {"images": 4}, "overlong": "split"}, 'needs overlong="drop"'),
    ):
        with pytest.raises(ConfigError, match=said):
            Packed(documents, LENGTH, **options)
    with pytest.raises(ConfigError, match="nothing to pack"):
        Packed(images[1:4], 1, budgets={"images": 1})
