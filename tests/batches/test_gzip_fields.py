"""Fields such as ``json.gz``: unpacked before their decoder, as webdataset and ``datasets`` do, and within bounds."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from click.testing import CliRunner
from datasets.packaged_modules.webdataset.webdataset import WebDataset as HuggingFace
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset, decode
from streaming.build.decode import from_webdataset, resolve_decoders
from streaming.build.decode.values import Unpacked
from streaming.common import inflate
from streaming.errors import ConfigError, TooManyBadSamplesError
from streaming.shards.schema.kinds import kind_by_name
from tests.support.servers.show_pages import Shown
from tests.support.sets.tars import write_tar

COUNT = 6


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def png(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), (shade, 0, 9)).save(out, "PNG")
    return out.getvalue()


PLAIN = {
    "txt": lambda number: f"text {number}".encode() * 50,
    "cls": lambda number: b"%d" % number,
    "json": lambda number: json.dumps({"n": number, "class": f"c{number % 2}"}).encode(),
    "npy": lambda number: npy(np.full((3, 2), number, np.float32)),
    "npz": lambda number: npz(a=np.arange(number)),
    "part.npy": lambda number: npy(np.full(2, number, np.int16)),
    "nii": lambda number: b"\0\1\2" * number,
    "png": png,
}


def run(*arguments: object) -> str:
    ran = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert ran.exit_code == 0, ran.output
    return str(ran.output)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples three times: plain, with gzip fields, and these without an index."""
    folder = tmp_path_factory.mktemp("gz")
    for name, ending, change in (("plain", "", bytes), ("packed", ".gz", gzip.compress)):
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", columns={"n": f"json{ending}.n"}) as writer:
            for number in range(COUNT):
                fields = {f"{field}{ending}": change(of(number)) for field, of in PLAIN.items()}
                writer.write({"__key__": f"{number}", **fields})
    (folder / "bare").mkdir()
    (folder / "bare/000000.tar").write_bytes((folder / "packed/000000.tar").read_bytes())
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("place", ["packed", "bare"])
def test_batches_are_those_of_the_plain_set(home: Path, place: str, num_workers: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "epoch_size": COUNT}
    with (
        DataLoader(StreamingDataset(f"{home}/plain", shuffle=False), 3, **options) as expected,
        DataLoader(StreamingDataset(f"{home}/{place}", shuffle=False), 3, **options) as found,
    ):
        for one, other in zip(expected, found, strict=True):
            assert list(other) == [name if name.startswith("__") else f"{name}.gz" for name in one]
            for name in PLAIN:
                assert same(one[name], other[f"{name}.gz"]), name


def test_fields_decode_as_webdataset_and_datasets_decode_them(home: Path) -> None:
    theirs = wds.autodecode.Decoder([wds.imagehandler("rgb8")])
    stored = StreamingDataset(f"{home}/packed", decode=None)
    for sample, ours in zip(stored, StreamingDataset(f"{home}/packed"), strict=True):
        decoded = theirs.decode({name: value for name, value in sample.items() if isinstance(value, bytes)})
        for name in PLAIN:
            assert same(decoded[f"{name}.gz"], ours[f"{name}.gz"]), name
    with tarfile.open(home / "packed/000000.tar") as archive:
        opened = ((member.name, archive.extractfile(member)) for member in archive)
        examples = HuggingFace._get_pipeline_from_tar("000000.tar", opened)
        for example, ours in zip(examples, StreamingDataset(f"{home}/packed"), strict=True):
            for name in ("txt", "json", "npy", "nii"):  # it has no decoder for cls, and images become features later
                assert same(example[f"{name}.gz"], ours[f"{name}.gz"]), name


STORED = gzip.compress(b"12", mtime=0)


