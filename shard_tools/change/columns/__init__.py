"""Write late columns and saved views beside the index: values and filters added to existing shards.

No shard is written, and shards are read only to compute or lift a column.
"""
