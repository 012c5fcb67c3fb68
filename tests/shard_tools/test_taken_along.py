"""What each command that writes or changes a set takes along: what docs/tools.md says, and nothing goes in silence."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.errors import ShardstreamError
from tests.support.code.folders import ROOT
from tests.support.sets.late_fields import add_late
from tests.support.sources.foreign_sets import picture

NUM = 8
NAMES = {
    "fields": "png", "columns of sample tables": "cls", "names of classes": "cls", "late columns": "score",
    "late fields": "caption.txt", "views": "best", "tagged versions": "v1",
}  # fmt: skip


def table_of_page() -> dict[str, dict[str, str]]:
    """The words of the page, by command and thing."""
    text = (ROOT / "docs/tools.md").read_text().partition("## What a command takes along")[2]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    commands = [re.sub(r"`([^`]+)`", r"\1", head) for head in heads[1:]]
    return {name: {row[0]: row[place] for row in rows[1:]} for place, name in enumerate(commands, 1)}


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(word) for word in words], prog_name="shard_tools")
    assert result.exit_code == code, result.output
    return result.output


def add_pictures(folder: Path, first: int) -> None:
    for number in range(first, first + NUM):
        path = folder / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(8 + number % 3))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set that has all there is: classes, columns of both kinds, a late field, a view, a name, inputs."""
    folder = tmp_path_factory.mktemp("everything")
    add_pictures(folder / "inbox", 0)
    home = folder / "set"
    run("convert", folder / "inbox", home, "--max-samples", 4)
    keys = [sample["__key__"] for sample in StreamingDataset(str(home))]
    lines = (json.dumps({"key": key, "score": number}) + "\n" for number, key in enumerate(keys))
    (folder / "scores.jsonl").write_text("".join(lines))
    run("version", "tag", home, "v1")
    run("column", "add", home, "score", "--from", folder / "scores.jsonl", "--on", "key")
    add_late(str(home), "caption.txt", lambda key: f"of {key}")
    run("view", "save", home, "best", "--where", "cls >= 0")
    return folder


def works(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except (ShardstreamError, KeyError):
        return False


def kept_in_set(url: str) -> dict[str, bool]:
    """What a set has of all that; each is read, not only looked for."""

    def of(**options: object) -> StreamingDataset:
        return StreamingDataset(url, **options)  # type: ignore[arg-type]

    return {
        "fields": works(lambda: all(len(bytes(one["png"])) for one in of(decode=None, fields=("png",)))),
        "columns of sample tables": works(lambda: len(of(where="cls >= 0", fields=("png",))) > 0),
        "names of classes": works(lambda: of(fields=("cls",)).class_names["cls"][:2] == ("cat", "dog")),
        "late columns": works(lambda: len(of(where="score >= 0", fields=("png",))) > 0),
        "late fields": works(lambda: all(one["caption.txt"] for one in of(fields=("caption.txt",)))),
        "views": works(lambda: len(of(view="best", fields=("png",))) > 0),
        "tagged versions": works(lambda: len(of(version="v1", fields=("png",))) == NUM),
    }


def kept_in_files(folder: str) -> dict[str, bool]:
    """What Parquet files have."""
    (file, *_) = sorted(Path(folder).rglob("*.parquet"))
    schema = pq.read_schema(file)
    said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    types = said.get("info", {}).get("features", {})
    return {
        "fields": "png" in schema.names, "columns of sample tables": "cls" in schema.names,
        "names of classes": types.get("cls", {}).get("names") == ["cat", "dog"],
        "late columns": "score" in schema.names, "late fields": "caption.txt" in schema.names, "views": False,
        "tagged versions": False,
    }  # fmt: skip


def split(home: Path, target: Path) -> str:
    run("split", home, f"{target}=90%", f"{target}-2=10%", "--seed", 3)
    return str(target)


def appended(home: Path, _: Path) -> str:
    add_pictures(home.parent / "inbox", NUM)
    run("append", home.parent / "inbox", home)
    return str(home)


def deleted(home: Path, target: Path) -> str:
    keys = target.parent / "keys.txt"
    keys.write_text("cat/0\n")
    run("delete", home, "--keys", keys)
    return str(home)


def deduped(home: Path, _: Path) -> str:
    run("dedupe", home, "--by", "png")
    return str(home)


def to(*words: str) -> Callable[[Path, Path], str]:
    def write(home: Path, target: Path) -> str:
        command, *options = words
        run(command, home, *(["--to", target] if command == "repair" else [target]), *options)
        return str(target)

    return write


COMMANDS: dict[str, tuple[Callable[[Path, Path], str], Callable[[str], dict[str, bool]]]] = {
    "copy": (to("copy"), kept_in_set),
    "reshard": (to("reshard"), kept_in_set),
    "split": (split, kept_in_set),
    "repair": (to("repair"), kept_in_set),
    "export --to hf": (to("export", "--to", "hf"), kept_in_files),
    "export --to parquet": (to("export", "--to", "parquet"), kept_in_files),
    "append": (appended, kept_in_set),
    "delete": (deleted, kept_in_set),
    "dedupe": (deduped, kept_in_set),
}


def said_of(thing: str, log: str) -> bool:
    """Whether a warning says that this is left out, or has no values yet."""
    lines = [line for line in log.splitlines() if "left out" in line or "has no values" in line]
    kinds = {"late columns": r"late columns? .*", "late fields": r"late fields? .*", "views": "views .*",
             "tagged versions": "tagged versions .*", "names of classes": "names of the classes of .*",
             "columns of sample tables": "columns of the sample tables .*", "fields": "fields .*"}  # fmt: skip
    return any(re.search(rf"\b{kinds[thing]}\b{re.escape(NAMES[thing])}\b", line) for line in lines)


def test_the_page_has_every_command_and_everything() -> None:
    page = table_of_page()
    assert page.keys() == COMMANDS.keys()
    assert all(words.keys() == NAMES.keys() for words in page.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_kept_is_what_the_page_says(
    name: str, everything: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(everything, tmp_path / "here"))
    write, look = COMMANDS[name]
    with caplog.at_level(logging.WARNING):
        target = write(folder / "set", tmp_path / "target")
    log = caplog.text
    found = {
        thing: "kept" if is_kept else "named" if said_of(thing, log) else "silent"
        for thing, is_kept in look(target).items()
    }
    assert found == table_of_page()[name], log
