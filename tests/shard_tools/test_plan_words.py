"""What `shard_tools plan` and the file of a mixture refuse, and with which words; keys that come in no step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import Balanced, DataLoader, Mixture, Packed, Schedule, StreamingDataset
from streaming.common.arguments import counted
from streaming.errors import ConfigError
from tests.support.sets.data_sets import mesh_of, write_set

pytestmark = pytest.mark.thorough

LENGTH = 64


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """60 documents of 1 to 150 tokens, in 3 classes."""
    folder, dice = tmp_path_factory.mktemp("docs"), np.random.default_rng(1)
    columns = {"tokens": lambda one: len(one["tok"]) // 2, "cls": lambda one: one["cls"]}
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=20, columns=columns) as writer:
        for number in range(60):
            tokens = 150 if number == 7 else int(dice.integers(1, 60))
            writer.write({"__key__": f"k{number:03d}", "tok": bytes(2 * tokens), "cls": number % 3})
    return f"{folder}/"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)], prog_name="shard_tools")


def state_of(dataset: Any, path: Path, steps: int = 3, **options: Any) -> list[list[str]]:
    """Save the state of a run after so many steps; return the keys of its batches."""
    with DataLoader(dataset, device_mesh=mesh_of(1, 0), **options) as loader:
        got = [batch["__key__"] for batch, _ in zip(loader, range(steps), strict=False)]
        path.write_text(json.dumps(loader.state_dict()))
    return got


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--padded",), "Packs need --length"),
        (("--packed", '{"column": "tokens"}'), "Packs need --length"),
        (("--length", 64, "--packed", '{"length": 32}'), "both give 'length'"),
        (("--length", 64, "--packed", '{"colum": "tokens"}'), "did you mean 'column'"),
        (("--length", 64, "--packed", "tokens"), "not JSON"),
        (("--length", 64, "--packed", '{"column": "words"}'), "'words'"),
        (("--length", 64, "--packed", '{"documents": 1}'), "no option 'documents' in a file"),
        (("--length", 64, "--packed", '{"self": 1}'), "no option 'self' in a file"),
        (("--length", 64, "--balanced", "cls"), "a set can be only one of these"),
        (("--balanced", "class"), "'class'"),
        (("--balanced", '{"by": "cls", "weigths": {}}'), "did you mean 'weights'"),
        (("--curriculum", '{"metric": "tokens", "schedule": {"shape": "linear"}}'), "'start' is missing"),
        (("--curriculum", '{"metric": "tokens", "schedule": {"shape": "rooot"}}'), "linear, root, cosine, steps"),
        (("--curriculum", '{"metric": "tokens", "shedule": 1}'), "did you mean 'schedule'"),
        (("--exclude", "nowhere.txt"), "nowhere.txt"),
        (("--global-batch-size", "0:4,0:8"), "gives one row twice"),
        (("--global-batch-size", "4:8,x"), "expected rows with numbers"),
        (("--thorough",), "--thorough is for --when"),
    ],
)
def test_arguments_that_do_not_fit_a_set(docs: str, arguments: tuple[object, ...], words: str) -> None:
    size = () if "--global-batch-size" in arguments else ("--batch-size", 2)
    result = run(docs, *size, *arguments)
    assert result.exit_code in (1, 2), result.output
    assert words in result.output
    assert isinstance(result.exception, SystemExit), result.exception


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"urls": "x/"}, "no option 'urls' in a file; write the shards as \"url\""),
        ({"self": 1}, "no option 'self' in a file"),
        ({"length": 64}, "'length' belongs in 'packed'"),
        ({"packed": 64}, 'packed: expected an object of options such as {"length": 8192}'),
        ({"packed": {"length": 64, "padding": 1}}, "no option 'padding'"),
        ({"packed": {"length": 64}, "balanced": {"by": "cls"}}, "a set can be only one of these"),
        ({"curriculum": {"metric": "tokens"}}, "schedule"),
    ],
)
def test_sources_of_a_file_that_cannot_work(docs: str, tmp_path: Path, source: dict[str, Any], words: str) -> None:
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps({"sources": {"a": {"url": docs, **source}}}))
    with pytest.raises(ConfigError) as caught:
        Mixture.from_file(path)
    assert words in str(caught.value)
    assert caught.value.__notes__ == ["of the source 'a'"]
    assert words in run(path, "--batch-size", 2).output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"url": "x/", "packed": {"length": 64}}, 'For a single set write {"sources": {"NAME": …}}'),
        ({"sources": {"a": "URL"}, "packed": {"length": 64}}, "'packed' beside \"sources\": each source has its own"),
        ({"sources": {"a": "URL"}, "self": 1}, "no option 'self' in a file"),
        ({"sources": {"a": "URL"}, "global_batch_size": 8}, "it belongs to the loader"),
        ({"sources": {"a": "URL"}, "shuffle": {"self": 1}}, "no option 'self'"),
    ],
)
def test_files_that_cannot_work(docs: str, tmp_path: Path, content: dict[str, Any], words: str) -> None:
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps(content).replace("URL", docs))
    with pytest.raises(ConfigError) as caught:
        Mixture.from_file(path)
    assert words in str(caught.value)


def test_sources_may_be_called_urls_and_self(docs: str, tmp_path: Path) -> None:
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps({"sources": {"self": docs, "urls": docs}}))
    assert Mixture.from_file(path).names == ("self", "urls")
    assert run(path, "--batch-size", 2).exit_code == 0


def test_training_opens_every_kind_of_a_file(docs: str, tmp_path: Path) -> None:
    path, packed = tmp_path / "mixture.json", {"url": docs, "packed": {"length": LENGTH, "overlong": "drop"}}
    path.write_text(json.dumps({"sources": {"a": packed, "b": {"sources": {"c": packed}}}}))
    by_hand = Packed(StreamingDataset(docs), LENGTH, overlong="drop")
    made = Mixture.from_file(path)
    assert made.source.fingerprints == dict.fromkeys(("a", "b/c"), by_hand.fingerprint)
    classes = {"by": "cls", "weights": {"0": 1, "1": 2, "2": 0}}
    content = {"sources": {"a": {"url": docs, "balanced": classes}}, "weights": {"a": 1}}
    path.write_text(json.dumps(content))
    balanced = Mixture.from_file(path, transforms={"a": lambda one: {"n": 1, "__key__": one["__key__"]}}).sources["a"]
    assert isinstance(balanced, Balanced)
    assert balanced[0]["n"] == 1


def test_keys_that_come_in_no_step_say_why(docs: str, tmp_path: Path) -> None:
    saved, excluded = tmp_path / "state.json", tmp_path / "keys.txt"
    excluded.write_text("k003\n")
    state_of(StreamingDataset(docs, exclude=str(excluded)), saved, batch_size=4)
    more = (docs, "--batch-size", 4, "--state", saved, "--exclude", excluded, "--when", "--key")
    assert run(*more, "k004").exit_code == 0
    result = run(*more, "k003")
    assert (result.exit_code, "is in the shards, but the set leaves it out" in result.output) == (1, True)
    state_of(Packed(StreamingDataset(docs), LENGTH, overlong="drop"), saved, batch_size=2)
    more = (
        docs,
        "--batch-size",
        2,
        "--state",
        saved,
        "--length",
        LENGTH,
        "--packed",
        '{"overlong": "drop"}',
        "--when",
        "--key",
    )
    result = run(*more, "k007")
    assert (result.exit_code, "is in no pack: it is longer than length=64 (overlong='drop')" in result.output) == (
        1,
        True,
    )
    assert (run(*more, "nobody").exit_code, "has the key 'nobody'" in run(*more, "nobody").output) == (1, True)


def test_a_document_in_several_packs_comes_in_the_step_of_each(docs: str, tmp_path: Path) -> None:
    saved = tmp_path / "state.json"
    got = state_of(Packed(StreamingDataset(docs), LENGTH), saved, steps=99, batch_size=2)
    result = run(docs, "--batch-size", 2, "--state", saved, "--length", LENGTH, "--when", "--key", "k007", "--step",
                 f"0..{len(got)}", "--json")  # fmt: skip
    found = json.loads(result.stdout)["rows"]
    due = [(step, pack) for step, packs in enumerate(got) for pack in packs if "k007" in pack]
    assert len(due) == 3
    assert [(row["step"], row["keys"]) for row in found] == due
    assert all("key" not in row for row in found)


def test_steps_before_a_state_had_the_batches_that_it_records(docs: str, tmp_path: Path) -> None:
    saved = tmp_path / "state.json"
    got = state_of(StreamingDataset(docs), saved, batch_size=4, steps=4)  # sample 20
    more = (docs, "--state", saved, "--who", "--step")
    for size in (4, 7):
        report = json.loads(run(*more, 1, "--batch-size", size, "--json").stdout)
        assert sorted(row["key"] for row in report["rows"]) == sorted(got[1])
        behind = json.loads(run(*more, 5, "--batch-size", size, "--json").stdout)
        assert (behind["at_step"], len(behind["rows"])) == (5, size)
    unknown = tmp_path / "unknown.json"
    unknown.write_text(json.dumps({**json.loads(saved.read_text()), "batch_sizes": None}))
    more = (docs, "--state", unknown, "--who", "--step")
    result = run(*more, 1, "--batch-size", 7)
    assert (result.exit_code, "batches before it had another size" in result.output) == (2, True)
    assert "steps from 3 on" in result.output
    assert run(*more, 3, "--batch-size", 7).exit_code == 0
    more = (docs, "--state", saved, "--who", "--step")
    refused = run(*more, 1, "--batch-size", 4, "--lanes", 4)
    assert (refused.exit_code, "--lanes has no effect with --state" in refused.output) == (2, True)
    beyond = run(docs, "--state", saved, "--who", "--step", 10**9, "--batch-size", 4, "--json")
    assert json.loads(beyond.stdout)["rows"][0]["epoch"] == 10**9 // 15


def test_packs_are_planned_by_tokens(docs: str) -> None:
    report = json.loads(run(docs, "--batch-size", 1, "--length", LENGTH, "--padded", "--json").stdout)
    padded = Packed(StreamingDataset(docs), LENGTH, padded=True)
    assert report["packs"]["packs"] == report["num_samples"] == len(padded)
    assert (report["packs"]["padded"], report["packs"]["split"]) == (True, 1)
    assert report["packs"]["fill"] == pytest.approx(padded.fill, abs=1e-3)
    shown = run(docs, "--batch-size", 4, "--length", LENGTH, "--padded").output
    assert f"{len(padded)} padded packs of at most 64 tokens" in shown
    assert "without collate_fn=list" in shown
    ramp = run(docs, "--global-batch-size", "0:4,20:8").output
    assert "4 samples from row 0 on, 8 samples from row 20 on" in ramp


def test_rows_that_grow_are_shown_by_row(docs: str, tmp_path: Path) -> None:
    lengths = {0: 16, 6: 32, 14: 64}
    dataset, saved = Packed(StreamingDataset(docs), Schedule.steps(lengths)), tmp_path / "state.json"
    shown = run(docs, "--batch-size", "0:4,8:2", "--length", "0:16,6:32,14:64")
    parts = [(0, 16, 16), (6, 32, 8), (8, 32, 4), (14, 64, 2)]
    said = ", ".join(f"{rows} of {length} tokens from row {row} on" for row, length, rows in parts)
    assert f"rows      a batch has {said}\n" in shown.output
    described = {"sources": {"t": {"url": docs, "packed": {"length": Schedule.steps(lengths).to_dict()}}}}
    (tmp_path / "mixture.json").write_text(json.dumps(described))
    assert Mixture.from_file(tmp_path / "mixture.json").source.items == dataset.source.items
    for what in ((docs, "--length", "0:16,6:32,14:64"), (tmp_path / "mixture.json",)):
        packs = json.loads(run(*what, "--batch-size", "0:4,8:2", "--json").stdout)["packs"]
        assert [(one["from"], one["length"], one["rows"]) for one in packs["rows"]] == parts
        assert (packs["length"], packs["packs"]) == (LENGTH, len(dataset))
    assert "rows" not in json.loads(run(docs, "--batch-size", 4, "--length", 64, "--json").stdout)["packs"]
    got = state_of(dataset, saved, batch_size=4, num_threads=0)
    for length, each in (("0:16,6:32,14:64", 1), ("0:32,99:64", 2), ("64", 1)):
        due = [4, 4, 2, 2, each]  # up to row 16, where the state stands, as that records them; then as they are given
        asked = (docs, "--batch-size", 4, "--length", length, "--state", saved, "--who", "--step", "0..5")
        report = json.loads(run(*asked, "--json").stdout)
        assert [row["num_rows"] for row in report["rows"]] == [count for count in due for _ in range(4)]
        for step, batch in enumerate(got):
            rows = [row for row in report["rows"] if row["step"] == step]
            assert {key for row in rows for key in row["keys"]} == {key for row in batch for key in row}
        assert ", in 4 rows)" in run(*asked).output


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [(1, "shard", "1 shard"), (0, "shard", "0 shards"), (1, "batch", "1 batch"), (2000, "batch", "2,000 batches"),
     (4, "process", "4 processes")],
)  # fmt: skip
def test_numbers_with_their_nouns(number: int, noun: str, told: str) -> None:
    assert counted(number, noun) == told


def test_a_plan_of_one_shard(tmp_path: Path) -> None:
    write_set(tmp_path, (1,))
    told = CliRunner().invoke(cli, ["plan", f"{tmp_path}/", "--dp", "1", "--batch-size", "1"]).output
    assert "data      1 sample in 1 chunk of 1 shard," in told
    assert "1 data rank, 1 process each" in told
    assert "1 batch, 1 sample\n" in told
