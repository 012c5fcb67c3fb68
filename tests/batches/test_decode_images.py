"""Image decoders: modes, sizes, odd files, and the limits that are checked before pixels exist."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from streaming import decode
from streaming.build.decode import images
from streaming.errors import ConfigError, DecodeError
from tests.support.sources.image_files import auto, saved, smooth


def png_of(width, height, *chunks):
    """A PNG whose header says width x height, whatever its pixels are."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        *(chunk(*one) for one in chunks),
        chunk(b"IDAT", zlib.compress(b"")),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("png", "PNG"),
        ("seg.png", "PNG"),
        ("bmp", "BMP"),
        ("tif", "TIFF"),
        ("tiff", "TIFF"),
        ("ppm", "PPM"),
        ("pnm", "PPM"),
        ("jpg", "PNG"),
    ],
)
def test_lossless_images_come_back_exactly(field, kind):
    pixels = smooth()
    result = auto(field, memoryview(saved(pixels, kind)))
    assert result.dtype == np.uint8
    assert result.flags.writeable
    np.testing.assert_array_equal(result, pixels)


def test_webp_and_gif():
    pixels = smooth()
    np.testing.assert_array_equal(auto("webp", saved(pixels, "WEBP", lossless=True)), pixels)
    frames = [Image.fromarray(smooth()).quantize(16), Image.new("P", (64, 48))]
    first = np.asarray(frames[0].convert("RGB"))
    np.testing.assert_array_equal(auto("gif", saved(frames[0], "GIF", save_all=True, append_images=frames[1:])), first)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize("name", ["jpg", "jpeg"])
