"""Late fields of a set: tars beside its shards, with the same keys and chunks. Added, followed, checked, dropped.

How a user's function is run to compute one belongs in ``shard_tools.change.functions``.
"""
