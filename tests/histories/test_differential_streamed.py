"""Random sets without an index, streamed, against ``tarfile``: ``test_differential.py`` for what such sets promise.

Of each case: every rank gets the same number of batches; without a shuffle each rank goes through every R-th shard in
storage order, over and over; with one, nothing comes before it was read, and no more stays behind than the window
holds. In place of a sample that cannot be had comes one of the same batch of its rank, or that is masked. An epoch that
is interrupted goes on, on as many ranks, with the same rows, drawn numbers included; so does the next epoch.
"""

from __future__ import annotations

import gzip
import logging
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pytest

from streaming import ShuffleConfig
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
    write_set,
)
from tests.support.sets.data_sets import loaders
from tests.support.tiers import first_here

STREAMS_EVERY = 5
"""Of so many cases that ``--differential-cases`` asks for one is played here."""

Due = list[list[list[str]]]
"""Keys by rank, batch and row, without padding."""


def draw_stream(seed: int, number: int, directory: Path) -> Case:
    dice = random.Random(f"stream {seed} {number}")
    write_set(directory, dice)
    shutil.rmtree(directory / "_shardstream", ignore_errors=True)
    by_shard = Counter(known.shard for known in read_by_tarfile(directory).values())
    for path in sorted(directory.glob("*.tar")):
        if path.name not in by_shard:
            path.unlink()  # a rank all of whose shards are empty is refused
        elif dice.random() < 0.5:
            path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    known = read_by_tarfile(directory)
    shards = {one.shard for one in known.values()}
    in_all = set.intersection(
        *({name for one in known.values() if one.shard == shard for name in one.fields} for shard in shards)
    )  # what is in no sample of the first shard that a rank reads is refused
    epoch_size = dice.randint(1, 3 * len(known))
    last_batch = dice.choice(("drop", "pad", "partial"))
    window = dice.choice((0, 1, dice.randint(2, 50)))  # the default reads 4,096 samples of a tiny set, over and over
    return Case(
        directory, dice, known, list(known), slice(None),
        data_options={
            "shuffle": dice.choice((False, ShuffleConfig(window=window))), "seed": dice.randrange(9),
            "decode": dice.choice(("auto", "auto", None)),
            "fields": dice.choice((None, tuple(sorted(in_all)[: dice.randint(1, 4)]))) or None,
            "on_error": dice.choice(("substitute", "skip")),
        },
        options={
            "global_batch_size": dice.randint(1, min(24, epoch_size) if last_batch == "drop" else 24),
            "last_batch": last_batch, "epoch_size": epoch_size, "prefetch_factor": dice.randint(1, 3),
        },
        num_epochs=dice.choice((1, 1, 2)),
        in_workers=number % WORKERS_EVERY == 1,
    )  # fmt: skip


def due_rows(case: Case, world_size: int) -> Due:
    """What each rank gets of the undamaged set, read without decoding."""
    pads = case.options["last_batch"] == "pad"
    found: Due = []
    for loader in loaders(case.open(decode=None, on_error="raise"), world_size, num_threads=0, **case.options):
        batches = [batch for _ in range(case.num_epochs) for batch in loader]
        assert len(batches) == case.num_epochs * len(case.batch_sizes)
        rows = [rows_of(case, batch, decoded=False, masked=pads) for batch in batches]
        found.append([[key for key, valid, _ in batch if valid] for batch in rows])
    for number, shares in enumerate(zip(*found, strict=True)):
        assert sum(map(len, shares)) == case.batch_sizes[number % len(case.batch_sizes)]
    return found


