"""The fenced blocks of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_EXCUSE = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->")
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*([\w+-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    line: int  # of its first line of code, from 1
    code: str
    excuse: str | None


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text, each with the excuse that stands right before it."""
    lines = text.split("\n")
    excuse: str | None = None
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        found = _EXCUSE.search(lines[number])
        if fence is None:
            excuse = found[1] if found else (excuse if not lines[number].strip() else None)
            number += 1
            continue
        end = next(
            (n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[2]),
            None,
        )
        if end is None:
            raise ValueError(f"line {number + 1}: the block is not closed")
        code = "\n".join(line.removeprefix(fence[1]) for line in lines[number + 1 : end])
        yield Block(language=fence[3], line=number + 2, code=code + "\n", excuse=excuse)
        excuse, number = None, end + 1
