"""Fetch byte ranges of chunks, check them, and fetch damaged ones again.

The ranges that a batch needs are computed here, by pure functions; when they are fetched and where they are stored is
not decided here.
"""
