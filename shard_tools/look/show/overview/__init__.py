"""Answer the first question about a set: what is in it, what will surprise, and what does it cost to read.

The facts are those of ``shard_tools stats`` (``shard_tools.look.stats.survey``), for its page as a file and for the
first page of ``show``. Nothing here counts or reads values.
"""
