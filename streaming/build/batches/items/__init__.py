"""Make rows of several samples each: packs of documents, padded batches of documents, batches of whole samples.

Each is a ``RowKind`` (``streaming.build.batches.build``). Not here: which samples share a row (``packing``,
``catalog``).
"""
