"""Print results for people: plain lines, and tables for columns."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shard_tools.change.check.recheck import RecheckReport
from shard_tools.change.check.verify import VerifyReport
from shard_tools.change.functions.run import FunctionReport
from shard_tools.change.sets.copy import CopyReport
from shard_tools.change.sets.inspect import DataSetInfo, SampleEntry, SampleView
from shard_tools.change.sets.reindex import IndexReport
from shard_tools.change.sets.repair import RepairReport
from shard_tools.change.sets.rewrite.reshard import ReshardReport
from shard_tools.make.convert import ConvertReport
from shard_tools.make.tokens.run import TokenizeReport
from shard_tools.running.report import Finding, plain, plain_place
from streaming.common.arguments import counted, format_bytes
from streaming.errors import shell_word, visible
from streaming.storage import redact_text

_SHOWN_SKIPPED = 10
_SHOWN_FINDINGS = 20  # of one kind
_PREVIEW_CHARACTERS = 2000
_NOT_PLAIN = re.compile(r"[\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_BINARY = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def as_json(value: object, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON that is safe for any terminal and encoding."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NOT_PLAIN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class VisibleLines(logging.Formatter):
    """Formats lines of the log for a terminal: control characters of names are spelled."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return visible(super().format(record))


def show_error(error: BaseException) -> None:
    """Print an error and its notes, without secrets in URLs and without control characters from names."""
    for line in (f"Error: {error}", *getattr(error, "__notes__", ())):
        for part in redact_text(line).split("\n"):
            click.echo(plain(part), err=True)


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{format_bytes(num_bytes / max(seconds, 1e-9))}/s"


def _show_earlier(num_resumed: int, *, was_complete: bool, changed: Sequence[str] = (), what: str = "sample") -> None:
    """Say what an earlier run had done, and what of it was made again."""
    if changed:
        click.echo(
            f"changed since an earlier run: {counted(len(changed), 'input')}, first {plain(changed[0])}; what was made "
            "of them, and all that follows, is made again"
        )
    if was_complete:
        click.echo("Complete already; nothing written.")
    elif num_resumed:
        click.echo(f"went on after {counted(num_resumed, what)} of an earlier run")


def show_convert(report: ConvertReport) -> None:
    """Print the outcome of a conversion."""
    _show_earlier(report.num_resumed_samples, was_complete=report.was_complete, changed=report.changed)
    click.echo(
        f"{plain_place(report.target)}: {counted(report.num_samples, 'sample')} in "
        f"{counted(report.num_shards, 'shard')}, {format_bytes(report.num_bytes)}, from {report.kind} in "
        f"{report.seconds:.1f} s"
    )
    if report.classes:
        field = "field cls: " if report.kind in {"images", "audio"} else ""
        by = (
            f"numbers of {plain_place(report.classes_from)}"
            if report.classes_from
            else "number by sorted name in this source"
        )
        click.echo(f"classes: {len(report.classes):,} ({field}{by})")
    if report.shuffle_seed is not None:
        click.echo(f"shuffled with seed {report.shuffle_seed}; --shuffle none keeps the order of the source")
    if report.skipped:
        click.echo(f"left out {counted(len(report.skipped), 'file')} of the source:", err=True)
        for entry in report.skipped[:_SHOWN_SKIPPED]:
            click.echo(f"  {plain(entry.path)}: {entry.reason}", err=True)
        if len(report.skipped) > _SHOWN_SKIPPED:
            click.echo(f"  … {len(report.skipped) - _SHOWN_SKIPPED:,} more; --json lists all", err=True)


