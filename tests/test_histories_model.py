"""Random histories over all kinds of sets, with damage in shards and index, against ``model.py``.

A case is JSON, drawn from a seed and its number: a tree of data sets (filters, late columns, views, fields, decoders;
mixtures, packs, curricula, classes), often several over the same shards; options of the loader; bits that are flipped,
shards that are cut off or missing; and what happens to the job: it goes on, on other numbers of ranks, by resumes and
``remesh``, with other weights and sources. All that is delivered is checked against the model, then against a job
of another world whose index nobody damaged. Damage of the index may end a job with an error of ours, and no more.

A failure names the case and the least that is left of it when whatever does not matter is taken away.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from data_sets import mesh_of
from known_sets import CONDITIONS, FIELDS, VIEW, Sample, content, read, select, under_one_checksum
from model import MOST_OFF, Model, Row, Share, check_shares
from test_histories import draw_options, draw_tree, draw_weights, make

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, Schedule
from streaming.catalog.build import index_shards
from streaming.catalog.urls import expand_urls
from streaming.errors import ConfigError, MemoryLimitError, ShardstreamError
from streaming.index.cutter import ChunkRule
from streaming.storage import Storage

Case = dict[str, Any]
Spec = dict[str, Any]
MOST_LEAVES = 5
LEAST = (1 << 20, 256)
"""Bytes and samples at which a chunk may end (docs/format.md)."""


@dataclass(frozen=True)
class Shape:
    """How a set looks: its size, samples per shard, ranges of bytes and tokens, and where chunks may end."""

    size: int
    per_shard: int
    num_bytes: tuple[int, int]
    tokens: tuple[int, int] = (1, 60)
    least: tuple[int, int] = LEAST
    broken: float = 0.0
    is_indexed: bool = True

    @property
    def is_default(self) -> bool:
        return self.least == LEAST


COLUMNS = ("cls", "lang", "size", "tokens")
SHAPES = {
    "one": Shape(1, 1, (30_000, 40_000)),
    "chunk": Shape(40, 40, (1_000, 12_000), broken=0.05),
    "big": Shape(16, 8, (120_000, 300_000)),
    "mixed": Shape(48, 12, (1_000, 250_000), broken=0.04),
    "many": Shape(120, 5, (100, 1_000)),
    "cut": Shape(160, 60, (500, 3_000), tokens=(1, 300), least=(1, 10)),
    "docs": Shape(240, 80, (10, 200), tokens=(1, 400)),
    "long": Shape(24, 12, (10, 1_000), tokens=(1, 9_000)),
    "plain": Shape(32, 10, (1_000, 20_000), is_indexed=False),
}
LARGE = ("chunk", "mixed", "many", "cut", "docs")
FOR_TOKENS = ("chunk", "many", "cut", "docs", "long")


@dataclass
class Drop:
    """A transform that drops keys, by their hashes."""

    share: int

    def drops(self, key: str) -> bool:
        return crc32(b"drop" + key.encode()) % 100 < self.share

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if self.drops(sample["__key__"]) else sample


# --- sets ---


def draw_fields(dice: random.Random, shape: Shape, key: str) -> dict[str, bytes]:
    low, high = shape.num_bytes
    tokens = int(shape.tokens[0] * (shape.tokens[1] / shape.tokens[0]) ** dice.random())
    text = 11 * dice.randint(1, 20) + (10 if dice.random() < shape.broken else dice.randint(0, 9))
    sizes = {"bin": int(low * (high / low) ** dice.random()), "cls": 1, "mask": tokens, "tok": 2 * tokens, "txt": text}
    if dice.random() < 0.1:
        del sizes["txt"]
    return {name: content(key, name, size) for name, size in sizes.items()}


def write_pool(folder: Path, dice: random.Random) -> dict[str, list[Sample]]:
    """Write all sets: columns with the shards, or where these are indexed later, as late columns; ``score`` is one."""
    pool = {}
    for name, shape in SHAPES.items():
        made = {key: draw_fields(dice, shape, key) for key in (f"{name}{one:04d}" for one in range(shape.size))}
        known = {key: Sample(key, "", 0, 0, fields, {}).columns for key, fields in made.items()}
        lifted = {column: lambda one, column=column: known[one["__key__"]][column] for column in COLUMNS}
        with ShardWriter(
            f"{folder}/{name}/{{:06d}}.tar", max_samples=shape.per_shard, index=shape.is_indexed and shape.is_default,
            columns=lifted if shape.is_indexed and shape.is_default else None,
        ) as writer:  # fmt: skip
            for key, fields in made.items():
                writer.write({"__key__": key, **fields})
        pool[name] = read(folder / name)
        if shape.is_indexed and shape.size > 1:
            add_later(f"{folder}/{name}/", shape, known)
    return pool


def add_later(url: str, shape: Shape, known: dict[str, dict[str, Any]]) -> None:
    """Index the set, if its writer did not, and add late columns and a view."""
    if not shape.is_default:
        storage = Storage()
        rule = ChunkRule(min_bytes=shape.least[0], min_samples=shape.least[1])
        index_shards(storage, expand_urls(url, storage), rule=rule, parallel=1)
    for column in ("score",) if shape.is_default else ("score", *COLUMNS):
        has = {key: columns[column] for key, columns in known.items() if columns[column] is not None}
        pq.write_table(pa.table({"key": list(has), column: list(has.values())}), f"{url}/table.parquet")
        run_command("column", "add", url, column, "--from", f"{url}/table.parquet", "--on", "key")
    os.unlink(f"{url}/table.parquet")
    run_command("view", "save", url, "view", "--where", VIEW)


def run_command(*arguments: str) -> None:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


# --- cases ---


def draw_case(seed: int, number: int) -> Case:
    dice = random.Random(f"{seed}/{number}")
    length = dice.choice((64, 300, 1000)) if dice.random() < 0.3 else 0
    spec = draw_tree(dice, dice.choice((0, 1, 1, 1, 1, 2, 2)), length)
    while len(leaves := list(leaves_of(spec))) > MOST_LEAVES:
        spec = draw_tree(dice, 0, length)
    shared = dice.choice(FOR_TOKENS if length else LARGE) if dice.random() < 0.35 else None
    packing = draw_packing(dice) if length else {}
    for _, leaf, above in leaves:
        draw_selection(dice, leaf, above, shared, is_alone=len(leaves) == 1)
        if length:
            above["options"] = packing
            if packing.get("field", "tok") is None:
                above |= {"overlong": "drop", "length": 400_000 if packing["column"] == "size" else length}
    options = draw_options(dice, spec)
    options.pop("memory_limit", None)
    if packing.get("padded"):
        options["last_batch"] = dice.choice(("drop", "partial"))
    case: Case = {"spec": spec, "options": options, "damage": [], "play": dice.randrange(1 << 30), "happens": True,
                  "ranks": dice.randint(1, 4), "workers": 0, "threads": dice.choice((0, 0, 0, 1, 2)),
                  "batches": dice.choice((10, 25, 60))}  # fmt: skip
    if spec["kind"] == "mixture" and spec["quotas"] == "exact" and not length and dice.random() < 0.3:
        if all(one["kind"] == "leaf" for one in spec["sources"].values()):
            spec["options"]["fetch_bytes"] = dice.choice(("256KiB", "1MiB"))
    if dice.random() < 0.55:
        case["damage"] = draw_damage(dice, dice.choice(leaves)[1]["name"])
    return case


def leaves_of(spec: Spec, path: str = "", above: Spec | None = None) -> Iterator[tuple[str, Spec, Spec]]:
    """Path, leaf and what stands over it, of each."""
    if spec["kind"] == "leaf":
        yield path, spec, above if above is not None else {}
    elif spec["kind"] == "mixture":
        for name, source in spec["sources"].items():
            yield from leaves_of(source, f"{path}/{name}".lstrip("/"), spec)
    else:
        yield from leaves_of(spec["of"], path, spec)


def draw_selection(dice: random.Random, leaf: Spec, above: Spec, shared: str | None, *, is_alone: bool) -> None:
    kind = above.get("kind")
    names = FOR_TOKENS if kind == "packed" else LARGE if kind in ("balanced", "curriculum") else tuple(SHAPES)
    name = shared or dice.choice(names)
    leaf |= {"name": name, "of": name, "draws": False, "where": None, "subset": None}
    options: dict[str, Any] = {"max_bad_samples": 1.0, "on_error": dice.choice(("substitute", "substitute", "skip"))}
    if is_alone and dice.random() < 0.1:
        options["on_error"] = "raise"
    if kind != "packed":
        options["fields"] = dice.choice((None, None, ("bin",), ("cls", "txt"), ("tok", "bin"), ("txt",)))
        options["decode"] = dice.choice(("auto", "auto", None, {"cls": None}, {"txt": None}))
    if SHAPES[name].is_indexed and SHAPES[name].size > 1:
        leaf["where"] = dice.choice(list(CONDITIONS)) if dice.random() < 0.35 else None
        if dice.random() < 0.2:
            leaf["subset"] = dice.choice([(0.0, 0.5), (0.25, 1.0), (1, 14)])
        if dice.random() < 0.15:
            options["exclude"] = [f"{name}{dice.randrange(SHAPES[name].size):04d}" for _ in range(3)]
        if dice.random() < 0.1:
            options["view"] = "view"
    leaf["options"] = options
    if (kind != "packed" or above.get("options", {}).get("field", 1) is None) and dice.random() < 0.12:
        leaf["drops"] = 15
    leaf["is_cached"] = dice.random() < 0.1


def draw_packing(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.2:
        return {"padded": True, "field": None, "column": dice.choice(("tokens", "size"))}
    packing: dict[str, Any] = {"mask_field": dice.choice((None, None, "mask")), "shift_labels": dice.random() < 0.5}
    packing |= {"pad_id": dice.choice((0, 7)), "multiple": dice.choice((1, 1, 1, 4))}
    if dice.random() < 0.25:
        return packing | {"padded": True}
    return packing | {"labels_across": dice.random() < 0.4, "max_docs": dice.choice((None, None, 12))}


def draw_damage(dice: random.Random, name: str) -> list[Any]:
    """What happens to a set: ("flip", share of the shards' bytes or where), ("index", …), ("cut", shard), …"""
    kind = dice.random()
    if kind < 0.1 or not SHAPES[name].is_indexed:
        return [["missing" if SHAPES[name].is_indexed and kind < 0.05 else "cut", name, dice.random(), dice.random()]]
    flips = [["flip", name, dice.random(), dice.randrange(8)] for _ in range(dice.choice((1, 1, 2)))]
    index = [["index", name, dice.random(), dice.random(), dice.randrange(8)] for _ in range(dice.choice((1, 1, 3)))]
    return flips if kind < 0.5 else index if kind < 0.9 else flips + index


# --- damage ---


def hurt(folder: Path, pool: dict[str, list[Sample]], damage: list[Any], *, index_too: bool) -> dict[str, str]:
    """Copy the sets that are damaged, and damage them: their names by those of the whole ones."""
    names: dict[str, str] = {}
    for kind, name, share, *more in damage:
        if name not in names:
            names[name] = f"hurt{next(COPIES)}/{name}"
            shutil.copytree(folder / name, folder / names[name])
        if kind == "index" and index_too:
            files = sorted(one for one in (folder / names[name] / "_shardstream").rglob("*") if one.is_file())
            if files:
                file = files[int(share * len(files))]
                flip(file, int(more[0] * file.stat().st_size), more[1])
        elif kind == "flip":
            shard, at = place_of(pool[name], share)
            flip(folder / names[name] / shard, at, more[0])
        elif kind in ("cut", "missing"):
            shard, at = place_of(pool[name], share)
            if kind == "cut":
                os.truncate(folder / names[name] / shard, at)
            else:
                os.unlink(folder / names[name] / shard)
    return names


COPIES = count()


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))


