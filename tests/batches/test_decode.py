"""Decoders: what each extension means, what is refused, and that nothing keeps the buffer it was given."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile

import msgpack
import numpy as np
import pytest
import safetensors.numpy
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from webdataset.autodecode import gzfilter

from streaming import decode
from streaming.errors import ConfigError, DecodeError
from streaming.testing import DecoderTests
from streaming.testing.decoders import GivenDecoder
from tests.support.sources.image_files import auto, saved, smooth
from tests.support.tiers import first_here


def npy_bytes(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npy_header(header, payload=b"", version=1):
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + payload


def npz_bytes(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


# --- by extension ---


@pytest.mark.parametrize(
    ("field", "data", "expected"),
    [
        ("txt", "schön\n".encode(), "schön\n"),
        ("text", b"", ""),
        ("transcript", b"a", "a"),
        ("cls", b"7", 7),
        ("cls2", b"-7\n", -7),
        ("index", b"0", 0),
        ("inx", b"1", 1),
        ("id", b"12345678901234567890", 12345678901234567890),
        ("int", b" 3 ", 3),
        ("float", b"1.5", 1.5),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("jsn", b"2", 2),
        ("meta.JSON", b"2", 2),
        ("msgpack", msgpack.packb({"a": b"\0", 1: "b"}), {"a": b"\0", 1: "b"}),
        ("mp", msgpack.packb([1]), [1]),
        ("msg", msgpack.packb(None), None),
        ("mp4", b"\0\1", b"\0\1"),
        ("json.gz", gzip.compress(b"[1]", mtime=0), [1]),
        ("", b"\0", b"\0"),
    ],
)
def test_auto_decodes_by_the_last_component_of_the_extension(field, data, expected):
    for given_data in (data, bytearray(data), memoryview(data)):
        result = auto(field, given_data)
        assert result == expected
        assert type(result) is type(expected)


@pytest.mark.parametrize("field", ["pyd", "pickle", "pkl", "pth", "pt", "PTH", "model.pt", "ten", "tb"])
def test_pickles_and_tenbin_are_refused_with_the_cure(field):
    decoders = decode.resolve_decoders("auto")
    with pytest.raises(ConfigError, match=r"decode={.*: None}"):
        decoders.decoder_for(field)
    assert auto(field, b"x", {field: None}) == b"x"
    assert auto(field, b"x", {field: lambda data: data * 2}) == b"xx"
    assert auto(field, b"x", None) == b"x"


def test_decoder_for_is_stable():
    decoders = decode.resolve_decoders("auto")
    assert decoders.decoder_for("a.jpg") is decoders.decoder_for("a.jpg")
    assert decoders.decoder_for("bin") is decode.raw
    assert decode.resolve_decoders(None).decoder_for("jpg") is decode.raw


# --- specs ---


@pytest.mark.parametrize(
    ("spec", "data", "expected"),
    [
        ("raw", b"1", b"1"),
        ("bytes", b"1", b"1"),
        ("text", b"1", "1"),
        ("int", b"1", 1),
        ("float", b"1", 1.0),
        ("json", b"[1]", [1]),
        (int, b"1", 1),
        (float, b"1", 1.0),
        (str, b"1", "1"),
        (bytes, b"1", b"1"),
        (None, b"1", b"1"),
        (json.loads, b"[1]", [1]),
        (type, b"1", bytes),
    ],
)
def test_a_listed_field_is_decoded_as_told(spec, data, expected):
    assert auto("jpg", memoryview(data), {"jpg": spec}) == expected


def test_unlisted_fields_are_decoded_by_extension_and_patterns_apply():
    spec = {"cls": str, "*.json": None}
    assert auto("cls", b"3", spec) == "3"
    assert auto("CLS", b"3", spec) == "3"
    assert auto("a.cls", b"3", spec) == 3
    assert auto("json", b"{}", spec) == b"{}"
    assert auto("a.json", b"{}", spec) == b"{}"
    assert auto("txt", b"3", spec) == "3"
    assert auto("txt", b"3", {"*": None, "cls": int}) == b"3"
    assert auto("pkl", b"3", {"*": None}) == b"3"
    assert auto("pkl", b"3", {"*": None, "pkl": len}) == 1
    assert auto("seg.txt", b"3", {"*": None, "seg.txt": "auto"}) == "3"


@pytest.mark.parametrize(
    "spec",
    [
        "jpeg8",
        3,
        {"jpg": "rgb9"},
        {"jpg": 3},
        {"x": "array:object"},
        {"x": "array:int64->uint8x"},
        {"x": "rgb8:0x5"},
        ["jpg"],
    ],
)
def test_a_spec_that_means_nothing_is_a_config_error(spec):
    with pytest.raises(ConfigError):
        decode.resolve_decoders(spec)


def test_a_decoder_that_accepts_buffers_gets_the_buffer_and_a_function_gets_bytes():
    class Length:
        accepts_buffer = True

        def __call__(self, data):
            return type(data)

    assert auto("x", memoryview(b"1"), {"x": Length()}) is memoryview
    assert auto("x", memoryview(b"1"), {"x": type}) is bytes


def test_a_field_decoder_is_its_own_spec():
    decoders = decode.resolve_decoders("auto")
    assert decode.resolve_decoders(decoders) is decoders


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    for resolve in (
        lambda: decode.resolve_decoders("auto").decoder_for("mp"),
        lambda: decode.resolve_decoders({"x": "msgpack"}),
    ):
        with pytest.raises(ConfigError, match=r"shardstream\[msgpack\]"):
            resolve()


def test_decoders_survive_a_pickle():
    spec = {
        "x": "array:uint16->int64:2x2",
        "jpg": "rgb8:8x8",
        "npz": decode.npz(max_bytes=5),
        "cls": int,
        "f": len,
    }
    decoders = pickle.loads(pickle.dumps(decode.resolve_decoders(spec)))
    assert decoders == decode.resolve_decoders(spec)
    assert decoders.decoder_for("x")(bytes(range(8))).tolist() == [[256, 770], [1284, 1798]]
    for name in ("txt", "cls", "json", "npy", "npz", "mp", "sft", "png", "bin"):
        decoder = decode.resolve_decoders("auto").decoder_for(name)
        assert pickle.loads(pickle.dumps(decoder)) == decoder
    assert pickle.loads(pickle.dumps(decode.raw)) is decode.raw


# --- arrays ---


@pytest.mark.parametrize("spec", ["array:uint16->int64", decode.array("uint16", "int64")])
def test_raw_arrays_are_little_endian_and_converted(spec):
    result = auto("tokens", memoryview(b"\x01\x00\xff\xff"), {"tokens": spec})
    assert result.dtype == np.int64
    assert result.tolist() == [1, 65535]


def test_array_decoders_say_what_they_do():
    decoder = decode.array("uint16", "int64", (-1, 2))
    assert (decoder.dtype, decoder.to, decoder.shape) == (np.dtype("<u2"), np.dtype("int64"), (-1, 2))
    assert decoder(bytes(8)).shape == (2, 2)
    assert auto("x", bytes(8), {"x": np.dtype(">f4")}).dtype == np.dtype("float32")
    assert auto("x", bytes(8), {"x": np.float32}).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "to", "shape"),
    [
        ("O", None, None),
        ("float32", "int32", None),
        ("int8", None, (-1, -1)),
        ("bogus", None, None),
        ("U4", None, None),
    ],
)
def test_array_refuses_what_cannot_work(dtype, to, shape):
    with pytest.raises(ConfigError):
        decode.array(dtype, to, shape)


@pytest.mark.parametrize(("shape", "size"), [(None, 3), ((2,), 6), ((-1, 3), 8)])
def test_array_refuses_lengths_that_do_not_fit(shape, size):
    with pytest.raises(ValueError, match=r"bytes|reshape"):
        decode.array("uint16", shape=shape)(bytes(size))


@given(
    hnp.arrays(
        hnp.scalar_dtypes().filter(lambda dtype: dtype.kind not in "mM"),
        hnp.array_shapes(min_dims=0, min_side=0),
    ),
    st.booleans(),
)
def test_npy_reads_what_numpy_writes(array, fortran):
    array = np.asfortranarray(array) if fortran else array
    result = decode.npy(memoryview(npy_bytes(array)))
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert result.tobytes() == array.tobytes()
    assert result.flags.writeable
    assert result.flags.f_contiguous == array.flags.f_contiguous


def test_npy_of_structures_and_later_versions():
    array = np.zeros(3, [("a", "<i4"), ("日", "<f8", (2,))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = npy_bytes(array)
    assert data[6] == 3
    assert decode.npy(data).dtype == array.dtype
    header = b"{'descr': '<i2', 'fortran_order': False, 'shape': (1,), }"
    assert decode.npy(npy_header(header, b"\x05\0", version=2)).tolist() == [5]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\0\x10\0" + bytes(16),
        npy_bytes(np.arange(9))[:-1],
        npy_bytes(np.arange(9)) + b"\0",
        npy_header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846976,)}", bytes(8)),
        npy_header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}", bytes(8)),
        npy_header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (True,)}", bytes(8)),
        npy_header(b"{'descr': '<i8', 'fortran_order': False, 'shape': 1}", bytes(8)),
        npy_header(b"{'descr': '<i8', 'shape': (1,)}", bytes(8)),
        npy_header(b"__import__('os').getpid()"),
        npy_header(b"(" * 9000),
        npy_header(b" " * 60000),
        npy_bytes(np.array([{"a": 1}], object), allow_pickle=True),
    ],
)
def test_npy_refuses_damaged_huge_and_pickled_content(data):
    with pytest.raises(ValueError, match="npy"):
        decode.npy(data)


def test_npz_is_a_dict_of_arrays_in_order():
    result = auto("npz", memoryview(npz_bytes(b=np.arange(3), a=np.ones((2, 2), np.float32))))
    assert list(result) == ["b", "a"]
    assert result["b"].tolist() == [0, 1, 2]
    assert result["a"].dtype == np.float32


def test_npz_is_bounded_before_it_is_unpacked():
    data = npz_bytes(a=np.zeros(10_000_000, np.uint8))
    assert len(data) < 20_000
    with pytest.raises(ValueError, match="max_bytes"):
        decode.npz(max_bytes=1_000_000)(data)


def test_npz_whose_directory_understates_the_size_is_refused():
    data = bytearray(npz_bytes(a=np.zeros(100_000, np.uint8)))
    central = data.rindex(b"PK\1\2")
    data[central + 24 : central + 28] = struct.pack("<I", 200)
    with pytest.raises(ValueError, match=r"npz|npy"):
        decode.npz()(bytes(data))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_refuses_methods_whose_unpacking_is_not_bounded(method):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("a.npy", npy_bytes(np.arange(3)))
    with pytest.raises(ValueError, match="unusual method"):
        decode.npz()(stream.getvalue())


def test_npz_refuses_what_is_no_archive():
    with pytest.raises(ValueError, match="valid"):
        decode.npz()(b"not a zip")


def test_safetensors_are_writable_arrays_of_their_own():
    data = bytearray(safetensors.numpy.save({"a": np.arange(4, dtype=np.int16).reshape(2, 2)}))
    result = auto("safetensors", memoryview(data))
    data[:] = bytes(len(data))
    assert result["a"].tolist() == [[0, 1], [2, 3]]
    assert result["a"].flags.writeable


# --- the contract ---

_SAMPLES = {
    "txt": b"abc",
    "cls": b"3",
    "json": b'{"a": "b"}',
    "bin": b"abc",
    "npy": npy_bytes(np.arange(5)),
    "npz": npz_bytes(a=np.arange(5)),
    "mp": msgpack.packb([b"abc", "d"]),
    "sft": safetensors.numpy.save({"a": np.arange(5)}),
    "tokens": bytes(range(10)),
    "words": bytes(range(10)),
    "png": saved(smooth(), "PNG"),
    "jpg": saved(smooth(), "JPEG"),
    "small": saved(smooth(), "JPEG"),
    "crop": saved(smooth(), "JPEG"),
}


SPECS = {
    "tokens": "array:uint16->int64",
    "words": "array:uint8",
    "small": "rgb8:9x9",
    "crop": decode.random_crop("rgb8", (9, 9)),
}
_OTHERS = {
    "txt": b"abd",
    "cls": b"4",
    "json": b"[1, null]",
    "bin": b"",
    "npy": npy_bytes(np.arange(4.0)),
    "npz": npz_bytes(b=np.arange(5)),
    "mp": msgpack.packb({"a": 3}),
    "sft": safetensors.numpy.save({"a": np.arange(4)}),
    "tokens": bytes(6),
    "words": bytes(6),
    "png": saved(smooth()[:20], "PNG"),
    "jpg": saved(smooth()[:20], "JPEG"),
    "small": saved(smooth()[:20], "JPEG"),
    "crop": saved(smooth()[:20], "JPEG"),
}


class TestContract(DecoderTests):
    @pytest.fixture(params=first_here(_SAMPLES, 6))
    def given(self, request):
        field = request.param
        return GivenDecoder(SPECS.get(field, "auto"), field, [_SAMPLES[field], _OTHERS[field]])


def test_errors_name_the_sample_and_keep_the_cause():
    with pytest.raises(DecodeError, match=r"s3://b/a\.tar.*'k1'.*'cls'.*3 B.*invalid literal") as caught:
        decode.decode_field(decode.integer, b"abc", url="s3://b/a.tar", key="k1", field="cls")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [ConfigError("x"), MemoryError()])
def test_errors_that_are_not_the_samples_fault_pass(error):
    def decoder(data):
        raise error

    with pytest.raises(type(error)):
        decode.decode_field(decoder, b"", url="u", key="k", field="f")


def test_deeply_nested_json_is_a_decode_error():
    with pytest.raises(DecodeError):
        decode.decode_field(decode.json, b"[" * 200_000, url="u", key="k", field="json")


@given(st.binary(max_size=200), st.sampled_from(sorted(_SAMPLES)), st.integers(0, 400), st.integers(0, 255))
def test_damaged_bytes_decode_or_raise_a_decode_error(extra, field, position, byte):
    data = bytearray(_SAMPLES[field] + extra)
    data[position % len(data)] = byte
    decoder = decode.resolve_decoders({"tokens": "array:uint16"}).decoder_for(field)
    for damaged in (bytes(data), extra):
        try:
            decode.decode_field(decoder, damaged, url="u", key="k", field=field)
        except DecodeError as error:
            assert "'k'" in str(error)  # noqa: PT017 - decoding may also succeed


# --- webdataset ---


def test_webdataset_handlers_decode_and_the_rest_is_ours():
    decoders = decode.resolve_decoders(decode.from_webdataset(wds.imagehandler("rgb8")))
    pixels = smooth()
    np.testing.assert_array_equal(decoders.decoder_for("png")(memoryview(saved(pixels, "PNG"))), pixels)
    assert decoders.decoder_for("cls")(b"3") == 3
    with pytest.raises(ConfigError, match="pickle"):
        decoders.decoder_for("pkl")(pickle.dumps(1))
    assert auto("png", saved(pixels, "PNG"), {"png": decode.from_webdataset("torchrgb8")}).shape == (
        3,
        48,
        64,
    )
    assert pickle.loads(pickle.dumps(decoders)).decoder_for("cls")(b"3") == 3


def test_webdataset_handlers_may_unpack_and_go_on():
    decoders = decode.from_webdataset(gzfilter, rest={"json": None})
    assert decoders.decoder_for("txt.gz")(gzip.compress(b"abc", mtime=0)) == "abc"
    assert decoders.decoder_for("json.gz")(gzip.compress(b"{}", mtime=0)) == b"{}"


@pytest.mark.parametrize("handlers", [(), (3,), ("no such mode",)])
def test_webdataset_handlers_are_checked(handlers):
    with pytest.raises(ConfigError):
        decode.from_webdataset(*handlers)


@pytest.mark.thorough
def test_importing_decode_imports_neither_torch_nor_optional_packages():
    code = (
        "import sys, streaming.decode\n"
        "print([m for m in ('torch', 'webdataset', 'cv2', 'msgpack', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_closest_name_of_a_field_decides():
    decoders = decode.resolve_decoders({"*": "raw", "*.txt": "text", "a.txt": "int"})
    assert [decoders.decoder_for(name)(b"1") for name in ("a.txt", "A.TXT", "b.txt", "txt", "cls")] == [
        1, 1, "1", "1", b"1",
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_json_of_every_encoding_that_json_may_have(encoding):
    for text in ("a", "ä"):  # ASCII in UTF-16 is UTF-8 as well, with NULs in it
        assert auto("json", json.dumps([text], ensure_ascii=False).encode(encoding)) == [text]
