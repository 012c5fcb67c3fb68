"""Every attack of the table in docs/security.md is made, and what happens is what the page says.

``python tests/docs/test_attack_table.py`` writes the table.
"""

from __future__ import annotations

import re

import pytest

from tests.support.code.folders import ROOT
from tests.support.contracts.attack_kinds import ATTACKS, Attack, Happened, happens
from tests.support.tiers import first_here

PAGE = ROOT / "docs" / "security.md"
CURE = "write the page anew: PYTHONPATH=. .venv/bin/python tests/docs/test_attack_table.py"
_WORDS = 120
_TITLE = "| by | attack | what happens | words |"


def row(one: Attack, found: Happened) -> str:
    words = re.sub(r"\s+", " ", found.words)
    words = (words if len(words) <= _WORDS else words[:_WORDS].rpartition(" ")[0] + " …").replace("|", "\\|")
    return f"| {one.by} | {one.what} | {found.word} | {f'`` {words} ``' if words else ''} |"


def rows_of_page() -> dict[tuple[str, str], str]:
    found = {}
    for line in PAGE.read_text().partition(_TITLE)[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and not cells[1].startswith("---"):
            found[cells[1], cells[2]] = line
    return found


@pytest.mark.parametrize("one", first_here(ATTACKS, 5), ids=lambda one: f"{one.by}: {one.what}"[:60])
def test_an_attack_does_what_the_page_says(one: Attack) -> None:
    assert rows_of_page().get((one.by, one.what)) == row(one, happens(one)), CURE


def test_the_page_has_a_row_for_every_attack() -> None:
    assert [*rows_of_page()] == [(one.by, one.what) for one in ATTACKS], CURE
    assert {one.by for one in ATTACKS} == {
        "other user", "mixture file", "index", "state", "columns", "media", "tokenizer", "store", "page",
    }  # fmt: skip


def main() -> None:
    made = [_TITLE, "|---|---|---|---|", *(row(one, happens(one)) for one in ATTACKS)]
    text, table = PAGE.read_text(), re.compile(rf"(?m)^{re.escape(_TITLE)}(?:\n\|.*)*")
    assert table.search(text), f"put this line where the table belongs: {_TITLE}"
    PAGE.write_text(table.sub(lambda _: "\n".join(made), text))


if __name__ == "__main__":
    main()
