"""``diff``: against brute force over random sets and edits; what is read and said; on stores, without an index."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
from shard_tools.cli import cli
from shard_tools.look.diff import read
from shard_tools.look.diff.compare import DiffOptions, DiffReport, diff
from streaming.errors import ChecksumError
from streaming.shards.catalog.build import index_shards
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.large_members import LARGE_BYTES
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name

pytestmark = pytest.mark.thorough

Fields = Mapping[str, bytes]
Samples = Sequence[tuple[str, Fields]]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["diff", *map(str, arguments)], prog_name="shard_tools")


def as_json(*arguments: object, code: int) -> dict[str, Any]:
    """What the command prints for programs."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def compared(a: Path | str, b: Path | str, storage: Storage | None = None, **options: Any) -> DiffReport:
    return diff(str(a), str(b), storage=storage or Storage(), options=DiffOptions(**options))


def write(folder: Path | str, samples: Samples, per_shard: int = 20, **options: Any) -> None:
    """Shards with an index, as our writer makes them."""
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=per_shard, **options) as writer:
        for key, fields in samples:
            writer.write({"__key__": key, **fields})


def write_tars(folder: Path, samples: Samples, per_shard: int, *, seconds: int = 0, gzip: bool = False) -> None:
    """Shards as another program makes them: without an index, with times in the headers, perhaps compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(0, len(samples), per_shard)):
        path = folder / f"{shard:06d}.tar{'.gz' if gzip else ''}"
        with tarfile.open(path, "w:gz" if gzip else "w", format=tarfile.USTAR_FORMAT) as archive:
            for key, fields in samples[first : first + per_shard]:
                for name, data in fields.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size, member.mtime = len(data), seconds
                    archive.addfile(member, io.BytesIO(data))


def index(folder: Path, samples_in_chunk: int) -> None:
    urls = sorted(map(str, folder.glob("*.tar")))
    index_shards(Storage(), urls, duplicate_keys="keep", rule=ChunkRule(min_bytes=1, min_samples=samples_in_chunk))


def brute(a: Samples, b: Samples) -> dict[str, Any]:
    """What differs, by comparing all bytes: copies of one key match by content first, then in order."""
    copies: tuple[dict[str, list[tuple[int, Fields]]], ...] = (defaultdict(list), defaultdict(list))
    for by_key, samples in zip(copies, (a, b), strict=True):
        for number, (key, fields) in enumerate(samples):
            by_key[key].append((number, fields))
    same, only, changed = 0, ([], []), []  # type: ignore[var-annotated]
    for key in copies[0].keys() | copies[1].keys():
        ones, others = list(copies[0][key]), list(copies[1][key])
        for one in list(ones):
            match = next((other for other in others if other[1] == one[1]), None)
            if match is not None:
                ones.remove(one)
                others.remove(match)
                same += 1
        for (number, fields), (_, more) in zip(ones, others, strict=False):
            names = {name for name in fields.keys() | more.keys() if fields.get(name) != more.get(name)}
            changed.append((number, {"key": key, "fields": sorted(names)}))
        only[0].extend((number, key) for number, _ in ones[len(others) :])
        only[1].extend((number, key) for number, _ in others[len(ones) :])
    first, second, third = ([entry for _, entry in sorted(some, key=lambda one: one[0])] for some in (*only, changed))
    return {"only_a": first, "only_b": second, "changed": third, "same": same}


def content(random_: random.Random, number: int) -> dict[str, bytes]:
    """Small fields, empty ones, now and then a large one, and a field that some samples lack."""
    fields = {"txt": random_.randbytes(random_.choice((0, 1, 40, 3000, 70_000))), "cls": b"%d" % (number % 3)}
    if random_.random() < 0.15:
        fields["bin"] = random_.randbytes(LARGE_BYTES + random_.randrange(1000))
    elif random_.random() < 0.5:
        fields["bin"] = random_.randbytes(20)
    return fields


def edited(samples: Samples, random_: random.Random, num_edits: int, *, repeats: bool) -> Samples:
    """Some samples dropped, added, changed in a field that keeps its size or not; perhaps copies of keys."""
    found = [(key, dict(fields)) for key, fields in samples]
    for edit in range(num_edits):
        place = random_.randrange(len(found)) if found else 0
        kind = random_.choice(("drop", "add", "flip", "grow", "lose", "gain", *(("copy",) if repeats else ())))
        if kind == "add" or not found:
            found.insert(place, (f"new{edit}", content(random_, edit)))
            continue
        key, fields = found[place]
        name = random_.choice(sorted(fields))
        if kind == "drop":
            del found[place]
        elif kind == "copy":
            found.insert(random_.randrange(len(found)), (key, dict(fields) if edit % 2 else content(random_, edit)))
        elif kind == "flip" and fields[name]:
            fields[name] = bytes([fields[name][0] ^ 1]) + fields[name][1:]
        elif kind == "lose" and len(fields) > 1:
            del fields[name]
        elif kind == "gain":
            fields["more"] = b"more"
        else:
            fields[name] += b"+"
    return found


@given(
    seed=st.integers(0, 2**32),
    num_samples=st.integers(1, 60),
    num_edits=st.integers(0, 6),
    order=st.sampled_from(("same", "same", "shuffled")),
    forms=st.tuples(*[st.sampled_from(("writer", "writer", "foreign", "tars", "gz"))] * 2),
    per_shard=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    memory_bytes=st.sampled_from((1 << 30, 1 << 16)),
    repeats=st.booleans(),
)
def test_random_edits_are_found_as_brute_force_finds_them(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_samples: int, num_edits: int, order: str,
    forms: tuple[str, str], per_shard: tuple[int, int], memory_bytes: int, repeats: bool,
) -> None:  # fmt: skip
    """Other shards, other orders, other programs, compressed or not, in memory or in files: the same answer."""
    random_, folder = random.Random(seed), tmp_path_factory.mktemp("diff")
    a: Samples = [(f"k{number:03d}", content(random_, number)) for number in range(num_samples)]
    if repeats:
        a = edited(a, random_, 3, repeats=True)
    b = edited(a, random_, num_edits, repeats=repeats)
    if order == "shuffled":
        b = random_.sample(b, len(b))
    a, b = _apart(a), _apart(b)
    for name, samples, form, size in zip("ab", (a, b), forms, per_shard, strict=True):
        if form == "writer" and len({key for key, _ in samples}) == len(samples) and samples:
            write(folder / name, samples, size)
            continue
        write_tars(folder / name, samples, size, seconds=len(name), gzip=form == "gz")
        if not samples:
            (folder / name / "0.tar").write_bytes(bytes(1024))
        if form in {"writer", "foreign"}:
            index(folder / name, random_.randrange(1, 9))
    report = compared(f"{folder}/a/", f"{folder}/b/", memory_bytes=memory_bytes)
    found = report.as_dict()
    expected = brute(a, b)
    if repeats:  # which of several equal copies has no partner is not defined, and so its place in the lists
        found |= {name: sorted(found[name]) for name in ("only_a", "only_b")}
        expected |= {name: sorted(expected[name]) for name in ("only_a", "only_b")}
        keys = ([one["key"] for one in some["changed"]] for some in (found, expected))
        assert Counter(next(keys)) == Counter(next(keys))
        expected["changed"] = found["changed"]
    assert {name: found[name] for name in expected} == expected
    assert report.equal == (expected["same"] == len(a) == len(b))
    assert report.num_changed == len(expected["changed"])
    assert report.fields == Counter(name for one in expected["changed"] for name in one["fields"])
    assert report.unindexed == tuple(side for side, form in zip("AB", forms, strict=True) if form in {"tars", "gz"})


def _apart(samples: Samples) -> Samples:
    """The same without samples of one key side by side, which a tar joins to one."""
    found: list[tuple[str, Fields]] = []
    for key, fields in samples:
        if not found or found[-1][0] != key:
            found.append((key, fields))
    return found


@pytest.fixture(scope="module")
def samples() -> Samples:
    random_ = random.Random(3)
    return [(f"k{number:03d}", {"txt": random_.randbytes(2000), "cls": b"1"}) for number in range(400)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, samples: Samples) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write(folder, samples, 50)
    return folder


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise AssertionError("bytes of shards were read")

    monkeypatch.setattr(read, "_sum_run", refuse)


@pytest.mark.parametrize("per_shard", [20, 150, 1000])
def test_a_set_in_other_shards_is_compared_by_its_index_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_shard: int
) -> None:
    """Where the order is kept, joined checksums tell."""
    reshard(f"{source}/", f"{tmp_path}/b/", options=ReshardOptions(max_samples=per_shard, max_bytes=1 << 30))
    forbid_reading(monkeypatch)
    report = compared(f"{source}/", f"{tmp_path}/b/")
    assert (report.equal, report.same, report.num_read_bytes) == (True, 400, 0)
    assert not report.shards.is_none
    result = run(f"{source}/", f"{tmp_path}/b/")
    assert result.exit_code == 0
    assert result.stdout.startswith("equal: 400 samples the same\n")


def test_of_a_small_change_little_is_read(source: Path, tmp_path: Path, samples: Samples) -> None:
    """One span of either set, not the shard."""
    b = [(key, {**fields, "cls": b"2"} if key == "k123" else fields) for key, fields in samples]
    write(tmp_path / "b", b, 50)
    report = compared(f"{source}/", f"{tmp_path}/b/")
    assert [(one.key, one.fields) for one in report.changed] == [("k123", ("cls",))]
    assert 0 < report.num_read_bytes <= 2 * (64 << 10) + 2 * 8192
    assert report.shards.replaced == ("000002.tar",)
    assert report.shards.same == 7


def test_large_fields_are_compared_by_their_own_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order and any shards."""
    random_ = random.Random(5)
    a = [(f"k{number}", {"jpg": random_.randbytes(LARGE_BYTES + number)}) for number in range(20)]
    b = random_.sample(a, len(a))
    key, fields = b[7]
    b[7] = key, {"jpg": fields["jpg"][:-1] + bytes([fields["jpg"][-1] ^ 1])}
    write(tmp_path / "a", a, 7)
    write(tmp_path / "b", b, 4)
    forbid_reading(monkeypatch)
    report = compared(f"{tmp_path}/a/", f"{tmp_path}/b/")
    assert [(one.key, one.fields) for one in report.changed] == [(key, ("jpg",))]
    assert report.same == 19


