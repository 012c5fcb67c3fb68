"""Folders of classes: shuffled as said, with columns for filters and balance; ugly folders; types of lifted values."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from streaming import Balanced, DataLoader, StreamingDataset
from streaming.errors import ConfigError
from tests.support.sets.index_files import change_document

NUM_CLASSES, NUM_IMAGES = 30, 10


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def picture(kind: str = "PNG", size: tuple[int, int] = (5, 4), orientation: int = 1, color: int = 0) -> bytes:
    note, out = Image.Exif(), io.BytesIO()
    note[274] = orientation
    Image.new("RGB", size, (color % 256, 1, 2)).save(out, kind, exif=note)
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classes")
    for number in range(NUM_CLASSES):
        (root / f"c{number:03d}").mkdir()
        for image in range(NUM_IMAGES):
            (root / f"c{number:03d}" / f"{image:03d}.png").write_bytes(picture(color=number * 7 + image))
    return root


def labels(target: Path, shards: str = "*.tar") -> list[int]:
    """The classes of all samples, in their order."""
    found = []
    for shard in sorted(target.glob(shards)):
        with tarfile.open(shard) as archive:
            members = [archive.extractfile(member) for member in archive if member.name.endswith(".cls")]
            found += [int(member.read()) for member in members if member is not None]
    return found


def opened(path: Path, **options: object) -> StreamingDataset:
    return StreamingDataset(str(path), fields=("cls",), **options)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_class_folders_are_shuffled_unless_none_is_said(folder: Path, tmp_path: Path) -> None:
    """Shards were sorted by class: the last tenth of a set held a tenth of its classes."""
    said = run("convert", folder, tmp_path / "out", "--max-samples", 60)
    assert "shuffled with seed 0; --shuffle none keeps the order of the source" in said.stdout
    for shard in range(5):
        assert len({*labels(tmp_path / "out", f"00000{shard}.tar")}) > 20, "60 uniform draws from 30 classes miss four"
    kept = run("convert", folder, tmp_path / "kept", "--shuffle", "none", "--json")
    assert json.loads(kept.stdout)["shuffle_seed"] is None
    other = run("convert", folder, tmp_path / "other", "--shuffle", "5", "--json")
    assert json.loads(other.stdout)["shuffle_seed"] == 5
    orders = [labels(tmp_path / name) for name in ("out", "other", "kept")]
    assert orders[2] == sorted(classes_of(folder))
    assert len({tuple(order) for order in orders}) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(orders[2])}
    last = opened(tmp_path / "out", subset=(0.9, 1.0))
    assert len({int(last[number]["cls"]) for number in range(len(last))}) > 12, "30 draws miss 11 of 30 classes"


def classes_of(folder: Path) -> list[int]:
    return [int(path.parent.name[1:]) for path in folder.glob("*/*.png")]


@pytest.mark.thorough
def test_the_shuffle_is_the_same_work_again_and_after_a_stop(folder: Path, tmp_path: Path) -> None:
    source, out = str(folder), tmp_path / "out"
    whole = convert(source, str(tmp_path / "whole"), options=ConvertOptions(max_samples=30))
    convert(source, str(out), options=ConvertOptions(max_samples=30))
    journal = out / "_shardstream" / "convert.json"
    change_document(journal, complete=False)
    for path in sorted(out.glob("*.tar"))[4:]:
        path.unlink()
    again = convert(source, str(out), options=ConvertOptions(max_samples=30, shuffle_seed=0))  # said, or by default
    assert (whole.num_samples, again.num_resumed_samples) == (300, 90)
    for path in sorted(out.rglob("*.tar*")):
        assert path.read_bytes() == (tmp_path / "whole" / path.relative_to(out)).read_bytes()
    refused = run("convert", folder, out, "--max-samples", 30, "--shuffle", "none")
    assert "shuffle_seed: there 0, here None" in refused.stderr
    with pytest.raises(ConfigError, match="--shuffle 3: the order cannot be kept, too"):
        ConvertOptions(shuffle_seed=3, keep_order=True)
    assert "neither a seed" in run("convert", folder, out, "--shuffle", "-1").stderr


def test_one_class_keeps_its_order_and_tables_keep_theirs(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / "flat").mkdir(exist_ok=True)
        (tmp_path / "flat" / f"{name}.png").write_bytes(picture())
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(9)))
    for source, more in (("flat", ()), ("a.jsonl", ()), ("a.jsonl", ("--shuffle", "none"))):
        told = json.loads(run("convert", tmp_path / source, tmp_path / "out", *more, "--overwrite", "--json").stdout)
        assert told["shuffle_seed"] is None
        dataset = StreamingDataset(str(tmp_path / "out"), decode=None)
        keys = [dataset[number]["__key__"] for number in range(len(dataset))]
        assert keys == sorted(keys)


@pytest.mark.thorough
def test_columns_are_there_for_filters_and_balance(folder: Path, tmp_path: Path) -> None:
    assert run("convert", folder, tmp_path / "out", "--columns", "path").exit_code == 0
    info = json.loads(run("info", tmp_path / "out", "--json").stdout)
    assert sorted(info["columns"]) == ["class", "cls", "height", "path", "width"]
    assert len(opened(tmp_path / "out", where="cls = 7 and class = 'c007' and width = 5 and height = 4")) == NUM_IMAGES
    balanced = Balanced(opened(tmp_path / "out", where="cls != 3 or hash(path) % 3 = 0"), by="cls")
    counts: Counter[int] = Counter()
    with DataLoader(balanced, batch_size=NUM_CLASSES, epoch_size=20 * NUM_CLASSES, num_workers=0) as loader:
        for batch in loader:
            counts.update(batch["cls"].tolist())
    assert len(counts) == NUM_CLASSES
    assert min(counts.values()) >= 8, "20 for each, also for the class of which few are left"


def test_an_ugly_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "in"
    files = {
        "cat/a.jpg": picture("JPEG", (30, 20), orientation=6), "cat/b.jpg": picture("JPEG", (30, 20), orientation=3),
        "cat/c.jpg": picture("JPEG", (30, 20)), "cat/broken.jpg": b"\xff\xd8\xff\xe0 cut", "cat/html.jpg": b"<html>",
        "dog ü/x y'z.v1.jpg": picture("JPEG", (8, 9)), "dog ü/none": picture(), "dog ü/.hidden.jpg": picture("JPEG"),
        ".ipynb_checkpoints/a-checkpoint.jpg": picture("JPEG"), "cat/.thumbs/a.jpg": picture("JPEG"),
        "cat/Thumbs.db": b"x", "cat/.DS_Store": b"x", "cat/empty.jpg": b"",
    }  # fmt: skip
    for name, body in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    report = convert(str(root), str(tmp_path / "out"), options=ConvertOptions(on_error="skip"))
    assert report.classes == {"cat": 0, "dog ü": 1}
    assert {one.path: one.reason for one in report.skipped} == {
        ".ipynb_checkpoints/a-checkpoint.jpg": "hidden: a name that starts with a dot",
        "cat/.thumbs/a.jpg": "hidden: a name that starts with a dot",
        "dog ü/.hidden.jpg": "hidden: a name that starts with a dot",
        "cat/.DS_Store": "hidden: a name that starts with a dot", "cat/empty.jpg": "empty file",
        **dict.fromkeys(("cat/Thumbs.db", "dog ü/none"), "not an image, and beside none of its name"),
    }  # fmt: skip
    assert {one.path for one in report.skipped if one.is_lost} == {"dog ü/none", "cat/empty.jpg"}
    assert sorted(report.remarks.values()) == [2, 2]
    assert "turned or mirrored by its EXIF orientation" in caplog.text
    assert "no width and height: the image is damaged" in caplog.text
    upright = StreamingDataset(str(tmp_path / "out"), where="width = 20 and height = 30")
    assert [upright[0]["__key__"], upright[0]["jpg"].shape] == ["cat/a", (30, 20, 3)]
    assert len(StreamingDataset(str(tmp_path / "out"), where="width = 30 and height = 20")) == 2
    assert len(StreamingDataset(str(tmp_path / "out"), where="width > 0")) == 4, "damaged ones have none"
    assert run("verify", tmp_path / "out").exit_code == 0


def test_columns_of_shards_without_any_value_do_not_hide_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.jpg").write_bytes(b"broken" if name == "a" else picture("JPEG"))
    convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(max_samples=1))
    dataset = StreamingDataset(str(tmp_path / "out"), where="width = 5", decode=None)
    assert [dataset[0]["__key__"], len(dataset)] == ["b", 1]


def test_lift_takes_the_type_of_the_decoder(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar"), max_samples=2) as writer:
        for number in range(4):
            fields = {
                "cls": number,
                "score.float": f"{number / 4}",
                "txt": f"t{number}",
                "raw": b"r",
                "x.npy": np.float32(2),
            }
            writer.write({"__key__": str(number), "json": {"a": 1}, **fields})
    kinds = {"cls": "int64", "score.float": "double", "txt": "string", "raw": "string", "x.npy": "double"}
    for field, kind in kinds.items():
        added = run("column", "add", tmp_path, f"late.{field}", "--lift", field, "--json")
        assert added.exit_code == 0, added.output
        assert json.loads(added.stdout)["type"] == kind
    assert run("index", tmp_path, "--columns", "cls").exit_code == 0
    assert len(StreamingDataset(str(tmp_path), where="late.cls >= 2 and late.score.float < 0.7 and cls = 2")) == 1
    refused = run("column", "add", tmp_path, "whole", "--lift", "json")
    assert "or None, got dict. Name another value" in refused.stderr


def test_images_of_several_kinds_become_one_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch of one field lacked rows; of Parquet, they were one field before."""
    kinds = {"jpeg": "JPEG", "JPG": "JPEG", "png": "PNG"}
    (tmp_path / "in" / "cat").mkdir(parents=True)
    for number in range(6):
        extension = [*kinds][number % 3]
        Image.new("RGB", (4, 3)).save(tmp_path / "in" / "cat" / f"{number}.{extension}", kinds[extension])
    convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert "images of several kinds (2 jpeg, 2 jpg, 2 png): all become the field .jpg" in caplog.text
    dataset = StreamingDataset(str(tmp_path / "out"))
    assert [dataset[number]["jpg"].shape for number in range(6)] == [(3, 4, 3)] * 6
    assert run("verify", tmp_path / "out").exit_code == 0
    for path in (tmp_path / "in" / "cat").glob("*[!g].*"):
        path.rename(path.with_suffix(".JPEG"))
    caplog.clear()
    convert(str(tmp_path / "in"), str(tmp_path / "same"))
    assert not caplog.records
    same = StreamingDataset(str(tmp_path / "same"))
    assert {name for number in range(6) for name in same[number] if name[0] != "_"} == {"cls", "jpeg", "json"}


def test_images_beside_folders_of_classes_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("in/cat/1.png", "in/dog/1.png", "flat/2.png", "flat/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture())
    assert run("convert", tmp_path / "flat", tmp_path / "flat-out").exit_code == 0
    assert "no folder of a class" not in caplog.text
    found = run("convert", tmp_path / "in", tmp_path / "flat", tmp_path / "out", "--from", "images")
    assert found.exit_code == 0, found.output
    assert "2 of 4 images are in no folder of a class, such as 2.png" in caplog.text
