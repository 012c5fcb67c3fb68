"""Read shards without an index: samples in file order, shuffled within a window.

Nothing here seeks. A shard is read from its beginning, and resuming rereads everything before the position.
"""
