"""Keep fetched byte ranges on a node's disk or tmpfs, shared by all of its processes.

Knows bytes and their checksums; knows no shards, and may lose all that it holds at any time.
"""

from streaming.cache.node import NodeCache, open_cache

__all__ = ["NodeCache", "open_cache"]
