"""The programs of docs/trainers.md, as they stand there, killed and resumed on other numbers of ranks.

Each program runs in legs, one table for all: so many ranks, until rank 0 has received batch number ``kill_at`` and dies
by SIGKILL, before that batch is trained on. A checkpoint is saved after each step, so the next leg begins with the same
batch. What the ranks of all legs received, put together step by step, has to be what one process alone receives.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks
from tests.support.processes.forked import Forked
from tests.support.programs.recipes import run_job
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.sets.packed_sets import write as write_documents

pytestmark = [pytest.mark.thorough, pytest.mark.distributed, pytest.mark.timeout(1500)]  # up to four jobs a test

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs/trainers.md"
EPOCHS, STEPS, GLOBAL_BATCH = 3, 18, 12
DEADLINE_S = 300
TORCHRUN = "from torch.distributed.run import main; main()"

FORKS = """
import functools, os, sys
import torch.multiprocessing as mp
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
sys.executable = os.environ["STAND_IN"]
"""
"""Put before a program that starts ranks itself; that new interpreters do, too, shows ``make matrix``."""

Launcher = Literal["fork", "torchrun", "itself", "itself, by forking"]


@dataclass(frozen=True)
class Leg:
    """Ranks; the number of the batch that kills rank 0, from 1 (None: to the end); who starts them.

    All processes are forked from one that has imported the trainers, but those that ``torchrun`` or the program itself
    start, which begin as new interpreters.
    """

    ranks: int
    kill_at: int | None
    launcher: Launcher = "fork"


def legs(first: Launcher) -> tuple[Leg, ...]:
    """Killed in the middle of epoch 1; resumed, and killed before a batch was trained on; resumed from the same state,
    and killed at the border of epochs; resumed from a state of a resumed run.
    """  # fmt: skip
    return Leg(2, 9, first), Leg(3, 9), Leg(1, 13), Leg(2, None)


@dataclass(frozen=True)
class Program:
    """A section of the page."""

    heading: str
    legs: tuple[Leg, ...]
    replicas: int = 1
    quiet: dict[str, Any] = field(default_factory=dict)


NO_LOGS = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": True,
}
NO_REPORTS = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
PROGRAMS = (
    Program("torchrun", legs("fork")),
    Program("torch.multiprocessing.spawn", (Leg(2, 13, "itself, by forking"), Leg(1, None, "itself, by forking"))),
    Program("Lightning", legs("itself, by forking"), quiet=NO_LOGS),
    Program("transformers.Trainer", legs("fork"), quiet=NO_REPORTS),
    Program("Accelerate", legs("fork")),
    Program("Stateful and torch.distributed.checkpoint", legs("fork")),
    Program("Programs that fetch the next batch", legs("fork")),
    Program("FSDP2 and tensor parallel", (Leg(4, 9), Leg(2, 13), Leg(4, None)), replicas=2),
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """Six global batches an epoch."""
    return write_set(tmp_path_factory.mktemp("trainers") / "set", (30, 18, 24))


@pytest.fixture(scope="module")
def expected(samples: SampleSet) -> list[Counter[str]]:
    """The global batches of three epochs, as one process alone reads them."""
    with DataLoader(samples.open(), global_batch_size=GLOBAL_BATCH) as loader:
        found = []
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            found.append([Counter(batch["__key__"]) for batch in loader])
    for epoch in found:
        assert sum(epoch, Counter()) == Counter(samples.keys)
    assert all(found[a] != found[b] for a, b in ((0, 1), (1, 2), (0, 2)))
    return [batch for epoch in found for batch in epoch]


TRAINERS = ("accelerate", "lightning", "torch.distributed.checkpoint", "transformers.trainer", "streaming.loader")
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "true",  # as `accelerate launch --cpu` has it
    "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT))),
}


class Ranks:
    """Starts the ranks of a leg and waits for their end."""

    def __init__(self, forked: Forked) -> None:
        self._base = forked
        self._forked: Forked | None = None

    def fork(self, script: Path, ranks: int, errors: Path, environ: dict[str, str]) -> int:
        """With the variables that torchrun sets, and a store for the rendezvous such as it has."""
        codes = run_job(self.origin, script, ranks, errors, environ, DEADLINE_S + 60)
        return codes[0] or max(map(abs, codes))

    def start(self, program: str | Path, *arguments: str, errors: Path, environ: dict[str, str]) -> int:
        """As a program that starts its ranks; whatever it leaves behind when it was killed is killed, too."""
        process = self.origin.start(program, *arguments, output=errors, environ=environ, leads=True)
        return process.wait_for_all(DEADLINE_S + 60)

    @property
    def origin(self) -> Forked:
        """The process that has imported the trainers."""
        if self._forked is None:
            self._forked = Forked(*TRAINERS, environ=ENVIRON, base=self._base)
        return self._forked

    def close(self) -> None:
        if self._forked is not None:
            self._forked.close()


@pytest.fixture(scope="module")
def running(forked: Forked) -> Iterator[Ranks]:
    ranks = Ranks(forked)
    yield ranks
    ranks.close()


def code_of(heading: str, level: str = "##") -> str:
    section = PAGE.read_text().split(f"\n{level} {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    (block,) = (one for one in blocks(section) if one.language == "python")
    return block.code


def play_leg(
    running: Ranks, program: Program, leg: Leg, at: int, number: int, url: str, folder: Path, mixed: bool = False
) -> list[list[list[str]]]:
    """Run one leg; the batches that each rank received, beginning with batch ``at``."""
    script, errors, log = folder / "program.py", folder / f"errors-{number}", folder / f"received-{number}"
    code = code_of(program.heading)
    if mixed:
        assert "DataLoader(StreamingDataset(URL), global_batch_size=12)" in code
        code = MIX + code.replace("(StreamingDataset(URL), ", f"(mix, epoch_size={6 * GLOBAL_BATCH}, ")
    if leg.launcher == "itself, by forking":
        code = FORKS + code
    script.write_text(f"from trainer_names import *\n\n{code}")
    told = {
        "program": program.heading, "url": url, "folder": str(folder / "checkpoint"), "log": str(log), "epochs": EPOCHS,
        "rendezvous": str(folder / f"rendezvous-{number}"), "ranks": leg.ranks, "quiet": program.quiet,
        "kill_at": None if leg.kill_at is None else leg.kill_at - at, "deadline_s": DEADLINE_S,
    }  # fmt: skip
    environ = {"TRAINER_TEST": json.dumps(told), "STAND_IN": running.origin.python}
    if leg.launcher == "fork":
        status = running.fork(script, leg.ranks, errors, environ)
    elif leg.launcher.startswith("itself"):
        status = running.start(script, errors=errors, environ=environ)
    else:
        words = ["--standalone", "--nproc-per-node", str(leg.ranks), str(script)]
        status = running.start(TORCHRUN, *words, errors=errors, environ=environ)
    said = errors.read_text()[-6000:]
    assert (status == 0) == (leg.kill_at is None), said
    received = []
    for rank in range(leg.ranks):  # others may have received nothing when rank 0 dies at its first batch
        path = folder / f"{log.name}-{rank}"
        received.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
    if leg.kill_at is not None:
        assert len(received[0]) == leg.kill_at - at, said
    return received


# What torchrun adds to its variables and store shows test_distributed.py: two interpreters of three seconds.
BY_TORCHRUN = pytest.param(Program("torchrun", legs("torchrun")), marks=pytest.mark.matrix, id="by-torchrun")
# What an interpreter that spawn starts adds to a forked process shows test_portable.py: seven seconds, most of imports.
BY_SPAWN = pytest.param(
    Program("torch.multiprocessing.spawn", (Leg(2, 13, "itself"), Leg(1, None, "itself"))),
    marks=pytest.mark.matrix,
    id="by-spawn",
)
# What a new interpreter adds shows test_distributed.py under torchrun: nine seconds, most of imports.
BY_LIGHTNING = pytest.param(
    Program("Lightning", legs("itself"), quiet=NO_LOGS), marks=pytest.mark.matrix, id="by-Lightning"
)
IN_ALL_RUNS = [pytest.param(one, id=one.heading.replace(" ", "-")) for one in PROGRAMS]


@pytest.mark.parametrize("program", [*IN_ALL_RUNS, BY_TORCHRUN, BY_SPAWN, BY_LIGHTNING])
def test_killed_and_resumed(
    running: Ranks, samples: SampleSet, expected: list[Counter[str]], tmp_path: Path, program: Program
) -> None:
    at = 0
    for number, leg in enumerate(program.legs):
        received = play_leg(running, program, leg, at, number, samples.url, tmp_path)
        end = STEPS if leg.kill_at is None else leg.kill_at - 1
        shares = received[:: program.replicas]
        for replica in range(program.replicas):
            copies = received[replica :: program.replicas]
            assert [one[: end - at] for one in copies] == [one[: end - at] for one in shares]
        for step in range(at, end):
            assert all(len(one) > step - at for one in shares), f"leg {number}: a rank lacks batch {step}"
            rows = Counter(key for one in shares for key in one[step - at])
            assert rows == expected[step], f"leg {number} ({leg.ranks} ranks): batch {step}"
        if leg.kill_at is None:
            assert {len(one) for one in received} == {STEPS - at}
        at = end
    assert at == STEPS


MIX = """
from streaming import Mixture, Schedule, StreamingDataset
sources = {"all": StreamingDataset(URL), "some": StreamingDataset(URL, subset=(10, 40))}
ramp = Schedule.linear({"all": 1, "some": 0}, {"all": 1, "some": 2}, over=150, segments=8)
mix = Mixture(sources, weights=ramp)
"""


def test_a_scheduled_mixture_killed_and_resumed(running: Ranks, samples: SampleSet, tmp_path: Path) -> None:
    """With a filter, whose share grows by a schedule, on two, three and one ranks: as one process alone reads it."""
    names: dict[str, Any] = {"URL": samples.url}
    exec(MIX, names)
    with DataLoader(names["mix"], global_batch_size=GLOBAL_BATCH, epoch_size=6 * GLOBAL_BATCH) as loader:
        expected = [Counter(batch["__key__"]) for _ in range(EPOCHS) for batch in loader]
        assert loader.seen()["some"]["samples"] > 0
    at, program = 0, Program("torchrun", ())
    for number, leg in enumerate((Leg(2, 9), Leg(3, 13), Leg(1, None))):
        received = play_leg(running, program, leg, at, number, samples.url, tmp_path, mixed=True)
        end = STEPS if leg.kill_at is None else leg.kill_at - 1
        for step in range(at, end):
            rows = Counter(key for one in received for key in one[step - at])
            assert rows == expected[step], f"leg {number} ({leg.ranks} ranks): batch {step}"
        at = end


@pytest.mark.parametrize(
    ("script", "quiet"), [("glue_accelerate", {}), ("glue_transformers", NO_REPORTS), ("glue_lightning", NO_LOGS)]
)
def test_glue_script_of_each_trainer_passes(
    running: Ranks, samples: SampleSet, tmp_path: Path, script: str, quiet: dict[str, Any]
) -> None:
    told = {
        "program": script, "url": samples.url, "folder": str(tmp_path / "checkpoint"), "log": str(tmp_path / "log"),
        "epochs": EPOCHS, "rendezvous": "", "ranks": 1, "quiet": quiet, "kill_at": None, "deadline_s": DEADLINE_S,
    }  # fmt: skip
    environ = {"TRAINER_TEST": json.dumps(told)}
    status = running.fork(HERE / f"{script}.py", 1, tmp_path / "errors", environ)
    assert status == 0, (tmp_path / "errors").read_text()[-6000:]


def test_counts_under_accelerate_on_two_ranks(running: Ranks, tmp_path: Path) -> None:
    told = {
        "program": "counts", "url": "", "folder": str(tmp_path / "checkpoint"), "log": str(tmp_path / "log"),
        "epochs": 1, "rendezvous": "", "ranks": 2, "quiet": NO_REPORTS, "kill_at": None, "deadline_s": DEADLINE_S,
    }  # fmt: skip
    environ = {"TRAINER_TEST": json.dumps(told)}
    status = running.fork(HERE / "counts_accelerate.py", 2, tmp_path / "errors", environ)
    assert status == 0, (tmp_path / "errors").read_text()[-6000:]


def test_packs_under_the_trainer_of_transformers_on_two_ranks(running: Ranks, tmp_path: Path) -> None:
    write_documents(tmp_path / "checkpoint-documents", num_docs=400)
    told = {
        "program": "packs", "url": "", "folder": str(tmp_path / "checkpoint"), "log": str(tmp_path / "log"),
        "epochs": 1, "rendezvous": "", "ranks": 2, "quiet": NO_REPORTS, "kill_at": None, "deadline_s": DEADLINE_S,
    }  # fmt: skip
    environ = {"TRAINER_TEST": json.dumps(told)}
    status = running.fork(HERE / "packs_transformers.py", 2, tmp_path / "errors", environ)
    assert status == 0, (tmp_path / "errors").read_text()[-6000:]


# --- validation: on two ranks, the metric of one process; of the last batch, a single sample, one rank has nothing ---

NUM_SAMPLES = 37  # three batches of twelve, and one sample
HEADER = "from trainer_names import *\n"
BY_TORCHRUN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
report(validate(DistributedDataParallel(model), valid))
"""
BY_SPAWN = """
def train(rank, world_size):
    dist.init_process_group("gloo", init_method=f"file://{RENDEZVOUS}", rank=rank, world_size=world_size)
    report(validate(model, valid))

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(RANKS,), nprocs=RANKS)
"""
BY_ACCELERATE = """
from accelerate import Accelerator
report(validate(Accelerator().prepare(model), valid))
"""
BY_FSDP = """
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
fully_shard(model, mesh=mesh["dp_shard"])
valid = DataLoader(StreamingDataset(URL, shuffle=False), global_batch_size=12, last_batch="pad", device_mesh=mesh)
report(validate(model, valid))
"""
OWN_LOOP, LIGHTNING, TRANSFORMERS = "In a loop of your own", "In Lightning", "In transformers.Trainer"
RECIPES: dict[str, tuple[str, str, str, bool, dict[str, Any]]] = {  # heading, before, after, starts ranks itself, quiet
    "torchrun": (OWN_LOOP, "", BY_TORCHRUN, False, {}),
    "spawn": (OWN_LOOP, "", BY_SPAWN, True, {}),
    "Accelerate": (OWN_LOOP, "", BY_ACCELERATE, False, {}),
    "FSDP2": (OWN_LOOP, "", BY_FSDP, False, {}),
    "Lightning": (LIGHTNING, "Module = type(module)\n", 'report(metrics["valid_loss"])\n', True, NO_LOGS),
    "transformers": (TRANSFORMERS, "", 'report(metrics["eval_accuracy"])\n', False, NO_REPORTS),
}


