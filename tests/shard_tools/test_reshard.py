"""``reshard``: which samples come in which order, byte for byte; damage by name; stopping and going on."""

from __future__ import annotations

import io
import json
import random
import signal
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import shard_tools.change.sets.rewrite.shard_source as shard_source
from shard_tools import ShardWriter
from shard_tools.change.check.verify import verify
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, ReshardReport, reshard
from shard_tools.change.sets.rewrite.selection import Taken
from shard_tools.cli import cli
from shard_tools.make.convert import TargetNotEmptyError
from streaming import DataLoader, StreamingDataset
from streaming.build.batches.bad_file import BadRecord
from streaming.errors import AccessDeniedError, ChecksumError, ConfigError, DuplicateKeyError, NotFoundError
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.processes.forked import Forked, killed_until_it_is_done
from tests.support.processes.killed_programs import stopping
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import make_sample, mesh_of

COUNT = 100
LANGUAGES = ("en", "de", None)
COLUMNS = {
    "tokens": lambda sample: sample["__metadata__"]["tokens"],
    "lang": lambda sample: sample["__metadata__"]["lang"],
    "json.number": "json.number",
}


def metadata(number: int) -> dict[str, Any]:
    return {"tokens": number * 7 % 30, "lang": LANGUAGES[number % 3]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 samples of up to 30 KB in 5 shards, with columns; several spans a shard, one chunk."""
    folder = tmp_path_factory.mktemp("source")
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=20, columns=COLUMNS) as writer:
        for number in range(COUNT):
            sample = {**make_sample(number), "big": random.Random(number).randbytes(number * 300)}
            writer.write({**sample, "__metadata__": metadata(number)})
    return folder


@pytest.fixture(scope="module")
def source(data: Path) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, Any]]]:
    """The fields, and the lifted values, of each of its samples by key."""
    return dict(samples(data)), columns(data)


def samples(target: Path) -> list[tuple[str, dict[str, bytes]]]:
    """All samples in order, by Python's own tar reader."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in sorted(target.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                key, _, field = member.name.partition(".")
                reader = archive.extractfile(member)
                assert reader is not None
                found.setdefault(key, {})[field] = reader.read()
    return list(found.items())


def columns(target: Path) -> dict[str, dict[str, Any]]:
    """Lifted values by key."""
    found = {}
    for path in sorted((target / "_shardstream" / "samples").glob("*.parquet")):
        table = SampleTable.from_parquet(path.read_bytes(), str(path))
        rows = {name: column.to_pylist() for name, column in table.columns.items()}
        for i, key in enumerate(table.keys):
            found[key] = {name: values[i] for name, values in rows.items()}
    return found


def tree(target: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(target)): path.read_bytes()
        for path in sorted(target.rglob("*"))
        if path.is_file() and not path.name.startswith(".~")
    }


def run(source: Path | str, target: Path | str, **options: Any) -> ReshardReport:
    return reshard(str(source), str(target), options=ReshardOptions(**options))


def numbers(target: Path) -> list[int]:
    return [int(key) for key, _ in samples(target)]


# ------------------------------------------------------------------------------------------------ what comes when


