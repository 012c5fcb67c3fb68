"""Attacks by those whom nobody trusts, each run against the real thing, and what happens: the rows of a page's table.

An outcome is found, not written down: the attack is made, and what it leaves is looked at.
"""

from __future__ import annotations

import fcntl
import http.server
import io
import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.show.data.trees import boxes_in
from shard_tools.look.show.decoding.process import MEMORY_BYTES
from shard_tools.look.show.decoding.workers import DecodingWorkers, TokenTexts, _Worker
from shard_tools.make.tokens.tokenizer import find_tokenizer
from streaming import DataLoader, Mixture, StreamingDataset, metrics
from streaming.build.batches.bad_file import BadFile, BadRecord
from streaming.errors import ShardstreamError, shell_word
from streaming.shards.cache.node import NodeCache
from streaming.storage import Checked, Storage
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.show_pages import Shown
from tests.support.sets.data_sets import write_set
from tests.support.sets.index_files import with_facts
from tests.support.sets.tars import write_tar

REFUSED, NOTHING, TOLD, BOUNDED, OPEN = "refused", "nothing", "told", "bounded", "open"
NAME = "a$(touch x).tar"


@dataclass(frozen=True)
class Happened:
    """What an attack led to, words that it is sure to be told in, and all that is told."""

    word: str
    words: str = ""
    text: str = field(default="", repr=False)


@dataclass(frozen=True)
class Attack:
    """Who attacks, what they do, and the function that does it in a folder; None: no protection is claimed here."""

    by: str
    what: str
    run: Callable[[Path], Happened] | None


ATTACKS: list[Attack] = []


def attack(by: str, what: str) -> Callable[[Callable[[Path], Happened]], Callable[[Path], Happened]]:
    def note(run: Callable[[Path], Happened]) -> Callable[[Path], Happened]:
        ATTACKS.append(Attack(by, what, run))
        return run

    return note


def refused(work: Callable[[], object], *said: str) -> Happened:
    """The work is refused, in words that have all of these.

    Raises:
        AssertionError: It is not.
    """
    try:
        work()
    except (ShardstreamError, ValueError) as error:
        return told_in(REFUSED, str(error), *said)
    raise AssertionError("it is done")


def told_in(word: str, text: str, *said: str) -> Happened:
    """Return an outcome whose text has all of these words.

    Raises:
        AssertionError: It has not.
    """
    assert all(one in text for one in said), text
    return Happened(word, " … ".join(said), text)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Words of the warnings that are logged within."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def locked_by_a_reader(path: Path) -> Iterator[None]:
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def small_set(folder: Path) -> Path:
    write_set(folder, (4,))
    return folder


# ------------------------------------------------------------------------------------- another user of the machine


@attack("other user", "holds a lock of the folder of `serve()`")
def lock_of_serve(folder: Path) -> Happened:
    (folder / "run").mkdir()
    with locked_by_a_reader(folder / "run"), DataLoader(StreamingDataset(small_set(folder / "s")), batch_size=2) as one:
        metrics.serve(one, folder / "run" / "a.sock").close()
    return Happened(NOTHING)


@attack("other user", "makes the lock of `serve()` first, for all to open")
def lock_file_of_serve(folder: Path) -> Happened:
    (folder / "a.sock.lock").touch(mode=0o666)
    (folder / "a.sock.lock").chmod(0o666)
    with DataLoader(StreamingDataset(small_set(folder / "s")), batch_size=2) as one:
        return refused(lambda: metrics.serve(one, folder / "a.sock"), "other users can open this lock")


@attack("other user", "holds the lock of a `bad_samples_file` that they can read")
def lock_of_bad_samples(folder: Path) -> Happened:
    (folder / "bad").touch()
    with warnings() as told, locked_by_a_reader(folder / "bad"):
        BadFile(str(folder / "bad"), 0).add(BadRecord(url="a.tar", key="k", stage="decode", reason="torn"))
    assert b'"k"' in (folder / "bad").read_bytes()
    return told_in(TOLD, told[0], "another process has held its lock for 1 s; lines are added without it")