def place_of(samples: list[Sample], share: float) -> tuple[str, int]:
    """A byte of all records: every fourth one of a header."""
    if share < 0.25:
        one = samples[int(4 * share * len(samples))]
        return one.shard, one.start + int(4096 * share) % 512
    at = int((share - 0.25) / 0.75 * sum(one.stop - one.start for one in samples))
    for one in samples:
        if at < one.stop - one.start:
            return one.shard, one.start + at
        at -= one.stop - one.start
    raise AssertionError(share)


# --- what must hold ---


def passes_of(spec: Spec, times: float | None = 1) -> Iterator[tuple[float | None]]:
    """How often an epoch reads each leaf, in the order of ``leaves_of``; None: the run has no end, or ends earlier."""
    if spec["kind"] in ("balanced", "curriculum"):
        yield None
    elif spec["kind"] == "mixture":
        for name, source in spec["sources"].items():
            options = spec["options"]
            here = None if times is None or "weights" in options else times * options.get("repeats", {}).get(name, 1)
            yield from passes_of(source, here)
    else:
        yield times


def model_of(case: Case, pool: dict[str, list[Sample]]) -> Model:
    shares = {}
    times = None if "epoch_size" in case["options"] else 1
    for (path, leaf, above), passes in zip(leaves_of(case["spec"]), passes_of(case["spec"], times), strict=True):
        name, options = leaf["of"], leaf["options"]
        samples = select(pool[name], leaf["where"], leaf["subset"], options.get("exclude", ()))
        if "view" in options:
            samples = select(samples, VIEW, None)
        flips = [place_of(pool[name], one[2]) for one in case["damage"] if one[:2] == ["flip", name]]
        suspects = [under_one_checksum(pool[name], *flip, SHAPES[name].least) for flip in flips]
        drop = Drop(leaf.get("drops", 0))
        is_packed = above.get("kind") == "packed"
        shares[path] = Share(
            samples, options.get("fields"), options.get("decode", "auto"), options["on_error"],
            frozenset(one.key for one in samples if drop.drops(one.key)), flips, set().union(*suspects),
            {"length": above["length"], "overlong": above["overlong"], **above["options"]} if is_packed else {}, passes,
            {"balanced": "cls", "curriculum": "tokens"}.get(above.get("kind", "")),
        )  # fmt: skip
    return Model(shares)


