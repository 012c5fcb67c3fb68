"""Every named option of a set or loader over every kind of set: it acts, is refused with words, or cannot meet it.

Each test walks one option over all kinds, by a run with it and one without. What it finds must be what the page
docs/options.md says; ``python tests/docs/test_option_table.py`` writes that page.
"""

from __future__ import annotations

import atexit
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from infra import DeviceMesh
from streaming import DataLoader, RemoteGroup, Schedule, SequenceSlice, StageFields, StreamingDataset
from streaming.common.arguments import option_names
from streaming.common.platforms import num_cores
from streaming.errors import (
    ConfigError,
    IndexMissingError,
    MemoryLimitError,
    NotFoundError,
    TooManyBadSamplesError,
)
from streaming.watch.tuned.file import Tuned
from tests.support.code.folders import ROOT
from tests.support.contracts.option_kinds import BAD, COUNT, ENDLESS, KINDS, OWNERS, Options, Places, Run, run
from tests.support.sets.data_sets import mesh_of

pytestmark = pytest.mark.thorough

SHOWN = (
    "plain",
    "mixture",
    "nested",
    "packed",
    "by size",
    "balanced",
    "windows",
    "unindexed",
    "map-style",
    "iterable",
    "remote",
)
"""Kinds that `make test` walks. `make matrix` walks all: the others are read in the same way as one of these."""
CURE = "write the page anew: PYTHONPATH=. .venv/bin/python tests/docs/test_option_table.py"
PAGE = ROOT / "docs" / "options.md"
Look = Callable[[DataLoader, Any], Any]


@dataclass(frozen=True)
class Case:
    """How an option shows that it acts.

    Attributes:
        value: A value of it, or a ``By``.
        base: Options by class with which it is compared, in both runs, or a ``By``.
        look: What to look at, beyond the batches.
        epochs: Epochs to read.
        acts_by: Errors by which it acts.
        acts_if: What these errors say.
        cannot: Kinds that it cannot meet, although they have its class, and why.
    """

    value: Any
    base: Any = field(default_factory=dict)
    look: Look | None = None
    epochs: int = 1
    acts_by: tuple[type[Exception], ...] = ()
    acts_if: str = ""
    cannot: Mapping[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True)
class By:
    """A value that depends on the kind and on where the sets are."""

    made: Callable[[str, Places], Any]


def of(value: Any, kind: str, places: Places) -> Any:
    return value.made(kind, places) if isinstance(value, By) else value


# --------------------------------------------------------------------------------------------------- functions of users


def marked(sample: Any) -> Any:
    return {**sample, "mark": 1}


def rows(samples: list[Any]) -> dict[str, Any]:
    return {"rows": len(samples)}


def note(_worker: int) -> None:
    pass


# --------------------------------------------------------------------------------------------------------------- cases


def repr_of(_loader: DataLoader, data: Any) -> str:
    return repr(data)


def modes_of(_loader: DataLoader, data: Any) -> list[Any]:
    """What a mixture and those within it do with unlike classes."""
    return [getattr(one, "classes", None) for one in (data.source, *data.source.sources.values())]


def settings_of(*names: str) -> Look:
    """What reaches the loop, or the reader's loop, of options that show only in other worlds, or in time."""

    def look(loader: DataLoader, _data: Any) -> Any:
        loop: Any = loader._loop
        if hasattr(loop, "_actors"):
            (actor,) = loop._open()
            return look(actor._open()[0], None)
        config, check = loop.config, loader._core.check
        found = [reduce(lambda value, part: getattr(value, part, None), name.split("."), config) for name in names]
        return [*found, getattr(check, "_timeout_s", None) if "timeout_s" in names else None]

    return look


def set_or_function(kind: str) -> Any:
    """What makes the dataset of a kind anew: another set, or for actors a function that makes one."""

    def other(places: Places, _of: Any) -> Any:
        def made() -> StreamingDataset:
            return StreamingDataset(places.url("other"))

        return made if kind == "remote" else made()

    return other


def ledger(loader: DataLoader, _data: Any) -> Any:
    return loader.state_dict()["ledger"]


