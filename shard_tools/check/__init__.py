"""Check shards against their index and against every byte: the verb ``verify`` and what others check with."""