# --- jobs ---


class Job:
    """A job whose ranks are played together, and all that they got."""

    def __init__(self, case: Case, folder: Path, names: dict[str, str], model: Model) -> None:
        self.case, self.folder, self.names, self.model = case, folder, names, model
        self.spec, self.dice = copy.deepcopy(case["spec"]), random.Random(case["play"])
        self.options = dict(case["options"])
        size = self.options["global_batch_size"]
        self.most_ranks = min(case["ranks"], *(size.values() if isinstance(size, dict) else [size]))
        if isinstance(size, dict):
            self.options["global_batch_size"] = Schedule.steps({int(row): one for row, one in size.items()})
        if any(above.get("options", {}).get("padded") for _, _, above in leaves_of(self.spec)):
            self.options["collate_fn"] = list
        self.options |= {"num_workers": 2} if case["workers"] else {"num_threads": case["threads"]}
        self.ranks: list[DataLoader] = []
        self.iterators: list[Iterator[Any]] | None = None
        self.epoch = self.num_rows = 0
        self.batches: list[tuple[int, list[Row]]] = []
        self.whole: set[int] = set()
        self.bad: dict[int, set[str]] = {}
        self.told: list[str] = []
        self.opened: Any = None
        self.is_endless = is_endless(self.spec)
        self.is_drawn_from = self.is_endless and self.spec["kind"] == "mixture"
        self.weights: list[tuple[int, dict[str, float]]] = []

    def dataset(self) -> Any:
        """The data set: that of the last time, or opened once more."""
        if self.opened is None or self.dice.random() < 0.2:
            self.opened = self.made()
        return self.opened

    def made(self) -> Any:
        spec = copy.deepcopy(self.spec)
        for _, leaf, _ in leaves_of(spec):
            leaf["name"] = self.names.get(leaf["of"], leaf["of"])
            if leaf.get("drops"):
                leaf["options"]["transform"] = Drop(leaf["drops"])
            if leaf.get("is_cached"):
                leaf["options"]["cache_dir"] = str(self.folder / "cache")
        return make(self.folder, spec)

    def open(self, num_ranks: int, state: Any = None) -> None:
        dataset = self.dataset()
        for rank in range(num_ranks):
            self.ranks.append(DataLoader(dataset, device_mesh=mesh_of(num_ranks, rank), **self.options))
            if state is not None:
                self.ranks[-1].load_state_dict(json.loads(json.dumps(state)))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks, self.iterators = [], None

    def step(self) -> bool:
        """Take a batch on each rank; whether there was one."""
        self.iterators = self.iterators or [iter(rank) for rank in self.ranks]
        batches = [next(one, None) for one in self.iterators]
        assert len({batch is None for batch in batches}) == 1, "ranks end at different batches"
        if batches[0] is None:
            return False
        self.batches.append((self.epoch, [row for batch in batches for row in self.model.rows(batch)]))
        return True

    def state(self) -> Any:
        """The state, the same on all ranks; who asks for it leaves the loop."""
        self.listen()
        states = [json.dumps(rank.state_dict(), sort_keys=True) for rank in self.ranks]
        assert len(set(states)) == 1, "states differ"
        state = json.loads(states[0])
        self.go_to(state["epoch"])
        self.iterators = None
        return state

    def go_to(self, epoch: int) -> None:
        if epoch > self.epoch:
            assert epoch == self.epoch + 1
            self.whole.add(self.epoch)
        self.epoch = epoch

    def listen(self) -> None:
        """Note who is blamed."""
        for rank in self.ranks:
            self.bad.setdefault(self.epoch, set()).update(one["key"] for one in rank.metrics()["bad"])

    def play(self, most_batches: int, most_epochs: int) -> None:
        if not self.ranks:
            self.open(self.dice.randint(1, self.most_ranks))
        while len(self.batches) < most_batches and self.epoch < most_epochs:
            if not self.step():
                self.listen()
                self.go_to(self.epoch + 1)
                self.iterators = None
            elif self.case["happens"] and self.dice.random() < 0.12:
                acts = [self.resume, self.resume, self.remesh, self.copied]
                acts += [self.set_weights, self.other_sources] * (2 * self.is_drawn_from)
                act = self.dice.choice(acts)
                self.told.append(f"{act.__name__} in epoch {self.epoch} after {len(self.batches)} batches")
                act()
        self.listen()

    # --- what happens ---

    def resume(self) -> None:
        state = self.state()
        self.close()
        self.open(self.dice.randint(1, self.most_ranks), state)

    def remesh(self) -> None:
        state, places = self.state(), list(range(self.dice.randint(1, self.most_ranks)))
        self.dice.shuffle(places)
        for rank in self.ranks[len(places) :]:
            rank.close()
        del self.ranks[len(places) :]
        dataset = self.dataset()
        while len(self.ranks) < len(places):
            self.ranks.append(DataLoader(dataset, device_mesh=mesh_of(1, 0), **self.options))
        for rank, place in zip(self.ranks, places, strict=True):
            rank.remesh(place, len(places), at=state)

    def copied(self) -> None:
        self.state()
        copies = [copy.deepcopy(rank) for rank in self.ranks]
        self.close()
        self.ranks = copies

    def set_weights(self) -> None:
        weights = draw_weights(self.dice, list(self.spec["sources"]))
        state = self.ranks[0].state_dict()
        row = state["epoch"] * self.options.get("epoch_size", 0) + state["samples_seen"]
        row += self.dice.choice((0, 5, 40, 300))
        answers = [takes(rank, weights, row) for rank in self.ranks]
        assert len(set(answers)) == 1, "one rank refuses what another takes"
        if answers[0]:
            self.weights.append((row, weights))

    def other_sources(self) -> None:
        """Go on with other weights, or with one source more."""
        spec = copy.deepcopy(self.spec)
        before, self.spec = self.spec, spec
        spec["options"]["weights"] = draw_weights(self.dice, list(spec["sources"]))
        state, self.opened = self.state(), None
        self.close()
        self.open(self.dice.randint(1, self.most_ranks), state)
        self.weights.append((-1, {}))


