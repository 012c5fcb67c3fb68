"""Member names to sample keys and fields, exactly as webdataset splits them.

The rule, shared by webdataset, Megatron-Energon and Hugging Face datasets: directories are part of the key, and the
key ends at the first dot of the last path component. Fields are lower-cased as webdataset does. Names are bytes in
a tar; they are read as UTF-8, and bytes that are not UTF-8 become lone surrogates (``surrogateescape``), as in
Python's ``tarfile``, so that no name is lost and no two names become one.
"""

from __future__ import annotations

import re

_META_NAME = re.compile(r"__[^/]*__($|/)")


def decode_name(name: bytes) -> str:
    """``name`` as text; bytes that are not UTF-8 become surrogates, so :func:`encode_name` gives them back."""
    return name.decode("utf-8", "surrogateescape")


def encode_name(name: str) -> bytes:
    """The inverse of :func:`decode_name`."""
    return name.encode("utf-8", "surrogateescape")


def split_name(name: str) -> tuple[str, str] | None:
    """Key and field (lower-cased, without the dot) of a member name, or None if it belongs to no sample.

    No sample have names without a dot in the last component, and names that start with a component such as
    ``__meta__``. Dot-files take their directory as key (``a/b/.x`` is field ``x`` of ``a/b/``), as in webdataset.
    """
    if name.startswith("__") and _META_NAME.match(name):
        return None
    last = name.rfind("/") + 1
    dot = name.find(".", last)
    if dot < 0:
        return None
    if dot > last and "\n" not in name:
        return name[:dot], name[dot + 1 :].lower()
    # webdataset's regular expression, ^((?:.*/|)[^.]+)[.]([^/]*)$, without its steps back: they are quadratic.
    newline = name.find("\n")
    folder = name.rfind("/", 0, min(newline % (len(name) + 1), max(dot - 1, 0))) + 1
    if folder >= dot or "." in name[folder:dot]:
        return None
    return name[:dot], name[dot + 1 :].lower()


def is_meta(field: str) -> bool:
    """Whether a name is like those that readers give to what they note in a sample, such as ``__key__``."""
    return field.startswith("__") and field.endswith("__") and len(field) > len("____")
