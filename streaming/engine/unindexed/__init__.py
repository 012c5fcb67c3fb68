"""Read shards without an index: samples in file order, shuffled in a window."""
