"""MDS and LitData: sets that their own packages wrote, sample for sample; damaged and hostile ones, refused by name.

``data/`` holds the sets and what their packages read there, with the scripts that made both.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from shard_tools.make.convert import ConvertOptions, SourceOptions, convert, open_source
from shard_tools.make.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, DataError, NotFoundError, ShardstreamError
from streaming.storage import Storage
from tests.support.sources.conversions import members

pytestmark = pytest.mark.thorough

DATA = Path(__file__).resolve().parent / "data"


def expected(kind: str, name: str) -> list[dict[str, Any]]:
    found = json.loads((DATA / kind / "expected.json").read_text())[name]
    assert isinstance(found, list)
    return found


def samples_of(target: Path) -> list[dict[str, bytes]]:
    """The fields of each sample, by key."""
    found: dict[str, dict[str, bytes]] = {}
    for name, body in members(target).items():
        key, _, field = name.partition(".")
        found.setdefault(key, {})[field] = body
    return [found[key] for key in sorted(found)]


def source_of(name: str, **options: Any) -> Any:
    return open_source(str(DATA / name), Storage(), options=SourceOptions(**options))


def array_of(body: bytes) -> list[Any]:
    array = np.load(io.BytesIO(body), allow_pickle=False)
    return [str(array.dtype), list(array.shape), array.tobytes().hex()]


def image_of(body: bytes) -> list[Any]:
    image = Image.open(io.BytesIO(body))
    return [image.mode, list(image.size), image.tobytes().hex()]


# ------------------------------------------------------------------------------------------ sample for sample


def test_every_encoding_of_mds(tmp_path: Path) -> None:
    report = convert(str(DATA / "mds" / "every"), str(tmp_path / "out"))
    told = expected("mds", "every")
    assert (report.kind, report.num_samples) == ("mds", len(told))
    for fields, sample in zip(samples_of(tmp_path / "out"), told, strict=True):
        rest = json.loads(fields["json"])
        named = {name for name in fields if name != "json"}
        for name, value in sample.items():
            ((kind, content),) = value.items()
            if kind == "array":
                assert array_of(fields[f"{name}.npy"]) == content
                named.remove(f"{name}.npy")
            elif kind == "bytes":
                assert fields[f"{name}.bin"].hex() == content
                named.remove(f"{name}.bin")
            elif kind in {"image", "images"}:
                extension = "jpg" if name.startswith("jpeg") else "png"
                images = [value] if kind == "image" else content
                places = [name] if kind == "image" else [f"{name}.{i}" for i in range(len(images))]
                for place, image in zip(places, images, strict=True):
                    assert image_of(fields[f"{place}.{extension}"]) == image["image"]
                    named.remove(f"{place}.{extension}")
            elif kind == "scalar":
                (number,) = np.frombuffer(bytes.fromhex(content[1]), content[0])
                assert rest.pop(name) == (None if np.isnan(number) else number.item())
            elif kind == "decimal":
                assert Decimal(rest.pop(name)) == Decimal(content)
            else:
                there = rest.pop(name, [])
                assert there == content
                assert type(there) is type(content)
        assert not named
        assert not rest


def _plain(value: Any, path: str, fields: dict[str, bytes]) -> Any:
    """What a value of LitData became: None if it has a field of its own, which is compared."""
    ((kind, content),) = value.items()
    stem = path.replace(".", "_")
    if kind == "array":
        assert array_of(fields.pop(f"{stem}.npy")) == content, path
    elif kind == "image":
        assert image_of(fields.pop(f"{stem}.png", b"") or fields.pop("png")) == content, path
    elif kind == "bytes":
        (name,) = [name for name in fields if name.startswith(f"{stem}.")]
        assert fields.pop(name).hex() == content, path
    elif kind == "images":
        for number, one in enumerate(content):
            assert fields.pop(f"{stem}.{number}.jpg").hex() == one["bytes"]
    elif kind == "dict":
        inner = {key: _plain(one, f"{path}.{key}".lstrip("."), fields) for key, one in content.items()}
        return {key: one for key, one in inner.items() if one is not _FIELD}
    elif kind == "list":
        return [_plain(one, f"{path}.{number}", fields) for number, one in enumerate(content)]
    else:
        return content
    return _FIELD


_FIELD = object()


@pytest.mark.parametrize(
    "name",
    [
        "values",
        "media",
        "compressed/chunk",
        "compressed/batch",
        "compressed/sample",
        "rows",
        "rows-compressed",
        "nested",
    ],
)
def test_every_serializer_of_litdata(tmp_path: Path, name: str) -> None:
    report = convert(str(DATA / "litdata" / name), str(tmp_path / "out"))
    told = expected("litdata", name)
    assert (report.kind, report.num_samples) == ("litdata", len(told))
    for fields, sample in zip(samples_of(tmp_path / "out"), told, strict=True):
        rest = json.loads(fields.pop("json", b"{}"))
        assert rest == _plain(sample if "dict" in sample else {"dict": sample}, "", fields)
        assert not fields


def test_tuples_tensors_and_tokens_of_litdata(tmp_path: Path) -> None:
    convert(str(DATA / "litdata" / "tuple"), str(tmp_path / "tuple"))
    for fields, sample in zip(samples_of(tmp_path / "tuple"), expected("litdata", "tuple"), strict=True):
        image, number = sample["list"]
        assert image_of(fields["png"]) == image["image"]
        assert json.loads(fields["json"]) == {"1": number["json"]}
    for name, field in (("single", "value.npy"), ("tokens", "tokens.npy")):
        convert(str(DATA / "litdata" / name), str(tmp_path / name))
        for fields, sample in zip(samples_of(tmp_path / name), expected("litdata", name), strict=True):
            assert {one: array_of(body) for one, body in fields.items()} == {field: sample["array"]}


def test_tokens_go_on_as_tokens(tmp_path: Path) -> None:
    options = TokenizeOptions(tokens_field="tokens")
    tokenize(str(DATA / "litdata" / "tokens"), str(tmp_path / "out"), options=options)
    documents = [sample["tok"].tolist() for sample in StreamingDataset(str(tmp_path / "out"))]
    assert documents == [list(range(5 * number)) for number in range(1, 8)]


def test_training_on_a_converted_set(tmp_path: Path) -> None:
    convert(str(DATA / "mds" / "every"), str(tmp_path / "out"), options=ConvertOptions(columns=("whole",)))
    loader = DataLoader(
        StreamingDataset(str(tmp_path / "out"), fields=("jpeg.jpg", "fixed_array.npy", "json")), global_batch_size=3
    )
    batches = list(loader)
    loader.close()
    assert sum(len(batch["json"]) for batch in batches) in {6, 7}
    assert all(tuple(batch["fixed_array.npy"].shape[1:]) == (2, 3) for batch in batches)


# --------------------------------------------------------------------------- places, streams, resuming, order


def test_all_compressions_are_streams_of_one_source() -> None:
    source = source_of("mds/compressed")
    found = [record.metadata for record in source.records(0)]
    assert len(found) == source.num_records == 6 * 9
    told = [{name: value["json"] for name, value in sample.items()} for sample in expected("mds", "compressed/zstd")]
    assert found == told * 6
    assert len(source.files) == 6 * 2
    inner = open_source(str(DATA / "mds/compressed/*/index.json"), Storage())
    assert inner.kind == "mds"
    assert [record.metadata for record in inner.records(0)] == found


@pytest.mark.parametrize(
    "name", ["mds/every", "mds/compressed", "litdata/values", "litdata/compressed", "litdata/rows"]
)
@pytest.mark.parametrize("seed", [None, 3])
def test_from_any_position(name: str, seed: int | None) -> None:
    source = source_of(name, shuffle_seed=seed, num_threads=3)
    whole = [(record.key, dict(record.fields)) for record in source.records(0)]
    assert len(whole) == source.num_records
    for start in (1, 3, len(whole) - 1, len(whole), len(whole) + 1):
        assert [(record.key, dict(record.fields)) for record in source.records(start)] == whole[start:], start
    calm = {repr(sorted(record.fields.items())) for record in source_of(name).records(0)}
    assert {repr(sorted(fields.items())) for _, fields in whole} == calm
    with_one = source.records(0)
    next(with_one)
    with_one.close()  # files that are read ahead are closed


def test_an_index_above_lists_the_parts_below(tmp_path: Path) -> None:
    """As ``merge_index`` of the package leaves it: an index for all, and those of the parts."""
    shutil.copytree(DATA / "mds/compressed/gz-9", tmp_path / "in" / "0")
    index = json.loads((tmp_path / "in/0/index.json").read_text())
    for shard in index["shards"]:
        for part in ("raw_data", "zip_data"):
            shard[part]["basename"] = f"0/{shard[part]['basename']}"
    (tmp_path / "in" / "index.json").write_text(json.dumps(index))
    assert open_source(str(tmp_path / "in"), Storage()).num_records == 9
    shutil.copytree(DATA / "mds/compressed/zstd", tmp_path / "in" / "1")
    assert open_source(str(tmp_path / "in" / "1"), Storage()).num_records == 9


def test_what_a_reader_has_decompressed_is_taken(tmp_path: Path) -> None:
    shutil.copytree(DATA / "mds/compressed/gz-9", tmp_path / "in")
    before = [record.fields for record in open_source(str(tmp_path / "in"), Storage()).records(0)]
    packed = sorted((tmp_path / "in").glob("*.gz"))
    for path in packed:
        path.with_suffix("").write_bytes(zlib.decompress(path.read_bytes(), 31))
    packed[0].unlink()
    packed[1].with_suffix("").write_bytes(b"half of it")
    source = open_source(str(tmp_path / "in"), Storage())
    assert [record.fields for record in source.records(0)] == before


def test_fields_keys_and_columns(tmp_path: Path) -> None:
    options = ConvertOptions(
        key_field="big_int", columns=("int8", "tree.id"),
        fields=(("pixel_list", "view.png"), ("text", "txt"), ("any_array", "-"), ("jpegs", "-"), ("raw", "dat")),
    )  # fmt: skip
    convert(str(DATA / "mds" / "every"), str(tmp_path / "out"), options=options)
    found = members(tmp_path / "out")
    key = str(10**30)
    assert {f"{key}.view.0.png", f"{key}.view.1.png", f"{key}.txt", f"{key}.dat"} <= found.keys()
    assert not [name for name in found if "any_array" in name or "jpegs" in name]
    assert "any_array" not in json.loads(found[f"{key}.json"])
    dataset = StreamingDataset(str(tmp_path / "out"), where="int8 < 0", fields=("json",))
    assert len(dataset) == 4
    with pytest.raises(ConfigError, match=r"no column 'txet' .*text"):
        convert(str(DATA / "mds/every"), str(tmp_path / "x"), options=ConvertOptions(fields=(("txet", "txt"),)))


# ------------------------------------------------------------------------------------------ refused by name


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_pickles_are_refused_and_can_be_left_out(tmp_path: Path, kind: str) -> None:
    source = DATA / kind / "pickled"
    with pytest.raises(ConfigError, match=r"column 'any' is pickled.*--field any=-"):
        convert(str(source), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    convert(str(source), str(tmp_path / "out"), options=ConvertOptions(fields=(("any", "-"),)))
    assert [json.loads(fields["json"])["id"] for fields in samples_of(tmp_path / "out")][:2] == [0, 1]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


def test_no_pickle_is_ever_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    payload = pickle.dumps(Bomb())
    make_mds(tmp_path / "in", [payload, payload], encoding="pkl")
    with pytest.raises(ConfigError, match="pickled"):
        open_source(str(tmp_path / "in"), Storage())
    for encoding in ("bytes", "str", "json", "ndarray", "pil", "jpeg_array"):
        make_mds(tmp_path / encoding, [payload, payload], encoding=encoding)
        try_all(tmp_path / encoding)
    assert not (tmp_path / "ran").exists()


def make_mds(folder: Path, values: list[bytes], encoding: str = "bytes", **changes: Any) -> None:
    """A set of one column, with anything in its index."""
    folder.mkdir(parents=True)
    samples = [struct.pack("<I", len(value)) + value for value in values]
    begin = 8 + 4 * len(samples)
    ends = [begin + sum(map(len, samples[:count])) for count in range(len(samples) + 1)]
    body = struct.pack(f"<{len(samples) + 2}I", len(samples), *ends) + b"".join(samples)
    shard: dict[str, Any] = {
        "column_encodings": [encoding], "column_names": ["x"], "column_sizes": [None], "compression": None,
        "format": "mds", "hashes": [], "raw_data": {"basename": "shard.00000.mds", "bytes": len(body), "hashes": {}},
        "samples": len(samples), "size_limit": 1 << 26, "version": 2, "zip_data": None,
    }  # fmt: skip
    for name, value in changes.items():
        part = shard["raw_data"] if name in {"basename", "bytes"} else shard
        part[name] = value
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    (folder / "shard.00000.mds").write_bytes(body)


def try_all(folder: Path, **options: Any) -> list[dict[str, bytes]] | ShardstreamError:
    """All records, or the error of ours that ends them; anything else fails the test."""
    try:
        source = open_source(str(folder), Storage(), options=SourceOptions(**options))
        return [dict(record.fields) for record in source.records(0)]
    except ShardstreamError as error:
        return error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"basename": "../shard.00000.mds"}, "no name within its folder"),
        ({"basename": "/etc/passwd"}, "no name within its folder"),
        ({"basename": "a//b"}, "no name within its folder"),
        ({"basename": None}, "no name within its folder"),
        ({"basename": "gone.mds"}, "gone.mds, which is not there"),
        ({"samples": 10**12}, "1000000000000 samples in"),
        ({"samples": 3}, r"it says that it holds 2 samples, and index\.json says 3"),
        ({"samples": -1}, "got -1"),
        ({"samples": True}, "got True"),
        ({"samples": 1.5}, r"got 1\.5"),
        ({"bytes": 10**13}, "samples in 10000000000000 bytes"),
        ({"bytes": 40}, "by index.json; truncated"),
        ({"compression": "rar"}, "compression 'rar'; expected one of br, bz2"),
        ({"compression": "zstd", "basename": "gone.mds"}, "not an index of mds"),
        ({"version": 1}, "version 1; expected mds, version 2"),
        ({"format": "json"}, "--from jsonl"),
        ({"column_encodings": ["magic"]}, "encoding 'magic', which is not known here; leave it out"),
        ({"column_encodings": ["ndarray:float32:99999999,99999999"]}, "arrays of shape"),
        ({"column_encodings": ["ndarray:object"]}, "arrays of 'object'"),
        ({"column_encodings": ["int"], "column_sizes": [7]}, "values of 7 bytes, expected 8"),
        ({"column_names": ["x", "x"]}, "not an index of mds"),
        ({"column_names": [["x"]]}, "not an index of mds"),
        ({"column_encodings": ["int32"], "column_sizes": [4]}, "its columns take 4 bytes, and it has 9"),
    ],
)  # fmt: skip
def test_indexes_that_lie(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    make_mds(tmp_path / "in", [b"\xff\xd8\xff\xe0a", b"\xff\xd8\xff\xe0b"], **changes)
    with pytest.raises(ShardstreamError, match=said) as caught:
        list(open_source(str(tmp_path / "in"), Storage(), kind="mds").records(0))
    assert str(tmp_path / "in") in str(caught.value)


def test_places_that_go_back(tmp_path: Path) -> None:
    make_mds(tmp_path / "in", [b"aaaa", b"bbbb", b"cccc"])
    path = tmp_path / "in" / "shard.00000.mds"
    whole = path.read_bytes()
    for at, value, said in (
        (8, 5, "sample 0 ends before it begins"), (4, 5, "begin at byte 5"), (16, 2**32 - 1, "end at 4294967295"),
        (0, 2**31, "holds 2147483648 samples"),
    ):  # fmt: skip
        path.write_bytes(whole[:at] + struct.pack("<I", value) + whole[at + 4 :])
        with pytest.raises(DataError, match=said):
            list(open_source(str(tmp_path / "in"), Storage()).records(0))


def test_bombs_are_bounded(tmp_path: Path) -> None:
    make_mds(tmp_path / "in", [b"x"])
    index = json.loads((tmp_path / "in" / "index.json").read_text())
    shard = index["shards"][0]
    packed = zlib.compressobj(9, wbits=31)
    bomb = packed.compress(bytes(300 << 20)) + packed.flush()
    (tmp_path / "in" / "shard.00000.mds").unlink()
    (tmp_path / "in" / "shard.00000.mds.gz").write_bytes(bomb)
    shard["zip_data"] = {"basename": "shard.00000.mds.gz", "bytes": len(bomb), "hashes": {}}
    shard["compression"] = "gz:9"
    for num_bytes, said in ((300 << 20, "decompression bomb"), (50, "more than 50 bytes")):
        shard["raw_data"]["bytes"] = num_bytes
        (tmp_path / "in" / "index.json").write_text(json.dumps(index))
        with pytest.raises(DataError, match=said):
            list(open_source(str(tmp_path / "in"), Storage()).records(0))


def test_checksums_are_compared(tmp_path: Path) -> None:
    shutil.copytree(DATA / "mds/every", tmp_path / "in")
    path = sorted((tmp_path / "in").glob("*.mds"))[1]
    body = bytearray(path.read_bytes())
    body[-20] ^= 1
    path.write_bytes(body)
    with pytest.raises(DataError, match=r"shard\.00001\.mds: its sha1 is .*expected"):
        list(open_source(str(tmp_path / "in"), Storage()).records(0))


@pytest.mark.parametrize("codec", ["br-1", "bz2", "gz-9", "snappy", "zstd", "zstd-22"])
def test_truncated_and_damaged_compressed_shards(tmp_path: Path, codec: str) -> None:
    shutil.copytree(DATA / "mds/compressed" / codec, tmp_path / "in")
    index = json.loads((tmp_path / "in" / "index.json").read_text())
    path = tmp_path / "in" / index["shards"][0]["zip_data"]["basename"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(DataError, match="truncated"):
        open_source(str(tmp_path / "in"), Storage())
    index["shards"][0]["zip_data"] |= {"bytes": len(whole) - 10, "hashes": {}}
    index["shards"][0]["raw_data"]["hashes"] = {}
    (tmp_path / "in" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=str(path.name)):
        list(open_source(str(tmp_path / "in"), Storage()).records(0))
    path.write_bytes(os.urandom(len(whole) - 10))
    with pytest.raises(DataError, match=str(path.name)):
        list(open_source(str(tmp_path / "in"), Storage()).records(0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"item_loader": "ParquetLoader"}, "--from parquet"),
        ({"item_loader": "Mine"}, "samples of Mine"),
        ({"compression": "lz4"}, "compression 'lz4'"),
        ({"data_format": ["int"]}, "not an index of litdata"),
        ({"data_spec": "[1, {}]"}, "not an index of litdata"),
        ({"data_spec": "[" * 100_000}, "not an index of litdata|not JSON"),
        ({"data_format": ["no_header_numpy:14", "int"]}, "type number 14"),
        ({"data_format": ["graph", "int"]}, "graph, part of which is pickled"),
        ({"data_format": ["file:pickle", "int"]}, "pickled"),
        ({"compression_level": "page", "compression": "zstd"}, "compression_level 'page'"),
    ],
)
def test_indexes_of_litdata_that_lie(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    shutil.copytree(DATA / "litdata/tuple", tmp_path / "in")
    index = json.loads((tmp_path / "in" / "index.json").read_text())
    index["config"] |= change
    (tmp_path / "in" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ShardstreamError, match=said) as caught:
        list(open_source(str(tmp_path / "in"), Storage()).records(0))
    assert str(tmp_path / "in") in str(caught.value)


def test_a_type_named_in_a_spec_is_never_looked_up(tmp_path: Path) -> None:
    shutil.copytree(DATA / "litdata/tuple", tmp_path / "in")
    text = (tmp_path / "in" / "index.json").read_text()
    (tmp_path / "in" / "index.json").write_text(text.replace("builtins.tuple", "os.system"))
    with pytest.raises(ConfigError, match=r"data_spec has a os\.system, which is not known here"):
        open_source(str(tmp_path / "in"), Storage())


def test_the_other_package_is_named(tmp_path: Path) -> None:
    for kind, other in (("mds", "litdata"), ("litdata", "mds")):
        with pytest.raises(ConfigError, match=f"an index of {other}, not of {kind}; use --from {other}"):
            open_source(str(DATA / other / "pickled"), Storage(), kind=kind)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(DataError, match="expected a JSON object"):
        open_source(str(tmp_path), Storage())
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match="no file of a known layout"):
        open_source(str(tmp_path), Storage())
    with pytest.raises(NotFoundError, match=r"no index\.json there"):
        open_source(str(DATA / "mds" / "every" / "shard.00000.mds"), Storage())


def test_columns_that_differ_between_streams(tmp_path: Path) -> None:
    make_mds(tmp_path / "in" / "a", [b"1"], encoding="str")
    make_mds(tmp_path / "in" / "b", [b"\x93NUMPY"], encoding="bytes")
    with pytest.raises(ConfigError, match=r"b/shard\.00000\.mds: column 'x' is of another type .*--field x=EXT"):
        open_source(str(tmp_path / "in"), Storage())
    source = open_source(str(tmp_path / "in"), Storage(), options=SourceOptions(fields=(("x", "bin"),)))
    assert [record.fields["bin"] for record in source.records(0)] == [b"1", b"\x93NUMPY"]


# --------------------------------------------------------------------------------------------------- fuzz


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["mds/every", "mds/compressed/zstd", "mds/compressed/br-1", "mds/compressed/snappy", "litdata/values",
     "litdata/rows", "litdata/nested", "litdata/compressed/batch", "litdata/compressed/sample", "litdata/tokens"],
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=3),
    cut=st.booleans(),
)
@example(flips=[(0.5390625, 0)], cut=True)  # the first compressed part of a chunk begins behind its samples
def test_flipped_bits_are_errors_of_ours_or_values(
    tmp_path_factory: pytest.TempPathFactory, name: str, flips: list[tuple[float, int]], cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("in") / "in"
    shutil.copytree(DATA / name, folder)
    index = json.loads((folder / "index.json").read_text())
    for shard in index.get("shards", ()):  # checksums would find all of it
        for part in filter(None, (shard["raw_data"], shard["zip_data"])):
            part["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    files = sorted(path for path in folder.iterdir() if path.name != "index.json" or cut)
    for place, bit in flips:
        path = files[int(place * len(files))]
        body = bytearray(path.read_bytes())
        body[int(place * len(files) % 1 * len(body))] ^= 1 << bit
        path.write_bytes(body)
    try_all(folder, num_threads=2)
    try_all(folder, shuffle_seed=1)
