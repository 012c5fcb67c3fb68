"""Run the recipes of docs/recipes: stubs of other people's programs, with the patch of a page in its place.

A stub has the contract of a program's loader and loop, and no code of that program. What the patch replaces stands
between ``# <`` and ``# >``; the page has one block of Python for each such place, in order. So the same file runs as it
is, with a loader of its own, and with ours, by exactly what the page shows.

A recipe runs in legs: so many ranks, all of which end by SIGKILL when they have received a micro-batch and have not
trained on it. Stubs save after each step, so the next leg, on another number of ranks, begins with that step.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist

from tests.support.code.folders import PROGRAMS, ROOT
from tests.support.code.page_blocks import PYTHON, blocks

if TYPE_CHECKING:
    from tests.support.processes.forked import Forked

PAGES = ROOT / "docs/recipes"
BUCKET = "s3://bucket"
"""Where the pages have their sets."""
MOST_LINES = 8
DEADLINE_S = 240
_TOLD = "RECIPE"
_PLACE = re.compile(r"^( *)# <\n(.*?)^\1# >\n", re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------------------------------- in the program, on each rank


class Rank:
    """A rank of a stub: where it saves, and what it has received. Made once, before the loader.

    Attributes:
        folder: For checkpoints; the next leg finds it as this one left it.
        steps: Steps of the whole run.
        rank: This process's number.
        world_size: Number of processes. Joined by gloo, if there are several.
    """

    def __init__(self) -> None:
        self._told: dict[str, Any] = json.loads(os.environ[_TOLD])
        self.folder = Path(self._told["folder"])
        self.steps: int = self._told["steps"]
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        self._received: Counter[int] = Counter()

    def received(self, step: int, rows: Iterable[str], epoch: int | None = None) -> None:
        """Note the rows of a micro-batch before it is trained on, or die.

        Args:
            step: The step of the optimizer, by the program's own count.
            rows: Their names: keys, or ``names_of`` a tensor.
            epoch: The epoch, by the program's own count; None: it does not count epochs.
        """
        self._received[step] += 1
        line = {"step": step, "epoch": epoch, "rows": [*rows]}
        with open(f"{self._told['log']}-{self.rank}", "a") as log:
            log.write(json.dumps(line) + "\n")
        if self._told["kill"] == [step, self._received[step]]:
            self.reduce()  # until all ranks have come as far: one that dies takes the others with it
            os.kill(os.getpid(), signal.SIGKILL)

    def reduce(self) -> None:
        """Wait for the other ranks, as the gradients of a step do."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))


def names_of(rows: torch.Tensor) -> list[str]:
    """Return a name for the content of each row of a tensor [B, …]."""
    return [f"{crc32(row.contiguous().numpy().tobytes()):08x}" for row in rows]


# ------------------------------------------------------------------------------------------------------- in the test


@dataclass(frozen=True)
class Leg:
    """So many ranks.

    Attributes:
        ranks: How many.
        kill: The step and the micro-batch of it, from 1, with which all ranks die; None: to the end.
    """

    ranks: int
    kill: tuple[int, int] | None = None


@dataclass
class Step:
    """What all ranks received for a step.

    Attributes:
        epoch: The program's own count of epochs at its first micro-batch.
    """

    epoch: int | None
    rows: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Recipe:
    """A page of docs/recipes, and the stub of its program.

    Attributes:
        name: Of the page; the stub is NAME_stub.py.
        part: For a page of several programs: the heading; the stub is then NAME_PART_stub.py, in small letters.
        renamed: Pairs of texts of the page, such as sizes, and what stands for them in the test.
    """

    name: str
    part: str = ""
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def stub(self) -> Path:
        words = [self.name.replace("-", "_"), *self.part.lower().split(), "stub"]
        return PROGRAMS / f"{'_'.join(words)}.py"

    def patch(self) -> list[str]:
        """The blocks of the page, in order."""
        text = (PAGES / f"{self.name}.md").read_text()
        if self.part:
            text = text.split(f"\n## {self.part}\n")[1].split("\n## ")[0]
        return [one.code for one in blocks(text) if one.language in PYTHON and one.excuse is None]

    def num_lines(self) -> int:
        """The lines of the patch, without comments and blank lines."""
        lines = [line.strip() for part in self.patch() for line in part.splitlines()]
        return sum(1 for line in lines if line and not line.startswith("#"))

    def program(self, bucket: Path) -> str:
        """The stub with the patch in its places."""
        parts = iter(self.patch())

        def place(found: re.Match[str]) -> str:
            return indent(dedent(next(parts)), found[1])

        text = _PLACE.sub(place, self.stub.read_text())
        assert next(parts, None) is None, f"{self.stub.name} has fewer places than the page has blocks"
        for old, new in ((BUCKET, str(bucket)), *self.renamed):
            assert old in text, f"{self.name}: {old!r} is not in the patch"
            text = text.replace(old, new)
        return text

    def own(self) -> str:
        """The stub as it is."""
        return self.stub.read_text()


