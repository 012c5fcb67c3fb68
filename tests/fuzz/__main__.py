"""The long run: ``python -m tests.fuzz --minutes 10 [--target scanner] [--seed 1]``; ``make fuzz`` calls it.

A failure is written to ``tests/fuzz/regressions/TARGET/`` under a name made of its content, and the normal tests replay
that folder from then on. The seed that is printed gives the same inputs again.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.fuzz.corpus import REGRESSIONS, seeds_of  # noqa: E402
from tests.fuzz.mutate import mutated  # noqa: E402
from tests.fuzz.targets import TARGETS, run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    arguments = parser.parse_args()
    names = arguments.target or sorted(TARGETS)
    dice, end_s = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    runs, failed = dict.fromkeys(names, 0), 0
    REGRESSIONS.mkdir(exist_ok=True)
    current = REGRESSIONS / "current"  # what was running, where a library ends the process
    print(f"seed {arguments.seed}, targets {', '.join(names)}, {arguments.minutes:g} minutes", flush=True)
    while time.monotonic() < end_s:
        for name in names:
            turn_s = time.monotonic() + 0.5
            while time.monotonic() < turn_s:
                data = mutated(seeds_of(name), dice)
                runs[name] += 1
                current.write_bytes(data)
                try:
                    run(TARGETS[name], data)
                except Exception:
                    failed += 1
                    path = REGRESSIONS / name / hashlib.sha256(data).hexdigest()[:16]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                    print(f"{name}: {path.name}, {len(data)} bytes\n{traceback.format_exc()}", flush=True)
    current.unlink()
    print(
        f"{sum(runs.values())} inputs ({', '.join(f'{name} {count}' for name, count in runs.items())}), {failed} failed"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
