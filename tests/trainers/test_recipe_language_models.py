"""The recipes for programs that pretrain language models: the same rows a step, killed anywhere, on any ranks.

A step of each program has 24 rows of 64 tokens, in micro-batches of two rows where the program accumulates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.processes.forked import Forked
from tests.support.programs.recipes import MOST_LINES, Leg, Player, Recipe, Step, check, no_row_twice
from tests.support.sets.packed_sets import write
from tests.support.tiers import first_here

NANOGPT, NANOCHAT, TORCHTITAN = Recipe("nanogpt"), Recipe("nanochat"), Recipe("torchtitan")
OLMO_CORE, LITGPT = Recipe("olmo-core"), Recipe("litgpt")
RECIPES = [pytest.param(one, id=one.name) for one in (NANOGPT, NANOCHAT, TORCHTITAN, OLMO_CORE, LITGPT)]
STEPS, STEPS_PER_EPOCH = 9, 5
COUNTS_FROM = {NANOCHAT: 0, OLMO_CORE: 1}
"""The first epoch, of the programs that count and save it; others count steps alone."""
LEGS = (
    (Leg(2, (3, 1)), Leg(2, (6, 1)), Leg(3)),  # a place inside a step counts on as many ranks only
    (Leg(3, (1, 1)), Leg(2, (5, 1)), Leg(6, (7, 1)), Leg(1)),
    (Leg(1, (5, 1)), Leg(2, (5, 1)), Leg(3)),
)
INSIDE = 2
"""Programs that accumulate are killed so many micro-batches later, inside a step."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    for name in ("tokens", "train", "val"):
        write(folder / name, num_docs=300)
    return folder


def killed_inside(legs: tuple[Leg, ...]) -> list[Leg]:
    return [leg if leg.kill is None else replace(leg, kill=(leg.kill[0], leg.kill[1] + INSIDE - 1)) for leg in legs]


def one_epoch(recipe: Recipe, steps: list[Step]) -> None:
    """The program counts epochs as it does, or not at all; none has a row twice."""
    first = COUNTS_FROM.get(recipe)
    assert [step.epoch for step in steps] == [
        None if first is None else first + number // STEPS_PER_EPOCH for number in range(STEPS)
    ]
    for begin in range(0, STEPS, STEPS_PER_EPOCH):
        no_row_twice(steps[begin : begin + STEPS_PER_EPOCH])


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_short(recipe: Recipe) -> None:
    assert recipe.num_lines() <= MOST_LINES


@pytest.mark.parametrize("legs", first_here(LEGS, 1), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_and_resumed_elsewhere(
    forked: Forked, bucket: Path, tmp_path: Path, recipe: Recipe, legs: tuple[Leg, ...]
) -> None:
    played = [*legs] if recipe is OLMO_CORE else killed_inside(legs)
    check(Player(forked, recipe, bucket, STEPS), played, tmp_path / "run", each_once=partial(one_epoch, recipe))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_program_runs_as_it_is(forked: Forked, bucket: Path, tmp_path: Path, recipe: Recipe) -> None:
    assert len(Player(forked, recipe, bucket, STEPS).play([Leg(2)], tmp_path / "own", own=True)) == STEPS
