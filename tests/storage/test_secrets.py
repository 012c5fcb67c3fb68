"""No secret is told by any verb or class: in results, messages, tracebacks, logs, files, states and names of files.

Secrets stand where users put them: in the user and password and in the query of a URL, in ``endpoint_url``, in
``key``, ``secret`` and ``token``. The servers want them, so that calls that succeed have used them.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import shard_tools
import streaming
from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming.storage import Storage
from tests.support.servers.on_loopback import GuardedHttpServer, MiniS3Server, free_port

USER, PASSWORD, QUERY = "swordfish", "hunter2", "X-Amz-Signature=abcdef0123&token=0ddba11"
SECRETS = (USER, PASSWORD, "abcdef0123", "0ddba11", "fedcba9876", MiniS3Server.secret,
           base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())  # fmt: skip
IMPATIENT: dict[str, Any] = {"unreachable_s": 0.01, "max_retries": 0, "first_backoff_s": 0.0}
NUM = 8


@dataclass(frozen=True)
class Place:
    """Where a set lies, a damaged copy of it, and files; and how to come there."""

    good: str
    damaged: str
    rows: str
    score: str
    target: str
    options: dict[str, Any]
    folder: Path
    kind: str

    @property
    def works(self) -> bool:
        return self.kind.endswith("works")


@dataclass
class Told:
    """All that anybody was told."""

    texts: list[str] = field(default_factory=list)

    def add(self, *things: object) -> None:
        for thing in things:
            self.texts += [str(thing), repr(thing)]
            if isinstance(thing, BaseException):
                self.texts.append("".join(traceback.format_exception(thing)))
                self.add(*[one for one in (thing.__cause__, *getattr(thing, "__notes__", ())) if one is not None])

    def files(self, *folders: Path) -> None:
        for path in (path for folder in folders for path in folder.rglob("*")):
            self.texts.append(str(path))
            if path.is_file():
                self.texts.append(path.read_bytes().decode("latin-1"))

    def check(self) -> None:
        """Every text that tells a secret, by its line."""
        found = {line[:2000] for text in self.texts for line in text.splitlines() if any(s in line for s in SECRETS)}
        assert not found, "\n".join(sorted(found))
        assert self.texts


def make_set(folder: str, storage_options: dict[str, Any] | None = None) -> None:
    columns = {"tokens": lambda one: 8, "num": lambda one: int(one["__key__"])}
    with ShardWriter(
        f"{folder}/{{:06d}}.tar", max_samples=NUM // 2, columns=columns, storage_options=storage_options
    ) as writer:
        for number in range(NUM):
            tokens = np.arange(8, dtype="<u2").tobytes()
            writer.write({"__key__": f"{number:03d}", "cls": number, "txt": "a text " * 20, "tok": tokens})


def make_files(storage: Storage, base: str) -> None:
    """A set, one with a flipped byte, and the files that verbs take."""
    make_set(f"{base}/good", storage._given)
    for info in storage.list(f"{base}/good"):
        data = bytearray(storage.read(info.url))
        if info.url.endswith("000000.tar"):
            data[data.find(b"a text")] ^= 0xFF
        storage.put(info.url.replace("/good/", "/damaged/"), data)
    storage.put(f"{base}/rows.jsonl", b'{"text": "abc", "n": 1}\n{"text": "d", "n": 2}\n')
    body = io.BytesIO()
    pq.write_table(pa.table({"key": [f"{n:03d}" for n in range(NUM)], "score": list(range(NUM))}), body)
    storage.put(f"{base}/score.parquet", body.getvalue())


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniS3Server]:
    with MiniS3Server(("bucket",)) as server:
        make_files(Storage(server.storage_options), "s3://bucket")
        yield server


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GuardedHttpServer, Path]]:
    root = tmp_path_factory.mktemp("web")
    make_files(Storage(), str(root))
    with GuardedHttpServer(root, USER, PASSWORD, QUERY) as server:
        yield server, root


def s3_place(s3: MiniS3Server, tmp_path: Path, kind: str) -> Place:
    port = free_port() if kind == "unreachable" else s3.port
    options = {**s3.storage_options, "endpoint_url": f"http://{USER}:{PASSWORD}@127.0.0.1:{port}", **IMPATIENT}
    if kind == "works":
        options["token"] = "fedcba9876"
    if kind == "refused":
        options["secret"] = PASSWORD
    at = "s3://bucket" if kind != "missing" else "s3://none"
    return Place(
        f"{at}/good/", f"{at}/damaged/", f"{at}/rows.jsonl", f"{at}/score.parquet", f"{at}/{tmp_path.name}", options,
        Path(s3._folder), f"s3 {kind}",
    )  # fmt: skip


def web_place(web: tuple[GuardedHttpServer, Path], tmp_path: Path, kind: str) -> Place:
    server, root = web
    port = free_port() if kind == "unreachable" else server.port
    user = f"{USER}:{PASSWORD}" if kind != "refused" else f"{PASSWORD}:{USER}"
    at = f"http://{user}@127.0.0.1:{port}" + ("/none" if kind == "missing" else "")
    shards = f"/{{000000..000001}}.tar?{QUERY}"
    rows, score = (f"{at}/{name}?{QUERY}" for name in ("rows.jsonl", "score.parquet"))
    good, damaged = f"{at}/good{shards}", f"{at}/damaged{shards}"
    return Place(good, damaged, rows, score, str(tmp_path / "out"), IMPATIENT, root, f"web {kind}")


FLAGS = {"s3 works": [], "s3 refused": ["--debug"], "s3 unreachable": ["--debug"], "s3 missing": ["--json"],
         "web works": ["--json"], "web refused": ["--debug"], "web unreachable": ["--debug"],
         "web missing": ["--debug"]}  # fmt: skip
"""Kinds of places, and what verbs are told there."""


@pytest.fixture(
    params=[pytest.param(kind, marks=[pytest.mark.matrix] if kind.endswith("missing") else []) for kind in FLAGS]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    store, kind = request.param.split()
    make = {"s3": s3_place, "web": web_place}[store]
    return make(request.getfixturevalue(store), tmp_path, kind)  # type: ignore[operator]


# ----------------------------------------------------------------------------------------------------------- verbs

VERBS: dict[str, list[str]] = {
    "bench": ["{good}", "--seconds", "0.5"],
    "cat": ["{good}", "001"],
    "column add": ["{good}", "{name}", "--from", "{score}", "--on", "key", "--value", "score"],
    "column list": ["{good}"],
    "convert": ["{rows}", "{target}/converted", "--max-samples", "1"],
    "copy": ["{good}", "{target}/copied"],
    "diff": ["{good}", "{good}"],
    "doctor": ["{good}", "--no-imports"],
    "index": ["{good}", "--index", "{local}/index"],
    "info": ["{good}"],
    "ls": ["{good}", "--long"],
    "plan": ["{good}", "--batch-size", "2"],
    "repair": ["{damaged}", "--to", "{target}/repaired", "--drop-damaged"],
    "reshard": ["{good}", "{target}/resharded", "--max-samples", "3", "--shuffle"],
    "clean": ["{local}"],
    "export": ["{good}", "{target}/exported", "--to", "parquet"],
    "map": ["{good}", "{target}/mapped", "builtins:dict", "--workers", "1"],
    "show": ["{good}", "--html", "{local}/show.html"],
    "stats": ["{good}", "--all", "--html", "{local}/report.html"],
    "verify": ["{good}"],
    "view save": ["{good}", "{name}", "--where", "num >= 2"],
    "view list": ["{good}"],
    "view show": ["{good}", "{name}"],
    "column drop": ["{good}", "{name}"],
    "append": ["{rows}", "{target}/converted"],
    "split": ["{good}", "{target}/parts/train=50%", "{target}/parts/val=50%"],
    "version tag": ["{target}/copied", "first"],
    "delete": ["{target}/copied", "--where", "num >= 3"],
    "dedupe": ["{target}/copied", "--by", "key"],
    "version list": ["{target}/copied"],
    "version show": ["{target}/copied", "first"],
    "version diff": ["{target}/copied", "first", "2"],
    "version prune": ["{target}/copied"],
    "field add": ["{target}/copied", "{name}.txt", "--from", "{good}", "--field", "txt", "--on", "key"],
    "field list": ["{target}/copied"],
    "field drop": ["{target}/copied", "{name}.txt"],
}
"""Arguments of every verb; of those that work in a store that can be written all succeed, in this order."""
MORE = [
    ("verify", ["{damaged}", "--decode", "--write-bad", "{local}/bad.jsonl"]),
    ("repair", ["{damaged}", "--to", "{target}/left"]),
    ("reshard", ["{damaged}", "{target}/halfway"]),
    ("copy", ["{damaged}", "{target}/copied-too"]),
    ("column add", ["{good}", "other", "--lift", "none"]),
    ("convert", ["{rows}", "{target}/tokens", "--tokenizer", "bytes"]),
    ("convert", ["{rows}", "{target}/tokens2", "--tokenizer", "{rows}"]),
    ("convert", ["{damaged}", "{target}/from-tars"]),
    ("convert", ["{rows}", "{local}/classes", "--classes", "{score}"]),
    ("index", ["{damaged}", "--index", "{local}/index-too"]),
    ("plan", ["{rows}", "--batch-size", "2"]),
    ("info", ["{good}", "--index", "{rows}"]),
    ("ls", ["{good}", "--limit", "{good}"]),
    ("bench", ["{good}", "--seconds", "0.5"]),
    ("bench", ["{good}", "--index", "{rows}"]),
    ("bench", ["{good}", "--tune", "--seconds", "0.2", "--out", "{local}/tuned.json"]),
    ("bench", ["{good}", "--tune", "--seconds", "0.2", "--out", "{rows}"]),
    ("stats", ["{damaged}", "--where", "{rows}"]),
    ("stats", ["{damaged}", "--json"]),
    ("clean", ["{good}"]),
    ("export", ["{good}", "{target}/lists", "--to", "wids"]),
    ("export", ["{damaged}", "{target}/damaged", "--to", "hf"]),
    ("show", ["{damaged}", "--html", "{local}/damaged.html", "--state", "{rows}"]),
    ("map", ["{damaged}", "{target}/mapped-too", "builtins:dict"]),
    ("doctor", ["{damaged}", "--no-imports", "--index", "{rows}", "--json"]),
    ("cat", ["{good}", "001", "{rows}"]),
    ("diff", ["{good}", "{damaged}", "--index-b", "{rows}"]),
    ("diff", ["{damaged}", "{good}"]),
    ("view save", ["{good}", "x", "--exclude", "{rows}"]),
    ("append", ["{damaged}", "{target}/converted"]),
    ("delete", ["{damaged}", "--keys", "{rows}"]),
    ("dedupe", ["{damaged}", "--by", "{score}"]),
    ("split", ["{damaged}", "{target}/parts-too/train={rows}"]),
    ("version show", ["{good}", "{rows}"]),
    ("version diff", ["{good}", "{rows}", "{score}"]),
    ("field add", ["{good}", "late.txt", "--from", "{damaged}", "--field", "txt"]),
    ("field add", ["{good}", "late.cls", "--compute", "builtins:dict", "--workers", "1"]),
    ("field drop", ["{good}", "{rows}"]),
]
"""What fails late, finds damage, or is not said right."""


def leaves(command: click.Command, name: str = "") -> Iterator[str]:
    if isinstance(command, click.Group):
        for below, one in command.commands.items():
            yield from leaves(one, f"{name} {below}".strip())
    else:
        yield name


def test_each_verb_is_tried() -> None:
    assert {*VERBS} == {*leaves(cli)} - {"trace merge"}  # which reads no store


@pytest.mark.thorough
def test_verbs_tell_no_secret(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.DEBUG)
    told, local = Told(), tmp_path / "local"
    local.mkdir()
    names = {"good": place.good, "damaged": place.damaged, "rows": place.rows, "score": place.score,
             "target": place.target, "local": str(local), "name": "extra"}  # fmt: skip
    how = [part for name, value in place.options.items() for part in ("--storage-option", f"{name}={value}")]
    for number, (verb, arguments) in enumerate([*VERBS.items(), *MORE]):
        words = [*verb.split(), *(one.format(**names) for one in arguments), *how, *FLAGS[place.kind]]
        result = CliRunner().invoke(cli, words, prog_name="shard_tools")
        told.add(result.output, result.stderr, *([result.exception] if result.exception else []))
        if place.kind == "s3 works" and number < len(VERBS):
            allowed = {0, 1} if verb == "doctor" else {0}  # whose 1 may be about this machine
            assert result.exit_code in allowed, (verb, result.output)
    told.add(caplog.text, capfd.readouterr())
    told.files(tmp_path, place.folder)
    told.check()


@pytest.mark.parametrize("option", ["--storage-option", "--target-option"])
@pytest.mark.parametrize("extra", [[], ["--json"], ["--debug"]])
def test_a_secret_that_is_not_given_right_is_not_repeated(option: str, extra: list[str]) -> None:
    told = Told()
    for verb in (["copy", "a", "b"], ["info", "a"]):
        result = CliRunner().invoke(cli, [*verb, option, PASSWORD, *extra], prog_name="shard_tools")
        assert result.exit_code == 2
        told.add(result.output, result.stderr)
    assert "is not of the form KEY=VALUE" in "".join(told.texts)
    told.check()


# --------------------------------------------------------------------------------------------------------- classes

SLOWLY = streaming.Schedule.linear(0.5, 1.0, over=8)
Read = Callable[[Place, Told, Path], None]


def opened(place: Place, local: Path, url: str = "", **options: Any) -> streaming.StreamingDataset:
    return streaming.StreamingDataset(
        url or place.good, storage_options=place.options, cache_dir=str(local / "cache"),
        bad_samples_file=str(local / "bad.jsonl"), **options,
    )  # fmt: skip


def without_videos(place: Place, told: Told, local: Path) -> None:
    """What windows say of a set without an index of its videos, or of a store that fails."""
    with pytest.raises(streaming.errors.ShardstreamError) as raised:
        streaming.Windows(opened(place, local), every="frame", video={"txt": [0.0]})
    told.add(raised.value)
    if not place.works:
        raise raised.value


def loop_over(loader: Any, told: Told, *, owner: Any = None) -> None:
    """An epoch, and all that can be asked of what reads it; ``owner`` is the loader that it stands for."""
    told.add(loader)
    with owner or loader:
        for batch in loader:
            told.add(batch)
            break
        numbers = (owner or loader).metrics
        told.add(loader.state_dict(), numbers())
        told.add(list(loader), loader.state_dict(), json.dumps(numbers(), default=str), loader)


def read_wrapped(wrap: Callable[[Any], Any], place: Place, told: Told, local: Path) -> None:
    loader = streaming.DataLoader(opened(place, local), 2)
    loop_over(wrap(loader), told, owner=loader)


def read_dataset(place: Place, told: Told, local: Path) -> None:
    for url, on_error in ((place.good, "raise"), (place.damaged, "substitute"), (place.damaged, "skip")):
        dataset = opened(place, local, url, on_error=on_error, max_bad_samples=8)
        told.add(dataset, copy.copy(dataset), dataset.source.storage, dataset.fingerprint, dataset[NUM - 1])
        loop_over(streaming.DataLoader(dataset, 2), told)


def read_damaged(place: Place, told: Told, local: Path) -> None:
    told.add(opened(place, local, place.damaged, on_error="raise")[0])


def read_by_batches(place: Place, told: Told, local: Path) -> None:
    dataset = opened(place, local)
    mesh = DeviceMesh.from_sizes(dp_size=1, rank=0)
    sampler = streaming.DeviceMeshSampler(dataset, 2, device_mesh=mesh)
    told.add(sampler, list(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=list)))
    retrying = streaming.RetrySampler(streaming.DeviceMeshSampler(dataset, 2, device_mesh=mesh), dataset)
    told.add(retrying, list(torch.utils.data.DataLoader(retrying.dataset, batch_sampler=retrying, collate_fn=list)))


def packed(place: Place, local: Path) -> streaming.Packed:
    return streaming.Packed(opened(place, local), 16, dtype="uint16")


def is_kept(sample: Any) -> bool:
    return True


CLASSES: dict[str, Read] = {
    "StreamingDataset": read_dataset,
    "as_torch": lambda place, told, local: read_wrapped(streaming.as_torch, place, told, local),
    "one_behind": lambda place, told, local: read_wrapped(streaming.one_behind, place, told, local),
    "DataLoader": read_damaged,
    "DeviceMeshSampler": read_by_batches,
    "RetrySampler": read_by_batches,
    "Balanced": lambda place, told, local: loop_over(
        streaming.DataLoader(streaming.Balanced(opened(place, local), by="num"), 2, epoch_size=8), told
    ),
    "Curriculum": lambda place, told, local: loop_over(
        streaming.DataLoader(streaming.Curriculum(opened(place, local), "num", SLOWLY), 2, epoch_size=8), told
    ),
    "Mixture": lambda place, told, local: loop_over(
        streaming.DataLoader(streaming.Mixture({"a": opened(place, local), "b": opened(place, local)}), 2), told
    ),
    "Packed": lambda place, told, local: loop_over(streaming.DataLoader(packed(place, local), 2), told),
    "Windows": without_videos,
    "DeviceMeshFetcher": lambda place, told, local: loop_over(
        streaming.DeviceMeshFetcher(opened(place, local), 2), told
    ),
    "DevicePrefetcher": lambda place, told, local: told.add(
        *streaming.DevicePrefetcher(streaming.DataLoader(opened(place, local), 2), device="cpu")
    ),
    "OrdinaryDataset": lambda place, told, local: loop_over(
        streaming.DataLoader(
            streaming.OrdinaryDataset(streaming.TableDataset(place.rows, storage_options=place.options)), 1
        ), told
    ),
    "TableDataset": lambda place, told, local: told.add(
        table := streaming.TableDataset(place.rows, storage_options=place.options), table[0]
    ),
    "TorchIterable": lambda place, told, local: told.add(
        view := streaming.TorchIterable(opened(place, local)), *view, view.state_dict()
    ),
    "Tickets": lambda place, told, local: told.add(
        tickets := streaming.Tickets(streaming.DataLoader(opened(place, local), 2)), *tickets, tickets.state_dict(),
        tickets.report(),
    ),
    "ShardWriter": lambda place, told, local: make_set(f"{place.target}/written", place.options),
    "lines": lambda place, told, local: told.add(
        read := shard_tools.lines(place.rows, storage_options=place.options), repr(read)
    ),
    "optimize": lambda place, told, local: told.add(
        shard_tools.optimize(
            dict, [{"txt": "a"}], f"{place.target}/optimized", workers=0, storage_options=place.options
        )
    ),
    "select": lambda place, told, local: told.add(
        shard_tools.select(is_kept, place.good, "kept", fields=["txt"], storage_options=place.options)
    ),
}  # fmt: skip
WRITING = {"ShardWriter", "optimize", "select"}  # into a store that may be read-only, or into a folder
WITHOUT_URLS = {"BatchHandle", "Broadcast", "Jagged", "RemoteBatch", "RemoteGroup", "Schedule", "SequenceSlice",
                "ShuffleConfig", "Sound", "StageFields", "Video"}  # fmt: skip
"""Options, and what a cluster of Ray gives: test_ray.py."""


def test_each_class_is_tried() -> None:
    assert {*CLASSES} | WITHOUT_URLS == {*streaming.__all__, *shard_tools.__all__}


@pytest.mark.thorough
def test_classes_tell_no_secret(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.DEBUG)
    told = Told()
    for name, read in CLASSES.items():
        try:
            read(place, told, tmp_path)
        except (streaming.errors.ShardstreamError, ValueError) as error:
            assert not place.works or name in {"DataLoader", *WRITING}, name
            told.add(error)
        else:
            assert place.works or name in WRITING, name
    mixture = {"sources": {"a": {"urls": place.good, "storage_options": place.options}, "b": {"url": place.damaged}}}
    for content in (mixture, {**mixture, "unit": place.good}, {"sources": {"a": place.good}}):
        (tmp_path / "mixture.json").write_text(json.dumps(content))
        try:
            told.add(streaming.Mixture.from_file(tmp_path / "mixture.json", storage_options=place.options))
        except streaming.errors.ShardstreamError as error:
            told.add(error)
    (tmp_path / "mixture.json").unlink()  # the user's
    told.add(caplog.text, capfd.readouterr())
    told.files(tmp_path, place.folder)
    told.check()


# --------------------------------------------------------------------------------------------------------- errors

ELSEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "http": ("http://{at}/x.tar", {}),
    "signed": (f"http://{{at}}/x.tar?{QUERY}", {}),
    "http by fsspec": (f"http://{{at}}/x.tar?{QUERY}", {"client": "fsspec"}),
    "s3": ("s3://bucket/x", {"endpoint_url": "http://{at}", "key": "abcdef0123", "secret": "0ddba11"}),
    "s3 by fsspec": (
        "s3://bucket/x",
        {"endpoint_url": "http://{at}", "key": "abcdef0123", "secret": "0ddba11", "client": "fsspec"},
    ),
    "s3 without a scheme": ("s3://bucket/x", {"endpoint_url": "{at}"}),
    "gs": ("gs://bucket/x", {"endpoint_url": "http://{at}", "token": "fedcba9876"}),
    "az": ("az://bucket/x", {"endpoint_url": "http://{at}", "account_name": "a", "sas_token": "?sv=1&sig=0ddba11"}),
    "ftp": ("ftp://{at}/x", {}),
    "a file on a host": ("file://{at}/x", {}),
    "an unknown scheme": ("nowhere://{at}/x", {}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.matrix] if one == "s3 by fsspec" else []) for one in ELSEWHERE]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fsspec's ftp, never connected
def test_errors_of_every_kind_of_store_tell_no_secret(
    kind: str, s3fs_closed: Callable[[Storage], Storage], caplog: pytest.LogCaptureFixture
) -> None:
    at = f"{USER}:{PASSWORD}@127.0.0.1:{free_port()}"
    url, options = ELSEWHERE[kind]
    told, raised = Told(), 0
    storage = Storage({**{name: value.format(at=at) for name, value in options.items()}, **IMPATIENT})
    if kind == "s3 by fsspec":
        s3fs_closed(storage)
    for call in (storage.read, storage.info, lambda url: list(storage.list(url)), lambda url: storage.put(url, b"x")):
        try:
            told.add(call(url.format(at=at)))
        except streaming.errors.ShardstreamError as error:
            told.add(error, storage, storage._options)
            raised += 1
    assert raised >= 3  # fsspec lists nothing of a web server that does not answer
    told.add(caplog.text)
    told.check()


def test_a_cause_keeps_its_name_and_what_it_says() -> None:
    port = free_port()
    with pytest.raises(streaming.errors.StorageError) as caught:
        Storage(IMPATIENT).read(f"http://127.0.0.1:{port}/x?sig={PASSWORD}")
    text = "".join(traceback.format_exception(caught.value))
    assert re.search(rf"obstore\.exceptions\.\w+: .*Error performing GET http://127\.0\.0\.1:{port}/x\?… in ", text)
    assert "Connection refused" in text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"http://u:{PASSWORD}@host/a.tar?sig=x: no such shard", "http://…@host/a.tar?…: no such shard"),
        ("(see https://host/a?b=c).", "(see https://host/a?…)."),
        ("http://…@host/a?…, bytes 0-9", "http://…@host/a?…, bytes 0-9"),
        ("s3://bucket/what?.tar is 3", "s3://bucket/what?.tar is 3"),
    ],
)
def test_errors_leave_out_secrets_of_urls_when_they_are_made(message: str, shown: str) -> None:
    for kind in (streaming.errors.DataError, streaming.errors.NotFoundError, streaming.errors.OptionError):
        error = kind(message)
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == shown


def test_a_password_that_is_percent_encoded_is_sent_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with GuardedHttpServer(tmp_path, "me@home", "p/w:1", "") as server:
        assert bytes(Storage().read(f"http://me%40home:p%2Fw%3A1@127.0.0.1:{server.port}/x")) == b"abc"
        with pytest.raises(streaming.errors.AccessDeniedError, match="came from the user and password in the URL"):
            Storage().read(f"http://me%40home@127.0.0.1:{server.port}/x")
