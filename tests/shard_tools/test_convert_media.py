"""Folders of images and sounds with metadata files, as ``datasets`` reads them, and with captions beside files."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError, DuplicateKeyError
from tests.support.sources.conversions import members
from tests.support.sources.foreign_sets import picture, write_sound

SKIP = ConvertOptions(on_error="skip")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def written(root: Path, **contents: bytes) -> Path:
    for name, body in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    return root


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.with_suffix(".csv").open("w", newline="") as file:
        out = csv.DictWriter(file, [*rows[0]])
        out.writeheader()
        out.writerows(rows)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))


WRITERS = (as_jsonl, as_csv, as_parquet)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets leaves files open
@pytest.mark.parametrize("write", WRITERS)
def test_a_metadata_file_is_read_as_datasets_does(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = tmp_path / "in"
    for part in ("one", "two"):
        names = [f"{part}-{number}.png" if number else f"deep/ä {part}.png" for number in range(4)]
        written(root / part, **{name: picture(number) for number, name in enumerate(names)})
        write(root / part / "metadata", [{"file_name": name, "text": f'a {name}, "so"'} for name in names])
    theirs = {}
    for part in ("one", "two"):
        folder = datasets.load_dataset(
            "imagefolder", data_dir=str(root / part), split="train", cache_dir=str(tmp_path / "cache")
        ).cast_column("image", datasets.Image(decode=False))
        theirs |= {row["text"]: (root / part / row["text"][2:-6]).read_bytes() for row in folder}
        assert all(Path(row["image"]["path"]).read_bytes() == theirs[row["text"]] for row in folder)
    report = convert(str(root), str(tmp_path / "out"))
    assert (report.kind, report.num_samples, report.classes) == ("images", 8, {})
    found = members(tmp_path / "out")
    notes = {name: json.loads(body) for name, body in found.items() if name.endswith(".json")}
    assert {note["text"]: found[name.replace(".json", ".png")] for name, note in notes.items()} == theirs
    assert {note["path"] for note in notes.values()} == {name.replace(".json", ".png") for name in notes}


def test_sounds_have_metadata_too(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for number in range(3):
        (root / "clips").mkdir(parents=True, exist_ok=True)
        write_sound(root / f"clips/{number}.wav", 0.1)
    as_csv(
        root / "metadata", [{"file_name": f"clips/{number}.wav", "transcription": f"t{number}"} for number in range(3)]
    )
    assert run("convert", root, tmp_path / "out", "--columns", "transcription").exit_code == 0
    found = StreamingDataset(str(tmp_path / "out"), where="transcription = 't1' and rate = 16000")
    assert [found[0]["__key__"], found[0]["json"]] == [
        "clips/1",
        {"class": None, "path": "clips/1.wav", "transcription": "t1"},
    ]


def test_names_are_taken_as_paths(tmp_path: Path) -> None:
    root = written(tmp_path / "in", **{"a/x.png": picture(), "b.png": picture(1)})
    as_jsonl(root / "a/metadata", [{"file_name": "./x.png", "n": 1}])
    as_jsonl(root / "metadata", [{"file_name": "a/../b.png", "n": 2}])
    convert(str(root), str(tmp_path / "out"))
    notes = {name: json.loads(body) for name, body in members(tmp_path / "out").items() if name.endswith("json")}
    assert {name: note["n"] for name, note in notes.items()} == {"a/x.json": 1, "b.json": 2}


def test_several_files_of_a_row(tmp_path: Path) -> None:
    root = written(
        tmp_path / "pairs", **{name: picture(number) for number, name in enumerate(("a.png", "b.png", "c.png"))}
    )
    as_jsonl(
        root / "metadata",
        [
            {"before_file_name": "a.png", "after_file_name": "b.png", "mask_file_name": None},
            {"before_file_name": "c.png", "after_file_name": "b.png", "mask_file_name": "a.png"},
        ],
    )
    convert(str(root), str(tmp_path / "out"))
    assert {name: body for name, body in members(tmp_path / "out").items() if not name.endswith("json")} == {
        "a.before.png": picture(0), "a.after.png": picture(1),
        "c.before.png": picture(2), "c.after.png": picture(1), "c.mask.png": picture(0),
    }  # fmt: skip
    (root / "metadata.jsonl").unlink()
    as_jsonl(root / "metadata", [{"file_names": ["a.png", "b.png", "c.png"], "n": 1}])
    report = convert(str(root), str(tmp_path / "lists"))
    assert report.num_samples == 1
    assert {*members(tmp_path / "lists")} == {"a.0.png", "a.1.png", "a.2.png", "a.json"}
    as_jsonl(
        root / "metadata",
        [{"file_name": "a.png"}, {"file_name": "a.png"}, {"file_name": "b.png"}, {"file_name": "c.png"}],
    )
    with pytest.raises(DuplicateKeyError, match="--key number"):
        convert(str(root), str(tmp_path / "twice"))
    numbered = convert(str(root), str(tmp_path / "twice"), options=ConvertOptions(key_field="number"))
    assert numbered.num_samples == 4


WRONG = {
    "missing": ([{"file_name": "a.png"}, {"file_name": "gone.png"}], "metadata.jsonl:2: no such file: gone.png"),
    "outside": ([{"file_name": "a.png"}, {"file_name": "../secret.png"}], r"no such file: \.\./secret.png"),
    "absolute": ([{"file_name": "a.png"}, {"file_name": "/etc/hostname"}], "no such file: /etc/hostname"),
    "null": ([{"file_name": "a.png"}, {"file_name": None}], "metadata.jsonl:2: a row without file_name"),
    "number": ([{"file_name": "a.png"}, {"file_name": 3}], "metadata.jsonl:2: file_name is 3, expected a name"),
    "unnamed": ([{"file_name": "a.png"}], "b.png: named by no row of the metadata"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_rows_and_files_that_do_not_meet(kind: str, tmp_path: Path) -> None:
    written(tmp_path, **{"secret.png": picture()})
    rows, told = WRONG[kind]
    root = written(tmp_path / "in", **{"a.png": picture(), **({"b.png": picture()} if kind == "unnamed" else {})})
    as_jsonl(root / "metadata", rows)
    with pytest.raises(DataError, match=told):
        convert(str(root), str(tmp_path / "out"))
    report = convert(str(root), str(tmp_path / "out"), options=SKIP)
    assert (report.num_samples, sum(one.is_lost for one in report.skipped)) == (1, 1)


def test_metadata_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    root = written(tmp_path / "in", **{"a.png": picture(), "metadata.jsonl": b'{"file_name": "a.png"}\n{broken\n'})
    with pytest.raises(DataError, match=r"metadata\.jsonl:2: not JSON"):
        convert(str(root), str(tmp_path / "out"))
    assert [one.path for one in convert(str(root), str(tmp_path / "out"), options=SKIP).skipped] == [
        f"{root}/metadata.jsonl:2"
    ]
    for body, said in (
        (b'{"name": "a.png"}\n', "no column file_name"),
        (b'{"file_name": 3}\n', "file_name is 3, expected a name"),
    ):
        (root / "metadata.jsonl").write_bytes(body)
        with pytest.raises(DataError, match=said):
            convert(str(root), str(tmp_path / "x"))
    (root / "metadata.jsonl").write_bytes(b'{"file_name": "a.png"}\n')
    with pytest.raises(ConfigError, match=r"--classes numbers folders of classes; here metadata\.jsonl says"):
        convert(str(root), str(tmp_path / "x"), options=ConvertOptions(classes="a,b"))
    (root / "metadata.jsonl").unlink()
    (root / "metadata.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"metadata\.parquet: not a Parquet file"):
        convert(str(root), str(tmp_path / "x"))


def test_a_change_of_the_metadata_is_seen(tmp_path: Path) -> None:
    root = written(tmp_path / "in", **{f"{name}.png": picture() for name in "abc"})
    rows = [{"file_name": f"{name}.png", "text": name} for name in "abc"]
    as_jsonl(root / "metadata", rows)
    convert(str(root), str(tmp_path / "out"))
    rows[1]["text"] = "B"
    as_jsonl(root / "metadata", rows)
    again = run("convert", root, tmp_path / "out")
    assert again.exit_code == 1
    assert "metadata.jsonl" in again.stderr


@pytest.mark.parametrize("suffix", ["txt", "caption", "xml", "npy", "json"])
def test_files_of_the_stem_of_an_image_are_fields_of_its_sample(suffix: str, tmp_path: Path) -> None:
    body = b'{"score": 0.5}' if suffix == "json" else b"a caption"
    root = written(tmp_path / "in", **{"cat/a.v1.png": picture(), "cat/b.png": picture(1), f"cat/a.v1.{suffix}": body})
    result = run("convert", root, tmp_path / "out", "--columns", "path" if suffix != "json" else "path,score")
    assert result.exit_code == 0, result.output
    found = members(tmp_path / "out")
    assert json.loads(found["cat/b.json"]) == {"class": "cat", "path": "cat/b.png"}
    expected = {"class": "cat", "path": "cat/a.v1.png"} | ({"score": 0.5} if suffix == "json" else {})
    assert json.loads(found["cat/a_v1.json"]) == expected
    if suffix != "json":
        assert found[f"cat/a_v1.{suffix}"] == body
        journal = json.loads((tmp_path / "out/_shardstream/convert.json").read_text())
        assert journal["fields"] == {"cls": True, "json": True, "png": True, suffix: False}
    else:
        assert len(StreamingDataset(str(tmp_path / "out"), where="score = 0.5")) == 1
    assert run("verify", tmp_path / "out").exit_code == 0


# ----------------------------------------------------------------------------------------- img2dataset, webshart


def img2dataset(root: Path, form: str) -> Path:
    """Write what its writers of ``files`` and ``webdataset`` do: two parts of three samples, and a table of all."""
    for part in range(2):
        found = {}
        for number in range(3):
            key = f"{part:05d}{number:04d}"
            note = {"caption": f"c{key}", "key": key, "status": "success", "width": 8, "height": 8}
            found |= {
                f"{key}.jpg": picture(number),
                f"{key}.txt": f"c{key}".encode(),
                f"{key}.json": json.dumps(note).encode(),
            }
        root.mkdir(exist_ok=True)
        if form == "files":
            written(root / f"{part:05d}", **found)
        else:
            with tarfile.open(root / f"{part:05d}.tar", "w") as archive:
                for name, body in found.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(body)
                    archive.addfile(member, io.BytesIO(body))
        (root / f"{part:05d}_stats.json").write_text('{"count": 4, "successes": 3}')
        pq.write_table(pa.table({"key": ["a"], "status": ["failed"]}), root / f"{part:05d}.parquet")
    return root


def test_files_of_img2dataset_are_images_without_classes(tmp_path: Path) -> None:
    report = convert(
        str(img2dataset(tmp_path / "in", "files")), str(tmp_path / "out"), options=ConvertOptions(columns=("status",))
    )
    assert (report.kind, report.num_samples, report.classes) == ("images", 6, {})
    assert not any(one.is_lost for one in report.skipped)
    found = members(tmp_path / "out")
    assert found["00001/000010002.txt"] == b"c000010002"
    note = json.loads(found["00001/000010002.json"])
    assert (note["caption"], note["path"]) == ("c000010002", "00001/000010002.jpg")
    assert len(StreamingDataset(str(tmp_path / "out"), where="status = 'success'")) == 6


def test_shards_of_img2dataset_are_indexed_where_they_are(tmp_path: Path) -> None:
    root = img2dataset(tmp_path / "in", "webdataset")
    refused = run("convert", root, tmp_path / "out")
    assert refused.exit_code == 2
    assert f"`shard_tools index {root}` indexes them where they are" in refused.stderr
    assert run("index", root).exit_code == 0
    assert len(StreamingDataset(str(root))) == 6
    assert run("convert", root, tmp_path / "out", "--from", "tars").exit_code == 0


def of_webshart(tar: Path, form: str) -> dict[str, Any]:
    """The index that webshart writes of a tar, with files by name or in a list."""
    with tarfile.open(tar) as archive:
        places = [(one.name, one.offset_data, one.size) for one in archive]
    if form == "list":
        files: Any = [{"path": name, "offset": offset, "size": size} for name, offset, size in places]
    else:
        files = {name: {"offset": offset, "length": size, "width": 8} for name, offset, size in places}
    return {"path": tar.name, "filesize": tar.stat().st_size, "files": files}


@pytest.mark.parametrize("form", ["names", "list"])
def test_shards_with_an_index_of_webshart_are_shards(form: str, tmp_path: Path) -> None:
    """It is compared with what the shards hold, and contradictions are named; other JSON is left alone."""
    root = img2dataset(tmp_path / "in", "webdataset")
    for path in root.glob("*_stats.json"):
        path.unlink()
        (root / f"{path.name[:5]}.parquet").unlink()
    tars = sorted(root.glob("*.tar"))
    indexes = [of_webshart(tar, form) for tar in tars]
    for tar, index in zip(tars, indexes, strict=True):
        tar.with_suffix(".json").write_text(json.dumps(index))
    told = run("index", root)
    assert told.exit_code == 0
    assert "beside 2 shards: an index of webshart. It has no checksums" in told.stderr
    assert "gets other bytes" not in told.stderr
    assert json.loads(run("index", root, "--force", "--json").stdout)["webshart"] == {
        "num": 2,
        "unlike": [],
        "num_unlike": 0,
    }
    for change, words in (({"filesize": 5}, "its shard has 5 bytes"), ({"files": {"x": {"offset": 9, "length": 1}}},
                          "'x' has 1 bytes at 9, where the shard has no such file")):  # fmt: skip
        tars[1].with_suffix(".json").write_text(json.dumps(indexes[1] | change))
        told = run("index", root, "--force")
        assert words in told.stderr
        assert told.exit_code == 0
    tars[0].with_suffix(".json").write_text('{"files": 3}')
    assert "webshart" not in run("index", root, "--force").stderr
    assert len(StreamingDataset(str(root))) == 6
    assert convert(str(root), str(tmp_path / "out")).kind == "tars"
