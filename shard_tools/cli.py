"""Parse the command line: every verb is a thin command over one library function.

Exit codes: 0 done, 1 a finding or a failure, 2 wrong usage, 130 stopped by Ctrl-C. Results go to standard output,
progress and errors to standard error; an error is one message without a traceback unless ``--debug`` is given.
"""

from __future__ import annotations

import math
import sys
from typing import Any, get_args

import click

from infra import DeviceMesh
from shard_tools import render
from shard_tools.check.recheck import RecheckReport, recheck
from shard_tools.check.verify import VerifyReport, verify
from shard_tools.column_verbs import column_group, show_added, view_group
from shard_tools.columns.lift import lift_all
from shard_tools.convert import SOURCE_KINDS, ConvertOptions, convert
from shard_tools.options import (
    COUNT,
    PAIR,
    SIZE,
    as_storage_options,
    duplicates_option,
    engine_option,
    index_option,
    json_option,
    names,
    on_shards,
    typed_option,
    with_storage_options,
)
from shard_tools.plan.report import PlanOptions, plan_opened
from shard_tools.plan.sources import chosen_of, open_planned
from shard_tools.plan.steps import open_run, parse_steps, show_steps
from shard_tools.plan.view import save_plot, show_plan
from shard_tools.running.engine import DEFAULT_WORKERS, open_engine
from shard_tools.running.progress import progress_bar
from shard_tools.sets.bad_list import load_bad_list, records_of
from shard_tools.sets.copy import copy
from shard_tools.sets.inspect import cat_field, describe_sample, info, list_samples
from shard_tools.sets.reindex import index
from shard_tools.sets.repair import repair
from shard_tools.sets.reshard import ReshardOptions, reshard
from shard_tools.token_verbs import convert_tokens, take_token_options, tokenizer_options
from shard_tools.verbs import ToolGroup, emit, finish
from streaming.storage import Storage
from streaming.tar.samples import MAX_GZIP_RATIO
from streaming.types import VERSION, DuplicateKeys, LastBatch

_DEFAULT_MAX_BYTES = "256MB"  # a few seconds of one connection; 100 TB are 400,000 objects
_RESHARD_OPTIONS: tuple[str, ...] = ("max_bytes", "max_samples", "sort", "descending", "where", "drop", "overwrite")
_RESHARD_OPTIONS += ("memory_bytes", "workers", "index_url", "dedupe", "key_prefix")


@click.group(
    cls=ToolGroup,
    commands={"column": column_group, "view": view_group},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, prog_name="shard_tools")
def cli() -> None:
    """Pack, index, check and show WebDataset tar shards, in any store.

    \b
    Example:
      shard_tools convert photos/ s3://bucket/train/
      shard_tools verify s3://bucket/train/
    """


@cli.command("convert")
@click.argument("source")
@click.argument("target")
@click.option("--from", "kind", type=click.Choice(SOURCE_KINDS), default="auto", help="What SOURCE is.")
@click.option("--max-bytes", type=SIZE, default=_DEFAULT_MAX_BYTES, show_default=True, help="Largest shard.")
@click.option("--max-samples", type=COUNT, help="Most samples of a shard.")
@click.option("--shuffle", "shuffle_seed", type=click.IntRange(min=0), metavar="SEED", help="Mix the records.")
@click.option("--key", "key_field", metavar="FIELD", help="Take keys from this field; 'number' counts.")
@click.option(
    "--field",
    "fields",
    type=PAIR,
    multiple=True,
    metavar="COLUMN=EXT",
    help="Store this column as a field of its own, say image=jpg or text=txt; COLUMN=- drops it.",
)
@click.option(
    "--classes",
    metavar="FILE|URL|NAMES",
    help="Number classes as this list, folder or converted set has them. Default: as train/ beside SOURCE or TARGET.",
)
@click.option(
    "--columns",
    type=names,
    default=(),
    help="Scalar columns that the index shall hold too, for filters.",
)
@click.option(
    "--max-gzip-ratio",
    type=click.FloatRange(min=1),
    default=MAX_GZIP_RATIO,
    show_default=True,
    help="Refuse a .tar.gz that inflates to more than so many times its size.",
)
@tokenizer_options
@engine_option
@click.option(
    "--workers",
    type=COUNT,
    help="Reading threads (default 8), tasks on Ray (64), or processes of a tokenizer (as many as processors).",
)
@click.option("--overwrite", is_flag=True, help="Delete what the target holds, and begin anew.")
@json_option
@with_storage_options
def convert_command(
    source: str, target: str, *, engine: str, workers: int | None, as_json: bool, **arguments: Any
) -> None:
    """Pack SOURCE (a folder of images, JSONL, Parquet, CSV, text, tars) into indexed tar shards in TARGET.

    With --tokenizer, documents become token ids: field tok, column tokens. The same source gives the same bytes. A
    conversion that was stopped goes on where it was when run again.

    \b
    Example:
      shard_tools convert photos/ s3://bucket/train/ --max-bytes 256MB
      shard_tools convert 'web-*.jsonl' shards/ --key id --columns tokens,lang
      shard_tools convert table.parquet shards/ --field image=jpg --shuffle 7
      shard_tools convert web.jsonl.zst tokens/ --tokenizer tokenizer.json --text-field text --split val=0.5%
    """
    storage_options = as_storage_options(arguments)
    tokens = take_token_options(arguments)
    if tokens:
        tokens |= {"storage_options": storage_options, **arguments}
        convert_tokens(source, target, engine=engine, workers=workers, as_json=as_json, **tokens)
        return
    threads = workers if workers and engine == "local" else DEFAULT_WORKERS["local"]
    options = ConvertOptions(workers=threads, **arguments)
    with open_engine(engine, workers) as executor, progress_bar("convert", "samples") as progress:
        report = convert(
            source, target, options=options, storage_options=storage_options, executor=executor, progress=progress
        )
    emit(report, as_json=as_json, for_people=render.show_convert)


