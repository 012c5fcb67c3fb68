"""Read the format on disk and in stores: catalogs, indexes, tar, chunks, the cache, the schema.

Nothing here depends on an order or a batch.
"""
