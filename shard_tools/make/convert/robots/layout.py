"""Describe the files of a LeRobot set (v2.0, v2.1, v3.0), for reading and for writing it: pure values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from streaming.errors import DataError

VERSION: Final = "v3.0"
"""The version that is written; v2.0 and v2.1 are read, too."""
INFO: Final = "meta/info.json"
STATS: Final = "meta/stats.json"
TASKS: Final = "meta/tasks.parquet"
SUBTASKS: Final = "meta/subtasks.parquet"
EPISODES: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
OLD_EPISODES: Final = "meta/episodes.jsonl"
OLD_STATS: Final = "meta/episodes_stats.jsonl"
OLD_TASKS: Final = "meta/tasks.jsonl"
CHUNK_FILES: Final = 1000
"""Files in one folder ``chunk-000``, unless ``info.json`` has another number."""
SERIAL: Final = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Features of every set, which number its steps."""
RENUMBERED: Final = ("episode_index", "index", "task_index")
"""Those whose numbers change when sets are joined or split."""
OF_FILES: Final = ("data/", "videos/", "meta/", "dataset_", "stats/")
"""Beginnings of the columns of episodes that describe files; the other columns describe the episode."""
OF_EPISODE: Final = ("episode_index", "tasks", "length")
_PLACE: Final = re.compile(r"\{(\w+)(?::0(\d{1,2})d)?\}")
_UNSAFE: Final = re.compile(r"[^\w.-]+")
_ARRAYS: Final = re.compile(r"(float|u?int)(8|16|32|64)|bool")
_VERSIONS: Final = re.compile(r"v(2\.[01]|3\.\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A value of every step.

    Attributes:
        name: Its name, as ``action``.
        dtype: Its type: that of numbers by NumPy's name, ``"video"``, ``"image"`` or ``"string"``.
        shape: The shape of one value.
        field: The field of an episode that holds all values: ``NAME.mp4``, ``NAME.npy`` or ``NAME.parquet``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    field: str

    @property
    def is_video(self) -> bool:
        """Whether its values are frames of a video."""
        return self.dtype == "video"

    @property
    def is_array(self) -> bool:
        """Whether its values are numbers, so that those of an episode are an array."""
        return _ARRAYS.fullmatch(self.dtype) is not None

    @property
    def is_scalar(self) -> bool:
        """Whether a value is a number by itself: LeRobot stores those of shape [1] without a list."""
        return self.shape == (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """The content of ``meta/info.json``.

    Attributes:
        version: Version of the format.
        fps: Steps per second.
        features: The features, in their order.
        data_path: Template of the tables' paths.
        video_path: Template of the videos' paths; None: there are no videos.
        chunks_size: Number of files, or in v2 of episodes, in one folder.
        content: All of it.
    """

    version: str
    fps: float
    features: tuple[Feature, ...]
    data_path: str
    video_path: str | None
    chunks_size: int
    content: Mapping[str, Any]

    @classmethod
    def of(cls, content: object, where: str) -> Info:
        """Read parsed JSON.

        Raises:
            DataError: It is not the description of a LeRobot set, or one of an unknown version.
        """
        if not isinstance(content, dict) or not isinstance(content.get("features"), dict):
            raise DataError(f"{where}: expected an object with 'features', as LeRobot writes; fetch the file again")
        version = content.get("codebase_version")
        if not isinstance(version, str) or not _VERSIONS.fullmatch(version):
            raise DataError(
                f"{where}: codebase_version {version!r}; v2.0, v2.1 and v3.0 are read here. Bring older sets to v3.0 "
                "with LeRobot's own converter"
            )
        fps, size = content.get("fps"), content.get("chunks_size", CHUNK_FILES)
        if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps < 1e6:
            raise DataError(f"{where}: fps {fps!r}; expected a number of steps per second above 0")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise DataError(f"{where}: chunks_size {size!r}; expected a whole number above 0")
        data_path, video_path = content.get("data_path", DATA), content.get("video_path")
        if not isinstance(data_path, str) or not isinstance(video_path, str | None):
            raise DataError(f"{where}: data_path and video_path are no templates of paths; fetch the file again")
        features = features_of(content["features"], where)
        return cls(
            version=version, fps=float(fps), features=features, data_path=data_path, video_path=video_path,
            chunks_size=size, content=content,
        )  # fmt: skip

    @property
    def is_old(self) -> bool:
        """Whether each episode has files of its own (v2)."""
        return self.version.startswith("v2")

    @property
    def videos(self) -> tuple[Feature, ...]:
        """The cameras."""
        return tuple(one for one in self.features if one.is_video)

    @property
    def columns(self) -> tuple[Feature, ...]:
        """The features that the tables hold."""
        return tuple(one for one in self.features if not one.is_video)


def features_of(content: Mapping[str, Any], where: str) -> tuple[Feature, ...]:
    """Return the features that ``info.json`` describes; names of fields are lower case, without white space.

    Raises:
        DataError: One is not described as LeRobot does, or two would become one field.
    """
    found: dict[str, Feature] = {}
    for name, told in content.items():
        dtype = told.get("dtype") if isinstance(told, dict) else None
        shape = told.get("shape") if isinstance(told, dict) else None
        if not isinstance(dtype, str) or not _is_shape(shape):
            raise DataError(f"{where}: feature {name!r} has no dtype and shape; correct it, or fetch the file again")
        stem = ".".join(part for part in _UNSAFE.sub("_", name.lower()).split(".") if part).removeprefix("__")
        if not stem or "/" in name or "\\" in name:
            raise DataError(f"{where}: feature {name!r}: LeRobot allows no '/' in names; rename it")
        kind = "mp4" if dtype == "video" else "npy" if _ARRAYS.fullmatch(dtype) else "parquet"
        one = Feature(name=name, dtype=dtype, shape=tuple(shape or ()), field=f"{stem}.{kind}")
        other = found.setdefault(one.field, one)
        if other is not one:
            raise DataError(
                f"{where}: features {other.name!r} and {name!r} would both become the field {one.field!r}; rename one"
            )
    return tuple(found.values())


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, list | tuple):
        return shape is None
    return all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape)