def takes(loader: DataLoader, weights: dict[str, float], row: int) -> bool:
    try:
        return loader.set_weights(weights, at=row) == row
    except ConfigError as refusal:
        assert "planned already" in str(refusal)
        return False


def is_endless(spec: Spec) -> bool:
    if spec["kind"] == "mixture":
        return "weights" in spec["options"] and "ends" not in spec["options"]
    return spec["kind"] in ("balanced", "curriculum")


# --- the judge ---


def judge(case: Case, folder: Path, pool: dict[str, list[Sample]]) -> str:
    """Play a case: "played", "ended" by an error that is due, or "refused".

    Raises:
        AssertionError: Something does not hold.
    """
    case = json.loads(json.dumps(case))
    model = model_of(case, pool)
    kinds = {one[0] for one in case["damage"]}
    job = Job(case, folder, hurt(folder, pool, case["damage"], index_too=True), model)
    try:
        try:
            job.play(case["batches"], 2)
        except ShardstreamError as error:
            if not job.batches and isinstance(error, ConfigError) and "index" not in kinds:
                return f"refused: {error}"
            if kinds & {"index", "cut", "missing"} or is_scarce(model):
                return "ended"
            raise AssertionError(f"no reason to end: {error!r}") from error
        assert not kinds & {"cut", "missing"}, "a shard is cut off or missing, and nobody says so"
        check(case, job, model)
        compare(case, job, folder, pool)
    finally:
        job.close()
        for name in set(job.names.values()):
            shutil.rmtree((folder / name).parent)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    return "played"


