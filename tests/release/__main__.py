"""Check a release: ``python -m tests.release``. Builds wheel and sdist, and uses them in clean environments.

``--quick`` uses the wheel with every Python that is found, as CI does. Without it, also: type checkers on a user's
program, every extra, the oldest dependencies. Nothing is uploaded, and nothing outside of ``build/release`` is changed.
Exit code 1: something failed. What could not be tried for want of a package is told, not failed; on the oldest Python,
for which all packages are there, it fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.release import contents
from tests.release.environments import Environment, FailedError, Interpreter, interpreters

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WORK = ROOT / "build" / "release"
PAGE = ROOT / "docs" / "versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = re.search(r'^VERSION = "(.*)"', (ROOT / "streaming/types.py").read_text(), re.MULTILINE)[1]  # type: ignore[index]
NOT_OLDEST = ("torch", "ray", "gcsfs", "adlfs", "datasets", "matplotlib")
"""Torch has no old build without CUDA; the others are large, or bring versions of the rest that are not the oldest."""
NEEDED_BY_TESTS = (
    "hypothesis",
    "lmdb",
    "moto",
    "pandas",
    "psutil",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
    "scikit-learn",
)
TESTS_OF_OLDEST = (
    "plan",
    *(f"batches/test_{name}.py" for name in ("collate", "decode", "decode_images", "fields", "jagged", "libraries")),
    *(f"catalog/test_{name}.py" for name in ("index", "interop", "tables", "views", "where")),
    *(f"storage/test_{name}.py" for name in ("storage", "storage_fsspec", "storage_urls")),
    "metrics/test_exports.py",
    *(f"shard_tools/test_{name}.py" for name in ("convert", "show", "tokenize")),
)
"""Those that use each package that has a lower bound, few enough for five minutes."""
NOT_WITH_OLDEST = {
    "batches/test_decode_images.py::test_a_text_bomb_in_a_png_is_refused": "it is refused in other words of Pillow",
    "catalog/test_interop.py::test_hugging_face_datasets_reads_our_shards": "datasets is not installed",
    **dict.fromkeys(
        (
            "shard_tools/test_show.py::test_sets_of_any_state",
            "shard_tools/test_show.py::test_tokens_are_text_where_their_tokenizer_is_at_hand",
            "shard_tools/test_show.py::test_one_file_holds_the_pages_and_asks_for_nothing",
            "shard_tools/test_show.py::test_what_cannot_be_shown_is_refused",
            "shard_tools/test_show.py::test_a_state_is_looked_at_before_anything_is_served",
            "shard_tools/test_tokenize.py::test_wrong_usage_is_told",
            "shard_tools/test_tokenize.py::test_no_such_column",
        ),
        "it asks click's runner for stderr alone, which it has from 8.2 on",
    ),
}
"""Tests that cannot pass there, and why that is no fault of what is tested."""
NO_PACKAGE = re.compile(
    r"No matching distribution|Failed building wheel|Could not build wheels|metadata-generation-failed"
)


@dataclass
class Report:
    """What was tried: rows of the table. On the Python ``must``, all of it is possible."""

    must: str = ""
    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, python: str, torch: str, what: str, result: str, began: float) -> None:
        """Add a row, and print it with the time since it began."""
        self.rows.append({"python": python, "torch": torch, "what": what, "result": result})
        print(f"-- {python} | torch {torch} | {what} | {result} | {time.monotonic() - began:.0f} s", flush=True)

    def attempt(self, python: str, torch: str, what: str, step: Callable[[], str]) -> bool:
        """Take a step that says what ran, and add what became of it; return whether it worked."""
        began = time.monotonic()
        try:
            result = step()
        except FailedError as error:
            self.add(python, torch, what, self.judged(python, error), began)
            return False
        self.add(python, torch, what, result, began)
        return True

    def judged(self, python: str, error: FailedError) -> str:
        """Return what to say of an error: want of a package is none, but where all packages are known to be there."""
        is_missing = NO_PACKAGE.search(str(error)) and python != self.must
        return f"{'not possible' if is_missing else 'FAILED'}: {error}"

    def prepare(
        self, one: Interpreter, what: str, install: Callable[[], Environment]
    ) -> tuple[Environment, str] | None:
        """Make an environment; return it with the version of torch there, or "". None: a row says why there is none."""
        began = time.monotonic()
        try:
            environment = install()
        except FailedError as error:
            self.add(one.shown, "none", what, self.judged(one.shown, error), began)
            return None
        torch = environment.versions().get("torch", "")
        self.add(one.shown, torch or "none", what, "installed", began)
        return environment, torch

    @property
    def failures(self) -> list[dict[str, str]]:
        """The rows that failed."""
        return [row for row in self.rows if row["result"].startswith("FAILED")]

    @property
    def summary(self) -> str:
        """How many rows passed, were not possible, and failed."""
        impossible = [row for row in self.rows if row["result"].startswith("not possible")]
        passed = len(self.rows) - len(impossible) - len(self.failures)
        return f"{passed} passed, {len(impossible)} not possible, {len(self.failures)} failed"

    def table(self) -> str:
        """As Markdown, with the last line of what did not work."""
        lines = ["| Python | torch | what ran | result |", "|---|---|---|---|"]
        for row in self.rows:
            said = row["result"].strip().splitlines()
            short = said[0] if len(said) == 1 else f"{said[0].partition(':')[0]}: {said[-1]}"
            lines.append(f"| {row['python']} | {row['torch']} | {row['what']} | {short.replace('|', '/')} |")
        return "\n".join(lines)


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel; return both."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode:
        raise FailedError(ran.stdout + ran.stderr)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def check_files(wheel: Path, sdist: Path, tools: Interpreter) -> str:
    """Look into both, and let twine judge them."""
    problems = contents.wheel_problems(wheel, ROOT, VERSION) + contents.sdist_problems(sdist, ROOT, VERSION)
    if problems:
        raise FailedError("\n".join(problems))
    twine = Environment(tools, WORK / "twine")
    twine.pip("install", "twine")
    twine.run("check", "--strict", str(wheel), str(sdist), script="twine")
    return f"contents as expected, twine {twine.versions()['twine']} check --strict passed"


def needed(without: Iterable[str] = ()) -> list[str]:
    """Return the requirements of the project, without some."""
    return [line for line in PROJECT["dependencies"] if named(line) not in without]


def named(line: str) -> str:
    """Return the name in a requirement."""
    return re.split(r"[\[<>=!~ ;]", line)[0].lower()


def extras_of_all() -> list[str]:
    """Return the extras that ``all`` names."""
    (line,) = PROJECT["optional-dependencies"]["all"]
    return str(line).partition("[")[2].rstrip("]").split(",")


def cpu_torch(environment: Environment) -> str | None:
    """Return the requirement of a torch without CUDA that pip finds for this Python; None: there is none."""
    pinned = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    wanted = pinned[0] if pinned else "torch"
    try:
        told = environment.pip("install", "--dry-run", "--no-deps", "--report", "-", wanted)
    except FailedError:
        return None
    (found,) = json.loads(told)["install"]
    return wanted if re.search(r"(\+|%2B)cpu|macosx|aarch64", found["download_info"]["url"]) else None


def installed(one: Interpreter, wheel: Path, folder: Path) -> Environment:
    """Install the wheel in a clean environment, with a torch without CUDA where there is one."""
    environment = Environment(one, folder)
    file = environment.taken(wheel)
    torch = one.torch or cpu_torch(environment)
    if torch:
        environment.pip("install", file, *([] if one.torch else [torch]))
        return environment
    environment.pip("install", *needed(without=("torch",)))
    environment.pip("install", "--no-deps", file)
    return environment


def smoke(one: Interpreter, wheel: Path, report: Report) -> None:
    """Use the wheel with one interpreter: import, every verb, training where there is a torch."""
    folder = work_of(one) / f"wheel-{one.name}"
    if ready := report.prepare(one, "install the wheel", lambda: installed(one, wheel, folder)):
        environment, torch = ready
        report.attempt(one.shown, torch or "none", "every verb", lambda: try_verbs(environment, torch))
        if torch:
            report.attempt(one.shown, torch, "write, train, stop, go on", lambda: try_training(environment))


def work_of(one: Interpreter) -> Path:
    """Return the folder of environments where this interpreter sees it."""
    return WORK if one.root is None else one.root / "tmp" / "release"


def try_verbs(environment: Environment, torch: str) -> str:
    """Run ``verbs.py`` and the console script."""
    told = environment.run("--version", script="shard_tools")
    if told.strip() != f"shard_tools, version {VERSION}":
        raise FailedError(told)
    found = json.loads(_program(environment, "verbs.py").splitlines()[-1])
    kept = [name for name, text in found["steps"].items() if not text]
    other = {name: text for name, text in found["steps"].items() if text and not text.startswith("not run: no ")}
    if not torch and "needs torch" in other.get("bench", ""):
        del other["bench"]
    if other or (found["torch"] and not torch):
        raise FailedError(json.dumps(other))
    skipped = [text.removeprefix("not run: no ") for text in found["steps"].values() if text.startswith("not run")]
    less = f", {len(skipped)} need {', '.join(sorted({*skipped}))}" if skipped else ""
    return f"{len(kept)} of {len(found['steps'])} steps{less}{'' if torch else ', bench needs torch'}"


def try_training(environment: Environment) -> str:
    """Run ``train.py``."""
    found = json.loads(_program(environment, "train.py").splitlines()[-1])
    if found != {"batch": "torch.int64", "samples": 200}:
        raise FailedError(str(found))
    return "each of 200 samples once"


def _program(environment: Environment, name: str) -> str:
    folder = environment.folder / f"data-{name}"
    folder.mkdir()
    return environment.run(environment.taken(HERE / name), environment.inside(folder))


def check_types(environment: Environment) -> str:
    """Check ``user_program.py`` against what is installed: what is marked is found, and nothing else."""
    program = environment.folder / "user_program.py"
    shutil.copy(HERE / program.name, program)
    python = environment.python
    marked = {number for number, line in enumerate(program.read_text().splitlines(), 1) if "# wrong" in line}
    said = []
    for checker, look in (("mypy", mypy_found), ("pyright", pyright_found)):
        errors, shown = look(program, python)
        if {line for line, _ in errors} != marked:
            told = "\n".join(f"line {line}: {text}" for line, text in sorted(errors))
            raise FailedError(f"{checker} found, where lines {sorted(marked)} are wrong:\n{told}")
        vague = [
            text
            for text in shown
            if re.search(r"\b(Unknown|Any)\b", text.replace("dict[str, Any]", "").replace("DataLoader[Any]", ""))
        ]
        if vague or len(shown) < 10:
            raise FailedError(f"{checker} shows: {vague or shown}")
        said.append(f"{checker}: {len(marked)} mistakes found, nothing else, {len(shown)} names shown with their types")
    return "; ".join(said)


def check_program(one: Interpreter, wheel: Path, report: Report) -> None:
    """Check a user's program against the installed wheel."""
    if ready := report.prepare(one, "install for types", lambda: installed(one, wheel, WORK / "types")):
        what = "a user's program under mypy --strict and pyright's strict mode"
        report.attempt(one.shown, ready[1] or "none", what, lambda: check_types(ready[0]))


