"""Fetch byte ranges of chunks, check them, and fetch damaged ones again.

Pure functions here compute the ranges that a batch needs. Other code decides when they are fetched and where they are
stored.
"""
