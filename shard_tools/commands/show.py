"""Parse the command ``show``: pages about a set, a mixture or a running job, served locally or written to a file."""

from __future__ import annotations

import sys
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from shard_tools.commands.plan import described_options, take_description
from shard_tools.commands.stats import check_page, write_page
from shard_tools.look.show.access import Access, check_host
from shard_tools.look.show.base.subject import Subject, open_subject
from shard_tools.look.show.data.notes import check_tokenizer
from shard_tools.look.show.file import page_file
from shard_tools.look.show.order.pages import check_state
from shard_tools.look.show.run.attach import check_addresses
from shard_tools.look.show.server import listen, need_server, serve
from shard_tools.look.show.table import MEDIA, PAGES
from shard_tools.terminal.options import as_storage_options, index_option, unfinished_option, with_storage_options

_OF_THE_SERVER = ("port", "no_browser", "host", "expose")


@click.command("show")
@click.argument("urls", nargs=-1, metavar="[URL...]")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port to listen at; 0: a free one."
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option("--state", "state_url", metavar="FILE", help="Saved state_dict (JSON) of the run whose order is shown.")
@click.option(
    "--run", multiple=True, metavar="ADDRESS",
    help="Running job to attach to: its socket file ('run/*.sock': of all ranks), or its metrics address.",
)  # fmt: skip
@click.option("--bad", multiple=True, metavar="FILE", help="List of bad samples (bad_samples_file, or verify's).")
@click.option("--tokenizer", metavar="FILE", help="Tokenizer that made the tokens, to show them as text.")
@click.option("--html", metavar="FILE", help="Write the pages into one file, and exit.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="IP", help="Address to listen at; see --expose."
)
@click.option("--expose", is_flag=True, help="Let other machines reach it at --host, without encryption.")
@described_options
@index_option
@unfinished_option
@with_storage_options
@click.pass_context
def show_command(
    context: click.Context, /, *, urls: tuple[str, ...], port: int, no_browser: bool, state_url: str | None,
    run: tuple[str, ...], bad: tuple[str, ...], tokenizer: str | None, html: str | None, host: str, expose: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    """Browse samples, columns, and the order of training, in a web page.

    Prints one line, the address of the pages with its secret token, and serves them to this machine until it is
    stopped. Every page is also available as JSON, by format=json. Only shown samples are read, and nothing is ever
    written. URL may be the JSON file of a mixture (Mixture.from_file).

    \b
    Example:
      shard_tools show s3://bucket/train/
      shard_tools show s3://bucket/train/ --where "tokens >= 512" --state state.json --port 0 --no-browser
      shard_tools show mixture.json --html report.html
    """
    storage_options = as_storage_options(arguments) | {"read_only": True}
    need_server()
    check_host(host, exposed=expose)
    check_addresses(run)
    if html is not None:
        _check_file(context)
    subject = open_subject(
        urls,
        storage_options=storage_options,
        state_url=state_url,
        bad=bad,
        tokenizer=tokenizer,
        run=run,
        **take_description(arguments),
    )
    try:
        check_tokenizer(subject)
        check_state(subject)
        if html is not None:
            check_page(html)  # before the work
            write_page(html, page_file(subject, PAGES, MEDIA))
        else:
            _serve(subject, host, port, opens=not no_browser)
    finally:
        subject.close()


def _serve(subject: Subject, host: str, port: int, *, opens: bool) -> None:
    with listen(host, port) as listening:
        access = Access(host=host, port=listening.getsockname()[1])

        def began(_: Callable[[], None]) -> None:
            click.echo(access.address)
            sys.stdout.flush()
            if opens:
                threading.Thread(target=webbrowser.open, args=(access.address_for_browser(),), daemon=True).start()

        serve(subject, listening, access, pages=PAGES, media=MEDIA, began=began)


def _check_file(context: click.Context) -> None:
    """Refuse options of the server together with ``--html``, which starts no server.

    Raises:
        UsageError: One is given.
    """
    for name in _OF_THE_SERVER:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect with --html, which serves nothing.")
