"""Make the reference: a page for each public class and for each module of functions, from their docstrings."""

from __future__ import annotations

import inspect

import streaming
from docs.site.tables import Made, markdown, table

MODULES: dict[str, str] = {
    "shard_tools": "Write sets, and make them by functions of your own",
    "infra": "Where this process is: rank, world and mesh",
    "streaming.decode": "Decoders of fields",
    "streaming.errors": "All errors",
    "streaming.metrics": "Export what a loader counts",
    "streaming.integrations.lightning": "Lightning and Fabric",
    "streaming.integrations.transformers": "transformers",
    "streaming.integrations.accelerate": "Accelerate",
    "streaming.integrations.checkpoint": "torch.distributed.checkpoint",
    "streaming.integrations.gpu_decoders": "Decoders on the GPU",
    "streaming.storage": "Stores: options, and bytes by URL",
    "streaming.contracts": "What may be implemented: stores, sources, decoders, rows, orders, layouts",
    "streaming.testing": "Batteries of tests for them",
}
"""Modules whose public names are documented, with what they are for."""

_CLASS = """# `{name}`

```{{eval-rst}}
.. autoclass:: streaming.{name}
   :members:
   :inherited-members: {outer}
```
"""
_MODULE = """# `{name}`

```{{eval-rst}}
.. automodule:: {name}
   :members:
   :imported-members:
   :show-inheritance:{more}
```
"""
_DOORS = ("streaming.contracts",)
"""Modules whose names are described elsewhere, too."""
_OUTER = "Dataset, IterableDataset, Sampler, tuple, object"


def pages() -> Made:
    """Return the list of all public names, and a page for each."""
    classes = {name: _CLASS.format(name=name, outer=_OUTER) for name in streaming.__all__}
    modules = {name: _MODULE.format(name=name, more="\n   :no-index:" if name in _DOORS else "") for name in MODULES}
    rows = [(f"[`{name}`](/docs/api/{name}.md)", _first(getattr(streaming, name))) for name in classes]
    others = [(f"[`{name}`](/docs/api/{name}.md)", what) for name, what in MODULES.items()]
    text = f"## `streaming`\n\n{table(('name', ''), rows)}\n## Modules\n\n{table(('module', ''), others)}"
    return Made(text=text, below={f"api/{name}": page for name, page in {**classes, **modules}.items()})


def _first(target: object) -> str:
    return markdown((inspect.getdoc(target) or "").partition("\n\n")[0].replace("\n", " "))
