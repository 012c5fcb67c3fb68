"""Random histories of sets that live: what may be done to them, what the model makes of it, and faults meanwhile.

A world holds a few sets: one is made of a source, others by ``copy``, ``split`` and ``reshard`` of those. A step
changes one of them, or makes others of it. It runs calmly, or is killed at a write, or another step runs at one of
its writes.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shard_tools import ShardWriter
from shard_tools.change.fields.join import FromSet, join_field
from shard_tools.change.fields.listed import drop_field
from shard_tools.change.functions.field import compute_field
from shard_tools.change.functions.run import Running
from shard_tools.change.life.dedupe import dedupe
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import history, tag
from shard_tools.change.sets.copy import copy
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
from shard_tools.change.sets.rewrite.split import SplitOptions, split
from shard_tools.make.convert.append import append
from shard_tools.make.convert.journal import TargetNotEmptyError
from streaming.errors import ConfigError, DataError, ShardstreamError
from streaming.shards.versions.history import kept_versions
from streaming.shards.versions.publish import OvertakenError, read_head
from tests.support.models.living_sets import (
    CLASS_NAMES,
    MOST_SAMPLES,
    Killed,
    LivingSet,
    Row,
    Seen,
    SetState,
    Source,
    Version,
    interrupted,
    kill,
    new_row,
)

States = dict[str, SetState]
Place = tuple[str, Mapping[str, Any]]
"""A directory, and the options of its store."""
KINDS = ("rows", "numbers", "images")
MOST_SETS = 5
LATE = ("cap.txt", "lat.bin")
HERE = Running(workers=0)


def mirrored(sample: Mapping[str, Any]) -> bytes | None:
    """Return the value of a late field; None for some samples."""
    key = str(sample["__key__"])
    return None if key[-1] in "37" else key[::-1].encode()


def doubled(sample: Mapping[str, Any]) -> bytes | None:
    """Return other values."""
    key = str(sample["__key__"])
    return None if key[-1] == "5" else key.encode() * 2


FUNCTIONS = {one.__name__: one for one in (mirrored, doubled)}


class RefusedError(Exception):
    """The model says that a step is refused: what it would do must not be done to the set as it is.

    Args:
        kind: The error.
        match: A pattern of its message.
    """

    def __init__(self, kind: type[ShardstreamError], match: str) -> None:
        super().__init__(match)
        self.kind, self.match = kind, match


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something that is done to sets.

    Attributes:
        words: What, for people.
        name: The set that it changes, or of which it makes others.
        run: Does it.
        apply: Does it to the model.
        makes: Names of the sets that it makes.
        may_fail: Errors by which it may say that it cannot be done; nothing has changed then.
        may_lose: Errors by which it may be refused for what another one has done; the model cannot say whether.
        repeats: Whether it finds nothing to do if it was done.
        is_apart: Whether others may come between only before its first write: it changes a set that does not live, or
            drops versions one by one.
    """

    words: str
    name: str
    run: Callable[[], Any]
    apply: Callable[[States], None]
    makes: tuple[str, ...] = ()
    may_fail: tuple[type[Exception], ...] = ()
    may_lose: tuple[type[Exception], ...] = ()
    repeats: bool = True
    is_apart: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.makes)

    def applied(self, states: States) -> States:
        """Return what the model becomes.

        Raises:
            RefusedError: The step is refused.
        """
        found = {name: state.copied() for name, state in states.items()}
        self.apply(found)
        return found


