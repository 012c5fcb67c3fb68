"""Serve map-style and iterable torch datasets, under our loader or under torch's own.

This room has their options, their sharding, their loops, and the samplers for torch's ``DataLoader``. It handles only
indices and finished samples, no bytes of shards: nothing here fetches or decodes.
"""
