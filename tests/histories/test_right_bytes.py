"""The bytes of each row are those of its key: every kind of set, under damage, drops, ``fields=``, workers and resumes.

Each field of a sample encodes the sample's number, so that one look at a row tells whether all of it belongs together.
What is delivered is compared, row by row, with what the same set delivers undamaged: samples that are bad, and no
others, are replaced, by sound ones of the same source.

A new kind of set is one line of ``KINDS``; it then meets all circumstances.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import Balanced, Curriculum, DataLoader, Mixture, Packed, Schedule, ShuffleConfig, StreamingDataset
from streaming.shards.index.sample_table import SampleTable
from tests.support.sets.data_sets import mesh_of
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM, PER_SHARD = 32, 8
NUM_CLASSES = 3
WIDTH = 100_000  # numbers of 2 bytes: each sample has 200 KB, more than the holes that are left out of a read
BUDGET, OTHER_BUDGET = 150, 60
EXPECTED: dict[str, Callable[[int], Any]] = {
    "cls": lambda n: n,
    "txt": lambda n: f"text of {n:05d}",
    "json": lambda n: {"number": n},
    "bin": lambda n: np.full(WIDTH, n, "<u2").tobytes(),
    "tok": lambda n: np.full(tokens_of(n), n, "<u2").tobytes(),
}


def tokens_of(number: int) -> int:
    return 3 + number * 7 % 50


@cache
def value_of(name: str, number: int) -> Any:
    return EXPECTED[name](number)


# --- what can be wrong with a set ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is wrong with which samples.

    Attributes:
        undecodable: They were written so that neither their text nor their tokens can be decoded.
        incomplete: They have neither text nor tokens, which only those that need tokens miss.
        flipped: Bytes of them changed in the store; only checksums of an index that was made before tell.
        dropped: A transform drops them: they are replaced, and are not bad.
    """

    undecodable: frozenset[int] = frozenset()
    incomplete: frozenset[int] = frozenset()
    flipped: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()

    def lost(self, *, of_tokens: bool) -> frozenset[int]:
        """The samples that cannot be delivered."""
        return self.undecodable | self.flipped | self.dropped | (self.incomplete if of_tokens else frozenset())


NO_DAMAGE = Damage()
DAMAGE = {
    "bad samples": Damage(undecodable=frozenset({9}), incomplete=frozenset({12, 27}), flipped=frozenset({14, 19})),
    "a bad chunk": Damage(undecodable=frozenset({2}), flipped=frozenset(range(PER_SHARD, 2 * PER_SHARD))),
    "drops": Damage(dropped=frozenset({9, 12, 19})),
}


def write(folder: Path, damage: Damage) -> None:
    columns = {
        "number": lambda sample: sample["cls"],
        "kind": lambda sample: sample["cls"] % NUM_CLASSES,
        "tokens": lambda sample: tokens_of(sample["cls"]),
    }
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=PER_SHARD, columns=columns) as writer:
        for number in range(NUM):
            sample = {"__key__": f"{number:05d}"} | {name: value_of(name, number) for name in EXPECTED}
            if number in damage.undecodable:  # no text, and half a token too many
                sample |= {"txt": b"\xff" * len(sample["txt"]), "tok": sample["tok"] + b"\xff"}
            if number in damage.incomplete:
                del sample["txt"], sample["tok"]
            writer.write(sample)


