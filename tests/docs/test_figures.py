"""Every measured figure that README and docs quote is recorded in ``benchmarks/figures.toml``, and equals the record.

How figures are recognized and recorded: ``benchmarks/figures.py``. Small pages made here show that the check can fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT

pytestmark = pytest.mark.thorough

_SPEC = importlib.util.spec_from_file_location("figures_of_pages", ROOT / "benchmarks" / "figures.py")
assert _SPEC is not None
assert _SPEC.loader is not None
figures = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = figures  # where dataclasses look for their module
_SPEC.loader.exec_module(figures)

RECORD = """
[[measured]]
name = "rates"
command = "python benchmarks/bench_rates.py --rounds 3"
machine = "2 cores"
date = 2026-11-20
commit = "0123abcd"
values = { rate = 30412, wait = 0.25, share = 41 }

[measured.quoted]
"README.md" = "takes {wait} s at {rate} records/s"
"docs/page.md" = ["{rate} records a second", "| copies | {share} |"]

[[no_measurement]]
why = "a default"
words = { "docs/page.md" = "the timeout of 60 s" }
"""
README = "It takes 0.25 s at 30,000 records/s on `7 s` of data.\n"
PAGE = """# Page

Delivers 30,400 records
a second, unless the timeout of 60 s is over.

| one way, %, in 20 November 2026 | |
|---|---|
| copies | 41 |

