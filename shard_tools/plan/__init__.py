"""Show who reads what: the verb ``plan``, the loads of ranks, the shares of mixtures, steps of a run, and pictures.

Everything is worked out by ``streaming.plan`` from the index; no byte of a shard is read, and no rule of the order
stands here.
"""
