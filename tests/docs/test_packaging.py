"""What is installed: the version has one source, the extras are complete, the licence comes along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import streaming
from hatch_build import described
from tests.release import __main__ as release
from tests.release import contents
from tests.release.environments import FailedError
from tests.support.code.folders import ROOT

pytestmark = pytest.mark.thorough

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "streaming/types.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", streaming.__version__)
    told = subprocess.run(
        [sys.executable, "-m", "shard_tools", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == f"shard_tools, version {streaming.__version__}\n"


def test_extra_all_names_every_other_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (every,) = extras["all"]
    named = set(re.fullmatch(r"shardstream\[(.*)\]", every)[1].split(","))
    assert named == extras.keys() - {"all", "dev", "docs"}  # the last builds the site of this repository


def test_the_licence_is_the_one_that_is_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this tree."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_wheel_and_sdist_hold_what_they_should_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert contents.wheel_problems(wheel, ROOT, streaming.__version__) == []
    assert contents.sdist_problems(sdist, ROOT, streaming.__version__) == []
    names = zipfile.ZipFile(wheel).namelist()
    for suffix in (".html", ".css", ".js", "py.typed", "LICENSE"):  # that the comparison compares something
        assert [name for name in names if name.endswith(suffix)], suffix


def test_a_wheel_that_lacks_a_file_or_holds_another_is_noticed(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel = tmp_path / built[0].name
    with zipfile.ZipFile(built[0]) as good, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith("/METADATA"):
                content += b"\n[more](docs/guide.md) `[code](x.md)`\n"
            if name != "infra/py.typed":
                bad.writestr(name, content)
        bad.writestr("tests/test_x.py", "")
    assert contents.wheel_problems(wheel, ROOT, streaming.__version__) == [
        "missing: infra/py.typed",
        "not expected: tests/test_x.py",
        "no marker of types in infra",
        "a link of the description leads nowhere on PyPI: docs/guide.md",
    ]


@pytest.mark.parametrize(
    ("page", "without", "under"),
    [
        ("a [guide](docs/a.md#b)", "a guide", "a [guide](https://x/t/docs/a.md#b)"),
        ("[top](#top)", "top", "[top](https://x/t/README.md#top)"),
        ("see ![p](docs/p.png).", "see .", "see ![p](https://x/raw/docs/p.png)."),
        ("[`f[0]`](a.md), `[b](c.md)`", "`f[0]`, `[b](c.md)`", "[`f[0]`](https://x/t/a.md), `[b](c.md)`"),
        ("[site](https://y/z)", "[site](https://y/z)", "[site](https://y/z)"),
        (
            "```python\nx[0](a)\n```\n[b](c)",
            "```python\nx[0](a)\n```\nb",
            "```python\nx[0](a)\n```\n[b](https://x/t/c)",
        ),
    ],
)
def test_links_of_the_description(page: str, without: str, under: str) -> None:
    assert described(page, pages="", pictures="") == without
    assert described(page, pages="https://x/t/", pictures="https://x/raw") == under


def test_each_extra_has_a_use_that_a_release_tries() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    code = (ROOT / "tests" / "release" / "extras.py").read_text()
    (table,) = [node for node in ast.parse(code).body if isinstance(node, ast.AnnAssign)]
    assert isinstance(table.value, ast.Dict)
    assert {ast.literal_eval(key) for key in table.value.keys if key} == extras.keys() - {"all", "dev", "docs"}


def test_hooks_before_a_commit_run_what_make_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin").replace(" .\n", "\n")
    made = re.findall(r"^\t(\.venv/bin/(?:ruff|mypy)\b.*)$", makefile, re.MULTILINE)
    assert entries == made[:3]


def test_a_citation_names_this_version() -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (told["version"], told["license"]) == (streaming.__version__, PROJECT["project"]["license"])


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"| Python | {named[0]} to {named[-1]} |" in page
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_a_release_that_lacks_a_package_passes_only_where_packages_may_be_missing() -> None:
    def missing() -> str:
        raise FailedError("pip: exit 1: No matching distribution found for pyarrow")

    def broken() -> str:
        raise FailedError("exit 1: ImportError")

    report = release.Report(must="3.11.7")
    for python, step in (("3.11.7", missing), ("3.15.0", missing), ("3.15.0", broken), ("3.15.0", lambda: "1 | 2")):
        report.attempt(python, "none", "verbs", step)
    told = [row["result"].partition(":")[0] for row in report.rows]
    assert told == ["FAILED", "not possible", "FAILED", "1 | 2"]
    assert report.summary == "1 passed, 1 not possible, 2 failed"


def test_the_table_that_is_published_is_what_ran_and_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "versions.md"
    page.write_text("before\n<!-- matrix -->\n\nold\n\n<!-- end of matrix -->\nafter\n")
    monkeypatch.setattr(release, "PAGE", page)
    report = release.Report()
    report.add("3.11.7", "2.13.0", "verbs", "FAILED: exit 1: first\nlast | line", 0)
    release.publish(report)
    lines = page.read_text().splitlines()
    assert lines[:2] + lines[-2:] == ["before", "<!-- matrix -->", "<!-- end of matrix -->", "after"]
    assert [line for line in lines if line.startswith("| 3")] == ["| 3.11.7 | 2.13.0 | verbs | FAILED: last / line |"]
    assert "old" not in lines
    assert "0 passed, 0 not possible, 1 failed." in page.read_text()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--quick", "--publish"], "--publish writes the whole table"),
        (["--only", "oldest", "--publish"], "--publish writes the whole table"),
        (["--quick", "--only", "all"], "--quick leaves out --only all"),
        (["--python", "/nowhere/python3"], "no Python of 3.11 or newer with venv and ensurepip: /nowhere/python3"),
    ],
)
def test_a_release_check_refuses_what_it_would_not_do(options: list[str], why: str) -> None:
    command = [sys.executable, "-m", "tests.release", *options]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode
    assert why in told.stderr


def test_what_a_release_leaves_out_with_oldest_versions_is_there() -> None:
    for name in release.NOT_WITH_OLDEST:
        file, _, test = name.partition("::")
        assert any(file == one or file.startswith(f"{one}/") for one in release.TESTS_OF_OLDEST), name
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()
    assert all((ROOT / "tests" / one).exists() for one in release.TESTS_OF_OLDEST)
