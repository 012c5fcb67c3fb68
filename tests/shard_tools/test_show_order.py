"""The pages of the order: what a rank gets in a step, over HTTP, is what a real loader of that world delivers."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from streaming.errors import ConfigError
from tests.support.models.drawn_sets import make
from tests.support.models.history_cases import Case, leaves_of
from tests.support.models.history_sets import Pools
from tests.support.models.planned_cases import Row, World, as_file, drawn
from tests.support.servers.show_pages import Shown

pytestmark = pytest.mark.thorough

KINDS = (
    "plain", "stored", "filtered", "view", "joined", "mixture", "packs", "curriculum", "balanced", "grouped", "ramp",
)  # fmt: skip
NUM_CASES = 44
MOST_STEPS = 24
ORDER = ("shuffle", "seed")


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Pools:
    return Pools(tmp_path_factory.mktemp("order") / "pools")


# --- cases of every kind


def is_of(case: Case, kind: str) -> bool:
    """Whether a case is of a kind; one of several URLs is made of a plain one."""
    spec, sizes = case["spec"], case["options"]["global_batch_size"]
    leaf, is_leaf = next(leaves_of(spec))[1], spec["kind"] == "leaf"
    if leaf["name"] == "plain" and is_leaf:  # without an index, which has no order to show
        return False
    chosen = leaf["where"] or leaf["subset"] or "exclude" in leaf["options"]
    has_view = any("view" in one["options"] for _, one, _ in leaves_of(spec))
    return {
        "plain": is_leaf and not chosen and spec["shuffle"] is not False,
        "stored": is_leaf and spec["shuffle"] is False,
        "filtered": is_leaf and bool(chosen),
        "view": has_view,
        "joined": is_leaf and not chosen and not has_view and leaf["name"] == "many",
        "mixture": spec["kind"] == "mixture",
        "packs": any(above.get("kind") == "packed" for _, _, above in leaves_of(spec)),
        "curriculum": spec["kind"] == "curriculum",
        "balanced": spec["kind"] == "balanced",
        "grouped": spec["kind"] == "mixture"
        and any(above.get("kind") in ("balanced", "curriculum") for _, _, above in leaves_of(spec)),
        "ramp": isinstance(sizes, dict),
    }[kind]


def case_of(number: int, pools: Pools) -> tuple[Case, Path]:
    """A case, of each kind in turn, and the folder of its sets."""
    folder, _ = pools.of(33, 0)
    kind = KINDS[number % len(KINDS)]
    attempt = 1000 * number
    while not is_of(case := drawn(33, attempt, folder), kind) or not is_possible(case, folder):
        attempt += 1
    case["options"].pop("memory_limit", None)
    if kind == "joined":
        case["spec"]["name"] = f"many/::{folder}/docs"
    return case, folder


def is_possible(case: Case, folder: Path) -> bool:
    """Whether training accepts it."""
    try:
        begun(case, make(folder, case["spec"])).close()
    except ConfigError:
        return False
    return True


def begun(case: Case, dataset: Any) -> World:
    return World(case, dataset, ranks_of(case), case["options"]["global_batch_size"])


def ranks_of(case: Case) -> int:
    size = case["options"]["global_batch_size"]
    return min(case["ranks"], min(size.values()) if isinstance(size, dict) else size)


def described(case: Case, folder: Path, tmp_path: Path) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
    """URLs and options of ``shard_tools show``, and what an address says of the order."""
    content = as_file(case["spec"], folder, is_top=True)
    if "sources" in content:
        file = folder / f"{tmp_path.name}.json"
        file.write_text(json.dumps(content))
        return (str(file),), {}, {}
    order = {name: content.pop(name) for name in ORDER if name in content}
    asked: dict[str, Any] = {"seed": order["seed"]}
    if isinstance(order["shuffle"], dict):
        asked |= order["shuffle"]
    elif order["shuffle"] is False:
        asked["shuffle"] = "off"
    url = content.pop("url")
    for name in ("fields", "on_error", "max_bad_samples", "decode"):
        content.pop(name, None)
    if "subset" in content:
        low, high = content["subset"]
        content["subset"] = f"{100 * low:g}%..{100 * high:g}%" if isinstance(low, float) else f"{low}..{high}"
    return (url,), content, asked


def sizes_of(case: Case) -> str:
    size = case["options"]["global_batch_size"]
    return ",".join(f"{row}:{one}" for row, one in size.items()) if isinstance(size, dict) else str(size)


def of_page(found: dict[str, Any], step: int) -> list[Row]:
    """The rows of a page as those of a loader."""
    rows = found["rows"]
    assert all(set(row) == {"source", "pass", "lane", "chunk", "keys" if "keys" in row else "key"} for row in rows)
    keys = [tuple(row["keys"]) if "keys" in row else row["key"] for row in rows]
    return [(step, found["rank"], row["source"], key) for row, key in zip(rows, keys, strict=True)]


def given(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


# --- the judge


def judge(case: Case, folder: Path, tmp_path: Path, number: int) -> None:
    """Compare pages with what all ranks get, in a run that begins and in one that goes on from a state."""
    dice = random.Random(f"pages/{number}")
    urls, chosen, order = described(case, folder, tmp_path)
    options, num_ranks = case["options"], ranks_of(case)
    asked = {**order, "global_batch_size": sizes_of(case), "world": num_ranks, "last_batch": options["last_batch"]}
    asked["epoch_size"] = options.get("epoch_size")
    world = begun(case, make(folder, case["spec"]))
    try:
        played = Played(world)
        steps = played.steps(dice.randint(6, MOST_STEPS))
        state, at = world.ranks[0].state_dict(), played.ended
        behind = played.steps(6)
    finally:
        world.close()
    with Shown(urls, chosen) as shown:
        for epoch, step, rows in dice.sample(steps, min(3, len(steps))):
            check(shown, rows, step, num_ranks, {**asked, "epoch": epoch, "step": step})
        if at is not None:
            refused = shown.get("/step", **given(asked), epoch=0, step=at)
            assert (refused.status, f"0 to {at - 1:,}, got {at:,}" in refused.text) == (400, True)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    with Shown(urls, {**chosen, "state_url": str(file)}) as shown:
        # The state says all but the world, and what is done with the tail.
        asked = {"world": num_ranks, "last_batch": options["last_batch"]}
        for place, (epoch, step, rows) in enumerate([*behind[:1], dice.choice(steps), *behind[1:2]]):
            which = {} if place == 0 and epoch == state["epoch"] else {"epoch": epoch, "step": step}
            check(shown, rows, step, num_ranks, {**asked, **which})


class Played:
    """Steps of a world, one after the other: epoch, step in it, and rows of each.

    Attributes:
        ended: How many steps epoch 0 had; None: it was not played to its end.
    """

    def __init__(self, world: World) -> None:
        self._world, self._epoch, self._step = world, 0, 0
        self.ended: int | None = None

    def steps(self, most: int) -> list[tuple[int, int, list[Row]]]:
        found: list[tuple[int, int, list[Row]]] = []
        while len(found) < most:
            rows = self._world.step(self._step)
            if rows is None:
                self.ended = self._step if self._epoch == 0 else self.ended
                self._epoch, self._step = self._epoch + 1, 0
                continue
            found.append((self._epoch, self._step, rows))
            self._step += 1
        return found


def check(shown: Shown, rows: list[Row], step: int, num_ranks: int, asked: dict[str, Any]) -> None:
    """Each rank's page has the keys that the rank got, in their order."""
    for rank in range(num_ranks):
        found = shown.json("/step", **given(asked), rank=rank)
        assert of_page(found, step) == [row for row in rows if row[1] == rank], (asked, rank)


@pytest.mark.parametrize("part", range(4))
def test_pages_have_the_keys_that_loaders_deliver(
    part: int, pools: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="streaming")
    for number in range(part, NUM_CASES, 4):
        case, folder = case_of(number, pools)
        try:
            judge(case, folder, tmp_path, number)
        except Exception as error:
            raise AssertionError(f"case {number} ({KINDS[number % len(KINDS)]}): {error!r}\n{case}") from error
