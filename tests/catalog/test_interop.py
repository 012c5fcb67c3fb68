"""Other programs read what we write, and we read what they write: sample for sample, byte for byte."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from shard_tools import ShardWriter
from shard_tools.make.write.encode import encode_field
from streaming.shards.tar import parse_chunk
from streaming.shards.tar.headers import END_OF_ARCHIVE, member_header, padding
from tests.support.processes.forked import Forked

GNU_TAR = shutil.which("tar")


def content(index):
    """Fields that every sample of a set has; Hugging Face asks for the same ones in each."""
    array = np.arange(index, index + 3, dtype=np.float32)
    return {
        "txt": f"text {index} é日本",
        "cls": index,
        "json": {"w": index, "name": "ü", "list": [1, 2.5, None]},
        "seg.npy": array,
        "empty.bin": b"",
        "bin": bytes(range(256)) * (index % 5),
    }


KEYS = [
    "000000",
    "dir/000001",
    "v1.0/sub.dir/000002",
    "ünï/日本語",
    "with space",
    "n" * 90,
    "n" * 91,  # the longest field makes it 101 bytes: PAX for that field, none for the others
    "p" * 150 + "/" + "q" * 80,  # ustar's prefix
    "p" * 160 + "/" + "q" * 80,  # too long for the prefix: PAX
    "ß" * 120,
    "/".join("abcdefghi" * 5 for _ in range(8)),
]
SAMPLES = [{"__key__": key, **content(index)} for index, key in enumerate(KEYS)]


def as_bytes(sample):
    key = sample["__key__"]
    return key, {
        field: b"".join(bytes(piece) for piece in encode_field(value, field=field, key=key))
        for field, value in sample.items()
        if not field.startswith("__")
    }


EXPECTED = [as_bytes(sample) for sample in SAMPLES]
MEMBERS = [(f"{key}.{field}", fields[field]) for key, fields in EXPECTED for field in sorted(fields)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shards")
    with ShardWriter(f"{directory}/train-{{:06d}}.tar", max_samples=4) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert len(writer.shards) == 3
    return writer.shards


def parsed(path):
    """Our own reader: list of (key, {field: bytes})."""
    raw = Path(path).read_bytes()
    layout = parse_chunk(raw, url=str(path), verify_headers=True)
    rows = zip(layout.keys, layout.starts.tolist(), layout.sizes.tolist(), strict=True)
    return [
        (
            key,
            {
                field: raw[start : start + size]
                for field, start, size in zip(layout.fields, starts, sizes, strict=True)
                if start >= 0
            },
        )
        for key, starts, sizes in rows
    ]


@contextlib.contextmanager
def webdataset():
    """The package, with the warnings of its own code silenced: deprecations, and shards that it leaves open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield pytest.importorskip("webdataset")
        gc.collect()  # closes what it left open while the filter is on


def webdataset_samples(paths, *, decode=False):
    """The samples as webdataset's own reader gives them."""
    with webdataset() as wds:
        dataset = wds.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False)
        return list(dataset.decode() if decode else dataset)


def webdataset_raw(paths):
    """The same as (key, {field: bytes})."""
    return [
        (sample["__key__"], {name: value for name, value in sample.items() if not name.startswith("__")})
        for sample in webdataset_samples(paths)
    ]


# What we write


def test_we_read_what_we_write(shards):
    assert [sample for shard in shards for sample in parsed(shard)] == EXPECTED


def test_python_tarfile_reads_our_shards(shards):
    found = []
    for shard in shards:
        for mode in ("r:", "r|"):
            with tarfile.open(shard, mode) as tar:
                inside = [(info.name, tar.extractfile(info).read()) for info in tar]
        found += inside
    assert found == MEMBERS


@pytest.mark.skipif(GNU_TAR is None, reason="needs the tar program")
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_the_tar_program_reads_our_shards(shards, tmp_path, locale):
    environment = {**os.environ, "LC_ALL": locale}
    names = []
    for shard in shards:
        done = subprocess.run(
            [GNU_TAR, "-tf", shard, "--quoting-style=literal"], capture_output=True, check=True, env=environment
        )
        assert done.stderr == b""
        names += done.stdout.decode().splitlines()
        done = subprocess.run(
            [GNU_TAR, "-xf", shard, "-C", str(tmp_path)], capture_output=True, check=True, env=environment
        )
        assert done.stderr == b""
    assert names == [name for name, _ in MEMBERS]
    for name, data in MEMBERS:
        assert (tmp_path / name).read_bytes() == data
        assert (tmp_path / name).stat().st_mtime == 0


@pytest.mark.skipif(GNU_TAR is None, reason="needs the tar program")
def test_members_beyond_8_gib_are_found(tmp_path):
    shard, size = tmp_path / "huge.tar", 9 << 30
    with shard.open("wb") as file:  # a hole instead of 9 GiB
        file.write(member_header("a.bin", size))
        file.seek(size, os.SEEK_CUR)
        file.write(padding(size) + member_header("b.bin", 1) + b"x" + padding(1) + END_OF_ARCHIVE)
    with tarfile.open(shard, "r:") as tar:
        assert [(info.name, info.size) for info in tar] == [("a.bin", size), ("b.bin", 1)]
    listed = subprocess.run([GNU_TAR, "-tvf", str(shard)], capture_output=True, check=True, text=True)
    assert listed.stderr == ""
    assert [(line.split()[2], line.split()[-1]) for line in listed.stdout.splitlines()] == [
        (str(size), "a.bin"),
        ("1", "b.bin"),
    ]


def test_webdataset_reads_our_shards(shards):
    assert webdataset_raw(shards) == EXPECTED