def show_tokens(report: TokenizeReport) -> None:
    """Print the outcome of a tokenization."""
    for one in report.sets:
        _show_earlier(one.num_resumed_documents, was_complete=one.was_complete, changed=one.changed, what="document")
        click.echo(
            f"{plain_place(one.target)}: {counted(one.num_documents, 'document')}, {counted(one.num_tokens, 'token')}, "
            f"longest {one.longest:,}; {counted(one.num_shards, 'shard')}, {format_bytes(one.num_bytes)}"
        )
        if one.num_differing:
            click.echo(
                f"not encoded as their whole text is: {counted(one.num_differing, 'document')}, since no "
                "special token stands where an answer begins or ends (docs/text.md, Token boundaries)",
                err=True,
            )
        for reason, count in one.rejected.items():
            click.echo(f"left out {counted(count, 'document')}: {plain(reason)}", err=True)
    click.echo(
        f"field tok: {report.dtype}, {report.tokenizer} {'of' if report.sha256 else 'below'} {report.vocab_size:,}"
        f"{' ids' if report.sha256 else ''}, "
        f"bos {'none' if report.bos is None else report.bos}, eos {'none' if report.eos is None else report.eos}"
        f"{'; field mask: uint8, 1 where a token carries loss' if report.masked else ''}"
    )
    click.echo(
        f"{report.seconds:.1f} s, {report.documents_per_s:,.0f} documents/s, {report.tokens_per_s:,.0f} tokens/s; "
        "StreamingDataset(url) gives tok as int64 arrays, Packed(StreamingDataset(url), length=…) packs them"
    )


def show_index(report: IndexReport) -> None:
    """Print the outcome of indexing, and damaged files that it could not rebuild."""
    _show_findings(report.findings)
    click.echo(
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{counted(report.num_chunks, 'chunk')}, {format_bytes(report.num_bytes)}; read "
        f"{format_bytes(report.num_scanned_bytes)} in {report.seconds:.1f} s "
        f"({_rate(report.num_scanned_bytes, report.seconds)})"
    )
    for line in _oddities(report):
        click.echo(line, err=True)
    _show_passed_over(report)
    if report.num_pruned:
        click.echo(f"removed from the index: {counted(report.num_pruned, 'shard')} no longer there")
    click.echo(f"index: {', '.join(map(plain_place, report.index_urls))}")
    for directory in report.declared_whole:
        click.echo(f"{plain_place(directory)} counts as a whole set from now on")


def _oddities(report: IndexReport) -> Iterator[str]:
    """Yield what is not wrong, but may not be meant."""
    if report.num_keys_again is None:
        yield "keys of different shards are not compared in a set of this size; `shard_tools verify` compares them"
    elif report.num_keys_again:
        yield (
            f"in two shards: {counted(report.num_keys_again, 'key')}, first "
            f"{plain(', '.join(report.first_keys_again))}. Training reads each of these samples, but exclude=, late "
            "columns joined by key, `cat` and --when take them for one another. `shard_tools reshard SOURCE TARGET "
            "--key-prefix '{shard}/'` tells them apart; if it is intended, give --duplicate-keys keep"
        )
    if report.lacking:
        url, names = next(iter(report.lacking.items()))
        yield (
            f"without columns that other shards have, and so NULL there: {counted(len(report.lacking), 'shard')}, "
            f"first {url}: {plain(', '.join(names))}. `index` cannot know their values: repeat the command that wrote "
            "the set, with --overwrite; or add them under other names with `shard_tools column add`, --lift or --from"
        )


def _show_passed_over(report: IndexReport | VerifyReport) -> None:
    if report.num_passed_over:
        first = plain(", ".join(report.first_passed_over))
        click.echo(f"passed over: {counted(report.num_passed_over, 'file')} of no sample, first {first}", err=True)


def _show_findings(findings: Sequence[Finding]) -> None:
    """Print the first findings of each kind, and the number of the others."""
    shown: Counter[str] = Counter()
    for finding in findings:
        shown[finding.kind] += 1
        if shown[finding.kind] <= _SHOWN_FINDINGS:
            click.echo(plain(str(finding)))
    for kind, count in shown.items():
        if count > _SHOWN_FINDINGS:
            click.echo(f"… {count - _SHOWN_FINDINGS:,} more of kind {kind}; --json lists them")