ORDERS: list[tuple[dict[str, Any], Any]] = [
    ({}, range(COUNT)),
    ({"max_samples": 7}, range(COUNT)),
    ({"max_bytes": 50_000}, range(COUNT)),
    ({"sort": "__key__", "descending": True}, range(COUNT - 1, -1, -1)),
    ({"sort": "tokens"}, sorted(range(COUNT), key=lambda n: n * 7 % 30)),
    ({"sort": "tokens", "descending": True}, sorted(range(COUNT), key=lambda n: -(n * 7 % 30))),
    ({"sort": "lang"}, sorted(range(COUNT), key=lambda n: LANGUAGES[n % 3] or "~")),
    ({"where": "tokens >= 20 and lang = 'en'"}, [n for n in range(0, COUNT, 3) if n * 7 % 30 >= 20]),
    ({"where": "lang is null", "sort": "json.number", "descending": True}, range(98, 0, -3)),
    ({"where": "__key__ = '00042'"}, [42]),
]
BOTH: list[dict[str, Any]] = [{}, {"sort": "tokens"}]
"""Played with little memory and with much; the others take turns, except under ``--matrix``."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "expected", "memory_bytes"),
    [
        pytest.param(*order, size, marks=[] if order[0] in BOTH or (place + turn) % 2 else pytest.mark.matrix)
        for place, order in enumerate(ORDERS)
        for turn, size in enumerate((1, 1 << 30))
    ],
)
def test_exactly_these_samples_in_this_order(
    data: Path, source: Any, tmp_path: Path, options: Mapping[str, Any], expected: Any, memory_bytes: int
) -> None:
    report = run(data, tmp_path / "out", memory_bytes=memory_bytes, **options)
    (fields_of, known), found = source, samples(tmp_path / "out")
    assert [int(key) for key, _ in found] == list(expected)
    assert all(fields == fields_of[key] for key, fields in found)
    assert columns(tmp_path / "out") == {key: known[key] for key, _ in found}
    assert verify([str(tmp_path / "out")], storage=Storage(), decode=True).findings == ()
    assert (report.num_source, report.num_dropped, report.num_filtered) == (COUNT, 0, COUNT - len(found))
    assert report.num_samples == len(found)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.tar")]
    assert (report.num_shards, report.num_bytes) == (len(sizes), sum(sizes))
    assert max(sizes) <= options.get("max_bytes", 256_000_000)


@pytest.mark.parametrize("memory_bytes", [1, 200_000, 1 << 30])
def test_shuffled_shards_follow_the_seed_whatever_the_memory(data: Path, tmp_path: Path, memory_bytes: int) -> None:
    """One permutation for a seed, whatever the memory; far from the order of the source."""
    run(data, tmp_path / "a", shuffle_seed=7, max_samples=30, memory_bytes=memory_bytes)
    run(data, tmp_path / "b", shuffle_seed=7, max_samples=30)
    run(data, tmp_path / "c", shuffle_seed=8, max_samples=30)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    order = numbers(tmp_path / "a")
    assert sorted(order) == list(range(COUNT))
    assert order != numbers(tmp_path / "c")
    moved = sum(abs(place - number) for place, number in enumerate(order)) / COUNT
    assert 25 < moved < 42  # uniform: a third of 100


def test_the_same_source_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "a", max_samples=30, workers=1)
    run(f"{data}/{{000000..000004}}.tar", tmp_path / "b", max_samples=30, workers=5)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    run(tmp_path / "a", tmp_path / "again", max_samples=20)
    assert [(tmp_path / "again" / f"{i:06d}.tar").read_bytes() for i in range(5)] == [
        (data / f"{i:06d}.tar").read_bytes() for i in range(5)
    ]


def test_sources_are_merged(data: Path, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/more/{{:d}}.tar", columns={"score": lambda _: 0.5}) as writer:
        writer.write({"__key__": "new", "txt": "x"})
    run(f"{data}/::{tmp_path}/more/", tmp_path / "out")
    assert [key for key, _ in samples(tmp_path / "out")] == [f"{n:05d}" for n in range(COUNT)] + ["new"]
    lifted = columns(tmp_path / "out")
    assert lifted["new"] == {"tokens": None, "lang": None, "json.number": None, "score": 0.5}
    assert lifted["00004"] == {"tokens": 28, "lang": "de", "json.number": 4, "score": None}
    run(f"{data}/::{tmp_path}/more/", tmp_path / "sorted", sort="score")
    assert samples(tmp_path / "sorted")[0][0] == "new"
    run(f"{data}/::{tmp_path}/more/", tmp_path / "scored", where="score > 0")
    assert [key for key, _ in samples(tmp_path / "scored")] == ["new"]
    with pytest.raises(DuplicateKeyError, match="00000"):
        run(f"{data}/::{tmp_path}/out/", tmp_path / "twice")


def test_reshard_of_some_fields_keeps_these_alone(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out", fields=("cls", "vec.npy"))
    source = dict(samples(data))
    assert samples(tmp_path / "out") == [
        (key, {"cls": fields["cls"], "vec.npy": fields["vec.npy"]}) for key, fields in source.items()
    ]
    with pytest.raises(ConfigError, match="has a field 'jpg'; there are: big, bin, cls"):
        run(data, tmp_path / "none", fields=("jpg",))


def test_a_source_without_an_index_and_of_another_writer(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("./a/1.JPG", "./a/1.Cls", "./é" * 60 + ".txt"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(name), 1.5
            archive.addfile(info, io.BytesIO(name.encode()[: len(name)]))
    run(tmp_path / "in", tmp_path / "out")
    first, second = samples(tmp_path / "out")
    assert first == ("a/1", {"jpg": b"./a/1.JPG", "cls": b"./a/1.Cls"})
    assert second[0].endswith("é")


def test_a_target_inside_the_source(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(data, tmp_path / "in")
    assert "lies below" not in caplog.text
    for _ in range(2):  # the second run must not see the first one's shards as its source
        run(tmp_path / "in", tmp_path / "in" / "new", max_samples=9)
    assert numbers(tmp_path / "in" / "new") == list(range(COUNT))
    assert f"{tmp_path}/in/new lies below {tmp_path}/in: every reader of the latter" in caplog.text
    with pytest.raises(ConfigError, match="the same place"):
        run(tmp_path / "in", tmp_path / "in")


def test_the_loader_reads_it(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out", sort="tokens")
    dataset = StreamingDataset(str(tmp_path / "out"))
    assert [dataset[i]["cls"] for i in range(COUNT)] == sorted(range(COUNT), key=lambda n: n * 7 % 30)


# ------------------------------------------------------------------------------------------------ damage and lists


@pytest.fixture
def damaged(data: Path, tmp_path: Path) -> tuple[Path, list[int]]:
    """A copy in which one bit of sample 30 is flipped, and the samples that share its checksum."""
    run(data, tmp_path / "in", max_samples=20)
    path = tmp_path / "in" / "_shardstream" / "samples" / "000001.tar.parquet"
    table = SampleTable.from_parquet(path.read_bytes(), str(path))
    body = bytearray((tmp_path / "in" / "000001.tar").read_bytes())
    body[int(table.fields["big"][0][10])] ^= 1
    (tmp_path / "in" / "000001.tar").write_bytes(body)
    low, high, _ = table.widened(10, 11)
    assert 1 < high - low < 20
    return tmp_path / "in", list(range(20 + low, 20 + high))


def write_list(path: Path, *records: BadRecord) -> str:
    path.write_bytes(b"".join(record.to_line() for record in records))
    return str(path)


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 1}])
def test_damage_is_an_error_by_name(damaged: tuple[Path, list[int]], tmp_path: Path, options: Any) -> None:
    source, lost = damaged
    with pytest.raises(ChecksumError, match=r"000001\.tar, bytes \d+-\d+: CRC32C") as caught:
        run(source, tmp_path / "out", **options)
    (note,) = caught.value.__notes__
    assert f"Sample '{lost[0]:05d}' (number {lost[0] - 20} of the shard) is damaged" in note
    assert "--drop" in note
    assert not (tmp_path / "out" / "_shardstream" / "chunks.parquet").exists()


@pytest.mark.parametrize("how", ["key", "number", "bytes"])
def test_what_is_listed_is_left_out(damaged: tuple[Path, list[int]], tmp_path: Path, how: str) -> None:
    source, lost = damaged
    url = str(source / "000001.tar")
    path = source / "_shardstream" / "samples" / "000001.tar.parquet"
    starts = SampleTable.from_parquet(path.read_bytes(), str(path)).record_starts
    why: dict[str, Any] = {"url": url, "stage": "fetch", "reason": "x"}
    records = {
        "key": [BadRecord(key=f"{n:05d}", **why) for n in lost],
        "number": [BadRecord(sample_in_shard=n - 20, **why) for n in lost],
        "bytes": [BadRecord(byte_start=int(starts[lost[0] - 20]), byte_end=int(starts[lost[-1] - 20]) + 1, **why)],
    }[how]
    bad = write_list(tmp_path / "bad.jsonl", *records, BadRecord(key="gone", **why))
    report = run(source, tmp_path / "out", drop=(bad,))
    assert numbers(tmp_path / "out") == [n for n in range(COUNT) if n not in lost]
    assert (report.num_dropped, report.num_not_found, report.num_samples) == (len(lost), 1, COUNT - len(lost))


def test_a_neighbor_under_the_same_checksum_cannot_be_proven(damaged: tuple[Path, list[int]], tmp_path: Path) -> None:
    source, lost = damaged
    records = [BadRecord(url=f"{source}/000001.tar", key="00030", stage="fetch", reason="x")]
    with pytest.raises(ChecksumError, match=r"000001\.tar"):
        run(source, tmp_path / "out", drop=(write_list(tmp_path / "bad.jsonl", *records),))
    assert len(lost) > 1


def test_large_members_are_proven_alone(tmp_path: Path) -> None:
    """What a loader lists of a span with one damaged large member is enough: its neighbors are carried over."""
    with ShardWriter(f"{tmp_path}/in/{{:d}}.tar") as writer:
        for number in range(9):
            writer.write({"__key__": f"{number}", "cls": number, "bin": bytes([number]) * (number % 3 // 2 * 200_000)})
    body = bytearray((tmp_path / "in" / "0.tar").read_bytes())
    body[body.index(bytes([5]) * 100)] ^= 1
    (tmp_path / "in" / "0.tar").write_bytes(body)
    bad = tmp_path / "bad.jsonl"
    dataset = StreamingDataset(f"{tmp_path}/in/", max_bad_samples=1, bad_samples_file=bad)
    with DataLoader(dataset, batch_size=9, device_mesh=mesh_of(1, 0)) as loader:
        next(iter(loader))
    assert [BadRecord.from_line(line).key for line in bad.read_bytes().splitlines()] == ["5"]
    run(tmp_path / "in", tmp_path / "out", drop=(str(bad),))
    assert [(int(key), fields["cls"]) for key, fields in samples(tmp_path / "out")] == [
        (number, b"%d" % number) for number in range(9) if number != 5
    ]


def test_from_verify_to_a_clean_set(damaged: tuple[Path, list[int]], tmp_path: Path) -> None:
    source, lost = damaged
    (source / "000004.tar").unlink()
    wide, narrow = tmp_path / "wide.jsonl", tmp_path / "narrow.jsonl"
    assert command("verify", source, "--write-bad", wide).exit_code == 1
    assert command("verify", "--bad", wide, "--write-bad", narrow).exit_code == 1
    for name, bad in (("wide", wide), ("narrow", narrow)):
        ran = command("reshard", f"{source}/{{000000..000004}}.tar", tmp_path / name, "--drop", bad, "--json")
        assert ran.exit_code == 0, ran.output
        told = json.loads(ran.stdout)
        assert told["num_source"] == COUNT
        assert told["num_dropped"] + told["num_samples"] == COUNT
        assert verify([str(tmp_path / name)], storage=Storage(), decode=True).findings == ()
    assert numbers(tmp_path / "wide") == [*range(20), *range(40, 80)]  # verify names chunks, verify --bad samples
    assert numbers(tmp_path / "narrow") == [n for n in range(80) if n not in lost]


def test_reshard_that_keeps_nothing_is_refused_and_writes_nothing(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tokens > 1000' keeps none of the 100 samples"):
        run(data, tmp_path / "out", where="tokens > 1000")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"where": "tokenz > 3"}, "no column 'tokenz'.*there are: __key__, json.number, lang, tokens"),
        ({"where": "tokens > '3'"}, "cannot compare"),
        ({"where": "tokens >"}, "where: expected"),
        ({"sort": "tokenz"}, "--sort: no column 'tokenz'.*__key__"),
        ({"sort": "tokens", "shuffle_seed": 1}, "cannot be combined"),
        ({"descending": True}, "--sort"),
        ({"fields": ()}, "at least one field"),
    ],
)
def test_options_that_cannot_work(data: Path, tmp_path: Path, options: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(data, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_columns_that_do_not_compare(data: Path, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/more/{{:d}}.tar", columns={"tokens": lambda _: "many"}) as writer:
        writer.write({"__key__": "new", "txt": "x"})
    with pytest.raises(ConfigError, match="column 'tokens' cannot be compared"):
        run(f"{data}/::{tmp_path}/more/", tmp_path / "out", sort="tokens")


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        run(tmp_path / "nothing", tmp_path / "out")


# ------------------------------------------------------------------------------------------------ stop and go on

STOPPER = stopping("""
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
reshard(sys.argv[1], sys.argv[2], options=ReshardOptions(max_samples=20, shuffle_seed=3, where="tokens < 25"))
""")


@pytest.mark.thorough
@pytest.mark.parametrize("stop_at", [0, 1, 21, 45, 79])
def test_killed_and_gone_on_with(data: Path, tmp_path: Path, forked: Forked, stop_at: int) -> None:
    options: dict[str, Any] = {"max_samples": 20, "shuffle_seed": 3, "where": "tokens < 25"}
    run(data, tmp_path / "calm", **options)
    arguments = (str(data), str(tmp_path / "out"), str(stop_at))
    assert forked.start(STOPPER, *arguments, output=tmp_path / "said").wait() == -signal.SIGKILL
    report = run(data, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")
    assert report.num_resumed_samples == max(0, (stop_at - 1) // 20 * 20 - 20)


COMMAND = "from shard_tools.cli import cli; cli(prog_name='shard_tools')"


@pytest.mark.thorough
def test_killed_at_random_moments(data: Path, tmp_path: Path, forked: Forked) -> None:
    """SIGKILL from outside, whenever; again and again until it is done."""
    options = ["--max-samples", "3", "--shuffle", "--seed", "5", "--memory", "100KB"]
    assert command("reshard", data, tmp_path / "calm", *options).exit_code == 0
    arguments = ("reshard", str(data), str(tmp_path / "out"), *options)
    assert killed_until_it_is_done(forked, COMMAND, *arguments, output=tmp_path / "said")
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


def test_other_work_is_not_gone_on_with(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out", max_samples=20)
    bad = write_list(tmp_path / "bad", BadRecord(url=f"{data}/000000.tar", key="00003", stage="fetch", reason="x"))
    for options in ({"max_samples": 21}, {"max_samples": 20, "shuffle_seed": 1}, {"max_samples": 20, "drop": (bad,)}):
        with pytest.raises(TargetNotEmptyError, match="another conversion"):
            run(data, tmp_path / "out", **options)
    run(data, tmp_path / "out", max_samples=20, drop=(bad,), overwrite=True)
    assert len(samples(tmp_path / "out")) == COUNT - 1


def test_other_samples_are_other_work() -> None:
    """Also where the numbers of those that are taken, shard after shard, are the same ones."""

    def taken(*rows: list[int]) -> str:
        parts = tuple(SimpleNamespace(rows=np.array(some)) for some in rows)
        more = {"columns": (), "fields": (), "num_source": 9, "num_dropped": 0, "num_filtered": 0, "not_found": ()}
        return Taken(parts=parts, **more).digest()  # type: ignore[arg-type]

    assert len({taken([0, 1], [2]), taken([0], [1, 2]), taken([0, 1, 2], []), taken([], [0, 1, 2])}) == 4


def test_all_that_changes_the_bytes_is_part_of_the_work() -> None:
    plain: dict[str, Any] = {"sort": "number", "max_samples": 20}
    others = (
        {"sort": None},
        {"descending": True},
        {"where": "number = 1"},
        {"fields": ("txt",)},
        {"dedupe": True},
        {"key_prefix": "x"},
        {"max_samples": 21},
        {"max_bytes": 9},
        {"sort": None, "shuffle_seed": 1},
    )
    works = [ReshardOptions(**{**plain, **other}).identity() for other in ({}, *others)]
    assert [(number, works.index(one)) for number, one in enumerate(works) if one in works[:number]] == []


@pytest.mark.thorough
def test_a_target_that_fails_leaves_whole_shards_and_is_gone_on_with(
    data: Path, tmp_path: Path, mini_s3: MiniS3Server
) -> None:
    run(data, tmp_path / "calm", max_samples=10)
    calm = tree(tmp_path / "calm")
    bucket = mini_s3.create_bucket(fresh_name())
    options = ReshardOptions(max_samples=10)
    storage = Storage(mini_s3.storage_options)

    def there() -> dict[str, bytes]:
        return {info.url.removeprefix(f"{bucket}/"): bytes(storage.read(info.url)) for info in storage.list(bucket)}

    with FaultProxy(mini_s3.port) as proxy:
        store = {**mini_s3.storage_options, "endpoint_url": proxy.url}
        for name in ("000005.tar", "samples/000006.tar.parquet", "chunks.parquet"):
            proxy.add(Fault(kind="status", status=403, method="PUT", path=name))
            with pytest.raises(AccessDeniedError):
                reshard(str(data), bucket, options=options, storage_options=store)
            half = there()
            assert "_shardstream/chunks.parquet" not in half
            assert all(calm[name] == body for name, body in half.items() if name.endswith((".tar", ".parquet")))
        proxy.add(Fault(kind="reset_before", method="PUT", path="000009.tar"))
        report = reshard(str(data), bucket, options=options, storage_options=store)
    assert report.num_resumed_samples == 90
    assert there() == calm


# ------------------------------------------------------------------------------------------------ what is read


def test_only_what_is_taken_is_read_and_memory_is_bounded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_pieces, asked = shard_source.read_pieces, []

    def recorded(storage: Storage, wanted: Any, samples: Any) -> Any:
        asked.append(wanted)
        return read_pieces(storage, wanted, samples)

    monkeypatch.setattr(shard_source, "read_pieces", recorded)
    run(data, tmp_path / "one", where="__key__ = '00090'")
    (wanted,) = asked
    assert wanted.url == str(data / "000004.tar")
    assert wanted.num_samples < 20
    asked.clear()
    run(data, tmp_path / "all")
    assert [one.num_samples for one in asked] == [20] * 5
    asked.clear()
    monkeypatch.setattr(shard_source, "_RUN_BYTES", 150_000)
    run(data, tmp_path / "small")
    assert sum(one.num_samples for one in asked) == COUNT
    assert all(one.num_bytes <= 150_000 for one in asked)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def test_as_a_command(data: Path, tmp_path: Path) -> None:
    ran = command("reshard", data, tmp_path / "out", "--where", "lang = 'en'", "--fields", "cls,.txt")
    assert ran.exit_code == 0, ran.output
    assert "100 samples in the source, 0 dropped, 66 filtered out" in ran.stdout
    assert samples(tmp_path / "out")[1] == ("00003", {"cls": b"3", "txt": b"text of 3"})
    assert command("reshard", data, tmp_path / "small", "--max-bytes", "50kB").exit_code == 0
    sizes = [path.stat().st_size for path in (tmp_path / "small").glob("*.tar")]
    assert len(sizes) > 3
    assert max(sizes) <= 50_000
    for wrong in (["--seed", "3"], ["--sort", "nothing"], ["--shuffle", "--sort", "tokens"], ["--where", "?"]):
        ran = command("reshard", data, tmp_path / "wrong", *wrong)
        assert ran.exit_code == 2, ran.output
        assert "Traceback" not in ran.output


# ------------------------------------------------------------------------------- late columns, views, samples that lack


def test_late_columns_select_sort_and_go_along(tmp_path: Path) -> None:
    """Score, then write out what is kept: the error named ``column add``, just done, as the cure."""
    source, key_of = tmp_path / "in", "{:05d}".format
    with ShardWriter(f"{source}/{{:06d}}.tar", max_samples=12, columns={"n": "json.n"}) as writer:
        for n in range(40):
            writer.write({"__key__": key_of(n), "json": {"n": n}} | ({"txt": f"t{n}"} if n % 4 else {}))
    (tmp_path / "scores.csv").write_text("key,score\n" + "".join(f"{key_of(n)},{n * 7 % 40}\n" for n in range(40)))
    assert command("column", "add", source, "score", "--from", tmp_path / "scores.csv", "--on", "key").exit_code == 0
    assert command("view", "save", source, "good", "--where", "score >= 20").exit_code == 0
    good = [n for n in range(40) if n * 7 % 40 >= 20]
    report = run(source, tmp_path / "a", where="score >= 20", columns=("score",))
    assert (numbers(tmp_path / "a"), report.num_filtered) == (good, 20)
    assert columns(tmp_path / "a") == {key_of(n): {"n": n, "score": n * 7 % 40} for n in good}
    run(source, tmp_path / "b", view="good", where="n < 30", sort="score", descending=True)
    assert numbers(tmp_path / "b") == sorted([n for n in good if n < 30], key=lambda n: -(n * 7 % 40))
    assert columns(tmp_path / "b")[key_of(good[0])] == {"n": good[0]}
    for options, problem in (
        ({"where": "skore > 1"}, "no column 'skore'.*did you mean 'score'"), ({"view": "bad"}, "there are: good"),
        ({"columns": ("skore",)}, "--columns: no column 'skore'"), ({"sort": "skore"}, "--sort: no column 'skore'"),
        ({"drop_missing": ("jpg",)}, "--drop-missing: no sample of .* has a field 'jpg'; there are: json, txt"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            run(source, tmp_path / "c", **options)
    with pytest.raises(ConfigError, match="--drop-missing and --dedupe cannot be combined"):
        ReshardOptions(drop_missing=("txt",), dedupe=True)
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match=r"10 samples without any of the fields txt, first '00000'.*--drop-missing"):
        run(source, tmp_path / "c", fields=("txt",))
    told = command("reshard", source, tmp_path / "d", "--fields", "txt", "--drop-missing", ".txt", "--sort", "score")
    assert "10 without a field of --drop-missing" in told.stdout
    assert numbers(tmp_path / "d") == sorted([n for n in range(40) if n % 4], key=lambda n: n * 7 % 40)


def test_another_version_of_a_late_column_is_other_work(tmp_path: Path) -> None:
    source = tmp_path / "in"
    with ShardWriter(f"{source}/{{:06d}}.tar") as writer:
        for n in range(9):
            writer.write({"__key__": f"{n}", "txt": "x"})
    for sign in ("-", ""):
        (tmp_path / "s.csv").write_text("key,score\n" + "".join(f"{n},{sign}{n}\n" for n in range(9)))
        more = () if sign else ("--overwrite",)
        assert (
            command("column", "add", source, "score", "--from", tmp_path / "s.csv", "--on", "key", *more).exit_code == 0
        )
        if sign:
            run(source, tmp_path / "out", sort="score")
    with pytest.raises(TargetNotEmptyError, match="late"):
        run(source, tmp_path / "out", sort="score")