def test_webdataset_decodes_our_values(shards):
    decoded = webdataset_samples(shards, decode=True)
    for sample, original in zip(decoded, SAMPLES, strict=True):
        assert sample["txt"] == original["txt"]
        assert sample["cls"] == original["cls"]
        assert sample["json"] == original["json"]
        assert np.array_equal(sample["seg.npy"], original["seg.npy"])


HUGGING_FACE = """
import json, sys
assert "datasets" not in sys.modules  # it reads its variables as it is imported
import datasets
datasets.disable_progress_bars()
found, cache, *files = sys.argv[1:]
rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True, cache_dir=cache)
with open(found, "w") as file:
    for row in rows:
        row = {k: v.hex() if isinstance(v, bytes) else v for k, v in row.items()}
        print(json.dumps(row, default=float), file=file)  # NumPy scalars
"""


def test_hugging_face_datasets_reads_our_shards(shards, tmp_path, forked: Forked):
    pytest.importorskip("datasets")
    environ = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    (tmp_path / "program.py").write_text(HUGGING_FACE)
    words, output, found = [str(tmp_path / "cache"), *shards], tmp_path / "output", tmp_path / "found"
    done = forked.start(tmp_path / "program.py", str(found), *words, output=output, environ=environ)
    assert done.wait() == 0, output.read_text()
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [row["__key__"] for row in rows] == KEYS
    for row, original, (_, raw) in zip(rows, SAMPLES, EXPECTED, strict=True):
        assert bytes.fromhex(row["bin"]) == raw["bin"]
        assert bytes.fromhex(row["empty.bin"]) == b""
        assert row["txt"] == original["txt"]
        assert row["cls"] == original["cls"]
        assert row["json"] == original["json"]
        assert row["seg.npy"] == original["seg.npy"].tolist()


def test_samples_that_webdataset_read_are_written_back_unchanged(shards, tmp_path):
    with ShardWriter(f"{tmp_path}/train-{{:06d}}.tar", max_samples=4) as writer:
        for sample in webdataset_samples(shards):
            assert "__url__" in sample
            writer.write(sample)
    for ours, again in zip(shards, writer.shards, strict=True):
        assert Path(ours).read_bytes() == Path(again).read_bytes()


# What others write

FOREIGN = [
    ("000000", {"jpg": b"\xff\xd8", "cls": b"3", "JSON.Gz": b"{}"}),
    ("dir/a", {"txt": "é".encode(), "seg.png": b""}),
    ("v1.0/b", {"txt": b"x" * 1025}),
    ("ü" * 60, {"bin": bytes(512)}),
    ("l" * 140, {"bin": b"1"}),
    ("/".join(["d" * 90] * 4) + "/k", {"bin": b"2", "id": b"7"}),
]
LOWERED = [(key, {field.lower(): data for field, data in fields.items()}) for key, fields in FOREIGN]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_we_read_what_python_writes(tmp_path, form):
    samples = [one for one in FOREIGN if form != tarfile.USTAR_FORMAT or len(one[0].encode()) < 90]
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=form) as tar:
        for key, fields in samples:
            for field, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                info.mtime = 1234567890.25 if form == tarfile.PAX_FORMAT else 1234567890
                tar.addfile(info, io.BytesIO(data))
    lowered = [(key, {field.lower(): data for field, data in fields.items()}) for key, fields in samples]
    assert parsed(path) == lowered
    assert webdataset_raw([path]) == lowered


@pytest.mark.skipif(GNU_TAR is None, reason="needs the tar program")
@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "posix"])
@pytest.mark.parametrize("with_directories", [True, False])
def test_we_read_what_the_tar_program_writes(tmp_path, form, with_directories):
    source = tmp_path / "source"
    names = []
    for key, fields in FOREIGN:
        for field, data in fields.items():
            path = source / f"{key}.{field}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            names.append(f"{key}.{field}")
    if with_directories:
        names = sorted(os.listdir(source))
    else:
        (source / "notes").write_text("a file without a dot belongs to no sample")
        names.append("notes")
    shard = tmp_path / "x.tar"
    subprocess.run([GNU_TAR, "-cf", str(shard), f"--format={form}", "--sort=name", *names], cwd=source, check=True)
    found = parsed(shard)
    assert found == webdataset_raw([shard])
    assert sorted(found) == sorted(LOWERED)
    if not with_directories:
        assert found == LOWERED


def test_we_read_what_webdatasets_writers_write(tmp_path):
    samples = [
        {
            "__key__": key,
            "txt": f"text {index}",
            "cls": index,
            "json": {"w": index},
            "npy": np.arange(index),
            "a.bin": b"x" * index,
        }
        for index, key in enumerate(KEYS)
    ]
    with (
        webdataset() as wds,
        wds.ShardWriter(f"{tmp_path}/w-%06d.tar", maxcount=3, verbose=0) as writer,
        wds.TarWriter(f"{tmp_path}/single.tar") as single,
    ):
        for sample in samples:
            writer.write(dict(sample))
            single.write(dict(sample))
    paths = sorted(tmp_path.glob("w-*.tar"))
    assert len(paths) == 4
    whole = list(itertools.chain.from_iterable(parsed(path) for path in paths))
    assert whole == webdataset_raw(paths) == parsed(tmp_path / "single.tar")
    assert [key for key, _ in whole] == KEYS
    for (_, fields), sample in zip(whole, samples, strict=True):
        assert fields["txt"].decode() == sample["txt"]
        assert int(fields["cls"]) == sample["cls"]
        assert json.loads(fields["json"]) == sample["json"]
        assert np.array_equal(np.load(io.BytesIO(fields["npy"])), sample["npy"])
        assert fields["a.bin"] == sample["a.bin"]