def group_of(loader: DataLoader, _data: Any) -> Any:
    group = getattr(loader._loop.config, "group", None)  # type: ignore[attr-defined]
    return group and group.name


def cached(loader: DataLoader, _data: Any) -> Any:
    counted = loader.metrics()
    counted = counted["readers"][0] if "readers" in counted else counted
    return {name: value for name, value in counted.items() if name.startswith("cache") and "_s" not in name}


def mesh(**sizes: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(**sizes, rank=0, environ={})


def uneven(kind: str, _places: Places) -> dict[str, Options]:
    """Batches that do not divide the epoch; of packs, over two ranks."""
    if KINDS[kind].loader.get("batch_size") == 1:
        return {"DataLoader": {"device_mesh": mesh_of(4, 0)}}
    return {"DataLoader": {"batch_size": 7}}


def on_bad(**more: Any) -> By:
    """Options of a set with a bad sample."""

    def made(kind: str, _places: Places) -> dict[str, Options]:
        bad = "badgz" if kind == "unindexed" else "bad"
        return {"StreamingDataset": {"urls": bad, **more}, "DataLoader": {"last_batch": "partial"}}

    return By(made)


def several(kind: str, _places: Places) -> Any:
    """Several padded packs in a batch, which have no common shape, are a list."""
    return {"DataLoader": {"batch_size": 2, "collate_fn": list}} if kind in ("padded", "by size") else {}


def tuned_file() -> str:
    path = Path(TEMPORARY.name, "tuned.json")
    path.write_bytes(Tuned(options={"prefetch_factor": 5}, cores=num_cores()).to_bytes())
    return str(path)


def ratios_of(_: DataLoader, data: Any) -> Any:
    """Return what fields of each source may inflate to."""
    parts = getattr(getattr(data, "source", None), "recipe_parts", ())
    decoders = [getattr(part.decoders, "wraps", part.decoders) for part in parts]  # of windows, for carried fields
    return [getattr(one, "max_gzip_ratio", None) for one in decoders]


def lines_of(_loader: DataLoader, _data: Any) -> Any:
    path = Path(TEMPORARY.name, "bad.jsonl")
    lines = path.read_text().count(f'"{BAD:05d}"') if path.exists() else 0
    path.unlink(missing_ok=True)
    return lines > 0


TEMPORARY = tempfile.TemporaryDirectory(prefix="option-table-")
atexit.register(TEMPORARY.cleanup)
FILE = By(lambda _kind, _places: f"{TEMPORARY.name}/bad.jsonl")
WORKERS = {"DataLoader": {"num_workers": 1}}
SPLIT = {"Mixture": {"weights": {"a": 2, "b": 1}}, "outer": {"weights": {"in": 3, "c": 1}},
         "DataLoader": {"epoch_size": COUNT}}  # fmt: skip
TYPED = By(lambda kind, _: {"Packed": {"dtype": "uint16"} if kind in OF_TEXT else {}})
OF_TEXT = ("packed", "padded")

CASES: dict[str, dict[str, Case]] = {
    "StreamingDataset": {
        "urls": Case("other"),
        "index": Case(By(lambda _kind, places: places.url("nowhere")), acts_by=(ConfigError, IndexMissingError)),
        "fields": Case(("cls",)),
        "decode": Case(By(lambda kind, _: {"tok": bytes} if kind in OF_TEXT else {"cls": "text"})),
        "transform": Case(marked),
        "where": Case("n < 16"),
        "view": Case("few"),
        "subset": Case((0.0, 0.5)),
        "exclude": Case(["00003", "00004"]),
        "shuffle": Case(False),
        "seed": Case(5),
        "storage_options": Case({"deadline_s": -1}, acts_by=(ConfigError,)),
        "mirrors": Case([{"url": "mirror/", "deadline_s": -1}], acts_by=(ConfigError,)),
        "cache_dir": Case(By(lambda kind, _: f"{TEMPORARY.name}/cache {kind}"),
                          look=cached),
        "cache_limit": Case("1KB", By(lambda kind, _: {"StreamingDataset": {
            "cache_dir": f"{TEMPORARY.name}/cache limit {kind}"}}), cached,
            cannot={("unindexed",): "cache_dir= is refused there"}),
        "duplicate_keys": Case("keep", base={"StreamingDataset": {"urls": "twice"}}, cannot={
            (*OF_TEXT, "where", "by size", "balanced", "curriculum"): "their columns need an index, made with "
            "`shard_tools index --duplicate-keys`",
            ("windows",): "they need an index, made with `shard_tools index --duplicate-keys`"}),
        "allow_unfinished": Case(True, base={"StreamingDataset": {"urls": "unfinished"}}),
        "version": Case(1, base={"StreamingDataset": {"urls": "living"}}),
        "max_gzip_ratio": Case(2.0, look=ratios_of, cannot={
            (*OF_TEXT, "remote"): "no field of these is packed, and a compressed shard has no index"}),
        "on_error": Case("raise", base=on_bad()),
        "max_bad_samples": Case(0, base=on_bad(), acts_by=(TooManyBadSamplesError,)),
        "bad_samples_file": Case(FILE, base=on_bad(max_bad_samples=1.0), look=lines_of),
        "classes": Case("union", base={"StreamingDataset": {"urls": "unlike"}}),
    },
    "Mixture": {
        "sources": Case(lambda found: {**found, "a": found["b"]}),
        "weights": Case({"a": 1, "b": 5}, base=SPLIT),
        "repeats": Case({"a": 2, "b": 0.5}),
        "quotas": Case("exact", SPLIT, ledger),
        "unit": Case("tokens", SPLIT, ledger),
        "ends": Case("first", base=By(lambda kind, _: {"Mixture": SPLIT["Mixture"]})),
        "shuffle": Case(False),
        "seed": Case(5),
        "batches": Case("one_source", base=SPLIT),
        "fetch_bytes": Case("1MiB", base={**SPLIT, "Mixture": {**SPLIT["Mixture"], "quotas": "exact"}}, look=repr_of),
        "max_bad_samples": Case(0, base=on_bad(max_bad_samples=1.0), acts_by=(TooManyBadSamplesError,)),
        "bad_samples_file": Case(FILE, base=on_bad(max_bad_samples=1.0), look=lines_of),
        "classes": Case("union", look=modes_of),
    },
    "Packed": {
        "documents": Case(lambda places, of: StreamingDataset(places.url("other"))),
        "length": Case(By(lambda kind, _: 30 if kind in OF_TEXT else 250)),
        "column": Case("n", base=TYPED),
        "field": Case(By(lambda kind, _: "mask" if kind in OF_TEXT else "tok"), base=TYPED),
        "dtype": Case("uint32", acts_by=(ConfigError,), acts_if="it holds uint16"),
        "overlong": Case(By(lambda kind, _: "drop" if kind in OF_TEXT else "split"),
                         base=By(lambda kind, _: {"Packed": {"length": 8 if kind in OF_TEXT else 43}})),
        "mask_field": Case("mask"),
        "shift_labels": Case(True),
        "labels_across": Case(True),
        "pad_id": Case(7),
        "ignore_id": Case(-1),
        "max_docs": Case(2),
        "multiple": Case(4),
        "padded": Case(By(lambda kind, _: kind == "packed"), base={"DataLoader": {"batch_size": 1}}),
        "stride": Case(4, base=By(lambda kind, _: {"Packed": {"length": 8}} if kind in OF_TEXT else {})),
        "overlap_labels": Case(False, base=By(
            lambda kind, _: {"Packed": {"length": 8, "stride": 4}} if kind in OF_TEXT else {})),
        "budgets": Case({"n": 60}),
        "alike": Case(("cls",)),
        "alike_across_ranks": Case(
            value=True,
            base=By(lambda kind, _: {
                "Packed": {"alike": ("cls",)} if kind != "packed" else {},
                "DataLoader": {"batch_size": 1, "last_batch": "drop"},
            }),
        ),
        "carry": Case(("cls",)),
        "placeholder": Case(7, base=By(lambda kind, _: {"Packed": {"carry": ("cls",)}} if kind in OF_TEXT else {})),
    },
    "Balanced": {
        "dataset": Case(lambda places, of: StreamingDataset(places.url("other"))),
        "by": Case("tokens"),
        "weights": Case({0: 1, 1: 2, 2: 3}),
        "power": Case(1.0, base={"Balanced": {"by": "tokens"}}),
        "nulls": Case("drop", base={"Balanced": {"by": "maybe"}}),
        "quotas": Case("exact", look=ledger),
        "name_sources": Case(True),
    },
    "Curriculum": {
        "dataset": Case(lambda places, of: StreamingDataset(places.url("other"))),
        "metric": Case("tokens"),
        "schedule": Case(Schedule.steps({0: 1.0})),
        "by": Case("value"),
        "buckets": Case(2),
        "nulls": Case("drop", base={"Curriculum": {"metric": "maybe"}}),
        "quotas": Case("exact", look=ledger),
        "name_sources": Case(True),
    },
    "Windows": {
        "recordings": Case(lambda places, of: StreamingDataset(places.url("other"))),
        "every": Case(0.05),
        "video": Case({"front.mp4": [0.0]}),
        "columns": Case({"vec.npy": (0, 3)}),
        "edge": Case("drop"),
        "size": Case((8, 8)),
        "clocks": Case({"vec.npy": 60.0}),
        "carry": Case(("cls", "txt")),
        "names": Case({"front.mp4": "camera"}),
        "groups": Case(2),
        "transform": Case(marked),
    },
    "DataLoader": {
        "dataset": Case(By(lambda kind, _: set_or_function(kind))),
        "batch_size": Case(By(lambda kind, _: 1 if KINDS[kind].loader.get("batch_size") != 1 else 2)),
        "global_batch_size": Case(By(lambda kind, _: 4 if KINDS[kind].loader.get("batch_size") != 1 else 2)),
        "micro_batch_size": Case(By(lambda kind, _: 1 if KINDS[kind].is_packed else 3), base=By(several)),
        "num_workers": Case(1, look=lambda loader, _: loader.num_workers, epochs=0),
        "num_threads": Case(1, base={"DataLoader": {"collate_fn": rows}}, look=settings_of("num_threads"), epochs=0),
        "device_mesh": Case(mesh_of(2, 1), By(lambda kind, _: {"DataLoader": ENDLESS} if kind == "iterable" else {})),
        "last_batch": Case("pad", base=By(uneven)),
        "epoch_size": Case(By(lambda kind, _: 4 if KINDS[kind].is_packed else 8)),
        "collate_fn": Case(rows),
        "as_tuple": Case(By(lambda kind, _: ("input_ids", "labels") if kind in OF_TEXT else ("cls",))),
        "jagged": Case(("bin",)),
        "prefetch_factor": Case(5, base=By(lambda kind, _: {} if KINDS[kind].is_streamed else WORKERS),
                                look=settings_of("depth", "prefetch_factor"), epochs=0),
        "pin_memory": Case(True, look=lambda loader, _: loader.pin_memory),
        "memory_limit": Case("100KB", acts_by=(MemoryLimitError,), look=settings_of("memory", "memory_limit")),
        "tuned": Case(By(lambda _kind, _places: tuned_file()), look=settings_of("depth"), epochs=0),
        "stall_report_s": Case(3.5, look=lambda loader, _: loader.stall_report_s),
        "remote_group": Case(RemoteGroup(name="others", num_actors=1), look=group_of),
        "replicate": Case("broadcast", base={"DataLoader": {"device_mesh": mesh(tp_size=2)}},
                          acts_by=(ConfigError,), acts_if="torch.distributed"),
        "stage_fields": Case(By(lambda kind, _: StageFields(
            first=("input_ids" if kind in OF_TEXT else "cls",), last=("labels",))),
                             base={"DataLoader": {"device_mesh": mesh(pp_size=2)}}),
        "sequence": Case(By(lambda kind, _: SequenceSlice(
            fields=("input_ids" if kind in OF_TEXT else "vec.npy",))),
                         base={"DataLoader": {"device_mesh": mesh(cp_size=2)}}),
        "balance": Case("local"),
        "cost": Case(10, base=By(lambda kind, _: {"DataLoader": {"balance": "local"} if kind == "packed" else {}}),
                     look=settings_of("recipe.items")),
        "agreement_timeout": Case(9.5, look=settings_of("timeout_s")),
        "drop_last": Case(False, base=By(uneven)),
        "shuffle": Case(By(lambda kind, _: kind == "iterable")),
        "multiprocessing_context": Case("fork", WORKERS, settings_of("multiprocessing_context"), epochs=0),
        "persistent_workers": Case(By(lambda kind, _: kind == "iterable"), WORKERS,
                                   settings_of("persistent_workers"), epochs=0),
        "timeout": Case(9.5, WORKERS, settings_of("timeout"), epochs=0),
        "worker_init_fn": Case(note, WORKERS, settings_of("worker_init_fn", "recipe.worker_init_fn"), epochs=0),
        "generator": Case(torch.Generator()),
        "sampler": Case([1]),
        "batch_sampler": Case([[1]]),
        "pin_memory_device": Case("cuda"),
        "in_order": Case(False),
    },
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the walk

ACTS, REFUSED, TOLD, NOT = "acts", "refused", "told", "-"
REFUSALS = (ConfigError, IndexMissingError, NotFoundError)


@cache
def places() -> Places:
    return Places.write(Path(TEMPORARY.name))


_without: dict[str, Run] = {}


def walked(owner: str, option: str, kind: str) -> tuple[str, str]:
    """What an option does in a kind of set, and the words with which it is refused or told."""
    case = CASES[owner][option]
    if owner != "DataLoader" and owner not in KINDS[kind].owners:
        return NOT, ""
    if why := next((why for kinds, why in case.cannot.items() if kind in kinds), ""):
        return NOT, why
    base = of(case.base, kind, places())
    key = repr((kind, base, case.epochs, case.look and id(case.look)))
    if key not in _without:
        _without[key] = run(kind, places(), base, case.look, case.epochs)
    before = _without[key]
    given = {**base, owner: {**base.get(owner, {}), option: of(case.value, kind, places())}}
    after = run(kind, places(), given, case.look, case.epochs)
    words = shown(str(after.error))
    if isinstance(after.error, REFUSALS) and not (isinstance(after.error, case.acts_by) and case.acts_if in words):
        assert option in words, f"the refusal of {option}= over {kind} does not name it: {after.error!r}"
        assert words != shown(str(before.error)), f"{kind} is refused without {option}=, too: {words}"
        return REFUSED, words
    assert after.error is None or case.acts_by or option == "on_error" or before.shown != after.shown, repr(after.error)
    if after.shown != before.shown:
        return ACTS, ""
    told = [line for line in after.warnings if line not in before.warnings and option in line]
    assert told, f"{option}= of {owner} is taken and does nothing over {kind}; {before.error!r}"
    return TOLD, shown(told[0])


def shown(words: str) -> str:
    """A message in one line, without what differs between runs."""
    words = re.sub(r"0x[0-9a-f]{6,}", "0x…", words.replace(TEMPORARY.name, "…"))
    return " ".join(words.split())


# ------------------------------------------------------------------------------------------------------------ the page

HEAD = """# Options and kinds of sets

The tables show the effect of each option on each kind of set. `tests/docs/test_option_table.py` reads every kind with
the option and without it, and writes this page (`PYTHONPATH=. .venv/bin/python tests/docs/test_option_table.py`).
**acts**: batches, errors, files, metrics or the settings of the loop differ. **refused**: an error with the words below
the table. **told**: it has no effect there, and a warning reports it in the words below. **-**: they cannot meet,
because the kind is not made of that class, or for the reason below.

Kinds: `plain`, `where`, `subset`, `exclude`: a `StreamingDataset`, and one narrowed by that option. `mixture`: a
`Mixture`, whose source gets the options of `StreamingDataset`; `nested`: a `Mixture` in a `Mixture`, of which the inner
one gets the options. `packed`, `padded`, `by size`: a `Packed`, of tokens in rows, of tokens in padded batches, of
whole samples by a budget. `balanced`, `curriculum`: a `Balanced`, a `Curriculum`. `windows`: a `Windows` of recordings,
which get the options of `StreamingDataset`. `unindexed`: shards that can only be streamed. `map-style`, `iterable`:
torch datasets. `remote`: a `StreamingDataset` read in the actors of a `remote_group`.
"""
TITLES = f"| option | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}"
Cells = Mapping[str, tuple[str, str]]


def row(option: str, cells: Cells) -> str:
    return f"| `{option}` | {' | '.join(cells[kind][0] for kind in KINDS)} |"


def words(option: str, cells: Cells) -> str:
    """The words of one option, each with the kinds that they are for; "" if it always acts."""
    said: dict[str, list[str]] = {}
    for kind, (_, text) in cells.items():
        said.setdefault(text, []).append(kind)
    return "\n".join(f"- `{option}`, {', '.join(kinds)}: {quoted(text)}" for text, kinds in said.items() if text)


def quoted(text: str) -> str:
    return f"``{text}``" if "`" in text else f"`{text}`"


def page(found: Mapping[str, Mapping[str, Cells]]) -> str:
    parts = [HEAD]
    for owner, options in found.items():
        lines = [TITLES, *(row(*one) for one in options.items())]
        said = list(filter(None, (words(*one) for one in options.items())))
        parts += [f"## {owner}\n", "\n".join(lines) + "\n", *(["\n".join(said) + "\n"] if said else [])]
    return "\n".join(parts)


def found_on_the_page(owner: str) -> tuple[dict[str, dict[str, str]], str]:
    """What the page says of a class: the verdict by option and kind, and the whole section."""
    section = PAGE.read_text().partition(f"## {owner}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return {
        name.strip(" `"): dict(zip(KINDS, map(str.strip, cells), strict=True)) for name, *cells in rows
    }, section  # fmt: skip


ALL = [(owner, option) for owner, cases in CASES.items() for option in cases]


@pytest.mark.parametrize(("owner", "option"), ALL, ids=[".".join(one) for one in ALL])
def test_an_option_does_what_the_page_says(owner: str, option: str, request: pytest.FixtureRequest) -> None:
    verdicts, section = found_on_the_page(owner)
    for kind in KINDS if request.config.getoption("--matrix") else SHOWN:
        verdict, said = walked(owner, option, kind)
        assert verdicts[option][kind] == verdict, f"{option}=, {kind}: {said}; {CURE}"
        assert quoted(said) in section or not said, f"{option}=, {kind}: other words: {said}; {CURE}"


def test_the_page_has_every_option_of_every_class_and_nothing_else() -> None:
    named = {owner: option_names(made) for owner, made in OWNERS.items()}
    assert {owner: tuple(cases) for owner, cases in CASES.items()} == named, "an option without a case: add one"
    assert PAGE.read_text().startswith(HEAD)
    for owner, options in named.items():
        verdicts, section = found_on_the_page(owner)
        assert tuple(verdicts) == options
        assert {cell for cells in verdicts.values() for cell in cells.values()} <= {ACTS, REFUSED, TOLD, NOT}
        lines = [line for line in section.splitlines() if line and not line.startswith("| `")]
        assert lines[:2] == TITLES.splitlines()
        said = [re.match(r"- `(\w+)`, ([a-z, -]+): `", line) for line in lines[2:]]
        kinds_of: dict[str, list[str]] = {}
        for one in said:
            assert one is not None
            kinds_of.setdefault(one[1], []).extend(one[2].split(", "))
        for option, cells in verdicts.items():
            worded = {kind for kind, verdict in cells.items() if verdict in {REFUSED, TOLD}}
            assert worded <= set(kinds_of.get(option, ()))
            assert len(kinds_of.get(option, ())) == len(set(kinds_of.get(option, ()))), "two words for one cell"


def main() -> None:
    """Write the page."""
    PAGE.write_text(
        page({
            owner: {option: {kind: walked(owner, option, kind) for kind in KINDS} for option in cases}
            for owner, cases in CASES.items()
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
