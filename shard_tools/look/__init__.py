"""Show sets, jobs and machines: statistics, differences, plans, pages, measurements.

Nothing here writes a shard.
"""