@pytest.fixture(scope="module")
def valid_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("validation")
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=16) as writer:
        for number, vector in enumerate(vectors()):
            out = io.BytesIO()
            np.save(out, vector)
            writer.write({"__key__": f"{number:03d}", "vec.npy": out.getvalue(), "cls": str(label(number)).encode()})
    return f"{folder}/"


def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(NUM_SAMPLES, 4)).astype(np.float32)


def label(number: int) -> int:
    return number % 3 % 2


def metric_of(name: str) -> float:
    """The metric without a loader and without ranks, of the model that trainer_names makes."""
    torch.manual_seed(0)
    logits = torch.nn.Linear(4, 2)(torch.from_numpy(vectors())).detach()
    if name != "transformers":
        return float(logits.square().mean())
    labels = torch.tensor([label(number) for number in range(NUM_SAMPLES)])
    return float((logits.argmax(-1) == labels).float().mean())


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_find_the_metric_of_one_process(running: Ranks, valid_url: str, tmp_path: Path, name: str) -> None:
    heading, before, after, by_itself, quiet = RECIPES[name]
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        script, errors = folder / "program.py", folder / "errors"
        script.write_text((FORKS if by_itself else "") + HEADER + before + code_of(heading, "###") + after)
        told = {
            "program": name, "url": valid_url, "folder": str(folder / "checkpoint"), "log": str(folder / "log"),
            "epochs": 1, "rendezvous": str(folder / "rendezvous"), "ranks": ranks, "quiet": quiet, "kill_at": None,
            "deadline_s": DEADLINE_S,
        }  # fmt: skip
        environ = {"TRAINER_TEST": json.dumps(told), "STAND_IN": running.origin.python}
        if by_itself:
            status = running.start(script, errors=errors, environ=environ)
        else:
            status = running.fork(script, ranks, errors, environ)
        assert status == 0, errors.read_text()[-6000:]
        found[ranks] = [json.loads((folder / f"log-metric-{rank}").read_text()) for rank in range(ranks)]
    assert found[1] == pytest.approx([metric_of(name)], rel=1e-5)
    assert found[2] == pytest.approx(found[1] * 2, rel=1e-5)
