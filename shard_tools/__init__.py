"""Packs, indexes, checks and shows WebDataset shards: the writer as a library, the verbs as a command."""

from shard_tools.write.writer import ShardWriter

__all__ = ["ShardWriter"]
