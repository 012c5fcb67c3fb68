"""Look at this machine, its packages and a store; report what is wrong and what will limit: ``shard_tools doctor``.

Its measurements take a moment; ``shard_tools.look.bench`` measures how fast a set is read. Nothing is written.
"""
