"""Versions of sets that live: what a chunk table says of them, how one is published, and which ones there are.

A set lives once something was appended, deleted or tagged. Not here: what is written to shards and sample tables.
"""
