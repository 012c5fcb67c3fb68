"""The field's storage benchmark: ours beside the loaders that it ships with.

Installs the engine of MLPerf Storage (DLIO, from PyPI) into an environment of its own below ``--data``, makes the data
of three workloads once, and lets contestants take turns, ``--rounds`` times, from disk and from an S3 server on
loopback, each turn in a process of its own. A turn finds the shortest step at which the emulated accelerator computes
for 90 % of the time. Results are kept after each turn: a run that was stopped goes on where it was; ``--fresh`` begins
anew. ``--publish`` writes RESULTS.md and results.json here.

    python benchmarks/mlperf_storage/run.py --rounds 3 --publish  # on an idle machine
    python benchmarks/mlperf_storage/run.py --rounds 1 --scale 0.1 --goal 0.3 --seconds 0.3 --confirmations 1  # smoke
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_BENCHMARKS = os.path.dirname(_HERE)
REPOSITORY = os.path.dirname(_BENCHMARKS)
sys.path[1:1] = [REPOSITORY, _BENCHMARKS, os.path.join(_BENCHMARKS, "peers")]

import common
from contestants import CONTESTANTS
from environments import PeerError, installed, last_line
from s3_server import serving
from table import Case, document, shown
from workloads import WORKLOADS, Workload, make

ENGINE = "dlio-benchmark==2.0.0"
WHERE = ("disk", "s3")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-mlperf"),
                        help="folder of the environment (4 GB), data (14 GB) and results")  # fmt: skip
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of: %(default)s")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="of: %(default)s")
    parser.add_argument("--where", default=",".join(WHERE), help="of: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="more can be added to earlier results")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the batches of an epoch")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a trial of one step time")
    parser.add_argument("--goal", type=float, default=0.9, help="part of the time that the accelerator computes")
    parser.add_argument("--confirmations", type=int, default=3, help="trials of the step time that was found")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds that a turn may take")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--retry", action="store_true", help="measure again what has failed")
    parser.add_argument("--prepare", action="store_true", help="only make the environment and the data")
    parser.add_argument("--publish", action="store_true", help="also write RESULTS.md and results.json here")
    args = parser.parse_args()
    for name, known in (("workloads", WORKLOADS), ("contestants", CONTESTANTS), ("where", WHERE)):
        chosen = getattr(args, name).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} unknown; known: {', '.join(known)}")
        setattr(args, name, [one for one in known if one in chosen])
    return args


def environment(folder: str) -> str:
    """The interpreter of the engine's environment.

    Raises:
        PeerError: It does not install.
    """
    # The engine asks for packages with CUDA that it does not need here.
    return installed(folder, os.path.join(_HERE, "requirements.txt"), bare=ENGINE)


def cases(args: argparse.Namespace) -> list[Case]:
    """In the order of a round: contestants of a workload next to each other, so that they see the same machine."""
    return [
        Case(workload=work, where=where, contestant=name)
        for work in args.workloads
        for where in args.where
        for name in args.contestants
        if where in CONTESTANTS[name].where and (CONTESTANTS[name].format == "npy" or WORKLOADS[work].per_file)
    ]


class Bench:
    """The environment, the data, and a turn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.root = os.path.join(args.data, f"data-{args.scale:g}")
        os.makedirs(self.root, exist_ok=True)
        self._python = environment(os.path.join(args.data, "engine"))

    def data(self, work: Workload) -> str:
        return common.made_once(self.root, work.name, lambda target: make(target, work, self._args.scale))

    def turn(self, case: Case, store: dict[str, str] | None) -> dict[str, Any]:
        """What a turn found; what went wrong under ``failed``."""
        work, one = WORKLOADS[case.workload], CONTESTANTS[case.contestant]
        data = self.data(work)
        common.read_all(os.path.join(data, "shards" if one.plug_in == "Shardstream" else one.format))
        load = os.getloadavg()[0]
        scratch = tempfile.mkdtemp(prefix="mlperf-")
        output = os.path.join(scratch, "result.json")
        asked = {
            "workload": work.name, "contestant": one.name, "batch_size": work.batch_size, "data": data,
            "sample_bytes": work.sample_bytes, "num_samples": work.num_samples(self._args.scale),
            "per_file": {"npy": 1, "tfrecord": max(1, work.per_file)}, "scratch": scratch, "output": output,
            "seconds": self._args.seconds, "goal": self._args.goal, "confirmations": self._args.confirmations,
            **self._urls(data, store),
        }  # fmt: skip
        command = [sys.executable, "-S", "-E", os.path.join(_BENCHMARKS, "peers", "measure.py"), "--result", output,
                   "--timeout", str(self._args.timeout), self._python, os.path.join(_HERE, "turn.py")]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        more = {"PYTHONPATH": REPOSITORY, "MLPERF_STORAGE_TURN": json.dumps(asked), "TF_CPP_MIN_LOG_LEVEL": "3"}
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch, env={**kept, **more})
        try:
            return {**self._found(ran, output), "load": load}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @staticmethod
    def _found(ran: subprocess.CompletedProcess[str], output: str) -> dict[str, Any]:
        if ran.returncode:
            return {"failed": last_line(ran.stderr), "errors": ran.stderr}
        whole = json.loads(ran.stdout)
        if not os.path.exists(output):
            return {"failed": whole["killed"] or last_line(whole["errors"]), "errors": whole["errors"]}
        with open(output) as file:
            return {**json.load(file), "peak_bytes": whole["peak_without_files_bytes"]}

    def _urls(self, data: str, store: dict[str, str] | None) -> dict[str, Any]:
        """Where ours and Amazon's connector find the data."""
        if store is None:
            return {"shards": f"{data}/shards/", "files": "", "storage_options": None, "store": None}
        base = f"s3://{store['bucket']}/{os.path.relpath(data, self.root)}"
        options = {"endpoint_url": store["endpoint"], **{name: store[name] for name in ("key", "secret", "region")}}
        return {"shards": f"{base}/shards/", "files": f"{base}/npy/train", "storage_options": options, "store": store}


