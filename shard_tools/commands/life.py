"""Parse the commands that change a set by versions: ``append``, ``delete``, ``dedupe``, ``split``, ``version``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, get_args

import click

from shard_tools.change.life.dedupe import CONTENT, DedupeReport, Keep, dedupe
from shard_tools.change.life.delete import DeleteReport, delete
from shard_tools.change.life.prune import PruneReport, prune
from shard_tools.change.life.versions import HistoryReport, VersionDiff, VersionReport, compare, history, show, tag
from shard_tools.change.sets.rewrite.split import SplitOptions, SplitReport, split
from shard_tools.make.convert import SOURCE_KINDS
from shard_tools.make.convert.append import AppendReport, append, is_of_tokens
from shard_tools.make.convert.journal import load_journal
from shard_tools.make.convert.pack import Destination
from shard_tools.make.tokens.append import append_tokens
from shard_tools.make.write.writer import DEFAULT_MAX_BYTES
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.processes import ProcessExecutor
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain, plain_place
from shard_tools.terminal.options import (
    COUNT,
    SIZE,
    as_storage_options,
    dry_run_option,
    left_out_options,
    places_and_target,
    report_options,
    unfinished_option,
    union_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit, finish
from streaming.common.arguments import MAX_SEED, counted, format_bytes, parse_share
from streaming.common.platforms import num_cores
from streaming.errors import shell_place, shell_word
from streaming.shards.versions.history import checked_version
from streaming.storage import Storage, redact

_LISTED = 20


def _store(arguments: dict[str, Any]) -> Storage:
    return Storage(as_storage_options(arguments))


@click.command("append")
@dry_run_option
@click.argument("places", nargs=-1, required=True, metavar="SOURCE... SET")
@click.option(
    "--from", "kind", type=click.Choice(SOURCE_KINDS), default="auto", help="Format of SOURCE.  [default: of SET]"
)
@click.option("--tokenizer", metavar="FILE", help="The tokenizer that made SET, if it holds tokens.")
@click.option("--chat-template", metavar="FILE", help="The chat template of SET.  [default: the tokenizer's]")
@click.option(
    "--image-folder", metavar="URL", help="Where the images are that messages name.  [default: beside SOURCE]"
)
@click.option(
    "--workers", type=COUNT, help="Reader threads (default 8), or tokenizer processes (default: one per core)."
)
@left_out_options
@unfinished_option
@report_options
@with_storage_options
def append_command(places: tuple[str, ...], *, as_json: bool, **arguments: Any) -> None:
    """Add the new inputs of each SOURCE to SET, as its next version.

    SET keeps the options of its conversion. Its classes keep their numbers, and new classes get the next ones. Inputs
    that SET already has are not read again, and existing shards are not rewritten. Readers see all new samples or none.

    \b
    Example:
      shard_tools append photos/ s3://bucket/train/
      shard_tools append 'days/2026-11-30/*.jsonl' s3://bucket/web/ --json
    """
    sources, target = places_and_target(places)
    append_all(sources, target, as_json=as_json, **arguments)


def append_all(
    sources: Sequence[str], target: str, *, tokenizer: str | None, chat_template: str | None,
    image_folder: str | None, workers: int | None, on_error: str | None, as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Add sources to a set, and print the totals.

    Raises:
        click.UsageError: A tokenizer is given for a set without tokens.
    """
    storage_options = as_storage_options(arguments)
    directory = Destination.of(target).directory
    has_tokens = is_of_tokens(load_journal(directory, Storage(storage_options)))
    if not has_tokens and (tokenizer or chat_template or image_folder):
        raise click.UsageError(
            f"--tokenizer is for sets of tokens, as --chat-template and --image-folder are; {redact(directory)} is "
            "not one. Leave them out."
        )
    with progress_bar("append", "samples") as progress:
        how = {"storage_options": storage_options, "progress": progress, **arguments}
        if not has_tokens:
            how |= {"workers": workers or DEFAULT_WORKERS["local"], "on_error": on_error or "raise"}
            report = append(sources, target, **how)
        else:
            workers = workers or num_cores()
            made_by: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": chat_template, "on_error": on_error}
            made_by["image_folder"] = image_folder
            with ProcessExecutor(workers) if workers > 1 and tokenizer else nullcontext() as executor:
                report = append_tokens(sources, target, workers=workers, executor=executor, **made_by, **how)
    emit(report, as_json=as_json, for_people=_show_append)


