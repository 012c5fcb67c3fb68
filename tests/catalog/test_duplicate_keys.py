"""Keys that come twice, and fields of one sample that do not stand together: read as they are, and cured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from webdataset.tariterators import group_by_keys, tar_file_iterator

from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, DuplicateKeyError
from streaming.shards.tar.keys import KeyLines, surely_unique
from tests.support.sets.index_files import change_document
from tests.support.sets.tars import write_tar

TWICE = [("a.txt", b"1"), ("a.cls", b"1"), ("b.txt", b"2"), ("b.cls", b"2"), ("a.txt", b"3"), ("a.cls", b"3")]
SIDE_BY_SIDE = [("a.txt", b"1"), ("a.cls", b"1"), ("a.txt", b"3"), ("a.cls", b"3"), ("b.txt", b"2"), ("b.cls", b"2")]
SCATTERED = [("a.txt", b"1"), ("b.txt", b"2"), ("c.txt", b"3"), ("b.cls", b"2"), ("a.cls", b"1"), ("c.cls", b"3")]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def samples(url: Path, **options: object) -> list[tuple[object, object, object]]:
    dataset = StreamingDataset(str(url), shuffle=False, **options)  # type: ignore[arg-type]
    return [
        (sample["__key__"], sample.get("txt"), sample.get("cls"))
        for sample in map(dataset.__getitem__, range(len(dataset)))
    ]


@pytest.mark.parametrize("members", [TWICE, SIDE_BY_SIDE, SCATTERED], ids=["twice", "side-by-side", "scattered"])
def test_refused_by_default_with_cures_that_work(tmp_path: Path, members: list[tuple[str, bytes]]) -> None:
    folder = write_tar(tmp_path / "in" / "x.tar", members).parent
    with pytest.raises(DuplicateKeyError, match=r"reshard SOURCE TARGET --dedupe.*--key-prefix.*duplicate_keys"):
        StreamingDataset(str(folder))
    assert len(StreamingDataset(str(folder), duplicate_keys="keep")) >= 3
    assert run("reshard", folder, tmp_path / "refused").exit_code == 1
    done("reshard", folder, tmp_path / "deduped", "--dedupe")
    wanted = {"a": ("a", "1", 1), "b": ("b", "2", 2), "c": ("c", "3", 3)}
    there = sorted({name[0] for name, _ in members})
    assert samples(tmp_path / "deduped") == [wanted[key] for key in there]
    done("reshard", folder, tmp_path / "all", "--key-prefix", "{shard}-{number}-")
    keys = [key for key, _, _ in samples(tmp_path / "all")]
    assert keys[0] == "x-000000000-a"
    assert len(set(keys)) == len(keys) == len(StreamingDataset(str(folder), duplicate_keys="keep"))
    done("verify", tmp_path / "deduped")
    done("verify", tmp_path / "all")


def test_kept_as_webdataset_has_it_and_resumed_exactly(tmp_path: Path) -> None:
    folder = write_tar(tmp_path / "in" / "x.tar", TWICE).parent
    kept = [("a", "1", 1), ("b", "2", 2), ("a", "3", 3)]
    assert samples(folder, duplicate_keys="keep") == kept
    with (folder / "x.tar").open("rb") as file:
        members = ({**member, "__url__": ""} for member in tar_file_iterator(file))
        theirs = [(sample["__key__"], sample["txt"].decode(), int(sample["cls"])) for sample in group_by_keys(members)]
    assert theirs == kept
    assert run("index", folder).exit_code == 1
    done("index", folder, "--duplicate-keys", "keep")
    assert samples(folder) == kept  # the index knows
    assert run("verify", folder).exit_code == 1
    done("verify", folder, "--duplicate-keys", "keep")
    assert json.loads(done("cat", folder, "a", "--json"))["number"] == 0
    dataset = StreamingDataset(str(folder))
    with DataLoader(dataset, batch_size=1) as loader:
        whole = [batch["txt"] for batch in loader]
    with DataLoader(dataset, batch_size=1) as loader:
        iterator = iter(loader)
        begun = [next(iterator)["txt"]]
        state = loader.state_dict()
    with DataLoader(dataset, batch_size=1) as loader:
        loader.load_state_dict(state)
        assert begun + [batch["txt"] for batch in loader] == whole


def test_of_two_that_share_a_key_the_bad_one_is_dropped(tmp_path: Path) -> None:
    folder, bad = write_tar(tmp_path / "in" / "x.tar", TWICE).parent, tmp_path / "bad.jsonl"

    def not_one(text: bytes) -> int:
        return 1 // (int(text) - 1)

    dataset = StreamingDataset(
        str(folder), duplicate_keys="keep", decode={"txt": not_one}, on_error="skip", bad_samples_file=str(bad)
    )
    with DataLoader(dataset, batch_size=1) as loader:
        list(loader)
    done("index", folder, "--duplicate-keys", "keep")
    done("reshard", folder, tmp_path / "left", "--drop", bad, "--key-prefix", "{number}-")
    assert [text for _, text, _ in samples(tmp_path / "left")] == ["2", "3"]


def test_a_stream_without_an_index_keeps_them_too(tmp_path: Path) -> None:
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(gzip.compress(write_tar(tmp_path / "x.tar", SIDE_BY_SIDE).read_bytes()))
    with DataLoader(
        StreamingDataset(str(packed), duplicate_keys="keep", shuffle=False), batch_size=3, epoch_size=3
    ) as loader:
        assert [batch["txt"] for batch in loader] == [["1", "3", "2"]]


def test_dedupe_joins_over_shards_in_any_order_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    numbers = [f"{number:03d}" for number in range(40)]
    write_tar(folder / "0.tar", [(f"{number}.txt", number.encode()) for number in numbers])
    second = [[(f"{number}.cls", number.encode()), (f"{number}.txt", b"later")] for number in reversed(numbers)]
    write_tar(folder / "1.tar", [one for pair in second for one in pair[: 1 + (pair[0][0] < "020")]])
    write_tar(folder / "2.tar", [(f"{number}.txt", b"later") for number in numbers[:5]])
    done("index", folder)
    report = json.loads(
        done("reshard", folder, tmp_path / "out", "--dedupe", "--shuffle", "--max-samples", 7, "--json")
    )
    assert (report["num_samples"], report["num_joined"], report["num_duplicates"]) == (40, 40, 5)
    got = samples(tmp_path / "out")
    assert sorted(got) == [(number, number, int(number)) for number in numbers]
    assert got != sorted(got)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")}
    for path in sorted((tmp_path / "out").glob("*.tar"))[3:]:  # as if it had been stopped
        path.unlink()
    journal = tmp_path / "out" / "_shardstream" / "convert.json"
    change_document(journal, complete=False)
    done("reshard", folder, tmp_path / "out", "--dedupe", "--shuffle", "--max-samples", 7)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")} == whole


def test_what_comes_twice_over_shards_names_the_cure(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for shard in range(2):
        write_tar(folder / f"{shard}.tar", [("a.txt", b"%d" % shard)])
    done("index", folder)
    refused = run("reshard", folder, tmp_path / "out")
    assert refused.exit_code == 1
    assert "--dedupe" in refused.stderr
    done("reshard", folder, tmp_path / "out", "--key-prefix", "{shard}/", "--overwrite")
    assert samples(tmp_path / "out") == [("0/a", "0", None), ("1/a", "1", None)]
    assert "{thing}" in run("reshard", folder, tmp_path / "o", "--key-prefix", "{thing}").stderr
    with pytest.raises(ConfigError, match="duplicate_keys: expected one of error, keep"):
        StreamingDataset(str(folder), duplicate_keys="drop")  # type: ignore[arg-type]


def test_thousands_of_them_end_in_a_sum(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_tar(folder / "0.tar", [(f"{number}.txt", b"") for number in range(1500)])
    write_tar(folder / "1.tar", [(f"{number}.txt", b"") for number in range(1500)])
    done("index", folder)
    shown = run("verify", folder)
    assert shown.exit_code == 1
    assert len(shown.stdout.splitlines()) < 30
    assert "980 more of kind duplicate" in shown.stdout
    findings = json.loads(run("verify", folder, "--json").stdout)["findings"]
    assert len(findings) == 1000
    assert findings[-1]["what"].endswith("and so do 500 more")


def test_names_that_ascend_show_no_duplicates_if_they_end_alike() -> None:
    def lines(*names: bytes, end: bytes) -> KeyLines:
        return KeyLines(b"\n".join(names) + b"\n", end, len(names), np.array([names[0], names[-1]]))

    first, same = lines(b"a.cls", b"b.cls", end=b".cls\n"), lines(b"c.cls", b"d.cls", end=b".cls\n")
    assert surely_unique([first, same])
    assert not surely_unique([same, first])
    assert not surely_unique([first, lines(b"b.jpg", b"c.jpg", end=b".jpg\n")])
    assert not surely_unique([first, ["e"]])
