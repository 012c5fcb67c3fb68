"""Suggest our replacement for a name of another library, when a missing attribute is accessed.

One table holds the names: those of packages, of methods of datasets, and of methods of loaders. The ``__getattr__`` of
our packages and classes reads it, so nothing here runs for names that exist. It raises AttributeError, so ``hasattr``,
``getattr`` with a default, pickles and completion behave as with any module or object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PACKAGES = ("streaming", "shard_tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Names of one library that people look for here, and the replacement of each.

    Attributes:
        name: The library. "" is shardstream, the first one: its names exist in one package, and are looked for in the
            other.
        page: Its page in docs/coming-from.
        names: Classes, functions and modules of its packages.
        of_datasets: Methods and attributes of its datasets.
        of_loaders: Methods and attributes of its loaders.
    """

    name: str
    page: str
    names: Mapping[str, str]
    of_datasets: Mapping[str, str] = field(default_factory=dict)
    of_loaders: Mapping[str, str] = field(default_factory=dict)


_WRITER = "shard_tools.ShardWriter writes samples to tar shards"
_LOADER = "streaming.DataLoader, which resumes by state_dict() on any number of ranks"
_CONVERT = "`shard_tools convert` makes shards of the data, which streaming.StreamingDataset reads"
_ONE_SET = "streaming.StreamingDataset reads every set; decode and transform say what a sample is"
_NO_SPLIT = "leave it out: streaming.DataLoader deals samples to ranks and workers"
_MIX = "streaming.Mixture mixes sets by weights"
_BAD = "write StreamingDataset(on_error=…), and see max_bad_samples"
_FIELDS = "shard_tools.ShardWriter encodes values by the extension of their field, such as jpg, npy or json"
_TRANSFORM = "give a function to transform of streaming.StreamingDataset"
_VIRTUAL = "write DataLoader(epoch_size=…); an epoch is the set, once"
_PARQUET = "`shard_tools convert --from parquet`, or streaming.TableDataset for tables of text"
_INDEX = "`shard_tools index` does so for tar shards"
_FILTER = "write where=… over columns, or shard_tools.select once and view=…"
_BATCHES = "write DataLoader(dataset, batch_size=…)"
_LENGTH = "leave it out; DataLoader(epoch_size=…) makes epochs of other lengths"
_STATE = "write loader.state_dict() and loader.load_state_dict(state)"
_SLICE = "write dataset[a:b], or StreamingDataset(subset=…)"
_NO_REBUILDING = "iterate over the loader itself, without a helper that rebuilds it, such as Ray's prepare_data_loader"
_OF_TORCH = "torch's own goes with every data set that streaming.DataLoader takes"

