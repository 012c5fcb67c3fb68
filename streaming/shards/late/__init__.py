"""Find fields that were added after shards were written, and the ranges of their tars that go with each chunk.

Not here: fetching these ranges, and putting samples together (``streaming/shards/fetch``).
"""
