"""COCO and Pascal VOC: boxes, captions, keypoints and masks stay with their images; splits; hostile files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, ImageOptions, convert
from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError, DuplicateKeyError, NotFoundError
from tests.support.sets.meanings import classes_of
from tests.support.sources.conversions import members
from tests.support.sources.foreign_sets import VOC, coco, picture, voc

SKIP = ConvertOptions(on_error="skip")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def notes(target: Path) -> dict[str, Any]:
    found = members(target)
    return {name.removesuffix(".json"): json.loads(body) for name, body in found.items() if name.endswith(".json")}


def classes(target: Path) -> list[str]:
    return classes_of(target, "json:objects.label")


# ----------------------------------------------------------------------------------------------------------- COCO

IMAGES = [{"id": number, "file_name": f"{number}.jpg", "width": 24, "height": 16} for number in (1, 2, 4)]
BOX = {"id": 7, "image_id": 1, "category_id": 18, "bbox": [1, 2, 3.5, 4], "area": 14.0, "iscrowd": 0}
BOX["segmentation"] = [[1, 2, 4, 2, 4, 6]]
NAMES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car", "supercategory": "vehicle"}]


def annotated(root: Path, **files: object) -> Path:
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "val2017").mkdir(exist_ok=True)
    for number in (1, 2, 3):
        (root / "val2017" / f"{number}.jpg").write_bytes(picture(number))
    for name, content in files.items():
        (root / "annotations" / f"{name}_val2017.json").write_text(json.dumps(content))
    return root


def whole(root: Path) -> Path:
    lost = {**BOX, "id": 8, "image_id": 4}
    nowhere = {**BOX, "id": 9, "image_id": 99}
    joints = {"id": 7, "image_id": 1, "category_id": 18, "keypoints": [1, 2, 2], "num_keypoints": 1}
    caption = {"id": 7, "image_id": 1, "caption": "a dög"}
    return annotated(
        root,
        instances={"images": IMAGES, "annotations": [BOX, lost, nowhere], "categories": NAMES},
        person_keypoints={"images": IMAGES, "annotations": [joints], "categories": NAMES[:1]},
        captions={"images": IMAGES, "annotations": [caption]},
        panoptic={"images": IMAGES, "annotations": []},
    )


def test_boxes_keypoints_and_captions_are_of_one_image(tmp_path: Path) -> None:
    report = convert(str(whole(tmp_path / "in")), str(tmp_path / "out"), options=SKIP)
    assert (report.kind, report.num_samples, report.classes) == ("coco", 2, {"car": 0, "dog": 1})
    told = notes(tmp_path / "out")
    rest = {name: value for name, value in BOX.items() if name != "image_id"}
    dog = {**rest, "category": "dog", "label": 1, "keypoints": [1, 2, 2], "num_keypoints": 1}
    size = {"width": 24, "height": 16}
    assert told["1"] == {"image_id": 1, "file_name": "1.jpg", **size, "objects": [dog], "captions": ["a dög"]}
    assert told["2"] == {"image_id": 2, "file_name": "2.jpg", **size, "objects": [], "captions": []}
    assert members(tmp_path / "out")["1.jpg"] == picture(1)
    assert classes(tmp_path / "out") == ["car", "dog"], "in the order of their numbers"
    assert {one.path: one.reason for one in report.skipped} == {
        "4.jpg": "no such image; annotations of it: 1",
        "image 99": "not listed; annotations of it: 1",
        "val2017/3.jpg": "an image that the annotations do not list",
        "annotations/panoptic_val2017.json": "annotations of pixels, which are not read here",
    }
    assert len(StreamingDataset(str(tmp_path / "out"), where="objects > 0 and width = 24 and height = 16")) == 1
    assert run("verify", tmp_path / "out", "--decode").exit_code == 0


def test_a_split_is_chosen(tmp_path: Path) -> None:
    coco(coco(tmp_path / "in", 4, "train2017"), 3, "val2017")
    with pytest.raises(ConfigError, match="take one with --source-split: train2017, val2017"):
        convert(str(tmp_path / "in"), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no such split; it has: train2017, val2017"):
        convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(part="test"))
    for part, count in (("train2017", 4), ("val2017", 3)):
        report = convert(str(tmp_path / "in"), str(tmp_path / part), options=ConvertOptions(part=part))
        assert (report.num_samples, report.skipped) == (count, ())
    refused = run("convert", tmp_path / "in", tmp_path / "val2017", "--source-split", "train2017")
    assert "holds another conversion" in refused.stderr


def test_a_file_of_annotations_with_images_elsewhere(tmp_path: Path) -> None:
    root = coco(tmp_path / "in", 5)
    file = shutil.move(root / "annotations/instances_train.json", tmp_path / "boxes.json")
    shutil.move(root / "train", tmp_path / "photos")
    result = run("convert", file, tmp_path / "out", "--from", "coco", "--image-folder", tmp_path / "photos")
    assert result.exit_code == 0, result.output
    shutil.move(tmp_path / "boxes.json", tmp_path / "photos" / "_annotations.coco.json")  # as some programs export
    beside = convert(str(tmp_path / "photos"), str(tmp_path / "beside"), options=ConvertOptions(kind="coco"))
    assert beside.num_samples == 5
    assert members(tmp_path / "beside") == members(tmp_path / "out")


def test_a_validation_set_takes_the_numbers_of_its_training_set(tmp_path: Path) -> None:
    coco(tmp_path / "in", 3)
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(classes="boat,car"))
    assert report.classes == {"boat": 0, "car": 1}
    assert {box["label"] for note in notes(tmp_path / "out").values() for box in note["objects"]} == {1}
    with pytest.raises(ConfigError, match="lacks the class 'car'"):
        convert(str(tmp_path / "in"), str(tmp_path / "x"), options=ConvertOptions(classes="boat,bus"))


def test_damaged_images_and_other_sizes_are_remarked(tmp_path: Path) -> None:
    root = whole(tmp_path / "in")
    (root / "val2017/1.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    (root / "val2017/2.jpg").write_bytes(picture(2, (10, 10)))
    report = convert(str(root), str(tmp_path / "out"), options=SKIP)
    assert sorted(report.remarks.values()) == [1, 1]
    assert any("another width and height" in remark for remark in report.remarks)
    assert any("no width and height" in remark for remark in report.remarks)
    assert members(tmp_path / "out")["1.jpg"] == b"\xff\xd8\xff\xe0 cut"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{broken", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not annotations of COCO"),
        ({"images": [{"id": 1}]}, r"images\[0\] lacks id or file_name"),
        ({"images": IMAGES, "annotations": [{"image_id": [1]}]}, r"annotations\[0\] lacks image_id"),
        ({"images": IMAGES, "annotations": {}}, "'annotations' is no list"),
        ({"images": IMAGES, "annotations": [BOX]}, "annotation 7 has category 18, which 'categories' lacks"),
        ({"images": [*IMAGES, {**IMAGES[0], "file_name": "x"}]}, "do not belong together"),
        ({"images": IMAGES, "categories": [*NAMES, {"id": 3, "name": "cat"}]}, "category 3 is 'cat' here, but 'car'"),
    ],
)
def test_hostile_annotations_are_refused_by_name(tmp_path: Path, content: object, said: str) -> None:
    root = annotated(tmp_path / "in", instances=content)
    if isinstance(content, str):
        (root / "annotations/instances_val2017.json").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        convert(str(root), str(tmp_path / "out"))
    assert "instances_val2017.json" in str(caught.value)


def test_names_in_annotations_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(picture())
    outside = [{"id": 11, "file_name": "../secret.jpg"}, {"id": 12, "file_name": str(tmp_path / "secret.jpg")}]
    root = annotated(tmp_path / "in", instances={"images": [*outside, IMAGES[0]]})
    report = convert(str(root), str(tmp_path / "out"), options=SKIP)
    assert report.num_samples == 1
    assert sum("no such image" in one.reason for one in report.skipped) == 2
    twice = [IMAGES[0], {"id": 5, "file_name": "1.jpg"}]
    with pytest.raises(DuplicateKeyError, match="key '1'"):
        convert(str(annotated(tmp_path / "two", instances={"images": twice})), str(tmp_path / "x"))
    with pytest.raises(NotFoundError, match=r"without any image; of what it names, the first is \.\./secret"):
        convert(str(annotated(tmp_path / "none", instances={"images": outside})), str(tmp_path / "x"))


# ------------------------------------------------------------------------------------------------------------ VOC


def test_voc_boxes_masks_and_splits(tmp_path: Path) -> None:
    root = voc(tmp_path / "in", 6)
    (root / "Annotations/2007_000005.xml").unlink()
    (root / "Annotations/gone.xml").write_text(VOC.format(name="gone", kind="cow"))
    (root / "SegmentationClass/2007_000001.png").unlink()
    report = convert(str(root), str(tmp_path / "all"), options=SKIP)
    assert (report.kind, report.num_samples, report.classes) == ("voc", 6, {"cat": 0, "cow": 1, "dog": 2})
    assert [(one.path, one.reason) for one in report.skipped] == [("Annotations/gone.xml", "no such image; objects: 1")]
    told = notes(tmp_path / "all")
    box = {"category": "dog", "bbox": [1, 2, 8.5, 9], "difficult": 0, "label": 2}
    expected = {"file_name": "2007_000001.jpg", "objects": [box], "width": 24, "height": 16}
    assert told["2007_000001"] == expected
    assert told["2007_000005"]["objects"] == [], "kept without annotations"
    found = members(tmp_path / "all")
    assert found["2007_000000.seg.png"] == (root / "SegmentationClass/2007_000000.png").read_bytes()
    assert "2007_000001.seg.png" not in found
    val = convert(str(root), str(tmp_path / "val"), options=replace(SKIP, part="val"))
    assert (val.num_samples, val.classes) == (3, report.classes), "numbers of all, not of the split alone"
    assert len(StreamingDataset(str(tmp_path / "val"), where="objects = 1 and width = 24")) == 2
    with pytest.raises(ConfigError, match="no such split; it has: train, val"):
        convert(str(root), str(tmp_path / "x"), options=ConvertOptions(part="test"))
    (root / "ImageSets/Main/odd.txt").write_text("2007_000001  1\nmissing -1\n\n")
    odd = convert(str(root), str(tmp_path / "odd"), options=replace(SKIP, part="odd"))
    assert [(odd.num_samples, one.path) for one in odd.skipped] == [(1, "JPEGImages/missing")]


def test_masks_are_left_alone_by_re_encoding(tmp_path: Path) -> None:
    root = voc(tmp_path / "in", 2)
    options = ConvertOptions(images=ImageOptions(format="webp", max_side=8))
    convert(str(root), str(tmp_path / "out"), options=options)
    found = members(tmp_path / "out")
    assert found["2007_000000.seg.png"] == (root / "SegmentationClass/2007_000000.png").read_bytes()
    assert found["2007_000000.webp"][8:12] == b"WEBP"
    assert notes(tmp_path / "out")["2007_000000"]["width"] == 24, "to what the boxes refer"
    assert len(StreamingDataset(str(tmp_path / "out"), where="width = 8 and height = 5")) == 2


BOMB = '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;">]><annotation>&b;</annotation>'
OBJECT = "<annotation><object>{}</object></annotation>"


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        (BOMB.encode(), "declares a document type"),
        (BOMB.encode("utf-16"), "declares a document type"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "declares a document type"),
        (b"<annotation><object>", "not XML"),
        (b"", "not XML"),
        (b"\xff\xd8\xff", "not XML"),
        (b"<a>" * 40 + b"</a>" * 40, "more than 32 deep"),
        (b"<annotation>x</annotation>", "is empty"),
        (OBJECT.format("<name>dog</name>").encode(), "the box of an object 'dog' is not four numbers"),
        (OBJECT.format("<bndbox/>").encode(), "without a <name>"),
        (OBJECT.format("<name>d</name><bndbox><xmin>nan</xmin></bndbox>").encode(), "not four numbers"),
    ],
)
def test_hostile_xml_is_refused_by_name(tmp_path: Path, xml: bytes, said: str) -> None:
    root = voc(tmp_path / "in", 2)
    (root / "Annotations/2007_000001.xml").write_bytes(xml)
    with pytest.raises(DataError, match=said) as caught:
        convert(str(root), str(tmp_path / "out"))
    assert "2007_000001.xml" in str(caught.value)


def test_voc_in_another_folder_is_named(tmp_path: Path) -> None:
    voc(tmp_path / "in/VOC2007", 2)
    with pytest.raises(NotFoundError, match=r"no images in JPEGImages/.*; name VOC2007/ instead"):
        convert(str(tmp_path / "in"), str(tmp_path / "out"), options=ConvertOptions(kind="voc"))
    twice = tmp_path / "in/VOC2007/ImageSets/Main/train.txt"
    twice.write_text("2007_000001\n2007_000001\n")
    with pytest.raises(DataError, match=r"train\.txt: it names '2007_000001' twice"):
        convert(str(tmp_path / "in/VOC2007"), str(tmp_path / "out"), options=ConvertOptions(part="train"))