def double(data: bytes) -> bytes:
    return data * 2


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("auto", 12),
        (None, STORED),
        ("raw", STORED),
        ("view", STORED),
        ({"cls.gz": None}, STORED),
        ({"*.gz": None}, STORED),
        ({"*": None}, STORED),
        ({"cls.gz": "view"}, STORED),
        ({"cls.gz": double}, STORED * 2),
        ({"*.gz": double}, STORED * 2),
        ({"cls.gz": "text"}, "12"),
        ({"cls.gz": str}, "12"),
        ({"cls.gz": "float"}, 12.0),
        ({"cls.gz": np.uint8}, np.frombuffer(b"12", np.uint8)),
        ({"cls.gz": "auto"}, 12),
        ({"cls": "text"}, "12"),
        ({"*.cls": "text", "*": None}, "12"),
        ({"cls": double}, b"1212"),
        ({"cls": "view"}, b"12"),
        ({"cls": None}, b"12"),
        ({"*": "text"}, "12"),
        ({"CLS.GZ": "text", "cls": None}, b"12"),
    ],
)
def test_what_decode_says_of_a_packed_field(spec: Any, expected: Any) -> None:
    decoders = pickle.loads(pickle.dumps(resolve_decoders(spec)))
    found = decoders.decoder_for("cls.gz")(STORED)
    assert same(bytes(found) if isinstance(found, memoryview) else found, expected)


def test_raw_bytes_stay_within_reach_in_batches(home: Path) -> None:
    for options in ({"decode": None}, {"decode": {"*.gz": None}}, {"decode": "view"}):
        batch = next(iter(DataLoader(StreamingDataset(f"{home}/packed", shuffle=False, **options), 2)))
        assert [gzip.decompress(one) for one in batch["txt.gz"]] == [PLAIN["txt"](number) for number in range(2)]


def test_images_are_sized_and_cut_at_random_as_plain_ones(home: Path) -> None:
    for mode in ("gray8", "rgb8:4x4", "rgb8:crop4x4", decode.random_crop("rgb8", (2, 2))):
        batches = [
            next(iter(DataLoader(StreamingDataset(f"{home}/{name}", decode={"png": mode}), 4, num_threads=0)))
            for name in ("plain", "packed")
        ]
        assert same(batches[0]["png"], batches[1]["png.gz"])


@pytest.mark.parametrize("field", ["pkl.gz", "model.PT.gz", "pickle.gz"])
def test_packed_pickles_are_refused_with_cures_that_work(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"field '{field}' is not decoded.*decode=\{{'{field}': None\}}"):
        resolve_decoders("auto").decoder_for(field)
    assert resolve_decoders({field: None}).decoder_for(field)(STORED) == STORED


def test_webdataset_handlers_get_what_is_packed() -> None:
    handler = wds.handle_extension("txt", bytes.upper)
    assert from_webdataset(handler).decoder_for("a.txt.gz")(gzip.compress(b"abc", mtime=0)) == b"ABC"
    assert from_webdataset(handler).decoder_for("cls.gz")(STORED) == 12


# --- bounds ---


def bomb(num_bytes: int) -> bytes:
    return gzip.compress(bytes(num_bytes), 9, mtime=0)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "HARMLESS_BYTES", 1 << 16)
    big = [
        (f"{number}.txt.gz", bomb(1 << 18) if number == 1 else gzip.compress(b"fine", mtime=0)) for number in range(4)
    ]
    write_tar(tmp_path / "000000.tar", big)
    run("index", tmp_path)
    with pytest.raises(Exception, match=r"more than 200 times as many.*max_gzip_ratio="):
        list(StreamingDataset(f"{tmp_path}"))
    dataset = StreamingDataset(f"{tmp_path}", shuffle=False)
    with DataLoader(dataset, 4, num_threads=0) as loader:
        (batch,) = loader
        assert set(batch["txt.gz"]) == {"fine"}
        assert [bad["key"] for bad in loader.metrics()["bad"]] == ["1"]
    for options in ({"max_gzip_ratio": 2000}, {"max_gzip_ratio": 2000, "decode": {"cls": "auto", "*": "auto"}}):
        meant = StreamingDataset(f"{tmp_path}", shuffle=False, **options)
        assert len(meant[1]["txt.gz"]) == 1 << 18
    with pytest.raises(TooManyBadSamplesError):
        list(DataLoader(StreamingDataset(f"{tmp_path}", max_bad_samples=0), 4, num_threads=0))


