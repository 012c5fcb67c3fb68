"""Run over other libraries' data sets and processes: torch data sets, and readers on Ray.

Nothing here depends on the format of shards.
"""
