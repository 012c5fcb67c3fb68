"""Show the results and failures of all commands, to people and to programs."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from shard_tools.running.functions import blamed
from shard_tools.running.report import plain_place
from shard_tools.running.switches import is_on
from shard_tools.terminal import render
from shard_tools.terminal.config_file import warn_of_variables
from streaming.errors import ConfigError, IndexMissingError, ReadOnlyError, ShardstreamError, StorageError
from streaming.storage import redact, redact_text

_AS_JSON, _DEBUG = "shard_tools.as_json", "shard_tools.debug"
_JUDGES = frozenset({"verify", "diff", "doctor"})
"""Commands whose exit code 1 means a finding, so that a failure to look needs another code."""


class ToolGroup(click.Group):
    """Turn the library's errors into one message and an exit code, and with ``--json`` also into JSON."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note ``--json`` before options are parsed, so that usage errors are also reported as JSON."""
        if "--json" in args:
            ctx.meta[_AS_JSON] = True
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        if ctx.parent is None:
            warn_of_variables(self)
        try:
            return self._invoked(ctx)
        except ShardstreamError as error:
            if isinstance(error, ReadOnlyError) and is_on("dry_run"):
                _report_dry_run(ctx, error)
                return None
            self._fail(ctx, error)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            verb = f"{ctx.command_path} {ctx.invoked_subcommand}"
            self._fail(ctx, ConfigError(f"{verb}: this needs torch, which is not installed; pip install torch"))
        except click.ClickException as error:
            vars(error)["message"] = redact_text(error.message)  # a command line may name a URL
            _print_for_program(ctx, error, error.format_message())
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC or ctx.meta.get(_DEBUG):
                raise
            where = error.filename or "standard output, or a temporary file"
            full = OSError(f"writing {where}: {error.strerror}; make room, and run the same command again")
            render.show_error(full)
            with suppress(OSError):  # standard output itself may be full
                _print_for_program(ctx, full, str(full))
            ctx.exit(1)
        except KeyboardInterrupt as error:
            click.echo("Stopped. Run the same command again to continue.", err=True)
            _print_for_program(ctx, error, "stopped; run the same command again to continue")
            ctx.exit(130)

    def _invoked(self, ctx: click.Context) -> Any:
        """Run the command; report any exception of a user's function as a failure of that function."""
        try:
            return super().invoke(ctx)
        except (Exception, SystemExit) as error:
            failed = "" if isinstance(error, ShardstreamError) or ctx.meta.get(_DEBUG) else blamed(error)
            if not failed:
                raise
            failure = RuntimeError(f"{failed}: {type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", ()):
                if said := note.removeprefix(failed).removeprefix("; "):
                    failure.add_note(said)
            render.show_error(failure)
            _print_for_program(ctx, failure, str(failure), kind=type(error).__name__)
            ctx.exit(1)

    def _fail(self, ctx: click.Context, error: ShardstreamError) -> None:
        """Report a failure, and exit with its code."""
        if ctx.meta.get(_DEBUG):
            raise error
        render.show_error(error)
        _print_for_program(ctx, error, str(error))
        is_blind = ctx.invoked_subcommand in _JUDGES and isinstance(error, (StorageError, IndexMissingError))
        ctx.exit(2 if isinstance(error, ConfigError) else 3 if is_blind else 1)


def _report_dry_run(ctx: click.Context, stopped: ReadOnlyError) -> None:
    """Report what would have been written without a dry run."""
    work = getattr(stopped, "work", "")
    if ctx.meta.get(_AS_JSON):
        report = {"dry_run": True, "work": work, "first": {"action": stopped.action, "url": redact(stopped.url)}}
        click.echo(render.as_json(report, indent=2))
        return
    if is_on("quiet"):
        return
    said = f"Would do: {work}. " if work else ""
    click.echo(f"{said}Would first {stopped.action} {plain_place(stopped.url)}. Dry run: nothing was written.")


def _print_for_program(ctx: click.Context, error: BaseException, message: str, *, kind: str = "") -> None:
    """Print a failure as a JSON object on standard output if ``--json`` was given."""
    if ctx.meta.get(_AS_JSON):
        notes = [redact_text(note) for note in getattr(error, "__notes__", ())]
        failure = {"type": kind or type(error).__name__, "message": redact_text(message), "notes": notes}
        click.echo(render.as_json({"ok": False, "error": failure}, indent=2))


def emit(result: Any, *, as_json: bool, for_people: Callable[[Any], None]) -> None:
    """Print a result as JSON, or with its renderer; the JSON of a dry run says that it is one."""
    if as_json:
        click.echo(render.as_json(({"dry_run": True} if is_on("dry_run") else {}) | result.as_dict(), indent=2))
    elif not is_on("quiet"):
        for_people(result)


def emit_line(result: Any, *, as_json: bool, for_people: Callable[[Any], None]) -> None:
    """Print one of many results: as JSON on a line of its own, or with its renderer."""
    if as_json:
        click.echo(render.as_json(result.as_dict()))
    elif not is_on("quiet"):
        for_people(result)


def finish(*, failed: bool, blind: bool = False) -> None:
    """Exit with code 1 if something was found, or with 3 if not everything could be examined."""
    if failed or blind:
        click.get_current_context().exit(3 if blind else 1)
