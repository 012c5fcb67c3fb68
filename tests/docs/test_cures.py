"""Every cure that a message names: what is named exists, and what the tools are to do is done, as it is written."""

from __future__ import annotations

import ast
import functools
import gzip
import inspect
import json
import pkgutil
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import infra
import shard_tools
import streaming
from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.show.find.texts import SearchedFields
from shard_tools.look.stats.run import stats
from streaming import Balanced, DataLoader, Mixture, Packed, ShuffleConfig, StreamingDataset, decode
from streaming.errors import AccessDeniedError, MemoryLimitError, ShardstreamError
from streaming.shards.catalog.build import read_chunks
from streaming.shards.video.read import read_video_index
from streaming.storage import Storage
from streaming.storage.base.options import RetryPolicy, StorageOptions
from tests.support.code.cure_messages import (
    FOREIGN_OPTIONS,
    Message,
    error_of,
    keys,
    messages,
    options_of,
    source_of,
    tar,
    tool,
)
from tests.support.code.folders import ROOT
from tests.support.code.source_tree import PACKAGES
from tests.support.contracts.meeting_kinds import logged
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import write_set
from tests.support.sets.index_files import touch
from tests.support.sources import streams
from tests.support.tiers import first_here

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_COMMAND = re.compile(r"shard_tools ([a-z]+)([^`;.]*)")
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]{2,}\b")

# What messages name that is not ours, with its owner.
OF_TORCHTITAN = frozenset(("dataset_path", "infinite", "repeat"))
"""Options of its configuration, which the messages of our integration name."""
FOREIGN_FLAGS = {
    "--checkpoint": "torchtitan",
    "--force-reinstall": "pip",
    "--hard-dereference": "tar",
    "--head": "ray start",
    "--install": "wsl, on Windows",
    "--shm-size": "docker",
    "--sort": "tar, and reshard",
    "--sparse": "tar",
    "--transform": "tar",
    "--ulimit": "docker",
}
FOREIGN_VARIABLES = {
    "AZURE_STORAGE_ACCOUNT_NAME": "obstore",
    "CUDA_VISIBLE_DEVICES": "CUDA",
    "HF_DATASETS_CACHE": "datasets",
}

# Commands that a message names and that no scenario below runs, each with the test that does.
NOT_RUN = {
    ("split", ""): "test_life.py::test_split_as_a_command",
    ("column", "--after"): "test_lengths_after.py::test_the_command_measures_in_processes",
    ("bench", ""): "test_doctor.py::test_what_limits_name_is_done",
    ("cat", ""): "test_cli.py::test_cat_verb",
    ("convert", ""): "test_cli.py::test_convert_reports",
    ("convert", "--from"): "test_class_folders.py::test_images_beside_folders_of_classes_are_told_of",
    ("copy", ""): "test_copy.py::test_as_a_command",
    ("append", ""): "test_life.py::test_as_commands",
    ("dedupe", ""): "test_life.py::test_as_commands",
    ("dedupe", "--by"): "test_life.py::test_as_commands",
    ("field", ""): "test_late_field_verbs.py::test_finished_tars_are_not_made_again",
    ("field", "--from"): "test_late_field_verbs.py::test_what_takes_shards_says_which_fields_it_leaves_out",
    ("field", "--overwrite"): "test_late_field_verbs.py::test_another_way_to_make_it_needs_overwrite",
    ("export", ""): "test_export.py::test_in_a_bucket_by_the_command",
    ("info", ""): "test_cli.py::test_info_verb",
    ("map", ""): "test_map.py::test_several_sources_follow_each_other",
    ("reshard", "--classes"): "test_cases.py::test_what_writes_one_set_refuses_or_writes_by_name",
    ("reshard", "--max-bytes"): "test_reshard.py::test_as_a_command",
    ("reshard", "--sort"): "test_curriculum.py::test_what_it_reads_is_said_and_sorted_shards_cure_it",
    ("reshard", "--where"): "test_reshard.py::test_as_a_command",
    ("show", ""): "test_show.py::test_the_command_prints_one_line_serves_and_ends_with_0",
    ("stats", "--all"): "test_doctor.py::test_what_limits_name_is_done",
    ("verify", "--decode"): "test_recheck.py::test_as_commands",
    ("version", "--abandon"): "test_life.py::test_a_killed_change_is_given_up_as_the_log_says",
}


# ----------------------------------------------------------------------------------------- what messages name


@functools.cache
def our_options() -> frozenset[str]:
    """Arguments of everything public, and the options of stores."""
    names = {field.name for kind in (StorageOptions, RetryPolicy) for field in fields(kind)}
    publics = [getattr(package, name) for package in (streaming, shard_tools, infra) for name in package.__all__]
    publics += [getattr(decode, name) for name in decode.__all__]
    for info in pkgutil.walk_packages(streaming.__path__, "streaming."):
        if ".integrations" not in info.name:
            publics += [one for one in vars(import_module(info.name)).values() if inspect.isclass(one)]
    for public in publics:
        for called in (public, *(vars(public).values() if inspect.isclass(public) else ())):
            function = getattr(called, "__func__", called)
            if callable(function):
                with suppress(TypeError, ValueError):
                    names.update(inspect.signature(function).parameters)
    return frozenset(names)


