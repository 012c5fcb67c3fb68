"""The order of mixtures: every sample as often as asked for, shares at every position, seekable, the same for ever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streaming.errors import ConfigError
from streaming.order.mixing import passes
from streaming.order.mixing.passes import Listing, Parts, keyed_number, lay_pass
from streaming.order.plan.permutation import permutations
from streaming.order.plan.schedule import checked_weights

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
sizes_ = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum)
sources_ = st.dictionaries(st.sampled_from(["web", "code", "math", "chat"]), sizes_, min_size=1)
seeds = st.integers(0, 2**64 - 1)


def listings_of(sources: dict[str, list[int]], seed: int, *, shuffle: bool = True) -> list[Listing]:
    first, made = 0, []
    for name, sizes in sources.items():
        made.append(Listing(name, sizes, first_chunk=first, seed=seed, shuffle=shuffle))
        first += len(sizes)
    return made


def samples_of(parts: Parts) -> list[tuple[int, int]]:
    """(chunk, sample in it) of every sample, in the order of the parts."""
    rows = zip(parts.chunk_ids.tolist(), parts.firsts.tolist(), parts.sizes.tolist(), strict=True)
    return [(chunk, first + number) for chunk, first, size in rows for number in range(size)]


def homes(sources: dict[str, list[int]]) -> list[str]:
    """The source of each chunk."""
    return [name for name, sizes in sources.items() for _ in sizes]


@unhurried
@given(sizes_, seeds, st.integers(0, 5), st.data())
def test_any_samples_of_a_list_are_those_of_the_whole(
    sizes: list[int], seed: int, skipped: int, data: st.DataObject
) -> None:
    listing = Listing("a", sizes, first_chunk=0, seed=seed)
    total = sum(sizes)
    whole = samples_of(listing.samples(0, 4 * total))
    for number in range(4):
        in_pass = whole[number * total : (number + 1) * total]
        assert sorted(in_pass) == [(chunk, n) for chunk, size in enumerate(sizes) for n in range(size)]
    start = data.draw(st.integers(0, 4 * total))
    stop = data.draw(st.integers(start, 4 * total))
    assert samples_of(listing.samples(start, stop)) == whole[start:stop]


@unhurried
@given(sources_, seeds, st.data())
def test_passes_hold_the_quotas_and_follow_one_another(
    sources: dict[str, list[int]], seed: int, data: st.DataObject
) -> None:
    listings = listings_of(sources, seed)
    quotas = {name: data.draw(st.integers(0, 3 * sum(sizes))) for name, sizes in sources.items()}
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(4):
        parts = lay_pass(listings, quotas, number=number, seed=seed)
        samples = samples_of(parts)
        of_source = Counter(homes(sources)[chunk] for chunk, _ in samples)
        assert of_source == Counter({name: quota for name, quota in quotas.items() if quota})
        seen.update(samples)
    for listing in listings:
        expected = Counter(samples_of(listing.samples(0, 4 * quotas[listing.name])))
        got = {sample: n for sample, n in seen.items() if homes(sources)[sample[0]] == listing.name}
        assert got == expected


@unhurried
@given(sources_, seeds, st.integers(0, 9), st.booleans(), st.sampled_from([0, 4, 99]), st.data())
def test_sources_laid_at_once_are_laid_as_one_after_the_other(
    sources: dict[str, list[int]], seed: int, number: int, shuffle: bool, kept_from: int, data: st.DataObject
) -> None:
    """Chunk by chunk, by the words of the contract; ``kept_from``: all sources count as large, some, or none."""
    quotas = {name: data.draw(st.integers(0, 3 * sum(sizes))) for name, sizes in sources.items()}
    quotas[min(quotas)] += 1
    first, stamped = 0, []
    for name, sizes in sorted(sources.items()):
        due, full = quotas[name], [chunk for chunk, size in enumerate(sizes) if size]
        key, phase = keyed_number(seed, "order", name), keyed_number(seed, "phase of a pass", name, number) >> 11
        begin = laid = 0
        for turn in range(due * (number + 1) // sum(sizes) + 1):
            order = permutations(key, np.array([turn]), len(full))[0].tolist() if shuffle else range(len(full))
            for chunk in (full[place] for place in order):
                low, high = max(begin, due * number), min(begin + sizes[chunk], due * (number + 1))
                if high > low:
                    stamp = (laid + (high - low) * (phase / 2**53)) / due
                    stamped.append((stamp, name, laid, (first + chunk, low - begin, high - low, turn)))
                    laid += high - low
                begin += sizes[chunk]
        first += len(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_KEPT_FROM", kept_from)
        listings = listings_of(dict(sorted(sources.items())), seed, shuffle=shuffle)
        parts = lay_pass(listings, quotas, number=number, seed=seed)
    got = zip(*(column.tolist() for column in (parts.chunk_ids, parts.firsts, parts.sizes, parts.passes)), strict=True)
    assert list(got) == [row for *_, row in sorted(stamped)]


def test_a_source_is_spread_evenly_over_a_pass() -> None:
    """At every point of the pass each source has given its share, within two of its chunks."""
    sources = {"web": [100] * 50, "code": [40] * 20, "math": [7] * 9}
    listings = listings_of(sources, 3)
    quotas = {"web": 5000, "code": 1600, "math": 63}
    parts = lay_pass(listings, quotas, number=2, seed=3)
    ends = np.cumsum(parts.sizes)
    for name, quota in quotas.items():
        mine = np.array([homes(sources)[chunk] == name for chunk in parts.chunk_ids.tolist()])
        given_so_far = np.cumsum(parts.sizes * mine)
        strayed = np.abs(given_so_far - ends * quota / sum(quotas.values()))
        assert strayed.max() <= 2 * max(sources[name]) + 2 * quota / sum(quotas.values()) * 100


def test_a_pass_is_the_same_for_ever_however_sources_are_listed() -> None:
    sources = {"web": [5, 4, 6, 5], "code": [3, 0, 3], "math": [1, 1]}
    listings = listings_of(sources, 11)
    quotas = {"web": 20, "code": 9, "math": 4}
    passes = [lay_pass(order, quotas, number=1, seed=11) for order in (listings, listings[::-1])]
    assert samples_of(passes[0]) == samples_of(passes[1])
    assert passes[0].chunk_ids.tolist() == [7, 3, 4, 8, 2, 4, 7, 1, 8, 6, 0]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", True])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="'a': expected a number of at least 0"):
        checked_weights({"a": weight, "b": 1})


def test_weights_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one must be above 0"):
        checked_weights({"a": 0, "b": 0.0})