def is_scarce(model: Model) -> bool:
    """Whether lost samples end the run: they are raised, or there may be none that could stand in for them."""
    return any(
        share.may_be_lost and (share.on_error == "raise" or share.is_half_lost())
        for share in model.shares.values()
    )


def check(case: Case, job: Job, model: Model) -> None:
    options, spec = case["options"], case["spec"]
    by_batches = spec.get("options", {}).get("batches") == "one_source"  # an epoch begins with what was left out
    is_cut = options["last_batch"] == "drop" or by_batches
    for epoch in range(job.epoch + 1):
        rows = [row for number, batch in job.batches if number == epoch for row in batch]
        bad, is_whole = job.bad.get(epoch, set()), epoch in job.whole and not is_cut
        model.check_epoch(rows, bad, is_whole=is_whole, slack=by_batches and epoch > 0)
    rows = [row for _, batch in job.batches for row in batch]
    if job.is_endless and not ("epoch_size" in options and is_cut):
        model.check_passes(rows, 2)


def compare(case: Case, job: Job, folder: Path, pool: dict[str, list[Sample]]) -> None:
    """A job of another world to which nothing happens, over the same shards and a sound index, gets the same."""
    calm = Job({**case, "happens": False, "play": case["play"] + 1}, folder, job.names, job.model)
    try:
        if any(one[0] == "index" for one in case["damage"]):
            calm.names = hurt(folder, pool, case["damage"], index_too=False)
        if job.is_endless:
            calm.spec, state = job.spec, job.state()
        if calm.names == job.names:
            calm.opened = job.opened
        if job.is_endless:
            calm.open(calm.dice.randint(1, calm.most_ranks), {**state, "epoch": 0, "samples_seen": 0})
        calm.play(len(job.batches), 9)
        for (epoch, got), (other_epoch, due) in zip(job.batches, calm.batches, strict=True):
            assert epoch == other_epoch
            pads = case["options"]["last_batch"] == "pad"
            here, there = (Counter(row for row in rows if row[2] or not pads) for rows in (got, due))
            assert here == there, f"{here - there} in place of {there - here} in epoch {epoch}"
    finally:
        calm.close()
        for name in set(calm.names.values()) - set(job.names.values()):
            shutil.rmtree((folder / name).parent)