LIBRARIES = (
    Library(
        name="",
        page="",
        names={
            "ShardWriter": "it is shard_tools.ShardWriter",
            "optimize": "it is shard_tools.optimize",
            "select": "it is shard_tools.select",
            "lines": "it is shard_tools.lines",
            "StreamingDataset": "it is streaming.StreamingDataset",
            "DataLoader": "it is streaming.DataLoader",
            "Mixture": "it is streaming.Mixture",
            "Packed": "it is streaming.Packed",
            "TableDataset": "it is streaming.TableDataset",
            "DeviceMesh": "it is infra.DeviceMesh",
            "ShardstreamError": "it is streaming.errors.ShardstreamError",
        },
    ),
    Library(
        name="Mosaic Streaming",
        page="mosaic",
        names={
            "MDSWriter": _WRITER,
            "JSONWriter": _WRITER,
            "CSVWriter": _WRITER,
            "TSVWriter": _WRITER,
            "XSVWriter": _WRITER,
            "Stream": "a source of streaming.Mixture, with weights or repeats",
            "StreamingDataLoader": _LOADER,
            "LocalDataset": "streaming.StreamingDataset reads a local folder by its path",
            "StreamingC4": _ONE_SET,
            "StreamingEnWiki": _ONE_SET,
            "StreamingPile": _ONE_SET,
            "StreamingADE20K": _ONE_SET,
            "StreamingCIFAR10": _ONE_SET,
            "StreamingCOCO": _ONE_SET,
            "StreamingImageNet": _ONE_SET,
            "StreamingInsideWebVid": _ONE_SET,
            "StreamingOutsideDTWebVid": _ONE_SET,
            "StreamingOutsideGIWebVid": _ONE_SET,
            "clean_stale_shared_memory": "leave it out: killed jobs leave nothing in /dev/shm",
            "merge_index": "`shard_tools index` over all shards makes one index",
            "dataframe_to_mds": _CONVERT,
            "dataframeToMDS": _CONVERT,
            "base": "our names are in streaming itself and in shard_tools",
            "text": _ONE_SET,
            "vision": _ONE_SET,
            "multimodal": _ONE_SET,
        },
        of_datasets={
            "state_dict": _STATE,
            "load_state_dict": _STATE,
            "get_item": "write dataset[number]",
            "size": "write len(dataset)",
        },
    ),
    Library(
        name="LitData",
        page="litdata",
        names={
            "StreamingDataLoader": _LOADER,
            "StreamingRawDataset": _CONVERT,
            "CombinedStreamingDataset": _MIX,
            "ParallelStreamingDataset": "join the fields of both sets in one, by `shard_tools map` or late columns",
            "TokensLoader": "streaming.Packed makes rows of one length of a set of documents",
            "ParquetLoader": _PARQUET,
            "index_parquet_dataset": _PARQUET,
            "index_hf_dataset": "`shard_tools convert --from hf`",
            "optimize_hf": "`shard_tools convert --from hf`",
            "map": "`shard_tools map` runs a function over a set, shard_tools.optimize over anything",
            "walk": "shard_tools.optimize takes any list of inputs, such as sorted(glob(…))",
            "list_media_folder": "`shard_tools convert` takes a folder of images or sounds",
            "iter_webdataset_tar": "streaming.StreamingDataset reads tars directly",
            "merge_datasets": "`shard_tools reshard` writes several sets into one",
            "build_keys_index": _INDEX,
            "train_test_split": "write StreamingDataset(subset=…) for each part, or where over hash(__key__)",
            "litdata_collate": "streaming.DataLoader makes tensors of fields; collate_fn replaces that",
            **dict.fromkeys(
                ("Audio", "Video", "Image", "Jpeg", "JpegArray", "Pil", "Tiff", "File", "Pdf", "Text"), _FIELDS
            ),
        },
    ),
    Library(
        name="webdataset",
        page="webdataset",
        names={
            "WebDataset": "streaming.StreamingDataset reads the same tars, shuffled, for any ranks and workers",
            "DataPipeline": "streaming.StreamingDataset and streaming.DataLoader are the pipeline; " + _TRANSFORM,
            "FluidInterface": _TRANSFORM,
            "WebLoader": _LOADER,
            "TarWriter": "shard_tools.ShardWriter writes a sequence of tars",
            "SimpleShardList": "give the URLs to streaming.StreamingDataset",
            "ResampledShards": _VIRTUAL,
            "resampled": _VIRTUAL,
            "with_epoch": _VIRTUAL,
            "with_length": _VIRTUAL,
            "MultiShardSample": _MIX,
            "RandomMix": _MIX,
            "RoundRobin": _MIX,
            "split_by_node": _NO_SPLIT,
            "split_by_worker": _NO_SPLIT,
            "single_node_only": _NO_SPLIT,
            "tarfile_to_samples": "streaming.StreamingDataset reads tars; its samples are dicts by extension, too",
            "tarfile_samples": "streaming.StreamingDataset reads tars; its samples are dicts by extension, too",
            "gopen": "streaming.StreamingDataset opens s3://, gs://, az://, https:// and paths; pipe: is refused",
            "Decoder": "streaming.decode.from_webdataset takes its handlers; images and more need none",
            "imagehandler": 'streaming.decode.from_webdataset takes it; write decode={"jpg": "rgb8"} for images',
            **dict.fromkeys(
                ("warn_and_continue", "warn_and_stop", "ignore_and_continue", "ignore_and_stop", "reraise_exception"),
                _BAD,
            ),
            "shuffle": "sets are shuffled unless they are opened with shuffle=False",
            "detshuffle": "sets are shuffled unless opened with shuffle=False, the same on every run of a seed",
            "batched": "write DataLoader(batch_size=…)",
            "to_tuple": "write StreamingDataset(fields=…); batches are dicts",
            "map_dict": "write StreamingDataset(decode=…), a function for each field",
        },
        of_datasets={
            "select": _FILTER,
            "decode": "write StreamingDataset(decode=…)",
            "to_tuple": "write fields=(…); batches are dicts",
            "map_dict": "write decode={'jpg': function}",
            "map_tuple": _TRANSFORM,
            "rename": _TRANSFORM,
            "compose": _TRANSFORM,
            "batched": _BATCHES,
            "with_epoch": _LENGTH,
            "with_length": _LENGTH,
            "repeat": "leave it out: each loop over the loader is the next epoch",
        },
        of_loaders={
            "with_epoch": _LENGTH,
            "unbatched": "write batch_size=…; batches come whole from workers",
            "batched": "write batch_size=…",
        },
    ),
    Library(
        name="Megatron-Energon",
        page="energon",
        names={
            "get_train_dataset": "streaming.StreamingDataset opens a set",
            "get_val_dataset": "streaming.StreamingDataset opens a set, with shuffle=False",
            "get_val_datasets": "streaming.StreamingDataset opens a set, with shuffle=False",
            "get_loader": _LOADER,
            "get_savable_loader": _LOADER,
            "SavableDataLoader": _LOADER,
            "WorkerConfig": "leave it out: ranks are found; infra.DeviceMesh says others",
            "TaskEncoder": "give functions to transform of the set and collate_fn of the loader",
            "DefaultTaskEncoder": "give functions to transform of the set and collate_fn of the loader",
            "Cooker": _TRANSFORM,
            "Metadataset": _MIX,
            "MetadatasetV2": _MIX,
            "BlendDataset": _MIX,
            "PackingDataset": "streaming.Packed packs documents",
            "CaptioningSample": "samples are dicts by field; build what the model takes in collate_fn",
            "CrudeSample": "samples are dicts by field; build what the model takes in collate_fn",
        },
        of_loaders={
            "save_state_rank": _STATE,
            "save_state_global": _STATE,
            "restore_state_rank": _STATE,
            "restore_state_global": _STATE,
        },
    ),
    Library(
        name="torch",
        page="torch",
        names={
            "Dataset": "torch's Dataset goes into streaming.DataLoader; sets in shards are streaming.StreamingDataset",
            "IterableDataset": "torch's goes into streaming.DataLoader; sets in shards are streaming.StreamingDataset",
            "DistributedSampler": _NO_SPLIT,
            "WeightedRandomSampler": "streaming.Balanced draws classes in shares",
            "StatefulDataLoader": _LOADER,
            "Subset": "write dataset[a:b], or StreamingDataset(subset=…)",
            "random_split": "write dataset[a:b], or StreamingDataset(subset=…)",
            "ConcatDataset": _MIX,
            "ChainDataset": _MIX,
            "get_worker_info": "leave it out: streaming.DataLoader deals samples to workers",
            "default_collate": _OF_TORCH,
            "TensorDataset": _OF_TORCH,
        },
        of_datasets={
            "set_epoch": "write loader.set_epoch(epoch)",
        },
        of_loaders={
            "worker_init_fn": _NO_REBUILDING,
            "generator": _NO_REBUILDING,
            "persistent_workers": _NO_REBUILDING,
            "timeout": _NO_REBUILDING,
        },
    ),
    Library(
        name="Hugging Face datasets",
        page="datasets",
        names={
            "load_dataset": "streaming.StreamingDataset opens shards, streaming.TableDataset tables of text",
            "load_from_disk": "`shard_tools convert --from hf` makes shards of it",
            "interleave_datasets": _MIX,
            "concatenate_datasets": _MIX,
            "split_dataset_by_node": _NO_SPLIT,
        },
        of_datasets={
            "filter": _FILTER,
            "batch": _BATCHES,
            "skip": _SLICE,
            "train_test_split": _SLICE,
            "shard": _NO_SPLIT,
            "with_format": "leave it out: arrays come as tensors; decode=… says more",
            "set_format": "leave it out: arrays come as tensors; decode=… says more",
        },
    ),
    Library(
        name="DALI",
        page="dali",
        names={
            "pipeline_def": _ONE_SET,
            "DALIGenericIterator": _LOADER,
            "DALIClassificationIterator": _LOADER,
            "LastBatchPolicy": 'write DataLoader(last_batch="drop", "pad" or "partial")',
            "wds2idx": _INDEX,
        },
    ),
    Library(
        name="LanceDB",
        page="lancedb",
        names={
            "connect": "streaming.StreamingDataset opens a set by its URL",
            "open_table": "streaming.StreamingDataset opens a set by its URL",
            "LanceDataset": _PARQUET,
            "SafeLanceDataset": _PARQUET,
            "Permutation": "streaming.StreamingDataset shuffles; dataset[[17, 4]] reads rows by number",
        },
    ),
    Library(
        name="webshart",
        page="webshart",
        names={
            "discover_dataset": _ONE_SET,
            "DiscoveredDataset": _ONE_SET,
            "TarDataLoader": _LOADER,
            "BucketDataLoader": "streaming.Packed(alike=…) batches images of one size",
            "BucketSamplingStrategy": "write streaming.StreamingDataset(shuffle=ShuffleConfig(window=…))",
            "read_files_batch": "write dataset[[17, 4]]",
        },
    ),
    Library(
        name="Lhotse",
        page="lhotse",
        names={
            "CutSet": _ONE_SET,
            "SharWriter": _WRITER,
            "DynamicBucketingSampler": "streaming.Packed(padded=True) makes batches of similar length under a budget",
            "SimpleCutSampler": _BATCHES,
            "RoundRobinSampler": _MIX,
            "IterableDatasetWrapper": "leave it out: streaming.DataLoader makes batches",
            "K2SpeechRecognitionDataset": "give a function to collate_fn of streaming.DataLoader",
        },
    ),
    Library(
        name="LeRobot",
        page="lerobot",
        names={
            "LeRobotDataset": "streaming.Windows, over what `shard_tools convert --from lerobot` has made",
            "StreamingLeRobotDataset": "streaming.Windows, over what `shard_tools convert --from lerobot` has made",
            "MultiLeRobotDataset": _MIX,
            "LeRobotDatasetMetadata": "`shard_tools info` and `shard_tools stats` say what a set holds",
            "EpisodeAwareSampler": "leave it out: streaming.DataLoader deals samples to ranks and workers",
        },
    ),
)


