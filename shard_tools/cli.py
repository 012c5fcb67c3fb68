"""Parse the command line: every command is a thin wrapper around one library function.

Exit codes: 0 done; 1 a finding or a failure; 2 wrong usage; 3 a command that checks could not read its subject; 130
stopped by Ctrl-C. Results go to standard output, progress and errors to standard error. An error is a single message,
without a traceback unless ``--debug`` is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click

from shard_tools.change.check.recheck import RecheckReport, recheck, show_recheck
from shard_tools.change.check.verify import VerifyReport, show_verify, verify
from shard_tools.change.columns.lift import lift_all
from shard_tools.change.columns.target import AddReport
from shard_tools.change.columns.video import VideoReport, index_video, show_video
from shard_tools.change.sets.bad_list import load_bad_list, records_of
from shard_tools.change.sets.copied import CHECKS
from shard_tools.change.sets.copy import copy, show_copy
from shard_tools.change.sets.inspect import (
    cat_field,
    describe_sample,
    info,
    is_binary,
    list_samples,
    list_sets,
    show_info,
    show_sample,
    show_sample_line,
    show_set_line,
)
from shard_tools.change.sets.open_set import open_set
from shard_tools.change.sets.reindex import index, show_index
from shard_tools.change.sets.repair import repair, show_repair
from shard_tools.change.sets.rewrite.field_changes import FieldChanges
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard, show_reshard
from shard_tools.commands.bench import bench_command, trace_group
from shard_tools.commands.clean import clean_command
from shard_tools.commands.column import column_group, field_group, show_added, view_group
from shard_tools.commands.diff import diff_command
from shard_tools.commands.doctor import doctor_command
from shard_tools.commands.export import export_command
from shard_tools.commands.life import (
    append_all,
    append_command,
    dedupe_command,
    delete_command,
    split_command,
    version_group,
)
from shard_tools.commands.map import map_command
from shard_tools.commands.plan import plan_command
from shard_tools.commands.show import show_command
from shard_tools.commands.stats import stats_command
from shard_tools.commands.tokens import convert_tokens, take_token_options, tokenizer_options
from shard_tools.look.stats.facts import ValueFacts
from shard_tools.make.convert import SOURCE_KINDS, ConvertOptions, ImageOptions, convert
from shard_tools.make.convert.run import show_convert
from shard_tools.running.engine import DEFAULT_MEMORY, DEFAULT_WORKERS, open_engine
from shard_tools.running.progress import progress_bar
from shard_tools.running.switches import is_on
from shard_tools.terminal.config_file import load_config
from shard_tools.terminal.options import (
    COUNT,
    KEEP_ORDER,
    PAIR,
    SECRET_PAIR,
    SEED,
    SIZE,
    STORAGE_OPTION_NAMES,
    as_storage_options,
    dry_run_option,
    duplicates_option,
    engine_option,
    for_this_run,
    index_option,
    names,
    on_shards,
    on_shards_in_parallel,
    places_and_target,
    refuse_options_of_the_set,
    report_options,
    shard_size_options,
    source_options,
    start_over_option,
    taken,
    typed_option,
    unfinished_option,
    union_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import ToolGroup, emit, emit_line, finish
from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.errors import shell_word
from streaming.shards.catalog.build import home_of, read_schema
from streaming.storage import Storage
from streaming.types import VERSION, DuplicateKeys

_OF_APPEND = frozenset(
    {"sources", "target", "kind", "workers", "appends", "tokenizer", "chat_template", "allow_unfinished", "on_error",
     "max_bad", "as_json", "dry_run", "quiet", "debug", *STORAGE_OPTION_NAMES}
)  # fmt: skip
_LISTED = 20  # samples that ls shows unless it is asked for more
_COPY_WORKERS = DEFAULT_WORKERS | {"local": 4}


@click.group(
    cls=ToolGroup,
    commands={
        "column": column_group,
        "field": field_group,
        "view": view_group,
        "plan": plan_command,
        "append": append_command,
        "clean": clean_command,
        "dedupe": dedupe_command,
        "delete": delete_command,
        "diff": diff_command,
        "doctor": doctor_command,
        "export": export_command,
        "map": map_command,
        "bench": bench_command,
        "stats": stats_command,
        "trace": trace_group,
        "show": show_command,
        "split": split_command,
        "version": version_group,
    },
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "auto_envvar_prefix": "SHARD_TOOLS",
    },
)
@click.version_option(VERSION, "--version", "shows_version", prog_name="shard_tools")
@click.option(
    "--config", metavar="FILE", is_eager=True, expose_value=False, callback=load_config,
    help='Take options from this TOML file, such as max-bytes = "1GB" below [convert].',
)  # fmt: skip
def cli() -> None:
    """Pack, index, check and inspect WebDataset tar shards in any store.

    Every option may also come from the environment: SHARD_TOOLS_CONVERT_MAX_BYTES=1GB is --max-bytes of convert.

    \b
    Example:
      shard_tools convert photos/ s3://bucket/train/
      shard_tools verify s3://bucket/train/
    """


@cli.command("convert")
@dry_run_option
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("target")
@click.option("--from", "kind", type=click.Choice(SOURCE_KINDS), default="auto", help="Format of SOURCE.")
@shard_size_options
@click.option(
    "--shuffle",
    metavar="SEED|none",
    type=SEED,
    help="Shuffle the records (not of CSV and tars).  [default: none; of folders of several classes 0]",
)
@click.option("--key", "key_field", metavar="FIELD", help="Take keys from this column; 'number': count them.")
@click.option(
    "--field",
    "fields",
    type=PAIR,
    multiple=True,
    metavar="COLUMN=EXT",
    help="Store this column as a separate field, such as image=jpg or text=txt; COLUMN=- drops it.",
)
@click.option(
    "--classes",
    metavar="FILE|URL|NAMES",
    help="Number classes as in this list, folder or converted set. Default: as in train/ beside SOURCE or TARGET.",
)
@click.option(
    "--columns",
    type=names,
    default=(),
    help="Scalar columns to store in the index as well, for filters.",
)
@click.option(
    "--max-gzip-ratio",
    type=click.FloatRange(min=1),
    default=MAX_GZIP_RATIO,
    show_default=True,
    help="Refuse a compressed file that inflates to more than this many times its size.",
)
@source_options
@tokenizer_options
@engine_option
@click.option(
    "--workers",
    type=COUNT,
    help="Reader threads (default 8), Ray tasks (default 64), or tokenizer processes (default: one per core).",
)
@start_over_option
@click.option("--append", "appends", is_flag=True, help="Add new inputs to the set in TARGET, with the set's options.")
@unfinished_option
@report_options
@with_storage_options
def convert_command(
    sources: tuple[str, ...], target: str, *, engine: str, workers: int | None, as_json: bool, shuffle: Any,
    max_side: int | None, quality: int | None, image_format: str | None, image_fields: tuple[str, ...], appends: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    """Pack each SOURCE into indexed tar shards in TARGET.

    SOURCE is a folder (or .zip) of images, sounds or any files, of COCO, Pascal VOC or Hugging Face, or JSON, Parquet,
    CSV, text (.txt), token ids or tar files: a file, a folder, or a pattern. Several follow each other in one set. With
    --tokenizer, documents become token ids: field tok, column tokens. The same source and options always give the same
    bytes. A conversion that was stopped continues where it left off when it is run again.

    \b
    Example:
      shard_tools convert photos/ s3://bucket/train/ --max-bytes 256MB
      shard_tools convert 'web-*.jsonl' shards/ --key id --columns tokens,lang
      shard_tools convert photos.zip shards/ --image-max-side 512 --format webp
      shard_tools convert coco/ shards/ --source-split train2017
      shard_tools convert table.parquet shards/ --field image=jpg --shuffle 7
      shard_tools convert web.jsonl.zst tokens/ --tokenizer tokenizer.json --text-field text --split val=0.5%
    """
    if appends:
        refuse_options_of_the_set(_OF_APPEND)
        taken = ("kind", "allow_unfinished", "on_error", "max_bad", "tokenizer", "chat_template", *STORAGE_OPTION_NAMES)
        append_all(sources, target, workers=workers, as_json=as_json, **{name: arguments[name] for name in taken})
        return
    storage_options = as_storage_options(arguments)
    arguments["on_error"] = arguments["on_error"] or "raise"
    arguments |= {"keep_order": True} if shuffle == KEEP_ORDER else {"shuffle_seed": shuffle}
    images = ImageOptions(max_side=max_side, quality=quality, format=image_format, fields=image_fields)
    tokens = take_token_options(arguments)
    if tokens:
        tokens |= {"storage_options": storage_options, "images": images, **arguments}
        convert_tokens(sources, target, engine=engine, workers=workers, as_json=as_json, **tokens)
        return
    threads = workers if workers and engine == "local" else DEFAULT_WORKERS["local"]
    options = ConvertOptions(workers=threads, images=images, **arguments)
    with open_engine(engine, workers) as executor, progress_bar("convert", "samples") as progress:
        report = convert(
            sources, target, options=options, storage_options=storage_options, executor=executor, progress=progress
        )
    emit(report, as_json=as_json, for_people=show_convert)


@cli.command("index")
@dry_run_option
@on_shards_in_parallel()
@click.option("--force", is_flag=True, help="Rebuild existing indexes.")
@click.option("--prune", is_flag=True, help="Remove shards that no longer exist from the index.")
@click.option(
    "--columns",
    type=names,
    default=(),
    metavar="PATH,...",
    help="Afterwards add late columns with values from the samples, such as json.similarity.",
)
@click.option(
    "--video",
    type=names,
    is_flag=False,
    flag_value="",
    metavar="[FIELD,...]",
    help="Afterwards index the packets, frames and groups of pictures of videos; default: all of them.",
)
@duplicates_option
@on_shards
def index_command(
    urls: tuple[str, ...], *, storage: Storage, index_url: str | None, engine: str, workers: int | None,
    columns: tuple[str, ...], video: tuple[str, ...] | None, allow_unfinished: bool, as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Build the index of existing shards, beside them or at --index. A run that was stopped can be continued.

    An existing index is checked, and its damaged files are rebuilt.

    \b
    Example:
      shard_tools index 's3://bucket/train/{000000..000099}.tar'
      shard_tools index https://host/public/train/ --index ./train-index/
      shard_tools index s3://bucket/laion/ --columns json.similarity,json.width
      shard_tools index robots/ --video
    """
    workers = workers or DEFAULT_WORKERS[engine]
    place: dict[str, Any] = {"storage": storage, "index_url": index_url, "allow_unfinished": allow_unfinished}
    place |= {"workers": workers}
    with open_engine(engine, workers) as executor, progress_bar("index", "shards") as progress:
        arguments["remakes_videos"] = video is not None
        report = index(urls, executor=executor, progress=progress, **place, **arguments)
    if not as_json:  # whose columns are part of it
        emit(report, as_json=False, for_people=show_index)
    with (
        open_engine(engine if columns else "local", workers) as executor,
        progress_bar("columns", "shards") as progress,
    ):
        added = tuple(lift_all(urls, columns, executor=executor, progress=progress, **place))
    videos = None
    if video is not None:
        with open_engine(engine, workers) as executor, progress_bar("videos", "shards") as progress:
            videos = index_video(
                urls, video, executor=executor, progress=progress, force=bool(arguments["force"]), **place
            )
    emit(replace(report, columns=added, video=videos), as_json=as_json, for_people=lambda _: _show_added(added, videos))
    finish(failed=bool(report.findings or (videos is not None and videos.findings)))


