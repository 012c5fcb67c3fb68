"""List the pages: a new page needs its module and a row here."""

from __future__ import annotations

from shard_tools.look.show import looks
from shard_tools.look.show.base.page import Media, Page, PagePart, always, never
from shard_tools.look.show.data import bad, columns, gallery, sample, values, windows
from shard_tools.look.show.find import keys
from shard_tools.look.show.order import mixture
from shard_tools.look.show.order import pages as order
from shard_tools.look.show.overview import page as overview
from shard_tools.look.show.run import page as run

OF_A_SAMPLE = (PagePart(name="steps", template="coming.html", answer=order.coming_part),)
"""Parts of a sample's page in addition to the stored data."""

OF_A_STEP = (PagePart(name="looks", template="step_looks.html", answer=looks.looks_of),)
"""Parts of a step's page in addition to the order."""

PAGES: tuple[Page, ...] = (
    Page(
        path="/overview", title="Overview", template="overview.html", answer=overview.overview, asks=overview.ASKS,
        in_file=always, file_asks={"whole": "1"},
    ),
    Page(path="/", title="Samples", template="gallery.html", answer=gallery.gallery, asks=gallery.ASKS, in_file=always),
    Page(
        path="/columns", title="Columns", template="columns.html", answer=columns.columns, asks=columns.ASKS,
        in_navigation=columns.has_columns, in_file=columns.has_columns,
    ),
    Page(
        path="/step", title="Step", template="step.html", answer=order.step_or_form, asks=order.STEP_ASKS,
        parts=OF_A_STEP, in_file=always,
    ),
    Page(
        path="/beside", title="Side by side", template="beside.html", answer=looks.beside, asks=looks.BESIDE_ASKS,
        in_navigation=never,
    ),
    Page(
        path="/mixture", title="Mixture", template="mixture.html", answer=mixture.mixture_page,
        asks=mixture.MIXTURE_ASKS, in_navigation=mixture.is_mixed, in_file=mixture.is_mixed,
    ),
    Page(
        path="/sample", title="Sample", template="sample.html", answer=sample.sample,
        asks=(*sample.ASKS, *order.COMING_ASKS), parts=OF_A_SAMPLE, in_navigation=never,
    ),
    Page(
        path="/bad", title="Bad samples", template="bad.html", answer=bad.bad_samples, asks=bad.ASKS,
        in_navigation=bad.has_list, in_file=lambda subject: bool(subject.bad),
    ),
    Page(path="/run", title="Run", template="run.html", answer=run.run_page, asks=run.ASKS, needs="run"),
)  # fmt: skip
"""All pages, in the order of the navigation and of ``--html``."""

MEDIA: tuple[Media, ...] = (
    Media(path="/value", answer=values.value, asks=values.ASKS),
    Media(path="/frame", answer=windows.frame, asks=windows.FRAME_ASKS),
    Media(path="/keys", answer=keys.keys, asks=keys.ASKS),
)
"""Bytes that pages show, or offer to save."""
