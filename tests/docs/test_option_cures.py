"""Every option that a message names as a cure: what is refused, or too little, works once it is given as written."""

from __future__ import annotations

import gzip
import inspect
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import (
    Balanced,
    Curriculum,
    DataLoader,
    DeviceMeshSampler,
    DevicePrefetcher,
    Mixture,
    OrdinaryDataset,
    Packed,
    RemoteGroup,
    Schedule,
    SequenceSlice,
    ShuffleConfig,
    StageFields,
    StreamingDataset,
    Windows,
    decode,
)
from streaming.common.platforms import num_cores
from streaming.watch.tuned.file import Tuned
from tests.support.code.cure_messages import FOREIGN_OPTIONS, error_of, keys, messages, options_of, source_of, tar, tool
from tests.support.sets import recordings
from tests.support.sets.data_sets import write_set

pytestmark = pytest.mark.thorough

_CURES: dict[Callable[[Path], None], tuple[str, ...]] = {}

RUN_ELSEWHERE = {
    "alike_across_ranks": "test_alike_across_ranks.py::test_documents_of_tokens_too_and_counts_are_those_of_the_set",
    "append": "test_life.py::test_a_function_is_called_with_new_inputs_alone",
    "mask_field": "test_mixed_masks.py::test_a_mask_that_is_not_read_beside_one_that_is_has_a_word",
    "most_in_flight": "test_tickets.py::test_a_bound_makes_the_iterator_wait",
    "version": "test_life.py::test_a_run_goes_on_with_its_version_while_the_set_grows",
    "micro_batch_size": "test_micro_batches.py::test_padded_packs_come_one_by_one_whatever_the_world",
    "name": "test_exports.py::test_a_loader_that_is_gone_is_not_kept_and_its_name_is_free",
    "restores": "test_headspace.py::test_model_and_optimizer_are_set_back",
    "worker_init_fn": "test_settings.py::test_functions_of_the_script_share_what_worker_init_fn_sets_up",
    "warmup": "test_headspace.py::test_what_cannot_be_measured_is_refused",
    "as_tuple": "test_as_tuple.py::test_batches_are_tuples_of_the_named_entries",
    "dataset_path": "test_torchtitan_loader.py::test_steps_are_those_of_the_packs_on_any_world_and_resume_on_another",
    "ignore_id": "test_packed_labels.py::test_labels_are_those_of_a_loop_over_tokens",
    "infinite": "test_torchtitan_loader.py::test_a_validation_reads_the_set_once",
    "repeat": "test_torchtitan_loader.py::test_a_validation_reads_the_set_once",
    "alike": "test_length_buckets.py::test_the_log_says_how_full_buckets_are_and_what_they_need",
    "borders": "test_packed_slices.py::test_loss_and_gradients_of_two_peers_are_those_of_one",
    "position_ids": "test_packed_slices.py::test_places_in_the_row_are_added_where_asked_for",
    "shift_labels": "test_packed_attention.py::test_each_document_has_the_loss_that_it_has_alone",
    "agreement_timeout": "test_agreement.py::test_it_can_be_switched_off",
    "allow_unfinished": "test_unfinished.py::test_the_option_in_every_reader",
    "anon": "test_cures.py::test_credentials_and_anonymous_reading",
    "balance": "test_balance.py::test_local_balance_puts_the_dearest_packs_first",
    "carry": "test_carried.py::test_batches_without_values_or_rows_have_the_same_entries",
    "placeholder": "test_carried.py::test_batches_without_values_or_rows_have_the_same_entries",
    "budgets": "test_packing.py::test_several_budgets_are_filled_together",
    "classes": "test_cases.py::test_batches_of_a_union_are_right_and_those_of_own_numbers_are_of_each_set",
    "cost": "test_balance.py::test_a_cost_function_gets_lengths_of_pieces",
    "engine": "test_optimize_ray.py::test_a_killed_node_costs_its_own_work_only",
    "workers": "test_optimize.py::test_what_cannot_be_sent_is_named",
    "share": "test_crops.py::test_center_is_that_of_resize_256_and_center_crop_224",
    "size": "test_crops.py::test_part_that_is_scaled_down_is_close_to_that_of_all",
    "upright": "test_upright.py::test_both_byte_orders_and_the_way_to_leave_it",
    "channels": "test_sound.py::test_channels_are_mixed_repeated_kept_or_refused",
    "every": "test_video.py::test_whole_videos_in_steps_and_from_a_second_on",
    "fps": "test_video.py::test_ranges_are_read_of_clips_or_as_told",
    "frames": "test_video.py::test_what_becomes_of_a_short_video",
    "rate": "test_sound.py::test_resampled_clips_are_those_of_the_resampled_whole",
    "reads_ranges": "test_sound.py::test_ranges_are_read_of_clips_except_of_mp3_or_as_told",
    "seconds": "test_sound.py::test_what_becomes_of_a_short_sound",
    "short": "test_sound.py::test_what_becomes_of_a_short_sound",
    "start": "test_video.py::test_what_becomes_of_a_short_video",
    "client": "test_forks.py::test_a_child_reads_after_its_parent_has_read",
    "duplicate_keys": "test_cures.py::keys_that_come_twice",
    "encode": "test_broadcast.py::test_objects_travel_by_the_functions_given",
    "exclude": "test_filters.py::test_keys_are_left_out",
    "field": "test_length_buckets.py::test_what_cannot_work_is_refused_with_the_cure",
    "index": "test_cures.py::an_index_elsewhere_is_built",
    "jagged": "test_jagged.py::test_ordinary_data_sets_too",
    "lanes": "test_cures.py::fewer_lanes_fit_into_less_memory",
    "max_gzip_ratio": "test_cures.py::an_archive_that_inflates_far_is_allowed",
    "max_samples": "test_optimize.py::test_a_run_goes_on_wherever_it_was_interrupted",
    "memory_limit": "test_cures.py::a_memory_limit_that_is_named_is_enough",
    "num_threads": "test_thread_faults.py::test_close_from_another_thread_while_the_consumer_builds",
    "region": "test_storage_faults.py::test_a_wrong_region",
    "overlap_labels": "test_packed_windows.py::test_a_token_bears_loss_once_if_asked",
    "transforms": "test_plan_mixtures.py::test_training_and_tool_read_the_same_file",
    "trust": "test_trust.py::test_trust_takes_what_it_names_and_no_more",
    "transform": "test_length_buckets.py::test_another_of_the_batch_stands_in",
    "replicate": "test_broadcast.py::test_only_what_a_rank_uses_is_sent",
    "stride": "test_packing.py::test_windows_overlap_by_length_less_stride",
    "timeout_s": "test_broadcast.py::test_objects_travel_by_the_functions_given",
    "world_size": "test_cures.py::test_a_mesh_that_is_named_plays_one_rank",
}
"""Options that a test of another file runs, or one of another table of cures: which one."""