def flip(folder: Path, numbers: frozenset[int]) -> None:
    """Flip a byte of the large field of each of these samples, and one of each other field."""
    for number in numbers:
        path = folder / f"{number // PER_SHARD:06d}.tar"
        table = SampleTable.from_parquet((folder / f"_shardstream/samples/{path.name}.parquet").read_bytes(), "")
        with path.open("r+b") as file:
            for starts, _ in table.fields.values():
                file.seek(int(starts[number % PER_SHARD]))
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 4]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the set with some damage, written once; compressed or not."""

    @cache
    def written(damage: Damage) -> Path:
        folder = tmp_path_factory.mktemp("set")
        write(folder, damage)
        flip(folder, damage.flipped)
        return folder

    @cache
    def folder(damage: Damage, *, compressed: bool) -> Path:
        plain = written(replace(damage, dropped=frozenset()))
        if not compressed:
            return plain
        packed = tmp_path_factory.mktemp("compressed")
        for path in plain.glob("*.tar"):
            (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        return packed

    return folder


# --- kinds of sets ---

Open = Callable[..., StreamingDataset]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of set.

    Attributes:
        make: Makes it from a function that opens the samples with the options of the circumstances, and more.
        loader: Options of the loader.
        indexed: Whether there is an index before the damage.
        streams: Whether the shards are streamed: then no substitute is the same on every world size.
        alike: Whether other kinds show the same mechanism, so that this one is left to ``make matrix``.
        fields: What is read where not all fields are: two of them.
    """

    make: Callable[[Open], Any]
    loader: Mapping[str, Any] = field(default_factory=dict)
    indexed: bool = True
    streams: bool = False
    alike: bool = False
    fields: tuple[str, ...] = ("txt", "cls")


def pair(one: Any, other: Any, **options: Any) -> Mixture:
    return Mixture({"one": one, "other": other}, **options)


EVEN = {"weights": {"one": 1, "other": 1}}
ENDLESS = {"epoch_size": 60}
SMALL: Mapping[str, Any] = {"fields": ("txt", "cls")}
LARGE: Mapping[str, Any] = {"fields": ("txt", "bin")}
STREAM = {"epoch_size": 36, "global_batch_size": 12}  # more rows a rank than are lost: only these replace each other
PACKS = {"global_batch_size": 3}
TOKENS = ("txt", "tok")
BY_SIZE: Mapping[str, Any] = {"column": "tokens", "padded": True, "field": None}


def pack(open_: Open, length: int = 40, **options: Any) -> Packed:
    return Packed(open_(), length, **options)


