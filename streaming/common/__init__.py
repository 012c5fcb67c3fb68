"""Provide utilities for every package: argument checks, arrays, counters, forks, threads, job ranks, platforms.

Nothing here depends on shards, datasets or batches.
"""