def show_verify(report: VerifyReport) -> None:
    """Print every finding, and the total."""
    _show_findings(report.findings)
    if report.not_decoded:
        click.echo(f"not decoded, for want of a safe decoder: {plain(', '.join(report.not_decoded))}", err=True)
    _show_passed_over(report)
    found = counted(len(report.findings), "finding") if report.findings else "all as the index says"
    num_unindexed = sum(finding.kind == "unindexed" for finding in report.findings)
    if num_unindexed:
        found += f", {counted(num_unindexed, 'shard')} not in the index and not read"
    click.echo(
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)} in {report.seconds:.1f} s ({_rate(report.num_bytes, report.seconds)}): "
        f"{found}"
    )


def show_recheck(report: RecheckReport) -> None:
    """Print every sample that is still bad, and the total."""
    for finding in report.findings:
        click.echo(str(finding))
    if report.num_unreadable:
        click.echo(f"cut off or no record: {counted(report.num_unreadable, 'line')} of the list", err=True)
    if report.num_elsewhere:
        click.echo(f"of other shards than those named: {counted(report.num_elsewhere, 'record')}", err=True)
    click.echo(
        f"{counted(report.num_listed, 'record')}, {counted(report.num_samples, 'sample')} read "
        f"({format_bytes(report.num_bytes)}) in {report.seconds:.1f} s: {report.num_good:,} good now, "
        f"{counted(len(report.findings), 'finding')}"
    )


def show_made(report: FunctionReport) -> None:
    """Print what became of the inputs of a function."""
    _show_earlier(report.num_resumed_samples, was_complete=report.was_complete, changed=report.changed)
    click.echo(
        f"{counted(report.num_inputs, 'sample')} taken, {report.num_empty:,} left out by the function, "
        f"{report.num_failed:,} on which it failed\n"
        f"{report.target}: {counted(report.num_samples, 'sample')} in {counted(report.num_shards, 'shard')}, "
        f"{format_bytes(report.num_bytes)}, in {report.seconds:.1f} s"
    )


def show_reshard(report: ReshardReport) -> None:
    """Print the outcome of resharding."""
    _show_earlier(report.num_resumed_samples, was_complete=report.was_complete)
    if report.num_not_found or report.num_unreadable:
        click.echo(
            f"list of --drop: without a sample in the source: {counted(report.num_not_found, 'record')}, cut off or "
            f"no record: {counted(report.num_unreadable, 'line')}",
            err=True,
        )
    lacking = f", {report.num_lacking:,} without a field of --drop-missing" if report.num_lacking else ""
    joined = ""
    if report.num_joined or report.num_duplicates:
        joined = (
            f", {report.num_joined:,} joined to another of their key, "
            f"{report.num_duplicates:,} left out: all their fields came before (contents were not compared)"
        )
    click.echo(
        f"{counted(report.num_source, 'sample')} in the source, {report.num_dropped:,} dropped, "
        f"{report.num_filtered:,} filtered out{lacking}{joined}\n"
        f"{report.target}: {counted(report.num_samples, 'sample')} in {counted(report.num_shards, 'shard')}, "
        f"{format_bytes(report.num_bytes)}, in {report.seconds:.1f} s"
    )


def show_repair(report: RepairReport) -> None:
    """Print what became of every damaged shard, and the total."""
    for shard in report.shards:
        links = [f"{counted(shard.num_links, 'hard link')} written out"] if shard.num_links else []
        for text in (*shard.mended, *links):
            click.echo(f"{plain_place(shard.url)}: mended: {plain(text)}")
        for text in shard.lost[:_SHOWN_FINDINGS]:
            click.echo(f"{plain_place(shard.url)}: lost: {plain(text)}")
        if shard.lost:
            more = f"… and {len(shard.lost) - _SHOWN_FINDINGS:,} more; " if len(shard.lost) > _SHOWN_FINDINGS else ""
            known = "by its index" if shard.exact else "by name, and perhaps more: there is no index to tell"
            click.echo(
                f"{plain_place(shard.url)}: {more}{counted(len(shard.lost_keys), 'sample')} lost or incomplete {known}"
            )
        if shard.target is None:
            click.echo(f"{plain_place(shard.url)}: not written; --drop-damaged writes the {shard.num_samples:,} others")
    written = [shard for shard in report.shards if shard.target is not None]
    click.echo(
        f"{plain_place(report.target)}: {len(written):,} of {counted(len(report.shards), 'shard')}, "
        f"{counted(sum(shard.num_samples for shard in written), 'sample')}, indexed"
    )


