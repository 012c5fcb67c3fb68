"""Show who reads what: the verb ``plan``, the loads of ranks, and their pictures.

Everything is worked out by ``streaming.plan`` from the index; no byte of a shard is read, and no rule of the order
stands here.
"""
