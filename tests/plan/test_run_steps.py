"""``RunSteps``: where each step of a run stands, against a walk over all of its batches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.order.plan.sizes import RunSteps, Sizes

EPOCHS = 4


@st.composite
def runs(draw: st.DrawFn) -> RunSteps:
    epoch_size = draw(st.integers(1, 40))
    changes = draw(st.sets(st.integers(1, 3 * epoch_size), max_size=3))
    sizes = Sizes(tuple((row, draw(st.integers(1, 12))) for row in (0, *sorted(changes))))
    epoch = draw(st.integers(0, 2))
    return RunSteps(
        sizes=sizes, epoch_size=epoch_size, last_batch=draw(st.sampled_from(["drop", "partial", "pad"])), epoch=epoch,
        seen=draw(st.integers(0, epoch_size)),
    )  # fmt: skip


def walk(run: RunSteps, epoch: int, start: int = 0) -> list[int]:
    """Return the samples of the epoch before each batch from ``start`` on, and behind the last one."""
    borders = [start]
    while borders[-1] < run.epoch_size:
        size = run.sizes.at(epoch * run.epoch_size + borders[-1])
        if borders[-1] + size > run.epoch_size and run.last_batch == "drop":
            break
        borders.append(borders[-1] + size)
    return borders


def counts(run: RunSteps) -> list[int]:
    """Return the number of batches of each epoch; of the place's, if none ends there, some that nobody recorded."""
    found = [len(walk(run, epoch)) - 1 for epoch in range(EPOCHS)]
    if not run.fits:
        found[run.epoch] = run.begun + len(walk(run, run.epoch, run.seen)) - 1
    return found


@given(runs())
def test_steps_stand_where_a_walk_comes_to_them(run: RunSteps) -> None:
    borders = walk(RunSteps(sizes=run.sizes, epoch_size=run.epoch_size, last_batch="partial"), run.epoch)
    assert run.fits == (run.seen in borders or run.seen == run.epoch_size)
    assert run.begun == sum(one < run.seen for one in borders)
    found = counts(run)
    assert [run.count(epoch) for epoch in range(EPOCHS)] == found
    firsts = [sum(found[:epoch]) for epoch in range(EPOCHS + 1)]
    assert [run.first(epoch) for epoch in range(EPOCHS + 1)] == firsts
    for epoch, (first, stop) in enumerate(itertools.pairwise(firsts)):
        assert all(run.epoch_at(step) == (epoch, first) for step in range(first, stop))
    assert run.at == firsts[run.epoch] + run.begun
    assert list(run.unknown) == ([] if run.fits else list(range(firsts[run.epoch], run.at)))


def test_a_run_whose_epochs_fill_no_batch_ends() -> None:
    run = RunSteps(sizes=Sizes(((0, 4), (8, 99))), epoch_size=8, last_batch="drop")
    assert [run.epoch_at(step) for step in (0, 1)] == [(0, 0), (0, 0)]
    with pytest.raises(ConfigError, match="step 2: the run ends at step 2: no later epoch fills one batch"):
        run.epoch_at(2)
