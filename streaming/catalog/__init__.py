"""Go from URLs to open shards: expand, list, read or build the index.

Everything that a data set asks its store before the first sample lives here; bytes of samples are fetched in
``fetch``, and the tables themselves, which do no I/O, live in ``index``.
"""
