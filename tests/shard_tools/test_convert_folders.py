"""Folders of any files, folders of sounds, and zip archives: what becomes of each file, and of ugly ones."""

from __future__ import annotations

import io
import json
import random
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert, open_source
from shard_tools.make.convert.base.zips import ZipStorage
from streaming import Balanced, DataLoader, StreamingDataset
from streaming.errors import ConfigError, DataError, DuplicateKeyError, NotFoundError
from streaming.storage import Storage
from tests.support.sources import drawn_sounds, streams
from tests.support.sources.conversions import members
from tests.support.sources.foreign_sets import picture, write_sound

pytestmark = pytest.mark.thorough

FILES = ConvertOptions(kind="files")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def written(root: Path, **contents: bytes) -> Path:
    for name, body in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    return root


# -------------------------------------------------------------------------------------------------------- files


def test_files_of_one_stem_are_a_sample(tmp_path: Path) -> None:
    bodies = {
        "v1.2/a.JPG": b"1", "v1.2/a.seg.png": b"2", "v1.2/a.txt": b"3", "b.json": b"{}", "v1.2/README": b"x",
        ".hidden/c.txt": b"x", "v1.2/.d.txt": b"x", "e.txt": b"", "v1.2/f.": b"x",
    }  # fmt: skip
    root = written(tmp_path / "in", **bodies)
    (root / "link.txt").symlink_to(tmp_path)
    report = convert(str(root), str(tmp_path / "out"), options=replace(FILES, on_error="skip"))
    assert (report.kind, report.num_samples) == ("files", 2)
    assert members(tmp_path / "out") == {
        "b.json": b"{}", "v1.2/a.jpg": b"1", "v1.2/a.seg.png": b"2", "v1.2/a.txt": b"3",
    }  # fmt: skip
    assert {one.path: one.reason for one in report.skipped} == {
        ".hidden/c.txt": "hidden: a name that starts with a dot",
        "v1.2/.d.txt": "hidden: a name that starts with a dot",
        "e.txt": "empty file",
        "v1.2/README": "no extension, which names the field",
        "v1.2/f.": "no extension, which names the field",
        "link.txt": "symbolic link to a folder",
    }
    journal = json.loads((tmp_path / "out/_shardstream/convert.json").read_text())
    assert journal["fields"] == {"jpg": False, "json": False, "seg.png": False, "txt": False}


def test_files_whose_names_collide(tmp_path: Path) -> None:
    root = written(tmp_path / "in", **{"a.jpg": b"1", "a.JPG": b"2"})
    with pytest.raises(DuplicateKeyError, match=r"a\.JPG.*a\.jpg.* both be the field 'jpg' of the sample 'a'"):
        convert(str(root), str(tmp_path / "out"), options=FILES)
    (root / "a.JPG").rename(root / "A.txt")
    with pytest.raises(DuplicateKeyError, match="--key number"):
        convert(str(root), str(tmp_path / "out"), options=FILES)
    numbered = ConvertOptions(kind="files", key_field="number")
    assert convert(str(root), str(tmp_path / "out"), options=numbered).num_samples == 2
    with pytest.raises(ConfigError, match="white space"):
        convert(str(written(tmp_path / "odd", **{"a.b c": b"1"})), str(tmp_path / "x"), options=numbered)
    with pytest.raises(NotFoundError, match="no files with extensions"):
        convert(str(written(tmp_path / "none", README=b"1")), str(tmp_path / "x"), options=FILES)
    with pytest.raises(ConfigError, match="starts with '__'"):
        convert(str(written(tmp_path / "under", **{"__x/a.b": b"1"})), str(tmp_path / "x"), options=FILES)


def test_dots_in_names_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = written(tmp_path / "in", **{f"a.{number}.jpg": b"1" for number in range(40)})
    convert(str(root), str(tmp_path / "out"), options=FILES)
    assert "40 different fields (0.jpg, " in caplog.text


