"""The samples of a set as inputs of a function; opening a set imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streaming
from shard_tools.change.functions.produce import Given
from shard_tools.make.convert.base.identity import KnownInputs, Origins
from shard_tools.running.engine import Shared
from streaming.build.batches.bad_file import shown_url
from streaming.errors import NotFoundError


def opened(url: str, storage_options: Mapping[str, object] | None) -> SetInputs:
    """Open the set at ``url``, decoded as in training.

    Raises:
        NotFoundError: There is no such set.
    """
    options = None if storage_options is None else {**storage_options}
    try:
        return SetInputs(streaming.StreamingDataset(url, shuffle=False, storage_options=options))
    except NotFoundError as error:
        error.add_note("inputs: a text names a set of samples, or a file of lines (.txt, .jsonl); others: lines(path)")
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadSet:
    """Read samples of a set by ranges of their numbers, in a worker process."""

    dataset: Any

    def __call__(self, part: Sequence[tuple[int, int]]) -> Iterator[Given]:
        numbers = [number for one in part for number in range(*one)]
        try:
            samples = self.dataset[numbers]
        except Exception:  # noqa: BLE001  one of them is at fault: find which
            samples = (self._alone(number) for number in numbers)
        for sample in samples:
            if isinstance(sample, Exception):
                yield Given(error=sample)
            else:
                yield Given(value=sample, url=str(sample.get("__url__", "")), key=str(sample.get("__key__", "")))

    def _alone(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except Exception as error:  # noqa: BLE001  the policy for failing inputs decides
            return error


class SetInputs:
    """Samples of a set, read by the worker processes.

    Args:
        dataset: The set: anything with a length, samples by number, ``urls`` and a ``fingerprint`` of its content.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.read: Callable[[Any], Iterator[Given]] = _ReadSet(dataset=dataset)
        self.shared: Shared = ()

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def classes(self) -> Mapping[str, Sequence[str]]:
        """The set's class names by field, so that a number which the function keeps also keeps its meaning."""
        names: Mapping[str, Sequence[str]] = getattr(self.dataset, "class_names", {})
        return names

    def identity(self) -> dict[str, object]:
        """Return the set's fingerprint."""
        return {"kind": "set", "num_inputs": len(self), "fingerprint": self.dataset.fingerprint}

    def origins(self) -> Origins:
        """Return no files: the fingerprint covers the content of all shards, and every byte read is checked."""
        return Origins()

    def new_to(self, known: KnownInputs) -> SetInputs:  # noqa: ARG002  a set of files is known by name, a sample by none
        """Return all samples."""
        return self

    def part(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the range of sample numbers."""
        return ((start, stop),)

    def describe(self, number: int) -> str:
        """Return the sample's number and the first shard of the set."""
        return f"sample {number} of {', '.join(map(shown_url, self.dataset.urls[:1]))}"
