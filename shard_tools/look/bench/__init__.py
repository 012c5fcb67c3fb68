"""Measure how fast this machine reads a set: requests, decoding, delivery; which one limits, and what would help.

Measuring (``requests``, ``decoding``, ``delivery``) is separate from judging (``judge``, pure). Writes nothing.
"""
