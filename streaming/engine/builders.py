"""Who builds a batch: a thread of this process, or a decode worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streaming.decode import ArrayDecoder, integer, raw, text
from streaming.engine.build import BadSampleReport, BatchBuilder, Recipe
from streaming.engine.rows import Rows
from streaming.engine.workers import WorkerPool

Substitutes = Callable[[int], Iterator[Rows]]
Mask = npt.NDArray[np.bool_] | None


class Builder(Protocol):
    """Builds batches. Thread-safe."""

    @property
    def is_local(self) -> bool:
        """Whether the calling thread does the work, so that the consumer may as well do it itself."""

    @property
    def holds_gil(self) -> bool:
        """Whether building is nothing but Python: then the consumer does it, and no thread in between."""

    def build(
        self, rows: Rows, valid: Mask, substitutes: Substitutes, report: BadSampleReport, *, seed: int | None = None
    ) -> Any:
        """The batch of ``rows``; ``seed`` is for the random generators that users' functions draw from."""


class LocalBuilder:
    """Builds batches in the calling thread."""

    is_local = True

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.holds_gil = False

    def build(
        self,
        rows: Rows,
        valid: Mask,
        substitutes: Substitutes,
        report: BadSampleReport,
        *,
        seed: int | None = None,  # noqa: ARG002  this process's generators are the user's
    ) -> Any:
        """See ``Builder``."""
        if not self.holds_gil:
            self.holds_gil = is_trivial(self._recipe, rows)
        return BatchBuilder(self._recipe, substitutes, report).build(rows, valid)


class WorkerBuilder:
    """Has batches built by worker processes, unless sending them there costs more than building them.

    Bytes, text, integers and fixed-size arrays are cut out of the arena faster than any process can hand them over:
    batches that hold nothing else are built where they are needed. The first batch decides.
    """

    def __init__(self, recipe: Recipe, pool: WorkerPool) -> None:
        self._recipe = recipe
        self._pool = pool
        self._local = LocalBuilder(recipe)
        self.is_local = False

    @property
    def holds_gil(self) -> bool:
        """See ``Builder``."""
        return self.is_local

    def build(
        self, rows: Rows, valid: Mask, substitutes: Substitutes, report: BadSampleReport, *, seed: int | None = None
    ) -> Any:
        """See ``Builder``."""
        if self.is_local or is_trivial(self._recipe, rows):
            self.is_local = True
            return self._local.build(rows, valid, substitutes, report)
        return self._pool.build(rows, valid, substitutes, report, seed=seed)


def is_trivial(recipe: Recipe, rows: Rows) -> bool:
    """Whether a batch of ``rows`` is only cut out of memory."""
    if recipe.transform is not None or recipe.collate_fn is not None:
        return False
    decoders = [recipe.decoders.decoder_for(name) for name in rows.fields]
    return all(decoder in (raw, text, integer) or isinstance(decoder, ArrayDecoder) for decoder in decoders)
