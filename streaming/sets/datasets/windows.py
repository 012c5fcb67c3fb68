"""Cut recordings into windows of frames and steps around moments: ``Windows``."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from streaming.common.arguments import checks_names, option_names, shows
from streaming.errors import ConfigError
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.face import DataSet, reading
from streaming.sets.sources.windows import WindowSource
from streaming.sets.windows.spec import Clock, Edge, Every, Offsets, checked_spec
from streaming.types import Transform

_AT_THE_RECORDINGS = "it belongs to the recordings; write Windows(StreamingDataset(…, {}=…), …)"
_ELSEWHERE = {
    name: _AT_THE_RECORDINGS.format(name) for name in option_names(StreamingDataset) if name != "transform"
} | {
    "batch_size": "it belongs to the loader; write DataLoader(windows, batch_size=…)",
    "delta_timestamps": 'write video={"front.mp4": [-0.2, 0.0]}, in seconds, and columns={"action.npy": (0, 16)}',
    "fps": "write every=…, the seconds between rows",
    "stride": 'write every=…: "frame", or the seconds between rows',
    "frames": 'write video={"front.mp4": […]}, the seconds of each frame from the moment',
    "resize": "write size=(height, width)",
    "image_size": "write size=(height, width)",
    "rename": 'write names={"top.mp4": "front"}',
    "padding": 'write edge="pad" or "drop"',
}  # fmt: skip


@checks_names(_ELSEWHERE)
class Windows(DataSet[WindowSource]):
    """Cut recordings into windows: a row is a moment of a recording, with the frames and steps around it.

    A recording is a sample that holds videos, and tables of what happened meanwhile. The set can be given to a
    ``DataLoader``, which keeps all its promises (the same global batches on any number of ranks and workers, exact
    resume), or to a ``Mixture``. ::

        episodes = StreamingDataset("s3://bucket/robots/")  # after `shard_tools index s3://bucket/robots/ --video`
        windows = Windows(
            episodes,
            every="frame",
            video={"front.mp4": [-0.2, 0.0], "wrist.mp4": [0.0]},  # seconds from the moment
            columns={"action.npy": (0, 16)},  # steps from the one of the moment
            size=(224, 224),
        )
        for batch in DataLoader(windows, batch_size=64, shuffle=True):
            loss = policy(batch["front.mp4"], batch["wrist.mp4"], batch["action.npy"], batch["__valid_steps__"])

    A row is a dict of

    - each stream of ``video``: uint8 [frames, height, width, 3], RGB and upright: the frame shown at each of its
      offsets, equal to that of ``Video()`` of the whole file;
    - each table of ``columns``: [steps, …] in its own type;
    - ``__time__``: the moment in seconds from the beginning of the first stream, a float; ``__key__``, that of the
      recording, and ``__url__``;
    - ``__valid_frames__``: bool [all frames], in the order of ``video``: False for a frame beyond the edge, in whose
      place the nearest one stands; ``__valid_steps__``: likewise for the steps of ``columns``, if there are any.

    Frames are decoded once for all windows that hold them, by the threads that fetch, into the memory that
    ``memory_limit`` bounds (docs/windows.md).

    Args:
        recordings: The recordings, with an index, and with one of their videos (``shard_tools index URL --video``).
            ``where=``, ``subset=`` and slices select recordings.
        every: ``"frame"``: a row for each frame of the first stream of ``video``. A number: a row at each
            multiple of these seconds, from its first frame on.
        video: For each stream, by its field, the seconds of its frames from the moment: ``{"front.mp4": [-0.2, 0.0]}``.
            The first stream is the reference: its frames say which moments there are.
        columns: For each table, its steps from the one of the moment: ``(0, 16)`` are 16 steps from it on, ``[-2, 0]``
            two of them, ``[-0.5, 0.0]`` those at seconds from the moment. A table is an ``.npy`` with steps along its
            first axis, a column of a Parquet table (``"steps.parquet:action"``), or a sound (``"mic.flac"``, with steps
            [channels]), for which ``(-0.5, 0.0)`` in seconds means all of its samples between.
        edge: What to do with rows that reach beyond the recording: ``"pad"`` repeats the nearest frame or step and
            marks it, ``"drop"`` leaves these rows out.
        size: (height, width) to which frames are scaled, as by ``Video(size=…)``; or a dict of these by stream. None:
            as stored.
        clocks: Which step of a table belongs to a moment. By default step i belongs to frame i of the first stream,
            and a sound has its own rate. A number: that many steps per second. A text: the field or column that holds
            the time of each step in seconds, ``{"force.npy": "force_time.npy"}``.
        carry: Fields of the recording that each row has as a whole, decoded by the recordings' ``decode``, such as
            ``("json",)`` for a task's words.
        names: Names in rows, by field: ``{"top.mp4": "front"}``, so that sets with unlike cameras can be mixed.
        groups: Number of groups of pictures that are read and dealt as one unit. None: as few as keep the bytes that
            two units both read below a quarter.
        transform: Function of one row that returns the row to use, or None to drop it; see ``StreamingDataset``.

    Raises:
        ConfigError: An argument is invalid; or the recordings lack such a field, have a ``transform``, or no window.
        IndexMissingError: The recordings have no index, or none of their videos.
    """

    _noun = "window"

    def __init__(
        self,
        recordings: StreamingDataset,
        *,
        every: Every = "frame",
        video: Mapping[str, Sequence[float]],
        columns: Mapping[str, Offsets] | None = None,
        edge: Edge = "pad",
        size: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
        clocks: Mapping[str, Clock] | None = None,
        carry: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
        groups: int | None = None,
        transform: Transform | None = None,
    ) -> None:
        _check_recordings(recordings)
        spec = checked_spec(
            every=every, video=video, columns=columns, carry=carry, edge=edge, size=size, clocks=clocks, names=names,
            groups=groups,
        )  # fmt: skip
        self._source = WindowSource(recordings.source, spec, transform)
        self._recordings = recordings

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._source.num_readable

    @property
    def recordings(self) -> StreamingDataset:
        """The data set of recordings: ``windows.recordings[0]["__key__"]``."""
        return reading(self._recordings, self._source.recordings)

    def _sliced(self, wanted: builtins.slice) -> NoReturn:  # noqa: ARG002  as other data sets have it
        raise ConfigError(
            "windows[a:b]: windows cannot be sliced, since those of one group of pictures are read together; slice the "
            "recordings: Windows(recordings[a:b], …), or write windows[range(a, b)], which is a list of rows"
        )

    @shows
    def __repr__(self) -> str:
        return f"Windows({self.recordings!r}, {self._source.words()})"


def _check_recordings(recordings: Any) -> None:
    """Check that ``recordings`` is a ``StreamingDataset``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(recordings, StreamingDataset):
        return
    if isinstance(recordings, DataSet):
        raise ConfigError(
            f"Windows: expected a StreamingDataset, got a {type(recordings).__name__}; make windows of each data set, "
            'and mix these: Mixture({"kitchen": Windows(kitchen, …), "lab": Windows(lab, …)}, weights=…)'
        )
    given = f"a {type(recordings).__name__}" if isinstance(recordings, list | dict) else repr(recordings)
    raise ConfigError(
        f"Windows: expected a StreamingDataset, got {given}; write Windows(StreamingDataset(…), …), or a slice of "
        "one, recordings[a:b]"
    )
