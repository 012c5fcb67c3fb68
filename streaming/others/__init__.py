"""Run over data sets and processes of others: torch data sets, and readers on Ray.

Nothing here knows the format of shards.
"""
