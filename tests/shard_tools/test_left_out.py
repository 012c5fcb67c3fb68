"""What a source cannot give as a sample: it ends the command, or is left out, counted and listed; for every source."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert, lines
from shard_tools.make.convert.base.identity import changed_meanwhile
from shard_tools.terminal.options import LIMIT
from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError, TooManyBadSamplesError
from tests.support.sources.conversions import members
from tests.support.sources.foreign_sets import coco, picture, voc

NUM = 40  # records of each of two inputs


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def line(number: int) -> bytes:
    return json.dumps({"n": number}).encode() + b"\n"


def rows(first: int) -> range:
    return range(first, first + NUM)


def one_line(root: Path) -> set[int]:
    (root / "a.jsonl").write_bytes(b"".join(b"{broken\n" if n == 7 else line(n) for n in rows(0)))
    (root / "b.jsonl").write_bytes(b"".join(map(line, rows(NUM))))
    return {7}


def an_empty_row(root: Path) -> set[int]:
    (root / "a.jsonl").write_bytes(b"".join(b"{}\n" if n in {0, 39} else line(n) for n in rows(0)))
    return {0, 39}


def end_of_gzip(root: Path) -> set[int]:
    noise = random.Random(1)
    found = [line(n)[:-2] + b', "x": "%032x"}\n' % noise.getrandbits(128) for n in range(2 * NUM)]
    (root / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(found[:NUM]))[:-400])
    (root / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(found[NUM:])))
    return {*range(NUM // 2, NUM)}  # from somewhere in the second half on


def csv_rows(root: Path) -> set[int]:
    (root / "a.csv").write_text("n,m\n" + "".join("x\n" if n in {3, 4} else f"{n},1\n" for n in rows(0)))
    return {3, 4}


def csv_rest(root: Path) -> set[int]:
    (root / "a.csv").write_text("n\n" + "".join('"9"9"\n' if n == 30 else f"{n}\n" for n in rows(0)))
    (root / "b.csv").write_text("n\n" + "".join(f"{n}\n" for n in rows(NUM)))
    return {*range(30, NUM)}


def row_group(root: Path) -> set[int]:
    table = pa.table({"n": [*rows(0)], "x": [bytes([n]) * 100 for n in rows(0)]})
    pq.write_table(table, root / "a.parquet", row_group_size=10, compression="gzip", use_dictionary=False)
    data = bytearray((root / "a.parquet").read_bytes())
    begin = pq.ParquetFile(root / "a.parquet").metadata.row_group(1).column(0).data_page_offset
    data[begin : begin + 40] = b"\xff" * 40
    (root / "a.parquet").write_bytes(data)
    return {*range(10, 20)}


def end_of_tar(root: Path) -> set[int]:
    for name, first in (("a.tar", 0), ("b.tar", NUM)):
        with tarfile.open(root / name, "w") as archive:
            for number in rows(first):
                member = tarfile.TarInfo(f"{number:03d}.json")
                member.size = len(line(number))
                archive.addfile(member, io.BytesIO(line(number)))
    (root / "a.tar").write_bytes((root / "a.tar").read_bytes()[: 1024 * 30 + 600])
    return {*range(30, NUM)}


def notes_beside(root: Path) -> set[int]:
    for number in rows(0):
        (root / f"{number:03d}.png").write_bytes(picture(number))
        (root / f"{number:03d}.json").write_bytes(b"[1]" if number == 5 else line(number))
    return {5}


SOURCES = (
    one_line, an_empty_row, end_of_gzip, csv_rows, csv_rest, row_group, end_of_tar, notes_beside,
)  # fmt: skip


def numbers(target: Path) -> set[int]:
    dataset = StreamingDataset(str(target))
    return {int(dataset[number]["json"]["n"]) for number in range(len(dataset))}


@pytest.mark.parametrize("make", SOURCES)
def test_what_cannot_be_read_is_an_error_or_left_out(make: Callable[[Path], set[int]], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    bad = make(tmp_path / "in")
    of_all = {*rows(0), *(rows(NUM) if any((tmp_path / "in").glob("b.*")) else ())}
    with pytest.raises(DataError):
        convert(f"{tmp_path}/in/", str(tmp_path / "out"), options=ConvertOptions(max_samples=9))
    report = convert(f"{tmp_path}/in/", str(tmp_path / "out"), options=ConvertOptions(max_samples=9, on_error="skip"))
    lost = of_all - numbers(tmp_path / "out")
    assert lost == bad or (make is end_of_gzip and lost and lost <= bad)
    assert sum(report.left_out.values()) == len([one for one in report.skipped if one.is_lost]) > 0
    assert all(one.path and one.reason for one in report.skipped)
    limit = sum(report.left_out.values())
    for most, error in ((limit, None), (limit - 1, TooManyBadSamplesError)):
        how = ConvertOptions(max_samples=9, on_error="skip", max_bad=most)
        if error is None:
            again = convert(f"{tmp_path}/in/", str(tmp_path / f"again{most}"), options=how)
            assert again.left_out == report.left_out
        else:
            with pytest.raises(error, match=rf"--max-bad allows {most}"):
                convert(f"{tmp_path}/in/", str(tmp_path / f"again{most}"), options=how)


@pytest.mark.parametrize("kept", range(1, 9))
def test_a_stopped_run_goes_on_and_leaves_out_the_same(kept: int, tmp_path: Path) -> None:
    broken = {0, 1, 9, 10, 11, 30, 31, 59}  # also right before the record that begins the second shard
    body = b"".join(b"nothing\n" if n in broken else line(n) for n in range(60))
    (tmp_path / "a.jsonl").write_bytes(body)
    how = ConvertOptions(max_samples=7, on_error="skip", max_bad=len(broken))  # none is counted twice
    whole = convert(str(tmp_path / "a.jsonl"), str(tmp_path / "whole"), options=how)
    assert (whole.num_samples, whole.left_out) == (52, {"unreadable": 8})
    out = tmp_path / "out"
    convert(str(tmp_path / "a.jsonl"), str(out), options=how)
    for path in sorted(out.glob("*.tar"))[kept - 1 :]:
        path.unlink()
    again = convert(str(tmp_path / "a.jsonl"), str(out), options=how)
    assert (again.num_samples, again.left_out) == (52, whole.left_out)
    assert sorted(again.skipped, key=str) == sorted(whole.skipped, key=str)
    for path in out.glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_a_run_that_raised_goes_on_with_skip_but_not_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(b"x\n" if n == 20 else line(n) for n in range(40)))
    source, out = str(tmp_path / "a.jsonl"), str(tmp_path / "out")
    refused = run("convert", source, out, "--max-samples", 5)
    assert refused.exit_code == 1
    assert "a.jsonl:21: not JSON" in refused.stderr
    report = convert(source, out, options=ConvertOptions(max_samples=5, on_error="skip"))
    assert (report.num_samples, report.num_resumed_samples) == (39, 10)
    (tmp_path / "out" / "000007.tar").unlink()
    with pytest.raises(ConfigError, match="an earlier run has left out records"):
        convert(source, out, options=ConvertOptions(max_samples=5))


def test_a_changed_input_is_never_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is one of data, too."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(map(line, range(10))))
    read = lines.read_lines

    def changing(stream: object, url: str) -> object:
        for number, found in enumerate(read(stream, url)):  # type: ignore[arg-type]
            if number == 5:
                raise changed_meanwhile(url)
            yield found

    monkeypatch.setattr(lines, "read_lines", changing)
    with pytest.raises(DataError, match="changed while it was read"):
        convert(str(source), str(tmp_path / "out"), options=ConvertOptions(on_error="skip"))


LISTED: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "text beside images": (lambda root: (root / "other.txt").write_text("x"), "other.txt: not an image", 1),
    "empty image": (lambda root: (root / "e.png").write_bytes(b""), "e.png: empty file", 1),
    "table beside images": (lambda root: (root / "labels.csv").write_text("a,b"), "labels.csv: not an image", 1),
    "notes for readers": (lambda root: (root / "README.md").write_text("x"), "", 0),
    "hidden": (lambda root: (root / ".DS_Store").write_text("x"), "", 0),
    "link out": (lambda root: (root / "l.png").symlink_to("/etc/hostname"), "l.png: symbolic link out", 1),
}


@pytest.mark.parametrize("kind", LISTED)
def test_inputs_that_nothing_reads_are_told_with_their_number_and_reason(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.png").write_bytes(picture())
    make, told, count = LISTED[kind]
    make(root)
    result = run("convert", root, tmp_path / "out")
    assert result.exit_code == (1 if count else 0), result.output
    assert told in result.stderr
    skipped = json.loads(run("convert", root, tmp_path / "out", "--on-error", "skip", "--json").stdout)["skipped"]
    assert sum(one["is_lost"] for one in skipped) == count
    assert run("convert", root, tmp_path / "x", "--on-error", "skip", "--max-bad", 0).exit_code == (1 if count else 0)


def test_1200_texts_beside_images_are_captions_or_an_error(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for number in range(1200):
        (root / f"{number}.txt").write_text(f"caption {number}")
    for number in range(20):
        (root / f"{number}.png").write_bytes(picture())
    refused = run("convert", root, tmp_path / "out")
    assert refused.exit_code == 1
    assert "1,180 inputs would be left out" in refused.stderr
    assert "--on-error skip" in refused.stderr


@pytest.mark.parametrize("make", [coco, voc])
def test_annotations_without_images_are_no_matter_of_course(make: Callable[..., Path], tmp_path: Path) -> None:
    root = make(tmp_path / "in", 4)
    next(iter(sorted(root.rglob("*.jpg")))).unlink()
    assert run("convert", root, tmp_path / "out").exit_code == 1
    assert run("convert", root, tmp_path / "out", "--on-error", "skip", "--max-bad", 1).exit_code == 0


def test_a_null_is_called_null(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null, "id": null}\n')
    named = run("convert", tmp_path / "a.jsonl", tmp_path / "o", "--key", "id").stderr
    assert "--key id: expected text or a whole number there, got null" in named
    told = run("convert", tmp_path / "a.jsonl", tmp_path / "t", "--tokenizer", "bytes", "--eos", "none").stderr
    assert "null: 'text' is null" in told
    nested = run(
        "convert", tmp_path / "a.jsonl", tmp_path / "t", "--tokenizer", "bytes", "--eos", "none", "--text-field", "a.b"
    ).stderr
    assert "missing field: no 'a.b'" in nested


@pytest.mark.thorough
def test_most_of_documents_that_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": 3}\n{"text": ""}\n{"text": null}\n')
    how = ("--tokenizer", "bytes", "--eos", "none", "--on-error", "skip")
    assert run("convert", tmp_path / "a.jsonl", tmp_path / "a", *how, "--max-bad", 2).exit_code == 0
    told = json.loads(run("convert", tmp_path / "a.jsonl", tmp_path / "a", *how, "--json").stdout)["sets"][0]
    assert {one["path"].rpartition(":")[2]: one["reason"] for one in told["skipped"]} == {
        "2": "not a string: 'text' is of type int, expected text", "3": "empty: 'text' is empty",
        "4": "null: 'text' is null",
    }  # fmt: skip
    assert "--max-bad allows 1" in run("convert", tmp_path / "a.jsonl", tmp_path / "b", *how, "--max-bad", 1).stderr
    assert "give both" in run("convert", tmp_path / "a.jsonl", tmp_path / "c", "--max-bad", 1).stderr
    assert members(tmp_path / "a") == {"000000000.tok": bytes([0, 1, ord("x"), 0])}


# ------------------------------------------------------------------------------------------------------------- a share


def bad_lines(root: Path, num: int, bad: set[int]) -> Path:
    (root / "a.jsonl").write_bytes(b"".join(b"{broken\n" if n in bad else line(n) for n in range(num)))
    return root


def bad_texts(root: Path, num: int, bad: set[int]) -> Path:
    """Documents of which some are no text."""
    rows = [{"text": n if n in bad else f"text {n}"} for n in range(num)]
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def bad_rows(root: Path, num: int, bad: set[int]) -> Path:
    """Rows of Parquet of which some have no text."""
    pq.write_table(pa.table({"text": [None if n in bad else f"text {n}" for n in range(num)]}), root / "a.parquet")
    return root


def bad_images(root: Path, num: int, bad: set[int]) -> Path:
    body = picture()
    for n in range(num):
        (root / f"{n:05d}.png").write_bytes(b"" if n in bad else body)
    return root


TOKENS = ("--tokenizer", "bytes", "--workers", "1", "--eos", "none")
SHARES: dict[str, tuple[Callable[[Path, int, set[int]], Path], tuple[str, ...], bool]] = {
    "lines": (bad_lines, (), False), "texts": (bad_texts, TOKENS, False), "rows": (bad_rows, TOKENS, True),
    "images": (bad_images, (), True),
}  # fmt: skip
"""What is bad; options; and whether the source knows its number before it is read."""


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("spelling", ["%", ""])
def test_a_share_is_of_all_inputs(kind: str, spelling: str, tmp_path: Path) -> None:
    """400 inputs, 12 bad: 3 % and no less; wherever they are, since fewer than 1,000 are not judged before the end."""
    make, how, _ = SHARES[kind]
    (tmp_path / "in").mkdir()
    root = make(tmp_path / "in", 400, {*range(5), *range(200, 207)})
    for number, (share, code) in enumerate({3.0: 0, 2.8: 0, 2.7: 1, 0.5: 1, 100.0: 0}.items()):
        text = f"{share:g}%" if spelling else f"{share / 100}"
        told = run("convert", root, tmp_path / f"{number}", *how, "--on-error", "skip", "--max-bad", text)
        assert told.exit_code == code, (share, told.output)
        assert not code or f"--max-bad {share:g}% of 400 inputs allows" in " ".join(told.stderr.split())


@pytest.mark.parametrize(("at", "ends"), [(range(900, 930), False), (range(1100, 1130), True)])
@pytest.mark.parametrize("kind", ["lines", "texts", "rows"])
def test_a_source_that_does_not_know_its_number_is_judged_from_1000_on(
    kind: str, at: range, ends: bool, tmp_path: Path
) -> None:
    """Of 3,000 inputs 1 % is bad, in one place: too many of those read so far, if that is behind the first thousand."""
    make, how, knows = SHARES[kind]
    (tmp_path / "in").mkdir()
    root = make(tmp_path / "in", 3000, {*at})
    told = run("convert", root, tmp_path / "out", *how, "--on-error", "skip", "--max-bad", "1%")
    assert told.exit_code == int(ends and not knows), told.output
    assert ("inputs read so far allows" in " ".join(told.stderr.split())) == (ends and not knows)


@pytest.mark.thorough
def test_two_of_few_are_no_rate_and_a_run_that_goes_on_counts_both(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    few = bad_lines(tmp_path / "in", 20, {3, 4})
    assert run("convert", few, tmp_path / "few", "--on-error", "skip", "--max-bad", "0.1%").exit_code == 0
    bad_lines(tmp_path / "in", 20, {3, 4, 17})
    for kept in range(4):
        out = tmp_path / f"out{kept}"
        how = ("--on-error", "skip", "--max-samples", 5)
        assert run("convert", tmp_path / "in", out, *how).exit_code == 0
        for path in sorted(out.glob("*.tar"))[kept:]:
            path.unlink()
        assert run("convert", tmp_path / "in", out, *how, "--max-bad", "1%").exit_code == 1
        assert run("convert", tmp_path / "in", out, *how, "--max-bad", "15%").exit_code == 0


@pytest.mark.parametrize("how", [(), TOKENS])
def test_what_is_appended_is_judged_alone(how: tuple[str, ...], tmp_path: Path) -> None:
    make = bad_texts if how else bad_lines
    for day, bad in enumerate([set[int](), {1, 2, 3}]):
        (tmp_path / f"{day}").mkdir()
        make(tmp_path / f"{day}", 40, bad)
        (tmp_path / f"{day}/a.jsonl").rename(tmp_path / f"{day}.jsonl")
    assert run("convert", tmp_path / "0.jsonl", tmp_path / "set", *how).exit_code == 0
    for share, code in (("5%", 1), ("7.5%", 0)):
        words = ("append", tmp_path / "1.jsonl", tmp_path / "set", *how[:4], "--on-error", "skip", "--max-bad", share)
        told = run(*words)
        assert told.exit_code == code, told.output
    assert len(StreamingDataset(str(tmp_path / "set"))) == 77


def test_an_inbox_with_a_few_broken_images_is_appended_each_night(tmp_path: Path) -> None:
    """They are not in the set, so they come again each night: a share is of all images, those of the set too."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for number in range(150):
        (inbox / f"{number:03d}.png").write_bytes(picture(number))
    assert run("convert", inbox, tmp_path / "set").exit_code == 0
    for night, name in enumerate(("a", "b", "c")):
        (inbox / f"bad-{name}.png").write_bytes(b"")
        (inbox / f"new-{name}.png").write_bytes(picture(200 + night))
        told = run("append", inbox, tmp_path / "set", "--on-error", "skip", "--max-bad", "2%")
        assert told.exit_code == 0, told.output
        assert len(StreamingDataset(str(tmp_path / "set"))) == 151 + night
    told = run("append", inbox, tmp_path / "set", "--on-error", "skip", "--max-bad", "1%")
    assert told.exit_code == 1, "three of 156"


@pytest.mark.parametrize("value", ["-1", "x", "200%", "1.5", "0%", "1/0"])
@pytest.mark.parametrize("verb", ["convert", "append", "map"])
def test_what_is_no_bound_is_refused_by_every_verb(verb: str, value: str) -> None:
    told = run(verb, "a", "b", *(["m:f", "--on-error", "drop"] if verb == "map" else []), "--max-bad", value)
    assert told.exit_code == 2
    assert "'--max-bad'" in told.stderr


def test_bounds_are_written_in_one_way() -> None:
    told = [LIMIT.convert(text, None, None) for text in ("20", "0", "0.1%", "0.001", "1/1000", "1", "100%", "1.0")]
    assert told == [20, 0, 0.001, 0.001, 0.001, 1, 1.0, 1.0]
    assert [type(one) for one in told] == [int, int, float, float, float, int, float, float]
