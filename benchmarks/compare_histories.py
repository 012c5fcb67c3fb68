"""Random histories of jobs in this tree and in another one: the same batches, byte for byte, and the same states.

Run: ``git worktree add ../base COMMIT``, then ``python benchmarks/compare_histories.py ../base --cases 500``.
Cases are those of ``tests/histories/test_histories_model.py`` (sets of all kinds, damage in shards, resumes, remesh,
weights that change), each tree plays them by its own tests, and every batch is hashed, but for ``__url__``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

_KEPT = ("epoch", "samples_seen", "order", "next_seed", "num_samples", "epoch_size")


def feed(digest: Any, value: Any) -> None:
    """Feed whatever a batch holds to a hash."""
    if isinstance(value, dict):
        for name in sorted(value):
            if name != "__url__":  # folders differ
                digest.update(name.encode())
                feed(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for one in value:
            feed(digest, one)
    elif hasattr(value, "numpy"):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.numpy().tobytes())
    else:
        digest.update(value if isinstance(value, bytes) else repr(value).encode())


def play(tree: Path, seed: int, cases: int) -> dict[int, Any]:
    """Play cases with the code and the tests of a tree: how each ended, its batches, their hash and the last state."""
    tests = tree / "tests"
    sys.path[:0] = [str(tree), str(tests), *sorted(str(one) for one in tests.glob("*/"))]
    model, drawn = (
        importlib.import_module("test_histories_model"),
        importlib.import_module("tests.support.models.history_cases"),
    )
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    folder, found = Path(tempfile.mkdtemp()), {}
    pools = model.Pools(folder / "pools")

    class Tapped(model.Job):  # type: ignore[misc, name-defined]  of either tree
        def step(self) -> bool:
            if not self.iterators:
                self.iterators = [map(self.note, rank) for rank in self.ranks]
            return bool(super().step())

        def note(self, batch: Any) -> Any:
            feed(self.digest, batch)
            return batch

    for number in range(cases):
        data, pool = pools.of(seed, number)
        case = json.loads(json.dumps(drawn.draw_case(seed, number))) | {"workers": 0}
        case["damage"] = [one for one in case["damage"] if one[0] == "flip"]
        of_case = model.model_of(case, pool)
        job = Tapped(case, data, model.hurt(data, pool, case["damage"], index_too=True), of_case)
        job.digest, end, state = hashlib.sha256(), "played", None
        try:
            job.play(case["batches"], 2)
            state = {name: value for name, value in job.state().items() if name in _KEPT}
        except Exception as error:  # noqa: BLE001  how a case ends is compared
            end = type(error).__name__
        finally:
            job.close()
        found[number] = [end, len(job.batches), job.digest.hexdigest(), state]
        for name in set(job.names.values()):
            shutil.rmtree((data / name).parent, ignore_errors=True)
        shutil.rmtree(data / "cache", ignore_errors=True)
    shutil.rmtree(folder)
    return found


def main() -> None:
    """Compare two trees, or play one and print what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other tree")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        print(json.dumps(play(options.other.resolve(), options.seed, options.cases)))
        return
    told = []
    for tree in (Path(__file__).parents[1], options.other):
        command = [sys.executable, __file__, str(tree), "--play", f"--cases={options.cases}", f"--seed={options.seed}"]
        told.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    differ = [number for number in told[0] if told[0][number] != told[1][number]]
    ends, batches = Counter(one[0] for one in told[0].values()), sum(one[1] for one in told[0].values())
    print(f"{options.cases} histories of seed {options.seed}, {batches:,} batches: {dict(ends)}; differ: {differ}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
