"""The pure parts of ``benchmarks/peers``: the rate of a run, the table of many, and how wrong samples are seen."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from streaming.storage import Storage
from tests.support.code.folders import ROOT
from tests.support.code.script_modules import script_modules
from tests.support.servers.mini_s3 import KEY, REGION, SECRET

FOLDER = str(ROOT / "benchmarks" / "peers")
MODULES = ("sets", "contestant", "report")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return script_modules(monkeypatch, FOLDER, MODULES)


def run(samples: int, seconds: float, **more: object) -> dict[str, object]:
    return {"samples": samples, "seconds": seconds, "first_batch_s": 0.5, "first_samples": 10, "whole": True,
            "wrong": "", "cpu_s": 2.0, "peak_bytes": 1 << 20, "load": 1.0, **more}  # fmt: skip


def test_a_whole_pass_counts_from_opening_to_the_last_batch(peers):
    assert peers["report"].rate(run(1000, 2.0), 1000) == 500


def test_a_pass_cut_short_is_extrapolated_with_its_start_counted_once(peers):
    cut = run(110, 1.5, first_batch_s=0.5, whole=False)
    # 10 samples after 0.5 s, then 100 a second: 1,000 samples take 0.5 + 9.9 s
    assert peers["report"].rate(cut, 1000) == pytest.approx(1000 / 10.4)


def test_a_pass_cut_short_at_its_first_batch_has_the_rate_that_was_seen(peers):
    assert peers["report"].rate(run(10, 0.5, whole=False), 1000) == 20


def test_medians_over_the_rounds(peers):
    report = peers["report"]
    found = report.outcome([run(100, 1.0), run(100, 4.0), run(100, 2.0, peak_bytes=3 << 20)], 100)
    assert (found.per_second, found.lowest, found.highest, found.rounds) == (50, 25, 100, 3)
    assert found.cpu_s_per_sample == 0.02
    assert found.peak_bytes == 1 << 20


@pytest.mark.parametrize(
    ("flawed", "word", "reason"),
    [
        ({"unsupported": "no client"}, "-", "no client"),
        ({"failed": "killed"}, "failed", "killed"),
        (run(99, 1.0, wrong="99 samples instead of 100"), "wrong", "99 samples instead of 100"),
    ],
)
def test_one_flawed_round_leaves_a_word_in_place_of_a_rate(peers, flawed, word, reason):
    report = peers["report"]
    assert report.outcome([run(100, 1.0), flawed], 100) == report.Missing(word=word, reason=reason)


def test_table_has_ratios_to_ours_and_the_reasons_below(peers):
    report = peers["report"]
    results = {
        "machine": "a machine", "versions": {"theirs": {"their-package": "1.2"}},
        "absent": {"third": "does not install"},
        "sizes": {"small": 100},
        "runs": {
            "small disk 0 ours": [run(100, 0.01)],
            "small disk 0 theirs": [run(100, 0.04)],
            "small disk 2 ours": [run(100, 0.02)],
            "small disk 2 theirs": [run(50, 0.1, wrong="50 samples instead of 100")],
            "small s3 2 ours": [run(100, 0.02)],
            "small s3 2 theirs": [{"unsupported": "no client"}],
        },
    }  # fmt: skip
    titles = {"ours": "Ours", "theirs": "Theirs", "third": "Third"}
    lines = report.document(results, {"small": "Small things"}, titles, "ours").splitlines()
    assert "| Ours | **10,000** | **5,000** | 20 / 20 | 1 / 1 | 0.50 / 0.50 |" in lines
    assert "| Theirs | 2,500 (4.0 x) | wrong | 20 / - | 1 / - | 0.50 / - |" in lines
    assert (
        "Against the best peer: best against best 4.00 x (0 workers; Theirs, 0 workers); 0 workers 4.00 x (Theirs)."
        in lines
    )
    assert "- Theirs, 2 workers: wrong: 50 samples instead of 100" in lines
    assert "- Theirs, 2 workers: no client" in lines
    assert "- Theirs: their-package 1.2" in lines
    assert "- Third: does not install" in lines


def test_best_is_held_against_best_with_the_processes_that_ran_and_few_batches_are_struck_out(peers):
    report = peers["report"]
    few, many = {"num_batches": 19}, {"num_batches": 20}
    results = {
        "machine": "a machine", "versions": {}, "sizes": {"small": 100},
        "runs": {
            "small disk 0 ours": [run(100, 0.04, processes=1, **many)],
            "small disk 2 ours": [run(100, 0.02, processes=1, **many)],
            "small disk 0 theirs": [run(100, 0.01, processes=1, **many)],
            "small disk 2 theirs": [run(100, 0.005, processes=4, **few)],
        },
    }  # fmt: skip
    text = report.document(results, {"small": "Small things"}, {"ours": "Ours", "theirs": "Theirs"}, "ours")
    assert "best against best 0.50 x (2 workers, 1 processes ran; Theirs, 0 workers, 1 processes ran)" in text
    assert "| Theirs | 10,000 (0.2 x) | 20,000 (~~0.2 x~~) |" in text
    assert "; 2 workers" not in text, "nobody has a figure there to be held against"


def test_unhidden_time_has_a_column_where_it_was_measured(peers):
    report = peers["report"]
    runs = {
        "small disk 0 ours": [run(100, 0.01, paused={"unhidden_ms": ms}) for ms in (0.5, 9.0, 0.25)],
        "small disk 0 theirs": [run(100, 0.04, paused={"failed": "killed"})],
    }
    results = {"machine": "a machine", "versions": {}, "sizes": {"small": 100}, "runs": runs}
    titles = {"ours": "Ours", "theirs": "Theirs"}
    text = report.document(results, {"small": "Small things"}, titles, "ours")
    assert "| Ours | **10,000** | 20 | 1 | 0.50 | 0.5 |" in text
    assert "| Theirs | 2,500 (4.0 x) | 20 | 1 | 0.50 |  |" in text
    for each in runs.values():
        for one in each:
            del one["paused"]
    assert "nhidden" not in report.document(results, {"small": "Small things"}, titles, "ours")


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1,230,000"), (1000.0, "1,000"), (999.6, "1,000"), (61.94, "61.9"), (0.01234, "0.0123")],
)
def test_rate_is_shown_with_three_digits(peers, value, text):
    assert peers["report"].number(value) == text


def test_fingerprints_see_length_order_and_content(peers):
    fingerprint = peers["sets"].fingerprint
    large = bytes(range(256)) * 64
    assert fingerprint(large) == fingerprint(memoryview(large)) == fingerprint(np.frombuffer(large, np.uint8))
    assert len({fingerprint(one) for one in (large, large[:-1], large[::-1], b"\1" + large[1:], b"", b"\0")}) == 6


def test_witness_tells_lost_doubled_and_foreign_samples(peers, tmp_path):
    sets, contestant = peers["sets"], peers["contestant"]
    samples = [b"%d" % i for i in range(8)]
    np.save(tmp_path / "fingerprints.npy", np.array([sets.fingerprint(one) for one in samples], np.uint64))

    def verdict(batches: list[list[bytes]], *, whole: bool = True) -> str:
        witness = contestant.Witness(sets.SETS["records"], check_all=True)
        for batch in batches:
            witness.see(batch)
        return witness.verdict(str(tmp_path), sum(map(len, batches)), whole=whole)

    assert verdict([samples[:3], samples[3:]]) == ""
    assert verdict([samples[:3]], whole=False) == ""
    assert verdict([samples[:7]]) == "7 samples instead of 8"
    assert verdict([samples[:7], [b"x"]]) == "1 of 8 checked samples have other content"
    assert verdict([samples[:7], samples[:1]]) == "1 of 8 checked samples came twice"


def test_witness_tells_other_pictures_however_they_are_laid_out(peers, tmp_path):
    sets, contestant = peers["sets"], peers["contestant"]
    rng = np.random.default_rng(0)
    squares = rng.integers(0, 255, (3, sets.GRID, sets.GRID, 3), np.uint8)
    pictures = squares.repeat(sets.SIDE // sets.GRID, 1).repeat(sets.SIDE // sets.GRID, 2)
    np.save(tmp_path / "thumbnails.npy", np.stack([sets.thumbnail(one) for one in pictures[:2]]))
    np.save(tmp_path / "fingerprints.npy", np.zeros(2, np.uint64))

    def verdict(batch: np.ndarray) -> str:
        witness = contestant.Witness(sets.SETS["images-decoded"], check_all=True)
        witness.see(batch)
        return witness.verdict(str(tmp_path), 2, whole=True)

    assert verdict(pictures[:2]) == verdict(pictures[:2].transpose(0, 3, 1, 2)) == ""
    assert verdict(pictures[1:]) == "1 of 2 checked samples have other content"
    with pytest.raises(ValueError, match="expected uint8"):
        verdict(pictures[:2].astype(np.float32))


def pack_row(sets: ModuleType, length: int, *spans: tuple[int, int]) -> np.ndarray:
    """Tokens of these spans of all documents, in one row with padding behind."""
    tokens = np.concatenate([sets.tokens_between(0, 200)[start:stop] for start, stop in spans])
    return np.pad(tokens, (0, length - len(tokens))).astype(np.int64)


@pytest.fixture
def pack_verdict(peers, tmp_path):
    """Judge rows of a pass over documents of 10, 30 and 24 tokens."""
    sets, contestant = peers["sets"], peers["contestant"]
    np.save(tmp_path / "borders.npy", np.array([0, 10, 40, 64]))

    def verdict(rows: list[np.ndarray], *, whole: bool = True, **rule: bool) -> str:
        one = dataclasses.replace(sets.SETS["packs-2k"], length=len(rows[0]))
        witness = contestant.PackWitness(one, contestant.Packing(rule="", **rule), check_all=True)
        count = sum(witness.see(row[None]) for row in rows)
        return witness.verdict(str(tmp_path), count, whole=whole)

    return verdict


def test_witness_of_packs_tells_lost_doubled_foreign_and_torn_tokens(peers, pack_verdict):
    row = functools.partial(pack_row, peers["sets"], 16)
    packed = [row((0, 10)), row((10, 26)), row((26, 40)), row((40, 56)), row((56, 64))]
    assert pack_verdict(packed) == ""
    assert pack_verdict(packed[1:]) == "54 tokens instead of 64"
    assert pack_verdict(packed[1:], whole=False) == ""
    assert pack_verdict([*packed, packed[0]]) == "74 tokens instead of 64; 10 of 74 checked tokens came twice"
    assert pack_verdict([row((64, 74)), *packed[1:]]) == "10 of 64 checked tokens are others"
    assert "checked tokens are others" in pack_verdict([packed[0][::-1], *packed[1:]])
    assert pack_verdict([row((0, 4)), row((4, 10)), *packed[1:]]) == "1 pieces begin in the middle of a document"
    assert (
        pack_verdict([row((40, 44), (0, 4)), row((4, 10)), *packed[1:3], row((44, 60)), row((60, 64))], cuts=True) == ""
    )
    assert "2 pieces" in pack_verdict([row((0, 4), (6, 10), (4, 6)), *packed[1:]], cuts=True), "not where a row begins"


def test_rows_may_be_cut_anywhere_where_that_is_the_rule(peers, pack_verdict):
    rows = [pack_row(peers["sets"], 15, (start, start + 15)) for start in range(0, 60, 15)]
    assert pack_verdict(rows, cuts=True, drops=True) == ""
    assert pack_verdict(rows, cuts=True) == "60 tokens instead of 64"
    assert pack_verdict(rows, drops=True).startswith("4 of 60 checked tokens are others")


def test_packs_are_counted_in_tokens_and_compared_with_those_that_cut_alike(peers):
    report = peers["report"]
    runs = {"ours": [run(2_000_000, 1.0, fill=0.99)], "ours_cut": [run(2_000_000, 0.5, fill=1.0)],
            "theirs": [run(2_000_000, 4.0, fill=0.9), run(2_000_000, 4.0, fill=0.8)],
            "theirs_cut": [run(2_000_000, 1.0, fill=1.0)], "limit": [run(2_000_000, 0.25, fill=1.0)]}  # fmt: skip
    results = {"machine": "a machine", "versions": {}, "sizes": {"packs": 2_000_000},
               "runs": {f"packs disk 0 {peer}": found for peer, found in runs.items()}}  # fmt: skip
    packs = report.Packs(
        sets=("packs",), rules={"ours": "best fit", "ours_cut": "cut", "theirs": "first"},
        cutters=("ours_cut", "theirs_cut", "limit"),
    )  # fmt: skip
    titles = {"ours": "Ours", "ours_cut": "Ours, cut", "theirs": "Theirs", "theirs_cut": "Theirs, cut", "limit": "Most"}
    text = report.document(results, {"packs": "Documents to packs"}, titles, "ours", packs, ("ours_cut",), "limit")
    assert "| Ours | **2,000,000** | 1 | 1 | 0.50 | 99.00 | best fit |" in text
    assert "| Ours, cut | 4,000,000 (0.5 x) | 1 | 1 | 0.50 | 100.00 | cut |" in text
    assert "| Theirs | 500,000 (4.0 x) | 1 | 1 | 0.50 | 80.00 | first |" in text
    assert (
        "Documents kept whole, against the best peer: best against best 4.00 x (0 workers; Theirs, 0 workers)" in text
    )
    assert "Cut anywhere: best against best 2.00 x (0 workers; Theirs, cut, 0 workers)" in text
    assert "50 % of the limit" in text


def test_s3_server_has_the_files_of_a_folder_and_leaves_with_its_parent(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.tar").write_bytes(b"0123456789")
    command = [sys.executable, os.path.join(FOLDER, "s3_server.py"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET, "region": REGION}
        assert bytes(Storage(options).read("s3://bench/set/a.tar", 2, 5)) == b"234"
        server.stdin.close()
        assert server.wait() == 0
