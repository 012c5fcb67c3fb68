"""Serve datasets that others made: map-style and iterable torch datasets, under our loader or under torch's own.

Their options, how they are dealt out, their loops, and the samplers for torch's ``DataLoader`` belong here. Only
indices and finished samples are handled, no bytes of shards: nothing here fetches or decodes.
"""
