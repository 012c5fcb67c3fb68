"""The numbers of classes: a validation set has those of its training set, or the log says that it may not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.shards.catalog.build import read_schema
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.meanings import classes_of

TRAIN = ("ant", "bee", "cat")
VAL = ("bee", "cat")  # which, by itself, would be 0 and 1


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def folder(path: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
        (path / name / "1.png").write_bytes(b"image of " + name.encode())
    return path


def numbers(url: object, **options: object) -> dict[str, object]:
    dataset = StreamingDataset(str(url), decode={"png": None}, storage_options=options or None)
    samples = [dataset[number] for number in range(len(dataset))]
    return {str(sample["__key__"]).partition("/")[0]: sample["cls"] for sample in samples}


def converted(*arguments: object) -> dict[str, object]:
    result = run("convert", *arguments, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, object] = json.loads(result.stdout)
    return report


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder(tmp_path / "photos" / "train", TRAIN)
    folder(tmp_path / "photos" / "val", VAL)
    return tmp_path / "photos"


def test_the_folder_beside_it_numbers_a_validation_set(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report = converted(images / "val", tmp_path / "out" / "val")
    assert report["classes"] == {"ant": 0, "bee": 1, "cat": 2}
    assert report["classes_from"] == str(images / "train")
    assert f"classes are numbered as in {images / 'train'}" in caplog.text
    assert numbers(tmp_path / "out" / "val") == {"bee": 1, "cat": 2}
    assert converted(images / "train", tmp_path / "out" / "train")["classes_from"] == ""
    assert numbers(tmp_path / "out" / "train") == {"ant": 0, "bee": 1, "cat": 2}
    for verb in ("reshard", "copy"):
        assert run(verb, tmp_path / "out" / "val", tmp_path / verb).exit_code == 0
        assert classes_of(tmp_path / verb) == list(TRAIN)
    again = converted(images / "val", tmp_path / "out" / "val")  # now by what was converted: the same work
    assert again["num_resumed_samples"] == 2


def test_the_set_converted_beside_the_target_does_too(images: Path, mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket(fresh_name())
    options = mini_s3.storage_options
    reach = [text for key, value in options.items() for text in ("--storage-option", f"{key}={value}")]
    for name in ("train", "val"):
        assert run("convert", images / name, f"{bucket}/{name}/", *reach).exit_code == 0
        (images / "train").rename(images / "gone") if name == "train" else None
    assert numbers(f"{bucket}/val/", **options) == {"bee": 1, "cat": 2}
    assert read_schema(Storage(options), f"{bucket}/val").classes["cls"] == TRAIN
    shown = run("convert", images / "val", f"{bucket}/other/", *reach, "--classes", f"{bucket}/train/")
    assert f"numbers of {bucket}/train/" in shown.stdout
    assert numbers(f"{bucket}/other/", **options) == {"bee": 1, "cat": 2}


@pytest.mark.parametrize("kind", ["names", "lines", "json", "mapping", "folder"])
def test_classes_are_given_in_any_form(images: Path, tmp_path: Path, kind: str) -> None:
    given = {
        "names": "cat, dog,bee",
        "lines": tmp_path / "a.txt",
        "json": tmp_path / "a.json",
        "mapping": tmp_path / "b.json",
        "folder": folder(tmp_path / "classes", ("bee", "cat", "aardvark")),
    }[kind]
    (tmp_path / "a.txt").write_text("cat\ndog\nbee\n")
    (tmp_path / "a.json").write_text('["cat", "dog", "bee"]')
    (tmp_path / "b.json").write_text('{"bee": 2, "cat": 0, "dog": 1}')
    converted(images / "val", tmp_path / "out", "--classes", given)
    assert numbers(tmp_path / "out") == ({"bee": 1, "cat": 2} if kind == "folder" else {"bee": 2, "cat": 0})


def test_what_cannot_be_the_same_numbers_is_told(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = run("convert", images / "val", tmp_path / "out", "--classes", "ant,bee")
    assert refused.exit_code == 2
    assert "--classes ant,bee: it lacks the class 'cat'" in refused.stderr
    assert "--classes" in run("convert", images / "val", tmp_path / "out", "--classes", "ant,ant").stderr
    assert run("convert", images / "val", tmp_path / "out", "--classes", tmp_path / "no.txt").exit_code == 1
    alone = folder(tmp_path / "alone" / "test", VAL)
    with caplog.at_level(logging.WARNING):
        converted(alone, tmp_path / "alone-out")
    assert "numbered by this folder alone" in caplog.text
    others = run("convert", alone, tmp_path / "alone-out", "--classes", "cat,bee")
    assert "holds another conversion" in others.stderr, "one set never holds two numberings"
    caplog.clear()
    folder(tmp_path / "alone" / "train", ("cat",))
    with caplog.at_level(logging.WARNING):
        assert converted(alone, tmp_path / "other-out")["classes"] == {"bee": 0, "cat": 1}
    assert "has class 'bee', which" in caplog.text
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert (
        "--classes numbers the folders of images"
        in run("convert", tmp_path / "a.csv", tmp_path / "csv", "--classes", "a,b").stderr
    )