def run_job(
    forked: Forked, script: Path, ranks: int, errors: Path, environ: Mapping[str, str], within_s: float = DEADLINE_S
) -> list[int]:
    """Run ranks with the variables that torchrun sets, and a store for the rendezvous such as it has; their codes."""
    from tests.support.processes.forked import all_end  # noqa: PLC0415  programs need nothing of it

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = forked.start_ranks(script, world_size=ranks, output=errors, environ={**environ, **place})
    return all_end(started, within_s)


class Player:
    """Plays legs of a recipe.

    Args:
        forked: Forks the ranks.
        recipe: What runs.
        bucket: The folder that stands for the bucket of the page.
        steps: Steps of the whole run.
    """

    def __init__(self, forked: Forked, recipe: Recipe, bucket: Path, steps: int) -> None:
        self._forked, self._recipe, self._bucket, self._steps = forked, recipe, bucket, steps

    def play(self, legs: Sequence[Leg], folder: Path, *, own: bool = False) -> list[Step]:
        """Return the steps as they were trained, over all legs.

        Args:
            legs: Each continues where the one before was killed.
            folder: A folder that is not there yet.
            own: Run the stub as it is, without the patch.
        """
        return [step for steps in self.legs(legs, folder, own=own) for step in steps]

    def legs(self, legs: Sequence[Leg], folder: Path, *, own: bool = False) -> list[list[Step]]:
        """Return the steps of each leg that a checkpoint has kept; see ``play``."""
        folder.mkdir(parents=True)
        script, at, found = folder / "program.py", 0, []
        script.write_text(self._recipe.own() if own else self._recipe.program(self._bucket))
        for number, leg in enumerate(legs):
            steps = self._leg(leg, script, folder, number)
            end = self._steps if leg.kill is None else leg.kill[0]
            assert min(steps) == at, f"leg {number}: begins with step {min(steps)}, not with {at}"
            found.append([steps[step] for step in range(at, end)])
            at = end
        return found

    def _leg(self, leg: Leg, script: Path, folder: Path, number: int) -> dict[int, Step]:
        log, errors = folder / f"received-{number}", folder / f"errors-{number}"
        told = {"folder": str(folder), "log": str(log), "steps": self._steps, "kill": leg.kill}
        codes = run_job(self._forked, script, leg.ranks, errors, {_TOLD: json.dumps(told)})
        told_by = errors.read_text()[-6000:] if errors.exists() else ""
        assert leg.kill is not None or codes == [0] * leg.ranks, f"leg {number}: {codes}\n{told_by}"
        steps: dict[int, Step] = {}
        for rank in range(leg.ranks):
            lines = [*_lines(Path(f"{log}-{rank}"))]
            if rank == 0 and leg.kill is not None:
                last = lines[-1]["step"] if lines else None
                assert last == leg.kill[0], f"leg {number} was to end in step {leg.kill[0]}, not in {last}\n{told_by}"
            for line in lines:
                step = steps.setdefault(line["step"], Step(line["epoch"]))
                step.rows.update(line["rows"])
        return steps


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    if log.exists():
        with open(log) as lines:
            yield from (json.loads(line) for line in lines if line.endswith("\n"))


def check(
    player: Player, legs: Sequence[Leg], folder: Path, *, each_once: Callable[[list[Step]], None] | None = None
) -> None:
    """Compare a run in legs with one that was never interrupted, on one rank, row for row and epoch for epoch.

    Args:
        player: Plays both.
        legs: The legs of the first.
        folder: For both.
        each_once: Called with the steps of the second; default: no row comes twice in an epoch of the program's count.
    """
    whole = player.play([Leg(1)], folder / "whole")
    (each_once or no_row_twice)(whole)
    found = player.play(legs, folder / "legs")
    for number, (one, other) in enumerate(zip(found, whole, strict=True)):
        assert one.rows == other.rows, f"step {number}"
        assert one.epoch == other.epoch, f"step {number}: epoch {one.epoch}, not {other.epoch}"


def no_row_twice(steps: list[Step]) -> None:
    """Check that no row comes twice in an epoch, and that epochs have different orders."""
    epochs: dict[int | None, list[Counter[str]]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).append(step.rows)
    for epoch, rows in epochs.items():
        twice = [name for name, count in sum(rows, Counter()).items() if count > 1]
        assert not twice, f"epoch {epoch}: {len(twice)} rows come twice"
    assert len({str(sorted(rows[0].items())) for rows in epochs.values()}) == len(epochs)
