"""Write shards: the writer, its index recorder, and the encoding of values.

Knows no source and no command; any code that has samples can use it.
"""
