"""Every way in which two sets meet, and every way in which they contradict each other."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import Curriculum, DataLoader, Mixture, Schedule, StreamingDataset
from streaming.common.job.agreement import differences
from streaming.errors import ShardstreamError
from streaming.shards.schema.value import TokenizerKey, TokenMeaning
from tests.support.sets.meanings import say, schema_of
from tests.support.sources.foreign_sets import picture

FIRST = ("ant", "bee", "cat")
COUNT = 6
BYTES = TokenizerKey(kind="bytes", sha256="a" * 64)


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """How the other set differs from the first one.

    Attributes:
        part: The field or column, as messages name it.
        names: The classes of the other set.
        width: Type of its tokens.
        facets: What it says of fields, beyond that.
        text: Whether its column ``n`` holds text.
    """

    part: str
    names: tuple[str, ...] = FIRST
    width: str = "uint16"
    facets: Mapping[str, Mapping[str, Any]] | None = None
    text: bool = False


OTHER_TOKENIZER = {"tokenizer": replace(BYTES, sha256="b" * 64)}
CONTRADICTIONS = {
    "classes reordered": Contradiction(part="cls", names=("cat", "ant", "bee")),
    "a class more": Contradiction(part="cls", names=(*FIRST, "dog")),
    "other names": Contradiction(part="cls", names=("bee", "cat", "dog")),
    "token width": Contradiction(part="tok", width="uint32"),
    "tokenizer": Contradiction(part="tok", facets={"tok": OTHER_TOKENIZER}),
    "dtype of a field": Contradiction(part="vec.npy", facets={"vec.npy": {"dtype": "float32"}}),
    "kind of a field": Contradiction(part="bin", facets={"bin": {"kind": "audio"}}),
    "type of a column": Contradiction(part="n", text=True),
}


def write(folder: Path, prefix: str, of: Contradiction, first: int = 0) -> Path:
    """Write a set whose ``json`` says what its numbers and ids mean."""
    columns = {"n": (lambda one: str(one["json"]["n"])) if of.text else "json.n", "cls": "cls"}
    with ShardWriter(f"{folder}/{prefix}{{:02d}}.tar", columns=columns, classes={"cls": of.names}) as writer:
        for number in range(COUNT):
            name = of.names[number % len(of.names)]
            ids = [number, 7, 300]
            writer.write({
                "__key__": f"{prefix}{number}", "cls": of.names.index(name), "tok": np.array(ids, of.width).tobytes(),
                "json": {"class": name, "ids": ids, "n": first + number}, "bin": b"x",
                "vec.npy": np.arange(3, dtype=np.float64),
            })  # fmt: skip
    schema = schema_of(folder)
    tokens = TokenMeaning(tokenizer=BYTES, vocab_size=70_000)
    said = {
        "tok": {"kind": "tokens", "dtype": of.width, "tokens": tokens}, "vec.npy": {"dtype": "float64"},
        "bin": {"kind": "bytes"},
    }  # fmt: skip
    for name, facets in (of.facets or {}).items():
        tokenizer = {"tokens": replace(tokens, **facets)} if "tokenizer" in facets else {}
        said[name] = {
            **said[name],
            **{facet: one for facet, one in facets.items() if facet != "tokenizer"},
            **tokenizer,
        }
    fields = dict(schema.fields)
    for name, facets in said.items():
        fields[name] = replace(fields.get(name, schema.fields["cls"]), **({"classes": ()} | dict(facets)))
    say(folder, replace(schema, fields=fields))
    return folder


def is_right(samples: Iterator[Mapping[str, Any]], names: tuple[str, ...], *, tokens: bool) -> bool:
    """Tell whether numbers and ids of decoded samples mean what their ``json`` says."""
    found = list(samples)
    right = all(names[one["cls"]] == one["json"]["class"] for one in found) if names else True
    return right and (not tokens or all(list(one["tok"]) == one["json"]["ids"] for one in found)) and len(found) > COUNT


@dataclass(frozen=True, kw_only=True)
class Met:
    """What came of a meeting.

    Attributes:
        told: Errors, findings and warnings.
        refused: Whether it was refused.
        right: Whether what is read afterwards is right; None: nothing is read.
    """

    told: str
    refused: bool = False
    right: bool | None = None


@contextmanager
def logged() -> Iterator[list[str]]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keeper = Keep(logging.WARNING)
    root = logging.getLogger()
    root.addHandler(keeper)
    try:
        yield found
    finally:
        root.removeHandler(keeper)


def reading(make: Callable[[], Any]) -> Met:
    """Open data sets, and read all of their samples by a loader."""
    with logged() as told:
        try:
            data = make()
            names = data.class_names.get("cls", ()) if hasattr(data, "class_names") else ()
            size = 2 * COUNT
            with DataLoader(data, batch_size=4, num_workers=0, epoch_size=size, collate_fn=list) as loader:
                samples = [sample for batch in loader for sample in batch]
        except ShardstreamError as error:
            return Met(told=str(error), refused=True)
    return Met(told="\n".join(told), right=is_right(iter(samples), names, tokens=True))


def command(*arguments: object, made: Path | None = None) -> Met:
    """Run a command, and read what it made."""
    with logged() as told:
        ran = CliRunner().invoke(cli, [str(one) for one in arguments])
    text = ran.output + "\n".join(told)
    if ran.exit_code == 2 or (ran.exit_code == 1 and "Error: " in ran.output):
        return Met(told=text, refused=True)
    if ran.exit_code not in (0, 1):
        raise AssertionError(text) from ran.exception
    if made is None:
        return Met(told=text)
    data = StreamingDataset(str(made), shuffle=False)
    return Met(told=text, right=is_right(iter(data), data.class_names.get("cls", ()), tokens=True))


Places = Mapping[str, Path]
Meeting = Callable[[Places, str | None], Met]


def urls(places: Places) -> list[str]:
    return [str(places["first"]), str(places["other"])]


def opened(places: Places, classes: Any) -> StreamingDataset:
    return StreamingDataset(urls(places), classes=classes)


def mixed(places: Places, classes: Any) -> Mixture:
    first, other = (StreamingDataset(url) for url in urls(places))
    return Mixture({"first": first, "other": other}, classes=classes)


def nested(places: Places, classes: Any) -> Mixture:
    first, other = (StreamingDataset(url) for url in urls(places))
    inner = Mixture({"there": other})
    return Mixture({"first": first, "inner": inner}, classes=classes)


def curriculum(places: Places, classes: Any) -> Curriculum:
    ramp = Schedule.linear(0.5, 1.0, over=COUNT)
    return Curriculum(opened(places, classes), metric="cls" if classes is None else "n", schedule=ramp, buckets=2)


def union(classes: str | None) -> list[str]:
    return [] if classes is None else ["--classes", classes]


def rewritten(verb: str, *more: str) -> Meeting:
    def meet(places: Places, classes: str | None) -> Met:
        target = places["scratch"] / verb
        return command(verb, *urls(places), target, *more, *union(classes), made=target)

    return meet


def split_up(places: Places, classes: str | None) -> Met:
    target = places["scratch"] / "parts"
    shares = f"{target / 'train'}=60%", f"{target / 'val'}=40%"
    return command("split", *urls(places), *shares, *union(classes), made=target / "val")  # has most of them


def appended(places: Places, _classes: str | None) -> Met:
    """Append the tars of a set to another one."""
    into = places["scratch"] / "set"
    shutil.copytree(places["first"], into)
    return command("append", places["other"], into, "--from", "tars", made=into)


UNCHANGED = "tests.support.contracts.meeting_kinds:unchanged"
"""The function below, as users name it for ``map``."""


def unchanged(_sample: Any) -> dict[str, Any]:
    return {"txt": "new"}


def copied_into(places: Places, _classes: str | None) -> Met:
    into = places["scratch"] / "set"
    shutil.copytree(places["first"], into)
    return command("copy", places["other"], into / "more")


def converted_into(of: Contradiction, places: Places, _classes: str | None) -> Met:
    """Convert what gives such a set: a folder of classes, or tars of a set."""
    into = places["scratch"] / "set"
    shutil.copytree(places["first"], into)
    if of.part != "cls":
        return command("convert", places["other"], into / "more", "--from", "tars")
    source = places["scratch"] / "pictures"
    for number, name in enumerate(of.names):
        (source / name).mkdir(parents=True)
        (source / name / f"{name}.jpg").write_bytes(picture(number))
    said = command("convert", source, into / "more")
    named = {one["json"]["class"]: one["cls"] for one in StreamingDataset(str(into / "more"))}
    known = StreamingDataset(str(into)).class_names["cls"]
    return replace(said, right=all(known[number] == name for name, number in named.items()))


def shown(places: Places, classes: str | None) -> Met:
    page = places["scratch"] / "page.html"
    return command("show", *urls(places), "--html", page, *union(classes))


def resumed(places: Places, _classes: str | None) -> Met:
    """Go on with a state over the same bytes, of which the set says now what the other one says."""
    changed = places["scratch"] / "changed"
    shutil.copytree(places["first"], changed)
    first, other = schema_of(places["first"]), schema_of(places["other"])
    say(changed, replace(first, fields={**first.fields, **other.fields}))
    try:
        with logged() as told:
            with DataLoader(StreamingDataset(str(places["first"])), 2, num_workers=0) as loader:
                next(iter(loader))
                state = loader.state_dict()
            with DataLoader(StreamingDataset(str(changed)), 2, num_workers=0) as loader:
                loader.load_state_dict(state)
    except ShardstreamError as error:
        return Met(told=str(error), refused=True)
    return Met(told="\n".join(told))


def agreed(places: Places, _classes: str | None) -> Met:
    """Compare what two ranks say before they begin: of the same bytes, with another meaning."""
    changed = places["scratch"] / "changed"
    shutil.copytree(places["first"], changed)
    first, other = schema_of(places["first"]), schema_of(places["other"])
    say(changed, replace(first, fields={**first.fields, **other.fields}))
    facts = []
    for folder in (places["first"], changed):
        with DataLoader(StreamingDataset(str(folder)), 2, num_workers=0) as loader:
            facts.append(loader._core.check._facts())
    found = differences(dict(enumerate(facts)), facts[0])
    return Met(told=json.dumps(found), refused=bool(found))


def parent(places: Places) -> Path:
    return places["first"].parent


def meetings(of: Contradiction) -> dict[str, Meeting]:
    """Return every kind of meeting, for sets that differ so."""
    return {
        "list": lambda places, classes: reading(lambda: opened(places, classes)),
        "folder above both": lambda places, classes: reading(
            lambda: StreamingDataset(str(parent(places)), classes=classes)  # type: ignore[arg-type]
        ),
        "`Mixture`": lambda places, classes: reading(lambda: mixed(places, classes)),
        "nested `Mixture`": lambda places, classes: reading(lambda: nested(places, classes)),
        "`Curriculum` over a list": lambda places, classes: reading(lambda: curriculum(places, classes)),
        "resume on other sources": resumed,
        "agreement of ranks": agreed,
        "reshard": rewritten("reshard"),
        "split": split_up,
        "map": rewritten("map", UNCHANGED),
        "append to a set": appended,
        "copy into a set": copied_into,
        "convert into a set": partial(converted_into, of),
        "export": lambda places, _: command("export", *urls(places), places["scratch"] / "out", "--to", "parquet"),
        "column add": lambda places, _: command("column", "add", parent(places), "late", "--lift", "json.n"),
        "index": lambda places, _: command("index", parent(places)),
        "index --index": lambda places, _: command("index", parent(places), "--index", parent(places)),
        "info": lambda places, _: command("info", parent(places)),
        "stats": lambda places, _: command("stats", *urls(places)),
        "verify": lambda places, _: command("verify", parent(places)),
        "show": shown,
        "diff": lambda places, _: command("diff", *urls(places)),
        "plan": lambda places, classes: command("plan", *urls(places), "--batch-size", 2, *union(classes)),
    }


UNION = ("list", "folder above both", "`Mixture`", "nested `Mixture`", "`Curriculum` over a list", "reshard", "split",
         "map", "show", "plan")  # fmt: skip
"""Meetings that take ``classes="union"``."""
CANNOT = {
    ("resume on other sources", "type of a column"): "no state refers to the types of columns",
    ("agreement of ranks", "type of a column"): "no batch depends on the types of columns",
    ("convert into a set", "type of a column"): "tars have no columns",
    ("append to a set", "type of a column"): "tars have no columns",
}
"""Meetings that cannot happen, and why."""
