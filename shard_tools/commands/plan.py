"""Parse the command ``plan``: the reads of a run, the samples of a step, and the steps of a sample."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import click
from click.core import ParameterSource

from infra import DeviceMesh
from shard_tools.look.plan.report import PlanOptions, parse_ramp, plan_opened
from shard_tools.look.plan.sources import open_planned
from shard_tools.look.plan.steps import open_run, parse_steps, show_steps
from shard_tools.look.plan.view import save_plot, show_plan
from shard_tools.terminal.options import (
    COUNT,
    SIZE,
    as_storage_options,
    index_option,
    report_options,
    together,
    unfinished_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import DEFAULT_MEMORY_LIMIT
from streaming.errors import ConfigError
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.sizes import Sizes
from streaming.shards.schema.joined import CLASSES
from streaming.storage import Storage
from streaming.types import LastBatch

_OF_THE_STATE = ("shuffle", "lanes", "window", "seed", "epoch", "epoch_size")
"""Options that a state contains; those of ``_NO_READING`` do not affect the order of samples."""
_NO_READING = ("memory_limit", "plot")


class RampType(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click alone
    """A number, or ``ROW:N,…``: the number N from row ROW of the run on."""

    name = "N|0:N,ROW:N…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Schedule:
        """Return the number, or the schedule of numbers."""
        text = str(value)
        if ":" not in text:
            return COUNT.convert(value, param, ctx)
        try:
            return parse_ramp(text)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class ObjectType(click.ParamType):  # type: ignore[type-arg]
    """A JSON object of options; a word without braces is the column of ``--balanced``."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Return the object."""
        if isinstance(value, dict):
            return value
        text = str(value).strip()
        if param is not None and param.name == "balanced" and not text.startswith("{"):
            return {"by": text}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.fail(f'not JSON ({error}); expected an object such as {{"column": "tokens"}}', param, ctx)
        if not isinstance(found, dict):
            self.fail(f'expected a JSON object such as {{"column": "tokens"}}, got {text}', param, ctx)
        return found


RAMP, OBJECT = RampType(), ObjectType()


described_options = together(
    click.option(
        "--length",
        type=RAMP,
        metavar="T|0:T,ROW:T…",
        help="Packs of T tokens, Packed(…, length=T); several lengths with the rows where they begin.",
    ),
    click.option("--padded", is_flag=True, help="With --length: padded packs, batches by size."),
    click.option(
        "--packed",
        type=OBJECT,
        help='Further options of Packed, such as \'{"column": "frames", "field": null}\'.',
    ),
    click.option(
        "--windows",
        type=OBJECT,
        help='As Windows with these options, such as \'{"video": {"front.mp4": [-0.2, 0.0]}, "every": 0.5}\'.',
    ),
    click.option(
        "--balanced",
        type=OBJECT,
        metavar="COLUMN|JSON",
        help="As Balanced(…, by=COLUMN), or with the options of a JSON object.",
    ),
    click.option("--curriculum", type=OBJECT, help="A Curriculum with these options, as in a mixture's file."),
    click.option("--where", metavar="CONDITION", help="Only the samples that match; see docs/filters.md."),
    click.option("--view", metavar="NAME", help="Only the samples of a saved view."),
    click.option("--exclude", metavar="FILE", help="Leave out the samples of this file of keys, one per line."),
    click.option("--version", metavar="VERSION", help="A version of the set, by number or name; see version list."),
    click.option("--subset", metavar="A..B", help="Only a range of the stored samples: 0%..80%, or 1000..2000."),
    click.option(
        "--classes",
        type=click.Choice(CLASSES),
        help="Sets that number classes in different ways: as classes= of StreamingDataset.",
    ),
    click.option(
        "--trust",
        multiple=True,
        metavar="OPTION|all",
        help="Let the file of a mixture set this option, such as endpoint_url, which does not describe data.",
    ),
)
"""Options that select samples and shape rows; see :func:`take_description`."""


