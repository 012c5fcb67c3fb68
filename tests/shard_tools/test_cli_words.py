"""What the tools say: typos, shards that are gone, long silences, failures for programs."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.make.convert import convert
from shard_tools.running.progress import progress_bar
from streaming.shards.catalog.unfinished import Unfinished
from tests.support.sets.data_sets import write_set


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def test_typos_in_decode_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = write_set(tmp_path, (3,))
    with caplog.at_level(logging.WARNING):
        samples.open(decode={"vec.npz": None, "cls": int, "*.png": None, "*": None})
        (record,) = caplog.records
        samples.open(decode={"CLS": int})  # reaches nothing: fields of a set are called as their files are
    assert "has a field 'CLS' (did you mean 'cls'?)" in caplog.records[-1].getMessage()
    assert "no sample of" in record.getMessage()
    assert "'vec.npz' (did you mean 'vec.npy'?); its fields are bin, cls, json, txt, vec.npy" in record.getMessage()


@pytest.mark.parametrize("option", [("--columns", "tokns"), ("--field", "tokns=txt")])
def test_typos_in_columns_and_fields_are_told(
    tmp_path: Path, option: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("tokens,name\n1,x\n")
    refused = run("convert", tmp_path / "a.csv", tmp_path / "csv", *option)
    assert refused.exit_code == 2
    assert f"{option[0]}: no column 'tokns' in the source (did you mean 'tokens'?); there are: tokens" in refused.stderr
    assert not (tmp_path / "csv").exists()
    (tmp_path / "a.jsonl").write_text('{"tokens": {"n": 1}}\n{"name": "x"}\n')
    with caplog.at_level(logging.WARNING):
        assert run("convert", tmp_path / "a.jsonl", tmp_path / "jsonl", *option).exit_code == 0
    assert "did you mean 'tokens'?" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert run("convert", tmp_path / "a.jsonl", tmp_path / "right", "--columns", "tokens.n,name").exit_code == 0
    assert not caplog.records


def test_info_notices_shards_that_are_gone_or_short(tmp_path: Path) -> None:
    samples = write_set(tmp_path, (3, 4, 5))
    assert run("info", samples.url).exit_code == 0
    (tmp_path / "000001.tar").unlink()
    with (tmp_path / "000002.tar").open("r+b") as file:
        file.truncate(5000)
    for url in (samples.url, f"{tmp_path}/{{000000..000002}}.tar"):
        told = run("info", url, "--json")
        assert told.exit_code == 1
        findings = json.loads(told.stdout)["findings"]
        assert sorted((finding["kind"], Path(finding["shard"]).name) for finding in findings) == [
            ("missing", "000001.tar"),
            ("size", "000002.tar"),
        ]
        assert "000002.tar: another size than the index says" in run("info", url).stdout


def test_long_verbs_write_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("verify", "shards", enabled=False, every_s=0) as progress:
        progress.start(total_bytes=2048, total=4)
        progress.advance(num_bytes=1024, num=3)
    assert capsys.readouterr().err.startswith("verify: 3 of 4 shards, 1.0 KiB of 2.0 KiB")
    with progress_bar("verify", "shards", enabled=False) as progress:
        progress.advance(num=1)
    assert capsys.readouterr().err == ""


def test_failures_are_json_where_a_program_reads(tmp_path: Path) -> None:
    gone = run("info", tmp_path / "x.tar", "--json")
    assert gone.exit_code == 1
    error = json.loads(gone.stdout)["error"]
    assert error["type"] == "NotFoundError"
    assert error["message"] in gone.stderr.replace("\n", " ")
    for wrong in (
        ("info", "--json"),
        ("info", "x", "--json", "--nonsuch"),
        ("reshard", "a", "b", "--json", "--sort", "x", "--shuffle"),
    ):
        told = run(*wrong)
        assert told.exit_code == 2
        assert json.loads(told.stdout)["ok"] is False
    assert run("info", tmp_path / "x.tar").stdout == ""


def test_many_damaged_shards_end_in_a_sum(tmp_path: Path) -> None:
    for number in range(15):
        (tmp_path / f"{number:02d}.tar").write_bytes(b"x" * 2048)
    told = run("index", tmp_path)
    assert told.exit_code == 1
    assert len(told.stderr.splitlines()) == 11
    assert "and 5 more shards are damaged" in told.stderr


def test_files_of_tars_that_belong_to_no_sample_are_named(tmp_path: Path) -> None:
    """No extension, no key: they were left out without a word."""
    files = {
        "a.txt": b"1", "README": b"x", "b.txt": b"2", ".DS_Store": b"x", "sub/.hidden": b"x", "sub/LICENSE": b"x",
        "c.txt": b"3", "__meta__": b"x",
    }  # fmt: skip
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    report = convert(str(tmp_path / "in.tar"), str(tmp_path / "out"))
    assert report.num_samples == 3
    assert {one.path: one.reason for one in report.skipped} == {
        "in.tar:README": "no extension, which names the field", "in.tar:.DS_Store": "a dot-file, which has no key",
        "in.tar:sub/.hidden": "a dot-file, which has no key",
        "in.tar:sub/LICENSE": "no extension, which names the field",
    }  # fmt: skip
    shown = run("convert", tmp_path / "in.tar", tmp_path / "again")
    assert "left out 4 files of the source:" in shown.stderr


def test_names_that_cannot_be_stored_are_listed_together(tmp_path: Path) -> None:
    lines = [f'{{"id": "a\\\\{n}"}}\n' if n % 2 else f'{{"id": "{n}"}}\n' for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for source in ("a.jsonl", "pictures"):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        for n in range(30):
            (tmp_path / "pictures" / f"a\\{n}.png").write_bytes(b"x")
        refused = run("convert", tmp_path / source, tmp_path / "out", *(("--key", "id") if source == "a.jsonl" else ()))
        assert refused.exit_code == 2
        assert refused.stderr.count("a backslash") == 10
        assert "… and 20 more names cannot be stored" in refused.stderr
    for n in range(4):
        (tmp_path / "pictures" / f"B{n}.png").write_bytes(b"x")
        (tmp_path / "pictures" / f"b{n}.jpg").write_bytes(b"x")
    told = run("convert", tmp_path / "pictures", tmp_path / "out").stderr
    assert [told.count(f"B{n}.png and b{n}.jpg") for n in range(4)] == [1, 1, 1, 1]


def test_index_names_keys_of_two_shards_and_lost_columns(tmp_path: Path) -> None:
    """Training on them is right, so it is no failure; what goes by key takes them for one another."""
    for shard in range(3):
        with ShardWriter(f"{tmp_path}/{{:d}}.tar", start_shard=shard, columns={"n": "json.n"}) as writer:
            for n in range(4):
                writer.write({"__key__": f"{n if shard < 2 else n + 9}", "json": {"n": n}})
    told = run("index", tmp_path)
    assert told.exit_code == 0
    assert f"in two shards: 4 keys, first '0' in {tmp_path}/0.tar and {tmp_path}/1.tar, '1' in" in told.stderr
    assert json.loads(run("index", tmp_path, "--json").stdout)["num_keys_again"] == 4
    assert run("index", tmp_path, "--duplicate-keys", "keep").stderr == ""
    assert [one["key"] for one in json.loads(run("verify", tmp_path, "--json").stdout)["findings"]] == [
        "0",
        "1",
        "2",
        "3",
    ]
    (tmp_path / "_shardstream" / "samples" / "1.tar.parquet").unlink()
    lost = run("index", tmp_path, "--duplicate-keys", "keep")
    assert "without columns that other shards have, and so NULL there: 1 shard, first" in lost.stderr
    assert f"{tmp_path}/1.tar: n." in lost.stderr


def test_fields_of_a_conversion_go_along_with_its_samples(tmp_path: Path) -> None:
    """Neither a copy nor a resharded set could be compared with what the conversion makes."""
    rows = [{"text": "a", "tag": "x"}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 5))
    named = ("--field", "text=txt", "--field", "tag=tag.txt")
    assert run("convert", tmp_path / "a.jsonl", tmp_path / "set", *named).exit_code == 0
    assert run("copy", tmp_path / "set", tmp_path / "copy").exit_code == 0
    there, here = (tmp_path / name / "_shardstream" / "convert.json" for name in ("set", "copy"))
    assert there.read_bytes() == here.read_bytes()
    assert run("reshard", tmp_path / "copy", tmp_path / "new", "--drop-missing", "tag.txt").exit_code == 0
    known = json.loads(there.read_bytes())["fields"]
    assert set(known) == {"txt", "tag.txt", "json"}
    fields = json.loads((tmp_path / "new" / "_shardstream" / "convert.json").read_bytes())["fields"]
    assert fields == {**known, "tag.txt": True}
    assert run("verify", tmp_path / "new").exit_code == 0
    here.write_bytes(b"damaged")
    findings = json.loads(run("verify", tmp_path / "copy", "--json").stdout)["findings"]
    assert [(one["kind"], Path(one["shard"]).name) for one in findings] == [("index", "convert.json")]


def test_verify_of_a_copy_that_has_only_begun_counts_what_it_did_not_read(tmp_path: Path) -> None:
    samples = write_set(tmp_path / "in", (3, 4, 5))
    assert run("copy", samples.url, tmp_path / "out").exit_code == 0
    (tmp_path / "out" / "000002.tar").unlink()
    for path in [*(tmp_path / "out" / "_shardstream").rglob("*.parquet")]:
        path.unlink()
    (tmp_path / "out" / "_shardstream" / "unfinished.json").write_bytes(
        Unfinished(command="copy", work="0", what="in", begun="", num_shards=3, first=-1, start=-1).to_bytes()
    )
    assert "2 shards not in the index and not read" in run("verify", tmp_path / "out").stdout
