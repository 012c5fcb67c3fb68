"""Re-encoding on the way: sizes, formats, EXIF, and what is never done to an image."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from PIL import Image, ImageCms

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, ImageOptions, convert
from streaming import StreamingDataset
from streaming.build.decode.images import image as decoder
from streaming.errors import ConfigError
from tests.support.sets.tars import write_tar
from tests.support.sources.conversions import contents, members
from tests.support.sources.image_files import saved, smooth

pytestmark = pytest.mark.thorough


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def folder(root: Path, **images: bytes) -> str:
    root.mkdir(parents=True, exist_ok=True)
    for name, body in images.items():
        (root / name).write_bytes(body)
    return str(root)


def recoded(tmp_path: Path, name: str, body: bytes, **how: Any) -> tuple[bytes, dict[str, int]]:
    """The bytes that a single image becomes, and the remarks."""
    options = ConvertOptions(images=ImageOptions(**how), overwrite=True)
    report = convert(folder(tmp_path / "one", **{name: body}), str(tmp_path / "out"), options=options)
    (found,) = (body for member, body in members(tmp_path / "out").items() if not member.endswith("json"))
    (tmp_path / "one" / name).unlink()
    return found, dict(report.remarks)


def opened(body: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(body))
    image.load()
    return image


def oriented(orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    exif[306] = "2024:01:01 00:00:00"
    return saved(smooth(30, 60), kind, exif=exif, **options)


@pytest.mark.parametrize("kind", ["jpg", "webp", "png"])
def test_larger_images_shrink_and_smaller_ones_keep_their_bytes(tmp_path: Path, kind: str) -> None:
    pillow = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}[kind]
    big, small = saved(smooth(120, 240), pillow), saved(smooth(20, 32), pillow)
    source = folder(tmp_path / "in", **{f"big.{kind}": big, f"small.{kind}": small})
    result = run("convert", source, tmp_path / "out", "--image-max-side", 32, "--json")
    assert result.exit_code == 0, result.output
    found = members(tmp_path / "out")
    assert found[f"small.{kind}"] == small, "never enlarged, and not encoded again"
    image = opened(found[f"big.{kind}"])
    assert (image.size, image.format) == ((32, 16), pillow)
    far = np.asarray(image.convert("RGB")).astype(float) - decoder("rgb8", (16, 32))(big)
    assert np.abs(far).mean() < 20, "the same picture; mirrored it would be 50"
    assert len(StreamingDataset(str(tmp_path / "out"), where="width = 32 and height = 16")) == 1
    assert len(StreamingDataset(str(tmp_path / "out"), where="width = 32")) == 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_is_applied_as_decoders_apply_it(tmp_path: Path, orientation: int, kind: str) -> None:
    body = oriented(orientation, kind)
    found, remarks = recoded(tmp_path, f"a.{kind.lower()}", body, format="png")
    assert np.array_equal(decoder("rgb8")(found), decoder("rgb8")(body))
    assert found == body or "exif" not in opened(found).info
    said = [remark for remark in remarks if "turned upright" in remark]
    assert bool(said) == (orientation > 1)
    assert not any("other programs may not" in remark for remark in remarks), "it is turned now"
    smaller, _ = recoded(tmp_path, f"a.{kind.lower()}", body, format="jpg", max_side=20)
    assert opened(smaller).size == ((10, 20) if orientation > 4 else (20, 10))


def test_quality_acts(tmp_path: Path) -> None:
    body = saved(np.random.default_rng(0).integers(0, 255, (60, 60, 3), dtype=np.uint8), "JPEG", quality=95)
    sizes = [len(recoded(tmp_path, "a.jpg", body, quality=quality)[0]) for quality in (10, 50, 90)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] / 2
    usual, _ = recoded(tmp_path, "a.jpg", body, format="webp")
    assert usual == recoded(tmp_path, "a.jpg", body, format="webp", quality=90)[0]
    assert recoded(tmp_path, "a.jpg", body, format="jpg")[0] == body, "it is as asked"


TRANSPARENT = Image.fromarray(np.dstack([smooth(), np.tile(np.arange(64, dtype=np.uint8) * 4, (48, 1))]))
DEEP = Image.fromarray(smooth(channels=1)[..., 0].astype(np.uint16) * 257)
FRAMES = [Image.fromarray(smooth()), Image.fromarray(smooth()[::-1].copy())]
KEPT = {
    "deep.png": (saved(DEEP, "PNG"), "more than 8 bits"),
    "deep.tif": (saved(DEEP, "TIFF"), "more than 8 bits"),
    "deep.pgm": (saved(DEEP, "PPM"), "more than 8 bits"),
    "float.tif": (saved(Image.fromarray(smooth(channels=1)[..., 0].astype(np.float32)), "TIFF"), "more than 8 bits"),
    "moving.gif": (saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "several frames"),
    "moving.webp": (saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "several frames"),
    "cut.jpg": (saved(smooth(), "JPEG")[:700], "cannot be decoded"),
    "no.jpg": (b"<html>", "cannot be decoded"),
    "huge.webp": (
        b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xfe\x3f\0\xfe\x3f\0", "more than 134,217,728 pixels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_images_that_would_lose_something_else_are_kept_and_remarked(tmp_path: Path, name: str) -> None:
    body, said = KEPT[name]
    found, remarks = recoded(tmp_path, name, body, format="webp", max_side=8)
    assert found == body
    assert any(said in remark for remark in remarks), remarks


def test_deep_colors_are_kept(tmp_path: Path) -> None:
    """Pillow opens them with 8 bits, without a word."""
    header = b"P6 2 1 65535\n" + bytes(range(12))
    assert recoded(tmp_path, "a.ppm", header, format="png")[0] == header

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(bytes(7))) + chunk(b"IEND", b"")
    found, remarks = recoded(tmp_path, "a.png", png, format="jpg")
    assert found == png
    assert any("more than 8 bits" in remark for remark in remarks)


MODES = {
    "alpha.png": (TRANSPARENT, "PNG", {"jpg": "RGB", "webp": "RGBA", "png": "RGBA"}),
    "gray.png": (TRANSPARENT.convert("L"), "PNG", {"jpg": "L", "webp": "RGB", "png": "L"}),
    "both.png": (TRANSPARENT.convert("LA"), "PNG", {"jpg": "L", "webp": "RGBA", "png": "LA"}),
    "palette.png": (Image.fromarray(smooth()).convert("P"), "PNG", {"jpg": "RGB", "webp": "RGB"}),
    "bits.bmp": (Image.fromarray(smooth()).convert("1"), "BMP", {"jpg": "L", "webp": "RGB", "png": "L"}),
    "print.jpg": (Image.fromarray(smooth()).convert("CMYK"), "JPEG", {"webp": "RGB", "png": "RGB"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "wanted"), [(name, kind) for name in MODES for kind in MODES[name][2]])
def test_modes_become_what_the_format_has(tmp_path: Path, name: str, wanted: str) -> None:
    image, kind, modes = MODES[name]
    found, remarks = recoded(tmp_path, name, saved(image, kind), format=wanted)
    assert opened(found).mode == modes[wanted]
    if wanted == "png" and kind == "PNG" and name != "palette.png":
        assert not remarks
    assert any("transparency is dropped" in remark for remark in remarks) == (wanted == "jpg" and "A" in image.mode)
    assert any("CMYK became RGB" in remark for remark in remarks) == (image.mode == "CMYK")


def test_a_color_profile_stays_where_it_fits(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    found, _ = recoded(tmp_path, "a.jpg", saved(smooth(), "JPEG", icc_profile=profile), format="webp")
    assert opened(found).info["icc_profile"] == profile
    printed = saved(Image.fromarray(smooth()).convert("CMYK"), "JPEG", icc_profile=profile)
    assert "icc_profile" not in opened(recoded(tmp_path, "a.jpg", printed, format="png")[0]).info


# ------------------------------------------------------------------------------------------------- other sources


def test_tars_are_re_encoded_and_get_columns(tmp_path: Path) -> None:
    big = saved(smooth(40, 80), "PNG")
    write_tar(tmp_path / "in.tar", [("a.png", big), ("a.txt", b"x"), ("b.txt", b"no image")])
    result = run("convert", tmp_path / "in.tar", tmp_path / "out", "--format", "jpg", "--image-max-side", 20)
    assert result.exit_code == 0, result.output
    found = members(tmp_path / "out")
    assert sorted(found) == ["a.jpg", "a.txt", "b.txt"]
    assert len(StreamingDataset(str(tmp_path / "out"), where="width = 20 and height = 10")) == 1


def test_masks_are_never_re_encoded_by_chance(tmp_path: Path) -> None:
    mask = saved(smooth(channels=1)[..., 0], "PNG")
    write_tar(tmp_path / "in.tar", [("a.jpg", saved(smooth(), "JPEG")), ("a.seg.png", mask)])
    refused = run("convert", tmp_path / "in.tar", tmp_path / "out", "--format", "webp")
    assert refused.exit_code == 2
    assert "several fields hold images (jpg, seg.png); name those to re-encode with --image-fields" in refused.stderr
    taken = run("convert", tmp_path / "in.tar", tmp_path / "out", "--format", "webp", "--image-fields", "jpg")
    assert taken.exit_code == 0, taken.output
    found = members(tmp_path / "out")
    assert sorted(found) == ["a.seg.png", "a.webp"]
    assert found["a.seg.png"] == mask
    write_tar(tmp_path / "two.tar", [("a.jpg", saved(smooth(), "JPEG")), ("a.webp", saved(smooth(), "WEBP"))])
    clash = run("convert", tmp_path / "two.tar", tmp_path / "x", "--format", "webp", "--image-fields", "jpg")
    assert "the field 'jpg' would become 'webp', which is there already" in clash.stderr


def test_columns_of_parquet_are_re_encoded(tmp_path: Path) -> None:
    table = pa.table({"left": [saved(smooth(40, 80), "JPEG")], "right": [saved(smooth(40, 80), "PNG")], "n": [1]})
    pq.write_table(table, tmp_path / "in.parquet")
    options = ConvertOptions(images=ImageOptions(max_side=20, format="webp", fields=("left.jpg", "right.png")))
    convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"), options=options)
    found = members(tmp_path / "out")
    assert sorted(found) == ["000000000.json", "000000000.left.webp", "000000000.right.webp"]
    assert opened(found["000000000.right.webp"]).size == (20, 10)
    journal = json.loads((tmp_path / "out/_shardstream/convert.json").read_text())
    assert sorted(journal["fields"]) == ["json", "left.webp", "right.webp"]
    assert run("verify", tmp_path / "out", "--decode").exit_code == 0


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("a.jsonl", ("--quality", "50"), "a source of kind 'jsonl' has none"),
        ("a.parquet", ("--format", "jpg"), "no field holds images in the source; its fields: json"),
        ("a.tar", ("--format", "jpg"), "no field holds images in the source; its fields: txt"),
        ("png", ("--quality", "50"), "field 'png' is png, which has none; give --format jpg or webp"),
        ("png", ("--quality", "50", "--format", "png"), "--quality: png has none"),
        ("gif", ("--image-max-side", "5"), "field 'gif': say what its images become: --format"),
        ("png", ("--image-fields", "png"), "say how: --image-max-side"),
        ("png", ("--image-fields", "jpg", "--format", "jpg"), "no field 'jpg' in the source; its fields: json, png"),
    ],
)
def test_options_that_would_not_act_are_refused(
    tmp_path: Path, source: str, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    write_tar(tmp_path / "a.tar", [("a.txt", b"x")])
    for kind in ("png", "gif"):
        folder(tmp_path / kind, **{f"a.{kind}": saved(smooth(), kind.upper())})
    result = run("convert", tmp_path / source, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_re_encoding_is_part_of_the_work(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", **{f"{number}.jpg": saved(smooth(40, 80), "JPEG") for number in range(5)})
    plain = convert(source, str(tmp_path / "plain"))
    assert convert(source, str(tmp_path / "plain")).num_resumed_samples == plain.num_samples
    journal = json.loads((tmp_path / "plain/_shardstream/convert.json").read_text())
    assert "images" not in journal["options"], "a conversion of an earlier release goes on"
    refused = run("convert", source, tmp_path / "plain", "--image-max-side", 20)
    assert "options images: there None" in refused.stderr
    with pytest.raises(ConfigError, match="expected 1 to 100"):
        ImageOptions(quality=0)
    for workers in (1, 5):
        options = ConvertOptions(workers=workers, images=ImageOptions(max_side=20, quality=40), max_samples=2)
        convert(source, str(tmp_path / f"out{workers}"), options=options)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out5")
