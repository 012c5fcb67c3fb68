"""Provide the datasets that users name: shards, mixtures, tables. The ``catalog`` reads their chunks."""
