"""The recipes for programs that train on pictures, sounds and both: the same rows a step, on any number of ranks.

A step of each program has twelve rows. Random crops are part of what is compared: a row is named by what it became.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.processes.forked import Forked
from tests.support.programs.recipes import MOST_LINES, Leg, Player, Recipe, Step, check, no_row_twice
from tests.support.sets.recipe_sets import write_rows
from tests.support.tiers import first_here

STEPS = 18


@dataclass(frozen=True)
class Case:
    """A recipe, and what its program does.

    Attributes:
        recipe: The recipe.
        folder: The folder of its set in the bucket.
        fields: The fields of its samples.
        steps_per_epoch: Steps of an epoch.
        counts_from: The number of the first epoch; None: no number is saved.
        saves_within: It saves after each step; else after each epoch.
        micro_batches: How many make a step.
    """

    recipe: Recipe
    folder: str
    fields: tuple[str, ...]
    steps_per_epoch: int = 6
    counts_from: int | None = 0
    saves_within: bool = True
    micro_batches: int = 1

    def legs(self, legs: tuple[Leg, ...]) -> list[Leg]:
        """The legs, with kills where the program has saved: within a step, or with the first step of an epoch."""
        if self.saves_within:
            return [leg if leg.kill is None else replace(leg, kill=(leg.kill[0], self.micro_batches)) for leg in legs]
        each = self.steps_per_epoch
        ends = [leg.kill if leg.kill is None else (leg.kill[0] // each * each, 1) for leg in legs]
        return [replace(leg, kill=kill) for leg, kill in zip(legs, ends, strict=True)]

    def check_epochs(self, steps: list[Step]) -> None:
        """Each epoch has each row once, in another order, and the number that the program gives it."""
        first = self.counts_from
        numbers = [None if first is None else first + number // self.steps_per_epoch for number in range(STEPS)]
        assert [step.epoch for step in steps] == numbers
        no_row_twice([replace(step, epoch=number // self.steps_per_epoch) for number, step in enumerate(steps)])


TIMM = Case(Recipe("timm"), "imagenet", ("jpg", "cls"))
MAE = Case(Recipe("mae", renamed=(("% 1000 == 999", "% 1 == 0"),)), "imagenet", ("jpg", "cls"))
SPEECHBRAIN = Case(Recipe("speechbrain", renamed=(("16_000", "8_000"),)), "speech", ("flac", "txt"), counts_from=1)
NANOVLM = Case(Recipe("nanovlm"), "vqa", ("jpg", "json"), counts_from=None, micro_batches=2)
OPEN_CLIP = Case(Recipe("open_clip"), "pairs", ("jpg", "txt"), steps_per_epoch=3, saves_within=False)
ULTRALYTICS = Case(Recipe("ultralytics"), "detect/train", ("jpg", "boxes"), saves_within=False)
DIFFUSERS = Case(Recipe("diffusers"), "captions", ("jpg", "txt"), micro_batches=2)
"""With Accelerate itself."""
ALL = (TIMM, MAE, SPEECHBRAIN, NANOVLM, OPEN_CLIP, ULTRALYTICS, DIFFUSERS)
LATER = {NANOVLM: pytest.mark.thorough, ULTRALYTICS: pytest.mark.thorough}
"""The first starts worker processes; of the second only the files are ours."""
CASES = [pytest.param(one, id=one.recipe.name, marks=LATER.get(one, ())) for one in ALL if one is not DIFFUSERS]
LEGS = (
    (Leg(2, (9, 1)), Leg(3)),
    (Leg(3, (6, 1)), Leg(2, (12, 1)), Leg(1, (17, 1)), Leg(2)),
    (Leg(1, (5, 1)), Leg(2, (7, 1)), Leg(3, (13, 1)), Leg(1)),
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    for name, fields in {case.folder: case.fields for case in ALL}.items():
        write_rows(folder / name, fields)
    return folder


@pytest.fixture(scope="module")
def with_accelerate(forked: Forked) -> Iterator[Forked]:
    environ = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    with Forked("accelerate", "datasets", "streaming.loader", environ=environ, base=forked) as ranks:
        yield ranks


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.recipe.name)
def test_it_is_short(case: Case) -> None:
    assert case.recipe.num_lines() <= MOST_LINES


@pytest.mark.parametrize("legs", first_here(LEGS, 1), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_elsewhere(
    forked: Forked, bucket: Path, tmp_path: Path, case: Case, legs: tuple[Leg, ...]
) -> None:
    player = Player(forked, case.recipe, bucket, STEPS)
    check(player, case.legs(legs), tmp_path / "run", each_once=case.check_epochs)


@pytest.mark.thorough
@pytest.mark.parametrize("legs", LEGS, ids=str)
def test_diffusers_killed_and_resumed_elsewhere(
    with_accelerate: Forked, bucket: Path, tmp_path: Path, legs: tuple[Leg, ...]
) -> None:
    player = Player(with_accelerate, DIFFUSERS.recipe, bucket, STEPS)
    check(player, DIFFUSERS.legs(legs), tmp_path / "run", each_once=DIFFUSERS.check_epochs)


IN_WORKERS = ('os.environ.get("WORKERS", "0")', '"2"')
MIXED = ('os.environ.get("MIXES")', '"1"')


@pytest.mark.thorough
@pytest.mark.parametrize("case", [TIMM, MAE, OPEN_CLIP, SPEECHBRAIN], ids=lambda case: case.recipe.name)
def test_in_worker_processes(forked: Forked, bucket: Path, tmp_path: Path, case: Case) -> None:
    """Samples are made by functions of the page, in other processes."""
    recipe = replace(case.recipe, renamed=(*case.recipe.renamed, IN_WORKERS))
    check(Player(forked, recipe, bucket, STEPS), case.legs(LEGS[0]), tmp_path / "run", each_once=case.check_epochs)


@pytest.mark.thorough
def test_timm_mixes_images(forked: Forked, bucket: Path, tmp_path: Path) -> None:
    """Pairs are drawn for each batch of a rank, so they are the same on as many ranks; the last epoch has none."""
    player = Player(forked, replace(TIMM.recipe, renamed=(MIXED,)), bucket, STEPS)
    whole = player.play([Leg(2)], tmp_path / "whole")
    found = player.play([Leg(2, (9, 1)), Leg(2, (12, 1)), Leg(2)], tmp_path / "legs")
    assert [step.rows for step in found] == [step.rows for step in whole]


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_the_program_runs_as_it_is(forked: Forked, bucket: Path, tmp_path: Path, case: Case) -> None:
    player = Player(forked, case.recipe, bucket, STEPS)
    assert len(player.play([Leg(2)], tmp_path / "own", own=True)) == STEPS


@pytest.mark.thorough
def test_diffusers_runs_as_it_is(with_accelerate: Forked, bucket: Path, tmp_path: Path) -> None:
    player = Player(with_accelerate, DIFFUSERS.recipe, bucket, STEPS)
    assert len(player.play([Leg(2)], tmp_path / "own", own=True)) == STEPS