```text
read in 3 s
```
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree whose figures are all recorded."""
    files = {"README.md": README, "docs/page.md": PAGE, "benchmarks/bench_rates.py": "", "Makefile": "torture: venv\n"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def problems(root: Path, records: str = RECORD) -> list[str]:
    return figures.Checked(root, figures.load(records)).problems


def test_every_figure_of_the_pages_is_recorded() -> None:
    found = problems(ROOT, (ROOT / figures.RECORDS).read_text())
    assert found == [], figures.CURE


def test_a_tree_whose_figures_are_recorded_has_no_problems(tree: Path) -> None:
    assert problems(tree) == []


def test_a_new_figure_is_named_with_page_and_line(tree: Path) -> None:
    (tree / "docs/page.md").write_text(PAGE + "\nWithout it, it is three times as slow: 9.5 ms.\n")
    assert problems(tree) == [
        "docs/page.md:14: 'three times' has no record in benchmarks/figures.toml",
        "docs/page.md:14: '9.5 ms' has no record in benchmarks/figures.toml",
    ]


def test_a_bare_number_of_a_table_of_figures_is_one(tree: Path) -> None:
    (tree / "docs/page.md").write_text(PAGE.replace("| copies | 41 |", "| copies | 41 |\n| views 2 | 77 |"))
    assert problems(tree) == ["docs/page.md:9: '77' has no record in benchmarks/figures.toml"]


def test_a_changed_figure_is_named_with_both_values(tree: Path) -> None:
    (tree / "README.md").write_text(README.replace("30,000", "40,000"))
    assert problems(tree) == [
        "README.md:1: says 40,000, but rate of 'rates' in benchmarks/figures.toml is 30412"
    ]  # fmt: skip


def test_a_record_that_no_page_quotes_any_more_is_named(tree: Path) -> None:
    (tree / "README.md").write_text("Nothing.\n")
    (told,) = problems(tree)
    assert told.startswith(
        "benchmarks/figures.toml: rates: README.md has no longer 'takes {wait} s at {rate} records/s'"
    )
    unused = RECORD.replace("share = 41 }", "share = 41, other = 5 }")
    (tree / "README.md").write_text(README)
    assert problems(tree, unused) == ["benchmarks/figures.toml: rates.other is quoted by no page; delete it"]
    nowhere = RECORD.partition("[measured.quoted]")[0]
    assert "benchmarks/figures.toml: rates: no page quotes it; delete it" in problems(tree, nowhere)


def test_an_excuse_for_nothing_is_named(tree: Path) -> None:
    (tree / "docs/page.md").write_text(PAGE.replace("the timeout of 60 s", "the timeout"))
    (found,) = problems(tree)
    assert "no_measurement (a default): docs/page.md has 0 figures in 0 places with 'the timeout of 60 s'" in found
    (tree / "docs/page.md").write_text(PAGE + "\nAgain: the timeout of 60 s.\n")
    assert "has 2 figures in 2 places" in problems(tree)[0]


@pytest.mark.parametrize(
    "command", ["python benchmarks/bench_gone.py", "python tests/test_rates.py", "make nothing", "by hand"]
)
def test_an_unknown_command_is_named(tree: Path, command: str) -> None:
    (tree / "tests").mkdir()
    (tree / "tests/test_rates.py").write_text("")
    wrong = RECORD.replace("python benchmarks/bench_rates.py --rounds 3", command)
    assert problems(tree, wrong) == [
        f"benchmarks/figures.toml: rates: '{command}' names neither a script in benchmarks/ nor a target of make"
    ]
    assert problems(tree, RECORD.replace("python benchmarks/bench_rates.py --rounds 3", "make torture FAULTS=5")) == []


def test_the_commit_is_one_of_the_history_and_not_later_than_the_date(tree: Path) -> None:
    def git(*words: str) -> str:
        who = {f"GIT_{one}_{key}": value for one in ("AUTHOR", "COMMITTER")
               for key, value in (("NAME", "a"), ("EMAIL", "a@b"), ("DATE", "2026-11-20T12:00:00Z"))}  # fmt: skip
        ran = subprocess.run(
            ["git", "-C", str(tree), *words], check=True, capture_output=True, text=True, env=os.environ | who
        )
        return ran.stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    commit = git("rev-parse", "HEAD")
    assert problems(tree) == ["benchmarks/figures.toml: rates: 0123abcd is no commit of this history"]
    known = RECORD.replace("0123abcd", commit)
    assert problems(tree, known) == []
    assert problems(tree, known.replace("2026-11-20", "2026-11-19")) == [
        f"benchmarks/figures.toml: rates: {commit} is of 2026-11-20, later than 2026-11-19"
    ]


@pytest.mark.parametrize("key", ["command", "machine", "date", "commit"])
def test_a_record_says_command_machine_date_and_commit(tree: Path, key: str) -> None:
    lines = [line for line in RECORD.splitlines() if not line.startswith(f"{key} =")]
    with pytest.raises(figures.RecordError, match=f"rates lacks {key}"):
        problems(tree, "\n".join(lines))


def test_numbers_that_stand_in_a_file_are_taken_from_there(tree: Path) -> None:
    record = RECORD.replace(
        "values = { rate = 30412, wait = 0.25, share = 41 }",
        'file = "benchmarks/RATES.md"\nfound = ["| rate | {rate} |", "| others | {} | {wait} | {share} % |"]',
    )
    rates = "20 November 2026\n\n| rate | 30,412 |\n| others | a | 0.25 | 41 % |\n"
    (tree / "benchmarks/RATES.md").write_text(rates)
    assert problems(tree, record) == []
    (tree / "benchmarks/RATES.md").write_text(rates.replace("41 %", "43 %"))
    assert problems(tree, record) == ["docs/page.md:8: says 41, but share of 'rates' in benchmarks/figures.toml is 43"]
    (tree / "benchmarks/RATES.md").write_text(rates.replace("20 November", "21 November"))
    assert problems(tree, record) == [
        "benchmarks/figures.toml: rates: benchmarks/RATES.md does not have its date, 2026-11-20"
    ]
    (tree / "benchmarks/RATES.md").write_text(rates + ' "commit": "fedcba98",\n')
    assert problems(tree, record) == [
        "benchmarks/figures.toml: rates: benchmarks/RATES.md is of commit fedcba98, not 0123abcd"
    ]
    (tree / "benchmarks/RATES.md").unlink()
    assert "benchmarks/figures.toml: rates: benchmarks/RATES.md is no file in benchmarks/" in problems(tree, record)


def test_what_is_made_of_a_file_is_as_it_is_there_and_is_written_anew(tree: Path) -> None:
    record = RECORD + (
        '[[measured]]\nname = "faults"\ncommand = "make torture"\nmachine = "2 cores"\ndate = 2026-11-20\n'
        'commit = "0123abcd"\nfile = "benchmarks/FAULTS.md"\n'
    )
    faults = tree / "benchmarks/FAULTS.md"
    faults.write_text("# Faults\n\n2026-11-20.\n\n| | 20 % |\n|---|---|\n| a | 3 s |\n\nMore.\n")
    block = "<!-- from benchmarks/FAULTS.md -->\n| | 20 % |\n|---|---|\n| a | 3 s |\n<!-- end -->\n"
    (tree / "docs/page.md").write_text(PAGE + block)
    assert problems(tree, record) == []
    faults.write_text(faults.read_text().replace("3 s", "4 s"))
    (told,) = problems(tree, record)
    assert told.startswith("docs/page.md:13: differs from benchmarks/FAULTS.md; python benchmarks/figures.py --refresh")
    assert figures.refresh(tree, ["docs/*.md"]) == ["docs/page.md"]
    assert "| a | 4 s |" in (tree / "docs/page.md").read_text()
    assert problems(tree, record) == []
    assert problems(tree)[0].startswith("docs/page.md:13: from benchmarks/FAULTS.md, which is the file of no record")


def test_the_tables_of_the_peers_are_those_of_the_results() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "benchmarks/peers/README.md").read_text()
    blocks = list(figures._MADE.finditer(text))
    assert [(block["file"], block["name"]) for block in blocks] == [
        ("benchmarks/peers/results.json", "best"), ("benchmarks/peers/results.json", "by workers")
    ]  # fmt: skip
    for block in blocks:
        assert block["text"] == figures.made(ROOT, block["file"], block["name"]), (
            "python benchmarks/figures.py --refresh writes the tables anew"
        )


def test_the_report_on_the_peers_is_that_of_the_results() -> None:
    results = ROOT / "benchmarks/peers/results.json"
    assert figures.made(ROOT, str(results.relative_to(ROOT)), "report") == results.with_name("RESULTS.md").read_text()


def test_a_table_of_the_peers_says_who_is_faster_and_who_does_less(tmp_path: Path) -> None:
    def runs(rate: float) -> list[dict[str, object]]:
        return [{"samples": 100, "seconds": 100 / rate, "first_batch_s": 0.0, "first_samples": 1, "whole": True,
                 "wrong": "", "cpu_s": 1.0, "peak_bytes": 1, "num_batches": 50}]  # fmt: skip

    results = {
        "machine": "2026-11-27, 2 cores of a CPU, 24 GiB",
        "versions": {}, "sizes": {"images-raw": 100, "records": 100, "packs-8k": 100},
        "runs": {
            "images-raw disk 0 shardstream": runs(1000), "images-raw disk 0 litdata": runs(2000),
            "images-raw disk 2 litdata": runs(400), "images-raw disk 2 spdl": runs(500),
            "images-raw disk 0 shardstream_views": runs(3000),
            "records disk 0 shardstream": runs(1000), "records s3 0 shardstream": runs(600),
            "records s3 0 energon": runs(50), "records disk 2 mosaic": [*runs(10), {"failed": "killed"}],
            "packs-8k disk 0 shardstream": runs(4e6), "packs-8k disk 0 litdata": runs(2e6),
            "packs-8k disk 2 energon": runs(1e6), "packs-8k disk 0 shardstream_cut": runs(8e6),
            "packs-8k disk 0 limit": runs(9e6),
        },
    }  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    best = figures.made(tmp_path, "results.json", "best")
    assert "2 cores of a CPU, 27 November 2026" in best
    assert "fastest of two peers (packs: two, S3: one)" in best
    assert "| JPEGs of 68 KB, bytes | 3,000 (views) | 2,000, LitData's views | **1.5 x** | |" in best
    assert "| records of 430 bytes |" not in best, "no peer was measured from disk"
    assert ("million tokens/s | 4 | 2, LitData, which only concatenates | **2.0 x** | |") in best
    by_workers = figures.made(tmp_path, "results.json", "by workers")
    assert "| records of 430 bytes | 1,000 | | 600 (12 x Energon) | |" in by_workers
    assert "JPEGs of 68 KB, bytes: 0.50 x LitData's views" in by_workers
    with pytest.raises(ValueError, match="no text called 'worst'; there are best, by workers, report"):
        figures.made(tmp_path, "results.json", "worst")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("reads 30,000 records/s", ["30,000 records/s"]),
        ("reads 1.5 million tokens a second", ["1.5 million tokens a second"]),
        ("54 GB/s and 5 Gbit/s", ["54 GB/s", "5 Gbit/s"]),
        ("10,900 JPEGs of 68 KB a second", ["10,900 JPEGs of 68 KB a second"]),
        ("takes 0.25 s, or 3 µs, then 20ms", ["0.25 s", "3 µs", "20ms"]),
        ("in ten minutes; takes about a second", ["ten minutes", "takes about a second"]),
        ("98.7 to 99.2 % of it", ["98.7 to 99.2 %"]),
        ("13\nand 5 %", ["13 and 5 %"]),
        (
            "0.97 of the rate, a factor of 3, doubles the memory",
            ["0.97 of the rate", "factor of 3", "doubles the memory"],
        ),
        ("takes about 300 MiB, 5,000 tokens per CPU second", ["takes about 300 MiB", "5,000 tokens per CPU second"]),
        ("2.3 x SPDL, three times faster, twice as fast", ["2.3 x", "three times", "twice as fast"]),
        ("60 bytes a source, 1.1 bytes are read per byte", ["60 bytes a", "1.1 bytes are read per "]),
        ("some 100 KB; a peak of 300 MiB; 2 GiB of memory", ["some 100 KB", "peak of 300 MiB", "2 GiB of memory"]),
        ("| a | took |\n|---|---|\n| 7 | 12 ms |\n\n", ["12 ms"]),
        ("| a | ms |\n|---|---|\n| 7 | 12 and 1,300 |\n\n", ["12", "1,300"]),
        ("| a | width |\n|---|---|\n| 7 | 12 |\n\n", []),
        ("224 x 224 pixels of 68 KB in chunks of 4 MiB, at most 64", []),
        ("`timeout=60 s` and ``5 %`` [x](y.md#10-s) <!-- 3 s -->", []),
        ("```text\n3 s\n```\nstep 41,200, CRC32C, version 1.3, S3, x86, 8-bit, int64", []),
    ],
)
def test_what_looks_like_a_figure(text: str, found: list[str]) -> None:
    spans = figures.figures(text)
    assert [text[span.start : span.end].replace("\n", " ") for span in spans] == found


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [
        ("99", "99.2", True), ("99.2", "99.2", True), ("99.3", "99.2", False), ("100", "99.2", False),
        ("0.1", "0.13", True), ("0.2", "0.13", False), ("0.90", "0.9", True), ("30,000", "30412", True),
        ("31,000", "30412", False), ("30,412", "30412", True), ("4,000", "3998", True), ("4,000", "4400", False),
        ("50", "50", True), ("50", "54", False), ("10,900", "10944", True), ("11,000", "10944", True),
    ],
)  # fmt: skip
def test_a_page_may_round(text: str, value: str, right: bool) -> None:
    assert figures.says(text, Decimal(value)) is right


def test_each_rule_of_tuning_has_a_figure() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    assert [rule for _, rule, figure in rows if not figures.figures(figure)] == []
