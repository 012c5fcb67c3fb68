"""The recipe for TorchTitan: killed inside a step and on its first batch, on one, two, three and six ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.forked import Forked
from tests.support.programs.recipes import MOST_LINES, Leg, Player, Recipe, check
from tests.support.sets.packed_sets import write
from tests.support.tiers import first_here

RECIPE = Recipe("torchtitan")
STEPS = 11
"""Seven of them are an epoch."""
LEGS = (
    (Leg(2, (3, 4)), Leg(3)),
    (Leg(3, (1, 1)), Leg(2, (5, 6)), Leg(6, (8, 1)), Leg(1)),
    (Leg(1, (7, 5)), Leg(2, (7, 1)), Leg(3)),
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    write(folder / "tokens", num_docs=400)
    return folder


def test_it_is_short() -> None:
    assert RECIPE.num_lines() <= MOST_LINES


@pytest.mark.parametrize("legs", first_here(LEGS, 1))
def test_killed_and_resumed_elsewhere(forked: Forked, bucket: Path, tmp_path: Path, legs: tuple[Leg, ...]) -> None:
    check(Player(forked, RECIPE, bucket, STEPS), legs, tmp_path / "run")


@pytest.mark.thorough
def test_the_program_runs_as_it_is(forked: Forked, bucket: Path, tmp_path: Path) -> None:
    assert len(Player(forked, RECIPE, bucket, STEPS).play([Leg(2)], tmp_path / "own", own=True)) == STEPS
