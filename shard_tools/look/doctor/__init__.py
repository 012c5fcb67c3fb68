"""Look at this machine, its packages and a store, and say what is wrong and what will limit: ``shard_tools doctor``.

What is measured here takes a moment; how fast a set is read is measured by ``shard_tools.look.bench``. Nothing is
written.
"""
