"""AVIF and JPEG 2000: decoded as Pillow does, upright, within the limit of pixels, wherever extensions are known."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from shard_tools.make.convert import ConvertOptions, ImageOptions, convert
from shard_tools.make.write.filetypes import file_type
from streaming import DataLoader, StreamingDataset
from streaming.build.decode import images, upright
from streaming.build.decode.registry import BY_EXTENSION
from streaming.shards.schema.kinds import kind_by_name

pytestmark = pytest.mark.skipif(not features.check("avif"), reason="this build of Pillow has no AVIF")

KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "avif": ("AVIF", {"quality": 90}), "jp2": ("JPEG2000", {"no_jp2": False}), "j2k": ("JPEG2000", {"no_jp2": True}),
}  # fmt: skip


def encoded(kind: str, pixels: np.ndarray, **how: Any) -> bytes:
    form, options = KINDS[kind]
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **(dict(options) | how))
    return out.getvalue()


def drawn(mode: str, size: tuple[int, int] = (21, 34)) -> np.ndarray:
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = np.add.outer(np.arange(size[0]) * 5, np.arange(size[1]) * 3).astype(np.uint8)
    return np.broadcast_to(pixels[..., None], (*size, *channels)).copy() if channels else pixels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("into", ["rgb8", "gray8", "rgba8", "pil"])
def test_pixels_are_those_of_pillow(kind: str, mode: str, into: str) -> None:
    data = encoded(kind, drawn(mode))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert({"rgb8": "RGB", "gray8": "L", "rgba8": "RGBA", "pil": "RGB"}[into]))
    found = np.asarray(images.image(into)(data))
    assert np.array_equal(found, expected)
    assert images.stored_size(data) == (21, 34, 1)
    assert file_type(data) == {"j2k": "jp2"}.get(kind, kind)
    assert kind in BY_EXTENSION or kind_by_name(kind) == "image"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_avif_comes_out_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    data = encoded("avif", drawn("RGB"), exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert upright.orientation_of(data) == orientation
    assert np.array_equal(np.asarray(images.image("rgb8")(data)), expected)
    assert images.stored_size(data)[:2] == expected.shape[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_more_pixels_than_allowed_are_refused_before_they_are_decoded(kind: str) -> None:
    with pytest.raises(ValueError, match="more than the 700 allowed"):
        images.image("rgb8", max_pixels=700)(encoded(kind, drawn("RGB")))


def test_a_jpeg_2000_whose_header_lies_about_its_size_is_refused() -> None:
    """Pillow takes the size of the file's header, and the pixels have their own."""
    data = bytearray(encoded("jp2", drawn("RGB")))
    at = data.index(b"\xff\x4f\xff\x51") + 8
    struct.pack_into(">II", data, at, 60_000, 60_000)
    decoder = images.image("rgb8")
    with pytest.raises(ValueError, match="image of 60000 x 60000 pixels"):
        decoder(bytes(data))
    decoy = bytes(data[:12]) + struct.pack(">I4s", 28, b"xml ") + b"\xff\x4f\xff\x51" + bytes(16) + bytes(data[12:])
    with pytest.raises(ValueError, match="image of 60000 x 60000 pixels"):
        decoder(decoy)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_flipped_files_are_errors_or_images_and_no_crash(kind: str) -> None:
    data, allowed = encoded(kind, drawn("RGB")), images.image("rgb8", max_pixels=10_000)
    changed = [data[:size] for size in range(0, len(data), 7)]
    for at in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[at] ^= 0xFF
        changed.append(bytes(flipped))
    for one in changed:
        with contextlib.suppress(Exception):  # of any library: a reader passes over the sample
            found = np.asarray(allowed(one))
            assert found.shape[0] * found.shape[1] <= 10_000
    assert np.asarray(allowed(data)).shape == (21, 34, 3)


def test_without_pillows_reader_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded("avif", drawn("RGB"))
    monkeypatch.setattr(images, "AVIF_READER", None)
    monkeypatch.setattr(upright, "AVIF_READER", None)
    with pytest.raises(ValueError, match=r"pip install 'pillow>=11\.3'"):
        images.image("rgb8")(data)


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_them_convert_and_train(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.{kind}").write_bytes(encoded(kind, drawn("RGB")))
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert (report.kind, report.num_samples, report.remarks) == ("images", 4, {})
    dataset = StreamingDataset(str(tmp_path / "out"), where="width = 34 and height = 21")
    with DataLoader(dataset, batch_size=4, num_workers=0, epoch_size=4) as loader:
        assert [tuple(batch[kind].shape) for batch in loader] == [(4, 21, 34, 3)]
    smaller = ConvertOptions(images=ImageOptions(max_side=10, format="jpg"))
    again = convert(str(tmp_path / "in"), str(tmp_path / "small"), options=smaller)
    assert again.remarks == {}
    assert len(StreamingDataset(str(tmp_path / "small"), where="width = 10")) == 4