@click.command("plan")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--dp", type=COUNT, default=1, show_default=True, help="Data-parallel size.")
@click.option("--fsdp", type=COUNT, default=1, help="Sharded data-parallel size: different data, like --dp.")
@click.option("--tp", type=COUNT, default=1, help="Tensor-parallel size: the same data.")
@click.option("--pp", type=COUNT, default=1, help="Pipeline stages: the same data.")
@click.option("--cp", type=COUNT, default=1, help="Context-parallel size: the same data.")
@click.option("--ulysses", type=COUNT, default=1, help="Sequence-parallel (Ulysses) size: the same data.")
@click.option("--ep", type=COUNT, default=1, help="Expert-parallel size, as a separate axis: the same data.")
@click.option(
    "--batch-size", type=RAMP, help="Samples per batch and data rank; for a ramp, with the rows where they begin."
)
@click.option("--global-batch-size", type=RAMP, help="Samples per batch over all ranks; or a ramp.")
@click.option("--shuffle/--no-shuffle", default=None, help="Shuffled (default), or in storage order.")
@click.option("--lanes", type=COUNT, help="Parts of an epoch that are read in parallel. Default: as in the loader.")
@click.option(
    "--window", type=click.IntRange(min=0), help="Maximum move of a sample within its lane. Default: as in the loader."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the order. Default: 0, or the mixture's seed.")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, help="Epoch to plan.")
@click.option("--epoch-size", type=COUNT, metavar="N", help="Samples of a virtual epoch. Default: one pass.")
@click.option(
    "--last-batch",
    type=click.Choice(get_args(LastBatch)),
    default="drop",
    show_default=True,
    help="What to do with samples that do not fill the last batch.",
)
@click.option(
    "--memory-limit",
    type=SIZE,
    default=DEFAULT_MEMORY_LIMIT,
    show_default=True,
    help="The loader's memory limit, per rank.",
)
@click.option("--state", "state_url", metavar="FILE", help="Saved state_dict (JSON) whose order --who and --when use.")
@click.option("--step", "steps", metavar="K|A..B", help="With --who: global batch K, or those from A up to but not B.")
@click.option("--who", is_flag=True, help="List the samples of --step, to find the cause of a loss spike.")
@click.option("--key", metavar="KEY", help="With --when: the key of a sample.")
@click.option(
    "--when", is_flag=True, help="Show the steps of --key: within --step, or in the state's epoch and the next one."
)
@click.option("--thorough", is_flag=True, help="With --when: read all keys, for sets with duplicate keys.")
@described_options
@click.option(
    "--plot", metavar="FILE.png", help="Also plot the bytes and memory of every data rank (needs matplotlib)."
)
@index_option
@unfinished_option
@report_options
@with_storage_options
@click.pass_context
def plan_command(
    context: click.Context,
    /,
    *,
    urls: tuple[str, ...],
    batch_size: int | Schedule | None,
    global_batch_size: int | Schedule | None,
    plot: str | None,
    state_url: str | None,
    steps: str | None,
    who: bool,
    key: str | None,
    when: bool,
    thorough: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Show the reads of every data rank under a topology.

    The report shows lanes, bytes, requests, memory and read amplification of every data rank. It comes from the planner
    that training uses, and needs only the index. A plan that does not fit into memory, or that reads many bytes twice,
    causes a warning with a cure. URL may be the JSON file of a mixture (Mixture.from_file).

    \b
    Example:
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 256
      shard_tools plan s3://bucket/train/ --dp 16 --fsdp 8 --tp 4 --global-batch-size 4096 --json
      shard_tools plan s3://bucket/text/ --dp 8 --batch-size 8 --length 8192
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 0:64,1000000:256 --balanced cls
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 256 --state state.json --step 41200..41203 --who
      shard_tools plan s3://bucket/train/ --dp 8 --batch-size 256 --state state.json --key cats/0001 --when
      shard_tools plan mixture.json --dp 8 --global-batch-size 512 --plot shares.png
    """
    storage_options = as_storage_options(arguments)
    if (batch_size is None) == (global_batch_size is None):
        raise click.UsageError("Give exactly one of --batch-size (per data rank) and --global-batch-size (over all).")
    is_run = who or when or state_url or steps or key
    if is_run and (who == when or not state_url or (who and not steps) or (when and not key) or (who and key)):
        raise click.UsageError("Give --state and --step with --who, or --state and --key with --when.")
    _check_effect(context, is_run=bool(is_run), when=when)
    sizes = {f"{name}_size": arguments.pop(name) for name in ("dp", "fsdp", "tp", "pp", "cp", "ulysses", "ep")}
    mesh = DeviceMesh.from_sizes(**sizes, rank=0, world_size=math.prod(sizes.values()), data_axes=("dp", "fsdp"))
    planned = open_planned(urls, storage_options=storage_options, **take_description(arguments))
    memory_limit = arguments.pop("memory_limit")
    options = PlanOptions(
        mesh=mesh, global_batch_size=Sizes.chosen(batch_size, global_batch_size, mesh.data_world_size),
        memory_limit_bytes=memory_limit, **arguments,
    )  # fmt: skip
    if state_url:
        run = open_run(planned, state_url, storage=Storage(storage_options), options=options)
        asked = None if steps is None else parse_steps(steps)
        if key is None:
            found = run.who(range(0) if asked is None else asked)
        else:
            found = run.when(key, asked, thorough=thorough)
        emit(found, as_json=as_json, for_people=show_steps)
        return
    report = plan_opened(planned, options=options)
    if plot is not None:
        save_plot(report, plot)
    emit(report, as_json=as_json, for_people=show_plan)


def _check_effect(context: click.Context, *, is_run: bool, when: bool) -> None:
    """Refuse options that would have no effect.

    Raises:
        UsageError: An option would have no effect.
    """
    given = {
        name for name in (*_OF_THE_STATE, *_NO_READING, "thorough")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }  # fmt: skip
    for name in _OF_THE_STATE if is_run else ():
        if name in given:
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect with --state, which has the run's own.")
    for name in _NO_READING if is_run else ():
        if name in given:
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect with --who and --when. Leave it out.")
    if "thorough" in given and not when:
        raise click.UsageError("--thorough is for --when, which looks keys up. Leave it out.")


def take_description(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove :func:`described_options` from ``arguments``; return them as a mixture's file describes a source.

    Raises:
        UsageError: Options of packs contradict each other.
    """
    names = ("where", "view", "version", "subset", "exclude", "windows", "balanced", "curriculum", "classes")
    described = {name: arguments.pop(name) for name in names}
    trusted = arguments.pop("trust")
    described["trust"] = True if "all" in trusted else trusted or None
    described["index"] = arguments.pop("index_url")
    described["allow_unfinished"] = arguments.pop("allow_unfinished") or None
    length, padded, packed = (arguments.pop(name) for name in ("length", "padded", "packed"))
    given = {"length": length, "padded": padded or None}
    packs = {name: value for name, value in given.items() if value is not None}
    twice = sorted(packs.keys() & (packed or {}).keys())
    if twice:
        raise click.UsageError(f"--{twice[0]} and --packed both give {twice[0]!r}. Leave one out.")
    packs |= packed or {}
    if isinstance(packs.get("length"), Schedule):  # the form in a mixture's file
        packs["length"] = packs["length"].to_dict()
    if (packs or packed is not None) and "length" not in packs:
        raise click.UsageError("Packs need --length, their tokens; with --padded, the budget of a batch.")
    return {**described, "packed": packs or None}
