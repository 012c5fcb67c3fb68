"""Write shards: the writer, what it records for the index, and how values become bytes."""
