"""Name the data as users do: shards, mixtures, files of records. Not here: how chunks are read (``catalog``)."""
