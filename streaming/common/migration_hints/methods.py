"""Tell what stands here for methods that data sets and loaders of other libraries have."""

from __future__ import annotations

from collections.abc import Mapping

_FILTER = "write where=… over columns, or shard_tools.select once and view=…"
_TRANSFORM = "give the function to transform of streaming.StreamingDataset"
_BATCHES = "write DataLoader(dataset, batch_size=…)"
_LENGTH = "leave it out; DataLoader(epoch_size=…) makes epochs of other lengths"
_STATE = "write loader.state_dict() and loader.load_state_dict(state)"
_SLICE = "write dataset[a:b], or StreamingDataset(subset=…)"
_NO_SPLIT = "leave it out: streaming.DataLoader deals samples to ranks and workers"
_NO_REBUILDING = "iterate over the loader itself, without a helper that rebuilds it, such as Ray's prepare_data_loader"

OF_DATASETS: Mapping[str, tuple[str, str]] = {  # method: what to write here, the page that says more
    "filter": (_FILTER, "datasets"),
    "select": (_FILTER, "webdataset"),
    "decode": ("write StreamingDataset(decode=…)", "webdataset"),
    "to_tuple": ("write fields=(…); batches are dicts", "webdataset"),
    "map_dict": ("write decode={'jpg': function}", "webdataset"),
    "map_tuple": (_TRANSFORM, "webdataset"),
    "rename": (_TRANSFORM, "webdataset"),
    "compose": (_TRANSFORM, "webdataset"),
    "batched": (_BATCHES, "webdataset"),
    "batch": (_BATCHES, "datasets"),
    "with_epoch": (_LENGTH, "webdataset"),
    "with_length": (_LENGTH, "webdataset"),
    "repeat": ("leave it out: each loop over the loader is the next epoch", "webdataset"),
    "skip": (_SLICE, "datasets"),
    "train_test_split": (_SLICE, "datasets"),
    "shard": (_NO_SPLIT, "datasets"),
    "with_format": ("leave it out: arrays come as tensors; decode=… says more", "datasets"),
    "set_format": ("leave it out: arrays come as tensors; decode=… says more", "datasets"),
    "state_dict": (_STATE, "mosaic"),
    "load_state_dict": (_STATE, "mosaic"),
    "set_epoch": ("write loader.set_epoch(epoch)", "torch"),
    "get_item": ("write dataset[number]", "mosaic"),
    "size": ("write len(dataset)", "mosaic"),
}
OF_LOADERS: Mapping[str, tuple[str, str]] = {
    "with_epoch": (_LENGTH, "webdataset"),
    "unbatched": ("write batch_size=…; batches come whole from workers", "webdataset"),
    "batched": ("write batch_size=…", "webdataset"),
    "save_state_rank": (_STATE, "energon"),
    "save_state_global": (_STATE, "energon"),
    "restore_state_rank": (_STATE, "energon"),
    "restore_state_global": (_STATE, "energon"),
    "worker_init_fn": (_NO_REBUILDING, "torch"),
    "generator": (_NO_REBUILDING, "torch"),
    "persistent_workers": (_NO_REBUILDING, "torch"),
    "timeout": (_NO_REBUILDING, "torch"),
}


def look_elsewhere(owner: object, name: str, known: Mapping[str, tuple[str, str]]) -> object:
    """Say what stands here for an attribute that ``owner`` does not have; a property that failed fails again.

    Raises:
        AttributeError: Always, but for a property that succeeds at the second time.
    """
    kind = type(owner)
    if hasattr(kind, name):
        return object.__getattribute__(owner, name)
    if name not in known:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=owner)
    cure, page = known[name]
    raise AttributeError(f"{kind.__name__} has no {name}. Here: {cure} (docs/coming-from/{page}.md)", name=name)
