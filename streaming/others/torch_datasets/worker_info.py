"""Control the result of ``torch.utils.data.get_worker_info()`` in users' functions.

torch's loader gets a dataset of ours that wraps the user's. Before ``worker_init_fn`` is called,
``get_worker_info().dataset`` is set back to the user's dataset: the same object that is indexed or iterated in that
worker.

After a resume, the worker that delivers next is started first. Therefore torch's numbers are replaced, too: a worker
has the number of its part, so ``worker_init_fn`` sets up the part that this worker continues.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from streaming.errors import ConfigError
from streaming.others.torch_datasets.kinds import Again

_torch: Any = torch_worker  # torch has no public way to change the result of ``get_worker_info``
_PLAIN = (bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginWorker:
    """The ``worker_init_fn`` of torch's loader: shows the user's dataset, then calls the user's function.

    Args:
        dataset: The dataset that the loop reads; in the worker, the same object as in the wrapping dataset.
        numbers: The worker number of each process, in the order in which torch starts them.
        num_workers: Number of workers, over all ranks if ``numbers`` count over all ranks.
        then: The user's ``worker_init_fn``.
        is_shared_out: Whether the loop keeps only a share of the samples although no option requested it. If the user's
            function divided the dataset as well, samples would be lost.
    """

    dataset: Any
    numbers: tuple[int, ...]
    num_workers: int
    then: Callable[[int], None] | None = None
    is_shared_out: bool = False

    def __call__(self, process: int) -> None:
        """Begin in worker process number ``process``.

        Raises:
            ConfigError: The function may have divided a dataset that the loop divides.
        """
        number = self.numbers[process]
        seed = _torch._worker_info.seed - process + number
        if number != process:  # torch's seed for worker ``number``
            random.seed(seed)
            torch.manual_seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  the generator that users' functions may draw from
        _torch._worker_info = worker_info(number, self.num_workers, seed, self.dataset)
        if self.then is None:
            return
        before = _attributes(shown(self.dataset)) if self.is_shared_out else {}
        self.then(number)
        if self.is_shared_out and (changed := _changes(before, _attributes(shown(self.dataset)))):
            raise ConfigError(
                f"worker_init_fn sets {', '.join(changed)} of an iterable data set. If that deals samples to workers, "
                'pass OrdinaryDataset(dataset, sharding="worker_info"): each worker then keeps all that it reads, and '
                "get_worker_info() counts the workers of all ranks. If it opens files or the like, pass "
                'sharding="auto": each worker reads everything that worker_init_fn leaves, and keeps its share'
            )


@contextmanager
def seen(info: Any) -> Iterator[None]:
    """Make ``get_worker_info`` return ``info`` inside the block."""
    before = get_worker_info()
    _torch._worker_info = info
    try:
        yield
    finally:
        _torch._worker_info = before


def worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> Any:
    """Return torch's description of a worker."""
    return _torch.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=shown(dataset))


def shown(dataset: Any) -> Any:
    """Return the user's ``dataset`` argument: the function, if it makes a new iterator for each pass."""
    return dataset.make if isinstance(dataset, Again) else dataset


def _attributes(dataset: object) -> dict[tuple[int, str], tuple[object, int]]:
    """Return the attributes of a dataset and of those inside it, each with its length if it can change in place."""
    found: dict[tuple[int, str], tuple[object, int]] = {}
    left, known = [dataset], {id(dataset)}
    while left:
        one = left.pop()
        for name, value in getattr(one, "__dict__", {}).items():
            found[id(one), name] = (value, len(value) if isinstance(value, (list, dict, set, bytearray)) else 0)
            several = isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Dataset)
            inner = [each for each in (value if several else [value]) if isinstance(each, Dataset)]
            left += [each for each in inner if id(each) not in known]
            known |= {id(each) for each in inner}
    return found


def _changes(
    before: dict[tuple[int, str], tuple[object, int]], after: dict[tuple[int, str], tuple[object, int]]
) -> list[str]:
    """Return the names of attributes that were set, changed or deleted."""
    changed = before.keys() ^ after.keys()
    for key in before.keys() & after.keys():
        (old, old_length), (new, length) = before[key], after[key]
        same = old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)
        if not same or old_length != length:
            changed.add(key)
    return sorted({name for _, name in changed})
