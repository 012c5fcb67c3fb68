"""The table of docs/reliability.md: every fault names tests, and they exist where it says."""

from __future__ import annotations

import re

from tests.support.code.folders import ROOT


def test_every_fault_has_its_tests() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text.split("## Faults, results, evidence")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    faults = [row for row in rows if not row[0].strip().startswith("**")]
    assert len(faults) > 35
    for row in faults:
        assert len(row) == 3, row
        named = re.findall(r"`tests/(\w+/test_\w+\.py)::(test_\w+)`", row[2])
        assert named, f"no test: {row[0]}"
        assert len(named) == row[2].count("`") // 2, f"not of the form tests/file.py::test: {row[2]}"
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^ *def {test}\(", source, re.MULTILINE), f"{row[0]}: no {test} in {file}"
