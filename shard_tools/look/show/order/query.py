"""Parse the address of a page: a run's batches, world and order, and a place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from shard_tools.look.plan.report import parse_ramp
from shard_tools.look.show.base.page import Query
from streaming.common.arguments import MAX_SEED
from streaming.errors import ConfigError
from streaming.order.plan.order import MAX_LANES, MAX_WINDOW
from streaming.order.plan.schedule import Schedule
from streaming.types import LastBatch

MAX_WORLD = 2**20
"""More data ranks than any job has."""
_MOST = 2**50
_MOST_SIZE = 2**31 - 1
_SHUFFLED = {"default": None, "on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAsked:
    """The run that an address names. None: as in the state or the dataset, or the default.

    Attributes:
        world: Number of data ranks.
        global_batch_size: Rows of a batch over all ranks, or a ramp.
        batch_size: Rows of a batch per rank, or a ramp.
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
        """The given settings of the order, without those left open."""
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
        first: First row on the page.
    """

    run: RunAsked
    rank: int = 0
    epoch: int | None = None
    step: int | None = None
    first: int = 0


OF_THE_RUN = (
    "world", "global_batch_size", "batch_size", "seed", "shuffle", "lanes", "window", "epoch_size", "last_batch",
    "state",
)  # fmt: skip
"""Parameters that name a run."""
OF_THE_STEP = ("epoch", "step", "rank", "first")
"""Parameters that name a place in it."""


def run_asked(query: Query) -> RunAsked:
    """Return the run that an address names.

    Raises:
        ConfigError: A value is wrong; the message names it, and the expected values.
    """
    last_batch: Any = query.choice("last_batch", *get_args(LastBatch))
    found = RunAsked(
        world=_number(query, "world", 1, MAX_WORLD, "the number of data ranks") or 1, last_batch=last_batch,
        global_batch_size=_sizes(query, "global_batch_size"), batch_size=_sizes(query, "batch_size"),
        seed=_number(query, "seed", 0, MAX_SEED, "the seed of the order"),
        lanes=_number(query, "lanes", 1, MAX_LANES, "the number of lanes"),
        window=_number(query, "window", 0, MAX_WINDOW, "the window in samples"),
        epoch_size=_number(query, "epoch_size", 1, _MOST, "the samples of an epoch"),
        shuffle=_SHUFFLED[query.choice("shuffle", *_SHUFFLED)], state=query.choice("state", "on", "off") == "on",
    )  # fmt: skip
    if found.global_batch_size is not None and found.batch_size is not None:
        raise ConfigError(
            "batch_size: it was given beside global_batch_size; give rows per rank (batch_size) or over all ranks "
            "(global_batch_size), and leave the other out"
        )
    return found


def asked_of(query: Query) -> Asked:
    """Return the step that an address names.

    Raises:
        ConfigError: A value is wrong; the message names it, and the expected values.
    """
    run = run_asked(query)
    rank = _number(query, "rank", 0, MAX_WORLD - 1, "the number of a data rank") or 0
    if rank >= run.world:
        cure = f"give a rank from 0 to {run.world - 1}, or a world of {rank + 1} or more"
        raise ConfigError(f"rank: expected one of the data ranks of a world of {run.world}, got {rank}; {cure}")
    return Asked(
        run=run, rank=rank, epoch=_number(query, "epoch", 0, _MOST, "the number of an epoch"),
        step=_number(query, "step", 0, _MOST, "the number of a batch in its epoch"),
        first=_number(query, "first", 0, _MOST, "the row that the page begins with") or 0,
    )  # fmt: skip


def _number(query: Query, name: str, least: int, most: int, what: str) -> int | None:
    try:
        return query.some_number(name, least=least, most=most)
    except ConfigError as error:
        raise ConfigError(f"{error}; give {what}, or leave {name} out") from error


def _sizes(query: Query, name: str) -> int | Schedule | None:
    text = query.text(name).strip()
    if ":" not in text:
        return _number(query, name, 1, _MOST_SIZE, "the rows of a batch, or a ramp such as 0:256,1000000:512")
    try:
        return parse_ramp(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
