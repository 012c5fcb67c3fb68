"""A cache of fetched byte ranges on a node's disk or tmpfs, shared by all of its processes."""

from streaming.cache.node import NodeCache, open_cache

__all__ = ["NodeCache", "open_cache"]
