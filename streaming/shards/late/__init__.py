"""Late fields: fields that were added after the shards were written, in tars of their own beside the index.

Where the bytes of a chunk are of such a field belongs here; fetching them and putting samples together belongs in
``streaming.shards.fetch``.
"""