def test_jpeg_matches_pillow(name, options):
    data = saved(smooth(), "JPEG", quality=90, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    result = auto(name, memoryview(data))
    assert result.flags.writeable
    assert result.shape == (48, 64, 3)
    assert np.abs(result.astype(int) - expected).max() <= 3


def test_grayscale_and_cmyk_jpegs_become_rgb():
    gray = saved(smooth()[:, :, 0], "JPEG", quality=95)
    result = auto("jpg", gray)
    assert result.shape == (48, 64, 3)
    assert (result[:, :, 0] == result[:, :, 2]).all()
    assert auto("jpg", gray, {"jpg": "gray8"}).shape == (48, 64)
    cmyk = saved(Image.fromarray(smooth()).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(auto("jpg", cmyk).astype(int) - smooth()).mean() < 5


def test_jpeg_with_stray_bytes_is_decoded_and_a_truncated_one_refused():
    data = saved(smooth(), "JPEG")
    stray = data[:-2] + b"\0\0\0" + data[-2:]
    assert auto("jpg", stray).shape == (48, 64, 3)
    with pytest.raises(OSError, match=r"(?i)truncated"):
        auto("jpg", data[: len(data) * 3 // 4])


@pytest.mark.parametrize(
    ("mode", "shape", "dtype"),
    [
        ("rgb8", (48, 64, 3), "uint8"),
        ("gray8", (48, 64), "uint8"),
        ("rgba8", (48, 64, 4), "uint8"),
        ("rgb", (48, 64, 3), "float32"),
        ("gray", (48, 64), "float32"),
        ("rgba", (48, 64, 4), "float32"),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_image_in_each_mode_has_its_shape_and_dtype(mode, shape, dtype, kind):
    result = auto("image", saved(smooth(), kind), {"image": mode})
    assert (result.shape, result.dtype) == (shape, np.dtype(dtype))
    if dtype == "float32":
        assert 0.5 < result.max() <= 1.0
    if mode == "rgba8":
        assert (result[:, :, 3] == 255).all()
    sized = decode.image(mode, (5, 7))
    assert sized(saved(smooth(), kind)).shape == sized.shape
    assert sized.dtype == np.dtype(dtype)


def test_pil_images_are_loaded_and_detached():
    data = bytearray(saved(smooth(), "PNG"))
    result = auto("png", memoryview(data), "pil")
    data[:] = bytes(len(data))
    assert isinstance(result, Image.Image)
    assert result.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(result), smooth())


def test_alpha_is_cut_off_palettes_are_looked_up_and_sixteen_bits_keep_the_high_byte():
    rgba = np.dstack([smooth(), np.zeros((48, 64), np.uint8)])
    np.testing.assert_array_equal(auto("png", saved(rgba, "PNG")), smooth())
    palette = Image.fromarray(smooth()).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    np.testing.assert_array_equal(auto("png", saved(palette, "PNG")), expected)
    np.testing.assert_array_equal(auto("png", saved(palette, "PNG", transparency=b"\0\x80")), expected)
    np.testing.assert_array_equal(auto("png", saved(palette, "PNG", transparency=3)), expected)
    deep = (np.arange(48 * 64, dtype=np.uint16) * 21).reshape(48, 64)
    np.testing.assert_array_equal(auto("png", saved(deep, "PNG"), {"png": "gray8"}), (deep >> 8).astype(np.uint8))
    np.testing.assert_array_equal(auto("tif", saved(deep, "TIFF"), {"tif": "gray8"}), (deep >> 8).astype(np.uint8))
    with pytest.raises(ValueError, match="32-bit"):
        auto("tif", saved(smooth()[:, :, 0].astype(np.float32), "TIFF"))


@pytest.mark.parametrize("opencv", [True, False])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_sized_images_are_height_by_width_and_close_to_an_area_average(kind, opencv, monkeypatch):
    if not opencv:
        monkeypatch.setattr(images, "opencv", lambda: None)
    data = saved(smooth(96, 128), kind, **({"quality": 95} if kind == "JPEG" else {}))
    result = auto("x", memoryview(data), {"x": "rgb8:24x64"})
    expected = np.asarray(Image.fromarray(smooth(96, 128)).resize((64, 24), Image.Resampling.BOX)).astype(int)
    assert result.shape == (24, 64, 3)
    assert np.abs(result - expected).mean() < 2
    larger = auto("x", data, {"x": "rgb8:100x200"})
    expected = np.asarray(Image.fromarray(smooth(96, 128)).resize((200, 100), Image.Resampling.BILINEAR)).astype(int)
    assert larger.shape == (100, 200, 3)
    assert np.abs(larger - expected).mean() < 2
    assert auto("x", data, {"x": "gray8:24x64"}).shape == (24, 64)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP"])
def test_images_above_the_limit_are_refused(kind):
    data = saved(Image.fromarray(smooth()).quantize(16) if kind == "GIF" else smooth(), kind)
    assert decode.image(max_pixels=48 * 64)(data).shape == (48, 64, 3)
    with pytest.raises(ValueError, match=r"48 x 64 pixels.*max_pixels"):
        decode.image(max_pixels=48 * 64 - 1)(data)


def test_the_limit_is_checked_before_pixels_exist():
    jpeg = bytearray(saved(smooth(), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    webp = (
        b"RIFF"
        + struct.pack("<I", 22)
        + b"WEBPVP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + b"\xff\xff\x00"
        + b"\xff\xff\x00"
    )
    for data in (png_of(2**20, 2**20), bytes(jpeg), webp):
        with pytest.raises(ValueError, match="max_pixels"):
            auto("png", data)


def test_large_but_allowed_images_raise_no_warning_of_pillow():
    """Pillow's own limit is lower than ours: its warning, an error under this test run, must not appear."""
    monitored = png_of(12_000, 10_000)
    with pytest.raises((OSError, SyntaxError)):
        auto("png", monitored)


def test_a_text_bomb_in_a_png_is_refused():
    bomb = b"a\0\0" + zlib.compress(bytes(100_000_000))
    with pytest.raises(ValueError, match="large"):
        auto("png", png_of(2, 2, (b"zTXt", bomb)))


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF-3.0", b"GIF89a", b"<svg>"])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(DecodeError):
        decode.decode_field(images.image(), data, url="u", key="k", field="jpg")


@pytest.mark.parametrize("size", [(0, 1), (1, -1), (1,)])
def test_sizes_are_checked(size):
    with pytest.raises(ConfigError):
        decode.image("rgb8", size)


def test_simplejpeg_is_what_decodes_jpegs(monkeypatch):
    calls = []
    real = simplejpeg.decode_jpeg
    monkeypatch.setattr(
        simplejpeg, "decode_jpeg", lambda *args, **options: calls.append(options) or real(*args, **options)
    )
    auto("jpg", saved(smooth(), "JPEG"), "rgb8:10x20")
    assert calls == [{"colorspace": "RGB", "min_height": 10, "min_width": 20}]
