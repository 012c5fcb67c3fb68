"""From runs to a table: medians, ratios, Markdown. Pure; standard library only.

A run is what ``measure.py`` and the contestant said of one process. Each either has a rate, or a word in its place:
``-`` (cannot, and why), ``wrong`` (other samples than it should), ``failed``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST_BATCHES = 20
"""A ratio to a rate that fewer batches gave is struck out."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Case:
    """What is measured; ``where`` is ``disk`` or ``s3``."""

    set: str
    where: str
    workers: int
    peer: str

    @property
    def key(self) -> str:
        return f"{self.set} {self.where} {self.workers} {self.peer}"

    @classmethod
    def of(cls, key: str) -> Case:
        name, where, workers, peer = key.split()
        return cls(set=name, where=where, workers=int(workers), peer=peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """What is counted in tokens: which sets, by which rule each contestant packs, and which of them cut documents."""

    sets: tuple[str, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict)
    cutters: tuple[str, ...] = ()


NO_PACKS = Packs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the rounds of one case; ``batches``: the fewest; ``processes``: the most at once, None: unknown.

    Of packs, samples are tokens; ``fill`` is their share of the places in a batch, the least of all rounds.
    ``unhidden_ms``: of a batch; None: not measured.
    """

    per_second: float
    cpu_s_per_sample: float
    peak_bytes: float
    first_batch_s: float
    lowest: float
    highest: float
    rounds: int
    whole: bool
    batches: int
    processes: int | None
    fill: float | None = None
    unhidden_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Which contestants are ours in a comparison, which is the limit of the machine, and what is said of it."""

    ours: tuple[str, ...]
    limit: str = ""
    title: str = "Against the best peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Why there are no figures: ``word`` for the table, ``reason`` for the notes."""

    word: str
    reason: str


Outcome = Figures | Missing


def rate(run: Mapping[str, Any], size: int) -> float:
    """Samples per second of one pass over ``size`` samples, from opening to the last batch.

    A pass that was cut short counts as what the whole pass would have taken: the wait for its first batch, and the rest
    at the pace seen since then. So a slow start weighs what it weighs in a whole pass.
    """
    samples, seconds = int(run["samples"]), float(run["seconds"])
    if run["whole"]:
        return samples / seconds
    later, later_s = samples - int(run["first_samples"]), seconds - float(run["first_batch_s"])
    if later <= 0 or later_s <= 0:
        return samples / seconds
    return size / (float(run["first_batch_s"]) + (size - int(run["first_samples"])) * later_s / later)


def flaw(run: Mapping[str, Any]) -> Missing | None:
    """Why this run has no rate, if it has none."""
    if "unsupported" in run:
        return Missing(word="-", reason=str(run["unsupported"]))
    if "failed" in run:
        return Missing(word="failed", reason=str(run["failed"]))
    if run["wrong"]:
        return Missing(word="wrong", reason=str(run["wrong"]))
    return None


def outcome(runs: Sequence[Mapping[str, Any]], size: int) -> Outcome:
    """Medians; one flawed run is enough to have none."""
    for run in runs:
        if found := flaw(run):
            return found
    rates = [rate(run, size) for run in runs]
    return Figures(
        per_second=statistics.median(rates),
        cpu_s_per_sample=statistics.median(run["cpu_s"] / max(1, run["samples"]) for run in runs),
        peak_bytes=statistics.median(run["peak_bytes"] for run in runs),
        first_batch_s=statistics.median(run["first_batch_s"] for run in runs),
        lowest=min(rates),
        highest=max(rates),
        rounds=len(runs),
        whole=all(run["whole"] for run in runs),
        batches=min(int(run.get("num_batches", LEAST_BATCHES)) for run in runs),
        processes=max((int(run["processes"]) for run in runs if "processes" in run), default=None),
        fill=min((float(run["fill"]) for run in runs if "fill" in run), default=None),
        unhidden_ms=_unhidden_ms(runs),
    )


def _unhidden_ms(runs: Sequence[Mapping[str, Any]]) -> float | None:
    found = [float(run["paused"]["unhidden_ms"]) for run in runs if "unhidden_ms" in run.get("paused", {})]
    return statistics.median(found) if found else None


def _is_paused(one: Outcome) -> bool:
    return isinstance(one, Figures) and one.unhidden_ms is not None


def number(value: float) -> str:
    """Three significant digits, thousands apart."""
    if value >= 999.5:
        digits = len(str(round(value))) - 3
        return f"{round(value / 10**digits) * 10**digits:,}"
    return f"{value:.3g}"


def table(
    outcomes: Mapping[Case, Outcome], titles: Mapping[str, str], ours: str, rules: Mapping[str, str] | None = None
) -> str:
    """One set at one place: a row per contestant, a column per number of workers, ours first and at the ratio of 1.

    With ``rules``, by contestant, it is of packs: tokens are counted, and how full packs are and the rule stand behind.
    """
    workers = sorted({case.workers for case in outcomes})
    peers = [peer for peer in titles if any(case.peer == peer for case in outcomes)]
    found = {(case.peer, case.workers): result for case, result in outcomes.items()}
    several = "/".join(map(str, workers))
    is_paused = any(_is_paused(one) for one in outcomes.values())
    unit, cpu, scale = ("samples", "CPU ms a sample", 1e3) if rules is None else ("tokens", "CPU s a million", 1e6)
    heads = ["", *(f"{count} worker{'s' * (count != 1)}, {unit}/s" for count in workers),
             f"{cpu} ({several})", f"peak MiB ({several})", f"first batch s ({several})",
             *([f"unhidden ms a batch ({several})"] if is_paused else []),
             *([] if rules is None else [f"fill % ({several})", "rule"])]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for peer in peers:
        results = [found.get((peer, count)) for count in workers]
        cells = [titles[peer]]
        cells += [_rate_cell(result, found.get((ours, count)), own=peer == ours)
                  for count, result in zip(workers, results, strict=True)]  # fmt: skip
        cells.append(_side_cell(results, lambda one: number(one.cpu_s_per_sample * scale)))
        cells.append(_side_cell(results, lambda one: f"{one.peak_bytes / 2**20:,.0f}"))
        cells.append(_side_cell(results, lambda one: f"{one.first_batch_s:.2f}"))
        if is_paused:
            cells.append(_side_cell(results, lambda one: "-" if one.unhidden_ms is None else number(one.unhidden_ms)))
        if rules is not None:
            cells.append(_side_cell(results, lambda one: "-" if one.fill is None else f"{100 * one.fill:.2f}"))
            cells.append(rules.get(peer, ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate_cell(result: Outcome | None, base: Outcome | None, *, own: bool) -> str:
    if result is None:
        return ""
    if isinstance(result, Missing):
        return result.word
    text = number(result.per_second) + ("" if result.whole else " ~")
    if own:
        return f"**{text}**"
    if not isinstance(base, Figures):
        return text
    ratio = f"{base.per_second / result.per_second:.1f} x"
    return f"{text} ({ratio if min(result.batches, base.batches) >= LEAST_BATCHES else f'~~{ratio}~~'})"


def _side_cell(results: Sequence[Outcome | None], shown: Callable[[Figures], str]) -> str:
    texts = [shown(one) if isinstance(one, Figures) else "-" for one in results]
    return "" if set(texts) == {"-"} else " / ".join(texts)


def best_peers(outcomes: Mapping[Case, Outcome], titles: Mapping[str, str], ways: Ways) -> str:
    """One line: our best against theirs, whatever the workers, then against the fastest for each number of workers.

    Last comes the share of what the machine could do at most, where that was measured.
    """
    figures = {case: one for case, one in outcomes.items() if isinstance(one, Figures) and one.batches >= LEAST_BATCHES}
    sides = [[case for case in figures if (case.peer in ways.ours) is own and case.peer != ways.limit]
             for own in (True, False)]  # fmt: skip
    parts = []
    if all(sides):
        own, best = (max(side, key=lambda case: figures[case].per_second) for side in sides)
        parts.append(
            f"best against best {figures[own].per_second / figures[best].per_second:.2f} x "
            f"({_ran(own, figures[own])}; {titles[best.peer]}, {_ran(best, figures[best])})"
        )
        for count in sorted({case.workers for case in figures}):
            here = [[case for case in side if case.workers == count] for side in sides]
            if all(here):
                own, best = (max(side, key=lambda case: figures[case].per_second) for side in here)
                ratio = figures[own].per_second / figures[best].per_second
                parts.append(f"{count} workers {ratio:.2f} x ({titles[best.peer]})")
    limits = [one.per_second for case, one in figures.items() if case.peer == ways.limit]
    if limits and sides[0]:
        best_rate = max(figures[case].per_second for case in sides[0])
        parts.append(f"{100 * best_rate / max(limits):.0f} % of the limit")
    return f"{ways.title}: {'; '.join(parts)}." if parts else ""


def _ran(case: Case, figures: Figures) -> str:
    """How many workers were asked for, and the processes that ran, where that was seen."""
    ran = "" if figures.processes is None else f", {figures.processes} processes ran"
    return f"{case.workers} workers{ran}"


def notes(outcomes: Mapping[Case, Outcome], titles: Mapping[str, str]) -> list[str]:
    """Each contestant's reasons for having no figures, once, with the workers they hold for."""
    workers: dict[tuple[str, str, str], list[int]] = {}
    for case, one in sorted(outcomes.items()):
        if isinstance(one, Missing):
            workers.setdefault((case.peer, one.word, one.reason), []).append(case.workers)
    return [
        f"- {titles[peer]}, {'/'.join(map(str, counts))} workers: {'' if word == '-' else word + ': '}{reason}"
        for (peer, word, reason), counts in workers.items()
    ]


def document(
    results: Mapping[str, Any],
    sets: Mapping[str, str],
    titles: Mapping[str, str],
    ours: str,
    packs: Packs = NO_PACKS,
    kin: tuple[str, ...] = (),
    limit: str = "",
) -> str:
    """The whole report as Markdown: from ``{"machine", "versions", "sizes", "runs": {key: [run, …]}, …}``.

    ``sets`` and ``titles`` name sets and contestants for people; ``kin`` are ours too, and ``limit`` is no loader.
    Packs are compared twice: those that keep documents whole, and those that cut them anywhere.
    """
    all_ours = Ways(ours=(ours, *kin), limit=limit)
    outcomes = {
        case: outcome(runs, results["sizes"][case.set])
        for key, runs in results["runs"].items()
        if runs and (case := Case.of(key)).peer in titles
    }
    is_paused = any(_is_paused(one) for one in outcomes.values())
    loads = [run["load"] for runs in results["runs"].values() for run in runs if "load" in run]
    rounds = sorted({one.rounds for one in outcomes.values() if isinstance(one, Figures)})
    lines = [
        "# The peers, measured",
        "",
        f"{results['machine']}.",
        "",
        f"Load before a measurement: {min(loads, default=0):.1f} to {max(loads, default=0):.1f}.",
        f"Medians of {' to '.join(map(str, rounds[:1] + rounds[1:][-1:]))} rounds.",
        "",
        "- In parentheses: how many times as fast shardstream is. Struck out: ratios to a rate from fewer than",
        f"  {LEAST_BATCHES} batches.",
        "- `~`: the pass was cut short and extrapolated.",
        "- CPU: user and system time of all processes while the clock runs. Peak: PSS of all processes together.",
        "- shardstream starts no worker process, whatever is requested, if a batch is only cut out of memory: all but",
        "  decoded images.",
        *(
            [
                "- Unhidden: what `next` and letting go of the last batch keep of the training thread after a step",
                "  in which there was time to prepare.",
            ]
            if is_paused
            else []
        ),
        "",
        "The method is described in [README.md](README.md).",
    ]
    places = sorted({(case.where, case.set) for case in outcomes}, key=lambda at: (at[0], list(sets).index(at[1])))
    for where, name in places:
        here = {case: one for case, one in outcomes.items() if (case.where, case.set) == (where, name)}
        place = "local disk, in the page cache" if where == "disk" else "an S3 server on loopback, nothing cached"
        packed = name in packs.sets
        unit = "tokens" if packed else "samples"
        lines += ["", f"## {sets[name]}; {results['sizes'][name]:,} {unit}, {place}", ""]
        lines += [table(here, titles, ours, packs.rules if packed else None), ""]
        if packed:
            for title, cut in (("Documents kept whole, against the best peer", False), ("Cut anywhere", True)):
                alike = {case: one for case, one in here.items() if (case.peer in packs.cutters) is cut}
                lines += [best_peers(alike, titles, dataclasses.replace(all_ours, title=title)), ""]
        else:
            lines += [best_peers(here, titles, all_ours), ""]
        lines += notes(here, titles)
    lines += ["", "## Versions", ""]
    for peer, packages in results["versions"].items():
        lines.append(f"- {titles[peer]}: {', '.join(f'{name} {one}' for name, one in packages.items())}")
    lines += [f"- {titles[peer]}: {reason}" for peer, reason in results.get("absent", {}).items()]
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"