KINDS = {
    "plain": Kind(make=lambda open_: open_()),
    "in storage order": Kind(make=lambda open_: open_(shuffle=False)),
    "where": Kind(make=lambda open_: open_(where="kind != 1")),
    "excluded": Kind(make=lambda open_: open_(exclude=[f"{number:05d}" for number in (8, 10, 11, 20)]), alike=True),
    "subset": Kind(make=lambda open_: open_(subset=(0.1, 0.8))),
    "view": Kind(make=lambda open_: open_()[5:27]),
    "view of a filter": Kind(make=lambda open_: open_(where="kind != 1")[3:18]),
    "without index": Kind(make=lambda open_: open_(), indexed=False),
    "streamed": Kind(
        make=lambda open_: open_(shuffle=ShuffleConfig(window=6)),
        loader=STREAM,
        indexed=False,
        streams=True,
    ),
    "jagged": Kind(make=lambda open_: open_(decode={"tok": "array:uint16"}, fields=None), loader={"jagged": ("tok",)}),
    "twice": Kind(make=lambda open_: pair(open_(), open_()), alike=True),
    "unlike fields": Kind(make=lambda open_: pair(open_(**SMALL), open_(**LARGE)), alike=True),
    "unlike fields, drawn": Kind(make=lambda open_: pair(open_(**SMALL), open_(**LARGE), **EVEN), loader=ENDLESS),
    "unlike fields, exact": Kind(
        make=lambda open_: pair(open_(**SMALL), open_(**LARGE), quotas="exact", **EVEN), loader=ENDLESS
    ),
    "unlike fields, cut": Kind(
        make=lambda open_: pair(open_(**SMALL), open_(**LARGE), quotas="exact", fetch_bytes={"other": "300KB"}, **EVEN),
        loader=ENDLESS,
    ),
    "unlike filters": Kind(make=lambda open_: pair(open_(where="kind = 0"), open_(where="kind != 1"))),
    "unlike filters, drawn": Kind(
        make=lambda open_: pair(open_(where="kind = 0"), open_(exclude=["00003", "00010"]), **EVEN), loader=ENDLESS
    ),
    "views": Kind(make=lambda open_: pair(open_()[:13], open_()[13:])),
    "nested": Kind(
        make=lambda open_: pair(pair(open_(where="kind = 0"), open_(**SMALL)), open_(where="kind = 0"), **EVEN),
        loader=ENDLESS,
    ),
    "batches of one source": Kind(
        make=lambda open_: pair(open_(**SMALL), open_(where="kind = 0"), batches="one_source", **EVEN), loader=ENDLESS
    ),
    "balanced": Kind(make=lambda open_: Balanced(open_(), "kind", name_sources=True), loader=ENDLESS),
    "balanced, exact": Kind(
        make=lambda open_: Balanced(open_(), "kind", name_sources=True, quotas="exact"), loader=ENDLESS, alike=True
    ),
    "balanced, mixed": Kind(
        make=lambda open_: pair(Balanced(open_(), "kind", name_sources=True), open_(**SMALL), **EVEN), loader=ENDLESS
    ),
    "curriculum": Kind(
        make=lambda open_: Curriculum(
            open_(), "tokens", Schedule.steps({0: 0.5, 30: 1.0}), buckets=4, name_sources=True
        ),
        loader=ENDLESS,
    ),
    "packed": Kind(make=pack, loader=PACKS, fields=TOKENS),
    "packed, truncated": Kind(
        make=lambda open_: pack(open_, overlong="truncate"), loader=PACKS, fields=TOKENS, alike=True
    ),
    "packed, dropped": Kind(make=lambda open_: pack(open_, overlong="drop"), loader=PACKS, fields=TOKENS, alike=True),
    "packed in windows": Kind(make=lambda open_: pack(open_, stride=20), loader=PACKS, fields=TOKENS),
    "packed, padded": Kind(
        make=lambda open_: pack(open_, BUDGET, padded=True), loader={"batch_size": 1}, fields=TOKENS
    ),
    "packed, mixed": Kind(
        make=lambda open_: pair(pack(open_), Packed(open_(where="kind = 0"), 40)), loader=PACKS, fields=TOKENS
    ),
    "by size": Kind(make=lambda open_: Packed(open_(), BUDGET, **BY_SIZE), loader={"batch_size": 1}),
    "by size, some left out": Kind(make=lambda open_: Packed(open_(), 45, **BY_SIZE), loader={"batch_size": 1}),
    "by size, other budgets": Kind(
        make=lambda open_: Packed(open_(), BUDGET, budgets={"number": OTHER_BUDGET}, **BY_SIZE),
        loader={"batch_size": 1},
    ),
    "by size, alike": Kind(
        make=lambda open_: Packed(open_(), BUDGET, alike=("kind",), **BY_SIZE), loader={"batch_size": 1}
    ),
    "by size, mixed": Kind(
        make=lambda open_: pair(Packed(open_(), BUDGET, **BY_SIZE), Packed(open_(where="kind = 0"), BUDGET, **BY_SIZE)),
        loader={"batch_size": 1},
    ),
}


# --- circumstances ---


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Case:
    """A kind of set in its circumstances."""

    kind: str
    damage: str = "bad samples"
    fields: bool = False
    ranks: int = 1
    workers: int = 0
    resumes: bool = False
    cached: bool = False
    on_error: str = "substitute"

    def __str__(self) -> str:
        said = [self.kind, self.damage, f"{self.ranks} ranks", self.on_error]
        said += ["fields"] * self.fields + ["workers"] * bool(self.workers)
        return ", ".join([*said, *["resumed"] * self.resumes, *["cached"] * self.cached])

    @property
    def nearest(self) -> Case:
        """The same case without the circumstances that do not exist for its kind."""
        return replace(self, fields=False, cached=False, resumes=False) if KINDS[self.kind].streams else self

    @property
    def exists(self) -> bool:
        kind = KINDS[self.kind]
        if self.kind.startswith("packed") and self.damage == "drops":
            return False  # tokens have no transform
        if not kind.indexed and self.damage == "a bad chunk":
            return False  # nothing tells
        return not (kind.streams and (self.cached or self.resumes or self.fields))

    @property
    def found(self) -> Damage:
        """The damage that can be found."""
        damage = DAMAGE[self.damage]
        return damage if KINDS[self.kind].indexed else replace(damage, flipped=frozenset())

    @property
    def lost(self) -> frozenset[int]:
        """The samples that cannot be delivered."""
        return self.found.lost(of_tokens=self.kind.startswith("packed"))


