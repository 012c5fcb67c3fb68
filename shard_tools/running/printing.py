"""Print the common elements of reports: tables, findings, and the work of an earlier run.

A verb prints its own report, beside the report's class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from shard_tools.running.report import Finding, plain
from streaming.common.arguments import counted, format_bytes

SHOWN_FINDINGS = 20
"""Findings shown per kind; ``--json`` lists all."""


def rate(num_bytes: int, seconds: float) -> str:
    """Return bytes per second in words."""
    return f"{format_bytes(num_bytes / max(seconds, 1e-9))}/s"


def show_earlier(num_resumed: int, *, was_complete: bool, changed: Sequence[str] = (), what: str = "sample") -> None:
    """Print how much an earlier run had done, and the part of it that was redone."""
    if changed:
        click.echo(
            f"changed since an earlier run: {counted(len(changed), 'input')}, first {plain(changed[0])}; their "
            "output, and all that follows, is written again"
        )
    if was_complete:
        click.echo("Already complete; nothing written.")
    elif num_resumed:
        click.echo(f"continued after {counted(num_resumed, what)} of an earlier run")


def show_findings(findings: Sequence[Finding]) -> None:
    """Print the first findings of each kind, and the number of the others."""
    shown: Counter[str] = Counter()
    for finding in findings:
        shown[finding.kind] += 1
        if shown[finding.kind] <= SHOWN_FINDINGS:
            click.echo(plain(str(finding)))
    for kind, count in shown.items():
        if count > SHOWN_FINDINGS:
            click.echo(f"… {count - SHOWN_FINDINGS:,} more of kind {kind}; --json lists them")


def show_passed_over(num_files: int, first: Sequence[str]) -> None:
    """Print the number of files that belong to no sample, and some of them, if there are any."""
    if num_files:
        click.echo(f"skipped: {counted(num_files, 'file')} of no sample, first {plain(', '.join(first))}", err=True)


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their heads, in columns of the width that they need."""
    if not rows:
        return
    shown = [heads, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in shown) for i in range(len(heads))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