# --- less of a case that fails ---


def simpler(case: Case) -> Iterator[Case]:
    """The case without one thing after another."""
    for name, value in (("happens", False), ("ranks", 1), ("threads", 0), ("workers", 0), ("batches", 10)):
        yield {**case, name: value}
    for number in range(len(case["damage"])):
        yield {**case, "damage": case["damage"][:number] + case["damage"][number + 1 :]}
    for name, value in (("last_batch", "partial"), ("prefetch_factor", 1), ("epoch_size", None)):
        yield {**case, "options": {key: one for key, one in {**case["options"], name: value}.items() if one is not None}}
    for path in paths_of(case["spec"]):
        for change in (smaller_mixture, only_source, plain_leaf):
            for number in range(8):
                spec = copy.deepcopy(case["spec"])
                if (changed := at(spec, path, lambda one, c=change, n=number: c(one, n))) is not None:
                    yield {**case, "spec": changed}


def paths_of(spec: Spec, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, source in spec.get("sources", {}).items():
        yield from paths_of(source, (*path, "sources", name))
    if "of" in spec and isinstance(spec["of"], dict):
        yield from paths_of(spec["of"], (*path, "of"))


def at(spec: Spec, path: tuple[str, ...], change: Callable[[Spec], Spec | None]) -> Spec | None:
    """The spec with what lies at a path replaced; None: there is nothing to change."""
    if not path:
        return change(spec)
    changed = at(spec[path[0]], path[1:], change)
    return None if changed is None else {**spec, path[0]: changed}


def smaller_mixture(spec: Spec, number: int) -> Spec | None:
    """Without a source."""
    names = list(spec.get("sources", ()))
    if len(names) < 2 or number >= len(names):
        return None
    without = lambda one: {key: value for key, value in one.items() if key != names[number]}  # noqa: E731
    options = dict(spec["options"])
    for name in {"weights", "repeats"} & options.keys():
        scheduled = "0" in options[name]
        options[name] = {row: without(one) for row, one in options[name].items()} if scheduled else without(options[name])
    return {**spec, "sources": without(spec["sources"]), "options": options}


def only_source(spec: Spec, number: int) -> Spec | None:
    """One of the sources alone."""
    sources = list(spec.get("sources", {}).values())
    return sources[number] if number < len(sources) else None


def plain_leaf(spec: Spec, number: int) -> Spec | None:
    """A leaf without an option."""
    options = {"where": None, "subset": None, "drops": 0, "is_cached": False}
    if spec["kind"] == "leaf" and number < len(options):
        name = list(options)[number]
        return {**spec, name: options[name]} if spec.get(name) else None
    left = [name for name in spec.get("options", ()) if name in OPTIONAL]
    if spec["kind"] not in ("leaf", "packed") or not number - len(options) in range(len(left)):
        return None
    return {**spec, "options": {name: one for name, one in spec["options"].items() if name != left[number - len(options)]}}


OPTIONAL = ("fields", "decode", "exclude", "view", "mask_field", "pad_id", "shift_labels", "labels_across", "max_docs")


def least_of(case: Case, fails: Callable[[Case], bool], most_tries: int = 80) -> Case:
    """What is left of a case that fails when all that does not matter is taken away."""
    tries = count()
    while True:
        for one in simpler(case):
            if one != case and next(tries) < most_tries and fails(one):
                case = one
                break
        else:
            return case
