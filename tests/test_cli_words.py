"""What the tools say: typos, shards that are gone, long silences, failures for programs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from data_sets import write_set

from shard_tools.cli import cli
from shard_tools.running.progress import progress_bar


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def test_typos_in_decode_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = write_set(tmp_path, (3,))
    with caplog.at_level(logging.WARNING):
        samples.open(decode={"vec.npz": None, "CLS": int, "*.png": None, "*": None})
    (record,) = caplog.records
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
