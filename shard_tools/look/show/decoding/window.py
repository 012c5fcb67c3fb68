"""Decode what a window has: frames of a group of pictures, and steps of tables.

``frames`` and ``steps`` run in a decoding process; ``group_facts`` and ``column_facts`` state in the server what these
must know, as JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from streaming.build.decode.groups.decode import GroupedStream, VideoFormat, decode_group
from streaming.sets.windows.recording import CutRecording, clipped
from streaming.sets.windows.spec import ColumnEntry
from streaming.sets.windows.tables import StepShape, check_step, table_of
from streaming.shards.video.groups import PictureGroup
from streaming.types import Int64Array

SHOWN_STEPS: Final = 12
"""Steps of a column that are shown."""
_SHOWN_NUMBERS: Final = 16  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneGroup:
    """A group of pictures as a stream of its own; packets, frames and bytes are counted from its first ones.

    Attributes:
        format: What the decoder must know.
        groups: The group.
        byte_start: int64 [P], the first byte of each packet.
        num_bytes: int64 [P], the size of each packet.
        packet_of_frame: int64 [F], the packet of each frame.
        times: float64 [F], when each frame is shown.
    """

    format: VideoFormat
    groups: Sequence[PictureGroup]
    byte_start: Int64Array
    num_bytes: Int64Array
    packet_of_frame: Int64Array
    times: npt.NDArray[np.float64]


def group_facts(
    stream: GroupedStream, number: int, frames: Sequence[int], size: tuple[int, int] | None
) -> dict[str, Any]:
    """Return what :func:`frames` must know of a group of pictures, as JSON."""
    group, form = stream.groups[number], stream.format
    packets, shown = slice(group.first_packet, group.stop_packet), slice(group.first_frame, group.stop_frame)
    return {
        "format": asdict(form) | {"extradata": base64.b64encode(form.extradata).decode()},
        "starts": (stream.byte_start[packets] - group.byte_start).tolist(),
        "sizes": stream.num_bytes[packets].tolist(),
        "packets": (stream.packet_of_frame[shown] - group.first_packet).tolist(),
        "times": stream.times[shown].tolist(), "frames": [one - group.first_frame for one in frames], "size": size,
    }  # fmt: skip


def frames(data: bytes, request: dict[str, Any]) -> list[Image.Image]:
    """Return frames of a group of pictures, as training gets them, each at most ``pixels`` wide and high.

    Raises:
        Exception: The group is damaged, or too large; the error may come from any library.
    """
    form = request["format"]
    form |= {name: tuple(form[name]) for name in ("coded_size", "color")}
    form["extradata"] = base64.b64decode(form["extradata"])
    starts, packets = np.array(request["starts"], np.int64), np.array(request["packets"], np.int64)
    alone = LoneGroup(
        format=VideoFormat(**form), byte_start=starts, num_bytes=np.array(request["sizes"], np.int64),
        groups=[PictureGroup(0, len(starts), 0, len(data), 0, 0, len(packets))], packet_of_frame=packets,
        times=np.array(request["times"], np.float64),
    )  # fmt: skip
    size = request["size"] and tuple(request["size"])
    found = [Image.fromarray(one) for one in decode_group(alone, 0, data, size=size, frames=request["frames"])]
    for one in found:
        one.thumbnail((request["pixels"], request["pixels"]), Image.Resampling.BOX)
    return found


def column_facts(entry: ColumnEntry, shape: StepShape, recording: CutRecording, row: int) -> dict[str, Any]:
    """Return what :func:`steps` must know of a column of a window, as JSON."""
    numbers = recording.steps_of(entry, np.array([row]), None)[0].tolist() if entry.by_frame else None
    return {
        "entry": asdict(entry), "numbers": numbers, "moment": float(recording.moments[row]),
        "frame": int(recording.frames[row]), "shape": [shape.dtype.str, shape.shape, shape.rate],
    }  # fmt: skip


def steps(data: bytes, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of each column of a window: their numbers, whether they are there, and what they hold.

    A column that cannot be read has an ``error`` instead.
    """
    fields, start = {}, 0
    for name, size in request["fields"]:
        fields[name] = data[start : start + size]
        start += size
    found = []
    for one in request["columns"]:
        try:
            found.append(_column(fields, one, request["where"]))
        except MemoryError:
            found.append({"error": "takes more memory than this may"})
        except Exception as error:  # noqa: BLE001  libraries raise errors of many types
            found.append({"error": str(error)[:500]})
    return found


def _column(fields: dict[str, bytes], one: dict[str, Any], where: str) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in one["entry"].items()
    }
    entry, (dtype, shape, rate) = ColumnEntry(**given), one["shape"]
    table = table_of(entry, fields, where)
    check_step(entry, table, StepShape(dtype=np.dtype(dtype), shape=tuple(shape), rate=rate), where)
    if one["numbers"] is None:
        nothing = np.zeros(1, np.int64)
        alone = CutRecording(
            sample=0, streams=(), moments=np.array([one["moment"]]), frames=np.array([one["frame"]]), borders=nothing
        )
        numbers = alone.steps_of(entry, nothing, table.clock)[0]
    else:
        numbers = np.array(one["numbers"], np.int64)
    placed = clipped(numbers, len(table.steps))
    shown = slice(SHOWN_STEPS)
    return {
        "total": len(numbers), "shape": table.steps.shape[1:], "dtype": str(table.steps.dtype),
        "numbers": placed.numbers[shown].tolist(), "valid": placed.valid[shown].tolist(),
        "values": [_numbers(table.steps[step]) for step in placed.numbers[shown]],
    }  # fmt: skip


def _numbers(step: npt.NDArray[Any]) -> list[Any]:
    """Return the first numbers of a step."""
    first: list[Any] = np.ravel(step)[:_SHOWN_NUMBERS].tolist()
    return [str(one) if isinstance(one, complex) else one for one in first]
