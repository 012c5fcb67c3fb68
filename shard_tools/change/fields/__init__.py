"""Write, check and drop late fields of a set: tars beside its shards, with the same keys and the same chunks.

Not here: how a user's function is run to compute one (``change/functions``), and how they are read (``shards/late``).
"""
