"""Write shards: the writer, what it records for the index, and how values are encoded.

Knows no source and no command; any code that has samples can use it.
"""
