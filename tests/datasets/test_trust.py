"""What a file may set: every option that describes data; none of another kind unless it is trusted with it."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from streaming import Balanced, Curriculum, Mixture, Packed, StreamingDataset, Windows
from streaming.common.arguments import option_names
from streaming.errors import ConfigError
from streaming.sets.datasets.trust import DATA_OF_STORES, FILES, OF_THE_MACHINE, check_trusted, refusable
from streaming.storage import STORAGE_OPTIONS
from streaming.storage.base import options as of_stores
from tests.support.code.cure_messages import tool
from tests.support.sets.data_sets import write_set

# Every option of the classes that a file describes, decided one by one: it says what the data is, or how it is ordered.
DATA = {
    Mixture: "sources weights repeats quotas unit ends shuffle seed batches fetch_bytes max_bad_samples classes",
    StreamingDataset: (
        "urls index fields decode where view subset exclude shuffle seed duplicate_keys allow_unfinished on_error "
        "max_bad_samples classes version"
    ),
    Packed: (
        "documents length column field dtype overlong mask_field shift_labels labels_across pad_id ignore_id max_docs "
        "multiple padded stride overlap_labels budgets alike alike_across_ranks carry placeholder"
    ),
    Windows: "recordings every video columns edge size clocks carry names groups",
    Balanced: "dataset by weights power nulls quotas name_sources",
    Curriculum: "dataset metric schedule by buckets nulls quotas name_sources",
}
LOOKED_INTO = {"storage_options", "mirrors"}
CODE = {"transform"}  # a file cannot hold it


@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
def test_every_option_is_data_or_needs_trust(kind: type) -> None:
    others = set(option_names(kind)) - set(DATA[kind].split()) - LOOKED_INTO - CODE
    assert others <= OF_THE_MACHINE.keys(), "decide: does it describe data? If not, add it to OF_THE_MACHINE"
    assert not set(DATA[kind].split()) & OF_THE_MACHINE.keys()


def described(folder: Path, at: str = "source", **options: Any) -> Path:
    """A file whose mixture, source, nested mixture or nested source has these options."""
    if not (folder / "set").exists():
        write_set(folder / "set", (8,))
    source: dict[str, Any] = {"url": str(folder / "set")}
    whole: dict[str, Any] = {"sources": {"a": source}}
    inner: dict[str, Any] = {"sources": {"b": {"url": str(folder / "set")}}, "weights": {"b": 1}, "ends": "all"}
    whole["sources"]["in"] = inner
    {"mixture": whole, "source": source, "inner": inner, "inner source": inner["sources"]["b"]}[at].update(options)
    path = folder / "mixture.json"
    path.write_text(json.dumps(whole))
    return path


PLACES = {"source": "'a'", "inner source": "'in/b'"}
OPTIONS: dict[str, Any] = {
    "bad_samples_file": "bad.jsonl", "cache_dir": "cache", "cache_limit": "1GB", "max_gzip_ratio": 1e9,
}  # fmt: skip
ALIASES = of_stores._ALIASES


def store_options() -> list[tuple[str, str]]:
    names = [(name, name) for name in sorted(STORAGE_OPTIONS - {"anon", "mirrors"})]
    return names + [(alias, name) for alias, name in ALIASES.items()]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_machine_are_refused(tmp_path: Path, place: str, name: str) -> None:
    path = described(tmp_path, place, **{name: OPTIONS[name]})
    with pytest.raises(ConfigError) as caught:
        Mixture.from_file(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, {PLACES[place]}: {name}: ")
    assert f'trust=["{name}"]' in text
    assert f"--trust {name}" in text


@pytest.mark.parametrize("at", ["mixture", "inner"])
def test_a_mixture_names_no_file_to_be_written(tmp_path: Path, at: str) -> None:
    profile = tmp_path / "profile"
    profile.write_text("export A=1\n")
    with pytest.raises(ConfigError, match="lines are appended to this file"):
        Mixture.from_file(described(tmp_path, at, bad_samples_file=str(profile)))
    assert profile.read_text() == "export A=1\n"


@pytest.mark.parametrize(("given", "name"), store_options())
@pytest.mark.parametrize("way", ["storage_options", "mirrors", "mirrors of storage_options"])
def test_options_of_stores_are_refused_wherever_they_stand(tmp_path: Path, given: str, name: str, way: str) -> None:
    bad = {given: "http://evil/"}
    ways: dict[str, Any] = {
        "storage_options": {"storage_options": bad},
        "mirrors": {"mirrors": [{"url": "s3://b/", **bad}]},
        "mirrors of storage_options": {"storage_options": {"mirrors": {"s3://a": {"url": "s3://b", **bad}}}},
    }
    path = described(tmp_path, **ways[way])
    with pytest.raises(ConfigError, match="a file may say only what the data is") as caught:
        Mixture.from_file(path)
    assert f'trust=["{name}"]' in str(caught.value)
    assert f": {given}: " in str(caught.value)


PATHS = set(FILES) | {"index", "urls"}  # an index and shards are read by the names and formats of their files


@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
def test_every_option_that_takes_a_path_is_known(kind: type) -> None:
    text = str(inspect.signature(kind.__init__))
    taken = {part.rpartition(" ")[2] for part in re.split(r": (?=[^:]*PathLike)", text)[:-1]} - {"", "text"}
    assert taken <= PATHS | set(OF_THE_MACHINE) | {"documents"}, "decide: may a file name any file for it?"


OUTSIDE = ("../keys.txt", "{0}/keys.txt", "{0}/in/../keys.txt", "file://{0}/keys.txt", "{0}/in/link", "s3://bucket/keys.txt",
           "http://127.0.0.1:1/keys.txt", "/dev/zero", "~/keys.txt", "{0}/input/keys.txt")  # fmt: skip
INSIDE = ("{0}/in/keys.txt", "file://{0}/in/keys.txt", "{0}/in/deep/../keys.txt", "{0}/in/own")


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Files of keys beside a description, and outside of its folder; links to both."""
    folder = tmp_path / "in"
    for name in ("in", "in/deep", "input"):
        (tmp_path / name).mkdir()
    for name in ("keys.txt", "in/keys.txt", "input/keys.txt"):
        (tmp_path / name).write_text("00000001\nsecret = hunter2\n")
    (folder / "link").symlink_to(tmp_path / "keys.txt")
    (folder / "own").symlink_to(folder / "keys.txt")
    return folder


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_files_outside_the_folder_are_not_read(
    beside: Path, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(beside)
    given = name.format(beside.parent)
    for path in (described(beside, place, exclude=given), Path("mixture.json")):
        with pytest.raises(
            ConfigError, match="exclude: a file may say only what the data is; it names a file outside"
        ) as caught:
            Mixture.from_file(path)
        assert 'trust=["exclude"]' in str(caught.value)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", [*INSIDE, "keys.txt", "./deep/../keys.txt", "../keys.txt"])
def test_files_of_the_folder_are_read_and_not_shown(
    beside: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(beside)
    trust = ["exclude"] if name.startswith("../") else []
    left = Mixture.from_file(described(beside, exclude=name.format(beside.parent)), trust=trust).sizes["a"]
    assert left in {7, 8}
    assert "keys are in none of the shards" in caplog.text
    assert "keys.txt" in caplog.text or "own" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(("where", "name", "is_own"), [
    ("s3://b/mix/m.json", "s3://b/mix/keys.txt", True), ("s3://b/mix/m.json", "s3://b/mix/a/keys.txt", True),
    ("s3://b/mix/m.json", "s3://b/other/keys.txt", False), ("s3://b/mix/m.json", "s3://b/mix/../keys.txt", False),
    ("s3://b/mix/m.json", "s3://b/mixed/keys.txt", False), ("s3://b/mix/m.json", "/etc/passwd", False),
    ("s3://b/m.json", "s3://b/keys.txt", True), ("s3://b/m.json", "s3://c/keys.txt", False),
    ("https://h/d/m.json?sig=1", "https://h/d/keys.txt?sig=2", True), ("https://h/m.json", "http://h/keys.txt", False),
    ("/a/m.json", "s3://b/keys.txt", False),
])  # fmt: skip
def test_files_of_a_description_elsewhere(where: str, name: str, is_own: bool) -> None:
    content = {"sources": {"a": {"url": "s3://b/", "exclude": name}}}
    for trust in (frozenset({"exclude"}), None):
        check_trusted(content, where, trust)
    if is_own:
        check_trusted(content, where, frozenset())
        return
    with pytest.raises(ConfigError, match="it names a file outside"):
        check_trusted(content, where, frozenset())


def test_what_describes_data_is_taken(tmp_path: Path) -> None:
    data = {"storage_options": {"anon": True, "region": "eu-west-1", "account_name": "abc1"}}
    assert len(Mixture.from_file(described(tmp_path, **data, where="__key__ != 'x'")).source.leaves) == 2
    assert set(DATA_OF_STORES) <= STORAGE_OPTIONS
    for name, value in (("region", "x.evil.com/"), ("region", "a#"), ("account_name", "evil.com/a")):
        with pytest.raises(ConfigError, match="another server would get your keys"):
            Mixture.from_file(described(tmp_path, storage_options={name: value}))


def test_trust_takes_what_it_names_and_no_more(tmp_path: Path) -> None:
    bad = str(tmp_path / "bad.jsonl")
    both = described(tmp_path, bad_samples_file=bad, cache_dir=str(tmp_path / "cache"))
    assert Mixture.from_file(both, trust=["bad_samples_file", "cache_dir"]).source.bad_files == {"a": bad}
    assert Mixture.from_file(both, trust=True).source.bad_files == {"a": bad}
    with pytest.raises(ConfigError, match="cache_dir"):
        Mixture.from_file(both, trust={"bad_samples_file"})
    for wrong in ("endpoint_url", {"a": 1}, 3):
        with pytest.raises(ConfigError, match="expected True, or a list"):
            Mixture.from_file(both, trust=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'endpoint_url'"):
        Mixture.from_file(both, trust=["endpoint_urls"])
    assert {"endpoint_url", "bad_samples_file"} <= refusable()


def test_commands_have_it_too(tmp_path: Path) -> None:
    path = described(tmp_path, cache_dir=str(tmp_path / "cache"))
    assert "--trust cache_dir" in tool("plan", path, "--batch-size", 2, code=2).stderr
    for trusted in ("cache_dir", "all"):
        tool("plan", path, "--batch-size", 2, "--trust", trusted)
    assert "leave it out" in tool("plan", tmp_path / "set", "--batch-size", 2, "--trust", "all", code=2).stderr
    assert not (tmp_path / "cache").exists()
