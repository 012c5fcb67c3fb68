"""``where``, ``subset``, ``exclude`` and views: a filtered set is what filtering by hand gives, wherever it goes."""

from __future__ import annotations

import json
import pickle
import re
import runpy
from collections import Counter, UserList
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.common.job import shared_results
from streaming.errors import ConfigError, IndexFormatError, IndexMismatchError, IndexMissingError, StateError
from streaming.order.plan.ledger import filter_fingerprint, why_differs
from streaming.sets.filters import select as filters
from streaming.sets.filters.select import Filter, checked_subset, excluded_keys
from streaming.sets.filters.views import View, save_view
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.fetch.read import fetch_range
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.selection import Filtered, Kept
from streaming.storage import Storage
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks
from tests.support.processes.thread_peers import ThreadPeers, on_ranks
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import data_gets, loaders

NUM = 170
CONDITION = "n % 3 = 0 and lang = 'en' or n is null"


def row(number: int) -> dict[str, Any]:
    return {
        "n": None if number % 17 == 5 else number,
        "lang": "de" if number % 5 == 1 else "en",
        "repo": f"r{number // 9}",
    }


def fits(number: int) -> bool:
    columns = row(number)
    return columns["n"] is None or (number % 3 == 0 and columns["lang"] == "en")


KEYS = [f"{number:05d}" for number in range(NUM)]
KEPT = [key for key in KEYS if fits(int(key))]


