"""Write shards: the writer, what it records for the index, and how values become bytes.

Knows no source and no verb; whoever has samples can use it.
"""