def no_attribute(package: str, name: str) -> AttributeError:
    """Return the error for ``package.name``, which does not exist.

    For a known name, the error has no object in which Python would look for similar names: none of them would be right.
    """
    found = [library for library in LIBRARIES if name in library.names]
    if not found:
        return AttributeError(f"module {package!r} has no attribute {name!r}")
    cures = "; or ".join(dict.fromkeys(library.names[name] for library in found))
    foreign = [library for library in found if library.name]
    if not foreign:
        return AttributeError(f"{package} has no {name}: {cures}", name=name)
    whose = " and ".join(f"{library.name}'s" for library in foreign)
    pages = ", ".join(f"docs/coming-from/{library.page}.md" for library in foreign)
    return AttributeError(f"{package} has no {name}, which is {whose}. Here: {cures} ({pages})", name=name)


def look_elsewhere(owner: object, name: str, kind: Literal["of_datasets", "of_loaders"]) -> object:
    """Suggest a replacement for an attribute that ``owner`` does not have; a property that failed fails again.

    Raises:
        AttributeError: Always, except if a property succeeds the second time.
    """
    ours = type(owner)
    if hasattr(ours, name):
        return object.__getattribute__(owner, name)
    for library in LIBRARIES:
        cure = getattr(library, kind).get(name)
        if cure:
            page = f"docs/coming-from/{library.page}.md"
            raise AttributeError(f"{ours.__name__} has no {name}. Here: {cure} ({page})", name=name)
    raise AttributeError(f"{ours.__name__!r} object has no attribute {name!r}", name=name, obj=owner)
