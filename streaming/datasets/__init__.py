"""What users name as data: shards, mixtures, files of records. Not here: how chunks are read (``catalog``)."""
