"""``stats``: numbers against brute force, every surprise with a set that has it and one that has not, pages, resume."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import wave
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.show.overview.cards import stats_page
from shard_tools.look.stats import journal, sketches
from shard_tools.look.stats import run as stats_run
from shard_tools.look.stats.report import StatsReport
from shard_tools.look.stats.run import StatsOptions, stats
from shard_tools.look.stats.shard import ShardReader, StatsPart
from shard_tools.look.stats.sketches import Distribution, Repeats, Top
from shard_tools.look.stats.survey import DEFAULT_LIMIT, choose
from shard_tools.running.progress import Progress
from streaming import StreamingDataset
from streaming.errors import ConfigError, IndexMissingError, StorageError
from streaming.storage import Storage
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.browser import Tab
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.tars import write_tar

pytestmark = pytest.mark.thorough

Sample = dict[str, Any]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["stats", *map(str, arguments)], prog_name="shard_tools")


def report_of(folder: Path | str, **options: Any) -> StatsReport:
    chosen = StatsOptions(**{"limit": None, **options})
    return stats([str(folder)], storage=Storage(), options=chosen)


def write(folder: Path | str, samples: Iterable[Sample], *, per_shard: int = 1000, columns: Any = None) -> Path:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=per_shard, columns=columns) as writer:
        for sample in samples:
            writer.write(sample)
    return Path(folder)


def encoded(mode: str = "RGB", size: tuple[int, int] = (8, 6), form: str = "JPEG", orientation: int = 1) -> bytes:
    out = io.BytesIO()
    exif = Image.Exif()
    exif[274] = orientation
    Image.new(mode, size).save(out, form, exif=exif)
    return out.getvalue()


def giant_png(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes whose header promises so many pixels."""
    small = encoded("RGB", (1, 1), "PNG")
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + small[24:29]
    return small[:12] + head + zlib.crc32(head).to_bytes(4, "big") + small[33:]


# --------------------------------------------------------------------------------------------------------- sketches


@given(st.lists(st.lists(st.integers(-(10**12), 10**12), max_size=40), max_size=6))
def test_spread_of_parts_is_the_spread_of_all(parts: list[list[int]]) -> None:
    draw = np.random.default_rng(0)
    joined = Distribution()
    for part in parts:
        one = Distribution()
        one.add(np.array(part, np.int64), draw)
        joined.merge(Distribution.of_dict(json.loads(json.dumps(one.as_dict()))))
    values = [value for part in parts for value in part]
    told = joined.told()
    assert joined.num == len(values)
    if values:
        assert (told["min"], told["max"]) == (min(values), max(values))
        assert told["p50"] == pytest.approx(statistics.median(values))
        assert told["mean"] == pytest.approx(statistics.fmean(values))
        assert sum(share for _, _, share in joined.bins()) == pytest.approx(1)
    else:
        assert told == {"min": None, "p50": None, "max": None, "mean": None}
        assert joined.bins() == []


def test_spread_beyond_its_capacity_estimates_quantiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "VALUES", 4096)
    draw = np.random.default_rng(1)
    joined = Distribution()
    for first in range(0, 100_000, 5000):
        one = Distribution()
        one.add(np.arange(first, first + 5000), draw)
        joined.merge(one)
    told = joined.told()
    assert (joined.num, told["min"], told["max"], told["mean"]) == (100_000, 0, 99_999, 49_999.5)
    assert told["p50"] == pytest.approx(50_000, abs=100_000 * 4 * 0.5 / 4096**0.5)
    assert len(joined.as_dict()["values"]) < 4096 * 12


def test_spread_counts_what_is_not_finite_apart() -> None:
    spread = Distribution()
    spread.add(np.array([1.0, np.nan, np.inf, 3.0]), np.random.default_rng(0))
    assert (spread.num, spread.num_not_finite, spread.told()["mean"]) == (2, 2, 2.0)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=30), max_size=6), st.integers(2, 9))
def test_top_is_exact_within_its_capacity_and_says_by_how_much_it_errs(parts: list[list[str]], capacity: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sketches, "WORDS", capacity)
        joined = Top()
        for part in parts:
            one = Top()
            one.add(pa.array(part, pa.string()))
            joined.merge(Top.of_dict(json.loads(json.dumps(one.as_dict()))))
    true = Counter(word for part in parts for word in part)
    assert joined.num == sum(true.values())
    assert len(joined.counts) <= capacity
    for word, count in true.items():
        assert count - joined.lost <= joined.counts.get(word, 0) <= count
    assert joined.lost * (capacity + 1) <= joined.num
    if len(true) <= capacity:
        assert joined.is_exact
        assert joined.counts == true


@given(st.lists(st.lists(st.integers(0, 2**63 - 1).map(lambda one: one % 50), max_size=60), max_size=6))
def test_repeats_count_what_occurs_again(parts: list[list[int]]) -> None:
    joined, at = Repeats(), 0
    for part in parts:
        one = Repeats()
        one.add(np.array(part, np.int64), np.arange(at, at + len(part)))
        at += len(part)
        joined.merge(Repeats.of_dict(json.loads(json.dumps(one.as_dict()))))
    values = [value for part in parts for value in part]
    assert joined.is_exact
    assert (joined.num, joined.num_again) == (len(values), len(values) - len(set(values)))
    again = {value: [i for i, one in enumerate(values) if one == value] for value in values if values.count(value) > 1}
    assert joined.pairs(100) == sorted((places[0], places[-1]) for places in again.values())