def check_order(case: Case, due: Due) -> None:
    """What a rank gets in each epoch, against the shards that it reads."""
    per_epoch, shuffle = len(case.batch_sizes), case.data_options["shuffle"]
    shards = sorted({one.shard for one in case.known.values()})
    window = getattr(shuffle, "window", 0)
    for rank, batches in enumerate(due):
        for first in range(0, len(batches), per_epoch):
            keys = list(chain.from_iterable(batches[first : first + per_epoch]))
            if shuffle is False:
                turns = (shards[place % len(shards)] for place in count(rank, len(due)))
                stream = (key for shard in turns for key in case.keys if case.known[key].shard == shard)
                assert keys == list(islice(stream, len(keys)))
            elif len(due) == 1:
                times, whole = Counter(keys), len(keys) // len(case.keys)
                assert max(times.values(), default=0) <= -(-(len(keys) + window) // len(case.keys))
                assert sum(max(0, whole - times[key]) for key in case.keys) <= window


def damage(case: Case, due: Due) -> None:
    """Draw what cannot be had: not all of any batch of a rank, whose rows stand in for each other."""
    batches = [set(keys) for rank in due for keys in rank if keys]
    unreadable = {key for key in case.known if not decodes(case, key)}
    if case.data_options["decode"] == "auto" and not any(keys <= unreadable for keys in batches):
        case.bad |= unreadable
    else:
        case.data_options["decode"] = None
    dice = case.dice
    kind: Any = dice.choice((None, Transform, DrawingTransform))
    if kind is None:
        return
    shares = dice.choice((0, 0.2, 0.4)), dice.choice((0, 0.05))
    dropped, raised = ({key for key in case.known if dice.random() < share} for share in shares)
    for keys in batches:
        if keys <= dropped | raised | case.bad:
            kept = min(keys - case.bad)
            dropped.discard(kept)
            raised.discard(kept)
    case.data_options["transform"] = kind(frozenset(dropped), frozenset(raised))
    case.bad |= raised
    case.dropped |= dropped - case.bad


def check_rank(case: Case, due: Sequence[Sequence[str]], batches: Sequence[Sequence[Row]]) -> None:
    """Row by row what was due; in place of a lost sample another one of the batch, masked under "skip"."""
    for keys, rows in zip(due, batches, strict=True):
        assert all(not valid for _, valid, _ in rows[len(keys) :])
        for expected, (key, valid, _) in zip(keys, rows, strict=False):
            if expected in case.lost:
                assert key in set(keys) - case.lost
                assert valid == (case.data_options["on_error"] == "substitute")
            else:
                assert (key, valid) == (expected, True)


def play_stream(case: Case) -> None:
    most = min(5, case.options["global_batch_size"])
    if case.options["last_batch"] != "pad":
        most = min(most, case.epoch_samples)  # a rank without a sample in the whole epoch is refused
    world_size = case.dice.randint(1, most)
    due = due_rows(case, world_size)
    check_order(case, due)
    damage(case, due)
    num_batches = len(due[0])
    calm = Leg.play(case, world_size, 0, num_batches)
    for wanted, found in zip(due, calm.batches, strict=True):
        check_rank(case, wanted, found)
    stop = case.dice.randint(0, num_batches)
    before = Leg.play(case, world_size, 0, stop)
    after = Leg.play(case, world_size, stop, num_batches, before.state)
    assert [one + other for one, other in zip(before.batches, after.batches, strict=True)] == calm.batches


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", first_here(range(NUM_PARTS), 2))
def test_random_streams_against_tarfile(
    part: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    not_scanned: None,
) -> None:
    caplog.set_level(logging.ERROR, logger="streaming")  # every lost sample is told of
    seed, first, cases = (int(request.config.getoption(f"--differential-{x}")) for x in ("seed", "first", "cases"))
    for number in range(first + part, first + max(1, cases // STREAMS_EVERY), NUM_PARTS):
        directory = tmp_path / f"{number}"
        try:
            play_stream(draw_stream(seed, number, directory))
        except Exception as error:
            error.add_note(
                f"stream {number} of seed {seed}; to run it alone: pytest -n 0 "
                "tests/histories/test_differential_streamed.py "
                f"--differential-seed {seed} --differential-first {number} --differential-cases 1"
            )
            raise
        shutil.rmtree(directory)