def mypy_found(program: Path, python: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Return what mypy --strict finds, by line, and the types that it shows."""
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--no-color-output"]
    command += ["--config-file", "", "--cache-dir", str(WORK / "mypy"), program.name]
    told = subprocess.run(command, check=False, capture_output=True, text=True, cwd=program.parent).stdout
    found = [(int(line), kind, text) for line, kind, text in re.findall(r":(\d+): (error|note): (.*)", told)]
    shown = [text for _, kind, text in found if kind == "note" and text.startswith("Revealed type is")]
    return [(line, text) for line, kind, text in found if kind == "error"], shown


def pyright_found(program: Path, python: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Return what pyright finds in its strict mode, by line, and the types that it shows."""
    config = program.parent / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "strict", "include": [program.name]}))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        str(python),
        "--outputjson",
        "-p",
        str(config),
    ]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=program.parent)
    try:
        found = json.loads(ran.stdout)["generalDiagnostics"]
    except ValueError:
        raise FailedError(f"pyright: {ran.stdout[-500:]}{ran.stderr[-500:]}") from None
    lines = [(one["range"]["start"]["line"] + 1, one["severity"], one["message"]) for one in found]
    shown = [text for _, severity, text in lines if severity == "information"]
    return [(line, text) for line, severity, text in lines if severity == "error"], shown


