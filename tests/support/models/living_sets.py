"""Random histories of a set that lives, next to a model that knows nothing of shards: versions are lists of samples."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import history, tag
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.convert.append import append
from streaming import StreamingDataset
from streaming.shards.versions.publish import OvertakenError
from streaming.storage import Storage

Samples = dict[str, dict[str, Any]]
"""Rows by key, in the order of the set."""
WRITES = ("put", "put_if", "delete", "open_write")


class Killed(BaseException):
    """The process ends here: nothing after it runs, as after SIGKILL."""


@contextmanager
def interrupted(at: int, act: Callable[[], None], *, before: bool, only: Sequence[str] = WRITES) -> Iterator[None]:
    """Call ``act`` once, before or after the ``at``-th write to any store, by this thread or another one."""
    left, busy = [at], [False]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            if busy[0]:
                return real(*args, **kwargs)
            left[0] -= 1
            mine = left[0] == -1
            if mine and before:
                busy[0] = True
                act()
                busy[0] = False
            found = real(*args, **kwargs)
            if mine and not before:
                busy[0] = True
                act()
                busy[0] = False
            return found

        return write

    with pytest.MonkeyPatch.context() as patch:
        for name in only:
            patch.setattr(Storage, name, counted(getattr(Storage, name)))
        yield


def kill() -> None:
    raise Killed


@dataclass
class LivingSet:
    """A set, its source, and what its versions hold by the model.

    Attributes:
        url: Directory of the set.
        source: Folder of its source: one file a day.
        options: Options of its store.
        versions: Samples by the number of the version.
        tags: Numbers by name.
        prints: Fingerprint of each version when it was first seen.
        numbered: Earlier versions that stay under their number.
    """

    url: str
    source: Path
    options: Mapping[str, Any]
    versions: dict[int, Samples] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    prints: dict[int, str] = field(default_factory=dict)
    numbered: set[int] = field(default_factory=set)
    days: int = 0
    rows: int = 0

    @classmethod
    def made(cls, url: str, source: Path, options: Mapping[str, Any], num: int) -> LivingSet:
        one = cls(url=url, source=source, options=options)
        source.mkdir()
        convert(
            str(source / "*.jsonl") if not (rows := one.day(num)) else str(source), url,
            options=ConvertOptions(max_samples=3, key_field="id", columns=("n",)), storage_options=options,
        )  # fmt: skip
        one.versions[1] = rows
        return one

    @property
    def storage(self) -> Storage:
        return Storage(self.options)

    @property
    def current(self) -> int:
        return max(self.versions)

    def day(self, num: int) -> Samples:
        """Write a file of new rows, and return them."""
        rows = {f"{self.rows + i:05d}": {"id": f"{self.rows + i:05d}", "n": (self.rows + i) % 7} for i in range(num)}
        text = "".join(json.dumps(row) + "\n" for row in rows.values())
        (self.source / f"{self.days:04d}.jsonl").write_text(text)
        self.days, self.rows = self.days + 1, self.rows + num
        return rows

    def check(self) -> None:
        """Every version that the model knows is what it was, by every byte; there are no others."""
        listed = {one.number: one for one in history(self.url, storage=self.storage).versions}
        assert listed.keys() == self.versions.keys()
        named = {name: one.number for one in listed.values() for name in one.names}
        assert named == self.tags
        for name in [None, *self.versions, *self.tags]:
            number = self.current if name is None else self.tags.get(str(name), name)
            self._check(int(number), StreamingDataset(self.url, version=name, storage_options=self.options))

    def _check(self, number: int, dataset: StreamingDataset) -> None:
        found = [(sample["__key__"], sample["json"]) for sample in dataset]  # each byte by its checksum
        wanted = self.versions[number]
        assert [key for key, _ in found] == list(wanted)
        assert all(content["n"] == wanted[key]["n"] for key, content in found)
        assert self.prints.setdefault(number, dataset.fingerprint) == dataset.fingerprint

    def publishes(self, samples: Samples) -> None:
        """Take this for the next version."""
        self.numbered.add(self.current)
        self.versions[self.current + 1] = samples


@dataclass
class Step:
    """One change: what runs, and what the model does if it was done."""

    words: str
    run: Callable[[], Any]
    done: Callable[[], None]
    publishes: bool
    gone: frozenset[str] = frozenset()


def drawn_step(one: LivingSet, dice: random.Random) -> Step:
    """A change that can be made of the set as it is."""
    now = one.versions[one.current]
    kind = dice.choice(["append", "append", "delete", "delete where", "tag", "prune"])
    if kind == "append":
        return _append(one, one.day(dice.randrange(1, 9)))
    if kind == "delete" and len(now) > 1:
        gone = {*dice.sample(list(now), dice.randrange(1, min(len(now), 6)))}
        return _delete(one, gone, keys=[*gone, "unknown"])
    if kind == "delete where":
        number = dice.randrange(7)
        gone = {key for key, row in now.items() if row["n"] == number}
        if len(gone) < len(now):
            return _delete(one, gone, where=f"n = {number}")
    if kind == "prune":
        keep, drop = dice.randrange(3), [name for name in one.tags if dice.random() < 0.3]
        return Step(f"prune keep {keep} drop {drop}", lambda: _prune(one, keep, drop), lambda: _pruned(one, keep, drop),
                    publishes=False)  # fmt: skip
    version, name = dice.choice(list(one.versions)), f"t{len(one.prints)}-{dice.randrange(10**6)}"
    return Step(f"tag {version} {name}", lambda: tag(one.url, name, storage=one.storage, version=version),
                lambda: one.tags.update({name: version}), publishes=False)  # fmt: skip


def _append(one: LivingSet, rows: Samples) -> Step:
    def done() -> None:
        one.publishes({**one.versions[one.current], **rows})

    return Step(f"append {len(rows)}", lambda: append(str(one.source), one.url, storage_options=one.options), done,
                publishes=True)  # fmt: skip


def _delete(one: LivingSet, gone: set[str], **by: Any) -> Step:
    def done() -> None:
        one.publishes({key: row for key, row in one.versions[one.current].items() if key not in gone})

    words = f"delete {sorted(gone)} by {', '.join(by)}"
    return Step(words, lambda: delete(one.url, storage=one.storage, **by), done, bool(gone), frozenset(gone))


def _prune(one: LivingSet, keep: int, drop: Sequence[str]) -> None:
    """Prune, also after a run that was killed when it had given up the names."""
    there = {name for version in history(one.url, storage=one.storage).versions for name in version.names}
    prune(one.url, storage=one.storage, keep=keep, drop=[name for name in drop if name in there])


def _pruned(one: LivingSet, keep: int, drop: Sequence[str]) -> None:
    one.tags = {name: number for name, number in one.tags.items() if name not in drop}
    latest = sorted(one.numbered)
    one.numbered = {*latest[len(latest) - keep :]} if keep else set()
    stays = {*one.tags.values(), one.current, *one.numbered}
    one.versions = {number: samples for number, samples in one.versions.items() if number in stays}


def play(one: LivingSet, dice: random.Random, num_steps: int) -> list[str]:
    """Make changes, some of them killed at a write, or overtaken by another writer; check after each."""
    told = []
    for _ in range(num_steps):
        step = drawn_step(one, dice)
        how = dice.choice(["calm", "killed", "killed", "overtaken"])
        told.append(f"{how}: {step.words}")
        if how == "killed":
            _killed(one, step, dice)
        elif how == "overtaken" and step.publishes:
            _overtaken(one, step, dice)
        else:
            step.run()
            _done(step)
        one.check()
    return told


def _killed(one: LivingSet, step: Step, dice: random.Random) -> None:
    number = one.current
    try:
        with interrupted(dice.randrange(12), kill, before=dice.random() < 0.5):
            step.run()
    except Killed:
        if step.publishes:  # the set is what it was, or what it becomes
            found = next(o for o in history(one.url, storage=one.storage).versions if o.is_current).number
            assert found in {number, number + 1}
            if found > number:
                step.done()
                step = Step(step.words, step.run, lambda: None, publishes=False)
            one.check()
        step.run()  # again: it finishes, or finds nothing to do
    _done(step)


def _done(step: Step) -> None:
    if step.publishes or not step.words.startswith("delete"):
        step.done()


def _overtaken(one: LivingSet, step: Step, dice: random.Random) -> None:
    """Another writer publishes while this one writes: one of both wins, and the other is told."""
    others = sorted({*one.versions[one.current]} - step.gone)
    if len(others) < 2:
        step.run()
        step.done()
        return
    other = _delete(one, gone := {dice.choice(others)}, keys=[*gone])
    with pytest.raises(OvertakenError), interrupted(dice.randrange(2), other.run, before=True):
        step.run()
    other.done()
    one.check()
    step.run()
    step.done()
