"""The reader of plain chunks: what it reads it reads as the exact reader does, and the rest it leaves alone."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streaming.shards.tar.blocks import Members, Origin, as_array
from streaming.shards.tar.fast import read_members
from streaming.shards.tar.headers import member_header, padding
from streaming.shards.tar.plain import read_plain
from streaming.shards.tar.walk import walk_members


def chunk_of(sizes: list[int]) -> bytes:
    """Members of these sizes, without an end-of-archive mark."""
    return b"".join(
        member_header(f"{number:05d}.bin", size) + bytes(b"x" * size) + padding(size)
        for number, size in enumerate(sizes)
    )


def headers_of(sizes: list[int]) -> list[int]:
    steps = [512 + size + len(padding(size)) for size in sizes]
    return [sum(steps[:number]) for number in range(len(steps))]


def as_lists(members: Members) -> tuple[list[bytes], list[list[int]], int, bool]:
    names = (
        members.names
        if isinstance(members.names, list)
        else [
            name.split(b"\0", 1)[0]
            for name in members.names.tolist()  # as it is in the header
        ]
    )
    places = [column.tolist() for column in (members.headers, members.data, members.sizes)]
    assert all(column.dtype == np.int64 for column in (members.headers, members.data, members.sizes))
    return names, places, members.end, members.ended


def check(chunk: bytes) -> None:
    """What is read is what the exact reader reads."""
    found = read_plain(as_array(chunk))
    if found is not None:
        assert as_lists(found) == as_lists(walk_members(memoryview(chunk), Origin(), partial=False))


READ = {
    "one": [3],
    "of-one-size": [4096] * 100,
    "of-nearly-one-size": [430 + number % 83 for number in range(100)],
    "two-fields": [2000, 3] * 50,
    "four-fields": [2000, 3, 700, 90] * 25,
    "large": [9_000 + 771 * number for number in range(30)],
    "empty": [0] * 20,
    "few": [1, 10_000, 5],
}
LEFT_ALONE = {
    "small-and-different": [100 * number for number in range(100)],
    "one-is-different": [*[4096] * 50, 10_000, *[4096] * 49],
    "five-fields": [2000, 3, 700, 90, 1100] * 20,
}


@pytest.mark.parametrize("name", READ)
def test_reads_what_is_plain(name: str) -> None:
    chunk = chunk_of(READ[name])
    found = read_plain(as_array(chunk))
    assert found is not None
    assert as_lists(found) == as_lists(walk_members(memoryview(chunk), Origin(), partial=False))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_leaves_the_rest_to_others(name: str) -> None:
    chunk = chunk_of(LEFT_ALONE[name])
    assert read_plain(as_array(chunk)) is None
    assert as_lists(read_members(chunk, Origin())) == as_lists(walk_members(memoryview(chunk), Origin(), partial=False))


def one(name: bytes, payload: bytes = b"", kind: str = "0", *, signed: bool = False, **at: bytes) -> bytes:
    """A member with some bytes of its header replaced (``at``: ``_345=...``), and a checksum that holds."""
    header = bytearray(member_header("x", len(payload)))
    header[: len(name)], header[156] = name, ord(kind)
    for place, value in at.items():
        start = int(place.removeprefix("_"))
        header[start : start + len(value)] = value
    values = np.frombuffer(header, np.int8 if signed else np.uint8)
    header[148:156] = b"%06o\0 " % (int(values.sum()) - int(values[148:156].sum()) + 8 * 0x20)
    return bytes(header) + payload + padding(len(payload))


ODD = {
    "a-long-name-is-of-one-member": (one(b"L", b"a.x\0", "L") + one(b"q") + one(b"b.x"), [b"a.x", b"b.x"]),
    "the-last-of-two-long-names": (one(b"L", b"a.x\0", "L") + one(b"L", b"b.x\0", "L") + one(b"q"), [b"b.x"]),
    "a-global-header-between": (
        one(b"x", b"12 path=a.x\n", "x") + one(b"g", b"10 k=long\n", "g") + one(b"q"),
        [b"a.x"],
    ),
    "a-path-beyond-a-block": (one(b"x", b"600 k=" + b"k" * 593 + b"\n12 path=a.x\n", "x") + one(b"q"), [b"a.x"]),
    "a-path-that-ends-with-a-slash": (one(b"x", b"13 path=a.x/\n", "x") + one(b"q"), [b"a.x"]),
    "times-of-gnu-at-the-prefix": (one(b"a.x", _257=b"ustar  \0", _345=b"14737530000"), [b"a.x"]),
    "a-folder-with-a-size": (one(b"d/", kind="5", _124=b"%011o\0" % 512) + one(b"a.x", b"1"), [b"a.x"]),
    "a-signed-checksum": (one(b"\xff\xe9.x", signed=True) + one(b"b.x"), [b"\xff\xe9.x", b"b.x"]),
    "a-long-link": (one(b"K", b"t\0", "K") + one(b"l", kind="2") + one(b"b.x"), [b"b.x"]),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_read_alike_by_both(name: str) -> None:
    archive, names = ODD[name][0] + bytes(1024), ODD[name][1]
    exact = as_lists(walk_members(memoryview(archive), Origin(), partial=False))
    assert exact[0] == names
    for options in ({}, {"verify_headers": True}, {"partial": True, "verify_headers": True}):
        assert as_lists(read_members(archive, Origin(), **options)) == exact


sizes_of_samples = st.one_of(
    st.builds(
        lambda period, count: list(islice(cycle(period), count)),
        st.lists(st.integers(0, 2000), min_size=1, max_size=5),
        st.integers(1, 40),
    ),
    st.lists(st.integers(0, 40_000), min_size=1, max_size=12),
)


@given(
    sizes=sizes_of_samples,
    member=st.integers(0, 39),
    at=st.one_of(st.integers(0, 147), st.integers(156, 511), st.sampled_from([124, 134, 135, 156, 257, 262, 345])),
    value=st.sampled_from(b"\0 01789xL5S\xff"),
)
@example(sizes=[4096] * 20, member=12, at=134, value=ord("1"))  # a size that differs within the padding
@example(sizes=[4096] * 20, member=12, at=132, value=ord("3"))  # one that does not
@example(sizes=[4000] * 200, member=12, at=134, value=ord("8"))  # a digit that is none, within the padding
@example(sizes=[4096] * 200, member=12, at=135, value=ord("0"))  # a size of twelve digits
@example(sizes=[4096] * 200, member=12, at=345, value=ord("x"))  # a prefix
@settings(deadline=None)
def test_a_byte_that_is_not_plain(sizes: list[int], member: int, at: int, value: int) -> None:
    """One byte of one header is another: the same members, or hands off."""
    chunk = bytearray(chunk_of(sizes))
    place = headers_of(sizes)[member % len(sizes)]
    chunk[place + at] = value
    header = chunk[place : place + 512]
    chunk[place + 148 : place + 156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 0x20)
    check(bytes(chunk))


@given(sizes=sizes_of_samples, cut=st.integers(1, 3000))
@settings(deadline=None)
def test_a_part_of_a_chunk(sizes: list[int], cut: int) -> None:
    """Hands off, unless the rest is whole members."""
    chunk = chunk_of(sizes)[:-cut]
    check(chunk)
