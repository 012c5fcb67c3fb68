"""Print JSON, errors and log lines, which belong to no verb. A verb prints its own report."""

from __future__ import annotations

import json
import logging
import re

import click

from shard_tools.running.report import plain
from streaming.errors import visible
from streaming.storage import redact_text

_NOT_PLAIN = re.compile(r"[\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def as_json(value: object, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON that is safe for any terminal and encoding."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NOT_PLAIN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class VisibleLines(logging.Formatter):
    """Format lines of the log for a terminal: control characters in names are shown by their codes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return visible(super().format(record))


def show_error(error: BaseException) -> None:
    """Print an error and its notes, without secrets in URLs and without control characters from names."""
    for line in (f"Error: {error}", *getattr(error, "__notes__", ())):
        for part in redact_text(line).split("\n"):
            click.echo(plain(part), err=True)