class Results:
    """``results.json``: written whole after every turn."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        self.content: dict[str, Any] = {"runs": {}}
        if path.exists() and not fresh:
            self.content = json.loads(path.read_text())

    def runs(self, case: Case) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.content["runs"].setdefault(case.key, [])
        return runs

    def wants(self, case: Case, round_number: int) -> bool:
        """Not measured in this round yet, and not failed in an earlier one."""
        runs = self.runs(case)
        return len(runs) <= round_number and not any("failed" in run for run in runs)

    def forget_failed(self) -> None:
        for key, runs in self.content["runs"].items():
            self.content["runs"][key] = [run for run in runs if "failed" not in run]

    def save(self) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        unfinished.replace(self._path)


def main() -> None:
    args = arguments()
    try:
        bench = Bench(args)
    except PeerError as failed:
        sys.exit(f"the storage benchmark's engine {failed}")
    for name in args.workloads:
        bench.data(WORKLOADS[name])
    if args.prepare:
        return
    results = Results(Path(args.data, f"results-{args.scale:g}-{args.goal:g}.json"), fresh=args.fresh)
    if args.retry:
        results.forget_failed()
    if any(results.wants(case, args.rounds - 1) for case in cases(args)):
        results.content |= {"machine": common.machine(), "commit": common.commit()}
        results.content |= {"engine": ENGINE, "scale": args.scale, "goal": args.goal}
    with serving(bench.root) as store:
        for round_number in range(args.rounds):
            for case in cases(args):
                if results.wants(case, round_number):
                    run = bench.turn(case, store if case.where == "s3" else None)
                    results.runs(case).append(run)
                    results.save()
                    print(f"{round_number + 1}  {shown(case, run)}", flush=True)
    text = document(results.content)
    print(text)
    if args.publish:
        Path(_HERE, "RESULTS.md").write_text(text)
        Path(_HERE, "results.json").write_text(json.dumps(results.content, indent=1) + "\n")


if __name__ == "__main__":
    main()