@dataclass
class World:
    """Sets, their models, and dice.

    Attributes:
        dice: What is random.
        place: Returns a new place in the store, given a name.
        folder: A folder for sources.
        sets: The sets by name; those that a killed step was to make, too.
        states: Their models, of those that are there.
        told: What happened so far.
        sides: The set that each key goes to when sets are split.
    """

    dice: random.Random
    place: Callable[[str], Place]
    folder: Path
    sets: dict[str, LivingSet] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    sides: dict[str, str] = field(default_factory=dict)
    num_rows: int = 0
    num_names: int = 0
    num_ways: int = 0
    repeated: set[str] = field(default_factory=set)

    @classmethod
    def made(
        cls, dice: random.Random, place: Callable[[str], Place], folder: Path, kinds: Collection[str] = KINDS
    ) -> World:  # fmt: skip
        """Return a world with one set, or with two of one kind."""
        world = cls(dice=dice, place=place, folder=folder)
        kind = dice.choice(sorted(kinds))
        for _ in range(dice.choice([1, 1, 2])):
            name = world.name("s")
            source = Source(folder / name, kind)
            world.fill(source, dice.randrange(2, 9), None)
            url, options = place(name)
            world.sets[name] = LivingSet(url=url, options=options, source=source, kind=kind)
            world.states[name] = world.sets[name].convert()
        return world

    def name(self, stem: str) -> str:
        """Return a name that nothing has yet."""
        self.num_names += 1
        return f"{stem}{self.num_names}"

    def rows(self, kind: str, num: int, known: Version | None) -> list[Row]:
        """Return new rows; some have the key and content of one that is known, or its bytes alone."""
        found = []
        for _ in range(num):
            row = new_row(self.num_rows, kind, self.dice.choice(CLASS_NAMES))
            self.num_rows += 1
            like = self.dice.choice(known.rows) if known is not None and self.dice.random() < 0.25 else None
            if like is not None and kind == "images":
                row = replace(row, fields={**row.fields, "png": like.fields["png"]})
            elif like is not None and (kind == "numbers" or like.key not in self.repeated):
                self.repeated.add(like.key)
                row = replace(like, late={}, key=row.key if kind == "numbers" else like.key)
            found.append(row)
        return found

    def fill(self, source: Source, num: int, known: Version | None) -> None:
        source.add(self.rows(source.kind, num, known))

    def add(self, name: str, kind: str, place: Place | None = None, copy_of: str = "") -> LivingSet:
        """Add a set that a step makes."""
        url, options = place or self.place(name)
        self.sets[name] = LivingSet(url=url, options=options, source=None, kind=kind, copy_of=copy_of)
        return self.sets[name]

    # --- what happens ---

    def play(self, num_steps: int) -> None:
        """Do random steps, some with faults, and compare with the model after each.

        Raises:
            AssertionError: Something differs; notes say what happened.
        """
        try:
            for _ in range(num_steps):
                self.step()
            self.end()
        except BaseException as error:
            error.add_note("what happened: " + "; ".join(self.told))
            raise

    def step(self) -> None:
        step = drawn(self, self.states, self.dice.choice([*self.states]))
        how = self.dice.choice(["calm", "calm", "killed", "killed", "overtaken"])
        self.told.append(f"{how}: {step.words}")
        {"calm": self.calm, "killed": self.killed, "overtaken": self.overtaken}[how](step)
        self.check(step.names)

    def check(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.states:
                one, state = self.sets[name], self.states[name]
                earlier = sorted({*state.versions} - {state.number}) + sorted(state.tags)
                one.check(state, [self.dice.choice(earlier)] if earlier and self.dice.random() < 0.4 else ())
                check_tars(one, state.now)

    def calm(self, step: Step) -> None:
        try:
            step.run()
        except step.may_fail as error:
            self.told.append(f"refused: {str(error)[:60]}")
            self.states = self.matching([self.states], step.names)
            return
        self.states = step.applied(self.states)
        assert {*step.makes} <= self.states.keys()

    def killed(self, step: Step) -> None:
        before, at = self.states, self.dice.randrange(self.dice.choice([4, 12, 30]))
        try:
            with interrupted(at, kill, before=self.dice.random() < 0.5):
                step.run()
        except Killed:
            self.told.append(f"at {at}")
        except step.may_fail:
            self.states = self.matching([before], step.names)
            return
        else:
            self.states = step.applied(before)
            return
        after = step.applied(before)
        between = pruned_in_part(self, step, before, after) if kind_of(step) == "prune" else []
        if step.makes:  # what is there of them cannot be read
            between.append({name: state for name, state in before.items() if name not in step.makes})
        self.states = self.matching([after, before, *between], step.names)
        is_done = self.states is after and {*step.makes} <= after.keys()
        if kind_of(step) == "prune" or (self.dice.random() < 0.6 and (step.repeats or not is_done)):
            self.told.append("again")
            self.again(step, is_done=is_done)

    def again(self, step: Step, *, is_done: bool) -> None:
        """Run a step again that was killed: it finishes, or finds nothing to do."""
        try:
            step.run()
        except step.may_fail:
            self.states = self.matching([self.states], step.names)
            return
        if not is_done:
            self.states = step.applied(self.states)

    def overtaken(self, step: Step) -> None:
        """Another step is done to the same set while this one writes: one of both wins, and the other is told."""
        before, other, base = self.states, list[Step](), list[States]()

        def act() -> None:
            candidates = [before] if step.makes else [before, step.applied(before)]
            base.append(self.matching(candidates, (step.name,)))
            other.append(drawn(self, base[0], step.name, makes=False))
            self.told.append(f"meanwhile {other[0].words}")
            try:
                other[0].run()
            except ShardstreamError as refusal:  # it comes as a whole, so nobody is in its way
                raise AssertionError(f"refused: {other[0].words}") from refusal

        error: ShardstreamError | None = None
        at, is_before = self.dice.randrange(self.dice.choice([2, 6, 20])), self.dice.random() < 0.7
        if step.is_apart:
            at, is_before = 0, True
        try:
            with interrupted(at, act, before=is_before):
                step.run()
        except ShardstreamError as refusal:
            error = refusal
        if not other:
            assert error is None or isinstance(error, step.may_fail), error
            self.states = before if error is not None else step.applied(before)
            return
        # If the other one came while the set began to live, it has made a version, too.
        done = [other[0].applied(base[0]), other[0].applied(alive(base[0], step.name))]
        if base[0] is not before:
            candidates = done
        elif error is not None:
            candidates = done
            is_told = isinstance(error, (OvertakenError, *step.may_fail, *LOSING.get(kind_of(step), ())))
            assert is_told or step.makes, repr(error)
            self.told.append(f"lost: {type(error).__name__}")
        else:
            candidates = [*possible(other[0], possible(step, [before])), *possible(step, done)]
        self.states = self.matching(candidates, step.names)
        self.check((step.name,))
        if error is not None and step.repeats and not step.makes:
            self.told.append("again")
            self.after_another(step)

    def after_another(self, step: Step) -> None:
        """Run a step again that lost: it finishes, or is refused for what the other one has made of the set."""
        try:
            becomes = step.applied(self.states)
        except RefusedError as refused:
            self.told.append(f"must be refused: {refused.match}")
            with pytest.raises(refused.kind, match=refused.match):
                step.run()
            self.states = self.matching([self.states], step.names)
            return
        try:
            step.run()
        except step.may_lose:
            self.states = self.matching([self.states], step.names)
        else:
            self.states = becomes

    def matching(self, candidates: Sequence[States], names: Sequence[str]) -> States:
        """Return the first of these models that is what can be seen of some sets.

        Raises:
            AssertionError: None of them is.
        """
        seen = {name: self.seen(name) for name in names}
        said = [{name: one[name].shown() if name in one else None for name in names} for one in candidates]
        alike = [one for one, shown in zip(candidates, said, strict=True) if shown == seen]
        assert alike, f"{seen}, not one of {said}"
        for one in alike:
            for name in {*names} & one.keys():  # a change that did not come to its end may have let it live
                one[name].lives |= self.sets[name].lives()
        return next((one for one in alike[:-1] if self.is_like(one, names)), alike[-1])

    def is_like(self, states: States, names: Sequence[str]) -> bool:
        """Return whether sets are as a model has them, by every byte of every version."""
        try:
            for name in {*names} & states.keys():
                self.sets[name].check(states[name], sorted(states[name].versions))
        except (AssertionError, ShardstreamError, pytest.fail.Exception):
            return False
        return True

    def seen(self, name: str) -> Seen | None:
        """Return what can be seen of a set; None: it is not there, or not whole, which is an error."""
        try:
            return self.sets[name].shown()
        except ShardstreamError:
            return None

    def end(self) -> None:
        """Read every version of every set; then nothing is left behind but what versions hold."""
        for name, one in self.sets.items():
            if name not in self.states:
                assert self.seen(name) is None
                continue
            state = self.states[name]
            left = history(one.url, storage=one.storage).pending
            prune(one.url, storage=one.storage, abandon=[work for work in left if work != "prune"])
            state.prune(0, ())
            one.check(state, [*state.tags])
            if read_head(one.storage, one.url).lives:  # of one that was killed as it began to live, nothing is pruned
                check_left(one)


def alive(states: States, name: str) -> States:
    """Return the same models, one of a set that lives."""
    return {**states, name: replace(states[name].copied(), lives=True)}


def possible(step: Step, models: Sequence[States]) -> list[States]:
    """Return what models become, those that neither refuse a step nor are refuted by what it has made."""
    found = []
    for states in models:
        with contextlib.suppress(AssertionError, RefusedError):
            found.append(step.applied(states))
    return found


LOSING: dict[str, tuple[type[Exception], ...]] = {
    "tag": (ConfigError,),  # what it was to name is dropped, or another version has the name
}
"""Errors besides ``OvertakenError`` by which a step may be told that another one was first."""


def kind_of(step: Step) -> str:
    return step.words.partition(" ")[0]


def pruned_in_part(world: World, step: Step, before: States, after: States) -> list[States]:
    """Return the model of a set that was pruned up to some version."""
    one, was, becomes = world.sets[step.name], before[step.name], after[step.name]
    listed = history(one.url, storage=one.storage).versions
    there, tags = {version.number for version in listed}, {name: v.number for v in listed for name in v.names}
    assert becomes.versions.keys() <= there <= was.versions.keys()
    assert becomes.tags.items() <= tags.items() <= was.tags.items()
    versions = {number: version for number, version in was.versions.items() if number in there}
    kept = {int(one.name) for one in kept_versions(one.storage, one.url) if not one.is_tag}
    return [{**before, step.name: replace(was, versions=versions, tags=tags, numbered=was.numbered & kept)}]


# ------------------------------------------------------------------------------------------------------- kinds of steps


def drawn(world: World, states: States, name: str, *, makes: bool = True) -> Step:
    """Return a step that can be done to a set as it is."""
    dice, state = world.dice, states[name]
    kinds: list[Callable[[World, SetState, str], Step | None]] = [
        appended, appended, appended, deleted, deleted, deleted_where, deduped, deduped, tagged, tagged, pruned,
        computed, computed, dropped,
    ]  # fmt: skip
    if makes and len(world.sets) < MOST_SETS:
        kinds += [copied, halved]
    while True:
        kind = dice.randrange(len(kinds) + 3)
        step = (
            kinds[kind](world, state, name) if kind < len(kinds)
            else joined(world, states, name) if kind == len(kinds)
            else merged(world, states, name) if makes and kind == len(kinds) + 1 and len(world.sets) < MOST_SETS
            else copied_again(world, states, name) if makes
            else None
        )  # fmt: skip
        if step is not None:
            return step


def appended(world: World, state: SetState, name: str) -> Step:
    one = world.sets[name]
    num = world.dice.randrange(1, 6)
    if one.source is None:
        if one.copy_of and (source := world.sets[one.copy_of].source) is not None and world.dice.random() < 0.2:
            return appended_to_copy(one, source, name)
        return written(world, state, name, num)
    source = one.source
    world.fill(source, num, state.now)
    upto = len(source.days)

    def apply(states: States) -> None:
        state = states[name]
        rows = source.unread(state, upto)
        if rows:
            state.publish(with_rows(state.now, rows))
            state.read |= frozenset(range(upto))
            state.records += len(rows)

    return Step(words=f"append {num} to {name}", name=name, apply=apply,
                run=lambda: append(source.spec, one.url, storage_options=one.options))  # fmt: skip


def appended_to_copy(one: LivingSet, source: Source, name: str) -> Step:
    """A copy does not say what it was made of: nothing of that is added to it once more."""

    def run() -> None:
        with pytest.raises(ConfigError, match="copies leave out"):
            append(source.spec, one.url, storage_options=one.options)

    return Step(words=f"append nothing to the copy {name}", name=name, run=run, apply=lambda _: None)


def with_rows(version: Version, rows: Sequence[Row]) -> Version:
    """Return a version with more rows; new classes get the next numbers."""
    labels = {row.label for row in rows if row.label is not None}
    return replace(
        version, rows=(*version.rows, *rows), classes=(*version.classes, *sorted(labels - {*version.classes}))
    )


def written(world: World, state: SetState, name: str, num: int) -> Step:
    """Add samples to a set that is made of other sets."""
    one = world.sets[name]
    rows = [replace(row, key=f"w{row.key}") for row in world.rows(one.kind, num, None)]

    def run() -> None:
        classes = with_rows(state.now, rows).classes
        labels = {row.key: row.label for row in rows}
        columns: dict[str, Any] = {"n": lambda sample: json.loads(sample["json"])["n"]}
        if one.kind == "images":
            columns = {
                "cls": lambda sample: int(sample["cls"]), "class": lambda sample: labels[sample["__key__"]],
            }  # fmt: skip
        with ShardWriter(
            f"{one.url}/{{:06d}}.tar", append=True, max_samples=MOST_SAMPLES, storage_options=one.options,
            columns=columns, classes={"cls": classes} if classes else None,
        ) as writer:  # fmt: skip
            for row in rows:
                number = {} if row.label is None else {"cls": classes.index(row.label)}
                writer.write({"__key__": row.key, **row.fields, **number})

    def apply(states: States) -> None:
        states[name].publish(with_rows(states[name].now, rows))

    return Step(words=f"write {num} to {name}", name=name, run=run, apply=apply, repeats=False)


def leave_out(world: World, name: str, words: str, run: Callable[[], Any], gone: Callable[[Version], set[int]]) -> Step:
    def apply(states: States) -> None:
        state = states[name]
        numbers = gone(state.now)
        if len(numbers) == len(state.now.rows):
            raise RefusedError(ConfigError, "no sample would stay")
        if numbers:
            state.publish(state.now.without(numbers))

    return Step(words=f"{words} of {name}", name=name, run=run, apply=apply)


def deleted(world: World, state: SetState, name: str) -> Step | None:
    one, keys = world.sets[name], sorted({*state.now.keys})
    if len(keys) < 3:
        return None
    some = {*world.dice.sample(keys, world.dice.randrange(1, min(len(keys) - 1, 5)))}
    return leave_out(
        world, name, f"delete {sorted(some)}", lambda: delete(one.url, storage=one.storage, keys=[*some, "unknown"]),
        lambda now: {at for at, row in enumerate(now.rows) if row.key in some},
    )  # fmt: skip


def deleted_where(world: World, state: SetState, name: str) -> Step | None:
    one, row = world.sets[name], world.dice.choice(state.now.rows)
    where = f"n = {row.n}" if row.label is None else f"class = '{row.label}'"

    def gone(now: Version) -> set[int]:
        return {at for at, other in enumerate(now.rows) if (other.n, other.label) == (row.n, row.label)}

    if len(gone(state.now)) == len(state.now.rows):
        return None
    return leave_out(
        world, name, f"delete where {where}", lambda: delete(one.url, storage=one.storage, where=where), gone
    )


def deduped(world: World, state: SetState, name: str) -> Step:
    one, keep = world.sets[name], world.dice.choice(["first", "newest"])
    by = world.dice.choice(["key", "content", "json", *(["png"] if one.kind == "images" else [])])

    def gone(now: Version) -> set[int]:
        groups: dict[Any, list[int]] = {}
        for at, row in enumerate(now.rows):
            same = row.key if by == "key" else (sorted(row.fields.items()), row.label)
            groups.setdefault(str(same if by in {"key", "content"} else row.fields[by]), []).append(at)
        return {at for group in groups.values() for at in (group[1:] if keep == "first" else group[:-1])}

    return leave_out(
        world, name, f"dedupe by {by} keep {keep}",
        lambda: dedupe(one.url, storage=one.storage, by=by, keep=keep),  # type: ignore[arg-type]
        gone,
    )  # fmt: skip


def tagged(world: World, state: SetState, name: str) -> Step:
    one, number, label = world.sets[name], world.dice.choice([*state.versions]), world.name("t")
    is_current = number == state.number

    def apply(states: States) -> None:
        states[name].lives = True
        states[name].tags[label] = number

    return Step(
        words=f"tag {number} of {name} {label}", name=name, apply=apply, repeats=False,
        run=lambda: tag(one.url, label, storage=one.storage, version=None if is_current else number),
    )  # fmt: skip


def pruned(world: World, state: SetState, name: str) -> Step:
    one, keep = world.sets[name], world.dice.randrange(3)
    drop = [label for label in state.tags if world.dice.random() < 0.3]

    def run() -> None:
        """Prune, also after a run that was killed when it had given up the names."""
        there = {label for version in history(one.url, storage=one.storage).versions for label in version.names}
        prune(one.url, storage=one.storage, keep=keep, drop=[label for label in drop if label in there])

    return Step(words=f"prune {name} keep {keep} drop {drop}", name=name, run=run, is_apart=True,
                apply=lambda states: states[name].prune(keep, drop))  # fmt: skip


def computed(world: World, state: SetState, name: str) -> Step:
    one, late = world.sets[name], world.dice.choice(LATE)
    there = state.now.late.get(late, "")
    known = base_of(there)
    function = known if known in FUNCTIONS and world.dice.random() < 0.6 else world.dice.choice([*FUNCTIONS])
    overwrite = bool(known) and function != known
    world.num_ways += 1
    way = f"{function}#{world.num_ways}"

    def apply(states: States) -> None:
        if not overwrite and base_of(states[name].now.late.get(late, function)) != function:
            raise RefusedError(ConfigError, "made in another way")
        fill_late(states[name], late, way, lambda row: FUNCTIONS[function]({"__key__": row.key}),
                  overwrite=there if overwrite else "")  # fmt: skip

    return Step(
        words=f"field add {late} to {name} by {function}", name=name, apply=apply, repeats=not overwrite,
        run=lambda: compute_field(
            one.url, late, f"{__name__}:{function}", storage=one.storage, storage_options=one.options,
            fields=("json",), on_missing="skip", overwrite=overwrite, running=HERE,
        ),
    )  # fmt: skip


def joined(world: World, states: States, name: str) -> Step | None:
    one, state, late = world.sets[name], states[name], world.dice.choice(LATE)
    others = [other for other in states if world.sets[other].kind == one.kind and not states[other].now.again()]
    if not others:
        return None
    chosen = world.dice.choice(others)
    other, values = world.sets[chosen], {row.key: row for row in states[chosen].now.rows}
    given = "png" if one.kind == "images" else "json"
    there = state.now.late.get(late, "")
    world.num_ways += 1
    way = f"from {chosen}#{world.num_ways}"

    def apply(states: States) -> None:
        if not there and base_of(states[name].now.late.get(late, "")) in FUNCTIONS:
            raise RefusedError(ConfigError, "made in another way")
        fill_late(
            states[name], late, way, lambda row: values[row.key].fields[given] if row.key in values else None,
            overwrite=there,
        )  # fmt: skip

    return Step(
        words=f"field add {late} to {name} from {chosen}", name=name, apply=apply,
        may_lose=(ConfigError,),  # if somebody has joined it from other values
        repeats=chosen != name and not there,
        run=lambda: join_field(
            one.url, late, FromSet(url=other.url, field=given), storage=one.storage, storage_options=one.options,
            on_missing="skip", overwrite=bool(there),
        ),
    )  # fmt: skip


def base_of(way: str) -> str:
    return way.partition("#")[0]


def fill_late(
    state: SetState, late: str, way: str, value: Callable[[Row], bytes | None], *, overwrite: str
) -> None:  # fmt: skip
    """Add a late field to the model: all values, or those that are missing.

    Args:
        state: The model.
        late: The field.
        way: How its values are made.
        value: Returns the value of a row.
        overwrite: How the values were made that are replaced; "": none are. If somebody else has replaced them in the
            same way meanwhile, nothing is left to do.
    """
    now = state.now
    there = now.late.get(late, "")
    is_known = bool(there) and (not overwrite or (there != overwrite and base_of(there) == base_of(way)))
    if is_known and late not in now.lacking:
        return
    rows = [
        row if is_known and late in row.late else replace(row, late={**row.late, late: value(row)}) for row in now.rows
    ]  # fmt: skip
    how = way if not is_known else f"{now.late[late]}+"
    state.say(replace(now, rows=tuple(rows), late={**now.late, late: how}))


def dropped(world: World, state: SetState, name: str) -> Step | None:
    if not state.now.late:
        return None
    one, late = world.sets[name], world.dice.choice(sorted(state.now.late))

    def apply(states: States) -> None:
        state = states[name]
        state.say(without_late(state.now, {late}))

    return Step(words=f"field drop {late} of {name}", name=name, apply=apply, repeats=False, is_apart=not state.lives,
                run=lambda: drop_field(one.url, late, storage=one.storage))  # fmt: skip


def without_late(version: Version, names: set[str]) -> Version:
    rows = [replace(row, late={name: v for name, v in row.late.items() if name not in names}) for row in version.rows]
    return replace(
        version, rows=tuple(rows), late={name: how for name, how in version.late.items() if name not in names}
    )


# ------------------------------------------------------------------------------------------- steps that make other sets


def copied(world: World, state: SetState, name: str) -> Step:
    one, new = world.sets[name], world.name("c")
    other = world.add(new, one.kind, copy_of=name)

    def apply(states: States) -> None:
        state = states[name]
        now = without_late(state.now, {*state.now.late})
        states[new] = SetState(versions={1: now})

    return Step(words=f"copy {name} to {new}", name=name, makes=(new,), apply=apply,
                run=lambda: copy(one.url, other.url, storage_options=one.options))  # fmt: skip


def copied_again(world: World, states: States, name: str) -> Step | None:
    """Copy to where an earlier copy is that nobody changed."""
    there = [
        other for other, state in states.items()
        if world.sets[other].copy_of == name and not state.lives and not state.now.late
    ]  # fmt: skip
    if not there:
        return None
    new = world.dice.choice(there)
    one, other = world.sets[name], world.sets[new]

    def apply(states: States) -> None:
        state = states[name]
        now = without_late(state.now, {*state.now.late})
        states[new] = SetState(versions={1: now})

    return Step(words=f"copy {name} again to {new}", name=name, makes=(new,), apply=apply,
                may_fail=(TargetNotEmptyError,),
                run=lambda: copy(one.url, other.url, storage_options=one.options))  # fmt: skip


def halved(world: World, state: SetState, name: str) -> Step | None:
    one, stem = world.sets[name], world.name("h")
    if state.now.again() or len(state.now.rows) < 4:
        return None
    url, options = world.place(stem)
    names = (f"{stem}/train", f"{stem}/val")
    for each in names:
        world.add(each, one.kind, (f"{url}/{each.rpartition('/')[2]}", options))

    def apply(states: States) -> None:
        """Each row is in one of both sets, in its order, and always in the same one by its key."""
        now = without_late(states[name].now, {*states[name].now.late})
        seen = {each: shown for each in names if (shown := world.seen(each)) is not None}
        sides = {each: {*shown[3]} for each, shown in seen.items()}
        assert sum(map(len, sides.values())) == len(set().union(*sides.values()))
        assert len(sides) < len(names) or set().union(*sides.values()) == {*now.keys}
        for each, keys in sides.items():
            side = each.rpartition("/")[2]
            assert all(world.sides.setdefault(key, side) == side for key in keys)
            rows = tuple(row for row in now.rows if row.key in keys)
            states[each] = SetState(versions={1: replace(now, rows=rows)})

    return Step(
        words=f"split {name} into {stem}", name=name, makes=names, apply=apply, may_fail=(DataError,),
        run=lambda: split(
            one.url, {world.sets[each].url: Fraction(1, 2) for each in names},
            options=SplitOptions(max_samples=MOST_SAMPLES), storage_options=options,
        ),
    )  # fmt: skip


def merged(world: World, states: States, name: str) -> Step | None:
    others = [other for other in states if other != name and world.sets[other].kind == world.sets[name].kind]
    if not others:
        return None
    chosen, new = world.dice.choice(others), world.name("m")
    both, made = [world.sets[name], world.sets[chosen]], world.add(new, world.sets[name].kind)
    keys = [key for each in (name, chosen) for key in states[each].now.keys]
    prefix = "{number}_" if len({*keys}) < len(keys) else ""
    options = ReshardOptions(classes="union", max_samples=MOST_SAMPLES, key_prefix=prefix)

    def apply(states: States) -> None:
        two = [without_late(states[each].now, {*states[each].now.late}) for each in (name, chosen)]
        rows = (*two[0].rows, *two[1].rows)
        if prefix:
            rows = tuple(replace(row, key=f"{at:09d}_{row.key}") for at, row in enumerate(rows))
        classes = (*two[0].classes, *(one for one in two[1].classes if one not in two[0].classes))
        states[new] = SetState(versions={1: Version(rows=rows, classes=classes)})

    return Step(
        words=f"merge {name} and {chosen} as {new}", name=name, makes=(new,), apply=apply,
        run=lambda: reshard(
            [one.url for one in both], made.url, options=options, storage_options=made.options
        ),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- other checks


def check_tars(one: LivingSet, now: Version) -> None:
    """The shards of the current version are tars of its rows, whoever reads them."""
    there, found = one.files(), list[tuple[str, dict[str, bytes]]]()
    for shard in read_head(one.storage, one.url).table.shards:
        found += samples_in_tar(there[shard.name])
    assert [key for key, _ in found] == now.keys
    for (_, fields), row in zip(found, now.rows, strict=True):
        if row.label is not None:
            assert now.classes[int(fields.pop("cls"))] == row.label
        assert fields == {**row.fields}


def samples_in_tar(data: bytes) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and fields of each sample of a tar, as the convention of WebDataset has it."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            folder, slash, last = member.name.rpartition("/")
            stem, _, extension = last.partition(".")
            file = archive.extractfile(member)
            assert file is not None
            if not samples or samples[-1][0] != folder + slash + stem or extension in samples[-1][1]:
                samples.append((folder + slash + stem, {}))
            samples[-1][1][extension] = file.read()
    yield from samples


def check_left(one: LivingSet) -> None:
    """Nothing is left in a set that was pruned but what its versions hold."""
    tables = [read_head(one.storage, one.url).table, *(each.table for each in kept_versions(one.storage, one.url))]
    held = {path for table in tables for path in one.paths_of(table)}
    inputs = {name for table in tables for name in (table.version.inputs if table.version is not None else ())}
    there = one.files()
    left = {
        path
        for path in there
        if path.endswith(".tar") or path.startswith(("_shardstream/samples/", "_shardstream/fields/"))
    }
    assert left == {path for path in held if path in there}
    assert {Path(path).stem for path in there if path.startswith("_shardstream/inputs/")} == inputs
    assert not [path for path in there if path.startswith("_shardstream/pending/")]


def forget(world: World) -> None:
    """Remove what a history has left on disk and in memory."""
    shutil.rmtree(world.folder, ignore_errors=True)
    for one in world.sets.values():
        if one.url.startswith("memory://"):
            below = one.url.removeprefix("memory:/") + "/"
            for name in [name for name in MemoryFileSystem.store if name.startswith(below)]:
                del MemoryFileSystem.store[name]
        elif "://" not in one.url:
            shutil.rmtree(one.url, ignore_errors=True)