def test_repeats_beyond_their_capacity_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "HASHES", 1 << 12)
    draw = np.random.default_rng(3)
    hashes = draw.integers(0, 2**63 - 1, 200_000)
    joined = Repeats()
    for part in np.array_split(np.concatenate((hashes, hashes[:60_000])), 40):
        one = Repeats()
        one.add(part, part)
        joined.merge(one)
    assert not joined.is_exact
    assert joined.num_again == pytest.approx(60_000, rel=0.15)


# ------------------------------------------------------------------------------------------- numbers, by brute force


SAMPLES = st.lists(
    st.fixed_dictionaries(
        {"txt": st.text(st.characters(codec="utf-8"), max_size=40), "cls": st.integers(0, 4)},
        optional={"bin": st.binary(max_size=50), "json": st.fixed_dictionaries({"w": st.integers(1, 9)})},
    ),
    min_size=1,
    max_size=30,
)


@given(SAMPLES, st.integers(1, 12), st.booleans())
def test_numbers_are_those_of_brute_force(samples: list[Sample], per_shard: int, indexed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keyed = [{"__key__": f"{i:04d}", **sample} for i, sample in enumerate(samples)]
        with ShardWriter(
            f"{folder}/{{:03d}}.tar", max_samples=per_shard, index=indexed, columns={"c": "cls"} if indexed else None
        ) as writer:
            for sample in keyed:
                writer.write(sample)
        found = report_of(folder).as_dict()
        files = sorted(Path(folder).glob("*.tar"))
        assert found["bytes"] == sum(file.stat().st_size for file in files)
        assert (found["samples"], found["shards"]) == (len(samples), len(files))
    raw = [{**sample, "txt": sample["txt"].encode(), "cls": str(sample["cls"]).encode()} for sample in samples]
    for name in ("txt", "cls", "bin"):
        sizes = [len(sample[name]) for sample in raw if name in sample]
        assert (name in found["fields"]) == bool(sizes)
        if sizes:
            told = found["fields"][name]
            assert told["samples"] == len(sizes)
            assert told["empty"] == sizes.count(0)
            assert told["bytes"]["p50"] == pytest.approx(statistics.median(sizes))
            assert told["bytes"] | {"p50": 0} == {
                "min": min(sizes), "max": max(sizes), "p50": 0, "mean": pytest.approx(statistics.fmean(sizes)),
            }  # fmt: skip
    lengths = [len(sample["txt"]) for sample in samples if sample["txt"]]
    if lengths:
        assert found["fields"]["txt"]["characters"]["max"] == max(lengths)
        assert found["fields"]["txt"]["characters"]["p50"] == pytest.approx(statistics.median(lengths))
    classes = Counter(sample["cls"] for sample in samples)
    assert dict(map(tuple, found["classes"]["cls"]["top"])) == classes
    if indexed:
        column = found["columns"]["c"]
        assert (column["type"], column["missing"]) == ("int64", 0)
        assert (column["min"], column["max"], dict(map(tuple, column["top"]))) == (min(classes), max(classes), classes)
    assert found["duplicates"]["keys"] == 0
    texts = [sample["txt"] for sample in samples if sample["txt"]]
    if texts:
        assert found["duplicates"]["contents"] == len(texts) - len(set(texts))


def test_a_filtered_set_is_that_of_its_samples(tmp_path: Path) -> None:
    data = write(
        tmp_path / "d", ({"__key__": f"{i:04d}", "txt": "x" * i, "json": {"n": i}} for i in range(100)),
        per_shard=30, columns={"n": "json.n"},
    )  # fmt: skip
    done = CliRunner().invoke(cli, ["view", "save", str(data), "few", "--where", "n < 10"])
    assert done.exit_code == 0, done.output
    for options, kept in (
        ({"where": "n >= 60"}, range(60, 100)),
        ({"subset": (0.1, 0.5)}, range(10, 50)),
        ({"subset": (95, 100)}, range(95, 100)),
        ({"view": "few"}, range(10)),
        ({"where": "n >= 20", "subset": (0, 40)}, range(20, 40)),
    ):
        found = report_of(data, **options).as_dict()
        assert found["samples"] == found["read"]["samples"] == len(kept)
        assert found["fields"]["txt"]["bytes"]["min"] == kept[0]
        assert found["fields"]["txt"]["bytes"]["max"] == kept[-1]
        assert (found["columns"]["n"]["min"], found["columns"]["n"]["max"]) == (kept[0], kept[-1])
        assert found["shards"] == len({number // 30 for number in kept})
    with pytest.raises(ConfigError, match="keeps none"):
        report_of(data, where="n > 1000")


def test_late_columns_and_missing_values_are_told(tmp_path: Path) -> None:
    data = write(tmp_path / "d", ({"__key__": f"{i:02d}", "txt": "t"} for i in range(20)), per_shard=7)
    table = pa.table({"key": [f"{i:02d}" for i in range(15)], "lang": ["en", "de", "en"] * 5})
    pa.parquet.write_table(table, tmp_path / "lang.parquet")
    done = CliRunner().invoke(
        cli, ["column", "add", str(data), "lang", "--from", str(tmp_path / "lang.parquet"), "--on", "key"]
    )
    assert done.exit_code == 0, done.output
    report = report_of(data)
    column = report.as_dict()["columns"]["lang"]
    assert column == {
        "type": "string", "late": True, "missing": 5, "min": "de", "max": "en", "distinct": 2,
        "top": [["en", 10], ["de", 5]],
    }  # fmt: skip
    assert "missing" in kinds(report)
    for path in (data / "_shardstream/columns/lang").glob("*000001*"):
        path.unlink()
    assert "beside" in kinds(report_of(data))  # and no failure


def test_token_lengths_come_from_the_index_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": "a" * (5 * i)}) for i in range(1, 30)))
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "in.jsonl"), str(tmp_path / "d"), "--tokenizer", "bytes"])
    assert done.exit_code == 0, done.output
    report = report_of(tmp_path / "d", limit=10)
    told = report.as_dict()["fields"]["tok"]
    lengths = report.totals.columns["tokens"].numbers.told()
    assert told["kind"] == "tokens"
    assert told["tokens"] == lengths
    assert told["read"] == 0


