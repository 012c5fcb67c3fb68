"""Random small sets, options, ranks and resumes, against what Python's own ``tarfile`` reads of the same files.

Every case is drawn from a seed and its number alone; a failure names both, and how to run that case by itself. The
normal run plays 100 cases, ``make matrix`` 300; ``--differential-cases`` (``make differential``) makes them as many as
you like.

Of each case: the order in which samples are due is checked against the promises (each once, the same batches on any
ranks); then the set is damaged, transforms drop and raise, and everything received is compared row by row with what
was due and with tarfile's bytes; then the same again, interrupted and resumed on another number of ranks.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streaming import ShuffleConfig, StreamingDataset
from streaming.shards.index.spans import SPAN_BYTES
from tests.support.models.differential_cases import (
    NUM_PARTS,
    WORKERS_EVERY,
    Case,
    DrawingTransform,
    Leg,
    Row,
    Transform,
    decodes,
    read_by_tarfile,
    rows_of,
    wanted_fields,
    write_set,
)
from tests.support.sets.data_sets import loaders
from tests.support.tiers import first_here


def draw_shuffle(dice: random.Random) -> bool | ShuffleConfig:
    if dice.random() < 0.5:
        return dice.random() < 0.5
    lanes, window = dice.choice((None, dice.randint(1, 12))), dice.choice((None, 0, dice.randint(1, 50)))
    return ShuffleConfig(lanes=lanes, window=window, scope=dice.choice(("global", "lane")))


def draw_case(seed: int, number: int, directory: Path) -> Case:
    dice = random.Random(f"{seed} {number}")
    write_set(directory, dice)
    known = read_by_tarfile(directory)
    view = slice(None)
    if dice.random() < 0.3:
        first = dice.randrange(len(known))
        view = slice(first, dice.randint(first + 1, len(known)))
    keys = list(known)[view]
    last_batch = dice.choice(("drop", "pad", "partial"))
    epoch_size = dice.choice((None, None, dice.randint(1, 3 * len(keys))))
    batch_size = dice.randint(1, min(24, epoch_size or len(keys)) if last_batch == "drop" else 24)
    present = sorted({name for one in known.values() for name in one.fields})
    case = Case(
        directory, dice, known, keys, view,
        data_options={
            "shuffle": draw_shuffle(dice), "seed": dice.randrange(9), "decode": dice.choice(("auto", "auto", None)),
            "fields": dice.choice((None, None, tuple(dice.sample(present, k=dice.randint(1, len(present)))))),
            "on_error": dice.choice(("substitute", "skip")),
        },
        options={
            "global_batch_size": batch_size, "last_batch": last_batch, "epoch_size": epoch_size,
            "prefetch_factor": dice.randint(1, 3),
        },
        num_epochs=dice.choice((1, 1, 2)),
        in_workers=number % WORKERS_EVERY == 1,
    )  # fmt: skip
    unreadable = {key for key in known if not decodes(case, key)}
    if case.data_options["decode"] == "auto" and case.spares(unreadable):
        case.bad |= unreadable
    else:
        case.data_options["decode"] = None
    draw_transform(case)
    return case


def draw_transform(case: Case) -> None:
    dice = case.dice
    dropped, raised = (
        frozenset(key for key in case.known if dice.random() < share)
        for share in (dice.choice((0, 0.2, 0.4)), dice.choice((0, 0.05)))
    )
    kind = dice.choice((None, Transform, DrawingTransform))
    if kind is not None and case.spares(dropped | raised):
        case.data_options["transform"] = kind(dropped, raised)
        case.bad |= raised
        case.dropped |= dropped - case.bad


def flip_a_byte(case: Case) -> None:
    """Damage a field of an indexed set: all samples under the same checksum, that of the chunk, are lost.

    One that is read: spans in which no sample has any of the fields asked for are left out, by their documentation.
    """
    keys, table = list(case.known), StreamingDataset(f"{case.directory}/").source.table
    assert int((table.byte_end - table.byte_start).max()) <= SPAN_BYTES, "each chunk is one span"
    places = [(key, name) for key in keys for name, data in wanted_fields(case, key).items() if data]
    if not places:
        return
    key, name = case.dice.choice(places)
    stops = np.cumsum(table.num_samples)
    chunk = int(np.searchsorted(stops, keys.index(key), side="right"))
    lost = set(keys[int(stops[chunk] - table.num_samples[chunk]) : int(stops[chunk])])
    if not case.spares(lost):
        return
    with (case.directory / case.known[key].shard).open("r+b") as file:
        file.seek(case.known[key].offsets[name])
        file.write(bytes([case.known[key].fields[name][0] ^ 1 << case.dice.randrange(8)]))
    case.bad |= lost
    case.dropped -= lost


def due_order(case: Case) -> list[list[str]]:
    """Keys of the rows of each global batch of every epoch, from an undamaged set read without decoding."""
    pads = case.options["last_batch"] == "pad"
    found: list[list[str]] = []
    dataset = case.open(decode=None, transform=None, on_error="raise")
    for loader in loaders(dataset, 1, num_threads=0, **case.options):
        for _ in range(case.num_epochs):
            for batch in loader:
                rows = rows_of(case, batch, decoded=False, masked=pads)
                size = sum(valid for _, valid, _ in rows)
                assert all(valid for _, valid, _ in rows[:size]), "padding comes last"
                found.append([key for key, _, _ in rows[:size]])
    assert list(map(len, found)) == case.batch_sizes * case.num_epochs
    check_once(case, found)
    return found


def check_once(case: Case, due: Sequence[Sequence[str]]) -> None:
    """Every pass over the data has each sample once; without a shuffle, in storage order."""
    num, per_epoch = len(case.keys), len(case.batch_sizes)
    seen, within_pass, at = Counter(dict.fromkeys(case.keys, 0)), Counter[tuple[int, str]](), 0
    for number, batch in enumerate(due):
        at = max(at, number // per_epoch * case.epoch_samples)  # last_batch="drop" leaves out an epoch's end
        if case.data_options["shuffle"] is False:
            assert list(batch) == [case.keys[position % num] for position in range(at, at + len(batch))]
        if at // num == (at + len(batch) - 1) // num:
            within_pass.update((at // num, key) for key in batch)
        at += len(batch)
        seen.update(batch)
        if number < per_epoch or case.options["last_batch"] != "drop":
            assert set(seen.values()) <= {at // num, -(-at // num)}
    assert seen.keys() == set(case.keys)
    assert set(within_pass.values()) <= {1}


def check_reference(case: Case, due: Sequence[Sequence[str]], batches: Sequence[Sequence[Row]]) -> None:
    """Row by row what was due; in place of a lost sample one of the view that can be had, masked under "skip"."""
    for keys, rows in zip(due, batches, strict=True):
        assert all(not valid for _, valid, _ in rows[len(keys) :])
        for expected, (key, valid, _) in zip(keys, rows, strict=False):
            if expected in case.lost:
                assert key in case.keys
                assert key not in case.lost
                assert valid == (case.data_options["on_error"] == "substitute")
            else:
                assert (key, valid) == (expected, True)


def check_losses(case: Case, due: Sequence[Sequence[str]], metrics: Mapping[str, Any]) -> None:
    """What the last epoch lost is listed or counted, and nothing else is."""
    keys = {key for batch in due[-len(case.batch_sizes) :] for key in batch}
    listed = [one["key"] for one in metrics["bad"]]
    assert len(listed) == len(set(listed))
    assert keys & case.bad <= set(listed) <= case.bad
    assert metrics["dropped_samples"] >= len(keys & case.dropped)
    assert case.dropped or not metrics["dropped_samples"]


def play_case(case: Case) -> None:
    due = due_order(case)
    dice = case.dice
    if (case.directory / "_shardstream").exists() and dice.random() < 0.5:
        flip_a_byte(case)
    calm = Leg.play(case, 1, 0, len(due))
    check_reference(case, due, calm.batches[0])
    check_losses(case, due, calm.metrics)
    most = min(5, case.options["global_batch_size"])
    if case.options["last_batch"] != "pad":
        most = min(most, case.epoch_samples)  # a rank without a sample in the whole epoch is refused
    stop = dice.randint(0, len(due))
    before = Leg.play(case, dice.randint(1, most), 0, stop)
    after = Leg.play(case, dice.randint(1, most), stop, len(due), before.state)
    assert before.merged(case) + after.merged(case) == calm.merged(case)


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", first_here(range(NUM_PARTS), 2))
def test_random_cases_against_tarfile(
    part: int, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="streaming")  # every lost sample is told of
    seed, first, count = (int(request.config.getoption(f"--differential-{x}")) for x in ("seed", "first", "cases"))
    for number in range(first + part, first + count, NUM_PARTS):
        directory = tmp_path / f"{number}"
        try:
            play_case(draw_case(seed, number, directory))
        except Exception as error:
            error.add_note(
                f"case {number} of seed {seed}; to run it alone: pytest -n 0 tests/histories/test_differential.py "
                f"--differential-seed {seed} --differential-first {number} --differential-cases 1"
            )
            raise
        shutil.rmtree(directory)
