"""Names with what stands for several URLs: files that are there are read, objects are not written, cures find them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.make.convert.pack import Destination
from streaming import StreamingDataset
from streaming.errors import ConfigError, IndexMismatchError, shell_place
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server

NAMES = ["{a,b}", "{0..9}", "{a", "a}b", "{}", "a::b", "{{a,b},c}", "[a]{b}", "x{a,b}y::{c}"]


def write(folder: str) -> None:
    with ShardWriter(f"{folder}/t-{{:06d}}.tar", max_samples=10) as writer:
        for number in range(30):
            writer.write({"__key__": f"{number:03d}", "cls": number})


def named(message: str) -> str:
    found = re.search(r"`shard_tools (.*?)`", message)
    assert found is not None, message
    return found[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_and_a_shard_of_such_a_name_are_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "inner"
    write(str(folder))
    assert len(StreamingDataset(str(folder))) == 30
    assert len(expand_urls(f"{folder}/t-{{000000..000002}}.tar", Storage())) == 3, (
        "braces that are no name still expand"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_the_command_that_a_message_suggests_finds_the_shard(tmp_path: Path, name: str) -> None:
    write(str(tmp_path))
    shard = tmp_path / f"{name}.tar"
    (tmp_path / "t-000001.tar").rename(shard)
    assert CliRunner().invoke(cli, ["index", "--prune", str(tmp_path)]).exit_code == 0
    with shard.open("ab") as file:
        file.write(bytes(10_240))
    with pytest.raises(IndexMismatchError) as caught:
        StreamingDataset(str(tmp_path))
    ran = CliRunner().invoke(cli, shlex.split(named(str(caught.value))))
    assert ran.exit_code == 0, ran.output
    assert len([StreamingDataset(str(tmp_path))[number] for number in range(30)]) == 30


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.text("{}:,.a1[*?] ", min_size=1, max_size=8).filter(lambda name: not set(name) <= set(". ")))
def test_a_file_that_is_there_is_named_by_itself(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.tar"
    path.touch()
    (word,) = shlex.split(shell_place(str(path)))
    assert expand_urls(word, Storage()) == [str(path)]
    path.unlink()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/set/{a,b}.tar", "s3://b/set/"),
        ("s3://b/set/a::b.tar", "s3://b/set/"),
        ("gs://b/{x}/a.tar", "gs://b/"),
        ("https://host/set/{a,b}.tar", "https://host/set/%7Ba,b%7D.tar"),
        ("https://host/a::b.tar?sig={x}", "https://host/a%3A%3Ab.tar?…"),
        ("s3://b/set/a.tar", "s3://b/set/a.tar"),
        ("file:///x/{a}.tar", "file:///x/{a}.tar"),
    ],
)
def test_the_place_of_an_object_is_a_word_that_commands_read_as_it(url: str, expected: str) -> None:
    assert shlex.split(shell_place(url)) == [expected]


@pytest.mark.parametrize("name", ["{x,y}", "a::b"])
def test_objects_are_not_written_under_names_that_none_reads(mini_s3: MiniS3Server, s3_bucket: str, name: str) -> None:
    for target in (f"{s3_bucket}/{name}/t-{{:06d}}.tar", f"{s3_bucket}/{name}-%06d.tar"):
        with pytest.raises(ConfigError, match="which stands for several URLs; leave braces"):
            ShardWriter(target, storage_options=mini_s3.storage_options)
    with pytest.raises(ConfigError, match="which stands for several URLs"):
        Destination.of(f"{s3_bucket}/{name}/out")