@attack("other user", "may write into the `cache_dir`, and so replace the cache")
def cache_of_others(folder: Path) -> Happened:
    around = folder / "cache"
    around.mkdir()
    around.chmod(0o777)
    out = bytearray(4)

    def fetch(view: memoryview) -> Checked:
        view[:] = b"mine"
        return Checked.comparing(4, ())

    with warnings() as told:
        NodeCache(around, 1 << 20).read_into("s3://b/k", "v", 0, memoryview(out), fetch, crc32c=None)
    assert out == b"mine"
    assert not [*around.iterdir()]
    return told_in(TOLD, told[0], "expected a folder owned by this user that nobody else can write to")


@attack("other user", "plants a link at the path of a file that is written")
def planted_link(folder: Path) -> Happened:
    victim = folder / "victim"
    victim.write_text("mine")
    (folder / "out").mkdir()
    (folder / "out" / "00.tar").symlink_to(victim)
    with ShardWriter(f"{folder}/out/%02d.tar", overwrite=True) as writer:
        writer.write({"__key__": "k", "txt": "t"})
    assert victim.read_text() == "mine"
    return Happened(NOTHING)


def shown(work: Callable[[Shown], Happened]) -> Callable[[Path], Happened]:
    def run(folder: Path) -> Happened:
        with Shown((str(small_set(folder / "s")),)) as pages:
            return work(pages)

    return run


@attack("other user", "reads the command line of the browser that `show` starts, and uses the address after it")
@shown
def invitation(pages: Shown) -> Happened:
    address = pages.access.address_for_browser().removeprefix(pages.root)
    assert pages.access.token not in address
    assert pages.ask(address).status == 303
    found = pages.ask(address, {"Accept": "text/html"})
    assert "set-cookie" not in found.headers
    return Happened(REFUSED, "this address let in once") if found.status == 401 else Happened(OPEN)


@attack("other user", "reads that command line, and is faster than the browser")
@shown
def invitation_taken(pages: Shown) -> Happened:
    address = pages.access.address_for_browser().removeprefix(pages.root)
    stolen = pages.ask(address)
    sent = {"Cookie": stolen.headers["set-cookie"].partition(";")[0]}
    with warnings() as told:
        assert pages.ask(address).status == 401
    assert pages.ask(stolen.headers["location"], sent).status == 401, "they are out again"
    return told_in(TOLD, told[0], "another program of this machine may have read it")


@attack("other user", "listens at another port, for the cookie of `show`")
@shown
def cookie_at_another_port(pages: Shown) -> Happened:
    made = pages.ask(f"/?token={pages.access.token}", {"Accept": "text/html"}).headers
    value, *rest = made["set-cookie"].split("; ")
    (path,) = [one.removeprefix("Path=") for one in rest if one.startswith("Path=")]
    assert len(path) > 20, "a path that nobody asks for"
    assert pages.access.token not in made["set-cookie"]
    assert pages.ask("/", {"Cookie": value}).status == 401
    return Happened(NOTHING)


@attack("other user", "asks the server of `show` without its token")
@shown
def no_token(pages: Shown) -> Happened:
    statuses = {pages.ask(path).status for path in ("/", "/sample?number=0", "/value?number=0&field=txt", "/s/x/")}
    return Happened(REFUSED, f"status {statuses.pop()}") if statuses == {401} else Happened(OPEN)


# --------------------------------------------------------------------------------------------- the file of a mixture


def described(folder: Path, *, at_mixture: bool = False, **options: Any) -> Path:
    source = {"url": str(small_set(folder / "s"))}
    whole: dict[str, Any] = {"sources": {"a": source}}
    (whole if at_mixture else source).update(options)
    (folder / "mixture.json").write_text(json.dumps(whole))
    return folder / "mixture.json"


class Catcher(http.server.BaseHTTPRequestHandler):
    """Notes what it is sent."""

    def do_GET(self) -> None:  # the name is http.server's
        self.server.heard.append(dict(self.headers))  # type: ignore[attr-defined]
        self.send_response(404)
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def catching() -> Iterator[tuple[str, list[dict[str, str]]]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Catcher)
    server.heard = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.heard  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ONLY_DATA = "a file may say only what the data is"
KEYS = {"key": "AKIA", "secret": "very-secret", "token": "session-token"}


