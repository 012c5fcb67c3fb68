"""What holds for every source of ``convert``: the same bytes always, stopped and gone on with, here and elsewhere."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, ImageOptions, SourceOptions, convert, elsewhere
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, DuplicateKeyError, NotFoundError
from streaming.storage import Storage
from streaming.testing import LayoutTests
from streaming.testing.layouts import Input
from tests.support.processes.forked import Forked
from tests.support.processes.killed_programs import stopping
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sources.conversions import contents
from tests.support.sources.foreign_sets import MAKE, audio, files, picture

pytestmark = pytest.mark.thorough

COUNT = 50
KINDS = tuple(MAKE)


def kind_of(name: str) -> str:
    return "files" if name == "files" else "auto"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {name: make(root / name, COUNT) for name, make in MAKE.items()}


class TestLayouts(LayoutTests):
    @pytest.fixture(params=[*KINDS, "jsonl"])
    def source(self, request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path: Path) -> Input:
        name = request.param
        if name != "jsonl":
            return Input({"zip": "images"}.get(name, name), str(sources[name]))
        (tmp_path / "a.jsonl").write_text("".join(f'{{"id": {number}, "text": "t"}}\n' for number in range(COUNT)))
        return Input(name, str(tmp_path / "a.jsonl"), SourceOptions(key_field="id"))


@pytest.mark.parametrize("name", KINDS)
def test_an_executor_and_any_number_of_threads_give_the_same_bytes(
    sources: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "_MIN_RANGE", 8)
    options: dict[str, Any] = {"kind": kind_of(name), "max_samples": 9}
    if name not in {"audio", "lerobot"}:
        options["images"] = ImageOptions(max_side=10, format="webp")
    here = convert(str(sources[name]), str(tmp_path / "here"), options=ConvertOptions(workers=1, **options))
    with ThreadPoolExecutor(3) as executor:
        convert(
            str(sources[name]), str(tmp_path / "there"), options=ConvertOptions(workers=4, **options), executor=executor
        )
    assert (here.num_samples, here.num_shards) == (COUNT, 6)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert run("verify", tmp_path / "here", "--decode").exit_code == 0


STOPPER = stopping("""
from shard_tools.make.convert import ConvertOptions, convert
convert(sys.argv[1], sys.argv[2], options=ConvertOptions(kind=sys.argv[4], max_samples=9))
""")


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_killed_and_gone_on_with(sources: dict[str, Path], name: str, tmp_path: Path, forked: Forked) -> None:
    source, out = str(sources[name]), tmp_path / "out"
    options = ConvertOptions(kind=kind_of(name), max_samples=9)
    convert(source, str(tmp_path / "calm"), options=options)
    for stop_at in (3, 21, 14):  # of those that are left each time
        arguments = (source, str(out), str(stop_at), kind_of(name))
        assert forked.start(STOPPER, *arguments, output=tmp_path / "said").wait() == -signal.SIGKILL
    assert convert(source, str(out), options=options).num_resumed_samples == 9
    assert contents(out) == contents(tmp_path / "calm")


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_a_source_in_a_store_gives_the_same_shards(
    sources: dict[str, Path], name: str, tmp_path: Path, mini_s3: MiniS3Server
) -> None:
    bucket, options = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
    storage, source = Storage(options), sources[name]
    for path in [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]:
        storage.put(f"{bucket}/in/{path.relative_to(source.parent)}", path.read_bytes())
    chosen = ConvertOptions(kind=kind_of(name), max_samples=9)
    url = f"{bucket}/in/{source.name}{'' if source.is_file() else '/'}"
    report = convert(url, f"{bucket}/out", options=chosen, storage_options=options)
    convert(str(source), str(tmp_path / "out"), options=chosen)
    assert report.num_samples == COUNT
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        assert bytes(storage.read(f"{bucket}/out/{shard.name}")) == shard.read_bytes()


def test_a_converted_set_trains(sources: dict[str, Path], tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    options = ConvertOptions(images=ImageOptions(max_side=16, format="png"), max_samples=9)
    convert(str(sources["zip"]), target, options=options)
    dataset = StreamingDataset(target, fields=("png", "cls"), where="width = 16 and height = 11", shuffle=True)
    seen: list[int] = []
    with DataLoader(dataset, batch_size=10, num_workers=0) as loader:
        for batch in loader:
            assert tuple(batch["png"].shape) == (10, 11, 16, 3)
            seen += batch["cls"].tolist()
    assert sorted(seen) == sorted(number % 3 for number in range(COUNT))


# ------------------------------------------------------------------------------------------------ several sources


def test_several_sources_follow_each_other(tmp_path: Path) -> None:
    for name, numbers in (("b", range(3)), ("a", range(3, 7))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in numbers))
    sources = [str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]
    assert run("convert", *sources, tmp_path / "out").exit_code == 0
    dataset = StreamingDataset(str(tmp_path / "out"), shuffle=False)
    assert [dataset[number]["json"]["n"] for number in range(7)] == list(range(7))
    other = run("convert", *reversed(sources), tmp_path / "out")
    assert other.exit_code == 1
    assert "source sha256_of_names" in other.stderr
    twice = run("convert", sources[0], *sources, tmp_path / "twice")
    assert "named twice by the sources" in twice.stderr
    assert run("convert", sources[0], tmp_path / "no.jsonl", tmp_path / "x").exit_code == 1
    tokens = run("convert", *sources, tmp_path / "tok", "--tokenizer", "bytes", "--text-field", "n")
    assert "n" in tokens.output


def test_class_folders_of_several_sources_are_numbered_and_shuffled_together(tmp_path: Path) -> None:
    for place, name in (("one", "cat"), ("one", "dog"), ("two", "ant"), ("two", "dog")):
        (tmp_path / place / name).mkdir(parents=True, exist_ok=True)
        for number in range(4):
            (tmp_path / place / name / f"{place}{number}.jpg").write_bytes(picture(number))
    both = [str(tmp_path / "one"), str(tmp_path / "two")]
    report = convert(both, str(tmp_path / "out"))
    assert (report.num_samples, report.classes, report.shuffle_seed) == (16, {"ant": 0, "cat": 1, "dog": 2}, 0)
    (tmp_path / "two" / "dog" / "one1.jpg").write_bytes(picture(9))
    with pytest.raises(DuplicateKeyError, match="dog/one1"):
        convert(both, str(tmp_path / "twice"))
    assert convert(both, str(tmp_path / "n"), options=ConvertOptions(key_field="number")).num_samples == 17


def test_patterns_name_folders_and_archives(tmp_path: Path, mini_s3: MiniS3Server) -> None:
    for number in range(3):
        files(tmp_path / f"day{number}" / f"x{number}", 2)
    report = convert(f"{tmp_path}/day[01]/", str(tmp_path / "out"), options=ConvertOptions(kind="files"))
    assert report.num_samples == 4
    keys = {sample["__key__"] for sample in map(StreamingDataset(str(tmp_path / "out")).__getitem__, range(4))}
    assert "x1/part0/000" in keys, "relative to each folder that the pattern names"
    with pytest.raises(NotFoundError, match="matches nothing"):
        convert(f"{tmp_path}/night*/", str(tmp_path / "no"))
    for number in range(2):
        (tmp_path / f"z{number}").mkdir()
        MAKE["zip"](tmp_path / f"z{number}", 3).rename(tmp_path / f"p{number}.zip")
    pattern = str(tmp_path / "p*.zip")
    with pytest.raises(DuplicateKeyError):
        convert(pattern, str(tmp_path / "zips"))
    assert convert(pattern, str(tmp_path / "zips"), options=ConvertOptions(key_field="number")).num_samples == 6
    single = convert([str(path) for path in sorted((tmp_path / "day0").rglob("*.jpg"))], str(tmp_path / "single"))
    assert (single.kind, single.num_samples) == ("images", 2)


def test_sources_of_one_layout_alone(tmp_path: Path, sources: dict[str, Path]) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    with pytest.raises(ConfigError, match=r"have to be of one layout: .*'csv'.*'audio'"):
        convert([str(tmp_path / "a.csv"), str(sources["audio"])], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="'coco' is a single one, got 2"):
        convert([str(sources["coco"])] * 2, str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="same place"):
        convert([str(audio(tmp_path / "x", 1)), str(audio(tmp_path / "out", 1))], str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("audio", ("--quality", "50"), "'audio' has none"),
        ("audio", ("--source-split", "x"), "--source-split takes one split"),
        ("voc", ("--source-config", "x"), "--source-config takes one"),
        ("voc", ("--image-folder", "x"), "--image-folder says where"),
        ("coco", ("--field", "a=b"), "--field names columns"),
        ("hf", ("--classes", "a,b"), "--classes numbers the folders"),
        ("files", ("--from", "files", "--classes", "a,b"), "--classes numbers the folders"),
        ("files", ("--from", "files", "--key", "id"), "'path' or 'number'"),
        ("coco", ("--key", "id"), "'path' or 'number'"),
        ("zip", ("--from", "tars"), "an archive is read as images, audio, files, coco, voc, not as 'tars'"),
        ("audio", ("--tokenizer", "bytes"), "audio hold no text"),
        ("hf", ("--tokenizer", "bytes", "--quality", "50"), "Images are not tokenized"),
    ],
)
def test_every_option_acts_or_is_refused(
    sources: dict[str, Path], tmp_path: Path, name: str, option: tuple[str, ...], said: str
) -> None:
    result = run("convert", sources[name], tmp_path / "out", *option, "--json")
    assert result.exit_code == 2
    assert said in json.loads(result.stdout)["error"]["message"]
    assert not (tmp_path / "out").exists()
