"""Go from URLs to open shards: expand, list, read or build the index."""
