"""Say what is in a set, and what will surprise in training: the command ``stats``.

What the index knows is taken from it; bytes of shards are read only for the rest, and never decoded further than their
headers. Nothing here prints or draws: pages and plots are in ``shard_tools.look.show``.
"""
