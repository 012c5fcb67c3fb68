"""Images come out upright in every path, as width and height say; masks and depths keep their numbers."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset, decode
from streaming.build.decode import images
from streaming.errors import ConfigError
from streaming.integrations.gpu_decoders import upright

ORIENTATIONS = tuple(range(1, 9))
PATHS = ("JPEG", "JPEG stray", "JPEG CMYK", "PNG", "PNG late", "WEBP", "TIFF")  # simplejpeg, and Pillow's readers


def corners() -> np.ndarray:
    """Pixels [64, 96, 3] that differ in every corner, smooth enough for a JPEG."""
    y, x = np.mgrid[:64, :96]
    return np.stack([x * 2, y * 3, (x > 48) * 120 + (y > 32) * 100], axis=2).astype(np.uint8)


def encoded(path: str, orientation: int, order: str = "<") -> bytes:
    """An image in which ``orientation`` is noted."""
    kind, _, special = path.partition(" ")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    entries = [(271, 2, 4, b"cam\0"), (274, 3, 1, struct.pack(f"{order}HH", orientation, 0))]
    body = b"".join(struct.pack(f"{order}HHI", *one[:3]) + one[3] for one in entries)
    exif = head + struct.pack(f"{order}H", len(entries)) + body + bytes(4)
    picture, out = Image.fromarray(corners()), io.BytesIO()
    if kind == "TIFF":
        note = Image.Exif()
        note[274] = orientation
        picture.save(out, kind, exif=note)
        return out.getvalue()
    options: dict[str, Any] = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    if special != "late":
        options["exif"] = exif if kind == "WEBP" else b"Exif\0\0" + exif
    (picture.convert("CMYK") if special == "CMYK" else picture).save(out, kind, **options)
    data = out.getvalue()
    if special == "stray":
        data = data[:-2] + b"\0\0\0" + data[-2:]
    if special == "late":  # behind the pixels, which is allowed, too
        chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
        data = data[:-12] + chunk + data[-12:]
    return data


def expected(data: bytes) -> np.ndarray:
    """What Pillow's own function makes of it."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_turns_images_alike(path: str, orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(path, orientation)
    whole = expected(data)
    assert whole.shape == ((96, 64, 3) if orientation > 4 else (64, 96, 3))
    result = decode.image("rgb8")(memoryview(data))
    assert np.abs(result.astype(int) - whole).max() <= 3
    assert (result.flags.c_contiguous, result.flags.writeable) == (True, True)
    assert np.array_equal(np.asarray(decode.image("pil")(data)), result)
    assert images.stored_size(data) == (*whole.shape[:2], 1 if path == "TIFF" and orientation == 1 else orientation)
    for size in ((24, 16), (16, 24), (96, 64)):
        fits = np.asarray(Image.fromarray(whole).resize(size[::-1], Image.Resampling.BOX)).astype(int)
        for module in (images.opencv(), None):  # OpenCV, Pillow
            monkeypatch.setattr(images, "opencv", lambda module=module: module)
            sized = decode.image("rgb8", size)(data)
            assert sized.shape == (*size, 3)
            assert np.abs(sized.astype(int) - fits).mean() < 6, "upright, and then of this size"


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders_and_the_way_to_leave_it(order: str) -> None:
    data = encoded("JPEG", 6, order)
    assert decode.image("rgb8")(data).shape == (96, 64, 3)
    stored = decode.image("rgb8", upright=False)(data)
    assert np.abs(stored.astype(int) - corners()).mean() < 2
    assert decode.image("gray8", (10, 20))(data).shape == (10, 20)
    with pytest.raises(ValueError, match="upright=False"):
        decode.image("rgb8", upright=False)(encoded("TIFF", 6))


def test_damaged_notes_are_no_orientation() -> None:
    data = encoded("JPEG", 6)
    at = data.index(b"\x01\x12\0\3", 0) if b"\x01\x12\0\3" in data else data.index(b"\x12\x01\3\0")
    for value in (0, 9, 255):
        assert decode.image()(data[: at + 8] + bytes([value, 0]) + data[at + 10 :]).shape == (64, 96, 3)
    whole = bytearray(data)
    for position in range(2, at + 12):  # any flipped byte: an image, or an error of the image
        whole[position] ^= 0xFF
        images.orientation_of(bytes(whole))
        whole[position] ^= 0xFF
    for cut in range(at + 12):
        assert images.orientation_of(data[:cut]) == 1