AXES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS), "damage": tuple(DAMAGE), "fields": (False, True), "ranks": (1, 2, 3), "workers": (0, 2),
    "resumes": (False, True), "cached": (False, True), "on_error": ("substitute", "skip"),
}  # fmt: skip


def pairs_of(case: Case) -> set[tuple[Any, ...]]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in AXES], 2))


def all_pairs() -> list[Case]:
    """Cases that together meet each pair of circumstances: each kind each damage, with the others in turn."""
    found = []
    for turn, (kind, damage) in enumerate(itertools.product(KINDS, DAMAGE)):
        row, column = divmod(turn, len(DAMAGE))
        case = Case(
            kind=kind, damage=damage, ranks=1 + (row + column) % 3, workers=2 * (column == row % len(DAMAGE)),
            fields=(row + column) % 2 == 0, resumes=(row + column // 2) % 2 == 0, cached=(row // 2 + column) % 2 == 0,
            on_error=AXES["on_error"][(row + (column + 1) // 2) % 2],
        )  # fmt: skip
        found.append(case.nearest)
    found = [case for case in found if case.exists]
    met = set().union(*map(pairs_of, found))
    for (name, values), (other, others) in itertools.combinations(AXES.items(), 2):
        for value, beside in itertools.product(values, others):
            case = Case(**{"kind": "plain", name: value, other: beside})
            if ((name, value), (other, beside)) not in met and case.exists:
                found.append(case)
                met |= pairs_of(case)
    return found


def the_rest() -> list[Case]:
    """All other cases; where bytes come from and how what is lost is marked take turns."""
    known, turn = set(all_pairs()), itertools.cycle(itertools.product(AXES["cached"], AXES["on_error"]))
    product = itertools.product(*(AXES[name] for name in ("kind", "damage", "fields", "ranks", "workers", "resumes")))
    every = [_case(values, next(turn)).nearest for values in product]
    return [case for case in dict.fromkeys(every) if case.exists and case not in known]


def _case(values: tuple[Any, ...], turn: tuple[Any, ...]) -> Case:
    kind, damage, fields, ranks, workers, resumes = values
    return Case(kind=kind, damage=damage, fields=fields, ranks=ranks, workers=workers, resumes=resumes,
                cached=turn[0], on_error=turn[1])  # fmt: skip


# --- what is delivered ---


@dataclass(frozen=True, slots=True)
class Row:
    """One row, or document of a pack, as delivered: its sample, its source, and its mask."""

    number: int
    source: str
    valid: bool


def rows_of(
    batch: Mapping[str, Any], parts: Mapping[str, tuple[str, ...]], lacking: frozenset[int] = frozenset()
) -> list[Row]:
    """The rows of a batch, after checking that each field that its source reads is that of its key.

    Args:
        batch: The batch.
        parts: Fields that each source reads.
        lacking: Samples that have neither text nor tokens.
    """
    keys: list[str] = batch["__key__"]
    sources = batch.get("__source__", [""] * len(keys))
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(keys)
    for name in EXPECTED:
        column = batch[name].rows() if hasattr(batch.get(name), "rows") else batch.get(name, [None] * len(keys))
        for key, source, value in zip(keys, sources, column, strict=True):
            number = int(key)
            reads = parts.get(source, next(iter(parts.values())))
            if name not in reads or (number in lacking and name in {"txt", "tok"}):
                assert value is None or len(value) == 0, (key, source, name)
            else:
                assert same(value, name, number), (key, source, name)
    return [Row(int(key), source, mask) for key, source, mask in zip(keys, sources, valid, strict=True)]


def same(value: Any, name: str, number: int) -> bool:
    if name == "tok" and not isinstance(value, bytes):
        value = np.asarray(value).tobytes()
    return bool(value == value_of(name, number))


def parts_of(dataset: Any) -> dict[str, tuple[str, ...]]:
    """The fields that each source reads."""
    return {part.name: tuple(EXPECTED) if part.fields is None else part.fields for part in dataset.source.recipe_parts}


def rows_of_packs(batch: Mapping[str, Any]) -> list[Row]:
    """The documents of a batch of packs, each after checking all of its tokens."""
    rows = []
    is_padded = "attention_mask" in batch
    packs = [[key] for key in batch["__key__"]] if is_padded else batch["__key__"]
    ids = batch["attention_mask"] - 1 if is_padded else batch["document_ids"]
    for pack, keys in enumerate(packs):
        tokens, of = batch["input_ids"][pack].numpy(), ids[pack].numpy()
        assert not tokens[of < 0].any()
        source = batch["__source__"][pack] if "__source__" in batch else ""
        there = [key for key in keys if key]
        for document, key in enumerate(there):
            assert np.unique(tokens[of == document]).tolist() == [int(key)]
        rows += [Row(int(key), source, True) for key in there]
    return rows


def at_random(dataset: Any, case: Case, parts: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    """Every sample of a set, requested by its number."""
    for number in range(dataset.source.num_readable):
        sample = dataset[number]
        alone = {name: [value] for name, value in sample.items()}
        if case.kind.startswith("packed"):
            yield from rows_of_packs(sample if "attention_mask" in sample else alone)
        else:
            yield from rows_of(sample if case.kind.startswith("by size") else alone, parts)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What all ranks received: rows by rank and batch, and the samples listed as bad."""

    ranks: list[list[list[Row]]]
    listed: set[int]

    @property
    def rows(self) -> Iterator[Row]:
        return (row for batches in self.ranks for rows in batches for row in rows)


def deliver(case: Case, dataset: Any, lacking: frozenset[int]) -> Delivered:
    """Run an epoch on every rank."""
    kind = KINDS[case.kind]
    of_tokens = case.kind.startswith("packed")
    parts = parts_of(dataset)
    options = {"global_batch_size": 6, **kind.loader, "num_workers": case.workers, "last_batch": "partial"}
    if "batch_size" in options:
        del options["global_batch_size"]
    ranks, listed = [], set[int]()

    def take(loader: DataLoader, count: int | None = None) -> list[list[Row]]:
        found = [
            rows_of_packs(batch) if of_tokens else rows_of(batch, parts, lacking)
            for batch in itertools.islice(loader, count)
        ]
        listed.update(int(bad["key"]) for bad in loader.metrics()["bad"])
        return found

    for rank in range(case.ranks):
        mesh = mesh_of(case.ranks, rank)
        options["num_threads"] = 2 if rank == case.ranks - 1 or case.workers else 0  # else built in this thread
        with DataLoader(dataset, device_mesh=mesh, **options) as loader:
            batches = take(loader, 2 if case.resumes else None)
            state = json.loads(json.dumps(loader.state_dict()))
        if case.resumes:
            with DataLoader(dataset, device_mesh=mesh, **options) as loader:
                loader.load_state_dict(state)
                batches += take(loader)
        ranks.append(batches)
    return Delivered(ranks, listed)


def opened(case: Case, damage: Damage, folders: Callable[..., Path], scratch: Path) -> Any:
    """The set of a case, with some damage; what is made for it alone is in ``scratch``."""
    kind = KINDS[case.kind]
    folder = folders(damage, compressed=kind.streams)
    if not kind.indexed and not kind.streams:
        folder = Path(shutil.copytree(folder, scratch / "no index", ignore=shutil.ignore_patterns("_shardstream")))
    options = {
        "max_bad_samples": 1.0,
        "on_error": case.on_error,
        "transform": Drop(damage.dropped) if damage.dropped else None,
        "fields": kind.fields if case.fields else None,
        "cache_dir": scratch / "cache" if case.cached else None,
    }

    def open_(**more: Any) -> StreamingDataset:
        return StreamingDataset(folder, **{**options, **more})

    return kind.make(open_)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a kind delivers undamaged, at once, in threads, whatever fields are read; and its samples by source.

    Groups do not name the source of a sample that is requested by its number.
    """

    delivered: Delivered
    members: frozenset[tuple[str, int]]


@pytest.fixture(scope="module")
def planned(folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Plan]:
    """The plan of a case."""

    @cache
    def members(kind: str) -> frozenset[tuple[str, int]]:
        case = Case(kind=kind)
        dataset = opened(case, NO_DAMAGE, folders, tmp_path_factory.mktemp("members"))
        return frozenset((row.source, row.number) for row in at_random(dataset, case, parts_of(dataset)))

    @cache
    def plan(kind: str, ranks: int) -> Plan:
        case = Case(kind=kind, ranks=ranks)
        dataset = opened(case, NO_DAMAGE, folders, tmp_path_factory.mktemp("planned"))
        delivered = deliver(case, dataset, lacking=frozenset())
        seen = frozenset((row.source, row.number) for row in delivered.rows)
        return Plan(delivered, seen if KINDS[kind].streams else members(kind))

    return lambda case: plan(case.kind, case.ranks)


@dataclass(frozen=True, slots=True)
class Drop:
    """A transform that drops some samples."""

    numbers: frozenset[int]

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if int(sample["__key__"]) in self.numbers else sample


# --- the promise ---


StandIns = dict[tuple[str, str, str, int], int]
"""What replaced a sample, by kind, damage, source and number: the same in all circumstances."""


@pytest.fixture(scope="module")
def stand_ins() -> StandIns:
    return {}


def check(
    case: Case, folders: Callable[..., Path], planned: Callable[[Case], Plan], stand_ins: StandIns, scratch: Path
) -> None:
    dataset = opened(case, case.found, folders, scratch)
    got, plan = deliver(case, dataset, case.found.incomplete), planned(case)
    by = check_by_size if case.kind.startswith("by size") else check_packs if "packed" in case.kind else check_rows
    for found, expected in zip(got.ranks, plan.delivered.ranks, strict=True):
        for rows, wanted in zip(found, expected, strict=True):
            by(case, rows, wanted)
            if by is check_packs or KINDS[case.kind].streams:
                continue
            for row, lost in zip(rows, wanted, strict=False):
                if lost.number in case.lost:
                    name = (case.kind, case.damage, lost.source, lost.number)
                    assert stand_ins.setdefault(name, row.number) == row.number
    assert all(not plan.members.isdisjoint({(row.source, row.number), ("", row.number)}) for row in got.rows)
    bad = case.lost - case.found.dropped
    assert bad & {row.number for row in plan.delivered.rows} <= got.listed <= bad


def check_rows(case: Case, found: list[Row], wanted: list[Row]) -> None:
    """What is lost is replaced, and all else is in its place."""
    for row, plan in zip(found, wanted, strict=True):
        if plan.number in case.lost:
            assert row.source == plan.source
            assert row.number not in case.lost
            assert row.valid == (case.on_error != "skip")
        else:
            assert row == plan


def check_packs(case: Case, found: list[Row], wanted: list[Row]) -> None:
    """All documents are in their places but those that are lost."""
    assert found == [row for row in wanted if row.number not in case.lost]


def check_by_size(case: Case, found: list[Row], wanted: list[Row]) -> None:
    """What is lost of a batch is replaced by others of it; one of which nothing is left is a single other sample."""
    sound = [row for row in wanted if row.number not in case.lost]
    if not sound and wanted:
        (row,) = found
        assert row.number not in case.lost
        assert row.valid == (case.on_error != "skip")
    else:
        for row, plan in zip(found, wanted, strict=True):
            assert row == plan if plan in sound else row.number in {one.number for one in sound}
    assert len(found) * max((tokens_of(row.number) for row in found), default=0) <= BUDGET
    if case.kind == "by size, other budgets":
        assert len(found) * max((row.number for row in found), default=0) <= OTHER_BUDGET


CASES = [
    *(pytest.param(case, marks=pytest.mark.matrix if KINDS[case.kind].alike else ()) for case in all_pairs()),
    *(pytest.param(case, marks=pytest.mark.matrix) for case in the_rest()),
]


@pytest.mark.parametrize("case", first_here(CASES, 24), ids=str)
def test_each_row_is_its_key(
    case: Case,
    folders: Callable[..., Path],
    planned: Callable[[Case], Plan],
    stand_ins: StandIns,
    tmp_path: Path,
) -> None:
    check(case, folders, planned, stand_ins, tmp_path)
