"""Turn URLs into open shards: expand patterns, list directories, read or build the index.

Every request that a dataset makes before its first sample belongs here. The bytes of samples are fetched in ``fetch``;
the tables themselves, which do no I/O, are in ``index``.
"""
