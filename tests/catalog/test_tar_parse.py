"""parse_chunk, TarScanner and iter_samples against Python's tarfile, GNU tar and webdataset; damage and fuzz."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import re
import shutil
import subprocess
import tarfile
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError, DuplicateKeyError, TarError
from streaming.shards.tar import TarScanner, find_values, iter_samples, parse_chunk
from streaming.shards.tar.blocks import Origin, split_name
from streaming.shards.tar.fast import read_members
from streaming.shards.tar.group import _group_one_by_one, group_members
from streaming.shards.tar.keys import pack_keys
from tests.support.sets.tars import tar_bytes

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
PIECES = (1, 511, 512, 513, 4096, 10_000, 1 << 30)

Samples = list[tuple[str, dict[str, bytes]]]


SIDE = ("@eaDir", "__MACOSX", ".AppleDouble")  # folders that nobody packed on purpose


def regex_split(name: str) -> tuple[str, str] | None:
    """The rule as webdataset writes it, but for files that macOS or a NAS left beside those that somebody packed."""
    *folders, last = name.split("/")
    return None if last.startswith(".") or {*folders} & {*SIDE} else webdataset_split(name)


def webdataset_split(name: str) -> tuple[str, str] | None:
    if re.match(r"__[^/]*__($|/)", name):
        return None
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    return (match[1], match[2].lower()) if match else None


def reference(archive: bytes) -> Samples:
    """The samples that tarfile and the rule give."""
    samples: Samples = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            split = regex_split(member.name) if member.isreg() else None
            if split is None:
                continue
            if not samples or samples[-1][0] != split[0]:
                samples.append((split[0], {}))
            content = tar.extractfile(member)
            assert content is not None
            samples[-1][1][split[1]] = content.read()
    return samples


def of_layout(archive: bytes, base: int = 0, **kwargs: bool) -> Samples:
    layout = parse_chunk(archive, **kwargs)
    assert layout.starts.shape == layout.sizes.shape == (len(layout.keys), len(layout.fields))
    return [
        (
            key,
            {
                field: archive[start : start + size]
                for field, start, size in zip(layout.fields, layout.starts[row], layout.sizes[row], strict=True)
                if start >= 0
            },
        )
        for row, key in enumerate(layout.keys)
    ]


def pieces_of(archive: bytes, size: int) -> Iterator[bytes]:
    return (archive[start : start + size] for start in range(0, len(archive), size))


def scan(archive: bytes, piece_bytes: int) -> tuple[list[str], list[int], dict[tuple[str, str], tuple[int, int]]]:
    """Keys, record borders and places that a scanner finds in pieces of one size."""
    scanner = TarScanner("s.tar")
    keys: list[str] = []
    borders: list[int] = []
    places = {}

    def take(layout) -> None:
        if layout.keys:
            assert not borders or borders[-1] == layout.record_starts[0]
            borders.extend(layout.record_starts.tolist() if not borders else layout.record_starts[1:].tolist())
        for row, key in enumerate(layout.keys):
            keys.append(key)
            for column, field in enumerate(layout.fields):
                if layout.starts[row, column] >= 0:
                    places[key, field] = (int(layout.starts[row, column]), int(layout.sizes[row, column]))

    for piece in pieces_of(archive, piece_bytes):
        take(scanner.feed(piece))
    take(scanner.finish())
    return keys, borders, places


def check_all(archive: bytes) -> Samples:
    """All readers agree with the reference; returns it."""
    expected = reference(archive)
    assert of_layout(archive) == expected
    assert of_layout(archive, verify_headers=True) == expected
    layout = parse_chunk(archive)
    borders = layout.record_starts.tolist() if layout.keys else []
    assert borders == sorted(set(borders))
    for row in range(len(layout.keys)):  # each record alone is a chunk with this one sample
        record = archive[layout.record_starts[row] : layout.record_starts[row + 1]]
        assert of_layout(record) == [expected[row]]
    whole = scan(archive, 1 << 30)
    assert whole[0] == [key for key, _ in expected]
    assert whole[1] == borders
    for size in PIECES:
        if len(archive) / size < 3_200:  # byte by byte only the smallest archives
            assert scan(archive, size) == whole, size
            assert list(iter_samples(pieces_of(archive, size))) == expected
    return expected


def plain_files(num_samples: int, fields: tuple[str, ...] = ("jpg", "cls"), size: int = 100) -> list[tuple[str, bytes]]:
    return [(f"{i:05d}.{field}", os.urandom(size + i % 7)) for i in range(num_samples) for field in fields]


INNER = tar_bytes(plain_files(3))
MAGIC_BLOCK = bytes(257) + b"ustar\x0000" + bytes(247)
SEGMENT = st.sampled_from(["a", "b", "img.v2", "é", "x y", ".hid", "n" * 60, "__m__", "q\nr", *SIDE, "my@eaDir"])
STEM = st.sampled_from(["0", "1", "22", "s", "__meta__", "", "._0", "été", "k" * 90, "k" * 160, "a\nb"])
EXTENSION = st.sampled_from(["", ".jpg", ".JPG", ".cls", ".seg.png", ".json", ".", ".é", "..x"])
PAYLOAD = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", bytes(512), bytes(2048), INNER, INNER[:700], MAGIC_BLOCK, b"x" * 511, b"x" * 513, MAGIC_BLOCK * 3]
    ),
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 8 + [tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)


class Archive(bytes):
    def __repr__(self) -> str:  # the members, not the bytes
        with tarfile.open(fileobj=io.BytesIO(self), mode="r:") as tar:
            return f"Archive({[(member.name, member.type, member.size) for member in tar]})"


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    out = io.BytesIO()
    form = draw(st.sampled_from(list(FORMATS.values())))
    headers = {"comment": "made by a test"} if draw(st.booleans()) and form == tarfile.PAX_FORMAT else {}
    seen = set()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=headers, encoding="utf-8") as tar:
        for folders, stem, extension, payload, kind, mtime in draw(
            st.lists(
                st.tuples(st.lists(SEGMENT, max_size=3), STEM, EXTENSION, PAYLOAD, KINDS, st.sampled_from([0, 1.5])),
                max_size=12,
            )
        ):
            name = "/".join([*folders, stem + extension])
            split = regex_split(name)
            if not name or name.endswith("/") or (split is not None and split in seen):
                continue
            if kind == tarfile.LNKTYPE and split is not None:
                continue  # an error where a shard is read for the first time: see test_places.py
            info = tarfile.TarInfo(name)
            info.type, info.mtime, info.linkname = kind, mtime, "t" * 120 if kind == tarfile.SYMTYPE else "t"
            if form == tarfile.USTAR_FORMAT:
                info.linkname, info.mtime = "t", 0
            info.size = len(payload) if info.isreg() else 0
            try:
                info.tobuf(form, "utf-8", "surrogateescape")
            except ValueError:  # a name that ustar cannot hold
                continue
            seen.add(split)
            tar.addfile(info, io.BytesIO(payload) if info.isreg() else None)
        end = tar.offset
    assume(seen)  # tarfile cannot read a global header with no member after it
    return Archive(out.getvalue()[: end + 2 * 512])  # without the padding to 10,240 bytes, which has zeros alone


@pytest.mark.thorough
@given(archive=archives())
@settings(deadline=None)
def test_agrees_with_tarfile_on_any_archive(archive: bytes) -> None:
    expected = reference(archive)
    if len({key for key, _ in expected}) == len(expected):
        check_all(archive)
    else:  # the same key in two places: two samples here, refused by the index
        assert of_layout(archive) == expected


@given(
    name=st.text(st.sampled_from("ab./_\n"), max_size=12)
    | st.lists(st.sampled_from([*SIDE, "t", "._a.jpg", ".DS_Store", "a.jpg", "x@eaDir", ".", ""]), max_size=4).map(
        "/".join
    )
)
@example(name="__a.b__")
@example(name="t/._a.jpg")
@example(name="t/@eaDir/a.jpg/SYNOPHOTO_THUMB_M.jpg")
@settings(deadline=None)
def test_names_split_as_the_regular_expression_does(name: str) -> None:
    assert split_name(name) == regex_split(name)
    assert split_name(name) in {None, webdataset_split(name)}


@given(archive=archives(), piece_bytes=st.sampled_from([100, 512, 1100, 1 << 20]))
@settings(deadline=None)
def test_files_of_no_sample_are_named_wherever_pieces_are_cut(archive: bytes, piece_bytes: int) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        expected = [one.name for one in tar if one.isreg() and regex_split(one.name) is None]
    scanner, found = TarScanner(repeats=True), list[str]()
    for piece in pieces_of(archive, piece_bytes):
        scanner.feed(piece)
        found += scanner.passed_over
    scanner.finish()
    assert found == expected
    left_out: list[str] = []
    deque(iter_samples(pieces_of(archive, piece_bytes), repeats=True, left_out=left_out.append), 0)
    assert left_out == expected
    assert [*parse_chunk(archive, repeats=True).passed_over] == expected


@given(names=st.lists(st.text(st.sampled_from("ab./_"), min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
@settings(deadline=None)
def test_uniform_path_agrees_with_the_rule(names: list[str]) -> None:
    files = [(f"{name}.{field}", b"x") for name in names for field in ("jpg", "cls")]
    archive = b"".join(tar_bytes([file])[:1024] for file in files) + bytes(1024)
    wanted: list[tuple[str, str]] = [split for name, _ in files if (split := regex_split(name))]
    neighbors = set()
    for index, split in enumerate(wanted):
        if index and wanted[index - 1][0] != split[0]:
            neighbors = set()
        if split in neighbors:
            with pytest.raises(DuplicateKeyError):
                parse_chunk(archive)
            return
        neighbors.add(split)
    samples = of_layout(archive)
    assert [key for key, _ in samples] == [key for key, _ in itertools.groupby(key for key, _ in wanted)]
    assert sorted((key, field) for key, fields in samples for field in fields) == sorted(wanted)


@given(
    keys=st.lists(st.text(st.sampled_from("ab./_"), min_size=1, max_size=3), min_size=1, max_size=8),
    fields=st.sampled_from([["jpg"], ["jpg", "cls"]]),
)
@example(keys=["a", "b", "b", "c"], fields=["jpg", "cls"])
@example(keys=["a", "b", "b", "c"], fields=["jpg"])
@example(keys=["ab", "__", "b"], fields=["jpg"])
@settings(deadline=None)
def test_neighbors_with_one_key_are_two_samples_if_they_may(keys: list[str], fields: list[str]) -> None:
    files = [(f"{key}.{field}", b"x") for key in keys for field in fields]
    chunk = b"".join(tar_bytes([file])[:1024] for file in files)
    members = read_members(chunk, Origin())
    found = group_members(members, Origin(), first=0, stop=members.end, repeats=True).unpacked()
    exact = _group_one_by_one(members, Origin(), first=0, stop=members.end, repeats=True).unpacked()
    assert (found.keys, found.fields) == (exact.keys, exact.fields)
    assert np.array_equal(found.starts, exact.starts)
    assert np.array_equal(found.sizes, exact.sizes)


NEARLY_ALIKE = [
    ["a\nb.jpg", "c\nd.jpg"],
    ["a.b/x.jpg", "ccc.y.jpg"],
    ["a.b/x.jpg", "a.b/.jpg"],
    ["a.jpg", "b.jpgx"],
    ["README", "a.jpg", "b.jpg"],
    ["t/a.jpg", "t/@eaDir/b.jpg"],
    ["t/a.jpg", "t/__MACOSX/b.jpg"],
    ["t/a.jpg", "t/.b.jpg", "t/.jpg"],
    ["BZh91AY.jpg", "PK\3\4.jpg"],
]


@pytest.mark.parametrize("names", NEARLY_ALIKE)
def test_names_that_are_nearly_alike(names: list[str]) -> None:
    archive = tar_bytes([(name, name.encode() * (700 if "." in name else 0)) for name in names])
    samples = check_all(archive)
    scanner = TarScanner()
    layouts = [scanner.feed_packed(archive), scanner.finish_packed()]
    packed = [pack_keys(layout.keys) for layout in layouts if len(layout.keys)]
    ends = [keys[: stops[row]].decode() for keys, stops in packed for row in range(len(stops))]
    assert "".join(keys.decode() for keys, _ in packed) == "".join(key for key, _ in samples)
    assert [end.endswith(key) for end, (key, _) in zip(ends, samples, strict=True)] == [True] * len(samples)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("folder", ["", "./", "a.b/c/", "x" * 120 + "/"])
@pytest.mark.parametrize("fields", [("jpg",), ("jpg", "seg.png", "CLS")])
def test_formats_folders_and_fields(form: str, folder: str, fields: tuple[str, ...]) -> None:
    files = [(folder + name, content) for name, content in plain_files(6, fields)]
    samples = check_all(tar_bytes(files, FORMATS[form], mtime=1.25 if form == "pax" else 0))
    assert len(samples) == 6
    assert list(samples[0][1]) == [field.lower() for field in fields]


def test_missing_fields_are_minus_one() -> None:
    layout = parse_chunk(tar_bytes([("a.x", b"1"), ("b.x", b"2"), ("b.y", b"33"), ("c.y", b"4")]))
    assert layout.fields == ("x", "y")
    assert layout.starts.tolist() == [[512, -1], [1536, 2560], [-1, 3584]]
    assert layout.sizes.tolist() == [[1, 0], [1, 2], [0, 1]]
    assert layout.record_starts.tolist() == [0, 1024, 3072, 4096]
    assert layout.starts.dtype == layout.sizes.dtype == layout.record_starts.dtype == np.int64


def test_folders_and_links_belong_to_the_record_before_them() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (("d", b"5"), ("d/a.x", b"0"), ("d/l", b"2"), ("d/b.x", b"0"), ("e", b"5")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.x"
            tar.addfile(info)
    layout = parse_chunk(out.getvalue())
    assert layout.keys == ["d/a", "d/b"]
    assert layout.record_starts.tolist() == [0, 1536, 2560]
    assert scan(out.getvalue(), 512)[1] == [0, 1536, 2560]


def test_payloads_that_look_like_headers() -> None:
    files = [("0.tar", INNER), ("1.tar", MAGIC_BLOCK * 4 + INNER), ("1.txt", b"t"), ("2.tar", INNER[512:])]
    check_all(tar_bytes(files))


def test_accepts_any_buffer_and_an_empty_archive() -> None:
    archive = tar_bytes(plain_files(2))
    keys = parse_chunk(archive).keys
    assert parse_chunk(memoryview(bytearray(archive))).keys == keys
    assert parse_chunk(np.frombuffer(archive, np.uint8)).keys == keys
    for empty in (b"", bytes(512), bytes(10_240)):
        layout = parse_chunk(empty)
        assert layout.keys == []
        assert layout.starts.shape == (0, 0)
    assert scan(bytes(1024), 100) == ([], [], {})


def test_a_chunk_needs_no_end_of_archive_but_whole_members() -> None:
    archive = tar_bytes(plain_files(3))
    layout = parse_chunk(archive)
    middle = archive[layout.record_starts[1] : layout.record_starts[3]]
    assert parse_chunk(middle).keys == layout.keys[1:3]
    with pytest.raises(TarError, match=r"u\.tar, byte 12072"):
        parse_chunk(middle[:-512], url="u.tar", base=9000)


def test_base_256_sizes() -> None:
    archive = bytearray(tar_bytes([("a.x", b"abc"), ("b.x", b"d")]))
    archive[124:136] = b"\x80" + (3).to_bytes(11, "big")
    fix_checksum(archive)
    assert check_all(bytes(archive)) == [("a", {"x": b"abc"}), ("b", {"x": b"d"})]
    for field in (b"\xff" * 12, b"\x80" + b"\xff" * 11, b"\x80\x01" + bytes(10), b"\x81" + bytes(10) + b"\3"):
        archive[124:136] = field
        fix_checksum(archive)
        with pytest.raises(TarError, match=r"size field|exceeds"):
            parse_chunk(archive)
        with pytest.raises(TarError):
            scan(bytes(archive), 1000)


def fix_checksum(archive: bytearray, at: int = 0) -> None:
    archive[at + 148 : at + 156] = b" " * 8
    archive[at + 148 : at + 156] = b"%06o\0 " % sum(archive[at : at + 512])


def test_old_headers_without_magic_and_with_blank_padded_numbers() -> None:
    archive = bytearray(tar_bytes([("a.x", b"abc"), ("b.x", b"d"), ("c.x", b"e")]))
    for at in (0, 1024):
        archive[at + 257 : at + 265] = bytes(8)
        archive[at + 156] = 0
        archive[at + 124 : at + 136] = b"%10o \0" % (3 if at == 0 else 1)
        fix_checksum(archive, at)
    assert [key for key, _ in check_all(bytes(archive))] == ["a", "b", "c"]


def test_pax_size_overrides_the_header() -> None:
    archive = bytearray(tar_bytes([("a.x", b"abc" * 300), ("b.x", b"d")]))
    archive[124:136] = b"%011o\0" % 0
    fix_checksum(archive)
    record = b"12 size=900\n"
    pax = bytearray(tar_bytes([("PaxHeader", record)])[:1024])
    pax[156] = ord("x")
    fix_checksum(pax)
    assert check_all(bytes(pax + archive))[0] == ("a", {"x": b"abc" * 300})


def test_names_that_are_not_utf8_survive() -> None:
    archive = bytearray(tar_bytes([("aa.x", b"1"), ("bb.x", b"2")]))
    archive[0:2] = b"\xff\xe9"
    fix_checksum(archive)
    keys = parse_chunk(archive).keys
    assert keys[0].encode("utf-8", "surrogateescape") == b"\xff\xe9"
    assert [key for key, _ in reference(bytes(archive))] == keys


def test_one_field_twice_names_both_places() -> None:
    for names in (("a.x", "a.x"), ("b.x", "a.X", "a.x"), ("b.x", "b.y", "c.x", "c.y", "c.x", "c.y")):
        with pytest.raises(DuplicateKeyError, match=r"s\.tar: sample '[ac]' has field 'x' twice, at bytes \d+ and \d+"):
            parse_chunk(tar_bytes([(name, b"") for name in names]), url="s.tar")


def test_extensions_without_end_are_refused() -> None:
    with pytest.raises(TarError, match="rename"):
        parse_chunk(tar_bytes([(f"{i}.{i}.jpg", b"") for i in range(300)]))
    many = parse_chunk(tar_bytes([(f"video.{i:04d}.jpg", b"") for i in range(300)]))
    assert many.starts.shape == (1, 300)


def test_sparse_files_are_refused() -> None:
    archive = bytearray(tar_bytes([("a.x", b"abc")]))
    archive[156] = ord("S")
    fix_checksum(archive)
    with pytest.raises(TarError, match="sparse"):
        parse_chunk(archive)


def test_oversized_extension_header_is_refused() -> None:
    archive = bytearray(tar_bytes([("a.x", b"abc")]))
    archive[156] = ord("L")
    archive[124:136] = b"%011o\0" % (2 << 20)
    fix_checksum(archive)
    with pytest.raises(TarError, match="at most"):
        parse_chunk(archive)
    with pytest.raises(TarError, match="at most"):
        TarScanner().feed(archive)


def test_global_header_that_renames_members_is_refused() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "all/the/same.x"}) as tar:
        tar.addfile(tarfile.TarInfo("a.x"))
    with pytest.raises(TarError, match="global"):
        parse_chunk(out.getvalue())


@pytest.mark.parametrize("form", FORMATS)
def test_every_truncation_is_noticed(form: str) -> None:
    files = [("a" * 120 + ".x", b"1" * 600), ("b.x", b"2")] if form != "ustar" else [("a.x", b"1" * 600), ("b.x", b"2")]
    archive = tar_bytes(files, FORMATS[form])
    end = parse_chunk(archive).record_starts[-1]
    for length in sorted({*range(0, end, 97), *range(0, end + 1, 256), *range(1, end, 512), *range(511, end, 512)}):
        with pytest.raises(TarError, match=r"s\.tar, byte \d+"):
            scan_url(archive[:length])
        if length % 512:
            with pytest.raises(TarError, match=r"s\.tar, byte \d+"):
                parse_chunk(archive[:length], url="s.tar")
    assert scan(archive[: end + 512], 100) == scan(archive, 100)


def scan_url(archive: bytes) -> None:
    scanner = TarScanner("s.tar")
    for piece in pieces_of(archive, 300):
        scanner.feed(piece)
    scanner.finish()


def test_data_after_the_end_is_noticed() -> None:
    archive = tar_bytes([("a.x", b"1")])
    joined = archive + archive
    for read in (parse_chunk, scan_url, lambda data: list(iter_samples([data]))):
        with pytest.raises(TarError, match=r"after the end-of-archive"):
            read(joined)
    scanner = TarScanner()
    scanner.feed(archive)
    with pytest.raises(TarError, match=r"after the end-of-archive"):
        scanner.feed(bytes(1024) + b"x")


def test_each_damaged_header_byte_is_noticed() -> None:
    archive = tar_bytes(plain_files(6))
    layout = parse_chunk(archive)
    header = int(layout.record_starts[3])
    for offset in set(range(512)) - {155}:  # 155 closes the checksum, which nothing guards
        damaged = bytearray(archive)
        damaged[header + offset] ^= 0x41
        with pytest.raises(TarError, match=rf"byte {header}[:,]"):
            parse_chunk(damaged, verify_headers=True)
        with pytest.raises(TarError, match=rf"byte {header}[:,]"):
            list(iter_samples([bytes(damaged)]))


def test_samples_before_the_damage_are_yielded() -> None:
    archive = bytearray(tar_bytes(plain_files(10)))
    archive[parse_chunk(archive).record_starts[5]] ^= 1
    seen: list[str] = []
    with pytest.raises(TarError):
        seen.extend(key for key, _ in iter_samples(pieces_of(bytes(archive), 1024)))
    assert seen[:4] == ["00000", "00001", "00002", "00003"]


@given(data=st.binary(max_size=2000), at=st.integers(0, 6000), size=st.sampled_from([100, 512, 5000]))
@settings(deadline=None)
def test_fuzz_raises_nothing_but_data_errors(data: bytes, at: int, size: int) -> None:
    archive = bytearray(FUZZ_BASE)
    archive[at : at + len(data)] = data
    for verify in (False, True):
        with contextlib.suppress(DataError):
            parse_chunk(archive, verify_headers=verify)
    outcomes = []
    for piece_bytes in (size, 1 << 30):
        try:
            outcomes.append(list(iter_samples(pieces_of(bytes(archive), piece_bytes))))
        except DataError:
            outcomes.append("damaged")
    assert outcomes[0] == outcomes[1]


FUZZ_BASE = tar_bytes([("p" * 130 + ".x", b"1"), *plain_files(3)], tarfile.PAX_FORMAT, mtime=2.5)


@given(data=st.binary(max_size=3000))
@settings(deadline=None)
def test_fuzz_of_pure_noise(data: bytes) -> None:
    for read in (
        parse_chunk,
        scan_url,
        lambda noise: list(iter_samples([noise])),
        lambda noise: list(iter_samples([b"\x1f\x8b" + noise])),
    ):
        with contextlib.suppress(DataError):
            read(data)


def test_gzip_streams() -> None:
    for num_samples, sizes in ((3, (1, 7)), (50, (1000, 1 << 20))):
        archive = tar_bytes(plain_files(num_samples, size=60 * num_samples))
        expected = reference(archive)
        packed = gzip.compress(archive, 1)
        for size in sizes:
            assert list(iter_samples(pieces_of(packed, size))) == expected
    two_members = gzip.compress(archive[:5000]) + gzip.compress(archive[5000:])
    assert list(iter_samples([two_members])) == expected
    filled = gzip.compress(archive[:5000]) + bytes(700) + gzip.compress(archive[5000:]) + bytes(9)
    assert list(iter_samples(pieces_of(filled, 300))) == expected
    for damaged in (packed[:-20], packed[: len(packed) // 2], packed[:5000] + b"???" + packed[5003:]):
        with pytest.raises(TarError, match="gzip"):
            list(iter_samples([damaged], "s.tar.gz"))


def test_a_decompression_bomb_is_stopped() -> None:
    bomb = gzip.compress(tar_bytes([("a.x", bytes(30 << 20))]), 6)
    assert len(bomb) < 100_000
    with pytest.raises(TarError, match="a sample of more than 1048576 bytes; cut it into smaller samples"):
        list(iter_samples([bomb], max_sample_bytes=1 << 20))
    many = tar_bytes(plain_files(10))[: 22 << 10]  # in one piece, larger than each of them may be
    assert len(list(iter_samples([many], max_sample_bytes=4096))) == 10
    padded = tar_bytes(plain_files(2)) + bytes(100_000)  # as tapes leave it: in no sample
    assert len(list(iter_samples(pieces_of(padded, 1000), max_sample_bytes=4096))) == 2


def test_a_gzip_bomb_is_stopped_by_its_ratio() -> None:
    """Many small samples, of which none is too large; a stream of ordinary text is none."""
    bomb = gzip.compress(tar_bytes([(f"{i}.x", bytes(1 << 20)) for i in range(80)]), 6)
    with pytest.raises(TarError, match=r"more than 200 times as many.*max_gzip_ratio"):
        list(iter_samples([bomb]))
    assert len(list(iter_samples([bomb], max_gzip_ratio=2000))) == 80
    with pytest.raises(ConfigError, match="max_gzip_ratio: expected a number"):
        StreamingDataset("x.tar.gz", max_gzip_ratio=0)


def test_scanner_keeps_no_payload() -> None:
    archive = tar_bytes([("a.x", b"1"), ("b.x", bytes(3 << 20)), ("b.y", b"2")])
    scanner = TarScanner()
    for piece in pieces_of(archive, 100_000):
        scanner.feed(piece)
        assert len(scanner._tail) <= 512
        assert scanner.record_start <= scanner.num_bytes
    assert scanner.finish().keys == ["b"]


def test_gnu_tar_archives(tmp_path) -> None:
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("no tar program here")
    source = tmp_path / "in"
    deep = source / ("deep" * 15) / ("deep" * 15)
    deep.mkdir(parents=True)
    for i in range(10):
        (source / f"{i:03d}.jpg").write_bytes(os.urandom(i * 100))
        (source / f"{i:03d}.cls").write_text(str(i))
    (deep / ("n" * 90 + ".jpg")).write_bytes(b"long")
    (source / "link.jpg").symlink_to("000.jpg")
    os.link(source / "000.jpg", source / "zhard")
    for form in ("gnu", "posix", "ustar", "v7", "oldgnu"):
        out = tmp_path / f"{form}.tar"
        names = ["--exclude=deep*"] if form == "v7" else []
        subprocess.run([tar, f"--format={form}", "--sort=name", *names, "-cf", out, "-C", source, "."], check=True)
        samples = check_all(out.read_bytes())
        assert len(samples) == (10 if form == "v7" else 11)


def test_webdatasets_writer(tmp_path) -> None:
    wds = pytest.importorskip("webdataset")
    path = str(tmp_path / "a.tar")
    with wds.TarWriter(path) as writer:
        for i in range(10):
            writer.write({"__key__": f"k/{i:04d}", "txt": f"text {i}", "cls": i, "bin": os.urandom(700)})
    with open(path, "rb") as file:
        samples = check_all(file.read())
    assert [key for key, _ in samples] == [f"k/{i:04d}" for i in range(10)]
    assert samples[7][1]["cls"] == b"7"


# ------------------------------------------------------------------------------------------- values of known keys

_KEY = st.text(st.sampled_from("abß/0-"), min_size=1, max_size=9).filter(
    lambda key: split_name(f"{key}.lat") == (key, "lat")
)
_KEYS = st.lists(_KEY, min_size=1, max_size=40, unique=True)


@given(_KEYS, st.data())
def test_values_of_known_keys_are_those_that_the_headers_give(keys: list[str], data: st.DataObject) -> None:
    """And anything else in the bytes is left to the parser, whatever it is."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 511, 512, 700]), min_size=len(keys), max_size=len(keys)))
    even = data.draw(st.booleans())
    members = [(f"{key}.lat", bytes(sizes[0] if even else size)) for key, size in zip(keys, sizes, strict=True)]
    body = tar_bytes(members)
    body = body[: sum(512 + -(-len(value) // 512) * 512 for _, value in members)]
    found = find_values(body, keys, "lat")
    if found is not None:
        layout = parse_chunk(body, repeats=True)
        assert (layout.keys, layout.fields) == (keys, ("lat",))
        assert np.array_equal(found[0], layout.starts[:, 0])
        assert np.array_equal(found[1], layout.sizes[:, 0])
    others = {
        "another field": (keys, "cls"), "fewer": (keys[:-1], "lat"), "more": ([*keys, "z"], "lat"),
        "others": ([*keys[:-1], "z"], "lat"), "two in one": (["\n".join(f"{key}.lat" for key in keys)[:-4]], "lat"),
    }  # fmt: skip
    for what, (wrong, field) in others.items():
        if (wrong, field) != (keys, "lat"):
            assert find_values(body, wrong, field) is None, what


@pytest.mark.parametrize("size", [1, 700])
def test_plain_tars_of_one_field_are_found_fast(size: int) -> None:
    keys = [f"{number:05d}" for number in range(300)]
    body = tar_bytes([(f"{key}.lat", bytes(size)) for key in keys])
    assert find_values(body[: 300 * (512 + -(-size // 512) * 512)], keys, "lat") is not None
