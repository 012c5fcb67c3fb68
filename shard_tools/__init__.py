"""Pack, index, check and inspect WebDataset shards: ``ShardWriter`` and ``optimize``, and commands.

This package holds the command line itself, the meaning of its options and the display of results. The work of each
command is done in a package below, by functions that print nothing. Training loops and their engine are not known here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

try:
    import streaming.errors as _errors  # noqa: F401  shardstream's
except ModuleNotFoundError as _error:
    if _error.name != "streaming.errors":
        raise
    _found = getattr(sys.modules.get("streaming"), "__file__", None) or "a package without a file"
    _ours = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "streaming", "__init__.py")
    raise ImportError(
        f"import streaming: {_found} shadows shardstream's own package of that name, {_ours}. If it is MosaicML's, "
        "give the two separate environments. If it is yours, rename it, or remove its folder from PYTHONPATH; if it "
        "lies beside your script, whose folder Python searches first, start the script from elsewhere as "
        "`python -m package.script`"
    ) from _error

from streaming.common.migration_hints.names import no_attribute as _no_attribute

if TYPE_CHECKING:
    from shard_tools.change.columns.chosen import select
    from shard_tools.change.functions.inputs import lines
    from shard_tools.change.functions.run import optimize
    from shard_tools.make.write.writer import ShardWriter

_HOMES = {
    "ShardWriter": "shard_tools.make.write.writer",
    "lines": "shard_tools.change.functions.inputs",
    "optimize": "shard_tools.change.functions.run",
    "select": "shard_tools.change.columns.chosen",
}

__all__ = ["ShardWriter", "lines", "optimize", "select"]


def __dir__() -> list[str]:
    """Return all names, also of what is imported on first use."""
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # or type checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        """Import a public name on first use: worker processes need none of them."""
        if name not in _HOMES:
            raise _no_attribute(__name__, name)
        return getattr(import_module(_HOMES[name]), name)
