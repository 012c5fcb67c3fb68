"""Late fields: computed or joined, gone on with, checked, listed and dropped; and what becomes of them as sets live."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.functions.field import compute_field
from shard_tools.change.functions.run import Running
from shard_tools.change.life.versions import tag
from shard_tools.change.sets.copy import copy
from shard_tools.cli import cli
from shard_tools.commands import column
from shard_tools.running.parts import ExecutorRunner
from streaming import StreamingDataset
from streaming.errors import ConfigError, IndexFormatError, IndexMismatchError
from streaming.storage import Storage
from tests.support.sets.late_fields import add_late
from tests.support.tiers import first_here

NUM, PER_SHARD = 50, 12
HERE = Running(workers=0)
MODULE = """
def length(sample):
    return len(sample["txt"])
def odd(sample):
    return None if int(sample["__key__"]) % 2 == 0 else sample["txt"].upper()
def wrong(sample):
    raise KeyError(sample["__key__"])
def refused(sample):
    from streaming.errors import DataError
    raise DataError("of the user")
def pid(sample):
    import os
    return str(os.getpid())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, ``made``."""
    path = tmp_path / "code" / "made.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.delitem(sys.modules, "made", raising=False)
    importlib.invalidate_caches()
    return path


def write(folder: Path, numbers: Iterable[int] = range(NUM), *, per_shard: int = PER_SHARD, **options: Any) -> str:
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=per_shard, **options) as writer:
        for number in numbers:
            writer.write({"__key__": f"{number:04d}", "txt": f"text {number}", "n": number})
    return str(folder)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), catch_exceptions=False)


def told(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(folder: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def values(url: str, name: str, **options: Any) -> dict[str, Any]:
    return {one["__key__"]: one.get(name) for one in StreamingDataset(url, shuffle=False, **options)}


def upper(numbers: Iterable[int]) -> dict[str, Any]:
    return {f"{number:04d}": f"TEXT {number}" if number % 2 else None for number in numbers}


# --- computed


def without(url: str, numbers: Iterable[int]) -> None:
    """Remove the tars of some shards, as if they had not been written yet."""
    of_shards = [sorted(Path(url, "_shardstream/fields").rglob(f"{number:03d}-*.tar*")) for number in numbers]
    for path in (path for paths in of_shards for path in paths):
        path.unlink()


@pytest.mark.thorough
def test_one_process_makes_all_tars_that_are_missing(tmp_path: Path, module: Path) -> None:
    """It started anew for each tar: a set of a thousand shards began a thousand times."""
    url = write(tmp_path / "set")
    options: dict[str, Any] = {"storage": Storage(), "fields": ("txt",), "running": Running(workers=1)}
    assert compute_field(url, "pid.txt", "made:pid", **options).num_written == 5
    before = values(url, "pid.txt")
    assert len({*before.values()}) == 1
    without(url, (1, 3))
    assert compute_field(url, "pid.txt", "made:pid", **options).num_written == 2
    after = values(url, "pid.txt")
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {f"{number:04d}" for number in (*range(12, 24), *range(36, 48))}
    assert len({after[key] for key in changed}) == 1


@pytest.mark.parametrize("tars", [[0, 1, 2, 3, 4], [1, 3], [0, 4], [2]])
def test_what_fails_is_named_whatever_tars_are_missing(tars: list[int], tmp_path: Path, module: Path) -> None:
    url = write(tmp_path / "set")
    how: dict[str, Any] = {"storage": Storage(), "fields": ("txt",), "running": HERE}
    compute_field(url, "pid.txt", "made:odd", on_missing="skip", **how)
    assert values(url, "pid.txt") == upper(range(NUM))
    without(url, tars)
    compute_field(url, "pid.txt", "made:odd", on_missing="skip", **how)
    assert values(url, "pid.txt") == upper(range(NUM))
    without(url, tars)
    last = min(NUM, PER_SHARD * (tars[-1] + 1)) - 1
    module.write_text(MODULE.replace("return None if", f"return 1 / 0 if sample['txt'] == 'text {last}' else None if"))
    importlib.reload(sys.modules["made"])
    with pytest.raises(ConfigError, match="made in another way"):
        compute_field(url, "pid.txt", "made:odd", on_missing="skip", **how)
    with pytest.raises(ZeroDivisionError) as failed:
        compute_field(url, "more.txt", "made:odd", on_missing="skip", **how)
    assert f"sample {last} of" in str(failed.value.__notes__)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("workers", [1, 2])
def test_damage_is_reported_with_its_shard_and_not_as_a_failed_call(tmp_path: Path, workers: int) -> None:
    url = write(tmp_path / "set")
    shard = Path(url, "002.tar")
    damaged = bytearray(shard.read_bytes())
    damaged[damaged.index(b"text 30")] ^= 1
    shard.write_bytes(damaged)
    result = run("field", "add", url, "len.txt", "--compute", "made:length", "--workers", str(workers))
    assert result.exit_code == 1
    assert "002.tar, bytes 0-" in result.output
    assert "made:length failed" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("function", ["wrong", "refused"])
def test_what_the_function_raises_comes_with_its_traceback(tmp_path: Path, function: str) -> None:
    """Also if it is one of our own errors of reading."""
    url = write(tmp_path / "set")
    result = run("field", "add", url, "len.txt", "--compute", f"made:{function}", "--workers", "1")
    assert result.exit_code == 1
    assert f"made:{function} failed on" in result.output
    assert f"in {function}" in result.output


@pytest.mark.thorough
def test_a_field_is_computed_in_processes(tmp_path: Path, module: Path) -> None:
    url = write(tmp_path / "set")
    before = files(url)
    report = told(
        "field",
        "add",
        url,
        "odd.txt",
        "--compute",
        "made:odd",
        "--fields",
        "txt",
        "--on-missing",
        "skip",
        "--workers",
        "2",
    )
    assert (report["num_samples"], report["num_missing"], report["num_written"]) == (NUM, NUM // 2, 5)
    assert report["first_missing"] == [f"{number:04d}" for number in range(0, 10, 2)]
    assert values(url, "odd.txt") == upper(range(NUM))
    after = files(url)
    assert {name: after[name] for name in before if name != "_shardstream/schema.json"} == {
        name: data for name, data in before.items() if name != "_shardstream/schema.json"
    }
    assert run("verify", url).exit_code == 0


class Stop(BaseException):
    """What kills a run."""


class Writes:
    """Count what is written, and stop at one of them: before it, or when it is there."""

    def __init__(self, patched: pytest.MonkeyPatch, stop: int = 0, *, is_after: bool = False) -> None:
        self.num = 0
        for name in ("put", "put_if", "open_write", "delete"):
            patched.setattr(Storage, name, self._counted(getattr(Storage, name), stop, is_after))

    def _counted(self, write: Any, stop: int, is_after: bool) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            self.num += 1
            if self.num == stop and not is_after:
                raise Stop
            found = write(*given, **options)
            if self.num == stop:
                raise Stop
            return found

        return counted


@pytest.mark.parametrize(
    ("lives", "is_after"),
    first_here([pytest.param(*one) for one in [(False, True), (True, False), (False, False), (True, True)]], 1),
)
def test_a_run_that_is_killed_at_any_write_goes_on(
    tmp_path: Path, module: Path, *, lives: bool, is_after: bool
) -> None:  # fmt: skip
    def add(url: str) -> Any:
        return compute_field(url, "len.txt", "made:length", storage=Storage(None), running=HERE)

    def made(name: str) -> str:
        url = write(tmp_path / name, range(9), per_shard=4)
        if lives:
            told("version", "tag", url, "v1")
        return url

    whole = made("whole")
    with pytest.MonkeyPatch.context() as patched:
        writes = Writes(patched)
        add(whole)
    expected = values(whole, "len.txt")
    assert expected == {f"{number:04d}": "6" for number in range(9)}
    assert writes.num > 7
    for stop in range(1, writes.num + 1):
        url = made(str(stop))
        with pytest.MonkeyPatch.context() as patched:
            Writes(patched, stop, is_after=is_after)
            with pytest.raises(Stop):
                add(url)
        left = values(url, "len.txt")
        assert left in (expected, dict.fromkeys(expected))  # the field is there as a whole, or not at all
        add(url)
        assert values(url, "len.txt") == expected
        assert files(url).keys() == files(whole).keys()
        if lives:
            assert values(url, "len.txt", version="v1") == dict.fromkeys(expected)


def test_finished_tars_are_not_made_again(tmp_path: Path, module: Path) -> None:
    url = write(tmp_path / "set")
    with pytest.MonkeyPatch.context() as patched:
        Writes(patched, 5)  # two tars, each with its sample table, are there
        with pytest.raises(Stop):
            compute_field(url, "len.txt", "made:length", storage=Storage(None), running=HERE)
    report = compute_field(url, "len.txt", "made:length", storage=Storage(None), running=HERE)
    assert (report.num_written, report.num_shards) == (3, 5)
    result = run("field", "add", url, "len.txt", "--compute", "made:length")
    assert "complete already; nothing written" in result.output


def test_an_executor_elsewhere_gives_the_same_bytes(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = write(tmp_path / "here"), write(tmp_path / "there")
    compute_field(here, "odd.txt", "made:odd", storage=Storage(None), on_missing="skip", running=HERE)
    with ThreadPoolExecutor(3) as executor:
        monkeypatch.setattr(
            Running, "runner", lambda _, work, shared: _Opened(ExecutorRunner(work, executor, 4, shared))
        )
        compute_field(there, "odd.txt", "made:odd", storage=Storage(None), on_missing="skip", running=HERE)
    assert files(there) == files(here)


class _Opened:
    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __enter__(self) -> Any:
        return self._runner

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["len.txt", "--compute", "made:odd"], "made:odd has no value for 1 sample, '0000'"),
        (["len.txt", "--compute", "made:wrong"], "made:wrong failed on"),
        (["len.txt", "--compute", "made:nothing"], "nothing"),
        (["txt", "--compute", "made:length"], "have a field of this name"),
        (["absent", "--compute", "made:length"], "marks samples without a value"),
        (["Len.txt", "--compute", "made:length"], "Len.txt"),
        (["len.txt", "--compute", "made:length", "--fields", "nope"], "nope"),
        (["len.txt"], "Give one of"),
        (["len.txt", "--compute", "made:length", "--on", "key"], "are for --from"),
    ],
)
def test_what_cannot_be_added_is_refused(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:  # fmt: skip
    monkeypatch.setattr(column, "Running", lambda **_: HERE)
    url = write(tmp_path / "set")
    before = files(url)
    result = CliRunner().invoke(cli, ["field", "add", url, *words])
    assert result.exit_code != 0
    assert said in f"{result.output} {result.exception} {getattr(result.exception, '__notes__', '')}"
    assert files(url).keys() - before.keys() <= {name for name in files(url) if "/fields/" in name}
    assert values(url, "len.txt") == dict.fromkeys(f"{number:04d}" for number in range(NUM))


def test_another_way_to_make_it_needs_overwrite(tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column, "Running", lambda **_: HERE)
    url = write(tmp_path / "set")
    compute_field(url, "a.txt", "made:length", storage=Storage(None), running=HERE)
    with pytest.raises(ConfigError, match="made in another way"):
        compute_field(url, "a.txt", "made:odd", storage=Storage(None), on_missing="skip", running=HERE)
    with pytest.raises(ConfigError, match="made in another way"):
        compute_field(url, "a.txt", "made:length", storage=Storage(None), fields=("txt",), running=HERE)
    opened = StreamingDataset(url, shuffle=False)
    again = ["field", "add", url, "a.txt", "--compute", "made:odd", "--on-missing", "skip"]
    told(*again, "--overwrite")
    assert values(url, "a.txt") == upper(range(NUM))
    assert opened[3]["a.txt"] == "6"  # what is open goes on with the version that it began with
    report = told(*again, "--overwrite")
    assert report["num_written"] == report["num_shards"]
    assert told(*again)["num_written"] == 0


# --- joined


def captions(folder: Path, keys: Iterable[str], **options: Any) -> str:
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=7, **options) as writer:
        for key in keys:
            writer.write({"__key__": key, "cap.txt": f"caption of {key}", "json": {"of": key[-4:]}})
    return str(folder)


def test_a_field_is_joined_by_key(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    keys = [f"{number:04d}" for number in range(NUM + 10)]
    random.Random(1).shuffle(keys)
    other = captions(tmp_path / "other", keys)
    report = told("field", "add", url, "cap.txt", "--from", other, "--on", "key")
    assert (report["num_missing"], report["num_written"]) == (0, 5)
    expected = {f"{number:04d}": f"caption of {number:04d}" for number in range(NUM)}
    assert values(url, "cap.txt") == expected
    assert told("field", "add", url, "cap.txt", "--from", other)["num_written"] == 0
    named = captions(tmp_path / "named", [f"x{key}" for key in keys], columns={"of": "json.of"})
    told("field", "add", url, "other.txt", "--from", named, "--field", "cap.txt", "--on", "of")
    assert values(url, "other.txt") == {key: f"caption of x{key}" for key in expected}
    again = write(tmp_path / "again", range(5))
    told("field", "add", again, "late.txt", "--from", url, "--field", "other.txt")  # from a late field of another set
    assert values(again, "late.txt") == {f"{number:04d}": f"caption of x{number:04d}" for number in range(5)}


@pytest.mark.parametrize("lives", [False, True])
def test_the_same_values_from_another_place_change_nothing(tmp_path: Path, lives: bool) -> None:
    """A set that lives got a version that differed from the one before in the words of the origin alone."""
    url = write(tmp_path / "set", range(20))
    if lives:
        tag(url, "v1", storage=Storage(None))
    other = captions(tmp_path / "other", [f"{number:04d}" for number in range(NUM)])
    copy(other, str(tmp_path / "moved"))
    report = told("field", "add", url, "cap.txt", "--from", other)
    before = files(url)
    again = told("field", "add", url, "cap.txt", "--from", str(tmp_path / "moved"))
    assert again["num_written"] == 0
    assert [again[name] for name in ("version", "set_version", "made_from")] == [
        report[name] for name in ("version", "set_version", "made_from")
    ]
    assert files(url) == before
    with ShardWriter(f"{url}/{{:03d}}.tar", append=True) as writer:
        writer.write({"__key__": "0030", "txt": "text 30", "n": 30})
    grown = told("field", "add", url, "cap.txt", "--from", str(tmp_path / "moved"))
    assert (grown["num_written"], grown["made_from"]) == (1, str(tmp_path / "moved"))
    assert values(url, "cap.txt")["0030"] == "caption of 0030"


def test_missing_keys_and_keys_that_occur_twice_are_errors(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    some = captions(tmp_path / "some", [f"{number:04d}" for number in range(10, NUM)])
    result = run("field", "add", url, "cap.txt", "--from", some)
    assert result.exit_code != 0
    assert "has no value for 10 samples, '0000', '0001', '0002', '0003', '0004'" in result.output
    assert not any("/fields/" in name for name in files(url))
    report = told("field", "add", url, "cap.txt", "--from", some, "--on-missing", "skip")
    assert (report["num_missing"], report["first_missing"][0]) == (10, "0000")
    assert values(url, "cap.txt") == {
        f"{number:04d}": f"caption of {number:04d}" if number >= 10 else None for number in range(NUM)
    }
    twice = captions(tmp_path / "twice", [f"{number:04d}" for number in range(NUM)])
    captions(tmp_path / "twice", ["0003", "0017"], start_shard=50)
    result = run("field", "add", url, "two.txt", "--from", twice, "--field", "cap.txt")
    assert result.exit_code != 0
    assert "2 keys of this set occur twice or more there, '0003', '0017'" in result.output


# --- checked, listed, dropped


def test_verify_finds_what_is_wrong_with_a_tar(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    add_late(url, "late.bin", lambda key: key.encode() * 100)
    tar = sorted(Path(url).glob("_shardstream/fields/late.bin/*/*.tar"))[1]
    whole = tar.read_bytes()
    kinds = {
        "late": whole.replace(b"0013001300", b"0013001200", 1),
        "size": whole[:-512],
    }
    for kind, data in kinds.items():
        tar.write_bytes(data)
        (finding,) = json.loads(run("verify", url, "--json").stdout)["findings"]
        assert (finding["kind"], finding["shard"]) == (kind, str(tar))
        assert "field add" in finding["cure"]
    tar.unlink()
    assert json.loads(run("verify", url, "--json").stdout)["findings"][0]["shard"] == str(tar)
    tar.write_bytes(whole)
    assert run("verify", url).exit_code == 0
    table = next(Path(url).glob("_shardstream/fields/late.bin/*.parquet"))
    table.write_bytes(table.read_bytes()[:-9] + b"123456789")
    assert run("verify", url).exit_code == 1
    with pytest.raises(IndexFormatError, match="add the field again"):
        StreamingDataset(url)
    assert StreamingDataset(url, fields=("txt",))[0]["txt"] == "text 0"


def test_a_field_is_listed_and_dropped(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    before = files(url)
    add_late(url, "a.bin", lambda key: key.encode())
    add_late(url, "b.bin", lambda key: key.encode() if key > "0010" else None)
    listed = told("field", "list", url)["fields"]
    assert [(one["name"], one["num_samples"], one["num_missing"], one["lacking"]) for one in listed] == [
        ("a.bin", NUM, 0, []), ("b.bin", NUM, 11, []),
    ]  # fmt: skip
    result = run("field", "drop", url, "c.bin")
    assert result.exit_code != 0
    assert "there are: a.bin, b.bin" in result.output
    told("field", "drop", url, "a.bin")
    told("field", "drop", url, "b.bin")
    assert {name: data for name, data in files(url).items() if "schema" not in name} == {
        name: data for name, data in before.items() if "schema" not in name
    }
    assert run("field", "list", url).output == "no late fields\n"


def test_ls_cat_and_info_know_late_fields(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    add_late(url, "late.bin", lambda key: key.encode() * 2 if key != "0013" else None)
    lines = [json.loads(line) for line in run("ls", url, "--json", "--limit", "20").stdout.splitlines()]
    assert [one["fields"].get("late.bin") for one in lines] == [None if one["key"] == "0013" else 8 for one in lines]
    assert run("cat", url, "0030", "--field", "late.bin").stdout_bytes == b"00300030"
    assert "late.bin" not in run("cat", url, "0013").output
    assert "late.bin" in run("cat", url, "0014").output
    assert run("cat", url, "0013", "--field", "late.bin").exit_code != 0
    info = told("info", url)["fields"]["late.bin"]
    assert (info["num_samples"], info["num_bytes"], info["is_late"]) == (NUM - 1, 8 * (NUM - 1), True)
    assert "late.bin (late)" in run("info", url).output


@pytest.mark.parametrize("words", [["copy"], ["reshard"], ["export", "--to", "parquet"]])
def test_what_takes_shards_says_which_fields_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: list[str]
) -> None:
    url, target = write(tmp_path / "set"), str(tmp_path / "target")
    add_late(url, "late.bin", lambda key: key.encode())
    caplog.clear()
    result = run(words[0], url, target, *words[1:])
    assert result.exit_code == 0, result.output
    assert "the late fields late.bin are left out" in caplog.text
    if words[0] != "export":
        assert values(target, "late.bin") == dict.fromkeys(f"{number:04d}" for number in range(NUM))
        (field,) = told("field", "add", target, "late.bin", "--from", url)["first_missing"] or ["added"]
        assert (field, values(target, "late.bin")) == ("added", values(url, "late.bin"))


def test_a_set_that_says_nothing_else_is_still_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That a late field is known says nothing of the fields of the shards."""
    for name in ("named", "plain"):
        with ShardWriter(f"{tmp_path}/{name}/{{:03d}}.tar", classes={"cls": ["a", "b"]}) as writer:
            writer.write({"__key__": "0000", "cls": 1})
    (tmp_path / "plain" / "_shardstream" / "schema.json").unlink()
    add_late(str(tmp_path / "plain"), "late.bin", lambda key: key.encode())
    caplog.clear()
    StreamingDataset([str(tmp_path / "named"), str(tmp_path / "plain")])
    assert "plain does not say the classes of field 'cls'" in caplog.text