def write(url: str, storage_options: Any = None, *, payload: int = 0, num: int = NUM) -> str:
    columns = {"n": "json.n", "lang": "json.lang", "repo": "json.repo"}
    with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=41, columns=columns, storage_options=storage_options) as writer:
        for number in range(num):
            data = number.to_bytes(4, "little") * (payload // 4)
            writer.write({"__key__": f"{number:05d}", "json": row(number), "cls": number, "bin": data})
    return f"{url}/"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """170 samples in 5 shards, chunks of 8 MiB: one each."""
    return write(str(tmp_path_factory.mktemp("filters")))


@pytest.fixture(scope="module")
def small_chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same in chunks of four samples, and so without lifted columns: ``__key__`` is what conditions have."""
    url = write(str(tmp_path_factory.mktemp("chunks")))
    storage = Storage()
    rule = ChunkRule(target_bytes=8 << 10, min_bytes=1, min_samples=4)
    index_shards(storage, expand_urls(url, storage), rule=rule, force=True)
    return url


def keys_of(dataset: StreamingDataset, world_size: int = 1, **options: Any) -> list[list[list[str]]]:
    options = {"global_batch_size": 12, "last_batch": "partial", **options}
    return [[list(batch["__key__"]) for batch in loader] for loader in loaders(dataset, world_size, **options)]


def flat(ranks: list[list[list[str]]]) -> list[str]:
    return [key for batches in ranks for batch in batches for key in batch]


# ------------------------------------------------------------------------------------------- the same as by hand


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_filtered_epoch_is_the_kept_samples(data: str, shuffle: bool, world_size: int) -> None:
    dataset = StreamingDataset(data, where=CONDITION, shuffle=shuffle)
    assert len(dataset) == len(KEPT)
    ranks = keys_of(dataset, world_size)
    assert sorted(flat(ranks)) == KEPT
    alone = keys_of(dataset)[0]
    assert [Counter(key for batches in ranks for key in batches[k]) for k in range(len(alone))] == list(
        map(Counter, alone)
    )
    if not shuffle:
        assert flat([alone]) == KEPT


@pytest.mark.parametrize("shuffle", [True, False])
def test_chunks_of_which_nothing_is_kept_are_not_fetched(small_chunks: str, shuffle: bool) -> None:
    dataset = StreamingDataset(small_chunks, where="__key__ < '00021' or hash(__key__) % 20 = 3", shuffle=shuffle)
    reads: list[int] = []
    fetch = dataset.source.fetch_unit
    dataset.source.fetch_unit = lambda wanted, out: (reads.append(wanted.first_sample), fetch(wanted, out))[1]  # type: ignore[method-assign]
    ranks = keys_of(dataset, 2, num_workers=0)
    whole = StreamingDataset(small_chunks, decode=None)
    by_hand = [sample["__key__"] for sample in (whole[i] for i in range(len(whole)))]
    kept = [dataset[i]["__key__"] for i in range(len(dataset))]
    assert sorted(flat(ranks)) == kept == [key for key in by_hand if key in set(kept)]
    assert kept[:21] == by_hand[:21]
    assert dataset.source.table.num_chunks < whole.source.table.num_chunks
    empty = set(whole.source.table.first_sample.tolist()) - set(dataset.source.table.first_sample.tolist())
    assert not empty & set(reads)
    assert (dataset.source.table.num_samples > 0).all()


def test_random_access_ranges_take_map_and_copies(data: str) -> None:
    dataset = StreamingDataset(data, where=CONDITION, fields=("cls",))
    assert [dataset[i]["cls"] for i in range(len(dataset))] == list(map(int, KEPT))
    assert dataset[-1]["__key__"] == KEPT[-1]
    with pytest.raises(IndexError):
        dataset[len(KEPT)]
    view = dataset[7:40]
    assert [sample["__key__"] for sample in view] == KEPT[7:40]
    assert [sample["__key__"] for sample in view[3:][:9]] == KEPT[10:19]
    assert sorted(flat(keys_of(view, 2))) == KEPT[7:40]
    assert [sample["__key__"] for sample in dataset.take(3)] == KEPT[:3]
    doubled = dataset.map(lambda sample: {**sample, "cls": 2 * sample["cls"]})
    assert [sample["cls"] for sample in doubled[:3]] == [2 * int(key) for key in KEPT[:3]]
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied.fingerprint == dataset.fingerprint
    assert [sample["__key__"] for sample in copied[5:8]] == KEPT[5:8]
    assert len({one.fingerprint for one in (dataset, view, view[3:], dataset[:-1])}) == 4
    assert dataset[0 : len(dataset)].fingerprint == dataset.fingerprint
    assert f"{len(KEPT)} samples" in repr(dataset)
    assert "where=" in repr(dataset)


def test_workers_deliver_the_same(data: str, one_fork_server: None) -> None:
    del one_fork_server
    dataset = StreamingDataset(data, where=CONDITION)
    assert keys_of(dataset, num_workers=2) == keys_of(dataset, num_workers=0)


@pytest.mark.parametrize(("worlds", "stop"), [((1, 3), 2), ((2, 1), 3), ((3, 2), 1)])
def test_a_filtered_run_resumes_on_another_world(data: str, worlds: tuple[int, int], stop: int) -> None:
    options: dict[str, Any] = {"global_batch_size": 12, "last_batch": "partial"}
    whole = flat(keys_of(StreamingDataset(data, where=CONDITION, seed=4)))
    seen: list[str] = []
    state: dict[str, Any] = {}
    for loader in loaders(StreamingDataset(data, where=CONDITION, seed=4), worlds[0], **options):
        batches = iter(loader)
        for _ in range(stop):
            seen += next(batches)["__key__"]
        state = json.loads(json.dumps(loader.state_dict()))
    for loader in loaders(StreamingDataset(data, where="n%3=0 AND lang='en' OR n IS NULL"), worlds[1], **options):
        loader.load_state_dict(state)
        seen += [key for batch in loader for key in batch["__key__"]]
    assert sorted(seen) == KEPT == sorted(whole)
    assert Counter(seen[: 12 * stop]) == Counter(whole[: 12 * stop])


def test_a_state_of_another_filter_is_refused_by_name(data: str) -> None:
    def state_of(**filters: Any) -> Any:
        with DataLoader(StreamingDataset(data, **filters), batch_size=8) as loader:
            return loader.state_dict()

    with DataLoader(StreamingDataset(data, where=CONDITION), batch_size=8) as loader:
        with pytest.raises(StateError, match=r"where: the state was saved with 'n > 3', this data set has .n % 3 = 0"):
            loader.load_state_dict(state_of(where="n > 3"))
        with pytest.raises(StateError, match="where: the state was saved with none"):
            loader.load_state_dict(state_of())
        with pytest.raises(StateError, match="subset: the state was saved with '0 to 100', this data set has none"):
            loader.load_state_dict(state_of(where=CONDITION, subset=(0, 100)))
        with pytest.raises(StateError, match="exclude: the state was saved with '1 keys"):
            loader.load_state_dict(state_of(where=CONDITION, exclude=["00003"]))
        loader.load_state_dict(state_of(where=CONDITION))
    with (
        DataLoader(StreamingDataset(data), batch_size=8) as plain,
        pytest.raises(StateError, match="this data set has none"),
    ):
        plain.load_state_dict(state_of(where=CONDITION))
    odd = [filter_fingerprint("shards", {"where": text}) for text in ("a ; b", "a %3B b")]
    assert why_differs(*odd) == "where: the state was saved with 'a ; b', this data set has 'a %3B b'"


# ----------------------------------------------------------------------------------------------- what is asked for


def kept_of(data: str, **filters: Any) -> list[str]:
    dataset = StreamingDataset(data, shuffle=False, **filters)
    return [sample["__key__"] for sample in dataset]


def test_subsets_are_of_the_samples_as_they_are_stored(data: str) -> None:
    assert kept_of(data, subset=(20, 30)) == kept_of(data, subset=UserList([20, 30])) == KEYS[20:30]
    assert kept_of(data, subset=(0.0, 0.25)) + kept_of(data, subset=(0.25, 1.0)) == KEYS
    assert kept_of(data, subset=(20, 130), where=CONDITION) == [key for key in KEPT if 20 <= int(key) < 130]
    train, rest = (set(kept_of(data, subset=part, where=CONDITION)) for part in ((0.0, 0.8), (0.8, 1.0)))
    assert train | rest == set(KEPT)
    assert not train & rest
    assert StreamingDataset(data, subset=(0.0, 1.0)).fingerprint == StreamingDataset(data).fingerprint


def test_an_expression_of_pyarrow(data: str) -> None:
    asked = (pc.field("n") >= 10) & pc.field("lang").isin(["de"])
    assert kept_of(data, where=asked) == kept_of(data, where="n >= 10 and lang in ('de')") != []
    with pytest.raises(ConfigError, match=r"no column 'lange' .did you mean 'lang'"):
        StreamingDataset(data, where=pc.field("lange") == "de")


def test_keys_are_left_out(data: str, tmp_path: Path) -> None:
    rest = [key for key in KEYS if key not in {"00007", "00011"}]
    assert kept_of(data, exclude=["00011", "00007", "nobody"]) == rest
    (tmp_path / "bad.txt").write_text('00007\n\n{"key": "00011", "url": "x.tar"}\n')
    assert kept_of(data, exclude=tmp_path / "bad.txt") == rest
    assert kept_of(data, exclude=tmp_path / "bad.txt", where=CONDITION) == [key for key in KEPT if key in rest]
    (tmp_path / "bad.txt").write_text('{"url": "x.tar"}\n')
    with pytest.raises(ConfigError, match=r"bad.txt, line 1: not a sample key"):
        StreamingDataset(data, exclude=tmp_path / "bad.txt")
    # As editors write it, of keys with characters at which Python's texts break into lines.
    (tmp_path / "bad.txt").write_bytes("\ufeff00007\r\na\u2028b\x0b\r\n\u0085".encode())
    found = excluded_keys(Storage(), tmp_path / "bad.txt")
    assert found == ("00007", "a\u2028b\x0b", "\u0085")
    with pytest.raises(ConfigError, match="expected keys"):
        StreamingDataset(data, exclude=[7])  # type: ignore[list-item]


def test_a_split_by_hash_crosses_no_group(data: str) -> None:
    train, rest = (set(kept_of(data, where=f"hash(repo) % 100 {sign} 70")) for sign in ("<", ">="))
    assert train | rest == set(KEYS)
    assert {row(int(key))["repo"] for key in train}.isdisjoint(row(int(key))["repo"] for key in rest)
    assert train
    assert rest


@pytest.mark.parametrize(
    ("filters", "problem"),
    [
        ({"where": "n > 1000"}, "where='n > 1000' keeps none of the 170 samples"),
        ({"where": "m > 1"}, "no column 'm'.*there are: __key__, lang, n, repo"),
        ({"where": "lang > 1"}, r"cannot compare column 'lang' \(text\) > 1"),
        ({"where": 3}, "expected a condition such as"),
        ({"subset": (5, 500)}, "no such samples; the data set has 170"),
        ({"subset": (0.5, 0.2)}, "expected two ascending shares"),
        ({"subset": (True, 3)}, "expected two ascending shares"),
        ({"subset": "0:3"}, "expected two ascending shares"),
        *(({"exclude": wrong}, "exclude: expected keys .str., or the path of a file of them, got")
          for wrong in (3, np.array(0.5), b"ab", {"a": 1}, [None])),
        ({"view": "gone"}, "no view 'gone'.*there are: none"),
        ({"view": "../up"}, "expected letters, digits"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_the_start(data: str, filters: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){problem}"):
        StreamingDataset(data, **filters)


def test_a_set_without_sample_tables_says_so(tmp_path: Path) -> None:
    data = write(str(tmp_path))
    for file in (tmp_path / "_shardstream/samples").iterdir():
        file.unlink()
    with pytest.raises(IndexMissingError, match="has no sample table for this shard, which where= and exclude= need"):
        StreamingDataset(data, where="n > 1")


def test_a_sample_table_of_a_shard_of_the_same_size_is_refused(tmp_path: Path) -> None:
    data = write(str(tmp_path))
    assert (tmp_path / "000001.tar").stat().st_size == (tmp_path / "000002.tar").stat().st_size
    tables = tmp_path / "_shardstream/samples"
    (tables / "000001.tar.parquet").write_bytes((tables / "000002.tar.parquet").read_bytes())
    with pytest.raises(IndexMismatchError, match=r"000001.tar: its sample table does not match the shard"):
        StreamingDataset(data, where=CONDITION)


def test_a_set_that_is_indexed_on_the_fly_is_filtered_by_keys(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", max_samples=20, index=False) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:05d}", "cls": number})
    assert kept_of(f"{tmp_path}/", where="__key__ between '00013' and '00030'") == KEYS[13:31]


# ----------------------------------------------------------------------------------------------------------- views


def test_saved_view_selects_as_its_options_do(data: str) -> None:
    view = View(name="clean-v2", where=CONDITION, subset=(0.0, 0.9), excluded=("00000",))
    save_view(Storage(), data.rstrip("/"), view)
    expected = [key for key in KEPT if int(key) < 153 and key != "00000"]
    assert kept_of(data, view="clean-v2") == expected
    narrowed = kept_of(data, view="clean-v2", where="n < 60", exclude=["00003"])
    assert narrowed == [key for key in expected if int(key) < 60 and key != "00003" and row(int(key))["n"] is not None]
    dataset = StreamingDataset(data, view="clean-v2")
    assert view.hash in dataset.fingerprint
    with pytest.raises(ConfigError, match="has subset="):
        StreamingDataset(data, view="clean-v2", subset=(0, 5))
    with pytest.raises(ConfigError, match="there are: clean-v2"):
        StreamingDataset(data, view="clean")
    save_view(Storage(), data.rstrip("/"), replace(view, name="all-of-it", subset=None))
    assert kept_of(data, view="all-of-it", subset=(0, 60)) == [key for key in expected if int(key) < 60]
    for other in ({"where": "n > 1"}, {"subset": None}, {"excluded": ()}, {"columns": {"score": "1"}}):
        with pytest.raises(ConfigError, match="another view of this name"):
            save_view(Storage(), data.rstrip("/"), replace(view, **other))
    save_view(Storage(), data.rstrip("/"), view)  # the same once more
    left_out = Path(data).parent / "left-out.txt"
    left_out.write_text(f"{expected[1]}\n")
    assert kept_of(data, view="clean-v2", exclude=left_out) == [expected[0], *expected[2:]]
    file = Path(data) / "_shardstream/views/clean-v2.json"
    file.write_text(file.read_text().replace("n % 3", "n % 2"))
    with pytest.raises(IndexFormatError, match="changed by hand"):
        StreamingDataset(data, view="clean-v2")
    file.unlink()
    (file.parent / "all-of-it.json").unlink()


def test_the_page_about_filters_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/filters.md").read_text()
    code = "".join(block.code for block in blocks(page) if block.language == "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text(code)
    runpy.run_path("page.py")
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert expected
    assert capsys.readouterr().out.splitlines() == expected


# ----------------------------------------------------------------------------------------------------- many ranks


def test_ranks_share_the_work(data: str, monkeypatch: pytest.MonkeyPatch, join_job: Callable[[Any], None]) -> None:
    join_job(ThreadPeers(4))
    looked: list[int] = []
    shard = filters._Work._shard
    monkeypatch.setattr(filters._Work, "_shard", lambda self, one: (looked.append(one), shard(self, one))[1])
    found = on_ranks(lambda: StreamingDataset(data, where=CONDITION).fingerprint, 4)
    assert len(set(found)) == 1
    assert sorted(looked) == list(range(5))  # each shard by one rank
    errors = on_ranks(lambda: StreamingDataset(data, where="m > 3"), 4)
    assert all(isinstance(error, ConfigError) and "no column 'm'" in str(error) for error in errors), errors


@pytest.mark.parametrize("as_file", [False, True])
def test_keys_to_leave_out_are_those_of_each_rank(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join_job: Callable[[Any], None], as_file: bool
) -> None:
    """Those of a set that rank 0 alone opens are not taken for them."""
    files = [tmp_path / key for key in KEYS[:2]]
    for file in files:
        file.write_text(file.name)
    other, mine = files if as_file else ([key] for key in KEYS[:2])
    wanted = StreamingDataset(data, exclude=mine).fingerprint
    monkeypatch.setattr(shared_results, "PEER_WAIT_S", 0.1)
    peers = ThreadPeers(2)
    join_job(peers)

    def fingerprint() -> str:
        if peers.rank == 0:
            StreamingDataset(data, exclude=other)
        return StreamingDataset(data, exclude=mine).fingerprint

    assert on_ranks(fingerprint, 2) == [wanted] * 2


def test_the_same_filter_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loader of it reads no sample table, and neither does another part of it; but those that changed."""
    data, reads, read = write(str(tmp_path)), list[str](), filters.read_sample_columns

    def noted(buffer: Any, names: Any, source: str, **options: Any) -> Any:
        reads.append(source)
        return read(buffer, names, source, **options)

    monkeypatch.setattr(filters, "read_sample_columns", noted)
    first = StreamingDataset(data, where=CONDITION, exclude=KEPT[:1])
    assert len(reads) == 5
    again = StreamingDataset(data, where=CONDITION, exclude=KEPT[:1], seed=3)
    half = StreamingDataset(data, where=CONDITION, exclude=KEPT[:1], subset=(0, NUM // 2))
    assert len(reads) == 5
    assert again.fingerprint == first.fingerprint != half.fingerprint
    assert [sample["__key__"] for sample in again] == KEPT[1:]
    assert [sample["__key__"] for sample in half] == [key for key in KEPT[1:] if int(key) < NUM // 2]
    assert len(StreamingDataset(data, where=CONDITION)) == len(KEPT)
    assert len(reads) == 10
    path = tmp_path / "_shardstream/samples/000001.tar.parquet"
    table = SampleTable.from_parquet(path.read_bytes(), "table")
    columns = {**table.columns, "n": pa.nulls(table.num_samples, pa.int64())}
    path.write_bytes(replace(table, columns=columns).to_parquet())
    other = StreamingDataset(data, where=CONDITION)
    assert {sample["__key__"] for sample in other} == {*KEPT, *KEYS[41:82]}
    # Of a store that tells no versions nobody knows what changed.
    info = Storage.info
    monkeypatch.setattr(Storage, "info", lambda *given: replace(info(*given), version=None))
    assert [len(StreamingDataset(data, where=CONDITION)) for _ in range(2)] == [len(other)] * 2
    assert len(reads) == 10 + 5 + 2 * 5


# ----------------------------------------------------------------------------------------------- bytes that are read


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MiniS3Server, str, dict[str, str]]]:
    """300 samples of 100 KB in a bucket."""
    with MiniS3Server() as server:
        url = server.create_bucket("images")
        write(f"{url}/train", server.storage_options, payload=100_000, num=300)
        yield server, f"{url}/train/", server.storage_options


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_filtered_out_is_not_fetched(images: tuple[MiniS3Server, str, dict[str, str]], shuffle: bool) -> None:
    server, url, options = images
    dataset = StreamingDataset(
        url, where="hash(__key__) % 10 = 4", storage_options=options, decode=None, shuffle=shuffle
    )
    server.clear_log()
    with DataLoader(dataset, batch_size=4, last_batch="partial") as loader:
        batches = list(loader)
        counted = loader.metrics()["fetched_bytes"]
    keys = [key for batch in batches for key in batch["__key__"]]
    for batch in batches:
        for key, value in zip(batch["__key__"], batch["bin"], strict=True):
            assert bytes(value) == int(key).to_bytes(4, "little") * 25_000
    assert 15 < len(keys) == len(set(keys)) == len(dataset) < 50
    # A range that a busy server kept waiting is asked for a second time: it counts once.
    gets = {(entry["path"], str(entry["range"])): int(str(entry["bytes"])) for entry in data_gets(server.log(), url)}
    read = sum(gets.values())
    assert read <= 1.3 * 100_000 * len(keys), (read, len(keys))
    assert counted == read


def test_the_node_cache_keeps_what_a_filter_reads(
    images: tuple[MiniS3Server, str, dict[str, str]], tmp_path: Path
) -> None:
    server, url, options = images
    asked: dict[str, Any] = {"storage_options": options, "cache_dir": tmp_path, "decode": None}
    few = StreamingDataset(url, where="hash(__key__) % 10 = 4", **asked)
    first = keys_of(few)
    server.clear_log()
    again = StreamingDataset(url, where="hash(__key__) % 10 = 4", **asked)
    assert keys_of(again) == first
    assert not data_gets(server.log(), url)
    other = StreamingDataset(url, where="hash(__key__) % 10 = 5", fields=("bin",), **asked)
    with DataLoader(other, batch_size=4, last_batch="partial") as loader:
        for batch in loader:
            for key, value in zip(batch["__key__"], batch["bin"], strict=True):
                assert bytes(value) == int(key).to_bytes(4, "little") * 25_000
    assert data_gets(server.log(), url)


def test_damage_to_what_is_filtered_out_harms_nobody(tmp_path: Path) -> None:
    """Of small records whole chunks are read: a damaged one that nobody wants is told from those that are kept."""
    data = write(str(tmp_path), payload=70_000)
    shard = tmp_path / "000000.tar"
    content = bytearray(shard.read_bytes())
    dataset = StreamingDataset(data, where=CONDITION, max_bad_samples=0)
    lost = next(number for number in range(41) if not fits(number))
    at = content.index(lost.to_bytes(4, "little") * 100)
    content[at + 40_000] ^= 1
    shard.write_bytes(content)
    with DataLoader(dataset, batch_size=8, last_batch="partial") as loader:
        assert sorted(key for batch in loader for key in batch["__key__"]) == KEPT
        assert loader.metrics()["bad"] == []
    kept = int(KEPT[3])
    at = content.index(kept.to_bytes(4, "little") * 100)
    content[at + 40_000] ^= 1
    shard.write_bytes(content)
    dataset = StreamingDataset(data, where=CONDITION, max_bad_samples=1)
    with DataLoader(dataset, batch_size=8, last_batch="partial") as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
        assert [bad["key"] for bad in loader.metrics()["bad"]] == [KEPT[3]]
        assert KEPT[3] not in keys
        assert set(keys) <= set(KEPT)  # the stand-in, too


def test_of_pieces_that_a_filter_reads_a_damaged_sample_alone_is_lost(tmp_path: Path) -> None:
    data = write(str(tmp_path), payload=200_000, num=41)
    where = "n % 8 = 3"
    kept = kept_of(data, where=where)
    shard = tmp_path / "000000.tar"
    content = bytearray(shard.read_bytes())
    for lost in (4, int(kept[1])):  # of the first nobody reads the bytes
        content[content.index(lost.to_bytes(4, "little") * 100) + 40_000] ^= 1
    shard.write_bytes(content)
    dataset = StreamingDataset(data, where=where, decode=None, max_bad_samples=1, on_error="skip")
    wanted = dataset.source.chunk(0)
    layout = fetch_range(
        dataset.source.storage,
        wanted,
        memoryview(bytearray(wanted.num_bytes)),
        known=dataset.source._facts_of(wanted),
    )
    assert list(layout.damage) == [int(kept[1])]  # what was not read is not called damaged
    with DataLoader(dataset, batch_size=1, last_batch="partial", num_threads=0) as loader:
        found = [
            (key, value) for batch in loader for key, value, valid in zip(
                batch["__key__"], batch["bin"], batch["__valid__"], strict=True
            ) if valid
        ]  # fmt: skip
        said = loader.metrics()
    assert [bad["key"] for bad in said["bad"]] == [kept[1]]
    assert sorted(key for key, _ in found) == [key for key in kept if key != kept[1]]
    assert all(bytes(value) == int(key).to_bytes(4, "little") * 50_000 for key, value in found)
    assert said["fetched_bytes"] < 3 * 200_000 * len(kept)  # in pieces, those of one chunk twice


def test_memory_is_counted_by_what_is_read(images: tuple[MiniS3Server, str, dict[str, str]]) -> None:
    """Chunks of 4 MB do not fit into the limit, what a filter leaves of them does."""
    _, url, options = images
    shuffle = ShuffleConfig(lanes=4, window=40)
    few = StreamingDataset(url, where="hash(__key__) % 10 = 4", storage_options=options, shuffle=shuffle)
    with DataLoader(few, batch_size=4, memory_limit="14MB") as loader:
        assert len(list(loader)) == len(few) // 4
    most = StreamingDataset(url, where="hash(__key__) % 10 != 4", storage_options=options, shuffle=shuffle)
    with (
        DataLoader(most, batch_size=4, memory_limit="14MB") as loader,
        pytest.raises(ConfigError, match="memory_limit"),
    ):
        next(iter(loader))


# ------------------------------------------------------------------------------------------------------- the bits


@example([(256, 5), (9, 5)], 1)
@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 10)), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_kept_samples_are_found_by_rank(shards: list[tuple[int, int]], seed: int) -> None:
    """Against a list of them: any chunks, any bits, any range."""
    draw = np.random.default_rng(seed)
    masks = [draw.random(count) < tenths / 10 for count, tenths in shards]
    columns: dict[str, list[int]] = {name: [] for name in ("shard", "first_sample", "num_samples")}
    for shard, (count, _) in enumerate(shards):
        cuts = np.unique(np.append(draw.integers(0, count, 7), [0, count])) if count else np.array([0])
        for first, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            for name, value in zip(columns, (shard, first, stop - first), strict=True):
                columns[name].append(value)
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    none = np.zeros(len(columns["shard"]), np.int64)
    table = ChunkTable(
        shards=tuple(ShardInfo(name=str(n), size_bytes=0, num_samples=count) for n, (count, _) in enumerate(shards)),
        **arrays, byte_start=none, byte_end=none, crc32c=none,
    )  # type: ignore[arg-type]  # fmt: skip
    kept = Kept(table, [np.packbits(mask, bitorder="little") for mask in masks])
    expected = [(shard, int(sample)) for shard, mask in enumerate(masks) for sample in np.flatnonzero(mask)]

    def listed(selected: Filtered) -> list[tuple[int, int]]:
        counts = selected.table.num_samples
        chunks = np.repeat(np.arange(counts.size), counts)
        offsets = np.arange(chunks.size) - np.repeat(np.cumsum(counts) - counts, counts)
        samples = selected.table.first_sample[chunks] + selected.inside(chunks, offsets)
        return list(zip(selected.table.shard[chunks].tolist(), samples.tolist(), strict=True))

    whole = Filtered.of(table, table, kept, "f")
    assert kept.total == len(expected)
    assert listed(whole) == expected
    low, high = sorted(draw.integers(0, len(expected) + 1, 2).tolist())
    part = whole.between(low, high)
    assert listed(part) == expected[low:high]
    inner = sorted(draw.integers(0, high - low + 1, 2).tolist())
    assert listed(part.between(*inner)) == expected[low:high][slice(*inner)]
    for shard, mask in enumerate(masks):
        first, stop = sorted(draw.integers(0, mask.size + 1, 2).tolist())
        assert kept.rows(shard, first, stop).tolist() == mask[first:stop].tolist()
        if shard:  # the digest of the first shards is that of a set that has no others
            alone = table.take(range(shard))
            bits = [np.packbits(one, bitorder="little") for one in masks[:shard]]
            assert Kept(alone, bits).digest == kept.digest_of(shard)


@given(st.floats(0, 1), st.integers(1, 10**12))
def test_shares_that_meet_leave_no_sample_out(share: float, count: int) -> None:
    parts = [Filter(subset=checked_subset(part)) for part in ((0.0, share), (share, 1.0)) if part[0] < part[1]]
    bounds = []
    for part in parts:
        try:
            bounds.append(part.bounds(count))
        except ConfigError:  # no sample in it
            continue
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
