"""Versions of sets that live: what a chunk table says of them, how one is published, and which ones there are.

A set lives once something was appended, deleted or tagged. What is written to shards and sample tables belongs elsewhere.
"""
