"""Cache fetched byte ranges on a node's disk or tmpfs, shared by all of its processes.

Stores bytes and their checksums. Nothing here depends on shards, and its contents may be lost at any time.
"""

from streaming.shards.cache.node import NodeCache, open_cache

__all__ = ["NodeCache", "open_cache"]
