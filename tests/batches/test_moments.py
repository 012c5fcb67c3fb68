"""A clip is that part of the whole, for every codec, rate, mode, layout and place: random clips, many by an option."""

from __future__ import annotations

import io

import drawn_sounds
import numpy as np
import pytest
import soxr

from streaming import Sound

CLIPS_OF_EACH = 40


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case of each dozen of sounds, a sound of each kind."""
    if "dozen" in metafunc.fixturenames:
        kinds = len(drawn_sounds.STREAMS)
        count = -(-metafunc.config.getoption("--clips") // (kinds * CLIPS_OF_EACH))
        first = metafunc.config.getoption("--clips-first") // (kinds * CLIPS_OF_EACH)
        metafunc.parametrize("dozen", range(first, first + count))


def test_random_clips_are_parts_of_the_whole(dozen, pytestconfig, capfd):
    seed, kinds, worst = pytestconfig.getoption("--torture-seed"), len(drawn_sounds.STREAMS), {}
    for number in range(dozen * kinds, (dozen + 1) * kinds):
        drawn = drawn_sounds.drawn_sound(number, seed)
        rng = np.random.default_rng([seed, number, 1])
        whole = Sound()(drawn.data)
        assert whole.shape == drawn.whole.T.shape, drawn.what
        for _ in range(CLIPS_OF_EACH):
            off, words = difference(drawn, rng)
            assert off <= drawn.bound, f"{drawn.what}: {words}: off by {off}"
            worst[drawn.bound] = max(worst.get(drawn.bound, 0), off)
    capfd.readouterr()  # libmpg123 prints
    print(f"clips: {kinds * CLIPS_OF_EACH}, most by bound: {worst}")


def difference(drawn, rng):
    """By how much a random clip differs from the whole, and which it was."""
    count, rate = len(drawn.whole), drawn.rate
    length = int(rng.integers(1, max(2, min(count, rate))))
    first = int(rng.integers(0, count))
    if rng.random() < 0.4:  # in the last second
        first = max(0, count - 1 - int(rng.integers(0, rate)))
    given = io.BytesIO(drawn.data) if rng.random() < 0.4 else drawn.data
    to = int(rng.choice([8_000, 16_000, 44_100])) if rng.random() < 0.15 else rate
    if to != rate:
        length, first = max(1, length * to // rate), min(first * to // rate, max(0, count * to // rate - 1))
    clip = Sound(samples=length, start=first / to, rate=to, short="keep", details=True)(given)
    assert round(clip["start"] * to) == first
    if to == rate:
        expected, more = drawn.whole[first : first + length], 0.0
    else:
        expected, more = soxr.resample(drawn.whole, rate, to)[first : first + length], 2e-6
    words = f"{length} samples from {first} of {count}, at {to} Hz"
    made = clip["samples"].T
    if made.shape != expected.shape:  # soxr makes a few fewer of very short sounds: zeros
        assert not made[len(expected) :].any(), words
        made = made[: len(expected)]
    off = float(np.abs(made - expected).max(initial=0))
    return max(0.0, off - more) / (1.5 if to != rate else 1.0), words  # a filter may add what two libraries differ in