# --------------------------------------------------------------------------------------- what is read of the shards


class Reads(Storage):
    """Notes every read of a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []

    def read(self, url: Any, *args: Any, **options: Any) -> Any:
        if str(url).endswith(".tar"):
            self.noted.append(args[:2])
        return super().read(url, *args, **options)


def test_no_byte_is_read_for_what_the_index_knows(tmp_path: Path) -> None:
    """Large values have their checksums there; a column has the classes."""
    rng = np.random.default_rng(0)
    blobs = [rng.bytes(200_000) for _ in range(4)]
    samples = [{"__key__": f"{i}", "msgpack": blobs[i % 4], "cls": i % 3} for i in range(6)]
    data = write(tmp_path / "d", samples, columns={"cls": "cls"})
    storage = Reads()
    found = stats([str(data)], storage=storage, options=StatsOptions(limit=None)).as_dict()
    assert storage.noted == []
    assert found["duplicates"] == {"keys": 0, "contents": 2}
    assert found["classes"]["cls"]["top"] == [[0, 2], [1, 2], [2, 2]]


def test_of_large_images_only_the_headers_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (700, 700, 3), np.uint8)).save(out, "PNG")
    data = write(tmp_path / "d", ({"__key__": f"{i}", "png": out.getvalue()} for i in range(5)))
    storage = Reads()
    found = stats([str(data)], storage=storage, options=StatsOptions(limit=None)).as_dict()
    assert found["fields"]["png"]["width"]["max"] == 700
    assert found["duplicates"]["contents"] == 4  # by the checksums of the index
    assert 0 < found["read"]["bytes"] <= 5 * (33 << 10)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(0, 5))
def test_the_chosen_samples_are_spread_evenly(num_samples: int, limit: int, seed: int) -> None:
    chosen = choose(num_samples, limit, seed)
    if limit >= num_samples:
        assert chosen is None
        return
    assert chosen is not None
    assert len(chosen) == limit
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0
    assert chosen[-1] < num_samples
    assert np.array_equal(chosen, choose(num_samples, limit, seed))
    parts = np.bincount(chosen * -(-limit // 8) // num_samples)
    assert parts.max() <= 24


def test_a_sample_of_a_set_says_so_and_counts_all_that_the_index_knows(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i:04d}", "txt": "ab" * (1 + i % 5), "cls": i % 7} for i in range(400)]
    data = write(tmp_path / "d", samples, per_shard=50)
    report = report_of(data, limit=80, seed=3)
    found = report.as_dict()
    assert (found["samples"], found["read"]["samples"], found["read"]["all"]) == (400, 80, False)
    assert found["fields"]["txt"]["samples"] == 400
    assert found["fields"]["txt"]["characters"]["p50"] == pytest.approx(6, abs=2)
    assert found["duplicates"]["contents"] is None
    assert "80 of 400 samples" in report.read_words
    assert report_of(data, limit=80, seed=3).as_dict() == found
    assert report_of(data, limit=80, seed=4).as_dict() != found
    assert DEFAULT_LIMIT == 2000


def test_workers_do_not_change_the_report(tmp_path: Path) -> None:
    data = write(tmp_path / "d", ({"__key__": f"{i:04d}", "txt": "x" * (i % 91)} for i in range(300)), per_shard=20)
    assert report_of(data, workers=1).as_dict() == report_of(data, workers=7).as_dict()


# --------------------------------------------------------------------------------------------------------- surprises


def kinds(report: StatsReport) -> set[str]:
    return {one.kind for one in report.found}


def plain_sample(i: int) -> Sample:
    return {"__key__": f"{i:05d}", "jpg": encoded(size=(8 + i % 5, 6 + i // 5)), "cls": i % 5}


def some(change: Callable[[Sample, int], None], *, num: int = 100) -> list[Sample]:
    samples = [plain_sample(i) for i in range(num)]
    for i, sample in enumerate(samples):
        change(sample, i)
    return samples


def put(name: str, value: Any, at: int = 7) -> Callable[[Sample, int], None]:
    def change(sample: Sample, i: int) -> None:
        if i == at:
            sample[name] = value

    return change


def by_class(sample: Sample, i: int) -> None:
    sample["cls"] = i // 20


def rare_class(sample: Sample, i: int) -> None:
    sample["cls"] = int(i % 20 == 3)


def with_sound(at: int, rate: int, channels: int) -> Callable[[Sample, int], None]:
    def change(sample: Sample, i: int) -> None:
        sample["wav"] = wav(rate, channels) if i == at else wav(16_000, 1)

    return change


def wav(rate: int, channels: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(2 * channels * 100))
    return out.getvalue()


UNNAMED = {"sorted", "partial", "pickle", "uneven classes"}  # of which no sample is an example
NOISE = np.random.default_rng(0).bytes(3 << 20)
SURPRISES: dict[str, tuple[str, Callable[[Sample, int], None]]] = {
    "sorted": ("class-sorted shards: .* have the same cls", by_class),
    "giant": ("one giant sample: '00007' in .*000000.tar has 3.0 MiB", put("jpg", encoded() + NOISE)),
    "partial": (r"fields that only some samples have: txt 1\.0%", put("txt", "words")),
    "empty": ("empty values: jpg in 1 sample", put("jpg", b"")),
    "broken": ("broken values: 1 of 100 jpg looked at, first 00007: ", put("jpg", b"no image")),
    "modes": (r"gray or CMYK among RGB images: field jpg: gray 1\.0%", put("jpg", encoded("L"))),
    "exif": (r"EXIF orientations: 1\.0% of the jpg images", put("jpg", encoded(orientation=6))),
    "formats": (r"images of several formats in field jpg: JPEG 99\.0%, PNG 1\.0%", put("jpg", encoded(form="PNG"))),
    "too large": ("giant images: 1 image of 100 in field jpg", put("jpg", giant_png(10**5, 10**5))),
    "odd keys": (r"keys with odd characters: 1, first 'a b\\x01'", put("__key__", "a b\x01")),
    "duplicate contents": ("duplicate contents: 1 of 100 values of jpg", put("jpg", plain_sample(3)["jpg"])),
    "text classes": ("classes that are no numbers: field cls in 1 sample, such as 'cat'", put("cls", b"cat")),
    "pickle": ("pickles: field pkl", put("pkl", b"\x80\x04.")),
    "mixed rate": (r"mixed sampling rates in field wav: 16,000 99\.0%, 8,000 1\.0%", with_sound(7, 8000, 1)),
    "mixed channels": (r"mixed numbers of channels in field wav: 1 99\.0%, 2 1\.0%", with_sound(7, 16_000, 2)),
    "uneven classes": (r"uneven classes of cls: 0 has 95\.0% of the samples, 1 5\.0%", rare_class),
    "near keys": ("keys that are nearly equal: 1 sample of 100", put("__key__", "8")),
}


def test_a_plain_set_has_no_surprise(tmp_path: Path) -> None:
    report = report_of(write(tmp_path / "d", some(lambda sample, i: None), per_shard=30))
    assert report.found == ()


@pytest.mark.parametrize("kind", SURPRISES)
def test_a_surprise_is_found_where_it_is(tmp_path: Path, kind: str) -> None:
    what, change = SURPRISES[kind]
    files: list[tuple[str, bytes]] = []
    for sample in some(change):
        key = sample.pop("__key__")
        files += [(f"{key}.{name}", str(v).encode() if isinstance(v, (int, str)) else v) for name, v in sample.items()]
    write_tar(tmp_path / "d/000000.tar", files)
    assert CliRunner().invoke(cli, ["index", str(tmp_path / "d")]).exit_code == 0
    report = report_of(tmp_path / "d")
    (found,) = [one for one in report.found if one.kind == kind]
    assert re.match(what, found.what)
    assert found.why
    assert found.cure
    named = {one.key for group in found.groups for one in group}
    key = {"odd keys": "a b\x01", "near keys": "8"}.get(kind, "00007")
    assert (key in named) == (kind not in UNNAMED)
    allowed = {"partial", "giant", "broken", "formats", "duplicate contents"}  # that come along with another
    assert kinds(report) <= {kind} | allowed


def rare(i: int) -> int:
    return int(i % 20 == 3)


def number(sample: Sample) -> int:
    return int(sample["__key__"])


SPELLINGS: dict[str, tuple[Callable[[int], Sample], dict[str, Callable[[Sample], Any]], set[str]]] = {
    "numbers and names": (lambda i: {"cls": rare(i)}, {"class": lambda s: ("cat", "dog")[s["cls"]]}, {"class"}),
    "two columns": (lambda i: {}, {"label": lambda s: rare(number(s)), "class": lambda s: "ab"[rare(number(s))]},
                    {"class"}),
    "the same name": (lambda i: {"cls": rare(i)}, {"cls": lambda s: s["cls"]}, {"cls"}),
    "no column": (lambda i: {"cls": rare(i)}, {}, {"cls"}),
    "another class": (lambda i: {"cls": rare(i)}, {"label": lambda s: rare(1 + number(s))}, {"cls", "label"}),
    "fine": (lambda i: {"cls": rare(i)}, {"class": lambda s: "acd"[s["cls"] << number(s) // 20 % 2]}, {"cls", "class"}),
}  # fmt: skip
"""By case: fields of a sample, its columns, and the classes that are told."""


@pytest.mark.parametrize("limit", [None, 2000])
@pytest.mark.parametrize("case", SPELLINGS)
def test_a_class_is_told_once_however_it_is_spelled(tmp_path: Path, case: str, limit: int | None) -> None:
    fields, columns, told = SPELLINGS[case]
    samples = ({"__key__": f"{i:05d}", "txt": f"{i}", **fields(i)} for i in range(4000))
    data = write(tmp_path / "d", samples, per_shard=500, columns=columns)
    report = report_of(data, limit=limit)
    assert set(report.as_dict()["classes"]) == told
    uneven = [one.what for one in report.found if one.kind == "uneven classes"]
    assert len(uneven) == len({re.findall(r"of (\w+):", one)[0] for one in uneven}) <= len(told)
    assert uneven
    text = run(data, *(("--all",) if limit is None else ())).stdout
    assert text.count("classes of") - len(uneven) == len(told)
    page = stats_page(report).partition('id="classes"')[2].partition('id="columns"')[0]
    assert page.count("<article>") == len(told)
    if case == "numbers and names":
        assert "classes of class (also cls): 2: cat 95.0%, dog 5.0%" in text


EMPTY = {"txt": b"", "txt.gz": b"", "2 odd.name.txt": b""}


@pytest.mark.parametrize("field", EMPTY)
def test_the_cure_of_empty_values_lists_them(tmp_path: Path, field: str) -> None:
    files = []
    for i in range(60):
        value = b"" if i % 20 == 3 else gzip.compress(b"words") if field.endswith("gz") else b"words"
        files += [(f"{i:03d}.cls", b"1"), *([] if i == 5 else [(f"{i:03d}.{field}", value)])]
    write_tar(tmp_path / "my set/0.tar", files)
    data = str(tmp_path / "my set")
    assert CliRunner().invoke(cli, ["index", data]).exit_code == 0
    (found,) = [one for one in report_of(data).found if one.kind == "empty"]
    add, listed = (shlex.split(one) for one in re.findall(r"`shard_tools ([^`]*)`", found.cure))
    (condition,) = re.findall(r'where="([^"]*)" trains', found.cure)
    assert CliRunner().invoke(cli, add).exit_code == 0
    done = CliRunner().invoke(cli, [*listed, "--json"])
    assert [json.loads(line)["key"] for line in done.stdout.splitlines()] == ["003", "023", "043"]
    assert len(StreamingDataset(data, where=condition)) == 60 - 3 - 1  # nor one that lacks the field


def test_cmyk_is_told_too(tmp_path: Path) -> None:
    report = report_of(write(tmp_path / "d", some(put("jpg", encoded("CMYK")))))
    assert any("CMYK 1.0%" in one.what for one in report.found)
    gray = write(tmp_path / "gray", ({"__key__": f"{i}", "jpg": encoded("L", (9, i + 1))} for i in range(9)))
    assert "modes" not in kinds(report_of(gray))


def test_uneven_shards_but_not_a_small_last_one(tmp_path: Path) -> None:
    for name, sizes, is_uneven in (("even", (50, 50, 50, 5), False), ("uneven", (10, 80, 10, 10), True)):
        first = 0
        for shard, size in enumerate(sizes):
            with ShardWriter(f"{tmp_path}/{name}/{{:06d}}.tar", start_shard=shard) as writer:
                for i in range(first, first + size):
                    writer.write(plain_sample(i))
            first += size
        assert ("uneven" in kinds(report_of(tmp_path / name))) is is_uneven


def test_small_and_large_chunks(tmp_path: Path) -> None:
    small = write(tmp_path / "small", some(lambda sample, i: None), per_shard=10)
    assert any(one.what.startswith("very small chunks: half of the 10") for one in report_of(small).found)
    large = write(tmp_path / "large", ({"__key__": f"{i}", "bin": bytes(i + (65 << 20))} for i in range(1)))
    assert any(one.what.startswith("very large chunks: 1 of 1") for one in report_of(large).found)


def test_duplicate_keys(tmp_path: Path) -> None:
    files = [(f"{i % 90:03d}.txt", b"%d" % i) for i in range(100)]
    write_tar(tmp_path / "d/0.tar", files)
    report = report_of(tmp_path / "d")
    assert report.as_dict()["duplicates"] == {"keys": 10, "contents": 0}
    assert kinds(report) == {"duplicate keys", "no index"}
    assert any(one.what == "duplicate keys: 10 samples of 100" for one in report.found)


def test_columns_with_nan(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "txt": f"{i}"} for i in range(10)]
    data = write(tmp_path / "d", samples, columns={"s": lambda one: float("nan" if one["__key__"] == "3" else 1.5)})
    report = report_of(data)
    assert kinds(report) == {"not finite"}
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["columns"]["s"]["max"] == 1.5


def test_an_unfinished_set_is_refused_or_told(tmp_path: Path) -> None:
    writer = ShardWriter(f"{tmp_path}/d/{{:03d}}.tar", max_samples=3)
    for i in range(8):
        writer.write({"__key__": f"{i}", "txt": f"{i}"})
    with pytest.raises(RuntimeError, match="killed"), writer:
        raise RuntimeError("killed")
    assert run(tmp_path / "d").exit_code == 1
    done = run(tmp_path / "d", "--allow-unfinished", "--json")
    assert done.exit_code == 0
    assert any(one["what"].startswith("unfinished set") for one in json.loads(done.stdout)["surprises"])


def test_classes_of_few_samples_of_a_sorted_set_show_it(tmp_path: Path) -> None:
    data = write(tmp_path / "d", ({"__key__": f"{i:05d}", "cls": i // 100, "txt": f"{i}"} for i in range(3000)))
    assert "sorted" in kinds(report_of(data, limit=120))
    rng = np.random.default_rng(0)
    data = write(
        tmp_path / "e", ({"__key__": f"{i:05d}", "cls": int(rng.integers(30)), "txt": f"{i}"} for i in range(3000))
    )
    assert "sorted" not in kinds(report_of(data, limit=120))


# ------------------------------------------------------------------------------------------------------ hostile data


def test_broken_values_are_counted_and_never_fatal(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    names = (
        "jpg",
        "png",
        "webp",
        "tif",
        "gif",
        "bmp",
        "npy",
        "safetensors",
        "json",
        "txt",
        "wav",
        "cls",
        "float",
        "odd",
    )
    heads = {
        "jpg": encoded(), "png": encoded(form="PNG"), "webp": encoded(form="WEBP"), "tif": encoded(form="TIFF"),
        "json": b"[" * 100_000, "safetensors": (2**60).to_bytes(8, "little"), "wav": b"RIFF....WAVEfmt ",
    }  # fmt: skip
    samples = []
    for i in range(60):
        sample: Sample = {"__key__": f"{i:03d}"}
        for name in names:
            head = heads.get(name, b"")
            sample[name] = head[: int(rng.integers(len(head) + 1))] + rng.bytes(int(rng.integers(200)))
        samples.append(sample)
    files = [(f"{one['__key__']}.{name}", one[name]) for one in samples for name in names]
    write_tar(tmp_path / "d/0.tar", files)
    report = report_of(tmp_path / "d")
    found = report.as_dict()["fields"]
    assert found["jpg"]["broken"] > 0
    assert found["json"]["broken"] > 50
    assert found["npy"]["broken"] == found["npy"]["samples"] - found["npy"]["empty"]
    assert len(stats_page(report)) > 1000
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.thorough
def test_headers_of_giant_images_cost_nothing(tmp_path: Path) -> None:
    """10^5 x 10^5 pixels as PNG, 16383 x 16383 as WebP (whose canvas Pillow allocates on opening), a packed text."""
    bomb = PngImagePlugin.PngInfo()
    bomb.add_text("x", "y" * (2 << 20), zip=True)
    out = io.BytesIO()
    Image.new("RGB", (1, 1)).save(out, "PNG", pnginfo=bomb)
    webp = bytearray(encoded(form="WEBP", orientation=3))
    assert webp[12:16] == b"VP8X"
    webp[24:30] = (16382).to_bytes(3, "little") * 2
    data = write(
        tmp_path / "d",
        [
            {"__key__": "a", "png": giant_png(10**5, 10**5), "webp": bytes(webp)},
            {"__key__": "b", "png": out.getvalue()},
            {"__key__": "c", "mp4": b"\0\0\0\1moov" + (2**60).to_bytes(8, "big") + bytes(99), "json": b"[" * (1 << 20)},
            {"__key__": "d", "wav": b"RIFF\xff\xff\xff\xffWAVEdata\xff\xff\xff\xff", "mkv": b"\x1a\x45\xdf\xa3" * 9999},
        ],
    )
    code = f"""