def asks_elsewhere(folder: Path, options: Callable[[str], dict[str, Any]], said: str) -> Happened:
    with catching() as (url, heard):
        path = described(folder, **options(url))
        found = refused(lambda: Mixture.from_file(path, storage_options=KEYS), f"{said}: {ONLY_DATA}")
    assert heard == []
    return found


@attack("mixture file", "`endpoint_url`: your keys would be sent there")
def endpoint_of_a_file(folder: Path) -> Happened:
    return asks_elsewhere(
        folder, lambda url: {"url": "s3://b/", "storage_options": {"endpoint_url": url}}, "endpoint_url"
    )


@attack("mixture file", "`endpoint_url` of a mirror")
def endpoint_of_a_mirror(folder: Path) -> Happened:
    return asks_elsewhere(folder, lambda url: {"mirrors": [{"url": "s3://b/", "endpoint_url": url}]}, "endpoint_url")


@attack("mixture file", "a `region` that makes another host of the store's")
def region_of_a_file(folder: Path) -> Happened:
    return asks_elsewhere(folder, lambda _: {"storage_options": {"region": "x.evil.example/"}}, "region")


@attack("mixture file", "`profile`, `key`, `token`: whose keys are used")
def keys_of_a_file(folder: Path) -> Happened:
    for name in ("profile", "key", "token"):
        found = asks_elsewhere(folder, lambda _, name=name: {"storage_options": {name: "x"}}, name)
    return found


@attack("mixture file", "`bad_samples_file`: lines would be appended to a start-up file of your shell")
def bad_samples_of_a_file(folder: Path) -> Happened:
    (folder / "profile").write_text("mine")
    for at_mixture in (True, False):
        path = described(folder, at_mixture=at_mixture, bad_samples_file=str(folder / "profile"))
        found = refused(lambda path=path: Mixture.from_file(path), f"bad_samples_file: {ONLY_DATA}")
    assert (folder / "profile").read_text() == "mine"
    return found


@attack("mixture file", "`cache_dir`: files would be written and deleted there")
def cache_of_a_file(folder: Path) -> Happened:
    path = described(folder, cache_dir=str(folder / "c"))
    found = refused(lambda: Mixture.from_file(path), f"cache_dir: {ONLY_DATA}")
    assert not (folder / "c").exists()
    return found


PASSWORD = "aws_secret_access_key = hunter2"


@attack("mixture file", "`exclude`: a file of keys of yours is read, and its lines are shown")
def keys_file_of_a_file(folder: Path) -> Happened:
    secrets = folder / "home" / "credentials"
    secrets.parent.mkdir()
    secrets.write_text(f"[default]\n{PASSWORD}\n")
    (folder / "in").mkdir()
    (folder / "in" / "linked").symlink_to(secrets)
    for name in (str(secrets), f"file://{secrets}", str(folder / "in" / ".." / "home" / "credentials"),
                 str(folder / "in" / "linked"), "s3://bucket/credentials"):  # fmt: skip
        path = described(folder, exclude=name).rename(folder / "in" / "mixture.json")
        found = refused(lambda path=path: Mixture.from_file(path), f"exclude: {ONLY_DATA}", "it names a file outside")
    path = described(folder, exclude=str(secrets))
    with warnings() as told:
        sizes = Mixture.from_file(path).sizes
    assert sizes == {"a": 4}
    assert "2 of 2 keys are in none of the shards" in told[0]
    assert "hunter2" not in told[0], "a file below the description is read, and not shown"
    return found


@attack("mixture file", "`url` is a file of keys of yours, whose beginning would be shown as the name of a member")
def keys_as_shard(folder: Path) -> Happened:
    (folder / "credentials").write_text(f"{PASSWORD}\n" * 40)
    found = refused(lambda: Mixture.from_file(described(folder, url=str(folder / "credentials"))), "no tar header here")
    assert "hunter2" not in found.text
    return found


