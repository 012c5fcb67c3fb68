"""Make rows of several samples each: packs and padded batches of documents, batches and lists of whole samples.

Each is a ``RowKind`` (``streaming.build.batches.build``). Nothing here chooses the samples of a row: ``packing`` and
``catalog`` do.
"""
