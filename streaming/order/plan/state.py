"""Represent a checkpoint: a position in the order, so that a resume replays nothing.

The state is the same on every rank, so it may be saved by one rank and loaded by any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self, TypeAlias

from streaming.common.arguments import checked_count, checked_flag, checked_int, checked_seed, is_list, is_whole
from streaming.errors import ConfigError, StateError
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.sizes import Sizes, Steps

STATE_VERSION = 1
_TEXT = "ledger_text"
"""The ledger as JSON, a single value. torch.distributed.checkpoint takes lists of dicts apart, and restores only the
places that the state of a new loader has, too: of a ledger that grew, only its first entry."""
_MICRO = "micro_batches"
"""The place in a step, in states of loaders that cut steps; other states, also those of earlier releases, lack it."""
_VERSIONS = "versions"
"""The versions of sets that live, in states over such sets; other states, also those of earlier releases, lack it."""
Versions: TypeAlias = Mapping[str, Sequence[int]]
"""Numbers of the versions of sets, by the name of their source; ``""`` is that of a single set."""
NO_VERSIONS: Versions = MappingProxyType({})
_NAMES = (
    "version", "epoch", "samples_seen", "order", "next_seed", "fingerprint", "num_samples", "epoch_size", "has_begun",
    "batch_sizes", "lengths", "ledger", _TEXT,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WithinStep:
    """Say how many micro-batches of a step come before a place in it, and how the step is cut on every rank.

    Attributes:
        done: How many come before; 0: the place is between two steps, and the rest is 0, too.
        parts: How many the step has.
        num_rows: Its rows over all ranks, padding included.
        num_ranks: The number of data-parallel ranks.

    Raises:
        StateError: They are no such numbers.
    """

    done: int = 0
    parts: int = 0
    num_rows: int = 0
    num_ranks: int = 0

    def __post_init__(self) -> None:
        numbers = (self.done, self.parts, self.num_rows, self.num_ranks)
        if not all(is_whole(number) and number >= 0 for number in numbers) or self.done >= max(self.parts, 1):
            raise StateError(
                f"state: {_MICRO}: expected micro-batches that are done, fewer than the step has, its rows and the "
                f"number of ranks, got {list(numbers)}"
            )

    @classmethod
    def from_text(cls, text: object) -> Self:
        """Return what ``to_text`` wrote.

        Raises:
            StateError: The text is of none.
        """
        try:
            found = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            found = None
        if not is_list(found) or len(found) != 4:
            raise StateError(f"state: {_MICRO}: expected four numbers as JSON, such as '[0, 0, 0, 0]', got {text!r}")
        return cls(*found)

    def to_text(self) -> str:
        """Return it as a single value: programs that save states take lists apart."""
        return json.dumps([self.done, self.parts, self.num_rows, self.num_ranks])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The whole state of a loader.

    Attributes:
        epoch: The epoch in progress, from 0.
        samples_seen: Samples of that epoch that all ranks together have consumed. After the last batch, all samples of
            the epoch count, including those that fill no batch.
        order: The order settings of that epoch.
        next_seed: Seed from the next epoch on, if it was changed; otherwise None.
        fingerprint: Fingerprint of the dataset's index.
        num_samples: Samples of the dataset, for a message that is clearer than a fingerprint.
        epoch_size: Samples of a virtual epoch, or None: one pass is one epoch.
        ledger: Ledger of a mixture; None: the run reads one dataset.
        has_begun: Whether the epoch had begun when ``next_seed`` was given, although none of its samples was received;
            the seed then applies to the epoch after it.
        batch_sizes: Sizes of the global batches of the run by row, including future ones; None: not recorded.
        lengths: Tokens per row of packs by row of the run, including future ones; None: rows are not packs, or not
            recorded.
        within: Its place in the step after ``samples_seen``; None: steps are not cut into micro-batches.
        versions: Versions of the sets that were read, if they have any; only for messages, since the fingerprint
            identifies the samples.
    """

    epoch: int
    samples_seen: int
    order: OrderSettings
    next_seed: int | None = None
    fingerprint: str
    num_samples: int
    epoch_size: int | None = None
    ledger: Ledger | None = None
    has_begun: bool = False
    batch_sizes: Sizes | None = None
    lengths: Steps | None = None
    within: WithinStep | None = None
    versions: Versions = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        try:
            checked_count("num_samples", self.num_samples, 1)
            checked_count("epoch", self.epoch)
            if self.next_seed is not None:
                checked_seed("next_seed", self.next_seed)
            if self.epoch_size is not None:
                checked_count("epoch_size", self.epoch_size, 1)
            checked_int("samples_seen", self.samples_seen, 0, self._epoch_samples)
            checked_flag("has_begun", self.has_begun)
        except ConfigError as error:
            raise StateError(f"state: {error}; was it edited, or cut short when it was saved?") from error
        if not isinstance(self.order, OrderSettings):
            raise StateError(f"state: order: expected order settings, got {self.order!r}")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise StateError(f"state: fingerprint: expected a non-empty string, got {self.fingerprint!r}")

    def check_fits(self, *, epoch_size: int | None, shuffle: bool) -> None:
        """Check that the run can continue with an epoch size and a kind of order.

        Raises:
            StateError: They differ from those of the state.
        """
        for name, was, now in (("epoch_size", self.epoch_size, epoch_size), ("shuffle", self.order.shuffle, shuffle)):
            if was != now:
                raise StateError(f"{name}: expected {was}, as in the state, got {now}; give the same")

    @property
    def seeded_from(self) -> int:
        """The first epoch that uses ``next_seed``."""
        return self.epoch + (self.samples_seen > 0 or self.has_begun)

    @property
    def is_end(self) -> bool:
        """Whether the state was taken after the last batch of the epoch, before the loop requested another batch."""
        return self.samples_seen > 0 and self.samples_seen == self._epoch_samples

    @property
    def onward(self) -> Self:
        """The state from which the next batch comes: at the end of an epoch, the start of the next one."""
        return replace(self, epoch=self.epoch + 1, samples_seen=0) if self.is_end else self

    @property
    def _epoch_samples(self) -> int:
        if self.epoch_size is not None:
            return self.epoch_size
        return self.num_samples if self.ledger is None else self.ledger.last.blend.samples_per_pass

    def to_dict(self) -> dict[str, Any]:
        """Return a small JSON-serializable dict, equal on every rank."""
        entries = None if self.ledger is None else self.ledger.to_list()
        return {
            "version": STATE_VERSION,
            "epoch": int(self.epoch),
            "samples_seen": int(self.samples_seen),
            "order": self.order.to_dict(),
            "next_seed": None if self.next_seed is None else int(self.next_seed),
            "fingerprint": self.fingerprint,
            "num_samples": int(self.num_samples),
            "epoch_size": None if self.epoch_size is None else int(self.epoch_size),
            "has_begun": self.has_begun,
            "batch_sizes": None if self.batch_sizes is None else self.batch_sizes.to_text(),
            "lengths": None if self.lengths is None else self.lengths.to_text(),
            "ledger": entries,
            _TEXT: None if entries is None else json.dumps(entries),
        } | {
            **({} if self.within is None else {_MICRO: self.within.to_text()}),
            **({_VERSIONS: json.dumps({name: [*numbers] for name, numbers in self.versions.items()})}
               if self.versions else {}),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoaderState:
        """Rebuild a state from the dict of :meth:`to_dict`.

        Raises:
            StateError: ``data`` is not such a dict: its type, version, keys or values are wrong.
        """
        if not isinstance(data, Mapping):
            raise StateError(f"state: expected the dict of state_dict(), got {type(data).__name__}")
        version = data.get("version")
        if "version" not in data:
            found = ", ".join(map(repr, list(data)[:5])) or "nothing"
            raise StateError(
                f"state: expected what state_dict() of a loader returned, got a dict of {found}; if it was saved "
                'beside other states, pass its own part: loader.load_state_dict(checkpoint["loader"])'
            )
        if isinstance(version, bool) or version != STATE_VERSION:
            raise StateError(
                f"state version: this release reads version {STATE_VERSION}, got {version!r}; load it with the release "
                "that saved it"
            )
        optional = {_MICRO, _VERSIONS}
        if set(data) - optional != set(_NAMES):
            if isinstance(data.get("loader"), Mapping) and {"unit", "ranks", "for_others"} <= set(data):
                raise StateError("state: got a state of Tickets, which Tickets(loader).load_state_dict(state) loads")
            missing, unknown = sorted(set(_NAMES) - set(data)), sorted(map(str, set(data) - {*_NAMES, *optional}))
            raise StateError(f"state: expected the keys {list(_NAMES)}; missing {missing}, unknown {unknown}")
        given = {name: data[name] for name in _NAMES if name not in ("version", _TEXT)}
        readers = ((_MICRO, "within", WithinStep.from_text), (_VERSIONS, "versions", _versions_of))
        given |= {name: read(data[key]) for key, name, read in readers if key in data}
        given["order"] = OrderSettings.from_dict(data["order"])
        kinds: tuple[tuple[str, type[Steps]], ...] = (("batch_sizes", Sizes), ("lengths", Steps))
        for name, kind in kinds:
            if data[name] is not None:
                try:
                    given[name] = kind.from_text(data[name], name)
                except ConfigError as error:
                    raise StateError(f"state: {error}") from error
        if data["ledger"] is not None or data[_TEXT] is not None:
            given["ledger"] = Ledger.from_list(_whole_ledger(data["ledger"], data[_TEXT]))
        return cls(**given)


def _versions_of(text: Any) -> Versions:
    """Return the versions in a state.

    Raises:
        StateError: They are none.
    """
    try:
        found = json.loads(text)
        if all(is_list(numbers) and all(map(is_whole, numbers)) for numbers in found.values()):
            return dict(found)
    except (TypeError, ValueError, AttributeError, RecursionError):
        pass
    raise StateError(f"state: {_VERSIONS}: expected numbers by name as JSON, such as '{{\"\": [3]}}', got {text!r}")


def _whole_ledger(entries: Any, text: Any) -> Any:
    """Return the entries, or those in ``text`` if a program that restores values one by one lost some entries.

    Raises:
        StateError: They contradict each other.
    """
    if text is None:
        return entries
    try:
        whole = json.loads(text)
        entries = json.loads(json.dumps(_plain(entries)))
    except (TypeError, ValueError) as error:
        raise StateError(f"state: {_TEXT}: expected the ledger's JSON: {error}") from error
    if not _is_part(entries, whole):
        raise StateError(f"state: ledger and {_TEXT} contradict each other; change a ledger where {_TEXT} is None")
    return whole


def _plain(value: Any) -> Any:
    """Convert dicts and lists of configuration libraries, such as OmegaConf's, to those that JSON accepts."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value


def _is_part(some: Any, whole: Any) -> bool:
    """Return whether every value in ``some`` is at the same place in ``whole``."""
    if isinstance(some, list) and isinstance(whole, list):
        return len(some) <= len(whole) and all(map(_is_part, some, whole))
    if isinstance(some, dict) and isinstance(whole, dict):
        return some.keys() <= whole.keys() and all(_is_part(some[name], whole[name]) for name in some)
    return bool(some == whole)
