"""Parsers on hostile bytes: the corpus, what once failed, and a short random run; ``make fuzz`` is the long one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import targets
from tests.fuzz.corpus import CORPUS, files_of, regressions_of, seeds_of
from tests.fuzz.make_corpus import make
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Disagreement, run

SHORT = 150
"""Random inputs per target."""


def test_the_corpus_is_what_its_script_makes() -> None:
    """Parquet, gzip and LMDB bytes depend on the libraries' versions, and a state on ours."""
    made = make()
    assert {folder.name for folder in CORPUS.iterdir()} == set(made)
    for folder, files in made.items():
        assert {path.name for path in (CORPUS / folder).iterdir()} == set(files)
        if folder not in {"index", "gzip", "state", "formats"}:
            assert {path.name: path.read_bytes() for path in (CORPUS / folder).iterdir()} == files


@pytest.mark.parametrize("target", TARGETS)
def test_corpus_and_regressions(target: str) -> None:
    for path in [*files_of(target), *regressions_of(target)]:
        try:
            run(TARGETS[target], path.read_bytes())
        except Exception as error:
            error.add_note(str(path))
            raise


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_run(target: str) -> None:
    dice = random.Random(f"{target} 1")
    for _ in range(SHORT):
        run(TARGETS[target], mutated(seeds_of(target), dice))


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=1200))
def test_random_bytes_raise_only_errors_of_ours(target: str, data: bytes) -> None:
    run(TARGETS[target], data)


def test_a_slow_or_greedy_target_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SECONDS", 0.0)
    with pytest.raises(Disagreement, match="took"):
        run(TARGETS["pax"], b"12 path=a.b\n")