def our_flags(verb: str | None = None) -> set[str]:
    commands: list[click.Command] = [cli, *cli.commands.values()] if verb is None else [cli.commands[verb]]
    for command in commands:
        commands += getattr(command, "commands", {}).values()  # of a group, such as `view`
    return {
        text for command in commands for option in command.params for text in (*option.opts, *option.secondary_opts)
    }


def commands_of(message: Message) -> Iterator[tuple[str, list[str]]]:
    """Verb and flags of each command that a message names."""
    for found in _COMMAND.finditer(message.text):
        yield found[1], _FLAG.findall(found[2])


@pytest.mark.thorough
def test_messages_are_found() -> None:
    assert len(messages()) > 500
    assert sum(1 for message in messages() for _ in commands_of(message)) > 40


def test_every_option_that_a_message_names_exists() -> None:
    named = {(name, message.place) for message in messages() for name in options_of(message)}
    assert len(named) > 100
    unknown = {item for item in named if item[0] not in our_options() | FOREIGN_OPTIONS.keys() | OF_TORCHTITAN}
    assert not unknown


def test_every_flag_that_a_message_names_exists() -> None:
    named = {(flag, message.place) for message in messages() for flag in _FLAG.findall(message.text)}
    assert len(named) > 60
    assert not {item for item in named if item[0] not in our_flags() and item[0] not in FOREIGN_FLAGS}


def test_every_command_that_a_message_names_exists() -> None:
    for message in messages():
        for verb, flags in commands_of(message):
            assert verb in cli.commands, message
            assert set(flags) <= our_flags(verb) | FOREIGN_FLAGS.keys(), message


@pytest.mark.thorough
def test_every_variable_that_a_message_names_is_read() -> None:
    whole = {message.text for message in messages()}
    named = {name for text in whole for name in _VARIABLE.findall(text)} - FOREIGN_VARIABLES.keys()
    assert "WORLD_SIZE" in named
    read = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            read.update(value for value in constants if isinstance(value, str) and _VARIABLE.fullmatch(value))
    assert named <= read


# --------------------------------------------------------------------------------------------------- scenarios


def do(text: str, verb: str, *more: object, **filled: object) -> Result:
    """The command that ``text`` names, with what stands for the user's own names filled in."""
    found = re.search(rf"(?:`?shard_tools )({verb}[^`;,\n]*)", text)
    assert found is not None, text
    words = [str(filled.get(word, word)) for word in shlex.split(found[1].strip().rstrip("."))]
    return tool(*words, *more)


SCENARIOS: dict[str, tuple[Callable[[Path], None], tuple[tuple[str, str], ...]]] = {}


def scenario(*commands: tuple[str, str]) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """A cure done as a message has it; ``commands`` are the verbs and flags that it runs."""

    def note(function: Callable[[Path], None]) -> Callable[[Path], None]:
        SCENARIOS[function.__name__] = function, commands
        return function

    return note


@scenario()
def compressed_shards_are_unpacked(folder: Path) -> None:
    plain = tar(folder / "a.tar", ("a.txt", b"1"), ("b.txt", b"2"))
    packed = folder / "a.tar.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert "compressed shards cannot be indexed" in error_of(lambda: StreamingDataset(packed)[0])
    assert "`gunzip`" in tool("index", packed, code=2).stderr
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    tool("index", folder)
    assert keys(folder) == ["a", "b"]


@scenario(("index", ""), ("index", "--index"))
def an_index_elsewhere_is_built(folder: Path) -> None:
    samples = write_set(folder / "in", (3,), indexed=False)
    text = error_of(lambda: StreamingDataset(samples.url, index=folder / "index"))
    do(text, "index --index", URL=samples.url)
    assert len(StreamingDataset(samples.url, index=folder / "index")) == 3
    do(error_of(lambda: tool_error("verify", samples.url)), "index", samples.url)
    tool("verify", samples.url)


