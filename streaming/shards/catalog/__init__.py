"""Turn URLs into open shards: expand patterns, list directories, read or build the index.

All requests of a dataset before its first sample belong here. The bytes of samples are fetched in ``fetch``; the tables
themselves, which do no I/O, are in ``index``.
"""
