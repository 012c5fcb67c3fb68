"""Make the reference: a page for each public class and for each module of functions, from their docstrings."""

from __future__ import annotations

import inspect
from importlib import import_module

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
   :show-inheritance:
```
"""
_DOORS = {
    "streaming.contracts": "Examples, with their tests: [a store, a source, a decoder of your own](/docs/extending.md)."
}
"""Modules that only name what others define: a list of names, and words before it."""
_OUTER = "Dataset, IterableDataset, Sampler, tuple, object"


def pages() -> Made:
    """Return the list of all public names, and a page for each."""
    classes = {name: _CLASS.format(name=name, outer=_OUTER) for name in streaming.__all__}
    modules = {name: _door(name) if name in _DOORS else _MODULE.format(name=name) for name in MODULES}
    rows = [(f"[`{name}`](/docs/api/{name}.md)", _first(getattr(streaming, name))) for name in classes]
    others = [(f"[`{name}`](/docs/api/{name}.md)", what) for name, what in MODULES.items()]
    text = f"## `streaming`\n\n{table(('name', ''), rows)}\n## Modules\n\n{table(('module', ''), others)}"
    return Made(text=text, below={f"api/{name}": page for name, page in {**classes, **modules}.items()})


def _door(name: str) -> str:
    module = import_module(name)
    named = [(one, getattr(module, one)) for one in module.__all__]
    rows = [
        (f"`{one}`", _first(what) if inspect.isclass(what) or inspect.isfunction(what) else "") for one, what in named
    ]
    return f"# `{name}`\n\n{_DOORS[name]}\n\n{table(('name', ''), rows)}"


def _first(target: object) -> str:
    return markdown((inspect.getdoc(target) or "").partition("\n\n")[0].replace("\n", " "))
