"""Lay out JSON as a foldable tree of bounded size; find boxes, and the names of their contents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_tools.running.report import Report

_MOST_NODES = 400
_DEEPEST = 24
_CHARACTERS = 2000
_MOST_BOXES = 200
_LABELS = ("label", "category", "class", "name", "category_name", "category_id", "cls")
_LISTS = ("annotations", "objects", "instances", "boxes", "bboxes", "bbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value in a tree of JSON.

    Attributes:
        name: Its name or number in its parent; "" for the root.
        kind: ``object``, ``list``, ``text``, ``number``, ``null`` or ``cut``.
        text: The value, or a description of its contents.
        inner: Its contents.
    """

    name: str
    kind: str
    text: str
    inner: tuple[Node, ...] = ()


def tree_of(content: object) -> Node:
    """Return JSON as a tree; only the beginning if it is too large or too deep."""
    left = [_MOST_NODES]
    return _node("", content, left, 0)


def _node(name: str, value: object, left: list[int], depth: int) -> Node:
    left[0] -= 1
    if isinstance(value, (Mapping, list)):
        is_object = isinstance(value, Mapping)
        pairs: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
        inner: list[Node] = []
        for key, one in pairs:
            if left[0] <= 0 or depth >= _DEEPEST:
                inner.append(Node(name="…", kind="cut", text=f"{len(value) - len(inner):,} more"))
                break
            inner.append(_node(str(key), one, left, depth + 1))
        words = f"{len(value):,} {'name' if is_object else 'item'}{'' if len(value) == 1 else 's'}"
        return Node(name=name, kind="object" if is_object else "list", text=words, inner=tuple(inner))
    if isinstance(value, str):
        shown = value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + "…"
        return Node(name=name, kind="text", text=shown)
    kind = "null" if value is None else "truth" if isinstance(value, bool) else "number"
    return Node(name=name, kind=kind, text=json.dumps(value) if not isinstance(value, int) else str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Box(Report):
    """A box in an image, in pixels of the upright image, and its label."""

    x: float
    y: float
    width: float
    height: float
    label: str


def boxes_in(content: object, width: int, height: int, classes: Sequence[str]) -> tuple[Box, ...]:
    """Return the boxes in JSON, for an image of this size.

    Known forms are COCO's ``annotations`` with ``bbox`` (x, y, width, height), lists ``boxes`` of corners (x0, y0, x1,
    y1) beside ``labels``, and objects with ``xmin``, ``ymin``, ``xmax``, ``ymax``. Numbers up to 1 are fractions of the
    image.
    """
    found: list[Box] = []
    for corners, label in _raw_boxes(content):
        scaled = corners
        if all(0 <= one <= 1 for one in corners) and any(0 < one < 1 for one in corners):
            scaled = (corners[0] * width, corners[1] * height, corners[2] * width, corners[3] * height)
        x0, y0, x1, y1 = scaled
        if not (0 <= x0 < x1 <= width * 1.02 and 0 <= y0 < y1 <= height * 1.02):
            continue
        text = (
            classes[label]
            if isinstance(label, int) and 0 <= label < len(classes)
            else ""
            if label is None
            else str(label)
        )
        found.append(Box(x=x0, y=y0, width=x1 - x0, height=y1 - y0, label=text[:60]))
        if len(found) == _MOST_BOXES:
            break
    return tuple(found)


def _raw_boxes(content: object) -> Iterator[tuple[tuple[float, float, float, float], Any]]:
    """Yield corners and label of each box, as written."""
    if isinstance(content, list):
        listed: Any = content
        labels: Any = None
    elif isinstance(content, Mapping):
        name = next((one for one in _LISTS if isinstance(content.get(one), list)), None)
        if name is None:
            return
        listed, labels = content[name], content.get("labels", content.get("classes"))
        if name == "bbox" and _four(listed):
            listed = [content]
    else:
        return
    for number, one in enumerate(listed[: 4 * _MOST_BOXES]):
        label = labels[number] if isinstance(labels, list) and number < len(labels) else None
        if isinstance(one, Mapping):
            label = next((one[key] for key in _LABELS if isinstance(one.get(key), (str, int))), label)
            corners = _corners(one)
        else:
            corners = _four(one)
        if corners is not None:
            yield corners, label


def _corners(one: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    inner = one["bndbox"] if isinstance(one.get("bndbox"), Mapping) else one
    named = _four([inner.get(name) for name in ("xmin", "ymin", "xmax", "ymax")])
    if named is not None:
        return named
    sized = _four(one.get("bbox"))
    if sized is not None:
        return sized[0], sized[1], sized[0] + sized[2], sized[1] + sized[3]
    return _four(one.get("box"))


def _four(value: object) -> tuple[float, float, float, float] | None:
    if not isinstance(value, list) or len(value) != 4:
        return None
    if not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value):
        return None
    try:
        a, b, c, d = map(float, value)
    except OverflowError:  # integers too large for a float
        return None
    return (a, b, c, d) if all(map(math.isfinite, (a, b, c, d))) else None
