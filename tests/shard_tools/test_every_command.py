"""What all commands share, over all of them: exit codes, dry runs, silence, JSON, and what a second run does."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.columns.lift import lift_column
from shard_tools.change.columns.target import ColumnTarget
from shard_tools.change.columns.views import save
from shard_tools.change.fields.join import FromSet, join_field
from shard_tools.change.life.versions import tag
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from streaming.storage import Storage
from tests.support.tiers import first_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A command that works, on the places of the fixture ``places``.

    Attributes:
        words: What follows its name.
        changes: Whether it changes a set, or makes one.
        judges: Whether its exit code 1 is a finding, so that 3 says that it could not look.
        again: The exit code of the same command once more, which changes nothing.
        missing: What follows its name, where its set is not there; None: that is no failure of it.
        prints: What it prints with --json: one object, or one in each line.
    """

    words: str
    changes: bool = False
    judges: bool = False
    again: int = 0
    missing: str | None = "{gone}"
    prints: str = "object"


def change(words: str, missing: str | None = None, again: int = 0) -> Use:
    return Use(words=words, changes=True, missing=words.replace("{set}", "{gone}") if missing is None else missing,
               again=again)  # fmt: skip


def look(words: str, *, judges: bool = False, prints: str = "object") -> Use:
    return Use(words=words, judges=judges, missing=words.replace("{set}", "{gone}"), prints=prints)


USES = {
    "append": change("{days} {web}", "{days} {gone}"),
    "clean": look("{set}"),  # nothing is left over
    "column add": change("{set} late --lift json.n"),
    "column drop": change("{set} there", again=2),  # a name that is not there may be a typo
    "convert": change("{days} {new}", "{gone} {new}"),
    "convert --tokenizer": change("{days} {new} --tokenizer bytes --text-field text", "{gone} {new} --tokenizer bytes"),
    "copy": change("{set} {new}"),
    "copy elsewhere": change("{set} {new} --target-option read_timeout_s=5"),
    "dedupe": change("{set} --by txt"),
    "delete": change("{set} --keys {keys}", again=1),  # the set has none of the samples now
    "export": change("{set} {new} --to parquet"),
    "field add": change("{set} more.txt --from {other} --field txt"),
    "field drop": change("{set} late.txt", again=2),
    "index": change("{bare} --index {new}", "{gone}"),
    "index --columns": change("{bare} --index {new} --columns json.n", "{gone}"),
    "map": change("{set} {new} made_samples:unchanged --workers 1"),
    "repair": change("{bare}/000000.tar --to {new}", "{gone}/000000.tar --to {new}"),
    "reshard": change("{set} {new}"),
    "split": change("{set} {new}/a=50% {new}/b=50%"),
    "version prune": change("{lived} --drop v1", "{gone}", again=2),
    "version tag": change("{set} v7"),
    "view save": change('{set} some --where "n > 3"'),
    "bench": look("{set} --seconds 0.05 --bytes 100kB"),
    "cat": look("{set} 001"),
    "column list": look("{set}"),
    "diff": look("{set} {set}", judges=True),
    "doctor": Use(words="{set} --no-imports", judges=True, missing=None),  # which reports it
    "field list": look("{set}"),
    "info": look("{set}"),
    "ls": look("{set}", prints="lines"),
    "plan": look("{set} --batch-size 2"),
    "stats": look("{set}"),
    "trace merge": Use(words="{trace}", missing=None),  # it reads no set
    "verify": look("{set}", judges=True),
    "version diff": look("{set} 1"),
    "version list": look("{set}"),
    "version show": look("{set}"),
    "view list": look("{set}"),
    "view show": look("{set} seen"),
}
SERVES = "show"
"""The one command that reports nothing: it serves pages until it is stopped."""
CHANGING = [name for name, use in USES.items() if use.changes]
SLOW = {"map", "bench", "convert --tokenizer", "export", "stats", "doctor", "copy elsewhere", "index --columns"}


def spread(names: list[str], number: int) -> list[object]:
    """Some commands here, and the others where there is time."""
    return first_here(sorted(names, key=lambda name: (name in SLOW, [*USES].index(name))), number)


def run(*words: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="shard_tools", env=env)


def commands(group: click.Group, above: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, one in group.commands.items():
        found |= commands(one, f"{name} ") if isinstance(one, click.Group) else {above + name: one}
    return found


def command_of(name: str) -> str:
    """The command of a row, without what tells rows of one command apart."""
    return name.partition(" --")[0].removesuffix(" elsewhere")


def options_of(command: click.Command) -> set[str]:
    return {option for param in command.params for option in param.opts}


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, *, index: bool = True) -> None:
    """Seven samples in two shards; two of them are alike."""
    columns = {"n": "json.n"} if index else None
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=4, columns=columns, index=index) as writer:
        for n in range(7):
            writer.write({"__key__": f"{n:03d}", "json": {"n": n}, "txt": f"text {n % 6}"})


