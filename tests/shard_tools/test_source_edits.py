"""Sources that are edited between two runs of a command: what is there then is what they hold, or an error names one.

Each case makes a set of a source, all of it or up to a stop, edits the source at random, and runs the command again. It
must then be what the command makes of the edited source in an empty place; or there is an error that names a file which
was edited, and its cure gives that. ``--source-edits 2000`` tries as many (default: 60), ``--torture-seed`` others.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.change.columns.join import JoinOptions, join_column
from shard_tools.change.columns.target import ColumnTarget
from shard_tools.change.functions.mapped import MapOptions, map_set
from shard_tools.change.functions.run import Running, optimize
from shard_tools.change.sets.reindex import index
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, TargetNotEmptyError, convert
from shard_tools.make.convert.journal import Waypoint, kept
from shard_tools.make.convert.pack import PackingRun
from shard_tools.make.tokens import TokenizeOptions, tokenize
from shard_tools.running.progress import NoProgress
from streaming import StreamingDataset
from streaming.errors import DataError, ShardstreamError
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.tiers import first_here

Samples = list[tuple[str, dict[str, Any]]]


class Stopped(Exception):  # as a signal is: the process is gone
    """Stands for the end of a process."""


class Meanwhile(NoProgress):
    """Does something once in a run, after so many records or calls of a function."""

    def __init__(self, after: int, what: Callable[[], None]) -> None:
        self._left, self._what = after, what

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        del num_bytes
        before, self._left = self._left, self._left - num
        if self._left < 0 <= before:
            self._what()


def stop() -> None:
    raise Stopped


# ------------------------------------------------------------------------------------------------- kinds of sources


def text_of(draw: random.Random, number: int) -> str:
    return f"{number:03d} {draw.randrange(10**6):06d}"


def lines(draw: random.Random, folder: Path, suffix: str, line: Callable[[str], str], head: str = "") -> None:
    for name in "abc":
        rows = [line(text_of(draw, number)) for number in range(draw.randrange(3, 30))]
        (folder / f"{name}.{suffix}").write_text(head + "".join(f"{row}\n" for row in rows))


def make_jsonl(draw: random.Random, folder: Path) -> None:
    lines(draw, folder, "jsonl", lambda text: json.dumps({"t": text}))


def make_text(draw: random.Random, folder: Path) -> None:
    lines(draw, folder, "txt", str)


def make_csv(draw: random.Random, folder: Path) -> None:
    lines(draw, folder, "csv", lambda text: f"{text},1", "t,n\n")


def make_parquet(draw: random.Random, folder: Path) -> None:
    for name in "abc":
        rows = [text_of(draw, number) for number in range(draw.randrange(3, 30))]
        pq.write_table(pa.table({"t": rows}), folder / f"{name}.parquet", row_group_size=7)


def make_files(draw: random.Random, folder: Path) -> None:
    for number in range(draw.randrange(5, 30)):
        (folder / f"f{number:03d}.txt").write_text(text_of(draw, number))


def make_images(draw: random.Random, folder: Path) -> None:
    for number in range(draw.randrange(6, 24)):
        place = folder / f"class{number % 3}"
        place.mkdir(exist_ok=True)
        Image.new("RGB", (4, 3), (draw.randrange(256), number, 0)).save(place / f"{number:03d}.png")


def make_zip(draw: random.Random, folder: Path) -> None:
    make_images(draw, folder / "..")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for path in sorted((folder / "..").glob("class*/*.png")):
            archive.write(path, f"{path.parent.name}/{path.name}")
    for place in (folder / "..").glob("class*"):
        shutil.rmtree(place)


def make_tars(draw: random.Random, folder: Path) -> None:
    for name in "abc":
        with ShardWriter(f"{folder}/{name}-{{:d}}.tar", index=False) as writer:
            for number in range(draw.randrange(3, 20)):
                writer.write({"__key__": f"{name}{number:03d}", "txt": text_of(draw, number)})


def make_set(draw: random.Random, folder: Path) -> None:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=7) as writer:
        for number in range(draw.randrange(8, 40)):
            writer.write({"__key__": f"{number:03d}", "txt": text_of(draw, number)})


# ------------------------------------------------------------------------------------------------- kinds of edits


def files_of(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file() and "_shardstream" not in one.parts)


def other_digit(draw: random.Random, path: Path, *, keep_time: bool = False, replaces: bool = False) -> None:
    """Write other content of the same size: where there is a digit, another one, so that it stays readable."""
    status, content = path.stat(), bytearray(path.read_bytes())
    places = [at for at, byte in enumerate(content) if 48 <= byte < 58] or [*range(len(content))]
    if not places:
        return
    at = draw.choice(places)
    content[at] = 48 + (content[at] - 48 + draw.randrange(1, 10)) % 10
    if replaces:
        path.with_name("new").write_bytes(content)
        path.with_name("new").rename(path)
    else:
        path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def one(draw: random.Random, folder: Path) -> Path:
    return draw.choice(files_of(folder))


def edit_content(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    other_digit(draw, path, keep_time=draw.random() < 0.5, replaces=draw.random() < 0.3)
    return [path]


def touch(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    if draw.random() < 0.5:
        os.utime(path)
    else:  # a copy that took its place
        shutil.copy2(path, path.with_name("copy"))
        path.with_name("copy").rename(path)
    return [path]


def truncate(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    content = path.read_bytes()
    path.write_bytes(content[: draw.choice([0, len(content) // 2, max(0, len(content) - 1)])])
    return [path]


def fewer_lines(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    if path.suffix not in {".jsonl", ".txt", ".csv"}:
        return truncate(draw, folder)
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept[: draw.randrange(1, len(kept) + 1)]))
    return [path]


def more(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    content = path.read_bytes()
    last = content.splitlines(keepends=True)[-1] if content else b"1\n"
    path.write_bytes(content + last)
    return [path]


def reorder(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    if path.suffix not in {".jsonl", ".txt", ".csv"}:
        return swap(draw, folder)
    rows = path.read_bytes().splitlines(keepends=True)
    head, rest = rows[:1], rows[1:]
    draw.shuffle(rest)
    path.write_bytes(b"".join(head + rest))
    return [path]


def swap(draw: random.Random, folder: Path) -> list[Path]:
    """Let two files change their names."""
    paths = files_of(folder)
    if len(paths) < 2:
        return rename(draw, folder)
    first, second = draw.sample(paths, 2)
    first.rename(first.with_name("swapped"))
    second.rename(first)
    first.with_name("swapped").rename(second)
    return [first, second]


def rename(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    new = path.with_name(f"{draw.choice('0z')}{path.name}")
    return [path, path.rename(new)]


def add(draw: random.Random, folder: Path) -> list[Path]:
    path = one(draw, folder)
    new = path.with_name(f"{draw.choice('0z')}{path.name}")
    shutil.copy(path, new)
    return [new]


def remove(draw: random.Random, folder: Path) -> list[Path]:
    paths = files_of(folder)
    path = draw.choice(paths)
    if len(paths) > 1:
        path.unlink()
    return [path]


def is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, EOFError, struct.error, zlib.error):
        return False


def lying_directory(draw: random.Random, folder: Path) -> list[Path]:
    """Change the directory of an archive: a count, a name, a place, a size; or other files under the same names."""
    path = one(draw, folder)
    content = bytearray(path.read_bytes())
    if path.suffix != ".zip" or not is_whole(path):
        return edit_content(draw, folder)
    end, begin = content.rindex(b"PK\5\6"), content.index(b"PK\1\2")
    what = draw.randrange(4)
    if what == 0:  # another number of files
        content[end + 8 : end + 12] = 2 * draw.randrange(1, 5).to_bytes(2, "little")
    elif what == 1:  # another name
        at = content.index(b"class", begin + draw.randrange(end - begin - 60))
        content[at + 5] = 48 + draw.randrange(10)
    elif what == 2:
        content[draw.randrange(begin, len(content))] = draw.randrange(256)
    else:
        with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        names = [*held]
        draw.shuffle(names)
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in zip(sorted(held), (held[one] for one in names), strict=True):
                archive.writestr(name, data)
        return [path]
    path.write_bytes(content)
    return [path]


EDITS = (
    edit_content, edit_content, touch, truncate, fewer_lines, more, reorder, swap, rename, add, remove, lying_directory
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- kinds of commands


@dataclass
class Case:
    """A source in ``source``, and a set of it in ``target``."""

    draw: random.Random
    root: Path
    told: Counter[str] = field(default_factory=Counter)

    @property
    def source(self) -> Path:
        return self.root / "in"


def converted(kind: str, **how: Any) -> Callable[..., Any]:
    def run(source: Path, target: Path, *, overwrite: bool, progress: NoProgress) -> Any:
        options = ConvertOptions(kind=kind, max_samples=5, overwrite=overwrite, **how)
        spec = str(source / "all.zip") if (source / "all.zip").exists() else str(source)
        return convert(spec, str(target), options=options, progress=progress)

    return run


def tokenized(source: Path, target: Path, *, overwrite: bool, progress: NoProgress) -> Any:
    options = TokenizeOptions(
        kind="text", tokenizer="bytes", max_samples=5, overwrite=overwrite, on_error="skip", eos="none"
    )  # fmt: skip
    return tokenize(str(source), str(target), options=options, progress=progress).sets[0]


CALLS: list[NoProgress] = []
"""Who is told of calls of a function."""


def called() -> None:
    for one in CALLS:
        one.advance(num=1)


def as_sample(path: str) -> dict[str, Any]:
    called()
    return {"txt": Path(path).read_text(encoding="utf-8", errors="replace"), "json": {"path": Path(path).name}}


def optimized(source: Path, target: Path, *, overwrite: bool, progress: NoProgress) -> Any:
    paths = [str(path) for path in files_of(source)]
    return optimize(
        as_sample, paths, target, max_samples=5, workers=0, overwrite=overwrite, progress=progress
    )  # fmt: skip


def louder(sample: dict[str, Any]) -> dict[str, Any]:
    called()
    return {"txt": f"{sample['txt']}!"}


def mapped(source: Path, target: Path, *, overwrite: bool, progress: NoProgress) -> Any:
    return map_set(
        str(source), str(target), "test_source_edits:louder", options=MapOptions(max_samples=5, overwrite=overwrite),
        running=Running(workers=0), progress=progress,
    )  # fmt: skip


COMMANDS: dict[str, tuple[Callable[[random.Random, Path], None], Callable[..., Any]]] = {
    "jsonl": (make_jsonl, converted("jsonl")),
    "jsonl shuffled": (make_jsonl, converted("jsonl", shuffle_seed=3)),
    "text": (make_text, converted("text")),
    "csv": (make_csv, converted("csv")),
    "parquet": (make_parquet, converted("parquet")),
    "parquet shuffled": (make_parquet, converted("parquet", shuffle_seed=3)),
    "files": (make_files, converted("files")),
    "images": (make_images, converted("images")),
    "zip": (make_zip, converted("images")),
    "tars": (make_tars, converted("tars")),
    "tokens": (make_text, tokenized),
    "optimize": (make_files, optimized),
    "map": (make_set, mapped),
}


def samples_of(target: Path) -> Samples:
    """Return the samples as training reads them, bytes of fields as they are."""
    dataset = StreamingDataset(str(target), shuffle=False, decode="raw")
    found = ((one["__key__"], {name: bytes(one[name]) for name in one if name[:2] != "__"}) for one in dataset)
    return sorted(found, key=lambda pair: pair[0])


def files_there(target: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(target)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in target.rglob("*.tar")
    }  # fmt: skip


def try_edit(case: Case, kind: str) -> None:
    draw, target, source = case.draw, case.root / "out", case.source
    make, run = COMMANDS[kind]
    source.mkdir(parents=True)
    make(draw, source)
    edited, edits = list[Path](), list[str]()

    def edit_some() -> None:
        for edit in draw.sample(EDITS, draw.choice([1, 1, 1, 2])):
            if files_of(source):
                edited.extend(edit(draw, source))
                edits.append(edit.__name__)

    when = draw.choice(["stopped", "meanwhile", "afterwards", "afterwards"])
    what = {"stopped": stop, "meanwhile": edit_some, "afterwards": lambda: None}[when]
    progress = Meanwhile(draw.randrange(4, 30), what)
    CALLS[:] = [progress] if kind in {"optimize", "map"} else []
    try:
        run(source, target, overwrite=False, progress=NoProgress() if CALLS else progress)
    except Stopped:
        case.told["stopped"] += 1
    except (ShardstreamError, OSError) as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert names_one(told, [*edited, source]), f"{kind}, {edits}: {told}"
        case.told["failed meanwhile"] += 1
    CALLS.clear()
    if not edits:
        edit_some()
    if kind == "map" and draw.random() < 0.5:
        with_index(source)
    said = f"{kind}, {edits} of {[path.name for path in edited]}, {when}"

    expected = made_anew(run, source, case.root / "anew")
    try:
        report = run(source, target, overwrite=False, progress=NoProgress())
    except ShardstreamError as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert names_one(told, [*edited, source]), f"{said}: {told}"
        case.told["refused" if isinstance(error, TargetNotEmptyError) else "failed"] += 1
        if isinstance(error, TargetNotEmptyError) and not isinstance(expected, Exception):
            assert "start over with" in told, f"{said}: {told}"
            run(source, target, overwrite=True, progress=NoProgress())
            assert samples_of(target) == expected, f"{said}: its cure gives something else"
        return
    assert not isinstance(expected, Exception), f"{said}: {expected}, and yet it went through"
    assert samples_of(target) == expected, said
    case.told["nothing written" if report.was_complete else "made"] += 1
    before = files_there(target)
    assert run(source, target, overwrite=False, progress=NoProgress()).was_complete, said
    assert files_there(target) == before, said


def names_one(told: str, paths: list[Path]) -> bool:
    return any(path.name in told for path in paths)


def with_index(folder: Path) -> None:
    shutil.rmtree(folder / "_shardstream")
    try:
        index([str(folder)], storage=Storage())
    except ShardstreamError:
        shutil.rmtree(folder / "_shardstream", ignore_errors=True)


def made_anew(run: Callable[..., Any], source: Path, target: Path) -> Samples | Exception:
    """Return what the command makes of the source in an empty place, or its error."""
    try:
        run(source, target, overwrite=False, progress=NoProgress())
    except ShardstreamError as error:
        return error
    return samples_of(target)


def cases(config: pytest.Config, share: float, what: str) -> Iterator[random.Random]:
    """Yield the randomness of each case of a share of all."""
    seed = config.getoption("--torture-seed")
    for number in range(max(1, round(share * config.getoption("--source-edits")))):
        yield random.Random(f"{seed} {what} {number}")


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", first_here(COMMANDS, 2))
def test_what_is_there_after_an_edit_is_what_the_source_holds(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    told: Counter[str] = Counter()
    for number, draw in enumerate(cases(pytestconfig, 0.95 / len(COMMANDS), kind)):
        case = Case(draw=draw, root=tmp_path / str(number), told=told)
        try_edit(case, kind)
        shutil.rmtree(case.root)
    print(f"{kind}: {dict(told)}")


def other_value(draw: random.Random, table: Path) -> None:
    """Change one value in place, and let the file seem as old as it was."""
    status, text = table.stat(), table.read_text()
    at = draw.choice([at for at, letter in enumerate(text) if letter == "}"]) - 1
    table.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.thorough
def test_a_late_column_after_an_edit_holds_what_its_file_holds(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Also when the file is edited while it is read, or after a run that was stopped."""
    for number, draw in enumerate(cases(pytestconfig, 0.05, "column")):
        root = tmp_path / str(number)
        (root / "set").mkdir(parents=True)
        make_set(draw, root / "set")
        table, storage = root / "values.jsonl", Storage()
        keys = [key for key, _ in samples_of(root / "set")]
        table.write_text("".join(json.dumps({"key": key, "v": draw.randrange(100, 999)}) + "\n" for key in keys))

        class Edits(NoProgress):
            """Edits the file, or ends the run, after the first shard's values."""

            def __init__(self, draw: random.Random, table: Path) -> None:
                self.what, self._draw, self._table = draw.choice(["edit", "stop", "nothing"]), draw, table

            def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
                del num_bytes
                if num and self.what == "stop":
                    raise Stopped
                if num and self.what == "edit":
                    other_value(self._draw, self._table)
                    self.what = "edited"

        def added(progress: NoProgress, overwrite: bool) -> None:
            place = ColumnTarget([str(root / "set")], "v", storage=storage, index_url=None, overwrite=overwrite)  # noqa: B023
            join_column(place, str(table), storage=storage, progress=progress,  # noqa: B023
                        options=JoinOptions(on="key", memory_bytes=96 * 7))  # fmt: skip

        told = table.name
        try:
            added(Edits(draw, table), overwrite=False)
        except (Stopped, ShardstreamError) as error:
            told = str(error) or told
        assert table.name in told
        other_value(draw, table)
        wanted = {row["key"]: row["v"] for row in map(json.loads, table.read_text().splitlines()) if row["key"] in keys}
        added(NoProgress(), overwrite=True)
        for value in {*wanted.values()}:
            found = {one["__key__"] for one in StreamingDataset(str(root / "set"), where=f"v = {value}", shuffle=False)}
            assert found == {key for key, one in wanted.items() if one == value}
        shutil.rmtree(root)


