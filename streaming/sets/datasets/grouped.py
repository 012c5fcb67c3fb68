"""Draw from groups of a dataset's samples: the common base of ``Curriculum`` and ``Balanced``."""

from __future__ import annotations

import builtins
from typing import Any, NoReturn, Self

from streaming.common.arguments import option_names
from streaming.errors import ConfigError
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.face import reading
from streaming.sets.datasets.mixture import MixedSet
from streaming.sets.datasets.packed import Packed
from streaming.sets.datasets.windows import Windows
from streaming.sets.sources.grouped import GroupedSource
from streaming.types import Transform

ELSEWHERE = {
    name: f"it belongs to the data set; write StreamingDataset(…, {name}=…)" for name in option_names(StreamingDataset)
} | {"epoch_size": "it belongs to the loader; write DataLoader(…, epoch_size=…)"}
"""Options that a grouped dataset does not have, and where they belong."""


class GroupedSet(MixedSet[GroupedSource]):
    """Draw without end from the groups of a dataset's samples.

    Samples keep their numbers in the dataset: ``curriculum[i]`` is ``dataset[i]``.
    """

    _dataset: StreamingDataset

    @property
    def dataset(self) -> StreamingDataset:
        """The data set whose samples are grouped: ``len(balanced.dataset)``."""
        return self._dataset

    def __len__(self) -> int:
        """Raise, because it has no end.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"this {type(self).__name__} has no len(): it is drawn from without end. Give the loader an epoch_size, or "
            f"count steps; for the number of samples take len() of the data set that it was made of"
        )

    def map(self, function: Transform) -> Self:
        """Return the same set that also calls ``function`` on each sample, after the functions of the data set.

        Example::

            balanced = Balanced(images, by="cls").map(resize)
        """
        made = reading(self, self._source.mapped(function))
        made._dataset = self._dataset.map(function)
        return made

    def _sliced(self, wanted: builtins.slice) -> NoReturn:  # noqa: ARG002  as other data sets have it
        raise ConfigError(
            f"a {type(self).__name__} cannot be sliced; slice the data set: {type(self).__name__}(dataset[a:b])"
        )


def check_dataset(dataset: Any, owner: str) -> None:
    """Check that ``dataset`` is a ``StreamingDataset``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(dataset, MixedSet):
        raise ConfigError(
            f"{owner}: expected a StreamingDataset, got a {type(dataset).__name__}; make a {owner} of each source, and "
            f'mix these: Mixture({{"web": {owner}(web, …)}}, weights=…)'
        )
    if isinstance(dataset, Packed):
        raise ConfigError(
            f"{owner}: expected a StreamingDataset of documents, got a {type(dataset).__name__}: a pack holds "
            f"documents with many values of a column, so neither can wrap the other. Give {owner} the unpacked "
            'documents; or pack parts of them, chosen by where=, and mix these: Mixture({"easy": '
            'Packed(StreamingDataset(…, where="tokens <= 512"), length=…), "hard": …}, weights=…), whose weights= '
            "also takes a Schedule"
        )
    if isinstance(dataset, Windows):
        raise ConfigError(
            f"{owner}: expected a StreamingDataset, got a Windows, whose units hold rows of one recording. Cut parts "
            'of the recordings, chosen by where=, and mix these: Mixture({"easy": Windows(StreamingDataset(…, '
            'where="level <= 2"), …), "hard": …}, weights=…), whose weights= also takes a Schedule'
        )
    if not isinstance(dataset, StreamingDataset):
        hint = "; write StreamingDataset(…)" if isinstance(dataset, str) else ""
        raise ConfigError(f"{owner}: expected a StreamingDataset, got {dataset!r}{hint}")