def test_versions_of_a_set_are_compared_shard_by_shard(
    source: Path, tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard more, a shard less, one renamed to the front: no byte is read, and of equal shards no sample table."""
    write(tmp_path / "b", samples[50:400], 50)
    with ShardWriter(f"{tmp_path}/b/more-{{:06d}}.tar") as writer:
        writer.write({"__key__": "extra", "txt": b"1"})
    forbid_reading(monkeypatch)
    report = compared(f"{source}/", f"{tmp_path}/b/")
    assert (report.num_only_a, report.only_b, report.same) == (50, ("extra",), 350)
    assert report.only_a == tuple(key for key, _ in samples[:50])
    assert report.shards.same == 7
    assert report.shards.only_b == ("more-000000.tar",)


def test_equal_shards_are_counted_as_often_as_they_are_there(tmp_path: Path) -> None:
    """The same shard twice under two names, against once."""
    samples = [(f"k{number}", {"txt": b"%d" % number}) for number in range(5)]
    for name in ("a", "b"):
        write_tars(tmp_path / name, samples, 5)
    (tmp_path / "a" / "more.tar").write_bytes((tmp_path / "a" / "000000.tar").read_bytes())
    for name in ("a", "b"):
        index(tmp_path / name, 2)
    report = compared(f"{tmp_path}/a/", f"{tmp_path}/b/")
    assert (report.same, report.num_only_a, report.num_only_b) == (5, 5, 0)
    report = compared(f"{tmp_path}/b/", f"{tmp_path}/a/")
    assert (report.same, report.only_a, report.only_b) == (5, (), tuple(key for key, _ in samples))


def test_beside_a_changed_large_field_small_ones_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of their span has a checksum of its own."""
    a = [(f"k{number}", {"txt": b"%d" % number, "mp4": bytes([number]) * LARGE_BYTES}) for number in range(6)]
    b = [(key, {**fields, "mp4": fields["mp4"][:-1] + b"+"} if key == "k3" else fields) for key, fields in a]
    write(tmp_path / "a", a, 3)
    write(tmp_path / "b", b, 3)
    forbid_reading(monkeypatch)
    report = compared(f"{tmp_path}/a/", f"{tmp_path}/b/")
    assert ([(one.key, one.fields) for one in report.changed], report.same) == ([("k3", ("mp4",))], 5)


def test_columns_are_compared_wherever_they_are_kept(tmp_path: Path, samples: Samples) -> None:
    """Late columns and those of the tables: added, removed, changed; one that only moved has not changed."""
    scores = {key: number / 7 for number, (key, _) in enumerate(samples)}
    write(tmp_path / "a", samples, 50, columns={"score": lambda sample: scores[sample["__key__"]], "lang": _lang})
    write(tmp_path / "b", samples, 80, columns={"lang": lambda sample: "de" if sample["__key__"] == "k007" else "en"})
    rows = "".join(json.dumps({"key": key, "value": value, "n": 1}) + "\n" for key, value in scores.items())
    (tmp_path / "rows.jsonl").write_text(rows)
    for name, value in (("score", "value"), ("rank", "n")):
        added = ["column", "add", f"{tmp_path}/b/", name, "--from", f"{tmp_path}/rows.jsonl", "--on", "key", "--value"]
        assert CliRunner().invoke(cli, [*added, value]).exit_code == 0
    found = as_json(f"{tmp_path}/a/", f"{tmp_path}/b/", code=1)
    assert found["columns"] == {"only_a": [], "only_b": ["rank"], "changed": {"lang": 1}}
    assert (found["same"], found["changed"], found["equal"]) == (400, [], False)
    text = run(f"{tmp_path}/a/", f"{tmp_path}/b/").stdout
    assert text.startswith("column rank added; column lang: 1 other values; 400 samples the same\n")


def _lang(_: Mapping[str, Any]) -> str:
    return "en"


def test_the_same_late_column_of_two_copies_is_not_read(source: Path, tmp_path: Path, samples: Samples) -> None:
    """Columns of one version are the same; another version with the same values is, too."""
    rows = "".join(json.dumps({"key": key, "value": 1}) + "\n" for key, _ in samples)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "again.jsonl").write_text("\n" + rows)
    for name, table in (("a", "rows"), ("b", "again")):
        write(tmp_path / name, samples, 50)
        added = ["column", "add", f"{tmp_path}/{name}/", "value", "--from", f"{tmp_path}/{table}.jsonl", "--on", "key"]
        assert CliRunner().invoke(cli, added).exit_code == 0
    assert compared(f"{tmp_path}/a/", f"{tmp_path}/b/").equal
    report = compared(f"{source}/", f"{tmp_path}/b/")
    assert report.columns is not None
    assert (report.equal, report.columns.only_b) == (False, ("value",))