def show_copy(report: CopyReport) -> None:
    """Print the outcome of copying."""
    click.echo(
        f"{report.target}: {counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)}; {report.num_copied:,} copied, "
        f"{report.num_shards - report.num_copied:,} were there already, in {report.seconds:.1f} s "
        f"({_rate(report.num_bytes, report.seconds)})"
    )


def show_info(report: DataSetInfo) -> None:
    """Print totals, and a table of fields."""
    mean = report.num_bytes / report.num_samples if report.num_samples else 0
    click.echo(f"shards    {report.num_shards:,}")
    click.echo(f"samples   {report.num_samples:,}")
    click.echo(f"bytes     {report.num_bytes:,} ({format_bytes(report.num_bytes)}, {format_bytes(mean)} a sample)")
    click.echo(f"chunks    {report.num_chunks:,}")
    click.echo(f"index     {report.index}")
    if report.fingerprint:
        click.echo(f"print     {report.fingerprint}")
    for view in report.views:
        click.echo(f"view      {plain(view.name)}: {view.num_kept:,} of {counted(view.num_samples, 'sample')}")
    if report.columns:
        table = Table("column", "samples", "type", "least", "most", box=None, pad_edge=False)
        for column in report.columns:
            name = f"{plain(column.name)}{' (late)' if column.version else ''}"
            numbers = ("" if one is None else f"{one:,}" for one in (column.least, column.most))
            table.add_row(escape(name), f"{column.num_values:,}", column.type, *numbers)
        Console(width=shutil.get_terminal_size().columns).print(table)
    if report.fields:
        table = Table("field", "samples", "bytes", "mean", "least", "most", box=None, pad_edge=False)
        for field in report.fields:
            sizes = (field.num_bytes, field.num_bytes / field.num_samples, field.min_bytes, field.max_bytes)
            name = f"{plain(field.name)}{' (late)' if field.is_late else ''}"
            table.add_row(escape(name), f"{field.num_samples:,}", *(format_bytes(size) for size in sizes))
        Console(width=shutil.get_terminal_size().columns).print(table)
    _show_findings(report.findings)


def show_sample_line(sample: SampleEntry, *, long: bool, with_columns: bool) -> None:
    """Print one line of ``ls``."""
    fields = " ".join(sample.fields)
    parts = [sample.key, fields]
    if long:
        fields = "  ".join(f"{field}:{size}" for field, size in sample.fields.items())
        parts = [str(sample.number), plain_place(sample.shard), sample.key, fields]
    if with_columns:
        parts.append("  ".join(f"{name}={_value(value)}" for name, value in sample.columns.items()))
    click.echo("\t".join(map(plain, parts)))


def _value(value: object) -> str:
    """Return a column's value as a condition of ``--where`` writes it."""
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "TRUE", False: "FALSE"}[value]
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def show_sample(sample: SampleView) -> None:
    """Print one sample: text as text, everything else by its size."""
    shard = plain_place(sample.entry.shard)
    click.echo(f"key    {plain(sample.entry.key)}\nnumber {sample.entry.number}\nshard  {shard}")
    if sample.entry.columns:
        click.echo(
            "".join(f"column {plain(name)} = {plain(_value(value))}\n" for name, value in sample.entry.columns.items()),
            nl=False,
        )
    for field, payload in sample.payloads.items():
        click.echo(f"--- {plain(field)} ({format_bytes(len(payload))})")
        if is_binary(payload):
            click.echo(f"(binary; write it out with --field {shell_word(field)})")
        else:
            text = payload.decode()
            more = f"\n… {len(text) - _PREVIEW_CHARACTERS:,} characters more"
            click.echo(text[:_PREVIEW_CHARACTERS] + (more if len(text) > _PREVIEW_CHARACTERS else ""))


def is_binary(payload: bytes) -> bool:
    """Tell whether ``payload`` is not text that a terminal can show."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return True
    return _BINARY.search(text.replace("\r\n", "\n")) is not None
