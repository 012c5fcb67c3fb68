"""Run a user's function over inputs, or over the samples of a set, and pack what it returns: ``optimize`` and ``map``.

Starts no process and writes no shard itself: that is the concern of ``running``, and of ``convert``'s ``pack``.
"""