def test_lists_are_limited_and_numbers_are_of_all(source: Path, tmp_path: Path, samples: Samples) -> None:
    """The first ones, in the order of the set."""
    b = [(key if int(key[1:]) % 2 else f"new{key}", {**fields, "txt": b"x"}) for key, fields in samples]
    write(tmp_path / "b", b, 50)
    found = as_json(f"{source}/", f"{tmp_path}/b/", "--limit", 3, code=1)
    assert found["only_a"] == ["k000", "k002", "k004"]
    assert found["only_b"] == ["newk000", "newk002", "newk004"]
    assert found["changed"] == [{"key": key, "fields": ["txt"]} for key in ("k001", "k003", "k005")]
    assert (found["num_only_a"], found["num_only_b"], found["num_changed"], found["same"]) == (200, 200, 200, 0)
    text = run(f"{source}/", f"{tmp_path}/b/", "--limit", 3).stdout
    assert "200 samples only in A, 200 samples only in B, 200 changed: field txt of 200" in text
    assert "only in A: k000, k002, k004, … 197 more" in text
    assert "changed: k001 (txt), k003 (txt), k005 (txt), … 197 more" in text


def test_keys_that_repeat_are_said(tmp_path: Path) -> None:
    """Copies of one key, of which one more is only in B."""
    a = [("k", {"txt": b"1"}), ("m", {"txt": b"2"}), ("k", {"txt": b"3"})]
    write_tars(tmp_path / "a", a, 10)
    write_tars(tmp_path / "b", [("k", {"txt": b"3"}), ("m", {"txt": b"2"}), *a[:2], ("k", {"txt": b"4"})], 10)
    result = run(f"{tmp_path}/a/", f"{tmp_path}/b/")
    assert result.exit_code == 1
    assert "2 samples only in B; 3 samples the same" in result.stdout
    assert "A has 2 samples whose key occurs more than once" in result.stderr
    assert "B has 5 samples whose key occurs more than once" in result.stderr
    assert "without an index, and so read whole, without columns: A and B" in result.stderr


