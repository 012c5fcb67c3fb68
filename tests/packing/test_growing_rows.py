"""``Packed(length=Schedule.steps({…}))``: rows that grow over a run hold exactly the packs of the plan."""

from __future__ import annotations

import json
import logging
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    DeviceMeshFetcher,
    Mixture,
    Packed,
    Schedule,
    SequenceSlice,
    StageFields,
    StreamingDataset,
)  # fmt: skip
from streaming.errors import ConfigError, DataError
from tests.support.processes.played_ranks import Play, played
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import LENGTH, damaged, loader_of, real_tokens, write

GROWING = Schedule.steps({0: 16, 100: 32, 300: 64})
"""On batches of 8, the first of 32 begins at row 104, the first of 64 at row 304."""
SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target)
    return target


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


def packed_of(folder: Path, length: Any = GROWING, *, dataset: Any = None, **options: Any) -> Packed:
    return Packed(StreamingDataset(folder, seed=3, **(dataset or {})), length, **options)


def length_at(row: int, schedule: Schedule = GROWING) -> int:
    return int(schedule.at(row))  # type: ignore[arg-type]


def epoch_of(packed: Any, world: int = 1, rank: int = 0, state: Any = None, **options: Any) -> list[Any]:
    with loader_of(packed, rank, world, **{"num_threads": 0} | options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return list(loader)


# --- a model: each batch of whole packs, laid out again by hand ---


def documents_of(row: int, batch: Any, mask: Any) -> list[tuple[str, list[int], list[bool]]]:
    """Each document, or piece of one, in a row of a batch: its key, its tokens, whether each may bear a loss."""
    numbers, found = batch["document_ids"][row], []
    for number, key in enumerate(batch["__key__"][row]):
        tokens = batch["input_ids"][row][numbers == number].tolist()
        found.append((key, tokens, [mask is None or token % 3 != 0 for token in tokens]))
    return found


def laid_out(documents: list[Any], length: int, count: int, multiple: int) -> list[list[Any]]:
    """Documents in rows: the longest first, each in the first row with room; the others cut to fill what is left."""

    def room(tokens: int) -> int:
        return -(-tokens // multiple) * multiple

    rows: list[list[tuple[int, Any]]] = [[] for _ in range(count)]
    left, cut = [length] * count, []
    for number in sorted(range(len(documents)), key=lambda number: -room(len(documents[number][1]))):
        key, tokens, loss = documents[number]
        fitting = [row for row in range(count) if room(len(tokens)) <= left[row]]
        if fitting:
            rows[fitting[0]].append((number, documents[number]))
            left[fitting[0]] -= room(len(tokens))
        else:
            cut.append(number)
    for number in cut:
        key, tokens, loss = documents[number]
        for row in range(count):
            taken = min(left[row], room(len(tokens)))
            if taken and tokens:
                rows[row].append((number, (key, tokens[:taken], loss[:taken])))
                tokens, loss, left[row] = tokens[taken:], loss[taken:], left[row] - taken
        assert not tokens
    return [[piece for _, piece in sorted(row, key=lambda one: one[0])] for row in rows]


def row_of(pieces: list[Any], length: int, options: dict[str, Any]) -> dict[str, Any]:
    """The entries of a row that holds these pieces, position by position."""
    multiple, shift, across = (options.get(name, default) for name, default in
                               (("multiple", 1), ("shift_labels", False), ("labels_across", False)))  # fmt: skip
    ids, documents, positions = [0] * length, [-1] * length, [-1] * length
    labels, borders, at, before = [-100] * length, [0], 0, -1
    for number, (_, tokens, loss) in enumerate(pieces):
        for place, (token, counts) in enumerate(zip(tokens, loss, strict=True)):
            ids[at + place], documents[at + place], positions[at + place] = token, number, place
            predicts = at + place - 1 if place else before if across else -1
            if counts and predicts >= 0:
                labels[predicts if shift else at + place] = token
        before = at + len(tokens) - 1
        at += -(-len(tokens) // multiple) * multiple
        borders.append(at)
    borders += [length] if at < length else []
    return {"input_ids": ids, "document_ids": documents, "position_ids": positions, "labels": labels,
            "borders": borders, "__key__": [key for key, _, _ in pieces]}  # fmt: skip


def check_rows(batch: Any, due: list[dict[str, Any]], length: int, max_docs: int | None) -> None:
    """Check a batch against its rows by the model."""
    assert batch["input_ids"].shape == (len(due), length)
    is_token = batch["document_ids"] >= 0
    for name in ("input_ids", "document_ids", "labels", "position_ids"):
        found, expected = batch[name], torch.tensor([row[name] for row in due])
        assert torch.equal(*((found, expected) if name != "position_ids" else (found[is_token], expected[is_token])))
    assert batch["__key__"] == [row["__key__"] for row in due]
    assert len(batch["__url__"]) == len(due)
    borders = sorted({number * length + border for number, row in enumerate(due) for border in row["borders"]})
    places = len(due) * length
    if max_docs is None:
        assert batch["cu_seqlens"].tolist() == borders
        assert batch["max_seqlen"] == max(high - low for low, high in pairwise(borders))
    else:
        fixed = len(due) * (max_docs + 1) + 1
        assert batch["cu_seqlens"].tolist() == borders + [places] * (fixed - len(borders))
        assert batch["max_seqlen"] == length
    assert batch["num_tokens"] == int(is_token.sum())
    assert batch["num_labels"] == int((batch["labels"] != -100).sum())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_docs": 7},
        {"multiple": 4, "overlong": "truncate"},
        {"multiple": 4, "shift_labels": True, "labels_across": True, "overlong": "drop"},
        {"mask_field": "mask"},
        {"mask_field": "mask", "shift_labels": True},
        {"labels_across": True},
    ],
    ids=str,
)
def test_the_rows_of_a_batch_are_the_packs_of_the_plan_cut_to_its_length(folder: Path, options: dict[str, Any]) -> None:
    whole = epoch_of(packed_of(folder, LENGTH, **options))
    found = epoch_of(packed_of(folder, **options))
    assert len(found) == len(whole)
    is_cut = 0
    for number, (batch, packs) in enumerate(zip(found, whole, strict=True)):
        length = length_at(number * SIZE)
        each = LENGTH // length
        if each == 1:
            assert same_batch(batch, packs)
            continue
        due = []
        for row in range(len(packs["input_ids"])):
            documents = documents_of(row, packs, options.get("mask_field"))
            pieces = laid_out(documents, length, each, options.get("multiple", 1)) if each > 1 else [documents]
            is_cut += sum(map(len, pieces)) - len(documents)
            due += [row_of(one, length, options) for one in pieces]
        check_rows(batch, due, length, options.get("max_docs"))
    assert is_cut
    both = [np.sort(np.concatenate([real_tokens(batch) for batch in batches])) for batches in (found, whole)]
    assert np.array_equal(*both)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_threads": 2}, {"prefetch_factor": 1}], ids=str)
def test_batches_do_not_depend_on_who_builds_them(folder: Path, options: dict[str, Any]) -> None:
    whole = epoch_of(packed_of(folder))
    assert [len(batch["input_ids"]) for batch in whole[::10]][:4] == [32, 32, 16, 16]
    for number, batch in enumerate(epoch_of(packed_of(folder), **options)):
        assert same_batch(batch, whole[number])


def rows_of(packed: Any, world: int, state: Any = None, **options: Any) -> list[list[list[int]]]:
    """The rows of each global batch, of all ranks together."""
    ranks = [epoch_of(packed, world, rank, state, **options) for rank in range(world)]
    return [[row for part in parts for row in part["input_ids"].tolist()] for parts in zip(*ranks, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 3, 4])
def test_global_batches_are_the_same_on_any_world(folder: Path, world: int) -> None:
    assert rows_of(packed_of(folder), world) == rows_of(packed_of(folder), 1)


@pytest.mark.thorough
def test_a_run_goes_on_behind_any_batch_on_any_world(folder: Path) -> None:
    packed = packed_of(folder)
    whole = rows_of(packed, 1)
    with loader_of(packed, num_threads=0) as loader:
        states = [loader.state_dict() for _ in loader]
    for number in (0, 11, 12, 13, 37, 38, 60):
        assert states[number]["lengths"] == "[[0, 16], [100, 32], [300, 64]]"
        assert rows_of(packed_of(folder), 1 + number % 3, json.loads(json.dumps(states[number]))) == whole[number + 1 :]


@pytest.mark.thorough
def test_a_mesh_that_changes_goes_on_across_a_change_of_length(folder: Path) -> None:
    packed = packed_of(folder)
    whole = rows_of(packed, 1)
    loaders = [loader_of(packed, rank, 4, num_threads=0) for rank in range(4)]
    for loader in loaders:
        for _ in islice(loader, 11):
            pass
    state = loaders[0].state_dict()
    parts = []
    for rank, loader in enumerate(loaders[:2]):
        loader.remesh(rank, 2, at=state)
        parts.append([batch["input_ids"].tolist() for batch in loader])
    assert [[row for part in both for row in part] for both in zip(*parts, strict=True)] == whole[11:]
    for loader in loaders:
        loader.close()


def test_lengths_follow_the_run_over_epochs_and_with_batches_that_grow(folder: Path) -> None:
    schedule, ramp = Schedule.steps({0: 16, 550: 64, 700: 32}), Schedule.steps({0: 4, 100: 8, 560: 16, 690: 24})
    packed, plain = packed_of(folder, schedule), packed_of(folder, LENGTH)

    def run(dataset: Any) -> list[Any]:
        with DataLoader(dataset, global_batch_size=ramp, num_threads=0, last_batch="partial") as loader:
            return [(loader.epoch, batch) for _ in range(2) for batch in loader]

    row, seen = 0, set()
    for (_, batch), (_, packs) in zip(run(packed), run(plain), strict=True):
        epoch, within = divmod(row, len(packed))
        length = length_at(row, schedule)
        seen.add((epoch, length, len(packs["input_ids"])))
        assert batch["input_ids"].shape == (len(packs["input_ids"]) * LENGTH // length, length)
        assert np.array_equal(np.sort(real_tokens(batch)), np.sort(real_tokens(packs)))
        row += min(int(ramp.at(row)), len(packed) - within)  # type: ignore[call-overload]
    assert {(epoch, length) for epoch, length, _ in seen} >= {(0, 16), (0, 64), (1, 64), (1, 32)}
    assert len({size for _, length, size in seen if length == 32}) >= 2


@pytest.mark.thorough
def test_packs_of_a_mixture_grow_together_and_weights_may_change(tmp_path: Path) -> None:
    for number, name in enumerate(("web", "code")):
        write(tmp_path / name, first=100_000 * number, num_docs=400, seed=number)

    def mixed(length: Any) -> Mixture:
        sources = {name: packed_of(tmp_path / name, length) for name in ("web", "code")}
        return Mixture(sources, weights={"web": 3, "code": 1}, quotas="exact")

    def take(length: Any) -> list[Any]:
        with loader_of(mixed(length), num_threads=0) as loader:
            found = list(islice(loader, 20))
            loader.set_weights({"web": 1, "code": 1}, at=480)
            return found + list(islice(loader, 60))

    schedule = Schedule.steps({0: 32, 200: 16, 500: 64})
    for number, (batch, packs) in enumerate(zip(take(schedule), take(LENGTH), strict=True)):
        each = LENGTH // length_at(number * SIZE, schedule)
        assert batch["input_ids"].shape == (SIZE * each, LENGTH // each)
        assert batch["__source__"] == [name for name in packs["__source__"] for _ in range(each)]
        assert torch.equal(batch["source_ids"], packs["source_ids"].repeat_interleave(each))
        assert np.array_equal(np.sort(real_tokens(batch)), np.sort(real_tokens(packs)))
    with pytest.raises(
        ConfigError, match=r"Packed 'code' has length=Schedule.steps\({0: 16, .*but 'web' has length=64"
    ):
        Mixture({"web": packed_of(tmp_path / "web", LENGTH), "code": packed_of(tmp_path / "code")})


@pytest.mark.parametrize("world", [1, 3])
def test_rows_that_fill_the_last_batch_do_not_count(folder: Path, world: int) -> None:
    schedule = Schedule.steps({0: 64, 8: 16})
    packed = packed_of(folder, schedule)
    parts = []
    for rank in range(world):
        mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
        with DataLoader(packed, global_batch_size=24, device_mesh=mesh, last_batch="pad", num_threads=0) as loader:
            parts.append(list(loader))
    assert all(len(batch["__valid__"]) == len(batch["input_ids"]) for part in parts for batch in part)
    for part in parts:
        assert (part[-1]["labels"][~part[-1]["__valid__"]] == -100).all()
    valid = [int(sum(part[number]["__valid__"].sum() for part in parts)) for number in range(len(parts[0]))]
    assert valid == [24, *[24 * 4] * (len(valid) - 2), len(packed) % 24 * 4]
    tokens = sum(part[number]["num_tokens"] for part in parts for number in range(len(valid)))
    assert tokens == packed.num_tokens


def test_a_rank_without_rows_gets_the_shape_of_the_batch(folder: Path) -> None:
    packed = packed_of(folder, Schedule.steps({0: 64, 8: 16}), max_docs=9)
    parts = [epoch_of(packed, 2, rank, size=8, epoch_size=9) for rank in range(2)]
    assert [part[1]["input_ids"].shape for part in parts] == [(0, 16), (4, 16)]
    assert [part[1]["cu_seqlens"].shape for part in parts] == [(1,), (4 * 10 + 1,)]


@pytest.mark.thorough
def test_a_document_that_cannot_be_read_is_padding_in_all_its_rows(folder: Path, tmp_path: Path) -> None:
    key = "000003"  # of LENGTH + 1 tokens
    options = {"on_error": "skip", "max_bad_samples": 1.0}
    bad = packed_of(damaged(folder, tmp_path / "bad", key), dataset=options)
    with loader_of(bad, num_threads=0) as loader:
        found = list(loader)
        num_bad = loader.metrics()["bad_samples"]
    whole = epoch_of(packed_of(folder))
    keys_of = [{one for batch in epoch for keys in batch["__key__"] for one in keys} for epoch in (whole, found)]
    lost = keys_of[0] - keys_of[1]  # all that shares a checksum with it
    assert key in lost
    assert num_bad == len(lost)  # once each, in however many rows they are
    for batch, good in zip(found, whole, strict=True):
        assert batch["input_ids"].shape == good["input_ids"].shape
        assert batch["__key__"] == [[one for one in keys if one not in lost] for keys in good["__key__"]]
        has_none = torch.tensor([bool(keys) and lost.issuperset(keys) for keys in good["__key__"]])
        assert torch.equal(batch["__valid__"], ~has_none)
        had = torch.tensor([not lost.isdisjoint(keys) for keys in good["__key__"]])
        assert torch.equal(batch["input_ids"][~had], good["input_ids"][~had])
        assert (batch["num_tokens"] < good["num_tokens"]) == bool(had.any())
    with pytest.raises(DataError, match="CRC32C"):
        epoch_of(packed_of(tmp_path / "bad", dataset={"on_error": "raise"}))


@pytest.mark.thorough
def test_a_function_gets_one_row_after_the_other(folder: Path) -> None:
    whole = epoch_of(packed_of(folder))
    for number, rows in enumerate(epoch_of(packed_of(folder), collate_fn=list)):
        assert torch.equal(torch.stack([row["input_ids"] for row in rows]), whole[number]["input_ids"])
        assert [row["__key__"] for row in rows] == whole[number]["__key__"]
    packed = packed_of(folder, Schedule.steps({0: 64, 8: 16}))
    with DataLoader(packed, 64, collate_fn=list, last_batch="pad", num_threads=0) as loader:
        assert [row["__valid__"] for row in list(loader)[-1]].count(True) == len(packed) % 64 * 4


# --- ranks ---


def cost(lengths: Any) -> int:
    return int((lengths**2).sum())


def test_a_rank_has_its_dearest_packs_first_and_ranks_may_exchange_rows(folder: Path) -> None:
    packed = packed_of(folder)
    dealt = epoch_of(packed, size=16)
    for batch, plain in zip(epoch_of(packed, size=16, balance="local", cost=cost), dealt, strict=True):
        costs = [sum(map(cost, rows)) for rows in lengths_of(batch, LENGTH // batch["input_ids"].shape[1])]
        assert costs == sorted(costs, reverse=True)
        assert sorted(batch["input_ids"].tolist()) == sorted(plain["input_ids"].tolist())
    for batch, plain in zip(epoch_of(packed, size=16, balance="exchange", cost=cost), dealt, strict=True):
        costs = [sum(map(cost, rows)) for rows in lengths_of(batch, 1)]
        assert costs == sorted(costs, reverse=True)
        assert sorted(batch["input_ids"].tolist()) == sorted(plain["input_ids"].tolist())
        assert {name: value.shape for name, value in batch.items() if name in ("labels", "position_ids")} == {
            name: plain[name].shape for name in ("labels", "position_ids")
        }


@pytest.mark.thorough
def test_ranks_exchange_rows_of_the_global_batch(folder: Path, play: Play) -> None:
    packed = packed_of(folder)

    def run(mesh: DeviceMesh) -> list[Any]:
        with DataLoader(packed, global_batch_size=16, device_mesh=mesh, balance="exchange", cost=cost, num_threads=0,
                        last_batch="pad") as loader:  # fmt: skip
            return list(loader)

    ranks = play(run, dp_size=2)
    dealt = epoch_of(packed, size=16)[:-1]  # the last one has rows that do not count, and stays as it is
    moved = 0
    for number, plain in enumerate(dealt):
        rows = [part[number]["input_ids"].tolist() for part in ranks]
        assert sorted(row for part in rows for row in part) == sorted(plain["input_ids"].tolist())
        moved += rows[0] != plain["input_ids"].tolist()[: len(rows[0])]
    assert moved


def lengths_of(batch: Any, each: int) -> list[list[Any]]:
    """Lengths of the pieces in each row, by pack of ``each`` rows."""
    found = []
    for documents in batch["document_ids"]:
        numbers = documents[documents >= 0].numpy()
        found.append(np.bincount(numbers) if len(numbers) else np.zeros(0, np.int64))
    return [found[at : at + each] for at in range(0, len(found), each)]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_of_every_length_are_cut_for_context_parallel_ranks(folder: Path, layout: Any) -> None:
    fields = ("input_ids", "position_ids")
    for borders in (None, "cu_seqlens"):
        packed = packed_of(folder, multiple=4)
        whole = epoch_of(packed)
        wanted = SequenceSlice(fields=fields, layout=layout, borders=borders)
        parts = []
        for rank in range(2):
            mesh = DeviceMesh.from_sizes(cp_size=2, rank=rank)
            with DataLoader(
                packed, SIZE, device_mesh=mesh, sequence=wanted, num_threads=0, last_batch="partial"
            ) as one:
                parts.append(list(one))
        for number, batch in enumerate(whole):
            halves = [part[number]["input_ids"] for part in parts]
            assert [half.shape for half in halves] == [(len(batch["input_ids"]), batch["input_ids"].shape[1] // 2)] * 2
            both = torch.cat(halves, 1).sort().values
            assert torch.equal(both, batch["input_ids"].sort().values)
    mesh = DeviceMesh.from_sizes(cp_size=4, rank=0)
    with pytest.raises(ConfigError, match=r"rows of 2 tokens, which come from row 0 on.*multiple of 8"):
        DataLoader(packed_of(folder, Schedule.steps({0: 2, 9: 64})), SIZE, device_mesh=mesh,
                   sequence=SequenceSlice(fields=fields, layout="zigzag"))  # fmt: skip


def test_stages_without_payload_count_the_same_rows(folder: Path) -> None:
    packed = packed_of(folder)
    stages = StageFields(first=("input_ids",), last=("labels",))
    counts = []
    for rank in range(3):
        mesh = DeviceMesh.from_sizes(pp_size=3, rank=rank)
        with DataLoader(packed, 24, device_mesh=mesh, stage_fields=stages, num_threads=0, last_batch="pad") as loader:
            counts.append([(batch["__num_samples__"], batch["__valid__"].tolist()) for batch in loader])
    assert counts[0] == counts[1] == counts[2]
    assert [count for count, _ in counts[0]][:6] == [96] * 5 + [48]


@pytest.mark.thorough
def test_one_rank_reads_for_its_replicas(folder: Path, play: Play) -> None:
    packed = packed_of(folder)

    def run(mesh: DeviceMesh) -> list[Any]:
        with DataLoader(packed, SIZE, device_mesh=mesh, replicate="broadcast", num_threads=0,
                        last_batch="partial") as loader:  # fmt: skip
            return list(loader)

    alone = epoch_of(packed)
    for found in play(run, tp_size=2):
        assert all(same_batch(*both) for both in zip(found, alone, strict=True))


# --- states, words ---


def said_of(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


def test_a_change_is_logged_and_words_show_the_schedule(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming")
    packed = packed_of(folder)
    assert "length=64, rows of 16 tokens from row 0 on, rows of 32 tokens from row 100 on, rows of 64" in repr(packed)
    with loader_of(packed, num_threads=0) as loader:
        assert "rows of 32 tokens from row 100 on" in repr(loader)
        for _ in loader:
            pass
    assert said_of(caplog, "before they had") == [
        "from row 104 batches have rows of 32 tokens; before they had rows of 16 tokens",
        "from row 304 batches have rows of 64 tokens; before they had rows of 32 tokens",
    ]
    (begun,) = said_of(caplog, "epoch 0 begins")
    assert begun.endswith("rows of 16 tokens, rows of 32 tokens from row 100 on, rows of 64 tokens from row 300 on")


def test_a_resume_with_other_lengths_keeps_the_packs_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streaming")
    plain = epoch_of(packed_of(folder, LENGTH))
    with loader_of(packed_of(folder), num_threads=0) as loader:
        for _ in islice(loader, 5):
            pass
        state = loader.state_dict()
    assert not said_of(caplog, "the length of rows changes")
    same = epoch_of(packed_of(folder, Schedule.steps({0: 64, 40: 16, 100: 32, 300: 64})), state=state)
    assert not said_of(caplog, "the length of rows changes")  # of what is past nothing comes again
    assert len(same) == len(plain) - 5
    other = packed_of(folder, LENGTH)
    with loader_of(other, num_threads=0) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["lengths"] == "[[0, 16], [40, 64]]"
        found = list(loader)
    assert all(same_batch(*both) for both in zip(found, plain[5:], strict=True))
    (said,) = said_of(caplog, "the length of rows changes at row 40")
    assert "the state had 16 from row 0 on, 32 from row 100 on, 64 from row 300 on; this loader has 64" in said
    with loader_of(other, num_threads=0) as loader:
        assert loader.state_dict()["lengths"] == "[[0, 64]]"
        loader.load_state_dict({**state, "lengths": None})
        assert loader.state_dict()["lengths"] == "[[0, 64]]"
    with DataLoader(StreamingDataset(folder), SIZE) as loader:
        assert loader.state_dict()["lengths"] is None


def test_packs_by_number_have_the_longest_length(folder: Path) -> None:
    growing, plain = packed_of(folder), packed_of(folder, LENGTH)
    assert (len(growing), growing.fingerprint, growing.counts) == (len(plain), plain.fingerprint, plain.counts)
    assert same_batch(growing[7], plain[7])


def test_a_schedule_of_one_length_is_that_length(folder: Path) -> None:
    one = packed_of(folder, Schedule.steps({0: LENGTH, 10: LENGTH}))
    assert repr(one) == repr(packed_of(folder, LENGTH))
    assert all(same_batch(*both) for both in zip(epoch_of(one), epoch_of(packed_of(folder, LENGTH)), strict=True))


STEPS = Schedule.steps({0: 16, 9: 64})


@pytest.mark.parametrize(
    ("length", "options", "words"),
    [
        ({0: 16, 9: 64}, {}, r"length: numbers by row are a schedule; write Schedule.steps\({0: 16, 9: 64}\)"),
        (Schedule.linear(16, 64, over=100), {}, r"length: expected an integer, or Schedule.steps of integers"),
        (Schedule.steps({0: 16, 9: 64.5}), {}, r"length: expected an integer, or Schedule.steps of integers"),
        (Schedule.steps({0: 0, 9: 64}), {}, r"length: expected an integer, or Schedule.steps of integers"),
        (Schedule.steps({0: {"web": 1}}), {}, r"length: expected an integer, or Schedule.steps of integers"),
        (Schedule.steps({0: 16, 9: 40}), {}, r"length: 16 from row 0 on: .*divisor of 40"),
        (Schedule.steps({0: 8, 5: 2, 9: 64}), {"multiple": 4}, r"length: 2 from row 5 on.*multiple of multiple=4"),
        (STEPS, {"padded": True}, r"padded=True: .*give length an integer, or leave padded out"),
        (STEPS, {"stride": 32}, r"stride=32: .*leave stride out"),
        (STEPS, {"budgets": {"tokens2": 5}}, r"budgets=.*leave budgets out"),
        (STEPS, {"padded": True, "field": None}, r"padded=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(folder: Path, length: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        packed_of(folder, length, **options)


def test_groups_of_samples_are_not_packed(folder: Path) -> None:
    for make in (
        lambda packed: Balanced(packed, by="tokens"),
        lambda packed: Curriculum(packed, metric="tokens", schedule=Schedule.root(0.5, 1.0, over=9)),
    ):
        with pytest.raises(ConfigError, match="StreamingDataset"):
            make(packed_of(folder))


def test_the_raw_share_of_a_rank_has_the_same_rows(folder: Path) -> None:
    fetcher = DeviceMeshFetcher(packed_of(folder), batch_size=SIZE, last_batch="partial")
    for samples, batch in zip(fetcher, epoch_of(packed_of(folder)), strict=True):
        assert torch.equal(torch.stack([sample["input_ids"] for sample in samples]), batch["input_ids"])
