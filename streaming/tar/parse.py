"""A chunk's bytes to its layout."""

from __future__ import annotations

from streaming.tar.blocks import BytesLike, Where
from streaming.tar.fast import read_members
from streaming.tar.group import ChunkLayout, group_members


def parse_chunk(
    buffer: BytesLike, *, url: str = "", base: int = 0, verify_headers: bool = False, repeats: bool = False
) -> ChunkLayout:
    """The samples in ``buffer``, which holds whole members from its first byte to its last.

    The buffer may be a chunk or a whole archive (with or without the end-of-archive mark). Nothing is copied from it
    and no reference to it is kept. Offsets in the result count from the buffer's start; ``record_starts[0]`` is 0 and
    ``record_starts[-1]`` where the last member's padding ends. Pure; safe from any thread.

    Args:
        buffer: Contiguous bytes.
        url: The shard, for messages.
        base: Offset of the buffer in the shard, for messages.
        verify_headers: Check the checksum of every member header. Not needed where the buffer's CRC32C was checked.
        repeats: A field that a sample holds already begins another sample of the same key: for bytes that an index
            describes, which says how many samples there are.

    Raises:
        TarError: For damage, truncation, sparse files, or data after the end-of-archive mark.
        DuplicateKeyError: If one sample holds one field twice, unless ``repeats``.
    """
    where = Where(url, base)
    members = read_members(buffer, where, verify_headers=verify_headers)
    return group_members(members, where, first=0, stop=members.end, repeats=repeats).unpacked()
