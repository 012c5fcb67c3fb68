"""Render templates: data is escaped, and its control characters are shown by their codes."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

from shard_tools.running.report import plain
from shard_tools.running.templates import Template, jinja
from streaming.common.arguments import format_bytes

FILES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "templates")
STYLES = ("style.css", "show.css", "order.css")
"""Styles of the pages of ``show``."""
FRAME = "page.html"
"""Template that frames a page in a file of its own."""


def render(name: str, /, styles: Sequence[str] = ("style.css",), **values: Any) -> str:
    """Return a page as a file: a template, its style, and a policy that allows this style only."""
    style = as_markup("".join(template(one).render() for one in styles))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return template(name).render(policy=policy, frame=FRAME, style=style, is_file=True, **values)


def as_markup(text: str) -> str:
    """Mark text that a template made, so that others do not escape it again."""
    return _environment().filters["safe"](text)  # type: ignore[no-any-return]


@functools.cache
def template(name: str) -> Template:
    """Return a template of ``show/templates``.

    Raises:
        ConfigError: Jinja is not installed.
    """
    return _environment().get_template(name)  # type: ignore[no-any-return]


@functools.cache
def _environment() -> Any:
    jinja2 = jinja("pages", "show")
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_visible,
    )  # fmt: skip
    made.filters |= {"lines": _lines, "bytes": _bytes, "count": "{:,}".format, "percent": "{:.1%}".format}
    return made


def _bytes(number: float) -> str:
    """Return a size whose number and unit stay on one line."""
    return format_bytes(number).replace(" ", "\u00a0")


def _lines(text: str) -> Any:
    """Return data text as markup that keeps lines and tabs, and shows other control characters."""
    lines = text.replace("\r\n", "\n").split("\n")
    shown = "\n".join("\t".join(map(plain, line.split("\t"))) for line in lines)
    return jinja("pages", "show").utils.markupsafe.escape(shown)


def _visible(value: object) -> object:
    """Show control characters of data by their codes; leave markup from templates unchanged."""
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