@pytest.fixture(scope="module")
def first_places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, storage = tmp_path_factory.mktemp("places"), Storage()
    write(base / "bare", index=False)
    for name in ("set", "other", "lived"):
        write(base / name)
    target = ColumnTarget([str(base / "set")], "there", storage=storage, index_url=None, overwrite=False)
    lift_column(target, "json.n")
    view: dict[str, Any] = {"where": "n > 2", "subset": None, "exclude": None}
    save([str(base / "set")], "seen", storage=storage, index_url=None, overwrite=False, **view)
    join_field(str(base / "set"), "late.txt", FromSet(url=str(base / "other"), field="txt", on="__key__"),
               storage=storage)  # fmt: skip
    tag(str(base / "lived"), "v1", storage=storage)
    (base / "days").mkdir()
    for day in range(2):
        rows = [json.dumps({"n": n, "text": f"text {n}"}) for n in range(10 * day, 10 * day + 5)]
        (base / "days" / f"{day}.jsonl").write_text("\n".join(rows))
    convert(str(base / "days/0.jsonl"), str(base / "web"), options=ConvertOptions(max_samples=2))
    (base / "keys").write_text("001\n")
    times = [{"asked_us": n * 10.0, "received_us": n * 10.0 + 1, "ended_us": n * 10.0 + 9} for n in range(4)]
    steps = [{"epoch": 0, "samples_seen": 8 * n} | one for n, one in enumerate(times, 1)]
    ours = {"format": 1, "rank": 0, "world_size": 1, "clock": "one", "is_cut_off": False, "steps": steps}
    (base / "trace").write_text(json.dumps({"shardstream": ours, "traceEvents": []}))
    return base


@pytest.fixture
def places(first_places: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first_places, tmp_path / "places"))


def words_of(name: str, places: Path, words: str | None = None) -> list[str]:
    """The command line of a row."""
    there = {one.name: one for one in places.iterdir()} | {one: places / one for one in ("new", "gone")}
    filled = [part.strip('"') for part in _parts((USES[name].words if words is None else words).format(**there))]
    return [*command_of(name).split(), *filled]


def _parts(text: str) -> list[str]:
    """Split a line at spaces that are not quoted."""
    outside = text.split('"')
    return [word for at, part in enumerate(outside) for word in ([part] if at % 2 else part.split())]


# ------------------------------------------------------------------------------------------------ what they have


def test_the_table_has_every_command() -> None:
    assert {*map(command_of, USES)} == commands(cli).keys() - {SERVES}


def test_all_commands_report_to_programs_and_to_nobody_and_those_that_change_a_set_have_a_dry_run() -> None:
    for name, command in commands(cli).items():
        options = options_of(command)
        if name != SERVES:
            assert {"--json", "--quiet", "--debug"} <= options, name
        assert ("--dry-run" in options) == (name in map(command_of, CHANGING) or name == "clean"), name


# -------------------------------------------------------------------------------------------------- what they do


@pytest.mark.parametrize("name", spread(CHANGING, 12))
def test_a_dry_run_says_what_it_would_do_and_writes_nothing(name: str, places: Path) -> None:
    words, before = words_of(name, places), files(places)
    dry = run(*words, "--dry-run")
    assert (dry.exit_code, dry.stderr) == (0, "")
    assert "would" in dry.stdout.lower()
    told = json.loads(run(*words, "--dry-run", "--json").stdout)
    assert told["dry_run"] is True
    assert {"dry_run", "work", "first"} == told.keys() or "seconds" in told or name == "version prune"
    silent = run(*words, "--dry-run", "--quiet")
    assert (silent.exit_code, silent.output) == (0, "")
    assert files(places) == before


@pytest.mark.parametrize("name", spread([*USES], 24))
def test_a_quiet_command_says_nothing(name: str, places: Path) -> None:
    words = words_of(name, places)
    ran = run(*words, "--quiet")
    assert ran.exit_code in ({0, 1} if name == "doctor" else {0}), ran.output  # which judges this machine, too
    assert ran.output == ""


@pytest.mark.parametrize("name", spread([*USES], 24))
def test_json_is_json_and_a_second_run_changes_nothing(name: str, places: Path) -> None:
    words, before = words_of(name, places), files(places)
    ran = run(*words, "--json")
    assert ran.exit_code in ({0, 1} if name == "doctor" else {0}), ran.output
    told = [json.loads(line) for line in ran.stdout.splitlines()] if USES[name].prints == "lines" else ran.stdout
    assert told
    assert isinstance(json.loads(told) if isinstance(told, str) else told[0], dict)
    after = files(places)
    assert (after != before) == USES[name].changes
    again = run(*words, "--json")
    assert again.exit_code in ({0, 1} if name == "doctor" else {USES[name].again}), again.output
    if USES[name].prints != "lines":
        json.loads(again.stdout)
    assert files(places) == after
    by_variable = f"SHARD_TOOLS_{command_of(name).replace(' ', '_').upper()}_AS_JSON"
    assert run(*words, env={by_variable: "1"}).stdout.lstrip().startswith("{")


@pytest.mark.parametrize("name", spread([*USES], 24))
def test_exit_codes(name: str, places: Path) -> None:
    """2 for a command that cannot be; 1 for a set that is not there, or 3 if 1 is a finding; each is one line."""
    use, words = USES[name], words_of(name, places)
    wrong = run(*words, "--no-such-option")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert json.loads(run(*words, "--no-such-option", "--json").stdout)["ok"] is False
    if use.missing is None:
        return
    before = files(places)
    gone = run(*words_of(name, places, use.missing))
    assert (gone.exit_code, gone.stdout) == (3 if use.judges else 1, ""), gone.output
    (line,) = gone.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert "Traceback" not in line
    told = json.loads(run(*words_of(name, places, use.missing), "--json").stdout)
    assert (told["ok"], told["error"]["type"].endswith("Error")) == (False, True)
    assert files(places) == before
