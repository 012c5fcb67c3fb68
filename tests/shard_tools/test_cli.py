"""The command line: every verb on real data, its exit codes, its JSON, its messages; local and on S3 servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from streaming.storage import Storage
from tests.support.processes.forked import Forked
from tests.support.servers.on_loopback import MiniS3Server, MotoServer, fresh_name

PNG = b"\x89PNG\r\n\x1a\n\0\xff"
VERBS = (
    "convert",
    "index",
    "verify",
    "reshard",
    "map",
    "repair",
    "copy",
    "info",
    "ls",
    "cat",
    "plan",
    "diff",
    "doctor",
    "bench",
    "stats",
    "export",
    "show",
    "clean",
    "append",
    "dedupe",
    "delete",
    "split",
)


def run(*arguments: object, **environ: str) -> Result:
    """One command in this process; standard output and error apart."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], env=environ, prog_name="shard_tools")


def done(*arguments: object, **environ: str) -> str:
    """Standard output of a command that has to end with 0."""
    result = run(*arguments, **environ)
    assert result.exit_code == 0, result.output
    return result.stdout


JUDGES = {"verify", "diff"}  # their 1 is a finding, and 3 says that they could not look


def failed(*arguments: object, code: int | None = None, **environ: str) -> str:
    """The message of a command that has to fail: one line on standard error, nothing on standard output."""
    result = run(*arguments, **environ)
    wanted = code if code is not None else 3 if arguments[0] in JUDGES else 1
    assert result.exit_code == wanted, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_onto_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    (tmp_path / "in.txt").write_text("a\nb\n")
    done("convert", tmp_path / "in.txt", tmp_path / "out")
    for how in ((), ("--json",)):
        with monkeypatch.context() as patched, contextlib.suppress(OSError), open("/dev/full", "w") as full:
            patched.setattr(sys, "stdout", full)
            with pytest.raises(SystemExit) as ended:
                cli(["info", str(tmp_path / "out"), *how], prog_name="shard_tools")
            assert ended.value.code == 1
        said = capsys.readouterr().err
        assert said.startswith(
            "Error: writing standard output, or a temporary file: No space left on device; make room"
        )
        assert said.count("\n") == 1


