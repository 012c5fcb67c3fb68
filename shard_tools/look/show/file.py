"""Write pages into one self-contained file: pictures are embedded, links lead to its own parts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from shard_tools.look.show.base.page import Media, Page, Query
from shard_tools.look.show.base.render import STYLES, as_markup, render, template
from shard_tools.look.show.base.subject import Subject
from streaming.errors import ConfigError, ShardstreamError

_MOST_PICTURE_BYTES = 1 << 20


def page_file(subject: Subject, pages: Sequence[Page], media: Sequence[Media]) -> str:
    """Return the pages that belong in a file, below one another.

    Raises:
        ConfigError: None of them has anything to show.
        ShardstreamError: Any kind that a page raises.
    """
    mine = [page for page in pages if page.fits(subject) and page.in_file(subject)]
    if not mine:
        raise ConfigError("--html: there is nothing to write: give the URL of shards, or the JSON file of a mixture")
    inside = _Inside(subject, {page.path: f"page-{number}" for number, page in enumerate(mine)}, media)
    sections = [(inside.anchors[page.path], page.title, as_markup(inside.section(page))) for page in mine]
    return render("file.html", STYLES, title=subject.title, chosen=subject.chosen, sections=sections)


@dataclass(frozen=True)
class _Inside:
    """Targets of references in a file: its parts, by their addresses as pages, and embedded pictures."""

    subject: Subject
    anchors: Mapping[str, str]
    media: Sequence[Media]

    def section(self, page: Page) -> str:
        """Return a page without a frame.

        Raises:
            ConfigError: The page has nothing but a problem to show.
        """
        query = Query(page.file_asks)
        found = page.answer(self.subject, query)  # without its parts, which a file has no room for
        if problem := getattr(found, "problem", ""):
            raise ConfigError(f"--html: the page {page.title!r}: {problem}")
        return template(page.template).render(
            frame="bare.html", is_file=True, subject=self.subject, to=self.to, src=self.src, title=page.title,
            path=page.path, query=query, answer=found, pages=(), parts=[],
        )  # fmt: skip

    def to(self, path: str, /, **given: object) -> str:  # noqa: ARG002  the signature of `address`
        """Return the link to a page within the file."""
        return "#" + self.anchors.get(path, "")

    def src(self, address: str) -> str:
        """Return a picture as a data URL; "": it cannot be shown."""
        path, _, text = address.partition("?")
        media = next((one for one in self.media if one.path == path), None)
        if media is None:
            return ""
        try:
            found = media.answer(self.subject, Query(dict(parse_qsl(text, errors="surrogateescape"))))
        except ShardstreamError:
            return ""
        if not found.media_type.startswith("image/") or found.num_bytes > _MOST_PICTURE_BYTES:
            return ""
        data = b"".join(found.read(0, found.num_bytes))
        return f"data:{found.media_type};base64,{base64.b64encode(data).decode()}"