def with_all(one: Interpreter, wheel: Path) -> Environment:
    """Install ``[all]`` in the versions that are pinned, so that every package is one that tests have seen."""
    environment = Environment(one, WORK / "all")
    pins = environment.taken(ROOT / "constraints.txt")
    torch = filter(None, [cpu_torch(environment)])
    environment.pip("install", "-c", pins, f"{environment.taken(wheel)}[all]", *torch)
    environment.run("-m", "pip", "check")
    return environment


def use_extras(environment: Environment) -> str:
    """Use each extra."""
    found = json.loads(_program(environment, "extras.py").splitlines()[-1])
    if found["failed"]:
        raise FailedError(json.dumps(found["failed"]))
    return f"used: {', '.join(found['used'])}"


def oldest_requirements() -> list[str]:
    """Return the requirements whose oldest versions are tried."""
    extras = PROJECT["optional-dependencies"]
    lines = needed(without=NOT_OLDEST)
    lines += [line for name in extras_of_all() for line in extras[name] if named(line) not in NOT_OLDEST]
    return list(dict.fromkeys(lines))


def with_oldest(one: Interpreter, wheel: Path) -> Environment:
    """Install the oldest versions that pyproject.toml claims, as uv finds them."""
    tools = Environment(one, WORK / "uv")
    tools.pip("install", "uv")
    environment = Environment(one, WORK / "oldest")
    torch = cpu_torch(environment)
    if torch is None:
        raise FailedError("No matching distribution: no torch without CUDA")
    environment.pip("install", torch)
    install = ("pip", "install", "--quiet", "--python", str(environment.python))
    tools.run(*install, "--upgrade", "--resolution", "lowest-direct", *oldest_requirements(), script="uv")
    tools.run(*install, "--no-deps", str(wheel), script="uv")
    return environment


