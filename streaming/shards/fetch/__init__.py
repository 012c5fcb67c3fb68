"""Fetch byte ranges of chunks, check them, and fetch damaged ones again.

Pure functions here compute the ranges that a batch needs. Nothing here decides when they are fetched, or where they are
stored.
"""
