"""Write late columns and saved views beside the index: values and filters that come after the shards.

No shard is written, and none is read but by ``--lift``.
"""