import resource
from shard_tools.look.stats.run import stats
from streaming.storage import Storage
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = stats([{str(data)!r}], storage=Storage()).as_dict()["fields"]
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
assert found["png"]["width"]["max"] == 100_000 and found["webp"]["width"]["max"] == 16383, found
assert found["png"]["broken"] == 1, found
assert all(found[name]["broken"] == 1 for name in ("mp4", "wav", "mkv", "json")), found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_missing_and_a_cut_shard_are_told(tmp_path: Path) -> None:
    data = write(tmp_path / "d", ({"__key__": f"{i:03d}", "txt": "x" * 300} for i in range(40)), per_shard=10)
    whole = (data / "000002.tar").read_bytes()
    (data / "000002.tar").write_bytes(whole[: len(whole) // 2])
    report = report_of(f"{data}/{{000000..000003}}.tar")
    assert report.totals.num_unread > 0
    (data / "000002.tar").unlink()
    report = report_of(f"{data}/{{000000..000003}}.tar")
    assert report.totals.num_unread == 10
    assert any(re.match("10 samples cannot be read: .*000002.tar", one.what) for one in report.found)
    for url in (f"{data}/{{000000..000003}}.tar", data):  # a directory stands for what is listed in it
        (gone,) = [one for one in report_of(url).found if one.kind == "gone"]
        assert re.match("1 shard not as the index says: .*000002.tar: in the index, but not in the store", gone.what)


def test_keys_that_are_not_utf8_and_empty_shards(tmp_path: Path) -> None:
    names = [b"a".decode(), b"\xff\xfe".decode("utf-8", "surrogateescape"), "e\u0301", "../up", "\u4e2d\u6587-1.5"]
    write_tar(tmp_path / "d/0.tar", [(f"{name}.txt", b"x" * i) for i, name in enumerate(names)])
    write_tar(tmp_path / "d/1.tar", [])
    report = report_of(tmp_path / "d")
    assert report.totals.num_odd == 2 + 1
    assert report.as_dict()["samples"] == 5
    assert json.loads(run(tmp_path / "d", "--json", "--html", tmp_path / "a.html").stdout)["samples"] == 5
    write_tar(tmp_path / "e/1.tar", [])
    report = report_of(tmp_path / "e")
    assert (report.num_samples, report.as_dict()["fields"]) == (0, {})
    assert "0" in stats_page(report)
    assert run(tmp_path / "e").exit_code == 0


# ------------------------------------------------------------------------------------------------------ command line


def test_json_is_as_promised(tmp_path: Path) -> None:
    data = write(tmp_path / "d", some(lambda sample, i: None), columns={"n": lambda one: one["cls"]})
    done = run(data, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert {"samples", "bytes", "shards", "fields", "columns", "duplicates", "surprises"} <= found.keys()
    for told in found["fields"].values():
        assert {"samples", "bytes", "kind"} <= told.keys()
        assert told["bytes"].keys() == {"min", "p50", "max", "mean"}
    assert {name: told["kind"] for name, told in found["fields"].items()} == {"jpg": "image", "cls": "class"}
    assert found["duplicates"].keys() == {"keys", "contents"}
    assert {"type", "missing", "min", "max", "top"} <= found["columns"]["n"].keys()
    done = run(write(tmp_path / "e", some(by_class)), "--json")
    assert done.exit_code == 0  # surprises are no failures
    (one,) = json.loads(done.stdout)["surprises"]
    assert one.keys() == {"what", "why", "cure", "samples"}


def test_text_and_wrong_usage(tmp_path: Path) -> None:
    data = tmp_path / "d"
    write_tar(data / "0.tar", [(f"{i:03d}\x1b[31m.cls", b"%d" % (i // 20)) for i in range(101)])
    done = run(data, "--limit", 40)
    assert done.exit_code == 0
    assert "! class-sorted shards" in done.stdout
    assert "\x1b" not in done.stdout
    assert "40 of 101 samples" in done.stdout
    assert "surprises" in done.stdout.splitlines()[-1]
    for arguments, message in (
        ((data, "--all", "--limit", 3), "cannot be combined"),
        ((data, "--journal", "x"), "no effect without --all"),
        ((data, "--limit", 0), "x>=1"),
        ((data, "--subset", "9..2"), "subset"),
        ((data, "--where", "nothing = 1"), "nothing"),
        ((data, "--html", tmp_path / "no" / "a.html"), "--html"),
        ((tmp_path / "mixture.json",), "mixture"),
        ((), "URL"),
    ):
        wrong = run(*arguments)
        assert wrong.exit_code == 2, (arguments, wrong.output)
        assert message in wrong.stderr
    assert "Example:" in run("--help").stdout


def test_a_large_set_without_index_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "d/0.tar", [("a.txt", b"text")])
    monkeypatch.setattr("shard_tools.change.sets.open_set._MAX_READ_BYTES", 10)
    with pytest.raises(IndexMissingError, match="shard_tools index"):
        report_of(tmp_path / "d")


# ------------------------------------------------------------------------------------------------- stopped, continued

STOPPED = """
import os, sys
from shard_tools.look.stats.run import StatsOptions, stats
from shard_tools.look.stats.shard import ShardReader
from streaming.storage import Storage
read = ShardReader.read
def dying(self, part, progress):
    if part.position == 5:
        os.kill(os.getpid(), 9)
    return read(self, part, progress)
ShardReader.read = dying
options = StatsOptions(limit=None, journal=sys.argv[2], save_every_s=0, workers=1)
stats([sys.argv[1]], storage=Storage(), options=options)
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(
        tmp_path / "d", ({"__key__": f"{i:04d}", "txt": f"{i % 50} " * (i % 9), "cls": i % 4} for i in range(200)),
        per_shard=20, columns={"n": lambda one: int(one["__key__"])},
    )  # fmt: skip
    whole = report_of(data).as_dict()
    place = tmp_path / "journal"
    killed = subprocess.run([sys.executable, "-c", STOPPED, str(data), str(place)], timeout=PATIENCE_S, check=False)
    assert killed.returncode == -9
    (kept,) = place.iterdir()
    read: list[int] = []
    original = ShardReader.read

    def noting(self: ShardReader, part: StatsPart, progress: Progress) -> Any:
        read.append(part.position)
        return original(self, part, progress)

    monkeypatch.setattr(ShardReader, "read", noting)
    assert report_of(data, journal=str(place), workers=1).as_dict() == whole
    assert read == [5, 6, 7, 8, 9]
    assert not kept.exists()


def test_a_run_over_a_bucket_goes_on_from_the_bucket(mini_s3: MiniS3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, options = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
    with ShardWriter(f"{bucket}/d/{{:03d}}.tar", max_samples=10, storage_options=options) as writer:
        for i in range(80):
            writer.write({"__key__": f"{i:03d}", "txt": f"{i % 9}" * i})
    storage = Storage(options)
    chosen = StatsOptions(limit=None, journal=f"{bucket}/journal/", save_every_s=0, workers=1)
    whole = stats([f"{bucket}/d/"], storage=storage, options=StatsOptions(limit=None)).as_dict()
    original = ShardReader.read
    read: list[int] = []

    def until(stop: int) -> Callable[[ShardReader, StatsPart, Progress], Any]:
        def reading(self: ShardReader, part: StatsPart, progress: Progress) -> Any:
            if part.position == stop:
                raise KeyboardInterrupt
            read.append(part.position)
            return original(self, part, progress)

        return reading

    monkeypatch.setattr(ShardReader, "read", until(3))
    with pytest.raises(KeyboardInterrupt):
        stats([f"{bucket}/d/"], storage=storage, options=chosen)
    monkeypatch.setattr(ShardReader, "read", until(-1))
    assert stats([f"{bucket}/d/"], storage=storage, options=chosen).as_dict() == whole
    assert read == [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(storage.list(f"{bucket}/journal/")) == []


@pytest.mark.thorough
def test_a_journal_of_other_work_or_damaged_is_not_used(tmp_path: Path) -> None:
    data = write(tmp_path / "d", ({"__key__": f"{i:04d}", "txt": f"{i}"} for i in range(60)), per_shard=20)
    place = tmp_path / "journal"
    command = [sys.executable, "-c", STOPPED.replace("== 5", "== 2"), str(data), str(place)]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == -9
    (kept,) = place.iterdir()
    content = kept.read_bytes()
    assert report_of(data, journal=str(place), where="__key__ < '0050'").num_samples == 50
    assert kept.read_bytes() == content
    kept.write_bytes(content.replace(b'"num_shards": 2', b'"num_shards": 1'))
    assert report_of(data, journal=str(place)).as_dict() == report_of(data).as_dict()
    assert not kept.exists()


def test_a_journal_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "d", ({"__key__": f"{i:04d}", "txt": f"{i}"} for i in range(60)), per_shard=20)
    (tmp_path / "file").write_text("")
    place = f"{tmp_path}/file/below"
    with pytest.raises(StorageError) as caught:
        report_of(data, journal=place, save_every_s=0)
    assert "--journal" in "".join(caught.value.__notes__)
    monkeypatch.setattr(stats_run, "JOURNALS", place)  # nobody asked for it
    assert report_of(data, journal=place, save_every_s=0).num_samples == 60


@pytest.mark.parametrize(("seconds_a_shard", "saved"), [(0, []), (7, [5]), (16, [2, 4]), (31, [1, 2, 3, 4, 5])])
def test_the_journal_is_written_every_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_a_shard: int, saved: list[int]
) -> None:
    """By a clock that goes on with each shard."""
    data = write(tmp_path / "d", ({"__key__": f"{i:04d}", "txt": f"{i}"} for i in range(120)), per_shard=20)
    note, write_document = journal.TotalsJournal.note, journal.write_document
    now_s, found = [0.0], list[int]()

    def noting(self: journal.TotalsJournal, num_shards: int, totals: Any) -> None:
        now_s[0] += seconds_a_shard
        note(self, num_shards, totals)

    def writing(content: Any) -> bytes:
        found.append(content["num_shards"])
        return write_document(content)

    monkeypatch.setattr(journal.TotalsJournal, "note", noting)
    monkeypatch.setattr(journal, "write_document", writing)
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    report_of(data, journal=str(tmp_path / "journal"))
    assert found == saved


# -------------------------------------------------------------------------------------------------------------- page

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about names, texts and values that are markup."""
    folder = tmp_path_factory.mktemp("page")
    field = "<b>x"
    files = []
    for i in range(40):
        key = f"{i:02d}{HOSTILE.replace('/', '').replace('.', '')}"
        files += [(f"{key}.{name}", data) for name, data in (
            ("jpg", encoded(size=(8, 6 + i)) if i else b"no image"), ("cls", b"<i>class</i>"), (field, b"\0\1"),
            ("json", json.dumps({HOSTILE: 1}).encode()), ("txt", b"words " * i),
        )]  # fmt: skip
    write_tar(folder / "d/0.tar", files)
    assert CliRunner().invoke(cli, ["index", str(folder / "d")]).exit_code == 0
    done = CliRunner().invoke(cli, ["column", "add", str(folder / "d"), "cls2", "--lift", "txt"])
    assert done.exit_code == 0, done.output
    done = run(folder / "d", "--html", folder / "page.html")
    assert done.exit_code == 0, done.output
    return folder / "page.html"


def test_nothing_of_the_data_is_markup(hostile_page: Path) -> None:
    text = hostile_page.read_text()
    assert "&lt;script&gt;" in text
    assert "{{ 7*7 }}" in text
    for markup in ("<script", "<img", "onerror=alert(2)>", "<i>class", "<b>x", "javascript:"):
        assert markup not in text
    assert re.findall(r"(?:href|src)=\"([^\"#][^\"]*)\"", text) == ["data:,"]
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    assert "unsafe" not in policy
    assert "style=" not in text


@pytest.mark.thorough
def test_the_page_in_a_browser(hostile_page: Path, tab: Callable[..., Tab]) -> None:
    colors = {}
    for scheme in ("light", "dark"):
        seen = tab(color_scheme=scheme)
        seen.open(hostile_page.as_uri())
        assert seen.value("document.querySelectorAll('article').length") > 8
        for width in (360, 768, 1920, 3840):
            seen.width(width)
            assert seen.value("document.documentElement.scrollWidth") <= width
            assert seen.value("document.querySelector('article').getBoundingClientRect().width") > 200
        colors[scheme] = seen.value("getComputedStyle(document.body).backgroundColor")
        assert seen.value("document.querySelectorAll('script, img, iframe').length") == 0
        assert [url for url in seen.asked if not url.startswith(("file:", "data:"))] == []
        assert seen.dialogs == seen.errors == []
        assert seen.value("getComputedStyle(document.querySelector('.plot rect')).fill") != "rgb(0, 0, 0)"
    brightness = {name: sum(map(int, re.findall(r"\d+", color)[:3])) for name, color in colors.items()}
    assert brightness["light"] > 700
    assert brightness["dark"] < 100


def test_without_jinja_the_page_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = run(tmp_path / "nothing", "--html", tmp_path / "a.html")
    assert done.exit_code == 2
    assert r"pip install 'shardstream[show]'" in done.stderr
