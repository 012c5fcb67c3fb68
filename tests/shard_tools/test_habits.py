"""Habits of command lines: dry runs, silence, options from files and the environment, exit codes, several sources."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.sets.copy import copy
from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.errors import ConfigError, NotFoundError, ReadOnlyError, UnfinishedError
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import write_set

pytestmark = pytest.mark.thorough


def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools", env=env)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=4, columns={"number": "json.number"}) as writer:
        for number in range(7):
            writer.write({"__key__": f"{number:03d}", "json": {"number": number}, "txt": f"text {number}"})
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"n": n, "tok": [n]}) + "\n" for n in range(20)))
    return {"source": tmp_path, "set": tmp_path / "set", "target": tmp_path / "new"}


def test_a_dry_run_finds_what_the_run_would(places: dict[str, Path]) -> None:
    assert "20 " not in run("convert", places["source"] / "lines.jsonl", places["set"], "--dry-run").stdout
    assert run("convert", places["source"] / "lines.jsonl", places["set"], "--dry-run").exit_code == 1
    assert run("reshard", f"{places['set']}/", places["target"], "--where", "nothing = 1", "--dry-run").exit_code == 2
    assert "7 samples" in run("reshard", f"{places['set']}/", places["target"], "--dry-run").stdout


def test_a_read_only_store_refuses(tmp_path: Path) -> None:
    storage = Storage({"read_only": True})
    (tmp_path / "a").write_text("x")
    for write in (
        partial(storage.put, data=b"y"), storage.open_write, storage.delete,
    ):  # fmt: skip
        with pytest.raises(ReadOnlyError, match="read-only"):
            write(str(tmp_path / "a"))
    assert bytes(storage.read(str(tmp_path / "a"))) == b"x"


def test_a_read_only_store_is_no_dry_run(places: dict[str, Path]) -> None:
    refused = run("reshard", f"{places['set']}/", places["target"], "--storage-option", "read_only=true")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "this store is read-only" in refused.stderr


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_could_not_look_is_no_finding(verb: str, places: dict[str, Path]) -> None:
    shards = f"{places['set']}/"
    others = [shards] if verb == "diff" else []
    assert run(verb, shards, *others).exit_code == 0
    assert run(verb, f"{places['source']}/gone/", *others).exit_code == 3
    (places["set"] / "000001.tar").unlink()
    if verb != "diff":
        assert run(verb, shards).exit_code == 1
    assert run(verb, shards, *others, "--no-such-option").exit_code == 2


def test_options_from_a_file(places: dict[str, Path]) -> None:
    config = places["source"] / "tools.toml"
    config.write_text(
        "max_samples = 5\noverwrite = true\n"
        '[convert]\nfield = {n = "cls"}\ncolumns = ["n"]\n[column.add]\nlift = "json.number"\n'
    )
    assert run("--config", config, "convert", places["source"] / "lines.jsonl", places["target"]).exit_code == 0
    assert len(StreamingDataset(f"{places['target']}/").source.shards.urls) == 4
    assert StreamingDataset(f"{places['target']}/", where="n > 17")[0]["cls"] == 18
    run("--config", config, "convert", places["source"] / "lines.jsonl", places["target"], "--max-samples", "10")
    assert len(StreamingDataset(f"{places['target']}/").source.shards.urls) == 2
    assert run("--config", config, "column", "add", f"{places['set']}/", "late").exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-sample = 5", "no command has an option 'max-sample' (did you mean 'max-samples'?)"),
        ("[convrt]\nmax-samples = 5", "'convrt' (did you mean 'convert'?)"),
        ("[convert]\nmax-sample = 5", "convert has no option 'max-sample' (did you mean 'max-samples'?)"),
        ("[column.add]\nlft = 'x'", "add has no option 'lft' (did you mean 'lift'?)"),
        ("convert = 5", "expected a table [convert], got 5"),
        ("= 5", 'tools.toml: Invalid statement (at line 1, column 1); it has to be TOML, as in `max-bytes = "1GB"`'),
        ("a = 1\n[convert]\nfield", "(at end of document); it has to be TOML"),
        ("max-bytes = '1GB'\n\n[convert]\nmax_sample = 5", "tools.toml, line 4: convert has no option 'max-sample'"),
        ("[column.add]\nlft = 'x'", "tools.toml, line 2: add has no option 'lft'"),
        ("# x\n[convrt]\nmax-samples = 5", "tools.toml, line 2: no command has an option 'convrt' (did you"),
    ],
)
def test_files_of_options_that_are_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text(text)
    refused = run("--config", tmp_path / "tools.toml", "info", tmp_path)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_options_from_the_environment(places: dict[str, Path], mini_s3: MiniS3Server, s3_bucket: str) -> None:
    env = {"SHARD_TOOLS_RESHARD_MAX_SAMPLES": "2", "SHARD_TOOLS_CONFIG": str(places["source"] / "tools.toml")}
    (places["source"] / "tools.toml").write_text("[reshard]\nshuffle = true\n")
    assert run("reshard", f"{places['set']}/", places["target"], env=env).exit_code == 0
    shards = StreamingDataset(f"{places['target']}/")
    assert len(shards.source.shards.urls) == 4
    assert [one["__key__"] for one in shards] != [one["__key__"] for one in StreamingDataset(f"{places['set']}/")]
    url, options = f"{s3_bucket}/{fresh_name()}/", mini_s3.storage_options
    copy(f"{places['set']}/", url, target_options=options)
    env = {
        "SHARD_TOOLS_ENDPOINT_URL": options["endpoint_url"], "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"], "AWS_REGION": options["region"],
    }  # fmt: skip
    assert run("info", url, env=env).exit_code == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SHARD_TOOLS_RESHARD_MAX_SAMPLE", " (did you mean 'SHARD_TOOLS_RESHARD_MAX_SAMPLES'?)"),
        ("SHARD_TOOLS_ENDPOINT", " (did you mean 'SHARD_TOOLS_ENDPOINT_URL'?)"),
        ("SHARD_TOOLS_CONVERT_FROM", " (did you mean 'SHARD_TOOLS_CONVERT_KIND'?)"),
        ("SHARD_TOOLS_QQQQ", ""),
        ("SHARD_TOOLS_RESHARD_MAX_SAMPLES", None),
        ("SHARD_TOOLS_COLUMN_ADD_LIFT", None),
        ("SHARD_TOOLS_REGION", None),
        ("SHARD_TOOLSET", None),
    ],
)
def test_misspelled_names_in_the_environment_are_told(
    name: str, hint: str | None, places: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert run("info", f"{places['set']}/", env={name: "1"}).exit_code == 0
    told = [record.getMessage() for record in caplog.records if "environment" in record.getMessage()]
    assert told == ([] if hint is None else [f"{name} in the environment is no option of any command{hint}"])


def test_several_sources_and_patterns(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(places["source"] / "more/part-1", (2,), first=100)
    sources = [f"{places['set']}/*.tar", f"{places['source']}/more/"]
    keys = [one["__key__"] for url in sources for one in StreamingDataset(url)]
    assert run("reshard", *sources, places["target"]).exit_code == 0
    assert [one["__key__"] for one in StreamingDataset(f"{places['target']}/")] == keys
    assert run("copy", *sources, places["source"] / "copied").exit_code == 0
    assert sorted(one["__key__"] for one in StreamingDataset(f"{places['source']}/copied/")) == sorted(keys)
    monkeypatch.chdir(places["source"])
    write_set(places["source"] / ".old", (2,), first=200)  # hidden, as in listings of folders
    for pattern, count in (("s*/*.tar", 7), ("**/00*.tar", 27), ("more/part-*/000*.tar", 2), ("set/*1.tar", 3)):
        assert len(StreamingDataset(pattern)) == count
    for pattern, error, message in (
        ("set/x*.tar", NotFoundError, "no shards match"), ("mo*e/", ConfigError, "add the ending of the shards"),
        ("http://host/a*.tar", ConfigError, "write braces"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            StreamingDataset(pattern)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("?.tar", "1.tar 2.tar 3.tar a.tar"), ("[12].tar", "1.tar 2.tar"), ("[1-3].tar", "1.tar 2.tar 3.tar"),
        ("[!1-2].tar", "3.tar a.tar"), ("sub[0-9]/?.tar", "sub7/1.tar sub7/2.tar"), ("sub?1.tar", "sub-1.tar"),
        ("sub[!0-9]1.tar", "sub-1.tar"), ("[13]*.tar", "1.tar 11.tar 3.tar"), ("x[1].tar", "x[1].tar"),
        ("[^a].tar", "a.tar"), (r"[\\a].tar", "a.tar"), ("y[1].tar", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_characters_that_stand_for_others(
    pattern: str, names: str, where: str, tmp_path: Path, mini_s3: MiniS3Server, s3_bucket: str
) -> None:
    """No wildcard stands for a slash; a name that is there is no pattern."""
    base = str(tmp_path) if where == "disk" else f"{s3_bucket}/{fresh_name()}"
    storage = Storage(None if where == "disk" else mini_s3.storage_options)
    for name in ["1", "2", "3", "11", "a", "x[1]", "x1", "sub7/1", "sub7/2", "sub-1", "sub/1"]:
        storage.put(f"{base}/{name}.tar", b"x")
    if names:
        assert expand_urls(f"{base}/{pattern}", storage) == [f"{base}/{name}" for name in names.split()]
    else:
        with pytest.raises(NotFoundError, match="no shards match"):
            expand_urls(f"{base}/{pattern}", storage)


def test_a_file_whose_name_has_a_star(tmp_path: Path) -> None:
    write_set(tmp_path, (3,), indexed=False)
    (tmp_path / "000000.tar").rename(tmp_path / "a*.tar")
    (tmp_path / "ab.tar").write_bytes(b"")
    assert len(StreamingDataset(f"{tmp_path}/a*.tar")) == 3


def test_a_pattern_over_a_set_that_is_not_whole(tmp_path: Path) -> None:
    writer = ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=2)
    for number in range(5):
        writer.write({"__key__": f"{number}", "txt": "x"})
    with pytest.raises(UnfinishedError):
        StreamingDataset(f"{tmp_path}/set/*.tar")
    with pytest.raises(UnfinishedError):
        StreamingDataset(f"{tmp_path}/*/*.tar")
    writer.close()
    assert len(StreamingDataset(f"{tmp_path}/*/*.tar")) == 5
