"""Folders of the repository, so that no test counts how deep it lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
PROGRAMS = SUPPORT / "programs"
"""What tests start by path."""
GOLDEN = TESTS / "golden"
EXAMPLES = ROOT / "examples"