@click.command("delete")
@click.argument("target", metavar="SET")
@click.option("--keys", metavar="FILE", help="Delete the samples with these keys: a file with one per line.")
@click.option("--where", metavar="CONDITION", help='Delete the samples that match, such as "score < 0.2".')
@click.option(
    "--contents",
    metavar="FILE",
    help="Delete the samples with a field of one of these SHA-256 or MD5 digests: a file with one per line.",
)
@click.option("--purge", is_flag=True, help="Remove the old shards, and all untagged versions.")
@click.option("--workers", type=COUNT, default=4, show_default=True, help="Shards written in parallel.")
@click.option("--dry-run", is_flag=True, help="Only report what would be deleted and written.")
@report_options
@with_storage_options
def delete_command(
    target: str, *, keys: str | None, where: str | None, contents: str | None, purge: bool, workers: int,
    dry_run: bool, as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Delete samples from SET, a directory of indexed shards.

    Only the shards that hold them are rewritten, under other names; then the set's next version is published.
    Earlier versions keep the old shards, until --purge or `version prune` removes them. The exit code is 1 if SET has
    none of the samples that a line of --keys or --contents names.

    \b
    Example:
      shard_tools delete s3://bucket/train/ --keys requests.txt --purge
      shard_tools delete s3://bucket/train/ --where "score < 0.2" --dry-run
    """
    if [keys, where, contents].count(None) != 2:
        raise click.UsageError("Give one of --keys FILE, --where CONDITION and --contents FILE.")
    with progress_bar("delete", "shards") as progress:
        report = delete(
            target, storage=_store(arguments), keys=keys, where=where, contents=contents, purge=purge,
            dry_run=dry_run, workers=workers,
            progress=progress,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=_show_delete)
    finish(failed=report.num_not_found > 0)


@click.command("dedupe")
@click.argument("target", metavar="SET")
@click.option(
    "--by", metavar="content|key|FIELD", default=CONTENT, show_default=True,
    help="Compare the bytes of all fields, the keys, or the bytes of one field.",
)  # fmt: skip
@click.option(
    "--keep",
    type=click.Choice(get_args(Keep)),
    default="first",
    show_default=True,
    help="Which one stays.",
)
@click.option("--pairs", metavar="FILE", help="Write each pair to this file, as a line of JSON.")
@click.option("--workers", type=COUNT, default=4, show_default=True, help="Shards written in parallel.")
@click.option("--dry-run", is_flag=True, help="Only report the duplicates.")
@report_options
@with_storage_options
def dedupe_command(
    target: str, *, by: str, keep: Keep, pairs: str | None, workers: int, dry_run: bool, as_json: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    """Remove duplicates from SET, a directory of indexed shards.

    Each duplicate is listed with the sample that stays. Only samples that the index cannot distinguish by keys, sizes
    and checksums are read. Shards are rewritten as by `delete`, as the set's next version.

    \b
    Example:
      shard_tools dedupe s3://bucket/train/ --by jpg --dry-run
      shard_tools dedupe s3://bucket/train/ --by key --keep newest --pairs pairs.jsonl
    """
    storage = _store(arguments)
    with progress_bar("dedupe", "shards") as progress:
        report = dedupe(
            target, storage=storage, by=by, keep=keep, dry_run=dry_run, workers=workers, progress=progress
        )  # fmt: skip
    if pairs is not None:
        storage.put(pairs, b"".join(pair.to_line() for pair in report.pairs))
    emit(report, as_json=as_json, for_people=_show_dedupe)


@click.command("split")
@click.argument("places", nargs=-1, required=True, metavar="SET... TARGET=SHARE...")
@click.option(
    "--group-field", metavar="COLUMN", help="Keep samples with the same value of this column, late or not, together."
)
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Another seed divides otherwise."
)
@click.option("--split", "former", multiple=True, hidden=True, help="Give each target its share instead.")
@click.option("--max-bytes", type=SIZE, default=DEFAULT_MAX_BYTES, show_default=True, help="Maximum size of a shard.")
@click.option("--max-samples", type=COUNT, help="Maximum number of samples in a shard.")
@click.option(
    "--workers", type=COUNT, default=DEFAULT_WORKERS["local"], show_default=True, help="Requests in parallel."
)
@click.option("--overwrite", is_flag=True, help="Delete what the new sets hold and start over.")
@click.option("--dry-run", is_flag=True, help="Only report how many samples each new set would get.")
@union_option
@unfinished_option
@report_options
@with_storage_options
def split_command(
    places: tuple[str, ...], *, former: tuple[str, ...], dry_run: bool, as_json: bool, **arguments: Any
) -> None:
    """Divide the samples of SET among several new sets, each with its share, in one pass.

    A share is 80%, 0.8 or 4/5; what the shares leave of 100% goes into no set. Only the seed and the hash of a
    sample's key, or of its value in a column, decide. So samples keep their set when SET grows, and a group, such as
    all pictures of one person, is never in two sets.

    \b
    Example:
      shard_tools split s3://bucket/all/ s3://bucket/train/=98% s3://bucket/val/=1% s3://bucket/test/=1%
      shard_tools split faces/ faces-train/=80% faces-val/=20% --group-field person --seed 7
    """
    sources, targets = _sources_and_shares(places, former)
    storage_options = as_storage_options(arguments)
    with progress_bar("split", "samples") as progress:
        report = split(
            sources, targets, options=SplitOptions(**arguments), dry_run=dry_run, storage_options=storage_options,
            progress=progress,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=_show_split)


def _sources_and_shares(
    places: Sequence[str], former: Sequence[str]
) -> tuple[list[str], dict[str, Fraction]]:  # fmt: skip
    """Part the arguments of ``split`` into sources and the shares of the targets.

    The first argument is a source. Of the others, those with ``=`` are targets, unless they end with ``/``.

    Args:
        places: The arguments.
        former: Values of the option by which shares were once given.

    Raises:
        click.UsageError: A target is missing, named twice, or follows what it should precede.
        ConfigError: A share is none.
    """
    if former:
        raise click.UsageError(f"--split: each new set is named with its share: {_split_anew(places, former)}")
    first, *rest = places
    named = [place for place in rest if "=" in place and not place.endswith("/")]
    sources, last = [first, *(place for place in rest if place not in named)], [*rest[len(rest) - len(named) :]]
    if not named or last != named:
        wrong = f"{redact(sources[-1])!r} has no share" if named else "there is no TARGET=SHARE"
        raise click.UsageError(
            f"Name the set, and then each new set with its share; {wrong}. For example: shard_tools split "
            f"{shell_place(first)} {shell_word(first.rstrip('/') + '-train/=80%')} "
            f"{shell_word(first.rstrip('/') + '-val/=20%')}"
        )
    targets: dict[str, Fraction] = {}
    for place in named:
        target, _, share = place.rpartition("=")
        if target in targets or not target:
            raise click.UsageError(f"{redact(place)}: each target is named once, as TARGET=SHARE.")
        targets[target] = parse_share(share, name=redact(place))
    return sources, targets


def _split_anew(places: Sequence[str], former: Sequence[str]) -> str:
    """Return the command for shares that were given by an option, as of sets below the last place."""
    *sources, target = places
    shares = dict(one.rpartition("=")[::2] for one in former)
    rest = 1 - sum(parse_share(share, name="--split") for share in shares.values())
    given = ({"train": f"{float(100 * rest):.10g}%"} if rest > 0 else {}) | shares
    new = [shell_word(f"{target.rstrip('/')}/{name}={share}") for name, share in given.items()]
    return " ".join(["shard_tools split", *map(shell_place, sources), *new])


@click.group("version")
def version_group() -> None:
    """Tag, list, show, compare and prune the versions of a set.

    Each change of a set makes its next version. Earlier versions can be opened by number until they are pruned; tagged
    versions can be opened by name until the tag is dropped.

    \b
    Example:
      shard_tools version tag s3://bucket/train/ v3
    """


@version_group.command("tag")
@dry_run_option
@click.argument("target", metavar="SET")
@click.argument("name")
@click.option("--of", "version", metavar="VERSION", help="The version to tag. Default: the current one.")
@report_options
@with_storage_options
def tag_command(target: str, name: str, *, version: str | None, as_json: bool, **arguments: Any) -> None:
    """Tag a version of SET as NAME, so that it is kept: StreamingDataset(SET, version=NAME).

    \b
    Example:
      shard_tools version tag s3://bucket/train/ v3
      shard_tools version tag s3://bucket/train/ before-cleaning --of 7
    """
    report = tag(target, name, storage=_store(arguments), version=checked_version("--of", version))
    emit(report, as_json=as_json, for_people=_show_version)


@version_group.command("list")
@click.argument("target", metavar="SET")
@report_options
@with_storage_options
def list_command(target: str, *, as_json: bool, **arguments: Any) -> None:
    """List the versions of SET that can be opened, and unpublished changes.

    \b
    Example:
      shard_tools version list s3://bucket/train/
    """
    emit(history(target, storage=_store(arguments)), as_json=as_json, for_people=_show_history)


@version_group.command("show")
@click.argument("target", metavar="SET")
@click.argument("version", required=False)
@report_options
@with_storage_options
def show_command(target: str, *, version: str | None, as_json: bool, **arguments: Any) -> None:
    """Show the contents of a version of SET. Default: the current one.

    \b
    Example:
      shard_tools version show s3://bucket/train/ v3
    """
    report = show(target, checked_version("VERSION", version), storage=_store(arguments))
    emit(report, as_json=as_json, for_people=_show_version)


@version_group.command("diff")
@click.argument("target", metavar="SET")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW", required=False)
@report_options
@with_storage_options
def diff_command(target: str, *, old: str, new: str | None, as_json: bool, **arguments: Any) -> None:
    """Show the samples of SET, by key, that only one of the versions OLD and NEW has.

    NEW is the current version by default. Only the key columns of shards that differ are read.

    \b
    Example:
      shard_tools version diff s3://bucket/train/ v3
    """
    old_version, new_version = checked_version("OLD", old), checked_version("NEW", new)
    report = compare(target, old_version, new_version, storage=_store(arguments))
    emit(report, as_json=as_json, for_people=_show_diff)


@version_group.command("prune")
@click.argument("target", metavar="SET")
@click.option(
    "--keep", type=click.IntRange(min=0), default=0, show_default=True, help="Latest untagged versions to keep."
)
@click.option("--drop", multiple=True, metavar="NAME", help="Drop this tagged version, too.")
@click.option(
    "--abandon", multiple=True, metavar="CHANGE", help="Remove the shards of a killed change; see `version list`."
)
@click.option("--dry-run", is_flag=True, help="Only report what would be removed.")
@report_options
@with_storage_options
def prune_command(
    target: str, *, keep: int, drop: tuple[str, ...], abandon: tuple[str, ...], dry_run: bool, as_json: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    """Drop the untagged versions of SET, and remove the shards that no other version holds.

    \b
    Example:
      shard_tools version prune s3://bucket/train/ --keep 3
      shard_tools version prune s3://bucket/train/ --drop v1 --dry-run
    """
    report = prune(target, storage=_store(arguments), keep=keep, drop=drop, abandon=abandon, dry_run=dry_run)
    emit(report, as_json=as_json, for_people=_show_prune)


def _show_append(report: AppendReport) -> None:
    known = f"{counted(report.num_known, 'input')} known already" if report.num_known else ""
    if not report.num_added:
        click.echo(f"nothing new: {known}; version {report.version}, {counted(report.num_samples, 'sample')}")
        return
    click.echo(
        f"{counted(report.num_added, 'sample')} added in {counted(report.num_shards, 'shard')} "
        f"({format_bytes(report.num_bytes)}), version {report.version}: {report.num_samples:,} in all"
        f"{'; ' + known if known else ''}"
    )
    for reason, count in report.left_out.items():
        click.echo(f"  left out: {plain(reason)}: {count:,}", err=True)
    for field, names in report.new_classes.items():
        click.echo(f"  field {field!r}: new classes {', '.join(map(plain, names))}")


def _show_delete(report: DeleteReport) -> None:
    done = "would be deleted" if report.dry_run else f"deleted, version {report.version}"
    click.echo(
        f"{counted(report.num_deleted, 'sample')} in {counted(report.num_shards, 'shard')} "
        f"({format_bytes(report.num_bytes)}) {done}; {report.num_samples:,} stay"
    )
    if report.num_not_found:
        shown = ", ".join(map(plain, report.first_not_found))
        click.echo(f"{counted(report.num_not_found, 'line')} of the list not in the set, such as {shown}", err=True)
    if report.purged is not None:
        _show_prune(report.purged)


def _show_dedupe(report: DedupeReport) -> None:
    for pair in report.pairs[:_LISTED]:
        click.echo(f"{plain(pair.key)} in {plain(pair.shard)} is {plain(pair.kept_key)} in {plain(pair.kept_shard)}")
    if len(report.pairs) > _LISTED:
        click.echo(f"… and {len(report.pairs) - _LISTED:,} more; --pairs FILE or --json names each")
    done = "would be left out" if report.dry_run else f"left out, version {report.version}"
    click.echo(
        f"{counted(report.num_removed, 'sample')} in {counted(report.num_shards, 'shard')} {done}; "
        f"{report.num_samples:,} stay; the bytes of {report.num_compared:,} were compared"
    )


def _show_split(report: SplitReport) -> None:
    for one in report.sets:
        shards = "" if report.dry_run else f"in {counted(one.num_shards, 'shard')}, "
        click.echo(
            f"{plain_place(one.target)}: {one.share}, {counted(one.num_samples, 'sample')} {shards}"
            f"{format_bytes(one.num_bytes)}{' would be written' if report.dry_run else ''}"
        )
    if report.num_left_out:
        click.echo(f"{counted(report.num_left_out, 'sample')} left out, since the shares add up to less than 100%")
    if report.was_complete:
        click.echo("Complete already; nothing written.")


def _show_version(report: VersionReport) -> None:
    names = f" ({', '.join(report.names)})" if report.names else ""
    now = ", the current one" if report.is_current else ""
    click.echo(
        f"version {report.number}{names}{now}: {counted(report.num_samples, 'sample')} in "
        f"{counted(report.num_shards, 'shard')}, {format_bytes(report.num_bytes)}, fingerprint "
        f"{report.fingerprint[:12]}"
    )
    for field, classes in report.classes.items():
        click.echo(f"  {plain(field)}: {counted(len(classes), 'class')}")
    if report.columns:
        click.echo(f"  columns {', '.join(map(plain, report.columns))}")


def _show_history(report: HistoryReport) -> None:
    for one in report.versions:
        _show_version(one)
    for work, words in report.pending.items():
        click.echo(f"{work}: {plain(words)} is not published: it is running, or was killed")


def _show_diff(report: VersionDiff) -> None:
    for count, what, keys, shards in (
        (report.num_added, "added", report.first_added, report.shards_added),
        (report.num_removed, "removed", report.first_removed, report.shards_removed),
    ):
        some = f", such as {', '.join(map(plain, keys))}" if keys else ""
        click.echo(f"{counted(count, 'sample')} {what}{some}; {counted(len(shards), 'shard')} {what}")
    click.echo(f"{counted(report.num_same, 'sample')} in shards of both; versions {report.old} and {report.new}")
    for words in report.schema:
        click.echo(plain(words))


def _show_prune(report: PruneReport) -> None:
    would = "would be " if report.dry_run else ""
    click.echo(
        f"{counted(len(report.dropped), 'version')} {would}dropped, {counted(report.num_shards, 'shard')} "
        f"({format_bytes(report.num_bytes)}) {would}removed; kept besides the current one: "
        f"{', '.join(report.kept) or 'none'}"
    )