def test_images_decoded_elsewhere_are_turned_alike(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar")) as writer:
        for orientation in ORIENTATIONS:
            writer.write({"__key__": str(orientation), "jpg": encoded("JPEG", orientation)})
    dataset = StreamingDataset(str(tmp_path), decode={"jpg": None}, shuffle=False)
    with DataLoader(dataset, batch_size=8, jagged=("jpg",), num_workers=0) as loader:
        batch = next(iter(loader))
    payloads = [bytes(row.numpy()) for row in batch["jpg"].rows()]
    as_stored = decode.image("rgb8", upright=False)
    results = upright([torch.from_numpy(as_stored(data)).permute(2, 0, 1) for data in payloads], batch["jpg"])
    for data, result in zip(payloads, results, strict=True):
        np.testing.assert_array_equal(result.permute(1, 2, 0).numpy(), decode.image("rgb8")(data))
    with pytest.raises(ConfigError, match="7 images for the 8 rows"):
        upright(results[:7], batch["jpg"])


# ------------------------------------------------------------------------------------------------- modes


def gray_png(bits: int) -> bytes:
    """A gray PNG [1, 16] of so many bits with the values 0, 1, 2, …"""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = int("".join(format(value % 2**bits, f"0{bits}b") for value in range(16)), 2).to_bytes(2 * bits, "big")
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 1, bits, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_index8_reads_the_numbers_of_a_mask() -> None:
    mask = (np.arange(48 * 64) // 7 % 21).astype(np.uint8).reshape(48, 64)
    palette = Image.fromarray(mask)
    palette.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    decoder = decode.image("index8")
    for kind, options in (("PNG", {}), ("PNG", {"bits": 8, "transparency": 3}), ("GIF", {}), ("TIFF", {}), ("BMP", {})):
        np.testing.assert_array_equal(decoder(saved(palette, kind, **options)), mask)
    np.testing.assert_array_equal(decoder(saved(Image.fromarray(mask), "PNG")), mask)
    for bits in (1, 2, 4, 8):
        np.testing.assert_array_equal(decoder(gray_png(bits))[0], np.arange(16) % 2**bits)
    small = decode.image("index8", (13, 5))(saved(palette, "PNG"))
    assert (small.shape, small.dtype, decode.image("index8", (13, 5)).shape) == ((13, 5), np.uint8, (13, 5))
    assert {*small.ravel().tolist()} <= {*range(21)}, "the nearest pixel, never a mean of two classes"
    doubled = decode.image("index8", (96, 128))(saved(palette, "PNG"))
    np.testing.assert_array_equal(doubled, mask.repeat(2, 0).repeat(2, 1))
    turned = Image.Exif()
    turned[274] = 6
    np.testing.assert_array_equal(decoder(saved(palette, "PNG", exif=turned)), np.rot90(mask, -1))
    for wrong in (saved(Image.fromarray(corners()), "PNG"), saved(Image.fromarray(mask), "JPEG")):
        with pytest.raises(ValueError, match="index8 takes"):
            decoder(wrong)
    with pytest.raises(ValueError, match="16 bits as gray16"):
        decoder(saved(Image.fromarray(mask.astype(np.uint16) * 100), "PNG"))


def test_gray16_keeps_sixteen_bits_and_widens_fewer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    depth = (np.arange(48 * 64, dtype=np.uint16) * 21 + 7).reshape(48, 64)
    decoder = decode.image("gray16")
    for kind in ("PNG", "TIFF", "PPM"):
        result = decoder(saved(Image.fromarray(depth), kind))
        assert result.dtype == np.uint16
        np.testing.assert_array_equal(result, depth)
    np.testing.assert_array_equal(decoder(gray_png(8))[0], np.arange(16) * 257)
    assert decoder(gray_png(1))[0, :2].tolist() == [0, 65535]
    flat = Image.fromarray(np.full((48, 64), 40_000, np.uint16))
    for module in (images.opencv(), None):
        monkeypatch.setattr(images, "opencv", lambda module=module: module)
        assert (decode.image("gray16", (12, 10))(saved(flat, "PNG")) == 40_000).all()
    for wrong in (corners(), depth.astype(np.float32)):
        with pytest.raises(ValueError, match="gray values of up to 16 bits"):
            decoder(saved(Image.fromarray(wrong), "TIFF"))
    with ShardWriter(str(tmp_path / "{:d}.tar")) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "depth.png": saved(Image.fromarray(depth + number), "PNG")})
    dataset = StreamingDataset(str(tmp_path), decode={"depth.png": "gray16"}, shuffle=False)
    for workers in (0, 1):
        with DataLoader(dataset, batch_size=4, num_workers=workers) as loader:
            batch = next(iter(loader))["depth.png"]
        assert (batch.dtype, batch.shape) == (torch.uint16, (4, 48, 64))
        np.testing.assert_array_equal(batch.numpy(), np.stack([depth + number for number in range(4)]))
