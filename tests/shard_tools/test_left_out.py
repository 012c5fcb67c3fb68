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