@cli.command("index")
@engine_option
@click.option("--workers", type=COUNT, help="Shards at a time (default 8; on Ray 64).")
@click.option("--force", is_flag=True, help="Index anew what has an index.")
@click.option("--prune", is_flag=True, help="Take shards that are gone out of the index.")
@click.option(
    "--columns",
    type=names,
    default=(),
    metavar="PATH,...",
    help="Then lift late columns out of the samples, such as json.similarity.",
)
@duplicates_option
@on_shards
def index_command(
    urls: tuple[str, ...], *, storage: Storage, index_url: str | None, engine: str, workers: int | None,
    columns: tuple[str, ...], as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Build the index of existing shards, beside them or at --index. Goes on where it was stopped.

    \b
    Example:
      shard_tools index 's3://bucket/train/{000000..000099}.tar'
      shard_tools index https://host/public/train/ --index ./train-index/
      shard_tools index s3://bucket/laion/ --columns json.similarity,json.width
    """
    workers = workers or DEFAULT_WORKERS[engine]
    with open_engine(engine, workers) as executor, progress_bar("index", "shards") as progress:
        report = index(
            urls, storage=storage, index_url=index_url, workers=workers, executor=executor, progress=progress,
            **arguments,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=render.show_index)
    threads = workers if engine == "local" else DEFAULT_WORKERS["local"]
    with progress_bar("columns", "shards") as progress:
        added = lift_all(urls, columns, storage=storage, index_url=index_url, workers=threads, progress=progress)
    for one in added if not as_json else ():
        show_added(one)


@cli.command("verify")
@click.argument("urls", nargs=-1, metavar="URL...")
@index_option
@click.option("--decode", is_flag=True, help="Decode every field too.")
@click.option(
    "--bad",
    multiple=True,
    metavar="FILE",
    help="Check only the samples on this list (a loader's bad_samples_file), and decode them; '*' for several files.",
)
@click.option("--write-bad", metavar="FILE", help="Write the samples found bad to such a list, for reshard --drop.")
@duplicates_option
@click.option("--workers", type=COUNT, default=8, show_default=True, help="Shards at a time.")
@json_option
@with_storage_options
def verify_command(
    urls: tuple[str, ...],
    *,
    bad: tuple[str, ...],
    write_bad: str | None,
    decode: bool,
    duplicate_keys: DuplicateKeys,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Check every promise of the index against every byte of the shards; list all that fails.

    With --bad, only the samples on a list, of these shards or (without URL) of all shards on it: which are still
    bad, and why.

    \b
    Example:
      shard_tools verify s3://bucket/train/ --json > findings.json
      shard_tools verify --bad 'bad-*.jsonl'
    """
    storage = Storage(as_storage_options(arguments))
    if not urls and not bad:
        raise click.UsageError("Give the URL of shards, or a list of bad samples with --bad.")
    report: VerifyReport | RecheckReport
    with progress_bar("verify", "shards") as progress:
        if bad:
            report = recheck(urls, load_bad_list(bad, storage), storage=storage, progress=progress, **arguments)
        else:
            report = verify(
                urls, storage=storage, decode=decode, duplicate_keys=duplicate_keys, progress=progress, **arguments
            )
    if write_bad is not None:
        storage.put(write_bad, b"".join(record.to_line() for record in records_of(report.findings)))
    show = render.show_verify if isinstance(report, VerifyReport) else render.show_recheck
    emit(report, as_json=as_json, for_people=show)
    finish(failed=bool(report.findings))


@cli.command("reshard")
@click.argument("source")
@click.argument("target")
@click.option("--max-bytes", type=SIZE, default=_DEFAULT_MAX_BYTES, show_default=True, help="Largest shard.")
@click.option("--max-samples", type=COUNT, help="Most samples of a shard.")
@click.option("--shuffle", is_flag=True, help="Mix all samples.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of --shuffle.  [default: 0]")
@click.option("--sort", metavar="COLUMN", help="Sort by a column of the sample table, or by __key__.")
@click.option("--descending", is_flag=True, help="Sort the largest first.")
@click.option("--where", metavar="CONDITION", help='Take only samples that fit, such as "tokens >= 512".')
@click.option("--fields", type=names, metavar="EXT,...", help="Keep only these fields.")
@click.option("--dedupe", is_flag=True, help="One sample a key: fields are joined, the first of each stays.")
@click.option("--key-prefix", default="", metavar="TEXT", help="Before every key; may hold {shard} and {number}.")
@click.option("--drop", multiple=True, metavar="FILE", help="Leave out the samples on this list (see verify).")
@click.option(
    "--memory",
    "memory_bytes",
    type=SIZE,
    default="1GiB",
    show_default=True,
    help="For samples on their way, where the order changes: more means fewer and larger requests.",
)
@click.option("--workers", type=COUNT, default=8, show_default=True, help="Requests at a time.")
@click.option("--overwrite", is_flag=True, help="Delete what the target holds, and begin anew.")
@index_option
@json_option
@with_storage_options
def reshard_command(
    source: str,
    target: str,
    *,
    shuffle: bool,
    seed: int | None,
    fields: tuple[str, ...] | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Write the samples of SOURCE into new shards in TARGET: split, merged, mixed, sorted or filtered.

    Fields keep their bytes, samples their columns in the index. Every byte read is checked; a damaged sample is an
    error unless --drop lists it. A run that was stopped goes on where it was when run again.

    \b
    Example:
      shard_tools reshard s3://bucket/raw/ s3://bucket/train/ --max-bytes 1GB --shuffle --seed 7
      shard_tools reshard shards/ english/ --where "tokens >= 512 and lang = 'en'" --sort tokens
      shard_tools reshard shards/ clean/ --drop 'bad-*.jsonl'
      shard_tools reshard scattered/ whole/ --dedupe
    """
    if seed is not None and not shuffle:
        raise click.UsageError("--seed is the seed of --shuffle; give both.")
    options = ReshardOptions(
        shuffle_seed=(seed or 0) if shuffle else None,
        fields=None if fields is None else tuple(name.lstrip(".") for name in fields),
        **{name: arguments.pop(name) for name in _RESHARD_OPTIONS},
    )
    with progress_bar("reshard", "samples") as progress:
        report = reshard(
            source, target, options=options, storage_options=as_storage_options(arguments), progress=progress
        )
    emit(report, as_json=as_json, for_people=render.show_reshard)


@cli.command("repair")
@click.option("--to", "target", required=True, metavar="TARGET", help="Folder or prefix for what is saved.")
@click.option("--drop-damaged", is_flag=True, help="Also write shards of which samples are lost.")
@on_shards
def repair_command(urls: tuple[str, ...], *, target: str, as_json: bool, **arguments: Any) -> None:
    """Write what can be saved of damaged tars to TARGET, under their names, indexed; say what is lost.

    Mends a missing end-of-archive mark, archives joined by cat, and hard links. Where the shards have an index, its
    checksums tell damaged bytes. A shard of which samples are lost is left out unless --drop-damaged is given.

    \b
    Example:
      shard_tools repair shards/000007.tar --to repaired/
      shard_tools repair s3://bucket/train/ --to s3://bucket/saved/ --drop-damaged --json
    """
    with progress_bar("repair", "shards") as progress:
        report = repair(urls, target, progress=progress, **arguments)
    emit(report, as_json=as_json, for_people=render.show_repair)
    finish(failed=not report.ok)


@cli.command("copy")
@click.argument("source")
@click.argument("target")
@click.option(
    "--target-option",
    type=PAIR,
    multiple=True,
    metavar="K=V",
    help="Option of the target's store, such as endpoint_url=URL. Given one, the others count for the source alone.",
)
@click.option("--workers", type=COUNT, default=4, show_default=True, help="Shards at a time.")
@click.option("--overwrite", is_flag=True, help="Replace shards of the same name that are others.")
@index_option
@json_option
@with_storage_options
def copy_command(
    source: str, target: str, *, target_option: tuple[tuple[str, str], ...], as_json: bool, **arguments: Any
) -> None:
    """Copy the shards of SOURCE and their index to TARGET, every byte checked; the index comes last.

    A run that was stopped goes on when run again: shards that are at the target are read there, and skipped if right.

    \b
    Example:
      shard_tools copy s3://bucket/train/ /data/train/
      shard_tools copy shards/ s3://bucket/train/ --target-option endpoint_url=https://host:9000
    """
    storage_options = as_storage_options(arguments)
    target_options = {key: typed_option(key, text) for key, text in target_option} or None
    with progress_bar("copy", "shards") as progress:
        report = copy(
            source,
            target,
            storage_options=storage_options,
            target_options=target_options,
            progress=progress,
            **arguments,
        )
    emit(report, as_json=as_json, for_people=render.show_copy)


@cli.command("info")
@on_shards
def info_command(urls: tuple[str, ...], *, as_json: bool, **arguments: Any) -> None:
    """Show what a data set holds: shards, samples, bytes, fields, index; and shards that are gone or cut off.

    \b
    Example:
      shard_tools info s3://bucket/train/
    """
    with progress_bar("read", "shards") as progress:
        report = info(urls, progress=progress, **arguments)
    emit(report, as_json=as_json, for_people=render.show_info)
    finish(failed=bool(report.findings))


@cli.command("ls")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after N samples.")
@click.option("--long", is_flag=True, help="Also show number, shard and the size of every field.")
@on_shards
def ls_command(urls: tuple[str, ...], *, long: bool, as_json: bool, **arguments: Any) -> None:
    """List samples: key and fields. --json prints one object a line.

    \b
    Example:
      shard_tools ls s3://bucket/train/ --limit 20 --long
    """
    for sample in list_samples(urls, **arguments):
        if as_json:
            click.echo(render.as_json(sample.as_dict()))
        else:
            render.show_sample_line(sample, long=long)


@cli.command("cat")
@click.argument("url")
@click.argument("sample")
@index_option
@click.option("--field", metavar="EXT", help="Write just the bytes of this field.")
@json_option
@with_storage_options
def cat_command(
    url: str, sample: str, *, index_url: str | None, field: str | None, as_json: bool, **arguments: Any
) -> None:
    """Show one SAMPLE, given by its key or its number; --field writes that field's bytes as they are.

    A key made of digits is taken as a key first, and as a number if there is no such key.

    \b
    Example:
      shard_tools cat s3://bucket/train/ cats/0001
      shard_tools cat s3://bucket/train/ 1234 --field jpg > picture.jpg
    """
    storage = Storage(as_storage_options(arguments))
    if field is None:
        shown = describe_sample(url, sample, storage=storage, index_url=index_url)
        emit(shown, as_json=as_json, for_people=render.show_sample)
        return
    if as_json:
        raise click.UsageError("--json and --field exclude each other: --field writes raw bytes.")
    payload = cat_field(url, sample, field, storage=storage, index_url=index_url)
    if sys.stdout.isatty() and render.is_binary(payload):
        raise click.UsageError(f"field {field!r} is binary; send it to a file: ... --field {field} > file.{field}")
    click.echo(payload, nl=False)


@cli.command("plan")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--dp", type=COUNT, default=1, show_default=True, help="Data-parallel size.")
@click.option("--fsdp", type=COUNT, default=1, help="Sharded data-parallel size: other data, like --dp.")
@click.option("--tp", type=COUNT, default=1, help="Tensor-parallel size: the same data.")
@click.option("--pp", type=COUNT, default=1, help="Pipeline stages: the same data.")
@click.option("--cp", type=COUNT, default=1, help="Context-parallel size: the same data.")
@click.option("--ulysses", type=COUNT, default=1, help="Sequence-parallel (Ulysses) size: the same data.")
@click.option("--ep", type=COUNT, default=1, help="Expert-parallel size, as an axis of its own: the same data.")
@click.option("--batch-size", type=COUNT, metavar="N", help="Samples of a batch per data rank.")
@click.option("--global-batch-size", type=COUNT, metavar="N", help="Samples of a batch over all ranks.")
@click.option("--shuffle/--no-shuffle", default=None, help="Shuffled (default), or in storage order.")
@click.option("--lanes", type=COUNT, help="Parts of an epoch read side by side. Default: the loader's.")
@click.option(
    "--window", type=click.IntRange(min=0), help="How far a sample may move in its lane. Default: the loader's."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the order. Default: 0, or that of the mixture.")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, help="Which epoch.")
@click.option("--epoch-size", type=COUNT, metavar="N", help="Samples of a virtual epoch. Default: one pass.")
@click.option(
    "--last-batch",
    type=click.Choice(get_args(LastBatch)),
    default="drop",
    show_default=True,
    help="What becomes of the tail of the epoch.",
)
@click.option("--memory-limit", type=SIZE, default="4GiB", show_default=True, help="The loader's, of one rank.")
@click.option("--state", "state_url", metavar="FILE", help="A saved state_dict (JSON): the order of --who and --when.")
@click.option("--step", "steps", metavar="K|A..B", help="With --who: this global batch, or those from A to before B.")
@click.option("--who", is_flag=True, help="List the samples of --step: for spikes of the loss.")
@click.option("--key", metavar="KEY", help="With --when: the key of a sample.")
@click.option(
    "--when", is_flag=True, help="Tell the steps of --key: of --step, or of the state's epoch and the next one."
)
@click.option("--thorough", is_flag=True, help="With --when: read all keys, for sets in which some come twice.")
@click.option("--where", metavar="CONDITION", help="Of the samples that fit alone; see docs/filters.md.")
@click.option("--view", metavar="NAME", help="Of those of a saved view.")
@click.option("--subset", metavar="A..B", help="Of a range of the stored samples: 0%..80%, or 1000..2000.")
@click.option("--plot", metavar="FILE.png", help="Also draw bytes and memory of every data rank (needs matplotlib).")
@index_option
@json_option
@with_storage_options
def plan_command(
    urls: tuple[str, ...],
    *,
    batch_size: int | None,
    global_batch_size: int | None,
    plot: str | None,
    state_url: str | None,
    steps: str | None,
    who: bool,
    key: str | None,
    when: bool,
    thorough: bool,
    index_url: str | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Show who reads what under a topology: lanes, bytes, requests, memory and read amplification of every data rank.

    Worked out by the planner that training uses, from the index alone. A plan that does not fit into memory or reads
    much more than once is a warning, with its cure. URL may be the JSON file of a mixture (Mixture.from_file).

    \b
    Example:
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 256
      shard_tools plan s3://bucket/train/ --dp 16 --fsdp 8 --tp 4 --global-batch-size 4096 --json
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 256 --state state.json --step 41200..41203 --who
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 256 --state state.json --key cats/0001 --when
      shard_tools plan mixture.json --dp 8 --global-batch-size 512 --plot shares.png
    """
    storage_options = as_storage_options(arguments)
    storage = Storage(storage_options)
    if (batch_size is None) == (global_batch_size is None):
        raise click.UsageError("Give exactly one of --batch-size (per data rank) and --global-batch-size (over all).")
    sizes = {f"{name}_size": arguments.pop(name) for name in ("dp", "fsdp", "tp", "pp", "cp", "ulysses", "ep")}
    mesh = DeviceMesh.from_sizes(**sizes, rank=0, world_size=math.prod(sizes.values()))
    size = global_batch_size or (batch_size or 0) * mesh.data_world_size
    filters = {name: arguments.pop(name) for name in ("where", "view", "subset")}
    is_run = who or when or state_url or steps or key
    if is_run and (who == when or not state_url or (who and not steps) or (when and not key) or (who and key)):
        raise click.UsageError("Give --state and --step with --who, or --state and --key with --when.")
    planned = open_planned(urls, storage=storage, storage_options=storage_options, index_url=index_url, **filters)
    if state_url:
        run = open_run(
            planned, state_url, storage=storage, global_batch_size=size, num_ranks=mesh.data_world_size,
            last_batch=arguments["last_batch"],
        )  # fmt: skip
        asked = None if steps is None else parse_steps(steps)
        if key is None:
            found = run.who(range(0) if asked is None else asked)
        else:
            found = run.when(key, asked, thorough=thorough)
        emit(found, as_json=as_json, for_people=show_steps)
        return
    memory_limit = arguments.pop("memory_limit")
    given = {name: value for name, value in arguments.items() if value is not None}
    chosen = {**chosen_of(planned), **given}
    options = PlanOptions(mesh=mesh, global_batch_size=size, memory_limit_bytes=memory_limit, **chosen)
    report = plan_opened(planned, options=options)
    if plot is not None:
        save_plot(report, plot)
    emit(report, as_json=as_json, for_people=show_plan)
