"""Check shards against their index and against every byte: the verb ``verify``.

Nothing here writes or mends: what is wrong becomes a ``Finding`` with its cure.
"""