def test_plan_counts_their_requests(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    before = told("plan", url, "--batch-size", "5")
    add_late(url, "late.bin", lambda key: key.encode())
    after = told("plan", url, "--batch-size", "5")
    assert after["num_ranges"] == 2 * before["num_ranges"]
    assert after["total"]["num_requests"] == 2 * before["total"]["num_requests"]
    assert "one per chunk and late field" in run("plan", url, "--batch-size", "5").output


# --- as sets live


def test_fields_follow_deletions_and_wait_for_what_is_added(tmp_path: Path) -> None:
    url = write(tmp_path / "set")
    value = {f"{number:04d}": f"late {number}".encode() if number % 5 else None for number in range(NUM + 20)}
    add_late(url, "late.bin", value.__getitem__)
    told("version", "tag", url, "v1")
    gone = {f"{number:04d}" for number in [*range(3, 20, 3), *range(24, 36)]}
    (tmp_path / "keys.txt").write_text("\n".join(sorted(gone)))
    told("delete", url, "--keys", str(tmp_path / "keys.txt"))
    first = {key: value[key] for key in list(value)[:NUM]}
    stays = {key: one for key, one in first.items() if key not in gone}
    assert values(url, "late.bin") == stays
    assert values(url, "late.bin", version="v1") == first
    (listed,) = told("field", "list", url)["fields"]
    assert listed["num_missing"] == sum(one is None for one in stays.values())
    assert run("verify", url).exit_code == 0
    write(tmp_path / "set", range(NUM, NUM + 20), append=True)
    with pytest.raises(IndexMismatchError, match=r"no values for 2 shards of \d+, which were added after it"):
        StreamingDataset(url)
    assert len(StreamingDataset(url, fields=("txt",))) == len(stays) + 20
    assert run("verify", url).exit_code == 1
    assert add_late(url, "late.bin", value.__getitem__).num_written == 2
    now = stays | {key: value[key] for key in list(value)[NUM:]}
    assert values(url, "late.bin") == now
    told("version", "prune", url)
    assert (values(url, "late.bin"), values(url, "late.bin", version="v1")) == (now, first)
    told("field", "drop", url, "late.bin")
    assert values(url, "late.bin") == dict.fromkeys(now)
    assert values(url, "late.bin", version="v1") == first
    told("version", "prune", url, "--drop", "v1")
    assert not any("/fields/" in name for name in files(url))
