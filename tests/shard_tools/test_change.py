"""Fields renamed, left out and added at ``reshard``; what killed runs leave, removed by ``clean``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.sets.clean import clean
from shard_tools.change.sets.rewrite.field_changes import FieldChanges
from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.errors import AccessDeniedError, ConfigError, NotFoundError
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import until

HELD = """
import sys, time
from streaming.storage import Storage
writer = Storage().open_write(sys.argv[1])
writer.write(b"x" * 1_000_000)
print("open", flush=True)
time.sleep(3600)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=4, columns={"caption": "json.caption"}) as writer:
        for number in range(9):
            sample: dict[str, Any] = {
                "json": {"caption": f"ü {number}" if number % 3 else None},
                "jpeg": b"j" * 200_000,
            }
            writer.write({"__key__": f"{number:03d}", **sample, "pdf": b"p"})
    return f"{tmp_path}/set/"


def test_fields_are_renamed_left_out_and_made_of_columns(shards: str, tmp_path: Path) -> None:
    target = tmp_path / "new"
    options = ["--rename", "jpeg=JPG", "--drop-fields", ".pdf", "--add", "txt=caption"]
    assert run("reshard", shards, target, *options).exit_code == 0
    new = StreamingDataset(f"{target}/", decode=None)
    for number, sample in enumerate(new):
        there = {"jpg", "json"} | ({"txt"} if number % 3 else set())
        assert {name for name in sample if name[0] != "_"} == there
        assert bytes(sample["jpg"]) == b"j" * 200_000
        assert bytes(sample.get("txt", b"")).decode() == (f"ü {number}" if number % 3 else "")
    assert run("verify", f"{target}/").exit_code == 0
    assert run("reshard", shards, target, *options).exit_code == 0, "goes on, as the same work"
    assert run("reshard", shards, target, *options[:-1], "text=caption").exit_code == 1, "is other work"


def test_a_late_column_becomes_a_field(shards: str, tmp_path: Path) -> None:
    table = tmp_path / "late.jsonl"
    table.write_text("".join(json.dumps({"key": f"{number:03d}", "score": number / 2}) + "\n" for number in range(9)))
    assert run("column", "add", shards, "score", "--from", table, "--on", "key").exit_code == 0
    assert run("reshard", shards, tmp_path / "new", "--add", "score.txt=score", "--where", "score > 2").exit_code == 0
    found = [sample["score.txt"] for sample in StreamingDataset(f"{tmp_path}/new/", fields=("score.txt",))]
    assert [float(one) for one in found] == [2.5, 3.0, 3.5, 4.0]


def test_a_value_that_its_field_cannot_hold(shards: str, tmp_path: Path) -> None:
    refused = run("reshard", shards, tmp_path / "new", "--add", "n.cls=caption")
    assert refused.exit_code == 1
    assert "sample '001', --add n.cls=caption" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rename", "jpg=x"), "--rename: no sample has a field 'jpg' (did you mean 'jpeg'?)"),
        (("--drop-fields", "pfd"), "--drop-fields: no sample has a field 'pfd' (did you mean 'pdf'?)"),
        (("--add", "txt=captoin"), "'captoin'"),
        (("--rename", "jpeg=pdf"), "there is a field 'pdf', too"),
        (("--add", "json=caption"), "there is a field 'json', too"),
        (("--drop-fields", "jpeg,json,pdf"), "no field is left"),
        (("--rename", "jpeg=a", "--rename", "pdf=a"), "'a' is made twice"),
        (("--rename", "jpeg=a", "--drop-fields", "jpeg"), "'jpeg' is changed twice"),
        (("--fields", "json", "--rename", "jpeg=jpg"), "no sample has a field 'jpeg'; there are: json"),
        (("--add", "jpg=caption"), "--add jpg: values of columns are stored as text"),
        (("--add", "x.npy=caption"), "--add x.npy: values of columns are stored as text"),
        (("--add", "pkl=caption"), "a pickle runs code on loading"),
        (("--rename", "jpeg"), "is not of the form KEY=VALUE"),
    ],
)
def test_changes_that_are_not_possible(options: tuple[str, ...], message: str, shards: str, tmp_path: Path) -> None:
    refused = run("reshard", shards, tmp_path / "new", *options)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_field_may_take_the_place_of_one_that_goes(shards: str, tmp_path: Path) -> None:
    done = run("reshard", shards, tmp_path / "new", "--rename", "jpeg=pdf", "--drop-fields", "pdf")
    assert done.exit_code == 0, done.stderr
    assert bytes(StreamingDataset(f"{tmp_path}/new/", decode=None)[0]["pdf"]) == b"j" * 200_000
    assert FieldChanges().identity() == {}


