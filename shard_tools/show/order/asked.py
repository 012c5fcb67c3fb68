"""Read what the address of a page asks: a run's batches, world and order, and a place in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from shard_tools.plan.report import parse_ramp
from streaming.arguments import MAX_SEED
from streaming.errors import ConfigError
from streaming.plan.order import MAX_LANES, MAX_WINDOW
from streaming.plan.schedule import Schedule
from streaming.types import LastBatch

MAX_WORLD = 2**20
"""More data ranks than any job has."""
_MOST = 2**50
_MOST_SIZE = 2**31 - 1
_YES = {"1": True, "true": True, "0": False, "false": False}
STATES = ("on", "off")
"""Values of ``state``: whether a page takes the run of the saved state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAsked:
    """What an address says of the run. None: as the state or the dataset has it, or the default.

    Attributes:
        world: Number of data ranks.
        global_batch_size: Rows of a batch over all ranks, or a ramp.
        batch_size: Rows of a batch per rank, likewise.
        seed: Seed of the order.
        shuffle: Whether it is shuffled.
        lanes: Number of lanes.
        window: Window in samples.
        epoch_size: Samples of a virtual epoch.
        last_batch: How the tail is treated.
        state: Whether the saved state counts, if there is one.
    """

    world: int = 1
    global_batch_size: int | Schedule | None = None
    batch_size: int | Schedule | None = None
    seed: int | None = None
    shuffle: bool | None = None
    lanes: int | None = None
    window: int | None = None
    epoch_size: int | None = None
    last_batch: LastBatch = "drop"
    state: bool = True

    @property
    def order(self) -> dict[str, Any]:
        """What it says of the order, without what it leaves open."""
        found = {name: getattr(self, name) for name in ("shuffle", "seed", "lanes", "window")}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run, and a place in it.

    Attributes:
        run: The run.
        rank: Data rank.
        epoch: Number of the epoch; None: the state's, or the first.
        step: Batch of the epoch; None: the one that the state would perform next, or the first.
        first: The first row that a page shows.
    """

    run: RunAsked
    rank: int = 0
    epoch: int | None = None
    step: int | None = None
    first: int = 0


NAMES = (*(field.name for field in fields(RunAsked)), "rank", "epoch", "step", "first")
"""Names of all that can be asked."""


def asked_of(query: Mapping[str, str]) -> Asked:
    """Return what an address asks; a name without a value is taken as not given.

    Raises:
        ConfigError: A value is wrong; the message names it, with what is expected.
    """
    given = {name: text.strip() for name, text in query.items() if name in NAMES and text.strip()}

    def number(name: str, least: int, most: int, what: str) -> int | None:
        return None if name not in given else _number(name, given[name], least, most, what)

    world = number("world", 1, MAX_WORLD, "the number of data ranks") or 1
    rank = number("rank", 0, MAX_WORLD - 1, "a data rank") or 0
    if rank >= world:
        cure = f"give a rank from 0 to {world - 1}, or world={rank + 1} or more"
        raise ConfigError(f"rank: expected one of the data ranks of world={world}, got {rank}; {cure}")
    last_batch: Any = _choice("last_batch", given.get("last_batch", "drop"), get_args(LastBatch))
    run = RunAsked(
        world=world, last_batch=last_batch,
        global_batch_size=_sizes("global_batch_size", given), batch_size=_sizes("batch_size", given),
        seed=number("seed", 0, MAX_SEED, "a seed"), lanes=number("lanes", 1, MAX_LANES, "a number of lanes"),
        window=number("window", 0, MAX_WINDOW, "a window in samples"),
        epoch_size=number("epoch_size", 1, _MOST, "a number of samples"),
        shuffle=_YES[_choice("shuffle", given["shuffle"].lower(), tuple(_YES))] if "shuffle" in given else None,
        state=_choice("state", given.get("state", "on"), STATES) == "on",
    )  # fmt: skip
    if run.global_batch_size is not None and run.batch_size is not None:
        raise ConfigError(
            "batch_size: it was given beside global_batch_size; give rows per rank (batch_size) or over all ranks "
            "(global_batch_size), and leave the other out"
        )
    return Asked(
        run=run, rank=rank, epoch=number("epoch", 0, _MOST, "an epoch"), step=number("step", 0, _MOST, "a step"),
        first=number("first", 0, _MOST, "the row to begin with") or 0,
    )  # fmt: skip


def _number(name: str, text: str, least: int, most: int, what: str) -> int:
    """Return a number in an address.

    Raises:
        ConfigError: It is none, or out of range.
    """
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most)) + 3
    if not is_number or not least <= int(text) <= most:
        raise ConfigError(
            f"{name}: expected {what}, a whole number from {least} to {most:,}, got {_short(text)}; give one, or leave "
            f"{name} out"
        )
    return int(text)


def _sizes(name: str, given: Mapping[str, str]) -> int | Schedule | None:
    text = given.get(name)
    if text is None or ":" not in text:
        return None if text is None else _number(name, text, 1, _MOST_SIZE, "rows of a batch")
    if len(text) > 10_000:
        raise ConfigError(f"{name}: expected a ramp such as 0:256,1000000:512, got {len(text):,} characters")
    try:
        return parse_ramp(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _choice(name: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise ConfigError(f"{name}: expected one of {', '.join(known)}, got {_short(text)}; give one, or leave it out")
    return text


def _short(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]}…")
