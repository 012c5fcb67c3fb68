"""Read shards without an index: samples in file order, shuffled in a window.

Nothing here seeks: a shard is read from its start, and a resume reads again what came before.
"""