def _show_added(columns: Sequence[AddReport], videos: VideoReport | None) -> None:
    for one in columns:
        show_added(one)
    if videos is not None:
        show_video(videos)


@cli.command("verify")
@click.argument("urls", nargs=-1, metavar="URL...")
@index_option
@click.option("--decode", is_flag=True, help="Also decode every field.")
@click.option(
    "--bad",
    multiple=True,
    metavar="FILE",
    help="Check and decode only the samples in this list (a loader's bad_samples_file); '*' matches several files.",
)
@click.option("--write-bad", metavar="FILE", help="Write the bad samples to such a list, for reshard --drop.")
@duplicates_option
@on_shards_in_parallel()
@unfinished_option
@report_options
@with_storage_options
def verify_command(
    urls: tuple[str, ...],
    *,
    bad: tuple[str, ...],
    write_bad: str | None,
    decode: bool,
    duplicate_keys: DuplicateKeys,
    engine: str,
    workers: int | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Check the index against every byte of the shards.

    Every problem is listed. With --bad, check only the samples in a list, in these shards or (without URL) in all
    shards of the list, and show which are still bad, and why.

    \b
    Example:
      shard_tools verify s3://bucket/train/ --json > findings.json
      shard_tools verify --bad 'bad-*.jsonl'
    """
    storage = Storage(as_storage_options(arguments))
    if not urls and not bad:
        raise click.UsageError("Give the URL of shards, or a list of bad samples with --bad.")
    report: VerifyReport | RecheckReport
    workers = workers or DEFAULT_WORKERS[engine]
    with open_engine(engine, workers) as executor, progress_bar("verify", "shards") as progress:
        arguments |= {"storage": storage, "workers": workers, "executor": executor, "progress": progress}
        if bad:
            report = recheck(urls, load_bad_list(bad, storage), **arguments)
        else:
            report = verify(urls, decode=decode, duplicate_keys=duplicate_keys, **arguments)
    if write_bad is not None:
        storage.put(write_bad, b"".join(record.to_line() for record in records_of(report.findings)))
    show = show_verify if isinstance(report, VerifyReport) else show_recheck
    emit(report, as_json=as_json, for_people=show)
    finish(failed=bool(report.findings))


@cli.command("reshard")
@dry_run_option
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... TARGET")
@shard_size_options
@click.option("--shuffle", is_flag=True, help="Shuffle all samples.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of --shuffle.  [default: 0]")
@click.option("--sort", metavar="COLUMN", help="Sort by a column, or by __key__.")
@click.option("--descending", is_flag=True, help="Sort in descending order.")
@click.option("--where", metavar="CONDITION", help='Keep only samples that match, such as "tokens >= 512".')
@click.option("--view", metavar="NAME", help="Keep only the samples of a saved view.")
@click.option("--columns", type=names, default=(), metavar="A,B", help="Late columns to keep, in the sample tables.")
@click.option(
    "--drop-missing", type=names, default=(), metavar="EXT,...", help="Leave out samples that lack one of these fields."
)
@union_option
@click.option("--fields", type=names, metavar="EXT,...", help="Keep only these fields.")
@click.option("--drop-fields", type=names, default=(), metavar="EXT,...", help="Leave out these fields.")
@click.option("--rename", type=PAIR, multiple=True, metavar="EXT=NEW", help="Give a field another name.")
@click.option(
    "--add",
    type=PAIR,
    multiple=True,
    metavar="EXT=COLUMN",
    help="Make a field from the values of a column, late or not.",
)
@click.option(
    "--dedupe", is_flag=True, help="Merge samples with the same key; if a field occurs twice, keep the first."
)
@click.option(
    "--key-prefix", default="", metavar="TEXT", help="Prefix for every key; may contain {shard} and {number}."
)
@click.option("--drop", multiple=True, metavar="FILE", help="Leave out the samples in this list (see verify).")
@click.option("--exclude", metavar="FILE", help="Leave out the samples of this file of keys, one per line.")
@click.option(
    "--memory",
    "memory_bytes",
    type=SIZE,
    default=DEFAULT_MEMORY,
    show_default=True,
    help="Memory for samples in transit when the order changes (on Ray, of each task); more means fewer, larger "
    "requests.",
)
@engine_option
@click.option("--workers", type=COUNT, help="Requests in parallel (default 8), or Ray tasks (default 64).")
@start_over_option
@index_option
@unfinished_option
@report_options
@with_storage_options
def reshard_command(
    sources: tuple[str, ...],
    *,
    engine: str,
    workers: int | None,
    shuffle: bool,
    seed: int | None,
    fields: tuple[str, ...] | None,
    drop_missing: tuple[str, ...],
    as_json: bool,
    **arguments: Any,
) -> None:
    """Write the samples of SOURCE into new shards in TARGET.

    Samples can be split, merged, shuffled, sorted or filtered, by late columns, too. Fields keep their bytes, and
    samples keep the columns of their sample tables. Every byte read is checked; a damaged sample is an error unless
    --drop lists it. A run that was stopped continues where it left off when it is run again.

    \b
    Example:
      shard_tools reshard s3://bucket/raw/ s3://bucket/train/ --max-bytes 1GB --shuffle --seed 7
      shard_tools reshard shards/ english/ --where "tokens >= 512 and lang = 'en'" --sort tokens
      shard_tools reshard shards/ clean/ --drop 'bad-*.jsonl' --drop-missing jpg,txt
      shard_tools reshard shards/ good/ --where "score >= 0.3" --columns score
      shard_tools reshard scattered/ whole/ --dedupe
      shard_tools reshard shards/ renamed/ --rename jpeg=jpg --drop-fields pdf --add txt=caption
    """
    places, target = places_and_target(sources)
    if seed is not None and not shuffle:
        raise click.UsageError("--seed is the seed of --shuffle; give both.")
    options = ReshardOptions(
        workers=workers if workers and engine == "local" else DEFAULT_WORKERS["local"],
        shuffle_seed=(seed or 0) if shuffle else None,
        fields=None if fields is None else tuple(name.lstrip(".") for name in fields),
        drop_missing=tuple(name.lstrip(".") for name in drop_missing),
        changes=_changes(arguments),
        **taken(ReshardOptions, arguments),
    )
    with open_engine(engine, workers) as executor, progress_bar("reshard", "samples") as progress:
        report = reshard(
            places, target, options=options, storage_options=as_storage_options(arguments), executor=executor,
            progress=progress,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=show_reshard)


def _changes(arguments: dict[str, Any]) -> FieldChanges:
    """Take the options that change fields."""
    rename, drop, add = (arguments.pop(name) for name in ("rename", "drop_fields", "add"))
    return FieldChanges(
        rename=tuple((old.lstrip("."), new.lstrip(".").lower()) for old, new in rename),
        drop=tuple(name.lstrip(".") for name in drop),
        add=tuple((name.lstrip(".").lower(), column) for name, column in add),
    )


@cli.command("repair")
@dry_run_option
@click.option("--to", "target", required=True, metavar="TARGET", help="Folder or prefix for the repaired shards.")
@click.option("--drop-damaged", is_flag=True, help="Also write shards that have lost samples.")
@on_shards
def repair_command(urls: tuple[str, ...], *, target: str, as_json: bool, **arguments: Any) -> None:
    """Salvage the intact samples of damaged tars to TARGET.

    Shards keep their names and are indexed; losses are reported. Repairs a missing end-of-archive marker, archives
    concatenated with cat, and hard links. If the shards have an index, its checksums identify damaged bytes. A shard
    that has lost samples is left out unless --drop-damaged is given.

    \b
    Example:
      shard_tools repair shards/000007.tar --to repaired/
      shard_tools repair s3://bucket/train/ --to s3://bucket/saved/ --drop-damaged --json
    """
    with progress_bar("repair", "shards") as progress:
        report = repair(urls, target, progress=progress, **arguments)
    emit(report, as_json=as_json, for_people=show_repair)
    finish(failed=not report.ok)


@cli.command("copy")
@dry_run_option
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... TARGET")
@click.option(
    "--target-option",
    type=SECRET_PAIR,
    multiple=True,
    metavar="K=V",
    help="Option of the target's store, such as endpoint_url=URL; the other store options then apply to SOURCE only.",
)
@on_shards_in_parallel(_COPY_WORKERS["local"])
@click.option("--overwrite", is_flag=True, help="Replace shards of the same name that differ.")
@click.option(
    "--delete", is_flag=True, help="Delete shards in TARGET that an earlier copy brought and SOURCE has no longer."
)
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="recorded",
    show_default=True,
    help="Shards that are there: read only those without recorded checksums, or all.",
)
@index_option
@unfinished_option
@report_options
@with_storage_options
def copy_command(
    sources: tuple[str, ...], *, target_option: tuple[tuple[str, str], ...], engine: str, workers: int | None,
    as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Copy the shards of SOURCE and their index to TARGET.

    Every byte is checked, and the index is written last. Run again, after a stop or for a set that has grown, it reads
    nothing that is there with the right size and recorded checksums. --check full reads all of it.

    \b
    Example:
      shard_tools copy s3://bucket/train/ /data/train/
      shard_tools copy s3://bucket/train/ s3://backup/train/ --delete
      shard_tools copy shards/ s3://bucket/train/ --target-option endpoint_url=https://host:9000
    """
    places, target = places_and_target(sources)
    storage_options = as_storage_options(arguments)
    given = {key: typed_option(key, text) for key, text in target_option}
    target_options = for_this_run(given) if given else None
    workers = workers or _COPY_WORKERS[engine]
    with open_engine(engine, workers) as executor, progress_bar("copy", "shards") as progress:
        report = copy(
            places, target, storage_options=storage_options, target_options=target_options, workers=workers,
            executor=executor, progress=progress, **arguments,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=show_copy)


@cli.command("info")
@on_shards
def info_command(urls: tuple[str, ...], *, as_json: bool, **arguments: Any) -> None:
    """Summarize a dataset.

    Shows shards, samples, bytes, views, columns (late ones, too), fields, the index, and shards that are missing or
    truncated.

    \b
    Example:
      shard_tools info s3://bucket/train/
    """
    with progress_bar("read", "shards") as progress:
        report = info(urls, progress=progress, **arguments)
    emit(report, as_json=as_json, for_people=show_info)
    finish(failed=bool(report.findings))


@cli.command("ls")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after N samples.  [default: 20]")
@click.option("--all", "is_all", is_flag=True, help="List all samples; --json does, unless --limit is given.")
@click.option("--where", metavar="CONDITION", help="List only samples that match; see docs/filters.md.")
@click.option("--view", metavar="NAME", help="List only the samples of a saved view.")
@click.option("--columns", type=names, metavar="A,B", help="Show the values of these columns, also of late ones.")
@click.option("--long", is_flag=True, help="Also show number, shard and the size of every field.")
@on_shards
def ls_command(
    urls: tuple[str, ...], *, columns: tuple[str, ...] | None, long: bool, is_all: bool, limit: int | None,
    as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """List samples with their keys and fields; of a prefix that holds several sets, the sets.

    Sets come with the kinds of their fields and their sizes; --limit, --all, --long, --where, --view or --columns lists
    the samples of all. --json prints one object per line.

    \b
    Example:
      shard_tools ls s3://bucket/
      shard_tools ls s3://bucket/train/ --limit 20 --long
      shard_tools ls s3://bucket/train/ --where "score >= 0.9 and lang = 'en'" --columns score,lang
    """
    asked = (limit is not None, is_all, long, columns is not None, arguments["where"], arguments["view"])
    storage, index_url, allow_unfinished = (arguments[name] for name in ("storage", "index_url", "allow_unfinished"))
    opened = None if limit == 0 else open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    sets = [] if any(asked) or opened is None else list_sets(opened, storage)
    for one in sets:
        emit_line(one, as_json=as_json, for_people=show_set_line)
    if sets:
        return
    if is_all and limit is not None:
        raise click.UsageError("--all and --limit: one lists all samples, the other N of them; give one.")
    most = _LISTED if limit is None and not is_all and not as_json else limit
    more: list[int] = []
    show = partial(show_sample_line, long=long, with_columns=columns is not None)
    for sample in list_samples(urls, columns=columns, limit=most, opened=opened, more=more.append, **arguments):
        emit_line(sample, as_json=as_json, for_people=show)
    num_more = more[0] if more else 0
    if limit is None and num_more and not as_json and not is_on("quiet"):
        click.echo(f"… {num_more:,} more; --all lists them, --limit N the first N", err=True)


@cli.command("cat")
@click.argument("url")
@click.argument("sample")
@index_option
@click.option("--field", metavar="EXT", help="Write only the bytes of this field.")
@click.option("--tokenizer", metavar="FILE", help="Show tokens as text, by the file that made them.")
@unfinished_option
@report_options
@with_storage_options
def cat_command(
    url: str, sample: str, *, index_url: str | None, field: str | None, tokenizer: str | None, allow_unfinished: bool,
    as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Show one SAMPLE, given by its key or its number: its columns, late ones too, and its fields.

    Arrays, images, sounds and videos are shown by size, rate and duration, tokens as text with --tokenizer. --field
    writes the raw bytes of one field. Digits are looked up as a key first, and as a number if there is no such key.

    \b
    Example:
      shard_tools cat s3://bucket/train/ cats/0001
      shard_tools cat s3://bucket/train/ 1234 --field jpg > picture.jpg
    """
    opened: dict[str, Any] = {"storage": Storage(as_storage_options(arguments)), "index_url": index_url}
    opened["allow_unfinished"] = allow_unfinished
    if field is None:
        shown = describe_sample(url, sample, **opened)
        home = home_of(shown.entry.shard, index_url)
        facts = ValueFacts.of(read_schema(opened["storage"], home), tokenizer, opened["storage"])
        shown = replace(shown, facts=facts.of_fields(shown.payloads))
        emit(shown, as_json=as_json, for_people=show_sample)
        return
    if as_json:
        raise click.UsageError("--json and --field cannot be combined: --field writes raw bytes.")
    payload = cat_field(url, sample, field, **opened)
    if sys.stdout.isatty() and is_binary(payload):
        raise click.UsageError(
            f"field {field!r} is binary; send it to a file: ... --field {shell_word(field)} > "
            f"{shell_word(f'file.{field}')}"
        )
    click.echo(payload, nl=False)