def tool_error(*arguments: object) -> None:
    """Raise what a verb says when it fails."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")
    assert result.exit_code in {1, 2, 3}, result.output
    raise ShardstreamError(result.output)


@scenario(("version", ""), ("version", "--drop"))
def versions_are_listed_named_and_given_up(folder: Path) -> None:
    samples = write_set(folder, (3, 4))
    tool("version", "tag", folder, "v1")
    (folder / "keys").write_text(samples.open()[0]["__key__"])
    tool("delete", folder, "--keys", folder / "keys")
    do(error_of(lambda: StreamingDataset(folder / "000000.tar")), "version list")
    do(error_of(lambda: StreamingDataset(folder, version="v2")), "version tag")
    assert len(StreamingDataset(folder, version="v2")) == 6
    text = error_of(lambda: tool_error("delete", folder, "--where", "__key__ != ''", "--purge"))
    assert "no sample would stay" in text
    (folder / "keys").write_text(samples.open()[1]["__key__"])
    do(error_of(lambda: tool_error("delete", folder, "--keys", folder / "keys", "--purge")), "version prune")
    tool("delete", folder, "--keys", folder / "keys", "--purge")
    assert len(StreamingDataset(folder)) == 5
    numbered = error_of(lambda: tool_error("version", "tag", folder, "v1", "--of", 9))
    do(numbered, "version list")
    tool("version", "tag", folder, "now", "--of", last_version(numbered))


@scenario(("reshard", "--columns"), ("column", "--lift"), ("view", ""))
def what_stays_behind_is_brought_along(folder: Path) -> None:
    home = folder / "set"
    with ShardWriter(f"{home}/{{:02d}}.tar", max_samples=4, columns=["cls"]) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:02d}", "cls": number % 3})
    (folder / "scores.jsonl").write_text(
        "".join(f'{{"key": "{number:02d}", "score": {number}}}\n' for number in range(12))
    )
    tool("column", "add", home, "score", "--from", folder / "scores.jsonl", "--on", "key")
    tool("view", "save", home, "best", "--where", "score >= 6")
    asked = {"where": "score >= 0", "fields": ("cls",)}

    with logged() as told:
        tool("split", home, f"{folder}/a=90%", f"{folder}/b=10%", "--seed", 3)
    do("\n".join(told), "reshard SOURCE NEW --columns", SOURCE=home, NEW=folder / "new")
    assert len(StreamingDataset(folder / "new", **asked)) == 12
    with logged() as told:
        tool("copy", home, folder / "copy")
    text = "\n".join(told)
    assert "bring it their folder, _shardstream/columns" in text
    shutil.copytree(home / "_shardstream/columns", folder / "copy/_shardstream/columns")
    assert len(StreamingDataset(folder / "copy", **asked)) == 12
    assert "score >= 6" in do(text, "view show", NAME="best").output
    with logged() as told:
        tool("repair", home, "--to", folder / "repaired")
    do("\n".join(told), "column add", TARGET=folder / "repaired", NAME="cls")
    assert len(StreamingDataset(folder / "repaired", where="cls = 1", fields=("cls",))) == 4


def last_version(text: str) -> int:
    """The version that a message says to give instead of one that is not there."""
    found = re.search(r"such as version=(\d+)", text)
    assert found is not None, text
    return int(found[1])


def a_state(dataset: Any) -> dict[str, Any]:
    with DataLoader(dataset, batch_size=2, num_threads=0) as loader:
        next(iter(loader))
        return loader.state_dict()


def first_keys(dataset: Any) -> list[str]:
    with DataLoader(dataset, batch_size=2, num_threads=0, epoch_size=8) as loader:
        return [key for batch in loader for key in batch["__key__"]]


def load(dataset: Any, state: dict[str, Any]) -> None:
    with DataLoader(dataset, batch_size=2, num_threads=0) as loader:
        loader.load_state_dict(state)


@scenario(("version", ""))
def a_pruned_version_is_given_up_as_the_errors_say(folder: Path) -> None:
    """Whatever was pinned to it: a set, a mixture with or without an end, a file of one, a group of a set."""
    one, other = write_set(folder / "one", (9, 4)), write_set(folder / "other", (5,))
    (folder / "keys").write_text(one.open()[0]["__key__"])
    tool("delete", one.url, "--keys", folder / "keys")

    def mixed(version: int, **options: Any) -> Mixture:
        return Mixture({"a": StreamingDataset(one.url, version=version), "b": StreamingDataset(other.url)}, **options)

    def of_file(version: int) -> Mixture:
        sources = {"a": {"url": one.url, "version": version}, "b": other.url}
        (folder / "mixture.json").write_text(json.dumps({"sources": sources}))
        return Mixture.from_file(folder / "mixture.json")

    kinds: list[Callable[[int], Any]] = [
        lambda version: StreamingDataset(one.url, version=version), mixed, of_file,
        lambda version: mixed(version, weights={"a": 1, "b": 1}),
        lambda version: Balanced(StreamingDataset(one.url, version=version), "__key__"),
    ]  # fmt: skip
    states = [a_state(make(2)) for make in kinds]
    (folder / "keys").write_text(one.open()[1]["__key__"])
    tool("delete", one.url, "--keys", folder / "keys")
    tool("version", "prune", one.url)
    for make, state in zip(kinds, states, strict=True):
        gone = error_of(lambda make=make: make(2))
        assert "pruned, and does not come back" in gone
        assert "version tag" not in gone
        do(gone, "version list")
        now = last_version(gone)
        refused = error_of(lambda make=make, state=state, now=now: load(make(now), state))
        assert "begin a new run, without this state" in refused
        assert "Open the same shards" not in refused
        do(refused, "version list")
        assert len(first_keys(make(now))) == 8


@scenario(("version", ""))
def sets_that_are_read_as_one_get_one_name_for_a_state(folder: Path) -> None:
    sets = [write_set(folder / name, (9,)) for name in ("one", "other")]
    urls = [one.url for one in sets]
    for one in sets:
        (folder / "keys").write_text(one.open()[0]["__key__"])
        tool("delete", one.url, "--keys", folder / "keys")
    state = a_state(StreamingDataset(urls))
    (folder / "keys").write_text(sets[1].open()[0]["__key__"])
    tool("delete", sets[1].url, "--keys", folder / "keys")
    text = error_of(lambda: load(StreamingDataset(urls), state))
    for command in re.findall(r"shard_tools (version tag [^;]+)", text):
        tool(*[{"NAME": "mine"}.get(word, word) for word in shlex.split(command)])
    load(StreamingDataset(urls, version="mine"), state)


@scenario(("index", ""), ("index", "--force"), ("index", "--prune"))
def a_replaced_or_lost_shard_is_indexed_anew(folder: Path) -> None:
    samples = write_set(folder, (3, 4))
    tar(folder / "000000.tar", ("z.txt", b"other"))
    do(error_of(lambda: StreamingDataset(samples.url)), "index")
    assert keys(samples.url)[0] == "z"
    data = bytearray((folder / "000001.tar").read_bytes())
    data[600] ^= 1
    (folder / "000001.tar").write_bytes(data)
    do(tool("verify", samples.url, code=1).stdout, "index --force", samples.url)
    tool("verify", samples.url)
    (folder / "000001.tar").unlink()
    do(error_of(lambda: StreamingDataset(samples.url)), "index --prune")
    assert keys(samples.url) == ["z"]


@scenario(("index", ""))
def a_lost_sample_table_is_built_anew(folder: Path) -> None:
    samples = write_set(folder, (3,))
    (folder / "_shardstream" / "samples" / "000000.tar.parquet").unlink()
    do(error_of(lambda: tool_error("ls", samples.url)), "index")
    assert len(tool("ls", samples.url).stdout.splitlines()) == 3


@scenario(("reshard", "--dedupe"), ("reshard", "--key-prefix"), ("index", "--duplicate-keys"))
def keys_that_come_twice(folder: Path) -> None:
    shards = tar(folder / "in" / "a.tar", ("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3")).parent
    text = error_of(lambda: StreamingDataset(shards))
    do(text, "reshard SOURCE TARGET --dedupe", SOURCE=shards, TARGET=folder / "one")
    assert keys(folder / "one") == ["a", "b"]
    prefix = re.search(r"`(--key-prefix \S+)`", text)
    assert prefix is not None
    tool("reshard", shards, folder / "all", *prefix[1].split())
    assert len(keys(folder / "all")) == 3
    option = re.search(r'duplicate_keys="(\w+)"', text)
    assert option is not None
    assert keys(shards, duplicate_keys=option[1]) == ["a", "b", "a"]
    do(text, "index --duplicate-keys", shards)
    assert keys(shards) == ["a", "b", "a"]


@scenario(("repair", "--to"), ("repair", "--drop-damaged"))
def damaged_tars_are_repaired(folder: Path) -> None:
    shard = tar(folder / "in" / "a.tar", ("a.txt", b"1"), ("b.txt", b"2"))
    shard.write_bytes(shard.read_bytes()[:2048])  # without its end
    do(error_of(lambda: StreamingDataset(shard)), "repair", URL=shard, TARGET=folder / "whole")
    assert keys(folder / "whole") == ["a", "b"]
    taken = tar(folder / "in" / "b.tar", ("a.txt", b"1"), ("a.__key__", b"2"))
    do(error_of(lambda: StreamingDataset(taken)), "repair", URL=taken, TARGET=folder / "named")
    assert keys(folder / "named") == ["a"]


@scenario(("convert", "--max-gzip-ratio"))
def an_archive_that_inflates_far_is_allowed(folder: Path) -> None:
    member = tarfile.TarInfo("a.bin")
    member.size = 65 << 20  # up to 64 MiB nobody asks
    (folder / "in").mkdir()
    packed = gzip.compress(member.tobuf() + bytes(member.size + 1024), 1)
    (folder / "in" / "a.tar.gz").write_bytes(packed)
    text = error_of(lambda: tool_error("convert", folder / "in", folder / "out"))
    assert "shard_tools convert --max-gzip-ratio" in text
    assert "a larger max_gzip_ratio=" in text
    options = {"decode": None, "max_gzip_ratio": 1000, "shuffle": False}
    assert next(iter(DataLoader(StreamingDataset(folder / "in", **options), batch_size=1, epoch_size=1)))[
        "__key__"
    ] == ["a"]
    tool("convert", folder / "in", folder / "out", "--max-gzip-ratio", 1000)
    assert keys(folder / "out") == ["a"]


@scenario(("verify", "--write-bad"), ("reshard", "--drop"))
def damaged_samples_are_left_out(folder: Path) -> None:
    samples = write_set(folder / "in", (9,))
    shard = folder / "in" / "000000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    text = error_of(lambda: tool_error("reshard", samples.url, folder / "out"))
    found = re.search(r"verify SOURCE (--write-bad bad\.jsonl)`.*(--drop bad\.jsonl)", text)
    assert found is not None, text
    bad = folder / "bad.jsonl"
    tool("verify", samples.url, "--write-bad", bad, code=1)
    tool("reshard", samples.url, folder / "out", "--drop", bad, "--overwrite")
    assert 0 < len(keys(folder / "out")) < 9


@scenario()
def a_memory_limit_that_is_named_is_enough(folder: Path) -> None:
    samples = write_set(folder, (40, 40), chunk_samples=40)
    dataset = samples.open()

    def batches(limit: str) -> int:
        with DataLoader(dataset, batch_size=8, memory_limit=limit) as loader:
            return len(list(loader))

    text = error_of(lambda: batches("64KiB"), MemoryLimitError)
    found = re.search(r"memory_limit=\W?(\d+ ?\w+)", text)
    assert found is not None, text
    assert batches(found[1]) == 10


@scenario()
def fewer_lanes_fit_into_less_memory(folder: Path) -> None:
    samples = write_set(folder, (64,) * 8, chunk_samples=8)

    def batches(**shuffle: int) -> int:
        dataset = samples.open(shuffle=ShuffleConfig(**shuffle))
        with DataLoader(dataset, batch_size=64, memory_limit="2MiB") as loader:
            return len(list(loader))

    text = error_of(lambda: batches(lanes=64, window=8), MemoryLimitError)
    found = re.search(r"ShuffleConfig\(lanes=(\d+)\)", text)
    assert found is not None, text
    assert batches(lanes=int(found[1]), window=8) == 8


@scenario()
def a_state_of_many_ranks_goes_on_where_memory_is_short(folder: Path) -> None:
    samples = write_set(folder, (64,) * 8, chunk_samples=8)

    def state_after(
        rank: int, ranks: int, state: dict[str, Any] | None, limit: str = "2MiB", lanes: int = 64, epoch: int = 0
    ) -> dict[str, Any]:
        dataset = samples.open(shuffle=ShuffleConfig(lanes=lanes, window=8))
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank, environ={})
        with DataLoader(dataset, global_batch_size=64, device_mesh=mesh, memory_limit=limit) as loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(epoch)
            next(iter(loader))
            return loader.state_dict()

    state = state_after(0, 16, None)
    text = error_of(lambda: state_after(0, 1, state), MemoryLimitError)
    assert "lanes=" not in text
    named = re.search(r'memory_limit="(\w+)", or (\d+) data-parallel ranks\. .*set_epoch\((\d+)\)', text)
    assert named is not None, text
    two_batches = {**state, "samples_seen": 128}
    assert state_after(0, 1, state, limit=named[1]) == two_batches
    assert [state_after(rank, int(named[2]), state) for rank in range(int(named[2]))] == [two_batches] * int(named[2])
    assert state_after(0, 1, None, lanes=4, epoch=int(named[3]))["epoch"] == 1


@scenario(("column", "--fields"), ("ls", "--where"), ("ls", "--all"))
def empty_values_are_listed(folder: Path) -> None:
    with ShardWriter(f"{folder}/own/{{:06d}}.tar") as writer:
        for key, text in (("a", "x"), ("b", ""), ("c", "y")):
            writer.write({"__key__": key, "txt": text})
    (found,) = [one for one in stats([str(folder / "own")], storage=Storage()).found if one.kind == "empty"]
    do(found.cure, "column add")
    assert json.loads(do(found.cure, "ls", "--json").stdout)["key"] == "b"


@scenario(("convert", "--field"))
def text_is_kept_beside_its_tokens(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "abc"}\n')
    (cure,) = SearchedFields(past=frozenset({("tok", "tokens")})).cures
    do(cure, "convert", SOURCE=folder / "a.jsonl", TARGET=folder / "made", FILE="bytes")
    assert StreamingDataset(folder / "made")[0]["txt"] == "abc"


@scenario()
def a_shard_that_was_left_behind_is_not_indexed(folder: Path) -> None:
    home = folder / "lives"
    with ShardWriter(f"{home}/{{:06d}}.tar", max_samples=3) as writer:
        for number in range(6):
            writer.write({"__key__": f"k{number}", "txt": f"t{number}"})
    (folder / "keys.txt").write_text("k1\n")
    tool("delete", home, "--keys", folder / "keys.txt")
    for more in ([], ["--force"]):
        text = error_of(lambda more=more: tool_error("index", home / "000000.tar", *more))  # type: ignore[misc]
        assert "would bring them back" in text
        do(text, "index")
    assert sorted(sample["__key__"] for sample in StreamingDataset(home)) == ["k0", "k2", "k3", "k4", "k5"]
    assert len(StreamingDataset(home, version=1)) == 6


@scenario()
def classes_are_given(folder: Path) -> None:
    (folder / "val" / "bee").mkdir(parents=True)
    (folder / "val" / "bee" / "1.png").write_bytes(b"x")
    text = error_of(lambda: tool_error("convert", folder / "val", folder / "out", "--classes", "ant,cat"))
    assert "give a list that holds all" in text
    tool("convert", folder / "val", folder / "out", "--classes", "ant,bee")
    assert StreamingDataset(folder / "out", decode={"png": None})[0]["cls"] == 1


@scenario(("convert", "--tokenizer"), ("column", "--compute"))
def tokens_are_counted(folder: Path) -> None:
    with ShardWriter(f"{folder}/own/{{:06d}}.tar") as writer:
        writer.write({"__key__": "a", "tok": bytes(12)})
    text = error_of(lambda: Packed(StreamingDataset(folder / "own"), 4))
    do(text, "column add", "--dtype", "uint32", URL=folder / "own")
    assert Packed(StreamingDataset(folder / "own"), 4).num_tokens == 3
    (folder / "a.jsonl").write_text('{"text": "abc"}\n')
    assert "`shard_tools convert --tokenizer`" in text
    tool("convert", folder / "a.jsonl", folder / "made", "--tokenizer", "bytes")
    assert Packed(StreamingDataset(folder / "made"), 4).num_tokens == 5


@scenario(("verify", "--duplicate-keys"))
def a_key_in_two_shards_is_meant(folder: Path) -> None:
    for name in ("a", "b"):
        tar(folder / f"{name}.tar", ("one.txt", name.encode()))
    tool("index", folder)
    text = tool("verify", folder, code=1).stdout
    assert "if it is intended, `shard_tools verify --duplicate-keys keep`" in text
    tool("verify", folder, "--duplicate-keys", "keep")


@scenario(("verify", ""))
def bad_samples_are_listed(folder: Path) -> None:
    samples = write_set(folder, (8, 8))
    data = bytearray((folder / "000000.tar").read_bytes())
    data[600] ^= 1
    (folder / "000000.tar").write_bytes(data)
    text = error_of(lambda: keys(samples.url, on_error="skip", max_bad_samples=0.0))
    assert "Check the shards with `shard_tools verify`, or raise max_bad_samples" in text
    assert "000000.tar" in tool("verify", samples.url, code=1).stdout
    assert keys(samples.url, on_error="substitute", max_bad_samples=1.0)


@scenario(("convert", "--tokens-field"), ("convert", "--mask-field"))
def arrays_become_packs(folder: Path) -> None:
    rows = {"input_ids": [[5, 6, 7], [8, 9]], "loss": [[0, 1, 1], [1, 1]]}
    pq.write_table(pa.table(rows), folder / "in.parquet")
    tool("convert", folder / "in.parquet", folder / "arrays")
    arrays = StreamingDataset(str(folder / "arrays"))
    text = error_of(lambda: Packed(arrays, 8, field="input_ids.npy"))
    assert "`shard_tools convert URL TARGET --tokens-field FIELD [--mask-field FIELD]`" in text
    named = ("--tokens-field", "input_ids.npy", "--mask-field", "loss.npy")
    tool("convert", arrays.urls[0].rpartition("/")[0], folder / "out", *named)
    pack = Packed(StreamingDataset(str(folder / "out")), 8, mask_field="mask")[0]
    assert sorted(pack["input_ids"].tolist()) == [0, 0, 0, 5, 6, 7, 8, 9]


@scenario(("ls", ""))
def keys_that_there_are_are_listed(folder: Path) -> None:
    samples = write_set(folder, (3,))
    shown = do(error_of(lambda: tool_error("cat", samples.url, "nobody")), "ls").stdout
    assert [line.split()[0] for line in shown.splitlines()] == list(samples.keys)


@scenario(("column", ""), ("column", "--from"), ("column", "--on"), ("view", ""))
def a_column_and_a_view_are_added(folder: Path) -> None:
    samples, other = write_set(folder / "in", (3,)), write_set(folder / "other", (3,), first=3)
    scores = folder / "scores.parquet"
    both = [*samples.keys, *other.keys]
    pq.write_table(pa.table({"key": both, "score": range(6)}), scores)
    text = error_of(lambda: keys(samples.url, where="score > 0"))
    assert "added with `shard_tools column add`" in text
    tool("column", "add", samples.url, "score", "--from", scores, "--on", "key")
    assert keys(samples.url, where="score > 0") == both[1:3]
    text = error_of(lambda: StreamingDataset([samples.url, other.url], where="score > 0"))
    do(text, "column", **{"URL…": other.url, "FILE": scores, "KEY": "key"})
    assert len(StreamingDataset([samples.url, other.url], where="score > 0")) == 5
    text = error_of(lambda: keys(samples.url, view="good"))
    assert "`shard_tools view save`" in text
    tool("view", "save", samples.url, "good", "--where", "score > 0")
    assert keys(samples.url, view="good") == both[1:3]


@scenario(("column", "--overwrite"), ("view", "--overwrite"), ("convert", "--overwrite"))
def what_is_damaged_beside_an_index_is_made_again(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(5)))
    convert = ("convert", folder / "a.jsonl", folder / "set", "--max-samples", 2)
    tool(*convert)
    url, home, scores = f"{folder}/set", folder / "set/_shardstream", folder / "scores.parquet"
    pq.write_table(pa.table({"key": keys(url), "score": range(5)}), scores)
    tool("column", "add", url, "score", "--from", scores, "--on", "key")
    tool("view", "save", url, "good", "--where", "score > 2")

    def good() -> list[object]:
        for table in (home / "samples").iterdir():
            touch(table)
        return keys(url, view="good")

    expected = good()
    for name in ("columns/score/column.json", "columns/score/000001.tar.parquet"):
        change_byte(home / name)
        do(error_of(good), "column", "--on", "key", URL=url, NAME="score", **{"…": f"--from={scores}"})
        assert good() == expected
    change_byte(home / "views/good.json")
    do(error_of(good), "view", URL=url, NAME="good", **{"…": "--where=score > 2"})
    assert good() == expected
    change_byte(home / "convert.json")
    do(error_of(lambda: tool_error(*convert)), "convert", folder / "set", **{"…": folder / "a.jsonl"})
    assert len(keys(url)) == 5


@scenario(("index", "--video"))
def videos_are_indexed(folder: Path) -> None:
    with ShardWriter(f"{folder}/set/{{:06d}}.tar") as writer:
        writer.write({"__key__": "a", "mp4": streams.video("mp4", 10)})
    home, storage = f"{folder}/set", Storage()
    rows = read_chunks(storage, home)

    def frames() -> int:
        return read_video_index(storage, home, rows, ["mp4"]).streams("mp4")[0].num_frames

    do(error_of(frames), "index")
    assert frames() == 10
    change_byte(folder / "set/_shardstream/video/mp4/000000.tar.parquet")
    do(error_of(frames), "index", URL=home)
    assert frames() == 10


@scenario(("stats", ""), ("reshard", ""), ("index", "--force"), ("plan", ""), ("convert", "--key"))
def surprises_of_a_set_are_cured(folder: Path) -> None:
    def found(url: object, what: str) -> str:
        surprises = json.loads(tool("stats", url, "--json").stdout)["surprises"]
        return next((one["cure"] for one in surprises if one["what"].startswith(what)), "")

    members = [(f"{i // 2:03d}.txt", b"%d" % i) for i in range(100)]
    members += [(f"{i:03d} .cls", b"%d" % (i // 50)) for i in range(100, 400)]
    tar(folder / "set" / "a.tar", *members)
    do(found(folder / "set", "there is no index"), "index", "--duplicate-keys", "keep")
    assert found(folder / "set", "there is no index") == ""
    source = "set"
    for what, target in (("duplicate keys", "unique"), ("class-sorted", "shuffled"), ("fields that only", "same")):
        do(found(folder / source, what), "reshard", TARGET=folder / target)
        assert found(folder / target, what) == ""
        source = target
    assert "`shard_tools convert … --key number`" in found(folder / "set", "keys with odd")
    tool("convert", folder / "set", folder / "numbered", "--key", "number")
    assert found(folder / "numbered", "keys with odd") == ""
    write_set(folder / "small", (200,), chunk_samples=8)
    do(found(folder / "small", "very small chunks"), "index")
    assert found(folder / "small", "very small chunks") == ""
    tool("plan", folder / "small", "--batch-size", 2)  # named for chunks of one large sample
    (folder / "mixture.json").write_text(json.dumps({"sources": {"a": {"url": str(folder / "small")}}}))
    text = tool("stats", folder / "mixture.json", code=2).stderr
    assert "`shard_tools stats` for the url of each of its sources" in text
    tool("stats", folder / "small")


@scenario(("index", "--columns"), ("column", "--lift"))
def values_inside_fields_are_taken_once_a_set_is_written(folder: Path) -> None:
    tar(folder / "in" / "a.tar", ("a.json", b'{"tokens": 3}'), ("b.json", b'{"tokens": 4}'))
    target = folder / "set"
    text = error_of(lambda: tool_error("convert", folder / "in", target, "--columns", "json.tokens"))
    tool("convert", folder / "in", target)
    do(text, "index", TARGET=target)
    assert keys(target, where='"json.tokens" > 3') == ["b"]
    do(text, "column add", TARGET=target, NAME="tokens")
    assert keys(target, where="tokens > 3") == ["b"]


@scenario(("column", ""))
def a_late_column_of_a_set_that_grew_is_completed(folder: Path) -> None:
    write_set(folder, (4,))
    tool("column", "add", folder, "late", "--compute", "bytes", "--fields", "txt")
    write_set(folder, (4, 3))
    text = error_of(lambda: keys(folder, where="late >= 0"))
    assert text.rpartition("column add ")[2].split()[1:] == ["late", "…"]
    tool("column", "add", folder, "late", "--compute", "bytes", "--fields", "txt")
    assert len(keys(folder, where="late >= 0")) == 7


@scenario(("bench", "--tune"), ("bench", "--out"))
def tuned_options_are_measured_anew(folder: Path) -> None:
    samples, path = write_set(folder / "set", (40,)), folder / "tuned options.json"
    path.write_text("{")
    text = error_of(lambda: DataLoader(samples.open(), 8, tuned=path))
    path.rename(folder / "away.json")
    do(text, "bench", "--seconds", 0.2, URL=samples.url)
    with DataLoader(samples.open(), 8, tuned=path) as loader:
        assert len(list(loader)) == 5


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", first_here(sorted(SCENARIOS), 6))
def test_a_cure_works_as_it_is_written(name: str, tmp_path: Path) -> None:
    SCENARIOS[name][0](tmp_path)


def test_credentials_and_anonymous_reading(mini_s3: MiniS3Server) -> None:
    url = mini_s3.create_bucket(fresh_name("public-"))
    samples = write_set(url, (3,), storage_options=mini_s3.storage_options)
    wrong = {**mini_s3.storage_options, "secret": "wrong"}
    text = error_of(lambda: StreamingDataset(samples.url, storage_options=wrong), AccessDeniedError)
    assert "storage_options takes key and secret" in text
    assert "anon=True" in text
    reach = {"endpoint_url": mini_s3.url, "region": mini_s3.region}
    assert len(StreamingDataset(samples.url, storage_options={**reach, "anon": True})) == 3
    keyed = {**reach, "key": mini_s3.key, "secret": mini_s3.secret}
    assert len(StreamingDataset(samples.url, storage_options=keyed)) == 3


def test_a_mesh_that_is_named_plays_one_rank(tmp_path: Path) -> None:
    samples = write_set(tmp_path, (8,))
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=0, world_size=2)
    with DataLoader(samples.open(), batch_size=2, device_mesh=mesh) as loader:
        assert len(list(loader)) == 2


def test_every_command_that_a_message_names_is_run_or_says_why_not() -> None:
    run = {command for _, commands in SCENARIOS.values() for command in commands}
    named = {
        (verb, flag)
        for message in messages()
        for verb, flags in commands_of(message)
        for flag in ([flag for flag in flags if flag in our_flags(verb)] or [""])
    }
    assert named - run - NOT_RUN.keys() == set()
    assert NOT_RUN.keys() <= named, "no message names this any more"


@pytest.mark.parametrize("command", NOT_RUN)
def test_what_runs_a_command_elsewhere_is_there(command: tuple[str, str]) -> None:
    source = source_of(NOT_RUN[command])
    assert [word for word in command if f"'{word}'" not in source and word] == []


def test_a_relative_path_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra changes the working directory, and a set that was opened before lost its shards: "rebuild the index"."""
    write_set(tmp_path / "set", (3,))
    monkeypatch.chdir(tmp_path)
    opened = StreamingDataset("set/", on_error="raise")
    monkeypatch.chdir("/")
    where = r" \(a relative path, looked for in /; an absolute one stays right after os.chdir\)"
    with pytest.raises(ShardstreamError, match=f"does not have it{where}. Restore"), DataLoader(opened, 1) as loader:
        list(loader)
    with pytest.raises(ShardstreamError, match=f"no shards below set/{where}: no name"):
        StreamingDataset("set/")
    with pytest.raises(ShardstreamError, match=f"set/000000.tar: no such file{where}; check"):
        StreamingDataset("set/000000.tar")
    with pytest.raises(ShardstreamError, match=f"no shards below {tmp_path}/no: no name"):
        StreamingDataset(tmp_path / "no")


def test_a_relative_path_below_a_deleted_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saying where it was looked for raised a bare FileNotFoundError."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ShardstreamError, match=r"no shards below set/ \(a relative path, and the working folder"):
        StreamingDataset("set/")
