"""Locks between processes: nothing waits without a limit for what another user may hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.code.folders import ROOT
from tests.support.code.source_tree import PACKAGES

HOME = "streaming/storage/base/locks.py"
_LOCKS = {"flock", "lockf", "F_SETLKW", "F_OFD_SETLKW", "LOCK_EX", "LOCK_SH"}


def uses() -> Iterator[tuple[str, ast.AST]]:
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in _LOCKS:
                yield str(path.relative_to(ROOT)), node


def test_one_module_locks() -> None:
    assert {place for place, _ in uses()} == {HOME}, "lock with streaming.storage.locked, try_lock or lock_open"


def test_no_lock_waits_by_itself() -> None:
    calls = [
        ast.unparse(node.args[1]) for node in ast.walk(ast.parse((ROOT / HOME).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "fcntl.flock"
    ]  # fmt: skip
    assert len(calls) == 3
    assert set(calls) == {"fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_UN"}
