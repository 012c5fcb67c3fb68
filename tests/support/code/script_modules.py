"""Import modules of a folder that is no package, as its scripts do."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

import pytest


def script_modules(monkeypatch: pytest.MonkeyPatch, folder: str, names: Iterable[str]) -> dict[str, ModuleType]:
    """Return the modules by name; they are taken away again afterwards."""
    monkeypatch.syspath_prepend(folder)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {name: __import__(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found
