"""Choose the size of the fetch units into which the chunks of a mixture's sources are cut: ``unit_sizes``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from streaming.common.arguments import format_bytes, parse_bytes, some_names
from streaming.errors import ConfigError
from streaming.order.plan.blend import Blend
from streaming.order.plan.memory import PAGE_BYTES
from streaming.order.plan.schedule import moderate
from streaming.types import SPAN_BYTES

if TYPE_CHECKING:  # they import torch, and ``shard_tools`` takes only the arithmetic
    from streaming.sets.sources.packs import PackedDocuments
    from streaming.sets.sources.samples import SampleSource
    from streaming.sets.sources.windows import WindowSource

FetchBytes: TypeAlias = int | str | Mapping[str, int | str]
LEAST_UNIT_BYTES = SPAN_BYTES
"""Minimum size of a unit, which is a run of whole spans; each span has a checksum."""
_UNITS_HELD = 6


def unit_sizes(
    given: FetchBytes, leaves: Mapping[str, SampleSource | PackedDocuments | WindowSource], blend: Blend
) -> dict[str, int]:
    """Return the size of the units of each source that is cut, in bytes.

    Args:
        given: Sizes by source name, or the sum of the sizes over all sources. The sum is divided so that a source with
            the share s of the bytes read has a size proportional to the square root of s, and at least
            ``LEAST_UNIT_BYTES``, which takes the fewest requests.
        leaves: The sources.
        blend: Amounts drawn from them. If shares change, the largest share of each source counts.

    Raises:
        ConfigError: A size is invalid, a source is unknown, or its chunks cannot be cut.
    """
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(leaves), key=str)
        if unknown:
            known = some_names(sorted(leaves))
            raise ConfigError(f"fetch_bytes: the sources are {known}, got {some_names(list(map(repr, unknown)))}")
        check_can_be_cut({name: leaves[name] for name in given}, "leave it out: its chunks then stay whole")
        return {name: _checked(size, name) for name, size in sorted(given.items())}
    total = parse_bytes(given, name="fetch_bytes")
    cut = [name for name, one in sorted(leaves.items()) if one.can_be_cut]
    others = ", ".join(f'"{name}": …' for name in cut[:2])
    cure = f"give sizes of the others alone, fetch_bytes={{{others}}}" if cut else "leave fetch_bytes out"
    check_can_be_cut(leaves, cure)
    least = len(leaves) * LEAST_UNIT_BYTES
    if total < least:
        raise ConfigError(
            f"fetch_bytes: expected at least {shown_total(least)} for {len(leaves)} sources, {shown_total(SPAN_BYTES)} "
            f"each (one checksum covers that much), got {format_bytes(total)}"
        )
    return divided(total, _byte_shares(leaves, blend))


def fitting_total(room_bytes: int, lanes: int, num_sources: int) -> int | None:
    """Return a total of ``fetch_bytes`` with which ``num_sources`` fit into ``room_bytes``; None: no total does.

    In each of a rank's ``lanes``, a source holds the five units that a window of two units touches, and the next one. A
    unit exceeds its nominal size by at most half a span and a page, on average.
    """
    total = int(room_bytes / (_UNITS_HELD * lanes)) - num_sources * (SPAN_BYTES // 2 + PAGE_BYTES)
    least = num_sources * LEAST_UNIT_BYTES
    step = 1 << 20 if total >= 16 << 20 else 1 << 16
    return total // step * step if total >= least else None


def shown_total(total: int) -> str:
    """Return a total as a user would write it."""
    return f"{total >> 20}MiB" if total % (1 << 20) == 0 else f"{total >> 10}KiB"


def _checked(size: int | str, name: str) -> int:
    found = parse_bytes(size, name=f"fetch_bytes of {name!r}")
    if found < LEAST_UNIT_BYTES:
        raise ConfigError(
            f"fetch_bytes of {name!r}: expected at least {format_bytes(LEAST_UNIT_BYTES)} (one checksum covers "
            f"that much), got {format_bytes(found)}"
        )
    return found


def check_can_be_cut(leaves: Mapping[str, SampleSource | PackedDocuments | WindowSource], cure: str) -> None:
    """Check that sources can be cut; ``cure`` says what helps if one cannot.

    Raises:
        ConfigError: One cannot.
    """
    for name, one in leaves.items():
        if not one.can_be_cut:
            what = one.why_whole
            if one.late:
                names = some_names([late.name for late in one.late])
                what = (
                    f"the late fields that it reads ({names}) lie in chunks of their own; give it fields= without them"
                )
            raise ConfigError(f"fetch_bytes: the source {name!r} cannot be cut: {what}; {cure}")


def _byte_shares(leaves: Mapping[str, SampleSource | PackedDocuments | WindowSource], blend: Blend) -> dict[str, float]:
    """Return the largest share that each source ever has of the bytes read."""
    found = dict.fromkeys(sorted(leaves), 0.0)
    mean_bytes = {name: float(one.chunk_bytes.sum() / one.chunk_samples.sum()) for name, one in leaves.items()}
    for _, weights in blend.shares(blend.rows()):
        mix = moderate(weights)
        rates = {name: mix.get(name, 0) * mean_bytes[name] for name in found}
        total = sum(rates.values())
        found = {name: max(share, rates[name] / total) for name, share in found.items()}
    return found


def divided(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divide ``total`` in proportion to the square roots of the shares, with at least the least unit size for each."""
    sizes: dict[str, int] = {}
    roots = {name: math.sqrt(share) for name, share in shares.items()}
    while roots:
        left, whole = total - LEAST_UNIT_BYTES * len(sizes), sum(roots.values())
        small = [name for name, root in roots.items() if root * left < LEAST_UNIT_BYTES * whole or not root]
        if not small:
            return dict(sorted((sizes | {name: int(left * root / whole) for name, root in roots.items()}).items()))
        sizes |= dict.fromkeys(small, LEAST_UNIT_BYTES)
        roots = {name: root for name, root in roots.items() if name not in sizes}
    return dict(sorted(sizes.items()))
