"""The life of a set: its Makefile runs from beginning to end, then does nothing, and its page says the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shard_tools.change.check.verify import verify
from shard_tools.change.life.versions import history
from streaming import StreamingDataset
from streaming.storage import Storage
from tests.support.code.folders import EXAMPLES, ROOT
from tests.support.code.page_blocks import blocks
from tests.support.processes.forked import Forked
from tests.support.servers.on_loopback import MiniS3Server, fresh_name

LIFE, PAGE = EXAMPLES / "life", ROOT / "docs/life-of-a-set.md"
OURS = re.compile(r"(shard_tools|python3 train\.py) .*")
Make = Callable[..., subprocess.CompletedProcess[str]]


def plain_make(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, even where the tests themselves run below a make."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", *words], cwd=folder, env=inherited | environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LIFE, tmp_path / "life"))


@pytest.fixture
def make(folder: Path, tmp_path: Path, forked: Forked) -> Make:
    """Run make in the folder, its interpreters forked; it has to end well."""
    tools = tmp_path / "tools.py"
    tools.write_text("from shard_tools.__main__ import main\nmain()\n")

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        programs = (f"PYTHON={forked.python}", f"TOOLS={forked.python} {tools}")
        ran = plain_make(folder, *programs, *words, SHARD_TOOLS_FIELD_ADD_WORKERS="1", **environ)
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        return ran

    return run


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def contents(found: dict[Path, tuple[int, bytes]]) -> dict[Path, bytes]:
    return {path: body for path, (_, body) in found.items()}


def keys(url: object, **options: object) -> list[str]:
    opened = StreamingDataset(str(url), decode=None, fields=("cls",), **options)  # type: ignore[arg-type]
    return [str(sample["__key__"]) for sample in opened]


def pictures(folder: Path) -> set[str]:
    """Keys of all pictures but those that came twice."""
    found = {str(path.relative_to(folder / "inbox").with_suffix("")) for path in folder.glob("inbox/*/*.png")}
    return {key for key in found if "again" not in key}


def test_the_page_has_the_commands_of_the_makefile(folder: Path) -> None:
    planned = plain_make(folder, "--dry-run", "all")
    assert planned.returncode == 0, planned.stderr
    wanted = [found[0] for line in planned.stdout.splitlines() if (found := OURS.search(line))]
    assert len(wanted) > 20
    shown = [
        line for block in blocks(PAGE.read_text()) if block.language == "bash" for line in block.code.splitlines()
    ]  # fmt: skip
    assert shown == wanted


def test_the_makefile_lives_through_the_page_and_does_nothing_twice(folder: Path, make: Make) -> None:
    make("all")
    left = pictures(folder) - {"dog/1-03"}
    assert len(left) == 51
    for url in ("store/photos", "backup/photos"):
        assert {*keys(folder / url)} == left
    assert sorted(keys(folder / "store/train") + keys(folder / "store/val")) == sorted(left)
    opened = StreamingDataset(str(folder / "store/photos"))
    assert opened.class_names == {"cls": ("cat", "dog", "bird")}
    assert all(str(sample["caption.txt"]).endswith(f"of class {sample['cls']}") for sample in opened)
    captions = {sample["__key__"]: sample["caption.txt"] for sample in opened}
    for part in ("train", "val"):
        joined = StreamingDataset(str(folder / "store" / part))
        assert all(sample["caption.txt"] == captions[sample["__key__"]] for sample in joined)
    told = {"stats.json": "samples", "deleted.json": "num_deleted"}
    found = {name: json.loads((folder / name).read_text())[key] for name, key in told.items()}
    assert found == {"stats.json": 40, "deleted.json": 1}
    assert {json.loads(line)["key"] for line in (folder / "pairs.jsonl").read_text().splitlines()} == {
        "cat/2-again-0",
        "cat/2-again-1",
    }
    run = json.loads((folder / "run.json").read_text())["keys"]
    assert len(run) == 40
    assert {*run} == {key for key in pictures(folder) if "/1-" in key}  # of v1, with what was deleted later

    before = files(folder)
    assert "Nothing to be done" in make("all").stdout
    assert files(folder) == before
    night = make("--silent", "nightly")
    left_out = ["late fields caption.txt are left out", "tagged versions v2 are left out"]
    assert (night.stdout, night.stderr.count("\n")) == ("", len(left_out))
    assert all(words in night.stderr for words in left_out)
    assert contents(files(folder)) == contents(before)  # the index of the copy is written again


def check_days(folder: Path, make: Make, url: str, backup: str, storage: Storage, **environ: str) -> None:
    options = {"storage_options": storage._given}
    make("all", f"SET={url}", f"BACKUP={backup}", "TRAIN=store/train", "VAL=store/val", **environ)
    make("days", "DAYS=6", f"SET={url}", f"BACKUP={backup}", **environ)
    left = pictures(folder) - {"dog/1-03"}
    assert len(left) == 51 + 6 * 12
    for place in (url, backup):
        assert {*keys(place, **options)} == left
        assert not verify([place], storage=storage).findings
    kept = history(url, storage=storage)
    assert kept.pending == {}
    assert [one.names for one in kept.versions] == [("v2",), (), (), (), ()]
    assert len(keys(url, version="v2", **options)) == 51
    captioned = StreamingDataset(url, fields=("caption.txt",), **options)  # type: ignore[arg-type]
    assert len({sample["caption.txt"] for sample in captioned}) == len(left)


@pytest.mark.thorough
def test_days_go_by(folder: Path, make: Make) -> None:
    check_days(folder, make, str(folder / "store/photos"), str(folder / "backup/photos"), Storage())


@pytest.mark.thorough
def test_days_go_by_on_s3(folder: Path, make: Make, mini_s3: MiniS3Server) -> None:
    bucket, elsewhere = (mini_s3.create_bucket(fresh_name()) for _ in range(2))
    environ = {"AWS_ACCESS_KEY_ID": mini_s3.key, "AWS_SECRET_ACCESS_KEY": mini_s3.secret}
    environ |= {"AWS_DEFAULT_REGION": mini_s3.region, "AWS_ENDPOINT_URL": mini_s3.url}
    check_days(folder, make, f"{bucket}/photos", f"{elsewhere}/photos", Storage(mini_s3.storage_options), **environ)


def test_real_programs_are_named(folder: Path) -> None:
    """What a reader types needs no variable: the Makefile starts `shard_tools` and `python3` by itself."""
    planned = plain_make(folder, "--dry-run", "days", "DAYS=3")
    assert "python3 camera.py --next 3" in planned.stdout