def test_files_of_killed_writers_are_removed_and_no_others(shards: str, tmp_path: Path, forked: Forked) -> None:
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    killed = forked.start(HELD, f"{tmp_path}/set/killed.tar", output=tmp_path / "out1")
    living = forked.start(HELD, f"{tmp_path}/set/living.tar", output=tmp_path / "out2")
    for output in (tmp_path / "out1", tmp_path / "out2"):
        until(lambda output=output: output.exists() and "open" in output.read_text(), "a file is open for writing")
    killed.kill()
    killed.wait()
    dry = clean(shards, dry_run=True)
    assert [one.removed for one in dry.found] == [False, False]
    assert [bool(one.why_kept) for one in dry.found] == [False, True]
    told = json.loads(run("clean", shards, "--json").stdout)
    assert [(one["kind"], one["removed"]) for one in told["found"]] == [("file", True), ("file", False)]
    assert "a running command writes it" in told["found"][1]["why_kept"]
    living.kill()
    living.wait()
    assert [one.removed for one in clean(shards).found] == [True]
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before | {tmp_path / "out1", tmp_path / "out2"}
    assert clean(shards).found == ()


@pytest.mark.thorough
def test_uploads_that_nobody_finished(moto_bucket: Any, moto: Any) -> None:
    options = moto.storage_options
    client = boto3.client(
        "s3", endpoint_url=options["endpoint_url"], aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"], region_name=options.get("region", "us-east-1"),
    )  # fmt: skip
    bucket = moto_bucket.partition("://")[2].partition("/")[0]
    for key in ("train/a.tar", "train/b.tar", "train-v2/c.tar"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    century = 100 * 365 * 86_400.0  # moto says that all uploads began in 2010
    young = clean(f"s3://{bucket}/train/", storage_options=options, older_than_s=century)
    assert [(one.url, one.removed) for one in young.found] == [
        (f"s3://{bucket}/train/{name}.tar", False) for name in "ab"
    ]  # fmt: skip
    dry = clean(f"s3://{bucket}/train/", storage_options=options, older_than_s=0, dry_run=True)
    assert [one.why_kept for one in dry.found] == ["", ""]
    assert [one.removed for one in clean(f"s3://{bucket}/train/", storage_options=options, older_than_s=0).found] == [
        True, True,
    ]  # fmt: skip
    assert clean(f"s3://{bucket}/train/", storage_options=options, older_than_s=0).found == ()
    assert clean(f"s3://{bucket}/train", storage_options=options, older_than_s=0).found == (), "another set's"
    assert len(clean(f"s3://{bucket}/", storage_options=options, dry_run=True).found) == 1
    with pytest.raises((NotFoundError, AccessDeniedError)):
        clean("s3://no-such-bucket-here/", storage_options=options)


def test_what_cannot_be_cleaned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lists no uploads"):
        clean("http://host/set/")
    with pytest.raises(NotFoundError):
        clean(f"{tmp_path}/nothing/")
    assert run("clean", tmp_path, "--older-than", "soon").exit_code == 2
    assert run("clean", tmp_path, "--older-than", "2d").exit_code == 0


def test_an_unfinished_set_is_told_and_kept(tmp_path: Path) -> None:
    writer = ShardWriter(f"{tmp_path}/{{:06d}}.tar")
    writer.write({"__key__": "a", "txt": "x"})
    done = run("clean", tmp_path)
    assert "is unfinished, and kept" in done.stderr
    writer.write({"__key__": "b", "txt": "x"})
    writer.close()
    assert len(StreamingDataset(f"{tmp_path}/")) == 2
