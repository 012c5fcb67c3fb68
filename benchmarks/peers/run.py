"""Ours beside its peers on the same data: ``python benchmarks/peers/run.py [--quick] [--publish]``.

Makes a virtual environment for each peer, the data, and each peer's own copy of it, all below ``--data`` and only once.
Then every contestant delivers every set, from disk and from an S3 server, with every number of workers, each time in
a process of its own, contestants in turns, ``--rounds`` times. Results are kept after each measurement: a run that was
stopped goes on where it was; ``--fresh`` begins anew.

``--quick`` takes small data, one round, and checks every sample that any contestant delivers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(HERE))
sys.path[1:1] = [REPOSITORY, os.path.dirname(HERE)]

import common
import figures
import quoted
import source
from environments import OURS, PEERS, Peer, PeerError, interpreter, last_line, versions
from report import Case, flaw, rate
from s3_server import serving
from sets import SETS, Set

S3_SETS = ("images-raw", "records", "tokens", "large")
S3_WORKERS = (0, 2)
PACK_WORKERS = (0, 2)
MAKE_TIMEOUT_S = 1800.0
TITLES = {peer.name: peer.title for peer in PEERS.values()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-peers"),
                        help="folder of environments, data and results")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small data, one round, every sample checked")
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated, of: %(default)s")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, of: %(default)s")
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--where", default="disk,s3", help=f"s3: sets {', '.join(S3_SETS)}, workers 0 and 2")
    parser.add_argument(
        "--rounds", type=int, help="default: 2, or 1 with --quick; more can be added to earlier results"
    )
    parser.add_argument("--seconds", type=float, help="cut a pass short after so long; default: 3, or 60 with --quick")
    parser.add_argument("--timeout", type=float, default=40.0, help="seconds that a contestant may go beyond that")
    parser.add_argument("--paused-steps", type=int, default=20,
                        help="steps that sleep, for unhidden milliseconds; 0: none")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--prepare", action="store_true", help="only make the environments and the data")
    parser.add_argument("--retry", action="store_true", help="measure again what has failed or was wrong")
    parser.add_argument("--publish", action="store_true",
                        help="also write RESULTS.md and results.json here, docs/peers.svg, README's table")  # fmt: skip
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 2)
    args.seconds = args.seconds or (60.0 if args.quick else 3.0)
    for name, known in (("sets", SETS), ("peers", PEERS), ("where", ("disk", "s3"))):
        chosen = getattr(args, name).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} unknown; known: {', '.join(known)}")
        setattr(args, name, [one for one in known if one in chosen])
    args.workers = sorted(int(count) for count in args.workers.split(","))
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    """In the order of a round: contestants next to each other, so that they see the same machine."""
    return [
        Case(set=name, where=where, workers=workers, peer=peer)
        for where in args.where
        for name in args.sets
        for workers in args.workers
        for peer in args.peers
        if takes_part(PEERS[peer], SETS[name])
        and (workers in PACK_WORKERS or not SETS[name].length)
        and (where == "disk" or (name in S3_SETS and workers in S3_WORKERS))
    ]


def takes_part(peer: Peer, one: Set) -> bool:
    """In packs those who have packing of their own, each way of theirs; in other sets each program once.

    Ours twice where it gives views too.
    """
    if peer.sets:
        return one.name in peer.sets
    return peer.packing is not None if one.length else not peer.only_packs


class Results:
    """``results.json``: written whole after every measurement."""

    def __init__(self, path: str, *, fresh: bool) -> None:
        self._path = path
        self.content: dict[str, Any] = {"versions": {}, "absent": {}, "sizes": {}, "runs": {}}
        if os.path.exists(path) and not fresh:
            with open(path) as file:
                self.content = json.load(file)

    def runs(self, case: Case) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.content["runs"].setdefault(case.key, [])
        return runs

    def wants(self, case: Case, round_number: int) -> bool:
        """Not measured in this round yet, and nothing wrong in an earlier one."""
        runs = self.runs(case)
        return len(runs) <= round_number and not any(flaw(run) for run in runs)

    def forget_flawed(self) -> None:
        self.content["runs"] = {
            key: runs for key, runs in self.content["runs"].items() if not any(flaw(run) for run in runs)
        }

    def save(self) -> None:
        unfinished = f"{self._path}.unfinished"
        with open(unfinished, "w") as file:
            json.dump(self.content, file, indent=1)
        os.replace(unfinished, self._path)


class Bench:
    """Everything that a contestant needs, and its measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._size = "quick" if args.quick else "full"
        self.root = os.path.join(args.data, "data", self._size)
        self._pythons: dict[str, str] = {}
        os.makedirs(self.root, exist_ok=True)

    def install(self, name: str) -> dict[str, str]:
        """The environment of this name; the versions in it."""
        self._pythons[name] = interpreter(name, os.path.join(self._args.data, "venvs"))
        return versions(name, self._pythons[name])

    def source(self, one: Set) -> str:
        """The shards of a set, made if they are not there."""
        return common.made_once(
            os.path.join(self.root, "source"), one.data,
            lambda folder: source.make(folder, one, quick=self._args.quick),
        )  # fmt: skip

    def data(self, peer: Peer, one: Set) -> str:
        """What the peer reads, made from the shards if it is not there.

        Raises:
            PeerError: The peer could not make it.
        """
        shards = self.source(one)
        if not peer.own_data:
            return shards

        def make(folder: str) -> None:
            command = [*self._contestant(peer.name, "make", one, shards, folder)]
            try:  # in a temporary folder of its own: some empty folders of theirs in the usual one
                with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
                    environment = {**self._environment(peer.name), "TMPDIR": scratch}
                    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False,
                                          env=environment)  # fmt: skip
            except subprocess.TimeoutExpired:
                raise PeerError(f"its data was not made within {MAKE_TIMEOUT_S:.0f} s") from None
            if done.returncode:
                raise PeerError(f"its data could not be made: {last_line(done.stderr)}")

        name = one.name if peer.by_length else one.data
        return common.made_once(os.path.join(self.root, peer.home), name, make)

    def measure(self, case: Case, store: dict[str, str] | None) -> dict[str, Any]:
        """One pass of one contestant in a process of its own, then steps that sleep, in another."""
        peer, one = PEERS[case.peer], SETS[case.set]
        if store and peer.no_s3:
            return {"unsupported": peer.no_s3}
        try:
            shards, data = self.source(one), self.data(peer, one)
        except PeerError as failed:
            return {"failed": str(failed)}
        common.read_all(data if data != shards and os.path.isdir(data) else shards)
        load = os.getloadavg()[0]
        more = ["--workers", str(case.workers), *(["--store", json.dumps(store)] if store else [])]
        checks = ["--check-all"] if self._args.quick else []
        run = self._supervised(
            case.peer, [*self._contestant(case.peer, "run", one, shards, data), *more, *checks,
                        "--seconds", str(self._args.seconds)], self._args.seconds,
        )  # fmt: skip
        run["load"] = load
        if self._args.paused_steps and not flaw(run):
            command = [*self._contestant(case.peer, "pause", one, shards, data), *more]
            run["paused"] = self._supervised(
                case.peer, [*command, "--steps", str(self._args.paused_steps)], 2.0 * self._args.paused_steps
            )
        return run

    def _supervised(self, peer: str, command: list[str], seconds: float) -> dict[str, Any]:
        """Run a contestant, and return what it writes with what its processes used; or what went wrong."""
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
            output = os.path.join(scratch, "result.json")
            command = [
                sys.executable, "-S", "-E", os.path.join(HERE, "measure.py"), "--result", output,
                "--timeout", str(seconds + self._args.timeout), *command, "--output", output,
            ]  # fmt: skip
            environment = {**self._environment(peer), "TMPDIR": scratch}
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch,
                                  env=environment)  # fmt: skip
            if done.returncode:
                return {"failed": last_line(done.stderr), "errors": done.stderr}
            whole = json.loads(done.stdout)
            if not os.path.exists(output):
                return {"failed": whole["killed"] or last_line(whole["errors"]), "errors": whole["errors"]}
            with open(output) as file:
                result = json.load(file)
        return {
            **result, "peak_bytes": whole["peak_bytes"],
            "peak_without_files_bytes": whole["peak_without_files_bytes"], "wall_s": whole["wall_s"],
            "left_over": whole["left_over"], "killed": whole["killed"],
        }  # fmt: skip

    def _contestant(self, peer: str, verb: str, one: Set, shards: str, data: str) -> list[str]:
        return [self._pythons[PEERS[peer].home], os.path.join(HERE, "contestant.py"), peer, verb, "--set", one.name,
                "--root", self.root, "--source", shards, "--data", data]  # fmt: skip

    @staticmethod
    def _environment(peer: str) -> dict[str, str]:
        """The caller's, without what leads Python elsewhere; ours needs the way to this repository."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {**kept, "PYTHONPATH": REPOSITORY} if PEERS[peer].home == OURS else kept


def prepare(bench: Bench, args: argparse.Namespace, results: Results) -> list[str]:
    """Environments and data of all; the peers that can take part."""
    present = []
    for peer in args.peers:
        home = PEERS[peer].home
        try:
            results.content["versions"][home] = bench.install(home)
            results.content["absent"].pop(home, None)
            present.append(peer)
        except PeerError as failed:
            results.content["absent"][home] = str(failed)
            print(f"{TITLES[home]}: {failed}", file=sys.stderr)
    for name in args.sets:
        results.content["sizes"][name] = SETS[name].size(quick=args.quick)
        for peer in present:
            if not takes_part(PEERS[peer], SETS[name]):
                continue
            try:
                bench.data(PEERS[peer], SETS[name])
            except PeerError as failed:
                print(f"{TITLES[peer]}, {name}: {failed}", file=sys.stderr)
    return present


def shown(case: Case, run: dict[str, Any], size: int) -> str:
    """A line of progress."""
    found = flaw(run)
    text = f"{found.word}: {found.reason}" if found else f"{rate(run, size):12,.0f} {SETS[case.set].unit}/s"
    return f"{case.set:15} {case.where:5} {case.workers} workers  {TITLES[case.peer]:34} {text}"


def write_report(results: Results, folder: str, args: argparse.Namespace) -> str:
    """``results.md`` beside ``results.json``; with ``--publish`` also what the repository shows."""
    text = quoted.whole(results.content)
    with open(os.path.join(folder, "results.md"), "w") as file:
        file.write(text)
    chart = os.path.join(folder, "chart.svg")
    try:
        python = interpreter("chart", os.path.join(args.data, "venvs"))
        subprocess.run(
            [python, os.path.join(HERE, "chart.py"), os.path.join(folder, "results.json"), chart], check=True
        )
    except (PeerError, subprocess.CalledProcessError) as failed:
        print(f"no chart: {failed}", file=sys.stderr)
    if args.publish:
        for name, target in (("results.md", "benchmarks/peers/RESULTS.md"), ("chart.svg", "docs/peers.svg"),
                             ("results.json", "benchmarks/peers/results.json")):  # fmt: skip
            if os.path.exists(os.path.join(folder, name)):
                with open(os.path.join(folder, name)) as read, open(os.path.join(REPOSITORY, target), "w") as written:
                    written.write(read.read())
        print("tables of", *figures.refresh(Path(REPOSITORY)), file=sys.stderr)
    return text


def main() -> None:
    args = arguments()
    bench = Bench(args)
    folder = os.path.join(args.data, "results", "quick" if args.quick else "full")
    os.makedirs(folder, exist_ok=True)
    results = Results(os.path.join(folder, "results.json"), fresh=args.fresh)
    if args.retry:
        results.forget_flawed()
    args.peers = prepare(bench, args, results)
    if any(results.wants(case, args.rounds - 1) for case in cases(args)):
        results.content["machine"] = common.machine()
        results.content["commit"] = common.commit()
    results.save()
    if args.prepare:
        return
    with serving(bench.root) as store:
        for round_number in range(args.rounds):
            for case in cases(args):
                if results.wants(case, round_number):
                    run = bench.measure(case, store if case.where == "s3" else None)
                    results.runs(case).append(run)
                    results.save()
                    print(f"{round_number + 1}  {shown(case, run, SETS[case.set].size(quick=args.quick))}", flush=True)
    print(write_report(results, folder, args))


if __name__ == "__main__":
    main()
