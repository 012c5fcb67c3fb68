"""What README and the page on the peers quote of ``results.json``; ``figures.py --refresh`` writes it into them.

Ratios are to the fastest peer. Where that is slower than we are, or does less (LitData gives views that nobody has
read, and only concatenates tokens), the fastest of the others follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from environments import LIMIT, OURS, PEERS
from report import LEAST_BATCHES, Case, Figures, Packs, document, number, outcome
from sets import SETS

ROWS = {
    "images-raw": "JPEGs of 68 KB, bytes",
    "images-decoded": "the same as 224 x 224 pixels",
    "records": "records of 430 bytes",
    "tokens": "2,048 tokens as int64",
    "large": "samples of 20 MB, bytes",
    "packs-8k": "documents to packs of 8,192, million tokens/s",
}
OTHER_WAYS = {"shardstream_views": "as views", "shardstream_cut": "rows cut when written"}
"""Ours that do as little as the fastest peer does."""
NAMES = {"mosaic": "Mosaic", "energon": "Energon", "spdl": "SPDL", "torchdata": "StatefulDataLoader"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
Rates = Mapping[Case, float]


def made(path: Path, name: str) -> str:
    """Return the text called ``name`` of the results in a file."""
    makers: dict[str, Callable[[Mapping[str, Any], Rates], str]] = {
        "best": best, "by workers": by_workers, "report": whole,
    }  # fmt: skip
    if name not in makers:
        raise ValueError(f"{path} has no text called {name!r}; there are {', '.join(makers)}")
    results = json.loads(path.read_text())
    return makers[name](results, rates(results))


def whole(results: Mapping[str, Any], _: Rates | None = None) -> str:
    """``RESULTS.md``, all of it."""
    packs = Packs(
        sets=tuple(name for name, one in SETS.items() if one.length),
        rules={peer.name: peer.packing.rule for peer in PEERS.values() if peer.packing is not None},
        cutters=tuple(peer.name for peer in PEERS.values() if peer.packing is not None and peer.packing.cuts),
    )
    kin = tuple(peer.name for peer in PEERS.values() if peer.of == OURS and peer.name != LIMIT)
    titles = {peer.name: peer.title for peer in PEERS.values()}
    return document(results, {name: one.title for name, one in SETS.items()}, titles, OURS, packs, kin, LIMIT)


def rates(results: Mapping[str, Any]) -> dict[Case, float]:
    """What each case delivers per second, of those with enough batches."""
    found = {
        case: outcome(runs, results["sizes"][case.set])
        for key, runs in results["runs"].items()
        if runs and (case := Case.of(key)).peer in PEERS
    }
    return {
        case: one.per_second for case, one in found.items() if isinstance(one, Figures) and one.batches >= LEAST_BATCHES
    }


def best(results: Mapping[str, Any], known: Rates) -> str:
    """The table of README: our fastest way and the fastest peer, each with its best number of workers."""
    lines = ["| | shardstream | fastest peer | ratio | ratio from S3 |", "|---|--:|--:|--:|--:|"]
    for name, row in ROWS.items():
        disk, s3 = (select(known, set=name, where=where) for where in ("disk", "s3"))
        ours, peer = fastest(disk, ours=True), fastest(disk, ours=False)
        if ours is None or peer is None:
            continue
        scale = 1e6 if SETS[name].length else 1
        there, other = fastest(s3, ours=True), fastest(s3, ours=False)
        from_s3 = "" if there is None or other is None else f"{ratio(s3[there] / s3[other])} x"
        lines.append(
            f"| {row} | {number(disk[ours] / scale)}{way_of(ours)} | {number(disk[peer] / scale)}, {title(peer)} "
            f"| **{ratio(disk[ours] / disk[peer])} x** | {from_s3} |".replace("|  |", "| |")
        )
    return f"{caption(results, known)}.\n\n" + "\n".join(lines)


def fastest(known: Rates, *, ours: bool) -> Case | None:
    """The fastest case of ours, or of the peers; None: none was measured. Rows cut when written are no packing."""
    found = [
        case
        for case in known
        if (PEERS[case.peer].home == OURS) is ours and case.peer not in {LIMIT, "shardstream_cut"}
    ]
    return max(found, key=lambda case: known[case], default=None)


def way_of(case: Case) -> str:
    """What one of ours does less than its default: views are not copied."""
    return " (views)" if case.peer == "shardstream_views" else ""


def by_workers(results: Mapping[str, Any], known: Rates) -> str:
    """The table of the page on the peers: against those with as many workers; then best against best in a sentence."""
    places = [("disk", 0), ("disk", 2), ("s3", 0), ("s3", 2)]
    heads = [f"{'disk' if where == 'disk' else 'S3'}, {count} workers" for where, count in places]
    lines = [f"| | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for name, row in ROWS.items():
        cells = [cell(name, select(known, set=name, where=where, workers=count)) for where, count in places]
        text = f"| {row} | {' | '.join(cells)} |"
        lines.append(text.replace("|  |", "| |").replace("|  |", "| |"))
    against = [
        f"{row.removesuffix(', million tokens/s')}: {found}"
        for name, row in ROWS.items()
        if (found := best_ratio(select(known, set=name, where="disk")))
    ]
    return (
        f"{caption(results, known)}, with as many workers; ratios to it in parentheses.\n\n" + "\n".join(lines)
        + f"\n\nBest against best from disk, whatever the number of workers: {'; '.join(against)}."
    )  # fmt: skip


def caption(results: Mapping[str, Any], known: Rates) -> str:
    """What was measured, on which machine, when, and how many peers there are to compare with."""
    day, machine = results["machine"].split(", ")[:2]
    when = date.fromisoformat(day)
    packs = {name for name, one in SETS.items() if one.length}
    single = {PEERS[case.peer].home for case in known if case.set not in packs and case.where == "disk"} - {OURS}
    packing = {PEERS[case.peer].home for case in known if case.set in packs} - {OURS}
    remote = {PEERS[case.peer].home for case in known if case.where == "s3"} - {OURS}
    return (
        f"Samples per second, shuffled, delivered to the training process, {machine}, {when.day} {when:%B %Y};\n"
        f"against the fastest of {NUMBERS[len(single)]} peers (packs: {NUMBERS[len(packing)]}, "
        f"S3: {NUMBERS[len(remote)]})"
    )


def select(known: Rates, **wanted: object) -> dict[Case, float]:
    """The cases whose fields are these."""
    return {case: rate for case, rate in known.items() if all(getattr(case, key) == wanted[key] for key in wanted)}


def cell(name: str, known: Rates) -> str:
    """Our rate, and in parentheses how many times that of the peers it is; empty: not measured."""
    ours = max((rate for case, rate in known.items() if case.peer == OURS), default=None)
    if ours is None:
        return ""
    scale = 1e6 if SETS[name].length else 1
    text = f"{number(ours / scale)}{ratios(known, ours)}"
    for peer, way in OTHER_WAYS.items():
        rate = max((rate for case, rate in known.items() if case.peer == peer), default=None)
        if rate is not None:
            fastest = best_ratio(known, peer)
            text += f"; {way} {number(rate / scale)}" + (f" ({fastest})" if fastest else "")
    return text


def ratios(known: Rates, ours: float) -> str:
    """`` (0.92 x LitData's views; 2.4 x SPDL)``: to the fastest peer, and to the next that does as much."""
    told: dict[str, str] = {}
    for case in sorted((case for case in known if PEERS[case.peer].home != OURS), key=lambda case: -known[case]):
        told.setdefault(title(case), f"{ratio(ours / known[case])} x {title(case)}")
        if known[case] <= ours and title(case) == plain(case):
            break
    return f" ({'; '.join(told.values())})" if told else ""


def best_ratio(known: Rates, contestant: str = OURS) -> str:
    """The rate of one of ours against the fastest peer: ``1.9 x SPDL``; empty: not measured."""
    ours = max((rate for case, rate in known.items() if case.peer == contestant), default=None)
    peers = [case for case in known if PEERS[case.peer].home != OURS]
    if ours is None or not peers:
        return ""
    case = max(peers, key=lambda case: known[case])
    return f"{ratio(ours / known[case])} x {title(case)}"


def ratio(value: float) -> str:
    """Two digits."""
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def plain(case: Case) -> str:
    """The short name of a peer."""
    home = PEERS[case.peer].home
    return NAMES.get(home, PEERS[home].title)


def title(case: Case) -> str:
    """The short name of a peer, and what it does less than we do."""
    if case.peer == "litdata" and SETS[case.set].length:
        return "LitData, which only concatenates"
    if case.peer == "litdata" and SETS[case.set].read and not case.workers:  # its workers copy
        return "LitData's views"
    return plain(case)