def test_no_more_is_made_of_a_bomb_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "HARMLESS_BYTES", 1 << 16)
    monkeypatch.setattr(inflate, "INFLATED_BYTES", 1 << 12)
    made = []
    with pytest.raises(ValueError, match="decompression bomb"):
        made.extend(inflate.gunzipped([bomb(1 << 22)], 2.0, "say so"))
    assert sum(map(len, made)) <= (1 << 16) + (1 << 12)
    monkeypatch.setattr("streaming.build.decode.values.MAX_INFLATED_BYTES", 1 << 14)
    with pytest.raises(ValueError, match=r"more than the 16\.0 KiB allowed"):
        Unpacked(below=len, max_ratio=2000.0)(bomb(1 << 15))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0), b"ab"),
        (gzip.compress(b"", mtime=0), b""),
        (gzip.compress(b"a", mtime=0) + bytes(512), b"a"),
        (b"", None),
        (b"plain", None),
        (gzip.compress(b"abc", mtime=0)[:-5], None),
        (gzip.compress(b"abc", mtime=0) + b"rest", None),
    ],
)
def test_streams_of_every_form(data: bytes, expected: bytes | None) -> None:
    decoder = resolve_decoders("auto").decoder_for("bin.gz")
    if expected is None:
        with pytest.raises(ValueError, match="gzip stream"):
            decoder(data)
    else:
        assert decoder(data) == expected


# --- tools ---


def test_tools_see_what_is_packed(home: Path, tmp_path: Path) -> None:
    assert [kind_by_name(f"{name}.gz") for name in PLAIN] == [kind_by_name(name) for name in PLAIN]
    assert [sample["json.gz"]["n"] for sample in StreamingDataset(f"{home}/packed", where="n < 3")] == [0, 1, 2]
    copy = tmp_path / "set"
    run("copy", home / "packed", copy)
    run("column", "add", copy, "label", "--lift", "json.gz.class")
    run("column", "add", copy, "number", "--lift", "cls.gz")
    found = StreamingDataset(f"{copy}", where="label = 'c1' and number > 1", shuffle=False)
    assert [sample["cls.gz"] for sample in found] == [3, 5]
    run("verify", copy, "--decode")


@pytest.mark.thorough
def test_writers_pack_and_functions_get_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardWriter(f"{tmp_path}/a/{{:06d}}.tar", columns={"n": "json.gz.n"}) as writer:
        for number in range(3):
            fields = {"json.gz": {"n": number}, "npy.gz": np.ones(2), "bin.gz": gzip.compress(b"x", mtime=0)}
            writer.write({"__key__": f"{number}", **fields})
    for one in StreamingDataset(f"{tmp_path}/a", where="n = 2"):
        assert (one["json.gz"], one["npy.gz"].tolist(), one["bin.gz"]) == ({"n": 2}, [1, 1], b"x")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changes_of_gz.py").write_text(
        "def change(sample):\n    return {**sample, 'bin.gz': sample['bin.gz'] * 2, 'json.gz': {'n': -1}}\n"
    )
    run("map", tmp_path / "a", tmp_path / "b", "changes_of_gz:change", "--workers", 1)
    for one in StreamingDataset(f"{tmp_path}/b"):
        assert (one["json.gz"], one["npy.gz"].tolist(), one["bin.gz"]) == ({"n": -1}, [1, 1], b"xx")


@pytest.mark.parametrize("name", ["cls.gz", "json.gz"])
def test_classes_of_a_packed_field_are_translated(tmp_path: Path, name: str) -> None:
    part = name if name == "cls.gz" else "json.gz:label"
    for folder, classes in (("a", ["ant", "bee"]), ("b", ["bee", "cat"])):
        with ShardWriter(f"{tmp_path}/{folder}/{{:06d}}.tar", classes={part: classes}) as writer:
            for number in range(2):
                value: Any = number if name == "cls.gz" else {"label": number}
                writer.write({"__key__": f"{folder}{number}", name: value})
    urls = [f"{tmp_path}/a", f"{tmp_path}/b"]
    run("reshard", *urls, tmp_path / "c", "--classes", "union")
    for dataset in (StreamingDataset(urls, classes="union"), StreamingDataset(f"{tmp_path}/c")):
        values = [sample[name] for sample in dataset]
        assert [one if name == "cls.gz" else one["label"] for one in values] == [0, 1, 1, 2]


def test_pages_show_what_is_packed(home: Path) -> None:
    with Shown((f"{home}/packed",)) as shown:
        page = shown.json("/sample", number=1)
        fields = page["fields"]
        assert page["pictures"]["png.gz"]["facts"] == {"format": "PNG", "mode": "RGB", "width": 8, "height": 6}
        assert page["pictures"]["npy.gz"]["facts"]["arrays"][0]["shape"] == [3, 2]
        assert fields["txt.gz"]["text"].startswith("text 1")
        assert '"n": 1' in fields["json.gz"]["text"]