# ------------------------------------------------------------------------------------------------- as it was found


def ran(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words), "--json"] if "--json" in words else [*map(str, words)])


def rows(path: Path, *values: str) -> Path:
    path.write_text("".join(f'{{"t": "{value}"}}\n' for value in values))
    return path


def test_a_row_that_is_corrected_in_place_is_made_again(tmp_path: Path) -> None:
    """It said "went on after 3 samples", exit code 0, and kept the old row."""
    source, out = rows(tmp_path / "in.jsonl", "one", "two", "six"), tmp_path / "out"
    assert ran("convert", source, out).exit_code == 0
    status = source.stat()
    rows(source, "one", "ten", "six")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = ran("convert", source, out)
    assert (again.exit_code, "in.jsonl" in again.output) == (0, True), again.output
    assert [json.loads(fields["json"])["t"] for _, fields in samples_of(out)] == ["one", "ten", "six"]
    assert "Already complete; nothing written.\n" in ran("convert", source, out).output


def test_only_what_follows_a_change_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abcd":
        rows(tmp_path / f"in/{name}.jsonl", *"0123456789")
    options = ConvertOptions(max_samples=5)
    convert(str(tmp_path / "in"), str(tmp_path / "out"), options=options)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    rows(tmp_path / "in/c.jsonl", *"01234567", "x")
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"), options=options)
    assert (report.changed, report.num_samples) == (("c.jsonl",), 39)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    same = sorted(name for name in before if before[name] == after[name])
    assert same == [f"{number:06d}.tar" for number in range(report.num_resumed_samples // 5)]
    assert report.num_resumed_samples == 20, "the positions after the latest shards are all kept"


def test_what_is_shuffled_is_refused_with_a_cure_that_works(tmp_path: Path) -> None:
    source, out = rows(tmp_path / "in.jsonl", *"abcdefgh"), tmp_path / "out"
    assert ran("convert", source, out, "--shuffle", 1).exit_code == 0
    rows(source, *"abcdefgx")
    refused = ran("convert", source, out, "--shuffle", 1)
    assert refused.exit_code == 1
    assert "may hold rows of what changed" in refused.output and "in.jsonl" in refused.output  # noqa: PT018
    assert ran("convert", source, out, "--shuffle", 1, "--overwrite").exit_code == 0
    assert {json.loads(fields["json"])["t"] for _, fields in samples_of(out)} == {*"abcdefgx"}


def test_fewer_rows_leave_no_shard_of_the_old_ones(tmp_path: Path) -> None:
    source, out = rows(tmp_path / "in.jsonl", *"abcdefghij"), tmp_path / "out"
    options = ConvertOptions(max_samples=2)
    convert(str(source), str(out), options=options)
    rows(source, *"abc")
    assert convert(str(source), str(out), options=options).num_samples == 3
    assert sorted(path.name for path in out.glob("*.tar")) == ["000000.tar", "000001.tar"]
    assert len(StreamingDataset(str(out))) == 3


def test_what_was_rejected_stays_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that found everything done said that nothing was left out; one that went on, only what it saw itself."""
    texts = ["", "a", "b", "", "", "c", "d", "e", ""]
    source, out = rows(tmp_path / "in.jsonl", *texts), tmp_path / "out"
    options = TokenizeOptions(tokenizer="bytes", text_field="t", eos="none", max_samples=2)
    whole = PackingRun._note_shard

    def stopped(self: PackingRun, num_shards: int, *noted: Any) -> None:
        whole(self, num_shards, *noted)
        if num_shards == 2:
            raise Stopped

    monkeypatch.setattr(PackingRun, "_note_shard", stopped)
    with pytest.raises(Stopped):
        tokenize(str(source), str(out), options=options)
    monkeypatch.setattr(PackingRun, "_note_shard", whole)
    gone_on = tokenize(str(source), str(out), options=options).sets[0]
    assert (gone_on.num_resumed_documents, gone_on.rejected) == (2, {"empty": 4})
    again = ran("convert", source, out, "--tokenizer", "bytes", "--text-field", "t", "--eos", "none",
                "--max-samples", 2, "--json")  # fmt: skip
    assert json.loads(again.stdout)["sets"][0]["rejected"] == {"empty": 4}
    assert json.loads(again.stdout)["sets"][0]["was_complete"]
    said = ran("convert", source, out, "--tokenizer", "bytes", "--text-field", "t", "--eos", "none", "--max-samples", 2)
    assert "left out 4 documents: empty" in said.output
    assert "Already complete; nothing written." in said.output


def test_a_file_that_changes_while_it_is_read_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    numbers = [f"{number:02d}" for number in range(100)]
    edited = [*numbers[:-1], "xx"]
    for name in "ab":
        rows(tmp_path / f"in/{name}.jsonl", *numbers)

    class Edits(NoProgress):
        def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
            del num_bytes
            if num:
                rows(tmp_path / "in/b.jsonl", *edited)

    with pytest.raises(DataError, match=r"b\.jsonl: it was changed while it was read"):
        convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(max_samples=4), progress=Edits())
    convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(max_samples=4))
    found = [json.loads(fields["json"])["t"] for _, fields in samples_of(tmp_path / "out")]
    assert found == [*numbers, *edited]


@pytest.mark.thorough
def test_an_object_that_was_replaced_is_made_again(mini_s3: MiniS3Server, tmp_path: Path) -> None:
    bucket, options = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
    storage = Storage(options)
    for name in "abc":
        storage.put(f"{bucket}/in/{name}.jsonl", rows(tmp_path / "rows", *f"{name}0123").read_bytes())
    chosen = ConvertOptions(max_samples=3)
    convert(f"{bucket}/in/", f"{bucket}/out", options=chosen, storage_options=options)
    same = convert(f"{bucket}/in/", f"{bucket}/out", options=chosen, storage_options=options)
    assert (same.was_complete, same.changed) == (True, ())
    storage.put(f"{bucket}/in/a.jsonl", bytes(storage.read(f"{bucket}/in/a.jsonl")))  # as it was
    assert convert(f"{bucket}/in/", f"{bucket}/out", options=chosen, storage_options=options).was_complete
    storage.put(f"{bucket}/in/b.jsonl", rows(tmp_path / "rows", *"b012x").read_bytes())
    again = convert(f"{bucket}/in/", f"{bucket}/out", options=chosen, storage_options=options)
    assert (again.changed, again.num_resumed_samples) == (("b.jsonl",), 3)


@pytest.mark.thorough
def test_positions_thin_out_alike_in_every_order_of_runs() -> None:
    for latest in range(1, 300):
        whole = kept({number: Waypoint() for number in range(1, latest + 1)})
        one_by_one: dict[int, Waypoint] = {}
        for number in range(1, latest + 1):
            one_by_one = kept({**one_by_one, number: Waypoint()})
        assert [*whole] == [*one_by_one]
        assert len(whole) <= 32 + 16 * max(0, latest.bit_length() - 5)
        for back in range(latest):
            place = latest - back
            assert any(place - back // 15 - 1 <= number <= place for number in (0, *whole)), (latest, back)