@attack("mixture file", "`repeats`: an epoch of a billion passes is laid out")
def passes_without_end(folder: Path) -> Happened:
    ways: tuple[dict[str, Any], ...] = ({}, {"quotas": "exact"}, {"batches": "one_source"})
    for way in ways:
        mixture = Mixture.from_file(described(folder, at_mixture=True, repeats={"a": 1e9}, **way))
        with DataLoader(mixture, batch_size=16, num_threads=0) as loader:
            found = refused(lambda loader=loader: next(iter(loader)), "chunks, at most 16,777,216 can be laid out")
    return found


@attack("mixture file", "`packed`: rows of a billion tokens, of a set that has a few")
def rows_without_end(folder: Path) -> Happened:
    with ShardWriter(f"{folder}/t/%02d.tar", columns={"tokens": lambda _: 32}) as writer:
        writer.write({"__key__": "k", "tok": bytes(64)})
    packed = {"length": 2**30, "field": "tok", "dtype": "uint16"}
    path = described(folder, url=str(folder / "t"), packed=packed)
    return refused(lambda: Mixture.from_file(path), "a row longer than all 32 tokens of the set together")


@attack("mixture file", "weights at the ends of what floats are")
def odd_weights(folder: Path) -> Happened:
    path = described(folder, at_mixture=True)
    source = json.loads(path.read_text())["sources"]["a"]
    for weights in ((5e-324, 1), (5e-324, 1e308), (1e308, 1), (1e-300, 1e300)):
        mixed = {"sources": {"a": source, "b": source}, "weights": dict(zip("ab", weights, strict=True))}
        path.write_text(json.dumps(mixed))
        with DataLoader(Mixture.from_file(path), batch_size=2, num_threads=0) as loader:
            next(iter(loader))
    return Happened(NOTHING)


@attack("mixture file", "the character NUL in a path, a line break in a URL")
def odd_characters(folder: Path) -> Happened:
    refused(lambda: Mixture.from_file(described(folder, url="http://127.0.0.1:1/a\r\nb.tar")), "control character")
    return refused(lambda: Mixture.from_file(described(folder, url=f"{folder}/\0x")), "there is a character NUL in it")


@attack("mixture file", "`transform`, or a URL `pipe:…`: code")
def code_of_a_file(folder: Path) -> Happened:
    refused(lambda: Mixture.from_file(described(folder, transform="os.system")), "is code")
    return refused(
        lambda: Mixture.from_file(described(folder, url=f"pipe:touch {folder}/ran")), "no shards below pipe:"
    )


# -------------------------------------------------------------------------------------------------- index, and marks


@attack("index", "names a shard outside its folder")
def shard_outside(folder: Path) -> Happened:
    table = small_set(folder / "s") / "_shardstream" / "chunks.parquet"
    facts = json.loads(pq.read_schema(table).metadata[b"shardstream"])
    facts["shards"][0][0] = "../secret.tar"
    with_facts(table, facts)
    return refused(
        lambda: StreamingDataset(folder / "s"), "'../secret.tar' is not a path below the folder of the shards"
    )


def pasted(text: str, folder: Path) -> None:
    """Run a text in a shell, as somebody who pastes it does."""
    here = folder / "here"
    here.mkdir()
    subprocess.run(["bash", "--norc", "-c", text], cwd=here, capture_output=True, check=False, env={"PATH": "/bin"})
    assert not [*here.iterdir()], text


@attack("index", "names a shard `a$(touch x).tar`, and somebody pastes the cure of a message")
def a_cure_is_pasted(folder: Path) -> Happened:
    small_set(folder / "s")
    os.rename(folder / "s" / "000000.tar", folder / "s" / NAME)
    CliRunner().invoke(cli, ["index", str(folder / "s"), "--force", "--prune"])
    shard = folder / "s" / NAME
    shard.write_bytes(shard.read_bytes() + bytes(512))
    found = refused(lambda: StreamingDataset(folder / "s"), shell_word(str(shard)))
    pasted(f"echo {found.text[found.text.index('shard_tools') :].strip('`')}", folder)
    return Happened(NOTHING, f"shard_tools index '…/{NAME}'")


@attack("index", "names hold sequences that steer a terminal")
def a_terminal_is_steered(folder: Path) -> Happened:
    write_tar(folder / "s" / "a\x1b]0;owned\x07.tar", [("k.txt", b"x"), ("k.txt", b"y")])
    found = refused(lambda: StreamingDataset(folder / "s"), "\\x1b]0;owned\\x07")
    assert "\x1b" not in found.text
    return Happened(NOTHING, found.words)