def test_the_refusal_of_a_folder_names_a_way(tmp_path: Path) -> None:
    root = written(tmp_path / "in", **{"a.xyz": b"1"})
    told = run("convert", root, tmp_path / "out").stderr
    assert "no file of a known layout" in told
    assert "--from files takes any folder" in told
    both = run("convert", written(tmp_path / "two", **{"a.csv": b"a", "b.jsonl": b"{}"}), tmp_path / "out").stderr
    assert "files of several layouts (csv, jsonl)" in both
    assert "--from files takes any folder" in both


# -------------------------------------------------------------------------------------------------------- audio

KINDS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", None), "mp3": ("MP3", None), "ogg": ("OGG", "VORBIS")}
KINDS |= {"opus": ("OGG", "OPUS")}


@pytest.mark.parametrize("extension", KINDS)
def test_sounds_keep_their_bytes_and_tell_duration_rate_and_channels(tmp_path: Path, extension: str) -> None:
    kind, subtype = KINDS[extension]
    for name, seconds, channels in (("cat/a", 0.5, 1), ("cat/b", 1.0, 2), ("dog/c", 0.25, 1)):
        path = tmp_path / "in" / f"{name}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sound(path, seconds, 48_000, channels, format=kind, subtype=subtype)
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert (report.kind, report.classes, report.remarks) == ("audio", {"cat": 0, "dog": 1}, {})
    assert members(tmp_path / "out")[f"cat/b.{extension}"] == (tmp_path / "in" / f"cat/b.{extension}").read_bytes()
    for key, seconds, channels in (("a", 0.5, 1), ("b", 1.0, 2), ("c", 0.25, 1)):
        near = f"duration > {seconds - 0.06} and duration < {seconds + 0.06}"
        found = StreamingDataset(str(tmp_path / "out"), where=f"rate = 48000 and channels = {channels} and {near}")
        sample = found[0]
        assert (len(found), sample["__key__"].rpartition("/")[2]) == (1, key)
        assert soundfile.info(io.BytesIO(sample[extension])).channels == channels
    assert run("verify", tmp_path / "out").exit_code == 0


def test_an_ugly_folder_of_sounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = written(
        tmp_path / "in",
        **{
            "a/cut.wav": b"RIFF\0\0",
            "a/x.m4a": b"\0\0\0\x20ftypM4A ",
            "a/e.wav": b"",
            "a/t.txt": b"t",
            "a/.h.wav": b"x",
        },
    )
    write_sound(root / "a" / "ok.wav", 0.1)
    endless = bytearray((root / "a" / "ok.wav").read_bytes())
    endless[4:8] = endless[40:44] = b"\xff" * 4  # what a program writes that does not know the length
    (root / "a" / "endless.wav").write_bytes(endless)
    report = convert(str(root), str(tmp_path / "out"), options=ConvertOptions(on_error="skip"))
    assert report.num_samples == 4
    assert sorted(report.remarks.values()) == [2], report.remarks
    assert "of several kinds (3 wav, 1 m4a): all become the field .wav" in caplog.text
    assert {one.path for one in report.skipped} == {"a/e.wav", "a/t.txt", "a/.h.wav"}
    assert len(StreamingDataset(str(tmp_path / "out"), where="duration > 0")) == 2


def test_the_duration_of_a_chain_and_of_a_pipe_is_that_of_all(tmp_path: Path) -> None:
    """libsndfile states the first stream of a chain alone, and no length of what was written to a pipe."""
    chain = streams.sound("ogg", 2.0) + streams.sound("ogg", 1.0, seed=1)
    made = {"a/chain.ogg": chain, "a/piped.ogg": drawn_sounds.piped_flac(streams.sound("flac", 3.0))}
    convert(str(written(tmp_path / "in", **made)), str(tmp_path / "out"))
    assert len(StreamingDataset(str(tmp_path / "out"), where="duration = 3")) == 2


