"""`shard_tools plan` of every kind of set against what loaders deliver: totals, memory, ``--who`` and ``--when``.

A case is one of ``history_cases``: a tree of data sets, options of the loader, a world. Training builds it in Python;
the tool gets it as a user would describe it, by arguments or by a ``mixture.json``. What the tool says of a run, by a
state of its middle, is compared row by row with what all ranks got, before the state and after a resume with other
ranks and, without a ramp, another batch size.

The normal run plays 15 cases, ``--differential-cases 200`` that many and more; a failure names the case.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from streaming import Mixture
from streaming.errors import ConfigError, MemoryLimitError
from tests.support.models.drawn_sets import make
from tests.support.models.history_cases import Case
from tests.support.models.history_sets import Pools
from tests.support.models.planned_cases import Row, World, as_arguments, drawn

pytestmark = pytest.mark.thorough

NUM_PARTS = 3


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Pools:
    return Pools(tmp_path_factory.mktemp("plans") / "pools")


# --- the tool


def size_option(size: Any) -> list[str]:
    text = ",".join(f"{row}:{one}" for row, one in size.items()) if isinstance(size, dict) else str(size)
    return ["--global-batch-size", text]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments], prog_name="shard_tools")


def told(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def said(report: dict[str, Any]) -> Counter[Row]:
    """The rows of a report."""
    return Counter(
        (row["step"], row["dp_rank"], row["source"], tuple(row["keys"]) if "keys" in row else row["key"])
        for row in report["rows"]
    )


# --- the judge


def judge(case: Case, folder: Path, tmp_path: Path, number: int) -> str:
    """Compare a case: "same", or "refused" by both."""
    dice = random.Random(f"judge/{number}")
    file, saved = folder / f"{tmp_path.name}.json", tmp_path / "state.json"
    described, order = as_arguments(case["spec"], folder, file)
    size, options = case["options"]["global_batch_size"], case["options"]
    shape = [*size_option(size), "--last-batch", options["last_batch"]]
    epoch_size = ["--epoch-size", str(options["epoch_size"])] if "epoch_size" in options else []
    limit = ["--memory-limit", options["memory_limit"]] if "memory_limit" in options else []
    most = min(size.values()) if isinstance(size, dict) else size
    num_ranks = min(case["ranks"], most)
    whole = [*described, *order, *shape, *epoch_size, *limit, "--dp", str(num_ranks)]
    world = None
    try:
        try:
            dataset = make(folder, case["spec"])
            world = World(case, dataset, num_ranks, size)
            first = world.step(0)
        except MemoryLimitError:
            check_refusal(told(*whole), case, dataset, num_ranks, size)
            return "refused"
        except ConfigError:
            result = run(*whole)
            assert isinstance(result.exception, SystemExit), result.exception
            assert result.exit_code in (1, 2), result.output
            return "refused"
        report = told(*whole)
        assert not [one for one in report["warnings"] if "refuse this:" in one]
        rows, num_batches, metrics = play(world, first or [], case["steps"])
        check_plan(report, rows, num_batches, metrics, dataset)
        state = world.ranks[0].state_dict()
        saved.write_text(json.dumps(state))
        asked = [*described, *shape, "--dp", str(num_ranks), "--state", str(saved)]
        check_run(asked, rows, dice)
        described += ["--last-batch", options["last_batch"]]
        check_resume(case, dataset, described, state, rows, dice, saved)
    finally:
        if world is not None:
            world.close()
    return "same"


def play(world: World, first: list[Row], most: int) -> tuple[list[Row], int | None, list[dict[str, Any]]]:
    """Play so many steps of up to two epochs; return all rows, the batches of the first epoch, and metrics after it."""
    rows, step, ends, metrics = list(first), 1, list[int](), list[dict[str, Any]]()
    while step < most and len(ends) < 2:
        try:
            found = world.step(step)
        except MemoryLimitError:  # a later epoch needs more at once than the first, which is planned
            assert ends
            break
        if found is not None:
            rows, step = rows + found, step + 1
            continue
        ends.append(step)
        metrics = metrics or [rank.metrics() for rank in world.ranks]
    if ends:
        return rows, ends[0], metrics
    return rows, None, [rank.metrics() for rank in world.ranks]


def check_refusal(report: dict[str, Any], case: Case, dataset: Any, num_ranks: int, size: Any) -> None:
    """The tool warns of what training refuses, and names a limit that is enough."""
    assert [one for one in report["warnings"] if "refuse this:" in one], report["warnings"]
    enough = {**case, "options": {**case["options"], "memory_limit": report["needed_limit_bytes"]}}
    world = World(enough, dataset, num_ranks, size)
    try:
        world.step(0)
    finally:
        world.close()


def check_plan(
    report: dict[str, Any], rows: list[Row], num_batches: int | None, metrics: list[dict[str, Any]], dataset: Any
) -> None:
    """Totals and memory of the first epoch; ``num_batches`` None: it was not played to its end."""
    assert report["num_samples"] == int(dataset.source.chunk_samples.sum())
    assert ("packs" in report) == dataset.source.is_packed
    for found, load in zip(metrics, report["data_ranks"], strict=True):
        assert found["arena_limit_bytes"] <= load["limit_bytes"] * 1.1
        if report["ramp"] is None:  # else it is that of the last batches
            assert found["arena_limit_bytes"] == pytest.approx(load["limit_bytes"], rel=0.1)
        if num_batches is not None:
            assert found["arena_peak_bytes"] <= load["held_bytes"] * 1.1
        if num_batches is not None and load["keeps_all"]:
            assert found["arena_peak_bytes"] == pytest.approx(load["held_bytes"], rel=0.1)
    if num_batches is None:
        return
    assert report["num_batches"] == num_batches
    of_epoch = [row for row in rows if row[0] < num_batches]
    assert [one["num_samples"] for one in report["data_ranks"]] == [
        sum(row[1] == rank for row in of_epoch) for rank in range(len(metrics))
    ]
    if isinstance(dataset, Mixture) and report["has_end"]:
        shown, counts = dataset.source.shown_names, Counter[str]()
        for one in report["shares"]["sources"]:
            counts[shown[one["name"]] or ""] += one["drawn"]
        assert +counts == Counter(row[2] or "" for row in of_epoch)


def check_run(asked: list[str], rows: list[Row], dice: random.Random) -> None:
    """What was in the steps that were played, and when some of their samples came."""
    stop = 1 + max(row[0] for row in rows)
    assert said(told(*asked, "--who", "--step", f"0..{stop}")) == Counter(rows)
    for row in dice.sample(rows, min(2, len(rows))):
        key = dice.choice(row[3]) if isinstance(row[3], tuple) else row[3]
        found = told(*asked, "--when", "--key", key, "--step", f"0..{stop}", "--thorough")
        assert said(found) == Counter(
            one for one in rows if key == one[3] or (isinstance(one[3], tuple) and key in one[3])
        )


def check_resume(
    case: Case, dataset: Any, described: list[str], state: Any, rows: list[Row], dice: random.Random, saved: Path
) -> None:
    """On other ranks, with batches of another size if that is possible, the steps from the state on are these."""
    size, batches = case["options"]["global_batch_size"], case["spec"].get("options", {}).get("batches")
    if not isinstance(size, dict) and batches != "one_source" and dice.random() < 0.5:
        size = dice.choice((2, 3, 4, 7))
    num_ranks = dice.randint(1, min(case["ranks"], min(size.values()) if isinstance(size, dict) else size))
    asked = [*described, *size_option(size), "--dp", str(num_ranks), "--state", str(saved)]
    try:
        world = World(case, dataset, num_ranks, size, state)
    except ConfigError:  # such as an epoch that such a batch does not fit into
        assert run(*asked, "--who", "--step", "0").exit_code in (1, 2)
        return
    try:
        row = dice.choice(rows)
        key = row[3][0] if isinstance(row[3], tuple) else row[3]
        at = told(*asked, "--when", "--key", key)["at_step"]
        found, ends, step = list[Row](), 0, at
        while step < at + 12 and ends < 2:
            batch = world.step(step)
            ends, step = ends + (batch is None), step + (batch is not None)
            found += batch or []
    except MemoryLimitError:  # of fewer ranks
        return
    finally:
        world.close()
    assert said(told(*asked, "--who", "--step", f"{at}..{step}")) == Counter(found)


# --- tests


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_tool_says_what_loaders_deliver(
    part: int, pools: Pools, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="streaming")
    seed, first, cases = (int(request.config.getoption(f"--differential-{x}")) for x in ("seed", "first", "cases"))
    count = cases if cases not in (100, 300) else (15 if cases == 100 else 45)
    results = Counter[str]()
    for number in range(first + part, first + count, NUM_PARTS):
        folder, _ = pools.of(seed, number)
        case = drawn(seed, number, folder)
        try:
            results[judge(case, folder, tmp_path, number)] += 1
        except Exception as error:
            raise AssertionError(
                f"case {number} of seed {seed}: {error!r}; to run it alone: pytest -n 0 "
                "tests/shard_tools/test_plan_kinds.py "
                f"--differential-seed {seed} --differential-first {number} --differential-cases 1\n{json.dumps(case)}"
            ) from error
    print(f"plans against loaders: {dict(results)}")
    assert 2 * results["refused"] <= results.total() + 3, "else most of what is drawn is refused"


def test_memory_of_a_run_without_an_end_is_that_of_all_of_it(pools: Pools, tmp_path: Path) -> None:
    """A curriculum opens buckets behind the first pass, which is what else is shown."""
    folder, _ = pools.of(1, 0)
    case = drawn(7, 31, folder)
    assert (case["spec"]["kind"], case["options"]["memory_limit"]) == ("curriculum", "2MiB")
    assert judge(case, folder, tmp_path, 31) == "refused"
