"""The threat table of docs/security.md: every row names tests, and they exist. See also ``test_attack_table.py``."""

from __future__ import annotations

import re

from tests.support.code.folders import ROOT


def test_every_threat_has_its_tests() -> None:
    lines = (ROOT / "docs" / "security.md").read_text().partition("## Threats and protections")[2].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")][2:]
    assert len(rows) > 30
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^ *def (test_\w+)", text, re.MULTILINE))
    for row in rows:
        assert len(row) == 4, row
        named = re.findall(r"`(test_\w+)`", row[3])
        assert named, f"no test: {row[0]}"
        assert set(named) <= known, f"{row[0]}: no such test: {set(named) - known}"
        for path in re.findall(r"`([\w/]+\.(?:py|toml))`", row[2]):
            assert (ROOT / path).is_file(), path
