"""Show which rank reads what: the command ``plan``, loads of ranks, shares of mixtures, steps of a run, and plots.

``streaming.order.plan`` computes everything from the index. Nothing here reads a byte of a shard or implements a rule
of the order.
"""
