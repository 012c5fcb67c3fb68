"""A user's function over the samples of a set: what it names changes, everything else keeps its bytes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import made_samples
import numpy as np
import pytest
from click.testing import CliRunner, Result
from made_samples import changed
from PIL import Image

from shard_tools import ShardWriter, optimize
from shard_tools.change.check.verify import verify
from shard_tools.change.functions.mapped import MapCall, MapOptions, map_set
from shard_tools.change.functions.run import Running
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import tag
from shard_tools.change.sets.copy import copy
from shard_tools.change.sets.inspect import list_samples
from shard_tools.cli import cli
from shard_tools.make.convert.base.records import Record, runs_of
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.make.write.change import SetChange
from streaming import StreamingDataset
from streaming.build.decode import resolve_decoders
from streaming.errors import ChecksumError, ConfigError, DecodeError
from streaming.shards.versions.publish import OvertakenError
from streaming.storage import Storage
from tests.support.sources.conversions import contents, members

HERE = Running(workers=0)


def shell(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((9, 8, 3), number, np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=25, columns=["json.w"]) as writer:
        for number in range(120):
            writer.write(
                {
                    "__key__": f"{number:04d}", "jpg": jpeg(number), "txt": "t" * number, "cls": number % 4,
                    "json": f'{{"w":   {number}}}',  # not as we would write it
                }
            )  # fmt: skip
    return folder


def fields_of(target: Path) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for name, value in members(target).items():
        key, _, field = name.partition(".")
        found.setdefault(key, {})[field] = value
    return found


@pytest.mark.thorough
def test_what_the_function_names_changes_and_the_rest_keeps_its_bytes(tmp_path: Path, source: Path) -> None:
    options = MapOptions(max_samples=30)
    for workers in (0, 1, 3):
        report = map_set(
            str(source), str(tmp_path / str(workers)), "made_samples:changed", options=options,
            running=Running(workers=workers),
        )  # fmt: skip
        assert (report.num_inputs, report.num_empty, report.num_samples) == (120, 20, 20 * (2 + 1 + 1 + 3 + 1))
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "3")
    before, after = fields_of(source), fields_of(tmp_path / "0")
    for key, fields in before.items():
        number = int(key)
        expected: dict[str, Any]
        match number % 6:
            case 0:
                expected = {}
            case 1:
                expected = {
                    f"{key}-000": fields | {"txt": b"first"},
                    f"{key}-001": {n: v for n, v in fields.items() if n != "json"} | {"txt": b"second"},
                }
            case 2:
                kept = {n: v for n, v in fields.items() if n != "cls"}
                expected = {key: kept | {"json": f'{{"seen":true,"w":{number}}}'.encode()}}
            case 3:
                expected = {f"new-{number}": fields}
                assert np.array_equal(np.load(io.BytesIO(after[f"new-{number}"].pop("npy"))), np.arange(number))
            case 4:
                expected = {f"{key}-{part:03d}": fields | {"cls": str(part).encode()} for part in range(3)}
            case _:
                expected = {key: fields}
        for name, values in expected.items():
            assert after.pop(name) == values
    assert after == {}
    values = {
        one.key: one.columns for one in list_samples([str(tmp_path / "0")], storage=Storage(None), columns=("json.w",))
    }
    assert values["0001-001"] == {"json.w": 1}
    assert values["new-3"] == {"json.w": 3}


def test_a_set_that_is_not_changed_is_the_same_set(tmp_path: Path, source: Path) -> None:
    map_set(str(source), str(tmp_path), "made_samples:unchanged", options=MapOptions(max_samples=25), running=HERE)
    before, after = contents(source), contents(tmp_path)
    assert after.pop("_shardstream/convert.json")
    assert after == before


@pytest.mark.thorough
def test_several_sources_follow_each_other(tmp_path: Path, source: Path) -> None:
    """Named one by one or by a pattern, in the order of the command line."""
    for name in ("a", "b"):
        ran = shell("reshard", source, tmp_path / name, "--key-prefix", f"{name}-", "--where", "json.w < 10")
        assert ran.exit_code == 0, ran.output
    for target, sources in (("ab", [tmp_path / "a", tmp_path / "b"]), ("ba", [tmp_path / "b", tmp_path / "a"])):
        assert shell("map", *sources, tmp_path / target, "made_samples:unchanged", "--workers", "1").exit_code == 0
        assert fields_of(tmp_path / target) == fields_of(tmp_path / "a") | fields_of(tmp_path / "b")
        keys = [one.key for one in list_samples([str(tmp_path / target)], storage=Storage(None))]
        assert [key[0] for key in keys] == [*target[0] * 10, *target[1] * 10]
    told = shell("map", f"{tmp_path}/[ab]/*.tar", tmp_path / "two", "made_samples:unchanged", "--workers", "1")
    assert told.exit_code == 0, told.output
    assert fields_of(tmp_path / "two") == fields_of(tmp_path / "ab")
    for words, wrong in (
        ([tmp_path / "a", tmp_path / "x", tmp_path / "y"], "names your function as MODULE:FUNCTION"),
        ([tmp_path / "x", "made_samples:unchanged"], "Missing argument 'TARGET'"),
        (["made_samples:unchanged"], "Missing argument 'TARGET'"),
    ):
        refused = shell("map", *words)
        assert refused.exit_code == 2
        assert wrong in refused.output
    with pytest.raises(ConfigError, match="named twice"):
        map_set([str(source), f"{source}/"], str(tmp_path / "twice"), "made_samples:unchanged", running=HERE)


@pytest.mark.thorough
def test_fields_are_decoded_as_asked_and_samples_selected(tmp_path: Path, source: Path) -> None:
    shell("column", "add", source, "late", "--compute", "test_map_columns:late")
    ran = shell(
        "map", source, tmp_path / "t", "made_samples:only_text", "--fields", "txt", "--where", "json.w >= 100",
        "--workers", "1", "--json",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["num_samples"] == 20
    after = fields_of(tmp_path / "t")
    assert after["0119"]["txt"] == b"T" * 119
    assert after["0119"]["jpg"] == jpeg(119)


def test_an_image_changed_in_place_is_noticed(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"field 'jpg'.*an array belongs into a .npy field"):
        map_set(str(source), str(tmp_path), "made_samples:draws_on_image", running=HERE)


@pytest.mark.parametrize("field", ["json", "npy", "npz", "msgpack"])
def test_values_changed_in_place_are_noticed(field: str) -> None:
    array = np.arange(5.0)
    packed = io.BytesIO()
    np.savez(packed, a=array)
    plain = io.BytesIO()
    np.save(plain, array)
    raw = {
        "json": b'{"a":  [1, NaN, {"b": 2}]}', "npy": plain.getvalue(), "npz": packed.getvalue(),
        "msgpack": b"\x81\xa1a\x93\x01\x02\x81\xa1b\x02",
    }[field]  # fmt: skip
    change: Any = {
        "json": lambda value: value["a"][2].update(b=3), "npy": lambda value: value.__setitem__(0, 7),
        "npz": lambda value: value["a"].__setitem__(0, 7), "msgpack": lambda value: value["a"].append(1),
    }[field]  # fmt: skip

    def in_place(sample: dict[str, Any]) -> Any:
        change(sample[field])
        return sample

    record = Record(key="k", fields={field: raw})
    same = MapCall(function=lambda sample: sample, fields=None)(("u", record))
    assert same[field] is raw
    other = MapCall(function=in_place, fields=None)(("u", record))
    assert other[field] is not raw
    assert type(other[field]) is type(resolve_decoders("auto").decoder_for(field)(raw))


@pytest.mark.thorough
def test_a_stopped_map_goes_on(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = MapOptions(max_samples=7)
    map_set(str(source), str(tmp_path / "whole"), "made_samples:changed", options=options, running=HERE)
    for number in (10, 50, 51, 118):
        target = str(tmp_path / str(number))

        class Stop:
            done, at = 0, number

            def start(self, **_: Any) -> None:
                pass

            def advance(self, *, num: int = 0, num_bytes: int = 0) -> None:
                self.done += num
                if self.done >= self.at:
                    raise KeyboardInterrupt

        monkeypatch.setattr("shard_tools.change.functions.source._PROGRESS_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            map_set(str(source), target, "made_samples:changed", options=options, running=HERE, progress=Stop())
        map_set(str(source), target, "made_samples:changed", options=options, running=HERE)
        assert contents(tmp_path / str(number)) == contents(tmp_path / "whole")


@pytest.mark.thorough
def test_failing_samples_are_listed_for_reshard(tmp_path: Path, source: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    how = ("--on-error", "drop", "--write-bad", bad, "--max-bad", "20", "--workers", "1")
    ran = shell("map", source, tmp_path / "t", "made_samples:refuses_threes", *how)
    assert ran.exit_code == 0, ran.output
    assert "120 samples taken, 0 left out by the function, 12 on which it failed" in ran.stdout
    assert shell("reshard", source, tmp_path / "good", "--drop", bad).exit_code == 0
    assert members(tmp_path / "good") == members(tmp_path / "t")
    refused = shell("map", source, tmp_path / "u", "made_samples:refuses_threes", "--write-bad", bad)
    assert refused.exit_code == 2
    assert "--max-bad and --write-bad are for --on-error drop." in refused.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "key", "told"),
    [
        ("refuses_threes", "0003", "LookupError: a three"),
        ("opens_nothing", "0000", r"FileNotFoundError: .*No such file or directory: '/nowhere/0000'"),
        ("imports_nothing", "0000", "ModuleNotFoundError: No module named 'nowhere'"),
        ("leaves", "0000", "SystemExit: cannot do 0000"),
    ],
)
def test_a_function_that_fails_is_named_in_words_and_as_json(
    tmp_path: Path, source: Path, function: str, key: str, told: str
) -> None:
    asked = ("map", source, tmp_path / "t", f"made_samples:{function}", "--workers", 1)
    failed = shell(*asked, "--json")
    assert failed.exit_code == 1
    said = json.loads(failed.stdout)["error"]
    first = rf"made_samples:{function} failed on sample \d+ of .*/000000\.tar, key '{key}': ({told})"
    assert re.fullmatch(first, said["message"])
    assert said["type"] == told.partition(":")[0]
    notes = "\n".join(said["notes"])
    assert notes.endswith("on_error='drop' (--on-error drop) leaves such inputs out")
    assert f"in {function}\n" in notes
    assert "shard_tools/change/functions" not in notes
    plain = shell(*asked)
    assert (plain.exit_code, plain.stdout) == (1, "")
    assert f"Error: {said['message']}" in plain.stderr
    assert f"in {function}\n" in plain.stderr
    assert "shard_tools/change/functions" not in plain.stderr
    assert isinstance(shell(*asked, "--debug").exception, SystemExit if function == "leaves" else Exception)


def test_damaged_samples_are_failing_samples(tmp_path: Path, source: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name, value in contents(source).items():
        (damaged / name).parent.mkdir(exist_ok=True)
        (damaged / name).write_bytes(value)
    shard = damaged / "000001.tar"
    data = bytearray(shard.read_bytes())
    at = data.index(jpeg(30)) + 100
    data[at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ChecksumError) as raised:
        map_set(str(damaged), str(tmp_path / "t"), "made_samples:unchanged", running=HERE)
    assert "failed on sample " in "\n".join(raised.value.__notes__)
    running = Running(workers=0, on_error="drop", max_bad_samples=1.0)
    report = map_set(str(damaged), str(tmp_path / "u"), "made_samples:unchanged", running=running)
    assert 1 <= report.num_failed <= 25
    assert report.num_samples + report.num_failed == 120
    left = fields_of(tmp_path / "u")
    assert "0030" not in left
    assert left.items() <= fields_of(source).items()


def test_a_field_that_does_not_decode_names_the_option(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/in/{{:06d}}.tar") as writer:
        writer.write({"__key__": "a", "jpg": b"no image", "txt": "x"})
    with pytest.raises(DecodeError) as raised:
        map_set(f"{tmp_path}/in", str(tmp_path / "t"), "made_samples:unchanged", running=HERE)
    assert "--fields says which fields are decoded for the function" in raised.value.__notes__
    options = MapOptions(fields=("txt",))
    map_set(f"{tmp_path}/in", str(tmp_path / "u"), "made_samples:only_text", options=options, running=HERE)
    assert fields_of(tmp_path / "u") == {"a": {"jpg": b"no image", "txt": b"X"}}


@pytest.mark.parametrize(
    ("spec", "options", "told"),
    [
        ("made_samples", {}, "expected a function as module:function"),
        ("made_samples:nothing", {}, "has no attribute 'nothing'"),
        ("no_such_module:f", {}, "No module named 'no_such_module'"),
        ("made_samples:changed", {"fields": ("png",)}, "no sample of .* has a field 'png'; there are: cls, jpg"),
        ("made_samples:changed", {"columns": ("score",)}, "--columns: no column 'score'"),
        ("made_samples:changed", {"where": "x > 1"}, "no column 'x'"),
        ("made_samples:changed", {"view": "v"}, "no view 'v'|'v'"),
    ],
)
def test_wrong_usage_is_told(tmp_path: Path, source: Path, spec: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, FileNotFoundError), match=told):
        map_set(str(source), str(tmp_path / "t"), spec, options=MapOptions(**options), running=HERE)
    assert not (tmp_path / "t").exists()


def test_another_function_is_refused(tmp_path: Path, source: Path) -> None:
    map_set(str(source), str(tmp_path), "made_samples:changed", running=HERE)
    with pytest.raises(
        TargetNotEmptyError, match=r"function: there 'changed \(source text .*start over with --overwrite"
    ):
        map_set(str(source), str(tmp_path), "made_samples:unchanged", running=HERE)
    with pytest.raises(ConfigError, match="source and target are the same place"):
        map_set(str(source), str(source), "made_samples:unchanged", running=HERE)


@pytest.mark.thorough
def test_a_set_without_an_index_is_taken_too(tmp_path: Path, source: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for shard in source.glob("*.tar"):
        (bare / shard.name).write_bytes(shard.read_bytes())
    map_set(str(bare), str(tmp_path / "t"), "made_samples:changed", running=Running(workers=1))
    map_set(str(source), str(tmp_path / "u"), "made_samples:changed", running=HERE)
    assert members(tmp_path / "t") == members(tmp_path / "u")


def test_the_function_is_known_to_the_tests() -> None:
    assert made_samples.changed is changed


# -------------------------------------------------------------------------------------------------------------- append


def write_more(folder: Path, first: int, num: int, **options: Any) -> None:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=4, columns=["json.w"], **options) as writer:
        for number in range(first, first + num):
            writer.write({"__key__": f"{number:04d}", "txt": "t" * number, "json": {"w": number}})


def keys_of(target: Path) -> list[str]:
    return [sample["__key__"] for sample in StreamingDataset(str(target))]


def write_noise(folder: Path, first: int, num: int, **options: Any) -> None:
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=500, **options) as writer:
        for number in range(first, first + num):
            writer.write({"__key__": f"{number:05d}", "bin": noise(number), "txt": f"text {number}"})


def noise(number: int) -> bytes:
    return np.random.default_rng(number).bytes(10 + 37 * number % 3000)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_every_byte_of_an_addition_is_the_functions(tmp_path: Path, workers: int) -> None:
    """Records of processes lie in memory that is reused: a run of them was written after the first ones were lost."""
    raw, out, running = tmp_path / "raw", tmp_path / "out", Running(workers=workers)
    write_noise(raw, 0, 700)
    map_set(str(raw), str(out), "made_samples:unchanged", running=running)
    write_noise(raw, 700, 900, append=True)
    map_set(str(raw), str(out), "made_samples:unchanged", append=True, running=running)
    assert fields_of(out) == {f"{n:05d}": {"bin": noise(n), "txt": f"text {n}".encode()} for n in range(1600)}


def test_a_lent_record_ends_its_run() -> None:
    memory, is_lent = bytearray(4), [False, True, True, False, False, True]

    def records() -> Any:
        for number, lent in enumerate(is_lent):
            memory[:] = bytes([number]) * 4
            yield Record(key=str(number), fields={"bin": memoryview(memory) if lent else bytes(memory)}, is_lent=lent)

    runs = [[bytes(record.fields["bin"]) for record in run] for run in runs_of(records())]
    assert runs == [[bytes([0]) * 4, bytes([1]) * 4], [bytes([2]) * 4], [bytes([n]) * 4 for n in (3, 4, 5)]]


def test_only_samples_of_new_shards_are_mapped(tmp_path: Path) -> None:
    """The function is called for these alone; options come from the set; what is deleted does not come back."""
    raw, out = tmp_path / "raw", tmp_path / "out"
    write_more(raw, 0, 10)
    made = MapOptions(max_samples=3, where="json.w != 1", fields=("txt",))
    map_set(str(raw), str(out), "made_samples:unchanged", options=made, running=HERE)
    assert map_set(str(raw), str(out), "made_samples:unchanged", append=True, running=HERE).was_complete
    write_more(raw, 10, 5, append=True)
    report = map_set(str(raw), str(out), "made_samples:unchanged", append=True, running=HERE)
    assert (report.num_inputs, report.num_samples, report.num_resumed_samples) == (5, 14, 9)
    assert keys_of(out) == [f"{n:04d}" for n in range(15) if n != 1]
    delete(str(raw), storage=Storage(), keys=["0002", "0011"])
    write_more(raw, 15, 2, append=True)
    report = map_set(str(raw), str(out), "made_samples:unchanged", append=True, running=HERE)
    assert (report.num_inputs, report.num_samples) == (2, 16)
    assert keys_of(out) == [f"{n:04d}" for n in range(17) if n != 1]
    assert not verify([str(out)], storage=Storage()).findings
    assert len({*keys_of(out)}) == 16


def test_shards_of_another_set_are_new_whatever_they_are_called(tmp_path: Path) -> None:
    write_more(tmp_path / "a", 0, 6)
    write_more(tmp_path / "b", 100, 6)
    out = tmp_path / "out"
    map_set(str(tmp_path / "a"), str(out), "made_samples:unchanged", running=HERE)
    for _ in range(2):
        map_set(str(tmp_path / "b"), str(out), "made_samples:unchanged", append=True, running=HERE)
    copy(str(tmp_path / "a"), str(tmp_path / "c"))
    map_set([str(tmp_path / "c"), str(tmp_path / "b")], str(out), "made_samples:unchanged", append=True, running=HERE)
    assert keys_of(out) == [*(f"{n:04d}" for n in range(6)), *(f"{n:04d}" for n in range(100, 106))]


def test_a_day_of_which_nothing_is_made_adds_nothing(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    write_more(raw, 0, 6)
    map_set(str(raw), str(out), "made_samples:early", running=HERE)
    write_more(raw, 50, 3, append=True)
    report = map_set(str(raw), str(out), "made_samples:early", append=True, running=HERE)
    assert (report.num_inputs, report.num_empty, report.num_samples) == (3, 3, 6)
    assert [path.name for path in (out / "_shardstream").glob("pending/*")] == []
    write_more(raw, 9, 1, append=True)
    assert map_set(str(raw), str(out), "made_samples:early", append=True, running=HERE).num_samples == 7


def test_what_cannot_be_appended_by_map_is_refused(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    write_more(raw, 0, 6)
    map_set(str(raw), str(out), "made_samples:unchanged", running=HERE)
    write_more(raw, 6, 2, append=True)
    with pytest.raises(ConfigError, match="was made by another function"):
        map_set(str(raw), str(out), "made_samples:changed", append=True, running=HERE)
    with pytest.raises(ConfigError, match=r"was not made by `shard_tools map`.*ShardWriter"):
        map_set(str(raw), str(write_and_return(tmp_path / "else")), "made_samples:unchanged", append=True, running=HERE)
    with pytest.raises(ConfigError, match=r"was not made by shard_tools\.optimize.*add to it by `shard_tools map`"):
        optimize(len, ["x"], out, append=True, workers=0, progress=False)
    refused = shell("map", raw, out, "made_samples:unchanged", "--append", "--max-samples", 3)
    assert refused.exit_code == 2
    assert "--max-samples: with --append, options come from the set" in refused.stderr
    delete(str(raw), storage=Storage(), keys=["0001"])
    prune(str(raw), storage=Storage())
    with pytest.raises(ConfigError, match="the index no longer says what that held"):
        map_set(str(raw), str(out), "made_samples:unchanged", append=True, running=HERE)
    assert keys_of(out) == [f"{n:04d}" for n in range(6)]


def write_and_return(folder: Path) -> Path:
    write_more(folder, 0, 3)
    return folder


@pytest.mark.thorough
def test_of_two_maps_that_append_one_wins(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    write_more(raw, 0, 6)
    map_set(str(raw), str(out), "made_samples:unchanged", running=HERE)
    write_more(raw, 6, 4, append=True)
    calls: list[Any] = []
    real = SetChange.publish

    def publish(self: SetChange, *args: Any, **kwargs: Any) -> int:
        if not calls:
            calls.append(1)
            tag(str(out), "between", storage=Storage())
            write_more(out, 100, 1, append=True)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SetChange, "publish", publish)
        with pytest.raises(OvertakenError, match="somebody else has changed"):
            map_set(str(raw), str(out), "made_samples:unchanged", append=True, running=HERE)
    assert keys_of(out) == [*(f"{n:04d}" for n in range(6)), "0100"]
    done = shell("map", raw, out, "made_samples:unchanged", "--append", "--workers", 1, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_inputs"] == 4
    assert keys_of(out) == [*(f"{n:04d}" for n in range(6)), "0100", *(f"{n:04d}" for n in range(6, 10))]