NO_CURES = {
    "endpoint_url": "an example in the help of --storage-option",
    "limit": "in the description of a cache",
    "samples": "in a digest",
    "val": "the name of a set, in the example of --split",
    "view": "one of what may leave a key out, in `plan --when`",
}
"""Options that messages name and that are no cures, each with what they are."""


def cure(*options: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Note that a function runs the cures that name ``options``."""

    def note(function: Callable[[Path], None]) -> Callable[[Path], None]:
        _CURES[function] = options
        return function

    return note


def count(dataset: Any, **options: Any) -> int:
    """Batches of an epoch."""
    options.setdefault("batch_size", 4)
    with DataLoader(dataset, **options) as loader:
        return sum(1 for _ in loader)


def said(work: Callable[[], object], *words: str, kind: type[Exception] = Exception) -> str:
    """What ``work`` says when it fails, which holds ``words``."""
    text = error_of(work, kind)
    for word in words:
        assert word in text, text
    return text


def played(dp_size: int, **sizes: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(dp_size=dp_size, **sizes, rank=0, environ={})


# --------------------------------------------------------------------------------------------- options of the loader


@cure("batch_size", "global_batch_size")
def one_batch_size_is_enough(folder: Path) -> None:
    samples = write_set(folder, (8,)).open()
    said(lambda: DataLoader(samples, batch_size=2, global_batch_size=2), "exactly one of batch_size")
    assert count(samples, batch_size=2) == count(samples, batch_size=None, global_batch_size=2) == 4


@cure("drop_last", "last_batch")
def one_word_about_the_tail(folder: Path) -> None:
    samples = write_set(folder, (10,)).open()
    said(lambda: count(samples, drop_last=True, last_batch="pad"), "drop_last=True and last_batch='pad'")
    assert (count(samples, drop_last=True), count(samples, last_batch="pad")) == (2, 3)
    said(lambda: count(samples, drop_remainder=True), 'write last_batch="drop" or "partial"')
    assert (count(samples, last_batch="drop"), count(samples, last_batch="partial")) == (2, 3)


@cure("last_batch", "epoch_size")
def fewer_samples_than_a_batch(folder: Path) -> None:
    samples = write_set(folder, (3,)).open()
    said(lambda: count(samples), 'last_batch="pad" or "partial", a smaller batch, or epoch_size')
    cured = ({"last_batch": "pad"}, {"last_batch": "partial"}, {"batch_size": 3}, {"epoch_size": 4})
    assert [count(samples, **options) for options in cured] == [1, 1, 1, 1]
    mesh = played(8)
    said(lambda: count(samples, last_batch="partial", batch_size=1, device_mesh=mesh), 'last_batch="pad", at most 3')
    assert count(samples, last_batch="pad", batch_size=1, device_mesh=mesh) == 1
    assert count(samples, last_batch="partial", batch_size=1, device_mesh=played(3)) == 1


@cure("last_batch")
def single_indices_come_in_equal_numbers(folder: Path) -> None:
    del folder
    make = partial(DeviceMeshSampler, 9, device_mesh=played(2))
    said(lambda: make(last_batch="partial"), 'use "drop" or "pad"')
    assert (len(list(make(last_batch="drop"))), len(list(make(last_batch="pad")))) == (4, 5)


@cure("batch_size", "sampler")
def a_sampler_goes_where_torch_wants_it(folder: Path) -> None:
    del folder
    batches = DeviceMeshSampler(list(range(8)), batch_size=4, device_mesh=played(1))
    numbers = list(range(8))
    torchs = torch.utils.data.DataLoader
    said(lambda: list(torchs(numbers, sampler=batches)), "DataLoader(…, batch_sampler=sampler)", "sampler=sampler)")
    assert len(list(torchs(numbers, batch_sampler=batches))) == 2
    single = DeviceMeshSampler(list(range(8)), device_mesh=played(1))
    assert len(list(torchs(numbers, batch_size=4, sampler=single))) == 2


@cure("device_mesh", "dp_size", "rank")
def ranks_are_said_by_a_mesh(folder: Path) -> None:
    samples = write_set(folder, (8,)).open()
    for name in ("rank", "num_replicas", "world_size"):
        said(partial(count, samples, **{name: 1}), "device_mesh=DeviceMesh.from_sizes(dp_size=…, rank=…)")
    assert count(samples, device_mesh=DeviceMesh.from_sizes(dp_size=2, rank=1, environ={})) == 1


@cure("num_workers", "prefetch_factor")
def a_file_for_shards_is_left_out_elsewhere(folder: Path) -> None:
    path = folder / "tuned.json"
    path.write_bytes(Tuned(options={"num_threads": 1}, cores=num_cores()).to_bytes())
    said(lambda: count(list(range(8)), tuned=path), "Leave it out, and give num_workers= and prefetch_factor= yourself")
    assert count(list(range(8)), num_workers=1, prefetch_factor=3) == 2


@cure("num_workers")
def functions_that_cannot_travel_stay_here(folder: Path) -> None:
    file = (folder / "open").open("w")
    samples = write_set(folder / "in", (8,)).open(transform=lambda sample: file and sample)
    said(lambda: count(samples, num_workers=1), "cannot be sent to worker processes", "num_workers=0")
    assert count(samples, num_workers=0) == 2
    said(lambda: count(samples, reading_service=1), "write num_workers=")
    file.close()


@cure("stall_report_s", "storage_options")
def patience_has_other_names(folder: Path) -> None:
    samples = write_set(folder, (8,))
    said(lambda: count(samples.open(), timeout=5), "stall_report_s=", 'storage_options={"deadline_s": …}')
    patient = StreamingDataset(samples.url, storage_options={"deadline_s": 5})
    assert count(patient, stall_report_s=5) == 2
    said(lambda: count(samples.open(), max_retries=5), 'storage_options={"deadline_s": …}')
    said(lambda: count([1, 2, 3, 4], timeout=5), "stall_report_s=")
    assert count([1, 2, 3, 4], stall_report_s=5) == 1


@cure("on_error", "max_bad_samples", "max_retries", "seed", "sharding", "shuffle", "fields")
def options_of_the_data_set_are_given_there(folder: Path) -> None:
    samples = write_set(folder, (8,))
    choices: dict[str, Any] = {
        "on_error": "skip", "max_bad_samples": 0.5, "seed": 5, "shuffle": False, "fields": ("cls",),
    }  # fmt: skip
    for name, value in choices.items():
        said(partial(count, samples.open(), **{name: value}), f"StreamingDataset(…, {name}=")
        assert count(samples.open(**{name: value})) == 2
    for name, value in {"on_error": "substitute", "max_bad_samples": 0.5, "max_retries": 5, "seed": 5}.items():
        said(partial(count, list(range(8)), **{name: value}), f"OrdinaryDataset(dataset, {name}=")
        assert count(OrdinaryDataset(list(range(8)), **{name: value})) == 2
    said(lambda: count(_Numbers(), sharding="worker_info"), "OrdinaryDataset(dataset, sharding=…)")
    assert count(OrdinaryDataset(_Numbers(), sharding="worker_info")) == 2
    said(lambda: count(samples.open(), generator=torch.Generator()), "seed=generator.initial_seed()")
    assert count(samples.open(seed=torch.Generator().initial_seed())) == 2


class _Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@cure("on_error", "last_batch")
def ordinary_samples_that_are_left_out(folder: Path) -> None:
    del folder
    make = partial(OrdinaryDataset, [{"x": 1}] * 6)
    said(lambda: count(make(on_error="skip"), last_batch="pad"), 'use on_error="substitute", or last_batch="partial"')
    assert count(make(on_error="substitute"), last_batch="pad") == 2
    assert count(make(on_error="skip"), last_batch="partial") == 2
    said(lambda: count([1] * 6, last_batch="pad"), 'last_batch="partial"')
    assert count([1] * 6, last_batch="partial") == 2


@cure("on_error", "max_bad_samples", "decode")
def samples_are_passed_over(folder: Path) -> None:
    make = partial(write_set(folder, (8,)).open, transform=lambda one: None if one["cls"] == 1 else one)
    said(lambda: count(make(on_error="raise")), 'Use on_error="substitute" or "skip"')
    assert [count(make(on_error=policy)) for policy in ("substitute", "skip")] == [2, 2]
    bad = tar(folder / "bad" / "a.tar", ("a.json", b"{"), *((f"{number}.json", b"1") for number in range(3)))
    said(lambda: count(StreamingDataset(bad, on_error="raise")), "decode={'json': None}", 'on_error="substitute"')
    said(lambda: count(StreamingDataset(bad, on_error="skip", max_bad_samples=0.0)), "or raise max_bad_samples")
    cures: tuple[dict[str, Any], ...] = (
        {"decode": {"json": None}}, {"on_error": "substitute", "max_bad_samples": 0.5},
        {"on_error": "skip", "max_bad_samples": 0.5},
    )  # fmt: skip
    assert [count(StreamingDataset(bad, **cured), epoch_size=4) for cured in cures] == [1, 1, 1]


@cure("device")
def batches_stay_where_there_is_no_gpu(folder: Path) -> None:
    samples = write_set(folder, (8,)).open()

    def number(device: str | None) -> int:
        with DataLoader(samples, batch_size=4) as loader:
            return sum(1 for _ in DevicePrefetcher(loader, device=device))

    if not torch.cuda.is_available():
        said(lambda: number("cuda"), 'Use device="cpu", or device=None')
    assert number("cpu") == number(None) == 2


@cure("sequence", "axes")
def axes_of_a_sequence_are_named(folder: Path) -> None:
    def loaded(sequence: SequenceSlice | None, **sizes: int) -> int:
        ranks = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
        mesh = DeviceMesh.from_ranks(ranks, tuple(sizes), rank=0, data_axes=("dp",))
        return count(samples, device_mesh=mesh, sequence=sequence)

    with ShardWriter(f"{folder}/{{:06d}}.tar") as writer:
        for number in range(8):
            writer.write({"__key__": f"{number}", "npy": np.arange(8)})
    samples = StreamingDataset(folder)
    said(lambda: loaded(SequenceSlice(fields=("npy",)), dp=1, parts=2), "no context-parallel axis", "sequence= out")
    assert loaded(SequenceSlice(fields=("npy",), axes=("parts", "")), dp=1, parts=2) == 2
    assert loaded(None, dp=1, parts=2) == 2
    said(lambda: loaded(SequenceSlice(fields=("npy",)), dp=1, cp=2, context=2), "axes=(ring, ulysses)")
    assert loaded(SequenceSlice(fields=("npy",), axes=("cp", "context")), dp=1, cp=2, context=2) == 2


@cure("on_error")
def stages_need_to_know_who_is_there(folder: Path) -> None:
    mesh, stages = played(1, pp_size=2), StageFields(first=("cls",), last=("txt",))

    def number(policy: str) -> int:
        return count(samples.open(on_error=policy), device_mesh=mesh, stage_fields=stages)

    samples = write_set(folder, (8,))
    said(lambda: number("skip"), 'use on_error="substitute" or replicate="broadcast"')
    assert number("substitute") == 2


# ------------------------------------------------------------------------------------------- options of the data set


@cure("cache_dir", "cache_limit", "seed", "shuffle", "window", "lanes", "memory_limit", "epoch_size", "on_error")
def names_of_other_libraries(folder: Path) -> None:
    samples = write_set(folder / "in", (8,))
    cache = folder / "cache"
    cures: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "local": ("cache_dir=", {"cache_dir": cache}, {}),
        "max_cache_size": ("cache_limit=", {"cache_dir": cache, "cache_limit": "1GB"}, {}),
        "shuffle_seed": ("seed=", {"seed": 3}, {}),
        "shuffle_algo": ("shuffle=ShuffleConfig(", {"shuffle": ShuffleConfig()}, {}),
        "shuffle_block_size": ("ShuffleConfig(window=", {"shuffle": ShuffleConfig(window=4)}, {}),
        "num_canonical_nodes": ("ShuffleConfig(lanes=", {"shuffle": ShuffleConfig(lanes=2)}, {}),
        "shardshuffle": ("shuffle=", {"shuffle": True}, {}),
        "handler": ("on_error=", {"on_error": "substitute"}, {}),
        "predownload": ("memory_limit=", {}, {"memory_limit": "64MiB"}),
        "resampled": ("epoch_size=", {}, {"epoch_size": 8}),
    }
    for name, (cured, options, at_the_loader) in cures.items():
        said(partial(samples.open, **{name: 1}), cured)
        assert count(samples.open(**options), **at_the_loader) == 2, name
    said(lambda: samples.open(cache_limit="1GB"), "without a cache_dir")


@cure("fields", "decode")
def fields_that_are_not_there_or_not_decoded(folder: Path) -> None:
    url = tar(folder / "a.tar", ("a.foo", b"1"), ("a.txt", b"x"))
    said(lambda: keys(url, fields=("tx",)), "Correct fields=, or leave it out")
    assert keys(url, fields=("txt",)) == ["a"]
    pickled = tar(folder / "b.tar", ("a.pkl", b"1"), ("a.txt", b"x"))
    said(lambda: keys(pickled), "decode={'pkl': None}", "fields=", "decode={'pkl': function}")
    cures: tuple[dict[str, Any], ...] = (
        {"decode": {"pkl": None}}, {"fields": ("txt",)}, {"decode": {"pkl": bytes.decode}},
    )  # fmt: skip
    assert [keys(pickled, **cured) for cured in cures] == [["a"]] * 3


@cure("decode", "max_bytes", "max_pixels")
def bounds_of_decoders_are_raised(folder: Path) -> None:
    packed, image = io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, np.zeros(1 << 16, np.uint8))
    Image.new("RGB", (64, 64)).save(image, "png")
    arrays = tar(folder / "arrays" / "a.tar", ("a.npz", packed.getvalue()))
    images = tar(folder / "images" / "a.tar", ("a.png", image.getvalue()))
    small, large = decode.npz(max_bytes=1 << 10), decode.npz(max_bytes=1 << 20)
    said(lambda: StreamingDataset(arrays, decode={"npz": small})[0], "decode={field: decode.npz(max_bytes=...)}")
    assert "npz" in StreamingDataset(arrays, decode={"npz": large})[0]
    tight, wide = decode.image("rgb8", max_pixels=100), decode.image("rgb8", max_pixels=4096)
    said(lambda: StreamingDataset(images, decode={"png": tight})[0], "decode.image('rgb8', max_pixels=...)")
    assert "png" in StreamingDataset(images, decode={"png": wide})[0]


@cure("epoch_size")
def a_set_without_an_index_says_how_long_an_epoch_is(folder: Path) -> None:
    samples = write_set(folder, (8,), indexed=False)
    plain = folder / "000000.tar"
    packed = Path(f"{plain}.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    said(lambda: count(samples.open()), "until they are unpacked (`gunzip`)", "needs epoch_size=")
    assert count(samples.open(), epoch_size=8) == 2
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    tool("index", samples.url)
    assert count(samples.open()) == 2


@cure("decode", "fields")
def names_of_decoders(folder: Path) -> None:
    tokens = np.arange(4, dtype=np.uint16).tobytes()
    url = tar(folder / "a.tar", ("a.tok", tokens), ("a.txt", b"x"))
    said(lambda: StreamingDataset(url, decode={"tok": "uint16"})[0], '"array:uint16->int64"')
    sample = StreamingDataset(url, decode={"tok": "array:uint16->int64"})[0]
    assert torch.equal(torch.as_tensor(sample["tok"]), torch.arange(4))
    said(lambda: StreamingDataset(url, decode="nothing"), 'expected "auto", "raw"')
    assert StreamingDataset(url, decode="raw")[0]["tok"] == tokens
    assert StreamingDataset(url, fields=("txt",), decode="auto")[0]["txt"] == "x"


@cure("index", "columns")
def columns_need_an_index(folder: Path) -> None:
    def write(**options: Any) -> None:
        columns = {"length": lambda one: len(one["txt"])}
        with ShardWriter(f"{folder}/{{:06d}}.tar", columns=columns, **options) as writer:
            writer.write({"__key__": "a", "txt": "x"})

    said(lambda: write(index=False), "columns: they live in the sample table")
    write(index=True)
    assert len(StreamingDataset(folder, where="length = 1")) == 1


@cure("subset")
def a_view_that_has_a_subset(folder: Path) -> None:
    samples = write_set(folder, (8,))
    tool("view", "save", folder, "half", "--subset", "0%..50%")
    said(lambda: samples.open(view="half", subset=(0, 2)), "leave one out, or take a range", "dataset[a:b]")
    assert (len(samples.open(view="half")), len(samples.open(subset=(0, 2)))) == (4, 2)
    assert len(samples.open(view="half")[0:2]) == 2


@cure("subset")
def a_subset_within_what_there_is(folder: Path) -> None:
    samples = write_set(folder, (8,))
    said(lambda: len(samples.open(subset=(0, 9))), "has 8 of them")
    assert len(samples.open(subset=(0, 8))) == 8


@cure("where", "columns")
def a_column_is_lifted(folder: Path) -> None:
    def made(name: str, **options: Any) -> int:
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", **options) as writer:
            for number in range(8):
                writer.write({"__key__": f"{number}", "json": {"score": number}})
        return len(StreamingDataset(folder / name, where="score > 3"))

    (folder / "bare").mkdir()
    (folder / "lifted").mkdir()
    said(lambda: made("bare"), "lifted when shards are written (columns=)")
    assert made("lifted", columns={"score": lambda one: one["json"]["score"]}) == 4


@cure("storage_options")
def mirrors_are_said_by_folder(folder: Path) -> None:
    urls = ["s3://one/a.tar", "gs://two/b.tar"]
    said(lambda: StreamingDataset(urls, mirrors=[str(folder)]), 'storage_options={"mirrors": {')
    samples = write_set(folder, (8,))
    assert len(StreamingDataset(samples.url, storage_options={"mirrors": {samples.url: [f"{folder}/other"]}})) == 8


@cure("overwrite")
def shards_are_replaced(folder: Path) -> None:
    write_set(folder, (8,))

    def write(**options: Any) -> None:
        with ShardWriter(f"{folder}/{{:06d}}.tar", **options) as writer:
            writer.write({"__key__": "new", "txt": "x"})

    said(write, "pass overwrite=True", "start_shard beyond")
    write(start_shard=1)
    assert keys(folder)[-1] == "new"
    write(overwrite=True)


# ------------------------------------------------------------------------------------------------- mixtures, meshes


@cure("weights", "ends", "epoch_size", "repeats", "quotas", "batches", "scope", "fetch_bytes")
def mixtures_end_or_do_not(folder: Path) -> None:
    sources = {name: write_set(folder / name, (8,)).open() for name in ("a", "b")}
    even = {"a": 1.0, "b": 1.0}
    endless = Mixture(sources, weights=even)
    said(lambda: len(endless), "Give it ends=", "epoch_size=", "sum(mixture.sizes.values())", kind=TypeError)
    with DataLoader(endless, batch_size=4, epoch_size=16) as loader:
        assert (len(loader), len(Mixture(sources, weights=even, ends="all"))) == (4, 16)
        loader.set_weights({"a": 1.0, "b": 3.0})
    with DataLoader(Mixture(sources, repeats={"a": 2, "b": 1}), batch_size=4) as loader:
        assert len(loader) == 6
        said(lambda: loader.set_weights(even), "Make it with weights= and ends=None")
    with DataLoader(endless, batch_size=4) as loader:
        said(lambda: len(loader), "give an epoch_size=", kind=TypeError)
    said(lambda: Mixture({"in": endless}), "Give this mixture weights=, or that one ends=")
    assert len(Mixture({"in": Mixture(sources, weights=even, ends="first")})) == 16
    Mixture({"in": endless}, weights={"in": 1.0})
    said(lambda: Mixture(sources, ends="all"), "Give weights=")
    said(lambda: Mixture(sources, weights={"a": 1.0, "b": 0.0}, ends="all"), "leave them out")
    assert len(Mixture({"a": sources["a"]}, weights={"a": 1.0}, ends="all")) == 8
    assert count(Mixture(sources, quotas="exact")) == 4
    assert count(Mixture(sources, weights=even, quotas="exact"), epoch_size=16) == 4
    few = {"a": sources["a"], "b": sources["b"][:3]}
    said(lambda: DataLoader(Mixture(few, batches="one_source"), batch_size=4), "repeats=", 'batches="mixed"')
    assert count(Mixture(few, repeats={"a": 1, "b": 2}, batches="one_source")) == 3
    assert count(Mixture(few, batches="mixed"), last_batch="partial") == 3
    assert count(Mixture(sources, weights=even, batches="one_source"), epoch_size=16) == 4
    assert count(Mixture(sources, weights=even, quotas="chunks", ends="all")) == 4
    said(lambda: Mixture(sources, fetch_bytes="1MiB"), 'for quotas="exact" and batches="one_source"')
    said(lambda: Mixture(sources, quotas="exact", fetch_bytes={"c": "1MiB"}), "the sources are a, b, got 'c'")
    said(lambda: Mixture(sources, quotas="exact", fetch_bytes={"a": 512}), "expected at least 64.0 KiB")
    assert count(Mixture(sources, quotas="exact", fetch_bytes={"a": "64KiB"})) == 4
    said(lambda: Mixture(sources, stopping_strategy="first"), 'write ends="first" or "all"')
    said(lambda: Mixture(sources, probabilities=[0.5, 0.5]), "write weights=")
    said(lambda: Mixture(sources, epoch_size=8), "DataLoader(mixture, epoch_size=…)")
    changing = Schedule.steps({0: {"a": 1.0, "b": 0.0}, 8: even})
    said(lambda: Mixture(sources, weights=changing, ends="first"), "DataLoader(mixture, epoch_size=…)")
    assert count(Mixture(sources, weights=changing), epoch_size=8) == 2
    by_lane = ShuffleConfig(scope="lane")
    said(lambda: count(Mixture(sources, shuffle=by_lane)), 'scope="global"')
    assert count(Mixture(sources, shuffle=ShuffleConfig(scope="global"))) == 4


@cure("unit", "columns")
def tokens_are_counted_in_a_column(folder: Path) -> None:
    def mixture(name: str, **options: Any) -> Mixture:
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", **options) as writer:
            for number in range(8):
                writer.write({"__key__": f"{number}", "txt": "word"})
        return Mixture({"a": StreamingDataset(folder / name)}, weights={"a": 1.0}, unit="tokens")

    (folder / "bare").mkdir()
    (folder / "counted").mkdir()
    said(lambda: mixture("bare"), 'ShardWriter(columns={"tokens": …})')
    assert mixture("counted", columns={"tokens": lambda one: len(one["txt"])}).sizes == {"a": 8}


@cure("column", "dtype", "length", "multiple", "overlong", "padded", "labels_across", "collate_fn")
def documents_are_packed(folder: Path) -> None:
    with ShardWriter(f"{folder}/{{:06d}}.tar", columns={"n": lambda one: one["n"], "odd": lambda one: 7}) as writer:
        for number in range(8):
            writer.write({"__key__": f"{number}", "tok": np.arange(5, dtype="<u2").tobytes(), "n": 5})
    documents = StreamingDataset(folder)
    said(lambda: Packed(documents, length=10), "Name the column with column=…", "there are: n, odd")
    assert len(Packed(documents, length=10, column="n")) == 4
    said(lambda: Packed(documents, length=10, column="odd"), 'give dtype="uint16" or "uint32"')
    assert Packed(documents, length=10, column="odd", dtype="uint16").source.items.shape.token_bytes == 2
    said(lambda: Packed(documents, length=10, column="n", multiple=3), "length=10", "use 9 or 12")
    assert len(Packed(documents, length=12, column="n", multiple=3)) == 4
    said(lambda: Packed(documents, max_length=10), "write length=…")
    said(lambda: Packed(documents, length=4, column="n", overlong="drop"), "overlong='drop'")
    assert len(Packed(documents, length=4, column="n", overlong="truncate")) == 8
    said(lambda: Packed(documents, max_tokens=10), "write length=…; with padded=True")  # type: ignore[call-arg]
    padded = partial(Packed, documents, length=10, column="n", padded=True)
    said(lambda: padded(labels_across=True), "leave one of them out")
    assert len(padded(labels_across=False)) == 4
    said(lambda: DataLoader(padded(), batch_size=2), "expected batch_size=1", "collate_fn=list")
    assert [len(packs) for packs in DataLoader(padded(), batch_size=2, collate_fn=list)] == [2, 2]


@cure("order", "data_axes", "rank", "allow_subset", "dp_size")
def meshes_say_what_they_lack(folder: Path) -> None:
    del folder
    make = partial(DeviceMesh.from_sizes, rank=0, environ={})
    said(lambda: make(dp_size=2, tp_size=2, order=("dp", "xx")), "known are")
    said(lambda: make(dp_size=2, tp_size=2, order=("dp",)), "name every axis in use")
    assert make(dp_size=2, tp_size=2, order=("dp", "tp")).world_size == 4
    said(lambda: DeviceMesh.from_sizes(dp_size=2, environ={}), "pass rank= to play one of 2")
    assert make(dp_size=2).data_world_size == 2
    names = partial(DeviceMesh.from_ranks, [0, 1], ["mine"])
    said(lambda: names(rank=0), "pass data_axes=")
    assert names(rank=0, data_axes=["mine"]).data_world_size == 2
    said(lambda: DeviceMesh.from_sizes(dp_size=2, rank=2, environ={}), "correct rank=")
    part = SimpleNamespace(mesh=[0, 1], mesh_dim_names=("dp",))
    started = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    said(lambda: DeviceMesh.from_torch(part, environ=started), "pass rank=")
    said(lambda: DeviceMesh.from_torch(part, rank=0, environ=started), "allow_subset=True")
    assert DeviceMesh.from_torch(part, rank=0, environ=started, allow_subset=True).world_size == 2


@cure("buckets", "schedule", "nulls", "degree", "over", "metric")
def curricula_say_how_to_write_them(folder: Path) -> None:
    with ShardWriter(str(folder / "{:06d}.tar"), columns={"n": "json.n"}) as writer:
        for number in range(8):
            writer.write({"__key__": str(number), "json": {"n": number or None}})
    dataset = StreamingDataset(f"{folder}/")
    ramp = Schedule.root(0.25, 1.0, over=100, degree=3)
    said(lambda: Curriculum(dataset, "n", ramp), 'nulls="drop"')
    said(lambda: Curriculum(dataset, "n", ramp, buckets=0), "expected 1 to 1024")
    said(lambda: Curriculum(dataset, {}), 'metric="tokens", schedule=…')  # type: ignore[arg-type]
    made = Curriculum(dataset, metric="n", schedule=ramp, buckets=4, nulls="drop")
    assert len(made.pool(0)) < len(made.pool(100)) == 4


@cure("power")
def classes_between_balanced_and_as_they_come(folder: Path) -> None:
    with ShardWriter(str(folder / "{:06d}.tar"), columns={"c": "json.c"}) as writer:
        for number in range(8):
            writer.write({"__key__": str(number), "json": {"c": int(number > 0)}})
    dataset = StreamingDataset(f"{folder}/")
    said(lambda: Balanced(dataset, by="c", temperature=2), "write power=1 / temperature")  # type: ignore[call-arg]
    assert Balanced(dataset, by="c", power=0.5).sizes == {"0": 1, "1": 7}


@cure("memory")
def readers_ask_for_more_memory(folder: Path) -> None:
    del folder
    assert RemoteGroup(name="readers", memory="2GiB").memory_bytes == 2 << 30


@cure("video", "clocks", "edge", "names", "groups")
def windows_are_cut_as_messages_say(folder: Path) -> None:
    of = StreamingDataset(recordings.write(folder, recordings.of_set(2)))
    one = {"front.mp4": [0.0]}
    said(lambda: Windows(of, video={}), 'such as {"front.mp4": [-0.2, 0.0]}')
    assert len(Windows(of, video={"front.mp4": [-0.2, 0.0]}))
    span = {"action.npy": (-0.5, 0.5)}
    said(lambda: Windows(of, video=one, columns=span), "clocks={'action.npy': 200.0}")
    assert Windows(of, video=one, columns=span, clocks={"action.npy": 200.0})[0]["action.npy"].shape == (200, 2)
    timed: Any = {"columns": {"force.npy": [0]}, "clocks": {"force.npy": "force_time.npy"}}
    said(lambda: Windows(of, video=one, **timed, edge="drop"), 'edge="pad"')
    assert len(Windows(of, video=one, **timed, edge="pad"))
    two: dict[str, list[float]] = {"front.mp4": [0.0], "wrist.mp4": [0.0]}
    said(lambda: Windows(of, video=two, names={"front.mp4": "a", "wrist.mp4": "a"}), "names={…: …}")
    assert {"a", "b"} < {*Windows(of, video=two, names={"front.mp4": "a", "wrist.mp4": "b"})[0]}
    few, many = (Windows(of, video=one, groups=groups) for groups in (4, 1))
    said(lambda: Mixture({"a": few}, weights={"a": 1}, fetch_bytes="1MiB", quotas="exact"), "groups= says")
    assert max(many.source.chunk_bytes) < max(few.source.chunk_bytes)


@pytest.mark.parametrize("run", _CURES, ids=lambda function: function.__name__)
def test_an_option_works_as_a_message_has_it(run: Callable[[Path], None], tmp_path: Path) -> None:
    run(tmp_path)


# ---------------------------------------------------------------------------------------------------- nothing is left


def test_every_option_that_a_message_names_is_run_or_says_where() -> None:
    named = {name for message in messages() for name in options_of(message)} - FOREIGN_OPTIONS.keys()
    run = {name for options in _CURES.values() for name in options}
    assert named - run - RUN_ELSEWHERE.keys() - NO_CURES.keys() == set()
    assert RUN_ELSEWHERE.keys() | NO_CURES.keys() <= named, "no message names this any more"
    assert not run & NO_CURES.keys()
    for function, options in _CURES.items():
        body = inspect.getsource(function).partition("def ")[2]
        assert [name for name in options if not re.search(rf"\b{name}\b", body)] == [], function


@pytest.mark.parametrize("option", RUN_ELSEWHERE)
def test_what_runs_an_option_elsewhere_is_there(option: str) -> None:
    assert re.search(rf"\b{option}\b", source_of(RUN_ELSEWHERE[option]))