def test_sounds_train_balanced(tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "in" / f"class{0 if number < 18 else 1}" / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sound(path, 0.05)
    convert(str(tmp_path / "in"), str(tmp_path / "out"))
    dataset = StreamingDataset(str(tmp_path / "out"), decode={"wav": lambda data: soundfile.read(io.BytesIO(data))[0]})
    with DataLoader(Balanced(dataset, by="cls"), batch_size=8, epoch_size=32, num_workers=0) as loader:
        for batch in loader:
            assert tuple(batch["wav"].shape) == (8, 800)
            assert sorted(batch["cls"].tolist()) == [0] * 4 + [1] * 4


def test_without_soundfile_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardstream\[audio\]'"):
        convert(str(written(tmp_path / "in", **{"a.wav": b"x"})), str(tmp_path / "out"))


# ---------------------------------------------------------------------------------------------------------- zips


def archive(path: Path, how: int = zipfile.ZIP_DEFLATED, **bodies: bytes) -> Path:
    with zipfile.ZipFile(path, "w", how) as out:
        for name, body in bodies.items():
            out.writestr(name, body)
    return path


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_is_the_folder_it_holds(tmp_path: Path, how: int) -> None:
    bodies = {f"{name}/{number}.jpg": picture(number) for name in ("ä b", "cat") for number in range(3)}
    archive(tmp_path / "plain.zip", how, **bodies, **{"cat/": b"", "__MACOSX/cat/._0.jpg": b"x"})
    archive(tmp_path / "one [2].zip", how, **{f"train/{name}": body for name, body in bodies.items()})
    written(tmp_path / "folder", **bodies)
    for name in ("plain.zip", "one [2].zip", "folder"):
        report = convert(str(tmp_path / name), str(tmp_path / f"{name}.out"))
        assert (report.kind, report.classes) == ("images", {"cat": 0, "ä b": 1})
    whole = members(tmp_path / "folder.out")
    assert members(tmp_path / "plain.zip.out") == members(tmp_path / "one [2].zip.out") == whole
    files = convert(str(tmp_path / "plain.zip"), str(tmp_path / "files"), options=FILES)
    assert (files.kind, files.num_samples) == ("files", 6)


def patched(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def encrypt(data: bytearray) -> None:
    for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + at] |= 1


def inflate(data: bytearray) -> None:
    at = data.index(b"PK\1\2")
    struct.pack_into("<I", data, at + 24, 3 << 30)


def flip(data: bytearray) -> None:
    data[data.index(b"PK\1\2") - 3] ^= 0xFF


def overlap(data: bytearray) -> None:
    second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
    struct.pack_into("<I", data, second + 42, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (encrypt, "member 'a/1.jpg': it is encrypted"),
        (inflate, "decompression bomb"),
        (overlap, "they overlap"),
        (lambda data: data.__delitem__(slice(-10, None)), "not a zip archive, or a damaged one"),
        (lambda data: data.__setitem__(slice(0, 4), b"XXXX"), "the member is damaged"),
        (flip, "the member is damaged"),
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, change: Callable[[bytearray], None], said: str) -> None:
    path = archive(tmp_path / "a.zip", **{"a/1.jpg": picture(1), "b/2.jpg": picture(2)})
    with pytest.raises(DataError, match=said) as caught:
        convert(str(patched(path, change)), str(tmp_path / "out"))
    assert "a.zip" in str(caught.value)


@pytest.mark.parametrize("name", ["../a.jpg", "x/../../a.jpg", "/etc/a.jpg", "a\\b.jpg", "C:/a.jpg"])
def test_names_that_lead_out_of_an_archive_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="the name leads out of the archive"):
        convert(str(archive(tmp_path / "a.zip", **{"cat/1.jpg": picture(), name: b"x"})), str(tmp_path / "out"))


