"""Apply a user's function to inputs, or to the samples of a set, and pack the results: ``optimize`` and ``map``.

Processes are started by ``running``, and shards are written by ``convert``'s ``pack``, not here.
"""