def filled(template: str, values: Mapping[str, str | int], where: str) -> str:
    """Return the path, relative to the set, that a template names.

    Raises:
        DataError: The template has other places than LeRobot's, or the path leads out of the set.
    """
    unknown = sorted({name for name, _ in _PLACE.findall(template)} - {*values})
    rest = _PLACE.sub("", template)
    if unknown or "{" in rest or "}" in rest:
        raise DataError(
            f"{where}: the template {template!r} has {', '.join(unknown) or 'braces'}, which are not filled in; "
            f"expected {', '.join(f'{{{name}}}' for name in values)}"
        )
    path = _PLACE.sub(lambda one: str(values[one[1]]).zfill(int(one[2] or 0)), template)
    if "\\" in path or any(part in {"", ".", ".."} for part in path.split("/")):
        raise DataError(
            f"{where}: the path {path!r} leads out of the set's folder; correct the template {template!r}, or do not "
            "trust this set"
        )
    return path


def numbered_path(template: str, number: int, **more: str) -> str:
    """Return the path of file ``number`` of a kind, as LeRobot writes them."""
    chunk, file = divmod(number, CHUNK_FILES)
    return filled(template, {"chunk_index": chunk, "file_index": file, **more}, INFO)


def parsed(data: bytes, where: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        DataError: It is no JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); fetch the file again") from error


def joined_statistics(each: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the statistics of several episodes together, by feature, as LeRobot joins them.

    Quantiles are means of the episodes' quantiles, weighted by their numbers of values. Features without ``count`` are
    left out.
    """
    found = {}
    for name in dict.fromkeys(name for one in each for name in one):
        some = [_arrays(one[name]) for one in each if name in one]
        if all({"mean", "std", "min", "max", "count"} <= one.keys() for one in some):
            found[name] = {key: value.tolist() for key, value in _joined(some).items()}
    return found


def _arrays(one: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {key: np.asarray(value, None if key == "count" else np.float64) for key, value in one.items()}


def _joined(some: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    counts, means = np.stack([one["count"] for one in some]), np.stack([one["mean"] for one in some])
    total = counts.sum(0)
    weights = counts.reshape(counts.shape + (1,) * (means.ndim - counts.ndim))
    mean = (means * weights).sum(0) / total
    variance = ((np.stack([one["std"] for one in some]) ** 2 + (means - mean) ** 2) * weights).sum(0) / total
    found = {
        "min": np.stack([one["min"] for one in some]).min(0), "max": np.stack([one["max"] for one in some]).max(0),
        "mean": mean, "std": np.sqrt(variance), "count": total,
    }  # fmt: skip
    for key in some[0]:
        if re.fullmatch(r"q\d+", key) and all(key in one for one in some):
            found[key] = (np.stack([one[key] for one in some]) * weights).sum(0) / total
    return found


def nested(flat: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return statistics by feature, from columns ``stats/FEATURE/KIND``; columns without a value are left out."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in flat:
        feature, slash, kind = name.removeprefix("stats/").rpartition("/")
        if slash and name.startswith("stats/") and value is not None:
            found.setdefault(feature, {})[kind] = value
    return found
