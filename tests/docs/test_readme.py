"""Every block of the README runs, in order, in one temporary folder and one Python name space.

A block is left out only by a comment with the reason right before it: ``<!-- not run: needs a GPU -->``. Lines of a
``console`` block that start with ``$ `` are the commands; the others are sample output. Blocks of ``text`` are prose.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import PYTHON, SHELL, Block, blocks, commands, run_python, run_shell

README = ROOT / "README.md"
PROSE = frozenset({"text"})


def test_every_block_names_a_known_language() -> None:
    known = PYTHON | SHELL | PROSE
    unknown = [(b.line, b.language) for b in blocks(README.read_text()) if b.language not in known]
    assert unknown == [], f"(line, language): use one of {sorted(known)}"


def test_an_excuse_gives_a_reason() -> None:
    assert [b.line for b in blocks(README.read_text()) if b.excuse == ""] == []


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_fork_server: None) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(README.read_text()):
        if block.excuse is None and block.language in PYTHON:
            run_python(block, names, README)
        elif block.excuse is None and block.language in SHELL:
            run_shell(block, tmp_path, README)


def test_blocks_are_found_with_their_excuses() -> None:
    page = """a
<!-- not run: no GPU -->

```python
x = 1
```
```bash
ls
```
<!-- not run: gone -->
prose between
- item
  ```console
  $ echo a \\
    b
  a b
  ```
"""
    found = list(blocks(page))
    assert [(b.language, b.line, b.excuse) for b in found] == [
        ("python", 5, "no GPU"),
        ("bash", 8, None),
        ("console", 14, None),
    ]
    assert commands(found[1]) == "ls\n"
    assert commands(found[2]) == "echo a \\\n  b\n"


def test_a_failing_block_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"README\.md:7"):
        run_shell(Block(language="bash", line=7, code="false | true\n", excuse=None), tmp_path, README)
    with pytest.raises(ZeroDivisionError):
        run_python(Block(language="python", line=7, code="1 / 0\n", excuse=None), {}, README)


def test_an_open_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        list(blocks("```python\nx = 1"))
