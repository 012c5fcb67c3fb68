"""List the pages: a new one costs its module and a row here."""

from __future__ import annotations

from shard_tools.show.base.page import Media, Page, PagePart
from shard_tools.show.data import gallery, sample
from shard_tools.show.order import pages as order

STEPS: tuple[PagePart, ...] = ()
"""Parts of the page of a sample that know the order of training."""

PAGES: tuple[Page, ...] = (
    Page(path="/", title="Samples", template="gallery.html", answer=gallery.gallery, asks=gallery.ASKS, in_file=True),
    Page(
        path="/sample", title="Sample", template="sample.html", answer=sample.sample, asks=sample.ASKS, parts=STEPS,
        in_navigation=False,
    ),
    Page(
        path="/step", title="Step", template="step.html", answer=order.step_page, asks=order.STEP_ASKS, in_file=True
    ),
)  # fmt: skip
"""All pages, in the order of the navigation and of ``--html``."""

MEDIA: tuple[Media, ...] = ()
"""The bytes that they show."""
