"""The recipes for TRL: SFT step for step, asynchronous GRPO prompt for prompt."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset, Tickets
from streaming.errors import ConfigError, StateError
from tests.support.processes.forked import Forked
from tests.support.programs.recipes import MOST_LINES, Leg, Player, Recipe, check
from tests.support.sets.packed_sets import write
from tests.support.tiers import first_here

SFT, GRPO = Recipe("trl", "SFT"), Recipe("trl", "Asynchronous GRPO")
NUM_PROMPTS, GENERATIONS = 40, 4
EPOCHS = 2
"""What comes after a run is read up to the end of the second epoch."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    write(folder / "chat", num_docs=300)
    with ShardWriter(f"{folder}/prompts/{{:02d}}.tar", max_samples=8) as writer:
        for number in range(NUM_PROMPTS):
            row = {"prompt": f"prompt {number}", "solution": str(number)}
            writer.write({"__key__": f"{number:03d}", "json": row})
    return folder


@pytest.mark.parametrize("recipe", [SFT, GRPO], ids=lambda one: one.part)
def test_it_is_short(recipe: Recipe) -> None:
    assert recipe.num_lines() <= MOST_LINES


@pytest.fixture(scope="module")
def with_transformers(forked: Forked) -> Iterator[Forked]:
    environ = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with Forked("transformers.trainer", "datasets", "streaming.loader", environ=environ, base=forked) as ranks:
        yield ranks


@pytest.mark.thorough
@pytest.mark.parametrize("legs", [(Leg(2, (3, 2)), Leg(3, (5, 1)), Leg(1)), (Leg(1, (8, 1)), Leg(4))])
def test_sft_killed_and_resumed_elsewhere(
    with_transformers: Forked, bucket: Path, tmp_path: Path, legs: tuple[Leg, ...]
) -> None:
    check(Player(with_transformers, SFT, bucket, steps=12), legs, tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SFT, GRPO], ids=lambda one: one.part)
def test_the_program_runs_as_it_is(with_transformers: Forked, bucket: Path, tmp_path: Path, recipe: Recipe) -> None:
    assert len(Player(with_transformers, recipe, bucket, steps=4).play([Leg(2)], tmp_path / "own", own=True)) == 4


def complete(leg: list[Any]) -> Counter[str]:
    """The prompts of a run whose rollouts were all trained on."""
    rows = sum((step.rows for step in leg), Counter())
    return Counter(name.partition(":")[2] for name, count in rows.items() if count == GENERATIONS)


def to_come(bucket: Path, folder: Path) -> Counter[str]:
    """The prompts that the last checkpoint has not settled, up to the end of the second epoch."""
    last = max((folder / "out").iterdir(), key=lambda one: int(one.name.partition("-")[2]))
    saved = json.loads((last / "trainer_state.json").read_text())
    (position,) = saved["stateful_callbacks"].values()
    dataset = StreamingDataset(str(bucket / "prompts"), decode="auto")
    with Tickets(DataLoader(dataset, 8, last_batch="partial")) as tickets:
        tickets.load_state_dict(position["attributes"]["tickets"])
        found: Counter[str] = Counter()
        while tickets.epoch < EPOCHS:
            found.update(sample["json"]["prompt"] for _, sample in tickets)
        return found


GRPO_LEGS = (
    (Leg(2, (5, 2)), Leg(3, (9, 1)), Leg(1, None)),
    (Leg(1, (3, 3)), Leg(4, (4, 1)), Leg(2, (9, 3)), Leg(3, None)),
    (Leg(3, (1, 1)), Leg(3, (2, 2)), Leg(2, None)),
)


@pytest.mark.parametrize("legs", first_here(GRPO_LEGS, 1))
def test_each_prompt_is_trained_on_once_an_epoch(
    forked: Forked, bucket: Path, tmp_path: Path, legs: tuple[Leg, ...]
) -> None:
    """Prompts that are complete, and those that come after the last checkpoint: all of two epochs, none twice."""
    player = Player(forked, GRPO, bucket, steps=14)
    trained = [complete(leg) for leg in player.legs(legs, tmp_path / "run")]
    assert all(trained)
    everything = sum(trained, Counter()) + to_come(bucket, tmp_path / "run")
    assert everything == Counter({f"prompt {number}": EPOCHS for number in range(NUM_PROMPTS)})


# ------------------------------------------------------------------------------------ what use_tickets refuses


@pytest.fixture
def of_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over the two names that it takes from transformers, which takes seconds to import."""
    for name in ("transformers", "transformers.trainer_callback"):
        module: Any = ModuleType(name)
        module.TrainerCallback, module.ExportableState = type("TrainerCallback", (), {}), type("State", (), {})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "streaming.integrations.trl", raising=False)
    yield importlib.import_module("streaming.integrations.trl")
    sys.modules.pop("streaming.integrations.trl", None)


def test_what_use_tickets_refuses(of_trl: Any, bucket: Path, tmp_path: Path) -> None:
    prompts = of_trl.TicketPrompts(StreamingDataset(str(bucket / "prompts")))
    assert len(prompts) == NUM_PROMPTS

    def trainer(**changed: Any) -> Any:
        args = SimpleNamespace(num_generations=GENERATIONS, ignore_data_skip=changed.pop("ignore_data_skip", True))
        return SimpleNamespace(**{"args": args, "train_dataset": prompts, "_trained_groups": set()} | changed)

    with pytest.raises(ConfigError, match=r"expected the trainer's train_dataset, got other prompts"):
        of_trl.use_tickets(trainer(train_dataset=[]), prompts)
    with pytest.raises(ConfigError, match=r"got a SimpleNamespace that does not; update shardstream, or TRL"):
        of_trl.use_tickets(trainer(_trained_groups=None), prompts)
    with pytest.raises(ConfigError, match=r"give its arguments ignore_data_skip=True"):
        of_trl.use_tickets(trainer(ignore_data_skip=False), prompts, str(tmp_path))
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(StateError, match=r"no tickets in its trainer_state\.json"):
        of_trl.use_tickets(trainer(), prompts, str(tmp_path))


def test_a_long_run_holds_what_is_open(of_trl: Any, bucket: Path) -> None:
    """Whatever the order, however rows are cut, and though some prompts stay open: never more than these."""
    prompts = of_trl.TicketPrompts(StreamingDataset(str(bucket / "prompts")))
    position = of_trl.TicketPosition(prompts, GENERATIONS)
    dice, stale = random.Random(0), {7, 90}
    waiting = [number for number in range(400) if number not in stale]
    trained = 0
    while waiting:
        step = [waiting.pop(dice.randrange(min(5, len(waiting)))) for _ in range(min(3, len(waiting)))]
        rows = [number for number in step for _ in range(GENERATIONS + dice.randrange(3))]  # some are cut in several
        dice.shuffle(rows)
        for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            position.groups.update(part)
            position.on_substep_end(None, None, None)
        position.on_step_end(None, None, None)
        position.groups.update([dice.choice(step)])  # one more row of a prompt that is settled
        position.on_step_end(None, None, None)
        trained += len(step)
        assert len(position.groups) == trained
        assert all(number in position.groups for number in step)
        parts = {**vars(position), **vars(position.groups)}
        held = {name: len(one) for name, one in parts.items() if name != "groups" and hasattr(one, "__len__")}
        assert max(held.values()) <= len(stale) + 5, held
    report = position.tickets.report()
    assert (report["acknowledged"], report["in_flight"]) == (398, 2)
    assert {number for number in range(400) if number not in position.groups} == stale
