"""Every way in which sets meet over every way in which they contradict each other: never in silence.

What the test finds must be what the page docs/meaning.md says; ``python tests/docs/test_meeting_table.py`` writes its
tables.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT
from tests.support.contracts.meeting_kinds import CANNOT, CONTRADICTIONS, UNION, Contradiction, Met, meetings, write

PAGE = ROOT / "docs" / "meaning.md"
pytestmark = pytest.mark.thorough

CURE = "write the page anew: PYTHONPATH=. .venv/bin/python tests/docs/test_meeting_table.py"
NAMES = tuple(meetings(Contradiction(part="")))
OF_CLASSES = tuple(name for name, one in CONTRADICTIONS.items() if one.part == "cls")


def word_of(met: Met, of: Contradiction, *, classes: str | None) -> str:
    """Return what a cell says.

    Raises:
        AssertionError: What is read is wrong, or a contradiction is not told.
    """
    if met.refused:
        assert repr(of.part) in met.told or of.part in met.told, met.told
        return "refused"
    assert met.right is not False, f"wrong, and {met.told or 'nothing'} is said"
    is_as_there = "field cls: numbers of" in met.told
    assert repr(of.part) in met.told or is_as_there, f"silent: {met.told or 'nothing'}"
    is_translated = met.right and (classes or of.width == "uint32" or is_as_there)
    return "translated" if is_translated else "reported"


def cell(sets: dict[str, Path], name: str, contradiction: str, classes: str | None = None) -> str:
    if (name, contradiction) in CANNOT:
        return "-"
    of = CONTRADICTIONS[contradiction]
    scratch = Path(tempfile.mkdtemp(dir=sets["scratch"]))
    for place in ("first", contradiction):
        shutil.copytree(sets[place], scratch / "sets" / ("first" if place == "first" else "other"))
    places = {"first": scratch / "sets/first", "other": scratch / "sets/other", "scratch": scratch}
    return word_of(meetings(of)[name](places, classes), of, classes=classes)


def made_sets(folder: Path) -> dict[str, Path]:
    found = {name: write(folder / name.replace(" ", "-"), "b", of, COUNT_FIRST) for name, of in CONTRADICTIONS.items()}
    (folder / "scratch").mkdir()
    return {**found, "first": write(folder / "first", "a", Contradiction(part="")), "scratch": folder / "scratch"}


COUNT_FIRST = 100


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_sets(tmp_path_factory.mktemp("meetings"))


def tables_of_page() -> dict[str, dict[str, list[str]]]:
    """Return the cells of the page's tables, by their title and row."""
    found: dict[str, dict[str, list[str]]] = {}
    title = ""
    for line in PAGE.read_text().splitlines():
        title = line.removeprefix("## ") if line.startswith("## ") else title
        cells = [one.strip() for one in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) > 2 and cells[0] in NAMES:
            found.setdefault(title, {})[cells[0]] = cells[1:]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_meeting_is_silent(sets: dict[str, Path], name: str) -> None:
    said = tables_of_page()["Where sets meet"].get(name)
    assert said == [cell(sets, name, one) for one in CONTRADICTIONS], CURE


@pytest.mark.parametrize("name", UNION)
def test_a_union_translates(sets: dict[str, Path], name: str) -> None:
    said = tables_of_page()['With `classes="union"`'].get(name)
    assert said == [cell(sets, name, one, "union") for one in OF_CLASSES], CURE


def test_the_page_has_a_row_for_every_meeting() -> None:
    tables = tables_of_page()
    assert tuple(tables["Where sets meet"]) == NAMES, CURE
    assert tuple(tables['With `classes="union"`']) == UNION, CURE


def table(sets: dict[str, Path], names: tuple[str, ...], columns: tuple[str, ...], classes: str | None) -> str:
    rows = [["meeting", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(cell(sets, name, one, classes) for one in columns)] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sets = made_sets(Path(folder))
        made = [table(sets, NAMES, tuple(CONTRADICTIONS), None), table(sets, UNION, OF_CLASSES, "union")]
    text = iter(made)
    PAGE.write_text(re.sub(r"(?m)^\| meeting \|.*(?:\n\|.*)*", lambda _: next(text), PAGE.read_text()))


if __name__ == "__main__":
    main()
