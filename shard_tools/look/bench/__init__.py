"""Measure how fast this machine reads a set: requests, decoding, delivery; which of them limits, and what would help.

Measuring (``requests``, ``decoding``, ``delivery``) and judging (``judge``, pure) are apart. Nothing is written.
"""
