"""Report what is in a set, and what will surprise in training: the command ``stats``.

Facts come from the index where possible; bytes of shards are read only for the rest, and decoded no further than their
headers. Nothing here prints or draws: pages and plots are in ``shard_tools.look.show``.
"""