# ------------------------------------------------------------------------------------------------------------- states


def state_of(folder: Path) -> dict[str, Any]:
    with DataLoader(StreamingDataset(small_set(folder / "s")), batch_size=2, num_threads=0) as loader:
        return loader.state_dict()


@attack("state", "holds options of a set or a store")
def options_in_a_state(folder: Path) -> Happened:
    state = state_of(folder)
    with DataLoader(StreamingDataset(folder / "s"), batch_size=2, num_threads=0) as loader:
        for name in ("storage_options", "url", "bad_samples_file", "cache_dir"):
            found = refused(lambda name=name: loader.load_state_dict({**state, name: "x"}), f"unknown ['{name}']")
    return found


@attack("state", "is a pickle, or JSON without end, given to `plan --state`")
def a_state_that_is_none(folder: Path) -> Happened:
    small_set(folder / "s")
    for content in (b"\x80\x04cos\nsystem\n", b"[" * 100_000, b'{"version": 1' + b"0" * 5000 + b"}"):
        (folder / "state").write_bytes(content)
        asked = [
            "plan",
            str(folder / "s"),
            "--batch-size",
            "2",
            "--state",
            str(folder / "state"),
            "--step",
            "0",
            "--who",
        ]
        done = CliRunner().invoke(cli, asked)
        assert done.exit_code, done.output
        assert isinstance(done.exception, SystemExit), done.exception
    return told_in(REFUSED, done.output, "not JSON")


# ------------------------------------------------------------------------------------------- columns, views, schemas


@attack("columns", "a view, or a column, whose name leads to another folder")
def names_that_lead_away(folder: Path) -> Happened:
    small_set(folder / "s")
    refused(lambda: StreamingDataset(folder / "s", where='"../../x" = 1'), "../../x")
    return refused(lambda: StreamingDataset(folder / "s", view="../../x"), "view '../../x': expected letters, digits")


@attack("columns", "`schema.json` is nested without end")
def a_deep_schema(folder: Path) -> Happened:
    small_set(folder / "s")
    (folder / "s" / "_shardstream" / "schema.json").write_bytes(b'{"fields":' + b"[" * 100_000)
    return refused(lambda: StreamingDataset(folder / "s"), "schema.json: damaged index file")


# -------------------------------------------------------------------------------------------------------------- media


@attack("media", "a pickle")
def a_pickle(folder: Path) -> Happened:
    write_tar(folder / "s" / "a.tar", [("a.pt", b"\x80\x04cos\nsystem\n(S'touch x'\ntR.")])
    return refused(lambda: StreamingDataset(folder / "s")[0], "which may run code on loading")


@attack("media", "an array that claims 2^60 values")
def a_large_claim(folder: Path) -> Happened:
    out = io.BytesIO()
    np.save(out, np.zeros((10, 10)))
    large = out.getvalue().replace(b"(10, 10), }" + b" " * 18, b"(1073741824, 1073741824), }  ")
    write_tar(folder / "s" / "a.tar", [("a.npy", large)])
    return refused(lambda: StreamingDataset(folder / "s")[0], "bytes, but the payload has 800")


