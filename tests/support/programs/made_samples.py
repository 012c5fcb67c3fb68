"""Functions that ``optimize`` and ``map`` run in the tests; a module that their processes can import fast."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def varied(number: int) -> Any:
    """A sample, several, none, of all kinds of values."""
    if number % 7 == 3:
        return None
    if number % 11 == 5:
        return [{"bin": bytes([number % 256]) * 100, "json": {"i": number}}, {"txt": "second", "json": {"i": number}}]
    if number % 13 == 2:
        return yielded(number)
    if number % 17 == 4:
        return []
    return {"bin": bytes([number % 256]) * (number * 37 % 5000), "json": {"i": number}}


def yielded(number: int) -> Iterator[dict[str, Any]]:
    """Five samples, in one array that changes."""
    array = np.zeros(number + 1, np.int32)
    for part in range(5):
        array[:] = part
        yield {"npy": array, "txt": str(part), "json": {"i": number}}


class Interrupted:
    """``varied``, but interrupted at an input as long as a file is there."""

    def __init__(self, at: int, flag: str) -> None:
        self._at, self._flag = at, flag

    def __call__(self, number: int) -> Any:
        if number == self._at and os.path.exists(self._flag):
            raise KeyboardInterrupt
        return varied(number)

    def __reduce__(self) -> Any:
        return Interrupted, (self._at, self._flag)


def fails_at_threes(number: int) -> dict[str, Any]:
    """A sample, but for numbers that end in 3."""
    if number % 10 == 3:
        raise LookupError(f"no {number}")
    return {"txt": f"text of {number}"}


def dies_once(given: tuple[int, str]) -> dict[str, Any]:
    """Ends its process at the first time that it sees a folder without a file of this number."""
    number, folder = given
    mark = Path(folder, str(number))
    if number % 20 == 7 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"txt": f"text of {number}"}


def dies_always(number: int) -> dict[str, Any]:
    """Ends its process at one input."""
    if number == 31:
        os._exit(3)
    return {"txt": f"text of {number}"}


def large(number: int) -> dict[str, Any]:
    """20 MB."""
    return {"bin": bytes([number]) * 20_000_000}


STANDS_AT = "SLOW_STANDS_AT"
"""The variable with the first number at which ``slow`` stands still, so that it is not done before it is killed."""


def slow(number: int) -> dict[str, Any]:
    """A sample that takes its time."""
    while number >= int(os.environ.get(STANDS_AT, number + 1)):
        time.sleep(0.1)
    time.sleep(0.01)
    return {"bin": bytes([number % 256]) * 5000}


def exits(number: int) -> dict[str, Any]:
    """Calls sys.exit."""
    sys.exit(number)


def changed(sample: dict[str, Any]) -> Any:
    """What ``map`` may return, by the number of the key."""
    number = int(sample["__key__"])
    kinds = number % 6
    if kinds == 0:
        return None
    if kinds == 1:
        return [{"txt": "first"}, {"txt": "second", "json": None}]
    if kinds == 2:
        sample["json"]["seen"] = True
        del sample["cls"]
        return sample
    if kinds == 3:
        return {"npy": np.arange(number), "__key__": f"new-{number}"}
    if kinds == 4:
        return ({"cls": part} for part in range(3))
    return sample


def unchanged(sample: dict[str, Any]) -> Any:
    """The sample."""
    return sample


def only_text(sample: dict[str, Any]) -> Any:
    """Check what it gets."""
    assert sorted(sample) == ["__key__", "__url__", "txt"], sorted(sample)
    return {"txt": sample["txt"].upper()}


def draws_on_image(sample: dict[str, Any]) -> Any:
    """Change an array in place."""
    sample["jpg"][0, 0] = 255 - sample["jpg"][0, 0]
    return sample


def opens_nothing(sample: dict[str, Any]) -> Any:
    """Fails with an exception that commands tell in words of their own where they raise it."""
    return {"txt": Path(f"/nowhere/{sample['__key__']}").read_text()}


def imports_nothing(sample: dict[str, Any]) -> Any:
    """Fails as a program does that lacks a package, and says why."""
    try:
        return sample["nothing"]
    except KeyError as error:
        raise ModuleNotFoundError("No module named 'nowhere'", name="torch") from error


def leaves(sample: dict[str, Any]) -> Any:
    """Calls sys.exit."""
    sys.exit(f"cannot do {sample['__key__']}")


def refuses_threes(sample: dict[str, Any]) -> Any:
    """Fails at keys that end in 3."""
    if sample["__key__"].endswith("3"):
        raise LookupError("a three")
    return {}


def plain(number: int) -> dict[str, Any]:
    """A number."""
    return {"txt": str(number)}


def early(sample: dict[str, Any]) -> dict[str, Any] | None:
    """The samples before number 50."""
    return {} if int(sample["__key__"]) < 50 else None