MAIN = "from shard_tools.__main__ import main\nmain()\n"


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, Path]]:
    """A pseudo-terminal: our end of it, and the device that a process writes to."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    try:
        yield ours, Path(os.ttyname(theirs))
    finally:
        os.close(theirs)
        os.close(ours)


def seen(ours: int) -> bytes:
    """What has been written to a terminal."""
    drawn = b""
    with contextlib.suppress(BlockingIOError):  # one read gives a page at most; a slow machine draws more
        while piece := os.read(ours, 1 << 16):
            drawn += piece
    return drawn


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for i in range(30):
        path = folder / f"class{i % 3}" / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(PNG + bytes([i]) * 100 * i)
    return folder


@pytest.fixture(scope="module")
def shards(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("shards")
    done("convert", images, target, "--max-samples", 12, "--shuffle", "none")
    return target


# ------------------------------------------------------------------------------------------- usage, help


def test_every_verb_has_help_with_an_example_and_json() -> None:
    leaves = {name: command for name, command in cli.commands.items() if not isinstance(command, click.Group)}
    assert tuple(sorted(leaves)) == tuple(sorted(VERBS))
    for group in (command for command in cli.commands.values() if isinstance(command, click.Group)):
        leaves |= {f"{group.name} {name}": command for name, command in group.commands.items()}
    assert leaves.keys() - set(VERBS) == {
        "column add",
        "column drop",
        "column list",
        "field add",
        "field drop",
        "field list",
        "trace merge",
        "version diff",
        "version list",
        "version prune",
        "version show",
        "version tag",
        "view list",
        "view save",
        "view show",
    }
    for name, command in leaves.items():
        text = done(*name.split(), "--help")
        assert "Example:" in text
        assert f"  shard_tools {name} " in text
        assert "--json" in text or name == "show"  # whose pages are JSON with format=json
        if name != "trace merge":  # of files that loaders wrote on a disk
            assert "--endpoint-url" in text
            assert "environment variable or profile" in " ".join(text.split())
        for option in command.params:
            assert isinstance(option, click.Argument) or getattr(option, "help", None), option.name
    assert "shard_tools convert" in done("--help")
    assert done("--version").startswith("shard_tools, version ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert"],
        ["convert", "a"],
        ["convert", "a", "b", "--max-bytes", "much"],
        ["convert", "a", "b", "--max-bytes", "0"],
        ["convert", "a", "b", "--from", "mystery"],
        ["convert", "a", "b", "--field", "noequals"],
        ["index"],
        ["verify", "--unknown", "x"],
        ["ls", "x", "--limit", "-1"],
        ["nonsense"],
        ["info", "x", "--storage-option", "novalue"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Error: " in result.stderr


def test_options_that_cannot_work_are_2(tmp_path: Path, images: Path) -> None:
    assert "--shuffle" in failed("convert", shard_file(tmp_path), tmp_path / "out", "--shuffle", 1, code=2)
    assert "nonsuch" in failed("info", images, "--storage-option", "nonsuch=1", code=2)
    assert "same place" in failed("convert", images, images, code=2)


def shard_file(folder: Path) -> Path:
    (folder / "in.jsonl").write_text('{"a":1}\n')
    done("convert", folder / "in.jsonl", folder / "tars")
    return folder / "tars"


# ------------------------------------------------------------------------------------------ the verbs


def test_convert_reports(images: Path, tmp_path: Path) -> None:
    text = done("convert", images, tmp_path / "a", "--max-samples", 12)
    assert "30 samples in 3 shards" in text
    assert "classes: 3" in text
    told = json.loads(done("convert", images, tmp_path / "a", "--max-samples", 12, "--json"))
    assert (told["kind"], told["num_samples"], told["num_resumed_samples"]) == ("images", 30, 30)
    assert told["classes"] == {"class0": 0, "class1": 1, "class2": 2}
    (images / "notes.md").write_text("x")
    try:
        result = run("convert", images, tmp_path / "b")
    finally:
        (images / "notes.md").unlink()
    assert (result.exit_code, "notes.md: not an image" in result.stderr) == (0, True)


def test_convert_sizes_and_overwrite(images: Path, tmp_path: Path) -> None:
    told = json.loads(done("convert", images, tmp_path / "a", "--max-bytes", "10KiB", "--json"))
    assert told["num_shards"] > 3
    assert max(path.stat().st_size for path in (tmp_path / "a").glob("*.tar")) <= 10 * 1024
    assert "--overwrite" in failed("convert", images, tmp_path / "a", "--max-bytes", "1MB")
    done("convert", images, tmp_path / "a", "--max-bytes", "1MB", "--overwrite")
    assert len(list((tmp_path / "a").glob("*.tar"))) == 1


def test_index_verb(shards: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "index"
    told = json.loads(done("index", shards / "{000000..000002}.tar", "--index", elsewhere, "--json"))
    assert (told["num_shards"], told["num_samples"]) == (3, 30)
    assert told["num_scanned_bytes"] == told["num_bytes"] > 0
    again = json.loads(done("index", shards, "--index", elsewhere, "--json"))
    assert again["num_scanned_bytes"] == 0
    forced = json.loads(done("index", shards, "--index", elsewhere, "--force", "--workers", 2, "--json"))
    assert forced["num_scanned_bytes"] == told["num_bytes"]
    assert told["fingerprint"] == again["fingerprint"] == forced["fingerprint"]
    text = done("index", shards, "--index", elsewhere)
    assert "3 shards, 30 samples" in text
    assert str(elsewhere) in text
    done("verify", shards, "--index", elsewhere)


def test_verify_verb(shards: Path, tmp_path: Path) -> None:
    assert "all as the index says" in done("verify", shards)
    assert json.loads(done("verify", shards, "--json", "--workers", 1))["ok"] is True
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("000000.tar", "000001.tar"):
        (copy / name).write_bytes((shards / name).read_bytes())
    done("index", copy)
    body = bytearray((copy / "000001.tar").read_bytes())
    body[700] ^= 1
    (copy / "000001.tar").write_bytes(body)
    result = run("verify", copy)
    assert result.exit_code == 1
    assert "000001.tar, bytes 0-" in result.stdout
    assert ": 1 finding\n" in result.stdout
    result = run("verify", copy, "--json")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["kind"] == "checksum"
    assert set(finding) == {"kind", "shard", "byte_start", "byte_end", "key", "what", "expected", "got", "cure"}


def test_info_verb(shards: Path) -> None:
    told = json.loads(done("info", shards, "--json"))
    assert (told["num_shards"], told["num_samples"], told["has_index"]) == (3, 30, True)
    assert sorted(told["columns"]) == ["class", "cls", "height", "width"]
    assert told["fields"]["png"]["num_samples"] == 30
    assert told["fields"]["png"]["num_bytes"] == sum(len(PNG) + 100 * i for i in range(30))
    assert (told["fields"]["png"]["min_bytes"], told["fields"]["png"]["max_bytes"]) == (len(PNG), len(PNG) + 2900)
    text = done("info", shards)
    assert "samples   30" in text
    assert "png" in text


def test_info_without_an_index_reads_small_sets(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes((shards / "000000.tar").read_bytes())
    told = json.loads(done("info", tmp_path / "a.tar", "--json"))
    assert (told["num_samples"], told["has_index"]) == (12, False)
    assert "shard_tools index" in done("info", tmp_path / "a.tar")
    assert not (tmp_path / "_shardstream").exists()


def test_ls_verb(shards: Path) -> None:
    lines = done("ls", shards, "--all").splitlines()
    assert len(lines) == 30
    assert lines[0] == "class0/00\tcls json png"
    assert done("ls", shards, "--limit", 3).splitlines() == lines[:3]
    assert done("ls", shards, "--limit", 0) == ""
    number, shard, key, fields = done("ls", shards, "--long", "--all").splitlines()[13].split("\t")
    assert (number, Path(shard).name, key) == ("13", "000001.tar", lines[13].partition("\t")[0])
    assert "png:" in fields
    told = [json.loads(line) for line in done("ls", shards, "--json").splitlines()]
    assert [entry["number"] for entry in told] == list(range(30))
    assert told[0]["fields"] == {"cls": 1, "json": len('{"class":"class0","path":"class0/00.png"}'), "png": len(PNG)}


def test_cat_verb(shards: Path) -> None:
    result = run("cat", shards, "class1/04", "--field", "png")
    assert (result.exit_code, result.stdout_bytes) == (0, PNG + bytes([4]) * 400)
    assert run("cat", shards, "0", "--field", "cls").stdout_bytes == b"0"
    text = done("cat", shards, "class1/04")
    assert '"path":"class1/04.png"' in text
    assert "binary; write it out with --field png" in text
    told = json.loads(done("cat", shards, 29, "--json"))
    assert told["key"] == "class2/29"
    assert told["content"] == {"cls": "2", "json": {"class": "class2", "path": "class2/29.png"}, "png": None}


def test_cat_reads_only_the_field(mini_s3: MiniS3Server, images: Path) -> None:
    bucket = mini_s3.create_bucket(fresh_name())
    environ = s3_environ(mini_s3)
    done("convert", images, f"{bucket}/d", "--endpoint-url", mini_s3.url, **environ)
    mini_s3.clear_log()
    done("cat", f"{bucket}/d/000000.tar", "class1/04", "--field", "png", "--endpoint-url", mini_s3.url, **environ)
    reads = [entry for entry in mini_s3.log() if str(entry["path"]).endswith("000000.tar") and entry["method"] == "GET"]
    assert [entry["bytes"] for entry in reads] == [len(PNG) + 400]


def test_a_key_of_digits_is_a_key_first(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"id": str(9 - i), "n": i}) for i in range(10)))
    done("convert", tmp_path / "in.jsonl", tmp_path / "out", "--key", "id")
    assert json.loads(done("cat", tmp_path / "out", "3", "--json"))["content"]["json"]["n"] == 6
    assert "no sample has the key '10'" in failed("cat", tmp_path / "out", "10")


def test_cat_refuses_binary_to_a_terminal(shards: Path, forked: Forked) -> None:
    """A real terminal: a pseudo-terminal as standard output."""
    with terminal() as (ours, theirs):
        assert forked.start(MAIN, "cat", str(shards), "0", "--field", "png", output=theirs).wait() == 2
        assert b"--field png >" in seen(ours)
        assert forked.start(MAIN, "cat", str(shards), "0", "--field", "cls", output=theirs).wait() == 0
        assert seen(ours) == b"0"


# --------------------------------------------------------------------------------------------- failures


def test_nothing_there_is_one_line_with_the_cure(tmp_path: Path, shards: Path) -> None:
    for verb in ("index", "verify", "info", "ls"):
        assert "no shards below" in failed(verb, str(tmp_path) + "/")
        assert str(tmp_path / "x.tar") in failed(verb, tmp_path / "x.tar")
    assert "no such file" in failed("convert", tmp_path / "nothing", tmp_path / "out")
    assert "has no field 'jpg'; it has cls, json, png" in failed("cat", shards, 0, "--field", "jpg")
    assert "no sample has the key 'nobody'" in failed("cat", shards, "nobody")


def test_bad_record_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a":1}\nnot json\n')
    assert "in.jsonl:2: not JSON" in failed("convert", tmp_path / "in.jsonl", tmp_path / "out")


def test_verify_without_index(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "a.tar").write_bytes((shards / "000000.tar").read_bytes())
    assert "shard_tools index" in failed("verify", tmp_path / "a.tar")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("info", tmp_path / "x.tar", "--debug")
    assert result.exit_code == 1
    assert result.exception is not None
    assert not isinstance(result.exception, SystemExit)


def s3_environ(server: MiniS3Server | MotoServer) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": server.key,
        "AWS_SECRET_ACCESS_KEY": server.secret,
        "AWS_DEFAULT_REGION": server.region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


# All that is stored goes through a Storage, which test_storage.py shows on moto's server, too.
@pytest.mark.parametrize("kind", [pytest.param("moto", marks=pytest.mark.matrix), "mini_s3"])
def test_all_verbs_on_s3(kind: str, request: pytest.FixtureRequest, images: Path, shards: Path) -> None:
    server: Any = request.getfixturevalue(kind)
    target = f"{server.create_bucket(fresh_name())}/train"
    common = ("--endpoint-url", server.url)
    environ = s3_environ(server)
    options = ("--max-samples", 12, "--shuffle", "none")
    done("convert", images, target, *options, *common, **environ)
    assert (
        json.loads(done("convert", images, target, *options, "--json", *common, **environ))["num_resumed_samples"] == 30
    )
    storage = Storage(server.storage_options)
    for path in sorted(shards.rglob("*")):
        if path.is_file():
            stored = bytes(storage.read(f"{target}/{path.relative_to(shards)}"))
            assert stored == path.read_bytes(), path
    told = json.loads(done("index", f"{target}/", "--force", "--json", *common, **environ))
    assert told["num_samples"] == 30
    assert json.loads(done("verify", target, "--json", *common, **environ))["ok"] is True
    assert json.loads(done("info", target, "--json", *common, **environ))["fingerprint"] == told["fingerprint"]
    assert len(done("ls", target, "--all", *common, **environ).splitlines()) == 30
    assert done("cat", target, "class0/00", "--field", "cls", *common, **environ) == "0"
    back = json.loads(done("convert", target, f"{target}-again", "--json", *options[:2], *common, **environ))
    assert (back["kind"], back["num_samples"]) == ("tars", 30)


def test_s3_failures_are_one_line_with_the_cure(mini_s3: MiniS3Server, images: Path) -> None:
    common = ("--endpoint-url", mini_s3.url)
    environ = s3_environ(mini_s3)
    bucket = mini_s3.create_bucket(fresh_name())
    for verb in ("index", "verify", "info", "ls"):
        assert "no-such-bucket-here" in failed(verb, "s3://no-such-bucket-here/x/", *common, **environ)
        assert "no shards below" in failed(verb, f"{bucket}/empty/", *common, **environ)
    assert "no-such-bucket-here" in failed("convert", images, "s3://no-such-bucket-here/x", *common, **environ)
    wrong = {**environ, "AWS_SECRET_ACCESS_KEY": "wrong"}
    for arguments in (("info", f"{bucket}/x/"), ("ls", f"{bucket}/x.tar"), ("convert", images, f"{bucket}/x")):
        assert "wrong" not in failed(*arguments, *common, **wrong)


# -------------------------------------------------------------------------------------- real processes


@pytest.mark.thorough
def test_python_m_and_console_script(shards: Path) -> None:
    script = Path(sys.executable).with_name("shard_tools")
    assert script.exists(), "the console script is installed with the package"
    for command in ([sys.executable, "-m", "shard_tools"], [script]):
        ran = subprocess.run([*command, "info", str(shards), "--json"], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert json.loads(ran.stdout)["num_samples"] == 30


def test_exit_codes(shards: Path, tmp_path: Path, forked: Forked) -> None:
    output = tmp_path / "output"
    nothing = str(shards / "none.tar")
    assert forked.start(MAIN, "info", nothing, output=output).wait() == 1
    assert "Traceback" not in output.read_text()
    assert forked.start(MAIN, "nonsense", output=output).wait() == 2
    assert "Traceback" not in output.read_text()
    assert forked.start(MAIN, "info", nothing, "--debug", output=output).wait() == 1
    assert "Traceback" in output.read_text()


@pytest.mark.thorough
def test_a_reader_that_leaves_early_is_no_error(shards: Path) -> None:
    pipeline = f"{sys.executable} -m shard_tools ls --all {shards} | head -n 1"
    ran = subprocess.run(["/bin/sh", "-c", pipeline], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("class0/00\tcls json png\n", "")


@pytest.mark.thorough
def test_starting_imports_no_torch() -> None:
    code = "import sys, shard_tools.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ctrl_c_is_130_and_the_next_run_goes_on(tmp_path: Path, forked: Forked) -> None:
    """An interrupt while the fourth shard is being written."""
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"n": i}) for i in range(50)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    done("convert", tmp_path / "in", tmp_path / "calm", "--max-samples", 10)
    code = (
        "import os, signal, sys, shard_tools.make.write.writer as writer\n"
        "write_all = writer.UnmarkedWriter.write_all\n"
        "def stopped(self, samples):\n"
        "    write_all(self, samples[:34])\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "writer.UnmarkedWriter.write_all = stopped\n"
    )
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--max-samples", "10"]
    output = tmp_path / "output"
    assert forked.start(code + MAIN, *arguments, output=output).wait() == 130
    assert output.read_text() == "Stopped. Run the same command again to continue.\n"
    told = json.loads(done(*arguments, "--json"))
    assert told["num_resumed_samples"] == 20
    for path in (tmp_path / "calm").rglob("*"):
        if path.is_file():
            assert (tmp_path / "out" / path.relative_to(tmp_path / "calm")).read_bytes() == path.read_bytes()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_progress_bar_on_a_terminal_only(shards: Path, tmp_path: Path, forked: Forked) -> None:
    """A real terminal as standard error shows the bar; standard output stays clean; without one there is silence."""
    told, silent = tmp_path / "told", tmp_path / "silent"
    elsewhere = f"import os\nos.dup2(os.open({str(told)!r}, os.O_WRONLY | os.O_CREAT), 1)\n"
    arguments, environ = ("verify", str(shards), "--json"), {"TERM": "xterm", "COLUMNS": "120"}
    with terminal() as (ours, theirs):
        assert forked.start(elsewhere + MAIN, *arguments, output=theirs, environ=environ).wait() == 0
        drawn = seen(ours)
    assert json.loads(told.read_text())["ok"] is True
    assert b"verify" in drawn
    assert b"3/3 shards" in drawn
    assert forked.start(elsewhere + MAIN, *arguments, output=silent, environ=environ).wait() == 0
    assert silent.read_text() == ""


def test_storage_options_reach_the_store(shards: Path) -> None:
    options = ("--storage-option", "anon=true", "--storage-option", "connect_timeout_s=5", "--region", "eu-west-1")
    done("info", shards, *options)
    result = run("info", shards, "--storage-option", "max_retries=none")
    assert (result.exit_code, "max_retries: expected a number" in result.stderr) == (2, True)


def test_sources_in_a_bucket_give_the_bytes_of_local_ones(mini_s3: MiniS3Server, images: Path, tmp_path: Path) -> None:
    bucket, environ = mini_s3.create_bucket(fresh_name()), s3_environ(mini_s3)
    storage = Storage(mini_s3.storage_options)
    for path in images.rglob("*.png"):
        storage.put(f"{bucket}/raw/{path.relative_to(images)}", path.read_bytes())
    table = pa.table({"n": list(range(100)), "image": [PNG] * 100})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=30)
    storage.put(f"{bucket}/t.parquet", (tmp_path / "t.parquet").read_bytes())
    cases = ((f"{bucket}/raw/", images), (f"{bucket}/raw", images), (f"{bucket}/t.parquet", tmp_path / "t.parquet"))
    for number, (remote, local) in enumerate(cases):
        ours, theirs = tmp_path / f"local{number}", tmp_path / f"remote{number}"
        done("convert", local, ours, "--shuffle", 5)
        done("convert", remote, theirs, "--shuffle", 5, "--endpoint-url", mini_s3.url, **environ)
        names = sorted(path.relative_to(ours) for path in ours.rglob("*") if path.is_file())
        assert names == sorted(path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file())
        same = [name for name in names if name.name != "sources.parquet"]  # which holds versions
        assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in same)


@pytest.mark.parametrize("verb", ["", "convert", "index", "verify", "info", "ls", "cat", "plan"])
def test_help_shows_its_example_line_by_line(verb: str) -> None:
    shown = CliRunner().invoke(cli, [*filter(None, [verb]), "--help"]).output
    example = shown.partition("Example:\n")[2]
    assert example.startswith("    shard_tools"), shown
    assert "\\b" not in shown