def test_damage_is_an_error_and_no_difference(source: Path, tmp_path: Path, samples: Samples) -> None:
    """A flipped byte in a span that has to be read."""
    write(tmp_path / "b", [(key, {**fields, "cls": b"2"}) for key, fields in samples], 50)
    path = tmp_path / "b" / "000003.tar"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"000003\.tar, bytes"):
        compared(f"{source}/", f"{tmp_path}/b/")
    result = run(f"{source}/", f"{tmp_path}/b/")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "shard_tools verify" in result.stderr


def test_sets_on_two_stores_are_compared(source: Path, mini_s3: MiniS3Server, samples: Samples) -> None:
    """A local set with one on S3, whose options are for B alone; of the shards on S3 only spans are asked for."""
    bucket = mini_s3.create_bucket(fresh_name())
    b = [(key, {**fields, "cls": b"2"} if key == "k123" else fields) for key, fields in samples]
    write(f"{bucket}/b", b, 50, storage_options=mini_s3.storage_options)
    mini_s3.clear_log()
    options = [word for name, value in mini_s3.storage_options.items() for word in ("--option-b", f"{name}={value}")]
    found = as_json(f"{source}/", f"{bucket}/b/", *options, code=1)
    assert found["changed"] == [{"key": "k123", "fields": ["cls"]}]
    reads = [entry for entry in mini_s3.log() if entry["method"] == "GET" and str(entry["path"]).endswith(".tar")]
    assert len(reads) == 1
    assert all(int(str(entry["bytes"])) < 80_000 for entry in reads)


@pytest.mark.parametrize("arguments", [("{a}",), ("{a}", "{a}", "--limit", "-1"), ("{a}", "{a}", "--unknown")])
def test_wrong_usage_ends_with_2(source: Path, arguments: tuple[str, ...]) -> None:
    assert run(*(one.format(a=source) for one in arguments)).exit_code == 2


def test_a_set_that_is_not_there_is_a_failure(source: Path, tmp_path: Path) -> None:
    result = run(f"{source}/", f"{tmp_path}/nothing/")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "nothing" in result.stderr


def test_nothing_is_left_of_temporary_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything written beside the sets."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(source.rglob("*"))
    reshard(f"{source}/", f"{tmp_path}/b/", options=ReshardOptions(shuffle_seed=1, max_bytes=1 << 30))
    there = sorted(tmp_path.rglob("*"))
    assert compared(f"{source}/", f"{tmp_path}/b/", memory_bytes=1 << 14).equal
    assert (sorted(source.rglob("*")), sorted(tmp_path.rglob("*"))) == (before, there)
