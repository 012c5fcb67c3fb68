"""Check shards against their index and against every byte: the command ``verify``.

Nothing here writes or repairs: every problem becomes a ``Finding`` that names the cure.
"""
