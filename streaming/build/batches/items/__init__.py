"""Make rows of several samples each: packs of documents, padded batches of documents, batches of whole samples.

Each is a ``RowKind`` (``streaming.build.batches.build``). ``packing`` and ``catalog`` choose the samples of a row.
"""