def test_links_and_repeated_names_in_archives_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("cat/1.jpg")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        out.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="it is a symbolic link"):
        convert(str(tmp_path / "a.zip"), str(tmp_path / "out"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as out:
        out.writestr("a.jpg", picture())
        with pytest.warns(UserWarning, match="Duplicate name"):
            out.writestr("a.jpg", picture())
    with pytest.raises(DataError, match="the name is there twice"):
        convert(str(tmp_path / "b.zip"), str(tmp_path / "out"))


def listing(path: Path, kept: slice, *, num_told: int | None = None, renamed: tuple[bytes, bytes] = (b"", b"")) -> Path:
    """Let the directory of an archive list some of its files, and say that there are so many."""
    data = path.read_bytes()
    begin, end = data.index(b"PK\1\2"), data.rindex(b"PK\5\6")
    entries = [b"PK\1\2" + entry for entry in data[begin:end].split(b"PK\1\2")[1:]][kept]
    directory = b"".join(entries).replace(*renamed, 1) if renamed[0] else b"".join(entries)
    count = len(entries) if num_told is None else num_told
    closing = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, count, count, len(directory), begin, 0)
    path.write_bytes(data[:begin] + directory + closing)
    return path


@pytest.mark.parametrize(
    ("kept", "how", "said"),
    [
        (slice(3), {}, "another file follows at byte .*which the directory leaves out"),
        (slice(27, None), {}, "it begins with a file that its directory leaves out"),
        (slice(0, None, 2), {}, "another file follows"),
        (slice(None), {"num_told": 3}, "lists 30 files, and says that there are 3"),
        (slice(None), {"num_told": 31}, "lists 30 files, and says that there are 31"),
        (slice(None), {"renamed": (b"a/05", b"b/05")}, "the file there is 'a/05.jpg'.*not what the directory says"),
        (slice(None), {"renamed": (b"a/05.jpg", b"////////")}, "the name leads out of the archive|it has no name"),
    ],
)
def test_an_archive_whose_directory_lies_is_refused(kept: slice, how: Any, said: str, tmp_path: Path) -> None:
    """Three of thirty files were written with exit code 0, or a file into another class."""
    bodies = {f"{'ab'[number % 2]}/{number:02d}.jpg": picture(number) for number in range(30)}
    bodies = {name.replace("b/05", "a/05"): body for name, body in bodies.items()}
    path = listing(archive(tmp_path / "all.zip", **bodies), kept, **how)
    with pytest.raises(DataError, match=rf"all\.zip.*({said})"):
        convert(str(path), str(tmp_path / "out"))
    assert not [*(tmp_path / "out").glob("*.tar")]


def test_a_flipped_byte_of_a_directory_gives_the_same_files_or_an_error_with_its_name(tmp_path: Path) -> None:
    path, draw = archive(tmp_path / "all.zip", **{f"c/{n}.txt": b"%d" % n * 50 for n in range(9)}), random.Random(1)
    whole = path.read_bytes()

    def held() -> dict[str, bytes]:
        storage = ZipStorage()
        found = [one.url for one in storage.list(storage.root(str(path)))]
        return {url: bytes(storage.read(url)) for url in found}

    expected = held()
    for _ in range(300):
        data = bytearray(whole)
        data[draw.randrange(whole.index(b"PK\1\2"), len(whole))] = draw.randrange(256)
        path.write_bytes(data)
        told = ""
        try:
            assert held() == expected
        except DataError as error:
            told = str(error)
        assert not told or "all.zip" in told


def test_a_real_bomb_inflates_to_no_more_than_it_says(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip", **{"a/1.jpg": bytes(80 << 20)})
    with pytest.raises(DataError, match=r"inflate to 83886080, more than 200 times.*--max-gzip-ratio"):
        convert(str(path), str(tmp_path / "out"))
    assert convert(str(path), str(tmp_path / "out"), options=ConvertOptions(max_gzip_ratio=2000)).num_samples == 1

    def lie(data: bytearray) -> None:
        at = data.index(b"PK\1\2")
        struct.pack_into("<I", data, at + 24, 1000)
        struct.pack_into("<I", data, at + 16, zlib.crc32(bytes(1000)))

    source = open_source(str(patched(path, lie)), Storage())
    assert [len(record.fields["jpg"]) for record in source.records(0)] == [1000]


def test_tables_in_an_archive_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip", **{"a.jsonl": b"{}"})
    with pytest.raises(ConfigError, match=r"a\.zip: an archive is read as .*not as 'jsonl'; unpack it"):
        convert(str(path), str(tmp_path / "out"))
