"""Late columns and saved views: values and filters that come after the shards, written beside the index.

No shard is written, and none is read but by ``--lift``.
"""
