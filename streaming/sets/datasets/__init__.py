"""Provide the datasets that users name: shards, mixtures, tables. Not here: how chunks are read (``catalog``)."""
