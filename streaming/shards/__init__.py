"""Read the format on disk and in stores: catalogs, indexes, tar, chunks, the cache, the schema.

Nothing here knows an order or a batch.
"""
