"""Read the formats of other programs: each module is one ``Source``, and knows no other and nothing of shards."""
