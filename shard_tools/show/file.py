"""Write pages into one file that asks for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from shard_tools.show.base.page import Media, Page, Query
from shard_tools.show.base.subject import Subject
from streaming.errors import ConfigError


def page_file(subject: Subject, pages: Sequence[Page], media: Sequence[Media], query: Query) -> str:  # noqa: ARG001
    """Return the pages as one file.

    Raises:
        ConfigError: There are none.
    """
    raise ConfigError("--html: not there yet")