@attack("media", "names of arrays of 25 MB, which pages of `show` would keep")
def large_facts(folder: Path) -> Happened:
    del folder
    header = json.dumps(
        {f"{'a' * 400_000}{at}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for at in range(64)}
    )
    data = len(header).to_bytes(8, "little") + header.encode() + b"\0"
    with closing(DecodingWorkers(PATIENCE_S)) as workers:
        found = workers.decode("tensor", 64, data)
    kept = len(json.dumps(found.facts))
    assert kept < len(data) / 500
    assert found.num_bytes > kept
    return Happened(BOUNDED, "names are cut, and what is kept is counted")


@attack("media", "numbers beyond all floats in the JSON of boxes")
def large_numbers(folder: Path) -> Happened:
    del folder
    for number in (10**400, 1e400, -(10**4000)):
        assert boxes_in({"bbox": [number, 0, 1, 1], "annotations": [{"bbox": [0, 0, number, 1]}]}, 8, 8, ()) == ()
    return Happened(NOTHING)


@attack("media", "takes over the process of `show` that decodes it, for the keys in its environment")
def secrets_of_a_decoder(folder: Path) -> Happened:
    del folder
    before = os.environ.get("AWS_SECRET_ACCESS_KEY")
    os.environ["AWS_SECRET_ACCESS_KEY"] = "very-secret"
    try:
        made = _Worker()
        made.ask({"kind": "image", "pixels": 8}, b"none", PATIENCE_S)
        environment = Path(f"/proc/{made._process.pid}/environ").read_bytes()
        made.kill()
    finally:
        os.environ.pop("AWS_SECRET_ACCESS_KEY")
        if before is not None:
            os.environ["AWS_SECRET_ACCESS_KEY"] = before
    assert b"PATH=" in environment
    assert b"very-secret" not in environment
    return Happened(NOTHING)


# ---------------------------------------------------------------------------------------------------------- tokenizer

PLAIN: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"t": 0, "?": 1}, "unk_token": "?"},
}  # fmt: skip


def tokenizes(folder: Path, **parts: Any) -> Happened:
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | parts))
    file = find_tokenizer(str(folder / "tokenizer.json"), Storage(), special=True)
    with closing(TokenTexts(file, PATIENCE_S)) as texts:
        found = refused(lambda: texts.pieces(np.zeros(8, np.uint32)), "the tokenizer cannot be used")
    return Happened(BOUNDED, found.words)


@attack("tokenizer", "makes its library panic, in a page of `show`")
def a_panic(folder: Path) -> Happened:
    return tokenizes(folder, decoder={"type": "Strip", "content": "t", "start": 5, "stop": 5})


@attack("tokenizer", "makes gigabytes of one token, in a page of `show`")
def gigabytes(folder: Path) -> Happened:
    assert MEMORY_BYTES <= 2 << 30
    more = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000}
    return tokenizes(folder, decoder={"type": "Sequence", "decoders": [more] * 4})


# -------------------------------------------------------------------------------------------------------------- store

ATTACKS.append(Attack("store", "redirects a signed URL: its query is sent as `Referer` to the next host", None))
ATTACKS.append(Attack("store", "answers with a listing, or an error, without end", None))


@attack("store", "answers with an error text of 100,000 letters without a blank, to be searched by every thread")
def long_error(_: Path) -> Happened:
    text = str(ShardstreamError("x" * 100_000))
    assert len(text) < 3_000
    return told_in(BOUNDED, text, "characters left out")


# --------------------------------------------------------------------------------------------------------------- page


@attack("page", "of another site embeds, frames or fetches pages of `show`")
@shown
def another_site(pages: Shown) -> Happened:
    for site in ("cross-site", "same-site"):
        for kind in ({"Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}):
            assert pages.get("/", {"Sec-Fetch-Site": site, **kind}).status == 403
    return Happened(REFUSED, "status 403")


@attack("page", "of a name that leads here by DNS asks `show`")
@shown
def another_name(pages: Shown) -> Happened:
    assert pages.get("/", {"Host": f"evil.example:{pages.access.port}"}).status == 421
    return Happened(REFUSED, "status 421")


@attack("page", "is a sample: SVG, HTML or a script, asked for by itself")
def a_sample_that_runs(folder: Path) -> Happened:
    fields = {"svg": b"<svg onload='1'/>", "html": b"<script>1</script>", "js": b"1", "txt": b"<script>1</script>"}
    write_tar(folder / "s" / "a.tar", [(f"a.{name}", data) for name, data in fields.items()])
    with Shown((str(folder / "s"),)) as pages:
        for name in fields:
            headers = pages.get("/value", number=0, field=name).headers
            assert headers["content-type"].partition(";")[0] in {"text/plain", "application/octet-stream"}
            assert headers["x-content-type-options"] == "nosniff"
    return Happened(NOTHING)


def happens(one: Attack) -> Happened:
    """Make an attack in a folder of its own."""
    if one.run is None:
        return Happened(OPEN)
    with tempfile.TemporaryDirectory() as folder:
        return one.run(Path(folder))
