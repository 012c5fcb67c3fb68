"""The recipe for open_clip: killed on the first batches of epochs, where it saves, on one to four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.forked import Forked
from tests.support.programs.recipes import MOST_LINES, Leg, Player, Recipe, check
from tests.support.sets.recipe_sets import write_rows
from tests.support.tiers import first_here

RECIPE = Recipe("open_clip")
STEPS = 18
"""Three of them are an epoch, half of the set."""
LEGS = (
    (Leg(2, (6, 1)), Leg(3)),
    (Leg(3, (3, 1)), Leg(2, (9, 1)), Leg(1, (15, 1)), Leg(4)),
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    write_rows(folder / "pairs", ("jpg", "txt"))
    return folder


def test_it_is_short() -> None:
    assert RECIPE.num_lines() <= MOST_LINES


@pytest.mark.parametrize("legs", first_here(LEGS, 1))
def test_killed_and_resumed_elsewhere(forked: Forked, bucket: Path, tmp_path: Path, legs: tuple[Leg, ...]) -> None:
    check(Player(forked, RECIPE, bucket, STEPS), legs, tmp_path / "run")


@pytest.mark.thorough
def test_the_program_runs_as_it_is(forked: Forked, bucket: Path, tmp_path: Path) -> None:
    assert len(Player(forked, RECIPE, bucket, STEPS).play([Leg(2)], tmp_path / "own", own=True)) == STEPS
