"""Random histories over all kinds of sets, with damage in shards and index, against ``delivery_model.py``.

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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from streaming import DataLoader, Schedule
from streaming.errors import ConfigError, ShardstreamError
from tests.support.models.delivery_model import MOST_OFF, Model, Row, Share, check_shares
from tests.support.models.drawn_sets import MOST_RANKS, draw_weights, make
from tests.support.models.history_cases import SHAPES, Case, Spec, draw_case, least_of, leaves_of
from tests.support.models.history_sets import Pools
from tests.support.models.known_sets import VIEW, Sample, select, under_one_checksum
from tests.support.sets.data_sets import mesh_of

NUM_PARTS = 4
MOST_AHEAD = 2
"""Passes that a sample may be ahead of another: two across a border of the window."""
COPIES = count()
"""Numbers of the folders of damaged sets."""


@dataclass
class Drop:
    """A transform that drops keys, by their hashes."""

    share: int

    def drops(self, key: str) -> bool:
        return crc32(b"drop" + key.encode()) % 100 < self.share

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if self.drops(sample["__key__"]) else sample


# --- sets ---


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
        self.epoch = 0
        self.batches: list[tuple[int, list[Row]]] = []
        self.sizes: dict[int, list[int]] = {}
        self.whole: set[int] = set()
        self.bad: dict[int, set[str]] = {}
        self.told: list[str] = []
        self.opened: Any = None
        self.is_endless = is_endless(self.spec)
        self.is_drawn_from = self.is_endless and self.spec["kind"] == "mixture"
        self.weights: list[tuple[int, dict[str, float]]] | None = weights_of(self.spec)

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
        num_ranks = min(num_ranks, self.most_of(dataset))
        for rank in range(num_ranks):
            self.ranks.append(DataLoader(dataset, device_mesh=mesh_of(num_ranks, rank), **self.options))
            if state is not None:
                self.ranks[-1].load_state_dict(json.loads(json.dumps(state)))

    def most_of(self, dataset: Any) -> int:
        """The most ranks that a set can be dealt to."""
        return int(self.options.get("epoch_size") or (MOST_RANKS if self.is_endless else len(dataset)))

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
        sizes = [len(batch if isinstance(batch, list) else batch["__key__"]) for batch in batches]
        assert max(sizes) - min(sizes) <= 1, f"ranks get {sizes} rows"
        self.sizes.setdefault(self.epoch, []).append(sum(sizes))
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
        most = min(self.most_ranks, self.most_of(self.opened))
        state, places = self.state(), list(range(self.dice.randint(1, most)))
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
        self.iterators = None  # the copies go on from where the loops left their loaders
        self.state()
        copies = [copy.deepcopy(rank) for rank in self.ranks]
        self.close()
        self.ranks = copies

    def set_weights(self) -> None:
        weights = draw_weights(self.dice, list(self.spec["sources"]))
        state = self.ranks[0].state_dict()
        row = state["epoch"] * self.options.get("epoch_size", 0) + state["samples_seen"]
        row += self.dice.choice((0, 5, 40, 300, 1_000))
        answers = [takes(rank, weights, row) for rank in self.ranks]
        assert len(set(answers)) == 1, "one rank refuses what another takes"
        self.told[-1] += f": {weights} from row {row} on, {'taken' if answers[0] else 'refused'}"
        if answers[0] and self.weights is not None:
            self.weights = [*(one for one in self.weights if one[0] < row), (row, weights)]

    def other_sources(self) -> None:
        """Go on with other weights, or with one source more: one that the model knows, under another name."""
        before, names = self.spec, list(self.spec["sources"])
        self.spec = copy.deepcopy(before)
        if (name := self.dice.choice(names)) + "+" not in names and self.dice.random() < 0.5:
            self.spec["sources"][f"{name}+"] = self.spec["sources"][name]
            known = [(path, share) for path, share in self.model.shares.items() if f"{path}/".startswith(f"{name}/")]
            self.model.shares |= {f"{name}+{path[len(name) :]}": share for path, share in known}
        self.spec["options"]["weights"] = draw_weights(self.dice, list(self.spec["sources"]))
        state, self.opened, self.weights = self.state(), None, None
        self.close()
        self.open(self.dice.randint(1, self.most_ranks), state)


def weights_of(spec: Spec) -> list[tuple[int, dict[str, float]]] | None:
    """From which row on which weights hold, if they count samples, exactly."""
    options = spec.get("options", {})
    if options.get("unit") != "samples" or spec["quotas"] != "exact" or "ends" in options or "batches" in options:
        return None
    weights = options["weights"]
    return sorted((int(row), one) for row, one in (weights if "0" in weights else {"0": weights}).items())


def takes(loader: DataLoader, weights: dict[str, float], row: int) -> bool:
    """Whether the rank takes weights from a row on; it refuses rows that are planned."""
    try:
        return loader.set_weights(weights, at=row) == row
    except ConfigError as refusal:
        if "planned already" not in str(refusal):
            raise
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
    except Exception as error:
        error.add_note(f"what happened: {'; '.join(job.told)}")
        raise
    finally:
        job.close()
        for name in set(job.names.values()):
            shutil.rmtree((folder / name).parent)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    return "played"


def is_scarce(model: Model) -> bool:
    """Whether lost samples end the run: they are raised, or there may be none that could stand in for them."""
    return any(
        share.may_be_lost and (share.on_error == "raise" or share.is_half_lost()) for share in model.shares.values()
    )


def check(case: Case, job: Job, model: Model) -> None:
    """Check all that ranks got together, but for what another job gets."""
    options, spec, rows = case["options"], case["spec"], [row for _, batch in job.batches for row in batch]
    by_batches = spec.get("options", {}).get("batches") == "one_source"
    is_cut = options["last_batch"] == "drop" or by_batches
    for epoch in range(job.epoch + 1):
        batches = [batch for number, batch in job.batches if number == epoch]
        bad, is_whole = job.bad.get(epoch, set()), epoch in job.whole and not is_cut
        # an epoch begins with what the one before left of a pass
        goes_on = epoch > 0 and (by_batches or any((one.passes or 0) % 1 for one in model.shares.values()))
        model.check_epoch(chain.from_iterable(batches), bad, is_whole=is_whole, slack=goes_on)
        if not isinstance(size := options["global_batch_size"], dict):
            padded = {-(-size // ranks) * ranks for ranks in (1, 2, 3, 4) if options["last_batch"] == "pad"}
            assert set(job.sizes.get(epoch, [])[:-1]) <= {size, *padded}, f"{job.sizes[epoch]} rows in place of {size}"
            if spec["kind"] == "leaf" and spec["shuffle"] is False and "epoch_size" not in options:
                model.check_order(batches, size)
    if job.is_endless and not ("epoch_size" in options and is_cut):
        model.check_passes(rows, MOST_AHEAD)
        if job.weights is not None and "epoch_size" not in options and not model.pack:
            check_shares([batch for _, batch in job.batches], job.weights, MOST_OFF * len(job.weights))
    is_counted = not model.pack and options["last_batch"] != "pad" and "epoch_size" not in options
    if job.is_drawn_from and is_counted:
        seen = Counter[str]()
        for name, one in job.ranks[0].seen().items():  # of classes and buckets, where these are sources
            seen[next(path for path in model.shares if f"{name}/".startswith(f"{path}/"))] += one["samples"]
        assert +seen == Counter(path for path, _, _ in rows), f"seen: {seen}"


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


# --- tests ---


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Pools:
    return Pools(tmp_path_factory.mktemp("model") / "pools")


def play(seed: int, number: int, pools: Pools) -> str:
    """Play a case: how it ended.

    Raises:
        AssertionError: It failed: with its seed and number, and with what is left of it without all that does not
            matter.
    """
    folder, pool = pools.of(seed, number)
    case = draw_case(seed, number)
    try:
        return judge(case, folder, pool)
    except Exception as error:
        kind = type(error)
        least = least_of(case, lambda one: error_of(one, folder, pool) is kind)
        raise AssertionError(
            f"case {number} of seed {seed}: {error!r}; to run it alone: pytest -n 0 "
            "tests/histories/test_histories_model.py "
            f"--differential-seed {seed} --differential-first {number} --differential-cases 1\n"
            f"without all that does not matter: {json.dumps(least)}"
        ) from error


def error_of(case: Case, folder: Path, pool: dict[str, list[Sample]]) -> type[Exception] | None:
    try:
        judge(case, folder, pool)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.timeout(36_000)
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_what_is_delivered_is_what_was_written(
    part: int, pools: Pools, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="streaming")  # every lost sample is told of
    seed, first, cases = (int(request.config.getoption(f"--differential-{x}")) for x in ("seed", "first", "cases"))
    num = cases if cases > 300 else max(1, cases // 5)  # 20, and under --matrix 60
    results = Counter(
        play(seed, number, pools).partition(":")[0] for number in range(first + part, first + num, NUM_PARTS)
    )
    print(f"histories against the model: {dict(results)}")
    assert 2 * results["refused"] <= results.total() + 3, "else most of what is drawn is refused"
