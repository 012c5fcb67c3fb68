"""Build batches of rows: decode fields, collate samples.

Nothing here fetches a shard or chooses a row.
"""