def quick_tests(environment: Environment) -> str:
    """Run the quick tests with what is installed, which what the tests themselves need leaves as it is."""
    names = sorted({named(line) for line in oldest_requirements()})
    versions = environment.versions()
    held = [f"{name}=={versions[name]}" for name in names]
    pins = environment.folder / "held.txt"
    pins.write_text("\n".join(held))
    wanted = [line for line in PROJECT["optional-dependencies"]["dev"] if named(line) in NEEDED_BY_TESTS]
    environment.pip("install", "-c", str(pins), *wanted)
    options = ["-m", "pytest", "-n", "3", "--dist", "loadfile", "-m", "not thorough and not distributed"]
    options += ["-p", "no:cacheprovider", "-W", "default", *(f"tests/{name}" for name in TESTS_OF_OLDEST)]
    options += [f"--deselect=tests/{name}" for name in NOT_WITH_OLDEST]
    with (WORK / "oldest.log").open("w") as log:
        ran = subprocess.run([environment.python, *options], check=False, stdout=log, stderr=log, cwd=ROOT)
    last = (WORK / "oldest.log").read_text().strip().splitlines()[-1].strip("= ")
    if ran.returncode:
        raise FailedError(f"see {WORK / 'oldest.log'}\n{last}")
    return f"{last}; {', '.join(held).replace('==', ' ')}"


def check_oldest(one: Interpreter, wheel: Path, report: Report) -> None:
    """Take every verb, training, and the quick tests with the oldest versions."""
    if ready := report.prepare(one, "install oldest versions", lambda: with_oldest(one, wheel)):
        environment, torch = ready
        report.attempt(one.shown, torch, "oldest: every verb", lambda: try_verbs(environment, torch))
        report.attempt(one.shown, torch, "oldest: write, train, stop, go on", lambda: try_training(environment))
        report.attempt(one.shown, torch, "oldest: quick tests", lambda: quick_tests(environment))


def publish(report: Report) -> None:
    """Write the table into its page, with the day and the system."""
    page = PAGE.read_text()
    today = datetime.now(tz=UTC).date()  # not in words, after which benchmarks/figures.py would ask for records
    when = f"{today.isoformat()}, {platform.system()} on {platform.machine()}: {report.summary}."
    head, _, rest = page.partition("<!-- matrix -->\n")
    _, end, tail = rest.partition("<!-- end of matrix -->")
    PAGE.write_text(f"{head}<!-- matrix -->\n\n{when}\n\n{report.table()}\n\n{end}{tail}")


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the wheel with every Python")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="an interpreter more")
    parser.add_argument(
        "--root", action="append", default=[], metavar="FOLDER", type=Path, help="root of another system"
    )
    parser.add_argument("--only", choices=["smoke", "types", "all", "oldest"], help="one part")
    parser.add_argument("--publish", action="store_true", help="write the table into docs/versions.md")
    options = parser.parse_args()
    if options.publish and (options.quick or options.only):
        parser.error("--publish writes the whole table, so it needs a whole run: without --quick and --only")
    if options.quick and options.only not in (None, "smoke"):
        parser.error(f"--quick leaves out --only {options.only}")
    return options


def main() -> int:
    """Check, and return the exit code."""
    options = parsed()
    found = interpreters(options.python, [root.resolve() for root in options.root])
    first = next(one for one in found if one.root is None)
    report = Report(must=first.shown)
    WORK.mkdir(parents=True, exist_ok=True)
    wheel, sdist = build(WORK / "dist")

    def asked(part: str) -> bool:
        return options.only in (None, part) and (part == "smoke" or not options.quick)

    if asked("smoke"):
        report.attempt(first.shown, "none", "files of wheel and sdist", lambda: check_files(wheel, sdist, first))
        for one in found:
            smoke(one, wheel, report)
    if asked("types"):
        check_program(first, wheel, report)
    if asked("all") and (ready := report.prepare(first, "install [all], pinned", lambda: with_all(first, wheel))):
        report.attempt(first.shown, ready[1], "[all]: each extra used", lambda: use_extras(ready[0]))
    if asked("oldest"):
        check_oldest(first, wheel, report)
    (WORK / "matrix.json").write_text(json.dumps(report.rows, indent=2))
    print(report.table())
    if options.publish:
        publish(report)
    print(report.summary)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
