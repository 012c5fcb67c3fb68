"""Show which rank reads what: the command ``plan``, the load of ranks, shares of mixtures, steps of a run, and plots.

Everything is computed by ``streaming.plan`` from the index; no byte of a shard is read, and no rule of the order is
implemented here.
"""
