"""The fenced blocks of a Markdown page, and how they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = frozenset({"python"})
SHELL = frozenset({"bash", "console", "sh"})
_EXCUSE = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->")
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*([\w+-]*)(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    line: int  # of its first line of code, from 1
    code: str
    excuse: str | None
    words: tuple[str, ...] = ()  # what follows the language


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
        yield Block(language=fence[3], line=number + 2, code=code + "\n", excuse=excuse, words=tuple(fence[4].split()))
        excuse, number = None, end + 1


def commands(block: Block) -> str:
    """The shell script of a block: all of it, or what follows the prompts of a console."""
    if block.language != "console":
        return block.code
    kept: list[str] = []
    goes_on = False
    for line in block.code.splitlines():
        if line.startswith("$ ") or goes_on:
            kept.append(line.removeprefix("$ ") if not goes_on else line)
            goes_on = line.endswith("\\")
    return "\n".join(kept) + "\n"


def run_shell(block: Block, folder: Path, page: Path) -> None:
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    # A pipe to head ends its writer early, with a signal that pipefail would take for a failure.
    script = ("set -eu\n" if "| head" in block.code else "set -euo pipefail\n") + commands(block)
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ran.returncode == 0, f"{page.name}:{block.line}\n{block.code}\n{ran.stdout}\n{ran.stderr}"


def run_python(block: Block, names: dict[str, object], page: Path) -> None:
    code = "\n" * (block.line - 1) + block.code
    try:
        exec(compile(code, str(page), "exec"), names)
    except Exception as error:
        error.add_note(f"in the block at {page.name}:{block.line}")
        raise
