"""The tables of the storage benchmark, of results as ``run.py`` keeps them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contestants import CONTESTANTS, OURS
from workloads import WORKLOADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured; ``where`` is ``disk`` or ``s3``."""

    workload: str
    where: str
    contestant: str

    @property
    def key(self) -> str:
        return f"{self.workload} {self.where} {self.contestant}"


COLUMNS: dict[str, tuple[str, str]] = {
    "cpu_s_per_gb": ("CPU s per GB", ".2f"),
    "step_ms": ("step, ms", ".2f"),
    "unhidden_ms": ("not computing, ms", ".2f"),
    "engine_samples_per_s": ("with starts of epochs", ",.0f"),
}
"""Numbers of a run, beside the rate: heading, and form."""


def middle(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(float(run[name]) for run in runs)


def shown(case: Case, run: Mapping[str, Any]) -> str:
    """A line of progress."""
    said = run.get("failed") or (
        f"{run['samples_per_s']:10,.0f} samples/s at {run['utilization']:.1%}, step {run['step_ms']:.2f} ms, "
        f"{run['cpu_s_per_gb']:.2f} CPU s per GB"
    )
    return f"{case.workload:10} {case.where:5} {CONTESTANTS[case.contestant].title:52} {said}"


def document(results: Mapping[str, Any]) -> str:
    """All tables."""
    said = (
        f"{results['machine']}; commit {results['commit']}; engine {results['engine']}, scale {results['scale']:g}. "
        "Medians of the rounds (lowest to highest). What is measured: [README.md](README.md). Contestants in italics "
        "hand over a constant array."
    )
    parts = [f"# The storage benchmark: samples/s at {results['goal']:.0%} utilization", said]
    for work in WORKLOADS.values():
        for where in ("disk", "s3"):
            found = {
                name: runs
                for name in CONTESTANTS
                if (runs := results["runs"].get(Case(workload=work.name, where=where, contestant=name).key))
            }
            if found:
                parts.append(f"## {work.name}, {'disk' if where == 'disk' else 'S3'}")
                size = f"{work.sample_bytes:,} bytes"
                parts.append(f"Samples of {size}, batches of {work.batch_size}.\n\n{table(found)}")
    return "\n\n".join(parts) + "\n"


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One table: contestants by row."""
    ours = found.get(OURS, ())
    base = middle(ours, "samples_per_s") if ours and not any("failed" in run for run in ours) else 0.0
    heads = ["", "samples/s", f"against {OURS}", *(head for head, _ in COLUMNS.values())]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, runs in found.items():
        failed = next((run["failed"] for run in runs if "failed" in run), "")
        if failed:
            cells = [f"failed: {failed}".replace("|", "/"), *[""] * (len(heads) - 2)]
        else:
            rates = [run["samples_per_s"] for run in runs]
            spread = f" ({min(rates):,.0f} to {max(rates):,.0f})" if len(rates) > 1 else ""
            rate = middle(runs, "samples_per_s")
            cells = [f"{rate:,.0f}{spread}", f"{rate / base:.2f} x" if base else ""]
            cells += [format(middle(runs, column), form) for column, (_, form) in COLUMNS.items()]
        rows.append("| " + " | ".join([CONTESTANTS[name].title, *cells]) + " |")
    return "\n".join(rows)
