"""Provide the datasets that users name: shards, mixtures, tables. No chunks are read here (see ``catalog``)."""
